"""What the rounds of a federation have spent of its privacy budget, as status and summary of a run say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..text import counted
from ..views.values import as_number


@dataclass(frozen=True)
class PrivacySpent:
    """What the closed rounds have cost of the privacy budget of [privacy]."""

    epsilon: float | None
    """What all rounds with noise have spent; None: it is infinite."""

    epsilon_left: float | None
    """What may still be spent; None: there is no limit."""

    delta: float
    rounds_without_noise: int = 0
    """Closed rounds without noise, which epsilon does not cover."""

    clip: float | None = None
    """The bound on the norm of an update; None: not said."""

    noise: float | None = None
    """The noise multiplier; None: not said."""

    @classmethod
    def from_body(cls, body: object) -> PrivacySpent | None:
        """Return what an object of a file says; None where there is none, or none that can be understood."""
        if not isinstance(body, Mapping):
            return None
        delta = as_number(body.get("delta"))
        if delta is None:
            return None
        return cls(
            epsilon=as_number(body.get("epsilon")),
            epsilon_left=as_number(body.get("epsilon_left")),
            delta=delta,
            rounds_without_noise=int(as_number(body.get("rounds_without_noise")) or 0),
            clip=as_number(body.get("clip")),
            noise=as_number(body.get("noise")),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as status and summary have it."""
        body = asdict(self)
        return {name: value for name, value in body.items() if value is not None or name not in {"clip", "noise"}}

    @property
    def text(self) -> str:
        """What is spent, as a line for people."""
        used = "more spent than any epsilon bounds" if self.epsilon is None else f"epsilon {self.epsilon:g} spent"
        rest = "no limit is set" if self.epsilon_left is None else f"{self.epsilon_left:g} left"
        line = f"differential privacy: {used}, {rest} (delta {self.delta:g})"
        if self.rounds_without_noise:
            without = counted(self.rounds_without_noise, "round")
            return f"{line}; {without} without noise, which epsilon does not cover"
        return line
