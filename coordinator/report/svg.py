"""Charts as SVG: no library, no scripts, colours from the page's style sheet, and a text for screen readers."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from edge_agent.errors import UsageError

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 44
ROW_HEIGHT = 26
MARKERS = {"local": "square", "global": "diamond", "personal": "dot"}
"""Shapes beside colours: readers who cannot tell the colours apart read the same chart."""

_MATRIX_MARGIN = 70
_MOST_NAMED, _MOST_NUMBERED = 40, 13
_SHAPES = ("dot", "square", "diamond")
_COLOURS = ("4e79a7", "f28e2b", "e15759", "76b7b2", "59a14f", "d4a72c", "b07aa1", "ff7f9e", "9c755f", "8c8c8c")

Keys = Sequence[tuple[str, str, str]]
"""Entries of a legend: (name, style, shape); shape is ``line``, ``dashed``, ``bar`` or one of MARKERS."""


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``style`` is a class of the style sheet."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str
    is_dashed: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Its entry in a legend."""
        return self.name, self.style, "dashed" if self.is_dashed else "line"


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


@dataclass(frozen=True)
class Chart:
    """An SVG element of WIDTH x ``height``; ``text`` is for screen readers."""

    text: str
    height: float
    body: str

    def __str__(self) -> str:
        return self.at()

    def at(self, y: float | None = None) -> str:
        """The element for a page, or at height ``y`` inside another SVG."""
        position = "" if y is None else f'x="0" y="{y:.0f}" width="{WIDTH}" height="{self.height:.0f}" '
        return (
            f'<svg {position}viewBox="0 0 {WIDTH} {self.height:.0f}" role="img" aria-label="{escape(self.text)}">'
            f"<title>{escape(self.text)}</title>{self.body}</svg>"
        )


@dataclass(frozen=True)
class Picture:
    """A chart with its file name, title, caption and legend."""

    name: str
    title: str
    caption: str
    chart: Chart
    keys: Keys = ()

    def as_file(self) -> bytes:
        """The content of an SVG file."""
        return standalone(self.title, self.chart, self.keys).encode()


