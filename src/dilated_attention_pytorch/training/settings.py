"""What a training run is told: every number of it, each with its meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dilated_attention_pytorch.models.config import LongNetConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Optimizer = Literal["muon", "adamw"]
Schedule = Literal["linear", "cosine", "constant"]
Precision = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Strategy = Literal["auto", "ring", "gather", "heads"]
Layout = Literal["auto", "contiguous", "zigzag"]
DataParallel = Literal["ddp", "fsdp"]

LARGEST_SEED = 2**32 - 1  # NumPy, which transformers seeds too, takes no larger one
LONGEST_TIMEOUT = 7 * 24 * 3600  # seconds; durations of the transport overflow far beyond
LARGEST_RATE = 1e36  # float32 holds it, and what optimizers multiply it with
_MOST_WINDOWS = 2**48  # what counts them, on any number of processes, stays an index


@dataclass(kw_only=True, slots=True)
class TrainSettings:
    """Train a LongNet language model on the bytes of text files.

    Raises:
        ValueError: a number out of range.
    """

    model: LongNetConfig
    """Sizes and pattern of the model."""
    data: tuple[Path, ...] = ()
    """Text files, and folders that are searched for text files. Without it: the source files of the standard library
    of the running Python (about 31 MB)."""
    context_length: int = 8192
    """Bytes of text that the model sees at once."""
    steps: int
    """Optimizer steps of the run."""
    batch_size: int = 1
    """Windows of context_length bytes that a device, or the devices that share a sequence, take at once."""
    gradient_accumulation: int = 1
    """Batches whose gradients are added up before an optimizer step."""
    file_start_fraction: float = 0.0
    """Fraction of the training windows that begin where a file begins; the others begin anywhere."""
    optimizer: Optimizer = "muon"
    """"muon": torch.optim.Muon for the matrices inside the blocks, AdamW for everything else. "adamw": AdamW alone."""
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
    max_grad_norm: float = 1.0
    """Gradients whose joint norm is larger are scaled down to it."""
    warmup_fraction: float = 0.03
    """Fraction of the steps over which the learning rates rise from 0."""
    schedule: Schedule = "linear"
    """How the learning rates fall to 0 after that, or "constant"."""
    precision: Precision = "auto"
    """"bfloat16": matrix products and attention in bfloat16 (autocast), weights and optimizer in float32. "auto":
    bfloat16 where the processor or GPU has instructions for it, else float32; the run records which."""
    device: Device = "auto"
    """Where to compute; "auto" takes a CUDA device if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch."""
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
    (torch's fully_shard)."""
    tensor_parallel: int = 1
    """Processes that split the heads, the feed-forward and the tokens of every layer's matrices."""
    timeout: int = 600
    """Seconds that a process waits for another one. Then the run ends with the number of the one that was killed or
    stopped, or takes no part. What one process does while the others wait, such as writing a checkpoint, has to take
    less."""
    compile: bool = False
    """Whether to run the model through torch.compile: minutes at the start, then faster steps on a GPU."""
    seed: int = 0
    """Seed of the weights, of the order of the data and of dropout."""
    log_steps: int = 5
    """Steps between two entries of the training loss."""
    eval_steps: int = 100
    """Steps between two evaluations on held-out text."""
    eval_windows: int = 12
    """Held-out windows of these evaluations; the one at the end takes final_eval_windows."""
    final_eval_windows: int = 256
    """Largest number of held-out windows in the evaluation at the end; xz is measured on the same bytes."""
    quarter_files: int = 48
    """Largest number of held-out files, each at least context_length long, measured by quarter of the context."""
    save_steps: int = 200
    """Steps between two checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints to keep. The newest one that is whole is gone on from, so that one that is damaged loses little."""
    sample_prompt: str = ""
    """What the text in sample.txt continues; empty: the beginning of a file."""
    sample_length: int = 600
    """Bytes of text to sample at the end."""
    sample_temperature: float = 0.7
    """Temperature of that sample."""

    def __post_init__(self) -> None:
        for name in (
            "steps", "batch_size", "gradient_accumulation", "log_steps", "eval_steps", "eval_windows",
            "final_eval_windows", "quarter_files", "save_steps", "keep_checkpoints", "context_parallel",
            "heads_parallel", "tensor_parallel",
        ):  # fmt: skip
            check_number(self, name, least=1)
        check_number(self, "seed", least=0, most=LARGEST_SEED)
        for name in ("threads", "sample_length", "sample_temperature", "weight_decay"):
            check_number(self, name, least=0)
        check_number(self, "context_length", least=8)
        check_number(self, "timeout", least=5, most=LONGEST_TIMEOUT)
        for name in ("learning_rate", "muon_learning_rate"):
            check_number(self, name, above=0, most=LARGEST_RATE)
        check_number(self, "max_grad_norm", above=0)
        check_windows(self.steps * self.batch_size * self.gradient_accumulation)
        check_text(self, "sample_prompt")
        for name in ("file_start_fraction", "warmup_fraction"):
            check_number(self, name, least=0, most=1)
        for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
            check_number(self, name, least=0, below=1)
        for name, choices in (
            ("optimizer", Optimizer), ("schedule", Schedule), ("precision", Precision), ("device", Device),
            ("strategy", Strategy), ("layout", Layout), ("data_parallel", DataParallel),
        ):  # fmt: skip
            check_choice(self, name, get_args(choices))
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
        if self.model.vocab_size != 256:
            raise ValueError(f"model.vocab_size must be 256, one token a byte, got {self.model.vocab_size}")
        self.data = tuple(Path(path) for path in self.data)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as values that JSON holds."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "model": self.model.to_dict(), "data": [str(path.absolute()) for path in self.data]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSettings:
        """The settings whose :meth:`to_dict` this is.

        Raises:
            KeyError, TypeError, ValueError: a key that is no field, no model, or a value out of range.
        """
        return cls(**{**values, "model": LongNetConfig.from_dict(values["model"]), "data": tuple(values["data"])})


