"""Charts as SVG, PNG or PDF for documents: those of `charts`, drawn by matplotlib.

A picture has one of two forms. `PAGE` is the pages' light theme at their size, with titles. `COLUMN` is for print: one
column wide, 8 point, without titles (the caption says them), fonts embedded as TrueType. Its colours are Okabe and
Ito's but for yellow, which is too pale for a line on white; a test computes how far apart they are for readers with
deuteranopia or protanopia. Its lines differ in markers and dashes, too.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from edge_agent.core.errors import UsageError

from .charts import (
    CLASSES,
    MOST_NAME,
    THEMES,
    Bars,
    Chart,
    Curves,
    Key,
    Mark,
    Matrix,
    Rows,
    Scatter,
    Series,
    Timeline,
    clean,
    number,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Format = Literal["svg", "png", "pdf"]
FORMATS: tuple[Format, ...] = get_args(Format)

_COLOURS = THEMES["light"]
_MARKERS = {"dot": "o", "square": "s", "diamond": "D"}

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of the form for print, by Okabe and Ito (2008), without yellow."""

_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
"""Markers of lines in the form for print: one for each of the roles ``c0`` to ``c9``."""

_PRINT_ROLES = {"local": 2, "global": 1, "personal": 0, "plain": 6, "up": 0, "down": 5, "good": 2, "bad": 1}
"""Role -> the index of its colour in `OKABE_ITO`; the roles ``c0`` to ``c9`` have their own number's."""

_MARKED_PER_LINE = 8
"""About how many points of a line have a marker in the form for print."""


def _print_colours() -> dict[str, str]:
    """Return the colour of each role in the form for print; those without a role are the pages'."""
    classes = {f"c{number}": OKABE_ITO[number % len(OKABE_ITO)] for number in range(CLASSES)}
    roles = {role: OKABE_ITO[index] for role, index in _PRINT_ROLES.items()}
    return {**_COLOURS, "ink": "#000000", "soft": "#333333", "rule": "#d0d0d0", "sheet": "#ffffff", **classes, **roles}


@dataclass(frozen=True)
class Form:
    """How large pictures are, and in which sizes and colours they are drawn."""

    colours: Mapping[str, str]
    """Role -> colour."""

    panel_width: float
    """In inches, as all lengths."""

    panel_height: float
    row_height: float
    """The height of a row of marks or bars."""

    font_pt: float
    legend_pt: float
    legend_below: float
    """How far the legend stands below a plot, as a share of the plot's height: ticks and label need that room."""

    legend_chars: int
    """The characters that stand beside each other in a legend, with some room."""

    label_chars: int
    """The most characters of the label of an axis, and of a name in a legend."""

    name_chars: int
    """The most characters of the name of a row."""

    line_pt: float
    mark_pt2: float
    """The area of a dot in a row, in square points."""

    hollow_pt2: float
    """The area of a hollow mark in a row, which is larger, so that marks at the same value stay visible."""

    has_titles: bool
    is_print: bool
    """Whether lines differ in markers and dashes, and intervals are whiskers."""


_HANDLE_CHARS = 6
"""The characters whose room a line or a mark takes in front of a name in a legend, with the gap to the next one."""

PAGE = Form(
    colours=_COLOURS,
    panel_width=7.2,
    panel_height=4.3,
    row_height=0.3,
    font_pt=9.5,
    legend_pt=8.5,
    legend_below=0.14,
    legend_chars=3 * (MOST_NAME + _HANDLE_CHARS),
    label_chars=MOST_NAME,
    name_chars=30,
    line_pt=1.8,
    mark_pt2=26,
    hollow_pt2=70,
    has_titles=True,
    is_print=False,
)
"""The pages' light theme."""

COLUMN = Form(
    colours=_print_colours(),
    panel_width=3.3,
    panel_height=2.2,
    row_height=0.19,
    font_pt=8.0,
    legend_pt=7.0,
    legend_below=0.24,
    legend_chars=60,
    label_chars=34,
    name_chars=22,
    line_pt=1.1,
    mark_pt2=14,
    hollow_pt2=26,
    has_titles=False,
    is_print=True,
)
"""One column of a paper: 3.3 inches (84 mm)."""


