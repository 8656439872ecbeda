"""What attends to what: frozen, hashable, integers only."""

from .dilated import DilatedPattern, DilationGroup, OffsetRule, Tail, pattern_from_spec
from .pattern import Pattern, PatternSum

__all__ = ["DilatedPattern", "DilationGroup", "OffsetRule", "Pattern", "PatternSum", "Tail", "pattern_from_spec"]
