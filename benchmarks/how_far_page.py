"""Page of the docs on how far it goes, and its picture, from the results file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.memory import in_bytes

PAGE = Path(__file__).parents[1] / "docs" / "how-far.md"
PICTURE = PAGE.parent / "pictures" / "how-far.png"

_HEAD = """# How far does it go?

This page plans large models and long texts on paper: no such cluster was available. `python -m benchmarks.how_far`
makes the plans ([`results/how_far.json`](../benchmarks/results/how_far.json)) and writes this page.

## Models and lengths

One training step on one text, with all devices on that text (`--context-parallel` of all, ring), weights, gradients and
moments split over all of them (FSDP), blocks recomputed, bfloat16. The pattern is the paper's, continued until a
segment is the whole text. The number of {device}s is the smallest power of two, from a node of {node} on, that has
enough memory:

| weights | tokens | {device}s | memory of one | states | activations | other | a step at least | bounded by |
|---|---|---|---|---|---|---|---|---|
"""

_BOUNDS = """
- **memory of one**: the peak memory of a device ([planner](planner.md)), without the gathered weights of the
  current block; so the number of devices is a lower bound. A device has {memory}.
- **a step at least**: the longest of three times, each on paper and each as if the others were free. Computation:
  operations of matrix products at the data sheet's rate. Weights: gathered twice, and their gradients reduced once.
  Keys and values: the rows that the last rows need from other devices, `(w - l) / r` rows of a group for `l` rows of
  a device. Weights, keys and values move at the rate of {node_link} within a node and of {cluster_link} beyond.
- A step on a billion tokens is a step on one text: with a trillion weights, nobody trains on such a batch.

![Devices by tokens, and operations by token](pictures/how-far.png)

Of the {count} steps, {bounds}. The largest part of memory is {parts}. Activations grow with rows, width and layers,
whatever the attention: long texts need devices for activations, not for attention.

## LongNet's own figures

