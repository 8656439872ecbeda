"""A training run: begun or resumed, trained, evaluated and reported."""

from __future__ import annotations

import functools
import os
import random
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate.memory import check_training_memory
from dilated_attention_pytorch.estimate.parallel_choice import choose_parallel
from dilated_attention_pytorch.installation import NAME
from dilated_attention_pytorch.machine import package_digest, package_version, versions
from dilated_attention_pytorch.output import write_text
from dilated_attention_pytorch.parent import end_with_launcher
from dilated_attention_pytorch.progress import counted, progress_bar

from . import preflight
from .checkpoint import SETTINGS_NAME, latest_checkpoint
from .data.corpus import check_same_corpus, describe_corpus
from .data.run_data import Evaluation, RunData, read_data, read_tokenizer, save_tokenizer, verify_tokenizer
from .data.sources import describe_skipped
from .eight_bit import convert_to_float8
from .initial_weights import InitialWeights, find_initial_weights
from .lifecycle import (
    OpenRun,
    begin,
    naming_ranks,
    open_for_resume,
    train_to_the_end,
    with_rewind,
)
from .manifest import read_sealed
from .process_group import all_or_none, check_alike, from_all, from_first, in_first, joined, num_processes, say_once
from .process_identity import launch, launch_record
from .prolongation import change_steps, with_steps
from .record import SAMPLE_NAME, Outcome, RunState, find_run, read_record
from .settings import SampleSettings, TrainSettings
from .spreading import respread
from .trackers import tracking
from .trained_model import check_same_model
from .zero import zero_stage

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainingArguments

    from dilated_attention_pytorch.models import LongNetForCausalLM

    from .trainer import LongNetTrainer

_PER_HOST = ("data", "cache", "tokenizer", "init_from", "offload_folder", "threads", "workers")
"""Settings that may differ between processes; of text, tokenizer and initial weights the contents are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run whose checks have passed."""

    opened: OpenRun
    settings: TrainSettings
    data: RunData
    model: LongNetForCausalLM
    args: TrainingArguments


def train(settings: TrainSettings, output: Path, console: Console, *, may_resume: bool = False) -> Outcome:
    """Train a new model into the folder ``output``, which must be free.

    If torchrun restarts its processes after a failure, the run that they began continues from its last checkpoint.

    Args:
        settings: settings of the run.
        output: run folder.
        console: console for messages.
        may_resume: resume the run that the same settings began in ``output``, if there is one; return its outcome if
            it is finished.

    Raises:
        RunError: the data, the folder, the disk or the device does not allow it; before anything is written.
    """
    end_with_launcher(os.environ)
    preflight.check_train_command()
    return with_rewind(
        lambda: _begin_or_resume(settings, output, console, may_resume),
        lambda: _resume(output, console, {}, may_begin=True),
        console,
    )


def resume(run: Path, console: Console, changes: Mapping[str, Any] | None = None) -> Outcome:
    """Resume a stopped run from its last checkpoint, with the result of an uninterrupted run.

    With another number of processes, or ``changes`` of the distribution over them, the steps take the same windows
    (:func:`.spreading.respread`); results then differ by rounding, and in the random numbers of dropout.
    ``changes`` may also set what to do about bad batches (:data:`.spreading.ON_FAULTS`), and ``steps``: with more of
    them the run, which may be finished, is trained longer (:mod:`.prolongation`).

    Raises:
        RunError: no intact checkpoint, changed data, a folder in use, or fewer steps than it has taken.
    """
    end_with_launcher(os.environ)
    preflight.check_train_command()
    return with_rewind(
        lambda: _resume(run, console, changes or {}),
        lambda: _resume(run, console, changes or {}, may_begin=True),
        console,
    )


def _begin_or_resume(settings: TrainSettings, output: Path, console: Console, may_resume: bool) -> Outcome:
    preflight.check_settings(settings)
    is_again = _was_begun_by_this_launch(output)
    if not (may_resume or is_again):
        preflight.check_current_processes(settings)

    def find() -> RunState:
        if may_resume:
            return find_run(output, settings, "train")
        return "stopped" if is_again else "nothing"

    chosen, device = preflight.choose_machine(settings)
    with _joined(chosen, output, device, "train") as args:
        # The file systems of several hosts may not show the same files yet.
        state = from_first(find)
        if state == "finished":
            return Outcome.of_finished(output)
        if state == "nothing":
            preflight.check_current_processes(settings)
            return _begin(chosen, output, console, device, args)
    return _resume(output, console, {}, may_begin=True)


