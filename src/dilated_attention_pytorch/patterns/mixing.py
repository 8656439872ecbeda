"""A counter-based pseudorandom integer mixer (splitmix64)."""

from __future__ import annotations

from torch import Tensor

# Odd multipliers of splitmix64 (Steele et al. 2014).
_SPLITMIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def shifted_right(state: Tensor, by: int, width: int) -> Tensor:
    """Logical right shift of integers of ``width`` bits; PyTorch's own shift is arithmetic."""
    return (state >> by) & ((1 << (width - by)) - 1)


def splitmix64(state: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, with wrap-around arithmetic."""
    state = state + _SPLITMIX[0]
    state = (state ^ shifted_right(state, 30, 64)) * _SPLITMIX[1]
    state = (state ^ shifted_right(state, 27, 64)) * _SPLITMIX[2]
    return state ^ shifted_right(state, 31, 64)
