"""A plan as a self-contained HTML page: figures, and charts for other lengths and numbers of devices."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.chart_page import COLORS, END, LAYOUT, beginning, drawn
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.training.settings import TrainSettings

from .batch import of_mesh, with_length
from .memory import footprint
from .run import Device, MemoryPlan, RunPlan
from .solve import longest_context, meshes, plan_if_possible

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PARTS: Mapping[str, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "loss": "logits and loss",
    "temporaries": "temporaries",
    "attention": "attention itself",
    "exchange": "exchange",
    "cache": "key/value cache",
}
"""Labels of the parts of memory, on the page and in the command's output."""
SECONDS: Mapping[str, str] = {
    "products": "matrix products",
    "attention": "attention",
    "rest": "norms, activations, loss, copies, waiting",
    "optimizer": "optimizer",
    "exchange": "exchange",
    "overlapped": "of it hidden",
    "host": "host",
}
"""Labels of the parts of a step's time."""
_LENGTHS = 7
_RANKS = 4
_LARGEST_LINE = 8
"""Largest ratio of the device's memory to the tallest bar at which its line is drawn."""
_MOST_LENGTH = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Data of the charts of a plan."""

    memory: tuple[tuple[int, dict[str, int]], ...]
    """Tokens per sequence, and bytes by part."""
    memory_bytes: int
    """Memory of the device."""
    seconds: tuple[tuple[int, str, dict[str, float]], ...]
    """Number of devices, flags of their mesh, and seconds of a step by part."""
    frontier: tuple[tuple[int, int], ...]
    """Number of devices, and the longest context that fits if they share every sequence and hold whole weights."""


def pictures_of(settings: TrainSettings, num_processes: int, device: Device) -> Pictures:
    """Plan the run with other lengths, and on other numbers of devices.

    Args:
        settings, num_processes: the run.
        device: the device, without measurements of this machine, which hold for one number of processes only.
    """
    lengths = []
    for power in range(-_LENGTHS // 2, _LENGTHS // 2 + 1):
        length = int(settings.context_length * 2.0**power)
        if max(8, settings.context_parallel) <= length <= _MOST_LENGTH:
            parts = dataclasses.asdict(footprint(with_length(settings, length), num_processes))
            lengths.append((length, {name: parts[name] for name in PARTS}))
    seconds, frontier = [], []
    for power in range(_RANKS):
        number = num_processes * 2**power
        for best in meshes(settings, number, device)[:1]:
            parts = dataclasses.asdict(best.plan.seconds)
            seconds.append((number, best.flags, {name: parts[name] for name in SECONDS}))
        longest = _longest_of(settings, number, device)
        if longest:
            frontier.append((number, longest))
    return Pictures(
        memory=tuple(lengths), memory_bytes=device.sheet.memory_bytes, seconds=tuple(seconds), frontier=tuple(frontier)
    )


def _longest_of(settings: TrainSettings, number: int, device: Device) -> int:
    """Longest context on devices that all share every sequence and hold whole weights; 0 if they cannot run it."""

    def shared() -> TrainSettings:
        mesh = of_mesh(context=number) | {"strategy": "auto", "layout": "auto"}
        return with_length(settings, max(settings.context_length, number), **mesh)

    if plan_if_possible(shared, number, device) is None:
        return 0
    return longest_context(shared(), number, device.sheet.memory_bytes)


def page(
    title: str, plan: MemoryPlan, words: Sequence[str], settings: Mapping[str, Any], pictures: Pictures | None
) -> Iterator[str]:
    """Yield the page, part by part. It needs plotly.

    Args:
        title: what is planned, and on which devices.
        plan: the plan.
        words: sentences about it.
        settings: settings of the run, by name.
        pictures: data of the charts; None for a page without charts.
    """
    yield from beginning(title)
    yield from (f"<p>{html.escape(sentence)}</p>" for sentence in words)
    memory = [(label, in_bytes(getattr(plan.footprint, name))) for name, label in PARTS.items()]
    memory += [("all", in_bytes(plan.footprint.total)), ("the device has", in_bytes(plan.memory_bytes))]
    yield "<h2>Memory of a process at the peak</h2>" + _table(memory)
    if isinstance(plan, RunPlan):
        seconds = [(label, f"{getattr(plan.seconds, name):.3g} s") for name, label in SECONDS.items()]
        yield "<h2>Seconds</h2>" + _table([*seconds, ("all", f"{plan.seconds.total:.3g} s")])
    if pictures is not None:
        yield "<h2>Other lengths, other numbers of devices</h2><p>Touch or point at a chart to read it.</p><main>"
        for name, heading, draw in (
            ("memory", "Memory of a process by part, over the length of a text", _memory),
            ("seconds", "Seconds of a step by part, over the number of devices, each with its best mesh", _seconds),
            ("frontier", "Longest text that fits, over the devices that share it with whole weights", _frontier),
        ):
            below = _meshes(pictures) if draw is _seconds else ""
            yield f"<section><h3>{heading}</h3>{drawn(_chart(draw, pictures), name)}{below}</section>"
        yield "</main>"
    yield "<h2>Settings</h2>" + _table(list(_flat(settings)))
    yield END


def _meshes(pictures: Pictures) -> str:
    """The mesh for each number of devices, as paragraphs: too long for the axis of a chart."""
    return "".join(
        f"<p>{number} {'device' if number == 1 else 'devices'}: {html.escape(flags or 'data parallel')}</p>"
        for number, flags, _ in pictures.seconds
    )


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings with nested ones flattened, line by line: a single line would be wider than a phone's screen."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", text) for inner, text in _flat(value))
        else:
            yield name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<div class=table><table><tbody>{body}</tbody></table></div>"


def _chart(draw: Callable[[Figure, Pictures], None], pictures: Pictures) -> Figure:
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(**LAYOUT)
    draw(figure, pictures)
    return figure


def _bars(figure: Figure, names: Mapping[str, str], xs: Sequence[str], rows: Sequence[Mapping[str, float]]) -> None:
    for index, (name, label) in enumerate(names.items()):
        values = [row[name] for row in rows]
        if any(values):
            figure.add_bar(x=xs, y=values, name=label, marker_color=COLORS[index % len(COLORS)])


def _memory(figure: Figure, pictures: Pictures) -> None:
    rows = [{name: size / 1e9 for name, size in parts.items()} for _, parts in pictures.memory]
    _bars(figure, PARTS, [f"{length:,}" for length, _ in pictures.memory], rows)
    most, has = max(sum(row.values()) for row in rows), pictures.memory_bytes / 1e9
    unit = "GB"
    if most * _LARGEST_LINE > has:
        figure.add_hline(y=has, line_dash="dot", annotation_text="the device has", annotation_position="top left")
    else:  # next to such a line the bars would be invisible
        unit = f"GB; the device has {has:,.4g}"
    figure.update_layout(
        barmode="stack",
        xaxis={"title": {"text": "tokens of a text"}, "type": "category"},
        yaxis={"title": {"text": unit}, "hoverformat": ".4~g"},
    )


def _seconds(figure: Figure, pictures: Pictures) -> None:
    rows = [{**parts, "overlapped": -parts["overlapped"]} for _, _, parts in pictures.seconds]
    xs = [str(number) for number, _, _ in pictures.seconds]
    _bars(figure, SECONDS, xs, rows)
    figure.update_layout(
        barmode="relative",
        xaxis={"title": {"text": "devices"}, "type": "category"},
        yaxis={"title": {"text": "s"}, "hoverformat": ".4~g"},
    )


def _frontier(figure: Figure, pictures: Pictures) -> None:
    from plotly.graph_objects import Scatter

    xs, ys = [number for number, _ in pictures.frontier], [longest for _, longest in pictures.frontier]
    figure.add_trace(Scatter(x=xs, y=ys, name="tokens", mode="lines+markers", line={"color": COLORS[0]}))
    figure.update_layout(
        xaxis={"title": {"text": "devices"}, "type": "log", "tickvals": xs},
        yaxis={"type": "log", "tickvals": ys, "tickformat": ".3~s", "hoverformat": ","},
    )
