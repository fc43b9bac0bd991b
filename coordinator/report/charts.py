"""Charts as inline SVG: no library, no scripts, colours from the page's style sheet, a text for who cannot see."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from edge_agent.errors import StateError, UsageError

from ..state.store import RunFolder
from ..text import counted
from .figures import SCOPES, RunFigures, as_number, read_run

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 44
ROW_HEIGHT = 26
MARKERS = {"local": "square", "global": "diamond", "personal": "dot"}
"""Shapes beside colours: a reader who does not tell the colours apart reads the same chart."""


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``style`` is a class of the style sheet."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str
    is_dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """Maps values from ``low..high`` to pixels from ``begin`` to ``end``."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Position of a value in pixels."""
        span = (self.high - self.low) or 1.0
        return self.begin + (value - self.low) / span * (self.end - self.begin)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round values between low and high, about ``wanted`` of them."""
        step = nice_step((self.high - self.low) / max(wanted, 1))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def line_chart(text: str, series: Sequence[Series], *, x_label: str, y_label: str, low: float, high: float) -> str:
    """Lines over rounds; ``text`` is what a screen reader says instead."""
    xs = [x for line in series for x, _ in line.points]
    across = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = Axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_frame(across, up, x_label, y_label), *(_line(one, across, up) for one in series)]
    return _svg(text, HEIGHT, parts)


def bar_chart(
    text: str, groups: Sequence[tuple[int, tuple[float, ...]]], styles: Sequence[str], *, x_label: str, y_label: str
) -> str:
    """Bars over rounds, one for each style; ``text`` is what a screen reader says instead."""
    numbers = [number for number, _ in groups]
    highest = max((value for _, values in groups for value in values), default=0.0) or 1.0
    across = Axis(min(numbers) - 0.5, max(numbers) + 0.5, LEFT, WIDTH - RIGHT)
    up = Axis(0.0, nice_ceiling(highest), HEIGHT - BOTTOM, TOP)
    room = 0.8 * (across.at(1) - across.at(0)) / len(styles)
    bars = []
    for number, values in groups:
        for place, (value, style) in enumerate(zip(values, styles, strict=True)):
            left = across.at(number) + (place - len(styles) / 2) * room
            top = up.at(value)
            bars.append(
                f'<rect class="fill {style}" x="{left:.1f}" y="{top:.1f}" '
                f'width="{max(room - 1, 0.5):.1f}" height="{up.begin - top:.1f}"/>'
            )
    return _svg(text, HEIGHT, [_frame(across, up, x_label, y_label), *bars])


def dot_chart(text: str, rows: Sequence[tuple[str, dict[str, float]]], *, x_label: str, low: float, high: float) -> str:
    """One row for each name with a mark for each scope; ``text`` is what a screen reader says instead."""
    left = 130
    across = Axis(low, high, left, WIDTH - RIGHT)
    height = TOP + ROW_HEIGHT * len(rows) + BOTTOM
    parts = [_vertical_grid(across, TOP, height - BOTTOM)]
    for position, (name, values) in enumerate(rows):
        y = TOP + ROW_HEIGHT * (position + 0.5)
        parts.append(f'<text class="label" x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{_short(name)}</text>')
        spread = [across.at(value) for value in values.values()]
        if spread:
            parts.append(f'<line class="grid" x1="{min(spread):.1f}" y1="{y}" x2="{max(spread):.1f}" y2="{y}"/>')
        parts += [_mark(MARKERS.get(scope, "dot"), scope, across.at(value), y) for scope, value in values.items()]
    parts.append(_x_label(x_label, height, (left + WIDTH - RIGHT) / 2))
    return _svg(text, height, parts)


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """A row of (name, style, shape) keys; shape is ``line``, ``dashed``, ``bar`` or one of MARKERS."""
    keys = "".join(f"<li>{_key(style, shape)} {escape(name)}</li>" for name, style, shape in entries)
    return f'<ul class="legend">{keys}</ul>'


def nice_step(raw: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``raw``."""
    if not raw > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9)))


def nice_ceiling(value: float) -> float:
    """The tick at or above ``value``."""
    step = nice_step(value / 5)
    return step * math.ceil(value / step - 1e-9)


def _svg(text: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(text)}">'
        f"<title>{escape(text)}</title>{''.join(parts)}</svg>"
    )


