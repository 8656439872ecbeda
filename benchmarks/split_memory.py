"""Memory of a device if thousands of devices shard the weights, from the traced step of one device."""

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
    """Upper bound for each of ``devices`` that shard all states and share one text, with ``rows`` rows each.

    Takes every moment of the step of one device, with its states divided by the number of devices, and also the
    optimizer's temporaries, which are those alive without activations. The block with gathered weights is not counted.
    """
    alone = dataclasses.replace(settings, context_length=rows, data_parallel="ddp", context_parallel=1, strategy="auto")
    # Longer by whole blocks of the loss, so that both steps have the same trace.
    more = _BLOCKS * rows_at_once(settings.model.vocab_size)
    longer = dataclasses.replace(alone, context_length=rows + more)
    most: dict[Any, int] = {}
    for moment, later in zip(moments(alone), moments(longer), strict=True):
        parts = dict(zip(PARTS, moment.counts, strict=True))
        # Activations that do not grow with the rows are bfloat16 copies of weights, which are sharded like these.
        kept = PARTS.index("activations")
        of_weights = parts["activations"] - (later.counts[kept] - parts["activations"]) * rows // more
        parts["activations"] += of_weights // devices - of_weights
        split = _STATES if moment.counts[kept] else (*_STATES, "temporaries")
        parts = {name: value // devices if name in split else value for name, value in parts.items()}
        if not most or sum(parts.values()) > sum(most.values()):
            most = {**parts}
    model = settings.model
    assert model.num_kv_heads is not None
    # Keys and values of a ring step in bfloat16: those in use, those being received, and those being sent.
    exchange = 3 * rows * 2 * model.embed_dim // model.num_heads * model.num_kv_heads * 2 if devices > 1 else 0
    return Footprint(**most, exchange=exchange)
