"""Context extension of a pretrained model: measured, changed, trained, measured again."""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate.flops import pretrained_flops, training_flops

from . import pattern_choice, preflight
from .checkpoint import RESTORE
from .data.corpus import Corpus, Text, check_same_corpus, corpus_figures, describe_corpus, read_corpus
from .data.sources import describe_skipped
from .data.windows import EvaluationWindows, StagedBatches, one_batch
from .extension_settings import ExtensionSettings, scaling
from .lifecycle import (
    OpenRun,
    begin,
    open_for_resume,
    train_to_the_end,
    with_rewind,
)
from .manifest import sums, verify_sums
from .measures import WorkDone
from .pretrained import (
    check_same_model,
    check_source,
    figures_of,
    length_of,
    load_config,
    load_model,
    load_tokenizer,
    num_bytes,
    num_kv_heads,
    tokenized,
)
from .prolongation import change_steps, with_steps
from .record import STATES, ExtensionOutcome, find_run, read_record
from .row_logits import row_logits
from .stages import Stages, stage_ends
from .trackers import tracking

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PICTURE_NAME = "context.png"
_KIND = "extension"
_TEXTS_OF_CHOICE = 4
"""Windows of the training text on which patterns are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """What a run reads before its weights."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase | None
    training: Text
    held_out: Text


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extension:
    """A run whose checks have passed."""

    opened: OpenRun
    settings: ExtensionSettings
    own_length: int
    inputs: _Inputs
    bytes_per_token: float
    model: PreTrainedModel


def extend(
    settings: ExtensionSettings, output: Path, console: Console, *, may_resume: bool = False
) -> ExtensionOutcome:
    """Extend the context length of a pretrained model, into the folder ``output``, which must be free.

    The model is measured on held-out text at its own length and at the new one. Its attention is replaced by the
    pattern of the settings, or the best of some candidates (:mod:`.pattern_choice`), and its positions are scaled
    unless windows are chosen (:func:`extend_context`). It is measured again, trained on windows that grow to the new
    length, and measured a third time.

    Args:
        settings: settings of the run.
        output: run folder.
        console: console for messages.
        may_resume: resume the run that the same settings began in ``output``, if there is one; return its outcome if
            it is finished.

    Raises:
        RunError: the model, the data, the folder, the disk or the device does not allow it; before anything is written.
    """
    preflight.check_extend_command()
    return with_rewind(
        lambda: _begin_or_resume(settings, output, console, may_resume),
        lambda: _resume(output, console, may_begin=True),
        console,
    )


def resume_extension(folder: Path, console: Console, steps: int | None = None) -> ExtensionOutcome:
    """Resume a stopped run from its last checkpoint, with the result of an uninterrupted run.

    With more ``steps``, the run, which may be finished, is trained longer (:mod:`.prolongation`).

    Raises:
        RunError: no intact checkpoint, changed data, a folder in use, or fewer steps than it has taken.
    """
    preflight.check_extend_command()
    return with_rewind(
        lambda: _resume(folder, console, steps), lambda: _resume(folder, console, steps, may_begin=True), console
    )


def _begin_or_resume(settings: ExtensionSettings, output: Path, console: Console, may_resume: bool) -> ExtensionOutcome:
    preflight.check_settings(settings)
    state = find_run(output, settings, "extend") if may_resume else "nothing"
    if state == "finished":
        return ExtensionOutcome.of_finished(output)
    return _resume(output, console, may_begin=True) if state == "stopped" else _begin(settings, output, console)


