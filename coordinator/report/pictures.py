"""Charts as SVG, PNG or PDF for documents: those of `charts`, drawn by matplotlib in the pages' light theme."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal, get_args

from edge_agent.core.errors import UsageError

from .charts import THEMES, Bars, Chart, Curves, Matrix, Rows, Scatter, Series, Timeline, clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Format = Literal["svg", "png", "pdf"]
FORMATS: tuple[Format, ...] = get_args(Format)

_COLOURS = THEMES["light"]
_MARKERS = {"dot": "o", "square": "s", "diamond": "D"}
_PANEL_WIDTH = 7.2
_PANEL_HEIGHT = 4.3
_MOST_NUMBERED, _MOST_NAMED = 14, 60
"""Columns of a matrix up to which cells have numbers, and names."""


def format_of(suffix: str) -> Format:
    """The format of a picture file with this suffix.

    Raises:
        UsageError: no such format.
    """
    kind = suffix.lstrip(".").lower()
    for known in FORMATS:
        if kind == known:
            return known
    result = f"'{suffix}'" if suffix else "a name without a suffix"
    raise UsageError(f"{result}: expected one of {', '.join('.' + one for one in FORMATS)}")


def picture(charts: Sequence[Chart], kind: Format = "svg", *, title: str = "") -> bytes:
    """The bytes of a picture file: the charts side by side, each under its title, all under ``title``.

    The same charts give the same bytes. An SVG says its charts' summaries to screen readers, and keeps text as text.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_style()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # names in any script; an SVG keeps them
        sizes = [_size(chart) for chart in charts]
        figure = Figure(
            figsize=(sum(width for width, _ in sizes), max(high for _, high in sizes)), layout="constrained"
        )
        panels = figure.subplots(1, len(charts), squeeze=False, width_ratios=[width for width, _ in sizes])[0]
        for panel, chart in zip(panels, charts, strict=True):
            _draw(panel, chart)
        if title:
            # The title's font is larger than a panel's, and a line that is wider than the picture is cut off.
            wide = int(_TITLE_CHARS_PER_INCH * sum(width for width, _ in sizes) * _PANEL_TITLE_SIZE / _TITLE_SIZE)
            lines = textwrap.fill(clean(title, 200), wide)
            figure.suptitle(lines, x=0.01, ha="left", fontsize=_TITLE_SIZE, fontweight="bold")
        out = io.BytesIO()
        dates = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}  # nothing that differs from run to run
        figure.savefig(out, format=kind, dpi=150, metadata={dates[kind]: None})
    content = out.getvalue()
    return content if kind != "svg" else _described(content, clean(" ".join(chart.summary for chart in charts), 4000))


def _style() -> Any:
    ink, soft, rule = (_COLOURS[name] for name in ("ink", "soft", "rule"))
    return {
        "svg.hashsalt": "headwater",
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 9.5,
        "text.color": ink,
        "axes.labelcolor": soft,
        "xtick.color": soft,
        "ytick.color": soft,
        "axes.edgecolor": rule,
        "axes.facecolor": _COLOURS["sheet"],
        "figure.facecolor": _COLOURS["sheet"],
        "axes.titlesize": _PANEL_TITLE_SIZE,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": rule,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.spines.bottom": False,
        "xtick.bottom": False,
        "ytick.left": False,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "lines.linewidth": 1.8,
    }


_TITLE_CHARS_PER_INCH = 9.5
"""The characters of a panel's title in an inch of its font, with some room: a longer line would squeeze the panel."""

_PANEL_TITLE_SIZE = 11
"""The size of a panel's title, in points."""

_TITLE_SIZE = 12
"""The size of the title above all panels, in points."""


def _size(chart: Chart) -> tuple[float, float]:
    if isinstance(chart, Rows | Timeline):
        return _PANEL_WIDTH, 1.5 + 0.3 * len(chart.rows)
    if isinstance(chart, Matrix):
        cell = 0.46 if len(chart.columns) <= _MOST_NUMBERED else 0.2
        sides = (1.8 + cell * len(chart.columns), 1.7 + min(cell, 0.32) * len(chart.rows))
        return min(18.0, max(4.2, sides[0])), min(18.0, max(2.8, sides[1]))
    return _PANEL_WIDTH, _PANEL_WIDTH if isinstance(chart, Scatter) else _PANEL_HEIGHT


