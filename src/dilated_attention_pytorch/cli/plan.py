"""The command ``dilated-attention plan``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import tyro

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training import TrainSettings
from dilated_attention_pytorch.training.run_settings import LONGEST_TEXT

from .plan_words import print_plan, steps_in_words
from .train import defaults_of, settings_of

if TYPE_CHECKING:
    from dilated_attention_pytorch.estimate import Device, Generation, MemoryPlan, RunPlan
    from dilated_attention_pytorch.estimate.pretrained import PretrainedRun
    from dilated_attention_pytorch.estimate.run import Purpose

_Answer = tuple[str, Any, list[str]]
"""An answer's name, its JSON value, and lines of text."""
_Planned: TypeAlias = "tuple[MemoryPlan, Device, dict[str, Any], Iterator[_Answer]]"
"""A plan, where, the settings as JSON, and the answers."""
_HERE = "here"
_OF_PRETRAINED = ("context_length", "batch_size", "precision", "optimizer", "device", "threads")
"""Settings of a run that a plan of a model of transformers reads; of ``model``, gradient_checkpointing."""


@dataclass(kw_only=True, slots=True)
class PlanCommand(TrainSettings):
    """Plan a run before it starts: memory, seconds, and what bounds it.

    The flags are those of train. Memory is counted from the step itself, on fake tensors. Seconds are a lower bound
    from the data sheet of the device that --hardware names; without it they are predicted from measurements of this
    machine.

    The run of `train` on this machine:

        dilated-attention plan

    A preset on an H200:

        dilated-attention plan --preset gpu --hardware H200

    The longest text, fewest devices and best changes:

        dilated-attention plan --preset gpu --hardware H200 --longest --fewest --changes

    A model of transformers:

        dilated-attention plan --model my/llama --hardware H200 --pattern "DilatedPattern([2048, 8192], [1, 4])"
    """

    preset: str = "auto"
    """Starting values: tiny, hybrid, cpu, gpu or gpu-large, and the default: see train."""
    config: Path | None = None
    """TOML file of settings, see train."""
    purpose: Annotated[Literal["training", "forward", "generation"], tyro.conf.arg(name="for")] = "training"
    """What to plan. A training step; a forward pass with the loss, as in an evaluation during training; or the memory
    of a generation of texts with the bounded cache."""
    prompt: int = 0
    """Tokens of every prompt; 0: --context-length."""
    new_tokens: int | None = None
    """Tokens to generate. Default: 500."""
    chunk_size: int | None = None
    """Tokens of a prompt to read at a time. Default: 4096."""
    pretrained: Annotated[Path | None, tyro.conf.arg(name="model")] = None
    """A folder with config.json, or that file; no weights are read. Of the other flags, --for, --pattern,
    --context-length, --batch-size, --precision, --optimizer, --model.gradient-checkpointing and those of the device
    apply."""
    pattern: str = ""
    """Its attention pattern, in the syntax of `dilated-attention show`."""
    hardware: str = "here"
    """Name of the device, such as H200; "here": this machine. For an unknown name, the error lists the known ones.
    "here" measures one process in at most two minutes (products, attention, small steps of the model). Measurements
    are kept."""
    link: str = ""
    """Link between the devices. Default: the one of the data sheet."""
    processes: int = 1
    """Devices, each with one process."""
    price_per_hour: float = 0.0
    """Price of one device, in any currency; 0: not known."""
    longest: bool = False
    """Find the longest --context-length that fits."""
    fewest: bool = False
    """Find the fewest devices on which a mesh fits."""
    mesh: bool = False
    """Show the best meshes for this number of --processes."""
    largest: bool = False
    """Find the largest model of this shape that fits."""
    changes: bool = False
    """Show the three changes that would help most."""
    output_file: Path | None = None
    """JSON file to write. Default: none."""

    def run_command(self) -> None:
        """Print the plan and write the file.

        Raises:
            RunError: an unknown device, settings that do not fit the number of processes, or a file that cannot be
                written.
        """
        from dilated_attention_pytorch.output import check_new_file, write_text
        from dilated_attention_pytorch.terminal import plain_console
        from dilated_attention_pytorch.training import preflight

        if self.output_file is not None:
            check_new_file(self.output_file)
        self._check_flags()
        preflight.check_packages("training")
        preflight.check_optimizer(self.optimizer)
        from dilated_attention_pytorch.estimate import RunPlan

        pretrained = self.pretrained
        plan, device, settings, answers = (
            self._plan_longnet() if pretrained is None else self._plan_pretrained(pretrained)
        )
        print_plan(plan, device, self.processes)
        console, values = plain_console(), dict[str, Any]()
        for name, value, lines in answers:
            values[name] = value
            console.print("\n".join(lines), soft_wrap=True)
        if self.output_file is not None:
            written = {
                "hardware": device.sheet.name,
                "processes": self.processes,
                "settings": settings,
                **dataclasses.asdict(plan),
                "total_bytes": plan.footprint.total,
                "fits": plan.fits,
                "bounded_by": plan.bounded_by if isinstance(plan, RunPlan) else None,
                "longest_context_length": None,
                **values,
            }
            write_text(self.output_file, json.dumps(written, indent=1, default=str) + "\n")

    def _check_flags(self) -> None:
        if self.processes < 1:
            raise RunError(f"a run takes at least 1 process, got {self.processes}")
        if not (math.isfinite(self.price_per_hour) and self.price_per_hour >= 0):
            raise RunError(f"--price-per-hour must be a finite number, at least 0, got {self.price_per_hour}")
        backwards = [f"--{name}" for name in ("longest", "fewest", "mesh", "largest", "changes") if getattr(self, name)]
        if backwards and (self.purpose != "training" or self.pretrained is not None):
            raise RunError(
                f"{backwards[0]} is for training steps of a LongNet; leave it out with "
                f"{'--model' if self.pretrained is not None else f'--for {self.purpose}'}"
            )
        if self.pattern and self.pretrained is None:
            raise RunError(
                "--pattern is for a model of transformers, named by --model; a LongNet's is "
                "--model.segment-lengths and --model.dilation-rates, or --model.layer-patterns"
            )
        named = [f"--{name.replace('_', '-')}" for name in self._lengths()]
        if named and self.purpose != "generation":
            raise RunError(f"{named[0]} requires --for generation, got --for {self.purpose}")
        for name, number in (
            ("processes", self.processes),
            ("context_length", self.context_length),
            *self._lengths().items(),
        ):
            if number > LONGEST_TEXT:
                raise RunError(f"--{name.replace('_', '-')} must be at most {LONGEST_TEXT:,}, got {number}")
        if self.prompt < 0:
            raise RunError(f"--prompt must be at least 1, got {self.prompt}; or 0 for --context-length")

    def _generation(self) -> Generation | None:
        from dilated_attention_pytorch.estimate import Generation

        if self.purpose != "generation":
            return None
        if self.price_per_hour:
            raise RunError("--price-per-hour needs seconds, which are not predicted for --for generation; leave it out")
        return Generation(**{"prompt": self.context_length, **self._lengths()})

    def _lengths(self) -> dict[str, int]:
        """The lengths of a generation that are given."""
        lengths = {"prompt": self.prompt or None, "new_tokens": self.new_tokens, "chunk_size": self.chunk_size}
        return {name: length for name, length in lengths.items() if length is not None}

    def _device(self) -> Device:
        """The device from its data sheet."""
        from dilated_attention_pytorch.data_sheets import link_of, sheet_of
        from dilated_attention_pytorch.estimate import Device

        try:
            sheet = sheet_of(self.hardware)
        except ValueError as error:
            raise RunError(f"--hardware: {error}; or {_HERE}, which measures this machine") from error
        try:
            link = link_of(self.link) if self.link else None
        except ValueError as error:
            raise RunError(f"--link: {error}") from error
        return Device(sheet=sheet, link=link, price_per_hour=self.price_per_hour or None)

    @property
    def _is_here(self) -> bool:
        return self.hardware.strip().lower() == _HERE

    def _here(self, settings: TrainSettings) -> tuple[TrainSettings, Device]:
        """This machine, and the settings with the precision and the threads that it computes with.

        Training steps of a LongNet are measured, everything else is planned by memory and the rate of matrix products.
        """
        from dilated_attention_pytorch.estimate import Device, measure_here
        from dilated_attention_pytorch.estimate.measure import sheet_here
        from dilated_attention_pytorch.machine import choose_device, set_threads
        from dilated_attention_pytorch.training import preflight

        others = {
            f"--processes {self.processes}": self.processes > 1,
            f"--link {self.link}": bool(self.link),
            **{f"--{name}": getattr(self, name) for name in ("fewest", "mesh", "largest")},
        }
        flag = next((flag for flag, is_given in others.items() if is_given), None)
        if flag is not None:
            raise RunError(
                f"{flag} is planned from the data sheet of a device; name one, for example --hardware H200 (without "
                f"--hardware, or with --hardware {_HERE}, plan is for one process on this machine)"
            )
        kind = choose_device(settings.device)
        settings = dataclasses.replace(
            settings,
            threads=set_threads(settings.threads),
            precision=preflight.choose_precision(settings.precision, kind),
        )
        price = self.price_per_hour or None
        if self.purpose != "training" or self.pretrained is not None:
            return settings, Device(sheet=sheet_here(kind, settings.precision), price_per_hour=price)
        preflight.check_processes(settings, 1, launch="name a device, and plan for {0} processes (--processes {0})")
        here = measure_here(settings, kind)
        return settings, Device(sheet=here.sheet, here=here, price_per_hour=price)

    def _plan_longnet(self) -> _Planned:
        from dilated_attention_pytorch.estimate import plan_generation, plan_run
        from dilated_attention_pytorch.training.data.run_data import read_tokenizer

        settings = settings_of(self)
        read_tokenizer(settings)  # it must have the model's number of tokens
        settings, device = self._here(settings) if self._is_here else (settings, self._device())
        generation = self._generation()
        if generation is not None:
            memory = plan_generation(settings, self.processes, device.sheet, generation)
            return memory, device, settings.to_dict(), iter(())
        plan = plan_run(settings, self.processes, device, purpose=cast("Purpose", self.purpose))
        return plan, device, settings.to_dict(), self._answers(settings, device, plan)

    def _answers(self, settings: TrainSettings, device: Device, plan: RunPlan) -> Iterator[_Answer]:
        """The seconds of a training, and answers to the inverse questions that were asked."""
        from dilated_attention_pytorch import estimate

        if self.purpose == "training":
            seconds = estimate.seconds_of_steps(settings, self.processes, device, plan)
            yield "seconds_of_run", seconds, [steps_in_words(settings, seconds, is_bound=plan.seconds.is_bound)]
        if self.longest:
            longest = estimate.longest_context(settings, self.processes, device.sheet.memory_bytes)
            yield "longest_context_length", longest, [f"the longest text that fits: {longest:,} tokens"]
        if self.fewest:
            fewest = estimate.fewest_processes(settings, device)
            words = "none of those that were tried" if fewest is None else fewest.describe()
            values = None if fewest is None else fewest.values()
            yield "fewest_processes", values, [f"the fewest devices on which it fits: {words}"]
        if self.mesh:
            best = estimate.meshes(settings, self.processes, device)[:5]
            lines = ["the best meshes, those that fit first:", *(f"  {mesh.describe()}" for mesh in best)]
            yield "meshes", [mesh.values() for mesh in best], lines
        if self.largest:
            largest = estimate.largest_model(settings, self.processes, device)
            words = "not even one of one layer" if largest is None else largest.describe()
            values = None if largest is None else largest.model.to_dict()
            yield "largest_model", values, [f"the largest model of this shape that fits: {words}"]
        if self.changes:
            helping = estimate.changes_that_help(settings, self.processes, device, plan)
            heading = "what would help most:" if helping else "no change that was tried would help"
            lines = [heading, *(f"  {change.describe()}" for change in helping)]
            yield "changes", [change.values() for change in helping], lines

    def _plan_pretrained(self, path: Path) -> _Planned:
        from dilated_attention_pytorch.estimate.pretrained import plan_pretrained, plan_pretrained_generation

        if self.processes > 1:
            raise RunError(f"a model of transformers is planned for one process, got --processes {self.processes}")
        self._check_pretrained_flags()
        run = self._pretrained_run(path)
        settings, device = self._here(settings_of(self)) if self._is_here else (None, self._device())
        precision = run.precision if settings is None else settings.precision
        if precision == "auto":
            precision = "bfloat16" if "bfloat16" in device.sheet.flops else "float32"
        run = dataclasses.replace(run, precision=precision)
        generation = self._generation()
        plan: MemoryPlan
        if generation is None:
            plan = plan_pretrained(run, device, purpose=cast("Purpose", self.purpose))
        else:
            plan = plan_pretrained_generation(run, device.sheet, generation)
        planned = {
            "model": str(path),
            "pattern": self.pattern,
            "context_length": run.length,
            "batch_size": run.batch_size,
            "precision": run.precision,
            "optimizer": run.optimizer,
        }
        return plan, device, planned, iter(())

    def _check_pretrained_flags(self) -> None:
        """Raise :class:`RunError` if a flag of a LongNet is given that a plan of another model does not read."""
        length = str(self.context_length)
        defaults = defaults_of_plan(
            ["--preset", self.preset, "--model", str(self.pretrained), "--context-length", length]
        )
        changed = [
            field.name.replace("_", "-")
            for field in dataclasses.fields(TrainSettings)
            if field.name not in ("model", "data", *_OF_PRETRAINED)
            and getattr(self, field.name) != getattr(defaults, field.name)
        ]
        changed += [
            f"model.{field.name.replace('_', '-')}"
            for field in dataclasses.fields(self.model)
            if field.name != "gradient_checkpointing"
            and getattr(self.model, field.name) != getattr(defaults.model, field.name)
        ]
        if changed:
            raise RunError(
                f"--{changed[0]} is for a LongNet, and a plan of a model of transformers does not read it; leave it "
                "out with --model"
            )

    def _pretrained_run(self, path: Path) -> PretrainedRun:
        from dilated_attention_pytorch.estimate.pretrained import PretrainedRun, read_config
        from dilated_attention_pytorch.patterns import pattern_from_expression

        if not self.pattern:
            raise RunError('--model needs a --pattern, for example --pattern "DilatedPattern([2048, 8192], [1, 4])"')
        try:
            pattern = pattern_from_expression(self.pattern)
        except ValueError as error:
            raise RunError(f"--pattern: {error}") from error
        return PretrainedRun(
            config=read_config(path),
            pattern=pattern,
            length=self.context_length,
            batch_size=self.batch_size,
            precision=self.precision,
            optimizer="adamw" if self.optimizer == "muon" else self.optimizer,
            gradient_checkpointing=self.model.gradient_checkpointing,
        )


def defaults_of_plan(argv: Sequence[str]) -> PlanCommand:
    """The defaults of ``plan``: those of ``train`` for the same arguments."""
    train = defaults_of(argv)
    fields = {entry.name: getattr(train, entry.name) for entry in dataclasses.fields(TrainSettings)}
    return PlanCommand(**fields, preset=train.preset)
