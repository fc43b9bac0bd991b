"""Tables of a comparison: one model of columns, cells and notes, written as text, Markdown, LaTeX, CSV and parquet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_agent.data.columns import import_pyarrow

from ...estimates import CONFIDENCE, Estimate
from ...report.charts import clean, percent
from ...text import about_time, counted, listed
from .records import ClientScore, Comparison, MethodRecord, SeedRun
from .row_statistics import (
    ComparisonStatistics,
    HurtRule,
    PairedDifference,
    RowStatistics,
    chance_of_distinguishing,
)

DASH = "–"
HUNDRED = 100.0

Value = float | int | str | None


@dataclass(frozen=True)
class Mark:
    """A sign behind a value, which a note below the table explains."""

    symbol: str
    latex: str
    """The sign in the math mode of LaTeX."""


SAME_AS_BEST = Mark("≈", r"\approx")
OTHER_FOOTING = Mark("†", r"\dagger")
SEEDS_MISSING = Mark("‡", r"\ddagger")
ONE_PAIR = Mark("§", r"\S")
MARKS = (SAME_AS_BEST, OTHER_FOOTING, SEEDS_MISSING, ONE_PAIR)


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str
    """Its name in CSV files, with the unit that values have there."""

    head: str
    unit: str = ""
    is_number: bool = True
    digits: int | None = None
    """The decimals that are shown; None: the value as it is."""

    factor: float = 1.0
    """What a value is multiplied by where it is shown, such as 100 for a share in per cent."""

    is_signed: bool = False
    """Whether positive values have a plus, as differences do."""

    least: float | None = None
    """Smaller values are shown as smaller than this one, as p values are; None: as they are."""

    has_spread: bool = False
    has_interval: bool = False

    @property
    def title(self) -> str:
        """The head with the unit."""
        if not self.unit:
            return self.head
        return f"{self.head} ({self.unit})"

    def format(self, value: Value) -> str:
        """Return a value as it is shown, without spread and marks; a dash for None."""
        if value is None:
            return DASH
        if isinstance(value, str):
            return clean(value, 200)
        if self.digits is None:
            return str(value)
        if self.least is not None and value < self.least:
            return f"< {self.least:.{self.digits}f}"
        shown = f"{value * self.factor:.{self.digits}f}"
        is_zero = float(shown) == 0
        if is_zero:
            return shown.removeprefix("-")  # a difference that rounds to 0 has no sign
        if self.is_signed:
            shown = f"{value * self.factor:+.{self.digits}f}"
        return shown.replace("-", "−")


@dataclass(frozen=True)
class Cell:
    """A value with what stands beside it, in the unit of CSV files."""

    value: Value
    spread: float | None = None
    low: float | None = None
    high: float | None = None
    is_best: bool = False
    marks: tuple[Mark, ...] = ()

    def text(self, column: Column) -> str:
        """Return the cell as plain text, without its marks."""
        text = column.format(self.value)
        if self.spread is not None:
            text += f" ± {column.format(self.spread).removeprefix('+')}"
        if self.low is not None and self.high is not None:
            text += f" [{column.format(self.low)}, {column.format(self.high)}]"
        return text

    @property
    def symbols(self) -> str:
        """The signs of its marks."""
        return "".join(mark.symbol for mark in self.marks)

    def marked_text(self, column: Column) -> str:
        """Return the cell as plain text with the signs of its marks."""
        return f"{self.text(column)} {self.symbols}".rstrip()


@dataclass(frozen=True)
class Note:
    """A sentence below a table; its mark is the sign that it explains."""

    text: str
    mark: Mark | None = None

    @property
    def marked_text(self) -> str:
        """The sentence behind its sign."""
        if self.mark is None:
            return self.text
        return f"{self.mark.symbol} {self.text}"


@dataclass(frozen=True)
class Table:
    """A table with its notes."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[Note, ...] = ()
    has_row_per_method: bool = True
    """Whether each row is of one method, which its column ``row`` names."""


# --- what the tables hold --------------------------------------------------------------------------------------------

