"""Seconds of a step by part, and what follows from them: what bounds it, utilisation, tokens, energy, money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilated_attention_pytorch.data_sheets import DataSheet, Link
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.footprint import Footprint

from .exchanged import Exchange
from .work import StepWork

_COMPUTED = ("products", "attention", "rest", "optimizer", "reading", "prompt", "tokens", "host")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Seconds of a step of one process."""

    products: float
    """Matrix products, those of attention left out."""
    attention: float
    rest: float = 0.0
    """Norms, activations, the loss, copies, and waiting for other processes: what is neither; 0 in a bound."""
    optimizer: float
    """Clipping and the step of the weights."""
    reading: float = 0.0
    """Of a generation, what reading all weights for every new token takes beyond its products."""
    prompt: float = 0.0
    """Of a generation, all until its first token, predicted; 0 in a bound."""
    tokens: float = 0.0
    """Of a generation, all tokens after the first, predicted; 0 in a bound."""
    exchange: float
    """What is sent, one thing after the other."""
    overlapped: float
    """Of the exchange, what is under way while the process computes."""
    host: float = 0.0
    """What does not grow with the batch: Python and the starting of operators; 0 in a bound."""
    is_bound: bool
    """Whether no step is faster (from a data sheet); else it is predicted from measurements of this machine."""

    @property
    def total(self) -> float:
        """Of the step."""
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
    sent: Sequence[Exchange],
    sheet: DataSheet,
    precision: str,
    link: Link | None,
    *,
    is_training: bool = True,
) -> StepSeconds:
    """What a step takes at least: operations at the rate of dense products, states over the rate of memory.

    Weights, gradients and what the optimizer keeps are read once, and all but gradients written once. All that is sent
    is taken to hide behind what is computed, as far as that takes as long.

    Args:
        work: of one process.
        states: its bytes.
        sent: by the process that sends most.
        sheet: of the device.
        precision: whose rate counts.
        link: between the devices; none is needed where nothing is sent.
        is_training: whether weights are stepped.

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
class Rates:
    """What follows from the seconds of a step."""

    seconds: float
    """Of a step."""
    tokens_per_second: float
    """Of all processes."""
    utilisation: float
    """Model FLOP utilisation: operations of the model over what all devices compute at their nominal rate."""
    joules_per_token: float | None
    """At the devices' full power; None where nothing is said of it."""
    price_per_million_tokens: float | None
    """None without a price."""


def rates(
    seconds: float, tokens: int, model_flops: int, processes: int, *, peak: float, watts: float, price: float | None
) -> Rates:
    """See :class:`Rates`.

    Args:
        seconds: of a step.
        tokens, model_flops: of a step of all processes.
        processes: devices.
        peak: operations a second of a device.
        watts: of a device; 0 is not known.
        price: of a device, an hour; None is not known.

    >>> found = rates(2.0, 1000, 10**12, 4, peak=1e12, watts=500, price=2.0)
    >>> found.tokens_per_second, found.utilisation, found.joules_per_token, round(found.price_per_million_tokens, 2)
    (500.0, 0.125, 4.0, 4.44)
    """
    return Rates(
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        utilisation=model_flops / seconds / processes / peak,
        joules_per_token=watts * processes * seconds / tokens if watts else None,
        price_per_million_tokens=None if price is None else price * processes * seconds / 3600 / tokens * 1e6,
    )
