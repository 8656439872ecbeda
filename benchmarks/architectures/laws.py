"""Laws that a model under a pattern keeps where the dense model keeps them; each returns the names of those shown."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from . import reference
from .drawing import draw_tokens
from .inputs import ROWS, TOKENS
from .outcome import NotedRefusal, SortedErrors, Wrong
from .subject import TOLERANCE, Subject, call, distance, seed, text_config

KEYWORDS = (
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "return_loss",
    "token_type_ids",
    "special_tokens_mask",
    "length",
    "seq_idx",
)
"""What Trainer, collators and tokenizers pass to a model."""


def gradients(ours: Any, dense: Any, subject: Subject) -> list[str]:
    found = []
    for model in (ours, dense):
        model.zero_grad()
        with torch.enable_grad():
            out = call(model, subject.inputs, grad=True)
            if not any(tensor.requires_grad for tensor in out):
                return []
            loss = torch.stack([(tensor * _like(tensor)).sum() for tensor in out if tensor.requires_grad]).sum()
            with SortedErrors():
                loss.backward()
        found.append([p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None])
        if model is ours and not all(bool(grad.isfinite().all()) for grad in found[0]):
            raise Wrong("a gradient is not finite")
    if len(found[0]) != len(found[1]):
        raise Wrong(f"{len(found[0])} weights have a gradient, of the reference {len(found[1])}")
    error = max(
        (distance([a], [b]) for a, b in zip(*found, strict=True) if b.numel() and b.abs().max() > 1e-3), default=0.0
    )
    if error > 100 * TOLERANCE[subject.dtype]:
        raise Wrong(f"gradients are {error:.1e} off the reference")
    return ["gradients"]


def _like(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5), dtype=tensor.dtype)


def causality(ours: Any, dense: Any, subject: Subject) -> list[str]:
    """Where a later token changes nothing of the dense model before it, it must not here."""
    name = _tokens_name(subject)
    if name is None:
        return []
    changed = dict(subject.inputs)
    changed[name] = subject.inputs[name].clone()
    changed[name][:, -1] = (changed[name][:, -1] - 79) % 50 + 80
    differences = []
    for model in (dense, ours):
        before, after = (_along_tokens(call(model, given), subject, name) for given in (subject.inputs, changed))
        if before is None or after is None:
            return []
        differences.append(distance([before[:, :-1]], [after[:, :-1]]))
    if differences[0] > TOLERANCE[subject.dtype]:
        return []
    if differences[1] > TOLERANCE[subject.dtype]:
        raise Wrong(f"a later token changes earlier results by {differences[1]:.1e}")
    return ["causal"]


def padding(ours: Any, dense: Any, subject: Subject) -> list[str]:
    """Where a padded row of the dense model equals the row alone, it must here."""
    parameters = inspect.signature(ours.forward).parameters
    if "input_ids" not in subject.inputs or "attention_mask" not in parameters or subject.inputs["input_ids"].dim() > 2:
        return []
    tokens = subject.inputs["input_ids"]
    length, pad, found = tokens.shape[1], 7, []
    for side, real in (("right", slice(0, length - pad)), ("left", slice(pad, length))):
        mask = torch.zeros_like(tokens)
        mask[:, real] = 1
        filled = torch.where(mask.bool(), tokens, getattr(text_config(ours.config), "pad_token_id", 0) or 0)
        padded = {**subject.inputs, "input_ids": filled, "attention_mask": mask}
        alone = {**subject.inputs, "input_ids": tokens[:, real], "attention_mask": mask[:, real]}
        if "position_ids" in parameters and side == "left":
            padded["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        for name in ("bbox",):
            if name in alone:
                alone[name] = alone[name][:, real]
        try:
            with reference.without_counts():
                holds = _padded_distance(dense, padded, alone, subject, real) < TOLERANCE[subject.dtype]
        except Exception:  # noqa: BLE001 - the dense model does not take a mask in this way
            continue
        if not holds:
            continue
        with NotedRefusal() as outcome:
            error = _padded_distance(ours, padded, alone, subject, real)
        if outcome.refused:
            found.append(f"padding on the {side} refused")
            continue
        if error > TOLERANCE[subject.dtype]:
            raise Wrong(f"rows padded on the {side} are {error:.1e} off the rows alone")
        found.append(f"padding on the {side}")
    return found


def _padded_distance(model: Any, padded: Any, alone: Any, subject: Subject, real: slice) -> float:
    name = "decoder_input_ids" if "decoder_input_ids" in subject.inputs else "input_ids"
    full, part = call(model, padded), call(model, alone)
    if name == "decoder_input_ids":
        first, second = (_first_of_length(out, subject.inputs[name].shape[1]) for out in (full, part))
    else:
        first = _first_of_length(full, padded["input_ids"].shape[1])
        first = None if first is None else first[:, real]
        second = _first_of_length(part, alone["input_ids"].shape[1])
    if first is None or second is None or first.shape != second.shape:
        raise ValueError("results are not along tokens")
    return distance([first], [second])


def generation(ours: Any, dense: Any, subject: Subject) -> list[str]:
    """Text from a cache equals text without one, where it does for the dense model."""
    if not ours.can_generate() or "input_ids" not in subject.inputs or subject.inputs["input_ids"].dim() > 2:
        return []
    prompt = draw_tokens(2, 13, seed=3)
    others = {name: value for name, value in subject.inputs.items() if name in ("pixel_values", "bbox")}
    if ours.config.is_encoder_decoder and "labels" in inspect.signature(ours.forward).parameters:
        others["labels"] = prompt  # as Seq2SeqTrainer does

    def text(model: Any, use_cache: bool) -> list[Tensor]:
        seed()
        made = model.generate(
            prompt,
            **others,
            max_new_tokens=5,
            min_new_tokens=5,
            do_sample=False,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_logits=True,
            num_beams=1,
        )
        return [made.sequences, *made.logits]

    try:
        with reference.without_counts():
            with_cache, without = text(dense, True), text(dense, False)
    except Exception:  # noqa: BLE001 - whatever it is, the dense model does not generate from tokens alone
        return []
    if not _same_text(with_cache, without, subject):
        return []
    with NotedRefusal() as outcome:
        with_cache, without = text(ours, True), text(ours, False)
    if outcome.refused:
        return ["generation refused"]
    if not _same_text(with_cache, without, subject):
        error = distance(with_cache[1:], without[1:])
        raise Wrong(f"generation from a cache differs from generation without one by {error:.1e}")
    return ["cached generation"]


def keywords(ours: Any, dense: Any, subject: Subject) -> list[str]:
    """What trainers and tokenizers pass besides the inputs changes nothing where the dense model ignores it.

    Not named in the table: it holds for every model.
    """
    parameters = inspect.signature(ours.forward).parameters
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    before, passed = call(dense, subject.inputs), {}
    for name in KEYWORDS:
        one = {name: draw_tokens(ROWS, TOKENS)}
        try:
            if name not in parameters and distance(call(dense, {**subject.inputs, **one}), before) == 0.0:
                passed.update(one)
        except Exception:  # noqa: BLE001 - the dense model does not take it
            continue
    with NotedRefusal() as outcome:
        after = call(ours, {**subject.inputs, **passed})
    if "does not honour" in outcome.refused:
        raise Wrong(outcome.refused)
    # A keyword may also make a mask that is refused.
    if not outcome.refused and distance(after, call(ours, subject.inputs)) > 0.0:
        raise Wrong(f"{', '.join(passed)} change results")
    return []


def _same_text(one: list[Tensor], other: list[Tensor], subject: Subject) -> bool:
    return torch.equal(one[0], other[0]) and distance(one[1:], other[1:]) < TOLERANCE[subject.dtype]


def _tokens_name(subject: Subject) -> str | None:
    for name in ("decoder_input_ids", "input_ids"):
        if name in subject.inputs and subject.inputs[name].dim() == 2:
            return name
    return None


def _along_tokens(out: list[Tensor], subject: Subject, name: str) -> Tensor | None:
    return _first_of_length(out, subject.inputs[name].shape[1])


def _first_of_length(out: list[Tensor], length: int) -> Tensor | None:
    return next((tensor for tensor in out if tensor.dim() >= 3 and tensor.shape[1] == length), None)
