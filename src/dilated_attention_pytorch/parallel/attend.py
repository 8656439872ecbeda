"""The functional API over several ranks: :func:`dilated_attention_pytorch.attend` on this rank's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.kernels.select import Impl, select
from dilated_attention_pytorch.ops import AttentionOutput
from dilated_attention_pytorch.ops.attend import attend_checked
from dilated_attention_pytorch.ops.autocast import cast_by_autocast
from dilated_attention_pytorch.ops.prepare import as_rows, with_scale, without_padding
from dilated_attention_pytorch.ops.validation import check_call, check_cu_seqlens, documents_of
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.planning import Layout, ShardedCall, Shards, with_rows

from .first_derivative import refuse_other_derivatives
from .heads import Heads, Places, Route, ToHeads, ToRows, to_heads
from .plan import Shape, Strategy, cheapest
from .sequence import SequenceAttention, Task
from .sharding import Ranks, check_layout, num_rows_of, ranks_of
from .slab import Options

STRATEGIES: tuple[str, ...] = get_args(Strategy)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keywords:
    """The keywords of :func:`attend` but for the mesh."""

    strategy: Strategy
    layout: Layout
    sequence_length: int | None
    key_sequence_length: int | None
    is_causal: bool
    scale: float | None
    query_offset: int
    key_offset: int
    cu_seqlens: Tensor | None
    key_padding_mask: Tensor | None
    dropout_p: float
    impl: Impl


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What all ranks agree about."""

    strategy: Strategy
    num_queries: int
    num_keys: int
    documents: tuple[int, ...] | None
    number: int
    """Marks the messages along the axis of rows."""
    heads_number: int
    """Marks those along the axis of heads."""


def attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    mesh: DeviceMesh,
    strategy: Strategy = "auto",
    layout: Layout = "contiguous",
    sequence_length: int | None = None,
    key_sequence_length: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    query_offset: int = 0,
    key_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    impl: Impl = "auto",
) -> AttentionOutput:
    """:func:`attend` with the log-sum-exp ``[B, rows, H]`` of this rank's rows. Both have exact gradients.

    Arguments and errors are those of :func:`attend`.
    """
    keywords = _Keywords(
        strategy=strategy, layout=layout, sequence_length=sequence_length, key_sequence_length=key_sequence_length,
        is_causal=is_causal, scale=scale, query_offset=query_offset, key_offset=key_offset, cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask, dropout_p=dropout_p, impl=impl,
    )  # fmt: skip
    out, lse = _attend(query, key, value, pattern, mesh, keywords, is_lse_wanted=True)
    assert lse is not None
    return AttentionOutput(out, lse)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    mesh: DeviceMesh,
    strategy: Strategy = "auto",
    layout: Layout = "contiguous",
    sequence_length: int | None = None,
    key_sequence_length: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    query_offset: int = 0,
    key_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    impl: Impl = "auto",
) -> Tensor:
    """Attention under a pattern over a sequence whose rows lie on several ranks: exact in output and gradient.

    Every rank passes its own rows (:func:`shard`) and gets its rows of what :func:`dilated_attention_pytorch.attend`
    computes of the whole; the gradients are that call's too. A group of segment length w and rate r moves
    ``(w - l) / r`` rows to a rank that holds l, and none where segments end with shards; windows, blocks and global
    tokens move the rows that they show to a rank's queries, each once (:func:`plan_parallel`).

    Args:
        query: this rank's rows, ``[B, rows, H, D]``.
        key, value: this rank's rows, ``[B, rows, G, D]``.
        pattern: who sees whom, the same on all ranks.
        mesh: the ranks that share the sequence: 1-D, or 2-D with the rows along the first axis and the heads along the
            second (heads within a node, rows across nodes).
        strategy: ``"ring"``: rows of keys travel point to point, those of the next step while those of this one are
            computed with. ``"gather"``: all-gather among the ranks of a segment, for dilated patterns. ``"heads"``:
            all-to-all, after which a rank has all rows of some heads (Ulysses). On a 2-D mesh the heads are split along
            its second axis, and ``"ring"`` or ``"gather"`` is what its first does. ``"auto"``: the cheapest by
            :func:`plan_parallel`.
        layout: how the rows are spread, see :func:`shard`.
        sequence_length: rows of the whole sequence, where the ranks do not divide it; it is ``cu_seqlens[-1]`` where
            that is given, and otherwise this rank's rows times the ranks.
        key_sequence_length: rows of the whole key, where they are not those of the query (``strategy="heads"``).
        is_causal, scale: see :func:`dilated_attention_pytorch.attend`.
        query_offset, key_offset: position of the first row of the whole query and of the whole key. Other than with
            ``strategy="heads"`` they must be equal, and query and key equally long.
        cu_seqlens: boundaries of packed documents in the whole sequence, int32 ``[documents + 1]``; best on the CPU, as
            its values are read.
        key_padding_mask: bool ``[B, rows]``, True = ignore, for this rank's rows of key.
        dropout_p: see :func:`dilated_attention_pytorch.attend`. Every rank draws from its own random state. Where ranks
            hold rows of all heads and are seeded alike, they drop what one process drops (without ``cu_seqlens``).
        impl: ``"auto"``, ``"triton"``, ``"cudnn"``, ``"native"`` or ``"aten"``; ``"reference"``, ``"gluon"`` and
            ``"triton-fp8"`` with ``strategy="heads"`` only.

    Returns:
        ``[B, rows, H, D]`` in the query's dtype.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, shape, dtype, device or range.
        NotImplementedError: the strategy cannot compute this call; the message says which can. Or derivatives other
            than the gradient are asked for: tangents, transforms of ``torch.func``, ``create_graph=True``.
        RankFailure: the ranks disagree about the call, or one died or does not answer.

    >>> from dilated_attention_pytorch import parallel
    >>> def on_every_rank(mesh):  # under torchrun, after init_process_group and init_device_mesh
    ...     q, k, v = (parallel.shard(torch.randn(1, 1000, 8, 64), mesh) for _ in range(3))
    ...     return parallel.attend(
    ...         q, k, v, DilatedPattern([128, 512], [1, 4]), mesh=mesh, sequence_length=1000, is_causal=True
    ...     )
    """
    keywords = _Keywords(
        strategy=strategy, layout=layout, sequence_length=sequence_length, key_sequence_length=key_sequence_length,
        is_causal=is_causal, scale=scale, query_offset=query_offset, key_offset=key_offset, cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask, dropout_p=dropout_p, impl=impl,
    )  # fmt: skip
    return _attend(query, key, value, pattern, mesh, keywords, is_lse_wanted=False)[0]


