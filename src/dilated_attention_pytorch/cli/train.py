"""The command ``dilated-attention train``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.machine import require
from dilated_attention_pytorch.training import PRESETS, Outcome, RunError, TrainSettings
from dilated_attention_pytorch.training.configuration import read_configuration, with_values
from dilated_attention_pytorch.training.spreading import ON_FAULTS, SPREADING
from dilated_attention_pytorch.training.stages import StageSettings, check_stage_ends, stage_ends

from .stopping import check_resume_alone, is_auto, leave_at_once, stopped, word_after

if TYPE_CHECKING:
    from rich.console import Console

    from dilated_attention_pytorch.models.config import LongNetConfig


_BESIDE_RESUME = ("steps", *SPREADING, *ON_FAULTS)
"""Settings that may change when a run is resumed."""


@dataclass(kw_only=True, slots=True)
class Train(TrainSettings):
    """Train a LongNet language model on text.

    Without flags: the preset for this machine, on the source files of Python's standard library. The run folder gets
    the model, the settings (run.toml), metrics, charts and checkpoints. Ctrl-C saves a checkpoint and stops; --resume
    continues.

    A smoke test, in seconds:

        dilated-attention train --preset tiny

    A model of your own text:

        dilated-attention train --data texts/ --steps 2000 --context-length 16384 --output runs/mine

    Stopped by Ctrl-C or a scheduler:

        dilated-attention train --resume runs/mine
    """

    preset: str = "auto"
    """Starting values, tiny, hybrid, cpu, gpu or gpu-large; default: gpu with CUDA, else hybrid. hybrid: 2.7 million
    parameters, every third layer sees the whole text. cpu: LongNet's segments in all layers, 1.7 million. gpu: 100
    million, 32,768 bytes of context. gpu-large: 730 million, 65,536 bytes. tiny: seconds. Other flags override them;
    --help after --preset shows them. Instead of hybrid, the default is cpu with --init-from, --packing documents, fewer
    than 3 layers, or flags that replace its patterns or rotary base."""
    output: Path = Path("runs/longnet")
    """Run folder to create. It must not exist, or be empty."""
    config: Path | None = None
    """TOML file of settings; flags override it. Settings have the flags' names with underscores for dashes, those of
    the model in a table [model]. It overrides the preset. Every run writes its own as run.toml."""
    resume: Path | None = None
    """Continue the stopped run in this folder. It keeps its own settings; with a larger --steps it also continues a
    finished run. Allowed with it are only --steps, flags that distribute it over processes (--context-parallel,
    --heads-parallel, --strategy, --layout, --data-parallel, --offload, --offload-folder, --tensor-parallel,
    --batch-size, --timeout), that handle bad batches (--on-nan, --spike-deviations, --spike-window), --workers and
    --cache. "auto", with any flags: continue the run that the same command line started in --output, if there is one;
    for jobs that a scheduler restarts."""
    given: tuple[str, ...] = dataclasses.field(default=(), init=False)
    """Names of the settings given on the command line."""

    def run_command(self) -> None:
        """Train, or continue, and report.

        Raises:
            RunError, SystemExit: see :func:`main`.
        """
        from dilated_attention_pytorch.terminal import plain_console
        from dilated_attention_pytorch.training import preflight, resume, train
        from dilated_attention_pytorch.training.process_group import is_first_process

        preflight.check_packages("training")
        from dilated_attention_pytorch.training.distribution import leaving_together

        console = plain_console()
        try:
            with leaving_together():
                if self.resume is None or is_auto(self.resume):
                    outcome = train(settings_of(self), self.output, console, may_resume=self.resume is not None)
                else:
                    changes = {name: getattr(self, name) for name in self.given if name in _BESIDE_RESUME}
                    outcome = resume(self.resume, console, changes)
        except KeyboardInterrupt:
            leave_at_once("train", self.output if self.resume is None or is_auto(self.resume) else self.resume)
        if is_first_process():
            _report(outcome, console)
        if outcome.stopped_by is not None:
            raise SystemExit(128 + outcome.stopped_by)


def defaults_of(argv: Sequence[str]) -> Train:
    """The defaults of ``train``: the preset named in ``argv`` (the arguments after ``train``) or in the file of
    ``--config``, overridden by that file.

    Raises:
        RunError: an unknown preset, a missing file, unknown settings in the file, or other flags with
            ``--resume``.
    """
    check_resume_alone(argv, beside=[f"--{name.replace('_', '-')}" for name in _BESIDE_RESUME])
    file = word_after("--config", argv)
    values = read_configuration(Path(file)) if file else {}
    named = values.pop("preset", "auto")
    name = word_after("--preset", argv) or named
    if name not in (*PRESETS, "auto"):
        raise RunError(f"--preset {name}: there is no such preset; choose one of auto, {', '.join(PRESETS)}")
    settings = PRESETS[_preset_for(argv, values) if name == "auto" else name]()
    fields = {entry.name: getattr(settings, entry.name) for entry in dataclasses.fields(settings)}
    fields |= _of_named_folders(settings, argv, values) | _of_lengths(settings.stages, argv, values)
    fields["model"] = _of_shape(fields["model"], argv, values)
    try:
        defaults = Train(**fields, preset=name)
    except ValueError as error:  # of a path that is not text, or of a vocabulary without its tokenizer
        raise RunError(str(error)) from error
    return with_values(defaults, values, Path(file or "."))


def _given(name: str, argv: Sequence[str], values: Mapping[str, Any]) -> Any:
    """A setting as a flag or the file of ``--config`` gives it, by its name with dots; None if neither does."""
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    flag = f"--{name.replace('_', '-')}"
    return word_after(flag, argv) or ("" if flag in argv else found)


def _number(name: str, argv: Sequence[str], values: Mapping[str, Any]) -> int | None:
    """A setting that is given as an integer; None if it is not."""
    try:
        return int(_given(name, argv, values))
    except (TypeError, ValueError):
        return None


def _preset_for(argv: Sequence[str], values: Mapping[str, Any]) -> str:
    """The preset of a run that names none.

    The preset `hybrid` has patterns, stages and positions that not every model and packing can have. Of a run that is
    resumed, or planned for a model of transformers, only the flags are read.
    """
    import torch

    if torch.cuda.is_available() and _given("device", argv, values) != "cpu":
        return "gpu"
    resumed = word_after("--resume", argv)
    is_other_run = resumed is not None and not is_auto(Path(resumed))
    is_other_model = word_after("--model", argv) is not None
    has_others = any(_given(name, argv, values) is not None for name in _NOT_OF_HYBRID)
    is_packed = _given("packing", argv, values) == "documents"
    layers = _number("model.num_layers", argv, values)
    is_shallow = layers is not None and layers < 3
    return "cpu" if is_other_run or is_other_model or has_others or is_packed or is_shallow else "hybrid"


_SEGMENTS = ("segment_lengths", "dilation_rates", "layer_segment_shifts", "offset_rule")
_NOT_OF_HYBRID = (
    "init_from",
    "stages.patterns",
    *(f"model.{name}" for name in (*_SEGMENTS, "layer_patterns", "rope_theta", "shifted_keys")),
)
"""Settings that replace a part of the preset `hybrid`, or are refused beside one."""


def _of_lengths(stages: StageSettings, argv: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that follow from ``--context-length``, at which a preset's stages end, from ``--stages.lengths``, which
    replaces them, and from ``--steps``: there are no stages if one would have no step."""
    if _given("stages.lengths", argv, values) is not None:
        return {"stages": StageSettings()}
    length, steps = _number("context_length", argv, values), _number("steps", argv, values)
    fields: dict[str, Any] = {}
    if stages.lengths and length is not None:
        stages = stages.ending_at(length)
        fields["context_length"] = length
    if stages.lengths and steps is not None:
        try:
            check_stage_ends(stage_ends(steps, len(stages.lengths), stages.fractions))
        except ValueError:
            stages = StageSettings()
    return {**fields, "stages": stages}