_BAR_WIDTH = 0.78
"""The width of all bars at one x together; the distance between two x is 1."""

_MOST_MARKED = 40
"""The most points of a line that are marked."""

_MOST_NUMBERED = 14
"""The most columns of a matrix whose cells have numbers."""

_MOST_NAMED = 60
"""The most columns, and the most rows, of a matrix that have names."""


def format_of(suffix: str) -> Format:
    """Return the format of a picture file with this suffix.

    Raises:
        UsageError: There is no such format.
    """
    name = suffix.lstrip(".").lower()
    for kind in FORMATS:
        if name == kind:
            return kind
    description = f"'{suffix}'" if suffix else "a name without a suffix"
    raise UsageError(f"{description}: expected one of {', '.join('.' + kind for kind in FORMATS)}")


def picture(charts: Sequence[Chart], kind: Format = "svg", *, title: str = "", form: Form = PAGE) -> bytes:
    """Return the bytes of a picture file: the charts side by side, each under its title, all under ``title``.

    The same charts give the same bytes. An SVG has the charts' summaries for screen readers, and keeps text as text.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_style(form)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # names in any script; an SVG keeps them
        # 1. The charts side by side: as wide as all of them, as high as the highest.
        sizes = [_size(form, chart) for chart in charts]
        widths = [size.width for size in sizes]
        width = sum(widths)
        figure = Figure(figsize=(width, max(size.height for size in sizes)), layout="constrained")
        panels = figure.subplots(1, len(charts), squeeze=False, width_ratios=widths)[0]
        for panel, chart in zip(panels, charts, strict=True):
            _draw(form, panel, chart)
        # 2. The title's font is larger than a panel's, and a line that is wider than the picture is cut off.
        if title:
            chars_per_line = int(_TITLE_CHARS_PER_INCH * width * _PANEL_TITLE_SIZE / _TITLE_SIZE)
            lines = textwrap.fill(clean(title, 200), chars_per_line)
            figure.suptitle(lines, x=0.01, ha="left", fontsize=_TITLE_SIZE, fontweight="bold")
        # 3. The file: the layout is found, and everything drawn, while it is written.
        content = _write(figure, kind)
    if kind != "svg":
        return content
    return _with_description(content, clean(" ".join(chart.summary for chart in charts), 4000))


def _write(figure: Figure, kind: Format) -> bytes:
    """Return a file of the figure without the date or the software's version, which would differ from run to run."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=150, metadata={_VOLATILE_METADATA[kind]: None})
    return file.getvalue()


_VOLATILE_METADATA: Mapping[Format, str] = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}
"""Format -> what matplotlib writes into a file that is not the same in each."""


def _style(form: Form) -> Any:
    """Return matplotlib's settings for a form."""
    ink = form.colours["ink"]
    soft = form.colours["soft"]
    rule = form.colours["rule"]
    return {
        "svg.hashsalt": "headwater",
        "svg.fonttype": "none",
        "pdf.fonttype": 42,  # TrueType: journals refuse fonts of type 3
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": form.font_pt,
        "text.color": ink,
        "axes.labelcolor": soft,
        "xtick.color": soft,
        "ytick.color": soft,
        "axes.edgecolor": rule,
        "axes.facecolor": form.colours["sheet"],
        "figure.facecolor": form.colours["sheet"],
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
        "legend.fontsize": form.legend_pt,
        "lines.linewidth": form.line_pt,
    }


_TITLE_CHARS_PER_INCH = 9.5
"""The characters of a panel's title in an inch of its font, with some room: a longer line would squeeze the panel."""

_PANEL_TITLE_SIZE = 11
"""The size of a panel's title, in points."""

_TITLE_SIZE = 12
"""The size of the title above all panels, in points."""


class _Size(NamedTuple):
    """Width and height of a panel in inches."""

    width: float
    height: float