_ROW = Column("row", "method", is_number=False)


def all_tables(comparison: Comparison, statistics: ComparisonStatistics) -> list[Table]:
    """Return every table that the comparison has figures for, that of the methods first."""
    tables = [methods_table(comparison, statistics), differences_table(statistics)]
    if comparison.trials or statistics.has_tuning:
        tables.append(tuning_table(comparison, statistics))
    if any(record.space for record in comparison.methods):
        tables.append(space_table(comparison))
    tables.append(costs_table(statistics))
    if any(record.footing for record in comparison.methods):
        tables.append(footing_table(statistics))
    if statistics.failures:
        tables.append(failures_table(statistics))
    return tables


def methods_table(comparison: Comparison, statistics: ComparisonStatistics) -> Table:
    """Return the table of accuracies, differences and clients that are hurt: a row for each method."""
    best_pooled = _highest(row.pooled_mean for row in statistics.rows if not row.missing_seeds)
    best_tenth = _highest(row.worst_tenth for row in statistics.rows if not row.missing_seeds)
    columns = (
        _ROW,
        Column("rank", "rank"),
        _share("client_mean", "client mean", has_spread=True),
        _share("pooled_mean", "pooled mean", has_spread=True),
        _share("worst_tenth", "worst tenth", has_spread=True),
        _difference("to_best", "to best"),
        _difference("to_baseline", f"to {baseline_name(comparison, statistics)}"),
        _share("hurt_share", "hurt", digits=0),
        _share("lower_share", "lower", digits=0),
        Column("seeds", "seeds"),
    )
    rows = []
    for row in statistics.rows:
        hurt = None
        lower = None
        if row.hurt is not None:
            hurt = row.hurt.hurt
            lower = row.hurt.lower
        rows.append(
            (
                Cell(row.name, marks=_marks_of_row(row)),
                Cell(row.rank),
                _estimate(row.client_mean, is_best=row.name == statistics.best, marks=_marks_of_mean(row)),
                _estimate(row.pooled_mean, is_best=_is_value(row.pooled_mean, best_pooled)),
                _estimate(row.worst_tenth, is_best=_is_value(row.worst_tenth, best_tenth)),
                _paired(row.to_best),
                _paired(row.to_baseline),
                Cell(hurt),
                Cell(lower),
                Cell(len(row.seeds)),
            )
        )
    notes = tuple(_notes_of_methods(comparison, statistics))
    return Table("methods", _title(comparison), columns, tuple(rows), notes)


def differences_table(statistics: ComparisonStatistics) -> Table:
    """Return the table of paired differences to the best row and to the baseline, with p values."""
    columns = (
        _ROW,
        Column("other", "compared with", is_number=False),
        Column("pairs", "pairs"),
        _difference("difference", "difference"),
        Column("standard_error", "standard error", "points", digits=2, factor=HUNDRED),
        Column("p", "p", digits=3, least=0.001),
        Column("p_holm", "p, Holm", digits=3, least=0.001),
        Column("verdict", "verdict", is_number=False),
    )
    rows = list[tuple[Cell, ...]]()
    for row in statistics.rows:
        rows += [_difference_cells(row, difference) for difference in _differences_of(row)]
    notes = (
        Note("Client means, paired over seeds; intervals and p are Student's and hold for normal differences."),
        Note(_said_of_many(statistics)),
    )
    return Table("differences", "Paired differences", columns, tuple(rows), notes, has_row_per_method=False)


