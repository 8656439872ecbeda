"""Fine-tuning over folds and seeds: each run goes on where a command before it was stopped."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import choose_device, set_threads
from dilated_attention_pytorch.memory import free_memory, in_bytes, is_out_of_memory, return_freed_blocks
from dilated_attention_pytorch.output import make_output, write_text
from dilated_attention_pytorch.slides.encoder import SlideEncoder
from dilated_attention_pytorch.slides.files import Source, find_slides
from dilated_attention_pytorch.slides.folder import check_same, settings_of
from dilated_attention_pytorch.slides.memory import measure_limits, measure_training_bytes
from dilated_attention_pytorch.slides.worker import load_encoder

from .cases import CaseFiles, are_embeddings, pooling_of, without, without_missing
from .labels import read_labels
from .maps import write_maps
from .metrics import BEST
from .model import SlideModel, add_adapters, merge_adapters
from .results import MAPS_NAME, RUN_NAME, WEIGHTS_NAME, summarise, write_run, write_weights
from .settings import FinetuneSettings
from .splits import CaseSplit, make_splits
from .trainer import FinetuneTrainer, Inputs, best_epoch, remove_checkpoints
from .vectors import computed_vectors, stored_vectors

SETTINGS_NAME, VECTORS_NAME, ADAPTER_NAME = "finetune.json", "vectors.safetensors", "adapter"
_LOCK_NAME = f"{SETTINGS_NAME}.lock"


@dataclass(frozen=True, slots=True)
class FinetuneProgress:
    """How far the current part of the work is."""

    what: str
    """What is done, such as an epoch of a run."""
    tiles: int
    total_tiles: int


@dataclass(frozen=True, slots=True)
class FinetuneOutcome:
    """Result of a command."""

    runs: int
    """Runs that this command trained."""
    finished: int
    """Runs of the folder that are finished."""
    total: int
    """Runs of the folder."""
    metrics: dict[str, Any] | None
    """The contents of metrics.json; None while runs are missing."""


class Finetuner:
    """Labelled slides, an encoder and an output folder for its fine-tuning.

    All inputs but the tiles are checked on construction; nothing is written before :meth:`run`.

    Args:
        slides: files of tile features or folders of them, or with ``freeze`` those that `embed` wrote.
        labels: CSV or TSV file; see :func:`.labels.read_labels`.
        checkpoint: weights of the encoder; None for files that `embed` wrote.
        output: a new folder, or that of an earlier run with the same settings.
        settings: all other options.

    Raises:
        RunError: an input is missing or invalid, or the folder is another run's. The message says what to do.
    """

    def __init__(
        self, slides: Sequence[Path], labels: Path, checkpoint: Path | None, output: Path, settings: FinetuneSettings
    ) -> None:
        self.settings, self.output = settings, output
        # Where Ray computes, the inputs are checked on this machine's CPU.
        self.device = torch.device("cpu" if settings.engine == "ray" else choose_device(settings.device))
        set_threads(settings.threads)
        with _as_run_error():
            read = read_labels(
                labels,
                task=settings.task,
                label_columns=settings.label_column,
                patient_column=settings.patient_column,
                slide_column=settings.slide_column,
                time_column=settings.time_column,
                event_column=settings.event_column,
                split_column=settings.split_column,
                by_patient=settings.by_patient,
            )
        paths = {name: path for name, path in find_slides(slides).items() if path.exists()}  # not a dangling link
        self.labels, self.left_out = without_missing(read, paths, may_skip=settings.skip_missing)
        self._files = slides, labels
        self.paths = {name: paths[name] for case in self.labels.cases for name in case.slides}
        self.has_embeddings = are_embeddings(self.paths)
        self.checkpoint = checkpoint
        self.encoder = self._load_encoder()
        self.made_with = {
            **settings.of_result(),
            "labels": _digest(labels.read_bytes()),
            "checkpoint": None if checkpoint is None else _digest(checkpoint.read_bytes()),
            "slides": _digest(
                json.dumps([(n, Source.of(n, [p]).source_bytes) for n, p in self.paths.items()]).encode()
            ),
        }
        self._before = self._check_folder()
        self._leave_out((self._before or {}).get("left_out", []))

    def _load_encoder(self) -> SlideEncoder | None:
        settings = self.settings
        if self.has_embeddings:
            if not settings.freeze or settings.maps:
                flag, remedy = (
                    ("--maps", "leave it out") if settings.freeze else ("training the encoder", "pass --freeze")
                )
                raise RunError(
                    f"{flag} needs the tiles of the slides, and the files given are embeddings: {remedy}, or pass the "
                    "folder of tile features"
                )
            if (pooled := pooling_of(self.paths)) not in (None, settings.pooling):
                raise RunError(
                    f"the embeddings are of --pooling {pooled}, got {settings.pooling}: pass --pooling {pooled}"
                )
            if self.checkpoint is not None:
                raise RunError("--checkpoint is for tile features, and the files given are embeddings: leave it out")
            return None
        if self.checkpoint is None:
            raise RunError(
                "--checkpoint must name the weights of the slide encoder, slide_encoder.pth of prov-gigapath"
            )
        if self.checkpoint.is_dir():
            raise RunError(
                f"--checkpoint {self.checkpoint} is a folder, TITAN's, and fine-tuning trains GigaPath's encoder: pass "
                "slide_encoder.pth, or embed the slides with TITAN and train on the embeddings (--freeze --layers 6)"
            )
        rates = {"dropout": settings.dropout, "drop_path": settings.drop_path}
        encoder = load_encoder(self.checkpoint, settings, pooling=settings.pooling, **rates)
        last = encoder.config.num_layers
        if max(settings.layers) > last:
            raise RunError(
                f"--layers must be 0 to {last}, the layers of {self.checkpoint}, got {max(settings.layers)}; pass for "
                f"example --layers {last}, the last"
            )
        if settings.lora is not None and settings.lora > encoder.config.embed_dim:
            raise RunError(f"--lora must be at most {encoder.config.embed_dim}, the width, got {settings.lora}")
        return encoder.to(self.device)

    def _check_folder(self) -> dict[str, Any] | None:
        """What the folder says of an earlier command.

        Raises:
            RunError: it is not free, or belongs to other settings.
        """
        before = settings_of(self.output, SETTINGS_NAME, command="finetune")
        if before is not None:
            made_with = before.get("made_with")
            if not isinstance(made_with, dict):
                raise RunError(f"{self.output / SETTINGS_NAME} is damaged; pass another --output, or remove the folder")
            check_same(self.output, made_with, self.made_with, what="runs of other settings or files")
        return before

    def _leave_out(self, names: list[str]) -> None:
        self.labels = without(self.labels, names)
        self.left_out = sorted({*self.left_out, *names})
        settings = self.settings
        with _as_run_error():
            self.splits = make_splits(
                self.labels,
                folds=settings.folds,
                validation=settings.validation,
                test=settings.test,
                seed=settings.split_seed,
            )

    def run(
        self,
        *,
        say: Callable[[str], None] = lambda sentence: None,
        progress: Callable[[FinetuneProgress], None] = lambda state: None,
    ) -> FinetuneOutcome:
        """Train every run that is not finished.

        Commands that run at the same time over one folder share its runs.

        Args:
            say: called with messages.
            progress: called whenever the tiles of a case are computed.

        Raises:
            RunError: a slide cannot be read, the memory does not suffice, or the loss is not finite.
        """
        make_output(self.output)
        files = None
        if self.encoder is not None:
            files = CaseFiles(self.paths, self.encoder.config, self.settings)
        if files is not None and self._before is None and not self.settings.freeze:
            self._leave_out_unreadable(self._check_files(files, progress), say)
        left = sum(not (folder / RUN_NAME).is_file() for _, _, folder in self._runs())
        if files is not None and left and self.settings.engine == "local":
            self._check_memory(files, say)
        vectors = self._vectors(files, say, progress) if self.settings.freeze else None
        self._begin()
        inputs = Inputs(
            labels=self.labels,
            files=files,
            vectors=vectors,
            device=self.device,
            precision=self.settings.precision,
        )
        if left and self.settings.engine == "ray":
            from .ray_runs import train_on_ray

            slides, labels = self._files
            train_on_ray(slides, labels, self.checkpoint, self.output, self.settings, left, say)
        trained, runs = 0, self._runs()
        for fold, seed, folder in runs:
            split = self.splits[fold - 1]
            with _held(folder) as is_held:
                if is_held and not (folder / RUN_NAME).is_file():
                    say(
                        f"fold {fold}, seed {seed}: {len(split.train):,} cases to train on, {len(split.validation):,} "
                        f"to choose the epoch by, {len(split.test):,} to test"
                    )
                    self._train(inputs, fold, split, seed, folder, say, progress)
                    trained += 1
                if is_held:
                    remove_checkpoints(folder)
                    if self.settings.maps:
                        self._write_maps(dataclasses.replace(inputs, vectors=None), split, folder, progress)
        finished = [folder for _, _, folder in runs if (folder / RUN_NAME).is_file()]
        found = self._summarise(finished) if len(finished) == len(runs) else None
        return FinetuneOutcome(trained, len(finished), len(runs), found)

    def _runs(self) -> list[tuple[int, int, Path]]:
        """Fold (from 1), seed and folder of every run."""
        folds = range(1, len(self.splits) + 1)
        return [(k, seed, self.output / f"fold{k}-seed{seed}") for k, seed in product(folds, self.settings.seeds)]

    def _begin(self) -> None:
        """Write the settings and the cases left out, unless the folder has them; another command may have begun it."""
        record = {"made_with": self.made_with, "left_out": self.left_out, "classes": self.labels.classes}
        with FileLock(self.output / _LOCK_NAME):
            before = self._check_folder()
            if before is None or before.get("left_out") != self.left_out:
                write_text(self.output / SETTINGS_NAME, json.dumps(record, indent=1) + "\n")

    def _check_files(self, files: CaseFiles, progress: Callable[[FinetuneProgress], None]) -> dict[str, str]:
        """Read every slide once, before hours of training; returns why cases cannot be read."""
        problems, done, total = {}, 0, sum(map(files.num_tiles, self.labels.cases))
        for case in self.labels.cases:
            try:
                done += files.read(case).num_tiles
                progress(FinetuneProgress("reading", done, total))
            except RunError as error:
                problems[case.name] = str(error)
        return problems

    def _leave_out_unreadable(self, problems: dict[str, str], say: Callable[[str], None]) -> None:
        """Leave out the cases that cannot be read.

        Raises:
            RunError: there are some, and they are not to be skipped.
        """
        if problems and not self.settings.skip_missing:
            raise RunError(
                f"{len(problems):,} of {len(self.labels.cases):,} cases cannot be read, the first: "
                f"{next(iter(problems.values()))}. Mend them, or pass --skip-missing to leave those cases out"
            )
        for problem in problems.values():
            say(f"left out: {problem}")
        self._leave_out(list(problems))

    def _vectors(
        self, files: CaseFiles | None, say: Callable[[str], None], progress: Callable[[FinetuneProgress], None]
    ) -> Tensor:
        """What the classifier reads of all cases ``[cases, width]``, on the device; unreadable ones are left out."""
        cases, settings = self.labels.cases, self.settings
        if files is None:
            vectors, problems = stored_vectors(self.paths, cases, settings.layers)
        else:
            total = sum(map(files.num_tiles, cases))
            vectors, problems = computed_vectors(
                self._new_model(0),
                files,
                cases,
                self.output / VECTORS_NAME,
                device=self.device,
                precision=settings.precision,
                may_skip=settings.skip_missing,
                begin=self._begin,
                report=lambda done: progress(FinetuneProgress("embedding", done, total)),
            )
        self._leave_out_unreadable(problems, say)
        return torch.stack([vectors[case.name] for case in self.labels.cases]).to(self.device)

    def _new_model(self, seed: int) -> SlideModel:
        """The encoder as it was loaded, and a classifier drawn by ``seed``."""
        settings = self.settings
        assert self.encoder is not None
        torch.manual_seed(seed)
        model = SlideModel(
            copy.deepcopy(self.encoder), self.encoder.config.embed_dim, settings.layers, self.labels.num_outputs
        )
        return model.to(self.device)

    def _train(
        self,
        inputs: Inputs,
        fold: int,
        split: CaseSplit,
        seed: int,
        folder: Path,
        say: Callable[[str], None],
        progress: Callable[[FinetuneProgress], None],
    ) -> None:
        """Train one run to its end, and write its results; run.json comes last."""
        settings, labels = self.settings, self.labels
        if inputs.vectors is None:
            model = self._new_model(seed)
            assert model.slide_encoder is not None
            model.slide_encoder.gradient_checkpointing_enable()
            if settings.lora is not None:
                add_adapters(model, settings.lora)
        else:
            torch.manual_seed(seed)
            width = inputs.vectors.shape[1] // len(settings.layers)
            model = SlideModel(None, width, settings.layers, labels.num_outputs).to(self.device)
        sizes = [0] * len(labels.cases) if inputs.files is None else [inputs.files.num_tiles(c) for c in labels.cases]
        counted = _Counted(f"fold {fold}, seed {seed}", sum(sizes[case] for case in split.train), progress)
        trainer = FinetuneTrainer(
            model=model,
            inputs=inputs,
            split=split,
            settings=settings,
            seed=seed,
            folder=folder,
            report=counted.add,
        )
        try:
            epochs = trainer.run()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"memory ran out in {folder}: end other programs, or use a device with more, and run the same command "
                "again; --precision bfloat16 takes less, with another --output"
            ) from error
        parts = {
            part: (cases, trainer.predict_scores(cases))
            for part, cases in (("validation", split.validation), ("test", split.test))
            if cases
        }
        if settings.lora is not None:
            merge_adapters(model, folder / ADAPTER_NAME)
        write_weights(model, folder, trainer.standard)
        best = best_epoch(epochs, BEST[labels.task])
        about = {"fold": fold, "seed": seed, "best_epoch": best, "epochs": epochs}
        write_run(folder, labels, about=about, parts=parts)
        say(f"fold {fold}, seed {seed}: the best epoch is {best} of {len(epochs)}; written: {folder}")

    def _write_maps(
        self, inputs: Inputs, split: CaseSplit, folder: Path, progress: Callable[[FinetuneProgress], None]
    ) -> None:
        """Maps of the test cases of a finished run."""
        assert inputs.files is not None
        model = self._new_model(0)
        # A frozen encoder is that of the checkpoint; the run has the classifier alone.
        model.load_state_dict(load_file(folder / WEIGHTS_NAME), strict=not self.settings.freeze)
        assert model.slide_encoder is not None
        model.slide_encoder.gradient_checkpointing_enable()
        total = sum(inputs.files.num_tiles(self.labels.cases[case]) for case in split.test)
        counted = _Counted(f"maps of {folder.name}", total, progress)
        write_maps(model, inputs, split.test, folder / MAPS_NAME, counted.add)

    def _check_memory(self, files: CaseFiles, say: Callable[[str], None]) -> None:
        """Raise :class:`RunError` if the largest case does not fit into memory."""
        assert self.encoder is not None
        settings, fixed = self.settings, 0
        if settings.freeze:
            limits = measure_limits(self.encoder, self.device, settings.precision, 1, None)
            tile_bytes = None if limits is None else limits.tile_bytes
        else:
            return_freed_blocks()
            step = measure_training_bytes(self.encoder, self.device, settings.precision)
            tile_bytes = None if step is None else step.tile_bytes
            if step is not None:
                # Every run has its own weights; adapters are small.
                fixed = sum(weight.nbytes for weight in self.encoder.parameters())
                fixed += step.fixed_bytes if settings.lora is None else 0
        if tile_bytes is None:
            say("memory cannot be measured on this system")
            return
        most = max(0, free_memory(self.device) - fixed) // tile_bytes
        tiles, name = max((files.num_tiles(case), case.name) for case in self.labels.cases)
        say(
            f"a tile takes {tile_bytes / 1e3:,.0f} kB on this device (measured): cases of up to {most:,} tiles fit, "
            f"and the largest one, {name}, has {tiles:,}"
        )
        if tiles > most:
            raise RunError(
                f"case {name} has {tiles:,} tiles, which take about {in_bytes(fixed + tiles * tile_bytes)}, and "
                f"{in_bytes(free_memory(self.device))} are free; use a device with more, --precision bfloat16 or "
                "--freeze, or leave the case out of the labels"
            )

    def _summarise(self, folders: Sequence[Path]) -> dict[str, Any]:
        settings = self.settings
        shown = {
            **settings.of_result(),
            "task": self.labels.task,
            "epochs": settings.num_epochs,
            "learning_rate": settings.rate,
            "checkpoint": "" if self.checkpoint is None else str(self.checkpoint),
            "cases left out": len(self.left_out),
        }
        return summarise(self.output, folders, self.labels, shown)


class _Counted:
    """Tiles that an epoch of a run has computed."""

    def __init__(self, run: str, total: int, report: Callable[[FinetuneProgress], None]) -> None:
        self._run, self._total, self._report = run, total, report
        self._epoch = self._tiles = 0

    def add(self, tiles: int, epoch: int = 0) -> None:
        if epoch != self._epoch:
            self._epoch, self._tiles = epoch, 0
        self._tiles += tiles
        of_epoch = f", epoch {epoch}" if epoch else ""
        self._report(FinetuneProgress(f"{self._run}{of_epoch}", self._tiles, self._total))


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold the folder of a run; False where another command holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


@contextmanager
def _as_run_error() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RunError(str(error)) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
