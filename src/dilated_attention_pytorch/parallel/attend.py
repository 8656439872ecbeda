"""The functional API for a sequence sharded over ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.estimate.parallel import Strategy
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.ops import AttentionOutput
from dilated_attention_pytorch.ops.attend import attend_checked
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from dilated_attention_pytorch.ops.run import as_rows, with_scale, without_padding
from dilated_attention_pytorch.ops.validation import check_call, sequence_first
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.plan.heads import Heads
from dilated_attention_pytorch.plan.layout import Layout, Shards, with_rows
from dilated_attention_pytorch.plan.shards import ShardedCall
from dilated_attention_pytorch.precision import cast_by_autocast

from .agreement import Agreed, Keywords, agree
from .first_derivative import refuse_other_derivatives
from .heads import Route, RowRanges, ToHeads, ToRows, to_heads
from .sequence import LayerTask, SequenceAttention
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
    heads_first: bool | None = None,
    impl: Impl = "auto",
) -> AttentionOutput:
    """:func:`attend` with the log-sum-exp ``[B, rows, H]`` of this rank's rows. Both have exact gradients.

    Arguments and errors are those of :func:`attend`.
    """
    keywords = Keywords(
        strategy=strategy,
        layout=layout,
        sequence_length=sequence_length,
        key_sequence_length=key_sequence_length,
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        key_offset=key_offset,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        impl=impl,
    )
    out, lse = _attend(query, key, value, pattern, mesh, keywords, heads_first, is_lse_wanted=True)
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
    keywords = Keywords(
        strategy=strategy,
        layout=layout,
        sequence_length=sequence_length,
        key_sequence_length=key_sequence_length,
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        key_offset=key_offset,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        impl=impl,
    )
    out, _ = _attend(query, key, value, pattern, mesh, keywords, heads_first, is_lse_wanted=False)
    return out.transpose(1, 2) if heads_first else out


@torch.compiler.disable
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    mesh: DeviceMesh,
    keywords: Keywords,
    heads_first: bool | None,
    *,
    is_lse_wanted: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output and, if requested, log-sum-exp of this rank's rows."""
    ranks = ranks_of(mesh)
    with ranks.rows.announced():
        query, key, value = sequence_first(query, key, value, heads_first)
        call = Call(
            query,
            key,
            value,
            key_padding_mask=keywords.key_padding_mask,
            pattern=pattern,
            is_causal=keywords.is_causal,
            scale=keywords.scale,
            query_offset=keywords.query_offset,
            key_offset=keywords.key_offset,
            dropout_p=keywords.dropout_p,
        )
        check_call(call)
        refuse_other_derivatives(query, key, value)
        # Before the ranks compare their calls: autocast sets the dtype of the exchanged tensors.
        query, key, value = cast_by_autocast(query, key, value)
        agreed = agree(ranks, query, key, value, pattern, keywords, is_lse_wanted=is_lse_wanted)
    seed = torch.randint(2**62, (), device=query.device) if keywords.dropout_p > 0.0 else None
    mask = keywords.key_padding_mask
    if ranks.heads is None and agreed.strategy != "heads":
        return _by_rows(ranks, agreed, query, key, value, mask, pattern, seed, keywords)
    # Each rank gets all rows of some heads: of the whole sequence, or of its row group's part.
    communicator = ranks.heads or ranks.rows
    heads = Heads.split(query.shape[2], key.shape[2], communicator.size)
    query_ranges, key_ranges = (
        _row_ranges(ranks, rows, keywords.layout) for rows in (agreed.num_queries, agreed.num_keys)
    )
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    number = agreed.number if ranks.heads is None else agreed.heads_number
    route = Route(communicator, heads.queries, query_ranges, num_heads, 2 * number)
    kv_route = Route(communicator, heads.kv, key_ranges, num_kv_heads, 2 * number)
    query, key, value = ToHeads.apply(query, key, value, route, kv_route)
    if mask is not None:
        same_for_all = Route(communicator, ((0,),) * communicator.size, key_ranges, 1, 2 * number)
        mask = to_heads(mask.unsqueeze(-1).to(torch.uint8), same_for_all).squeeze(-1).bool()
    kv, _ = heads.kv_of_queries(communicator.rank, num_heads // num_kv_heads)
    if kv != heads.kv[communicator.rank]:
        index = torch.tensor([heads.kv[communicator.rank].index(head) for head in kv], device=key.device)
        key, value = key.index_select(2, index), value.index_select(2, index)
    pattern = pattern.for_heads(kv, num_kv_heads)
    if seed is not None:
        # Other heads of the same rows need other draws.
        seed = seed + (communicator.rank << 48)
    if ranks.heads is not None:
        out, lse = _by_rows(ranks, agreed, query, key, value, mask, pattern, seed, keywords)
    else:
        of_heads = call._replace(
            query=query,
            key=key,
            value=value,
            cu_seqlens=keywords.cu_seqlens,
            key_padding_mask=mask,
            dropout_seed=seed,
            pattern=pattern,
            impl=keywords.impl,
        )
        out, lse = attend_checked(of_heads)
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


def _by_rows(
    ranks: Ranks,
    agreed: Agreed,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_ignored: Tensor | None,
    pattern: Pattern,
    seed: Tensor | None,
    keywords: Keywords,
) -> tuple[Tensor, Tensor]:
    """Ring or gather along the first axis."""
    query, scale = with_scale(query, keywords.scale)
    key, value = (without_padding(x, is_ignored) for x in (key, value))
    query, key, value = (as_rows(x) for x in (query, key, value))
    call = ShardedCall(pattern, key.shape[2], keywords.is_causal, keywords.query_offset, agreed.documents)
    shards = Shards(agreed.num_queries, ranks.rows.size, keywords.layout)
    options = Options(call, scale, IMPLEMENTATIONS[agreed.impl], keywords.dropout_p)
    task = LayerTask(options, ranks.rows, shards, agreed.strategy == "gather", agreed.number)
    out, lse = SequenceAttention.apply(query, key, value, is_ignored, seed, task)
    return out, lse
