"""Plan for a model of transformers under a pattern: memory, operations and time, from its configuration alone."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.errors import RunError, first_line
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.training.autocast import autocast, computing_dtype
from dilated_attention_pytorch.training.run_settings import AdamW

from .attention import operator_bytes
from .flops import PassFlops, StepWork, pretrained_flops
from .generation import Generation, walk
from .live_bytes import LiveBytes, Moment
from .memory import LEAST_MOMENTS, Footprint, parts_of, peak
from .run import Device, MemoryPlan, Purpose, RunPlan, check_precision, plan_of_work

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedRun:
    """A model of transformers, and a run with it in one process.

    Raises:
        RunError: a number is below 1.
    """

    config: PreTrainedConfig
    pattern: Pattern
    length: int
    batch_size: int = 1
    precision: str = "bfloat16"
    """Precision of products and attention. Weights are in float32, except for generation, where they have it, too."""
    optimizer: AdamW = "adamw"
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "batch_size"):
            if getattr(self, name) < 1:
                raise RunError(f"{name} must be at least 1, got {getattr(self, name)}")


def read_config(path: Path) -> PreTrainedConfig:
    """Read the configuration of a model of transformers: a folder with config.json, or that file.

    Raises:
        RunError: there is no such file, or it describes no causal language model of transformers.
    """
    from transformers import AutoConfig

    from dilated_attention_pytorch.integrations.transformers.config import configuration_errors

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise RunError(f"--model {path}: there is no file {file}; name a folder with config.json, or that file")
    refusals: tuple[type[Exception], ...] = (ValueError, OSError, *configuration_errors())
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or "model_type" not in values:
            raise ValueError("it has no model_type")
        return AutoConfig.for_model(**values)
    except refusals as error:
        raise RunError(f"--model {path}: {file} describes no model of transformers ({error})") from error


def _build(run: PretrainedRun, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model with its pattern; under fake tensors its weights hold no data."""
    from transformers import AutoModelForCausalLM

    from dilated_attention_pytorch.integrations import register, set_pattern
    from dilated_attention_pytorch.integrations.transformers.config import configuration_errors

    register()
    refusals: tuple[type[Exception], ...] = (NotImplementedError, *configuration_errors())
    try:
        # Other implementations than "eager" are refused by fake tensors in words of theirs.
        model = AutoModelForCausalLM.from_config(run.config, dtype=dtype, experts_implementation="eager")
        return set_pattern(model, run.pattern)
    except refusals as error:
        reason = first_line(error)
        raise RunError(f"--model: {run.config.model_type} cannot be planned under {run.pattern!r}: {reason}") from error


@contextlib.contextmanager
def _fake_tensors(run: PretrainedRun) -> Iterator[None]:
    """Context in which tensors have shapes and no values.

    Raises:
        RunError: the model needs values.
    """
    try:
        with FakeTensorMode():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RunError(
            f"--model: {run.config.model_type} cannot be planned from its configuration: its layers depend on the "
            f"values of tensors ({error.func}), as with experts chosen by token; measure a step of it instead"
        ) from error


def _recompute_blocks(model: PreTrainedModel) -> None:
    # transformers 6 drops the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def _last_logits(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments with which ``generate`` of transformers has the logits of the last token of a call alone."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def operations(run: PretrainedRun, purpose: Purpose) -> tuple[PassFlops, StepWork]:
    """Operations of a forward pass, and of a step with recomputation or a forward pass, on fake tensors.

    They are those that ``torch.utils.flop_counter`` counts.

    Raises:
        RunError: the model cannot run under the pattern.
    """
    # The model checks whether its mask lets all tokens see the one before; LiveBytes answers for fake tensors.
    with _fake_tensors(run), torch.random.fork_rng(devices=[]), LiveBytes():
        model = _build(run, torch.float32)
        forward = pretrained_flops(model)
        if run.gradient_checkpointing:
            _recompute_blocks(model)
        computed = pretrained_flops(model, is_step=purpose == "training")
    products, attention = computed.per_token * run.length, computed.attention(run.length)
    return forward, StepWork(products * run.batch_size, attention * run.batch_size)


