"""Charts as plain values, and the HTML figure of each: one layer for reports, analyses and the live view.

A chart is a value: `Lines`, `Bars`, `Scatter`, `Rows` (marks of several scopes for each name, as local and personal
accuracy of devices, or horizontal bars), `Matrix` or `Timeline`. Each has a ``title``, a ``summary`` of one sentence
(which screen readers say), and an optional ``caption``. Colours are named by ``role``, one of `ROLES`; the style sheet
and the pictures of `coordinator.report.pictures` take them from `THEMES`.

A page shows a chart with ``figure_html(chart, figure_id)``: the figure holds the chart as JSON, and its numbers as a
table. `assets` are the files that draw it: a page that is served names them by ``<script src>`` and
``<link rel="stylesheet">`` in the order ``charts.css``, ``uplot.js``, ``charts.js``; a page that stands alone has them
inline (`inline_assets`), allowed by their hashes. They request nothing, evaluate nothing, and need no inline style.

A live page replaces a chart with ``headwaterCharts.update(figureId, chart)``; the argument is what `chart_json` gives.
A reader's choices (hidden series, logarithmic axis, smoothing, zoom) stay. ``headwaterCharts.draw(element)`` draws the
figures in an element that was added later. ``data-theme="light"`` or ``"dark"`` on the root element overrides what the
system prefers.

Means and other aggregates are the caller's, over all its data. Only drawing is down-sampled (`MOST_POINTS`), so is the
table (`MOST_TABLE_ROWS`), and the caption says so. Names may come from peers: `clean` bounds their length and replaces
characters that change the direction of text; everything is escaped.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from typing import Any, Literal

MOST_POINTS = 600
"""Points of a series that are drawn; more are down-sampled, keeping the extremes of each stretch."""

MOST_TABLE_ROWS = 100
MOST_NAME = 80
"""Characters of a name that are shown."""

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "page": "#fbfaf7",
        "sheet": "#ffffff",
        "ink": "#1d2430",
        "soft": "#566070",
        "rule": "#e3e1da",
        "local": "#6741d9",
        "global": "#b8500a",
        "personal": "#0b7285",
        "plain": "#4a6fa5",
        "up": "#4a6fa5",
        "down": "#8aa3c8",
        "good": "#22703a",
        "bad": "#c02626",
        "c0": "#4269a5",
        "c1": "#c46a12",
        "c2": "#c8434b",
        "c3": "#2f8f8a",
        "c4": "#3f8a3a",
        "c5": "#a07c08",
        "c6": "#8e4f8c",
        "c7": "#d0507a",
        "c8": "#84593f",
        "c9": "#6b6f76",
        "depth": "62%",
    },
    "dark": {
        "page": "#14181f",
        "sheet": "#1c222c",
        "ink": "#e7eaf0",
        "soft": "#a3adbc",
        "rule": "#303846",
        "local": "#b197fc",
        "global": "#ffa94d",
        "personal": "#4dd0e1",
        "plain": "#7ea6e0",
        "up": "#7ea6e0",
        "down": "#4f6c99",
        "good": "#69db7c",
        "bad": "#ff8787",
        "c0": "#82aaf0",
        "c1": "#f2a154",
        "c2": "#f2777e",
        "c3": "#6fcdc6",
        "c4": "#7ccb72",
        "c5": "#dcbb4a",
        "c6": "#c99bd0",
        "c7": "#ff9ab8",
        "c8": "#c49a7f",
        "c9": "#b0b6bf",
        "depth": "40%",
    },
}
"""Colours of both themes, which style sheet and pictures share; ``depth`` is the share of colour in a full cell."""

ROLES = ("local", "global", "personal", "plain", "up", "down", "good", "bad", *(f"c{number}" for number in range(10)))
CLASSES = 10
"""Roles ``c0`` to ``c9`` are for things without a meaning in colour: classes, methods, agents."""

MARKERS = {"local": "square", "global": "diamond", "personal": "dot"}
"""Shapes beside colours: readers who cannot tell the colours apart read the same chart."""

Points = tuple[tuple[float, float | None], ...]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Names of columns, and rows."""


