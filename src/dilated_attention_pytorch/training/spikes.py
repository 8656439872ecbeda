"""Detection of loss spikes."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from .checkpoint import fitting


class SpikeWatch(TrainerCallback, ExportableState):
    """Compares each loss with the median of recent losses, in units of their median absolute deviation.

    The recent losses are stored in every checkpoint, so that a resumed run finds the same spikes.

    Args:
        deviations: threshold above the median, in these units.
        steps: number of recent losses; with fewer there is no spike.
    """

    def __init__(self, deviations: float, steps: int) -> None:
        self.deviations = deviations
        self.losses: deque[float] = deque(maxlen=steps)

    def state(self) -> dict[str, Any]:
        """State that :meth:`on_train_begin` restores."""
        return {"args": {}, "attributes": {"losses": list(self.losses)}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the losses from the checkpoint."""
        saved: Any = state.stateful_callbacks
        with fitting(f"the newest checkpoint of {args.output_dir}"):
            self.losses.extend(map(float, saved[type(self).__name__]["attributes"]["losses"]))

    def spike(self, loss: float) -> str | None:
        """Description of ``loss`` if it is a spike; otherwise records it and returns None."""
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
