"""Pattern expressions such as ``local_window(127) + global_tokens(4)``, parsed and written."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .blocks import BlockPattern, global_tokens, hierarchical, local_window, per_head, random_blocks, strided_blocks
from .dilated import DilatedPattern, SegmentedPattern
from .pattern import Pattern, PatternSum
from .spec import pattern_from_spec

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


def pattern_from_text(text: str) -> Pattern:
    """The pattern of an expression or of a :attr:`Pattern.spec`.

    Raises:
        ValueError: the text is neither.
    """
    if not text.startswith("["):
        return pattern_from_expression(text)
    try:
        return pattern_from_spec(text)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{text!r:.200} is not the spec of a pattern ({error}); write for example {_EXAMPLE}"
        ) from None


def text_of(pattern: Pattern) -> str:
    """The text that :func:`pattern_from_text` parses as ``pattern``: an expression, or its spec if it has none.

    A mask of blocks and a pattern that was restricted to some heads have no expression.

    >>> from dilated_attention_pytorch.patterns.expression import text_of
    >>> text_of(per_head([local_window(7), strided_blocks(2)]) + DilatedPattern([256], [2]))
    'per_head([local_window(7), strided_blocks(2, block_size=128)]) + DilatedPattern([256], [2])'
    """
    summands = pattern.patterns if isinstance(pattern, PatternSum) else (pattern,)
    text = " + ".join(
        term
        for num_parts, run in itertools.groupby(summands, key=_num_parts)
        for term in ([_per_head(run, num_parts)] if num_parts > 1 else map(repr, run))
    )
    try:
        is_read_back = pattern_from_expression(text) == pattern
    except ValueError:
        return pattern.spec
    return text if is_read_back else pattern.spec


def _num_parts(pattern: Pattern) -> int:
    """The number of patterns in the list of ``per_head`` that a summand comes from; 1 for a pattern of all heads."""
    return pattern.rule.part[1] if isinstance(pattern, BlockPattern) else 1


def _per_head(summands: Iterable[Pattern], num_parts: int) -> str:
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    for summand in summands:
        assert isinstance(summand, BlockPattern)
        parts[summand.rule.part[0]].append(repr(summand.rule.rule))
    return f"per_head([{', '.join(' + '.join(part) for part in parts)}])"


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