@dataclass(frozen=True)
class Axis:
    """``unit`` follows the label in brackets; ``low`` and ``high`` bound the axis, None: as the data need.

    ``log``: begins logarithmic. ``can_log``: readers may change that; values of 0 and less are not drawn then.
    ``digits``: decimals of a value that is read off; None: as many as it needs. ``is_share``: values, ``low`` and
    ``high`` are shares, which are shown as percentages. ``is_time``: values are seconds since 1970, shown as UTC.
    """

    label: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    log: bool = False
    can_log: bool = False
    digits: int | None = None
    is_share: bool = False
    is_time: bool = False

    @property
    def text(self) -> str:
        """The label with its unit."""
        unit = "%" if self.is_share else self.unit
        return f"{self.label} ({unit})" if unit else self.label

    def shown(self, value: float | None) -> str:
        """A value on this axis as text."""
        if self.is_time:
            return "–" if value is None else datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M")
        return percent(value) if self.is_share else number(value)


@dataclass(frozen=True)
class Series:
    """Points (x, y), x ascending except in a scatter chart; y None: a gap.

    ``band``: (low, high) around each point, for example the spread over agents; empty: none.
    """

    name: str
    points: Points
    role: str
    dashed: bool = False
    band: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Curves:
    """Series over common axes: `Lines`, `Bars` or `Scatter`."""

    title: str
    summary: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    caption: str = ""


@dataclass(frozen=True)
class Lines(Curves):
    """Lines over a common x."""


@dataclass(frozen=True)
class Bars(Curves):
    """Vertical bars over a common x of whole numbers, as bytes by round; ``stacked``: on top of each other.

    A bar that reaches beyond the axis is drawn broken, with its value beside it.
    """

    stacked: bool = False

    def cut(self) -> list[tuple[float, float]]:
        """Return (x, height) of each bar that reaches beyond the axis."""
        high = self.y.high
        if high is None:
            return []
        heights: dict[float, float] = {}
        for series in self.series:
            for x, y in series.points:
                value = y or 0.0
                heights[x] = heights.get(x, 0.0) + value if self.stacked else max(heights.get(x, 0.0), value)
        return [(x, height) for x, height in heights.items() if height > high]


@dataclass(frozen=True)
class Scatter(Curves):
    """Clouds of points. ``bare``: the axes mean nothing in themselves (as of t-SNE) and have no numbers."""

    bare: bool = False


