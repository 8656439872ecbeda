"""Training whose large matrix products are computed in float8, by torchao's linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dilated_attention_pytorch.errors import RunError

from .small_weights import import_torchao

if TYPE_CHECKING:
    from torch import nn

LEAST_CAPABILITY = (8, 9)
"""CUDA GPUs from this compute capability on (Ada, Hopper) multiply matrices of float8."""
_RECIPE = "tensorwise"


def check_float8(device: str) -> None:
    """Raise :class:`RunError` unless products of float8 are computed in hardware here."""
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
    """Have the large linear layers of ``model`` compute their three products in float8, in place.

    Each of input, weight and gradient is scaled by its largest magnitude before it is rounded (torchao's recipe
    "tensorwise"); weights, their names and the optimizer stay float32. Layers are those that torchao takes for faster
    by its own measurements on an H100: sides that 16 divides, and not small. Embeddings, the output matrix and the
    projection to queries, keys and values, which is no module of its own, stay as they are.

    Args:
        model: on any device.
        emulate: compute what the hardware would in float32, which any device can.

    Returns:
        the names of the layers.

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
