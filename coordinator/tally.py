"""What a round took and brought: one line of a run's figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .collect import Collection
from .fleet import Fleet
from .journal import Accepted


@dataclass(frozen=True)
class Tally:
    """Time and bytes at the start of a round."""

    started_at: float
    bytes_up: int
    bytes_down: int

    @classmethod
    def begin(cls, fleet: Fleet) -> Tally:
        """As they stand now."""
        return cls(fleet.clock(), *_bytes(fleet))

    def record(self, fleet: Fleet, collection: Collection) -> dict[str, Any]:
        """The round's line in ``metrics.jsonl``."""
        up, down = _bytes(fleet)
        accepted, refused = collection.accepted, sorted(collection.refused.items())
        return {
            "kind": "round",
            "round": collection.round,
            "seconds": round(fleet.clock() - self.started_at, 4),
            "agents": sorted(accepted),
            "missing": list(collection.outstanding),
            "refused": [{"agent": agent, "reason": why} for agent, why in refused],
            "late": [{"agent": agent, "round": number} for agent, number in collection.late],
            "bytes_up": up - self.bytes_up,
            "bytes_down": down - self.bytes_down,
            "acc": {scope: _metric(accepted, f"acc.{scope}") for scope in ("global", "personal")},
            "loss": _metric(accepted, "loss"),
        }


def _bytes(fleet: Fleet) -> tuple[int, int]:
    return sum(fleet.collector.bytes_from.values()), sum(fleet.distributor.bytes_to.values())


def _metric(accepted: dict[str, Accepted], name: str) -> dict[str, float]:
    return {agent: update.metrics[name] for agent, update in sorted(accepted.items()) if name in update.metrics}
