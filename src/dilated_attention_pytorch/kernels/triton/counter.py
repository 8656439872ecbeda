"""Counter-based dropout on the device, bit for bit as in :mod:`dilated_attention_pytorch.kernels.dropout`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class DropoutArguments(NamedTuple):
    """What determines which pairs are kept, and the factor of those."""

    seed: tl.tensor
    threshold: tl.tensor
    keep_scale: tl.tensor


@triton.jit
def dropout_of(GIVEN, DROPOUT: tl.constexpr):
    """The :class:`DropoutArguments` of a kernel that got a pointer to the seed, the threshold, and the factor."""
    SEED, threshold, keep_scale = GIVEN
    seed = tl.load(SEED) if DROPOUT else 0
    return DropoutArguments(seed, threshold, keep_scale)


@triton.jit
def _mix64(state):
    state = state + -7046029254386353131
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def head_state(seed, batch, head):
    """Part of a pair's random state that depends on its sequence and query head."""
    return _mix64(_mix64(seed + batch) + head)


@triton.jit
def query_state(state_of_head, query_row):
    """Part of a pair's random state that depends on its query."""
    return _mix64(state_of_head + query_row).to(tl.int32)


@triton.jit
def key_state(seed, key_row):
    """Part of a pair's random state that depends on its key."""
    return _mix64(_mix64(seed + 1) + key_row).to(tl.int32)


@triton.jit
def keep_factors(query_states, key_states, dropout):
    """``keep_scale`` where the pair is kept, else 0, for states that broadcast against each other."""
    state = query_states ^ key_states
    state = (state ^ ((state >> 16) & 0xFFFF)) * -2048144789
    state = (state ^ ((state >> 13) & 0x7FFFF)) * -1028477387
    return tl.where(state >= dropout.threshold, dropout.keep_scale, 0.0)