def _described(content: bytes, text: str) -> bytes:
    """The SVG with its summary for readers who cannot see it."""
    drawing = content[content.index(b"<svg ") :]  # without the address of a document type
    end = drawing.index(b">")
    summary = escape(text).encode()
    return (
        drawing[:end]
        + b' role="img" aria-label="'
        + summary
        + b'"><title>'
        + summary
        + b"</title>"
        + drawing[end + 1 :]
    )


def _draw(panel: Axes, chart: Chart) -> None:
    title = textwrap.fill(clean(chart.title, 200), int(_TITLE_CHARS_PER_INCH * _size(chart)[0]))
    panel.set_title(title, pad=10)
    if isinstance(chart, Rows):
        _rows(panel, chart)
    elif isinstance(chart, Matrix):
        _matrix(panel, chart)
    elif isinstance(chart, Timeline):
        _timeline(panel, chart)
    else:
        _curves(panel, chart)


def _curves(panel: Axes, chart: Curves) -> None:
    below: dict[float, float] = {}
    for index, one in enumerate(chart.series):
        known = [(x, y) for x, y in one.points if y is not None]
        xs = [x for x, _ in known]
        ys = [y for _, y in known]
        look: dict[str, Any] = {"color": _COLOURS[one.role], "label": clean(one.name)}
        if isinstance(chart, Scatter):
            panel.scatter(xs, ys, s=22, marker=list(_MARKERS.values())[index % 3], linewidths=0, **look)
        elif isinstance(chart, Bars):
            width = 0.78 if chart.stacked else 0.78 / len(chart.series)
            shift = 0.0 if chart.stacked else (index - (len(chart.series) - 1) / 2) * width
            bottoms = [below.get(x, 0.0) if chart.stacked else 0.0 for x in xs]
            panel.bar([x + shift for x in xs], ys, width, bottoms, **look)
            below.update({x: bottom + y for x, y, bottom in zip(xs, ys, bottoms, strict=True)})
        else:
            _line(panel, one, xs, ys, look)
    _scale(panel, chart)
    if isinstance(chart, Bars):
        _mark_cut_bars(panel, chart)
    if isinstance(chart, Scatter) and chart.bare:
        panel.tick_params(labelbottom=False, labelleft=False)
    if chart.series:
        columns = min(3, len(chart.series))
        panel.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=columns, borderaxespad=0)


def _line(panel: Axes, one: Series, xs: list[float], ys: list[float], look: dict[str, Any]) -> None:
    marker = "o" if len(xs) <= 40 and not one.dashed else None
    panel.plot(xs, ys, linestyle="--" if one.dashed else "-", marker=marker, markersize=3.5, **look)
    if one.band:
        lows, highs = zip(*one.band, strict=True)
        panel.fill_between([x for x, _ in one.points], lows, highs, color=look["color"], alpha=0.15, linewidth=0)


def _mark_cut_bars(panel: Axes, chart: Bars) -> None:
    """Break the bars that reach beyond the plot, and write how long they are."""
    for x, value in chart.cut():
        top = chart.y.high or 0.0
        for height in (0.86 * top, 0.9 * top):
            panel.plot([x - 0.45, x + 0.45], [height - 0.02 * top, height + 0.02 * top], color=_COLOURS["sheet"])
        label = f"{number(value)} {chart.y.unit}".rstrip()
        panel.annotate(label, (x + 0.42, top), (2, -2), textcoords="offset points", va="top", annotation_clip=False)


def _scale(panel: Axes, chart: Curves) -> None:
    from matplotlib.ticker import MaxNLocator

    x = chart.x
    y = chart.y
    is_whole = all(float(point[0]).is_integer() for line in chart.series for point in line.points)
    if is_whole and not x.log:  # there is no round 1.2
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set(xlabel=clean(x.text), ylabel=clean(y.text))
    panel.set_xlim(x.low, x.high)
    panel.set_ylim(y.low, y.high)
    if y.is_share:
        panel.yaxis.set_major_formatter(_in_percent)
    if y.log:
        panel.set_yscale("log")
    if x.log:
        panel.set_xscale("log")


