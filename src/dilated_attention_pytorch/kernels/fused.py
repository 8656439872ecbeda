"""PyTorch's fused kernels with log-sum-exp output for one partial, on strided views.

Views are ``[problems, problems, rows, D]`` with a contiguous last dimension; any stride elsewhere, 0 included.

``torch.nn.attention.varlen`` is not used: packed documents have the rows of a residue at one distance only where the
rate is 1, and the Triton kernels compute all of them in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

_CAPABILITIES = {"FA3": (9,), "FA4": (9, 10)}
"""Major compute capabilities for which PyTorch calls an implementation that replaces its flash kernels."""


def is_fused(query: Tensor, *, has_bias: bool) -> bool:
    """Whether a fused PyTorch kernel supports these operands; matrix products support all.

    Raises:
        NotImplementedError: the kernel was replaced by one that does not run on this device.
    """
    if query.device.type == "cpu":
        return True
    head_dim = query.shape[-1]
    if query.device.type != "cuda" or has_bias:
        return False
    if query.dtype in (torch.float16, torch.bfloat16):
        # The flash kernels need compute capability 8.0; bfloat16 has no other kernel.
        major, minor = torch.cuda.get_device_capability(query.device)
        if major < 8 or head_dim % 8 != 0 or head_dim > 256:
            return False
        active = current_flash_attention_impl()
        if active is not None and major not in _CAPABILITIES.get(active, (major,)):
            able = " and ".join(f"{one}.x" for one in _CAPABILITIES[active])
            raise NotImplementedError(
                f'impl="aten" calls PyTorch\'s flash kernel, which activate_flash_attention_impl("{active}") replaced '
                f"by one for GPUs of compute capability {able}, and this GPU has {major}.{minor}: call "
                "torch.nn.attention.restore_flash_attention_impl()"
            )
        return True
    return query.dtype == torch.float32 and head_dim % 4 == 0


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one partial.

    ``bias`` (CPU only, accumulation dtype) is 0, or -inf where a key is hidden. Under ``is_causal`` all query rows have
    the same.
    """
    of_values = value.shape[-1]
    if query.shape[-1] != of_values:
        query, key, value = _of_one_width(query, key, value)
        out, lse = forward(query, key, value, bias, is_causal=is_causal, scale=scale)
        return out[..., :of_values], lse
    if query.device.type == "cpu":
        q, k, v = (_computable_on_cpu(tensor) for tensor in (query, key, value))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        if bias is not None and bool((lse == 0.0).any()):
            # The kernel's log-sum-exp of a row that sees no key.
            lse.masked_fill_(_largest_bias(bias, is_causal=is_causal) == float("-inf"), float("-inf"))
        return out, lse
    if query.dtype == torch.float32:
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        return out, lse[..., : query.shape[2]]  # the kernel pads the number of rows
    query, key, value = _for_flash(query, key, value)
    results = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
    return results[0], results[1]


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of one partial under the *merged* ``out`` and ``lse``: the kernel's
    ``P = exp(s - lse)`` and ``delta = rowsum(grad_out * out)`` are then those of the joint softmax."""
    if query.shape[-1] != value.shape[-1]:
        g, q, k, v, o = _of_one_width(grad_out, query, key, value, out)
        grads = backward(g, q, k, v, o, lse, bias, is_causal=is_causal, scale=scale)
        return tuple(grad[..., : x.shape[-1]] for grad, x in zip(grads, (query, key, value), strict=True))
    if query.device.type == "cpu":
        g, q, k, v, o = (_computable_on_cpu(tensor) for tensor in (grad_out, query, key, value, out))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, o, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return grads[0], grads[1], grads[2]
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    if query.dtype == torch.float32:
        rows = query.shape[2]
        # The kernel assumes a last stride of 1 and a number of rows divisible by 32.
        padded = torch.nn.functional.pad(lse, (0, -rows % 32), value=float("inf")).contiguous()
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_out,
            query,
            key,
            value,
            None,
            out,
            padded,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
        return grads[0], grads[1], grads[2]
    grad_out, query, key, value, out = _for_flash(grad_out, query, key, value, out)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse.contiguous(),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        is_causal,
        seed,
        seed,
        scale=scale,
    )
    return grads[0], grads[1], grads[2]


def _largest_bias(bias: Tensor, *, is_causal: bool) -> Tensor:
    """Largest bias of the keys of every query row, ``[problems, problems, N]``."""
    if not is_causal:
        return bias.amax(-1)
    num_queries, num_keys = bias.shape[2:]
    last = torch.arange(num_queries).clamp_(max=num_keys - 1)
    return bias[:, :, 0].cummax(-1).values[..., last]


def _of_one_width(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors, padded by zeros to the largest width: the kernels take values as wide as keys only."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return (torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors)


def _for_flash(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors, as views where PyTorch's own kernel computes.

    One that replaces it gets copies of views with a stride of 0: FlashAttention-4 took a kernel that was compiled for
    other strides (pull request 2745 of Dao-AILab/flash-attention).
    """
    is_replaced = current_flash_attention_impl() is not None
    return (
        tensor.clone(memory_format=torch.contiguous_format) if is_replaced and 0 in tensor.stride() else tensor
        for tensor in tensors
    )


def _computable_on_cpu(tensor: Tensor) -> Tensor:
    # The CPU kernel's float16 backward runs at a twelfth of its float32 rate (14 against 167 GFLOP/s on Zen 5).
    return tensor.float() if tensor.dtype == torch.float16 else tensor
