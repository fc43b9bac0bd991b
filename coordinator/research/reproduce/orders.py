"""The orders of rows that a published table claims, checked with our values: by their means, and paired over seeds.

With one seed all rows of a table have the same clients and samples, so that differences of two rows within a seed are
less noisy than their means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

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


@dataclass(frozen=True)
class Values:
    """Our accuracies of one row in one column, in percent."""

    mean: float | None
    """Over seeds; None: there is no result."""

    by_seed: Mapping[int, float]


@dataclass(frozen=True)
class LowerRow:
    """A row that the paper has below another one, compared with it."""

    name: str
    margin: float | None
    """Points by which its mean is below the other row's; None: one of them has no result."""

    paired: Estimate | None = None
    """The mean of the same difference within a seed, over the seeds of both rows; None: they share no seed."""

    @property
    def standing(self) -> Standing | None:
        """Where it lies by the paired difference; None: fewer than two pairs say nothing of chance."""
        if self.paired is None or self.paired.standard_error is None:
            return None
        if not is_distinguishable(self.paired):
            return Standing.SIMILAR
        return Standing.LOWER if self.paired.mean > 0 else Standing.HIGHER

    def to_json(self) -> dict[str, Any]:
        """Return the paired difference as a JSON object."""
        if self.paired is None:
            return {"row": self.name, "seeds": 0}
        return {
            "row": self.name,
            "seeds": self.paired.count,
            "difference": self.paired.mean,
            "standard_error": self.paired.standard_error,
            "low": self.paired.low,
            "high": self.paired.high,
            "standing": None if self.standing is None else self.standing.value,
        }


