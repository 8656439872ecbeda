"""Settings of a context extension run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from dilated_attention_pytorch.integrations.transformers.extension import Rotary as Scaling
from dilated_attention_pytorch.patterns import pattern_from_expression

from .run_settings import (
    LONGEST_TEXT,
    AdamW,
    PlainPrecision,
    RunSettings,
    check_choice,
    check_number,
    check_text,
    check_windows,
)
from .stages import check_stage_ends, stage_ends

Rotary = Literal["auto", Scaling]


@dataclass(kw_only=True, slots=True)
class ExtensionSettings(RunSettings):
    """Extend the context length of a pretrained transformers language model.

    Raises:
        ValueError: a value is out of range, or the pattern is invalid.
    """

    model: str
    """Model to begin with: a folder, or a name on the Hugging Face hub. A decoder with rotary positions (Llama,
    Mistral, Qwen, GPT-NeoX, Gemma ...), with config.json and weights. Without a tokenizer and with a vocabulary of 256,
    tokens are bytes."""
    context_length: int = 8192
    """New context length in tokens."""
    pattern: str = ""
    """Attention pattern of all layers, as `dilated-attention show` takes it. Default: the run measures candidates on
    its training text, before training, and takes the cheapest of the nearly best (docs/long-context.md)."""
    layer_patterns: tuple[str, ...] = ()
    """Instead of one pattern, a pattern per layer; "" for a layer that keeps its own sliding window."""
    rotary: Rotary = "auto"
    """Scaling of the rotary positions, see extend_context. "auto": "yarn"; "none" if the run chooses windows in all
    layers."""
    stages: tuple[int, ...] = ()
    """Lengths of the training windows, in stages of equally many steps. Default: twice the model's own length, doubled
    up to the new one."""
    steps: int = 300
    batch_tokens: int = 0
    """Tokens per forward pass, as windows of the stage's length. Default: one window of the new length."""
    optimizer: AdamW = "adamw"
    """Optimizer. "adamw"; "adamw-bf16": moments in bfloat16, 4 bytes per weight instead of 8; "adamw-8bit": moments in
    8 bits (bitsandbytes), 2 bytes."""
    precision: PlainPrecision = "auto"
    """Number format of the computation, see train."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW. For models with billions of parameters, LongLoRA used 2e-5 (arXiv:2309.12307)."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, a third more time."""
    eval_steps: int = 50
    eval_windows: int = 4
    """Held-out windows of the evaluations during training."""
    final_eval_windows: int = 32
    """Most held-out windows of the final evaluations. They are made before training, after replacement and at the
    end."""
    save_steps: int = 50

    def __post_init__(self) -> None:
        check_choice(self, "precision", get_args(PlainPrecision))
        RunSettings.__post_init__(self)
        check_number(self, "context_length", least=8, most=LONGEST_TEXT)
        check_number(self, "batch_tokens", least=0)
        check_windows(self.steps * self.gradient_accumulation * max(1, self.batch_tokens // 8))
        check_choice(self, "rotary", get_args(Rotary))
        check_choice(self, "optimizer", get_args(AdamW))
        check_text(self, "model")
        if not self.model:
            raise ValueError("model must name a folder or a model of the hub, got nothing")
        self.stages = tuple(self.stages)
        if any(isinstance(stage, bool) or not isinstance(stage, int) or stage < 8 for stage in self.stages):
            raise ValueError(f"stages must be lengths of at least 8 tokens, got {list(self.stages)}")
        if self.stages and (max(self.stages) != self.context_length or list(self.stages) != sorted(self.stages)):
            raise ValueError(
                f"stages must rise and end with the context_length {self.context_length}, which the model is to "
                f"read, got {list(self.stages)}"
            )
        if self.stages:
            check_stage_ends(stage_ends(self.steps, len(self.stages), stage_steps=self.stage_steps))
        if self.batch_tokens and self.batch_tokens < self.context_length:
            raise ValueError(
                f"batch_tokens must hold one window of {self.context_length} tokens, got {self.batch_tokens}; "
                "leave it out"
            )
        self.layer_patterns = tuple(self.layer_patterns)
        if self.pattern and self.layer_patterns:
            raise ValueError("pattern is that of all layers, and layer_patterns are given too; leave one of them out")
        for name, text in (("pattern", self.pattern), *(("layer_patterns", text) for text in self.layer_patterns)):
            if text:
                try:
                    pattern_from_expression(text)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error

    def left_open(self) -> dict[str, Any]:
        """Settings whose value means that the run chooses."""
        lists: dict[str, Any] = {"layer_patterns": [], "stages": []}
        return {**RunSettings.left_open(self), **lists, "pattern": "", "rotary": "auto", "batch_tokens": 0}

    def complete(self, own_length: int) -> ExtensionSettings:
        """The same with stages, batch and scaling filled in, for a model of ``own_length`` tokens.

        Where the run chooses the pattern, it chooses the scaling with it.

        Raises:
            ValueError: the new length does not exceed ``own_length``.
        """
        if self.context_length <= own_length:
            raise ValueError(
                f"context_length must be more than the {own_length} tokens that the model has already "
                f"(max_position_embeddings), got {self.context_length}"
            )
        stages = self.stages or tuple(rising_lengths(own_length, self.context_length)[-self.steps :])
        rotary = scaling(self.rotary) if self.patterns else self.rotary
        return replace(self, stages=stages, batch_tokens=self.batch_tokens or self.context_length, rotary=rotary)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The pattern of all layers, or one per layer; empty if the run is to choose them."""
        return (self.pattern,) if self.pattern else self.layer_patterns

    def with_patterns(self, patterns: Sequence[str], rotary: Rotary) -> ExtensionSettings:
        """The same with the pattern of all layers, or one per layer, and the scaling of the positions."""
        is_one = len(patterns) == 1
        return replace(
            self,
            pattern=patterns[0] if is_one else "",
            layer_patterns=() if is_one else tuple(patterns),
            rotary=rotary,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-serialisable values."""
        lists = {"stages": list(self.stages), "layer_patterns": list(self.layer_patterns)}
        return {**RunSettings.to_dict(self), **lists}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExtensionSettings:
        """The inverse of :meth:`to_dict`.

        Raises:
            TypeError, ValueError: an unknown key, or a value out of range.
        """
        return cls(**{**values, "data": tuple(values["data"]), "stages": tuple(values["stages"])})


def scaling(rotary: Rotary, *, is_near: bool = False) -> Scaling:
    """The scaling that ``rotary`` stands for; ``is_near``: the run chose windows in all layers, which need none."""
    if rotary != "auto":
        return rotary
    return "none" if is_near else "yarn"


def rising_lengths(own_length: int, length: int) -> list[int]:
    """Twice ``own_length``, four times, ... up to ``length``, which is the last one."""
    lengths = [min(2 * own_length, length)]
    while lengths[-1] < length:
        lengths.append(min(2 * lengths[-1], length))
    return lengths
