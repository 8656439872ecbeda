"""A training run from its first check to its report, and taking one up again."""

from __future__ import annotations

import dataclasses
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
from dilated_attention_pytorch.machine import machine, package_digest, package_version, set_threads, versions
from dilated_attention_pytorch.output import write_text
from dilated_attention_pytorch.parent import end_with_launcher

from . import preflight
from .checkpoint import SETTINGS_NAME
from .configuration import CONFIGURATION_NAME, configuration_text
from .corpus import corpus_in_words
from .data.run_data import Evaluation, RunData, read_data, read_tokenizer, save_tokenizer, verify_tokenizer
from .float8 import convert_to_float8
from .going_back import going_back
from .lifecycle import (
    Found,
    OpenRun,
    begin,
    check_same_corpus,
    find_run,
    naming_ranks,
    read_record,
    take_up,
    train_to_the_end,
)
from .manifest import read_sealed, sealed
from .outcome import SAMPLE_NAME, Outcome
from .parallel_choice import choose_together
from .process import launch, launch_record
from .publishing import save_finished
from .settings import SampleSettings, TrainSettings
from .spreading import spread_anew
from .stages import Stages
from .text_files import in_words
from .together import check_alike, from_all, from_first, in_first, is_first_process, joined, num_processes
from .trackers import check_trackers, tracking
from .verification import check_same_model
from .zero import check_offload, check_zero_here, zero_stage

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainingArguments

    from dilated_attention_pytorch.models import LongNetForCausalLM

    from .data.tokenizer import Tokenizer
    from .trainer import LongNetTrainer

_OF_EACH_HOST = ("data", "cache", "tokenizer", "offload_folder", "threads", "workers")
"""Settings that may differ between processes; of the text and the tokenizer the contents are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run whose checks have passed."""

    place: OpenRun
    settings: TrainSettings
    device: str
    data: RunData
    model: LongNetForCausalLM
    args: TrainingArguments


def train(settings: TrainSettings, output: Path, console: Console, *, may_resume: bool = False) -> Outcome:
    """Train a new model into the folder ``output``, which must be free.

    Where torchrun starts its processes again after a failure, the run that they began goes on from its last checkpoint.

    Args:
        settings: what to do.
        output: the run folder.
        console: where to say what happens.
        may_resume: go on with the run that the same settings began in ``output``, if there is one; return what came
            of it if it is finished.

    Raises:
        RunError: the data, the folder, the disk or the device does not allow it; before anything is written.
    """
    end_with_launcher(os.environ)
    preflight.check_packages("training")
    preflight.check_launch()
    return going_back(
        lambda: _begin(settings, output, console, may_resume),
        lambda: _go_on(output, console, {}, may_begin=True),
        console,
    )


def _begin(settings: TrainSettings, output: Path, console: Console, may_resume: bool) -> Outcome:
    preflight.check_optimizer(settings.optimizer)
    check_trackers(settings)
    is_again = _was_begun_by_this_launch(output)
    if not (may_resume or is_again):
        _check_new(settings)
    device = preflight.choose_device(settings.device)
    precision = preflight.choose_precision(settings.precision, device)
    with _joined(dataclasses.replace(settings, precision=precision), output, device, "train") as args:
        found: Found = "nothing"
        if may_resume:
            # A file system that hosts share may show one process what it does not show another yet.
            found = from_first(lambda: find_run(output, settings, "train"))
        if found == "finished":
            return Outcome.of_finished(output)
        if not from_first(lambda: found == "stopped" or is_again):
            if may_resume or is_again:
                _check_new(settings)
            return _begin_anew(dataclasses.replace(settings, precision=precision), output, console, device, args)
    return _go_on(output, console, {}, may_begin=True)


def _check_new(settings: TrainSettings) -> None:
    check_zero_here(settings)
    preflight.check_processes(settings, num_processes())


def _begin_anew(
    settings: TrainSettings, output: Path, console: Console, device: str, args: TrainingArguments
) -> Outcome:
    in_first(lambda: preflight.check_output(output))
    settings = dataclasses.replace(settings, threads=set_threads(settings.threads))
    check_training_memory(settings, device, num_processes())
    preflight.check_space(output, settings.model.num_parameters, settings)
    check_offload(settings, device)
    settings = choose_together(settings, device, console)
    tokenizer = read_tokenizer(settings)
    data = _read_data(settings, tokenizer, console)
    data.check()
    model = _build(settings)
    agents = launch_record(from_all(launch()))
    with begin(output, console) as place:

        def write_record() -> None:
            record: dict[str, Any] = {
                "run": place.run_id,
                "settings": {**settings.to_dict(), "device": device},
                "corpus": data.figures,
                **save_tokenizer(tokenizer, output),
                "processes": num_processes(),
                "launch": agents,
                "machine": machine(),
            }
            write_text(output / SETTINGS_NAME, sealed(record))
            write_text(output / CONFIGURATION_NAME, configuration_text(record["settings"], "train"))
            model.config.save_pretrained(output)

        in_first(write_record)
        return _go(_Run(place=place, settings=settings, device=device, data=data, model=model, args=args))


