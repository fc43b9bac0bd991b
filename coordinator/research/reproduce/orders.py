"""The orders of rows that a published table claims, checked with our values: by their means, and paired over seeds.

With one seed all rows of a table have the same clients and samples, so that differences of two rows within a seed are
less noisy than their means. Seeds differ among themselves, often by more than rows do: where two rows have results of
other seeds, as in the middle of a run or after a failure, their means are those over the seeds that both have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import Field

from edge_agent.core.task import Frozen

from ...estimates import ENOUGH_SEEDS, Estimate, describe_chance, is_distinguishable
from ...text import listed
from .cells import Promise, Table

NOISE = 1.0
"""Points of accuracy below which a difference of two rows ranks nothing, where no two seeds say more."""


class Standing(Enum):
    """Where a row lies beside the one that should be above it, by differences that are paired over seeds."""

    LOWER = "lower"
    """Lower by two standard errors or more."""

    SIMILAR = "not distinguishable"
    HIGHER = "higher"
    """Higher by two standard errors or more."""


class Overlap(Enum):
    """Which seeds with a result two rows have in common."""

    ALL = "all"
    SOME = "some"
    NONE = "none"


@dataclass(frozen=True)
class Values:
    """Our accuracies of one row in one column, in percent."""

    mean: float | None
    """Over seeds; None: there is no result."""

    by_seed: Mapping[int, float]


class PairRecord(Frozen):
    """The difference of two rows within a seed, as table.json has it; rows without a common seed have no figures."""

    row: str = Field(description="the lower row by the paper's order")
    seeds: int = Field(ge=0, description="how many seeds both rows have")
    difference: float | None = Field(None, description="the mean over these seeds of upper minus lower row, in points")
    standard_error: float | None = Field(None, description="its standard error; null for one seed")
    low: float | None = Field(None, description="lower end of Student's 95 % interval")
    high: float | None = None
    standing: Standing | None = None


class OrderRecord(Frozen):
    """An order that the paper claims, as table.json has it."""

    column: str
    row: str = Field(description="the row that the paper has above the others")
    above: tuple[str, ...] = Field(description="the others")
    compared: tuple[str, ...] = Field(description="those of them that have a result")
    beaten_by: tuple[str, ...] = Field(description="those that came out at least as high")
    holds: bool | None = Field(description="null: it cannot be said yet")
    margin: float | None = Field(description="points above the next row")
    paired: tuple[PairRecord, ...]


@dataclass(frozen=True)
class LowerRow:
    """A row that the paper has below another one, compared with it."""

    name: str
    margin: float | None
    """Points by which its mean is below the other row's, over the seeds of both rows; None: one has no result.

    Where they share no seed, each has the mean over its own seeds.
    """

    overlap: Overlap = Overlap.ALL
    paired: Estimate | None = None
    """The mean of the same difference within a seed, over the seeds of both rows; None: they share no seed."""

    @property
    def standing(self) -> Standing | None:
        """Where it lies by the paired difference; None: fewer than two pairs say nothing of chance."""
        if self.paired is None or self.paired.standard_error is None:
            return None
        if not is_distinguishable(self.paired):
            return Standing.SIMILAR
        if self.paired.mean > 0:
            return Standing.LOWER
        return Standing.HIGHER

    def to_record(self) -> PairRecord:
        """Return the paired difference for table.json."""
        paired = self.paired
        if paired is None:
            return PairRecord(row=self.name, seeds=0)
        return PairRecord(
            row=self.name,
            seeds=paired.count,
            difference=paired.mean,
            standard_error=paired.standard_error,
            low=paired.low,
            high=paired.high,
            standing=self.standing,
        )


@dataclass(frozen=True)
class CheckedOrder:
    """An order that the paper claims, checked in one column."""

    column: str
    row: str
    """The row that the paper has above the others."""

    lower_rows: tuple[LowerRow, ...]
    is_short: bool = False
    """Whether a row that is compared has fewer rounds than the table."""

    @property
    def names(self) -> list[str]:
        """The names of the rows that the paper has below."""
        return [lower_row.name for lower_row in self.lower_rows]

    @property
    def margins(self) -> dict[str, float]:
        """Name -> margin, of the rows that have a result, if the row itself has one."""
        margins = {}
        for lower_row in self.lower_rows:
            if lower_row.margin is not None:
                margins[lower_row.name] = lower_row.margin
        return margins

    @property
    def missing(self) -> list[str]:
        """The names of the rows that cannot be compared yet."""
        return [name for name in self.names if name not in self.margins]

    @property
    def beaten_by(self) -> list[str]:
        """The names of the rows that came out at least as high."""
        return [name for name, margin in self.margins.items() if margin <= 0]

    @property
    def holds(self) -> bool | None:
        """Whether the row is above all others; None: some have no result yet, or there are none."""
        if self.beaten_by:
            return False
        if self.missing or not self.lower_rows:
            return None
        return True

    @property
    def judged_differences(self) -> dict[str, Estimate]:
        """Name -> paired difference, of the rows that have two seeds or more in common with the row."""
        differences = {}
        for lower_row in self.lower_rows:
            if lower_row.paired is not None and lower_row.standing is not None:
                differences[lower_row.name] = lower_row.paired
        return differences

    def to_json(self) -> dict[str, Any]:
        """Return the check as a JSON object of table.json."""
        margin = None
        if self.margins:
            margin = round(min(self.margins.values()), 3)
        record = OrderRecord(
            column=self.column,
            row=self.row,
            above=tuple(self.names),
            compared=tuple(self.margins),
            beaten_by=tuple(self.beaten_by),
            holds=self.holds,
            margin=margin,
            paired=tuple(lower_row.to_record() for lower_row in self.lower_rows),
        )
        return record.model_dump(mode="json", exclude_unset=True)

    def sentences(self) -> Iterator[str]:
        """Yield whether the order holds, how narrowly and over which seeds, then what differences say of chance."""
        yield self._describe_means()
        yield from self._describe_seeds()
        yield from self._describe_differences()

    def _describe_means(self) -> str:
        """Return whether the order holds by the means over seeds."""
        order = f"{self.row} above {listed(self.names)}"
        if not self.margins:
            return f"The paper's order ({order}) cannot be checked yet: there is nothing to compare."
        verdict = self._describe_verdict(order)
        if self.missing:
            verdict += f"; these are {len(self.margins)} of {len(self.names)}; not there yet: {listed(self.missing)}"
        if self.is_short:
            verdict += "; with fewer rounds than the table has, this may change"
        return f"{verdict}."

    def _describe_verdict(self, order: str) -> str:
        """Return whether the order holds among the rows that have a result, and by how much."""
        if self.beaten_by:
            return (
                f"By the means the paper's order does **not** hold ({order}): {listed(self.beaten_by)} came out at "
                f"least as high, {self._describe_largest_lead()}"
            )
        margin = self._describe_smallest_margin()
        if not self.missing:
            return f"The paper's order holds: {order}, {margin}"
        return f"The paper's order holds so far: {self.row} above {listed(list(self.margins))}, {margin}"

    def _describe_largest_lead(self) -> str:
        """Say by how much the highest of the other rows is above this one, and whether that is within the noise."""
        highest_row = min(self.margins, key=self.margins.__getitem__)
        lead = -self.margins[highest_row]
        if lead < NOISE and highest_row not in self.judged_differences:
            return f"by {lead:.2f} points at most, which is within the noise"
        return f"by {lead:.2f} points at most"

    def _describe_smallest_margin(self) -> str:
        """Say by how much the row is above the next one, and that less than the noise ranks nothing without pairs."""
        next_row = min(self.margins, key=self.margins.__getitem__)
        margin = self.margins[next_row]
        if margin < NOISE and next_row not in self.judged_differences:
            return f"by {margin:.2f} points, which is within the noise"
        return f"by {margin:.2f} points or more"

    def _describe_seeds(self) -> Iterator[str]:
        """Yield which rows are compared over some of their seeds, and which over other seeds; nothing where none is."""
        partly = [lower_row.name for lower_row in self.lower_rows if lower_row.overlap is Overlap.SOME]
        apart = [lower_row.name for lower_row in self.lower_rows if lower_row.overlap is Overlap.NONE]
        if partly:
            yield f"With other seeds than {self.row}: {listed(partly)}; the seeds that both rows have are compared."
        if apart:
            yield f"Without a seed of {self.row}: {listed(apart)}; part of the difference may be that of the seeds."

    def _describe_differences(self) -> Iterator[str]:
        """Yield from which rows the row is distinguishable; nothing where no row has two seeds in common with it."""
        counts = [difference.count for difference in self.judged_differences.values()]
        if not counts:
            return
        fewest = min(counts)
        seeds = f"{fewest} seeds"
        if max(counts) > fewest:
            seeds = f"{fewest} seeds or more"
        yield f"Paired over {seeds} {self.row} is {self._describe_standings()}."
        if fewest < ENOUGH_SEEDS:
            yield describe_chance(fewest)

    def _describe_standings(self) -> str:
        """Return what the row is above, what it is below, and what it is not distinguishable from."""
        lower_names = self._names_of(Standing.LOWER)
        higher_names = self._names_of(Standing.HIGHER)
        similar_names = self._names_of(Standing.SIMILAR)
        parts = []
        if lower_names:
            parts.append(f"above {listed(lower_names)} by two standard errors or more")
        if higher_names:
            parts.append(f"below {listed(higher_names)} by two standard errors or more")
        if similar_names:
            parts.append(f"not distinguishable from {listed(similar_names)}")
        return "; ".join(parts)

    def _names_of(self, standing: Standing) -> list[str]:
        """Return the names of the rows with this standing."""
        return [lower_row.name for lower_row in self.lower_rows if lower_row.standing is standing]


def check_order(
    table: Table, promise: Promise, column: str, values: Mapping[str, Values], *, short_rows: Collection[str] = ()
) -> CheckedOrder:
    """Return an order that the table claims, checked in one column.

    Args:
        table: The table.
        promise: The order.
        column: The name of the column.
        values: Row -> our accuracies; those of ``promise.row`` are there.
        short_rows: Those of the rows that have fewer rounds than the table.
    """
    highest = values[promise.row]
    nothing = Values(None, {})
    names = _rows_below(table, promise)
    lower_rows = [_compare_row(name, values.get(name, nothing), highest) for name in names]
    compared_names = [promise.row, *(lower_row.name for lower_row in lower_rows if lower_row.margin is not None)]
    is_short = any(name in short_rows for name in compared_names)
    return CheckedOrder(column, promise.row, tuple(lower_rows), is_short)


def _compare_row(name: str, lower: Values, highest: Values) -> LowerRow:
    """Return a row that should be the lower one, compared with the other."""
    if lower.mean is None or highest.mean is None:
        return LowerRow(name, None)
    margin = highest.mean - lower.mean
    common_seeds = [seed for seed in highest.by_seed if seed in lower.by_seed]
    if not common_seeds:
        return LowerRow(name, margin, Overlap.NONE)
    differences = [highest.by_seed[seed] - lower.by_seed[seed] for seed in common_seeds]
    paired = Estimate.from_values(differences)
    if highest.by_seed.keys() == lower.by_seed.keys():
        return LowerRow(name, margin, Overlap.ALL, paired)
    return LowerRow(name, paired.mean, Overlap.SOME, paired)


def _rows_below(table: Table, promise: Promise) -> list[str]:
    """Return the names of the rows that the paper has below the promise's row."""
    others = [row.name for row in table.rows if row.name != promise.row]
    if "all" in promise.above:
        return others
    return [name for name in others if name in promise.above]


def markdown_of_pairs(orders: Sequence[CheckedOrder]) -> Iterator[str]:
    """Yield the lines of a table of paired differences for each order that has some of two seeds or more."""
    for order in orders:
        differences = order.judged_differences
        if not differences:
            continue
        yield f"| {order.row} minus | points, paired over seeds | standard error | Student's 95 % interval | seeds |"
        yield "|---|---|---|---|---|"
        for name, difference in differences.items():
            yield _markdown_row(name, difference)
        yield ""


def _markdown_row(name: str, difference: Estimate) -> str:
    """Return the line of a paired difference."""
    mean = _format_points(difference.mean, "+.2f")
    error = _format_points(difference.standard_error, ".2f")
    low = _format_points(difference.low, "+.2f")
    high = _format_points(difference.high, "+.2f")
    return f"| {name} | {mean} | {error} | {low} to {high} | {difference.count} |"


def _format_points(value: float | None, form: str) -> str:
    """Return a number of points in this format, with a minus sign for a hyphen; a dash where there is none."""
    if value is None:
        return "–"
    return format(value, form).replace("-", "−")