def tuning_table(comparison: Comparison, statistics: ComparisonStatistics) -> Table:
    """Return the table of what tuning was worth: ranks and client means with and without it, chosen parameters."""
    columns = (
        _ROW,
        Column("tuned_rank", "rank"),
        Column("default_rank", "default rank"),
        _share("tuned_mean", "tuned mean", has_spread=True),
        _share("default_mean", "default mean", has_spread=True),
        _difference("tuning_worth", "worth of tuning"),
        Column("trial", "trial"),
        Column("params", "parameters", is_number=False),
    )
    records = {record.name: record for record in comparison.methods}
    rows = []
    for row in statistics.rows:
        tuning = row.tuning
        record = records[row.name]
        rows.append(
            (
                Cell(row.name, marks=_marks_of_row(row)),
                Cell(row.rank),
                Cell(tuning.rank),
                _estimate(row.client_mean),
                _estimate(tuning.mean),
                _paired(tuning.worth),
                Cell(record.chosen),
                Cell(_params_text(record)),
            )
        )
    notes = tuple(_notes_of_tuning(comparison, statistics))
    return Table("tuning", "What tuning was worth", columns, tuple(rows), notes)


def space_table(comparison: Comparison) -> Table:
    """Return the table of the values that were searched for each parameter."""
    columns = (
        _ROW,
        Column("param", "parameter", is_number=False),
        Column("values", "values searched", is_number=False),
    )
    rows = list[tuple[Cell, ...]]()
    for record in comparison.methods:
        rows += [(Cell(record.name), Cell(param), Cell(values)) for param, values in record.space.items()]
    return Table("space", "What was searched", columns, tuple(rows), has_row_per_method=False)


def costs_table(statistics: ComparisonStatistics) -> Table:
    """Return the table of trials, CPU hours and bytes."""
    columns = (
        _ROW,
        Column("trials", "trials"),
        Column("failed_trials", "trials failed"),
        Column("trial_cpu_hours", "trials", "CPU h", digits=3),
        Column("run_cpu_hours", "runs", "CPU h", digits=3),
        Column("bytes_up", "from clients", "MB", digits=2, factor=1e-6),
        Column("bytes_down", "to clients", "MB", digits=2, factor=1e-6),
    )
    rows = []
    for row in statistics.rows:
        costs = row.costs
        rows.append(
            (
                Cell(row.name),
                Cell(costs.trials),
                Cell(costs.failed_trials),
                Cell(costs.trial_hours),
                Cell(costs.run_hours),
                Cell(costs.bytes_up),
                Cell(costs.bytes_down),
            )
        )
    notes = (
        Note(f"{hours_in_all(statistics)} Hours of all processes; those of runs hold the runs with defaults, too."),
        Note("Bytes of one run: all clients and rounds, mean over seeds; MB are millions of bytes."),
    )
    return Table("costs", "What it cost", columns, tuple(rows), notes)


def hours_in_all(statistics: ComparisonStatistics) -> str:
    """Return in a sentence what all trials and runs have cost."""
    hours = sum(row.costs.trial_hours + row.costs.run_hours for row in statistics.rows)
    return f"{about_time(hours * 3600)} of CPU time in all."


def footing_table(statistics: ComparisonStatistics) -> Table:
    """Return the table of what the rows rest on: what all or most have, and what a row has instead."""
    columns = (
        Column("aspect", "aspect", is_number=False),
        Column("who", "rows", is_number=False),
        Column("value", "what it is", is_number=False),
    )
    footing = statistics.footing
    rows = [(Cell(aspect), Cell("all"), Cell(value)) for aspect, value in footing.common.items()]
    differing_rows = [row for row in statistics.rows if row.differing]
    aspects = dict.fromkeys(aspect for row in differing_rows for aspect in row.differing)
    for aspect in aspects:
        if aspect in footing.usual:
            rows.append((Cell(aspect), Cell("the others"), Cell(footing.usual[aspect])))
        for row in differing_rows:
            if aspect in row.differing:
                name = Cell(row.name, marks=(OTHER_FOOTING,))
                rows.append((Cell(aspect), name, Cell(row.differing[aspect] or "not stated")))
    note = Note("No row differs from the others.")
    if differing_rows:
        note = Note("differs here from the others, and a difference in accuracy may be due to that.", OTHER_FOOTING)
    return Table("footing", "What the rows rest on", columns, tuple(rows), (note,), has_row_per_method=False)


