"""What a state folder says, held in memory and read again as its files change; the coordinator is never asked.

`refresh` reads what is new, in one thread; pages read the result under `lock`, in others. Everything comes from files
that agents have contributed to, so a value of another form counts as absent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_agent.core.errors import HeadwaterError
from edge_agent.core.locks import lock_holder
from edge_agent.core.storage import IDENTITY

from ..identity.revoked import revoked_agents
from ..journal.store import utc_now
from ..state.fault_log import Fault, FaultLog
from ..state.fleet_rows import AgentRow, FleetFacts, rows_of
from ..state.status_file import (
    EVERYONE,
    STATUS,
    Awaited,
    JsonFile,
    ListedAgent,
    RefusedDevice,
    RunUnderWay,
    Status,
    list_agents,
)
from ..state.store import StateFolder
from ..state.timeline import Timeline
from ..views.fleet import FleetView
from ..views.follower import Follower
from ..views.history import HistoryIndex
from ..views.releases import Book
from ..views.run_list import RunInfo, RunList
from ..views.timeline import Event
from ..views.values import as_text
from .run_curves import RunCurves

log = logging.getLogger(__name__)

ENTRIES_AT_ONCE = 2000
"""Read in one transaction; pages are served in between."""

MOST_HISTORY = 2000
"""Entries of one agent that its page can reach; the journal has all of them."""

MOST_CURVES = 200
"""Newest runs whose curves are held; further `MOST_ASKED` older ones are held as pages ask for them."""

MOST_ASKED = 100
AGENT_RUNS = 20
"""Newest runs of which figures of single agents are held, as far as `MOST_HELD` of all runs together reaches."""

MOST_HELD = 4_000_000
"""Figures of single agents that are held of all runs, about 50 MB."""

MOST_EVENTS = 200
"""Events of a run that its page shows, the newest ones; 'headwater logs' shows all."""

MOST_TIMELINES = 8

SILENT_S = 15.0
"""A coordinator updates its status file each second, unless it is busy with long work."""

LOCK_EVERY_S = 5.0
"""Pause between two looks at who holds the folder, while the status is silent."""

VOLATILE = ("silent_s", "bytes_up", "bytes_down")
"""Fields of an agent's status that change all the time and are no news."""

_FLEET_NEWS = ("fleet", "storage", "broker_away", "other_coordinator", "refused_agents")