def _of_shape(model: LongNetConfig, argv: Sequence[str], values: Mapping[str, Any]) -> LongNetConfig:
    """A preset's model with what follows from flags: as many key/value heads as heads and a feed-forward that fits
    width and activation, where the preset has them so; no segments beside ``--model.layer-patterns``; no shift that no
    layer has."""
    layers = _number("model.num_layers", argv, values)
    changes: dict[str, Any] = {}
    if layers is not None and layers > 0:
        changes = {"layer_segment_shifts": model.layer_segment_shifts[:layers]}
    if _given("model.layer_patterns", argv, values):
        changes |= {"segment_lengths": (), "dilation_rates": (), "layer_segment_shifts": (0,), "offset_rule": "modulo"}
        changes["layer_patterns"] = ("local_window(127)",)  # the parser puts the given ones here
    sizes: dict[str, Any] = {name: _number(f"model.{name}", argv, values) for name in ("embed_dim", "num_heads")}
    sizes["activation"] = _given("model.activation", argv, values)
    changes |= {name: size for name, size in sizes.items() if size is not None}
    own = dataclasses.replace(model, num_kv_heads=None, ffn_dim=None)
    for name in ("num_kv_heads", "ffn_dim"):
        if getattr(model, name) == getattr(own, name):
            changes[name] = None
    try:
        return dataclasses.replace(model, **changes)
    except ValueError:  # of given sizes, which the parser refuses
        return model


