"""Memory of one call: the sizes of the kernels' buffers are those that the library was built with."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.estimate.attention import kernel_bytes, operator_bytes, packed_bytes
from dilated_attention_pytorch.estimate.live_bytes import LiveBytes
from dilated_attention_pytorch.estimate.workload import Workload
from dilated_attention_pytorch.kernels import native
from dilated_attention_pytorch.kernels.select import refusal

pytestmark = pytest.mark.skipif(
    refusal("native", torch.device("cpu"), torch.float32, 64) is not None, reason="no native kernels"
)


def test_sizes_that_python_decides_by_are_those_of_the_library() -> None:
    assert native.sizes().keys_of_window == native.KEYS_OF_WINDOW


def test_keys_of_a_window_are_packed_up_to_the_size_of_the_buffer() -> None:
    sizes = native.sizes()
    assert packed_bytes(4096, 100, 128, torch.float32) == sizes.packed_bytes
    assert packed_bytes(100, 3, 128, torch.float32) == 3 * 112 * 2 * 64 * 4  # 100 keys in a block of 7 x 16
    wide = packed_bytes(10**6, 2, 1024, torch.float32)
    assert wide == sizes.keys_of_window * 2 * 512 * 4 > sizes.packed_bytes
    assert packed_bytes(0, 3, 128, torch.float32) == packed_bytes(100, 0, 128, torch.float32) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_of_a_call_have_the_bytes_of_its_sizes(dtype: torch.dtype) -> None:
    pattern = DilatedPattern([64, 256], [1, 4])
    query, key, value = (torch.randn(2, 300, heads, 8, dtype=dtype, requires_grad=True) for heads in (6, 3, 3))
    with LiveBytes(own_bytes=operator_bytes) as live:
        live.is_recording = True
        attend(query, key, value, pattern, is_causal=True, impl="native").float().sum().backward()
    own = {moment.attention: moment.own for moment in live.moments if moment.own}
    sizes = {"sequence_length": 300, "batch_size": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8}
    forward, backward = kernel_bytes(pattern, Workload(**sizes, dtype=dtype))
    assert own == {"attend": forward, "attend_backward": backward}