def _size(form: Form, chart: Chart) -> _Size:
    """Return how large a chart is drawn; names and numbers of rows and cells have to fit."""
    if isinstance(chart, Rows):
        legend_rows = math.ceil(len(chart.keys) / _legend_columns(form, chart.keys))
        return _Size(form.panel_width, (4 + legend_rows + len(chart.rows)) * form.row_height)
    if isinstance(chart, Timeline):
        return _Size(form.panel_width, (5 + len(chart.rows)) * form.row_height)
    if isinstance(chart, Matrix):
        cell = 0.46 if len(chart.columns) <= _MOST_NUMBERED else 0.2
        width = 1.8 + cell * len(chart.columns)
        height = 1.7 + min(cell, 0.32) * len(chart.rows)
        return _Size(min(18.0, max(4.2, width)), min(18.0, max(2.8, height)))
    if isinstance(chart, Scatter):
        return _Size(form.panel_width, form.panel_width)
    if form.is_print:  # the legend stands below the plot
        legend_rows = math.ceil(len(chart.series) / _legend_columns(form, chart.series))
        return _Size(form.panel_width, form.panel_height + legend_rows * form.row_height)
    return _Size(form.panel_width, form.panel_height)


_LEGEND_COLUMNS = 3
"""The most columns of a legend."""


def _legend_columns(form: Form, entries: Sequence[Series | Key]) -> int:
    """Return how many columns a legend has, so that it is not wider than the picture."""
    longest = max((min(len(entry.name), form.label_chars) for entry in entries), default=0)
    fitting = form.legend_chars // (longest + _HANDLE_CHARS)
    return max(1, min(_LEGEND_COLUMNS, len(entries), fitting))


def _with_description(content: bytes, text: str) -> bytes:
    """Return the SVG with its summary for readers who cannot see it."""
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


def _draw(form: Form, panel: Axes, chart: Chart) -> None:
    """Draw a chart into a panel, under its title where the form has titles."""
    if form.has_titles:
        title = textwrap.fill(clean(chart.title, 200), int(_TITLE_CHARS_PER_INCH * _size(form, chart).width))
        panel.set_title(title, pad=10)
    if isinstance(chart, Rows):
        _rows(form, panel, chart)
    elif isinstance(chart, Matrix):
        _matrix(form, panel, chart)
    elif isinstance(chart, Timeline):
        _timeline(form, panel, chart)
    else:
        _curves(form, panel, chart)


def _curves(form: Form, panel: Axes, chart: Curves) -> None:
    """Draw lines, bars or a cloud with axes and legend."""
    if isinstance(chart, Bars):
        _bars(form, panel, chart)
        _scale(form, panel, chart)
        _mark_cut_bars(form, panel, chart)
    elif isinstance(chart, Scatter):
        _cloud(form, panel, chart)
        _scale(form, panel, chart)
        if chart.bare:
            panel.tick_params(labelbottom=False, labelleft=False)
    else:
        for series in chart.series:
            _line(form, panel, series)
        _scale(form, panel, chart)
    if chart.series:
        columns = _legend_columns(form, chart.series)
        panel.legend(loc="upper left", bbox_to_anchor=(0, -form.legend_below), ncols=columns, borderaxespad=0)


def _legend_name(form: Form, entry: Series | Key) -> str:
    """Return the name of a series or a key as a legend has room for it."""
    return clean(entry.name, form.label_chars)


@dataclass(frozen=True)
class _Coordinates:
    """The coordinates of those points of a series that have a value."""

    xs: list[float]
    ys: list[float]

    @classmethod
    def from_series(cls, series: Series) -> _Coordinates:
        """Return the coordinates of a series' points; those without a value are left out."""
        drawn = series.drawn_points
        return cls([x for x, _ in drawn], [y for _, y in drawn])


def _bars(form: Form, panel: Axes, chart: Bars) -> None:
    """Draw the series' bars beside each other, or on top of each other where they are stacked."""
    if chart.stacked:
        _stack_bars(form, panel, chart)
        return
    width = _BAR_WIDTH / len(chart.series)
    for index, series in enumerate(chart.series):
        points = _Coordinates.from_series(series)
        shift = _shift_from_middle(index, len(chart.series), width)
        middles = [x + shift for x in points.xs]
        panel.bar(middles, points.ys, width, color=form.colours[series.role], label=_legend_name(form, series))


