"""Charts as plain values, and the HTML figure of each: one layer for reports, analyses and the live view.

A chart is a value: `Lines`, `Bars`, `Scatter`, `Rows` (marks of several scopes for each name, as local and personal
accuracy of devices, or horizontal bars), `Matrix` or `Timeline`. Each has a ``title``, a ``summary`` of one sentence
(which screen readers read out), and an optional ``caption``. Colours are named by ``role``, one of `ROLES`; the style
sheet and the pictures of `coordinator.report.pictures` take them from `THEMES`.

A page shows a chart with ``figure_html(chart, figure_id)``: the figure holds the chart as JSON, and its numbers as a
table. `assets` are the files that draw it: a page that is served names them by ``<script src>`` and
``<link rel="stylesheet">`` in the order ``charts.css``, ``uplot.js``, ``charts.js``; a page that stands alone has them
inline (`inline_assets`), allowed by their hashes. They request nothing, evaluate nothing, and need no inline style.

A live page replaces a chart with ``headwaterCharts.update(figureId, chart)``; the argument is what `chart_json` gives.
A reader's choices (hidden series, logarithmic axis, smoothing, zoom) stay. ``headwaterCharts.draw(element)`` draws the
figures in an element that was added later. ``data-theme="light"`` or ``"dark"`` on the root element overrides what the
system prefers.

The caller computes means and other aggregates, over all its data. Only what is drawn is down-sampled (`MOST_POINTS`),
and the table (`MOST_TABLE_ROWS`); the caption says so. Names may come from peers: `clean` bounds their length and
replaces characters that change the direction of text; everything is escaped.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from typing import Any, Literal

MOST_POINTS = 600
"""The most points of a series that are drawn; longer ones are down-sampled to the extremes of each stretch."""

MOST_TABLE_ROWS = 100
"""The most rows of a chart's table; of more rows, evenly spread ones are shown."""

MOST_NAME = 80
"""The most characters of a name that are shown."""

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
        "good": "#23734a",
        "bad": "#b30f0f",
        "c0": "#0a6593",
        "c1": "#e36d00",
        "c2": "#480d00",
        "c3": "#506257",
        "c4": "#000087",
        "c5": "#978e79",
        "c6": "#b62000",
        "c7": "#24242f",
        "c8": "#5c98a3",
        "c9": "#826fff",
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
        "good": "#75f174",
        "bad": "#ec7d7d",
        "c0": "#8ea5ff",
        "c1": "#fffa00",
        "c2": "#d30e71",
        "c3": "#91f7ff",
        "c4": "#567800",
        "c5": "#7347ff",
        "c6": "#d0ffc7",
        "c7": "#b0b2aa",
        "c8": "#21bc4d",
        "c9": "#488993",
        "depth": "40%",
    },
}
"""Colours of both themes, which style sheet and pictures share; ``depth`` is the share of colour in a full cell.

``c0`` to ``c9`` were chosen by a search for ten colours of which readers with deuteranopia, protanopia or neither tell
any two apart, and which have a contrast of 3 to 1 with both grounds; the first ones are the furthest apart.
"""

CLASSES = 10
"""Roles ``c0`` to ``c9`` are for things without a meaning in colour: classes, methods, agents."""

_CLASS_ROLES = tuple(f"c{number}" for number in range(CLASSES))
ROLES = ("local", "global", "personal", "plain", "up", "down", "good", "bad", *_CLASS_ROLES)

MARKERS = {"local": "square", "global": "diamond", "personal": "dot"}
"""Shapes beside colours: readers who cannot tell the colours apart read the same chart."""

Points = tuple[tuple[float, float | None], ...]
"""(x, y) of each point; y None: a gap."""

