"""Several sources in one run, drawn in proportions that were told."""

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
    """Sample i is sample i of one of the members: which one is drawn by ``(seed, i)`` with the weights.

    Args:
        members: equally long, one a source.
        weights: positive, one a member; only their proportions count.
        seed: of the draws.
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
        """The member that sample ``index`` comes from."""
        # The word keeps these draws apart from those within the members.
        drawn = random.Random(f"{self.seed}:{index}:source").random() * self._sums[-1]
        return self.members[min(bisect.bisect(self._sums, drawn), len(self.members) - 1)]
