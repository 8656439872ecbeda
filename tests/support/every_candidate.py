"""Compile the Triton kernels with all their block sizes, and print what each uses as JSON.

    TRITON_INTERPRET=0 python -m support.every_candidate sm_90

A line has what :mod:`.compiled` prints: with the first block sizes of every kernel, with the second ones and so on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from dilated_attention_pytorch import local_window
from dilated_attention_pytorch.kernels.triton import configurations, plan
from dilated_attention_pytorch.kernels.triton.configurations import Candidates
from dilated_attention_pytorch.kernels.triton.problem import Problem

from . import compiled

MOST_CANDIDATES = 4


def calls(*, is_short: bool) -> Iterator[tuple[str, Problem]]:
    """Calls of 2 bytes an element that differ in their block sizes, or in the masks of their blocks."""
    groups, window = compiled.PATTERN.groups, local_window(255).rules
    for head_dim in (64, 128, 256):
        q = compiled.rows(8192, 4, head_dim)
        yield f"causal, D = {head_dim}", Problem(q, q, q, groups, True, 0.1)
        yield f"not causal, D = {head_dim}", Problem(q, q, q, groups, False, 0.1)
        yield f"window, D = {head_dim}", Problem(q, q, q, groups, True, 0.1, rules=window)
        yield f"terms, D = {head_dim}", Problem(q, q, q, groups, True, 0.1, **compiled.terms_of(q, q))


def candidates_from(index: int) -> Callable[..., Candidates]:
    """The block sizes of a call, the one at ``index`` first."""

    def candidates(*call: Any) -> Candidates:
        found = configurations.candidates(*call)
        first = index % len(found)
        return found[first:] + found[:first]

    return candidates


def main(target: str) -> None:
    for index in range(MOST_CANDIDATES):
        plan._plan.cache_clear()
        with (
            mock.patch.object(plan, "candidates", candidates_from(index)),
            mock.patch.object(compiled, "calls", calls),
        ):
            compiled.main(target)


if __name__ == "__main__":
    main(sys.argv[1])