class FolderView:
    """A state folder. Hold `lock` while reading its attributes."""

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], datetime] = utc_now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.now = now
        self._clock = clock
        self.lock = threading.RLock()
        self.faults = FaultLog(path)
        self.folder = StateFolder(path)
        self.status = Status({})
        self._timelines_lock = threading.Lock()
        self.trouble = ""
        """Why the journal cannot be read; pages show what the other files say."""

        self.is_loaded = False
        """Whether everything was read that was there at the first look."""

        self._reading = threading.Lock()
        self._is_closed = False
        self._status_file = JsonFile(path / STATUS)
        self._everyone_file = JsonFile(path / EVERYONE)
        self._everyone: list[ListedAgent] = []
        self._looked_at = float("-inf")
        self._is_held = False
        self._fleet_mark = 0
        self._run_mark = 0
        self._rows: tuple[Any, list[AgentRow]] = None, []
        self._revoked: frozenset[str] = frozenset()
        self._revoked_stamp: tuple[int, int, int] | None = None
        self._fault_version: tuple[int, ...] = ()
        self._faults_of: dict[str, list[Fault]] = {}
        self._forget_journal()

    def _forget_journal(self) -> None:
        """Forget what was read from the journal, because another file has taken its place."""
        with self._timelines_lock:
            self._timelines: dict[str, tuple[Timeline, deque[Event]]] = {}
        self.book = Book()
        self._run_list = RunList()
        self._fleet = FleetView(self.book)
        self._history = HistoryIndex(MOST_HISTORY)
        folds = (self._run_list, self.book, self._fleet, self._history)
        self._follower = Follower(self.folder.journal, *folds)
        self._curves: dict[str, RunCurves] = {}
        self._asked: dict[str, None] = {}
        """Older runs, in the order in which pages asked for them last."""

    def close(self) -> None:
        """Close the journal, after a look that is under way in another thread has ended; nothing is read any more."""
        with self._reading:
            self._is_closed = True
            self.folder.journal.close()

    # --- reading ---------------------------------------------------------------------------------------------------

    def refresh(self, *, wait: bool = False) -> bool:
        """Read what is new, but not for long; whether there is more to read now.

        Nothing is read here while another thread reads, unless ``wait``: then all that is there at the call is read.
        """
        if not self._reading.acquire(blocking=wait):
            return False
        try:
            if self._is_closed:
                return False
            has_more = self._read_journal()
            self._read_status()
            self._read_identity()
            self._read_faults()
            has_more |= self._read_curves()
            self.is_loaded |= not has_more
            if not has_more:
                self.agents()  # here, and not while somebody waits for a page
            return has_more
        finally:
            self._reading.release()

    def _read_journal(self) -> bool:
        """Read on in the journal, and return whether it has more; why it cannot be read is in ``trouble``."""
        journal = self.folder.journal
        try:
            if not journal.is_in_place:
                journal.close()
                with self.lock:
                    self._forget_journal()
            if not journal.is_open:
                if not journal.exists:
                    self.trouble = ""
                    return False
                journal.open(create=False)
            entries = self._follower.fetch(ENTRIES_AT_ONCE)
        except HeadwaterError as error:
            self.trouble = str(error)
            journal.close()
            return False
        self.trouble = ""
        with self.lock:
            self._follower.feed(entries)
        return len(entries) == ENTRIES_AT_ONCE

    def _read_status(self) -> None:
        """Take what the coordinator has written of itself and of its agents since the last look."""
        is_new = self._status_file.look()
        everyone_is_new = self._everyone_file.look()
        status = self._status_file.content
        everyone = self._everyone_file.content
        with self.lock:
            if is_new and isinstance(status, dict):
                self.status = Status(status)
                # What the file says, as JSON: any change of it is news, but for what changes all the time.
                agents = [_without(row.content, VOLATILE) for row in self.status.agents]
                waiting = status.get("waiting")
                if isinstance(waiting, dict):
                    waiting = _without(waiting, ("seconds_left",))
                others = [status.get(name) for name in _FLEET_NEWS]
                self._run_mark = _mark([status.get("run"), waiting])
                self._fleet_mark = _mark([agents, others])
            if everyone_is_new and isinstance(everyone, list):
                self._everyone = list_agents(everyone)

    def _read_identity(self) -> None:
        with contextlib.suppress(OSError):
            status = (self.path / IDENTITY / "revoked.json").stat()
            stamp = status.st_mtime_ns, status.st_size, status.st_ino
            if self._revoked_stamp != stamp:
                self._revoked = revoked_agents(self.path)
                self._revoked_stamp = stamp

    def _read_faults(self) -> None:
        version = self.faults.version()
        if version != self._fault_version:
            result = dict[str, list[Fault]]()
            for reported in self.faults.read():
                result.setdefault(as_text(reported.agent), []).append(reported.fault)
            with self.lock:
                self._faults_of = result
                self._fault_version = version

    def _read_curves(self) -> bool:
        """Read on in the first run that is not read to its end: those that pages ask for, then from the newest on."""
        with self.lock:
            newest = list(self.runs)[-MOST_CURVES:][::-1]
            to_read = [*reversed(self._asked), *newest]
            self._curves = {name: self._curve(name) for name in reversed(dict.fromkeys(to_read))}
            self._bound_memory(newest)
            curves = [(self._curves[name], self.runs[name].is_over) for name in to_read]
        for run_curves, is_over in curves:
            if is_over and run_curves.is_read:
                continue
            has_more = run_curves.read()
            run_curves.is_read = is_over and not has_more  # what is read of a run under way is not its end
            if has_more:
                return True
        return False

    def _bound_memory(self, newest: list[str]) -> None:
        """Drop the figures of single agents of all but the newest runs, and of these where they are too many.

        ``newest``: the newest runs, the very newest first.
        """
        room = MOST_HELD
        for number, name in enumerate(newest):
            room -= self._curves[name].held
            if number >= AGENT_RUNS or room < 0:
                self._curves[name].forget_agents()
        for name in self._asked.keys() - set(newest):
            self._curves[name].forget_agents()

    def _curve(self, run: str) -> RunCurves:
        return self._curves.get(run) or RunCurves(self.folder.run(run).metrics_path, self.lock)

    @property
    def runs(self) -> dict[str, RunInfo]:
        """Name -> run, in the order of their requests."""
        return self._run_list.runs

    # --- what it says ------------------------------------------------------------------------------------------------

    def curves(self, run: str) -> RunCurves:
        """Return the figures of a run as far as they are read; those of an old one are read from now on."""
        with self.lock:
            if run in self._asked or run not in self._curves:
                self._asked.pop(run, None)
                self._asked[run] = None
                for name in list(self._asked)[:-MOST_ASKED]:
                    del self._asked[name]
            return self._curve(run)

    def begun_runs(self) -> list[str]:
        """Return the runs that have started and whose curves are held, in the order of their requests."""
        return [name for name, run in self.runs.items() if run.started_at and name in self._curves]

    def log_of(self, run: str) -> list[Event]:
        """Return the newest events of a run, as 'headwater logs' shows them; read without `lock`.

        Raises:
            StateError: the journal cannot be read.
        """
        with self._timelines_lock:
            if run not in self._timelines:
                for name in list(self._timelines)[: 1 - MOST_TIMELINES]:
                    del self._timelines[name]
                self._timelines[run] = Timeline(self.folder, run), deque(maxlen=MOST_EVENTS)
            timeline, events = self._timelines[run]
            events.extend(replace(event, agents=(), data={}) for event in timeline.read_new())
            return list(events)

    @property
    def status_at(self) -> float | None:
        """When the status was written, in seconds since 1970."""
        return None if self.status.at is None else self.status.at.timestamp()

    @property
    def silent_s(self) -> float | None:
        """Seconds since the coordinator's last word; None: there was none."""
        at = self.status_at
        return None if at is None else max(0.0, self.now().timestamp() - at)

    @property
    def is_serving(self) -> bool:
        """Whether a coordinator works on the folder: it was heard lately, or it holds the folder's lock."""
        silent_s = self.silent_s
        if silent_s is not None and silent_s <= SILENT_S:
            return True
        if self._clock() - self._looked_at >= LOCK_EVERY_S:
            self._looked_at = self._clock()
            with contextlib.suppress(OSError):
                self._is_held = lock_holder(self.path) is not None
        return self._is_held

    def run_now(self) -> RunUnderWay | None:
        """Return the run under way, as the coordinator last wrote it; None: none, or no coordinator."""
        return self.status.run if self.is_serving else None

    def waiting(self) -> Awaited | None:
        """Return what the coordinator waits for; None: nothing, or no coordinator."""
        return self.status.awaited if self.is_serving else None

    @property
    def waits_until(self) -> float | None:
        """When `waiting` ends at the latest, in seconds since 1970; None: there is no limit."""
        awaited = self.waiting()
        if awaited is None or awaited.seconds_left is None or self.status_at is None:
            return None
        return self.status_at + awaited.seconds_left

    def status_of(self, run: RunInfo) -> str:
        """Return the status of a run as a word, of one that cannot be resumed for now ``stalled``."""
        now = self.run_now()
        if now is not None and now.id == run.id and now.stall is not None:
            return "stalled"
        return "cancelling" if run.cancel_requested and not run.is_over else run.status

    def faults_of(self, agent: str) -> list[Fault]:
        """Return the faults of an agent that are still known, the newest first."""
        return self._faults_of.get(agent, [])[::-1]

    def history_ids(self, agent: str) -> array[int]:
        """Return the ids of the journal's entries about an agent, oldest first."""
        return self._history.ids.get(agent, array("q"))

    def agents(self) -> list[AgentRow]:
        """Return all agents that were ever heard, sorted by id."""
        with self.lock:
            now_s = self.now().timestamp()
            files = self._status_file.stamp, self._everyone_file.stamp, self._follower.after, self._revoked
            key = files, self.is_serving, self._live_version(), int(now_s // 60)
            if self._rows[0] != key:
                self._rows = key, self._made_rows()
            return self._rows[1]

    def agent(self, name: str) -> AgentRow | None:
        """Return the row of one agent; None where it was never heard."""
        return next((row for row in self.agents() if row.id == name), None)

    def version(self, topic: str) -> str:
        """Another value whenever a page about ``topic`` has news: fleet, runs, releases, ``run:ID`` or ``agent:ID``."""
        with self.lock:
            kind, _, name = topic.partition(":")
            parts: list[Any] = [self._follower.after, self.is_serving, self.trouble, self.is_loaded]
            slow_s = 10 if kind in {"fleet", "agent"} else 60
            parts.append(int((self.status_at or 0) // slow_s))
            if kind in {"fleet", "agent"}:
                parts += [self._fleet_mark, self._everyone_file.stamp, self._fault_version, self._revoked]
            if kind in {"fleet", "runs", "run"}:
                parts += [self._run_mark]
            if kind == "run" and name in self._curves:
                parts += [self._curves[name].version]
            elif kind in {"fleet", "runs", "agent"}:
                parts += [self._live_version()]
            if kind == "runs":
                parts += [self._curves[run].version for run in self._asked if run in self._curves]
            return f"{zlib.crc32(repr(parts).encode(errors='replace')):08x}"

    def refused(self) -> Sequence[RefusedDevice]:
        """Return the devices that were kept out in the last minutes; none where no coordinator serves."""
        return self.status.refused if self.is_serving else ()

    def _live_version(self) -> int:
        run = self._live_run()
        return 0 if run is None else self._curves[run].version

    def _live_run(self) -> str | None:
        """Return the newest run that has begun; its figures are newer than reports of others before it."""
        begun = self.begun_runs()
        return begun[-1] if begun else None

    def _made_rows(self) -> list[AgentRow]:
        """Return the rows of all agents, from what is read by now."""
        # All agents were written some time ago; those in the status are newer.
        written = [*self._everyone, *self.status.agents]
        heard = {row.agent.id: row.agent for row in written}
        run = self._live_run()
        facts = FleetFacts(
            heard,
            self._fleet.reported,
            self.book,
            refused={device.id: device.why for device in self.refused() if device.id},
            revoked=self._revoked,
            is_serving=self.is_serving,
            status_at=self.status_at,
            run=run or "",
            by_round={} if run is None else self._curves[run].newest(),
            now=self.now(),
        )
        return rows_of(facts)


def _without(body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return an object of the status without the fields that change all the time and are no news."""
    return {name: value for name, value in body.items() if name not in names}


def _mark(content: Iterable[Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())
