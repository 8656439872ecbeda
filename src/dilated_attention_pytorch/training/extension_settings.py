"""Settings of a context extension run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from dilated_attention_pytorch.patterns import Pattern, pattern_from_expression

from .run_settings import LONGEST_TEXT, AdamW, RunSettings, check_choice, check_number, check_text, check_windows
from .stages import check_stage_ends, stage_ends

Rotary = Literal["yarn", "linear", "ntk", "none"]


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
    """Attention pattern, as `dilated-attention show` takes it. Default: segments of the model's own length L in full,
    and of 2 L, 4 L, ... up to the new length with rates 2, 4, ..., at most the number of key/value heads, so that in
    some head every token attends over the whole length."""
    rotary: Rotary = "yarn"
    """Scaling of the rotary positions. See extend_context."""
    stages: tuple[int, ...] = ()
    """Lengths of the training windows, in stages of equally many steps. Default: the model's own length, doubled until
    it is the new one."""
    steps: int = 300
    batch_tokens: int = 0
    """Tokens per forward pass, as windows of the stage's length. Default: one window of the new length."""
    optimizer: AdamW = "adamw"
    """Optimizer. "adamw"; "adamw-bf16": moments in bfloat16, 4 bytes per weight instead of 8; "adamw-8bit": moments in
    8 bits (bitsandbytes), 2 bytes."""
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
        if self.pattern:
            try:
                pattern_from_expression(self.pattern)
            except ValueError as error:
                raise ValueError(f"pattern: {error}") from error

    def left_open(self) -> dict[str, Any]:
        """Settings whose value means that the run chooses."""
        return {**RunSettings.left_open(self), "pattern": "", "stages": [], "batch_tokens": 0}

    def complete(self, own_length: int, num_kv_heads: int) -> ExtensionSettings:
        """The same with pattern, stages and batch filled in, for a model of ``own_length`` tokens.

        Raises:
            ValueError: the new length does not exceed ``own_length``.
        """
        if self.context_length <= own_length:
            raise ValueError(
                f"context_length must be more than the {own_length} tokens that the model has already "
                f"(max_position_embeddings), got {self.context_length}"
            )
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        doubled = [2 * own_length]
        while doubled[-1] < self.context_length:
            doubled.append(2 * doubled[-1])
        lengths = [*doubled[:-1], self.context_length]
        if not self.pattern:
            rates = [min(2 << level, num_kv_heads) for level in range(len(lengths))]
            values["pattern"] = f"DilatedPattern({[own_length, *lengths]}, {[1, *rates]})"
        if not self.stages:
            values["stages"] = tuple(lengths[-self.steps :])
        values["batch_tokens"] = self.batch_tokens or self.context_length
        return ExtensionSettings(**values)

    def read_pattern(self) -> Pattern:
        """The pattern of complete settings (:meth:`complete`)."""
        return pattern_from_expression(self.pattern)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-serialisable values."""
        return {**RunSettings.to_dict(self), "stages": list(self.stages)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExtensionSettings:
        """The inverse of :meth:`to_dict`.

        Raises:
            TypeError, ValueError: an unknown key, or a value out of range.
        """
        return cls(**{**values, "data": tuple(values["data"]), "stages": tuple(values["stages"])})