def _stack_bars(form: Form, panel: Axes, chart: Bars) -> None:
    """Draw the bars of each series on top of those of the series before."""
    tops: dict[float, float] = {}  # x -> where the next series begins
    for series in chart.series:
        points = _Coordinates.from_series(series)
        bottoms = [tops.get(x, 0.0) for x in points.xs]
        panel.bar(
            points.xs,
            points.ys,
            _BAR_WIDTH,
            bottoms,
            color=form.colours[series.role],
            label=_legend_name(form, series),
        )
        for x, bottom, y in zip(points.xs, bottoms, points.ys, strict=True):
            tops[x] = bottom + y


def _shift_from_middle(index: int, count: int, width: float) -> float:
    """Return how far the bar at ``index`` of ``count`` bars of a width, side by side, is from the middle of them."""
    return (index - (count - 1) / 2) * width


def _cloud(form: Form, panel: Axes, chart: Scatter) -> None:
    """Draw each series as points of a shape of its own, as far as there are shapes."""
    shapes = list(_MARKERS.values())
    for index, series in enumerate(chart.series):
        points = _Coordinates.from_series(series)
        shape = shapes[index % len(shapes)]
        colour = form.colours[series.role]
        panel.scatter(
            points.xs,
            points.ys,
            s=22,
            marker=shape,
            linewidths=0,
            color=colour,
            label=_legend_name(form, series),
        )


def _line(form: Form, panel: Axes, series: Series) -> None:
    """Draw a line with its band; the points of a line of few points are marked, but for those of a dashed one."""
    points = _Coordinates.from_series(series)
    colour = form.colours[series.role]
    look = _LineLook("-")
    if series.dashed:
        look = _LineLook("--")
    elif form.is_print:
        look = _print_look(series.role, len(points.xs))
    elif len(points.xs) <= _MOST_MARKED:
        look = _LineLook("-", "o")
    label = _legend_name(form, series)
    panel.plot(points.xs, points.ys, color=colour, label=label, markersize=3.5, **look._asdict())
    if not series.band:
        return
    xs = [x for x, _ in series.points]
    lows = [low for low, _ in series.band]
    highs = [high for _, high in series.band]
    panel.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)


class _LineLook(NamedTuple):
    """What tells a line from others besides its colour, as matplotlib names it."""

    linestyle: str
    marker: str | None = None
    markevery: int = 1
    """Every which point has a marker."""


def _print_look(role: str, count: int) -> _LineLook:
    """Return the look of a line of ``count`` points in the form for print.

    Ten roles have a marker of their own each; those that have to share a colour differ in dashes, too.
    """
    number = _PRINT_ROLES.get(role)
    if number is None:
        number = int(role.removeprefix("c"))
    style = "-" if number < len(OKABE_ITO) else "-."
    every = max(1, round(count / _MARKED_PER_LINE))
    return _LineLook(style, _SHAPES[number], every)


def _mark_cut_bars(form: Form, panel: Axes, chart: Bars) -> None:
    """Break the bars that reach beyond the plot, and write how long they are."""
    for x, value in chart.cut():
        top = chart.y.high or 0.0
        for height in (0.86 * top, 0.9 * top):
            panel.plot([x - 0.45, x + 0.45], [height - 0.02 * top, height + 0.02 * top], color=form.colours["sheet"])
        label = f"{number(value)} {chart.y.unit}".rstrip()
        panel.annotate(label, (x + 0.42, top), (2, -2), textcoords="offset points", va="top", annotation_clip=False)


def _scale(form: Form, panel: Axes, chart: Curves) -> None:
    """Label the axes, and set their ends and scales."""
    from matplotlib.ticker import MaxNLocator

    x = chart.x
    y = chart.y
    if _has_whole_xs(chart.series) and not x.log:  # there is no round 1.2
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set(xlabel=clean(x.text, form.label_chars), ylabel=clean(y.text, form.label_chars))
    panel.set_xlim(x.low, x.high)
    panel.set_ylim(y.low, y.high)
    if y.is_share:
        panel.yaxis.set_major_formatter(_in_percent)
    if y.log:
        panel.set_yscale("log")
    if x.log:
        panel.set_xscale("log")