Json = dict[str, Any]
"""A JSON object for ``charts.js``, which reads its keys: an edge of the program, so no module of ours looks into it."""

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Names of columns, and rows."""


@dataclass(frozen=True)
class Axis:
    """An axis of a chart: its label, its ends, and how values on it are shown."""

    label: str
    unit: str = ""
    """The unit of the values, which follows the label in brackets."""

    low: float | None = None
    """Where the axis begins; None: as the data need."""

    high: float | None = None
    """Where the axis ends; None: as the data need."""

    log: bool = False
    """Whether the axis is logarithmic at first."""

    can_log: bool = False
    """Whether readers may make it logarithmic, or linear; a logarithmic axis leaves out values of 0 and less."""

    digits: int | None = None
    """The decimals of a value that is read off; None: as many as it needs."""

    is_share: bool = False
    """Whether values, ``low`` and ``high`` are shares (0..1), which are shown as percentages."""

    is_time: bool = False
    """Whether values are seconds since 1970, which are shown as a time in UTC."""

    @property
    def text(self) -> str:
        """The label with its unit."""
        unit = "%" if self.is_share else self.unit
        if not unit:
            return self.label
        return f"{self.label} ({unit})"

    def shown(self, value: float | None) -> str:
        """Return a value on this axis as text; a dash for None."""
        if value is None:
            return "–"
        if self.is_time:
            return datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M")
        if self.is_share:
            return percent(value)
        return number(value)


@dataclass(frozen=True)
class Series:
    """A named series of points in one colour; x ascends except in a scatter chart."""

    name: str
    points: Points
    role: str
    dashed: bool = False
    band: tuple[tuple[float, float], ...] = ()
    """(Low, high) around each point, for example the spread over agents; empty: the series has no band."""

    @property
    def drawn_points(self) -> list[tuple[float, float]]:
        """The points that have a value."""
        return [(x, y) for x, y in self.points if y is not None]


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
    """Vertical bars over a common x of whole numbers, as bytes by round.

    A bar that reaches beyond the axis is drawn broken, with its value beside it.
    """

    stacked: bool = False
    """Whether the bars of several series stand on top of each other; otherwise they stand side by side."""

    def cut(self) -> list[tuple[float, float]]:
        """Return (x, height) of each bar that reaches beyond the axis."""
        high = self.y.high
        if high is None:
            return []
        heights: dict[float, float] = {}
        for series in self.series:
            for x, y in series.points:
                bar = y or 0.0
                below = heights.get(x, 0.0)
                if self.stacked:
                    heights[x] = below + bar
                else:
                    heights[x] = max(below, bar)
        return [(x, height) for x, height in heights.items() if height > high]


@dataclass(frozen=True)
class Scatter(Curves):
    """Clouds of points over two axes."""

    bare: bool = False
    """Whether the axes have no numbers, because they mean nothing in themselves (as those of t-SNE)."""


@dataclass(frozen=True)
class Mark:
    """A value, and the interval that it lies in."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """A name with a mark for each scope."""

    name: str
    marks: Mapping[str, Mark]
    """Name of a `Key` -> the mark."""

    note: str = ""
    tone: str = ""
    """The role that the note has its colour from."""


@dataclass(frozen=True)
class Key:
    """The meaning of the marks of one colour and shape."""

    name: str
    role: str
    shape: str = "dot"
    """A value of `MARKERS`, or ``bar``."""

    is_said: bool = True
    """Whether the value of each mark stands beside it as a number."""


@dataclass(frozen=True)
class Rows:
    """Rows of marks on one axis, joined by a line where a row has two or more.

    A legend shows the keys; the interval of a mark is drawn as a line through it.
    """

    title: str
    summary: str
    value: Axis
    keys: tuple[Key, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    style: Literal["marks", "bars"] = "marks"
    """Whether a value is a mark, or a bar from the left end of the axis."""


@dataclass(frozen=True)
class Matrix:
    """A matrix of cells that are the fuller the larger their values are, each with its number."""

    title: str
    summary: str
    row_label: str
    column_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    """The value of each cell, row by row; None: not defined."""

    low: float
    """The value of a pale cell; lower ones are as pale."""

    high: float
    """The value of a full cell; higher ones are as full."""

    digits: int = 2
    """The decimals of the numbers."""

    caption: str = ""
    zero: str = ""
    """What a cell of value 0 shows; empty: the number."""

    def cell(self, value: float) -> str:
        """Return the text of a cell."""
        if self.zero and value == 0:
            return self.zero
        return f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Span:
    """A stretch of a timeline, in the unit of its axis."""

    begin: float
    end: float | None
    """Where the stretch ends; None: it has not ended."""

    role: str
    text: str


@dataclass(frozen=True)
class Timeline:
    """Spans of each name on one axis."""

    title: str
    summary: str
    x: Axis
    """The axis of time; its end is now where a span has not ended."""

    rows: tuple[tuple[str, tuple[Span, ...]], ...]
    caption: str = ""


Chart = Lines | Bars | Scatter | Rows | Matrix | Timeline


def clean(text: object, most: int = MOST_NAME) -> str:
    """Return text that is safe to show: at most ``most`` characters, one line, in its own direction only.

    Control characters, and those that change the direction of what follows, become ``�``.
    """
    encodable = str(text).encode(errors="replace").decode()
    if len(encodable) > most:
        encodable = encodable[: most - 1] + "…"
    return "".join(map(_replace_unsafe, encodable))


def _replace_unsafe(letter: str) -> str:
    """Return a letter, or ``�`` where its category is one of `_UNSAFE`."""
    if unicodedata.category(letter) in _UNSAFE:
        return "�"
    return letter


_UNSAFE = frozenset({"Cc", "Cf", "Zl", "Zp"})
"""Unicode's categories of control characters, formatting ones, and separators of lines and paragraphs."""


