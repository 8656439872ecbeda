"""Distributed dilated attention modules; inputs and outputs are this rank's rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.estimate.parallel import Strategy
from dilated_attention_pytorch.legacy.keywords import answers_old_keywords
from dilated_attention_pytorch.nn import DilatedAttention, MultiheadDilatedAttention
from dilated_attention_pytorch.ops.validation import check_size, check_switch
from dilated_attention_pytorch.plan.layout import Layout

from .agreement import check_strategy
from .attend import attend
from .communicator import world_mesh
from .sharding import check_layout

# Keywords that an __init__ below does not name are passed on to that of DilatedAttention, which rejects unknown ones.


class ParallelDilatedAttention(DilatedAttention):
    """:class:`DilatedAttention` over a sequence whose rows are sharded over ranks, see :func:`attend`.

    In a single process it equals the local module.

    Args:
        segment_lengths, dilation_rates, dropout: as in :class:`DilatedAttention`.
        mesh: the ranks that share a sequence; None = all ranks of the process group that exists at the first call.
        strategy, layout, sequence_length: see :func:`attend`; attributes that can be changed later.
        options: the other keywords of :class:`DilatedAttention`.

    Raises:
        TypeError, ValueError: see :class:`DilatedAttention`.

    >>> from dilated_attention_pytorch import parallel
    >>> attention = parallel.ParallelDilatedAttention([128, 512], [1, 4], strategy="ring")
    >>> q = k = v = torch.randn(2, 1000, 8, 64)
    >>> attention(q, k, v, is_causal=True).shape  # one process: the local call
    torch.Size([2, 1000, 8, 64])
    """

    @answers_old_keywords
    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        mesh: DeviceMesh | None = None,
        strategy: Strategy = "auto",
        layout: Layout = "contiguous",
        sequence_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout, **options)
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a DeviceMesh, or None for all ranks, got {type(mesh).__name__}")
        check_layout(layout)
        check_strategy(strategy)
        if sequence_length is not None:
            check_size("sequence_length", sequence_length)
        self.mesh = mesh
        self.strategy: Strategy = strategy
        self.layout: Layout = layout
        self.sequence_length = sequence_length

    def _mesh_for(self, device_type: str) -> DeviceMesh | None:
        """The ranks that share the sequence of a call on such devices; None in a single process."""
        return world_mesh(device_type) if self.mesh is None else self.mesh

    def _function_for(self, query: Tensor, heads_first: bool | None) -> Callable[..., Tensor]:
        """See :func:`attend`: query, key, value and the result are this rank's rows."""
        mesh = self._mesh_for(query.device.type)
        if mesh is not None:
            return functools.partial(
                attend, mesh=mesh, strategy=self.strategy, layout=self.layout, sequence_length=self.sequence_length
            )
        rows = query.shape[2 if heads_first else 1] if query.dim() == 4 else self.sequence_length
        if self.sequence_length not in (None, rows):
            raise ValueError(
                f"sequence_length must be the rows of the whole sequence, which one process holds all of: got "
                f"{self.sequence_length} and {rows} rows of query; start the program with torchrun and "
                "torch.distributed.init_process_group(), or leave sequence_length out"
            )
        return super()._function_for(query, heads_first)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, strategy={self.strategy!r}, layout={self.layout!r}"


class RingDilatedAttention(ParallelDilatedAttention):
    """:class:`ParallelDilatedAttention` with the ring strategy: rows of keys travel between ranks; O(N / ranks) memory.

    Args:
        ring_size: expected number of ranks; None = any number, including a single process.

    Raises:
        TypeError, ValueError: ``ring_size`` is not a valid number of ranks. In a call: the number of ranks differs from
            ``ring_size``; a single process is one rank.

    >>> from dilated_attention_pytorch import parallel
    >>> attention = parallel.RingDilatedAttention([2048, 4096, 8192], [1, 2, 4])
    >>> q = k = v = torch.randn(1, 100, 4, 16)
    >>> attention(q, k, v).shape
    torch.Size([1, 100, 4, 16])
    """

    @answers_old_keywords
    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        ring_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout, strategy="ring", **options)
        if ring_size is not None:
            check_size("ring_size", ring_size)
        self.ring_size = ring_size

    def _mesh_for(self, device_type: str) -> DeviceMesh | None:
        mesh = super()._mesh_for(device_type)
        num_ranks = 1 if mesh is None else mesh.size()
        if self.ring_size is not None and num_ranks != self.ring_size:
            raise ValueError(
                f"ring_size must be the number of ranks that share the sequence, {num_ranks} here, got "
                f"{self.ring_size}; start the program with torchrun --nproc-per-node {self.ring_size} and "
                "torch.distributed.init_process_group(), pass mesh= for another set of ranks, or leave ring_size out"
            )
        return mesh