def resume(run: Path, console: Console, changes: Mapping[str, Any] | None = None) -> Outcome:
    """Go on with a run that was stopped, from its last checkpoint, as if it had never stopped.

    Another number of processes, or ``changes`` of how the run is spread over them, go on with the same steps on the
    same windows (:func:`.spreading.spread_anew`); results then differ by rounding, and dropout by its draws.
    ``changes`` may also say what to do about batches that break the run (:data:`.spreading.ON_FAULTS`).

    Raises:
        RunError: there is nothing to go on with, or no checkpoint or the data is what it was, or another job is at it.
    """
    end_with_launcher(os.environ)
    preflight.check_packages("training")
    preflight.check_launch()
    return going_back(
        lambda: _go_on(run, console, changes or {}),
        lambda: _go_on(run, console, changes or {}, may_begin=True),
        console,
    )


def _go_on(run: Path, console: Console, changes: Mapping[str, Any], *, may_begin: bool = False) -> Outcome:
    sampling = f"sample from it with `dilated-attention generate {shlex.quote(str(run))}`"
    with read_record(run, "train", finished=sampling) as record:
        settings = TrainSettings.from_dict(record["settings"])
        processes = int(record["processes"])
    try:
        settings = spread_anew(settings, processes, num_processes(), changes)
    except (RunError, ValueError) as error:
        raise RunError(f"--resume {run}: {error}") from error
    check_zero_here(settings)
    preflight.check_processes(settings, num_processes())
    if num_processes() != processes and is_first_process():
        console.print(
            f"the run began with {processes} processes and goes on with {num_processes()}: batches of "
            f"{settings.batch_size} windows, {settings.gradient_accumulation} of them a step",
            highlight=False,
            soft_wrap=True,
        )
    preflight.check_optimizer(settings.optimizer)
    check_trackers(settings)
    device = preflight.choose_device(settings.device)
    preflight.choose_precision(settings.precision, device)
    with _joined(settings, run, device, "resume") as args:
        verify_tokenizer(run, record)
        tokenizer = read_tokenizer(settings, run)
        set_threads(settings.threads)
        check_training_memory(settings, device, num_processes())
        preflight.check_space(run, settings.model.num_parameters, settings)
        check_offload(settings, device)
        data = _read_data(settings, tokenizer, console)
        check_same_corpus(data.figures, record["corpus"], run)
        model = _build(settings)
        check = functools.partial(check_same_model, model=settings.model)
        with take_up(run, console, run_id=record["run"], check=check, may_begin=may_begin) as place:
            return _go(_Run(place=place, settings=settings, device=device, data=data, model=model, args=args))


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


@contextmanager
def _joined(settings: TrainSettings, folder: Path, device: str, command: str) -> Iterator[TrainingArguments]:
    """Context in which the processes can communicate, with transformers' arguments; all were started alike."""
    from .arguments import arguments

    with joined("nccl" if device == "cuda" else "gloo", settings.timeout):
        args = arguments(
            settings,
            folder,
            device,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=settings.batch_size,
            torch_compile=settings.compile,
            ddp_find_unused_parameters=False,
            ddp_timeout=settings.timeout,
            # The gradients of every batch of a step go to the process that keeps them.
            accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": zero_stage(settings) > 0}},
        )
        assert args.device is not None  # which accelerate chooses now
        told = {name: value for name, value in settings.to_dict().items() if name not in _OF_EACH_HOST}
        package = {"dilated_attention_pytorch": f"{package_version('dilated-attention-pytorch')} ({package_digest()})"}
        check_alike(
            {
                "command": command,
                "folder": str(folder.absolute()),
                **told,
                "device": device,
                "versions": versions() | package,
            }
        )
        yield args


def _read_data(settings: TrainSettings, tokenizer: Tokenizer, console: Console) -> RunData:
    """The data of a run, which is the same in all processes."""
    data = read_data(settings, tokenizer, functools.partial(console.print, markup=False))
    check_alike({"tokenizer": tokenizer.digest, "text": data.figures})
    return data


def _build(settings: TrainSettings) -> LongNetForCausalLM:
    """The model, with its first weights. After all processes on this host have checked how much memory there is."""
    from transformers import set_seed
    from transformers.utils import logging

    from dilated_attention_pytorch.models import LongNetForCausalLM

    logging.disable_progress_bar()
    set_seed(settings.seed)
    model = LongNetForCausalLM.from_longnet_config(settings.model)
    if settings.precision == "float8":
        convert_to_float8(model)
    return model


