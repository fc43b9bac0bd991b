"""Values from files that agents have contributed to: one of another form counts as absent."""

from __future__ import annotations

_LARGEST = 1e300
"""Leaves room for sums and axes; NaN and infinity are not within."""


def as_number(value: object) -> float | None:
    """Return a finite number from a file that others have contributed to; None where it is something else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_LARGEST <= value <= _LARGEST:
        return None
    return float(value)


def as_text(value: object) -> str:
    """Any value as text that can be encoded."""
    return str(value).encode(errors="replace").decode()
