"""Everything that a call's launches need except tensor values: derived once, for both passes and later calls.

The ranges of positions, which change with every decoding step, are kept apart from the rest (:class:`.Kind`): a step at
a new position finds its kind, its tables and their bounds, and derives only some integers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .configurations import BlockSizes, Candidates, candidates
from .order import MEMBERSHIP_BITS
from .problem import Kind, PositionRanges, Problem, kind_of
from .regions import regions_of
from .rule_table import RuleTable, rule_table
from .runs import PlanningOptions, line_of, mask_bits
from .sides import Side, layout_of, side_of
from .table import group_table
from .target import triton_version
from .tiles import ComputingOptions, constant
from .tuning import TimedChoice, choice_of

# Keys are split to get up to this number of tiles per multiprocessor.
TILES_PER_MULTIPROCESSOR = 2
_MAX_SPLITS = 64


class Launch(NamedTuple):
    """The arguments of a launch that are no tensors."""

    before: tuple[int, ...]
    """Numbers before the position of the first row of tiles or queries, which may lie on the device."""
    after: tuple[Any, ...]
    """Numbers after it."""
    keywords: dict[str, Any]
    """The grid and the compile-time constants."""

    def run(self, kernel: Any, *tensors: Any, offset: int | Tensor) -> None:
        """Launch the kernel with the position of the first row of tiles or queries."""
        kernel.run(*tensors, *self.before, offset, *self.after, **self.keywords)


def launch_of(
    grid: tuple[int, ...], before: tuple[int, ...], after: tuple[Any, ...], **constants: int | NamedTuple
) -> Launch:
    """The launch of ``kernel[grid](..., *before, offset, *after, **constants)``, assembled once."""
    return Launch(before, after, {"grid": grid, "warmup": False, "enable_fp_fusion": True, **constants})


class Walk(NamedTuple):
    """Launches for tiles of one size: of the kernel that writes their runs, and of the kernel that walks over them."""

    runs: tuple[int, int, int]
    """Shape of the table of runs: heads, lines per head, integers per run."""
    ranges: tuple[int, int, int]
    """Shape of the table of each tile's lines: heads, tiles, first line and number of lines."""
    planning: Launch
    computing: Launch


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """The launches of one computing kernel."""

    kernel: str
    kind: Kind
    positions: PositionRanges
    table: Tensor
    """The table of groups."""
    rules: RuleTable | None
    """The table of rules for the tiles of this kernel."""
    choice: TimedChoice
    side: Side
    pack: int
    """Query heads that share a tile."""
    _walks: dict[tuple[BlockSizes, int], Walk] = field(default_factory=dict)

    @property
    def of_queries(self) -> bool:
        """Whether tiles hold keys and walk over queries."""
        return self.kernel == "key_gradient"

    @functools.cached_property
    def order_shape(self) -> tuple[int, int, int]:
        """Shape of the table of the order: heads, windows, rows per window."""
        return self.kind.num_kv_heads, self.side.num_windows, self.side.window

    @functools.cached_property
    def order(self) -> Launch:
        """The launch that orders the rows of the side."""
        kind, side, lengths = self.kind, self.side, self.kind.segment_lengths
        after = (
            min(len(lengths), MEMBERSHIP_BITS.value),
            kind.num_kv_heads,
            lengths.index(min(lengths)),
            *kind.search,
            self.positions.last,
        )
        grid, is_packed = (side.num_windows, kind.num_kv_heads), kind.num_documents is not None
        return launch_of(grid, (side.num_rows,), after, WINDOW=side.window, PACKED=is_packed, num_warps=4)

    @functools.cached_property
    def num_splits(self) -> int:
        """Number of parts of every run of keys that keeps the device busy if tiles are few, as in decoding."""
        kind, chosen, num_keys = self.kind, self.choice.candidates[0], self.positions.num_keys
        tile_rows = chosen.block_rows // self.pack
        tiles = kind.batch_size * kind.num_heads // self.pack * -(-self.side.num_rows // tile_rows)
        wanted = TILES_PER_MULTIPROCESSOR * kind.num_multiprocessors
        if 2 * tiles > wanted:
            return 1
        longest = max(
            (-(-min(group.segment_length, num_keys) // group.dilation_rate) for group in kind.groups), default=0
        )
        if self.rules is not None:
            longest = max(longest, int(max(self.rules.others_per_row)))
        return max(1, min(wanted // tiles, longest // (2 * chosen.block_run), _MAX_SPLITS))

    def walk(self, chosen: BlockSizes, num_splits: int = 1) -> Walk:
        """The launches for a configuration, with every run of keys split into ``num_splits`` parts."""
        walk = self._walks.get((chosen, num_splits))
        if walk is None:
            walk = self._walks[chosen, num_splits] = self._derived(chosen, num_splits)
        return walk

    def _derived(self, chosen: BlockSizes, num_splits: int) -> Walk:
        kind, side, rules, positions = self.kind, self.side, self.rules, self.positions
        tile_rows = chosen.block_rows // self.pack
        head_blocks, others = kind.ratio // self.pack, (positions.num_keys, positions.key_offset)
        if self.of_queries:
            assert positions.query_offset is not None, "the gradient of keys is of queries whose position is known here"
            head_blocks, others = 1, (positions.num_queries, positions.query_offset)
        programs, layout = layout_of(kind, side, tile_rows, head_blocks)
        regions, line = regions_of(kind, rules, side, tile_rows), line_of(tile_rows, is_banded=kind.is_banded)
        num_tiles = side.num_windows * layout[-1]
        planning = launch_of(
            (num_tiles, kind.num_kv_heads),
            (side.num_rows,),
            (
                *others,
                positions.last,
                len(kind.groups),
                len(kind.rules),
                kind.num_kv_heads,
                *kind.search,
                0 if rules is None else rules.longest.bit_length(),
                layout[-1],
                *regions,
            ),
            OPTIONS=PlanningOptions(
                TILE_ROWS=tile_rows,
                SLOTS=mask_bits(tile_rows),
                WINDOW=side.window,
                ORDERED=side.is_ordered,
                CAUSAL=kind.is_causal,
                PACKED=kind.num_documents is not None,
                ZERO_PAD_KEYS=kind.has_zero_pad_keys,
                OF_QUERIES=self.of_queries,
                RULES=rules is not None,
                BANDED=kind.is_banded,
                LINE=line,
            ),
            num_warps=1,
        )
        sizes = kind.batch_size, positions.num_queries, positions.num_keys, kind.num_kv_heads
        after: tuple[Any, ...] = positions.key_offset, *layout, regions.lines
        is_forward = self.kernel == "forward"
        if is_forward:
            programs, after = programs * num_splits, (*after, num_splits, kind.scales[1])
        else:
            after = *after, kind.scales
        options = ComputingOptions(
            RATIO=kind.ratio,
            PACK=self.pack,
            KEY_WIDTH=constant(kind.widths[0]),
            VALUE_WIDTH=constant(kind.widths[1]),
            BLOCK_ROWS=chosen.block_rows,
            BLOCK_RUN=chosen.block_run,
            LINE=line,
            WINDOW=side.window,
            ORDERED=side.is_ordered,
            CAUSAL=kind.is_causal,
            BANDED=kind.is_banded,
            PADDED=kind.is_padded,
            DROPOUT=kind.dropout_p > 0.0,
            TERMS=kind.has_terms,
            SOFTCAP=kind.softcap > 0.0,
            DISTANCE_BIAS=kind.has_distance_bias,
            COORDINATES=kind.has_coordinates,
            KEY_BIAS=kind.has_key_bias,
            ZERO_PAD_KEYS=is_forward and kind.has_zero_pad_keys,
            ROTATED=num_splits > 1 and bool(kind.rules),
        )
        computing = launch_of(
            (programs,), sizes, after, OPTIONS=options, num_warps=chosen.num_warps, num_stages=chosen.num_stages
        )
        return Walk((kind.num_kv_heads, regions.lines, line), (kind.num_kv_heads, num_tiles, 2), planning, computing)


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """The launches of calls of one kind at the same positions; each part is derived on first access."""

    kind: Kind
    positions: PositionRanges

    @functools.cached_property
    def table(self) -> Tensor:
        """The table of groups; without groups, a line that no kernel reads."""
        kind = self.kind
        return group_table(kind.sorted_groups, kind.num_kv_heads, self.positions.last, kind.device)

    @functools.cached_property
    def rules(self) -> RuleTable | None:
        """The table of rules for tiles of queries."""
        return self._rules(of_queries=False)

    @functools.cached_property
    def rules_of_keys(self) -> RuleTable | None:
        """The table of rules for tiles of keys."""
        return self._rules(of_queries=True)

    def _rules(self, *, of_queries: bool) -> RuleTable | None:
        kind = self.kind
        if not kind.rules:
            return None
        num_keys, first_key = self.positions.keys
        return rule_table(
            kind.rules,
            kind.num_kv_heads,
            self.positions.range_of_queries,
            (first_key, first_key + num_keys),
            is_causal=kind.is_causal,
            of_queries=of_queries,
            device=kind.device,
        )

    @functools.cached_property
    def forward(self) -> KernelPlan:
        """Plan of the kernel that computes the output."""
        pack, choices = self.kind.packed_heads, self.candidates("few_queries")
        if self.positions.num_queries * pack > choices[0].block_rows:
            choices = self.candidates("forward")
        side = self.side(self.positions.queries, _tile_rows(choices, pack))
        return self.kernel_plan("forward", choices, side)

    @functools.cached_property
    def query_gradient(self) -> KernelPlan:
        """Plan of the kernel that computes the gradient of the queries."""
        choices, positions = self.candidates("query_gradient"), self.positions
        tile_rows = _tile_rows(choices, self.kind.packed_heads)
        if positions.queries == positions.keys:
            tile_rows += _tile_rows(self.candidates("key_gradient"), 1)
        return self.kernel_plan("query_gradient", choices, self.side(positions.queries, tile_rows))

    @functools.cached_property
    def key_gradient(self) -> KernelPlan:
        """Plan of the kernel that computes the gradients of keys and values; on the same rows one order serves both."""
        choices, side = self.candidates("key_gradient"), self.query_gradient.side
        if self.positions.queries != self.positions.keys:
            side = self.side(self.positions.keys, _tile_rows(choices, 1))
        return self.kernel_plan("key_gradient", choices, side)

    def candidates(self, kernel: str) -> Candidates:
        """The configurations that the kernel is shipped with for the wider of keys and values."""
        kind = self.kind
        block_d = max(width.BLOCK_D for width in kind.widths)
        target, is_banded, is_biased = kind.target, kind.is_banded, kind.has_distance_bias
        return candidates(kernel, block_d, kind.dtype.itemsize, target, is_banded, is_biased, triton_version())

    def side(self, rows: tuple[int, int | None], tile_rows: tuple[int, ...]) -> Side:
        """Side of the rows that tiles hold, queries or keys."""
        return side_of(self.kind, self.rules, *rows, tile_rows)

    def kernel_plan(self, kernel: str, choices: Candidates, side: Side) -> KernelPlan:
        """Plan of the named kernel with these candidates, on the tiles of a side."""
        rules, pack = self.rules, self.kind.packed_heads
        if kernel == "key_gradient":
            rules, pack = self.rules_of_keys, 1
        return KernelPlan(
            kernel, self.kind, self.positions, self.table, rules, self._choice(kernel, choices), side, pack
        )

    def _choice(self, kernel: str, choices: Candidates) -> TimedChoice:
        """The choice for all that determines the fastest: device, dtype, pattern, and the bit lengths of sizes."""
        kind = self.kind
        if len(choices) == 1:
            return TimedChoice(choices)
        return choice_of(
            kernel,
            choices,
            kind.device,
            kind.dtype,
            kind.head_dim,
            kind.value_dim,
            kind.packed_heads,
            kind.groups,
            kind.rules,
            kind.is_causal,
            (kind.batch_size * kind.num_kv_heads).bit_length(),
            self.positions.num_queries.bit_length(),
            self.positions.num_keys.bit_length(),
            kind.num_documents is not None,
            kind.is_padded,
            kind.dropout_p > 0.0,
            kind.softcap > 0.0,
            kind.has_distance_bias,
            kind.has_coordinates,
            kind.has_key_bias,
        )


def _tile_rows(choices: Candidates, pack: int) -> tuple[int, ...]:
    return tuple(chosen.block_rows // pack for chosen in choices)


def plan_of(problem: Problem) -> LaunchPlan:
    """The plan shared by calls with equal shapes, dtype, device, pattern, positions and options.

    If only the device knows the position of the queries, all its values share a plan.

    Raises, now or on first access to a part:
        NotImplementedError: positions that do not fit 32 bits.
    """
    query, key, boundaries = problem.query, problem.key, problem.cu_seqlens
    num_documents = None if boundaries is None else boundaries.shape[0] - 1
    batch_size, num_queries, num_heads, head_dim = query.shape
    _, num_keys, num_kv_heads, _ = key.shape
    kind = kind_of(
        query.device,
        query.dtype,
        batch_size,
        num_heads,
        num_kv_heads,
        head_dim,
        problem.value.shape[3],
        problem.groups,
        problem.rules,
        problem.is_causal,
        float(problem.scale),
        problem.dropout_p,
        num_documents,
        problem.key_padding_mask is not None,
        float(problem.softcap),
        problem.distance_bias is not None,
        problem.coordinates is not None,
        problem.key_bias is not None,
    )
    query_offset = None if isinstance(problem.query_offset, Tensor) else problem.query_offset
    plan = _plan(kind, PositionRanges(num_queries, num_keys, query_offset, problem.key_offset))
    if kind.rules and query.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.add(plan)
    return plan


# Shared by all layers of a model and both passes; a decoding step makes its own, which is small.
_plan = functools.lru_cache(maxsize=64)(LaunchPlan)
_captured: set[LaunchPlan] = set()
"""Plans with tables that a CUDA graph reads on every replay: never dropped."""
