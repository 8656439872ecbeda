"""The same API over several ranks: one sequence, with its rows sharded over them."""

from typing import Any

from dilated_attention_pytorch.estimate.parallel import Machine, ParallelEstimate, ParallelPlan, plan_parallel
from dilated_attention_pytorch.legacy import look_up

from .attend import attend, attend_with_lse
from .communicator import naming_ranks
from .failure import RankFailure
from .generation import RankShare
from .modules import (
    DistributedDilatedAttention,
    HeadParallelDilatedAttention,
    HybridRingDilatedAttention,
    ParallelDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
)
from .previous_rows import previous_rows
from .selection import agreed_selector
from .sharding import positions, shard, shard_labels, unshard
from .traffic import Traffic, count_traffic

__all__ = [
    "DistributedDilatedAttention",
    "HeadParallelDilatedAttention",
    "HybridRingDilatedAttention",
    "Machine",
    "ParallelDilatedAttention",
    "ParallelEstimate",
    "ParallelPlan",
    "RankFailure",
    "RankShare",
    "RingDilatedAttention",
    "RingMultiheadDilatedAttention",
    "Traffic",
    "agreed_selector",
    "attend",
    "attend_with_lse",
    "count_traffic",
    "naming_ranks",
    "plan_parallel",
    "positions",
    "previous_rows",
    "shard",
    "shard_labels",
    "unshard",
]


def __getattr__(name: str) -> Any:
    return look_up("parallel", name)
