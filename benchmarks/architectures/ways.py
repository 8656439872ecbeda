"""The ways in which a user would give a model its pattern, and the same of the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.integrations import set_pattern

from . import reference
from .subject import Subject, call, text_config

PATTERN = DilatedPattern(list(reference.LENGTHS), list(reference.RATES))


@dataclass(frozen=True, slots=True)
class Way:
    """What is done before a model is built, and to which part of it the pattern is given."""

    name: str
    """What is done besides ``attn_implementation="dilated"`` and ``set_pattern``."""
    change: Callable[[Any], Any]
    """Changes a configuration and returns what transformers takes as ``attn_implementation``."""
    part: str = ""
    is_partial: bool = False
    """Whether other parts keep an attention of their own."""
    is_set_later: bool = False
    """Whether the model is built with the attention of others."""

    def ours(self, subject: Subject) -> Any:
        """The model under :data:`PATTERN`."""
        config = subject.config()
        model = subject.model(self.change(config), config)
        set_pattern(model.get_submodule(self.part), PATTERN)
        return model

    def reference(self, subject: Subject) -> Any:
        """The same by the second implementation."""
        config = subject.config()
        model = subject.model(_swapped(self.change(config)), config)
        if self.is_set_later:
            part = model.get_submodule(self.part)
            part.set_attn_implementation({"": reference.NAME} if part.config.sub_configs else reference.NAME)
        return model

    def runs_dense(self, subject: Subject) -> bool:
        """Whether the model runs at all with its configuration changed so."""
        config = subject.config()
        self.change(config)
        try:
            call(subject.model(subject.dense, config), subject.inputs)
        except Exception:  # noqa: BLE001 - whatever it is, it has no part of ours
            return False
        return True


def ways(subject: Subject) -> Iterator[Way]:
    """What a user would do, then what the refusals and the docs say to do."""
    config = subject.config()
    yield Way("", lambda config: "dilated")
    if _without_windows(subject.config()):
        yield Way("without the model's own windows", lambda config: _without_windows(config) and "dilated")
    text = text_config(config)
    parts = [name for name in type(config).sub_configs if getattr(config, name) is text]
    if parts:
        alone = {"": subject.dense, **dict.fromkeys(parts, "dilated")}
        yield Way("the text part alone", lambda config: alone, is_partial=True)
        if _without_windows(config):
            name = "the text part alone, without its own windows"
            yield Way(name, lambda config: _without_windows(config) and alone, is_partial=True)
    elif config.sub_configs:
        yield _set_later(subject, "set_pattern(model, pattern)")


def way_of_part(subject: Subject, refusal: str) -> Way | None:
    """The pattern given to the part that a refusal names; None where it names none."""
    found = re.search(r"set_pattern\(model\.([\w.]+), pattern\)", refusal)
    if found is None:
        return None
    return _set_later(subject, found.group(0), found.group(1))


def _set_later(subject: Subject, call: str, part: str = "") -> Way:
    return Way(f"`{call}`", lambda config: subject.dense, part, is_partial=True, is_set_later=True)


def _swapped(attention: Any) -> Any:
    """The reference in place of ours."""
    if isinstance(attention, dict):
        return {part: reference.NAME if value == "dilated" else value for part, value in attention.items()}
    return reference.NAME if attention == "dilated" else attention


def _without_windows(config: Any) -> bool:
    """Take the windows out of a configuration, and say whether it had any."""
    config, found = text_config(config), False
    for name in ("sliding_window", "attention_chunk_size"):
        if vars(config).get(name):
            try:
                setattr(config, name, None)
            except StrictDataclassError:  # it must have one
                return False
            found = True
    types = vars(config).get("layer_types")
    if found and types:
        config.layer_types = ["full_attention" if "sliding" in kind or "chunk" in kind else kind for kind in types]
    return found
