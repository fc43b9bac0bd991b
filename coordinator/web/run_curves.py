"""The figures of a run by round, read from ``metrics.jsonl`` as it grows; agents wrote some of them.

Means, spreads and sums are computed here, over all agents; what is drawn later may leave rounds out, never agents.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..report.figures import as_number
from ..text import WORST_SHARE

CHUNK_BYTES = 4 << 20
"""Read at once; a run of thousands of agents has hundreds of megabytes, and pages are served in between."""

MOST_POINTS = 2_000_000
"""Figures of single agents that are held for a run, 24 MB; beyond that only those over all agents."""

MOST_INCIDENTS = 1000
SCOPES = ("global", "personal")


class Spread(NamedTuple):
    """A figure over all agents of a round: mean, tenth and ninetieth percentile, mean of the worst tenth."""

    mean: float
    low: float
    high: float
    worst: float
    agents: int

    @classmethod
    def of(cls, values: np.ndarray[Any, np.dtype[np.float64]]) -> Spread:
        """Of one value or more."""
        ranked = np.sort(values)
        worst = ranked[: max(1, math.ceil(WORST_SHARE * len(ranked)))]
        low, high = np.percentile(ranked, (10, 90))
        return cls(float(ranked.mean()), float(low), float(high), float(worst.mean()), len(ranked))


class RoundPoint(NamedTuple):
    """One closed round. Times in seconds; None: not recorded."""

    round: int
    seconds: float | None
    waiting_s: float | None
    bytes_up: float | None
    bytes_down: float | None
    agents: int
    missing: int
    rejected: int
    acc: dict[str, Spread]
    loss: float | None


class Incident(NamedTuple):
    """An update that is not in the aggregate of its round, or not as it was sent."""

    round: int
    agent: str
    what: str


class RunCurves:
    """The figures of one run. Call `read` until it returns False, and again when the file has grown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clear()

    def _clear(self) -> None:
        self.points: dict[int, RoundPoint] = {}
        self.incidents: list[Incident] = []
        self.damaged = 0
        """Lines that are not JSON objects, which a kill or a full disk may leave."""

        self.is_read = False
        """Whether the file was read to its end; more may have been written since."""

        self.is_for_agents = True
        """Whether figures of single agents are held."""

        self._agents: dict[str, array[float]] = {}
        self._points, self._offset, self._inode = 0, 0, 0

    @property
    def version(self) -> int:
        """Another value whenever more of the file was read."""
        return self._offset

    def read(self, most: int = CHUNK_BYTES) -> bool:
        """Read on, at most so many bytes; whether there is more to read now."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                if status.st_size < self._offset or status.st_ino != (self._inode or status.st_ino):
                    self._clear()  # another run's file, after a backup was restored
                self._inode = status.st_ino
                file.seek(self._offset)
                chunk = file.read(most)
        except OSError:
            return False
        end = chunk.rfind(b"\n") + 1
        if not end and len(chunk) == most:  # a line longer than a chunk: the next call reads more
            return self.read(2 * most)
        for line in chunk[:end].splitlines():
            self._add(line)
        self._offset += end
        return bool(end) and len(chunk) == most

    def of_agent(self, agent: str) -> Iterator[tuple[int, float | None, float | None]]:
        """Round, acc.global and acc.personal of one agent, of those rounds that have any."""
        row = self._agents.get(agent, array("f"))
        for at in range(0, len(row), 3):
            number, *values = row[at : at + 3]
            known = [None if math.isnan(value) else round(value, 6) for value in values]
            yield int(number), known[0], known[1]

    def newest(self) -> dict[str, tuple[float | None, float | None]]:
        """Agent -> its newest acc.global and acc.personal."""
        result = dict[str, tuple[float | None, float | None]]()
        for agent, row in self._agents.items():
            last = [None if math.isnan(value) else round(value, 6) for value in row[-2:]]
            result[agent] = last[0], last[1]
        return result

    def rounds(self) -> list[RoundPoint]:
        """All closed rounds in order; one that was recorded twice counts as recorded last."""
        return [self.points[number] for number in sorted(self.points)]

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            self.damaged += 1
            return
        number = as_number(record.get("round"))
        if record.get("kind") == "round" and number is not None and 0 <= number < 1 << 24:
            self._add_round(int(number), record)

    def _add_round(self, number: int, record: Mapping[str, Any]) -> None:
        acc = _mapping(record.get("acc"))
        by_scope = {scope: _numbers(acc.get(scope)) for scope in SCOPES}
        spreads = {
            scope: Spread.of(np.fromiter(values.values(), dtype=np.float64))
            for scope, values in by_scope.items()
            if values
        }
        loss = _numbers(record.get("loss"))
        rejected, missing = _reasons(record.get("rejected")), _texts(record.get("missing"))
        self.points[number] = RoundPoint(
            round=number,
            seconds=as_number(record.get("seconds")),
            waiting_s=as_number(record.get("waiting_s")),
            bytes_up=as_number(record.get("bytes_up")),
            bytes_down=as_number(record.get("bytes_down")),
            agents=len(_texts(record.get("agents"))),
            missing=len(missing),
            rejected=len(rejected),
            acc=spreads,
            loss=float(np.mean(list(loss.values()))) if loss else None,
        )
        self._add_incidents(number, record, rejected, missing)
        self._add_agents(number, by_scope)

    def _add_incidents(
        self, number: int, record: Mapping[str, Any], rejected: list[tuple[str, str]], missing: list[str]
    ) -> None:
        self.incidents += [Incident(number, agent, f"rejected: {why}") for agent, why in rejected]
        left_out = _reasons(record.get("left_out"))
        self.incidents += [Incident(number, agent, f"left out: {why}") for agent, why in left_out]
        self.incidents += [Incident(number, agent, "no update before the round closed") for agent in missing[:100]]
        bounded = _mapping(record.get("bounded")).items()
        self.incidents += [Incident(number, text(agent), text(what)) for agent, what in bounded]
        if restored := _mapping(record.get("restored")):
            self.incidents.append(Incident(number, "", f"the last good state was restored: {text(restored)[:200]}"))
        del self.incidents[:-MOST_INCIDENTS]

    def _add_agents(self, number: int, by_scope: Mapping[str, Mapping[str, float]]) -> None:
        agents = set().union(*by_scope.values())
        self._points += len(agents)
        if self._points > MOST_POINTS:
            self.is_for_agents = False
            self._agents.clear()
        if self.is_for_agents:
            for agent in agents:
                values = (by_scope[scope].get(agent, math.nan) for scope in SCOPES)
                self._agents.setdefault(agent, array("f")).extend((number, *values))


def text(value: object) -> str:
    """Any value as text that can be encoded."""
    return str(value).encode(errors="replace").decode()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: object) -> dict[str, float]:
    return {text(key): number for key, item in _mapping(value).items() if (number := as_number(item)) is not None}


def _texts(value: object) -> list[str]:
    return [text(item) for item in value] if isinstance(value, list) else []


def _reasons(value: object) -> list[tuple[str, str]]:
    items = value if isinstance(value, list) else []
    return [(text(one.get("agent")), text(one.get("reason"))) for one in items if isinstance(one, dict)]
