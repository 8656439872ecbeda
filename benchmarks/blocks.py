"""Time of block patterns on this machine, relative to density times dense attention's time in the same run.

    python -m benchmarks.blocks [--tiny] [--only speed growth] [--impl auto|native|aten] [--device cuda]
        [--output FILE]

On a GPU the same patterns are also given to FlexAttention, as its own block masks.

A time is printed only if the call's sampled rows and gradients agree with a dense softmax in float64. It is the minimum
of several calls, both contestants in turn: other load on the machine makes calls longer, never shorter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import (
    Pattern,
    attend,
    from_block_mask,
    hierarchical,
    local_window,
    random_blocks,
    strided_blocks,
)
from dilated_attention_pytorch.benchmarks.flex import FlexBlocks
from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.ops import implementation

from .implementation import add_choice, chosen, in_words, judged
from .options import parse, parser_of, write_results

ROWS, BLOCK, HEAD_DIM = 16384, 128, 64
DENSITIES = (0.05, 0.1, 0.2)
# Errors of a row relative to the largest entry of its exact value, explained by rounding of inputs and weights.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Limits relative to density times dense attention's time on a CPU.
LIMITS = {
    torch.float32: {"forward": 0.65, "forward_backward": 0.80},
    torch.bfloat16: {"forward": 0.45, "forward_backward": 0.60},
}


def seconds(call: Callable[[], object]) -> float:
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def drawn_mask(density: float, heads: int, rows: int) -> Tensor:
    """A separate mask for every head, with equally many blocks in each of its rows."""
    blocks = rows // BLOCK
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(heads, blocks, blocks, generator=generator).argsort(-1).argsort(-1)
    return order < round(density * blocks)


def patterns(density: float, heads: int, rows: int) -> dict[str, Pattern]:
    width = round(density * rows)
    return {
        "from_block_mask, drawn": from_block_mask(drawn_mask(density, heads, rows), BLOCK),
        "random_blocks": random_blocks(density),
        "strided_blocks": strided_blocks(round(1 / density)),
        "hierarchical": hierarchical(max(1, round(density * rows / BLOCK / 5)), levels=4),
        "local_window": local_window(width // 2, width - width // 2 - 1),
    }


def operands(heads: int, kv_heads: int, dtype: torch.dtype, rows: int, *, device: str = "cpu") -> tuple[Tensor, ...]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    return tuple(
        torch.randn(1, rows, number, HEAD_DIM, generator=generator).to(device, dtype)
        for number in (heads, kv_heads, kv_heads, heads)
    )


def check(pattern: Pattern, inputs: tuple[Tensor, ...], *, is_causal: bool) -> float:
    """Largest relative error of some rows of the output, and of the query's gradient there, against dense float64.

    Raises:
        SystemExit: it exceeds what rounding explains; nothing is timed.
    """
    q, k, v, grad = inputs
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    out = attend(leaves[0], leaves[1], leaves[2], pattern, is_causal=is_causal)
    grad_query, grad_key, grad_value = torch.autograd.grad(out, leaves, grad)
    out = out.detach()
    num_rows = q.shape[1]
    rows = torch.tensor([0, 1, 127, 128, num_rows // 2 + 5, num_rows - 1])
    counts = pattern.counts(rows, torch.arange(num_rows), k.shape[2], is_causal=is_causal)
    counts, rows = counts.to(q.device), rows.to(q.device)
    ratio = q.shape[2] // k.shape[2]
    exact = [x.double() for x in (q[0, rows], k[0], v[0], grad[0, rows])]
    query, key, value, of_out = exact[0], *(x.repeat_interleave(ratio, 1) for x in exact[1:3]), exact[3]
    scores = torch.einsum("nhd,mhd->hnm", query, key) / HEAD_DIM**0.5
    weights = torch.softmax(scores + counts.repeat_interleave(ratio, 0).double().log(), -1).nan_to_num(0.0)  # no key
    expected = torch.einsum("hnm,mhd->nhd", weights, value)
    of_weights = torch.einsum("nhd,mhd->hnm", of_out, value)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    expected_grad = torch.einsum("hnm,mhd->nhd", of_scores, key) / HEAD_DIM**0.5
    pairs = ((out[0, rows], expected), (grad_query[0, rows], expected_grad))
    errors = [float((got.double() - want).abs().max() / want.abs().max()) for got, want in pairs]
    # For keys and values, one scalar each: <dK, K> = <dS, S> = <dQ, Q>, and <dV, V> = <dO, O>.
    sums = [float((x.double() * y.double()).sum()) for x, y in ((grad_key, k), (grad_query, q))]
    scale = float((grad_query.double() * q.double()).abs().sum())
    errors.append(abs(sums[0] - sums[1]) / scale)
    sums = [float((x.double() * y.double()).sum()) for x, y in ((grad_value, v), (grad, out))]
    errors.append(abs(sums[0] - sums[1]) / float((grad.double() * out.double()).abs().sum()))
    if not max(errors) <= TOLERANCE[q.dtype]:
        raise SystemExit(f"not timed, because it is wrong: {pattern}: {errors}")
    return max(errors)


def measure(
    name: str,
    pattern: Pattern,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    *,
    is_causal: bool,
    device: str,
    rows: int,
    size: float = 1.0,
) -> dict[str, Any]:
    """Times of one pattern; the queries are normal numbers times ``size``."""
    query, *others = operands(heads, kv_heads, dtype, rows, device=device)
    inputs = (query * size, *others)
    error = check(pattern, inputs, is_causal=is_causal)
    density = pattern.density(rows, num_kv_heads=kv_heads, is_causal=is_causal)
    *leaves, grad = inputs
    query, key, value = (x.requires_grad_() for x in leaves)

    def ours() -> Tensor:
        return attend(query, key, value, pattern, is_causal=is_causal)

    def dense() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)

    contestants: dict[str, Callable[[], Tensor]] = {"dense": dense, "ours": ours}
    if device == "cuda":
        flex = FlexBlocks(pattern, rows, heads, kv_heads, is_causal=is_causal, device=torch.device(device))
        contestants["flex"] = lambda: flex.attend(query, key, value)
        difference = float((contestants["flex"]() - ours()).abs().max() / ours().abs().max())
        if not difference <= 2 * TOLERANCE[dtype]:
            raise SystemExit(f"not timed, because FlexAttention differs: {pattern}: {difference}")
    result: dict[str, Any] = {
        "pattern": name,
        "density": density,
        "rows": rows,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "block_size": BLOCK,
        "dtype": str(dtype).removeprefix("torch."),
        "causal": is_causal,
        "query_size": size,
        "largest_error": error,
    }
    for mode in ("forward", "forward_backward"):
        times: dict[str, list[float]] = {who: [] for who in contestants}
        for repeat in range(3):
            for who, call in (*contestants.items(), ("ours", ours)):
                if mode == "forward":
                    with torch.no_grad():
                        taken = seconds(call)
                else:
                    taken = seconds(lambda call=call: torch.autograd.grad(call(), leaves, grad))  # type: ignore[misc]
                if repeat:
                    times[who].append(taken)
        least = {who: min(taken) for who, taken in times.items()}
        ratio = least["ours"] / (density * least["dense"])
        result[mode] = {
            "seconds": least["ours"],
            "dense_seconds": least["dense"],
            "median": statistics.median(times["ours"]),
            "dense_median": statistics.median(times["dense"]),
            "ratio_to_density": ratio,
        }
        if device == "cpu":
            result[mode] |= judged(ratio, LIMITS[dtype][mode])
        if "flex" in least:
            result[mode] |= {"flex_seconds": least["flex"], "speed_over_flex": least["flex"] / least["ours"]}
    return result


def show(result: dict[str, Any]) -> None:
    forward, both = result["forward"], result["forward_backward"]
    words = [in_words(x["ratio_to_density"], x["limit"]) if "limit" in x else "" for x in (forward, both)]
    flex = ""
    if "speed_over_flex" in forward:
        speeds = (forward["speed_over_flex"], both["speed_over_flex"])
        flex = "   speed over FlexAttention {:.2f} forward, {:.2f} forward+backward".format(*speeds)
    print(
        f"{result['pattern']:>22} density {result['density']:.4f} H={result['heads']}:{result['kv_heads']} "
        f"{result['dtype']:>8} causal={result['causal']!s:>5} q x{result['query_size']:g}  "
        f"forward {forward['seconds']:.3f} s of {forward['dense_seconds']:.3f} s = "
        f"{forward['ratio_to_density']:.2f} x density {words[0]}  forward+backward "
        f"{both['seconds']:.3f} s of {both['dense_seconds']:.3f} s = "
        f"{both['ratio_to_density']:.2f} x density {words[1]}  "
        f"(error {result['largest_error']:.0e}){flex}",
        flush=True,
    )


def speed(*, is_tiny: bool, device: str) -> list[dict[str, Any]]:
    """Every kind of block pattern at every density, in float32 and bfloat16; grouped heads, causal, larger scores."""
    results, rows = [], 1024 if is_tiny else ROWS
    for dtype in (torch.float32,) if is_tiny else (torch.float32, torch.bfloat16):
        for density in DENSITIES[2:] if is_tiny else DENSITIES:
            for name, pattern in list(patterns(density, 4, rows).items())[: 2 if is_tiny else None]:
                result = measure(name, pattern, 4, 4, dtype, is_causal=False, device=device, rows=rows)
                show(result)
                results.append(result)
        for is_causal, kv_heads in ((True, 4), (False, 1)):
            pattern = from_block_mask(drawn_mask(DENSITIES[2] if is_tiny else 0.1, kv_heads, rows), BLOCK)
            result = measure(
                "from_block_mask, drawn", pattern, 4, kv_heads, dtype, is_causal=is_causal, device=device, rows=rows
            )
            show(result)
            results.append(result)
    for name, pattern in list(patterns(0.1, 4, rows).items())[4 if is_tiny else 0 :: 4]:
        # Larger scores: those of normal numbers are small enough for a faster path on a CPU.
        result = measure(name, pattern, 4, 4, torch.float32, is_causal=False, device=device, rows=rows, size=4.0)
        show(result)
        results.append(result)
    return results


def growth(*, is_tiny: bool, device: str) -> dict[str, Any]:
    """Time of a window of 1,024 at 131,072 rows, relative to its time at 16,384."""
    least = 1024 if is_tiny else ROWS
    times: dict[int, list[float]] = {least: [], 8 * least: []}
    for repeat in range(3):
        for rows, of_rows in times.items():
            q, k, v, _ = operands(4, 4, torch.float32, rows, device=device)
            taken = seconds(lambda q=q, k=k, v=v: attend(q, k, v, local_window(1023), is_causal=True))  # type: ignore[misc]
            if repeat:
                of_rows.append(taken)
    small, large = times
    ratio = statistics.median(times[large]) / statistics.median(times[small])
    print(f"growth: a window at {large:,} rows over {small:,}: {ratio:.2f} (rows: {large / small:.0f} x)")
    return {"rows": [small, large], "seconds": [statistics.median(t) for t in times.values()], "ratio": ratio}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=["speed", "growth"], default=["speed", "growth"])
    add_choice(parser)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parse(parser, "blocks.json")
    with implementation(arguments.impl):
        results: dict[str, Any] = {"machine": origin(module_command()), "impl": chosen(arguments.impl)}
        print(f"impl: {results['impl']}")
        for part in arguments.only:
            results[part] = (speed if part == "speed" else growth)(is_tiny=arguments.tiny, device=arguments.device)
    write_results(arguments.output, "attention", results)


if __name__ == "__main__":
    main()
