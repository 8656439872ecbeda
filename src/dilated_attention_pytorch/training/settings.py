"""Settings of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dilated_attention_pytorch.models.config import CYCLED, LongNetConfig
from dilated_attention_pytorch.patterns.blocks import has_local_window, with_local_window

from .run_settings import (
    LARGEST_RATE,
    LARGEST_SEED,
    LONGEST_TEXT,
    MOST_WORKERS,
    RunSettings,
    check_choice,
    check_number,
    check_text,
    check_windows,
    renamed,
)
from .stages import Stages, StageSettings, stage_ends

Optimizer = Literal["muon", "adamw", "adamw-bf16", "adamw-8bit"]
Strategy = Literal["auto", "ring", "gather", "heads"]
Layout = Literal["auto", "contiguous", "zigzag"]
DataParallel = Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]
Offload = Literal["none", "optimizer", "parameters", "nvme"]
Parallel = Literal["manual", "auto"]
Packing = Literal["windows", "documents"]

LONGEST_TIMEOUT = 7 * 24 * 3600  # seconds; the transport's durations overflow far beyond


@dataclass(kw_only=True, slots=True)
class TrainSettings(RunSettings):
    """Train a LongNet language model on text.

    Raises:
        ValueError: a value is out of range.
    """

    init_from: Path | None = None
    """Folder whose weights the new run begins with: a run folder of train, or a saved LongNet (config.json and
    model.safetensors). On the command line its sizes and its tokenizer are the defaults. The pattern may be another
    one; the optimizer and the schedule start over. Default: random weights."""
    tokenizer: Path | None = None
    """Byte-level tokenizer: tokenizer.json, or a folder with it. `dilated-attention tokenizer` writes one. On the
    command line --model.vocab-size is its number of tokens. Default: one token per byte."""
    cache: Path | None = None
    """Folder for cached tokens. They are computed once per files and tokenizer, and memory-mapped. Default: with a
    tokenizer, the user's cache folder; bytes are read into memory."""
    data_weights: tuple[float, ...] = ()
    """Proportions of the sources of --data in the batches. One number per source. Default: all sources form one text,
    in which every byte is equally likely."""
    packing: Packing = "windows"
    """How rows are cut from the text. "windows": context_length consecutive tokens from anywhere in the text, across
    documents. "documents": rows of whole documents that do not attend to each other; positions restart in each, and
    every document is read once per epoch."""
    max_tokens: int = 0
    """With packing "documents": most tokens of a batch; 0: rows are counted. Batches are then of documents of similar
    length instead of batch_size rows."""
    max_batch_size: int = 0
    """With max_tokens: most documents per batch; 0: no limit."""
    workers: int = 0
    """Processes that load batches ahead; 0: the training process loads them. The batches do not depend on it."""
    model: LongNetConfig
    """Sizes and pattern of the model."""
    context_length: int = 8192
    """Tokens that the model reads at once. They are bytes without a tokenizer."""
    batch_size: int = 1
    """Windows of context_length tokens per batch and device. Per group of devices where they share a sequence."""
    stages: StageSettings = field(default_factory=StageSettings)
    """Stages with growing windows, each with its fraction of the steps, pattern and learning rate."""
    random_local_windows: tuple[int, ...] = ()
    """Sizes of which every step draws one, by its number and the seed, for every local_window of the model's layers.
    All are equally likely; a size that is named twice is drawn twice as often. The last tenth of the steps and all
    evaluations have the model's own windows, as in SWAX (arXiv 2509.24552). Default: always the model's own."""
    file_start_fraction: float = 0.0
    """Fraction of the training windows that start at the beginning of a file. The others start anywhere."""
    optimizer: Optimizer = "muon"
    """Optimizer. "muon": torch.optim.Muon for the matrices inside the blocks, AdamW for everything else. "adamw": AdamW
    only. "adamw-bf16": its moments in bfloat16, 4 bytes per weight instead of 8. "adamw-8bit": in 8 bits
    (bitsandbytes), 2 bytes."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW. With Muon, the matrices of the blocks have --muon-learning-rate."""
    muon_learning_rate: float = 2e-2
    """Peak learning rate of Muon, for the matrices of the blocks."""
    muon_momentum: float = 0.95
    """Momentum of Muon (Nesterov)."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; none for the embedding, biases, norms and the convolution of keys."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.95
    """Decay of AdamW's second moment."""
    parallel: Parallel = "manual"
    """"auto" chooses data_parallel and context_parallel. It does so by the available memory, and prints the reason.
    "manual": as set."""
    context_parallel: int = 1
    """Processes that share each sequence, started with torchrun. The rows are split between them. Times tensor_parallel
    it must divide the number of processes; the remaining factor is data parallel."""
    heads_parallel: int = 1
    """Processes of a sequence that split heads instead of rows, for example within a node."""
    strategy: Strategy = "auto"
    """How keys and values are sent between the processes of a sequence. "ring" (point to point), "gather" (one
    collective) or "heads" (all-to-all from rows to heads). "auto": the fastest according to plan_parallel."""
    layout: Layout = "auto"
    """Rows of each process. "contiguous", or "zigzag" (one chunk from the front and one from the back, which balances
    causal attention). "auto": the better balanced one."""
    data_parallel: DataParallel = "ddp"
    """How data-parallel processes hold the weights. "ddp": replicated. "fsdp": weights, gradients and optimizer state
    are sharded over the processes (torch's fully_shard). With DeepSpeed: "zero1" shards the optimizer state, "zero2"
    also gradients, "zero3" also weights."""
    offload: Offload = "none"
    """What zero1, zero2 and zero3 keep in host memory. "optimizer": the optimizer state. "parameters" (zero3): also the
    weights. "nvme" (zero3) keeps both in files under offload_folder."""
    offload_folder: Path | None = None
    """With offload "nvme": a folder on a disk of this machine. Every process keeps its files in a folder of its own
    there, and deletes it at the end."""
    tensor_parallel: int = 1
    """Processes that split heads, feed-forward and vocabulary of every layer."""
    timeout: int = 600
    """Seconds that a process waits for another one. Then the run ends and names the rank that was killed, was stopped
    or does not take part. Work of one process while the others wait, such as writing a checkpoint or encoding a large
    text for the first time, must take less."""
    compile: bool = False
    """Compile the model with torch.compile. That takes minutes at the start; then steps are faster on a GPU."""
    eval_windows: int = 12
    """Held-out windows of the evaluations during training."""
    final_eval_windows: int = 256
    """Most held-out windows of the final evaluation; xz is measured on the same bytes."""
    quarter_files: int = 48
    """Most held-out files for the evaluation by quarter of the context. Each is at least context_length long."""
    eval_steps: int = 100
    save_steps: int = 200
    sample_prompt: str = ""
    """Prompt of the text in sample.txt. Default: the beginning of a held-out file, or of a Python function."""
    sample_length: int = 600
    """Tokens of that text."""
    sample_temperature: float = 0.7
    """Temperature of that text."""

    def __post_init__(self) -> None:
        RunSettings.__post_init__(self)
        self._check_data()
        self.offload_folder = None if self.offload_folder is None else Path(self.offload_folder)
        for name in ("batch_size", "quarter_files", "context_parallel", "heads_parallel", "tensor_parallel"):
            check_number(self, name, least=1)
        for name in ("sample_length", "sample_temperature"):
            check_number(self, name, least=0)
        check_number(self, "context_length", least=8)
        check_number(self, "timeout", least=5, most=LONGEST_TIMEOUT)
        check_number(self, "muon_learning_rate", above=0, most=LARGEST_RATE)
        check_windows(self.steps * self.batch_size * self.gradient_accumulation)
        for name in ("sample_prompt", "offload_folder"):
            check_text(self, name)
        check_number(self, "file_start_fraction", least=0, most=1)
        for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
            check_number(self, name, least=0, below=1)
        for name, choices in (
            ("optimizer", Optimizer),
            ("strategy", Strategy),
            ("layout", Layout),
            ("data_parallel", DataParallel),
            ("offload", Offload),
            ("parallel", Parallel),
        ):
            check_choice(self, name, get_args(choices))
        if self.model.checkpoint_every > 1 and not self.model.gradient_checkpointing:
            raise ValueError(
                "model.checkpoint_every says which blocks model.gradient_checkpointing recomputes, got "
                f"{self.model.checkpoint_every} without it; set it too, or leave this out"
            )
        for name in CYCLED:
            entries = list(getattr(self.model, name))
            if len(entries) > self.model.num_layers:
                raise ValueError(
                    f"model.{name} must have at most one entry per layer, of model.num_layers {self.model.num_layers}: "
                    f"got {entries}; leave out those that no layer would read, or make more layers"
                )
        self.stages.check(self.context_length, self.steps, self.model, stage_steps=self.stage_steps)
        self._check_random_local_windows()
        self._check_spreading()
        if self.context_parallel % self.heads_parallel:
            raise ValueError(
                "heads_parallel must divide context_parallel, of whose processes it is a part: "
                f"got {self.heads_parallel} of {self.context_parallel}"
            )
        if self.heads_parallel > 1 and self.strategy == "heads":
            raise ValueError(
                'strategy must be "ring", "gather" or "auto" with heads_parallel, as it says how rows travel between '
                f'the groups that split the heads; got "heads" and heads_parallel {self.heads_parallel}. To split the '
                "heads over all processes, leave heads_parallel out"
            )
        if self.model.vocab_size != 256 and self.tokenizer is None:
            raise ValueError(
                f"model.vocab_size must be 256, one token a byte, got {self.model.vocab_size}; or name the tokenizer "
                "whose tokens they are (--tokenizer)"
            )
        self._check_packing()

    def _check_random_local_windows(self) -> None:
        sizes = self.random_local_windows = tuple(self.random_local_windows)
        if any(isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < LONGEST_TEXT for size in sizes):
            raise ValueError(
                f"random_local_windows must be integers of at least 0 and below {LONGEST_TEXT}, got {list(sizes)}"
            )
        if sizes and not any(map(has_local_window, self.model.different_patterns)):
            raise ValueError(
                "random_local_windows replace the sizes of the model's local windows, and no layer has one: got "
                f"{list(sizes)} with {self.model.pattern_in_words}; name local_window(N) in model.layer_patterns, or "
                "leave them out"
            )

    def _check_data(self) -> None:
        for name in ("max_tokens", "max_batch_size"):
            check_number(self, name, least=0)
        check_number(self, "workers", least=0, most=MOST_WORKERS)
        check_choice(self, "packing", get_args(Packing))
        for name in ("init_from", "tokenizer", "cache"):
            path = getattr(self, name)
            setattr(self, name, None if path is None else Path(path))
            check_text(self, name)
        self.data_weights = tuple(self.data_weights)
        if self.data_weights and len(self.data_weights) != len(self.data):
            raise ValueError(
                f"data_weights must be one for each of data, got {len(self.data_weights)} for {len(self.data)}; leave "
                "them out to take all as one text"
            )
        for weight in self.data_weights:
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
                raise ValueError(f"data_weights must be finite numbers above 0, got {weight!r}")
        if self.max_tokens and self.packing != "documents":
            raise ValueError(
                'max_tokens counts the tokens of whole documents: add packing "documents", or leave it out'
            )
        if self.max_batch_size and not self.max_tokens:
            raise ValueError("max_batch_size bounds the batches that max_tokens makes; add that, or leave it out")

    def _check_packing(self) -> None:
        if self.packing == "documents" and self.file_start_fraction:
            raise ValueError(
                f"file_start_fraction is of windows, got {self.file_start_fraction} with packing "
                '"documents", where every document begins one; leave it out'
            )
        if self.packing == "documents" and self.stages.lengths:
            raise ValueError(f'stages are of windows, got {list(self.stages.lengths)} with packing "documents"')
        if self.packing == "documents" and self.compile:
            raise ValueError('compile is for windows: the documents of every row of packing "documents" are others')
        if self.max_tokens and self.batch_size != 1:
            raise ValueError(
                f"batch_size counts rows, got {self.batch_size} with max_tokens, which says how much a batch holds; "
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
        setting = f'offload "{self.offload}"'
        if self.offload != "none" and not self.data_parallel.startswith("zero"):
            raise ValueError(
                f'{setting} is carried out by DeepSpeed: set data_parallel to "zero1", "zero2" or "zero3", got '
                f'"{self.data_parallel}"'
            )
        if self.offload in ("parameters", "nvme") and self.data_parallel != "zero3":
            raise ValueError(
                f'{setting} is for weights that are split: set data_parallel to "zero3", got "{self.data_parallel}"'
            )
        if (self.offload == "nvme") != (self.offload_folder is not None):
            raise ValueError(
                'offload "nvme" and offload_folder, where it keeps its files, go together; got offload '
                f'"{self.offload}" and offload_folder {self.offload_folder}: set both or none'
            )

    @property
    def stages_by_step(self) -> Stages:
        """The stages by optimizer step; a single one if the settings have none."""
        lengths = self.stages.lengths or (self.context_length,)
        own = [self.model.pattern(layer) for layer in range(self.model.num_layers)]
        return Stages(
            lengths,
            stage_ends(self.steps, len(lengths), self.stages.fractions, stage_steps=self.stage_steps),
            self.stages.windows or tuple(self.context_length // length for length in lengths),
            self.stages.learning_rates,
            self.stages.patterns_of(self.model),
            tuple(tuple(with_local_window(one, before) for one in own) for before in self.random_local_windows),
            self.seed,
        )

    def left_open(self) -> dict[str, Any]:
        """Settings whose value means that the run chooses."""
        chosen = ("parallel", "data_parallel", "context_parallel") if self.parallel == "auto" else ()
        return {
            **RunSettings.left_open(self),
            "cache": None,
            "sample_prompt": "",
            **{name: getattr(self, name) for name in chosen},
        }

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-serialisable values."""
        values = RunSettings.to_dict(self)
        for name in ("data_weights", "random_local_windows"):
            values[name] = list(values[name])
        for name in ("init_from", "tokenizer", "cache", "offload_folder"):
            path = values[name]
            values[name] = None if path is None else str(path.absolute())
        return {**values, "model": self.model.to_dict(), "stages": self.stages.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSettings:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError: an unknown key, a missing model, or a value out of range.
        """
        values = renamed(values)
        read = {"model": LongNetConfig.from_dict(values["model"]), "data": tuple(values["data"])}
        if values.get("parallel") == "told":  # as earlier versions recorded it
            read["parallel"] = "manual"
        return cls(**{**values, **read, "stages": StageSettings.from_dict(values.get("stages", {}))})


@dataclass(kw_only=True, slots=True)
class SampleSettings:
    """Sampling settings; tokens are bytes for a model without a tokenizer.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int = 500
    """Most tokens to generate; fewer if the text ends."""
    temperature: float = 0.7
    """Divisor of the logits; 0 is greedy."""
    top_k: int | None = None
    """Sample from the k most likely tokens."""
    top_p: float | None = None
    """Sample from the smallest set of most likely tokens of this total probability."""
    seed: int | None = None
    """Seed of the sampling. Default: every call samples differently."""

    def __post_init__(self) -> None:
        check_number(self, "max_new_tokens", least=1, most=LONGEST_TEXT)
        check_number(self, "temperature", least=0)
        if self.top_k is not None:
            check_number(self, "top_k", least=1)
        if self.top_p is not None:
            check_number(self, "top_p", above=0, most=1)
        if self.seed is not None:
            check_number(self, "seed", least=0, most=LARGEST_SEED)
