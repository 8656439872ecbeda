"""What a device has alive where thousands split the weights, from the moments of a step of one device."""

from __future__ import annotations

import dataclasses
from typing import Any

from dilated_attention_pytorch.models.token_loss import rows_at_once
from dilated_attention_pytorch.training import TrainSettings
from dilated_attention_pytorch.training.footprint import Footprint
from dilated_attention_pytorch.training.live_bytes import PARTS
from dilated_attention_pytorch.training.step_bytes import moments

_STATES = ("weights", "gradients", "optimizer")
_BLOCKS = 64


def split_footprint(settings: TrainSettings, rows: int, devices: int) -> Footprint:
    """At most what each of ``devices`` has alive that split all states, and share one text with ``rows`` rows each.

    Every moment of the step of one device is taken, its states divided by the devices, and what is temporary while no
    activation is alive as well: the optimizer's own. The block whose weights are gathered is not counted.
    """
    alone = dataclasses.replace(settings, context_length=rows, data_parallel="ddp", context_parallel=1, strategy="auto")
    # As many blocks of the loss more, so that both have the same traces.
    more = _BLOCKS * rows_at_once(settings.model.vocab_size)
    longer = dataclasses.replace(alone, context_length=rows + more)
    most: dict[Any, int] = {}
    for moment, later in zip(moments(alone), moments(longer), strict=True):
        parts = dict(zip(PARTS, moment.counts, strict=True))
        # What does not grow with the rows are copies of weights in bfloat16: of split weights, as they are.
        kept = PARTS.index("activations")
        of_weights = parts["activations"] - (later.counts[kept] - parts["activations"]) * rows // more
        parts["activations"] += of_weights // devices - of_weights
        split = _STATES if moment.counts[kept] else (*_STATES, "temporaries")
        parts = {name: value // devices if name in split else value for name, value in parts.items()}
        if not most or sum(parts.values()) > sum(most.values()):
            most = {**parts}
    model = settings.model
    assert model.num_kv_heads is not None
    # Keys and values of a step of the ring that are computed with, that come and that go, in bfloat16.
    exchange = 3 * rows * 2 * model.embed_dim // model.num_heads * model.num_kv_heads * 2 if devices > 1 else 0
    return Footprint(**most, exchange=exchange)
