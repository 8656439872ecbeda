"""The loop that times products alone computes products, of operands that lie as the kernels have them lie."""

from __future__ import annotations

import pytest
import torch
from benchmarks.products import factor_dtypes, load_products, sizes_of

from dilated_attention_pytorch.kernels.compilation import refusal_to_load

pytestmark = pytest.mark.skipif(refusal_to_load() is not None, reason=str(refusal_to_load()))


def test_what_is_timed_are_the_products_of_the_kernels() -> None:
    load_products()
    for dtype in factor_dtypes():
        for m, n, k, is_added in (size for sizes in sizes_of(48, dtype).values() for size in sizes):
            left, right = torch.randn(2, m, k).to(dtype), torch.randn(2, k, n).to(dtype)
            out = torch.ones(2, m, n)
            # Rows of bfloat16 lie in pairs.
            packed = right if dtype == torch.float32 else right.unflatten(1, (-1, 2)).transpose(2, 3).contiguous()
            torch.ops.dilated_attention_products.products(left, packed.reshape(right.shape), out, 2, is_added)
            once = left.float() @ right.float()
            torch.testing.assert_close(out, 1 + 2 * once if is_added else once, rtol=1e-4, atol=1e-4)
