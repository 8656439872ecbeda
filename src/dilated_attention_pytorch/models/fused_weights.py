"""Files of LongNet models whose query, key and value projections were one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

_FUSED = "attention.in_proj_weight"
_PROJECTIONS = tuple(f"attention.{name}.weight" for name in ("q_proj", "k_proj", "v_proj"))


class _SplitRows(ConversionOps):
    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        """The rows of each target's parameter."""
        (tensors,) = input_dict.values()
        fused = tensors[0] if isinstance(tensors, list) else tensors
        names = [kwargs["full_layer_name"].replace(target_patterns[0], target) for target in target_patterns]
        parts = fused.split([kwargs["model"].get_parameter(name).shape[0] for name in names])
        return {target: [part.clone()] for target, part in zip(target_patterns, parts, strict=True)}


class _FusedProjections(WeightConverter):
    def reverse_transform(self) -> WeightRenaming:
        """Models are saved as they are."""
        return WeightRenaming(_FUSED, _FUSED)


def read_fused_weights(model_type: str) -> None:
    """Let ``from_pretrained`` of models of this type read such files."""
    converter = _FusedProjections([_FUSED], list(_PROJECTIONS), [_SplitRows()])
    register_checkpoint_conversion_mapping(model_type, [converter], overwrite=True)


def fused_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in such a file, of a model with the parameters ``shapes``."""
    fused = dict(shapes)
    for name in shapes:
        if name.endswith(_PROJECTIONS[0]):
            stem = name.removesuffix(_PROJECTIONS[0])
            parts = [fused.pop(stem + projection) for projection in _PROJECTIONS]
            fused[stem + _FUSED] = (sum(rows for rows, _ in parts), parts[0][1])
    return fused
