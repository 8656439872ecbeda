"""Seconds of a step by part, their bound by a data sheet, and the rates that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilated_attention_pytorch.data_sheets import DataSheet, Link
from dilated_attention_pytorch.errors import RunError

from .exchange import SentBytes
from .flops import StepWork
from .memory import Footprint

_COMPUTED = ("products", "attention", "rest", "optimizer", "host")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Seconds of a step of one process."""

    products: float
    """Matrix products, except those of attention."""
    attention: float
    rest: float = 0.0
    """Norms, activations, loss, copies, and waiting for other processes: all other time; 0 in a bound."""
    optimizer: float
    """Gradient clipping and the optimizer's step."""
    exchange: float
    """Communication, one message after the other."""
    overlapped: float
    """Part of the communication that overlaps with computation."""
    host: float = 0.0
    """Time that does not grow with the batch: Python and operator launches; 0 in a bound."""
    is_bound: bool
    """Whether this is a lower bound from a data sheet; otherwise it is a prediction from measurements here."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, name) for name in _COMPUTED) + self.exchange - self.overlapped

    @property
    def bounded_by(self) -> str:
        """The part that takes longest."""
        parts = {name: getattr(self, name) for name in _COMPUTED}
        parts["exchange"] = self.exchange - self.overlapped
        return max(parts, key=lambda name: parts[name])


def sheet_seconds(
    work: StepWork,
    states: Footprint,
    sent: Sequence[SentBytes],
    sheet: DataSheet,
    precision: str,
    link: Link | None,
    *,
    is_training: bool = True,
) -> StepSeconds:
    """Lower bound of a step's time: operations at the rate of dense products, states at the rate of memory.

    Weights, gradients and optimizer states are read once, and all but gradients are written once. Communication is
    assumed to overlap with computation for as long as that takes.

    Args:
        work: operations of one process.
        states: its bytes.
        sent: traffic of the process that sends most.
        sheet: data sheet of the device.
        precision: precision whose rate applies.
        link: link between the devices; not needed if nothing is sent.
        is_training: whether the optimizer steps.

    Raises:
        RunError: something is sent, and there is no link.
    """
    if sent and link is None:
        raise RunError(
            f"processes exchange {sent[0].name}, and the data sheet of {sheet.name} names no link; name one with --link"
        )
    rate = sheet.flops[precision]
    products, attention = work.products / rate, work.attention / rate
    stepped = 2 * states.weights + states.gradients + 2 * states.optimizer if is_training else 0
    exchange = sum(one.bytes for one in sent) / link.bytes_per_second if link is not None else 0.0
    return StepSeconds(
        products=products,
        attention=attention,
        optimizer=stepped / sheet.bytes_per_second,
        exchange=exchange,
        overlapped=min(exchange, products + attention),
        is_bound=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRates:
    """Rates that follow from the seconds of a step."""

    seconds: float
    """Seconds of a step."""
    tokens_per_second: float
    """Tokens per second of all processes."""
    utilisation: float
    """Model FLOP utilisation: the model's operations relative to what all devices compute at their nominal rate."""
    joules_per_token: float | None
    """Energy at the devices' full power; None if that is not known."""
    price_per_million_tokens: float | None
    """None without a price."""