def line_chart(text: str, series: Sequence[Series], *, x_label: str, y_label: str, low: float, high: float) -> Chart:
    """Lines over rounds."""
    xs = [x for line in series for x, _ in line.points]
    across = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = Axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [*_frame(across, up, x_label, y_label)]
    for line in series:
        positions = [(across.at(x), up.at(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
        parts.append(f'<polyline class="line {line.style}{" dashed" * line.is_dashed}" points="{path}"/>')
        if len(positions) <= 40:
            parts += [_mark("dot", line.style, x, y, 2.6) for x, y in positions]
    return Chart(text, HEIGHT, "".join(parts))


def bar_chart(
    text: str, groups: Sequence[tuple[int, tuple[float, ...]]], styles: Sequence[str], *, x_label: str, y_label: str
) -> Chart:
    """Bars over rounds, one for each style."""
    numbers = [number for number, _ in groups]
    highest = max((value for _, values in groups for value in values), default=0.0) or 1.0
    across = Axis(min(numbers) - 0.5, max(numbers) + 0.5, LEFT, WIDTH - RIGHT)
    up = Axis(0.0, nice_ceiling(highest), HEIGHT - BOTTOM, TOP)
    room = 0.8 * (across.at(1) - across.at(0))
    parts = [*_frame(across, up, x_label, y_label)]
    for number, values in groups:
        parts += _bars(across.at(number), room, list(zip(styles, values, strict=True)), up)
    return Chart(text, HEIGHT, "".join(parts))


def named_bars(text: str, bars: Sequence[tuple[str, str, Mapping[str, float | None]]], *, y_label: str) -> Chart:
    """Bars 0..1 for (name, note below it, style -> value); None is drawn as a dash on the base line."""
    up = Axis(0.0, 1.0, HEIGHT - BOTTOM - 14, TOP)
    step = (WIDTH - LEFT - RIGHT) / max(len(bars), 1)
    parts = [*_horizontal_grid(up), _turned(y_label, 11, (TOP + up.begin) / 2, "middle", "label")]
    for index, (name, note, values) in enumerate(bars):
        middle = LEFT + step * (index + 0.5)
        parts += _bars(middle, 0.8 * step, list(values.items()), up)
        parts.append(_word(_short(name, max(2, int(step / 6))), middle, up.begin + 16, "middle", "tick"))
        parts.append(_word(note, middle, up.begin + 30, "middle", "small tick"))
    return Chart(text, HEIGHT, "".join(parts))


def dot_chart(
    text: str, rows: Sequence[tuple[str, dict[str, float]]], *, x_label: str, low: float, high: float
) -> Chart:
    """One row for each name with a mark for each scope."""
    left = 130
    across = Axis(low, high, left, WIDTH - RIGHT)
    bottom = TOP + ROW_HEIGHT * len(rows)
    parts = []
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(_word(f"{tick:g}", x, bottom + 17, "middle", "tick"))
    for position, (name, values) in enumerate(rows):
        y = TOP + ROW_HEIGHT * (position + 0.5)
        parts.append(_word(_short(name), left - 10, y + 4, "end", "label"))
        spread = [across.at(value) for value in values.values()]
        if spread:
            parts.append(f'<line class="grid" x1="{min(spread):.1f}" y1="{y}" x2="{max(spread):.1f}" y2="{y}"/>')
        parts += [_mark(MARKERS.get(scope, "dot"), scope, across.at(value), y) for scope, value in values.items()]
    parts.append(_word(x_label, (left + WIDTH - RIGHT) / 2, bottom + BOTTOM - 7, "middle", "label"))
    return Chart(text, bottom + BOTTOM, "".join(parts))


def matrix_chart(
    text: str, names: Sequence[str], matrix: Sequence[Sequence[float | None]], *, low: float, high: float
) -> Chart:
    """A square matrix; cells from pale (``low`` and less) to full (``high``), with numbers where there is room."""
    count, span = len(names), (high - low) or 1.0
    size = (WIDTH - _MATRIX_MARGIN - RIGHT) / count
    bottom = TOP + count * size
    parts = []
    for row, line in enumerate(matrix):
        for column, value in enumerate(line):
            x, y = _MATRIX_MARGIN + column * size, TOP + row * size
            share = 0.0 if value is None else min(1.0, max(0.0, (value - low) / span))
            square = f'x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{size:.1f}"'
            parts.append(f'<rect class="cell" fill-opacity="{0.04 + 0.76 * share:.2f}" {square}/>')
            if count <= _MOST_NUMBERED:
                shown = "–" if value is None else f"{value:.2f}"
                parts.append(_word(shown, x + size / 2, y + size / 2 + 4, "middle", "small label"))
    for index, name in enumerate(names if count <= _MOST_NAMED else ()):
        middle, short = size * (index + 0.5), _short(name, 11)
        parts.append(_word(short, _MATRIX_MARGIN - 6, TOP + middle + 4, "end", "small label"))
        parts.append(_turned(short, _MATRIX_MARGIN + middle + 3, bottom + 8, "end", "small label"))
    return Chart(text, bottom + _MATRIX_MARGIN, "".join(parts))


def point_chart(text: str, panels: Sequence[tuple[str, Sequence[Sequence[float]], Sequence[int]]]) -> Chart:
    """Panels (name, points, labels), two in a row; colour and shape show the label.

    Each panel is a square that the farthest point of its cloud touches.
    """
    is_alone = len(panels) == 1
    side = 320.0 if is_alone else 226.0
    parts = []
    for number, (name, points, labels) in enumerate(panels):
        left = (WIDTH - side) / 2 if is_alone else 8 + (side + 12) * (number % 2)
        top = 24 + (side + 32) * (number // 2)
        parts.append(f'<rect class="grid" x="{left}" y="{top}" width="{side}" height="{side}" fill="none"/>')
        parts.append(_word(name, left + side / 2, top - 6, "middle", "label"))
        reach = max((abs(value) for point in points for value in point), default=0.0) or 1.0
        across = Axis(-reach, reach, left + 8, left + side - 8)
        up = Axis(-reach, reach, top + side - 8, top + 8)
        for (x, y), label in zip(points, labels, strict=True):
            style, shape = class_style(label)
            parts.append(_mark(shape, style, across.at(x), up.at(y), 2.8))
    return Chart(text, 24 + -(-len(panels) // 2) * (side + 32) - 16, "".join(parts))


def class_style(label: int) -> tuple[str, str]:
    """Style and shape of a class: thirty classes differ in colour or in shape."""
    return f"k{label % len(_COLOURS)}", _SHAPES[label % len(_SHAPES)]


def style_sheet() -> str:
    """The style sheet of pages with charts."""
    colours = (f".fill.k{index} {{ fill: #{colour}; }}" for index, colour in enumerate(_COLOURS))
    return "\n".join([files(__package__).joinpath("templates/report.css").read_text(encoding="utf-8"), *colours])


def standalone(title: str, chart: Chart, keys: Keys = ()) -> str:
    """A chart with its title and legend as an SVG file, in light or dark colours as its reader prefers."""
    entries, x, y = [], 14.0, 40
    for name, style, shape in keys:
        width = 34 + 6.6 * len(name)
        if x > 14 and x + width > WIDTH - 10:
            x, y = 14.0, y + 20
        entries.append(
            f'<svg x="{x:.0f}" y="{y}" width="22" height="14" viewBox="0 0 22 14">{key_mark(style, shape)}</svg>'
        )
        entries.append(_word(name, x + 28, y + 11, "start", "tick"))
        x += width + 8
    top = y + 20 if keys else y
    sheet = style_sheet()
    wanted = ("text {", ".tick", ".label", ".small", ".grid", ".fill", ".line", ".dashed", ".cell")
    marks = [line for line in sheet.splitlines() if line.startswith(wanted)]
    style_ = " ".join(
        [*sheet[sheet.index(":root") : sheet.index("* {")].split(), *marks, ".sheet { fill: var(--sheet); }"]
    )
    height = top + chart.height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{1.5 * WIDTH:g}" '
        f'role="img"><style>{style_}</style><rect class="sheet" width="{WIDTH}" height="{height:.0f}" rx="8"/>'
        f'<text class="label" x="14" y="26" font-weight="600">{escape(title)}</text>{"".join(entries)}{chart.at(top)}'
        "</svg>\n"
    )


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


def accuracy_floor(values: Iterable[float]) -> float:
    """Where an axis of accuracies begins: 0 (or the lowest value below it), 0.5 where all lie in the upper half."""
    lowest = min(values, default=0.0)
    return 0.5 if lowest >= 0.5 else min(0.0, lowest)


def _frame(across: Axis, up: Axis, x_label: str, y_label: str) -> Iterator[str]:
    yield from _horizontal_grid(up)
    for tick in across.ticks(6):
        if tick == int(tick):
            yield _word(f"{tick:g}", across.at(tick), up.begin + 17, "middle", "tick")
    yield _turned(y_label, 11, (TOP + HEIGHT - BOTTOM) / 2, "middle", "label")
    yield _word(x_label, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 7, "middle", "label")


def _horizontal_grid(up: Axis) -> Iterator[str]:
    for tick in up.ticks():
        y = up.at(tick)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield _word(f"{tick:g}", LEFT - 7, y + 4, "end", "tick")


def _bars(middle: float, room: float, values: Sequence[tuple[str, float | None]], up: Axis) -> Iterator[str]:
    width = room / max(len(values), 1)
    for index, (style, value) in enumerate(values):
        left = middle + (index - len(values) / 2) * width
        if value is None:
            yield _word("–", left + width / 2, up.begin - 3, "middle", "tick")
            continue
        top = min(up.at(value), up.begin - 0.5)
        size = f'width="{max(width - 1, 0.5):.1f}" height="{up.begin - top:.1f}"'
        yield f'<rect class="fill {style}" x="{left:.1f}" y="{top:.1f}" {size}/>'


def _word(text: str, x: float, y: float, anchor: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _turned(text: str, x: float, y: float, anchor: str, style: str) -> str:
    turn = f'transform="translate({x:.1f} {y:.1f}) rotate(-90)" text-anchor="{anchor}"'
    return f'<text class="{style}" {turn}>{escape(text)}</text>'


def _mark(shape: str, style: str, x: float, y: float, size: float = 5.0) -> str:
    if shape == "dot":
        return f'<circle class="fill {style}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if shape == "diamond" else ""
    half = 0.85 * size
    corner = f'x="{x - half:.1f}" y="{y - half:.1f}" width="{2 * half:.1f}" height="{2 * half:.1f}"'
    return f'<rect class="fill {style}" {corner}{turn}/>'


def key_mark(style: str, shape: str) -> str:
    """The mark of a legend's entry, in a box of 22 x 14."""
    if shape in {"line", "dashed"}:
        return f'<line class="line {style}{" dashed" * (shape == "dashed")}" x1="0" y1="7" x2="22" y2="7"/>'
    if shape == "bar":
        return f'<rect class="fill {style}" x="5" y="1" width="12" height="12"/>'
    return _mark(shape, style, 11, 7)


def _short(name: str, limit: int = 16) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


FORMATS = ("svg", "png", "pdf")
MOST_BUBBLES = 60
"""Clients up to which each count is a bubble; more are drawn as a heat map."""


def picture_kind(suffix: str) -> str:
    """The format of a picture file with this suffix.

    Raises:
        UsageError: no such format.
    """
    kind = suffix.lstrip(".").lower()
    if kind not in FORMATS:
        result = f"'{suffix}'" if suffix else "a name without a suffix"
        raise UsageError(f"--plot: {result}; expected one of {', '.join('.' + one for one in FORMATS)}")
    return kind


def mixture(partition: Mapping[str, Any], kind: str) -> bytes:
    """The bytes of a picture file of format ``kind``, one of `FORMATS`.

    ``partition``: ``rule``, ``classes`` (names), and ``clients`` with ``id`` and ``train`` (counts by class).
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    clients, classes = partition["clients"], partition["classes"]
    counts = [one["train"] for one in clients]
    with mpl.rc_context({"svg.hashsalt": "headwater", "font.size": 9}):
        size = (min(14.0, 2.2 + 0.24 * len(clients)), min(9.0, 1.6 + 0.26 * len(classes)))
        figure = Figure(figsize=(max(4.0, size[0]), max(2.6, size[1])), layout="constrained")
        panel = figure.subplots()
        if len(clients) <= MOST_BUBBLES:
            _bubbles(panel, counts)
            panel.set_xticks(range(len(clients)), [one["id"] for one in clients], rotation=90)
        else:
            columns = [list(column) for column in zip(*counts, strict=True)]
            shown = panel.imshow(columns, aspect="auto", cmap="Blues", interpolation="nearest")
            figure.colorbar(shown, ax=panel, label="samples")
        panel.set_yticks(range(len(classes)), classes)
        panel.set(xlabel="client", ylabel="class")
        figure.suptitle(f"partition {partition['rule']}: training samples of each class", fontsize=10)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def _bubbles(panel: Any, counts: list[list[int]]) -> None:
    highest = max(map(max, counts)) or 1
    points = [(x, y, count) for x, row in enumerate(counts) for y, count in enumerate(row) if count]
    xs, ys, sizes = zip(*points, strict=True)
    panel.scatter(xs, ys, s=[140.0 * size / highest for size in sizes], color="#2166ac", alpha=0.85, linewidths=0)
    panel.set(xlim=(-0.7, len(counts) - 0.3), ylim=(len(counts[0]) - 0.4, -0.6))
    panel.scatter([], [], s=140.0, color="#2166ac", label=f"{highest} samples")
    panel.scatter([], [], s=14.0, color="#2166ac", label=f"{max(1, highest // 10)}")
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    panel.grid(alpha=0.15)