@dataclass(kw_only=True, slots=True)
class SampleSettings:
    """How the next byte is drawn.

    Raises:
        ValueError: a number out of range.
    """

    max_new_tokens: int = 500
    """Most bytes to generate; fewer if the text ends before."""
    temperature: float = 0.7
    """Divides the logits; 0 always takes the likeliest byte."""
    top_k: int | None = None
    """Draw from the k likeliest bytes only."""
    top_p: float | None = None
    """Draw from the smallest set of bytes that holds this probability."""
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


def check_windows(number: int) -> None:
    """Raise ``ValueError`` unless a run of ``number`` windows can be counted."""
    if number > _MOST_WINDOWS:
        raise ValueError(
            f"steps times gradient_accumulation times the windows of a batch must be at most {_MOST_WINDOWS:,}, got "
            f"{number:,}"
        )


def check_text(settings: DataclassInstance, name: str) -> None:
    """Raise ``ValueError`` unless the field ``name`` is text that UTF-8 holds."""
    try:
        getattr(settings, name).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be UTF-8 text, got {getattr(settings, name)!r}") from error


def check_choice(settings: DataclassInstance, name: str, choices: Sequence[str]) -> None:
    """Raise ``ValueError`` unless the field ``name`` is one of ``choices``."""
    value = getattr(settings, name)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_number(
    settings: DataclassInstance,
    name: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    """Raise ``ValueError`` unless a field is a finite number, an integer where so declared, within the bounds."""
    value = getattr(settings, name)
    declared = next(str(entry.type) for entry in fields(settings) if entry.name == name)
    if declared.startswith("int") and not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    bounds = ((f"at least {least}", value >= least), (f"above {above}", value > above),
              (f"below {below}", value < below), (f"at most {most}", value <= most))  # fmt: skip
    for words, holds in bounds:
        if not holds:
            raise ValueError(f"{name} must be {words}, got {value}")
