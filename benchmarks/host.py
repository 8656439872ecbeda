"""Host overhead of a call: time spent in Python before Triton's launcher. Needs no GPU.

    TRITON_INTERPRET=1 python -m benchmarks.host [--output FILE]

Calls with ``impl="triton"`` whose kernels are not launched: a launch returns at once, everything else runs. With
CPU tensors in Triton's interpreter; without TRITON_INTERPRET with GPU tensors. First, a
small call is computed and checked against the reference. For comparison, PyTorch's own attention of
one row is computed in the same rounds. Times are CPU times of the process, so that other load has less influence.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.benchmarks.shapes import SHAPES
from dilated_attention_pytorch.kernels.select import Impl, is_interpreted
from dilated_attention_pytorch.ops.attend import attend
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.derivatives import is_seen
from dilated_attention_pytorch.ops.validation import check_call

from .options import parse, parser_of, write_results

_STEPS = 4096
"""Number of positions in the decoding loop, repeated."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
Timed = Callable[[], object]


@dataclass(kw_only=True, slots=True)
class Row:
    """One kind of call."""

    what: str
    launches: int
    """Number of kernels of this package that a call launches."""
    samples: list[float] = field(default_factory=list)
    """Microseconds per call, mean of every round."""

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        """Minimum over the rounds."""
        return min(self.samples)


def calls(device: torch.device) -> dict[str, Timed]:
    """The timed calls by name."""
    from dilated_attention_pytorch.kernels.triton import launch

    paper = SHAPES["paper"].case(rows=4096, causal=True, dtype="bfloat16")
    learns = SHAPES["paper"].case(rows=4096, causal=True, dtype="bfloat16", mode="forward_backward")
    step = SHAPES["paper"].case(rows=32768, causal=True, dtype="bfloat16", mode="decode")
    operands, leaves, (token, keys, values) = (case.operands(device) for case in (paper, learns, step))
    pattern = paper.pattern
    call = functools.partial(attend, pattern=pattern, is_causal=True, impl="triton")
    positions = range(step.rows - _STEPS, step.rows)
    so_far = [(position, keys[:, : position + 1], values[:, : position + 1]) for position in positions]
    following, on_device = itertools.cycle(so_far), torch.tensor(step.query_offset, device=device)
    row = torch.zeros(1, 1, 1, 16, device=device)
    row_leaf = row.clone().requires_grad_()
    own = torch.nn.functional.scaled_dot_product_attention
    operator = torch.ops.dilated_attention_pytorch.attend.default
    chosen = Call(*operands, pattern=pattern, is_causal=True, scale=paper.head_dim**-0.5, impl="triton")
    options = chosen.for_operator()[3:]

    def next_step() -> Tensor:
        position, key, value = next(following)
        return call(token, key, value, query_offset=position)

    def both(of: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Timed:
        grad = torch.ones_like(inputs[0]).detach()
        return lambda: torch.autograd.grad(of(*inputs), inputs, grad)

    problem = launch.Problem(*operands, pattern.groups, True, paper.head_dim**-0.5)
    out, lse = (torch.zeros(*operands[0].shape[:width], device=device) for width in (4, 3))
    out = out.to(operands[0].dtype)
    return {
        "attend, forward": lambda: call(*operands),
        "of it, the checks of the arguments": lambda: check_call(Call(*operands, pattern=pattern, is_causal=True)),
        "of it, whether anything looks on": lambda: is_seen(*operands),
        "of it, from operands to launches": lambda: launch.forward(problem),
        "attend, forward + backward": both(call, leaves),
        "of it, from the gradient of the output to launches": lambda: launch.backward(problem, out, lse, out, None),
        "of it, autograd around a function that computes nothing": both(_Nothing.apply, leaves),
        "the operator by itself, forward": lambda: operator(*operands, *options),
        "the operator by itself, forward + backward": both(lambda *x: operator(*x, *options)[0], leaves),
        "attend, a step of decoding, again and again": lambda: call(token, keys, values, query_offset=step.rows - 1),
        "attend, a step of decoding, each at the next position": next_step,
        "attend, a step of decoding, the position on the device": lambda: call(
            token, keys, values, query_offset=on_device
        ),
        "PyTorch's attention of one row, forward": lambda: own(row, row, row),
        "PyTorch's attention of one row, forward + backward": both(lambda x: own(x, x, x), (row_leaf,)),
    }


class _Nothing(torch.autograd.Function):
    """A function with as many operands, results and gradients as attention, without computation."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value = ctx.saved_tensors
        return query, key, value


def check(device: torch.device) -> None:
    """Check a small call by the kernels against the reference, output and gradients."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 20, 1, 16, generator=generator).to(device).requires_grad_() for _ in range(3))
    pattern = SHAPES["paper"].case(rows=20).pattern
    impls: tuple[Impl, ...] = ("triton", "reference")
    of_impl = []
    for impl in impls:
        out = attend(query, key, value, pattern, is_causal=True, impl=impl)
        of_impl.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    for got, want in zip(*of_impl, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def launching(run: Callable[..., None]) -> Iterator[None]:
    """Replace every kernel launch by a call of ``run``."""
    from dilated_attention_pytorch.kernels.triton.forward import forward_kernel

    kind = type(forward_kernel)
    launch = kind.run
    kind.run = run
    try:
        yield
    finally:
        kind.run = launch


def num_launches(call: Timed) -> int:
    """Number of kernels that a call launches."""
    launched: list[str] = []
    with launching(lambda kernel, *_, **__: launched.append(kernel.__name__)):
        call()
    return len(launched)


def keep_freed_memory() -> None:
    """Keep freed memory: glibc returns large blocks to the system, while PyTorch caches them on a GPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the maximum
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def measure(device: torch.device, rounds: int, calls_per_round: int) -> list[Row]:
    """Time every call in every round, so that other load affects all of them equally."""
    timed = calls(device)
    if device.type == "cuda":
        for call in timed.values():
            call()  # compiles the kernels and selects their configurations
    rows = [Row(what=what, launches=num_launches(call)) for what, call in timed.items()]
    with launching(lambda *_, **__: None):
        for _ in range(rounds):
            for row, call in zip(rows, timed.values(), strict=True):
                seconds = timeit.timeit(call, timer=time.process_time, number=calls_per_round)
                row.samples.append(round(seconds / calls_per_round * 1e6, 2))
    return rows


def main() -> None:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=200, help="in a round")
    args = parse(parser, "host_time.json")
    if args.tiny:
        args.rounds, args.calls = 1, 1
    if not is_interpreted() and not torch.cuda.is_available():
        raise SystemExit("host: no GPU here; set TRITON_INTERPRET=1, and the kernels take tensors of the CPU")
    device, command = torch.device("cuda"), module_command()
    if is_interpreted():
        device, command = torch.device("cpu"), f"TRITON_INTERPRET=1 {command}"
    torch.set_num_threads(1)
    keep_freed_memory()
    check(device)
    rows = measure(device, args.rounds, args.calls)
    print(f"{'microseconds a call':58} {'median':>7} {'least':>7} {'launches':>9}")
    for row in rows:
        print(f"{row.what:58} {row.median:7.1f} {row.least:7.1f} {row.launches:9}")
    figures = [{**asdict(row), "median": row.median, "least": row.least} for row in rows]
    about = {"device": str(device), "rounds": args.rounds, "calls": args.calls}
    write_results(args.output, "triton", {"origin": {**origin(command), **about}, "figures": figures})


if __name__ == "__main__":
    main()
