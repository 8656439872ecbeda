"""The Triton kernels behind the operator: opcheck, tracing without a graph break, capture in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern, attend, local_window
from dilated_attention_pytorch.ops import operators
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from support.triton_calls import DEVICE

PATTERN = DilatedPattern([7, 16], [1, 3])


def leaves(rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((1, rows, 2, 16), (1, rows, 1, 16), (1, rows, 1, 16))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


# opcheck's own comparison reads the gradient of a tensor that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "is_packed",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["dropout, a window and terms", "packed, padded and in the plane"],
)
def test_opcheck(is_packed: bool) -> None:
    q, k, v = leaves(13)
    options: dict[str, Any] = {
        "distance_bias": torch.randn(2, 1, device=DEVICE).requires_grad_(),
        "coordinates": torch.randn(1, 2, 13, device=DEVICE),
        "cu_seqlens": torch.tensor([0, 9, 13], dtype=torch.int32, device=DEVICE),
        "key_padding_mask": torch.arange(13, device=DEVICE)[None] % 3 == 1,
    }
    if not is_packed:
        options = {"dropout_seed": torch.tensor(5, device=DEVICE), "dropout_p": 0.3, "softcap": 2.0}
        terms = (torch.randn(2, 25, device=DEVICE), torch.randn(1, 13, 1, device=DEVICE))
        options |= dict(zip(("distance_bias", "key_bias"), (x.requires_grad_() for x in terms), strict=True))
        v = v.detach()[..., :5].requires_grad_()
    pattern = PATTERN if is_packed else PATTERN + local_window(4)
    triton = IMPLEMENTATIONS["triton"]
    call = Call(q, k, v, pattern=pattern, is_causal=True, scale=0.3, impl=triton, **options).for_operator()
    torch.library.opcheck(operators.attend, call)
    out, lse = operators.attend(*call)
    with torch.no_grad():
        arguments = (torch.randn_like(out), torch.randn_like(lse), out, lse, *call)
        torch.library.opcheck(operators.attend_backward, arguments)


def test_compiled_without_a_graph_break_equals_eager() -> None:
    torch._dynamo.reset()

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q.sin(), k, v, PATTERN, is_causal=True, impl="triton").cos()

    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    inputs = leaves(19)
    eager, traced = compute(*inputs), compiled(*inputs)
    assert torch.equal(eager, traced)
    grads = [torch.autograd.grad(out.square().sum(), inputs) for out in (eager, traced)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_captured_graph_replays_forward_and_backward_on_new_values() -> None:
    inputs = leaves(300, torch.bfloat16)
    bounds = torch.tensor([0, 100, 300], dtype=torch.int32, device=DEVICE)

    def compute() -> tuple[torch.Tensor, ...]:
        out = attend(*inputs, PATTERN, is_causal=True, cu_seqlens=bounds, impl="triton")
        # Detached: a graph kept alive would tie the leaves to the stream of its first pass.
        return (out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
        bounds.copy_(torch.tensor([0, 250, 300], dtype=torch.int32))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, compute(), strict=True))
