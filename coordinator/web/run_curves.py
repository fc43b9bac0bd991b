"""The figures of a run by round, read from ``metrics.jsonl`` as it grows; agents wrote some of them.

Means, spreads and sums are computed here, over all agents; what is drawn later may leave rounds out, never agents.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge_agent.core.storage import open_regular
from edge_agent.core.worst_tenth import mean_of_worst_tenth

from ..views.values import as_number, as_text

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
        """Return the spread of at least one value."""
        ranked = np.sort(values)
        low, high = np.percentile(ranked, (10, 90))
        return cls(float(ranked.mean()), float(low), float(high), mean_of_worst_tenth(ranked.tolist()), len(ranked))


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

    @property
    def x(self) -> float:
        """Its place on the axis of rounds."""
        return float(self.round)

    @property
    def work_s(self) -> float:
        """Seconds from the tasks to the new model; 0 where they were not recorded."""
        return self.seconds or 0.0

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for agents before the tasks; 0 where they were not recorded."""
        return self.waiting_s or 0.0

    @property
    def has_traffic(self) -> bool:
        """Whether the bytes of at least one direction were recorded."""
        return self.bytes_up is not None or self.bytes_down is not None

    @property
    def up_mb(self) -> float:
        """Megabytes from agents; 0 where they were not recorded."""
        return (self.bytes_up or 0.0) / 1e6

    @property
    def down_mb(self) -> float:
        """Megabytes to agents; 0 where they were not recorded."""
        return (self.bytes_down or 0.0) / 1e6


class Incident(NamedTuple):
    """An update that is not in the aggregate of its round, or not as it was sent."""

    round: int
    agent: str
    what: str


class _Read(NamedTuple):
    """A line of the file that is about a closed round, and what follows from it."""

    point: RoundPoint
    incidents: list[Incident]
    by_scope: dict[str, dict[str, float]]


class RunCurves:
    """The figures of one run. Call `read` until it returns False, and again when the file has grown.

    Other threads see its attributes change only while ``lock`` is held.
    """

    def __init__(self, path: Path, lock: threading.RLock | None = None) -> None:
        self.path = path
        self._lock = lock or threading.RLock()
        self._reading = threading.Lock()
        self.is_for_agents = True
        """Whether figures of single agents are held."""

        self._clear()

    def _clear(self) -> None:
        """Begin as if nothing was read."""
        self.points: dict[int, RoundPoint] = {}
        self.incidents: list[Incident] = []
        self.damaged = 0
        """Lines that are not JSON objects, which a kill or a full disk may leave."""

        self.is_read = False
        """Whether the file was read to its end; more may have been written since."""

        self._agents: dict[str, array[float]] = {}
        self._points = 0
        self._offset = 0
        self._inode = 0

    @property
    def version(self) -> int:
        """Another value whenever more of the file was read."""
        return self._offset

    @property
    def held(self) -> int:
        """Figures of single agents that are held; an agent takes as much memory as ten of them."""
        return self._points + 10 * len(self._agents)

    def forget_agents(self) -> None:
        """Drop the figures of single agents; those over all agents stay."""
        self.is_for_agents = False
        self._points = 0
        self._agents.clear()

    def read(self, most: int = CHUNK_BYTES) -> bool:
        """Read on, at most so many bytes; whether there is more to read now. Only adding needs the lock."""
        with self._reading:
            return self._read(most)

    def _read(self, most: int) -> bool:
        """Read on while `_reading` is held, see `read`."""
        try:
            chunk = self._read_chunk(most)
        except OSError:
            return False
        end = chunk.rfind(b"\n") + 1
        if not end and len(chunk) == most:  # a line longer than a chunk: the next call reads more
            return self._read(2 * most)
        # Reading JSON takes time, so it is done before the lock is taken.
        rounds, damaged = _read_rounds(chunk[:end])
        with self._lock:
            for closed in rounds:
                self._add(closed)
            self.damaged += damaged
            self._offset += end
        return bool(end) and len(chunk) == most

    def _read_chunk(self, most: int) -> bytes:
        """Return at most so many bytes after those that were read; of another file, from its beginning.

        Raises:
            OSError: There is no file, or it cannot be read.
        """
        with open_regular(self.path) as file:
            status = self.path.stat()
            is_shorter = status.st_size < self._offset
            is_other_file = self._inode and status.st_ino != self._inode
            if is_shorter or is_other_file:
                with self._lock:
                    self._clear()  # another run's file, after a backup was restored
            self._inode = status.st_ino
            file.seek(self._offset)
            return file.read(most)

    def of_agent(self, agent: str) -> Iterator[tuple[int, float | None, float | None]]:
        """Yield round, acc.global and acc.personal of one agent, of those rounds that have any."""
        row = self._agents.get(agent, array("f"))
        for begin in range(0, len(row), 3):
            number, shared, personal = row[begin : begin + 3]
            yield int(number), _accuracy(shared), _accuracy(personal)

    def newest(self) -> dict[str, tuple[float | None, float | None]]:
        """Return agent -> its newest acc.global and acc.personal."""
        result = dict[str, tuple[float | None, float | None]]()
        for agent, row in self._agents.items():
            shared, personal = row[-2:]
            result[agent] = _accuracy(shared), _accuracy(personal)
        return result

    def rounds(self) -> list[RoundPoint]:
        """Return all closed rounds in order; one that was recorded twice counts as recorded last."""
        return [self.points[number] for number in sorted(self.points)]

    def _add(self, read: _Read) -> None:
        """Add a closed round; figures of single agents only as long as they are few enough to be held."""
        number = read.point.round
        self.points[number] = read.point
        self.incidents += read.incidents
        del self.incidents[:-MOST_INCIDENTS]
        agents = set().union(*read.by_scope.values())
        if not self.is_for_agents or self._points + len(agents) > MOST_POINTS:
            self.forget_agents()
            return
        self._points += len(agents)
        for agent in agents:
            values = (read.by_scope[scope].get(agent, math.nan) for scope in SCOPES)
            self._agents.setdefault(agent, array("f")).extend((number, *values))


