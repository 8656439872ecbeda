"""Options of slide embedding."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dilated_attention_pytorch.training.run_settings import DeviceChoice, check_choice, check_number

from .encoder import Pooling
from .tools import VECTORS, Like, Vector

Engine = Literal["local", "ray"]
FileKind = Literal["h5", "parquet"]
EmbeddingPrecision = Literal["float32", "bfloat16", "float16"]
_MOST_GIGABYTES = 2**30
"""An exabyte: bytes stay within 64 bits."""


@dataclass(kw_only=True, slots=True)
class TileSettings:
    """Options that say what the tiles and the encoder are, and where to compute.

    Raises:
        ValueError: a value is out of range.
    """

    tile_size: int | None = None
    """Pixels of a tile in the units of `coords`. A file that records another size is refused. Default: from each file
    (TRIDENT: patch_size_level0)."""
    tile_spacing: int | None = None
    """Pixels from one tile to the next where tiles overlap or have gaps. A slide whose tiles stand otherwise is
    refused, as its tile size is probably wrong. Default: the tile size, less an overlap that the file records."""
    encoder: str | None = None
    """Tile encoder of the features. A file that records another one is refused. Default: that of the released
    checkpoint, gigapath or (TITAN) conch_v15."""
    magnification: float = 20.0
    """Magnification of the tiles: 20 is 0.5 micrometres a pixel. A file that records another one is refused."""
    num_heads: int = 16
    """Heads of the encoder, which the weights do not determine: 16 in the released one."""
    prefix: str = ""
    """Load only weights whose names begin with it. "slide_encoder." is for a model fine-tuned by GigaPath's program."""
    device: DeviceChoice = "auto"
    """"auto" takes a CUDA device if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch. Cores of each worker under `--engine ray` without GPUs; 0 is all of
    the smallest machine."""
    engine: Engine = "local"
    """"ray": workers of a Ray cluster share the work. There is one per GPU or per `--threads` cores. One that dies is
    replaced."""
    ray_address: str | None = None
    """Ray cluster of this machine, "auto" or HOST:PORT. Default: one that is started for this command."""

    def __post_init__(self) -> None:
        check_choice(self, "device", get_args(DeviceChoice))
        check_choice(self, "engine", get_args(Engine))
        check_number(self, "num_heads", least=1)
        check_number(self, "threads", least=0)
        check_number(self, "magnification", above=0)
        for name in ("tile_size", "tile_spacing"):
            if getattr(self, name) is not None:
                check_number(self, name, least=1)
        if self.ray_address is not None and self.engine != "ray":
            raise ValueError("ray_address is read by engine ray alone; set it, or leave ray_address out")
        if self.encoder is not None and not self.encoder.strip():
            raise ValueError("encoder must be a name, got an empty one")

    @property
    def rounds(self) -> bool:
        """Whether coordinates that are floats are rounded to pixels before they are divided by the tile size."""
        return False


