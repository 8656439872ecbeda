"""Tensor parallelism of LongNet: heads, feed-forward and vocabulary split over the processes of one axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from dilated_attention_pytorch.models import LongNetConfig, LongNetLM
from dilated_attention_pytorch.models.blocks import LongNetBlock
from dilated_attention_pytorch.patterns import Pattern


def split_matrices(model: LongNetLM, mesh: DeviceMesh) -> None:
    """Give this process its heads, its part of every feed-forward and of the vocabulary, in place.

    Between the planned modules, activations are whole and equal in all processes (Megatron-LM, arXiv
    1909.08053): two all-reduces per block, and two small ones in each of its two inner LayerNorms.

    Args:
        model: with full weights, equal in all processes.
        mesh: one axis, whose size divides key/value heads, feed-forward and vocabulary.
    """
    config = model.config
    orders = row_orders(config, mesh.size())
    for name, parameter in model.named_parameters():
        order = order_of(name, orders)
        if order is not None:
            with torch.no_grad():
                parameter.copy_(parameter[order])
    for block in model.blocks:
        assert isinstance(block, LongNetBlock)
        for part in (block.attention, block.feed_forward):
            assert part.inner_layernorm is not None
            part.inner_layernorm = SplitLayerNorm.like(part.inner_layernorm)
    parallelize_module(model, mesh, _plan())
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    model.patterns = own_patterns(model.patterns, config, mesh)


def own_patterns(patterns: tuple[Pattern, ...], config: LongNetConfig, mesh: DeviceMesh) -> tuple[Pattern, ...]:
    """The patterns of this process's heads, of those of all heads."""
    assert config.num_kv_heads is not None
    heads = config.num_kv_heads // mesh.size()
    own = range(mesh.get_local_rank() * heads, (mesh.get_local_rank() + 1) * heads)
    return tuple(pattern.for_heads(own, config.num_kv_heads) for pattern in patterns)


def _plan() -> dict[str, ParallelStyle]:
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention_layernorm": Replicated(),
        "blocks.*.attention.q_proj": ColwiseParallel(),
        "blocks.*.attention.k_proj": ColwiseParallel(),
        "blocks.*.attention.v_proj": ColwiseParallel(),
        "blocks.*.head_gates.proj": ColwiseParallel(),
        "blocks.*.key_convolution": SplitHeads(),
        "blocks.*.attention.inner_layernorm": SplitRows("weight", "bias"),
        "blocks.*.attention.out_proj": RowwiseParallel(),
        "blocks.*.feed_forward_layernorm": Replicated(),
        "blocks.*.feed_forward.in_proj": ColwiseParallel(),
        "blocks.*.feed_forward.inner_layernorm": SplitRows("weight", "bias"),
        "blocks.*.feed_forward.out_proj": RowwiseParallel(),
        "layernorm": Replicated(),
        # Logits are gathered: with 256 tokens they are smaller than one hidden state.
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def row_orders(config: LongNetConfig, size: int) -> dict[str, Tensor]:
    """Row orders of the fused matrices for sharding over ``size`` processes, by parameter name suffix.

    Process t gets the t-th of equal row ranges, which must contain its gate and up.
    """
    if config.activation != "swiglu":
        return {}
    assert config.ffn_dim is not None
    parts = torch.arange(2 * config.ffn_dim).split(config.ffn_dim)
    return {
        "feed_forward.in_proj.weight": torch.cat(
            [part.tensor_split(size)[rank] for rank in range(size) for part in parts]
        )
    }


def order_of(name: str, orders: dict[str, Tensor]) -> Tensor | None:
    """The row order of the parameter with that name; None if unchanged."""
    return next((order for end, order in orders.items() if name.endswith(end)), None)


class SplitRows(ParallelStyle):
    """Shard the rows of the parameters with these names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            full = module.get_parameter(name).detach()
            split = distribute_tensor(full, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(split))
        return module


class SplitHeads(ParallelStyle):
    """Each process's heads of ``weight [G, ...]``, for inputs and an output ``[B, N, G, D]`` of its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        SplitRows("weight")._apply(module, device_mesh)

        def enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
            return tuple(DTensor.from_local(rows, mesh, [Shard(2)], run_check=False) for rows in inputs)

        return distribute_module(module, device_mesh, input_fn=enter, output_fn=_leave)  # type: ignore[arg-type]


class Replicated(ParallelStyle):
    """Replicated computation; parameters are DTensors because an optimizer needs all parameters of one kind."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Annotated without a result; in fact the results replace input and output.
        return distribute_module(module, device_mesh, input_fn=_enter, output_fn=_leave)  # type: ignore[arg-type]


def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)


def _leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.to_local()


class SplitLayerNorm(nn.LayerNorm):
    """LayerNorm over a sharded width: sums are all-reduced, where PyTorch's would gather the rows."""

    @classmethod
    def like(cls, norm: nn.LayerNorm) -> SplitLayerNorm:
        """With the parameters of ``norm``."""
        (width,) = norm.normalized_shape
        split = cls(width, eps=norm.eps, device="meta")
        split.weight, split.bias = norm.weight, norm.bias
        return split

    def forward(self, x: Tensor) -> Tensor:
        """This process's shard of the result from its shard of the rows; computed in float32 or wider."""
        assert isinstance(self.weight, DTensor)
        assert isinstance(self.bias, DTensor)
        mesh, width = self.weight.device_mesh, self.weight.shape[0]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - _sum_over(mesh, wide) / width
        scaled = centred * torch.rsqrt(_sum_over(mesh, centred.square()) / width + self.eps)
        return (scaled * self.weight.to_local() + self.bias.to_local()).to(x.dtype)


def _sum_over(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """The sum over the last dimension of all processes' shards, and likewise its gradient."""
    parts = DTensor.from_local(x.sum(dim=-1, keepdim=True), mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