def _begin(settings: TrainSettings, output: Path, console: Console, device: str, args: TrainingArguments) -> Outcome:
    in_first(lambda: preflight.check_output(output))
    settings, data, model, initial = _prepared(settings, output, device, console)
    agents = launch_record(from_all(launch()))
    with begin(output, console) as opened:

        def write_record() -> None:
            values = {"corpus": data.figures, "processes": num_processes(), "launch": agents}
            if initial is not None:
                values["init_from"] = initial.record()
                opened.say(f"weights: those of {initial.folder} (SHA-256 {initial.digest})")
            opened.write_record("train", settings, device, **values, **save_tokenizer(data.tokenizer, output))
            model.config.save_pretrained(output)

        in_first(write_record)
        return _train_and_report(_Run(opened=opened, settings=settings, data=data, model=model, args=args))


def _resume(folder: Path, console: Console, changes: Mapping[str, Any], *, may_begin: bool = False) -> Outcome:
    sampling = f"sample from it with `dilated-attention generate {shlex.quote(str(folder))}`"
    steps = changes.get("steps")
    with read_record(folder, "train", finished=sampling, steps=steps) as record:
        settings = TrainSettings.from_dict(record["settings"])
        processes = int(record["processes"])
    try:
        settings = settings if steps is None else with_steps(settings, steps)
        spreading = {name: value for name, value in changes.items() if name != "steps"}
        settings = respread(settings, processes, num_processes(), spreading)
    except (RunError, ValueError) as error:
        raise RunError(f"--resume {folder}: {error}") from error
    preflight.check_settings(settings)
    preflight.check_current_processes(settings)
    settings, device = preflight.choose_machine(settings)
    if num_processes() != processes:
        say_once(
            console,
            f"the run began with {processes} processes and goes on with {num_processes()}: batches of "
            f"{settings.batch_size} windows, {settings.gradient_accumulation} of them a step",
        )
    with _joined(settings, folder, device, "resume") as args:
        settings, data, model, _ = _prepared(settings, folder, device, console, record)
        check = functools.partial(check_same_model, model=settings.model)
        with open_for_resume(folder, console, record=record, check=check, may_begin=may_begin) as opened:
            change_steps(opened, settings, "train")
            return _train_and_report(_Run(opened=opened, settings=settings, data=data, model=model, args=args))


def _prepared(
    settings: TrainSettings, folder: Path, device: str, console: Console, record: dict[str, Any] | None = None
) -> tuple[TrainSettings, RunData, LongNetForCausalLM, InitialWeights | None]:
    """Check the machine, then read tokenizer and text and build the model: of a new run, or of that of ``record``.

    Returns the initial weights too, if the model has any and no checkpoint is to be loaded into it.
    """
    preflight.check_train_machine(settings, folder, device)
    if record is None:
        settings = _choose_together(settings, device, console)
    else:
        verify_tokenizer(folder, record)
    tokenizer = read_tokenizer(settings, None if record is None else folder)
    initial = None
    if settings.init_from is not None and (record is None or latest_checkpoint(folder) is None):
        initial = find_initial_weights(settings, tokenizer)
        if record is not None and initial.record()["sha256"] != record["init_from"]["sha256"]:
            raise RunError(
                f"--resume {folder}: the weights in {settings.init_from} are not those that the run began with "
                f"(SHA-256 {record['init_from']['sha256']}), and there is no checkpoint yet; restore them, or start a "
                "new run with another --output"
            )
    data = read_data(settings, tokenizer, functools.partial(console.print, markup=False))
    digest = "" if initial is None else initial.digest
    check_alike({"tokenizer": tokenizer.digest, "initial weights": digest, "text": data.figures})
    if record is None:
        data.check()
    else:
        check_same_corpus(data.figures, record["corpus"], folder)
    return settings, data, _build(settings, initial), initial