@dataclass(frozen=True)
class Mark:
    """A value, and the interval that it lies in."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """One name with a mark for each scope (a `Key`'s name); ``tone``: role of the note."""

    name: str
    marks: Mapping[str, Mark]
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Key:
    """What marks of one colour and shape (a value of MARKERS, or ``bar``) are; ``is_said``: as a number beside them."""

    name: str
    role: str
    shape: str = "dot"
    is_said: bool = True


@dataclass(frozen=True)
class Rows:
    """Rows of marks on one axis, joined by a line where a row has two or more; ``style`` ``bars``: bars from the left.

    A legend shows the keys; a key's interval is drawn as a line through its mark.
    """

    title: str
    summary: str
    value: Axis
    keys: tuple[Key, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    style: Literal["marks", "bars"] = "marks"


@dataclass(frozen=True)
class Matrix:
    """Cells from pale (``low`` and less) to full (``high``), with numbers of ``digits`` decimals; None: not defined.

    ``zero``: what a cell with 0 shows; empty: the number.
    """

    title: str
    summary: str
    row_label: str
    column_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    low: float
    high: float
    digits: int = 2
    caption: str = ""
    zero: str = ""

    def cell(self, value: float) -> str:
        """Return the text of a cell."""
        return self.zero if self.zero and value == 0 else f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Span:
    """A stretch of a timeline, in the axis' unit; ``end`` None: still going on."""

    begin: float
    end: float | None
    role: str
    text: str


@dataclass(frozen=True)
class Timeline:
    """Spans of each name on one axis; ``x.high`` is now where a span has not ended."""

    title: str
    summary: str
    x: Axis
    rows: tuple[tuple[str, tuple[Span, ...]], ...]
    caption: str = ""


Chart = Lines | Bars | Scatter | Rows | Matrix | Timeline


def clean(text: object, most: int = MOST_NAME) -> str:
    """Text that is safe to show: at most ``most`` characters, one line, in its own direction only.

    Control characters, and those that change the direction of what follows, become ``�``.
    """
    shown = str(text).encode(errors="replace").decode()
    shown = shown if len(shown) <= most else shown[: most - 1] + "…"
    return "".join("�" if unicodedata.category(one) in {"Cc", "Cf", "Zl", "Zp"} else one for one in shown)


def chart_json(chart: Chart) -> dict[str, Any]:
    """The chart as JSON, with its table: what ``headwaterCharts.update`` takes."""
    columns, rows = _table(chart)
    return {**_drawn(chart), "table": {"columns": columns, "rows": rows}}


def figure_html(chart: Chart, figure_id: str, *, level: int = 2) -> str:
    """The HTML of a chart: a figure with title, plot, caption, data, and its numbers as a table.

    ``figure_id`` is the element's id, unique on its page; ``level`` the rank of its heading.
    """
    drawn = _drawn(chart)
    columns, rows = _table(chart)
    title = escape(drawn["title"])
    data = json.dumps(drawn, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":  # nothing in a value may end the script element, or begin another
        data = data.replace(character, f"\\u{ord(character):04x}")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<figure class="chart" id="{escape(figure_id)}" role="figure" aria-label="{escape(drawn["summary"])}">'
        f'<h{level}>{title}</h{level}><div class="plot"></div><figcaption>{escape(drawn["caption"])}</figcaption>'
        f'<script type="application/json">{data}</script>'
        f'<details class="data"><summary>Data<span class="unseen"> of {title}</span></summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Data of {title}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details></figure>"
    )


@functools.cache
def assets() -> Mapping[str, bytes]:
    """Name -> content of the files that draw figures, in the order in which a page has to name them."""
    folder = files(__package__).joinpath("assets")
    light, dark = (" ".join(f"--{role}: {colour};" for role, colour in THEMES[name].items()) for name in THEMES)
    style = "\n".join(
        (
            f":root {{ color-scheme: light dark; {light} }}",
            f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}',
            f':root[data-theme="dark"] {{ color-scheme: dark; {dark} }}',
            ':root[data-theme="light"] { color-scheme: light; }',
            *(f".is-{role} {{ --own: var(--{role}); }}" for role in ROLES),
            folder.joinpath("uPlot.min.css").read_text(encoding="utf-8"),
            folder.joinpath("charts.css").read_text(encoding="utf-8"),
        )
    )
    return {
        "charts.css": style.encode(),
        "uplot.js": folder.joinpath("uPlot.iife.min.js").read_bytes(),
        "charts.js": folder.joinpath("charts.js").read_bytes(),
    }


@dataclass(frozen=True)
class InlineAssets:
    """Style sheet and scripts of a page that stands alone, and the policy that allows these and nothing else."""

    style: str
    scripts: tuple[str, ...]
    policy: str = field(default="", compare=False)


@functools.cache
def inline_assets(style: str = "") -> InlineAssets:
    """The assets as text for ``<style>`` and ``<script>`` elements; ``style`` is added to the style sheet."""
    texts = {name: content.decode() for name, content in assets().items()}
    sheet = f"{texts.pop('charts.css')}\n{style}"
    scripts = tuple(texts.values())
    allowed = " ".join(map(_source, scripts))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_source(sheet)}; base-uri 'none'; form-action 'none'"
    )
    return InlineAssets(sheet, scripts, policy)