def failures_table(statistics: ComparisonStatistics) -> Table:
    """Return the table of runs and trials that have no result, and why."""
    columns = (
        _ROW,
        Column("run", "run", is_number=False),
        Column("reason", "reason", is_number=False),
    )
    rows = [(Cell(failure.row), Cell(failure.run), Cell(failure.reason)) for failure in statistics.failures]
    return Table("failures", "Without a result", columns, tuple(rows), has_row_per_method=False)


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return (name, value) of what the comparison has in common for all rows."""
    settings = ", ".join(f"{name} {value}" for name, value in comparison.partition_settings.items())
    partition = comparison.partition
    if settings:
        partition = f"{partition} ({settings})"
    if len(comparison.seeds) == 1:
        seeds = f"{comparison.seeds[0]} alone"
    else:
        seeds = f"{len(comparison.seeds)} ({', '.join(map(str, comparison.seeds))})"
    lines = [
        ("Data", ", ".join(comparison.data)),
        ("Partition", partition),
        ("Clients", str(comparison.clients)),
        ("Rounds", str(comparison.rounds)),
        ("Seeds", seeds),
        ("Tuning", _tuning_text(comparison)),
    ]
    return [(name, clean(value, 300)) for name, value in lines]


def _tuning_text(comparison: Comparison) -> str:
    """Return how parameters were searched."""
    if not comparison.trials:
        return "none: defaults of the methods"
    text = f"{counted(comparison.trials, 'trial')} for each method, {comparison.search}, on validation samples"
    if comparison.validation is not None:
        text += f" ({percent(comparison.validation)} of the training samples)"
    if comparison.tune_seed is not None:
        text += f", seed {comparison.tune_seed}"
    return text


def _title(comparison: Comparison) -> str:
    """Return the title of the table of methods."""
    return clean(comparison.title, 200)


def baseline_name(comparison: Comparison, statistics: ComparisonStatistics) -> str:
    """Return the name of the baseline's row, or what the comparison calls it where there is no such row."""
    return clean(statistics.baseline or comparison.baseline, 40)


def _share(key: str, head: str, *, digits: int = 1, has_spread: bool = False) -> Column:
    """Return a column of shares, shown in per cent."""
    return Column(key, head, "%", digits=digits, factor=HUNDRED, has_spread=has_spread)


def _difference(key: str, head: str) -> Column:
    """Return a column of differences of shares with their intervals, shown in points."""
    return Column(key, head, "points", digits=1, factor=HUNDRED, is_signed=True, has_interval=True)


def _highest(estimates: Iterable[Estimate | None]) -> float | None:
    """Return the highest mean; None where there is none."""
    return max((estimate.mean for estimate in estimates if estimate is not None), default=None)


def _is_value(estimate: Estimate | None, value: float | None) -> bool:
    """Return whether an estimate has this mean."""
    return estimate is not None and estimate.mean == value


def _estimate(estimate: Estimate | None, *, is_best: bool = False, marks: tuple[Mark, ...] = ()) -> Cell:
    """Return the cell of a mean over seeds with its standard deviation."""
    if estimate is None:
        return Cell(None)
    return Cell(estimate.mean, spread=estimate.deviation, is_best=is_best, marks=marks)


def _paired(difference: PairedDifference | None) -> Cell:
    """Return the cell of a paired difference with its interval."""
    if difference is None:
        return Cell(None)
    estimate = difference.estimate
    marks = (ONE_PAIR,) if difference.is_distinguishable is None else ()
    return Cell(estimate.mean, low=estimate.low, high=estimate.high, marks=marks)


def _marks_of_row(row: RowStatistics) -> tuple[Mark, ...]:
    """Return the marks behind the name of a row."""
    marks = list[Mark]()
    if row.differing:
        marks.append(OTHER_FOOTING)
    if row.missing_seeds:
        marks.append(SEEDS_MISSING)
    return tuple(marks)


def _marks_of_mean(row: RowStatistics) -> tuple[Mark, ...]:
    """Return the marks behind the client mean of a row."""
    if row.to_best is not None and row.to_best.is_distinguishable is False:
        return (SAME_AS_BEST,)
    return ()


