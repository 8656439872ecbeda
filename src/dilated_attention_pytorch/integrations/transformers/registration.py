"""Registration of attention, masks and the construction hook with transformers."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from dilated_attention_pytorch.installation import importing

from .attention import dilated_attention_forward
from .config import FIELD, NAME, keep_implementation
from .layers import watch
from .mask import documents_mask
from .names import names_to_build

_SEEN = "_seen_being_built"
_HOOKS: list[Any] = []


def register() -> None:
    """Make ``attn_implementation="dilated"`` available to every transformers model that uses its attention interface.

    ``O[p] = sum_t c[p, t] exp(s[p, t]) v[t] / sum_t c[p, t] exp(s[p, t])`` with the pattern's count c replaces
    the model's dense attention; weights, positions and caches are the model's own. It applies to models built or
    loaded with ``attn_implementation="dilated"``, or after ``model.set_attn_implementation("dilated")``. The
    pattern is set by :func:`set_pattern` or ``config.dilated_attention``; a layer without one raises. Idempotent.

    Soft-capped scores, sinks and biases by distance are the model's own, see :class:`Scores`. Masks of four dimensions
    are honoured where they are padding, documents, a causal sequence, a prefix or a window. Unsupported features raise
    ``NotImplementedError`` or ``ValueError`` by name: other masks, other biases, keys chosen by content, paged caches,
    returned attention weights.

    Raises:
        ImportError: transformers is not installed, or cannot be imported.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from dilated_attention_pytorch import DilatedPattern
    >>> from dilated_attention_pytorch.integrations import register, set_pattern
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, attn_implementation="dilated",
    ... )
    >>> model = set_pattern(LlamaForCausalLM(config), DilatedPattern([16, 64], [1, 4]))
    >>> model(torch.randint(97, (2, 100))).logits.shape
    torch.Size([2, 100, 97])
    """
    with importing("register()", "train"):
        from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(NAME, dilated_attention_forward)
    AttentionMaskInterface.register(NAME, documents_mask)
    if not _HOOKS:
        # A hook of PyTorch, since transformers has none, and a model that bypasses its attention interface never calls
        # this package. It sees every transformers model when its first submodule is added.
        _HOOKS.append(register_module_module_registration_hook(_see))
    from dilated_attention_pytorch.models import causal_lm  # noqa: F401 - makes LongNet's classes known to AutoModel


def _see(module: nn.Module, name: str, part: nn.Module) -> None:
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel) or _SEEN in vars(module) or "config" not in vars(module):
        return
    setattr(module, _SEEN, True)
    config = module.config
    keep_implementation(config)
    has_pattern = getattr(config, FIELD, None) is not None
    if config._attn_implementation == NAME:
        _enter_tables(type(module))
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


def _enter_tables(kind: Any) -> None:
    """Let a model that looks its attention class up in a table find that of "eager" under our name.

    Its layers compute attention themselves; see :func:`write_under_pattern`.
    """
    table = _table_of(kind)
    if table is not None:
        table.setdefault(NAME, table["eager"])


@functools.cache
def _table_of(kind: Any) -> dict[str, Any] | None:
    """The table from which a class, or one that its constructor names, takes its attention class."""
    todo: list[Any] = [kind]
    done: set[Any] = set()
    while todo:
        current = todo.pop()
        if not _is_module(current) or current.__module__ != kind.__module__ or current in done:
            continue
        done.add(current)
        for _, value in names_to_build(current):
            if not isinstance(value, dict):
                todo.append(value)
                continue
            if "eager" in value and all(map(_is_module, value.values())):
                return value
            todo += value.values()
    return None


def _is_module(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