def _frame(across: Axis, up: Axis, x_label: str, y_label: str) -> str:
    ticks = [tick for tick in across.ticks(6) if tick == int(tick)]
    below = [
        f'<text class="tick" x="{across.at(tick):.1f}" y="{up.begin + 17:.1f}" text-anchor="middle">{tick:g}</text>'
        for tick in ticks
    ]
    beside = [
        f'<line class="grid" x1="{LEFT}" y1="{up.at(tick):.1f}" x2="{WIDTH - RIGHT}" y2="{up.at(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{up.at(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in up.ticks()
    ]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="translate(11 {middle}) rotate(-90)" text-anchor="middle"'
    title = f'<text class="label" {turned}>{escape(y_label)}</text>'
    return "".join([*beside, *below, title, _x_label(x_label, HEIGHT, (LEFT + WIDTH - RIGHT) / 2)])


def _vertical_grid(across: Axis, top: float, bottom: float) -> str:
    return "".join(
        f'<line class="grid" x1="{across.at(tick):.1f}" y1="{top}" x2="{across.at(tick):.1f}" y2="{bottom}"/>'
        f'<text class="tick" x="{across.at(tick):.1f}" y="{bottom + 17}" text-anchor="middle">{tick:g}</text>'
        for tick in across.ticks()
    )


def _x_label(label: str, height: float, middle: float) -> str:
    return f'<text class="label" x="{middle:.1f}" y="{height - 7:.1f}" text-anchor="middle">{escape(label)}</text>'


def _line(series: Series, across: Axis, up: Axis) -> str:
    places = [(across.at(x), up.at(y)) for x, y in series.points]
    dash = " dashed" if series.is_dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "" if len(places) > 40 else "".join(_mark("dot", series.style, x, y, 2.6) for x, y in places)
    return f'<polyline class="line {series.style}{dash}" points="{path}"/>{dots}'


def _mark(shape: str, style: str, x: float, y: float, size: float = 5.0) -> str:
    if shape == "dot":
        return f'<circle class="fill {style}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if shape == "diamond" else ""
    half = 0.85 * size
    corner = f'x="{x - half:.1f}" y="{y - half:.1f}" width="{2 * half:.1f}" height="{2 * half:.1f}"'
    return f'<rect class="fill {style}" {corner}{turn}/>'


def _key(style: str, shape: str) -> str:
    if shape in {"line", "dashed"}:
        dash = " dashed" if shape == "dashed" else ""
        mark = f'<line class="line {style}{dash}" x1="0" y1="7" x2="22" y2="7"/>'
    elif shape == "bar":
        mark = f'<rect class="fill {style}" x="5" y="1" width="12" height="12"/>'
    else:
        mark = _mark(shape, style, 11, 7)
    return f'<svg class="key" viewBox="0 0 22 14" aria-hidden="true">{mark}</svg>'


def _short(name: str, limit: int = 16) -> str:
    return escape(name if len(name) <= limit else name[: limit - 1] + "…")


FORMATS = ("svg", "png", "pdf")
MOST_BUBBLES = 60
"""Clients up to which each count is a bubble; more of them become a map of colours."""


def picture_kind(suffix: str) -> str:
    """The kind of picture that a file with this suffix is to hold.

    Raises:
        UsageError: no such kind.
    """
    kind = suffix.lstrip(".").lower()
    if kind not in FORMATS:
        found = f"'{suffix}'" if suffix else "a name without a suffix"
        raise UsageError(f"--plot: {found}; expected one of {', '.join('.' + one for one in FORMATS)}")
    return kind


