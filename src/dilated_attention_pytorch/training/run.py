"""A training run from its first check to its report, and taking one up again."""

from __future__ import annotations

import dataclasses
import math
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import machine, set_threads
from dilated_attention_pytorch.output import check_writable, make_output, write_text

from . import preflight
from .checkpoint import (
    SETTINGS_NAME,
    WEIGHTS_NAME,
    Start,
    check_weights,
    checkpoint_step,
    choose_start,
    save_finished,
)
from .corpus import CORPUS_KEYS, Corpus, corpus_figures, read_corpus
from .footprint import check_training_memory
from .lease import Lease
from .manifest import read_sealed, sealed
from .process import ending_with_launcher, launch, launch_record
from .settings import SampleSettings, TrainSettings
from .text_files import in_words
from .together import all_or_none, from_all, from_first, in_first, is_first_process, num_processes, process_rank
from .windows import EvaluationWindows, TrainingWindows, long_files

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainingArguments

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run whose checks have passed."""

    folder: Path
    run_id: str
    settings: TrainSettings
    device: str
    corpus: Corpus
    model: LongNetForCausalLM
    args: TrainingArguments
    start: Start
    lease: Lease | None
    console: Console


def train(settings: TrainSettings, output: Path, console: Console) -> Outcome:
    """Train a new model into the folder ``output``, which must be free.

    Where torchrun starts its processes again after a failure, the run that they began goes on from its last checkpoint.

    Raises:
        RunError: the data, the folder, the disk or the device does not allow it; before anything is written.
    """
    preflight.check_packages("training")
    preflight.check_processes(settings, num_processes())
    is_again = is_first_process() and _was_begun_by_this_launch(output)
    if is_first_process() and not is_again:
        preflight.check_output(output)
    device = preflight.choose_device(settings.device)
    corpus = read_corpus(settings.data, say=console.print if is_first_process() else None)
    preflight.check_corpus(corpus, settings)
    precision = preflight.choose_precision(settings.precision, device)
    settings = dataclasses.replace(settings, threads=set_threads(settings.threads), precision=precision)
    check_training_memory(settings, device, num_processes())
    preflight.check_space(output, settings.model.num_parameters, settings.keep_checkpoints)
    args = _meet(settings, output, device)
    if from_first(lambda: is_again):
        del corpus  # it is read again
        return _go_on(output, console, may_begin=True)
    model = _build(settings)
    run_id = from_first(lambda: secrets.token_hex(8))
    agents = launch_record(from_all(launch()))
    with ending_with_launcher(f"train into {output}"), ExitStack() as held:

        def begin() -> Lease:
            make_output(output)
            lease = held.enter_context(Lease(output, _tell(console)))
            # Another job may have begun, and ended, since it was looked at.
            preflight.check_output(output)
            record = {
                "run": run_id,
                "settings": {**settings.to_dict(), "device": device},
                "corpus": corpus_figures(corpus),
                "processes": num_processes(),
                "launch": agents,
                "machine": machine(),
            }
            write_text(output / SETTINGS_NAME, sealed(record))
            model.config.save_pretrained(output)
            return lease

        lease = in_first(begin)
        start = Start(checkpoint=None, left={})
        return _go(
            _Run(
                folder=output, run_id=run_id, settings=settings, device=device, corpus=corpus, model=model, args=args,
                start=start, lease=lease, console=console,
            )
        )  # fmt: skip


def resume(run: Path, console: Console) -> Outcome:
    """Go on with a run that was stopped, from its last checkpoint, as if it had never stopped.

    Raises:
        RunError: there is nothing to go on with, or no checkpoint or the data is what it was, or another job is at it.
    """
    preflight.check_packages("training")
    return _go_on(run, console)


def _go_on(run: Path, console: Console, *, may_begin: bool = False) -> Outcome:
    what = f"--resume {run}"
    run_id, settings, figures = _read_run(run)
    device = preflight.choose_device(settings.device)
    corpus = read_corpus(settings.data, say=console.print if is_first_process() else None)
    if corpus_figures(corpus) != figures:
        raise RunError(
            f"{what}: the text is not what the run began with (now {corpus_figures(corpus)}, then {figures}); "
            "restore the files, or train anew into another --output"
        )
    set_threads(settings.threads)
    check_training_memory(settings, device, num_processes())
    check_writable(run, what)
    preflight.check_space(run, settings.model.num_parameters, settings.keep_checkpoints)
    args = _meet(settings, run, device)
    model = _build(settings)
    with ending_with_launcher(what), ExitStack() as held:
        lease = in_first(lambda: held.enter_context(Lease(run, _tell(console))))

        def choose() -> Start:
            start = choose_start(run, run_id, num_processes(), lambda checkpoint: _check_model(checkpoint, settings))
            if start.checkpoint is None and not may_begin:
                raise RunError(
                    f"{what}: the run was stopped before its first checkpoint; train anew into another --output"
                )
            return start

        start = from_first(choose)
        all_or_none(lambda: start.verify_here(run_id, num_processes(), process_rank()))
        return _go(
            _Run(
                folder=run, run_id=run_id, settings=settings, device=device, corpus=corpus, model=model, args=args,
                start=start, lease=lease, console=console,
            )
        )  # fmt: skip


def _was_begun_by_this_launch(output: Path) -> bool:
    """Whether the run in ``output`` is one that this torchrun started, before it started its processes again."""
    mine = launch()
    if mine is None or not (output / SETTINGS_NAME).exists():
        return False
    try:
        record = read_sealed(output / SETTINGS_NAME, what="--output", remedy="")
    except RunError:
        return False  # of whoever that is: it is not written over
    return mine.is_in(record.get("launch"))


def _meet(settings: TrainSettings, folder: Path, device: str) -> TrainingArguments:
    """What transformers is told. It lets the processes find each other when it is asked for the device."""
    from .run_trainer import arguments

    args = arguments(
        settings, folder, device, per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size, torch_compile=settings.compile,
        ddp_find_unused_parameters=False, ddp_timeout=settings.timeout,
    )  # fmt: skip
    assert args.device is not None
    return args


def _tell(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, highlight=False, soft_wrap=True)


def _read_run(run: Path) -> tuple[str, TrainSettings, dict[str, int]]:
    what = f"--resume {run}"
    if not run.is_dir():
        raise RunError(f"{what}: there is no such folder; name the --output of the run that was stopped")
    remedy = "name the --output of a `train` command"
    values = read_sealed(run / SETTINGS_NAME, what=what, remedy=remedy)
    try:
        run_id = str(values["run"])
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
    return run_id, settings, figures


def _check_model(checkpoint: Path, settings: TrainSettings) -> None:
    check_weights(checkpoint)
    _check_same_model(checkpoint, settings)


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
    """The model, with its first weights. After :func:`_meet`: what it takes would be missing where others still check
    how much memory there is."""
    from transformers import set_seed
    from transformers.utils import logging

    from dilated_attention_pytorch.models import LongNetForCausalLM

    logging.disable_progress_bar()
    set_seed(settings.seed)
    return LongNetForCausalLM.from_longnet_config(settings.model)


def _go(run: _Run) -> Outcome:
    from torch.utils.data import Subset
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    from .callbacks import Bar, Interruption, Metrics
    from .distribution import Distribution
    from .evaluation import draw_losses, xz_bits_per_byte
    from .trainer import LongNetTrainer

    settings, folder, args = run.settings, run.folder, run.args
    distribution = Distribution(settings, args.device.type)
    windows_per_step = args.train_batch_size * args.gradient_accumulation_steps * distribution.data_size
    evaluation = EvaluationWindows(run.corpus.held_out, settings.context_length, settings.final_eval_windows)
    trainer = LongNetTrainer(
        model=run.model,
        args=args,
        settings=settings,
        distribution=distribution,
        run_id=run.run_id,
        lease=run.lease,
        left=run.start.left.keys(),
        training=TrainingWindows(
            run.corpus.training, settings.context_length, settings.steps * windows_per_step, seed=settings.seed,
            file_start_fraction=settings.file_start_fraction,
        ),
        evaluation=Subset(evaluation, evaluation.spread(settings.eval_windows)),
    )  # fmt: skip
    xz = xz_bits_per_byte(evaluation.predicted())
    checkpoint = run.start.checkpoint
    step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    bytes_per_step = windows_per_step * settings.context_length
    bar = Bar(run.console, bytes_per_step.__mul__)
    if trainer.is_world_process_zero():
        _announce(run, trainer, evaluation, bytes_per_step, xz)
        trainer.add_callback(Metrics(folder, step, bytes_per_step.__mul__))
        trainer.add_callback(bar)
        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(folder / "tensorboard"), purge_step=step or None)))
    if distribution.rows_rank:
        # Dropout differs between rows; processes that hold the same rows draw the same.
        torch.manual_seed(settings.seed + (distribution.rows_rank << 32))
    with Interruption(trainer.accelerator) as interruption, bar:
        trainer.add_callback(interruption)
        with _naming_ranks("training", trainer):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
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
    for line in (
        f"text: {source}: {figures['training_bytes']:,} bytes to train on, {figures['held_out_bytes']:,} bytes in "
        f"{figures['held_out_files']} files held out{in_words(run.corpus.skipped, '; left out: ')}",
        f"model: {parameters:,} parameters, context {settings.context_length:,} bytes, "
        f"segments {list(settings.model.segment_lengths)}, rates {list(settings.model.dilation_rates)}",
        f"run: {settings.steps:,} steps of {bytes_per_step:,} bytes, {settings.optimizer}, {settings.precision} on "
        f"{where}{spread}, into {run.folder}",
        f"xz -9e takes {xz:.3f} bits per byte of the {len(evaluation.predicted()):,} held-out bytes to be predicted",
    ):
        run.console.print(line, highlight=False, soft_wrap=True)
    for line in run.start.in_words():
        run.console.print(line, highlight=False, soft_wrap=True)
    if run.start.checkpoint is not None:
        run.console.print(f"going on after step {checkpoint_step(run.start.checkpoint)}", highlight=False)


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
        trainer.check_lease()
        record = read_sealed(folder / SETTINGS_NAME, what="the end of the run", remedy="restore it from a copy")
        write_text(folder / SETTINGS_NAME, sealed({**record, "result": result}))
        write_text(folder / "sample.txt", sample + "\n")
        draw_losses(folder, xz=xz, final=(trainer.state.global_step, bits))
        with SummaryWriter(str(folder / "tensorboard")) as writer:
            writer.add_scalar("final/bits_per_byte", bits, trainer.state.global_step)
            writer.add_text("sample", sample)
        trainer.check_lease()
        with trainer.writing("the trained model"):
            save_finished(model, folder, run_id=run.run_id, step=trainer.state.global_step)
    return Outcome(
        run=folder, step=trainer.state.global_step, bits_per_byte=bits, xz_bits_per_byte=xz, quarters=quarters,
        last_quarter_alone=alone, sample=sample,
    )  # fmt: skip