def chart_json(chart: Chart) -> Json:
    """Return the chart as JSON with its table, for ``headwaterCharts.update``."""
    columns, rows = _table(chart)
    return {**_drawing(chart), "table": {"columns": columns, "rows": rows}}


def figure_html(chart: Chart, figure_id: str, *, level: int = 2) -> str:
    """Return the HTML of a chart: a figure with title, plot, caption, data, and its numbers as a table.

    Args:
        chart: The chart.
        figure_id: The element's id, unique on its page.
        level: Rank of the heading.
    """
    drawing = _drawing(chart)
    title = escape(drawing["title"])
    data = json.dumps(drawing, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":  # nothing in a value may end the script element, or begin another
        data = data.replace(character, f"\\u{ord(character):04x}")
    return (
        f'<figure class="chart" id="{escape(figure_id)}" role="figure" aria-label="{escape(drawing["summary"])}">'
        f'<h{level}>{title}</h{level}><div class="plot"></div><figcaption>{escape(drawing["caption"])}</figcaption>'
        f'<script type="application/json">{data}</script>'
        f'<details class="data"><summary>Data<span class="unseen"> of {title}</span></summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Data of {title}">'
        f"{_table_html(chart)}</div></details></figure>"
    )


def _table_html(chart: Chart) -> str:
    """Return the chart's numbers as an HTML table."""
    columns, rows = _table(chart)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


@functools.cache
def assets() -> Mapping[str, bytes]:
    """Return name -> content of the files that draw figures, in the order in which a page has to name them."""
    folder = files(__package__).joinpath("assets")
    light = _variables_of("light")
    dark = _variables_of("dark")
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


def _variables_of(theme: str) -> str:
    """Return the colours of a theme as CSS variables."""
    return " ".join(f"--{role}: {colour};" for role, colour in THEMES[theme].items())


@dataclass(frozen=True)
class InlineAssets:
    """Style sheet and scripts of a page that stands alone, and the policy that allows these and nothing else."""

    style: str
    scripts: tuple[str, ...]
    policy: str = field(default="", compare=False)


@functools.cache
def inline_assets(style: str = "") -> InlineAssets:
    """Return the assets as text for ``<style>`` and ``<script>`` elements; ``style`` is added to the style sheet."""
    texts = {name: content.decode() for name, content in assets().items()}
    sheet = f"{texts.pop('charts.css')}\n{style}"
    scripts = tuple(texts.values())
    allowed = " ".join(map(_source, scripts))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_source(sheet)}; base-uri 'none'; form-action 'none'"
    )
    return InlineAssets(sheet, scripts, policy)


