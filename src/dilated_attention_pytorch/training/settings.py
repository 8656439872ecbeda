"""What a training run is told: every number of it, each with its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dilated_attention_pytorch.models.config import LongNetConfig

from .data.settings import DataSettings
from .run_settings import (
    LARGEST_RATE,
    LARGEST_SEED,
    check_choice,
    check_number,
    check_text,
    check_windows,
)
from .stages import StageSettings

Optimizer = Literal["muon", "adamw", "adamw-bf16", "adamw-8bit"]
Strategy = Literal["auto", "ring", "gather", "heads"]
Layout = Literal["auto", "contiguous", "zigzag"]
DataParallel = Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]
Offload = Literal["none", "optimizer", "parameters"]
Parallel = Literal["told", "auto"]

LONGEST_TIMEOUT = 7 * 24 * 3600  # seconds; durations of the transport overflow far beyond


@dataclass(kw_only=True, slots=True)
class TrainSettings(DataSettings):
    """Train a LongNet language model on texts.

    Raises:
        ValueError: a number out of range.
    """

    model: LongNetConfig
    """Sizes and pattern of the model."""
    context_length: int = 8192
    """Tokens of text, bytes without a tokenizer, that the model sees at once."""
    batch_size: int = 1
    """Windows of context_length tokens that a device, or the devices that share a sequence, take at once."""
    stages: StageSettings = field(default_factory=StageSettings)
    """Windows that grow, each stage with its part of the steps, pattern and learning rate."""
    file_start_fraction: float = 0.0
    """Fraction of the training windows that begin where a file begins; the others begin anywhere."""
    optimizer: Optimizer = "muon"
    """"muon": torch.optim.Muon for the matrices inside the blocks, AdamW for everything else. "adamw": AdamW alone.
    "adamw-bf16": its moments in bfloat16, 4 bytes a weight instead of 8. "adamw-8bit": in 8 bits (bitsandbytes), 2
    bytes."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW."""
    muon_learning_rate: float = 2e-2
    """Peak learning rate of Muon."""
    muon_momentum: float = 0.95
    """Momentum of Muon (Nesterov)."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; none for the embedding, biases and norms."""
    adam_beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: float = 0.95
    """Decay of AdamW's mean of squared gradients."""
    parallel: Parallel = "told"
    """"auto": choose data_parallel and context_parallel by what fits into memory, and say why. "told": as they say."""
    context_parallel: int = 1
    """Processes that share every sequence, each with its part of the rows; start as many with torchrun. Together with
    tensor_parallel it divides the number of processes, and the rest of them read other windows."""
    heads_parallel: int = 1
    """Of the processes that share a sequence, how many split the heads instead of the rows (within a node, say)."""
    strategy: Strategy = "auto"
    """How rows of keys and values reach the processes that need them: "ring" (point to point), "gather" (one collective
    call) or "heads" (all-to-all from rows to heads). "auto" takes what plan_parallel expects to be fastest."""
    layout: Layout = "auto"
    """Which rows a process has: "contiguous", or "zigzag" (one part from the front, one from the back, which
    balances causal attention). "auto" takes the better balanced one."""
    data_parallel: DataParallel = "ddp"
    """"ddp": every process has all weights. "fsdp": weights, gradients and optimizer state are split over the processes
    (torch's fully_shard). DeepSpeed splits the optimizer state with "zero1", gradients too with "zero2", weights too
    with "zero3"."""
    offload: Offload = "none"
    """Beside zero1, zero2 and zero3: "optimizer" keeps the optimizer state in the memory of the host, "parameters"
    (zero3) the weights too."""
    tensor_parallel: int = 1
    """Processes that split the heads, the feed-forward and the tokens of every layer's matrices."""
    timeout: int = 600
    """Seconds that a process waits for another one. Then the run ends with the number of the one that was killed or
    stopped, or takes no part. What one process does while the others wait, such as writing a checkpoint, has to take
    less."""
    compile: bool = False
    """Whether to run the model through torch.compile: minutes at the start, then faster steps on a GPU."""
    eval_windows: int = 12
    """Held-out windows of these evaluations; the one at the end takes final_eval_windows."""
    final_eval_windows: int = 256
    """Largest number of held-out windows in the evaluation at the end; xz is measured on the same bytes."""
    quarter_files: int = 48
    """Largest number of held-out files, each at least context_length long, measured by quarter of the context."""
    eval_steps: int = 100
    save_steps: int = 200
    sample_prompt: str = ""
    """What the text in sample.txt continues; empty: the beginning of a file."""
    sample_length: int = 600
    """Tokens of text to sample at the end."""
    sample_temperature: float = 0.7
    """Temperature of that sample."""

    def __post_init__(self) -> None:
        DataSettings.__post_init__(self)
        for name in ("batch_size", "quarter_files", "context_parallel", "heads_parallel", "tensor_parallel"):
            check_number(self, name, least=1)
        for name in ("sample_length", "sample_temperature"):
            check_number(self, name, least=0)
        check_number(self, "context_length", least=8)
        check_number(self, "timeout", least=5, most=LONGEST_TIMEOUT)
        check_number(self, "muon_learning_rate", above=0, most=LARGEST_RATE)
        check_windows(self.steps * self.batch_size * self.gradient_accumulation)
        check_text(self, "sample_prompt")
        check_number(self, "file_start_fraction", least=0, most=1)
        for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
            check_number(self, name, least=0, below=1)
        for name, choices in (
            ("optimizer", Optimizer), ("strategy", Strategy), ("layout", Layout), ("data_parallel", DataParallel),
            ("offload", Offload), ("parallel", Parallel),
        ):  # fmt: skip
            check_choice(self, name, get_args(choices))
        if self.model.checkpoint_every > 1 and not self.model.gradient_checkpointing:
            raise ValueError(
                "model.checkpoint_every says which blocks model.gradient_checkpointing recomputes, got "
                f"{self.model.checkpoint_every} without it; set it too, or leave this out"
            )
        self.stages.check(self.context_length, self.steps, self.model)
        self._check_spreading()
        if self.context_parallel % self.heads_parallel:
            raise ValueError(
                "heads_parallel must divide context_parallel, of whose processes it is a part: "
                f"got {self.heads_parallel} of {self.context_parallel}"
            )
        if self.heads_parallel > 1 and self.strategy == "heads":
            raise ValueError(
                'strategy must be "ring", "gather" or "auto" beside heads_parallel, as it says how rows travel between '
                f'the groups that split the heads; got "heads" and heads_parallel {self.heads_parallel}. To split the '
                "heads over all processes, leave heads_parallel out"
            )
        if self.model.vocab_size != 256 and self.tokenizer is None:
            raise ValueError(
                f"model.vocab_size must be 256, one token a byte, got {self.model.vocab_size}; or name the tokenizer "
                "whose tokens they are (--tokenizer)"
            )
        self._check_packing()

    def _check_packing(self) -> None:
        if self.packing == "documents" and self.file_start_fraction:
            raise ValueError(
                f"file_start_fraction is of windows, got {self.file_start_fraction} beside packing "
                '"documents", where every document begins one; leave it out'
            )
        if self.packing == "documents" and self.stages.lengths:
            raise ValueError(f'stages are of windows, got {list(self.stages.lengths)} beside packing "documents"')
        if self.packing == "documents" and self.compile:
            raise ValueError('compile is for windows: the documents of every row of packing "documents" are others')
        if self.max_tokens and self.batch_size != 1:
            raise ValueError(
                f"batch_size counts rows, got {self.batch_size} beside max_tokens, which says how much a batch holds; "
                "set batch_size to 1"
            )
        if self.max_tokens and self.context_parallel > 1:
            raise ValueError(
                f"max_tokens makes batches of any length, which {self.context_parallel} processes cannot share "
                '(context_parallel); leave it out: packing "documents" then makes rows of context_length'
            )
        if self.max_tokens and self.max_tokens < self.context_length:
            raise ValueError(
                f"max_tokens must hold the longest document, of context_length {self.context_length}, got "
                f"{self.max_tokens}"
            )

    def _check_spreading(self) -> None:
        chosen = (self.data_parallel, self.context_parallel, self.tensor_parallel)
        if self.parallel == "auto" and chosen != ("ddp", 1, 1):
            raise ValueError(
                'parallel "auto" chooses data_parallel and context_parallel itself, and splits no matrices: leave '
                f'them and tensor_parallel out; got "{self.data_parallel}", {self.context_parallel} and '
                f"{self.tensor_parallel}"
            )
        told = f'offload "{self.offload}"'
        if self.offload != "none" and not self.data_parallel.startswith("zero"):
            raise ValueError(
                f'{told} is carried out by DeepSpeed: set data_parallel to "zero1", "zero2" or "zero3", got '
                f'"{self.data_parallel}"'
            )
        if self.offload == "parameters" and self.data_parallel != "zero3":
            raise ValueError(
                f'{told} is for weights that are split: set data_parallel to "zero3", got "{self.data_parallel}"'
            )

    def left_open(self) -> dict[str, Any]:
        """Values of settings that leave the choice to the run."""
        chosen = ("parallel", "data_parallel", "context_parallel") if self.parallel == "auto" else ()
        return {**DataSettings.left_open(self), **{name: getattr(self, name) for name in chosen}}

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as values that JSON holds."""
        return {**DataSettings.to_dict(self), "model": self.model.to_dict(), "stages": self.stages.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSettings:
        """The settings whose :meth:`to_dict` this is.

        Raises:
            KeyError, TypeError, ValueError: a key that is no field, no model, or a value out of range.
        """
        read = {"model": LongNetConfig.from_dict(values["model"]), "data": tuple(values["data"])}
        return cls(**{**values, **read, "stages": StageSettings.from_dict(values.get("stages", {}))})


@dataclass(kw_only=True, slots=True)
class SampleSettings:
    """How the next token is drawn; tokens are bytes for a model without a tokenizer.

    Raises:
        ValueError: a number out of range.
    """

    max_new_tokens: int = 500
    """Most tokens to generate; fewer if the text ends before."""
    temperature: float = 0.7
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the smallest set of tokens that holds this probability."""
    seed: int | None = None
    """Seed of the draws; without it every call draws anew."""

    def __post_init__(self) -> None:
        check_number(self, "max_new_tokens", least=1)
        check_number(self, "temperature", least=0)
        if self.top_k is not None:
            check_number(self, "top_k", least=1)
        if self.top_p is not None:
            check_number(self, "top_p", above=0, most=1)
        if self.seed is not None:
            check_number(self, "seed", least=0, most=LARGEST_SEED)
