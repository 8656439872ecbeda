"""A training run from its first check to its report, and taking one up again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import machine
from dilated_attention_pytorch.output import check_writable, make_output, write_text

from . import preflight
from .checkpoint import (
    SETTINGS_NAME,
    WEIGHTS_NAME,
    check_checkpoint,
    checkpoint_step,
    latest_checkpoint,
    read_json,
    save_finished,
)
from .corpus import CORPUS_KEYS, Corpus, corpus_figures, read_corpus
from .settings import SampleSettings, TrainSettings
from .windows import EvaluationWindows, TrainingWindows, long_files

if TYPE_CHECKING:
    from rich.console import Console

    from dilated_attention_pytorch.models import LongNetForCausalLM

    from .trainer import LongNetTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended."""

    run: Path
    """The run folder."""
    step: int
    """Optimizer steps done."""
    stopped_by: int | None = None
    """The signal that stopped it; None if it came to its end, and then the rest is there."""
    bits_per_byte: float | None = None
    """Held-out bits per byte."""
    xz_bits_per_byte: float | None = None
    """What xz -9e reaches on the same bytes."""
    quarters: list[float] | None = None
    """Held-out bits per byte by quarter of the context; None without held-out files as long as the context."""
    last_quarter_alone: float | None = None
    """The last of them where the model sees nothing before that quarter."""
    sample: str | None = None
    """A sampled text."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose checks have passed."""

    folder: Path
    settings: TrainSettings
    device: str
    corpus: Corpus
    model: LongNetForCausalLM
    checkpoint: Path | None
    console: Console


def train(settings: TrainSettings, output: Path, console: Console) -> Outcome:
    """Train a new model into the folder ``output``, which must be free.

    Raises:
        RunError: the data, the folder, the disk or the device does not allow it; before anything is written.
    """
    preflight.check_packages("training")
    preflight.check_processes(settings, num_processes())
    if is_first_process():
        preflight.check_output(output)
    device = preflight.choose_device(settings.device)
    corpus = read_corpus(settings.data)
    preflight.check_corpus(corpus, settings)
    precision = preflight.choose_precision(settings.precision, device)
    settings = dataclasses.replace(settings, threads=preflight.set_threads(settings.threads), precision=precision)
    model = _build(settings)
    preflight.check_space(output, sum(parameter.numel() for parameter in model.parameters()))
    make_output(output)
    if is_first_process():
        record = {
            "settings": {**settings.to_dict(), "device": device},
            "corpus": corpus_figures(corpus),
            "processes": num_processes(),
            "machine": machine(),
        }
        write_text(output / SETTINGS_NAME, json.dumps(record, indent=2) + "\n")
        model.config.save_pretrained(output)
    return _go(_Run(output, settings, device, corpus, model, None, console))


def resume(run: Path, console: Console) -> Outcome:
    """Go on with a run that was stopped, from its last checkpoint, as if it had never stopped.

    Raises:
        RunError: there is nothing to go on with, or the checkpoint or the data is not what it was.
    """
    preflight.check_packages("training")
    checkpoint, settings, figures = _read_run(run)
    device = preflight.choose_device(settings.device)
    corpus = read_corpus(settings.data)
    if corpus_figures(corpus) != figures:
        raise RunError(
            f"--resume {run}: the text is not what the run began with (now {corpus_figures(corpus)}, then {figures}); "
            "restore the files, or train anew into another --output"
        )
    preflight.set_threads(settings.threads)
    model = _build(settings)
    check_writable(run, f"--resume {run}")
    preflight.check_space(run, sum(parameter.numel() for parameter in model.parameters()))
    return _go(_Run(run, settings, device, corpus, model, checkpoint, console))