def _source(text: str) -> str:
    """An inline element's hash, as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """The series with at most ``most`` points: of each stretch the lowest and the highest, and both ends."""
    count = len(series.points)
    if count <= most:
        return series
    kept = {0, count - 1}
    stretches = (most - 2) // 2
    for number in range(stretches):
        begin = 1 + number * (count - 2) // stretches
        end = 1 + (number + 1) * (count - 2) // stretches
        known = [index for index in range(begin, end) if series.points[index][1] is not None]
        if known:
            kept |= {pick(known, key=lambda index: series.points[index][1] or 0.0) for pick in (min, max)}
    order = sorted(kept)
    band = tuple(series.band[index] for index in order) if series.band else ()
    return Series(series.name, tuple(series.points[index] for index in order), series.role, series.dashed, band)


def number(value: float | None, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, whole numbers up to a million in full; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """A share as a percentage; a dash where it is not known."""
    return "–" if value is None else f"{100 * value:.1f} %"


def points(gain: float | None) -> str:
    """A difference of shares in percentage points, with its sign; a dash where it is not known."""
    return "–" if gain is None else f"{100 * gain:+.1f}".replace("-", "−")


def ends(
    series: Iterable[Series],
    where: str = "in round",
    shown: Callable[[float], str] = "{:.3f}".format,
    shown_x: Callable[[float], str] = "{:g}".format,
) -> str:
    """Return one sentence on where each line begins and ends; ``shown``, ``shown_x``: a value and its x as text."""
    parts = []
    for one in series:
        known = [(x, y) for x, y in one.points if y is not None]
        if known:
            (first, begin) = known[0]
            (last, end) = known[-1]
            further = f", {shown(end)} {where} {shown_x(last)}" if last != first else ""
            parts.append(f"{one.name}: {shown(begin)} {where} {shown_x(first)}{further}")
    return "; ".join(parts) + "."


def _drawn(chart: Chart) -> dict[str, Any]:
    """What is drawn, as JSON values: names cleaned, numbers rounded to six digits, points thinned."""
    notes = [chart.caption] if chart.caption else []
    result: dict[str, Any] = {"kind": type(chart).__name__.lower(), "title": clean(chart.title, 200)}
    if isinstance(chart, Curves):
        longest = max((len(one.points) for one in chart.series), default=0)
        if longest > MOST_POINTS:
            notes.append(f"Drawn from {MOST_POINTS} of {longest} points of a line, the extremes among them.")
        result |= {"x": _axis(chart.x), "y": _axis(chart.y), "series": [_series(one, chart.x) for one in chart.series]}
        result |= {"stacked": True} if isinstance(chart, Bars) and chart.stacked else {}
        if isinstance(chart, Bars) and (cut := chart.cut()):
            result["cut"] = [[_short(x), _short(height)] for x, height in cut]
        result |= {"bare": True} if isinstance(chart, Scatter) and chart.bare else {}
    elif isinstance(chart, Rows):
        keys = {key.name: clean(key.name) for key in chart.keys}
        result |= {"value": _axis(chart.value), "style": chart.style}
        result["keys"] = [
            {"name": keys[key.name], "role": key.role, "shape": key.shape, **({} if key.is_said else {"quiet": True})}
            for key in chart.keys
        ]
        result["rows"] = [
            {
                "name": clean(row.name),
                "marks": {keys[name]: _mark(mark) for name, mark in row.marks.items() if name in keys},
                **({"note": clean(row.note, 200), "tone": row.tone} if row.note else {}),
            }
            for row in chart.rows
        ]
    elif isinstance(chart, Matrix):
        result |= {"row_label": clean(chart.row_label), "column_label": clean(chart.column_label)}
        result |= {"rows": [clean(name) for name in chart.rows], "columns": [clean(name) for name in chart.columns]}
        result |= {"values": [[_short(value) for value in line] for line in chart.values]}
        result |= {"low": chart.low, "high": chart.high, "digits": chart.digits}
        result |= {"zero": chart.zero} if chart.zero else {}
    else:
        result |= {"x": _axis(chart.x), "rows": [_spans(name, spans) for name, spans in chart.rows]}
    return result | {"summary": clean(chart.summary, 2000), "caption": clean(" ".join(notes), 2000)}


def _axis(axis: Axis) -> dict[str, Any]:
    wanted: dict[str, Any] = {"low": _short(axis.low), "high": _short(axis.high)}
    wanted |= {
        "log": axis.log,
        "can_log": axis.can_log,
        "digits": axis.digits,
        "share": axis.is_share,
        "time": axis.is_time,
    }
    given = {name: value for name, value in wanted.items() if value is not None and value is not False}
    return {"label": clean(axis.label), "unit": clean(axis.unit), **given}


def _series(series: Series, x_axis: Axis) -> dict[str, Any]:
    shown = thinned(series)
    short_x = round if x_axis.is_time else _short  # six digits of seconds since 1970 would be a quarter of an hour
    result: dict[str, Any] = {"name": clean(series.name), "role": series.role}
    result |= {"x": [short_x(x) for x, _ in shown.points], "y": [_short(y) for _, y in shown.points]}
    if shown.band:
        result |= {"low": [_short(low) for low, _ in shown.band], "high": [_short(high) for _, high in shown.band]}
    return result | ({"dashed": True} if series.dashed else {})


def _mark(mark: Mark) -> list[float | None]:
    return [_short(mark.value), _short(mark.low), _short(mark.high)]


def _spans(name: str, spans: Sequence[Span]) -> dict[str, Any]:
    shown = [
        {"begin": _short(one.begin), "end": _short(one.end), "role": one.role, "text": clean(one.text)} for one in spans
    ]
    return {"name": clean(name), "spans": shown}


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def _table(chart: Chart) -> Table:
    """The chart's numbers; of more than MOST_TABLE_ROWS rows, evenly spread ones."""
    columns = _names_of_columns(chart)
    rows = list(_all_rows(chart))
    if len(rows) > MOST_TABLE_ROWS:
        last = MOST_TABLE_ROWS - 1
        rows = [rows[index * (len(rows) - 1) // last] for index in range(MOST_TABLE_ROWS)]
    return columns, rows


def _names_of_columns(chart: Chart) -> tuple[str, ...]:
    if isinstance(chart, Scatter):
        return "series", clean(chart.x.text), clean(chart.y.text)
    if isinstance(chart, Lines | Bars):
        return clean(chart.x.text), *(clean(one.name) for one in chart.series)
    if isinstance(chart, Rows):
        return (
            "name",
            *(clean(key.name) for key in chart.keys),
            *(["note"] if any(row.note for row in chart.rows) else []),
        )
    if isinstance(chart, Matrix):
        return f"{clean(chart.row_label)} \\ {clean(chart.column_label)}", *map(clean, chart.columns)
    return "name", "what", f"begin ({clean(chart.x.unit)})", f"end ({clean(chart.x.unit)})"


def _all_rows(chart: Chart) -> Iterator[tuple[str, ...]]:
    if isinstance(chart, Scatter):
        yield from ((clean(one.name), number(x), number(y)) for one in chart.series for x, y in one.points)
    elif isinstance(chart, Lines | Bars):
        values = [dict(one.points) for one in chart.series]
        bands = [dict(zip(dict(one.points), one.band, strict=bool(one.band))) for one in chart.series]
        for x in sorted({x for by_x in values for x in by_x}):
            cells = (_with_band(by_x.get(x), band.get(x), chart.y) for by_x, band in zip(values, bands, strict=True))
            yield chart.x.shown(x), *cells
    elif isinstance(chart, Rows):
        noted = any(row.note for row in chart.rows)
        for row in chart.rows:
            cells = (_with_interval(row.marks.get(key.name), chart.value) for key in chart.keys)
            yield clean(row.name), *cells, *([clean(row.note, 200)] if noted else [])
    elif isinstance(chart, Matrix):
        for name, line in zip(chart.rows, chart.values, strict=True):
            yield clean(name), *map(number, line)
    else:
        yield from _timed(chart)


def _timed(chart: Timeline) -> Iterator[tuple[str, ...]]:
    for name, spans in chart.rows:
        for one in spans:
            yield clean(name), clean(one.text), number(one.begin), "going on" if one.end is None else number(one.end)


def _with_band(value: float | None, band: tuple[float, float] | None, axis: Axis) -> str:
    shown = axis.shown
    return shown(value) if band is None else f"{shown(value)} ({shown(band[0])} to {shown(band[1])})"


def _with_interval(mark: Mark | None, axis: Axis) -> str:
    if mark is None:
        return axis.shown(None)
    has_interval = mark.low is not None and mark.high is not None
    return _with_band(mark.value, (mark.low or 0.0, mark.high or 0.0) if has_interval else None, axis)
