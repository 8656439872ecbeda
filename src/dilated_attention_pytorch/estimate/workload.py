"""The workload: the sizes and dtype of the calls that a pattern is chosen for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dilated_attention_pytorch.patterns.dilated import OffsetRule, Tail
from dilated_attention_pytorch.patterns.pattern import check_count

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One shape of self-attention, forward only or with gradients; each workload gets its own choice.

    Raises:
        TypeError: a size is not an integer, or the dtype is not supported by attention.
        ValueError: a size is below 1, or the key/value heads do not divide the heads.
    """

    sequence_length: int
    """Sequence length N."""
    batch_size: int
    """Batch size B."""
    num_heads: int
    """Query heads H."""
    num_kv_heads: int
    """Key/value heads G, which divides H."""
    head_dim: int
    """Head dimension D."""
    dtype: torch.dtype
    """Dtype of query, key and value."""
    is_causal: bool = False
    """Whether attention is causal."""
    is_training: bool = True
    """Whether gradients are computed."""
    is_padded: bool = False
    """Whether there is a key padding mask: keys and values are then copied once."""
    has_dropout: bool = False
    """Whether there is dropout: probabilities are then materialised in blocks."""
    offset_rule: OffsetRule = "modulo"
    """Offset rule of the pattern, see :class:`DilatedPattern`."""
    tail: Tail = "ragged"
    """Tail of the pattern."""
    segment_shift: int | tuple[int, ...] = 0
    """Segment shift of the pattern."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "batch_size", "num_heads", "num_kv_heads", "head_dim"):
            check_count(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide the {self.num_heads} heads, got {self.num_kv_heads}")
        if self.dtype not in _DTYPES:
            raise TypeError(f"dtype must be float16, bfloat16, float32 or float64 of torch, got {self.dtype!r}")

    @property
    def ratio(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes per element of query, key and value."""
        return self.dtype.itemsize

    @property
    def accumulation_itemsize(self) -> int:
        """Bytes per element of the log-sum-exp and of sums."""
        return max(4, self.itemsize)

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as ``"float32"``."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        words = [f"{self.sequence_length:,} positions", f"batch {self.batch_size}", f"{self.num_heads} heads"]
        if self.num_kv_heads != self.num_heads:
            words.append(f"{self.num_kv_heads} key/value heads")
        words += [f"of {self.head_dim}", self.dtype_name, "with gradients" if self.is_training else "forward"]
        return ", ".join(words) + (", causal" if self.is_causal else "")