def check_strategy(strategy: str) -> None:
    """Raise :class:`ValueError` unless ``strategy`` is one."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}")


@torch.compiler.disable
def _attend(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, mesh: DeviceMesh, keywords: _Keywords, *,
    is_lse_wanted: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Output and, if wanted, log-sum-exp of this rank's rows."""
    ranks = ranks_of(mesh)
    with ranks.rows.announced():
        check_call(
            query, key, value, pattern, is_causal=keywords.is_causal, scale=keywords.scale,
            query_offset=keywords.query_offset, key_offset=keywords.key_offset, cu_seqlens=None,
            key_padding_mask=keywords.key_padding_mask, dropout_p=keywords.dropout_p,
        )  # fmt: skip
        refuse_other_derivatives(query, key, value)
        # Before the ranks compare their calls: autocast decides about the dtype of what they exchange.
        query, key, value = cast_by_autocast(query, key, value)
        agreed = _agree(ranks, query, key, value, pattern, keywords, is_lse_wanted=is_lse_wanted)
    seed = torch.randint(2**62, (), device=query.device) if keywords.dropout_p > 0.0 else None
    mask = keywords.key_padding_mask
    if ranks.heads is None and agreed.strategy != "heads":
        return _by_rows(ranks, agreed, query, key, value, mask, pattern, seed, keywords)
    # Each rank gets all rows of some heads: of the whole sequence, or of the part that lies on its group of ranks.
    wire = ranks.heads or ranks.rows
    heads = Heads.split(query.shape[2], key.shape[2], wire.size)
    query_places, key_places = (_places(ranks, rows, keywords.layout) for rows in (agreed.num_queries, agreed.num_keys))
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    number = agreed.number if ranks.heads is None else agreed.heads_number
    route = Route(wire, heads.queries, query_places, num_heads, 2 * number)
    kv_route = Route(wire, heads.kv, key_places, num_kv_heads, 2 * number)
    query, key, value = ToHeads.apply(query, key, value, route, kv_route)
    if mask is not None:
        same_for_all = Route(wire, ((0,),) * wire.size, key_places, 1, 2 * number)
        mask = to_heads(mask.unsqueeze(-1).to(torch.uint8), same_for_all).squeeze(-1).bool()
    kv, _ = heads.kv_of_queries(wire.rank, num_heads // num_kv_heads)
    if kv != heads.kv[wire.rank]:
        index = torch.tensor([heads.kv[wire.rank].index(head) for head in kv], device=key.device)
        key, value = key.index_select(2, index), value.index_select(2, index)
    pattern = pattern.for_heads(kv, num_kv_heads)
    if seed is not None:
        # Other heads of the same rows: they draw apart.
        seed = seed + (wire.rank << 48)
    if ranks.heads is not None:
        out, lse = _by_rows(ranks, agreed, query, key, value, mask, pattern, seed, keywords)
    else:
        out, lse = attend_checked(
            query, key, value, pattern, is_causal=keywords.is_causal, scale=keywords.scale,
            query_offset=keywords.query_offset, key_offset=keywords.key_offset, cu_seqlens=keywords.cu_seqlens,
            key_padding_mask=mask, dropout_p=keywords.dropout_p, dropout_seed=seed, impl=keywords.impl,
        )  # fmt: skip
    if is_lse_wanted:
        return ToRows.apply(route, out, lse)
    return ToRows.apply(route, out)[0], None


def _places(ranks: Ranks, num_rows: int, layout: Layout) -> tuple[Places, ...]:
    """Where the rows of every rank that splits heads with this one lie in what they hold together."""
    if ranks.heads is None:
        all_runs = ranks.all_runs(num_rows, layout)
        return tuple(tuple((run[0], row, run[1] - run[0]) for run, row in with_rows(runs)) for runs in all_runs)
    sizes = [
        sum(stop - start for start, stop in ranks.runs(num_rows, layout, (ranks.rows.rank, part)))
        for part in range(ranks.heads.size)
    ]
    return tuple(((sum(sizes[:part]), 0, size),) for part, size in enumerate(sizes))


def _by_rows(
    ranks: Ranks,
    agreed: _Agreed,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_ignored: Tensor | None,
    pattern: Pattern,
    seed: Tensor | None,
    keywords: _Keywords,
) -> tuple[Tensor, Tensor]:
    """Ring or gather along the first axis."""
    query, scale = with_scale(query, keywords.scale)
    key, value = (without_padding(x, is_ignored) for x in (key, value))
    query, key, value = (as_rows(x) for x in (query, key, value))
    call = ShardedCall(pattern, key.shape[2], keywords.is_causal, keywords.query_offset, agreed.documents)
    impl = select(keywords.impl, query.device, query.dtype, query.shape[-1])
    shards = Shards(agreed.num_queries, ranks.rows.size, keywords.layout)
    options = Options(call, scale, impl, keywords.dropout_p)
    task = Task(options, ranks.rows, shards, agreed.strategy == "gather", agreed.number)
    out, lse = SequenceAttention.apply(query, key, value, is_ignored, seed, task)
    return out, lse


def _agree(
    ranks: Ranks, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, keywords: _Keywords, *,
    is_lse_wanted: bool,
) -> _Agreed:  # fmt: skip
    """Check how this rank's rows are spread, and once for every such call that the other ranks make the same."""
    is_causal, offset, key_offset, mask = (
        keywords.is_causal, keywords.query_offset, keywords.key_offset, keywords.key_padding_mask
    )  # fmt: skip
    layout = check_layout(keywords.layout)
    check_strategy(keywords.strategy)
    length = keywords.sequence_length
    if keywords.cu_seqlens is not None:
        check_cu_seqlens(keywords.cu_seqlens, query)
        length = int(keywords.cu_seqlens[-1]) if length is None else length
    num_queries = num_rows_of(query.shape[1], length, ranks, layout, "query")
    # Only what all ranks know may decide: some of them can have equally many rows of queries and keys by chance.
    num_keys = num_queries if keywords.key_sequence_length is None else keywords.key_sequence_length
    num_rows_of(key.shape[1], num_keys, ranks, layout, "key")
    for rule in pattern.rules:
        rule.check(max(offset + num_queries, key_offset + num_keys), key.shape[2])
    documents = documents_of(keywords.cu_seqlens, num_queries)
    is_one_sequence = num_keys == num_queries and key_offset == offset
    if documents is not None and not (is_one_sequence and offset == 0):
        raise ValueError(
            "cu_seqlens packs documents of self-attention, so query and key must have the same rows from position 0: "
            f"got {num_queries} query rows at {offset} and {num_keys} key rows at {key_offset}"
        )
    select(keywords.impl, query.device, query.dtype, query.shape[-1])
    strategy = keywords.strategy
    if strategy == "auto":
        call = ShardedCall(pattern, key.shape[2], is_causal, offset, documents)
        size = Shape(
            call, query.shape[0], num_queries, query.shape[2], query.shape[3], query.dtype, mask is not None,
            tuple(wire.size for wire in (ranks.rows, ranks.heads) if wire is not None),
        )  # fmt: skip
        needs_whole = ranks.heads is None and not (is_one_sequence and keywords.impl != "reference")
        strategy = "heads" if needs_whole else cheapest(size, layout)
    _check_strategy(ranks, strategy, query, key, pattern, keywords.impl, is_one_sequence=is_one_sequence)
    numbers = ranks.agree({
        "strategy": strategy, "layout": layout, "query": [query.shape[0], num_queries, *query.shape[2:]],
        "key": [key.shape[0], num_keys, *key.shape[2:]], "dtype": str(query.dtype), "pattern": pattern.spec,
        "is_causal": is_causal, "scale": keywords.scale, "query_offset": offset, "key_offset": key_offset,
        "cu_seqlens": documents, "key_padding_mask": "none" if mask is None else "a mask",
        "dropout_p": keywords.dropout_p, "impl": keywords.impl, "lse": is_lse_wanted,
        "gradient": torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)),
    })  # fmt: skip
    return _Agreed(strategy, num_queries, num_keys, documents, *numbers)


