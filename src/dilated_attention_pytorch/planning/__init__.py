"""Where: a pattern and lengths become the geometry of partials. Cached, no tensors' values."""

from .geometry import Axis, Partial
from .plan import Call, Plan, Tile, plan

__all__ = ["Axis", "Call", "Partial", "Plan", "Tile", "plan"]