def _has_whole_xs(series: Sequence[Series]) -> bool:
    """Return whether the x of every point is a whole number, as that of a round is."""
    for line in series:
        for x, _ in line.points:
            if not float(x).is_integer():
                return False
    return True


def _in_percent(value: float, _position: float) -> str:
    """Return a share (0..1) as the text of a tick on an axis of percentages."""
    return f"{100 * value:.4g}"


def _rows(form: Form, panel: Axes, chart: Rows) -> None:
    """Draw one line of marks or bars for each name, with axis and legend."""
    # 1. The marks or bars of one key after another, in the order of the legend.
    if chart.style == "bars":
        for order, key in enumerate(chart.keys):
            _bars_of_key(form, panel, _marks_by_row(chart, key), key, order, len(chart.keys))
    else:
        _join_marks(form, panel, chart)
        for order, key in enumerate(chart.keys):
            _marks_of_key(form, panel, _marks_by_row(chart, key), key, layer=3 + order)
    # 2. The names at the left, from top to bottom, and the axis of the values below.
    row_count = len(chart.rows)
    panel.set_yticks(list(range(row_count)), [clean(row.name, form.name_chars) for row in chart.rows])
    panel.set(xlabel=clean(chart.value.text, form.label_chars), ylim=(row_count - 0.4, -0.6))
    panel.set_xlim(chart.value.low, chart.value.high)
    left, right = panel.get_xlim()
    if left < 0 < right:  # differences: whether an interval holds 0 is what readers look for
        panel.axvline(0, color=form.colours["soft"], linewidth=0.8, zorder=1)
    if chart.value.is_share:
        panel.xaxis.set_major_formatter(_in_percent)
    panel.grid(visible=False, axis="y")
    # 3. The legend below the axis: as far below as in a panel of any height.
    if len(chart.keys) > 1:
        below = -0.6 / (0.3 * row_count + 0.6)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, below), ncols=_legend_columns(form, chart.keys))


def _marks_by_row(chart: Rows, key: Key) -> dict[int, Mark]:
    """Return the number of a row from the top -> its mark of a key, for the rows that have one."""
    return {y: row.marks[key.name] for y, row in enumerate(chart.rows) if key.name in row.marks}


def _bars_of_key(form: Form, panel: Axes, marks: Mapping[int, Mark], key: Key, order: int, key_count: int) -> None:
    """Draw a horizontal bar for each mark of a key.

    Args:
        form: Sizes and colours.
        panel: Where to draw.
        marks: Row -> its mark.
        key: What the marks are.
        order: The place of the key among all ``key_count``, whose bars stand side by side in a row.
        key_count: The number of keys.
    """
    height = 0.7 / key_count
    shift = _shift_from_middle(order, key_count, height)
    middles = [y + shift for y in marks]
    lengths = [mark.value for mark in marks.values()]
    panel.barh(middles, lengths, height, color=form.colours[key.role], label=_legend_name(form, key))


def _join_marks(form: Form, panel: Axes, chart: Rows) -> None:
    """Draw a line below the marks of each row that has several."""
    for y, row in enumerate(chart.rows):
        values = [mark.value for mark in row.marks.values()]
        if len(values) > 1:
            panel.plot([min(values), max(values)], [y, y], color=form.colours["rule"], linewidth=form.line_pt, zorder=1)


def _marks_of_key(form: Form, panel: Axes, marks: Mapping[int, Mark], key: Key, *, layer: int) -> None:
    """Draw the marks of a key over their intervals.

    Args:
        form: Sizes and colours.
        panel: Where to draw.
        marks: Row -> its mark.
        key: What the marks are.
        layer: The layer of the marks; a higher one is drawn over a lower one.
    """
    colour = form.colours[key.role]
    band: dict[str, Any] = {"alpha": 0.22, "linewidth": 6, "zorder": 2}
    if form.is_print:
        band = {"marker": "|", "markersize": 4, "linewidth": form.line_pt, "zorder": 2}
    for y, mark in marks.items():
        if mark.low is not None and mark.high is not None:
            panel.plot([mark.low, mark.high], [y, y], color=colour, **band)
    # Marks at the same value stay visible: the dot lies within the others, which are larger and hollow.
    look: dict[str, Any] = {"color": colour, "s": form.mark_pt2}
    if key.shape != "dot":
        look = {"edgecolors": colour, "facecolors": "none", "linewidths": form.line_pt, "s": form.hollow_pt2}
    values = [mark.value for mark in marks.values()]
    panel.scatter(values, list(marks), marker=_MARKERS[key.shape], zorder=layer, label=_legend_name(form, key), **look)