def _source(text: str) -> str:
    """Return an inline element's hash, as a content security policy names it."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def downsample(series: Series, most: int = MOST_POINTS) -> Series:
    """Return the series with at most ``most`` points: of each stretch the lowest and the highest, and both ends."""
    count = len(series.points)
    if count <= most:
        return series
    kept = {0, count - 1}
    # The points between both ends are cut into stretches of equal length, and each stretch keeps two of its points.
    stretches = (most - 2) // 2
    for stretch in range(stretches):
        begin = 1 + stretch * (count - 2) // stretches
        end = 1 + (stretch + 1) * (count - 2) // stretches
        kept |= _extremes(series.points, begin, end)
    order = sorted(kept)
    band: tuple[tuple[float, float], ...] = ()
    if series.band:
        band = tuple(series.band[index] for index in order)
    return replace(series, points=tuple(series.points[index] for index in order), band=band)


def _extremes(points: Points, begin: int, end: int) -> set[int]:
    """Return the indices of the lowest and the highest of the points begin..end-1; gaps are passed over."""
    heights: dict[int, float] = {}
    for index in range(begin, end):
        y = points[index][1]
        if y is not None:
            heights[index] = y
    if not heights:
        return set()
    return {min(heights, key=heights.__getitem__), max(heights, key=heights.__getitem__)}


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with ``digits`` significant digits, whole ones up to a million in full; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    is_short_whole = value == int(value) and abs(value) < 1e6
    if is_short_whole:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """Return a share as a percentage; a dash where it is not known."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %"


def points(gain: float | None) -> str:
    """Return a difference of shares in percentage points, with its sign; a dash where it is not known."""
    if gain is None:
        return "–"
    return f"{100 * gain:+.1f}".replace("-", "−")


def ends(
    series: Iterable[Series],
    where: str = "in round",
    shown: Callable[[float], str] = "{:.3f}".format,
    shown_x: Callable[[float], str] = "{:g}".format,
) -> str:
    """Return one sentence on where each line begins and ends; lines without a value are left out.

    Args:
        series: The lines.
        where: The words between a value and its x.
        shown: Returns a value as text.
        shown_x: Returns an x as text.
    """
    parts = []
    for line in series:
        drawn_points = line.drawn_points
        if not drawn_points:
            continue
        first_x, first_y = drawn_points[0]
        last_x, last_y = drawn_points[-1]
        part = f"{line.name}: {shown(first_y)} {where} {shown_x(first_x)}"
        if last_x != first_x:
            part += f", {shown(last_y)} {where} {shown_x(last_x)}"
        parts.append(part)
    return "; ".join(parts) + "."


# --- what charts.js draws --------------------------------------------------------------------------------------------


def _drawing(chart: Chart) -> Json:
    """Return what is drawn, as JSON: names cleaned, numbers rounded to six digits, points down-sampled."""
    notes = []
    if chart.caption:
        notes.append(chart.caption)
    if isinstance(chart, Curves):
        content = _curves(chart)
        longest = max((len(series.points) for series in chart.series), default=0)
        if longest > MOST_POINTS:
            notes.append(f"Drawn from {MOST_POINTS} of {longest} points of a line, the extremes among them.")
    elif isinstance(chart, Rows):
        content = _rows(chart)
    elif isinstance(chart, Matrix):
        content = _matrix(chart)
    else:
        content = _timeline(chart)
    return {
        "kind": type(chart).__name__.lower(),
        "title": clean(chart.title, 200),
        **content,
        "summary": clean(chart.summary, 2000),
        "caption": clean(" ".join(notes), 2000),
    }


def _curves(chart: Curves) -> Json:
    """Return the axes and series of a chart; what only bars or clouds have stands where it is not the default."""
    drawing: Json = {
        "x": _axis(chart.x),
        "y": _axis(chart.y),
        "series": [_series(series, chart.x) for series in chart.series],
    }
    if isinstance(chart, Bars):
        if chart.stacked:
            drawing["stacked"] = True
        broken_bars = chart.cut()
        if broken_bars:
            drawing["cut"] = [[_short(x), _short(height)] for x, height in broken_bars]
    if isinstance(chart, Scatter) and chart.bare:
        drawing["bare"] = True
    return drawing


def _rows(chart: Rows) -> Json:
    """Return the axis, keys and rows of a chart."""
    names = {key.name: clean(key.name) for key in chart.keys}
    return {
        "value": _axis(chart.value),
        "style": chart.style,
        "keys": [_key(key) for key in chart.keys],
        "rows": [_row(row, names) for row in chart.rows],
    }