def _differences_of(row: RowStatistics) -> list[PairedDifference]:
    """Return the differences of a row that there are; one, where the best row is the baseline."""
    if row.to_best is not None and row.to_baseline is not None and row.to_best.other == row.to_baseline.other:
        return [row.to_best]
    return [difference for difference in (row.to_best, row.to_baseline) if difference is not None]


def _difference_cells(row: RowStatistics, difference: PairedDifference) -> tuple[Cell, ...]:
    """Return the row of one paired difference."""
    return (
        Cell(row.name, marks=_marks_of_row(row)),
        Cell(difference.other),
        Cell(len(difference.seeds)),
        _paired(difference),
        Cell(difference.estimate.standard_error),
        Cell(difference.p),
        Cell(difference.p_holm),
        Cell(verdict(difference)),
    )


def verdict(difference: PairedDifference) -> str:
    """Return in words whether a difference is one."""
    if difference.is_distinguishable is None:
        return "one pair: no verdict"
    if not difference.is_distinguishable:
        return "not distinguishable"
    if difference.estimate.mean > 0:
        return "higher"
    return "lower"


def _params_text(record: MethodRecord) -> str:
    """Return the parameters that the runs of a row have beside the method's defaults."""
    for run in record.runs:
        if run.params:
            return ", ".join(f"{name}={value}" for name, value in run.params.items())
    if record.chosen is None:
        return DASH
    return "the defaults"


# --- notes -----------------------------------------------------------------------------------------------------------


def _notes_of_methods(comparison: Comparison, statistics: ComparisonStatistics) -> Iterator[Note]:
    """Yield the notes below the table of methods: what its figures are, and what to doubt."""
    baseline = baseline_name(comparison, statistics)
    most = max((len(row.seeds) for row in statistics.rows), default=0)
    # 1. What the columns are.
    yield Note(
        "Accuracy on each client's own test samples. Client mean: mean over clients; pooled: over test samples; worst "
        "tenth: over the lowest tenth of clients. Mean over seeds ± standard deviation."
    )
    if most > 1:
        yield Note(
            f"To best, to {baseline}: difference of client means, paired over seeds, with Student's "
            f"{100 * CONFIDENCE:.0f} % interval."
        )
        chance = 100 * chance_of_distinguishing(most)
        yield Note(
            f"not distinguishable from the best: less than two standard errors. With {most} seeds chance alone exceeds "
            f"two in {chance:.0f} % of comparisons.",
            SAME_AS_BEST,
        )
        yield Note(_said_of_many(statistics))
    # 2. Clients against the baseline.
    if statistics.baseline is None:
        yield Note(f"There is no row '{baseline}', so that nobody can say which clients are hurt.")
    else:
        yield Note(_said_of_hurt(baseline, statistics, most))
    # 3. What makes rows incomparable.
    if any(row.differing for row in statistics.rows):
        yield Note("rests on something else than other rows, see the table of footings.", OTHER_FOOTING)
    if any(row.missing_seeds for row in statistics.rows):
        yield Note("lacks seeds: means over those that it has, differences over the common ones.", SEEDS_MISSING)
    if any(_has_one_pair(row) for row in statistics.rows):
        yield Note("one pair of seeds: no interval, no verdict; clients are judged by their test samples.", ONE_PAIR)
    # 4. Notes on the data and the trials, which the comparison has recorded.
    for text in comparison.notes:
        yield Note(text)


def _said_of_many(statistics: ComparisonStatistics) -> str:
    """Return what a reader has to know of many comparisons at once."""
    count = max(0, len([row for row in statistics.rows if row.client_mean is not None]) - 1)
    return (
        f"{counted(count, 'row')} compared with the same row: intervals and ≈ are not corrected for their number, p by "
        "Holm is. The best row was picked by these numbers, which makes the differences to it look larger."
    )