def _read_run(run: Path) -> tuple[Path, TrainSettings, dict[str, int]]:
    what = f"--resume {run}"
    if not run.is_dir():
        raise RunError(f"{what}: there is no such folder; name the --output of the run that was stopped")
    remedy = "name the --output of a `train` command"
    values = read_json(run / SETTINGS_NAME, what=what, remedy=remedy)
    try:
        settings = TrainSettings.from_dict(values["settings"])
        figures = {name: int(values["corpus"][name]) for name in CORPUS_KEYS}
        processes = int(values["processes"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{what}: {run / SETTINGS_NAME} describes no run ({error}); {remedy}") from error
    if (run / WEIGHTS_NAME).exists():
        raise RunError(
            f"{what}: that run is finished; sample from it with `dilated-attention generate {shlex.quote(str(run))}`, "
            "or train anew into another --output"
        )
    if processes != num_processes():
        raise RunError(
            f"{what}: the run began with {processes} processes, each with its part of the text, and this is one of "
            f"{num_processes()}; start it with torchrun --nproc-per-node {processes}"
        )
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        raise RunError(f"{what}: the run was stopped before its first checkpoint; train anew into another --output")
    check_checkpoint(checkpoint)
    _check_same_model(checkpoint, settings)
    return checkpoint, settings, figures


def _check_same_model(checkpoint: Path, settings: TrainSettings) -> None:
    from dilated_attention_pytorch.models import LongNetCausalLMConfig

    found = LongNetCausalLMConfig.from_pretrained(checkpoint).to_longnet_config()
    expected = dataclasses.replace(settings.model, gradient_checkpointing=found.gradient_checkpointing)
    if found != expected:
        names = [
            entry.name
            for entry in dataclasses.fields(found)
            if getattr(found, entry.name) != getattr(expected, entry.name)
        ]
        raise RunError(
            f"foreign checkpoint: {checkpoint} is of another model than {checkpoint.parent / SETTINGS_NAME} describes "
            f"({', '.join(names)} differ); bring the two of one run together again"
        )


def _build(settings: TrainSettings) -> LongNetForCausalLM:
    from transformers import set_seed
    from transformers.utils import logging

    from dilated_attention_pytorch.models import LongNetForCausalLM

    logging.disable_progress_bar()
    set_seed(settings.seed)
    return LongNetForCausalLM.from_longnet_config(settings.model)


def is_first_process() -> bool:
    """Whether this process is the one that writes and prints, of those that torchrun started."""
    return int(os.environ.get("RANK", "0")) == 0


def num_processes() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _go(run: _Run) -> Outcome:
    from torch.utils.data import Subset
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    from .callbacks import Bar, Interruption, Metrics
    from .distribution import Distribution
    from .evaluation import draw_losses, xz_bits_per_byte
    from .run_trainer import arguments
    from .trainer import LongNetTrainer

    settings, folder = run.settings, run.folder
    args = arguments(
        settings, folder, run.device, per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size, torch_compile=settings.compile,
        ddp_find_unused_parameters=False, ddp_timeout=settings.timeout,
    )  # fmt: skip
    distribution = Distribution(settings, args.device.type)
    windows_per_step = args.train_batch_size * args.gradient_accumulation_steps * distribution.data_size
    evaluation = EvaluationWindows(run.corpus.held_out, settings.context_length, settings.final_eval_windows)
    trainer = LongNetTrainer(
        model=run.model,
        args=args,
        settings=settings,
        distribution=distribution,
        training=TrainingWindows(
            run.corpus.training, settings.context_length, settings.steps * windows_per_step, seed=settings.seed,
            file_start_fraction=settings.file_start_fraction,
        ),
        evaluation=Subset(evaluation, evaluation.spread(settings.eval_windows)),
    )  # fmt: skip
    xz = xz_bits_per_byte(evaluation.predicted())
    step = 0 if run.checkpoint is None else checkpoint_step(run.checkpoint)
    bytes_per_step = windows_per_step * settings.context_length
    if trainer.is_world_process_zero():
        _announce(run, trainer, evaluation, bytes_per_step, xz)
        trainer.add_callback(Metrics(folder, step, bytes_per_step.__mul__))
        trainer.add_callback(Bar(run.console, bytes_per_step.__mul__))
        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(folder / "tensorboard"), purge_step=step or None)))
    if distribution.rows_rank:
        # Dropout differs between rows; processes that hold the same rows draw the same.
        torch.manual_seed(settings.seed + (distribution.rows_rank << 32))
    with Interruption(trainer.accelerator) as interruption:
        trainer.add_callback(interruption)
        with _naming_ranks("training", trainer):
            trainer.train(resume_from_checkpoint=None if run.checkpoint is None else str(run.checkpoint))
    # Its writer is closed by now, and it would open another one elsewhere.
    trainer.remove_callback(TensorBoardCallback)
    done = trainer.state.global_step
    if done < settings.steps:
        if trainer.is_world_process_zero():
            draw_losses(folder, xz=xz, final=None)
        return Outcome(run=folder, step=done, stopped_by=interruption.signal)
    with _naming_ranks("evaluating", trainer):
        return _finish(run, trainer, evaluation, xz)


