"""The assignment of query and key/value heads to ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """Assignment of heads to the ranks of an axis."""

    queries: tuple[tuple[int, ...], ...]
    """Query heads per rank."""
    kv: tuple[tuple[int, ...], ...]
    """Key/value heads per rank that serve them."""

    @classmethod
    def split(cls, num_heads: int, num_kv_heads: int, size: int) -> Heads:
        """Contiguous query heads, split as evenly as possible, and the key/value heads that they need.

        Raises:
            ValueError: there are more ranks than query heads.
        """
        if num_heads < size:
            raise ValueError(
                f"splitting the heads needs at least one query head for every rank of the axis: got {num_heads} heads "
                f'and {size} ranks; use a smaller axis for the heads, or strategy="ring"'
            )
        ratio = num_heads // num_kv_heads
        cuts = [rank * (num_heads // size) + min(rank, num_heads % size) for rank in range(size + 1)]
        queries = tuple(tuple(range(cuts[rank], cuts[rank + 1])) for rank in range(size))
        return cls(queries, tuple(tuple(sorted({head // ratio for head in heads})) for heads in queries))

    def kv_of_queries(self, rank: int, ratio: int) -> tuple[tuple[int, ...], int]:
        """Key/value heads of a rank, each shared by equally many of its query heads, and the number of query heads.

        A key/value head is repeated if the rank's query heads share them unequally.
        """
        served = [head // ratio for head in self.queries[rank]]
        sizes = {served.count(head) for head in self.kv[rank]}
        if len(sizes) == 1:
            return self.kv[rank], sizes.pop()
        return tuple(served), 1
