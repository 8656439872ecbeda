"""The arguments of one call of attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import Pattern, pattern_from_spec
from dilated_attention_pytorch.precision import accumulation_dtype


class Call(NamedTuple):
    """The arguments of one call of attention, in the order of the operators' schemas.

    The keys that a query sees are those under ``pattern``, or, with ``blocks``, those of its query block's list. The
    scores are ``s = scale * q . k + e`` with ``e`` the log-gate of the key's block, 0 without gates. A call is checked
    (:func:`.validation.check_call`), then chosen for (:meth:`chosen`), then run (:mod:`.run`).
    """

    query: Tensor
    """``[B, N, H, D]``"""
    key: Tensor
    """``[B, M, G, D]``, like ``value``"""
    value: Tensor
    log_gates: Tensor | None = None
    """``[B, G, query blocks, k]``"""
    blocks: Tensor | None = None
    """int64 ``[B, G, query blocks, k]``, -1 for none"""
    cu_seqlens: Tensor | None = None
    """int32 ``[documents + 1]``"""
    key_padding_mask: Tensor | None = None
    """bool ``[B, M]``, True = ignore"""
    dropout_seed: Tensor | None = None
    """int64 scalar; None = no dropout"""
    pattern: Pattern | None = None
    """None with ``blocks``."""
    block_sizes: tuple[int, ...] = ()
    """Rows of a key block and of a query block with ``blocks``, else empty."""
    is_causal: bool = False
    scale: float | None = None
    """Positive once chosen; before, None stands for ``1 / sqrt(D)``."""
    query_offset: int | Tensor = 0
    key_offset: int = 0
    dropout_p: float = 0.0
    impl: str = "auto"
    """The implementation; once chosen, not "auto"."""

    @classmethod
    def of_operator(cls, *arguments: Any) -> Call:
        """The call from the arguments of an operator, :meth:`for_operator`."""
        call = cls(*arguments)
        return call._replace(pattern=None if call.block_sizes else pattern_from_spec(str(call.pattern)))

    def for_operator(self) -> tuple[Any, ...]:
        """The arguments of an operator: the pattern is its spec."""
        return self._replace(pattern="" if self.pattern is None else self.pattern.spec)  # type: ignore[arg-type]

    @property
    def first_query(self) -> int:
        """``query_offset`` as the host knows it."""
        assert not isinstance(self.query_offset, Tensor)
        return self.query_offset

    @property
    def dtype(self) -> torch.dtype:
        """The accumulation dtype: that of the log-sum-exp, of sums and of scores."""
        return accumulation_dtype(self.query.dtype)

    @property
    def ratio(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[2] // self.key.shape[2]


SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? log_gates, Tensor? blocks, Tensor? cu_seqlens, "
    "Tensor? key_padding_mask, Tensor? dropout_seed, str pattern, SymInt[] block_sizes, bool is_causal, float scale, "
    "SymInt query_offset, SymInt key_offset, float dropout_p, str impl"
)
"""The fields of :class:`Call` as arguments of an operator."""
NUM_TENSORS = 8
"""Number of its fields that are tensors, which come first."""
