"""Sequence-parallel attention as one autograd function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.plan.layout import Shards
from dilated_attention_pytorch.precision import without_autocast

from .communicator import Communicator
from .first_derivative import first_derivative
from .gather import Gather
from .ring import Ring
from .slab import Options, Slab


@dataclass(frozen=True, slots=True)
class RankCall:
    """One call on one rank."""

    options: Options
    communicator: Communicator
    shards: Shards
    """Runs of every rank."""
    is_gathered: bool
    """Whether rows are exchanged by all-gather instead of the ring."""
    number: int
    """Tag of the call's messages."""

    def slab(self, *tensors: Any) -> Slab:
        return Slab(self.options, self.shards[self.communicator.rank], *tensors)

    def others(self, slab: Slab) -> Ring | Gather:
        route = Gather if self.is_gathered else Ring
        return route(self.communicator, self.shards, slab, self.number)


class SequenceAttention(torch.autograd.Function):
    """Output and log-sum-exp of this rank's rows ``[B, N, H, D]`` in one collective call."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_ignored: Tensor | None,
        seed: Tensor | None,
        distance_bias: Tensor | None,
        task: RankCall,
    ) -> tuple[Tensor, Tensor]:
        """Local attention first, while the first remote rows are in transit."""
        with without_autocast(query.device.type):
            slab = task.slab(query, key, value, is_ignored, seed, distance_bias)
            others = task.others(slab)
            others.begin()
            accumulated, merged = slab.forward_within()
            slab.merge(slab.own_seen_keys(), accumulated, merged)
            others.forward(lambda seen_keys: slab.merge(seen_keys, accumulated, merged))
            out, lse = slab.finish(accumulated, merged)
        ctx.save_for_backward(query, key, value, is_ignored, seed, distance_bias, out, merged, slab.rest)
        ctx.task = task
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """A collective: all ranks take part, whether or not their rows have a gradient."""
        query, key, value, is_ignored, seed, distance_bias, out, merged, rest = ctx.saved_tensors
        task: RankCall = ctx.task
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        with without_autocast(query.device.type):
            slab = task.slab(query, key, value, is_ignored, seed, distance_bias)
            slab.rest = rest
            others = task.others(slab)
            others.begin()
            grad_out = grad_out.contiguous()
            grad_query, grad_key, grad_value = slab.backward_within(out, merged, grad_out, grad_lse)
            state = slab.state(out, merged, grad_out, grad_lse)
            slab.add_own_gradients(state, grad_query, grad_key, grad_value)
            others.backward(lambda seen_keys: slab.gradients(seen_keys, state, grad_query), grad_key, grad_value)
        grads = (grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype))
        return (*grads, None, None, slab.of_terms.distance_bias, None)
