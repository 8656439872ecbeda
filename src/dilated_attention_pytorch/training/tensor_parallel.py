"""A LongNet's matrices split over the processes of one axis: heads, feed-forward and tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)

from dilated_attention_pytorch.models import LongNetConfig, LongNetLM
from dilated_attention_pytorch.models.blocks import Block


def split_matrices(model: LongNetLM, mesh: DeviceMesh) -> None:
    """Give this process its heads, its part of every feed-forward and its tokens, in place.

    Between the modules that the plan names everything is whole and equal in all processes (Megatron-LM, arXiv
    1909.08053): two sums over the processes per block, and in each of the two LayerNorms inside of it two small ones.

    Args:
        model: with whole weights, equal in all processes.
        mesh: one axis, whose size divides key/value heads, feed-forward and tokens.
    """
    config, size, rank = model.config, mesh.size(), mesh.get_local_rank()
    assert config.num_kv_heads is not None
    orders = row_orders(config, size)
    for name, parameter in model.named_parameters():
        order = order_of(name, orders)
        if order is not None:
            with torch.no_grad():
                parameter.copy_(parameter[order])
    for block in model.blocks:
        assert isinstance(block, Block)
        for part in (block.attention, block.feed_forward):
            assert part.inner_layernorm is not None
            part.inner_layernorm = SplitLayerNorm.like(part.inner_layernorm)
    parallelize_module(model, mesh, _plan(model))
    heads = config.num_kv_heads // size
    mine = range(rank * heads, (rank + 1) * heads)
    model.patterns = tuple(pattern.for_heads(mine, config.num_kv_heads) for pattern in model.patterns)


def _plan(model: LongNetLM) -> dict[str, ParallelStyle]:
    tied = model.head is None
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention_layernorm": Replicated(),
        "blocks.*.attention": Rows("in_proj_weight"),
        "blocks.*.attention.in_proj": PrepareModuleInputOutput(
            input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None),
            output_layouts=Shard(-1), desired_output_layouts=Shard(-1),
        ),
        "blocks.*.attention.inner_layernorm": Rows("weight", "bias"),
        "blocks.*.attention.out_proj": RowwiseParallel(),
        "blocks.*.feed_forward_layernorm": Replicated(),
        "blocks.*.feed_forward.in_proj": ColwiseParallel(),
        "blocks.*.feed_forward.inner_layernorm": Rows("weight", "bias"),
        "blocks.*.feed_forward.out_proj": RowwiseParallel(),
        "layernorm": Replicated(),
        # All tokens' logits come together again: of 256 bytes that is less than one hidden state.
        "out_proj": PrepareModuleInputOutput(
            input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None),
            output_layouts=Shard(-1), desired_output_layouts=Replicate(),
        ),
    }  # fmt: skip
    return plan if tied else {**plan, "head": Rows("weight")}


def row_orders(config: LongNetConfig, size: int) -> dict[str, Tensor]:
    """How the rows of the fused matrices are ordered while ``size`` processes share them, by the end of their names.

    Process t has the t-th of equal runs of rows, which are to be its query, key and value heads, its gate and up.
    """
    assert config.num_kv_heads is not None
    assert config.ffn_dim is not None
    width = config.embed_dim // config.num_heads
    kv = config.num_kv_heads * width
    orders = {"attention.in_proj_weight": _dealt((config.embed_dim, kv, kv), size)}
    if config.activation == "swiglu":
        orders["feed_forward.in_proj.weight"] = _dealt((config.ffn_dim, config.ffn_dim), size)
    return orders


def order_of(name: str, orders: dict[str, Tensor]) -> Tensor | None:
    """The order of the parameter with that name; None where rows keep theirs."""
    return next((order for end, order in orders.items() if name.endswith(end)), None)


def _dealt(widths: tuple[int, ...], size: int) -> Tensor:
    parts = torch.arange(sum(widths)).split(widths)
    return torch.cat([part.tensor_split(size)[rank] for rank in range(size) for part in parts])


class Rows(ParallelStyle):
    """Split the rows of the parameters with these names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            whole = module.get_parameter(name).detach()
            split = distribute_tensor(whole, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(split))
        return module


class Replicated(ParallelStyle):
    """Every process computes the same from the same; its parameters are DTensors, as an optimizer wants all alike."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Declared as if they returned nothing; what they return takes the place of input and output.
        return distribute_module(module, device_mesh, input_fn=_enter, output_fn=_leave)  # type: ignore[arg-type]


def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)


def _leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.to_local()


class SplitLayerNorm(nn.LayerNorm):
    """LayerNorm over a width of which every process has a part: sums travel, where PyTorch's would collect the rows."""

    @classmethod
    def like(cls, whole: nn.LayerNorm) -> SplitLayerNorm:
        """With the parameters of ``whole``."""
        (width,) = whole.normalized_shape
        split = cls(width, eps=whole.eps, device="meta")
        split.weight, split.bias = whole.weight, whole.bias
        return split

    def forward(self, x: Tensor) -> Tensor:
        """This process's part of the rows, and of the result; in float32 inside where ``x`` has less."""
        assert isinstance(self.weight, DTensor)
        assert isinstance(self.bias, DTensor)
        mesh, width = self.weight.device_mesh, self.weight.shape[0]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - _sum_over(mesh, wide) / width
        scaled = centred * torch.rsqrt(_sum_over(mesh, centred.square()) / width + self.eps)
        return (scaled * self.weight.to_local() + self.bias.to_local()).to(x.dtype)


def _sum_over(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Over the last dimension of all processes' parts, in each of them; so is its gradient."""
    parts = DTensor.from_local(x.sum(dim=-1, keepdim=True), mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