def _choose_together(settings: TrainSettings, device: str, console: Console) -> TrainSettings:
    """:func:`choose_parallel` for all processes of a run with ``--parallel auto``; prints the reason once.

    Raises:
        RunError: the choice needs more memory than there is.
    """
    if settings.parallel == "manual":
        return settings
    # The first process decides: free memory differs between hosts.
    chosen, reason = from_first(lambda: choose_parallel(settings, device, num_processes()))
    say_once(console, reason)
    all_or_none(lambda: check_training_memory(chosen, device, num_processes()))
    return chosen


def _was_begun_by_this_launch(output: Path) -> bool:
    """Whether this torchrun began the run in ``output``, before it restarted its processes."""
    mine = launch()
    if mine is None or not (output / SETTINGS_NAME).exists():
        return False
    try:
        record = read_sealed(output / SETTINGS_NAME, what="--output", remedy="")
    except RunError:
        return False  # not a run of this package; it is not overwritten
    return mine.is_in(record.get("launch"))


@contextmanager
def _joined(settings: TrainSettings, folder: Path, device: str, command: str) -> Iterator[TrainingArguments]:
    """Context in which the processes communicate; checks that all have the same settings; builds TrainingArguments."""
    from .run_trainer import training_arguments

    with joined("nccl" if device == "cuda" else "gloo", settings.timeout):
        args = training_arguments(
            settings,
            folder,
            device,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=settings.batch_size,
            torch_compile=settings.compile,
            ddp_find_unused_parameters=False,
            ddp_timeout=settings.timeout,
            # With ZeRO, gradients of every batch of a step are sent to the process that keeps them.
            accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": zero_stage(settings) > 0}},
        )
        assert args.device is not None  # reading it makes accelerate choose the device
        same = {name: value for name, value in settings.to_dict().items() if name not in _PER_HOST}
        package = {"dilated_attention_pytorch": f"{package_version(NAME)} ({package_digest()})"}
        check_alike(
            {
                "command": command,
                "folder": str(folder.absolute()),
                **same,
                "device": device,
                "versions": versions() | package,
            }
        )
        yield args


def _build(settings: TrainSettings, initial: InitialWeights | None) -> LongNetForCausalLM:
    """Build the model, after all memory checks: its weights would be missing from the memory that others measure."""
    from transformers import set_seed
    from transformers.utils import logging

    from dilated_attention_pytorch.models import LongNetForCausalLM

    logging.disable_progress_bar()
    set_seed(settings.seed)
    model = LongNetForCausalLM.from_longnet_config(settings.model)
    if initial is not None:
        initial.load_into(model)
    if settings.precision == "float8":
        convert_to_float8(model)
    return model


def _train_and_report(run: _Run) -> Outcome:
    from torch.utils.data import Subset

    from .distribution import Distribution
    from .evaluation import draw_losses, xz_bits_per_byte
    from .trainer import LongNetTrainer

    settings, opened, args = run.settings, run.opened, run.args
    distribution = Distribution(settings, args.device.type)
    windows_per_step = args.train_batch_size * args.gradient_accumulation_steps * distribution.data_size
    training = run.data.training(windows_per_step)
    evaluation = run.data.evaluation()
    trainer = LongNetTrainer(
        model=run.model,
        args=args,
        settings=settings,
        distribution=distribution,
        run=opened,
        data=run.data,
        training=training,
        evaluation=Subset(evaluation, evaluation.spread(settings.eval_windows)),
    )
    xz = xz_bits_per_byte(evaluation.predicted())
    if trainer.is_world_process_zero():
        _announce(run, trainer, evaluation, run.data.describe(training, windows_per_step), xz)
    if distribution.rows_rank:
        # Dropout differs between rows; processes that hold the same rows draw the same.
        # A CPU's generator takes 32 bits of the seed: the sum of both would be the same one for all.
        torch.manual_seed(random.Random(f"{settings.seed}:{distribution.rows_rank}").getrandbits(63))
    with closing(distribution), tracking(settings, opened) as trackers:
        work = run.data.work(training, windows_per_step)
        stopped_by = train_to_the_end(trainer, work=work, trackers=trackers)
        done = trainer.state.global_step
        if done < settings.steps:
            if trainer.is_world_process_zero():
                draw_losses(opened.folder, xz=xz, final=None)
            return Outcome(run=opened.folder, step=done, stopped_by=stopped_by)
        with naming_ranks("evaluating", trainer):
            outcome = _finish(run, trainer, evaluation, xz)
        assert outcome.bits_per_byte is not None
        trackers.log(done, {"final_bits_per_byte": outcome.bits_per_byte})
    return outcome


