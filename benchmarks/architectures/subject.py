"""A small model of one kind with random weights, and inputs that it takes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import candidates
from .kinds import Kind, config_classes_of, model_class
from .reference import CountsInSoftmax, enter_tables
from .sizes import PARAMETERS, number_of_parameters, small_config
from .special import CHANGES

LEVELS = ("tiny", "shallow", "default")
DENSE = ("eager", "sdpa")
"""Few models have the second alone, or take their masks by it alone."""
SEARCH_SECONDS = 1.5
"""Of the processor's time: no longer are inputs tried with a configuration."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Models round to float32 in places, whatever their dtype is."""


class NotBuilt(Exception):
    """No small model of this kind runs here, dense."""


@dataclass(slots=True)
class Subject:
    """A kind of model that runs dense: how to build it, and with what it is called."""

    kind: Kind
    level: str
    dtype: torch.dtype
    number: int
    inputs: dict[str, Any]
    weights: dict[str, Tensor]
    dense: str = DENSE[0]
    """The attention of transformers' own under which it runs."""

    def config(self) -> Any:
        """A fresh configuration."""
        return _config(self.kind, self.level)

    def model(self, attention: Any, config: Any = None) -> Any:
        """A model with the weights of all, in evaluation mode."""
        model = _build(self.kind, config or self.config(), attention, self.dtype)
        model.load_state_dict(self.weights, strict=False)
        return model.eval()


def _config(kind: Kind, level: str) -> Any:
    config = small_config(config_classes_of(kind.model_type), level, CHANGES)
    if kind.is_decoder:
        config.is_decoder = True
    return config


def _build(kind: Kind, config: Any, attention: Any, dtype: torch.dtype | None) -> Any:
    seed()
    of_kind = model_class(kind)
    enter_tables()
    model = of_kind._from_config(config, attn_implementation=attention)
    return model if dtype is None else model.to(dtype)


def find_subject(kind: Kind, recipe: list[Any] | None) -> Subject:
    if recipe is not None:
        try:
            return _search(kind, recipe)
        except NotBuilt:
            pass
    return _search(kind, None)


def _search(kind: Kind, recipe: list[Any] | None) -> Subject:
    """A model of this kind that runs dense, and inputs that it takes."""
    problems: dict[str, str] = {}
    for level in LEVELS if recipe is None else [recipe[0]]:
        for dense in DENSE if recipe is None else recipe[3:] or DENSE[:1]:
            subject = _search_level(kind, level, dense, recipe, problems)
            if subject is not None:
                return subject
    raise NotBuilt(" | ".join(f"{level}: {problem}" for level, problem in problems.items()))


def _search_level(
    kind: Kind, level: str, dense: str, recipe: list[Any] | None, problems: dict[str, str]
) -> Subject | None:
    """The same of one size, under one attention; what goes wrong first is noted among the problems."""
    wants_float32 = recipe is not None
    for dtype in (torch.float64, torch.float32) if recipe is None else [getattr(torch, recipe[1])]:
        if dtype is torch.float32 and not wants_float32:
            continue
        try:
            size = number_of_parameters(partial(_build, kind, _config(kind, level), dense, None))
            if size > PARAMETERS:
                problems.setdefault(level, f"{size / 1e6:.0f} million parameters")
                break
            model = _build(kind, _config(kind, level), dense, dtype).eval()
        except Exception as error:  # noqa: BLE001 - a model that is not built is a row that says why
            problems.setdefault(level, _short(error))
            break
        _draw_weights(model)
        begun = time.process_time()
        for number, inputs in enumerate(candidates(model)):
            if recipe is not None and number != recipe[2]:
                continue
            if time.process_time() - begun > SEARCH_SECONDS:
                break
            cast = {name: _cast(value, dtype) for name, value in inputs.items()}
            try:
                out = call(model, cast)
            except Exception as error:  # noqa: BLE001 - the next inputs are tried
                wants_float32 |= any(word in str(error) for word in ("dtype", "Double", "float", "Float"))
                problems.setdefault(level, f"{', '.join(inputs)}: {_short(error)}")
                continue
            if not out or not all(bool(tensor.isfinite().any()) for tensor in out):
                problems.setdefault(level, f"{', '.join(inputs)}: no finite results")
                wants_float32 = True
                continue
            return Subject(kind, level, dtype, number, cast, model.state_dict(), dense)
    return None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The same with its floats of one dtype, within lists and dictionaries too."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(one, dtype) for name, one in value.items()}
    return type(value)(_cast(one, dtype) for one in value) if isinstance(value, (list, tuple)) else value


def _short(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/transformers/" in frame.filename]
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}{place}"


@torch.no_grad()
def _draw_weights(model: nn.Module) -> None:
    """Weights with which attention has something to say: nothing that is zero at first stays so."""
    generator = torch.Generator().manual_seed(2)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for _, parameter in sorted(model.named_parameters()):
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        if parameter.dim() < 2:
            parameter.add_(noise, alpha=0.1)
        elif id(parameter) in embeddings:
            parameter.copy_(noise)
        else:
            fan_in = parameter[0].numel() if parameter.dim() != 3 else max(parameter.shape[1:])
            parameter.copy_(noise * (1.5 / max(fan_in, 1) ** 0.5))


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Largest difference relative to the largest entry; infinite where shapes or what is finite differ."""
    if len(one) != len(other) or any(a.shape != b.shape for a, b in zip(one, other, strict=True)):
        return float("inf")
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        if not a.numel():
            continue
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, torch.zeros_like(a), (a - b).abs())
        size = b[b.isfinite()].abs().max() if b.isfinite().any() else torch.ones(())
        largest = max(largest, float((difference / size.clamp(min=1e-9)).nan_to_num(nan=float("inf")).max()))
    return largest


def seed() -> None:
    torch.manual_seed(11)


def call(model: Any, inputs: dict[str, Any], *, grad: bool = False) -> list[Tensor]:
    """What the model gives: every tensor of numbers but the caches. Inputs that it changes are made by functions."""
    seed()
    with torch.set_grad_enabled(grad), CountsInSoftmax(model):
        out = model(**{name: value(model) if callable(value) else value for name, value in inputs.items()})
    return list(_tensors(out))


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield out
    elif isinstance(out, dict):
        for name, value in out.items():
            if "past" not in name and "cache" not in name and "rnn" not in name and "state_dict" not in name:
                yield from _tensors(value)
    elif isinstance(out, (list, tuple)):
        for value in out:
            yield from _tensors(value)


def text_config(config: Any) -> Any:
    """That of the text part, or the whole where there is none or where there are two."""
    try:
        return config.get_text_config()
    except ValueError:
        return config
