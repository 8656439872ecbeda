"""What every run that trains is told: each number with its meaning, and how numbers are checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Schedule = Literal["linear", "cosine", "wsd", "constant"]
Precision = Literal["auto", "float32", "tf32", "bfloat16", "float16", "float8"]
Device = Literal["auto", "cpu", "cuda"]
OnNan = Literal["stop", "skip"]
AdamW = Literal["adamw", "adamw-bf16", "adamw-8bit"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "prometheus"]

LARGEST_SEED = 2**32 - 1  # NumPy, which transformers seeds too, takes no larger one
LARGEST_PORT = 2**16 - 1
LARGEST_RATE = 1e36  # float32 holds it, and what optimizers multiply it with
_MOST_WINDOWS = 2**48  # what counts them, on any number of processes, stays an index


@dataclass(kw_only=True, slots=True)
class RunSettings:
    """What `train` and `extend` are both told.

    Raises:
        ValueError: a number out of range.
    """

    data: tuple[Path, ...] = ()
    """Text files, folders that are searched for text files, and files of records (JSONL, Parquet, folders that
    save_to_disk of datasets wrote), to train and evaluate on. Without it: the source files of the standard library of
    the running Python (about 31 MB)."""
    text_field: str = "text"
    """The member or column of records that holds the text."""
    steps: int
    """Optimizer steps of the run."""
    gradient_accumulation: int = 1
    """Batches whose gradients are added up before an optimizer step."""
    learning_rate: float
    """Peak learning rate of AdamW."""
    weight_decay: float
    """Decoupled weight decay of matrices; none for the embedding, biases and norms."""
    max_grad_norm: float = 1.0
    """Gradients whose joint norm is larger are scaled down to it."""
    warmup_fraction: float = 0.03
    """Fraction of the steps over which the learning rates rise from 0."""
    schedule: Schedule = "linear"
    """How the learning rates fall to 0 after that: over all steps ("linear", "cosine"), over the last ones ("wsd":
    warm-up, stable, decay), or not ("constant")."""
    decay_fraction: float = 0.2
    """Fraction of the steps over which "wsd" falls, in a line."""
    precision: Precision = "auto"
    """"bfloat16": matrix products and attention in bfloat16 (autocast), weights and optimizer in float32. "float16":
    the same in float16, with a scaled loss; batches whose gradients overflow are taken again with a lower scale.
    "float8": bfloat16, and the large linear layers in float8 (torchao), on GPUs that can.
    "tf32": float32, whose products CUDA GPUs from compute capability 8.0 on compute with mantissas of 10 bits. "auto":
    bfloat16 where the processor or GPU has instructions for it, else float32; the run records which."""
    device: Device = "auto"
    """Where to compute; "auto" takes a CUDA device if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch."""
    seed: int = 0
    """Seed of the weights that are drawn, of the order of the data and of dropout."""
    log_steps: int = 5
    """Steps between two entries of the training loss."""
    track: tuple[TrackerName, ...] = ("tensorboard",)
    """Where the figures go beside metrics.jsonl: "tensorboard" (files in the run folder), "wandb" (Weights & Biases;
    with WANDB_MODE=offline files in the run folder), "mlflow" (at MLFLOW_TRACKING_URI, else a database in the run
    folder) and "prometheus" (metrics.prom in the run folder)."""
    prometheus_port: int = 0
    """Port at which Prometheus may ask for the last figures, beside metrics.prom; 0: none."""
    eval_steps: int
    """Steps between two evaluations on held-out text."""
    eval_windows: int
    """Held-out windows of these evaluations."""
    final_eval_windows: int
    """Largest number of held-out windows in the evaluation at the end."""
    save_steps: int
    """Steps between two checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints to keep. The newest one that is whole is gone on from, so that one that is damaged loses little."""
    async_checkpoints: bool = True
    """Whether a checkpoint is copied in memory and written beside the next steps; otherwise they wait for it."""
    on_nan: OnNan = "stop"
    """Where a loss or a gradient is NaN or infinite: "stop" ends the run; "skip" goes back to the newest checkpoint and
    goes on without the batch that did it. Twice in a row ends the run."""
    spike_deviations: float = 0.0
    """A loss that is so many median absolute deviations above the median of the last ones is a spike, whose batch is
    left out as with on_nan "skip"; 0: none is."""
    spike_window: int = 64
    """Steps whose losses a loss is compared with."""

    def __post_init__(self) -> None:
        for name in (
            "steps", "gradient_accumulation", "log_steps", "eval_steps", "eval_windows", "final_eval_windows",
            "save_steps", "keep_checkpoints", "spike_window",
        ):  # fmt: skip
            check_number(self, name, least=1)
        check_number(self, "seed", least=0, most=LARGEST_SEED)
        for name in ("threads", "weight_decay", "spike_deviations"):
            check_number(self, name, least=0)
        check_number(self, "learning_rate", above=0, most=LARGEST_RATE)
        check_number(self, "max_grad_norm", above=0)
        check_number(self, "warmup_fraction", least=0, most=1)
        check_number(self, "decay_fraction", above=0, most=1)
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                'warmup_fraction and decay_fraction must be at most 1 together for the schedule "wsd", got '
                f"{self.warmup_fraction} and {self.decay_fraction}"
            )
        for name, choices in (("schedule", Schedule), ("precision", Precision), ("device", Device), ("on_nan", OnNan)):
            check_choice(self, name, get_args(choices))
        check_number(self, "prometheus_port", least=0, most=LARGEST_PORT)
        self.data = tuple(Path(path) for path in self.data)
        self.track = tuple(self.track)
        unknown = [name for name in self.track if name not in get_args(TrackerName)]
        if unknown or len(set(self.track)) < len(self.track):
            raise ValueError(f"track must be different ones of {', '.join(get_args(TrackerName))}, got {self.track}")
        if self.prometheus_port and "prometheus" not in self.track:
            raise ValueError(
                f'prometheus_port is for "prometheus" in track, got {self.prometheus_port} and {self.track}; add it '
                "there, or leave the port out"
            )

    def left_open(self) -> dict[str, Any]:
        """Values of settings that leave the choice to the run."""
        return {"threads": 0, "precision": "auto", "device": "auto"}

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as values that JSON holds."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "data": [str(path.absolute()) for path in self.data], "track": list(self.track)}


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
