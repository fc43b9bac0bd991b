"""The model of a table: columns, cells with what stands beside a value, notes below; it knows no form of a file."""

from __future__ import annotations

from dataclasses import dataclass

from ...report.charts import clean

DASH = "–"
FOOTING_TITLE = "What the rows rest on"
"""Title of the table to which notes refer for what makes rows incomparable."""

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
