"""A limit for the time of a fit, because the parameters of a fit may come from a bundle and ask for hours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..core.errors import TrainingFailed


@dataclass(frozen=True)
class _Limit:
    """The time limit of a fit: ``seconds`` from ``begin`` on, both in seconds of ``clock``."""

    seconds: float
    begin: float
    clock: Callable[[], float]

    def remaining_s(self) -> float:
        """Return the seconds until the limit; negative behind it."""
        return self.begin + self.seconds - self.clock()


_limit: ContextVar[_Limit | None] = ContextVar("_limit", default=None)
"""The time limit of the fit under way; None where it has none. Heads of other packages need not know of it."""


@contextmanager
def time_limit(seconds: float, clock: Callable[[], float]) -> Iterator[None]:
    """End fits inside the block with `TrainingFailed` after ``seconds`` of ``clock``, when the present step is done."""
    token = _limit.set(_Limit(seconds, clock(), clock))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Check that the fit is within its time limit; a head calls this in each step of its fit.

    Raises:
        TrainingFailed: The time limit is reached.
    """
    limit = _limit.get()
    if limit is not None and limit.remaining_s() <= 0:
        raise TrainingFailed(
            f"not fitted within {limit.seconds:g} s; lower its epochs, iterations or sizes", is_public=True
        )


def at_most(seconds: float) -> float:
    """Return ``seconds``, or those until the fit's limit if these are fewer; for work that cannot `check_time`."""
    limit = _limit.get()
    if limit is None:
        return seconds
    return max(0.0, min(seconds, limit.remaining_s()))
