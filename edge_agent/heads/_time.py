"""A limit for the time of a fit: parameters may come from a bundle, and ask for hours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..core.errors import TrainingFailed


@dataclass(frozen=True)
class _Limit:
    seconds: float
    begin: float
    clock: Callable[[], float]

    def remaining_s(self) -> float:
        return self.begin + self.seconds - self.clock()


_limit: ContextVar[_Limit | None] = ContextVar("_limit", default=None)
"""The time limit of the fit under way; None where it has none. Heads of other packages need not know of it."""


@contextmanager
def time_limit(seconds: float, clock: Callable[[], float]) -> Iterator[None]:
    """End fits inside the block with `TrainingFailed` after ``seconds`` of ``clock``, behind the step under way."""
    token = _limit.set(_Limit(seconds, clock(), clock))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Call it in each step of a fit.

    Raises:
        TrainingFailed: The time limit is reached.
    """
    limit = _limit.get()
    if limit is not None and limit.remaining_s() <= 0:
        raise TrainingFailed(
            f"not fitted within {limit.seconds:g} s; lower its epochs, iterations or sizes", is_public=True
        )


def at_most(seconds: float) -> float:
    """Return ``seconds``, or those until the limit where these are fewer; for what cannot look at the time itself."""
    limit = _limit.get()
    return seconds if limit is None else max(0.0, min(seconds, limit.remaining_s()))