@contextmanager
def _naming_ranks(doing: str, trainer: LongNetTrainer) -> Iterator[None]:
    """Where a process fails, every other one ends with its number, and with what is left of the run."""
    from dilated_attention_pytorch.parallel import RankFailure, naming_ranks

    try:
        with naming_ranks(doing):
            yield
    except RankFailure as error:
        raise RunError(f"{error}; {trainer.how_to_go_on()}") from error


def _announce(
    run: _Run, trainer: LongNetTrainer, evaluation: EvaluationWindows, bytes_per_step: int, xz: float
) -> None:
    settings, figures = run.settings, corpus_figures(run.corpus)
    source = "the Python standard library" if not settings.data else ", ".join(map(str, settings.data))
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    where = f"{settings.threads} CPU threads" if run.device == "cpu" else f"{trainer.args.world_size} CUDA device(s)"
    spread = trainer.distribution.in_words()
    skipped = (
        f"; {run.corpus.skipped} files that are empty or not UTF-8 text are left out" if run.corpus.skipped else ""
    )
    for line in (
        f"text: {source}: {figures['training_bytes']:,} bytes to train on, {figures['held_out_bytes']:,} bytes in "
        f"{figures['held_out_files']} files held out{skipped}",
        f"model: {parameters:,} parameters, context {settings.context_length:,} bytes, "
        f"segments {list(settings.model.segment_lengths)}, rates {list(settings.model.dilation_rates)}",
        f"run: {settings.steps:,} steps of {bytes_per_step:,} bytes, {settings.optimizer}, {settings.precision} on "
        f"{where}{spread}, into {run.folder}",
        f"xz -9e takes {xz:.3f} bits per byte of the {len(evaluation.predicted()):,} held-out bytes to be predicted",
    ):
        run.console.print(line, highlight=False, soft_wrap=True)
    if run.checkpoint is not None:
        run.console.print(f"going on after step {checkpoint_step(run.checkpoint)}", highlight=False)


def _finish(run: _Run, trainer: LongNetTrainer, evaluation: EvaluationWindows, xz: float) -> Outcome:
    from torch.utils.tensorboard import SummaryWriter

    from .evaluation import bits_by_quarter, bits_of_last_quarter_alone, draw_losses
    from .sampling import sample_text

    settings, folder = run.settings, run.folder
    if trainer.is_world_process_zero():
        run.console.print("evaluating on the held-out text", highlight=False)
    start = time.perf_counter()
    bits = trainer.evaluate(evaluation, metric_key_prefix="final")["final_loss"] / math.log(2)
    files = long_files(run.corpus.held_out, settings.context_length, settings.quarter_files)
    # Every process goes on alone and alike, so that none waits for another's evaluation.
    model = trainer.distribution.whole(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
    quarters = bits_by_quarter(model.model, files, settings.precision) if files else None
    alone = bits_of_last_quarter_alone(model.model, files, settings.precision) if files else None
    sampling = SampleSettings(
        max_new_tokens=max(1, settings.sample_length), temperature=settings.sample_temperature, seed=settings.seed
    )
    sample = settings.sample_prompt + "".join(sample_text(model.model, settings.sample_prompt, sampling))
    if trainer.is_world_process_zero():
        result: dict[str, Any] = {
            "bits_per_byte": bits, "xz_bits_per_byte": xz, "held_out_bytes": len(evaluation.predicted()),
            "bits_per_byte_by_quarter": quarters, "last_quarter_alone": alone, "quarter_files": len(files),
            "evaluation_seconds": round(time.perf_counter() - start, 1),
        }  # fmt: skip
        record = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8"))
        write_text(folder / SETTINGS_NAME, json.dumps({**record, "result": result}, indent=2) + "\n")
        write_text(folder / "sample.txt", sample + "\n")
        draw_losses(folder, xz=xz, final=(trainer.state.global_step, bits))
        with SummaryWriter(str(folder / "tensorboard")) as writer:
            writer.add_scalar("final/bits_per_byte", bits, trainer.state.global_step)
            writer.add_text("sample", sample)
        save_finished(model, folder)
    return Outcome(
        run=folder, step=trainer.state.global_step, bits_per_byte=bits, xz_bits_per_byte=xz, quarters=quarters,
        last_quarter_alone=alone, sample=sample,
    )  # fmt: skip
