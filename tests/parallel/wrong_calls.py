"""Wrong calls of ``parallel.attend`` and its companions, made by all ranks alike."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dilated_attention_pytorch import DilatedPattern, from_block_mask, local_window, parallel
from dilated_attention_pytorch.patterns import SegmentedPattern

PATTERN = DilatedPattern([4, 16], [1, 2])
PADDED_TAIL = DilatedPattern([4, 16], [1, 2], tail="zero_padded")
BOUNDARIES = torch.tensor([0, 5, 16], dtype=torch.int32)

# what is wrong, arguments beside the right ones, the error, what its message says
CALLS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("mesh", {"mesh": 2}, TypeError, r"mesh must be a DeviceMesh, such as init_device_mesh.*got int"),
    ("strategy", {"strategy": "torus"}, ValueError, r"strategy must be one of 'auto', 'ring', 'gather', 'heads', got "),
    ("layout", {"layout": "striped"}, ValueError, r"layout must be one of 'contiguous', 'zigzag', got 'striped'"),
    ("length", {"sequence_length": 19}, ValueError, r"query must have this rank's (10|9) of the 19 rows \(rank [01] of "
     r"2, layout 'contiguous'\), got 8; parallel.shard gives every rank its rows"),
    ("boundaries", {"cu_seqlens": BOUNDARIES.long()}, TypeError, r"cu_seqlens must be an int32 tensor"),
    ("boundaries of the rank", {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}, ValueError,
     r"query must have this rank's 4 of the 8 rows"),
    ("boundaries and offset", {"cu_seqlens": BOUNDARIES, "query_offset": 4, "key_offset": 4}, ValueError,
     r"same rows starting at position 0: got 16 query rows at 4 and 16 key rows at 4"),
    ("offsets by ring", {"query_offset": 16}, NotImplementedError, r"strategy='ring' is for self-attention.*use "
     r'strategy="heads" on a 1-D mesh'),
    ("offset on the device", {"query_offset": torch.tensor(0), "is_causal": True}, NotImplementedError,
     r"query_offset is a tensor.*pass an integer"),
    ("tail by gather", {"pattern": PADDED_TAIL, "strategy": "gather"}, NotImplementedError,
     r'tail="zero_padded" needs whole segments.*strategy="heads"'),
    ("rules by gather", {"pattern": PATTERN + local_window(3), "strategy": "gather"}, NotImplementedError,
     r"strategy='gather' gathers whole segments.*use strategy=\"ring\", or strategy=\"heads\""),
    ("ragged segments by ring", {"pattern": SegmentedPattern([[0, 5]], [1])}, NotImplementedError,
     r"strategy='ring' needs segments of one length.*use strategy=\"heads\""),
    ("ragged segments by plan", {"pattern": SegmentedPattern([[0, 5]], [1]), "strategy": "auto"}, NotImplementedError,
     r'plans count segments of one length.*strategy="heads"'),
    ("a mask of this rank's blocks", {"pattern": from_block_mask(torch.ones(1, 2, 2, dtype=torch.bool), 4)}, ValueError,
     r"the block mask covers 8 positions.*got 16; make a mask of 4 blocks"),
    ("reference by ring", {"impl": "reference"}, NotImplementedError, r'impl="reference" needs whole sequences'),
    ("more ranks than heads", {"strategy": "heads", "heads": 1}, ValueError, r"at least one query head for every rank "
     r'of the axis: got 1 heads and 2 ranks; use a smaller axis for the heads, or strategy="ring"'),
    ("pattern", {"pattern": [4, 16]}, TypeError, r"pattern must be a Pattern"),
    ("mask", {"key_padding_mask": torch.zeros(1, 16, dtype=torch.bool)}, ValueError,
     r"key_padding_mask must have the shape \[B, M\] = \(1, 8\) of key, got \(1, 16\)"),
    ("dropout", {"dropout_p": 1.5}, ValueError, r"dropout_p must be a probability"),
]  # fmt: skip

# the same of previous_rows
CALLS_OF_ROWS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("rows", {"rows": [1.0]}, TypeError, r"rows must be a floating-point tensor \[batch, rows, ...\], got list"),
    ("dtype of rows", {"rows": torch.ones(1, 8).int()}, TypeError, r"rows must be a floating-point.*got torch.int32"),
    ("shape of rows", {"rows": torch.ones(8)}, ValueError,
     r"rows must have the dimensions \[batch, rows, ...\], got the shape \(8,\)"),
    ("no rows before", {"count": 0}, ValueError, r"count must be at least 1, got 0"),
    ("count", {"count": 1.0}, TypeError, r"count must be an integer, got 1.0 of type float"),
    ("layout of rows", {"layout": "x"}, ValueError, r"layout must be one of 'contiguous', 'zigzag', got 'x'"),
    ("length of rows", {"sequence_length": 19}, ValueError, r"rows must have this rank's (10|9) of the 19 rows.*got 8"),
]  # fmt: skip


def refused() -> list[str]:
    """The wrong calls whose error is not the expected one, with what came."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []

    def attend(heads: int = 2, **changes: Any) -> None:
        q = torch.zeros(1, 8, heads, 4)
        parallel.attend(q, q, q, **{"mesh": mesh, "strategy": "ring", "pattern": PATTERN, **changes})

    def previous_rows(**changes: Any) -> None:
        parallel.previous_rows(**{"mesh": mesh, "rows": torch.zeros(1, 8, 2), "count": 1, **changes})

    calls = [(attend, *row) for row in CALLS] + [(previous_rows, *row) for row in CALLS_OF_ROWS]
    for call, what, changes, error, message in calls:
        try:
            call(**changes)
            found.append(f"{what}: accepted")
        except Exception as came:  # noqa: BLE001 - compared with what is expected
            if type(came) is not error or not re.search(message, str(came), re.DOTALL):
                found.append(f"{what}: {type(came).__name__}: {came}")
    q = torch.zeros(1, 8, 2, 4)
    try:
        parallel.attend(q, q, q, PATTERN, mesh=DeviceMesh("cpu", [1, 0]))
        found.append("order of the mesh: accepted")
    except ValueError as came:
        if "must ascend, as process groups order them: got the mesh [1, 0]" not in str(came):
            found.append(f"order of the mesh: {came}")
    found += _other_derivatives(mesh)
    parallel.attend(q, q, q, PATTERN, mesh=mesh)  # nothing of it stays
    return found


