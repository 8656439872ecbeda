"""Patterns as a person writes them: ``local_window(127) + global_tokens(4)``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from .blocks import global_tokens, hierarchical, local_window, random_blocks, strided_blocks
from .dilated import DilatedPattern
from .pattern import Pattern

_CALLS: dict[str, Callable[..., Pattern]] = {
    "DilatedPattern": DilatedPattern,
    "global_tokens": global_tokens,
    "hierarchical": hierarchical,
    "local_window": local_window,
    "random_blocks": random_blocks,
    "strided_blocks": strided_blocks,
}
NAMES: Sequence[str] = tuple(_CALLS)
"""What an expression may call."""


def pattern_from_expression(text: str) -> Pattern:
    """The pattern of a sum of calls with plain numbers, lists and strings, written as in Python. Nothing is executed.

    Raises:
        ValueError: the text is no such sum, or a call refuses its arguments; the message says where.

    >>> pattern_from_expression("strided_blocks(4, block_size=8) + DilatedPattern([256], [2])").density(1024)
    0.3125
    """
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no sum of patterns ({error.msg}); write for example {_EXAMPLE}") from None
    return _pattern(parsed, text)


_EXAMPLE = '"local_window(127) + global_tokens(4) + DilatedPattern([2048, 4096], [1, 2])"'


def _pattern(node: ast.expr, text: str) -> Pattern:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left, text) + _pattern(node.right, text)
    part = ast.get_source_segment(text.strip(), node) or text
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in _CALLS:
        raise ValueError(
            f"expected a sum of calls of {', '.join(NAMES)}, got {part!r}; write for example {_EXAMPLE}"
        )  # fmt: skip
    try:
        arguments = [ast.literal_eval(argument) for argument in node.args]
        keywords: dict[str, Any] = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        return _CALLS[node.func.id](*arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{part}: {error}") from error
