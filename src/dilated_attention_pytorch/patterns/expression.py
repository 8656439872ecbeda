"""The parser of pattern expressions such as ``local_window(127) + global_tokens(4)``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from .blocks import global_tokens, hierarchical, local_window, per_head, random_blocks, strided_blocks
from .dilated import DilatedPattern, SegmentedPattern
from .pattern import Pattern, PatternSum

_CALLS: dict[str, Callable[..., Pattern]] = {
    "DilatedPattern": DilatedPattern,
    "SegmentedPattern": SegmentedPattern,
    "global_tokens": global_tokens,
    "hierarchical": hierarchical,
    "local_window": local_window,
    "per_head": per_head,
    "random_blocks": random_blocks,
    "strided_blocks": strided_blocks,
}
NAMES: Sequence[str] = tuple(_CALLS)
"""Names of the functions that an expression may call."""


def pattern_from_expression(text: str) -> Pattern:
    """Parse a sum of pattern constructors with literal arguments, in Python syntax. Nothing is executed.

    The list argument of ``per_head`` holds such sums.

    Raises:
        ValueError: the text is not such a sum, or a constructor rejects its arguments; the message gives the place.

    >>> pattern_from_expression("strided_blocks(4, block_size=8) + DilatedPattern([256], [2])").density(1024)
    0.3125
    """
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{text!r:.200} is not a sum of patterns ({reason}); write for example {_EXAMPLE}") from None
    return _pattern(parsed, text)


_EXAMPLE = '"local_window(127) + global_tokens(4) + DilatedPattern([2048, 4096], [1, 2])"'


def _pattern(node: ast.expr, text: str) -> Pattern:
    terms: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms.append(node.right)
        node = node.left
    if terms:
        return PatternSum(tuple(_pattern(term, text) for term in (node, *reversed(terms))))
    part = _source(node, text)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in _CALLS:
        raise ValueError(f"expected a sum of calls of {', '.join(NAMES)}, got {part!r}; write for example {_EXAMPLE}")
    of_patterns = node.func.id == "per_head"
    arguments = [_argument(argument, text, part, of_patterns=of_patterns) for argument in node.args]
    keywords: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(_no_plain_argument(part, f"**{_source(keyword.value, text)}"))
        keywords[keyword.arg] = _argument(keyword.value, text, part, of_patterns=of_patterns)
    try:
        return _CALLS[node.func.id](*arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{part}: {error}") from error


def _argument(node: ast.expr, text: str, part: str, *, of_patterns: bool) -> Any:
    if of_patterns and isinstance(node, (ast.List, ast.Tuple)):
        return [_pattern(one, text) for one in node.elts]
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(_no_plain_argument(part, _source(node, text))) from None


def _source(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text.strip(), node) or text


def _no_plain_argument(part: str, argument: str) -> str:
    return (
        f"{part}: arguments must be literal numbers, lists and strings (only per_head takes a list of "
        f"patterns), got {argument!r}"
    )
