"""PyTorch's cuDNN attention for one partial, on strided views, with the contract of :mod:`.fused`.

Requirements of PyTorch's ``sdp_utils.cpp`` and ``MHA.cpp`` and of cuDNN's frontend, and how they are met:

- float16 or bfloat16, heads of 8 to 128 in steps of 8: :mod:`.select` rejects others.
- Rows aligned to 16 bytes, and non-zero strides that are multiples of 16 bytes: :func:`laid_out` copies other tensors.
- Query heads that share keys are passed as grouped-query attention with one key/value head.
- At most 65,535 sequences and heads per call: larger calls are split.
- PyTorch caches plans by the layout of query, key and value; some versions ignore the layout of the
  output, its gradient and the log-sum-exp. These therefore get the layout of PyTorch's forward results.
- Calls with a single query or key are not supported (:func:`takes`).

The backward receives the merged output and log-sum-exp: its graph computes ``P = exp(s - lse)`` and
``rowsum(grad_out * out)`` from them, as PyTorch's own ring attention relies on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_HEAD_DIM = 128
"""Largest head dimension that every supported GPU takes, forward and backward."""
LEAST_VERSION = 91501
"""Lowest cuDNN version, as in ``torch.backends.cudnn.version()``: earlier ones give wrong results if the number of rows
is not a multiple of 128."""
_ALIGNMENT = 16
_MOST_PROBLEMS = 65535


def takes(query: Tensor, key: Tensor) -> bool:
    """Whether cuDNN supports these views ``[problems, problems, rows, D]``.

    PyTorch rejects a single key, and for some cuDNN versions a single query, whose gradients other versions get wrong.
    """
    return query.shape[2] > 1 and key.shape[2] > 1


def laid_out(tensor: Tensor) -> Tensor:
    """Rows ``[B, N, H, D]`` in a layout whose views cuDNN can read: the tensor, or a contiguous copy."""
    strides = [stride for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if size > 1]
    step = _ALIGNMENT // tensor.element_size()
    is_aligned = tensor.data_ptr() % _ALIGNMENT == 0 and all(stride > 0 and stride % step == 0 for stride in strides)
    return tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)


def forward(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one partial."""

    def compute(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        shared = _shared_axis(key)
        q, k, v = (_as_call(tensor, shared) for tensor in (query, key, value))
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
        out, lse = results[0], results[1].squeeze(-1)
        return (out.transpose(0, 1), lse.transpose(0, 1)) if shared == 0 else (out, lse)

    out, lse = _in_parts(compute, query, key, value)
    return out, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one partial under the *merged* ``out`` and ``lse``. If query heads share keys, the gradients of
    keys and values are summed over them: that axis then has size 1."""

    def compute(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        shared = _shared_axis(key)
        q, k, v = (_as_call(tensor, shared) for tensor in (query, key, value))
        if shared == 0:
            grad_out, out, lse = (tensor.transpose(0, 1) for tensor in (grad_out, out, lse))
        o, g = (torch.empty_like(q).copy_(tensor) for tensor in (out, grad_out))
        stats = lse.clone(memory_format=torch.contiguous_format).unsqueeze(-1)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            g, q, k, v, o, stats, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, is_causal, scale=scale
        )
        return tuple(grad.transpose(0, 1) for grad in grads) if shared == 0 else tuple(grads)

    grad_query, grad_key, grad_value = _in_parts(compute, grad_out, query, key, value, out, lse)
    return grad_query, grad_key, grad_value


def _shared_axis(key: Tensor) -> int | None:
    """The problem axis along which keys are shared: that of the query heads of a key/value head."""
    return next((dim for dim in (0, 1) if key.stride(dim) == 0 and key.shape[dim] > 1), None)


def _as_call(tensor: Tensor, shared: int | None) -> Tensor:
    """A view ``[sequences, heads, rows, D]`` with the shared axis as heads and keys once; axes of size 1 get a non-zero
    stride."""
    tensor = tensor.transpose(0, 1) if shared == 0 else tensor
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [tensor.shape[3] if size == 1 else stride for size, stride in zip(sizes, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, [*strides[:3], 1])


def _in_parts(compute: Callable[..., tuple[Tensor, ...]], *operands: Tensor) -> tuple[Tensor, ...]:
    """Apply ``compute`` to views, with as many problems at a time as one call supports."""
    for dim in (0, 1):
        if operands[0].shape[dim] > _MOST_PROBLEMS:
            split = zip(*(operand.split(_MOST_PROBLEMS, dim) for operand in operands), strict=True)
            parts = [_in_parts(compute, *some) for some in split]
            return tuple(torch.cat(part, dim) for part in zip(*parts, strict=True))
    return compute(*operands)