def _accuracy(held: float) -> float | None:
    """Return an accuracy as it was recorded, from 32 bits that hold it; None where it is not known (NaN)."""
    return None if math.isnan(held) else round(held, 6)


def _read_rounds(lines: bytes) -> tuple[list[_Read], int]:
    """Return the closed rounds that whole lines are about, and how many lines are damaged."""
    rounds = list[_Read]()
    damaged = 0
    for line in lines.splitlines():
        record = _record(line)
        if record is None:
            damaged += 1
            continue
        closed = _read_round(record)
        if closed is not None:
            rounds.append(closed)
    return rounds, damaged


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _read_round(record: Mapping[str, Any]) -> _Read | None:
    """Return the closed round that a line is about; None: it is about something else."""
    value = as_number(record.get("round"))
    if record.get("kind") != "round" or value is None or not 0 <= value < 1 << 24:
        return None
    number = int(value)
    acc = _mapping(record.get("acc"))
    by_scope = {scope: _numbers(acc.get(scope)) for scope in SCOPES}
    spreads = {
        scope: Spread.of(np.fromiter(values.values(), dtype=np.float64)) for scope, values in by_scope.items() if values
    }
    loss = _numbers(record.get("loss"))
    rejected = _reasons(record.get("rejected"))
    missing = _texts(record.get("missing"))
    point = RoundPoint(
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
    return _Read(point, _incidents(number, record, rejected, missing), by_scope)


def _incidents(
    number: int, record: Mapping[str, Any], rejected: list[tuple[str, str]], missing: list[str]
) -> list[Incident]:
    """Return what went wrong in a round, by agent; "" stands for the round itself."""
    result = [Incident(number, agent, f"rejected: {reason}") for agent, reason in rejected]
    left_out = _reasons(record.get("left_out"))
    result += [Incident(number, agent, f"left out: {reason}") for agent, reason in left_out]
    result += [Incident(number, agent, "no update before the round closed") for agent in missing[:100]]
    bounded = _mapping(record.get("bounded")).items()
    result += [Incident(number, as_text(agent), as_text(note)) for agent, note in bounded]
    restored = _mapping(record.get("restored"))
    if restored:
        result.append(Incident(number, "", f"the last good state was restored: {as_text(restored)[:200]}"))
    return result[-MOST_INCIDENTS:]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: object) -> dict[str, float]:
    return {as_text(key): number for key, item in _mapping(value).items() if (number := as_number(item)) is not None}


def _texts(value: object) -> list[str]:
    return [as_text(item) for item in value] if isinstance(value, list) else []


def _reasons(value: object) -> list[tuple[str, str]]:
    items = value if isinstance(value, list) else []
    return [(as_text(item.get("agent")), as_text(item.get("reason"))) for item in items if isinstance(item, dict)]