def _go(run: _Run) -> Outcome:
    from torch.utils.data import Subset

    from .distribution import Distribution
    from .evaluation import draw_losses, xz_bits_per_byte
    from .trainer import LongNetTrainer

    settings, place, args = run.settings, run.place, run.args
    distribution = Distribution(settings, args.device.type)
    windows_per_step = args.train_batch_size * args.gradient_accumulation_steps * distribution.data_size
    stages = Stages.of(settings.stages, settings.model, context_length=settings.context_length, steps=settings.steps)
    training = run.data.training(stages, windows_per_step)
    evaluation = run.data.evaluation()
    trainer = LongNetTrainer(
        model=run.model,
        args=args,
        settings=settings,
        distribution=distribution,
        place=place,
        data=run.data,
        stages=stages,
        training=training,
        evaluation=Subset(evaluation, evaluation.spread(settings.eval_windows)),
    )
    xz = xz_bits_per_byte(evaluation.predicted())
    if trainer.is_world_process_zero():
        _announce(run, trainer, evaluation, run.data.in_words(training, windows_per_step), xz)
    if distribution.rows_rank:
        # Dropout differs between rows; processes that hold the same rows draw the same.
        # A CPU's generator takes 32 bits of the seed: the sum of both would be the same one for all.
        torch.manual_seed(random.Random(f"{settings.seed}:{distribution.rows_rank}").getrandbits(63))
    with closing(distribution), tracking(settings, place) as trackers:
        work = run.data.work(training, stages, windows_per_step)
        stopped_by = train_to_the_end(place, trainer, work=work, trackers=trackers)
        done = trainer.state.global_step
        if done < settings.steps:
            if trainer.is_world_process_zero():
                draw_losses(place.folder, xz=xz, final=None)
            return Outcome(run=place.folder, step=done, stopped_by=stopped_by)
        with naming_ranks("evaluating", trainer):
            outcome = _finish(run, trainer, evaluation, xz)
        for tracker in trackers:
            assert outcome.bits_per_byte is not None
            tracker.log(done, {"final_bits_per_byte": outcome.bits_per_byte})
    return outcome


def _announce(run: _Run, trainer: LongNetTrainer, evaluation: Evaluation, training: str, xz: float) -> None:
    settings, text = run.settings, corpus_in_words(run.settings.data, run.data.figures)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    where = f"{settings.threads} CPU threads" if run.device == "cpu" else f"{trainer.args.world_size} CUDA device(s)"
    spread = trainer.distribution.in_words()
    run.place.say(
        f"text: {text}{in_words(run.data.skipped, '; left out: ')}",
        f"model: {parameters:,} parameters, context {settings.context_length:,} {run.data.unit}, "
        f"{settings.model.pattern_in_words}",
        f"run: {settings.steps:,} steps, {training}, {settings.optimizer}, {settings.precision} on "
        f"{where}{spread}, into {run.place.folder}",
        f"xz -9e takes {xz:.3f} bits per byte of the {len(evaluation.predicted()):,} held-out bytes to be predicted",
    )


def _finish(run: _Run, trainer: LongNetTrainer, evaluation: Evaluation, xz: float) -> Outcome:
    from .evaluation import bits_by_quarter, bits_of_last_quarter_alone, draw_losses
    from .sampling import sample_text

    settings, place, folder = run.settings, run.place, run.place.folder
    if trainer.is_world_process_zero():
        place.say("evaluating on the held-out text")
    start = time.perf_counter()
    bits = trainer.evaluate(evaluation, metric_key_prefix="final")["final_bits_per_byte"]
    files, lengths = run.data.long_files(), run.data.byte_lengths
    # Every process goes on alone and alike, so that none waits for another's evaluation.
    model = trainer.distribution.whole(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
    quarters = bits_by_quarter(model.model, files, settings.precision, lengths) if files else None
    alone = bits_of_last_quarter_alone(model.model, files, settings.precision, lengths) if files else None
    sampling = SampleSettings(
        max_new_tokens=max(1, settings.sample_length), temperature=settings.sample_temperature, seed=settings.seed
    )
    sample = settings.sample_prompt + "".join(
        sample_text(model.model, settings.sample_prompt, sampling, run.data.tokenizer)
    )
    if trainer.is_world_process_zero():
        result: dict[str, Any] = {
            "bits_per_byte": bits,
            "xz_bits_per_byte": xz,
            "held_out_bytes": len(evaluation.predicted()),
            "bits_per_byte_by_quarter": quarters,
            "last_quarter_alone": alone,
            "quarter_files": len(files),
            "evaluation_seconds": round(time.perf_counter() - start, 1),
        }
        trainer.check_lease()
        record = read_sealed(folder / SETTINGS_NAME, what="the end of the run", remedy="restore it from a copy")
        write_text(folder / SETTINGS_NAME, sealed({**record, "result": result}))
        write_text(folder / SAMPLE_NAME, sample + "\n")
        draw_losses(folder, xz=xz, final=(trainer.state.global_step, bits))
        trainer.check_lease()
        with trainer.writing("the trained model"):
            save_finished(
                model,
                folder,
                run_id=place.run_id,
                step=trainer.state.global_step,
                staging=place.staging,
                check=trainer.check_lease,
            )
    return Outcome(
        run=folder,
        step=trainer.state.global_step,
        bits_per_byte=bits,
        xz_bits_per_byte=xz,
        quarters=quarters,
        last_quarter_alone=alone,
        sample=sample,
    )
