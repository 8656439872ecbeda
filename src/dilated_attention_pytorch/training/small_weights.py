"""Weight-only 8-bit quantisation of a trained model for inference, with torchao's tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.machine import require

Weights = Literal["stored", "int8", "float8"]
"""``stored``: as in the file."""

_LEAST_LARGEST = 2.0**-100
_HEADS = ("head", "lm_head")


def import_torchao(purpose: str) -> None:
    """Import torchao for ``purpose``, without its warnings about extensions for other machines.

    Raises:
        RunError: it is not installed, or cannot be imported.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    require(purpose, ("torchao",), "torchao")


def make_small(model: nn.Module, weights: Weights) -> None:
    """Quantise the matrices of a model's layers to 8 bits, in place; it can no longer be trained.

    A row ``w`` is stored as ``q`` and one float32 scale ``s``, with ``w`` approximately ``s q``. "int8": integers from
    -128 to 127 and ``s = max |w| / 127.5``, at least 2^-23; the error is at most ``s / 2``. "float8": 4 exponent and
    3 mantissa bits (``e4m3fn``) and ``s = max |w| / 448``; the error is at most the larger of ``|w| / 16`` and
    ``2^-10 s``. Products are computed in the precision of the activations. Embeddings,
    output matrices, norms and biases are unchanged.

    Raises:
        RunError: torchao is not installed.
    """
    if weights == "stored":
        return
    import_torchao(f"--weights {weights}")
    for layer in list(_layers(model)):
        layer.weight = nn.Parameter(_small(layer.weight.detach(), weights), requires_grad=False)


def _small(matrix: Tensor, weights: Weights) -> Tensor:
    from torchao.quantization import Float8Tensor, Int8Tensor, PerRow

    if weights == "int8":
        integers: Tensor = Int8Tensor.from_hp(matrix, PerRow())
        return integers
    # Without a lower bound of the scale, a row of zeros would be divided by 0.
    floats: Tensor = Float8Tensor.from_hp(
        matrix, float8_dtype=torch.float8_e4m3fn, granularity=PerRow(), hp_value_lb=_LEAST_LARGEST
    )
    return floats


def _layers(model: nn.Module) -> Iterator[nn.Linear]:
    """The linear layers, except the output matrix."""
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in outer and name.split(".")[-1] not in _HEADS:
            yield module


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights of a model, including 8-bit scales; shared weights count once."""
    return sum(map(_bytes, {id(weight): weight for weight in model.parameters()}.values()))


def _bytes(tensor: Tensor) -> int:
    if type(tensor.data) in (Tensor, nn.Parameter):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.data.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(_bytes(getattr(tensor.data, name)) for name in names)