def _in_percent(value: float, _position: float) -> str:
    return f"{100 * value:.4g}"


def _rows(panel: Axes, chart: Rows) -> None:
    numbers = range(len(chart.rows))
    for y, row in zip(numbers, chart.rows, strict=True):
        values = [mark.value for mark in row.marks.values()]
        if chart.style == "marks" and len(values) > 1:
            panel.plot([min(values), max(values)], [y, y], color=_COLOURS["rule"], linewidth=2, zorder=1)
    for order, key in enumerate(chart.keys):
        known = [(y, row.marks[key.name]) for y, row in zip(numbers, chart.rows, strict=True) if key.name in row.marks]
        colour = _COLOURS[key.role]
        label = clean(key.name)
        if chart.style == "bars":
            height = 0.7 / len(chart.keys)
            shift = (order - (len(chart.keys) - 1) / 2) * height
            panel.barh(
                [y + shift for y, _ in known],
                [mark.value for _, mark in known],
                height,
                color=colour,
                label=label,
            )
            continue
        for y, mark in known:
            if mark.low is not None and mark.high is not None:
                panel.plot([mark.low, mark.high], [y, y], color=colour, alpha=0.22, linewidth=6, zorder=2)
        look: dict[str, Any] = {"color": colour}
        if key.shape != "dot":  # marks at the same value stay visible: the dot lies within the others
            look = {"edgecolors": colour, "facecolors": "none", "linewidths": 1.8}
        xs = [mark.value for _, mark in known]
        ys = [y for y, _ in known]
        size = 26 if key.shape == "dot" else 70
        panel.scatter(xs, ys, s=size, marker=_MARKERS[key.shape], zorder=3 + order, label=label, **look)
    panel.set_yticks(list(numbers), [clean(row.name, 30) for row in chart.rows])
    panel.set(xlabel=clean(chart.value.text), ylim=(len(chart.rows) - 0.4, -0.6))
    panel.set_xlim(chart.value.low, chart.value.high)
    if chart.value.is_share:
        panel.xaxis.set_major_formatter(_in_percent)
    panel.grid(visible=False, axis="y")
    if len(chart.keys) > 1:
        panel.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.6 / (0.3 * len(chart.rows) + 0.6)), ncols=len(chart.keys)
        )


def _matrix(panel: Axes, chart: Matrix) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("headwater", [_COLOURS["sheet"], _COLOURS["personal"]])
    span = (chart.high - chart.low) or 1.0
    share = float(_COLOURS["depth"].rstrip("%")) / 100
    shades = [
        [0.0 if value is None else share * min(1.0, max(0.0, (value - chart.low) / span)) for value in line]
        for line in chart.values
    ]
    panel.imshow(shades, aspect="auto", cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest")
    if len(chart.columns) <= _MOST_NUMBERED:
        for row, line in enumerate(chart.values):
            for column, value in enumerate(line):
                text = "–" if value is None else chart.cell(value)
                panel.text(column, row, text, ha="center", va="center", fontsize=8)
    for names, set_ticks, turn in ((chart.columns, panel.set_xticks, 90), (chart.rows, panel.set_yticks, 0)):
        if len(names) <= _MOST_NAMED:
            set_ticks(range(len(names)), [clean(name, 20) for name in names], rotation=turn)
    panel.set(xlabel=clean(chart.column_label), ylabel=clean(chart.row_label))
    panel.grid(visible=False)


def _timeline(panel: Axes, chart: Timeline) -> None:
    ends = [one.end for _, spans in chart.rows for one in spans if one.end is not None]
    now = chart.x.high if chart.x.high is not None else max(ends, default=1.0)
    for y, (_, spans) in enumerate(chart.rows):
        for one in spans:
            end = now if one.end is None else one.end
            panel.barh(y, end - one.begin, 0.6, one.begin, color=_COLOURS[one.role])
    panel.set_yticks(range(len(chart.rows)), [clean(name, 30) for name, _ in chart.rows])
    panel.set(xlabel=clean(chart.x.text), ylim=(len(chart.rows) - 0.4, -0.6))
    panel.grid(visible=False, axis="y")
