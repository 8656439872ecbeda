"""Where: a pattern and lengths become the geometry of partials. Cached, no tensors' values."""

from .exchange import Exchange, SlabPair, exchange, neighbours
from .gathered import Gathered, KeyLists
from .geometry import Axis, Bands, Partial
from .layout import Layout, Run, Shards, shard_runs, with_rows
from .plan import Call, Plan, Tile, plan, tile_size
from .shards import Block, Piece, Rectangle, ShardedCall, Team, pieces, teams

__all__ = [
    "Axis", "Bands", "Block", "Call", "Exchange", "Gathered", "KeyLists", "Layout", "Partial", "Piece", "Plan",
    "Rectangle", "Run", "ShardedCall", "Shards", "SlabPair", "Team", "Tile", "exchange", "neighbours", "pieces", "plan",
    "shard_runs", "teams", "tile_size", "with_rows",
]  # fmt: skip