def _begin(settings: ExtensionSettings, output: Path, console: Console) -> ExtensionOutcome:
    preflight.check_output(output)
    settings, device = preflight.choose_machine(settings)
    what = f"--model {settings.model}"
    check_source(what, settings.model)
    config = load_config(what, settings.model)
    own_length = length_of(what, config)
    try:
        settings = settings.complete(own_length)
    except ValueError as error:
        raise RunError(f"--{str(error).replace('_', '-', 1)}") from error
    preflight.check_extend_machine(settings, output, device, config)
    inputs = _read(settings, load_tokenizer(what, settings.model, config), console)
    _check_text(inputs, settings)
    checked = settings
    if not settings.patterns:  # those of the simplest candidate
        far = pattern_choice.segments(own_length, settings.context_length, num_kv_heads(config))
        checked = settings.with_patterns([far], scaling(settings.rotary))
    density = _check_model(load_model(what, settings.model, device), checked)
    model = load_model(what, settings.model, device)  # the check changes its model
    windows = _held_out_windows(inputs.held_out, settings)
    num_held_out_bytes = sum(num_bytes(window[1:], inputs.tokenizer) for window in windows)
    bytes_per_token = num_held_out_bytes / sum(len(window) - 1 for window in windows)
    with begin(output, console) as opened:
        run = _Extension(
            opened=opened,
            settings=settings,
            own_length=own_length,
            inputs=inputs,
            bytes_per_token=bytes_per_token,
            model=model,
        )
        _announce(run, device, density if settings.patterns else None)
        values: dict[str, Any] = {
            "kind": _KIND,
            "own_length": own_length,
            "corpus": corpus_figures(inputs.corpus),
            "bytes_per_token": bytes_per_token,
            "measured": {"before": _measure(run, "before")},
        }
        if not settings.patterns:
            found = _choose(run, load_model(what, settings.model, device))
            values["candidates"] = pattern_choice.recorded(found, bytes_per_token)
            settings = settings.with_patterns(found[0].patterns, found[0].rotary)
            run = dataclasses.replace(run, settings=settings)
        _replace(model, settings)
        values["measured"]["replaced"] = _measure(run, "replaced")
        opened.check()
        # So far the folder holds only the lease: a run that is stopped while it measures can begin again into it.
        if inputs.tokenizer is not None:
            inputs.tokenizer.model_max_length = settings.context_length
            values["tokenizer"] = sums(output, (Path(name).name for name in inputs.tokenizer.save_pretrained(output)))
        opened.write_record("extend", settings, device, **values, model=figures_of(model.config))
        return _train_and_report(run, device)


def _resume(folder: Path, console: Console, steps: int | None = None, *, may_begin: bool = False) -> ExtensionOutcome:
    """With ``may_begin``, a run without a checkpoint is trained from its beginning, and not measured again."""
    from dilated_attention_pytorch.integrations import register

    what = f"--resume {folder}"
    with read_record(folder, "extend", finished=f"its model is in {folder}", steps=steps) as record:
        settings = _read_settings(record)
    try:
        settings = settings if steps is None else with_steps(settings, steps)
    except ValueError as error:
        raise RunError(f"{what}: {error}") from error
    preflight.check_settings(settings)
    settings, device = preflight.choose_machine(settings)
    check = functools.partial(check_same_model, what, record["model"])
    with open_for_resume(folder, console, record=record, check=check, may_begin=may_begin) as opened:
        checkpoint = opened.start.checkpoint
        source = settings.model if checkpoint is None else str(checkpoint)
        register()
        config = load_config(what, source)
        preflight.check_extend_machine(settings, folder, device, config)
        tokenizer = None
        if "tokenizer" in record:
            verify_sums(folder, record["tokenizer"], what=what, remedy=RESTORE)
            tokenizer = load_tokenizer(what, str(folder), config)
        inputs = _read(settings, tokenizer, console)
        check_same_corpus(corpus_figures(inputs.corpus), record["corpus"], folder)
        if checkpoint is None:
            model = load_model(what, source, device)
            _replace(model, settings)
        else:
            model = load_model(what, source, device, attention="dilated")
        change_steps(opened, settings, "extend")
        run = _Extension(
            opened=opened,
            settings=settings,
            own_length=record["own_length"],
            inputs=inputs,
            bytes_per_token=record["bytes_per_token"],
            model=model,
        )
        return _train_and_report(run, device)


def _read(settings: ExtensionSettings, tokenizer: PreTrainedTokenizerBase | None, console: Console) -> _Inputs:
    """The text of a run, as tokens."""
    say = functools.partial(console.print, markup=False)
    corpus = read_corpus(settings.data, text_field=settings.text_field, say=say)
    training, held_out = tokenized(corpus.training, tokenizer), tokenized(corpus.held_out, tokenizer)
    return _Inputs(corpus=corpus, tokenizer=tokenizer, training=training, held_out=held_out)


