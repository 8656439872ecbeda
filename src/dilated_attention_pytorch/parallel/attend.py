"""The functional API for a sequence sharded over ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.estimate.parallel import Strategy
from dilated_attention_pytorch.kernels.dropout import drawn_seed
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.ops import AttentionOutput
from dilated_attention_pytorch.ops.attend import attend_checked
from dilated_attention_pytorch.ops.call import WATCHERS, Call
from dilated_attention_pytorch.ops.host import contiguous_rows, with_positive_scale, without_padding
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from dilated_attention_pytorch.ops.scores import Scores, by_distance, check_scores, finished, with_scores
from dilated_attention_pytorch.ops.validation import check_call, sequence_first
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.plan.heads import Heads
from dilated_attention_pytorch.plan.layout import Layout, Shards, with_rows
from dilated_attention_pytorch.plan.shards import ShardedCall
from dilated_attention_pytorch.precision import cast_by_autocast

from .agreement import Agreed, Sharding, agree
from .first_derivative import refuse_other_derivatives
from .heads import Route, RowRanges, ToHeads, ToRows, to_heads
from .sequence import RankCall, SequenceAttention
from .sharding import Ranks, ranks_of
from .slab import Options


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
    scores: Scores | None = None,
    heads_first: bool | None = None,
    impl: Impl = "auto",
) -> AttentionOutput:
    """:func:`attend` with the log-sum-exp ``[B, rows, H]`` of this rank's rows. Both have exact gradients.

    Arguments and errors are those of :func:`attend`.
    """
    call = Call(
        query,
        key,
        value,
        pattern=pattern,
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        key_offset=key_offset,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        impl=impl,
    )
    sharding = Sharding(strategy, layout, sequence_length, key_sequence_length)
    out, lse = _attend(call, scores, sharding, mesh, heads_first, is_lse_wanted=True)
    assert lse is not None
    return AttentionOutput(out.transpose(1, 2), lse.transpose(1, 2)) if heads_first else AttentionOutput(out, lse)


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
    scores: Scores | None = None,
    heads_first: bool | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention under a pattern over a sequence whose rows are sharded over ranks: exact in output and gradient.

    Every rank passes its own rows (:func:`shard`) and gets its rows of the output that
    :func:`dilated_attention_pytorch.attend` computes for the whole sequence; gradients are those of that call. A group
    of segment length w and rate r sends ``(w - l) / r`` rows to a rank that holds l rows, and none where segments end
    at shard boundaries; windows, blocks and global tokens send each row that a rank's queries attend to once
    (:func:`plan_parallel`).

    Args:
        query: this rank's rows, ``[B, rows, H, D]``.
        key, value: this rank's rows, ``[B, rows, G, D]``.
        pattern: attention pattern, the same on all ranks.
        mesh: the ranks that share the sequence: 1-D, or 2-D with rows sharded along the first axis and heads along the
            second (heads within a node, rows across nodes).
        strategy: ``"ring"``: rows of keys travel point to point; the next step's rows are sent during the computation
            of this one. ``"gather"``: all-gather among the ranks of a segment, for dilated patterns. ``"heads"``:
            all-to-all, after which a rank has all rows of some heads (Ulysses). On a 2-D mesh the heads are split along
            the second axis, and ``"ring"`` or ``"gather"`` applies to the first. ``"auto"``: the cheapest according to
            :func:`plan_parallel`.
        layout: assignment of rows to ranks, see :func:`shard`.
        sequence_length: number of rows of the whole sequence if it does not divide by the number of ranks. Default:
            ``cu_seqlens[-1]`` if given, else this rank's rows times the number of ranks.
        key_sequence_length: number of rows of the whole key if it differs from the query's (``strategy="heads"``).
        is_causal, scale: see :func:`dilated_attention_pytorch.attend`.
        query_offset, key_offset: positions of the first row of the whole query and the whole key. They must be equal,
            and query and key of equal length, except with ``strategy="heads"``.
        cu_seqlens: boundaries of packed documents in the whole sequence, int32 ``[documents + 1]``; preferably on the
            CPU, as the host reads the values.
        key_padding_mask: bool ``[B, rows]``, True = ignore, for this rank's rows of key.
        dropout_p: see :func:`dilated_attention_pytorch.attend`. Every rank draws from its own random state. Where ranks
            hold rows of all heads and have equal seeds, the result equals a single process's (without ``cu_seqlens``).
        scores: see :func:`dilated_attention_pytorch.attend`; the same on every rank, except ``key_bias [B, rows]`` or
            ``[B, rows, G]`` of this rank's rows, for ``strategy="heads"`` on a 1-D mesh. The gradients of the other
            tensors are this rank's part, as those of a model's weights are: sum them over the ranks.
        heads_first: see :func:`dilated_attention_pytorch.attend`.
        impl: ``"auto"``, ``"triton"``, ``"native"`` or ``"aten"``; ``"reference"`` with ``strategy="heads"`` only.
    Returns:
        ``[B, rows, H, D]`` in the query's dtype.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, shape, dtype, device or range.
        NotImplementedError: the strategy does not support this call; the message says which one does. Or derivatives
            other than the gradient are requested: tangents, transforms of ``torch.func``, ``create_graph=True``.
        RankFailure: the ranks' calls differ, or a rank died or does not respond.

    >>> from dilated_attention_pytorch import parallel
    >>> def on_every_rank(mesh):  # under torchrun, after init_process_group and init_device_mesh
    ...     q, k, v = (parallel.shard(torch.randn(1, 1000, 8, 64), mesh) for _ in range(3))
    ...     return parallel.attend(
    ...         q, k, v, DilatedPattern([128, 512], [1, 4]), mesh=mesh, sequence_length=1000, is_causal=True
    ...     )
    """
    call = Call(
        query,
        key,
        value,
        pattern=pattern,
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        key_offset=key_offset,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        impl=impl,
    )
    sharding = Sharding(strategy, layout, sequence_length, key_sequence_length)
    out, _ = _attend(call, scores, sharding, mesh, heads_first, is_lse_wanted=False)
    return out.transpose(1, 2) if heads_first else out


