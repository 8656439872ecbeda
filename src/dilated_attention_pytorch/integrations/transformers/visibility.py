"""Which keys a mask of transformers lets each query see: a rule that attention under a pattern computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .documents import PADDING, UNWRITTEN, is_causal_seal, is_packed_seal, is_seal, is_unread, unseal

HIDDEN = -1e4
"""A number that is added to a score and is at most this hides the key: its weight is 0 in every dtype."""


class Visibility(NamedTuple):
    """Query p sees key t: both in one document, with ``t <= p`` if causal, ``|t - p| < window`` if there is one."""

    num_columns: int
    documents: Tensor | None
    """int32 ``[B, columns]``, see :func:`seal`; None if every row is one document."""
    is_causal: bool
    is_packed: bool = False
    """Whether a row may have several documents."""
    window: int | None = None
    """Size of a sliding window in tokens, the query included; without ``is_causal`` to both sides."""
    prefix: Tensor | None = None
    """int64 ``[B]``: the first rows of a causal sequence that see each other both ways."""


_RECOGNISED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of a mask's tensor: its version, the number of queries, and its rule. All layers get one tensor."""


def visibility_of(mask: Tensor, num_queries: int, user: str) -> Visibility:
    """The rule of a mask: one of ours, or one of every pair that is compared with the rule in every element.

    Args:
        mask: a seal, or ``[1 or B, 1 or H, 1 or N, M]``: bool with True for a visible key, or numbers that are added
            to the scores, 0 for a visible key and -10,000 or less for a hidden one.
        num_queries: N, the last of M rows.
        user: the class that is called, for errors.

    Returns:
        the rule. A token that no token sees, not even itself, is padding; what padding sees is not defined.

    Raises:
        NotImplementedError: the mask is none of padding, documents, a causal sequence, a prefix, a window; it differs
            between heads; or its values cannot be read.
    """
    if is_seal(mask):
        return Visibility(mask.shape[3], unseal(mask), is_causal_seal(mask), is_packed_seal(mask))
    if mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise NotImplementedError(
            'with attn_implementation="dilated" attention_mask has the shape [batch, tokens], 1 for a real token, or '
            f"[batch, 1, queries, keys], got {mask.dtype} of shape {tuple(mask.shape)} in {user}"
        )
    if is_unread(mask):
        raise NotImplementedError(
            f"{user} came with a mask for every pair of tokens, of which the rule is not known before its values are, "
            "and a graph has no values: pass attention_mask [batch, tokens], or call the model without torch.compile"
        )
    known = _RECOGNISED.get(mask)
    if known is None or known[:2] != (mask._version, num_queries):
        known = _RECOGNISED[mask] = (mask._version, num_queries, _recognised(mask.detach(), num_queries, user))
    rule: Visibility = known[2]
    return rule


def both(one: Visibility | None, other: Visibility | None, user: str) -> Visibility | None:
    """What two masks of one call let a query see; None for no mask.

    Raises:
        NotImplementedError: both have documents or padding, or both a window, or one a prefix that the other cuts.
    """
    if one is None or other is None:
        return other if one is None else one
    for rule, added in ((one, other), (other, one)):
        cuts_prefix = rule.prefix is not None and (added.is_causal or added.window is not None)
        has_windows = rule.window is not None and added.window is not None
        if added.documents is None and added.prefix is None and not cuts_prefix and not has_windows:
            is_causal = rule.is_causal or added.is_causal
            return rule._replace(is_causal=is_causal, window=rule.window or added.window)
    raise NotImplementedError(
        f'{user} has two masks for every pair of tokens, which are not honoured together: use "sdpa" or "eager" for '
        "this model"
    )


def _recognised(mask: Tensor, num_queries: int, user: str) -> Visibility:
    by_head = _visible(mask, user)
    visible = by_head[:, 0]
    if mask.shape[1] > 1 and not bool((by_head == by_head[:, :1]).all()):
        raise NotImplementedError(
            f"{user} came with a mask that differs between heads, and residues of a pattern are all that may: put who "
            "sees whom into the pattern"
        )
    num_columns = visible.shape[2]
    unwritten = _unwritten(visible) if num_queries < num_columns else 0
    visible = visible[:, :, : num_columns - unwritten]
    real = visible.any(dim=1)
    if visible.shape[1] == 1 and num_queries > 1:
        return Visibility(num_columns, _documents(real, unwritten), is_causal=False)
    first = num_columns - unwritten - num_queries
    rows = _Rows(visible, real, first)
    for rule in rows.rules():
        if rows.differs_at(rule) is None:
            documents = rule.documents if rule.is_packed else _documents(real, unwritten)
            return rule._replace(num_columns=num_columns, documents=documents)
    batch, query, key = rows.nearest_difference()
    raise NotImplementedError(
        "a mask for every pair of tokens is honoured where it is padding, documents, a causal sequence, a prefix that "
        f"sees itself, or a window, and that of {user} is none of them: in row {batch} of the batch query {query} "
        f"{'sees' if bool(visible[batch, query, key]) else 'does not see'} key {key}; put who sees whom into the "
        'pattern, or use "sdpa"'
    )


