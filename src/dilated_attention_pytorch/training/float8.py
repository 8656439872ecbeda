"""Float8 training with torchao's linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dilated_attention_pytorch.errors import RunError

from .small_weights import import_torchao

if TYPE_CHECKING:
    from torch import nn

LEAST_CAPABILITY = (8, 9)
"""Lowest compute capability with float8 tensor cores (Ada, Hopper)."""
_RECIPE = "tensorwise"


def check_float8(device: str) -> None:
    """Raise :class:`RunError` unless the hardware supports float8 products."""
    found = "no CUDA device"
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) >= LEAST_CAPABILITY:
            import_torchao("--precision float8")
            return
        found = f"one of compute capability {major}.{minor}"
    raise RunError(
        "--precision float8 needs a CUDA GPU whose tensor cores multiply float8, from compute capability 8.9 (Ada, "
        f"Hopper) on, and the run has {found}; take --precision bfloat16"
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