def _read_settings(record: dict[str, Any]) -> ExtensionSettings:
    """The settings in a record; checks the other values of it that are read later.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is the record of no such run.
    """
    if record["kind"] != _KIND:
        raise ValueError(f"kind {record['kind']!r}")
    for name in ("before", "replaced"):
        _curve(record, name)
        {int(context): float(bits) for context, bits in record["measured"][name]["bits_per_byte"].items()}
    _ = float(record["bytes_per_token"]), int(record["own_length"]), record["model"]["use_cache"]
    return ExtensionSettings.from_dict(record["settings"])


def _check_text(inputs: _Inputs, settings: ExtensionSettings) -> None:
    for text, what in ((inputs.training, "to train on"), (inputs.held_out, "held out to measure on")):
        if len(text) < settings.context_length:
            raise RunError(
                f"--data holds {len(text):,} tokens {what}, fewer than one window of "
                f"--context-length {settings.context_length}; give "
                "more text"
            )


def _check_model(model: PreTrainedModel, settings: ExtensionSettings) -> float:
    """Change the model and run one forward and backward pass, to refuse it before hours of measuring.

    Returns:
        The fraction of the pairs of dense attention that its layers compute at the new length.
    """
    try:
        _replace(model, settings)
        density = pretrained_flops(model).density(settings.context_length)
        tokens = torch.zeros(1, 16, dtype=torch.int64, device=next(model.parameters()).device)
        model.train()(tokens, labels=tokens).loss.backward()
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        raise RunError(f"--model {settings.model}: {error}") from error
    return density


def _replace(model: PreTrainedModel, settings: ExtensionSettings) -> None:
    from dilated_attention_pytorch.integrations import extend_context

    pattern = settings.pattern or [one or None for one in settings.layer_patterns]
    assert settings.rotary != "auto", "the scaling is chosen with the pattern"
    extend_context(model, settings.context_length, pattern, rotary=settings.rotary)


def _choose(run: _Extension, model: PreTrainedModel) -> list[pattern_choice.Candidate]:
    """The candidates for the pattern, best first, as measured with ``model``, which is changed."""
    settings = run.settings
    windows = EvaluationWindows(run.inputs.training, settings.context_length, _TEXTS_OF_CHOICE)
    found = pattern_choice.measure_candidates(
        model,
        [windows[index]["input_ids"] for index in range(len(windows))],
        run.own_length,
        num_kv_heads(run.model.config),
        rotary=settings.rotary,
        precision=settings.precision,
        console=run.opened.console,
    )
    run.opened.say(*pattern_choice.described(found, run.bytes_per_token))
    return found


def _announce(run: _Extension, device: str, density: float | None) -> None:
    """``density``: fraction of the pairs of dense attention; None if the pattern is to be chosen."""
    settings, inputs = run.settings, run.inputs
    text = describe_corpus(settings.data, corpus_figures(inputs.corpus))
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    tokens = "bytes" if inputs.tokenizer is None else f"tokens of {run.bytes_per_token:.2f} bytes on average"
    pattern = (
        settings.pattern or f"patterns by layer {'; '.join(one or 'its window' for one in settings.layer_patterns)}"
    )
    if density is not None:
        change = f"rotary scaling {settings.rotary}, {pattern}: {density:.1%} of the pairs of dense attention"
    elif settings.rotary == "auto":
        change = "pattern and rotary scaling chosen by measurement"
    else:
        change = f"rotary scaling {settings.rotary}, a pattern chosen by measurement"
    where = f"{settings.threads} CPU threads" if device == "cpu" else torch.cuda.get_device_name()
    run.opened.say(
        f"text: {text}, read as {tokens}{describe_skipped(inputs.corpus.skipped, '; left out: ')}",
        f"model: {settings.model}: {parameters:,} parameters, {run.own_length:,} tokens of context",
        f"change: {settings.context_length:,} tokens, {change}",
        f"run: {settings.steps:,} steps of about {settings.batch_tokens * settings.gradient_accumulation:,} tokens in "
        f"windows of {', '.join(f'{stage:,}' for stage in settings.stages)}, {settings.precision} on {where}, into "
        f"{run.opened.folder}",
    )


def _held_out_windows(text: Text, settings: ExtensionSettings) -> list[Tensor]:
    windows = EvaluationWindows(text, settings.context_length, settings.final_eval_windows)
    return [windows[index]["input_ids"] for index in range(len(windows))]


