"""The vectors that other tools compute from the weights of GigaPath's slide encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from .encoder import Pooling

Like = Literal["gigapath", "gigapath-finetune", "trident", "patho-bench"]
Layout = Literal["own", "trident", "patho-bench"]


class Vector(NamedTuple):
    """How a slide's vector is computed and written."""

    pooling: Pooling = "class"
    layer: int | None = None
    """The layer whose pooled state is the vector, 0 to L, behind the final norm; None: the last layer, behind its
    LayerNorm and the final norm."""
    rounds: bool = False
    """Whether coordinates that are floats are rounded to pixels before they are divided by the tile size."""
    layout: Layout = "own"
    """"own": `embedding`, `layers`; "trident": `features` [E], `coords` [N, 2]; "patho-bench": `features` [1, E]."""


VECTORS: Mapping[Like, Vector] = {
    "gigapath": Vector(),
    "gigapath-finetune": Vector(layer=11),
    "trident": Vector("mean", 11, rounds=True, layout="trident"),
    "patho-bench": Vector("mean", 11, rounds=True, layout="patho-bench"),
}
"""By tool, read from its source:

- ``gigapath``: ``slide_encoder(x, coords)``, prov-gigapath README and ``gigapath/slide_encoder.py`` (09d8e87).
- ``gigapath-finetune``: ``--feat_layer 11``, the default of ``finetune/params.py`` and of ``scripts/run_panda.sh``.
- ``trident``: ``trident/slide_encoder_models/load.py`` (a91fa84, v0.3.1), ``model(features, coords,
  all_layer_embed=True)[11]`` with ``global_pool=True``; ``trident/wsi_objects/WSI.py`` rounds and writes.
- ``patho-bench``: ``patho_bench/Pooler.py`` (660e770) calls TRIDENT's encoder.
"""
