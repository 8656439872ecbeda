"""The arguments of one call of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.partial import Kernel
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.precision import accumulation_dtype


class Implementation(ABC):
    """A way to compute calls. The choice among them (:func:`.select.implementation_of`) never
    changes the result."""

    name: str
    is_in_place = False
    """Whether its kernels merge a partial into rows as they lie, without views."""
    takes_offset_tensor = False
    """Whether ``query_offset`` may be a tensor."""

    @abstractmethod
    def attend(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output in the query's dtype and log-sum-exp, with derivatives.

        Raises:
            NotImplementedError: the call needs what this implementation has not.
        """

    def forward(self, call: Call, *, is_prepared: bool = False) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp without derivatives.

        ``is_prepared``: the call is as :func:`.host.prepared` returns it.
        """
        raise self._has_no_parts()

    def backward(
        self,
        call: Call,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        *,
        is_prepared: bool = False,
    ) -> tuple[Tensor, ...]:
        """Gradients of :attr:`Call.leaves` under a merged output and log-sum-exp."""
        raise self._has_no_parts()

    def kernel(self, query: Tensor, *, has_bias: bool) -> Kernel:
        """The kernel of a partial over views."""
        raise self._has_no_parts()

    def _has_no_parts(self) -> NotImplementedError:
        return NotImplementedError(f'impl="{self.name}" computes whole calls only; use "native", "triton" or "aten"')


class Call(NamedTuple):
    """The arguments of one call of attention, in the order of the operators' schemas.

    The keys that a query sees are those under ``pattern``, or, with ``blocks``, those of its query block's list. The
    scores are ``s = cap(scale * q . k) + e`` with ``e`` the log-gate of the key's block and the biases of distance and
    key, each 0 where it is None. A call is checked (:func:`.validation.check_call`), then an implementation is chosen
    (:func:`.attend.attend_checked`), then it runs.
    """

    query: Tensor
    """``[B, N, H, D]``"""
    key: Tensor
    """``[B, M, G, D]``, like ``value``"""
    value: Tensor
    log_gates: Tensor | None = None
    """``[B, G, query blocks, k]``"""
    distance_bias: Tensor | None = None
    """``[H, N + M - 1]`` in the accumulation dtype: row i of query and row j of key have ``[h, j - i + N - 1]``. With
    ``coordinates`` ``[H, 1]``: the bias of a unit of distance."""
    key_bias: Tensor | None = None
    """``[B, M, G]`` in the accumulation dtype"""
    blocks: Tensor | None = None
    """int64 ``[B, G, query blocks, k]``, -1 for none"""
    cu_seqlens: Tensor | None = None
    """int32 ``[documents + 1]``"""
    key_padding_mask: Tensor | None = None
    """bool ``[B, M]``, True = ignore"""
    dropout_seed: Tensor | None = None
    """int64 scalar; None = no dropout"""
    coordinates: Tensor | None = None
    """``[B, 2, M]`` in the accumulation dtype, contiguous: those of key row j are ``[b, :, j]``, those of query row i
    ``[b, :, i + query_offset - key_offset]``. Pairs with a NaN have no bias."""
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
    softcap: float = 0.0
    """Cap of the scaled scores; 0 = none."""
    has_fixed_bias: bool = False
    """Whether ``distance_bias`` needs no gradient; one of zeros is then as good."""
    impl: Any = "auto"
    """A name; once chosen, an :class:`Implementation`."""
    sinks: Tensor | None = None
    """``[H]``; like the next no argument of an operator: :func:`.scores.finished` applies them to the results."""
    shift: Tensor | None = None
    """``[H]``, what was subtracted from ``distance_bias``, and is added to the log-sum-exp."""

    def for_operator(self) -> tuple[Any, ...]:
        """The arguments of an operator: spec of the pattern, name of the implementation."""
        spec: Any = "" if self.pattern is None else self.pattern.spec
        return self._replace(pattern=spec, impl=self.impl.name)[:-2]

    @property
    def has_terms(self) -> bool:
        """Whether scores are more than scaled products and gates."""
        return self.softcap != 0.0 or self.distance_bias is not None or self.key_bias is not None

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """The fields that have gradients, in the order of the gradients, which leave out those that are None."""
        return self.query, self.key, self.value, self.log_gates, self.distance_bias, self.key_bias

    def by_leaf(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients by :attr:`leaves`; None for those that are None."""
        remaining = iter(grads)
        return [None if leaf is None else next(remaining) for leaf in self.leaves]

    @property
    def first_query(self) -> int:
        """``query_offset`` as the host knows it."""
        assert not isinstance(self.query_offset, Tensor)
        return self.query_offset

    @property
    def last_start(self) -> int:
        """The largest ``query_offset`` of a tensor: the last query row is then at the last key row."""
        return self.key_offset + self.key.shape[1] - self.query.shape[1]

    @property
    def shape_of_out(self) -> tuple[int, ...]:
        """``[B, N, H, Dv]`` with the width Dv of the values."""
        return (*self.query.shape[:3], self.value.shape[3])

    @property
    def dtype(self) -> torch.dtype:
        """The accumulation dtype: that of the log-sum-exp, of sums and of scores."""
        return accumulation_dtype(self.query.dtype)

    @property
    def ratio(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[2] // self.key.shape[2]


SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? log_gates, Tensor? distance_bias, Tensor? key_bias, "
    "Tensor? blocks, Tensor? cu_seqlens, Tensor? key_padding_mask, Tensor? dropout_seed, Tensor? coordinates, "
    "str pattern, SymInt[] block_sizes, bool is_causal, float scale, SymInt query_offset, SymInt key_offset, "
    "float dropout_p, float softcap, bool has_fixed_bias, str impl"
)
"""The fields of :class:`Call`, less the last two, as arguments of an operator."""
NUM_TENSORS = 11
"""Number of these that are tensors, which come first."""
NUM_LEAVES = 6
"""Number of these tensors that have gradients, which come first."""
WATCHERS: list[Callable[[Call], None]] = []
"""Called with every checked call before it is computed, see :func:`.attention_map.attention_maps`."""