def mixture(told: Mapping[str, Any], kind: str) -> bytes:
    """The picture of a partition as the bytes of a file of that kind, one of `FORMATS`.

    ``told``: ``rule``, ``classes`` (names), and ``clients`` with ``id`` and ``train`` (counts by class).
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    clients, classes = told["clients"], told["classes"]
    counts = [one["train"] for one in clients]
    with mpl.rc_context({"svg.hashsalt": "headwater", "font.size": 9}):
        size = (min(14.0, 2.2 + 0.24 * len(clients)), min(9.0, 1.6 + 0.26 * len(classes)))
        figure = Figure(figsize=(max(4.0, size[0]), max(2.6, size[1])), layout="constrained")
        panel = figure.subplots()
        (_bubbles if len(clients) <= MOST_BUBBLES else _map)(figure, panel, counts)
        panel.set_yticks(range(len(classes)), classes)
        if len(clients) <= MOST_BUBBLES:
            panel.set_xticks(range(len(clients)), [one["id"] for one in clients], rotation=90)
        panel.set(xlabel="client", ylabel="class")
        figure.suptitle(f"partition {told['rule']}: training samples of each class", fontsize=10)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def _bubbles(_figure: Any, panel: Any, counts: list[list[int]]) -> None:
    highest = max(map(max, counts)) or 1
    places = [(x, y, count) for x, row in enumerate(counts) for y, count in enumerate(row) if count]
    xs, ys, sizes = zip(*places, strict=True)
    panel.scatter(xs, ys, s=[140.0 * size / highest for size in sizes], color="#2166ac", alpha=0.85, linewidths=0)
    panel.set(xlim=(-0.7, len(counts) - 0.3), ylim=(len(counts[0]) - 0.4, -0.6))
    panel.scatter([], [], s=140.0, color="#2166ac", label=f"{highest} samples")
    panel.scatter([], [], s=14.0, color="#2166ac", label=f"{max(1, highest // 10)}")
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    panel.grid(alpha=0.15)


def _map(figure: Any, panel: Any, counts: list[list[int]]) -> None:
    columns = [list(column) for column in zip(*counts, strict=True)]
    shown = panel.imshow(columns, aspect="auto", cmap="Blues", interpolation="nearest")
    figure.colorbar(shown, ax=panel, label="samples")


_HEADER = 62
_LEGEND_LEFT, _LEGEND_STEP = 130, 105


def picture(folder: RunFolder) -> str:
    """The SVG; light or dark as its reader prefers.

    Raises:
        StateError: the run has no figures of devices yet, or they are damaged.
    """
    run = read_run(folder.run, folder.summary() or {}, folder.metrics())
    rows = [(agent.id, {str(s): agent.acc[s] for s in SCOPES if s in agent.acc}) for agent in run.agents if agent.acc]
    if not rows:
        raise StateError(f"{folder.folder}: no device has said yet what it got; a picture can be made after the run")
    chart = dot_chart(_words(rows), rows, x_label="accuracy on held-back samples", low=0.0, high=1.0)
    height = _height_of(chart)
    placed = chart.replace("<svg ", f'<svg x="0" y="{_HEADER}" width="{WIDTH}" height="{height}" ', 1)
    whole = f'viewBox="0 0 {WIDTH} {_HEADER + height}" width="{1.5 * WIDTH:g}"'
    sheet = f'<rect class="sheet" width="{WIDTH}" height="{_HEADER + height}" rx="8"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {whole} role="img"><style>{_style()}</style>'
        f"{sheet}{_title(run)}{_legend()}{placed}</svg>\n"
    )


def _title(run: RunFigures) -> str:
    rounds = as_number(run.summary.get("rounds"))
    what = f"{run.summary.get('method', run.run)}, {'?' if rounds is None else counted(int(rounds), 'round')}"
    return f'<text class="label" x="14" y="24" font-weight="600">{escape(what)}</text>'


def _legend() -> str:
    keys = []
    for place, scope in enumerate(SCOPES):
        x = _LEGEND_LEFT + place * _LEGEND_STEP
        keys.append(f'{_mark(MARKERS[scope], scope, x, 45)}<text class="label" x="{x + 11}" y="49">acc.{scope}</text>')
    return "".join(keys)


def _words(rows: list[tuple[str, dict[str, float]]]) -> str:
    said = (f"{name}: " + ", ".join(f"acc.{scope} {value:.3f}" for scope, value in acc.items()) for name, acc in rows)
    return "Accuracy of each device. " + "; ".join(said)


def _height_of(chart: str) -> int:
    found = re.search(r'viewBox="0 0 \d+ (\d+)"', chart)
    return int(found[1]) if found else 0


def _style() -> str:
    """The page's colours and marks; what is not for charts is left out."""
    sheet = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    colours = sheet[sheet.index(":root") : sheet.index("* {")]
    marks = [
        line for line in sheet.splitlines() if line.startswith(("text {", ".tick", ".label", ".grid", ".fill", ".line"))
    ]
    return " ".join([*colours.split(), *marks, ".sheet { fill: var(--sheet); }"])
