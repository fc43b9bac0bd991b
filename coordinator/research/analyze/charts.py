"""Charts that reports do not have: matrices, points in the plane, bars for named things; SVG files that stand alone.

In the report's colours and form: inline SVG, no library, no scripts, a text for who cannot see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from ...report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, _key, _mark, _short, _svg

Keys = Sequence[tuple[str, str, str]]
"""(name, style, shape), as `coordinator.report.charts.legend` takes them."""

SHAPES = ("dot", "square", "diamond")
_COLOURS = ("4e79a7", "f28e2b", "e15759", "76b7b2", "59a14f", "d4a72c", "b07aa1", "ff7f9e", "9c755f", "8c8c8c")
STYLE = " ".join(
    [
        *(f".fill.k{place} {{ fill: #{colour}; }}" for place, colour in enumerate(_COLOURS)),
        "a { color: inherit; } .cell { fill: var(--personal); } .small { font-size: 9.5px; }",
    ]
)
"""Beside the report's style sheet: ten colours that can be told apart on light and on dark, cells of a matrix."""

_NAMES = 70
_MOST_NAMED, _MOST_NUMBERED = 40, 13


@dataclass(frozen=True)
class Picture:
    """One chart with its title, what its colours mean, and what it shows."""

    name: str
    title: str
    caption: str
    chart: str
    keys: Keys = ()


def class_style(label: int) -> tuple[str, str]:
    """Style and shape of a class: thirty classes are told apart, by colour and by shape."""
    return f"k{label % len(_COLOURS)}", SHAPES[label % len(SHAPES)]


def matrix_chart(
    text: str, names: Sequence[str], matrix: Sequence[Sequence[float | None]], *, low: float, high: float
) -> str:
    """A square matrix; cells from pale (``low`` and less) to full (``high``), with numbers where there is room."""
    count, span = len(names), (high - low) or 1.0
    size = (WIDTH - _NAMES - RIGHT) / count
    parts = []
    for row, line in enumerate(matrix):
        for column, value in enumerate(line):
            x, y = _NAMES + column * size, TOP + row * size
            share = 0.0 if value is None else min(1.0, max(0.0, (value - low) / span))
            place = f'x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{size:.1f}"'
            parts.append(f'<rect class="cell" fill-opacity="{0.04 + 0.76 * share:.2f}" {place}/>')
            if count <= _MOST_NUMBERED:
                shown = "–" if value is None else f"{value:.2f}"
                parts.append(_word(shown, x + size / 2, y + size / 2 + 4, "middle", "small label"))
    bottom = TOP + count * size
    return _svg(text, bottom + _NAMES, [*parts, *_names_beside(names, size), *_names_below(names, size, bottom)])


