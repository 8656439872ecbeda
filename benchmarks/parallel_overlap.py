"""Whether communication overlaps with computation: every message is delayed, and the call is timed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import DilatedPattern, attend, parallel
from dilated_attention_pytorch.parallel.communicator import Communicator, Pending
from dilated_attention_pytorch.parallel.slab import Slab

from .ranks import on_ranks

ROWS, HEADS, HEAD_DIM = 4096, 8, 64
PATTERN = DilatedPattern([1024, 4096], [1, 2])
FACTORS = (0.5, 1.0, 2.0)
REPEATS = 5
_EXCHANGE = Communicator.exchange


class _HeldBack:
    """Pending messages that another thread passes to the transport."""

    def __init__(self, posted: Future[Pending]) -> None:
        self._posted: Future[Pending] | None = posted

    def wait(self) -> None:
        # Wait for the transport only once: gloo would wait for another message.
        if self._posted is not None:
            self._posted.result().wait()
            self._posted = None


@contextlib.contextmanager
def slow_link(delay: float, *, is_awaited: bool) -> Iterator[None]:
    """Delay: each message reaches the transport ``delay`` seconds after the one before it, or after it was sent.

    With ``is_awaited``, the sender waits until the message has arrived.
    """
    link = ThreadPoolExecutor(1)

    def post(communicator: Communicator, *message: Any) -> Pending:
        time.sleep(delay)
        return _EXCHANGE(communicator, *message)

    def exchange(
        communicator: Communicator, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int, doing: str
    ) -> _HeldBack:
        pending = _HeldBack(link.submit(post, communicator, sends, receives, tag, doing))
        if is_awaited:
            pending.wait()
        return pending

    with mock.patch.object(Communicator, "exchange", exchange), link:
        yield


@contextlib.contextmanager
def no_computation() -> Iterator[None]:
    """Ranks exchange the same messages, but compute nothing."""

    def outputs(slab: Slab) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(slab.query), torch.zeros(slab.query.shape[:3])

    def gradients(slab: Slab, *_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(x) for x in (slab.query, slab.key, slab.value))

    def of_seen_keys(slab: Slab, seen_keys: Any, *_: Any) -> Tensor:
        return torch.zeros(sum(2 * keys.key.numel() for keys in seen_keys.keys))

    def nothing(*_: Any) -> None:
        pass

    with contextlib.ExitStack() as stack:
        for name, empty in (
            ("forward_within", outputs),
            ("merge", nothing),
            ("backward_within", gradients),
            ("add_own_gradients", nothing),
            ("gradients", of_seen_keys),
        ):
            stack.enter_context(mock.patch.object(Slab, name, empty))
        yield


def time_ways(rows: int, repeats: int) -> list[dict[str, Any]]:
    """On every rank: seconds of the call with and without delayed messages, after a check."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, rows, HEADS, HEAD_DIM, generator=generator) for _ in range(4)]
    q, k, v, grad = (parallel.shard(x, mesh) for x in whole)
    q, k, v = inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

    def call() -> Tensor:
        return parallel.attend(q, k, v, PATTERN, mesh=mesh, strategy="ring")

    with torch.no_grad(), slow_link(0.01, is_awaited=False):
        error = float((call() - parallel.shard(attend(whole[0], whole[1], whole[2], PATTERN), mesh)).abs().max())
    if error > 1e-4:
        raise SystemExit(f"not timed, because it is wrong by {error}")

    def forward() -> None:
        with torch.no_grad():
            call()

    def both() -> None:
        torch.autograd.grad(call(), inputs, grad)

    def seconds(run: Callable[[], None], *contexts: contextlib.AbstractContextManager[None]) -> float:
        """Seconds of the slowest rank."""
        dist.barrier()
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            begin = time.perf_counter()
            run()
            taken = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    found = []
    passes = (("forward", forward, world - 1), ("forward_backward", both, 3 * (world - 1)))
    for name, run, num_messages in passes:
        run()
        first = min(seconds(run) for _ in range(repeats))
        for factor in FACTORS:
            delay = factor * first / num_messages
            times: dict[str, list[float]] = {"compute": [], "communication": [], "ring": [], "awaited": []}
            for _ in range(repeats):
                times["compute"].append(seconds(run))
                times["communication"].append(seconds(run, slow_link(delay, is_awaited=False), no_computation()))
                times["ring"].append(seconds(run, slow_link(delay, is_awaited=False)))
                times["awaited"].append(seconds(run, slow_link(delay, is_awaited=True)))
            found.append(
                {
                    "ranks": world,
                    "pass": name,
                    "factor": factor,
                    "delay": delay,
                    "messages": num_messages,
                    "error": error,
                    **{way: min(of_way) for way, of_way in times.items()},
                    "medians": {way: statistics.median(of_way) for way, of_way in times.items()},
                }
            )
    return found


def overlap(*, is_tiny: bool) -> dict[str, Any]:
    """Time of the ring with delayed messages, relative to the longer of computation and communication."""
    lines, rows, repeats = [], 256 if is_tiny else ROWS, 1 if is_tiny else REPEATS
    for world in (2,) if is_tiny else (2, 4):
        for line in on_ranks(world, time_ways, rows, repeats)[0]:
            longer = max(line["compute"], line["communication"])
            # The tolerance is the time of one message: the first or the last one has nothing to overlap with.
            line |= {
                "ratio": line["ring"] / longer,
                "awaited_ratio": line["awaited"] / longer,
                "limit": 1.15 * longer + line["delay"],
            }
            lines.append(line)
            print(
                f"p={world} {line['pass']:16} delay {1e3 * line['delay']:5.0f} ms x {line['messages']}: computation "
                f"{line['compute']:.3f} s, communication {line['communication']:.3f} s, ring {line['ring']:.3f} s = "
                f"{line['ratio']:.2f} x the longer (limit {line['limit']:.3f} s: "
                f"{'kept' if line['ring'] <= line['limit'] else 'MISSED'}), awaited {line['awaited']:.3f} s = "
                f"{line['awaited_ratio']:.2f} x",
                flush=True,
            )
    shape = {"rows": rows, "heads": HEADS, "head_dim": HEAD_DIM, "threads_of_a_rank": 1, "repeats": repeats}
    groups = list(zip(PATTERN.segment_lengths, PATTERN.dilation_rates, strict=True))
    return {**shape, "groups": groups, "lines": lines}


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.parallel --help")