@dataclass(frozen=True)
class CheckedOrder:
    """An order that the paper claims, checked in one column."""

    column: str
    row: str
    """The row that the paper has above the others."""

    lower_rows: tuple[LowerRow, ...]

    @property
    def compared(self) -> list[LowerRow]:
        """The rows that have a result, if the row itself has one."""
        return [lower for lower in self.lower_rows if lower.margin is not None]

    @property
    def beaten_by(self) -> list[str]:
        """The names of the rows that came out at least as high."""
        return [lower.name for lower in self.lower_rows if lower.margin is not None and lower.margin <= 0]

    @property
    def holds(self) -> bool | None:
        """Whether the row is above all others; None: none is as high, but some have no result yet."""
        if self.beaten_by:
            return False
        if len(self.compared) < len(self.lower_rows):
            return None
        return True

    @property
    def closest(self) -> LowerRow | None:
        """The row with the smallest margin; None: nothing can be compared."""
        return min(self.compared, key=lambda lower: lower.margin or 0.0, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the check as a JSON object of table.json."""
        closest = self.closest
        return {
            "column": self.column,
            "row": self.row,
            "above": [lower.name for lower in self.lower_rows],
            "compared": [lower.name for lower in self.compared],
            "beaten_by": self.beaten_by,
            "holds": self.holds,
            "margin": None if closest is None or closest.margin is None else round(closest.margin, 3),
            "paired": [lower.to_json() for lower in self.lower_rows],
        }

    def sentences(self) -> Iterator[str]:
        """Yield whether the order holds, and how narrowly, then what differences within a seed say of chance."""
        yield self._verdict()
        yield from self._on_chance()

    def _verdict(self) -> str:
        """Return whether the order holds by the means over seeds."""
        names = [lower.name for lower in self.lower_rows]
        order = f"{self.row} above {listed(names)}"
        closest = self.closest
        if closest is None:
            return f"The paper's order ({order}) cannot be checked yet: there is nothing to compare."
        if self.beaten_by:
            return f"The paper's order does **not** hold ({order}): {listed(self.beaten_by)} came out at least as high."
        if self.holds:
            return f"The paper's order holds: {order}, {_in_words(closest)}."
        compared = [lower.name for lower in self.compared]
        missing = [name for name in names if name not in compared]
        return (
            f"The paper's order holds so far: {self.row} above {listed(compared)}, {_in_words(closest)}; these are "
            f"{len(compared)} of {len(names)}; not there yet: {listed(missing)}."
        )

    def _on_chance(self) -> Iterator[str]:
        """Yield from which rows the row is distinguishable; nothing where no row has two seeds in common with it."""
        counts = [other.paired.count for other in self.lower_rows if other.paired is not None and other.standing]
        if not counts:
            return
        fewest = min(counts)
        more = " or more" if max(counts) > fewest else ""
        yield f"Paired over {fewest} seeds{more} {self.row} is {self._standings()}."
        if fewest < ENOUGH_SEEDS:
            yield describe_chance(fewest)

    def _standings(self) -> str:
        """Return what the row is above, what it is below, and what it is not distinguishable from."""
        parts = []
        lower_names = self._names_of(Standing.LOWER)
        higher_names = self._names_of(Standing.HIGHER)
        similar_names = self._names_of(Standing.SIMILAR)
        if lower_names:
            parts.append(f"above {listed(lower_names)} by two standard errors or more")
        if higher_names:
            parts.append(f"below {listed(higher_names)} by two standard errors or more")
        if similar_names:
            parts.append(f"not distinguishable from {listed(similar_names)}")
        return "; ".join(parts)

    def _names_of(self, standing: Standing) -> list[str]:
        """Return the names of the rows with this standing."""
        return [other.name for other in self.lower_rows if other.standing is standing]


def check_order(table: Table, promise: Promise, column: str, values: Mapping[str, Values]) -> CheckedOrder:
    """Return an order that the table claims, checked in one column.

    Args:
        table: The table.
        promise: The order.
        column: The name of the column.
        values: Row -> our accuracies; those of ``promise.row`` are there.
    """
    highest = values[promise.row]
    nothing = Values(None, {})
    lower_rows = [_compared(name, values.get(name, nothing), highest) for name in _rows_below(table, promise)]
    return CheckedOrder(column, promise.row, tuple(lower_rows))


def _compared(name: str, lower: Values, highest: Values) -> LowerRow:
    """Return a row that should be the lower one, compared with the other."""
    if lower.mean is None or highest.mean is None:
        return LowerRow(name, None)
    common_seeds = [seed for seed in highest.by_seed if seed in lower.by_seed]
    differences = [highest.by_seed[seed] - lower.by_seed[seed] for seed in common_seeds]
    paired = Estimate.from_values(differences) if differences else None
    return LowerRow(name, highest.mean - lower.mean, paired)


def _rows_below(table: Table, promise: Promise) -> list[str]:
    """Return the names of the rows that the paper has below the promise's row."""
    others = [row.name for row in table.rows if row.name != promise.row]
    if "all" in promise.above:
        return others
    return [name for name in others if name in promise.above]


def _in_words(closest: LowerRow) -> str:
    """Say by how much a row is above the next one, and that a margin below the noise ranks nothing."""
    margin = closest.margin or 0.0
    if margin < NOISE and closest.standing is None:
        return f"by {margin:.2f} points, which is within the noise"
    return f"by {margin:.2f} points or more"


def markdown_of_pairs(orders: Sequence[CheckedOrder]) -> Iterator[str]:
    """Yield the lines of a table of paired differences for each order that has some of two seeds or more."""
    for order in orders:
        pairs = [lower for lower in order.lower_rows if lower.standing is not None]
        if not pairs:
            continue
        yield f"| {order.row} minus | points, paired over seeds | standard error | Student's 95 % interval | seeds |"
        yield "|---|---|---|---|---|"
        for lower in pairs:
            yield f"| {lower.name} | {_pair_cells(lower.paired)} |"
        yield ""


def _pair_cells(paired: Estimate | None) -> str:
    """Return the cells of a paired difference."""
    if paired is None or paired.standard_error is None:
        return "– | – | – | –"
    interval = f"{_signed(paired.low)} to {_signed(paired.high)}"
    return f"{_signed(paired.mean)} | {paired.standard_error:.2f} | {interval} | {paired.count}"


def _signed(value: float | None) -> str:
    """Return a number of points with its sign and two decimals."""
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")
