"""Distributed generation: a rank's share of the key/value cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.estimate.parallel import Strategy
from dilated_attention_pytorch.ops import AttentionOutput, merge
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.plan.layout import Layout, shard_runs

from .agreement import check_strategy
from .attend import attend
from .communicator import communicator_of
from .failure import RankFailure
from .previous_rows import previous_rows
from .sharding import check_layout, positions, shard

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd multiplier with well-mixed bits: 2**64 / golden ratio


class RankShare:
    """This rank's share of a key/value cache sharded over the ranks of a mesh, for ``LongNetCache(share=)``.

    The prompt is read once, each rank its rows of ``layout``. Afterwards each key/value row is held by one rank: blocks
    of positions are dealt round-robin, so that each rank holds about 1/p of the live rows of every dilation class.
    Prompt rows are sent to these ranks once, right after the layer that computed them. For each token, the ranks'
    partials are merged exactly, with one message of ``H (D + 1)`` numbers per sequence, layer and rank.

    Args:
        mesh: 1-D mesh of the ranks that hold the cache. Each has the whole model.
        strategy, layout: how the prompt is processed, see :func:`attend`.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or value.
        NotImplementedError: the mesh has several dimensions.

    >>> from dilated_attention_pytorch import LongNetCache, generate
    >>> def on_every_rank(model, prompt_ids, mesh):  # prompt_ids [B, N], whole and the same on every rank
    ...     cache = LongNetCache(model.config, share=RankShare(mesh, layout="zigzag"))
    ...     yield from generate(model, prompt_ids, 1000, cache=cache)  # [B], the same on every rank
    """

    def __init__(self, mesh: DeviceMesh, *, strategy: Strategy = "auto", layout: Layout = "contiguous") -> None:
        self._communicator = communicator_of(mesh)
        if mesh.ndim != 1:
            raise NotImplementedError(
                f"a cache is shared over the ranks of one dimension, got a mesh of shape {tuple(mesh.shape)}: make a "
                "mesh of one dimension of these ranks, or take one of its dimensions with mesh[name]"
            )
        check_strategy(strategy)
        self.mesh = mesh
        self.strategy = strategy
        self.layout = check_layout(layout)

    @property
    def rank(self) -> int:
        """Index of this rank in the mesh."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks that hold the cache."""
        return self._communicator.size

    def positions(self, sequence_length: int, device: torch.device) -> Tensor:
        """int64 ``[rows]``: this rank's rows of a prompt, ascending."""
        return positions(sequence_length, self.mesh, layout=self.layout, device=device)

    def rows(self, input_ids: Tensor) -> Tensor:
        """This rank's columns of ``input_ids [B, N]``."""
        return shard(input_ids, self.mesh, layout=self.layout)

    def check_same(self, input_ids: Tensor) -> None:
        """Check that all ranks have the same tokens.

        Raises:
            RankFailure: they differ; the message names a rank that differs.
        """
        weights = torch.arange(1, input_ids.numel() + 1, device=input_ids.device) * _MIX
        digest = ((input_ids.flatten() + 1) * (weights ^ (weights >> 29))).sum()  # modulo 2**64
        shape = torch.tensor(input_ids.shape, device=input_ids.device)
        number = self._communicator.agree({"call": "comparing prompts"})
        digests = self._communicator.all_gather(torch.cat([shape, digest.view(1)]), tag=2 * number).tolist()
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise RankFailure(
                    "every rank must have the whole prompt, the same tokens: those of rank "
                    f"{self._communicator.ranks[rank]}, of shape {tuple(other[:2])}, differ from those of rank "
                    f"{self._communicator.ranks[0]}, of shape {tuple(digests[0][:2])}; read the prompt on one rank "
                    "and send it to the others"
                )

    def row_at(self, rows: Tensor, position: int, sequence_length: int) -> Tensor:
        """The row at ``position`` of a tensor sharded as ``[B, rows, ...]``: ``[B, ...]`` on every rank."""
        holder, row = (int(number) for number in self._locate(torch.tensor(position), sequence_length))
        sent = rows[:, row].contiguous() if holder == self.rank else rows.new_empty(rows.shape[0], *rows.shape[2:])
        return self._communicator.broadcast(sent, holder)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, sequence_length: int) -> Tensor:
        """Causal attention of this rank's rows of a prompt to the whole prompt."""
        return attend(
            query,
            key,
            value,
            pattern,
            mesh=self.mesh,
            strategy=self.strategy,
            layout=self.layout,
            sequence_length=sequence_length,
            is_causal=True,
            heads_first=False,
        )

    def previous_rows(self, rows: Tensor, count: int, sequence_length: int) -> tuple[Tensor, ...]:
        """See :func:`parallel.previous_rows`, for this rank's rows ``[B, rows, ...]`` of a prompt."""
        return previous_rows(rows, count, mesh=self.mesh, layout=self.layout, sequence_length=sequence_length)

    def last_rows(self, rows: Tensor, count: int, sequence_length: int) -> Tensor:
        """The rows at the last ``count`` positions of a prompt sharded as ``[B, rows, ...]``, on every rank.

        Returns:
            ``[B, count, ...]``, beginning with zeros if the prompt is shorter.
        """
        batch, num_rows, *rest = rows.shape
        first = max(0, sequence_length - count)
        wanted = torch.arange(first, sequence_length)
        dealt = self.deal(rows.reshape(batch, num_rows, 1, math.prod(rest)), [wanted] * self.size, sequence_length)
        last = rows.new_zeros(batch, count, *rest)
        last[:, count - len(wanted) :] = dealt.view(batch, len(wanted), *rest)
        return last

    def deal(self, rows: Tensor, indices: Sequence[Tensor], sequence_length: int) -> Tensor:
        """Send rows ``[B, rows, G, D]`` of a prompt to the ranks that store them.

        Args:
            rows: this rank's rows.
            indices: per rank, the flat indices ``position * G + head`` that it stores.
            sequence_length: length of the prompt.

        Returns:
            ``[B, len(indices[rank]), D]``: the rows that this rank stores.
        """
        number = self._communicator.agree(
            {
                "call": "rows of a prompt to the ranks that store them",
                "sequence_length": sequence_length,
                "batch": rows.shape[0],
                "heads": rows.shape[2],
                "dtype": rows.dtype,
            }
        )
        num_heads, flat = rows.shape[2], rows.flatten(1, 2)
        located = [self._locate(wanted // num_heads, sequence_length) for wanted in indices]
        sends = {}
        for rank, (wanted, (holders, local)) in enumerate(zip(indices, located, strict=True)):
            here = holders == self.rank
            index = local[here] * num_heads + wanted[here] % num_heads
            sends[rank] = flat.index_select(1, index.to(flat.device))
        holders, _ = located[self.rank]
        targets = {rank: (holders == rank).nonzero().squeeze(1).to(flat.device) for rank in range(self.size)}
        dealt = flat.new_empty(flat.shape[0], holders.shape[0], flat.shape[2])
        receives = {
            rank: flat.new_empty(flat.shape[0], target.shape[0], flat.shape[2])
            for rank, target in targets.items()
            if rank != self.rank and target.shape[0]
        }
        own = sends.pop(self.rank)
        sends = {rank: sent for rank, sent in sends.items() if sent.shape[1]}
        pending = self._communicator.exchange(sends, receives, 2 * number, "sending rows to the ranks that store them")
        dealt.index_copy_(1, targets[self.rank], own)
        pending.wait()
        for rank, received in receives.items():
            dealt.index_copy_(1, targets[rank], received)
        return dealt

    def merge(self, partial: AttentionOutput) -> AttentionOutput:
        """The merge of all ranks' partials over the same queries."""
        both = torch.cat([partial.out, partial.lse.unsqueeze(-1)], dim=-1)
        call = {"call": "partials over a cache", "shape": tuple(partial.out.shape), "dtype": both.dtype}
        number = self._communicator.agree(call)
        return merge([(rank[..., :-1], rank[..., -1]) for rank in self._communicator.all_gather(both, tag=2 * number)])

    def agreed(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor, broadcast to every rank."""
        return self._communicator.broadcast(tensor.contiguous(), 0)

    def _locate(self, positions: Tensor, sequence_length: int) -> tuple[Tensor, Tensor]:
        """The rank that reads each position of a prompt, and the row index there."""
        starts, ranks, rows = _runs(sequence_length, self.size, self.layout)
        run = torch.searchsorted(starts, positions, right=True) - 1
        return ranks[run], positions - starts[run] + rows[run]


@functools.lru_cache(maxsize=16)
def _runs(sequence_length: int, num_ranks: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Every contiguous run of a prompt's rows, in order: first position, rank, first row on that rank."""
    runs = []
    for rank in range(num_ranks):
        row = 0
        for start, stop in shard_runs(sequence_length, num_ranks, rank, layout):
            runs.append((start, rank, row))
            row += stop - start
    starts, ranks, rows = torch.tensor(sorted(runs)).unbind(dim=1)
    return starts.contiguous(), ranks, rows
