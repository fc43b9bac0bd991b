"""What the readers of public data sets share: where a set comes from, and small files read within bounds.

A reader never downloads. What is missing is told together with the layout that was expected, the official page and the
licence, so that whoever reads the message can decide and fetch it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError, cause, nearest

MAX_TEXT_BYTES = 64 << 20
"""More than any list, label or signal file of these sets has."""


@dataclass(frozen=True)
class Origin:
    """A public data set: the ``kind`` that reads it, its ``layout``, its official ``page`` and its ``licence``."""

    kind: str
    title: str
    layout: str
    page: str
    licence: str

    def missing(self, where: object, found: str = "") -> DataError:
        """An error for a place that does not hold the set; ``found``: what is there, or lacks, in a few words."""
        told = f" ({found})" if found else ""
        return DataError(
            f"{self.kind}: no {self.title} in '{where}'{told}; expected {self.layout}; "
            f"get it from {self.page} (licence: {self.licence})"
        )

    def damaged(self, path: Path, found: str, expected: str) -> DataError:
        """An error for a file of the set that is not what it should be."""
        return DataError(
            f"{self.kind}: '{path}' {found}, expected {expected}; it is damaged or was not fetched whole: "
            f"get it anew from {self.page}"
        )


def lines_of(path: Path, origin: Origin) -> list[str]:
    """Lines of a text file of a set, without surrounding blanks and without empty ones.

    Raises:
        DataError: no such file, too large, or not text.
    """
    try:
        if (size := path.stat().st_size) > MAX_TEXT_BYTES:
            raise origin.damaged(path, f"has {size} bytes", f"text of at most {MAX_TEXT_BYTES}")
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise origin.missing(path.parent, f"'{path.name}': {cause(error)}") from error
    return [line for row in text.splitlines() if (line := row.strip())]


def integers_of(path: Path, origin: Origin) -> np.ndarray:
    """One natural number from each line of a text file, (n,) int64.

    Raises:
        DataError: as `lines_of`, or a line that is none.
    """
    lines = lines_of(path, origin)
    for number, line in enumerate(lines, 1):
        if not (line.isascii() and line.isdigit() and len(line) < 10):
            raise origin.damaged(path, f"has '{line[:40]}' in line {number}", "a natural number in each line")
    return np.array(lines, np.int64)


def random_part(count: int, n: int | None, seed: int | tuple[int, ...]) -> np.ndarray:
    """Rows (m,) of ``count``, in order: a random ``n`` of them where there are more than that, else all."""
    if n is None or n >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:n])


def near(name: str, known: tuple[str, ...]) -> str:
    """`` (did you mean 'x'?)`` where one of the known names looks like it, else nothing."""
    found = nearest(name, known)
    return "" if found is None else f" (did you mean '{found}'?)"
