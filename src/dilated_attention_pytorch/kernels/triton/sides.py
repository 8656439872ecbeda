"""The rows that tiles hold, queries or keys, and their division into windows.

Integers only: the kernels of :mod:`.order` and :mod:`.runs` plan the rest on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention_pytorch.patterns.blocks import HeadRule

from .problem import Kind, largest_divisor, next_power_of_2
from .rule_table import RuleTable

LARGEST_WINDOW = 2048
# Bytes of keys and values that one span of windows may touch: a part of the device's cache (50 MB on H100).
_SPAN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Side:
    """The rows of one side, and whether they are ordered within their windows."""

    num_rows: int
    offset: int | None
    """Position of the first row; None if only the device knows it."""
    window: int
    is_ordered: bool

    @property
    def num_windows(self) -> int:
        return -(-self.num_rows // self.window)


def side_of(kind: Kind, rules: RuleTable | None, num_rows: int, offset: int | None, tile_rows: tuple[int, ...]) -> Side:
    """The side with rows from position ``offset`` on, for tiles of any number of rows in ``tile_rows``."""
    window = max(*tile_rows, min([*kind.segment_lengths, num_rows]))
    window = min(max(16, next_power_of_2(window)), LARGEST_WINDOW)
    is_ordered = num_rows > min(tile_rows) and _is_order_worth_it(kind, rules, num_rows, max(tile_rows), window)
    return Side(num_rows, offset, window, is_ordered)


def _is_order_worth_it(kind: Kind, rules: RuleTable | None, num_rows: int, tile_rows: int, window: int) -> bool:
    """Whether tiles of rows that take part in the same groups walk over fewer rows than tiles of consecutive rows.

    An ordered tile walks over a group's rows only if its own rows take part in the group, but its rows are farther
    apart, on average by the number of kinds of rows. A window then reaches that much farther, and the rows meet that
    many more blocks.
    """
    if not kind.groups or (len(kind.groups) == 1 and kind.groups[0].dilation_rate == 1):
        return False
    if rules is None:
        return True
    kinds = 1 + sum(group.dilation_rate > 1 for group in kind.groups)
    ordered = unordered = 0.0
    for group in kind.groups:
        walked = min(group.segment_length, num_rows) / group.dilation_rate
        ordered, unordered = ordered + walked / group.dilation_rate, unordered + walked
    for rule, seen in zip(kind.rules, rules.others_per_row, strict=True):
        ordered += _walked(rule, seen, min(kinds * tile_rows, window))
        unordered += _walked(rule, seen, tile_rows)
    return ordered < unordered


def _walked(rule: HeadRule, seen: float, reach: int) -> float:
    """Rows that a tile walks over for a rule if each of its rows sees ``seen`` rows and they extend over ``reach``."""
    if rule.block_size is not None:
        return seen * max(1.0, reach / rule.block_size)
    return seen + reach * (rule.band(is_causal=False)[0] is not None)


def layout_of(kind: Kind, side: Side, tile_rows: int, head_blocks: int) -> tuple[int, tuple[int, int, int, int]]:
    """Number of programs, and numbers of spans, heads per span, windows per span, and tiles per window."""
    longest = min(max(kind.segment_lengths, default=0), side.num_rows)
    for low, high in kind.bands:
        longest = max(longest, min(side.num_rows, side.window + high - low))
    rows_in_cache = _SPAN_BYTES // (2 * kind.head_dim * kind.dtype.itemsize)
    windows_per_span = max(1, min(side.num_windows, -(-min(longest, rows_in_cache) // side.window)))
    heads_in_cache = max(1, rows_in_cache // (windows_per_span * side.window))
    heads = kind.batch_size * kind.num_kv_heads
    heads_per_span = largest_divisor(heads, heads_in_cache)
    num_spans = -(-side.num_windows // windows_per_span)
    tiles_per_window = -(-side.window // tile_rows)
    programs = heads * num_spans * windows_per_span * tiles_per_window * head_blocks
    return programs, (num_spans, heads_per_span, windows_per_span, tiles_per_window)