def _said_of_hurt(baseline: str, statistics: ComparisonStatistics, seeds: int) -> str:
    """Return by which rule clients are hurt, and how often chance alone would make one so."""
    lower = f"Lower: accuracy below that with {baseline}, if only by chance."
    if statistics.hurt_rule is HurtRule.SEEDS:
        chance = 100 * chance_of_distinguishing(seeds) / 2
        return (
            f"Hurt: a client's mean difference to {baseline} over seeds lies below minus two standard errors; chance "
            f"alone does that to {chance:.0f} % of clients. {lower}"
        )
    return (
        f"Hurt: a client's accuracy in a seed lies more than two standard errors, of its test samples, below that with "
        f"{baseline} (shares by Agresti and Caffo; each seed has clients of its own, or there is one). {lower}"
    )


def _has_one_pair(row: RowStatistics) -> bool:
    """Return whether a difference of a row has one pair."""
    return any(difference.is_distinguishable is None for difference in _differences_of(row))


def _notes_of_tuning(comparison: Comparison, statistics: ComparisonStatistics) -> Iterator[Note]:
    """Yield the notes below the table of what tuning was worth."""
    yield Note(f"{_tuning_text(comparison)}; ranks by client mean on test samples.")
    counts = {record.name: len(record.trials) for record in comparison.methods}
    other_counts = [f"{name} {count}" for name, count in counts.items() if count != comparison.trials]
    if other_counts:
        yield Note(f"Other numbers of trials: {listed(other_counts)}. Rows with fewer are at a disadvantage.")
    for record in comparison.methods:
        if record.note:
            yield Note(f"{record.name}: {record.note}")
    if not statistics.has_tuning:
        yield Note("No runs with defaults were asked for, so that nothing says what tuning was worth.")
        return
    yield Note("Worth: tuned minus defaults, paired over seeds; none where the defaults were kept or runs are missing.")
    unknown_rows = [row.name for row in statistics.rows if row.tuning.mean is None]
    if unknown_rows:
        yield Note(f"Ranks with defaults are without {listed(unknown_rows)}.")


# --- text ------------------------------------------------------------------------------------------------------------


def text_lines(table: Table, width: int) -> list[str]:
    """Return a table as lines of plain text of at most ``width`` characters, with its notes."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Screen
    from rich.text import Text

    screen = Screen(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, title=Text(table.title), title_justify="left")
    for column in table.columns:
        side: Literal["left", "right"] = "right" if column.is_number else "left"
        screen.add_column(Text(column.title), justify=side, overflow="fold")
    for row in table.rows:
        cells = zip(row, table.columns, strict=True)
        screen.add_row(*(Text(cell.marked_text(column)) for cell, column in cells))
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False)
    console.print(screen)
    for note in table.notes:
        console.print(Text(note.marked_text))
    return [line.rstrip() for line in file.getvalue().splitlines()]


# --- Markdown --------------------------------------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """Return a table in Markdown with its notes; the best values are bold."""
    lines = [f"## {markdown_text(table.title)}", ""]
    lines.append(_markdown_row(markdown_text(column.title) for column in table.columns))
    lines.append(_markdown_row(map(_markdown_side, table.columns)))
    lines += [_markdown_row(map(_markdown_cell, row, table.columns)) for row in table.rows]
    if table.notes:
        lines.append("")
    lines += [f"- {markdown_text(note.marked_text)}" for note in table.notes]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def _markdown_side(column: Column) -> str:
    """Return the mark of the side at which the cells of a column stand."""
    if column.is_number:
        return "--:"
    return "---"


def _markdown_cell(cell: Cell, column: Column) -> str:
    """Return a cell in Markdown."""
    text = markdown_text(cell.text(column))
    if cell.is_best:
        text = f"**{text}**"
    return f"{text} {cell.symbols}".rstrip()


def markdown_text(text: str) -> str:
    """Return text whose characters mean nothing in Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)


# --- LaTeX -----------------------------------------------------------------------------------------------------------