def _visible(mask: Tensor, user: str) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= HIDDEN
    if not bool((hidden | (mask == 0)).all()):
        raise NotImplementedError(
            f"{user} came with numbers for every pair of queries and keys that are added to the scores, and neither "
            f'0 nor at most {HIDDEN:g}: a bias that is not one by distance or by key is not computed, use "sdpa" or '
            '"eager" for this model'
        )
    return ~hidden


def _unwritten(visible: Tensor) -> int:
    """The number of last columns that no query sees: those of a static cache behind the new tokens."""
    seen = visible.flatten(0, 1).any(dim=0)
    return int((~seen).flip(0).int().cumprod(dim=0).sum())


def _documents(real: Tensor, unwritten: int) -> Tensor | None:
    if unwritten == 0 and bool(real.all()):
        return None
    documents = torch.where(real, 0, PADDING).int()
    return torch.nn.functional.pad(documents, (0, unwritten), value=UNWRITTEN)


class _Rows:
    """What the real tokens among the queries see, and the rules that they may follow."""

    def __init__(self, visible: Tensor, real: Tensor, first: int) -> None:
        self.visible, self.real = visible, real
        self.num_queries, self.num_keys = visible.shape[1:]
        columns = torch.arange(self.num_keys, device=visible.device)
        self.ahead = columns - columns[first:, None]
        """``t - p`` of every pair, ``[N, M]``."""
        self.seen = visible & real[:, first:, None]
        self.counts = real[:, first:, None]

    def rules(self) -> list[Visibility]:
        """The rules that may hold, the plainest first."""
        ahead = self.ahead.where(self.seen, 0)
        before, after = -int(ahead.min()), int(ahead.max())
        rules = [self._rule(is_causal=True), self._rule(is_causal=False)]
        if self.num_queries == self.num_keys:
            packed = self._documents_of_rows()
            rules += [self._rule(is_causal=is_causal, documents=packed, is_packed=True) for is_causal in (True, False)]
            rules.append(self._rule(is_causal=True, prefix=self._prefix()))
        if after in (0, before) and not self._has_gaps():
            rules.append(self._rule(is_causal=after == 0, window=before + 1))
        return rules

    def differs_at(self, rule: Visibility) -> Tensor | None:
        """The pairs ``[B, N, M]`` at which real tokens see otherwise than by the rule; None if there are none."""
        expected = self.real[:, None]
        if rule.documents is not None:
            expected = expected & (rule.documents[:, :, None] == rule.documents[:, None])
        if rule.window is not None:
            expected = expected & (self.ahead.abs() < rule.window)
        if rule.prefix is not None:
            columns = torch.arange(self.num_keys, device=self.real.device)
            expected = expected & ((self.ahead <= 0) | (columns < rule.prefix[:, None, None]))
        elif rule.is_causal:
            expected = expected & (self.ahead <= 0)
        differs = (self.visible != expected) & self.counts
        return differs if bool(differs.any()) else None

    def nearest_difference(self) -> tuple[int, int, int]:
        """The first pair that differs from the plain rule with the fewest such pairs."""
        pairs = [self.differs_at(self._rule(is_causal=is_causal)) for is_causal in (True, False)]
        differs = min((pair for pair in pairs if pair is not None), key=lambda pair: int(pair.sum()))
        batch, query, key = differs.nonzero()[0].tolist()
        return batch, query, key

    def _rule(self, **fields: Any) -> Visibility:
        return Visibility(**{"num_columns": self.num_keys, "documents": None, **fields})

    def _documents_of_rows(self) -> Tensor:
        """The document of every column: one begins where a token does not see the one before it."""
        sees_previous = self.seen.diagonal(offset=-1, dim1=1, dim2=2)
        begins = torch.nn.functional.pad(~sees_previous, (1, 0), value=False) & self.real
        return torch.where(self.real, begins.cumsum(dim=1), PADDING).int()

    def _prefix(self) -> Tensor:
        """The column ``[B]`` behind the last that the first real row sees."""
        first = self.real.int().argmax(dim=1)
        row = self.seen.take_along_dim(first[:, None, None], dim=1)[:, 0]
        columns = torch.arange(1, self.num_keys + 1, device=row.device)
        return (columns * row).amax(dim=1)

    def _has_gaps(self) -> bool:
        """Whether padding is between real tokens, where distances of columns are not those of positions."""
        runs = self.real[:, 0] + (self.real[:, 1:] & ~self.real[:, :-1]).sum(dim=1)
        return bool((runs > 1).any())