@dataclass(kw_only=True, slots=True)
class EmbedSettings(TileSettings):
    """Options of slide embedding besides slides, checkpoint and output folder.

    Raises:
        ValueError: a value is out of range.
    """

    format: FileKind = "h5"
    """Files of the embeddings. "h5": one file per slide with `embedding` [E] and `layers` [L + 1, E]. "parquet": one
    file of one row per slide with `embedding` and `layer_0` to `layer_L`; the folder reads as one table
    (pandas.read_parquet)."""
    like: Like | None = None
    """Write the vector of another tool, equal to its own on the same weights. "gigapath": class token, last layer; the
    README of prov-gigapath. "gigapath-finetune": class token, layer 11. "trident": mean of the tiles, layer 11;
    `features` [E] and `coords`. "patho-bench": the same in `features` [1, E]. Default: as "gigapath"."""
    pooling: Pooling | None = None
    """Slide embedding. "class": the class token. "mean": the mean over the tiles. Default: that of --like."""
    layer: int | None = None
    """Layer of the embedding. Its pooled state behind the final norm, from 0 (the tiles before the first layer) to the
    number of layers. Default: that of --like; without it the last layer, behind its own LayerNorm too."""
    maps: bool = False
    """Also write the attention of every layer and head to each tile. As `attention` [L, H, tiles], with a GeoJSON file
    for QuPath. `dilated-attention heatmap FILE` draws it."""
    rollout: bool = False
    """Also write how much of each tile can reach the embedding. Through all layers, as `rollout` [tiles] (Abnar and
    Zuidema 2020). It keeps the queries and keys of all layers in memory."""
    tiles: int | None = None
    """Also write the state of every tile after this layer, 0 to the number of layers. As `states` [tiles, E]."""
    patients: Path | None = None
    """CSV file with the columns `slide` and `patient`. The slides of a patient, in its order, are embedded as one
    sequence, and the output folder gets one file per patient."""
    precision: EmbeddingPrecision = "float32"
    """Number format of matrix products and attention, under autocast. GigaPath's own programs use float16 on GPUs."""
    batch_tiles: int | None = None
    """Most tiles per batch of several slides; fewer if memory is short. A command that is killed loses at most one
    batch. Default: 16,384 on a GPU; on a CPU every slide alone, so that its numbers do not depend on others."""
    memory: float | None = None
    """Memory limit in gigabytes besides the weights. A slide that needs more is skipped. Default: half of the free
    memory for a batch, all of it for a single slide."""
    part: str | None = None
    """Embed one part of the slides: 3/16 is the third of 16. Parts have about equally many tiles. Without it, commands
    over one output folder share all slides; those that torchrun, srun or a Slurm array started begin with a part
    each."""

    def __post_init__(self) -> None:
        TileSettings.__post_init__(self)
        for name, choices in (("format", FileKind), ("precision", EmbeddingPrecision)):
            check_choice(self, name, get_args(choices))
        for name, choices in (("like", Like), ("pooling", Pooling)):
            if getattr(self, name) is not None:
                check_choice(self, name, get_args(choices))
        if self.part is not None:
            self.numbers_of_part  # noqa: B018 - raises if it is no part
        for name, least in (("batch_tiles", 1), ("layer", 0), ("tiles", 0)):
            if getattr(self, name) is not None:
                check_number(self, name, least=least)
        if self.like is not None and (self.pooling is not None or self.layer is not None):
            name = "pooling" if self.pooling is not None else "layer"
            raise ValueError(f'{name} is set by like "{self.like}"; leave out one of them')
        in_hdf5 = {
            f'like "{self.like}"': self.vector.layout != "own",
            "maps": self.maps,
            "rollout": self.rollout,
            "tiles": self.tiles is not None,
        }
        for what, is_given in in_hdf5.items():
            if is_given and self.format == "parquet":
                raise ValueError(f"{what} is written in HDF5; leave out format parquet")
        if self.memory is not None:
            check_number(self, "memory", above=0, most=_MOST_GIGABYTES)

    @property
    def numbers_of_part(self) -> tuple[int, int] | None:
        """The part, from 1, and the number of parts."""
        if self.part is None:
            return None
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.part)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"part must be like 3/16, the third of 16 parts, got {self.part!r}")
        return int(found[1]), int(found[2])

    @property
    def vector(self) -> Vector:
        """How the slide's vector is computed and written."""
        if self.like is not None:
            return VECTORS[self.like]
        return Vector("class" if self.pooling is None else self.pooling, self.layer)

    @property
    def rounds(self) -> bool:
        """See the base class."""
        return self.vector.rounds

    def of_result(self, checkpoint: Path, digest: str) -> dict[str, Any]:
        """The options that affect the embeddings, as JSON-serialisable values."""
        return {
            "checkpoint": checkpoint.name,
            "sha256": digest,
            "prefix": self.prefix,
            "num_heads": self.num_heads,
            "pooling": self.vector.pooling,
            "precision": self.precision,
            "tile_size": self.tile_size,
            "format": self.format,
            # Folders of earlier versions, which had no such options, are continued.
            **({"layer": self.vector.layer} if self.vector.layer is not None else {}),
            **({"layout": self.vector.layout} if self.vector.layout != "own" else {}),
            **({"maps": True} if self.maps else {}),
            **({"rollout": True} if self.rollout else {}),
            **({"tiles": self.tiles} if self.tiles is not None else {}),
            **({"patients": True} if self.patients is not None else {}),
        }
