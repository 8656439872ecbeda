"""What replacing the attention of a model did: which layers were replaced, which were left, and why."""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention_pytorch.patterns import Pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedLayer:
    """A layer that attends under a pattern now."""

    name: str
    """Its name in the model."""
    kind: str
    """The class that was there."""
    pattern: Pattern
    """The pattern that it has."""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): {self.pattern}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftLayer:
    """A layer that is as it was."""

    name: str
    """Its name in the model; empty for the model itself."""
    kind: str
    """Its class."""
    reason: str
    """Why it was left."""

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({self.kind}): {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacementReport:
    """What :func:`replace_attention` did. ``print`` shows it, a layer to a line."""

    replaced: tuple[ReplacedLayer, ...]
    """The layers that attend under a pattern now, in the model's order."""
    left: tuple[LeftLayer, ...]
    """The attention layers that were seen and are as they were. Attention made of other parts, such as a projection for
    queries and keys and another for values, is not seen."""
    nested_tensors_off: tuple[str, ...]
    """The ``nn.TransformerEncoder`` whose ``use_nested_tensor`` was turned off."""

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}", *(f"  {layer}" for layer in self.replaced)]
        lines += [f"left {len(self.left)}", *(f"  {layer}" for layer in self.left)]
        lines += [
            f"use_nested_tensor off: {name or 'the model itself'} (rows that src_key_padding_mask hides come out of it "
            "as numbers in eval, as in training, and not as zeros)"
            for name in self.nested_tensors_off
        ]
        return "\n".join(lines)
