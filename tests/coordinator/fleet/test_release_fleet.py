"""What a release costs a coordinator with a large fleet: each report, each step of the loop, a restart, the status."""

from __future__ import annotations

import gc
import time
from datetime import datetime, timezone

import pytest

from coordinator.fleet.downloads import Distributor
from coordinator.fleet.rollout import OFFERS_S, Rollout
from coordinator.journal.entries import BundleExported
from coordinator.state.release_rows import ReleaseRow, device_rows
from coordinator.state.store import StateFolder
from coordinator.views.releases import Book, Plan, book_of
from edge_agent.wire.messages.down import Install
from edge_agent.wire.messages.up import Hello, Report
from edge_agent.wire.topics import Topics

NOW = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
RUN = f"run-0001-{'0' * 32}"
BUNDLE = "a" * 64
AT_ONCE = 64
"""Messages whose entries are written together."""


class Fleet:
    """A rollout beside ``count`` devices, all of them online."""

    def __init__(self, state, count, clock, sent_s=0.0):
        self.names = [f"device-{number:05}" for number in range(count)]
        self.state = state
        self.clock = clock
        self.sent = []
        self.took = []
        """Seconds of each step."""

        self.waited_s = 0.0
        self._sent_s = sent_s
        self.digest = state.blobs.put(b"a bundle")
        self.rollout = self.start()

    def start(self):
        distributor = Distributor(Topics("home"), lambda *_, **__: None, self._send, self.now_s)
        return Rollout(self.state, self, distributor, self._send, self.now_s, lambda: NOW)

    def present(self, _tier):
        return list(self.names)

    def get(self, _agent):
        return None

    def now_s(self):
        return self.clock() + self.waited_s

    def _send(self, agent, message):
        self.waited_s += self._sent_s
        message.model_dump_json()
        self.sent.append((agent, type(message)))

    def step(self, work, *given):
        begin = time.perf_counter()
        result = work(*given)
        self.took.append(time.perf_counter() - begin)
        return result

    def hear(self, work, message):
        for begin in range(0, len(self.names), AT_ONCE):
            with self.state.journal.deferring():
                for name in self.names[begin : begin + AT_ONCE]:
                    self.step(work, name, message)
            self.state.journal.flush()
            self.tick()

    def tick(self):
        self.waited_s += 0.25
        self.step(self.rollout.tick)

    def hellos(self):
        self.hear(self.rollout.hello, Hello(software="1", tier="head", samples=1, bundle_id=""))

    def release(self, canary):
        bundle = BundleExported(bundle_id=BUNDLE)
        self.step(self.rollout.make, RUN, 1, self.digest, bundle, Plan(canary=canary))
        for _ in range(1000):
            self.tick()

    def reports(self):
        figures = {"samples": 10, "acc_personal": 0.5, "metrics": {"rolled_back": 0.0, "acc.before": 0.4}}
        self.hear(self.rollout.reported, Report(run=RUN, about=BUNDLE, release=1, bundle_id=BUNDLE, **figures))

    def offered(self):
        return [agent for agent, kind in self.sent if kind is Install]


@pytest.fixture
def state(tmp_path):
    with StateFolder(tmp_path / "state").open("test") as opened:
        yield opened


def test_a_release_is_offered_to_a_fleet_in_steps(state):
    """Each message takes 1 ms of this clock; a restart and new commands in between change nothing."""
    fleet = Fleet(state, 100, lambda: 0.0, sent_s=0.001)
    fleet.hellos()
    fleet.rollout.make(RUN, 1, fleet.digest, BundleExported(bundle_id=BUNDLE))
    counts = [len(fleet.offered())]
    while len(fleet.offered()) < 100:
        fleet.tick()
        counts.append(len(fleet.offered()))
        assert counts[-1] > counts[-2]
    at_once = round(OFFERS_S / 0.001)
    assert max(after - before for before, after in zip([0, *counts], counts, strict=False)) <= at_once + 1
    assert sorted(fleet.offered()) == fleet.names
    fleet.tick()
    assert len(fleet.offered()) == 100


def test_reports_leave_the_drawing_of_a_canary_to_the_next_tick(state, monkeypatch):
    drawn = []
    real = Book.draw_canary
    monkeypatch.setattr(Book, "draw_canary", lambda *given: drawn.append(1) or real(*given))
    fleet = Fleet(state, 256, lambda: 0.0)
    fleet.hellos()
    fleet.release("100%")
    assert len(fleet.offered()) == 256
    drawn.clear()
    fleet.reports()
    release = fleet.rollout.book.releases[0]
    assert release.count["ok"] == 256
    assert release.stage == "paused"
    assert len(drawn) <= 2 * (256 // AT_ONCE + 1), "some for each tick, none for a report"


@pytest.mark.bench
@pytest.mark.parametrize("canary", ["", "10%", "100%"])
def test_10_000_devices_report_on_one_release(state, canary):
    """Budgets: 1 ms a report, 1 s for the status, 50 ms for the longest step."""
    fleet = Fleet(state, 10_000, time.perf_counter)
    gc.collect()
    figures = {}
    for name in ("hellos", "release", "reports"):
        fleet.took.clear()
        begin = time.perf_counter()
        fleet.release(canary) if name == "release" else getattr(fleet, name)()
        figures[f"{name}, us a device"] = 1e6 * (time.perf_counter() - begin) / 10_000
        figures[f"{name}, longest step, ms"] = 1e3 * max(fleet.took)
    again = fleet.start()
    begin = time.perf_counter()
    again.tick()
    figures["restart, ms"] = 1e3 * (time.perf_counter() - begin)
    begin = time.perf_counter()
    book = book_of(state.journal)
    rows = device_rows(book, NOW)
    shown = [ReleaseRow.from_release(book, release, NOW).to_json() for release in book.releases]
    figures["status, ms"] = 1e3 * (time.perf_counter() - begin)
    print("", f"canary {canary or 'none'}", *(f"  {name:30} {value:9.1f}" for name, value in figures.items()), sep="\n")
    assert len(rows) == 10_000
    assert sum(shown[0]["outcomes"].values()) == (1000 if canary == "10%" else 10_000)
    assert [again.book.releases[0].results, again.book.devices] == [book.releases[0].results, book.devices]
    assert figures["reports, us a device"] < 1000
    assert figures["status, ms"] < 1000