def _check_strategy(
    ranks: Ranks, strategy: Strategy, query: Tensor, key: Tensor, pattern: Pattern, impl: Impl, *, is_one_sequence: bool
) -> None:
    """Raise what a strategy cannot compute."""
    axis = ranks.heads or (ranks.rows if strategy == "heads" else None)
    if axis is not None:
        Heads.split(query.shape[2], key.shape[2], axis.size)
    if strategy == "heads":
        if ranks.heads is not None:
            raise ValueError(
                'strategy="heads" takes a 1-D mesh: on a 2-D mesh the heads are split along the second axis, and the '
                'strategy says what the first does; pass "ring" or "gather"'
            )
        return
    remedy = 'use strategy="heads" on a 1-D mesh'
    if not is_one_sequence:
        raise NotImplementedError(
            f"strategy={strategy!r} is for self-attention, with query and key of the same rows and offset: got "
            f"{query.shape[1]} and {key.shape[1]} rows of this rank; {remedy}"
        )
    if strategy == "gather" and pattern.rules:
        raise NotImplementedError(
            "strategy='gather' gathers the rows of segments, so it is for dilated patterns: for windows, blocks and "
            'global tokens use strategy="ring", or strategy="heads" on a 1-D mesh'
        )
    if any(group.boundaries is not None for group in pattern.groups):
        raise NotImplementedError(
            f"strategy={strategy!r} finds what ranks share by segments of one length, and a SegmentedPattern has "
            f"ragged ones; {remedy}"
        )
    if any(group.tail == "zero_padded" for group in pattern.groups):
        raise NotImplementedError(
            f'tail="zero_padded" depends on whole segments, which no rank has under strategy={strategy!r}; {remedy}, '
            'or tail="ragged"'
        )
    if impl == "reference":
        raise NotImplementedError(
            f'impl="reference" computes whole sequences, which no rank has under strategy={strategy!r}; {remedy}, or '
            'impl="aten"'
        )
    if impl in ("gluon", "triton-fp8"):
        raise NotImplementedError(
            f'impl="{impl}" computes calls whose rows one device has, and under strategy={strategy!r} keys come from '
            f'other ranks; {remedy}, or impl="triton"'
        )
