"""Options of fine-tuning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from dilated_attention_pytorch.slides.encoder import Pooling
from dilated_attention_pytorch.slides.settings import TileSettings
from dilated_attention_pytorch.training.run_settings import LARGEST_SEED, check_choice, check_number

from .labels import Task

FinetunePrecision = Literal["float32", "bfloat16"]
_BASE_RATE = 0.002
_OF_CASES = 256
_MOST = 10**6
_NOT_BINDING = ("device", "threads", "engine", "ray_address", "maps", "skip_missing")
"""Options that a later command over the same folder may change."""


@dataclass(kw_only=True, slots=True)
class FinetuneSettings(TileSettings):
    """Options of fine-tuning besides slides, labels, checkpoint and output folder; the defaults of the recipe are those
    of GigaPath's ``scripts/run_panda.sh``.

    Raises:
        ValueError: a value is out of range.
    """

    task: Task | None = None
    """Kind of the labels. "classification", "multilabel" (label columns of 0 and 1), "regression" or "survival".
    Default: classification; multilabel for several label columns."""
    label_column: tuple[str, ...] = ("label",)
    """Columns of the labels."""
    slide_column: str = "slide"
    """Column of the slides: names of feature files without their endings."""
    patient_column: str = "patient"
    """Column of the patients, if there is one. All slides of a patient are on one side of a split."""
    time_column: str = "time"
    """Column of the time to the event or to the end of observation (survival)."""
    event_column: str = "event"
    """Column of the event: 1 if it happened, 0 if not until then (survival)."""
    split_column: str = "split"
    """Column with train, validation or test for each slide, if there is one. It replaces --folds, --validation and
    --test."""
    by_patient: bool = False
    """All slides of a patient are one case: one sequence, one label."""
    folds: int = 1
    """Folds of a cross-validation over patients; 1: one split. Of one split, --test is held out."""
    validation: float = 0.1
    """Fraction of the patients on which the epoch is chosen; 0: the last epoch is taken."""
    test: float = 0.2
    """Fraction of the patients held out for the test of one split."""
    split_seed: int = 0
    """Seed of the splits, which are the same for all seeds of the training."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the training; every fold is trained once for each. They set the first weights of the classifier, the
    order of the cases, and dropout."""
    layers: tuple[int, ...] = (11,)
    """Layers whose pooled states, behind the final norm, the classifier reads. 0 is before the first layer. 5 11 is
    GigaPath's feat_layer "5-11"."""
    pooling: Pooling = "class"
    """Vector of a slide. "class": the class token. "mean": the mean over the tiles."""
    freeze: bool = False
    """Train the classifier alone, on vectors that are computed once."""
    lora: int | None = None
    """Train low-rank adapters of this rank instead of all weights. They are at the projections of the attention (peft);
    the classifier is trained too."""
    epochs: int | None = None
    """Epochs. Default: 5; with --freeze 100."""
    warmup_epochs: float = 1.0
    """Epochs over which learning rates rise from 0. Afterwards they fall to 0 along a cosine."""
    patience: int = 10
    """End after so many epochs without a better validation metric."""
    cases_per_step: int = 16
    """Cases whose gradients are summed before a step."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW. Default: 0.002 cases_per_step / 256, GigaPath's rule; with --freeze 0.001."""
    weight_decay: float = 0.05
    """Decoupled weight decay; none for biases and norms."""
    layer_decay: float = 0.95
    """Factor of the learning rate from each layer to the one below."""
    dropout: float = 0.1
    """Dropout probability of the encoder in training."""
    drop_path: float = 0.0
    """Stochastic depth: probability of dropping a residual branch of the last layer in training."""
    class_weights: bool = True
    """Weigh every class by the inverse of its frequency in the training part. Of several labels: presence and
    absence."""
    maps: bool = False
    """Also write the contribution of every tile to every class. For each slide of the test part, with the rollout.
    `dilated-attention heatmap FILE --contribution CLASS` draws it."""
    skip_missing: bool = False
    """Leave out cases whose slides are missing or cannot be read."""
    encoder: str | None = "gigapath"
    """Tile encoder of the features. A file that records another one is refused."""
    precision: FinetunePrecision = "float32"
    """Number format of matrix products and attention, under autocast. Weights and optimizer are in float32."""

    def __post_init__(self) -> None:
        if self.task is not None:
            check_choice(self, "task", get_args(Task))
        TileSettings.__post_init__(self)
        check_choice(self, "precision", get_args(FinetunePrecision))
        check_choice(self, "pooling", get_args(Pooling))
        for name in ("folds", "patience", "cases_per_step"):
            check_number(self, name, least=1, most=_MOST)
        for name, value in (("epochs", self.epochs), ("lora", self.lora)):
            if value is not None:
                check_number(self, name, least=1, most=_MOST)
        for name in ("validation", "dropout", "drop_path"):
            check_number(self, name, least=0, below=1)
        check_number(self, "test", above=0, below=1)
        for name in ("warmup_epochs", "weight_decay"):
            check_number(self, name, least=0, most=_MOST)
        check_number(self, "layer_decay", above=0, most=1)
        check_number(self, "split_seed", least=0, most=LARGEST_SEED)
        if self.learning_rate is not None:
            check_number(self, "learning_rate", above=0, most=1)
        _check_distinct("seeds", self.seeds)
        _check_distinct("layers", self.layers)
        if max(self.seeds) > LARGEST_SEED:
            raise ValueError(f"seeds must be at most {LARGEST_SEED}, got {max(self.seeds)}")
        if not self.label_column or not all(self.label_column):
            raise ValueError(f"label_column must name at least one column, got {list(self.label_column)}")
        if self.folds == 1 and self.validation + self.test >= 1:
            raise ValueError(
                f"validation and test must leave patients to train on, got {self.validation:g} and {self.test:g}; "
                "lower one of them"
            )
        if self.freeze and self.lora is not None:
            raise ValueError("freeze trains the classifier alone, and lora adapters too; leave out one of them")

    @property
    def num_epochs(self) -> int:
        """The epochs of a run."""
        return self.epochs or (100 if self.freeze else 5)

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-3 if self.freeze else _BASE_RATE * self.cases_per_step / _OF_CASES

    def of_result(self) -> dict[str, Any]:
        """The options that affect the results, as JSON-serialisable values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name not in _NOT_BINDING
        }


def _check_distinct(name: str, values: tuple[int, ...]) -> None:
    if not values or len(set(values)) < len(values) or min(values) < 0:
        raise ValueError(f"{name} must be different numbers of at least 0, one or more, got {list(values)}")