def _announce(run: _Run, trainer: LongNetTrainer, evaluation: Evaluation, training: str, xz: float) -> None:
    settings, text = run.settings, describe_corpus(run.settings.data, run.data.figures)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    where = (
        f"{settings.threads} CPU threads"
        if run.args.device.type == "cpu"
        else f"{trainer.args.world_size} CUDA device(s)"
    )
    spread = trainer.distribution.describe()
    run.opened.say(
        f"text: {text}{describe_skipped(run.data.skipped, '; left out: ')}",
        f"model: {parameters:,} parameters, context {settings.context_length:,} {run.data.unit}, "
        f"{settings.model.pattern_in_words}",
        f"run: {settings.steps:,} steps, {training}, {settings.optimizer}, {settings.precision} on "
        f"{where}{spread}, into {run.opened.folder}",
        f"xz -9e takes {xz:.3f} bits per byte of the {len(evaluation.predicted()):,} held-out bytes to be predicted",
    )


def _finish(run: _Run, trainer: LongNetTrainer, evaluation: Evaluation, xz: float) -> Outcome:
    from rich.console import Console

    from .callbacks import Bar, Evaluating
    from .evaluation import bits_by_quarter, bits_of_last_quarter_alone, draw_losses
    from .trained_model import sample_text

    settings, opened, folder = run.settings, run.opened, run.opened.folder
    if trainer.is_world_process_zero():
        opened.say("evaluating on the held-out text")
    start = time.perf_counter()
    console = opened.console if trainer.is_world_process_zero() else Console(quiet=True)
    trainer.remove_callback(Bar)
    with progress_bar(console, "batches") as show:
        trainer.add_callback(Evaluating(show))
        bits = trainer.evaluate(evaluation, metric_key_prefix="final")["final_bits_per_byte"]
    files, lengths = run.data.long_files(), run.data.byte_lengths
    # Every process evaluates the whole model by itself, so that none waits for another.
    model = trainer.distribution.full_model(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
    quarters, alone = None, None
    if files:
        shown = counted(files, "evaluating by quarter of the context", "files", console)
        quarters = bits_by_quarter(model.model, shown, settings.precision, lengths)
        shown = counted(files, "evaluating the last quarter alone", "files", console)
        alone = bits_of_last_quarter_alone(model.model, shown, settings.precision, lengths)
    sampling = SampleSettings(
        max_new_tokens=max(1, settings.sample_length), temperature=settings.sample_temperature, seed=settings.seed
    )
    fitting = run.data.prompt()
    prompt = settings.sample_prompt or fitting
    with progress_bar(console, "tokens") as show:
        sample = prompt
        pieces = sample_text(model.model, prompt, sampling, run.data.tokenizer) if settings.sample_length else ()
        for number, text in enumerate(pieces):
            show("sampling", number, sampling.max_new_tokens)
            sample += text
    if trainer.is_world_process_zero():
        result: dict[str, Any] = {
            "bits_per_byte": bits,
            "xz_bits_per_byte": xz,
            "held_out_bytes": len(evaluation.predicted()),
            "bits_per_byte_by_quarter": quarters,
            "last_quarter_alone": alone,
            "quarter_files": len(files),
            "prompt": fitting,
            "evaluation_seconds": round(time.perf_counter() - start, 1),
        }
        opened.add_to_record(result=result)
        write_text(folder / SAMPLE_NAME, sample + "\n")
        draw_losses(folder, xz=xz, final=(trainer.state.global_step, bits))
        with trainer.checkpoints.writing("the trained model"):
            opened.save_finished(model, trainer.state.global_step)
    return Outcome(
        run=folder,
        step=trainer.state.global_step,
        bits_per_byte=bits,
        xz_bits_per_byte=xz,
        quarters=quarters,
        last_quarter_alone=alone,
        sample=sample,
        prompt=fitting,
    )
