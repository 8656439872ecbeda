"""Settings common to all training runs, and their validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Schedule = Literal["linear", "cosine", "wsd", "constant"]
Precision = Literal["auto", "float32", "tf32", "bfloat16", "float16", "float8"]
PlainPrecision = Literal["auto", "float32", "tf32", "bfloat16", "float16"]
"""Without float8, in which only :func:`train` computes."""
DeviceChoice = Literal["auto", "cpu", "cuda"]
OnNan = Literal["stop", "skip"]
AdamW = Literal["adamw", "adamw-bf16", "adamw-8bit"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "prometheus"]

LARGEST_SEED = 2**32 - 1  # limit of NumPy, which transformers seeds too
LARGEST_PORT = 2**16 - 1
LARGEST_RATE = 1e36  # representable in float32, also after optimizers multiply it
LONGEST_TEXT = 2**31  # positions of a pattern
MOST_WORKERS = 1024
_RENAMED = {"length": "context_length", "weights": "data_weights"}
"""Settings that files of earlier versions have under another name."""
_MOST_WINDOWS = 2**48  # window counts stay within 64 bits on any number of processes


@dataclass(kw_only=True, slots=True)
class RunSettings:
    """Settings that `train` and `extend` share.

    Raises:
        ValueError: a value is out of range.
    """

    data: tuple[Path, ...] = ()
    """Training text; default: Python's own library. Text files, folders that are searched for text files, and record
    files (JSONL, Parquet, folders saved by save_to_disk of datasets). The default is the source of the running Python's
    standard library, about 31 MB."""
    text_field: str = "text"
    """Field or column of records that holds the text."""
    steps: int
    """Optimizer steps of the run. With --resume RUN: the number that it has from now on."""
    stage_steps: int = 0
    """Steps that the stages divide; the last stage lasts to the end of the run. 0: all steps. A run that is trained
    longer keeps those that it began with."""
    gradient_accumulation: int = 1
    """Batches whose gradients are summed before a step."""
    learning_rate: float
    """Peak learning rate of AdamW."""
    weight_decay: float
    """Decoupled weight decay of matrices; none for the embedding, biases and norms."""
    max_grad_norm: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    warmup_fraction: float = 0.03
    """Fraction of the steps over which learning rates rise from 0."""
    schedule: Schedule = "linear"
    """Decay of the learning rates after the warm-up. To 0 over all steps ("linear", "cosine"), over the last ones
    ("wsd": warm-up, stable, decay), or never ("constant")."""
    decay_fraction: float = 0.2
    """Fraction of the steps over which schedule "wsd" decays, linearly."""
    precision: Precision = "auto"
    """Number format of the computation. "bfloat16": matrix products and attention in bfloat16 (autocast), weights and
    optimizer in float32. "float16": the same in float16 with loss scaling; batches whose gradients overflow are
    repeated with a lower scale. "float8": bfloat16, with large linear layers in float8 (torchao), on GPUs that support
    it. "tf32": float32, with products in TF32 on CUDA GPUs from compute capability 8.0. "auto": bfloat16 with hardware
    support, else float32; the run records which."""
    device: DeviceChoice = "auto"
    """"auto" takes a CUDA device if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch."""
    seed: int = 0
    """Seed of the weights, the order of the data and dropout."""
    log_steps: int = 5
    """Steps between entries of the training loss."""
    track: tuple[TrackerName, ...] = ("tensorboard",)
    """Trackers besides metrics.jsonl. "tensorboard": files in the run folder. "wandb": Weights & Biases; with
    WANDB_MODE=offline files in the run folder. "mlflow": at MLFLOW_TRACKING_URI, else a database in the run folder.
    "prometheus": metrics.prom in the run folder."""
    prometheus_port: int = 0
    """Port on which Prometheus reads the latest figures; 0: none."""
    eval_steps: int
    """Steps between evaluations on held-out text."""
    eval_windows: int
    """Held-out windows of the evaluations during training."""
    final_eval_windows: int
    """Most held-out windows of the final evaluation."""
    save_steps: int
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints to keep. A run is resumed from the newest intact one."""
    async_checkpoints: bool = True
    """Write a checkpoint while training goes on, from a copy in memory. With --no-async-checkpoints, training waits
    until it is written."""
    on_nan: OnNan = "stop"
    """What follows a loss or gradient that is NaN or infinite. "stop" ends the run; "skip" goes back to the newest
    checkpoint and continues without the batch that caused it. Two in a row end the run."""
    spike_deviations: float = 0.0
    """Skip the batch of a loss this many deviations above recent ones; 0: never. They are median absolute deviations
    above the median of recent losses, and the batch is skipped as with on_nan "skip"."""
    spike_window: int = 64
    """Recent losses that a spike is compared with."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "gradient_accumulation",
            "log_steps",
            "eval_steps",
            "eval_windows",
            "final_eval_windows",
            "save_steps",
            "keep_checkpoints",
            "spike_window",
        ):
            check_number(self, name, least=1)
        check_number(self, "seed", least=0, most=LARGEST_SEED)
        for name in ("stage_steps", "threads", "weight_decay", "spike_deviations"):
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
        for name, choices in (
            ("schedule", Schedule),
            ("precision", Precision),
            ("device", DeviceChoice),
            ("on_nan", OnNan),
        ):
            check_choice(self, name, get_args(choices))
        check_number(self, "prometheus_port", least=0, most=LARGEST_PORT)
        self.data = tuple(Path(path) for path in self.data)
        check_text(self, "data")
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
        """Settings whose value means that the run chooses."""
        return {"threads": 0, "precision": "auto", "device": "auto", "stage_steps": 0}

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-serialisable values."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "data": [str(path.absolute()) for path in self.data], "track": list(self.track)}


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of settings from a file, with today's names for those of earlier versions."""
    return {_RENAMED.get(name, name): value for name, value in values.items()}


def check_windows(number: int) -> None:
    """Raise ``ValueError`` if the total number of windows of a run is too large to count."""
    if number > _MOST_WINDOWS:
        raise ValueError(
            f"steps times gradient_accumulation times the windows of a batch must be at most {_MOST_WINDOWS:,}, got "
            f"{number:,}"
        )


def check_text(settings: DataclassInstance, name: str) -> None:
    """Raise ``ValueError`` unless the field ``name``, a text, a path or a tuple of them, is valid UTF-8, in which
    settings are written to files."""
    value = getattr(settings, name)
    for text in map(str, value if isinstance(value, tuple) else (value,)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} must be UTF-8 text, got {text!r}") from error


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
    """Raise ``ValueError`` unless a field is a finite number (an integer if declared so) within the bounds."""
    value = getattr(settings, name)
    declared = next(str(entry.type) for entry in fields(settings) if entry.name == name)
    if declared.startswith("int") and not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    bounds = (
        (f"at least {least}", value >= least),
        (f"above {above}", value > above),
        (f"below {below}", value < below),
        (f"at most {most}", value <= most),
    )
    for words, holds in bounds:
        if not holds:
            raise ValueError(f"{name} must be {words}, got {value}")