def _of_named_folders(settings: TrainSettings, argv: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that follow from the folders of ``--init-from`` and ``--tokenizer``: the model, and its tokens."""

    def named(name: str) -> Path | None:
        path = word_after(f"--{name.replace('_', '-')}", argv) or values.get(name)
        return Path(path) if isinstance(path, str) and path else None

    model, source, tokenizer = settings.model, named("init_from"), named("tokenizer")
    if source is None and tokenizer is None:
        return {}
    from dilated_attention_pytorch.training.data.tokenizer import TOKENIZER_NAME, load_tokenizer

    if source is not None:
        from dilated_attention_pytorch.training.initial_weights import model_of

        model = model_of(source)
        if tokenizer is None and (source / TOKENIZER_NAME).is_file():
            tokenizer = source
    fields: dict[str, Any] = {"init_from": source}
    if tokenizer is not None and (tokenizer / TOKENIZER_NAME if tokenizer.is_dir() else tokenizer).is_file():
        require(f"--tokenizer {tokenizer}", ("tokenizers",), "train")
        model = dataclasses.replace(model, vocab_size=load_tokenizer(tokenizer).vocab_size)
        fields["tokenizer"] = tokenizer
    return {**fields, "model": model}


def settings_of(command: TrainSettings) -> TrainSettings:
    """The training settings of a command that has other options as well."""
    return TrainSettings(**{entry.name: getattr(command, entry.name) for entry in dataclasses.fields(TrainSettings)})


def _report(outcome: Outcome, console: Console) -> None:
    run = shlex.quote(str(outcome.run))
    if outcome.stopped_by is not None:
        words = stopped("train", outcome.run, outcome.step, outcome.stopped_by)
        console.print(words, highlight=False, soft_wrap=True)
        return
    console.rule("sample")
    console.print(outcome.sample or "", highlight=False, soft_wrap=True)
    console.rule("result")
    console.print(
        f"held-out: {outcome.bits_per_byte:.3f} bits per byte; xz -9e takes {outcome.xz_bits_per_byte:.3f} for the "
        "same bytes, compressed as one file",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_quarters_in_words(outcome), highlight=False, soft_wrap=True)
    console.print(
        f"in {run}: model.safetensors, config.json, training.json, run.toml, metrics.jsonl, loss.png, "
        "sample.txt\n"
        f"generate from it with:\n  dilated-attention generate {run} --prompt {shlex.quote(outcome.prompt or '')}",
        highlight=False,
        soft_wrap=True,
    )


def _quarters_in_words(outcome: Outcome) -> str:
    if outcome.quarters is None or outcome.last_quarter_alone is None:
        return "by quarter of the context: not measured, as no held-out file is as long as the context"
    quarters, alone = outcome.quarters, outcome.last_quarter_alone
    numbers = ", ".join(f"{bits:.3f}" for bits in quarters)
    fall = quarters[0] - quarters[-1]
    compared = f"the last is {fall:.3f} lower than the first" if fall > 0 else "the last is not lower than the first"
    return (
        f"held-out bits per byte by quarter of the context: {numbers}: {compared}\n"
        f"the last quarter without the earlier context: {alone:.3f}; the context improves it by "
        f"{alone - quarters[-1]:.3f}"
    )
