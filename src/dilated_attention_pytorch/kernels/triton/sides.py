"""What the tiles of a call hold and walk over: the rows of one side in order, and the runs of the other.

Nothing here reads a tensor's values: the kernels of :mod:`.order` and :mod:`.runs` plan on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.patterns import DilationGroup, HeadRule

from .order import MEMBERSHIP_BITS, order_kernel
from .rule_table import FAR, RuleTable, Tiles, band_of, rule_table
from .runs import BITS, runs_kernel
from .table import group_numbers, group_table

LARGEST_WINDOW = 2048
# Keys and values that a span of windows may touch before the next begins: a part of the device's cache (50 MB on H100).
_SPAN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """The operands of one call, checked. ``scale`` is not negative; last dimensions are contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor
    groups: tuple[DilationGroup, ...]
    is_causal: bool
    scale: float
    query_offset: int = 0
    key_offset: int = 0
    cu_seqlens: Tensor | None = None
    key_padding_mask: Tensor | None = None
    dropout_seed: Tensor | None = None
    dropout_p: float = 0.0
    rules: tuple[HeadRule, ...] = ()

    @property
    def sorted_groups(self) -> tuple[DilationGroup, ...]:
        """The groups from the densest to the sparsest: the order of rows and the table of groups count on it."""
        return tuple(sorted(self.groups, key=lambda group: (group.dilation_rate, group.segment_length)))

    @property
    def last_position(self) -> int:
        """One past the last position of either slab."""
        return max(self.query_offset + self.query.shape[1], self.key_offset + self.key.shape[1])

    @property
    def is_banded(self) -> bool:
        """Whether a rule bounds the distance of a key otherwise than the causal mask does."""
        causal = (-FAR, 0 if self.is_causal else FAR)
        return any(band_of(rule, is_causal=self.is_causal) != causal for rule in self.rules)

    @property
    def has_phantoms(self) -> bool:
        """Whether keys of score 0 and value 0 fill up the classes of a group."""
        return not self.is_causal and any(group.tail == "zero_padded" for group in self.groups)


