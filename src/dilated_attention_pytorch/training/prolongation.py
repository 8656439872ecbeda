"""A resumed run with another number of steps: trained longer, or ended earlier, also after it was finished."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import write_text

from .checkpoint import WEIGHTS_NAME, clear
from .configuration import CONFIGURATION_NAME, configuration_text
from .extension_settings import ExtensionSettings
from .lifecycle import OpenRun
from .manifest import MANIFEST_NAME
from .process_group import in_first
from .settings import TrainSettings

_Settings = TypeVar("_Settings", TrainSettings, ExtensionSettings)


def with_steps(settings: _Settings, steps: int) -> _Settings:
    """The settings of a run with another number of steps.

    The learning rates follow the schedule of that number. Stages end where they ended, and the last one lasts to the
    new end: a run that has come to long windows does not go back to short ones.

    Raises:
        ValueError: the number is below 1, or leaves a stage without a step.
    """
    if steps == settings.steps:
        return settings
    stages = settings.stages.lengths if isinstance(settings, TrainSettings) else settings.stages
    stage_steps = (settings.stage_steps or settings.steps) if stages else 0
    return dataclasses.replace(settings, steps=steps, stage_steps=stage_steps)


def change_steps(run: OpenRun, settings: TrainSettings | ExtensionSettings, command: str) -> None:
    """Record the number of steps of ``settings``, if it is another one than before. A collective of all processes.

    A finished run is unfinished from then on: its weights are removed, which its last checkpoint holds too.

    Args:
        run: the run, open for resumption.
        settings: settings with the new number of steps.
        command: command that starts such runs.

    Raises:
        RunError: the run has taken as many steps already, or is finished and its last checkpoint is not intact.
    """
    before = run.record["settings"]["steps"]
    if settings.steps == before:
        return
    if settings.steps <= run.step:
        raise RunError(
            f"--steps {settings.steps} is the number that the whole run is to have, and {run.folder} has taken "
            f"{run.step} already; name a larger one"
        )
    weights = run.folder / WEIGHTS_NAME
    if weights.exists() and run.step < before:
        raise RunError(
            f"--steps {settings.steps}: {run.folder} was finished after {before} steps, and its newest intact "
            f"checkpoint is that of step {run.step}; nothing was changed. Train on from the finished weights in a new "
            f"run: --init-from {run.folder}"
        )

    def write() -> None:
        run.check()
        # The weights first: a job that is killed in between leaves a run that has its last checkpoint to go on from.
        for name in (WEIGHTS_NAME, MANIFEST_NAME):
            clear(run.folder / name)
        entry = {"at": run.step, "from": before, "to": settings.steps, **_taken_result(run.record)}
        new = {**run.record["settings"], "steps": settings.steps, "stage_steps": settings.stage_steps}
        run.add_to_record(settings=new, steps_changed=[*run.record.get("steps_changed", ()), entry])
        write_text(
            run.folder / CONFIGURATION_NAME, configuration_text(new, command, notes=describe_changes(run.record))
        )
        run.say(
            f"steps: {before:,} until now, {settings.steps:,} from here on; the learning rates go on as the schedule "
            f'"{settings.schedule}" of {settings.steps:,} steps has them after step {run.step:,}'
        )

    in_first(write)


def _taken_result(record: dict[str, Any]) -> dict[str, Any]:
    """What the record says about the trained model, removed from it."""
    taken = {"result": record.pop("result")} if "result" in record else {}
    if "trained" in record.get("measured", {}):
        taken["trained"] = record["measured"]["trained"]
        record["measured"] = {state: values for state, values in record["measured"].items() if state != "trained"}
    return taken


def describe_changes(record: Mapping[str, Any]) -> Iterator[str]:
    """A line for every change of the number of steps."""
    for change in record.get("steps_changed", ()):
        yield f"at step {change['at']:,} the number of steps was changed from {change['from']:,} to {change['to']:,}"
