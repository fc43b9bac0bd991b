"""How long clients may take: by what they took before, else by how many samples they have."""

from __future__ import annotations

from collections.abc import Mapping


class Durations:
    """What has been measured so far, by client and purpose of the job."""

    def __init__(self, samples: Mapping[str, int]) -> None:
        self._samples = samples
        self._measured: dict[tuple[str, str], float] = {}
        self._totals: dict[str, tuple[float, int]] = {}

    def note(self, client: str, purpose: str, seconds: float) -> None:
        """A client took that long; what it took last counts."""
        self._measured[client, purpose] = seconds
        total, samples = self._totals.get(purpose, (0.0, 0))
        self._totals[purpose] = (total + seconds, samples + self._samples[client])

    def expected(self, client: str, purpose: str) -> float:
        """Seconds, or where nobody has been measured yet, a number that grows with them."""
        known = self._measured.get((client, purpose))
        if known is not None:
            return known
        total, samples = self._totals.get(purpose, (1.0, 1))
        return total / max(samples, 1) * self._samples[client]
