"""Matrices in 8 bits, by torchao: float8 products in training, and int8 or float8 weights of a trained model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require

Weights = Literal["stored", "int8", "float8"]
"""``stored``: as in the file."""

LEAST_CAPABILITY = (8, 9)
"""Lowest compute capability with float8 tensor cores (Ada, Hopper)."""
_RECIPE = "tensorwise"
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
    import_torchao(f"--weight-format {weights}")
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


def check_float8(device: str) -> None:
    """Raise :class:`RunError` unless the hardware supports float8 products."""
    hardware = "no CUDA device"
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) >= LEAST_CAPABILITY:
            import_torchao("--precision float8")
            return
        hardware = f"one of compute capability {major}.{minor}"
    raise RunError(
        "--precision float8 needs a CUDA GPU whose tensor cores multiply float8, from compute capability 8.9 (Ada, "
        f"Hopper) on, and the run has {hardware}; take --precision bfloat16"
    )


def convert_to_float8(model: nn.Module, *, emulate: bool = False) -> list[str]:
    """Convert the large linear layers of ``model`` to float8 products, in place.

    Input, weight and gradient are scaled by their largest magnitude before rounding (torchao's recipe
    "tensorwise"); weights, their names and the optimizer state stay float32. Converts the layers that torchao's
    measurements on an H100 found faster: dimensions divisible by 16, and not small. Not converted: embeddings and the
    output matrix.

    Args:
        model: on any device.
        emulate: emulate the hardware in float32, on any device.

    Returns:
        the names of the converted layers.

    Raises:
        RunError: torchao is not installed, or no layer is large enough.
    """
    import_torchao("--precision float8")
    from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(
        model, config=config, module_filter_fn=_auto_filter_for_recipe(_RECIPE, ["head", "embedding"])
    )
    names = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
    if not names:
        raise RunError(
            "--precision float8: no layer of this model is large enough to be faster in it; take --precision bfloat16"
        )
    return names
