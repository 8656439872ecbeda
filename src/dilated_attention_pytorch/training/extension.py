"""A pretrained model of transformers taken to longer texts: measured, changed, trained on, measured again."""

from __future__ import annotations

import dataclasses
import pickle
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import machine, set_threads
from dilated_attention_pytorch.output import check_writable, make_output, write_text

from . import preflight
from .checkpoint import SETTINGS_NAME, WEIGHTS_NAME, Start, checkpoint_step, choose_start, save_finished
from .corpus import CORPUS_KEYS, Corpus, Text, corpus_figures, read_corpus
from .extension_settings import ExtensionSettings
from .finite import what_is_not_finite
from .footprint import check_extension_memory
from .lease import Lease
from .manifest import read_sealed, sealed, sums, verify_sums
from .pretrained import check_source, num_parameters
from .process import ending_with_launcher
from .text_files import in_words
from .together import num_processes
from .tokens import load_tokenizer, num_bytes, tokenized
from .windows import EvaluationWindows, StagedBatches

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PICTURE_NAME = "context.png"
STATES = ("before", "replaced", "trained")
"""The model as it came; with scaled positions and the pattern; after training on."""
_KIND = "extension"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionOutcome:
    """How a run ended."""

    run: Path
    """The run folder."""
    step: int
    """Optimizer steps done."""
    own_length: int
    """Tokens that the model was made for before."""
    length: int
    """Tokens that it is made for now."""
    stopped_by: int | None = None
    """The signal that stopped it; None if it came to its end."""
    bits_per_byte: dict[str, dict[int, float]]
    """Held-out bits per byte by state (:data:`STATES`) and by the number of tokens that the model reads at most; the
    same bytes are predicted in every case."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose checks have passed."""

    folder: Path
    run_id: str
    settings: ExtensionSettings
    device: str
    own_length: int
    training: Text
    held_out: Text
    bytes_per_token: float
    model: PreTrainedModel
    start: Start
    lease: Lease
    console: Console


def extend(settings: ExtensionSettings, output: Path, console: Console) -> ExtensionOutcome:
    """Take a pretrained model to longer texts, into the folder ``output``, which must be free.

    The model is measured on held-out text at its own length and at the new one, its positions are scaled and its
    attention replaced (:func:`extend_context`), it is measured again, trained on windows that grow to the new length,
    and measured a third time.

    Raises:
        RunError: the model, the data, the folder, the disk or the device does not allow it; before anything is written.
    """
    preflight.check_packages("training")
    _check_alone()
    preflight.check_output(output)
    device = preflight.choose_device(settings.device)
    what = f"--model {settings.model}"
    check_source(what, settings.model)
    config = _load_config(what, settings.model)
    own_length = _own_length(what, config)
    try:
        settings = settings.complete(own_length, _num_kv_heads(config))
    except ValueError as error:
        raise RunError(f"--{error}") from error
    tokenizer = load_tokenizer(what, settings.model, config)
    corpus = read_corpus(settings.data, say=console.print)
    training, held_out = tokenized(corpus.training, tokenizer), tokenized(corpus.held_out, tokenizer)
    _check_text(training, held_out, settings)
    precision = preflight.choose_precision(settings.precision, device)
    settings = dataclasses.replace(settings, threads=set_threads(settings.threads), precision=precision)
    check_extension_memory(settings, config, num_parameters(what, config), device)
    model = _load_model(what, settings.model, device)
    preflight.check_space(
        output, sum(parameter.numel() for parameter in model.parameters()), settings.keep_checkpoints
    )  # fmt: skip
    _check_model(model, settings)
    # What was changed to see whether it can be is read again rather than kept beside.
    del model
    windows = _held_out_windows(held_out, settings)
    bytes_per_token = sum(num_bytes(window[1:], tokenizer) for window in windows) / sum(len(x) - 1 for x in windows)
    model = _load_model(what, settings.model, device)
    make_output(output)
    with ending_with_launcher(f"extend into {output}"), ExitStack() as held:
        lease = held.enter_context(Lease(output, lambda line: console.print(line, highlight=False, soft_wrap=True)))
        # Another job may have begun, and ended, since it was looked at.
        preflight.check_output(output)
        run = _Run(
            output, secrets.token_hex(8), settings, device, own_length, training, held_out, bytes_per_token, model,
            Start(checkpoint=None, left={}), lease, console,
        )  # fmt: skip
        _announce(run, corpus, tokenizer)
        record: dict[str, Any] = {
            "kind": _KIND,
            "run": run.run_id,
            "settings": {**settings.to_dict(), "device": device},
            "own_length": own_length,
            "corpus": corpus_figures(corpus),
            "bytes_per_token": run.bytes_per_token,
            "machine": machine(),
            "measured": {},
        }
        _measure(run, "before", record)
        _replace(run.model, settings)
        _measure(run, "replaced", record)
        lease.check()
        # Nothing but the lease is in the folder until here: whoever stops the measuring may begin again into it.
        if tokenizer is not None:
            tokenizer.model_max_length = settings.length
            record["tokenizer"] = sums(output, (Path(name).name for name in tokenizer.save_pretrained(output)))
        record["model"] = _figures_of(run.model.config)
        write_text(output / SETTINGS_NAME, sealed(record))
        return _go(run, record)