def _matrix(form: Form, panel: Axes, chart: Matrix) -> None:
    """Draw the cells of a matrix, with numbers and names where there are not too many."""
    from matplotlib.colors import LinearSegmentedColormap

    # 1. The cells.
    colours = LinearSegmentedColormap.from_list("headwater", [form.colours["sheet"], form.colours["personal"]])
    shades = [_shades(chart, line) for line in chart.values]
    image = panel.imshow(shades, aspect="auto", cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest")
    # 2. Their numbers, and the names of rows and columns, as far as these have room.
    if len(chart.columns) <= _MOST_NUMBERED:
        _write_numbers(panel, chart)
    else:
        _scale_of_shades(panel, chart, image)
    if len(chart.columns) <= _MOST_NAMED:
        panel.set_xticks(range(len(chart.columns)), [clean(name, 20) for name in chart.columns], rotation=90)
    if len(chart.rows) <= _MOST_NAMED:
        panel.set_yticks(range(len(chart.rows)), [clean(name, 20) for name in chart.rows], rotation=0)
    panel.set(xlabel=clean(chart.column_label), ylabel=clean(chart.row_label))
    panel.grid(visible=False)


def _scale_of_shades(panel: Axes, chart: Matrix, image: AxesImage) -> None:
    """Draw a bar beside the cells with the values of a pale, a middle and a full one, in place of their numbers."""
    deepest = float(_COLOURS["depth"].rstrip("%")) / 100
    bar = panel.figure.colorbar(image, ax=panel, fraction=0.03, pad=0.01)
    bar.ax.set_ylim(0.0, deepest)
    middle = (chart.low + chart.high) / 2
    values = (chart.low, middle, chart.high)
    bar.set_ticks([0.0, deepest / 2, deepest], labels=[number(value) for value in values])
    bar.outline.set_visible(False)


def _write_numbers(panel: Axes, chart: Matrix) -> None:
    """Write into each cell of a matrix its number, or a dash where it is not defined."""
    for row, line in enumerate(chart.values):
        for column, value in enumerate(line):
            text = "–" if value is None else chart.cell(value)
            panel.text(column, row, text, ha="center", va="center", fontsize=8)


def _shades(chart: Matrix, line: Sequence[float | None]) -> list[float]:
    """Return how full each cell of a row is, 0..1."""
    return [_shade(chart, value) for value in line]


def _shade(chart: Matrix, value: float | None) -> float:
    """Return how full a cell is, 0..1; at most as full as the theme allows, so that its number can be read."""
    if value is None:
        return 0.0
    span = chart.high - chart.low
    if span == 0:  # all cells have one value, and are pale
        span = 1.0
    deepest = float(_COLOURS["depth"].rstrip("%")) / 100
    return deepest * min(1.0, max(0.0, (value - chart.low) / span))


def _timeline(form: Form, panel: Axes, chart: Timeline) -> None:
    """Draw one bar for each span; those that have not ended reach to now."""
    now = _end_of_time(chart)
    for y, (_, spans) in enumerate(chart.rows):
        for span in spans:
            end = now if span.end is None else span.end
            panel.barh(y, end - span.begin, 0.6, span.begin, color=form.colours[span.role])
    panel.set_yticks(range(len(chart.rows)), [clean(name, 30) for name, _ in chart.rows])
    panel.set(xlabel=clean(chart.x.text), ylim=(len(chart.rows) - 0.4, -0.6))
    panel.grid(visible=False, axis="y")


def _end_of_time(chart: Timeline) -> float:
    """Return where spans end that have not ended: at the end of the axis, or else with the last span that has ended."""
    if chart.x.high is not None:
        return chart.x.high
    ends = list[float]()
    for _, spans in chart.rows:
        ends += [span.end for span in spans if span.end is not None]
    return max(ends, default=1.0)