def _key(key: Key) -> Json:
    """Return a key; ``quiet`` stands where its marks have no number beside them."""
    drawing: Json = {"name": clean(key.name), "role": key.role, "shape": key.shape}
    if not key.is_said:
        drawing["quiet"] = True
    return drawing


def _row(row: Row, names: Mapping[str, str]) -> Json:
    """Return a row with its marks by the shown ``names`` of their keys; a mark without a key is not drawn."""
    marks = {names[name]: _mark(mark) for name, mark in row.marks.items() if name in names}
    drawing: Json = {"name": clean(row.name), "marks": marks}
    if row.note:
        drawing["note"] = clean(row.note, 200)
        drawing["tone"] = row.tone
    return drawing


def _matrix(chart: Matrix) -> Json:
    """Return the names and values of a matrix."""
    drawing: Json = {
        "row_label": clean(chart.row_label),
        "column_label": clean(chart.column_label),
        "rows": [clean(name) for name in chart.rows],
        "columns": [clean(name) for name in chart.columns],
        "values": [list(map(_short, line)) for line in chart.values],
        "low": chart.low,
        "high": chart.high,
        "digits": chart.digits,
    }
    if chart.zero:
        drawing["zero"] = chart.zero
    return drawing


def _timeline(chart: Timeline) -> Json:
    """Return the axis of a timeline and the spans of each name."""
    return {"x": _axis(chart.x), "rows": [_spans(name, spans) for name, spans in chart.rows]}


def _axis(axis: Axis) -> Json:
    """Return label and unit of an axis, and of its other fields those that are set."""
    drawing: Json = {"label": clean(axis.label), "unit": clean(axis.unit)}
    options = {
        "low": _short(axis.low),
        "high": _short(axis.high),
        "log": axis.log,
        "can_log": axis.can_log,
        "digits": axis.digits,
        "share": axis.is_share,
        "time": axis.is_time,
    }
    for name, value in options.items():
        is_set = value is not None and value is not False
        if is_set:
            drawing[name] = value
    return drawing


def _series(series: Series, x_axis: Axis) -> Json:
    """Return a series with the coordinates of its points in lists of their own."""
    shown = downsample(series)
    drawing: Json = {
        "name": clean(series.name),
        "role": series.role,
        "x": [_short_x(x, x_axis) for x, _ in shown.points],
        "y": [_short(y) for _, y in shown.points],
    }
    if shown.band:
        drawing["low"] = [_short(low) for low, _ in shown.band]
        drawing["high"] = [_short(high) for _, high in shown.band]
    if series.dashed:
        drawing["dashed"] = True
    return drawing


def _short_x(x: float, axis: Axis) -> float | None:
    """Return an x rounded to six digits, or to whole seconds: six digits of those since 1970 are a quarter of an hour.

    None for what JSON has no number for.
    """
    if axis.is_time:
        return round(x)
    return _short(x)


def _mark(mark: Mark) -> list[float | None]:
    """Return the value of a mark and the ends of its interval."""
    return [_short(mark.value), _short(mark.low), _short(mark.high)]


def _spans(name: str, spans: Sequence[Span]) -> Json:
    """Return the spans of one name of a timeline."""
    drawn_spans = []
    for span in spans:
        text = clean(span.text)
        drawn_spans.append({"begin": _short(span.begin), "end": _short(span.end), "role": span.role, "text": text})
    return {"name": clean(name), "spans": drawn_spans}