class HybridRingDilatedAttention(ParallelDilatedAttention):
    """:class:`ParallelDilatedAttention` on a 2-D mesh: heads are split within the rows of the mesh, a ring across them.

    The partials of all steps are merged by their log-sum-exp.

    Args:
        mesh: ``init_device_mesh(device, (nodes, ranks per node))``; optional in a single process.

    Raises:
        ValueError: the mesh does not have two dimensions.
    """

    @answers_old_keywords
    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        if mesh is not None and mesh.ndim != 2:
            raise ValueError(f"mesh must have two dimensions, one for rows and one for heads, got {mesh.ndim}")
        super().__init__(segment_lengths, dilation_rates, dropout, mesh=mesh, strategy="ring", **options)

    def _mesh_for(self, device_type: str) -> DeviceMesh | None:
        mesh = super()._mesh_for(device_type)
        if self.mesh is None and mesh is not None:
            raise ValueError(
                "mesh must be given where there are several ranks: init_device_mesh(device, (nodes, ranks of a node))"
            )
        return mesh


class HeadParallelDilatedAttention(ParallelDilatedAttention):
    """:class:`ParallelDilatedAttention` with the heads strategy: all-to-all to all rows of some heads (Ulysses)."""

    @answers_old_keywords
    def __init__(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout, strategy="heads", **options)


class DistributedDilatedAttention(ParallelDilatedAttention):
    """:class:`ParallelDilatedAttention` with the strategy given by what is sharded.

    Args:
        sequence_parallel: shard rows (``strategy="ring"``).
        model_parallel: shard heads (``strategy="heads"``). With both, on a 2-D ``mesh``, heads are split along its
            second axis and the ring runs along its first.

    Raises:
        ValueError: both are False; or both are True and the mesh does not have two dimensions.
    """

    @answers_old_keywords
    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        sequence_parallel: bool = True,
        model_parallel: bool = False,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        check_switch("sequence_parallel", sequence_parallel)
        check_switch("model_parallel", model_parallel)
        if not sequence_parallel and not model_parallel:
            raise ValueError(
                "sequence_parallel and model_parallel are both False, so nothing is sharded: use DilatedAttention"
            )
        is_both = sequence_parallel and model_parallel
        if is_both and mesh is not None and mesh.ndim != 2:
            raise ValueError(
                "sequence_parallel and model_parallel together need a mesh of two dimensions, "
                f"init_device_mesh(device, (ring, heads)), got {mesh.ndim}"
            )
        strategy: Strategy = "ring" if sequence_parallel else "heads"
        super().__init__(segment_lengths, dilation_rates, dropout, mesh=mesh, strategy=strategy, **options)
        self._is_both = is_both

    def _mesh_for(self, device_type: str) -> DeviceMesh | None:
        mesh = super()._mesh_for(device_type)
        if self._is_both and self.mesh is None and mesh is not None:
            raise ValueError(
                "sequence_parallel and model_parallel together need a mesh of two dimensions where there are several "
                "ranks: mesh=init_device_mesh(device, (ring, heads))"
            )
        return mesh


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """:class:`MultiheadDilatedAttention` on this rank's rows ``[B, rows, E]``, with the ring strategy.

    Projections act per row, so only attention communicates. The parameters are those of the local module.

    Args:
        embed_dim, num_heads, segment_lengths, dilation_rates, dropout: as in :class:`MultiheadDilatedAttention`.
        ring_size: see :class:`RingDilatedAttention`.
        mesh, layout, sequence_length: see :class:`ParallelDilatedAttention`.
        options: the other keywords of :class:`MultiheadDilatedAttention`.

    >>> from dilated_attention_pytorch import parallel
    >>> attention = parallel.RingMultiheadDilatedAttention(64, 4, [128, 512], [1, 4])
    >>> x = torch.randn(2, 100, 64)
    >>> attention(x, x, x, is_causal=True)[0].shape
    torch.Size([2, 100, 64])
    """

    @answers_old_keywords
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        ring_size: int | None = None,
        mesh: DeviceMesh | None = None,
        layout: Layout = "contiguous",
        sequence_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, dropout, **options)
        local, pattern = self.attention, self.pattern
        self.attention = RingDilatedAttention(
            segment_lengths,
            dilation_rates,
            dropout,
            ring_size=ring_size,
            mesh=mesh,
            layout=layout,
            sequence_length=sequence_length,
            softmax_scale=local.softmax_scale,
            offset_rule=pattern.offset_rule,
            tail=pattern.tail,
            segment_shift=pattern.segment_shift,
            impl=local.impl,
        )
