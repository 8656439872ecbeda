"""Mixtures of data sources with given weights."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch.utils.data import Dataset

from ..windows import Window

_Member = TypeVar("_Member", bound=Dataset[Window])


class Mixture(Dataset[Window], Generic[_Member]):
    """Sample i is sample i of a member that is drawn from ``(seed, i)`` according to the weights.

    Args:
        members: equally long, one per source.
        weights: positive, one per member; normalised.
        seed: seed of the draws.
    """

    def __init__(self, members: Sequence[_Member], weights: Sequence[float], *, seed: int) -> None:
        self.members = members
        self.seed = seed
        self._sums = list(itertools.accumulate(weights))

    def __len__(self) -> int:
        return len(self.members[0])  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Window:
        return self.member_of(index)[index]

    def member_of(self, index: int) -> _Member:
        """The member of sample ``index``."""
        # The suffix makes these draws independent of those within the members.
        drawn = random.Random(f"{self.seed}:{index}:source").random() * self._sums[-1]
        return self.members[min(bisect.bisect(self._sums, drawn), len(self.members) - 1)]