def resume_extension(folder: Path, console: Console) -> ExtensionOutcome:
    """Go on with a run that was stopped, from its last checkpoint, as if it had never stopped.

    Raises:
        RunError: there is nothing to go on with, or the checkpoint or the data is not what it was.
    """
    from dilated_attention_pytorch.integrations import register

    preflight.check_packages("training")
    _check_alone()
    what = f"--resume {folder}"
    record, settings = _read_run(folder, what)
    device = preflight.choose_device(settings.device)
    corpus = read_corpus(settings.data, say=console.print)
    if corpus_figures(corpus) != record["corpus"]:
        raise RunError(
            f"{what}: the text is not what the run began with (now {corpus_figures(corpus)}, then {record['corpus']}); "
            "restore the files, or begin anew into another --output"
        )
    check_writable(folder, what)
    with ending_with_launcher(what), ExitStack() as held:
        lease = held.enter_context(Lease(folder, lambda line: console.print(line, highlight=False, soft_wrap=True)))
        start = choose_start(
            folder,
            record["run"],
            1,
            lambda checkpoint: _check_same_model(checkpoint, _load_config(what, checkpoint), record),
        )
        if start.checkpoint is None:
            raise RunError(f"{what}: the run was stopped before its first checkpoint; begin anew into another --output")
        tokenizer = None
        if "tokenizer" in record:
            remedy = "restore the folder from a copy, or begin anew into another --output"
            verify_sums(folder, record["tokenizer"], what=what, remedy=remedy)
            tokenizer = load_tokenizer(what, str(folder), _load_config(what, start.checkpoint))
        set_threads(settings.threads)
        register()
        config = _load_config(what, start.checkpoint)
        check_extension_memory(settings, config, num_parameters(what, config), device)
        model = _load_model(what, str(start.checkpoint), device, attn_implementation="dilated")
        preflight.check_space(
            folder, sum(parameter.numel() for parameter in model.parameters()), settings.keep_checkpoints
        )  # fmt: skip
        training, held_out = tokenized(corpus.training, tokenizer), tokenized(corpus.held_out, tokenizer)
        run = _Run(
            folder, record["run"], settings, device, record["own_length"], training, held_out,
            record["bytes_per_token"], model, start, lease, console,
        )  # fmt: skip
        for line in start.in_words():
            console.print(line, highlight=False, soft_wrap=True)
        step = checkpoint_step(start.checkpoint)
        console.print(f"going on after step {step} of {settings.steps:,}", highlight=False)
        return _go(run, record)


