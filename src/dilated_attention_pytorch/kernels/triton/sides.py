"""The rows that tiles hold, queries or keys: how they are cut into windows, and how much is kept for what they meet.

Integers only: the kernels of :mod:`.order` and :mod:`.runs` plan the rest on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention_pytorch.patterns import HeadRule

from .problem import Kind, largest_divisor, next_power_of_2
from .rule_table import RuleTable, Tiles
from .runs import BITS

LARGEST_WINDOW = 2048
# Keys and values that a span of windows may touch before the next begins: a part of the device's cache (50 MB on H100).
_SPAN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Side:
    """The rows of one side, and whether they are ordered within their windows."""

    num_rows: int
    offset: int
    window: int
    is_ordered: bool

    @property
    def num_windows(self) -> int:
        return -(-self.num_rows // self.window)


def side_of(kind: Kind, rules: RuleTable | None, num_rows: int, offset: int, tile_rows: tuple[int, ...]) -> Side:
    """The rows from position ``offset`` on, for tiles of every number of rows in ``tile_rows``."""
    window = max(*tile_rows, min([*kind.segment_lengths, num_rows]))
    window = min(max(16, next_power_of_2(window)), LARGEST_WINDOW)
    is_ordered = num_rows > min(tile_rows) and _is_order_worth_it(kind, rules, num_rows, max(tile_rows), window)
    return Side(num_rows, offset, window, is_ordered)


def _is_order_worth_it(kind: Kind, rules: RuleTable | None, num_rows: int, tile_rows: int, window: int) -> bool:
    """Whether tiles of rows that take part in the same groups walk over fewer rows than tiles of rows side by side.

    In order, a tile walks over a group's rows only where its own take part in it, but its rows lie apart: as far as
    there are kinds of rows, in the mean. So far a window reaches further, and so many more blocks its rows meet.
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
    """Rows that a tile walks over for a rule, where each of its rows sees ``seen`` and the last lies ``reach`` on."""
    if rule.block_size is not None:
        return seen * max(1.0, reach / rule.block_size)
    return seen + reach * (rule.band(is_causal=False)[0] is not None)


def slots_of(tile_rows: int) -> int:
    """Bits of a run, one for every row of a tile and some to fill up words."""
    return max(32, next_power_of_2(tile_rows))


def line_of(kind: Kind, tile_rows: int) -> int:
    """Integers of a run: its numbers, bits for the rows of a tile, the two ends of a band."""
    return BITS.value + slots_of(tile_rows) // 32 + 2 * kind.is_banded


def capacity_of(kind: Kind, rules: RuleTable | None, side: Side, tile_rows: int) -> int:
    """The most runs that a tile of ``tile_rows`` rows can have."""
    # Of groups: intervals that its rows, or all rows of its window, meet. A document adds its own end, and its segments
    # begin anew: with a shift the first of them is cut short.
    documents = kind.num_documents or 0
    capacity = sum(min(tile_rows, side.window // length + 2 + 2 * documents) for length in kind.segment_lengths)
    if rules is None:
        return capacity
    reach = side.window if side.is_ordered else min(tile_rows, side.num_rows)
    # One tile is bounded wherever it lies: a step of decoding, of which each begins elsewhere, asks for the same again.
    is_aligned = side.is_ordered or (side.num_rows > tile_rows and side.window % tile_rows == 0)
    begins = (side.offset, side.offset + side.num_rows) if is_aligned else None
    # At least one: a table without lines is no memory that a kernel could be given.
    return max(1, capacity + rules.most_runs(Tiles(begins, reach, tile_rows, kind.num_documents)))


def layout_of(kind: Kind, side: Side, tile_rows: int, head_blocks: int) -> tuple[int, tuple[int, int, int, int]]:
    """Number of programs, then spans, heads and windows a span, and tiles a window."""
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