@torch.compiler.disable
def _attend(
    call: Call,
    scores: Scores | None,
    sharding: Sharding,
    mesh: DeviceMesh,
    heads_first: bool | None,
    *,
    is_lse_wanted: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output and, if requested, log-sum-exp of this rank's rows."""
    if WATCHERS:
        raise NotImplementedError(
            "attention maps of a sequence whose rows are split over ranks are not computed: call the model in one "
            "process, or attention_map with all rows"
        )
    ranks, layout = ranks_of(mesh), sharding.layout
    with ranks.rows.announced():
        query, key, value = sequence_first(call.query, call.key, call.value, heads_first)
        if isinstance(call.query_offset, Tensor):
            raise NotImplementedError(
                "query_offset is a tensor, which one rank alone can read from its device; pass an integer"
            )
        # Boundaries of documents are those of the whole sequence, which this rank's rows say nothing about.
        check_call(call._replace(query=query, key=key, value=value, cu_seqlens=None))
        scores = Scores() if scores is None else scores
        check_scores(call._replace(query=query, key=key, value=value), scores)
        refuse_other_derivatives(query, key, value, *scores.tensors)
        # Before the ranks compare their calls: autocast sets the dtype of the exchanged tensors.
        query, key, value = cast_by_autocast(query, key, value)
        call = call._replace(query=query, key=key, value=value)
        agreed = agree(ranks, call, scores, sharding, is_lse_wanted=is_lse_wanted)
    if call.dropout_p > 0.0:
        call = call._replace(dropout_seed=drawn_seed(query.device))
    if ranks.heads is None and agreed.strategy != "heads":
        return _by_rows(ranks, agreed, call, scores, layout)
    # Each rank gets all rows of some heads: of the whole sequence, or of its row group's part.
    communicator = ranks.heads or ranks.rows
    heads = Heads.split(query.shape[2], key.shape[2], communicator.size)
    query_ranges, key_ranges = (_row_ranges(ranks, rows, layout) for rows in (agreed.num_queries, agreed.num_keys))
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    number = agreed.number if ranks.heads is None else agreed.heads_number
    route = Route(communicator, heads.queries, query_ranges, num_heads, 2 * number)
    kv_route = Route(communicator, heads.kv, key_ranges, num_kv_heads, 2 * number)
    tensors = [query, key, value]
    if scores.key_bias is not None:
        key_bias = scores.key_bias.unsqueeze(-1) if scores.key_bias.dim() == 2 else scores.key_bias
        tensors.append(key_bias.to(call.dtype).expand(key.shape[:3]).contiguous())
    query, key, value, *of_keys = ToHeads.apply((route, *(kv_route,) * (len(tensors) - 1)), *tensors)
    mask, seed = call.key_padding_mask, call.dropout_seed
    if mask is not None:
        same_for_all = Route(communicator, ((0,),) * communicator.size, key_ranges, 1, 2 * number)
        mask = to_heads(mask.unsqueeze(-1).to(torch.uint8), same_for_all).squeeze(-1).bool()
    kv, _ = heads.kv_of_queries(communicator.rank, num_heads // num_kv_heads)
    if kv != heads.kv[communicator.rank]:
        index = torch.tensor([heads.kv[communicator.rank].index(head) for head in kv], device=key.device)
        key, value, *of_keys = (x.index_select(2, index) for x in (key, value, *of_keys))
    assert call.pattern is not None
    of_heads = call._replace(
        query=query,
        key=key,
        value=value,
        key_padding_mask=mask,
        # Other heads of the same rows need other draws.
        dropout_seed=None if seed is None else seed + (communicator.rank << 48),
        pattern=call.pattern.for_heads(kv, num_kv_heads),
    )
    scores = replace(scores.for_heads(heads.queries[communicator.rank]), key_bias=of_keys[0] if of_keys else None)
    if ranks.heads is None:
        out, lse = attend_checked(with_scores(of_heads, scores))
    else:
        out, lse = _by_rows(ranks, agreed, of_heads, scores, layout)
    if is_lse_wanted:
        return ToRows.apply(route, out, lse)
    return ToRows.apply(route, out)[0], None


def _row_ranges(ranks: Ranks, num_rows: int, layout: Layout) -> tuple[RowRanges, ...]:
    """Locations of the rows of every rank of this rank's head group within the group's rows."""
    if ranks.heads is None:
        all_runs = ranks.all_runs(num_rows, layout)
        return tuple(tuple((run[0], row, run[1] - run[0]) for run, row in with_rows(runs)) for runs in all_runs)
    sizes = [
        sum(stop - start for start, stop in ranks.runs(num_rows, layout, (ranks.rows.rank, part)))
        for part in range(ranks.heads.size)
    ]
    return tuple(((sum(sizes[:part]), 0, size),) for part, size in enumerate(sizes))


def _by_rows(ranks: Ranks, agreed: Agreed, call: Call, scores: Scores, layout: Layout) -> tuple[Tensor, Tensor]:
    """Ring or gather along the first axis."""
    assert call.pattern is not None
    query, scale = with_positive_scale(call.query, call.scale)
    key, value = (without_padding(x, call.key_padding_mask) for x in (call.key, call.value))
    query, key, value = (contiguous_rows(x) for x in (query, key, value))
    sharded = ShardedCall(call.pattern, key.shape[2], call.is_causal, call.first_query, agreed.documents)
    shards = Shards(agreed.num_queries, ranks.rows.size, layout)
    softcap = 0.0 if scores.softcap is None else float(scores.softcap)
    options = Options(sharded, scale, IMPLEMENTATIONS[agreed.impl], call.dropout_p, softcap)
    task = RankCall(options, ranks.rows, shards, agreed.strategy == "gather", agreed.number)
    most = max(1, agreed.num_queries)
    distance_bias = by_distance(scores, 1 - most, 2 * most - 1, call.dtype, query.device)
    tensors = (query, key, value, call.key_padding_mask, call.dropout_seed, distance_bias)
    out, lse = SequenceAttention.apply(*tensors, task)
    return finished(out, lse, scores.sinks, None)