def latex(tables: Sequence[Table], caption: str) -> str:
    """Return tables in LaTeX, each a float of a page's width; the preamble needs the package booktabs.

    Args:
        tables: The tables; the first one has the caption.
        caption: What is compared, as plain text.
    """
    parts = ["% Needs \\usepackage{booktabs}. Each table has the width of a page of two columns.\n"]
    captions = [caption, *(table.title for table in tables[1:])]
    parts += map(_latex_table, tables, captions)
    return "\n".join(parts)


def _latex_table(table: Table, caption: str) -> str:
    """Return one table in LaTeX."""
    places = "".join(_latex_place(table, index) for index in range(len(table.columns)))
    lines = [
        r"\begin{table*}[t]",
        r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{latex_text(caption)}}}",
        rf"\label{{tab:comparison-{table.key}}}",
        rf"\begin{{tabular}}{{@{{}}{places}@{{}}}}",
        r"\toprule",
    ]
    heads = [latex_text(column.head) for column in table.columns]
    units = [_latex_unit(column) for column in table.columns]
    lines.append(f"{' & '.join(heads)} \\\\")
    if any(units):
        lines.append(f"{' & '.join(units)} \\\\")
    lines.append(r"\midrule")
    for row in table.rows:
        cells = map(_latex_cell, row, table.columns)
        lines.append(f"{' & '.join(cells)} \\\\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.notes:
        notes = " ".join(map(_latex_note, table.notes))
        lines.append(rf"\par\smallskip\parbox{{\linewidth}}{{\scriptsize {notes}}}")
    lines.append(r"\end{table*}")
    return "\n".join(lines) + "\n"


def _latex_place(table: Table, index: int) -> str:
    """Return how a column stands: numbers at the right, short text at the left, long text in lines of its own."""
    column = table.columns[index]
    if column.is_number:
        return "r"
    longest = max((len(row[index].text(column)) for row in table.rows), default=0)
    if longest > LATEX_LINE_CHARS:
        return r"p{0.4\linewidth}"
    return "l"


LATEX_LINE_CHARS = 40
"""The most characters of a column of text in LaTeX that stand on one line."""


def _latex_unit(column: Column) -> str:
    """Return the unit of a column in brackets; empty where it has none."""
    if not column.unit:
        return ""
    return latex_text(f"({column.unit})")


def _latex_cell(cell: Cell, column: Column) -> str:
    """Return a cell in LaTeX: bold where it is the best, its marks raised."""
    text = latex_text(cell.text(column))
    if text.startswith(("[", "*")):
        text = f"{{}}{text}"  # behind the end of a row LaTeX would read them as an argument of that
    if cell.is_best:
        text = rf"\textbf{{{text}}}"
    marks = "".join(mark.latex for mark in cell.marks)
    if marks:
        text += f"$^{{{marks}}}$"
    return text


def _latex_note(note: Note) -> str:
    """Return a note in LaTeX."""
    text = latex_text(note.text)
    if note.mark is None:
        return text
    return f"$^{{{note.mark.latex}}}$ {text}"


_LATEX_SPECIAL: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "{''}",
    "±": r"$\pm$",
    "−": r"$-$",
    "≈": r"$\approx$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "§": r"\S{}",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "≠": r"$\neq$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "×": r"$\times$",
    "·": r"$\cdot$",
}
"""Character -> how LaTeX writes it."""


def latex_text(text: str) -> str:
    """Return text as LaTeX writes it; a character that its fonts lack is named by its number, as ``U+4E2D``."""
    return "".join(map(_latex_letter, text))


def _latex_letter(letter: str) -> str:
    """Return one character as LaTeX writes it."""
    if letter in _LATEX_SPECIAL:
        return _LATEX_SPECIAL[letter]
    if letter.isascii():
        return letter
    is_accented_letter = letter.isalpha() and "À" <= letter <= "ſ"
    if is_accented_letter:
        return letter
    return f"U+{ord(letter):04X}"


# --- CSV and parquet -------------------------------------------------------------------------------------------------

CLIENT_COLUMNS = ("row", "method", "parameters", "seed", "client", "samples", "accuracy")
"""Columns of the long form: one line for each client of each run; ``parameters`` is ``chosen`` or ``defaults``."""


