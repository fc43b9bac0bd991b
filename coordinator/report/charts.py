"""Charts as inline SVG: no library, no scripts, colours from the page's style sheet, a text for who cannot see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

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
