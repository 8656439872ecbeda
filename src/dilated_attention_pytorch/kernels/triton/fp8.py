"""``impl="triton-fp8"``: the forward of :mod:`.forward` with products of e4m3 numbers, and a bound of its error.

Each row x of query, key or value, of one head, is stored as e4m3 numbers times a scale, the smallest power of two that
brings the row's largest absolute value to at most 448. A scale per row costs the kernel no more than a scale per block
of rows, because the rows of a run's block lie a rate apart. The numbers of a row depend on that row alone, so that
later keys do not change earlier ones, and a shard or a decoding step has the same numbers as the whole sequence.

Scores, maxima and sums are float32. A probability is multiplied by the scale of its value, divided by a bound of the
row's products so far, so that none exceeds 256, and rounded to e4m3 for the product with the values. The bound and the
256 are part of what the exponential subtracts anyway: they cost no instruction, and cancel in the division by the sum
of the probabilities, which are summed before they are rounded. 256 is used instead of 448 because a power of two is
exact.

*Error.* e4m3 has 3 bits of mantissa: the rounding error is at most ``u = 2^-4`` of the number, or ``2^-10``, half of
the smallest number, if that is larger. A row's largest number is at least 224, hence
``|x' - x| <= e(x) = u |x| + 2^-17 max|x|``.

- Score: ``|s' - s| <= d = scale (e(q) |k| + |q| e(k) + e(q) e(k))``. Hence the log-sum-exp is off by at most ``max d``,
  and a probability by a factor of at most ``exp(d + max d)``.
- Weight: off by ``u`` of itself, or by ``2^-10`` where the largest possible weight is 256: ``2^-17 max p max|v|`` in
  the output.
- Value: off by ``e(v)``.

To first order, an output is off by at most ``sum p (d + max d + 2 u) |v|``. This adds up errors that rarely coincide:
rounding errors are independent, with a root mean square of ``0.42 u``; for normal q and k, a score is then off by
``0.6 u``, and an output as a whole by ``0.85 u``, 5 % of its size. On compute capability 9.0 the device accumulates
products of e4m3 numbers with fewer bits than float32 has (14, according to https://arxiv.org/abs/2412.19437); the
kernel adds to float32 after every block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .problem import Problem, Scales
from .tiles import SIZES, rounded

_LINES = 16
_LARGEST = tl.constexpr(448.0)
"""The largest e4m3 number."""
_LEAST = tl.constexpr(2.0**-64)
"""Rows of smaller numbers are scaled as if this were their largest, so that products of scales stay within float32."""


def refusal(problem: Problem) -> str | None:
    """Why the kernel cannot compute a call on a device that supports it; None if it can."""
    if problem.dropout_p > 0.0:
        return "it has no dropout, as it is for calls without gradients"
    return None


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """:func:`.launch.forward` of query, key and value rounded to e4m3; the output is in the query's dtype.

    Raises:
        NotImplementedError: :func:`refusal` rejects the call, or its positions do not fit 32 bits.
    """
    reason = refusal(problem)
    if reason is not None:
        raise NotImplementedError(f'impl="triton-fp8" cannot compute this call: {reason}; impl="triton" can')
    with launch.on_device(problem.query):
        (query, of_query), (key, of_key), (value, of_value) = (
            quantized(x) for x in (problem.query, problem.key, problem.value)
        )
    scales = Scales(of_query, of_key, of_value, problem.query.dtype)
    return launch.forward(replace(problem, query=query, key=key, value=value, scales=scales))


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``[B, N, H, D]`` to e4m3 numbers of the same shape, contiguous, and float32 scales ``[B, H, N]``.

    A number times the scale of its row approximates the original. A row with NaN or an infinity has the scale NaN.
    """
    batch_size, num_rows, num_heads, head_dim = rows.shape
    numbers = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = rows.new_empty((batch_size, num_heads, num_rows), dtype=torch.float32)
    lines = scales.numel()
    if lines:
        quantize_kernel[(-(-lines // _LINES),)](
            rows,
            numbers,
            scales,
            *rows.stride()[:3],
            num_rows,
            num_heads,
            lines,
            D=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK=_LINES,
            num_warps=4,
        )
    return numbers, scales


@triton.jit(do_not_specialize=SIZES)
def quantize_kernel(
    ROWS,
    NUMBERS,
    SCALES,
    stride_b,
    stride_n,
    stride_h,
    num_rows,
    num_heads,
    num_lines,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``NUMBERS[B, N, H, D]`` and ``SCALES[B, H, N]`` from ``ROWS[B, N, H, D]``; a line is a row of one head."""
    line = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_line = line < num_lines
    head, row, batch = line % num_heads, line // num_heads % num_rows, line // num_heads // num_rows
    column = tl.arange(0, BLOCK_D)
    mask = is_line[:, None] & (column < D)[None, :]
    place = batch * stride_b + row * stride_n + head * stride_h
    x = tl.load(ROWS + place[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) == 1
    least = tl.maximum(tl.max(tl.abs(x), 1), _LEAST) / _LARGEST
    # Round up to a power of two: a nonzero mantissa carries into the exponent.
    power = (least.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000
    scale = tl.where(is_finite, power.to(tl.float32, bitcast=True), float("nan"))
    tl.store(SCALES + (batch * num_heads + head) * num_rows + row, scale, mask=is_line)
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    number = rounded(tl.where(is_finite[:, None], x, 0.0) * inverse[:, None], tl.float8e4nv)
    tl.store(NUMBERS + line[:, None] * D + column[None, :], number, mask=mask)
