"""Keywords of the earlier packages' modules: renamed, dropped or rejected with advice."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec

_P = ParamSpec("_P")

RENAMED = {
    "attention_dropout": "dropout",
    "layer_norm": "sub_layernorm",
    "layer_norm_eps": "layernorm_eps",
    "gamma_init": "gain",
}
"""Old keywords and their current names."""


class Unneeded(NamedTuple):
    """An old keyword for a feature that does not exist here or has moved.

    Values in ``off`` disable the feature: the keyword is dropped. Any other value raises with ``instead``.
    """

    off: tuple[object, ...]
    instead: str


_OFF = (False, None)
_POOL = "PyTorch's allocator does what a memory pool did; leave it out"
_CONFIG = "sizes, lengths and rates are arguments: embed_dim=, num_heads=, segment_lengths=, dilation_rates="
_BACKEND = "no other package computes here; impl= picks the kernels, and no choice changes the result"
_RECOMPUTE = (
    "attention keeps no scores for its backward; to recompute whole blocks call torch.utils.checkpoint.checkpoint, or "
    "LongNetLM.gradient_checkpointing_enable()"
)
_SPARSE = "a pattern says which keys a query sees: PatternAttention(local_window(255) + global_tokens(4))"
_SEGMENTS = "DynamicDilatedAttention(SegmentSelectionConfig({name}={value!r})) takes it"

UNNEEDED: Mapping[str, Unneeded] = {
    **dict.fromkeys(
        ("enable_memory_pool", "use_memory_pool", "lightweight_pool", "enable_buffer_manager"), Unneeded(_OFF, _POOL)
    ),
    **dict.fromkeys(("multihead_config", "attention_config"), Unneeded((None,), _CONFIG)),
    "use_pattern_cache": Unneeded(
        _OFF, "what a pattern needs is worked out once for every length and kept anyway; leave it out"
    ),
    "enable_profiling": Unneeded(_OFF, "torch.profiler.profile measures a call; leave it out"),
    **dict.fromkeys(("use_xformers", "use_flex_attention", "use_flash_attention"), Unneeded(_OFF, _BACKEND)),
    "op": Unneeded((None,), f"operators of xformers are not used: {_BACKEND}"),
    "use_tf32": Unneeded((None,), 'torch.set_float32_matmul_precision("high") allows it, for the whole process'),
    **dict.fromkeys(("use_checkpointing", "use_gradient_checkpointing"), Unneeded(_OFF, _RECOMPUTE)),
    "block_size": Unneeded(
        (None,),
        "kernels choose their tiles, and rows travel in shards; blocks of positions belong to a pattern, as in "
        "strided_blocks(stride, block_size=64), and to AdaptiveBlockAttention",
    ),
    "ring_size": Unneeded((None,), "parallel.RingDilatedAttention and parallel.RingMultiheadDilatedAttention take it"),
    **dict.fromkeys(("min_segment_size", "max_segment_size"), Unneeded((None,), _SEGMENTS)),
    **dict.fromkeys(("sparsity_ratio", "sparse_config", "sparsity_config", "pattern_type"), Unneeded((None,), _SPARSE)),
    **dict.fromkeys(
        ("min_sparsity", "max_sparsity"),
        Unneeded((None,), "blocks_per_query of AdaptiveBlockAttention says how many blocks a query sees"),
    ),
    **dict.fromkeys(
        ("device", "dtype"),
        Unneeded((None,), "the module has no parameters: the result has device and dtype of the inputs; leave it out"),
    ),
    "batch_first": Unneeded((True,), "the batch is the first axis here: transpose the inputs"),
}


def answers_old_keywords(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate a module's ``__init__`` to accept old keywords with a DeprecationWarning, or to reject them with advice.

    Keywords that belong to a parent's ``__init__`` are passed on to it.

    Raises:
        TypeError: an old keyword together with its current name, or one for a feature that this module does not have.
        ValueError: an old keyword with a value that requests a feature that does not exist here.
    """
    parameters = inspect.signature(init).parameters
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(init)
    def answering(*args: _P.args, **options: _P.kwargs) -> None:
        given: dict[str, Any] = dict(options)
        for name in [name for name in options if name not in parameters]:
            module = type(args[0]).__name__
            if name in RENAMED and (RENAMED[name] in parameters or not hands_on):
                _rename(given, name, RENAMED[name] in parameters, module)
            elif name in UNNEEDED and not hands_on:
                _drop(given, name, module)
        init(*args, **given)  # unknown keywords raise Python's own TypeError

    return answering


def _rename(given: dict[str, Any], name: str, is_there: bool, module: str) -> None:
    today = RENAMED[name]
    if not is_there:
        raise TypeError(
            f"{name} is {today} today, a keyword of modules with projections such as MultiheadDilatedAttention; "
            f"{module} has none: leave it out, got {name}={given[name]!r}"
        )
    if today in given:
        raise TypeError(f"{name} is the old name of {today}: pass {today} alone, got both")
    given[today] = given.pop(name)
    _warn(f"{name} is the old name; write {today}={given[today]!r}")


def _drop(given: dict[str, Any], name: str, module: str) -> None:
    value = given.pop(name)
    off, instead = UNNEEDED[name]
    if not any(value is nothing for nothing in off):
        asks = " or ".join(map(repr, off))
        raise ValueError(
            f"{name} of {module} must be {asks} or left out, got {value!r}: {instead.format(name=name, value=value)}"
        )
    _warn(f"{name}={value!r} is an old keyword that asks for nothing; leave it out")


def _warn(message: str) -> None:
    """Attribute the warning to the first caller outside the package."""
    level, package = 1, __name__.partition(".")[0]
    while sys._getframe(level).f_globals.get("__name__", "").partition(".")[0] == package:
        level += 1
    warnings.warn(message, DeprecationWarning, stacklevel=level + 1)
