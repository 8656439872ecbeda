"""What the fused kernels of other devices are given, as far as it can be seen without such a device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dilated_attention_pytorch.kernels import fused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_flash_kernel_of_cuda_takes_strided_views(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        q = torch.empty_strided((2, 3, 37, 64), (111 * 384, 128, 3 * 384, 1), dtype=dtype, device="cuda")
        k = torch.empty_strided((2, 3, 41, 64), (41 * 192, 64, 192, 1), dtype=dtype, device="cuda")
        out, lse = fused.forward(q, k, k, None, is_causal=False, scale=0.1)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
        grads = fused.backward(out, q, k, k, out, lse, None, is_causal=False, scale=0.1)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("rows", [20, 32, 64])
def test_the_memory_efficient_kernel_gets_a_log_sum_exp_whose_rows_are_contiguous(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def kernel(*operands: torch.Tensor, **_: object) -> tuple[torch.Tensor, ...]:
        seen.append(operands[6])
        return operands[1], operands[2], operands[3], operands[1]

    class Aten:
        _scaled_dot_product_efficient_attention_backward = staticmethod(kernel)

    class Ops:
        aten = Aten

    q = torch.empty(1, 2, rows, 8, device="meta")
    lse = torch.empty(1, rows, 2, device="meta").transpose(1, 2)
    monkeypatch.setattr(torch, "ops", Ops)
    fused.backward(q, q, q, q, q, lse, None, is_causal=False, scale=0.1)
    assert seen[0].stride(-1) == 1
    assert seen[0].shape[-1] % 32 == 0