The paper is [arXiv 2307.02486](https://arxiv.org/abs/2307.02486); equations and sections are numbered as there.

**Operations, equations 16 to 18.** The paper counts `2 N d sum(w / r^2)` and bounds it by `2 a / (a - 1) w0 N d`.
The table has w0 = 2,048, a = 2 and `d` = 1, beside our exact count of pairs (two of the paper's operations each):

| tokens | paper | 2 x pairs, ours | ours / paper | causal / paper | paper / bound |
|---|---|---|---|---|---|
"""

_TRAFFIC = """
The counts agree; ours is also exact where rates do not divide lengths. Causal attention takes half, which the paper
does not count. A matrix product has multiplications and additions, and there are two products: by the
convention of `torch.utils.flop_counter`, the same pairs cost `4 d` each, twice the paper's number.

**Communication, section 3.1.** "Both sizes ... are independent of the sequence length N, making the communication
cost constant." The table has {rows:,} rows per rank, the rows of one head that a rank sends to others, and the pairs
per token:

| ranks | tokens | three groups: pairs | gathered | ring | all groups: pairs | gathered | ring | messages |
|---|---|---|---|---|---|---|---|---|
"""

_LATENCY = """
The paper agrees: with the three groups of section 3.2 and figure 5 (2,048, the rows of a rank, the whole text, at rates
that keep w / r, because the paper does not give them) a rank of a ring sends at most 2,048 rows and a token has the
same pairs, whatever the number of ranks. With all groups of a geometric sequence, as in equation 11, each doubling of
the text adds one group, so the rows grow with its logarithm. At 8,192 ranks a gather sends more than a ring, because
every member of a set of ranks sends as many rows as the member with the most.

**Latency, figure 5.** "Dilated attention can successfully scale up the sequence length with almost constant
latency." Computation and bytes above agree. The number of messages is not constant where each rank sends to every
other: 8,191 messages of 20 µs each take 0.16 s. `gather` forwards small rows, which takes the messages of the table
([Thousands of ranks](scale.md) has the seconds of both). The paper says "all-gather" without naming the algorithm. Its
figure prints no numbers and it names no GPU, so milliseconds cannot be compared.

**Training, section 4 and table 2.** 300,000 steps of 0.5 M tokens of a model with width 768, 12 layers and
{weights:,} weights (with the tokenizer's 100,288 tokens) are {flops:.2g} operations: {days:,.0f} days of one
{device} at its peak, and longer at lower utilisation. The perplexities of table 2 (4.37, 3.33 and 3.01 at 32
K) were not reproduced: that takes those days and The Stack.
"""


def page(results: dict[str, Any]) -> str:
    """The page as Markdown."""
    planned, paper = results["planned"], results["longnet"]
    lines_of = planned["lines"]
    lines = [_HEAD.format(**planned).rstrip("\n")]
    for line in planned["lines"]:
        memory = line["memory"]
        states = sum(memory[name] for name in ("weights", "gradients", "optimizer"))
        other = line["total"] - states - memory["activations"]
        lines.append(
            f"| {line['weights'] / 1e9:,.1f} B | {line['tokens']:,} | {line['devices']:,} | "
            f"{in_bytes(line['total'])} | {in_bytes(states)} | {in_bytes(memory['activations'])} | {in_bytes(other)} | "
            f"{line['least_seconds']:,.3g} s | {line['bound']} |"
        )
    lines.append(
        _BOUNDS.format(
            memory=in_bytes(planned["memory_bytes"]),
            node_link=planned["node_link"],
            cluster_link=planned["cluster_link"],
            count=len(lines_of),
            bounds=_counted([line["bound"] for line in lines_of], "{} is bounded by {}", "{} are bounded by {}"),
            parts=_counted(map(_largest, lines_of), "{1} in {0}", "{1} in {0}"),
        ).rstrip("\n")
    )
    for line in paper["operations"]:
        lines.append(
            f"| {line['tokens']:,} | {line['paper']:.4g} | {2 * line['pairs']:.4g} | "
            f"{2 * line['pairs'] / line['paper']:.4f} | {2 * line['causal'] / line['paper']:.4f} | "
            f"{line['paper'] / line['bound']:.4f} |"
        )
    lines.append(_TRAFFIC.format(rows=paper["rows_of_a_rank"]).rstrip("\n"))
    for line in paper["traffic"]:
        three, every = line["three groups"], line["all groups"]
        lines.append(
            f"| {line['ranks']:,} | {line['tokens']:,} | {three['pairs']:,.0f} | {three['sent']:,} | "
            f"{three['sent_by_ring']:,} | {every['pairs']:,.0f} | {every['sent']:,} | {every['sent_by_ring']:,} | "
            f"{every['messages']:,} |"
        )
    training = paper["training"]
    lines.append(
        _LATENCY.format(
            rows=paper["rows_of_a_rank"],
            weights=training["weights"],
            flops=training["flops"],
            days=training["device_days"],
            device=planned["device"],
        )
    )
    return "\n".join(lines)


def _largest(line: dict[str, Any]) -> str:
    memory = line["memory"]
    return max((name for name in memory if name != "checkpoint"), key=lambda name: memory[name])


def _counted(names: Iterable[str], one: str, several: str) -> str:
    """Counts of each name as text, most frequent first."""
    parts = [(one if number == 1 else several).format(number, name) for name, number in Counter(names).most_common()]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def draw(results: dict[str, Any], file: Path) -> None:
    """Plot the devices that a text needs, and the operations per token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    planned = results["planned"]
    for model in dict.fromkeys(line["model"] for line in planned["lines"]):
        of_model = [line for line in planned["lines"] if line["model"] == model]
        left.plot(
            [line["tokens"] for line in of_model],
            [line["devices"] for line in of_model],
            marker="o",
            label=f"{model} weights",
        )
    left.set(xscale="log", yscale="log", xlabel="tokens of the text", ylabel=f"{planned['device']}s, at least")
    left.set_title("devices on which a step fits")
    left.legend()
    operations = results["longnet"]["operations"]
    tokens = [line["tokens"] for line in operations]
    for name, values in (
        ("ours, exact", [2 * line["pairs"] / line["tokens"] for line in operations]),
        ("ours, causal", [2 * line["causal"] / line["tokens"] for line in operations]),
        ("equation 18, bound", [line["bound"] / line["tokens"] for line in operations]),
        ("dense", [2 * line["tokens"] for line in operations]),
    ):
        right.plot(tokens, values, marker="o", markersize=3, label=name)
    right.set(xscale="log", yscale="log", xlabel="tokens of the text", ylabel="operations of a token, d = 1")
    right.set_title("attention, as the paper counts it")
    right.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=90)


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.how_far --help")