def _read_run(folder: Path, what: str) -> tuple[dict[str, Any], ExtensionSettings]:
    if not folder.is_dir():
        raise RunError(f"{what}: there is no such folder; name the --output of the run that was stopped")
    remedy = "name the --output of an `extend` command"
    record = read_sealed(folder / SETTINGS_NAME, what=what, remedy=remedy)
    try:
        if record["kind"] != _KIND or not isinstance(record["run"], str):
            raise ValueError(f"kind {record['kind']!r}")
        settings = ExtensionSettings.from_dict(record["settings"])
        if [int(record["corpus"][name]) for name in CORPUS_KEYS] != list(record["corpus"].values()):
            raise ValueError("corpus")
        for name in STATES[:2]:
            _curve(record, name)
            {int(context): float(bits) for context, bits in record["measured"][name]["bits_per_byte"].items()}
        _ = float(record["bytes_per_token"]), int(record["own_length"]), record["model"]["use_cache"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{what}: {folder / SETTINGS_NAME} describes no such run ({error}); {remedy}") from error
    if (folder / WEIGHTS_NAME).exists():
        raise RunError(f"{what}: that run is finished; its model is in {folder}")
    return record, settings


def _check_alone() -> None:
    if num_processes() > 1:
        raise RunError(
            f"extend runs in one process, and torchrun started {num_processes()}; for several call extend_context and "
            "give the model to your own trainer (FSDP2, DeepSpeed): docs/long-context.md"
        )


def _figures_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What an extension changes of a model, by which its checkpoints are known again."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "rope_parameters", "dilated_attention")
    return {**{name: getattr(text, name, None) for name in names}, "use_cache": getattr(text, "use_cache", None)}


def _check_same_model(checkpoint: Path, config: PreTrainedConfig, record: dict[str, Any]) -> None:
    # The trainer turns the cache of the model off.
    found, expected = ({**figures, "use_cache": None} for figures in (_figures_of(config), record["model"]))
    if found != expected:
        names = [name for name, value in expected.items() if found[name] != value]
        raise RunError(
            f"foreign checkpoint: {checkpoint} is of another model than {checkpoint.parent / SETTINGS_NAME} describes "
            f"({', '.join(names)} differ); bring the two of one run together again"
        )


def _load_config(what: str, model: str | Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"{what}: {model} describes no model of transformers ({error}); it takes a folder with config.json, or a "
            "model of the hub"
        ) from error
    return config


def _own_length(what: str, config: PreTrainedConfig) -> int:
    length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise RunError(
            f"{what}: {config.model_type} has no max_position_embeddings, so its length is not known; set it "
            "in config.json to the length that the model was trained on"
        )
    if hasattr(config.get_text_config(), "dilated_attention"):
        raise RunError(
            f"{what}: the model has a pattern already (dilated_attention in config.json), so what it computes with "
            "dense attention says nothing: begin with the model from before, or call set_pattern or extend_context and "
            "train with your own trainer"
        )
    return length


def _num_kv_heads(config: PreTrainedConfig) -> int:
    text = config.get_text_config()
    heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return heads


def _load_model(what: str, model: str, device: str, **options: Any) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, output_loading_info=True, trust_remote_code=False, **options
        )
    except pickle.UnpicklingError as error:
        raise RunError(
            f"{what}: the weights of {model} are a pickle that holds more than tensors, and were not unpickled, as "
            "what is in it would run; take a copy with model.safetensors, or convert it with the program that wrote it"
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RunError(f"{what}: the weights of {model} cannot be loaded ({error}); copy them again") from error
    loaded: PreTrainedModel = found[0]
    missing = sorted(found[1]["missing_keys"])
    if missing:
        raise RunError(
            f"{what}: {len(missing)} weights are missing in it ({missing[0]} the first), so it is no trained "
            "causal language model; name another one"
        )
    broken = what_is_not_finite({"weights": loaded.named_parameters()})
    if broken is not None:
        raise RunError(f"{what}: NaN or infinity is in {broken} of {model}, so nothing can be trained from it")
    moved: PreTrainedModel = nn.Module.to(loaded, device)
    return moved


def _check_text(training: Text, held_out: Text, settings: ExtensionSettings) -> None:
    for text, what in ((training, "to train on"), (held_out, "held out to measure on")):
        if len(text) < settings.length:
            raise RunError(
                f"--data holds {len(text):,} tokens {what}, fewer than one window of --length {settings.length}; give "
                "more text"
            )


def _check_model(model: PreTrainedModel, settings: ExtensionSettings) -> None:
    """Change the model and take a step back and forth, so that what is refused is refused before hours of measuring."""
    try:
        _replace(model, settings)
        _density(model.config, settings)
        tokens = torch.zeros(1, 16, dtype=torch.int64, device=next(model.parameters()).device)
        model.train()(tokens, labels=tokens).loss.backward()
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        raise RunError(f"--model {settings.model}: {error}") from error


def _density(config: PreTrainedConfig, settings: ExtensionSettings) -> float:
    pattern, heads = settings.read_pattern(), _num_kv_heads(config)
    return pattern.density(settings.length, num_kv_heads=heads, is_causal=True)


def _replace(model: PreTrainedModel, settings: ExtensionSettings) -> None:
    from dilated_attention_pytorch.integrations import extend_context

    extend_context(model, settings.length, settings.read_pattern(), rotary=settings.rotary)


def _announce(run: _Run, corpus: Corpus, tokenizer: PreTrainedTokenizerBase | None) -> None:
    settings, figures = run.settings, corpus_figures(corpus)
    source = "the Python standard library" if not settings.data else ", ".join(map(str, settings.data))
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    tokens = "bytes" if tokenizer is None else f"tokens of {run.bytes_per_token:.2f} bytes on average"
    where = f"{settings.threads} CPU threads" if run.device == "cpu" else torch.cuda.get_device_name()
    for line in (
        f"text: {source}: {figures['training_bytes']:,} bytes to train on, {figures['held_out_bytes']:,} bytes in "
        f"{figures['held_out_files']} files held out, read as {tokens}{in_words(corpus.skipped, '; left out: ')}",
        f"model: {settings.model}: {parameters:,} parameters, {run.own_length:,} tokens of context",
        f"change: {settings.length:,} tokens, rotary scaling {settings.rotary}, {settings.pattern}: "
        f"{_density(run.model.config, settings):.1%} of the pairs of dense attention",
        f"run: {settings.steps:,} steps of about {settings.batch_tokens * settings.gradient_accumulation:,} tokens in "
        f"windows of {', '.join(f'{stage:,}' for stage in settings.stages)}, {settings.precision} on {where}, into "
        f"{run.folder}",
    ):
        run.console.print(line, highlight=False, soft_wrap=True)


def _held_out_windows(text: Text, settings: ExtensionSettings) -> list[Tensor]:
    windows = EvaluationWindows(text, settings.length, settings.final_eval_windows)
    return [windows[index]["input_ids"] for index in range(len(windows))]


def _measure(run: _Run, state: str, record: dict[str, Any]) -> None:
    """Bits per byte of every position, at both lengths, into the record."""
    from .context_measure import bits_by_position

    held_out = _held_out_windows(run.held_out, run.settings)
    start = time.perf_counter()
    curves = {
        context: bits_by_position(
            run.model, held_out, context, run.settings.precision, run.console, f"{state}, reading {context:,} tokens"
        ) / run.bytes_per_token
        for context in (run.own_length, run.settings.length)
    }  # fmt: skip
    for context, curve in curves.items():
        if not bool(curve.isfinite().all()):
            raise RunError(
                f"{state}, reading {context:,} tokens, the model computes NaN or infinity from finite weights in "
                f"{run.settings.precision}; try --precision float32 or another --rotary, or begin with another model"
            )
    record["measured"][state] = {
        "bits_per_byte": {str(context): curve.mean().item() for context, curve in curves.items()},
        "by_position": [round(value, 5) for value in curves[run.settings.length].tolist()],
        "windows": len(held_out),
        "seconds": round(time.perf_counter() - start, 1),
    }
    words = ", ".join(f"{curve.mean():.3f} reading {context:,} tokens" for context, curve in curves.items())
    run.console.print(f"{state}: {words} (held-out bits per byte)", highlight=False, soft_wrap=True)


def _curve(record: dict[str, Any], state: str) -> Tensor:
    return torch.tensor(record["measured"][state]["by_position"], dtype=torch.float64)


def _go(run: _Run, record: dict[str, Any]) -> ExtensionOutcome:
    from .callbacks import Bar, Interruption, Metrics
    from .run_trainer import RunTrainer, arguments

    settings, folder = run.settings, run.folder
    training = StagedBatches(
        run.training, settings.stages, steps=settings.steps, batches_per_step=settings.gradient_accumulation,
        batch_tokens=settings.batch_tokens, seed=settings.seed,
    )  # fmt: skip
    evaluation = EvaluationWindows(run.held_out, settings.length, settings.eval_windows)
    if settings.gradient_checkpointing:
        # transformers 5.23 gave it this name; before it was the other.
        name = "activation_checkpointing_enable"
        getattr(run.model, name, run.model.gradient_checkpointing_enable)()
    trainer = RunTrainer(
        model=run.model,
        args=arguments(
            settings, folder, run.device, per_device_train_batch_size=1, per_device_eval_batch_size=1,
            weight_decay=settings.weight_decay,
        ),
        run_id=run.run_id,
        keep=settings.keep_checkpoints,
        lease=run.lease,
        left=run.start.left.keys(),
        training=training,
        evaluation=evaluation,
        data_collator=_one_batch,
        bytes_per_token=run.bytes_per_token,
    )  # fmt: skip
    checkpoint = run.start.checkpoint
    step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    trainer.add_callback(Metrics(folder, step, lambda done: training.tokens_after(done) * run.bytes_per_token))
    with Interruption(trainer.accelerator) as interruption, Bar(run.console, training.tokens_after) as bar:
        trainer.add_callback(bar)
        trainer.add_callback(interruption)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    done = trainer.state.global_step
    if done == settings.steps:
        with trainer.writing("the trained model"):
            _finish(run, record)
    return ExtensionOutcome(
        run=folder, step=done, own_length=run.own_length, length=settings.length,
        stopped_by=interruption.signal if done < settings.steps else None,
        bits_per_byte={
            state: {int(context): bits for context, bits in entry["bits_per_byte"].items()}
            for state, entry in record["measured"].items()
        },
    )  # fmt: skip


def _one_batch(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What is drawn is a batch already; a window of the evaluation becomes one."""
    (item,) = items
    return item if item["input_ids"].dim() == 2 else {name: tensor[None] for name, tensor in item.items()}


def _finish(run: _Run, record: dict[str, Any]) -> None:
    from .context_measure import draw_positions

    _measure(run, "trained", record)
    run.lease.check()
    write_text(run.folder / SETTINGS_NAME, sealed(record))
    names = ("before", "after replacement", "after training on")
    curves = {name: _curve(record, state) for name, state in zip(names, STATES, strict=True)}
    draw_positions(run.folder / PICTURE_NAME, curves, run.own_length)
    run.model.config.get_text_config().use_cache = record["model"]["use_cache"]
    run.lease.check()
    save_finished(run.model, run.folder, run_id=run.run_id, step=run.settings.steps)