def _other_derivatives(mesh: DeviceMesh) -> list[str]:
    """The derivatives beside the gradient that are not refused, or not by the sentence."""
    q, found = torch.randn(1, 8, 2, 4), []

    def attended(strategy: str) -> Callable[[Tensor], Tensor]:
        return lambda x: parallel.attend(x, x, x, PATTERN, mesh=mesh, strategy=strategy)

    def dual(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return function(forward_ad.make_dual(x, x))

    def with_a_graph(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        # A gradient of the result without a graph of its own: what PyTorch takes for a constant.
        return torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)[0]

    ways: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
        "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
        "grad": lambda function, x: torch.func.grad(lambda y: function(y).sum())(x),
        "vmap": lambda function, x: torch.func.vmap(function)(x.unsqueeze(0)),
        "dual": dual,
        "create_graph": with_a_graph,
    }
    functions = {strategy: attended(strategy) for strategy in ("ring", "gather", "heads")}
    functions["unshard"] = lambda x: parallel.unshard(x, mesh)
    functions["previous_rows"] = lambda x: parallel.previous_rows(x, 1, mesh=mesh)[0]
    for (name, function), (way, derivative) in itertools.product(functions.items(), ways.items()):
        try:
            derivative(function, q)
            found.append(f"{way} of {name}: accepted")
        except NotImplementedError as came:
            if "over several ranks has a gradient and no other derivative" not in str(came):
                found.append(f"{way} of {name}: {came}")
        except Exception as came:  # noqa: BLE001 - reported
            found.append(f"{way} of {name}: {type(came).__name__}: {came}")
    return found
