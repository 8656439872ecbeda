"""The report of replaced and unchanged attention layers."""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention_pytorch.patterns import Pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedLayer:
    """A layer that now attends under a pattern."""

    name: str
    """Name in the model."""
    kind: str
    """Original class."""
    pattern: Pattern
    """Its pattern."""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): {self.pattern}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftLayer:
    """A layer that was left unchanged."""

    name: str
    """Name in the model; empty for the model itself."""
    kind: str
    """Its class."""
    reason: str
    """Reason for leaving it unchanged."""

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({self.kind}): {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacementReport:
    """Result of :func:`replace_attention`; prints one line per layer."""

    replaced: tuple[ReplacedLayer, ...]
    """Layers that now attend under a pattern, in the model's order."""
    left: tuple[LeftLayer, ...]
    """Recognised attention layers that were left unchanged. Attention in other forms, such as separate projections for
    queries/keys and values, is not recognised."""
    nested_tensors_off: tuple[str, ...]
    """Each ``nn.TransformerEncoder`` whose ``use_nested_tensor`` was turned off."""

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}", *(f"  {layer}" for layer in self.replaced)]
        lines += [f"left {len(self.left)}", *(f"  {layer}" for layer in self.left)]
        lines += [
            f"use_nested_tensor off: {name or 'the model itself'} (rows hidden by src_key_padding_mask keep their "
            "values in eval, as in training, instead of being zeroed)"
            for name in self.nested_tensors_off
        ]
        return "\n".join(lines)