def trace(
    run: PretrainedRun,
    *,
    is_training: bool,
    dtype: torch.dtype = torch.float32,
    is_fake: bool = True,
    is_generating: bool = False,
) -> list[Moment]:
    """Live bytes after every operation of a forward pass with logits, and of the backward pass of its loss.

    Args:
        run: the model and its batch.
        is_training: whether there is a backward pass.
        dtype: dtype of the weights; float32 weights are multiplied in the precision of the run (autocast).
        is_fake: whether to use fake tensors; otherwise everything is computed.
        is_generating: whether only the last token has logits, as in a call of ``generate``.
    """
    live = LiveBytes(own_bytes=operator_bytes)
    with _fake_tensors(run) if is_fake else contextlib.nullcontext(), torch.random.fork_rng(devices=[]), live:
        with live.made_as("weights"):
            model = _build(run, dtype).train(is_training)
        if run.gradient_checkpointing and is_training:
            _recompute_blocks(model)
        options = _last_logits(model) if is_generating else {}
        with live.made_as("temporaries"):
            ids = torch.zeros(run.batch_size, run.length, dtype=torch.int64)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda own: live.mark([own.grad], "gradients"))
        live.phase, live.is_recording = ("forward", 0), True
        with (
            torch.set_grad_enabled(is_training),
            autocast(run.precision if dtype == torch.float32 else "float32", "cpu"),
        ):
            out: Any = model(ids, labels=ids if is_training else None, use_cache=False, **options)
        if is_training:
            live.phase = ("backward", 0)
            out.loss.backward()
    return live.moments


def pretrained_footprint(run: PretrainedRun, purpose: Purpose | Generation) -> Footprint:
    """Peak bytes of one process, by part.

    Training: the model's own forward and backward pass, with the loss of all logits, gradients, and AdamW's states.
    Generation, given by its lengths: a chunk of the prompt, and the bounded cache (``integrations.BoundedCache``), all
    in the precision of the run.
    """
    generation = purpose if isinstance(purpose, Generation) else None
    if generation is not None:
        run = dataclasses.replace(run, length=min(generation.prompt, generation.chunk_size))
    dtype = torch.float32 if generation is None else computing_dtype(run.precision)
    moments = trace(run, is_training=purpose == "training", dtype=dtype, is_generating=generation is not None)
    memory = peak(map(parts_of, moments))
    if purpose == "training":
        return dataclasses.replace(memory, optimizer=LEAST_MOMENTS[run.optimizer] * memory.weights // 4)
    if generation is not None:
        return dataclasses.replace(memory, cache=run.batch_size * dtype.itemsize * _cached_elements(run, generation))
    return memory


def _cached_elements(run: PretrainedRun, generation: Generation) -> int:
    """Elements of keys and values of a text in the bounded cache at the end of a generation."""
    layers = operations(run, "forward")[0].forward
    patterns = tuple(dict.fromkeys(call.pattern for call in layers))
    prompt, new_tokens, chunk = dataclasses.astuple(generation)
    slots = walk(patterns, layers[0].num_kv_heads, prompt, new_tokens, chunk).slots
    return sum(slots[call.pattern] * call.num_kv_heads * (call.head_dim + call.value_dim) for call in layers)


def plan_pretrained(run: PretrainedRun, device: Device, *, purpose: Purpose = "training") -> RunPlan:
    """Plan one process that trains or evaluates a model of transformers under a pattern.

    Seconds are a lower bound: operations at the nominal rate, states at the rate of memory.

    Raises:
        RunError: the model cannot run under the pattern, or the device has no rate for the precision.
    """
    check_precision(run.precision, device.sheet)
    forward, work = operations(run, purpose)
    return plan_of_work(
        purpose,
        device,
        pretrained_footprint(run, purpose),
        work,
        precision=run.precision,
        tokens=run.length * run.batch_size,
        forward_flops=forward.of_text(run.length) * run.batch_size,
    )


def plan_pretrained_generation(run: PretrainedRun, sheet: DataSheet, generation: Generation) -> MemoryPlan:
    """Plan the memory of one process that generates with a model of transformers under a pattern.

    Raises:
        RunError: as :func:`plan_pretrained`.
    """
    check_precision(run.precision, sheet)
    return MemoryPlan(
        purpose="generation",
        footprint=pretrained_footprint(run, generation),
        memory_bytes=sheet.memory_bytes,
        tokens=generation.new_tokens * run.batch_size,
    )
