"""What a run that takes a pretrained model to longer texts is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from dilated_attention_pytorch.patterns import Pattern, pattern_from_expression

from .settings import LARGEST_RATE, LARGEST_SEED, Device, Precision, Schedule, check_choice, check_number, check_windows

Rotary = Literal["yarn", "linear", "ntk", "none"]


@dataclass(kw_only=True, slots=True)
class ExtensionSettings:
    """Take a pretrained language model of transformers to longer texts.

    Raises:
        ValueError: a number out of range, or a pattern that is none.
    """

    model: str
    """A decoder with rotary positions (Llama, Mistral, Qwen, GPT-NeoX, Gemma ...): a folder with config.json and
    weights, or a name on the Hugging Face hub. Without a tokenizer, and with 256 tokens, its tokens are bytes."""
    data: tuple[Path, ...] = ()
    """Text files, and folders that are searched for text files, to train and evaluate on. Without it: the source files
    of the standard library of the running Python (about 31 MB)."""
    length: int = 8192
    """Tokens of the longest text that the model is to read."""
    pattern: str = ""
    """Who attends to whom, as `dilated-attention show` takes it. Empty: segments of the model's own length L in full,
    and of 2 L, 4 L, ... up to the new length with the rates 2, 4, ..., none above the number of key/value heads, so
    that every token reads all that far in some head."""
    rotary: Rotary = "yarn"
    """How positions are scaled to the new length; see extend_context."""
    stages: tuple[int, ...] = ()
    """Lengths of the training windows, one after the other, each for an equal part of the steps. Empty: the model's own
    length doubled until it is the new one."""
    steps: int = 300
    """Optimizer steps of the run."""
    batch_tokens: int = 0
    """Tokens that go through the model at once, as windows of the length of the stage; 0: one window of the new
    length."""
    gradient_accumulation: int = 1
    """Batches whose gradients are added up before an optimizer step."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW. For models of billions of parameters LongLoRA took 2e-5 (arXiv:2309.12307)."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices."""
    max_grad_norm: float = 1.0
    """Gradients whose joint norm is larger are scaled down to it."""
    warmup_fraction: float = 0.03
    """Fraction of the steps over which the learning rate rises from 0."""
    schedule: Schedule = "linear"
    """How the learning rate falls to 0 after that, or "constant"."""
    gradient_checkpointing: bool = False
    """Whether to compute every layer again in the backward pass: less memory, a third more time."""
    precision: Precision = "auto"
    """"bfloat16": matrix products and attention in bfloat16 (autocast), weights and optimizer in float32. "auto":
    bfloat16 where the processor or GPU has instructions for it, else float32; the run records which."""
    device: Device = "auto"
    """Where to compute; "auto" takes a CUDA device if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch."""
    seed: int = 0
    """Seed of the order of the data and of dropout."""
    log_steps: int = 5
    """Steps between two entries of the training loss."""
    eval_steps: int = 50
    """Steps between two evaluations on held-out text."""
    eval_windows: int = 4
    """Held-out windows of the new length in these evaluations."""
    final_eval_windows: int = 32
    """Largest number of held-out windows by which the model is measured before, after replacement and at the end."""
    save_steps: int = 50
    """Steps between two checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints to keep. The newest one that is whole is gone on from, so that one that is damaged loses little."""

    def __post_init__(self) -> None:
        for name in (
            "steps", "gradient_accumulation", "log_steps", "eval_steps", "eval_windows", "final_eval_windows",
            "save_steps", "keep_checkpoints",
        ):  # fmt: skip
            check_number(self, name, least=1)
        check_number(self, "length", least=8)
        check_number(self, "seed", least=0, most=LARGEST_SEED)
        for name in ("threads", "batch_tokens", "weight_decay"):
            check_number(self, name, least=0)
        check_number(self, "learning_rate", above=0, most=LARGEST_RATE)
        check_number(self, "max_grad_norm", above=0)
        check_windows(self.steps * self.gradient_accumulation * max(1, self.batch_tokens // 8))
        check_number(self, "warmup_fraction", least=0, most=1)
        for name, choices in (
            ("rotary", Rotary), ("schedule", Schedule), ("precision", Precision), ("device", Device)
        ):  # fmt: skip
            check_choice(self, name, get_args(choices))
        if not self.model:
            raise ValueError("model must name a folder or a model of the hub, got nothing")
        self.data = tuple(Path(path) for path in self.data)
        self.stages = tuple(self.stages)
        if any(isinstance(stage, bool) or not isinstance(stage, int) or stage < 8 for stage in self.stages):
            raise ValueError(f"stages must be lengths of at least 8 tokens, got {list(self.stages)}")
        if self.stages and (max(self.stages) != self.length or list(self.stages) != sorted(self.stages)):
            raise ValueError(
                f"stages must rise and end with the length {self.length}, which the model is to read, got "
                f"{list(self.stages)}"
            )
        if len(self.stages) > self.steps:
            raise ValueError(f"stages must be no more than the {self.steps} steps, got {len(self.stages)}")
        if self.batch_tokens and self.batch_tokens < self.length:
            raise ValueError(
                f"batch_tokens must hold one window of {self.length} tokens, got {self.batch_tokens}; leave it out"
            )
        if self.pattern:
            try:
                pattern_from_expression(self.pattern)
            except ValueError as error:
                raise ValueError(f"pattern: {error}") from error

    def complete(self, own_length: int, num_kv_heads: int) -> ExtensionSettings:
        """The same with pattern, stages and batch written out, for a model of ``own_length`` tokens.

        Raises:
            ValueError: the new length is no longer than that.
        """
        if self.length <= own_length:
            raise ValueError(
                f"length must be more than the {own_length} tokens that the model has already "
                f"(max_position_embeddings), got {self.length}"
            )
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        doubled = [2 * own_length]
        while doubled[-1] < self.length:
            doubled.append(2 * doubled[-1])
        lengths = [*doubled[:-1], self.length]
        if not self.pattern:
            rates = [min(2 << level, num_kv_heads) for level in range(len(lengths))]
            values["pattern"] = f"DilatedPattern({[own_length, *lengths]}, {[1, *rates]})"
        if not self.stages:
            values["stages"] = tuple(lengths[-self.steps :])
        values["batch_tokens"] = self.batch_tokens or self.length
        return ExtensionSettings(**values)

    def read_pattern(self) -> Pattern:
        """The pattern of :meth:`complete` settings."""
        return pattern_from_expression(self.pattern)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as values that JSON holds."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "data": [str(path.absolute()) for path in self.data], "stages": list(self.stages)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExtensionSettings:
        """The settings whose :meth:`to_dict` this is.

        Raises:
            TypeError, ValueError: a key that is no field, or a value out of range.
        """
        return cls(**{**values, "data": tuple(values["data"]), "stages": tuple(values["stages"])})
