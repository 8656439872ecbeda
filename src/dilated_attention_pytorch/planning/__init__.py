"""Where: a pattern and lengths become the geometry of partials. Cached, no tensors' values."""

from .exchange import Exchange, SlabPair, exchange
from .gathered import Gathered, KeyLists
from .geometry import Axis, Bands, Partial
from .plan import Call, Plan, Tile, plan, tile_size
from .shards import (
    Block,
    Layout,
    Piece,
    Rectangle,
    Run,
    ShardedCall,
    Team,
    pieces,
    shard_runs,
    teams,
    with_rows,
)

__all__ = [
    "Axis", "Bands", "Block", "Call", "Exchange", "Gathered", "KeyLists", "Layout", "Partial", "Piece", "Plan",
    "Rectangle", "Run", "ShardedCall", "SlabPair", "Team", "Tile", "exchange", "pieces", "plan", "shard_runs", "teams",
    "tile_size", "with_rows",
]  # fmt: skip
