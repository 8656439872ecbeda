"""A loss that is far above the last ones."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from .verification import fitting


class SpikeWatch(TrainerCallback, ExportableState):
    """Compares each loss with the last ones: with their median, in units of the median absolute deviation from it.

    The losses that it has seen lie in every checkpoint, so that a run that is taken up finds the same spikes.

    Args:
        deviations: so many of these units above the median is a spike.
        steps: how many losses are compared with; with fewer there is no spike.
    """

    def __init__(self, deviations: float, steps: int) -> None:
        self.deviations = deviations
        self.losses: deque[float] = deque(maxlen=steps)

    def state(self) -> dict[str, Any]:
        """What :meth:`on_train_begin` takes up."""
        return {"args": {}, "attributes": {"losses": list(self.losses)}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up the losses of the checkpoint that the run goes on from."""
        saved: Any = state.stateful_callbacks
        with fitting(f"the newest checkpoint of {args.output_dir}"):
            self.losses.extend(map(float, saved[type(self).__name__]["attributes"]["losses"]))

    def spike(self, loss: float) -> str | None:
        """What ``loss`` is beside the last ones, in words, if it is a spike; else it is one of them from now on."""
        if len(self.losses) == self.losses.maxlen:
            median = statistics.median(self.losses)
            deviation = statistics.median(abs(seen - median) for seen in self.losses)
            if loss > median + self.deviations * deviation > median:
                return (
                    f"its loss {loss:.4g} is {(loss - median) / deviation:.1f} deviations above {median:.4g}, the "
                    f"median of the last {len(self.losses)} steps"
                )
        self.losses.append(loss)
        return None