def _measure(run: _Extension, state: str) -> dict[str, Any]:
    """Bits per byte of every position, at both lengths, for the record."""
    from .evaluation import bits_of_tokens

    held_out = _held_out_windows(run.inputs.held_out, run.settings)
    start = time.perf_counter()
    curves = {}
    for context in (run.own_length, run.settings.context_length):
        doing = f"{state}, reading {context:,} tokens"
        bits = bits_of_tokens(run.model, held_out, context, run.settings.precision, run.opened.console, doing)
        curves[context] = torch.stack(bits).mean(dim=0) / run.bytes_per_token
    for context, curve in curves.items():
        if not bool(curve.isfinite().all()):
            raise RunError(
                f"{state}, reading {context:,} tokens, the model computes NaN or infinity from finite weights in "
                f"{run.settings.precision}; try --precision float32 or another --rotary, or begin with another model"
            )
    seconds = round(time.perf_counter() - start, 1)
    words = ", ".join(f"{curve.mean():.3f} reading {context:,} tokens" for context, curve in curves.items())
    run.opened.say(f"{state}: {words} (held-out bits per byte)")
    return {
        "bits_per_byte": {str(context): curve.mean().item() for context, curve in curves.items()},
        "by_position": [round(value, 5) for value in curves[run.settings.context_length].tolist()],
        "windows": len(held_out),
        "seconds": seconds,
    }


def _curve(record: dict[str, Any], state: str) -> Tensor:
    return torch.tensor(record["measured"][state]["by_position"], dtype=torch.float64)


def _train_and_report(run: _Extension, device: str) -> ExtensionOutcome:
    from .run_trainer import training_arguments
    from .trainer import ExtensionTrainer

    settings, opened = run.settings, run.opened
    logits = row_logits(run.model)
    if logits is None:
        opened.say(
            "loss: this model changes what its output matrix gives, so the logits of a whole window are there at once"
        )
    windows = tuple(max(1, settings.batch_tokens // length) for length in settings.stages)
    ends = stage_ends(settings.steps, len(settings.stages), stage_steps=settings.stage_steps)
    stages = Stages(settings.stages, ends, windows)
    training = StagedBatches(
        run.inputs.training, stages, batches_per_step=settings.gradient_accumulation, seed=settings.seed
    )
    evaluation = EvaluationWindows(run.inputs.held_out, settings.context_length, settings.eval_windows)
    if settings.gradient_checkpointing:
        # transformers 5.23 gave it this name; before it was the other.
        name = "activation_checkpointing_enable"
        getattr(run.model, name, run.model.gradient_checkpointing_enable)()
    args = training_arguments(
        settings, opened.folder, device, per_device_train_batch_size=1, per_device_eval_batch_size=1
    )
    trainer = ExtensionTrainer(
        settings=settings,
        model=run.model,
        args=args,
        run=opened,
        training=training,
        evaluation=evaluation,
        data_collator=one_batch,
        bytes_per_token=run.bytes_per_token,
    )
    trainer.logits = logits
    flops = pretrained_flops(run.model)
    work = WorkDone(
        tokens_after=training.tokens_after,
        bytes_after=lambda done: training.tokens_after(done) * run.bytes_per_token,
        flops_after=lambda done: settings.gradient_accumulation * training_flops(flops, stages, done),
    )
    with tracking(settings, opened) as trackers:
        stopped_by = train_to_the_end(trainer, work=work, trackers=trackers)
        done = trainer.state.global_step
        if done == settings.steps:
            with trainer.checkpoints.writing("the trained model"):
                _finish(run)
            bits = opened.record["measured"]["trained"]["bits_per_byte"][str(settings.context_length)]
            trackers.log(done, {"final_bits_per_byte": bits})
    return ExtensionOutcome.of_record(opened.folder, opened.record, done, stopped_by)


def _finish(run: _Extension) -> None:
    from .evaluation import binned, draw_positions

    opened, record = run.opened, run.opened.record
    opened.add_to_record(measured={**record["measured"], "trained": _measure(run, "trained")})
    curves = {state: _curve(record, state) for state in STATES}
    points = {f"{STATES[state]}, mean {curve.mean():.3f}": binned(curve) for state, curve in curves.items()}
    draw_positions(opened.folder / PICTURE_NAME, points, run.own_length)
    run.model.config.get_text_config().use_cache = record["model"]["use_cache"]
    opened.save_finished(run.model, run.settings.steps)
