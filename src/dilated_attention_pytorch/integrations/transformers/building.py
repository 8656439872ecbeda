"""A hook on the construction of transformers models with a pattern."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .config import FIELD, NAME, keep_implementation
from .layers import watch
from .names import names_to_build

_SEEN = "_seen_being_built"
_HOOKS: list[Any] = []


def watch_building() -> None:
    """Install a hook that sees every transformers model when its first submodule is added. Idempotent.

    A hook of PyTorch, since transformers has none, and a model that bypasses its attention interface never calls this
    package.
    """
    if not _HOOKS:
        _HOOKS.append(register_module_module_registration_hook(_see))


def _see(module: nn.Module, name: str, part: nn.Module) -> None:
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel) or _SEEN in vars(module) or "config" not in vars(module):
        return
    setattr(module, _SEEN, True)
    config = module.config
    keep_implementation(config)
    has_pattern = getattr(config, FIELD, None) is not None
    if config._attn_implementation == NAME:
        _check_tables(type(module))
        watch(module)
    elif has_pattern:
        watch(module)
        if any(isinstance(inner, PreTrainedModel) and inner.config is config for inner in part.modules()):
            return  # reported for the inner model
        warnings.warn(
            f'{type(module).__name__} has a pattern in config.dilated_attention and attends to everything ("'
            f'{config._attn_implementation}"): pass attn_implementation="dilated", or call set_pattern, which saves '
            "that choice with the model",
            stacklevel=4,
        )


def _check_tables(kind: Any) -> None:
    """Raise for a model that looks its attention class up in a table, where our name would give a KeyError."""
    found = _table_of(kind)
    if found is not None:
        name, implementations = found
        raise NotImplementedError(
            f"{kind.__name__} does not use transformers' attention interface, through which a layer gets its pattern: "
            f"it has attention of its own for each of {', '.join(implementations)} ({name}). Use one of them for this "
            "model, without a pattern"
        )


@functools.cache
def _table_of(kind: Any) -> tuple[str, tuple[str, ...]] | None:
    """Name and keys of the table from which a class, or one that its constructor names, takes its attention class."""
    todo: list[Any] = [kind]
    done: set[Any] = set()
    while todo:
        one = todo.pop()
        if not _is_module(one) or one.__module__ != kind.__module__ or one in done:
            continue
        done.add(one)
        for name, value in names_to_build(one):
            if not isinstance(value, dict):
                todo.append(value)
                continue
            if "eager" in value and NAME not in value and all(map(_is_module, value.values())):
                return name, tuple(value)
            todo += value.values()
    return None


def _is_module(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
