"""The values that a search tries for a parameter: a range, or a list; both are drawn from, counted and written as text.

A method's file states them beside a parameter's description (`edge_agent.methods.searched`), and a user on the command
line: ``0.001:0.1:log`` and ``0,0.01,0.1``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from .errors import UsageError

DIGITS = 3
"""Significant digits of a number from a range: people type it again."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included, tried evenly or, with ``log``, evenly on a logarithmic scale."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    """Whether only whole numbers are meant."""

    def __str__(self) -> str:
        scale = ":log" if self.log else ""
        return f"{self.low:g}:{self.high:g}{scale}"

    @property
    def size(self) -> float:
        """The number of different values; infinite unless they are whole numbers."""
        if self.whole:
            return math.floor(self.high) - math.ceil(self.low) + 1
        return 1 if self.low == self.high else math.inf

    def mistakes(self) -> Iterator[str]:
        """Yield why nothing can be drawn from this range."""
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            yield f"{self}: expected two finite numbers"
        elif self.low > self.high:
            yield f"{self}: expected the smaller number first"
        elif self.log and self.low <= 0:
            yield f"{self}: a logarithmic range begins above 0"
        elif self.size < 1:
            yield f"{self}: holds no whole number"

    def ends(self) -> tuple[float, ...]:
        """Return the values that have to be allowed for all of the range to be."""
        return self._rounded(self.low), self._rounded(self.high)

    def at(self, share: float) -> float:
        """Return the value at a share (0..1) of the way from the lowest to the highest, on the scale of the range."""
        if self.log:
            value = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        else:
            value = self.low + share * (self.high - self.low)
        return self._rounded(value)

    def grid(self, points: int) -> tuple[float, ...]:
        """Return so many values at equal distances, on the scale of the range; fewer where it has fewer."""
        if points == 1 or self.low == self.high:
            return (self._rounded(self.low),)
        values: dict[float, None] = {}
        for number in range(points):
            values[self.at(number / (points - 1))] = None
        return tuple(values)

    def _rounded(self, value: float) -> float:
        """Return a value with `DIGITS` digits, or the nearest whole number, within the range."""
        if self.whole:
            return int(min(max(round(value), math.ceil(self.low)), math.floor(self.high)))
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


@dataclass(frozen=True)
class Choices:
    """A list of values, each tried as often as the others."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return ",".join(value if isinstance(value, str) else json.dumps(value) for value in self.values)

    @property
    def size(self) -> float:
        """The number of different values."""
        return len(self._distinct())

    def mistakes(self) -> Iterator[str]:
        """Yield why nothing can be drawn from this list."""
        if not self.values:
            yield "no values; expected at least one"

    def ends(self) -> tuple[Any, ...]:
        """Return the values that have to be allowed: all of them."""
        return self.values

    def at(self, share: float) -> Any:
        """Return the value at a share (0..1) of the way through the list."""
        values = self._distinct()
        return values[min(int(share * len(values)), len(values) - 1)]

    def grid(self, points: int) -> tuple[Any, ...]:  # noqa: ARG002 - a list has the points that it has
        """Return all values."""
        return self._distinct()

    def _distinct(self) -> tuple[Any, ...]:
        """Return the values, each once; true and 1 are different ones."""
        return tuple({json.dumps(value): value for value in self.values}.values())


Space: TypeAlias = Range | Choices
"""What a search tries for one parameter."""


def parse_space(text: str) -> Space:
    """Return the space that a text describes: ``LOW:HIGH``, ``LOW:HIGH:log``, or values with commas between them.

    Values are read as JSON where they are JSON (``0.1``, ``true``, ``null``), else as text.

    Raises:
        UsageError: The text has no values, or a range has no two numbers.
    """
    if ":" in text:
        return _parse_range(text)
    values = []
    for word in text.split(","):
        if not word.strip():
            continue
        try:
            values.append(json.loads(word))
        except ValueError:
            values.append(word.strip())
    choices = Choices(tuple(values))
    _require_values(text, choices)
    return choices


def _parse_range(text: str) -> Range:
    """Return the range that a text with a colon describes."""
    low, high, *scale = text.split(":")
    try:
        bounds = (float(low), float(high))
    except ValueError as error:
        raise UsageError(f"'{text}': expected LOW:HIGH or LOW:HIGH:log with two numbers") from error
    if scale not in ([], ["log"]):
        raise UsageError(f"'{text}': after the two numbers only ':log' is known")
    space = Range(*bounds, log=bool(scale))
    _require_values(text, space)
    return space


def _require_values(text: str, space: Space) -> None:
    """Require that something can be drawn from a space.

    Raises:
        UsageError: Nothing can be drawn; the message says why.
    """
    mistakes = list(space.mistakes())
    if mistakes:
        raise UsageError(f"'{text}': {'; '.join(mistakes)}; for example 0.001:0.1:log, or 0,0.01,0.1")