def point_chart(text: str, panels: Sequence[tuple[str, Sequence[Sequence[float]], Sequence[int]]]) -> str:
    """Panels (name, points, labels) beside each other, two in a row; colour and shape tell the label."""
    parts, side = [], 226.0 if len(panels) > 1 else 320.0
    for number, (name, points, labels) in enumerate(panels):
        left, top = (
            (8 if len(panels) > 1 else (WIDTH - side) / 2) + (side + 12) * (number % 2),
            24 + (side + 32) * (number // 2),
        )
        frame = f'x="{left}" y="{top}" width="{side}" height="{side}" fill="none"'
        parts += [f'<rect class="grid" {frame}/>', _word(name, left + side / 2, top - 6, "middle", "label")]
        parts += _points(points, labels, left, top, side)
    rows = -(-len(panels) // 2)
    return _svg(text, 24 + rows * (side + 32) - 16, parts)


def named_bars(text: str, bars: Sequence[tuple[str, str, Mapping[str, float | None]]], *, y_label: str) -> str:
    """Bars 0..1 for (name, note below it, style -> value); None is drawn as a dash on the ground."""
    up = Axis(0.0, 1.0, HEIGHT - BOTTOM - 14, TOP)
    step = (WIDTH - LEFT - RIGHT) / max(len(bars), 1)
    parts = [*_scale(up), *_turned(y_label, (TOP + up.begin) / 2)]
    for place, (name, note, values) in enumerate(bars):
        middle = LEFT + step * (place + 0.5)
        parts += _bars_at(middle, 0.8 * step, values, up)
        limit = max(2, int(step / 6))
        parts.append(_word(_short(name, limit), middle, up.begin + 16, "middle", "tick", is_safe=True))
        parts.append(_word(note, middle, up.begin + 30, "middle", "small tick"))
    return _svg(text, HEIGHT, parts)


def standalone(picture: Picture) -> str:
    """One picture as an SVG file; light or dark as its reader prefers."""
    begin = picture.chart.index('viewBox="0 0 ') + len('viewBox="0 0 ')
    height = int(picture.chart[begin:].split('"', 1)[0].split()[1])
    keys, rows = _baked(picture.keys)
    top = 40 + 20 * rows
    placed = picture.chart.replace("<svg ", f'<svg x="0" y="{top}" width="{WIDTH}" height="{height}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + height}" width="{1.5 * WIDTH:g}" '
        f'role="img"><style>{_style()}</style><rect class="sheet" width="{WIDTH}" height="{top + height}" rx="8"/>'
        f'<text class="label" x="14" y="26" font-weight="600">{escape(picture.title)}</text>{keys}{placed}</svg>\n'
    )


# --- inside ----------------------------------------------------------------------------------------------------------


def _word(text: str, x: float, y: float, anchor: str, style: str, *, is_safe: bool = False) -> str:
    shown = text if is_safe else escape(text)
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{shown}</text>'


def _names_beside(names: Sequence[str], size: float) -> Iterator[str]:
    if len(names) <= _MOST_NAMED:
        for row, name in enumerate(names):
            y = TOP + size * (row + 0.5) + 4
            yield _word(_short(name, 11), _NAMES - 6, y, "end", "small label", is_safe=True)


def _names_below(names: Sequence[str], size: float, bottom: float) -> Iterator[str]:
    if len(names) <= _MOST_NAMED:
        for column, name in enumerate(names):
            x, y = _NAMES + size * (column + 0.5) + 3, bottom + 8
            turn = f'transform="translate({x:.1f} {y:.1f}) rotate(-90)" text-anchor="end"'
            yield f'<text class="small label" {turn}>{_short(name, 11)}</text>'


def _points(
    points: Sequence[Sequence[float]], labels: Sequence[int], left: float, top: float, side: float
) -> Iterator[str]:
    """Marks in a square, which the farthest point of the cloud touches."""
    reach = max((abs(value) for point in points for value in point), default=0.0) or 1.0
    across = Axis(-reach, reach, left + 8, left + side - 8)
    up = Axis(-reach, reach, top + side - 8, top + 8)
    for (x, y), label in zip(points, labels, strict=True):
        style, shape = class_style(label)
        yield _mark(shape, style, across.at(x), up.at(y), 2.8)


def _bars_at(middle: float, room: float, values: Mapping[str, float | None], up: Axis) -> Iterator[str]:
    width = room / max(len(values), 1)
    for place, (style, value) in enumerate(values.items()):
        left = middle + (place - len(values) / 2) * width
        if value is None:
            yield _word("–", left + width / 2, up.begin - 3, "middle", "tick")
            continue
        top = up.at(value)
        size = f'width="{max(width - 1, 0.5):.1f}" height="{max(up.begin - top, 0.5):.1f}"'
        yield f'<rect class="fill {style}" x="{left:.1f}" y="{min(top, up.begin - 0.5):.1f}" {size}/>'


def _scale(up: Axis) -> Iterator[str]:
    for tick in up.ticks():
        y = up.at(tick)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield _word(f"{tick:g}", LEFT - 7, y + 4, "end", "tick")


def _turned(label: str, middle: float) -> Iterator[str]:
    turn = f'transform="translate(11 {middle:.1f}) rotate(-90)" text-anchor="middle"'
    yield f'<text class="label" {turn}>{escape(label)}</text>'


def _baked(keys: Keys) -> tuple[str, int]:
    """Keys as part of the picture, and how many rows they take."""
    parts, x, row = [], 14.0, 0
    for name, style, shape in keys:
        width = 34 + 6.6 * len(name)
        if x > 14 and x + width > WIDTH - 10:
            x, row = 14.0, row + 1
        y = 40 + 20 * row
        mark = _key(style, shape).replace("<svg ", f'<svg x="{x:.0f}" y="{y}" width="22" height="14" ', 1)
        parts.append(mark + _word(name, x + 28, y + 11, "start", "tick"))
        x += width + 8
    return "".join(parts), row + 1 if keys else 0


def _style() -> str:
    """Colours and marks of the report's page; what is not for charts is left out."""
    sheet = files("coordinator.report").joinpath("report.css").read_text(encoding="utf-8")
    colours = sheet[sheet.index(":root") : sheet.index("* {")]
    wanted = ("text {", ".tick", ".label", ".grid", ".fill", ".line", ".dashed")
    marks = [line for line in sheet.splitlines() if line.startswith(wanted)]
    return " ".join([*colours.split(), *marks, STYLE, ".sheet { fill: var(--sheet); }"])