@dataclass(frozen=True, slots=True)
class Side:
    """The rows that tiles hold, queries or keys: how they are cut into windows and ordered in them."""

    num_rows: int
    offset: int
    window: int
    is_ordered: bool
    order: Tensor

    @property
    def num_windows(self) -> int:
        return -(-self.num_rows // self.window)


@dataclass(frozen=True, slots=True)
class Runs:
    """What the tiles of a side walk over: see :mod:`.runs`."""

    lines: Tensor
    numbers: Tensor

    @property
    def num_tiles(self) -> int:
        """Tiles of one key/value head, a whole number for every window."""
        return self.numbers.shape[1]


def table_of(problem: Problem) -> Tensor:
    """The table of groups; where there is none, a line that no kernel reads."""
    numbers = group_numbers(problem.sorted_groups, problem.key.shape[2], problem.last_position)
    return group_table(numbers or (((0,),),), problem.query.device)


def rules_of(problem: Problem, *, of_queries: bool) -> RuleTable | None:
    """The table of rules for tiles of queries, or with ``of_queries`` for tiles of keys."""
    if not problem.rules:
        return None
    queries = (problem.query_offset, problem.query_offset + problem.query.shape[1])
    keys = (problem.key_offset, problem.key_offset + problem.key.shape[1])
    return rule_table(
        problem.rules, problem.key.shape[2], queries, keys, is_causal=problem.is_causal, of_queries=of_queries,
        device=problem.query.device,
    )  # fmt: skip


def side_of(problem: Problem, table: Tensor, tile_rows: tuple[int, ...], *, is_query: bool) -> Side:
    """The order of one side's rows, for tiles of every number of rows in ``tile_rows``."""
    num_rows, offset = (
        (problem.query.shape[1], problem.query_offset) if is_query else (problem.key.shape[1], problem.key_offset)
    )
    lengths = [group.segment_length for group in problem.sorted_groups]
    window = max(*tile_rows, min([*lengths, num_rows]))
    window = min(max(16, triton.next_power_of_2(window)), LARGEST_WINDOW)
    if num_rows <= min(tile_rows) or not _is_order_worth_it(problem, num_rows, max(tile_rows), window):
        return Side(num_rows, offset, window, False, table)
    num_windows = -(-num_rows // window)
    num_kv_heads = problem.key.shape[2]
    order = torch.empty(num_kv_heads, num_windows, window, dtype=torch.int32, device=table.device)
    order_kernel[(num_windows, num_kv_heads)](
        order, table, documents_of(problem), num_rows, offset, min(len(lengths), MEMBERSHIP_BITS.value), num_kv_heads,
        lengths.index(min(lengths)),
        *_search(problem), problem.last_position, WINDOW=window, PACKED=problem.cu_seqlens is not None, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return Side(num_rows, offset, window, True, order)


def _is_order_worth_it(problem: Problem, num_rows: int, tile_rows: int, window: int) -> bool:
    """Whether tiles of rows that take part in the same groups walk over fewer rows than tiles of rows side by side.

    In order, a tile walks over a group's rows only where its own take part in it, but its rows lie apart: as far as
    there are kinds of rows, in the mean. So far a window reaches further, and so many more blocks its rows meet.
    """
    if not problem.groups or (len(problem.groups) == 1 and problem.groups[0].dilation_rate == 1):
        return False
    rules = rules_of(problem, of_queries=False)
    if rules is None:
        return True
    kinds = 1 + sum(group.dilation_rate > 1 for group in problem.groups)
    ordered = unordered = 0.0
    for group in problem.groups:
        walked = min(group.segment_length, num_rows) / group.dilation_rate
        ordered, unordered = ordered + walked / group.dilation_rate, unordered + walked
    for rule, seen in zip(problem.rules, rules.others_per_row, strict=True):
        ordered += _walked(rule, seen, min(kinds * tile_rows, window))
        unordered += _walked(rule, seen, tile_rows)
    return ordered < unordered


def _walked(rule: HeadRule, seen: float, reach: int) -> float:
    """Rows that a tile walks over for a rule, where each of its rows sees ``seen`` and the last lies ``reach`` on."""
    if rule.block_size is not None:
        return seen * max(1.0, reach / rule.block_size)
    return seen + reach * (rule.band(is_causal=False)[0] is not None)


def runs_of(problem: Problem, table: Tensor, side: Side, tile_rows: int, *, of_queries: bool) -> Runs:
    """The runs of keys (or, with ``of_queries``, of queries) of every tile of ``tile_rows`` rows."""
    num_kv_heads = problem.key.shape[2]
    num_others, others_offset = (
        (problem.query.shape[1], problem.query_offset) if of_queries else (problem.key.shape[1], problem.key_offset)
    )
    rules = rules_of(problem, of_queries=of_queries)
    documents, steps = _search(problem)
    capacity = capacity_of(problem, side.window, tile_rows)
    if rules is not None:
        # At least one: a table without lines is no memory that a kernel could be given.
        capacity = max(1, capacity + rules.most_runs(_tiles(problem, side, tile_rows)))
    tiles_per_window = -(-side.window // tile_rows)
    num_tiles = side.num_windows * tiles_per_window
    slots = max(32, triton.next_power_of_2(tile_rows))
    line = line_of(problem, tile_rows)
    lines = torch.empty(num_kv_heads, num_tiles, capacity, line, dtype=torch.int32, device=table.device)
    numbers = torch.empty(num_kv_heads, num_tiles, dtype=torch.int32, device=table.device)
    spans, lists = (table, table) if rules is None else (rules.spans, rules.lists)
    runs_kernel[(num_tiles, num_kv_heads)](
        lines, numbers, side.order, table, spans, lists, documents_of(problem), side.num_rows, side.offset, num_others,
        others_offset, problem.last_position, len(problem.groups), len(problem.rules), num_kv_heads, documents, steps,
        0 if rules is None else rules.longest.bit_length(), tiles_per_window, capacity,
        TILE_ROWS=tile_rows, SLOTS=slots, WINDOW=side.window, ORDERED=side.is_ordered, CAUSAL=problem.is_causal,
        PACKED=problem.cu_seqlens is not None, PHANTOMS=problem.has_phantoms, OF_QUERIES=of_queries,
        RULES=rules is not None, BANDED=problem.is_banded, LINE=line, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return Runs(lines, numbers)


def line_of(problem: Problem, tile_rows: int) -> int:
    """Integers of a run: its numbers, bits for the rows of a tile, the two ends of a band."""
    return BITS.value + max(32, triton.next_power_of_2(tile_rows)) // 32 + 2 * problem.is_banded


def capacity_of(problem: Problem, window: int, tile_rows: int) -> int:
    """The most runs of groups that a tile can have: intervals that its rows, or all rows of its window, meet."""
    # A document adds its own end, and its segments begin anew: with a shift the first of them is cut short.
    documents = 0 if problem.cu_seqlens is None else problem.cu_seqlens.shape[0] - 1
    return sum(min(tile_rows, window // group.segment_length + 2 + 2 * documents) for group in problem.groups)


def _tiles(problem: Problem, side: Side, tile_rows: int) -> Tiles:
    documents = None if problem.cu_seqlens is None else problem.cu_seqlens.shape[0] - 1
    is_aligned = side.is_ordered or side.window % tile_rows == 0
    reach = side.window if side.is_ordered else tile_rows
    return Tiles(side.offset, side.offset + side.num_rows, reach, is_aligned, tile_rows, documents)


def layout_of(problem: Problem, side: Side, runs: Runs, head_blocks: int) -> tuple[int, tuple[int, int, int, int, int]]:
    """Number of programs, then spans, heads and windows a span, tiles a window, and the capacity of the runs."""
    batch, _, num_kv_heads, head_dim = problem.key.shape
    longest = min(max((group.segment_length for group in problem.groups), default=0), side.num_rows)
    for rule in problem.rules:
        low, high = band_of(rule, is_causal=problem.is_causal)
        longest = max(longest, min(side.num_rows, side.window + high - low))
    rows_in_cache = _SPAN_BYTES // (2 * head_dim * problem.key.element_size())
    windows_per_span = max(1, min(side.num_windows, -(-min(longest, rows_in_cache) // side.window)))
    heads_in_cache = max(1, rows_in_cache // (windows_per_span * side.window))
    heads = batch * num_kv_heads
    heads_per_span = max(number for number in range(1, min(heads, heads_in_cache) + 1) if heads % number == 0)
    num_spans = -(-side.num_windows // windows_per_span)
    tiles_per_window = runs.num_tiles // side.num_windows
    programs = batch * num_kv_heads * num_spans * windows_per_span * tiles_per_window * head_blocks
    return programs, (num_spans, heads_per_span, windows_per_span, tiles_per_window, runs.lines.shape[2])


def documents_of(problem: Problem) -> Tensor:
    """Where the kernels are compiled without a use of an operand, any tensor stands for it."""
    return problem.query if problem.cu_seqlens is None else problem.cu_seqlens


def _search(problem: Problem) -> tuple[int, int]:
    """Number of documents, and halvings that find one among them."""
    if problem.cu_seqlens is None:
        return 1, 0
    documents = problem.cu_seqlens.shape[0] - 1
    return documents, documents.bit_length()