@dataclass(frozen=True)
class ClientLine:
    """One client of one run, in the long form."""

    row: str
    method: str
    parameters: str
    seed: int
    client: str
    samples: int
    accuracy: float


def client_lines(comparison: Comparison) -> Iterator[ClientLine]:
    """Yield every client of every run that did not fail, those without test samples included."""
    for record in comparison.methods:
        for parameters, runs in (("chosen", record.runs), ("defaults", record.untuned)):
            for run in runs:
                if not run.failure:
                    yield from (_client_line(record, parameters, run, client) for client in run.clients)


def _client_line(record: MethodRecord, parameters: str, run: SeedRun, client: ClientScore) -> ClientLine:
    """Return one client of one run."""
    return ClientLine(
        record.name, record.method, parameters, run.seed, client.id, samples=client.samples, accuracy=client.accuracy
    )


def figures_csv(tables: Iterable[Table]) -> bytes:
    """Return all figures of the tables that have a row for each method, side by side, as CSV in UTF-8.

    Values are as they are computed: accuracies are shares, not rounded. Behind the column of a figure stand those of
    its standard deviation (``_sd``) and of its interval (``_low``, ``_high``). What has no value is empty.
    """
    names = ["row"]
    lines: dict[str, list[Value]] = {}
    for table in tables:
        if not table.has_row_per_method:
            continue
        row_index = next(index for index, column in enumerate(table.columns) if column.key == "row")
        for index, column in enumerate(table.columns):
            if index == row_index:
                continue
            names += _csv_names(column)
            for row in table.rows:
                name = str(row[row_index].value)
                lines.setdefault(name, [name]).extend(_csv_values(column, row[index]))
    return _csv_bytes(names, lines.values())


def rows_csv(table: Table) -> bytes:
    """Return one table as CSV in UTF-8, values as they are computed."""
    names = list[str]()
    for column in table.columns:
        names += _csv_names(column)
    lines = []
    for row in table.rows:
        line = list[Value]()
        for column, cell in zip(table.columns, row, strict=True):
            line += _csv_values(column, cell)
        lines.append(line)
    return _csv_bytes(names, lines)


def clients_csv(comparison: Comparison) -> bytes:
    """Return the long form of all clients, with the columns `CLIENT_COLUMNS`, as CSV in UTF-8."""
    lines = [tuple(vars(line).values()) for line in client_lines(comparison)]
    return _csv_bytes(CLIENT_COLUMNS, lines)


def clients_parquet(comparison: Comparison) -> bytes:
    """Return the long form of all clients, with the columns `CLIENT_COLUMNS`, as a parquet file.

    Raises:
        MissingCapability: pyarrow is not installed.
    """
    pa = import_pyarrow("a parquet file of clients")
    from pyarrow import parquet

    types = (pa.string(), pa.string(), pa.string(), pa.int64(), pa.string(), pa.int64(), pa.float64())
    schema = pa.schema(list(zip(CLIENT_COLUMNS, types, strict=True)))
    lines = [vars(line) for line in client_lines(comparison)]
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(lines, schema), file)
    return file.getvalue()


def _csv_names(column: Column) -> list[str]:
    """Return the names of a column of figures and of what stands beside them."""
    names = [column.key]
    if column.has_spread:
        names.append(f"{column.key}_sd")
    if column.has_interval:
        names += [f"{column.key}_low", f"{column.key}_high"]
    return names


def _csv_values(column: Column, cell: Cell) -> list[Value]:
    """Return a cell's value and what stands beside it, in the order of `_csv_names`."""
    values = [cell.value]
    if column.has_spread:
        values.append(cell.spread)
    if column.has_interval:
        values += [cell.low, cell.high]
    return values


def _csv_bytes(names: Sequence[str], lines: Iterable[Sequence[Value]]) -> bytes:
    """Return a CSV file; numbers have as many digits as they need to be read back as they are."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(lines)
    return file.getvalue().encode(errors="replace")