def _short(value: float | None) -> float | None:
    """Return a number rounded to six digits, as an integer where it is whole; None for what JSON has no number for."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    is_whole = rounded == int(rounded) and abs(rounded) < 1e15  # beyond, digits would be made up
    if is_whole:
        return int(rounded)
    return rounded


# --- the table of a chart --------------------------------------------------------------------------------------------


def _table(chart: Chart) -> Table:
    """Return the chart's numbers as text; of more than MOST_TABLE_ROWS rows, evenly spread ones."""
    columns = _names_of_columns(chart)
    rows = list(_all_rows(chart))
    if len(rows) > MOST_TABLE_ROWS:
        last = MOST_TABLE_ROWS - 1
        rows = [rows[index * (len(rows) - 1) // last] for index in range(MOST_TABLE_ROWS)]
    return columns, rows


def _names_of_columns(chart: Chart) -> tuple[str, ...]:
    """Return the heads of the columns that `_all_rows` fills."""
    if isinstance(chart, Scatter):
        return "series", clean(chart.x.text), clean(chart.y.text)
    if isinstance(chart, Lines | Bars):
        return clean(chart.x.text), *_clean_names(chart.series)
    if isinstance(chart, Rows):
        columns = ("name", *_clean_names(chart.keys))
        if _has_notes(chart):
            return *columns, "note"
        return columns
    if isinstance(chart, Matrix):
        return f"{clean(chart.row_label)} \\ {clean(chart.column_label)}", *map(clean, chart.columns)
    unit = clean(chart.x.unit)
    return "name", "what", f"begin ({unit})", f"end ({unit})"


def _clean_names(parts: Iterable[Series | Key]) -> list[str]:
    """Return the names of series or keys as they are shown."""
    return [clean(part.name) for part in parts]


def _has_notes(chart: Rows) -> bool:
    """Return whether a row of the chart has a note."""
    return any(row.note for row in chart.rows)


def _all_rows(chart: Chart) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a chart's table, in the order of the chart."""
    if isinstance(chart, Scatter):
        yield from _rows_of_points(chart)
    elif isinstance(chart, Lines | Bars):
        yield from _rows_by_x(chart)
    elif isinstance(chart, Rows):
        yield from _rows_of_names(chart)
    elif isinstance(chart, Matrix):
        for name, line in zip(chart.rows, chart.values, strict=True):
            yield clean(name), *map(number, line)
    else:
        yield from _rows_of_spans(chart)


def _rows_of_points(chart: Scatter) -> Iterator[tuple[str, ...]]:
    """Yield one row for each point of each cloud."""
    for series in chart.series:
        for x, y in series.points:
            yield clean(series.name), number(x), number(y)


def _rows_by_x(chart: Lines | Bars) -> Iterator[tuple[str, ...]]:
    """Yield one row for each x that a series has, with the value of every series there."""
    # 1. What each series has at which x: its value, and the band around it where the series has one.
    columns = []
    every_x = set[float]()
    for series in chart.series:
        values_by_x = dict(series.points)
        bands_by_x = dict(zip(values_by_x, series.band, strict=bool(series.band)))
        columns.append((values_by_x, bands_by_x))
        every_x.update(values_by_x)
    # 2. One row for each x; a series without a point there has a dash.
    for x in sorted(every_x):
        cells = [_with_band(values_by_x.get(x), bands_by_x.get(x), chart.y) for values_by_x, bands_by_x in columns]
        yield chart.x.shown(x), *cells


def _rows_of_names(chart: Rows) -> Iterator[tuple[str, ...]]:
    """Yield one row for each name, with its marks, and its note where any row has one."""
    has_notes = _has_notes(chart)
    for row in chart.rows:
        cells = [_with_interval(row.marks.get(key.name), chart.value) for key in chart.keys]
        if has_notes:
            cells.append(clean(row.note, 200))
        yield clean(row.name), *cells


def _rows_of_spans(chart: Timeline) -> Iterator[tuple[str, ...]]:
    """Yield one row for each span of each name."""
    for name, spans in chart.rows:
        for span in spans:
            end = "going on"
            if span.end is not None:
                end = number(span.end)
            yield clean(name), clean(span.text), number(span.begin), end


def _with_band(value: float | None, band: tuple[float, float] | None, axis: Axis) -> str:
    """Return a value as text, with the interval around it in brackets."""
    if band is None:
        return axis.shown(value)
    low, high = band
    return f"{axis.shown(value)} ({axis.shown(low)} to {axis.shown(high)})"


def _with_interval(mark: Mark | None, axis: Axis) -> str:
    """Return a mark as text, with its interval in brackets; a dash for None."""
    if mark is None:
        return axis.shown(None)
    if mark.low is None or mark.high is None:
        return axis.shown(mark.value)
    return _with_band(mark.value, (mark.low, mark.high), axis)
