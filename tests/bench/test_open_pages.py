"""What open pages of the web view cost the rounds beside them: one run, with and without pages by turns.

``pytest -m bench -s tests/bench/test_open_pages.py``. Agents train nothing, so a round is the coordinator's work alone.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from statistics import median, quantiles

import pytest

from coordinator.broker import find_mosquitto
from coordinator.config import WebConfig
from coordinator.journal.entries import fact_of
from coordinator.research.bench import fleet
from coordinator.research.bench.measuring import FleetPlan, module, usage, wait_for
from coordinator.research.bench.rounds import PROGRAMS, broker, round_seconds
from coordinator.state.store import StateFolder
from coordinator.web.server import Settings, WebProcess

pytestmark = pytest.mark.bench

BLOCK, BLOCKS = 6, 12
"""Rounds of one kind after each other; the first of a block is not counted, as pages open or close during it."""

MOST_RATIO = 1.25
PAUSE_S = 0.5
"""Between two fetches of a page, as in web.js."""

PAGES = (
    ("fleet", "/"),
    ("fleet", "/?sort=personal&order=desc"),
    ("fleet", "/?find=agent-1"),
    ("agent:agent-0", "/agent?id=agent-0"),
    ("runs", "/runs"),
    ("runs", "/compare"),
    ("run:run-0001", "/run?id=run-0001"),
    ("run:run-0001", "/run?id=run-0001&before=20"),
    ("releases", "/releases"),
    ("releases", "/bundles"),
)


class Visitor(threading.Thread):
    """A browser with one page: its stream is open, and the page is fetched again after each news."""

    def __init__(self, port, topic, path):
        super().__init__(daemon=True)
        self.port = port
        self.topic = topic
        self.path = path
        self.stream = socket.create_connection(("127.0.0.1", port), 60)
        self.has_left = threading.Event()
        self.fetched = 0
        self.unlike = []

    def run(self):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # browsers are on other machines
        with contextlib.suppress(OSError), self.stream, self.stream.makefile("rb") as lines:
            self.stream.sendall(f"GET /events?topic={self.topic}&seen= HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            while not self.has_left.is_set() and (line := lines.readline()):
                if line.startswith(b"event: news"):
                    self.fetch()
                    self.has_left.wait(PAUSE_S)

    def fetch(self):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", self.path)
            answer = connection.getresponse()
            content = answer.read()
        self.fetched += 1
        if answer.status != 200 or b"</html>" not in content:
            self.unlike.append((self.path, answer.status, content[:500]))

    def leave(self):
        self.has_left.set()
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.join(60)


class Blocks:
    """Opens the pages in every second block of rounds, and notes what both kinds of rounds cost."""

    def __init__(self, port, pid):
        self.port = port
        self.pid = pid
        self.visitors = []
        self.fetched = 0
        self.cpu_s = {True: [], False: []}
        """With pages, without -> the coordinator's CPU seconds a round, of each block."""

        self._begin = 0, usage(pid).cpu_s

    def look(self, closed):
        """So many rounds are closed."""
        before, cpu_s = self._begin
        if closed // BLOCK == before // BLOCK:
            return
        self._begin = closed, usage(self.pid).cpu_s
        self.cpu_s[bool(self.visitors)].append((self._begin[1] - cpu_s) / (closed - before))
        self.leave()
        if closed // BLOCK % 2:
            self.visitors = [Visitor(self.port, *page) for page in PAGES]
            for visitor in self.visitors:
                visitor.start()

    def leave(self):
        for visitor in self.visitors:
            visitor.has_left.set()
        for visitor in self.visitors:
            visitor.leave()
            self.fetched += visitor.fetched
            assert not visitor.unlike
        self.visitors = []


@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_ten_open_pages_leave_the_rounds_of_two_hundred_agents_as_they_are(tmp_path):
    plan = FleetPlan(agents=200, payload="0.1MB", rounds=BLOCK * BLOCKS, transport="mosquitto")
    ready = threading.Event()
    state_path = tmp_path / "coordinator"
    with broker(plan.transport) as running, contextlib.ExitStack() as stack:
        address = running.config()
        config = tmp_path / "coordinator.toml"
        fleet.write_config(config, {**fleet.settings(plan), "state": state_path.name, "broker": {"url": address.url}})
        coordinator = stack.enter_context(
            module("coordinator", ["coordinator", "--config", config], tmp_path, module=PROGRAMS)
        )
        coordinator.answer()
        web = WebProcess(Settings(state_path, WebConfig(listen="127.0.0.1:0")), lambda _: ready.set())
        web.start()
        stack.callback(web.stop)
        to_agents = [address.host, address.port, plan.agents, fleet.FEDERATION]
        program = "coordinator.research.bench.fleet_mqtt"
        agents = stack.enter_context(module("fleet", to_agents, tmp_path, module=program))
        assert ready.wait(60)
        with StateFolder(state_path).look() as state:
            run = state.journal.request_run(fact_of("run_requested", fleet.request_for(plan).body()))
            blocks = Blocks(int(web.url.rsplit(":", 1)[1].strip("/")), coordinator.pid)
            web_s = usage(web.pid).cpu_s

            def is_over():
                blocks.look(len(state.journal.entries(run, ("round_closed",))))
                return bool(state.journal.entries(run, ("run_finished", "run_failed")))

            wait_for(is_over, [coordinator, agents], what="the run to end", limit_s=1800)
            blocks.leave()
            web_s = usage(web.pid).cpu_s - web_s
            seconds = round_seconds(state.journal, run)
    by_kind = {True: [], False: []}
    for number, one in enumerate(seconds):
        if number % BLOCK:
            by_kind[number // BLOCK % 2 == 1].append(one)
    open_s = median(by_kind[True])
    closed_s = median(by_kind[False])
    low, _, high = quantiles(by_kind[False])
    cpu = {kind: median(values) for kind, values in blocks.cpu_s.items()}
    print(f"\nrounds with pages {open_s:.3f} s, without {closed_s:.3f} s (half of them {low:.3f} to {high:.3f} s):")
    print(f"  ratio {open_s / closed_s:.3f}; the coordinator's CPU a round {cpu[True]:.3f} s, {cpu[False]:.3f} s")
    print(f"  {blocks.fetched} pages fetched; the view's CPU {web_s:.1f} s of {sum(seconds):.0f} s")
    assert blocks.fetched >= len(PAGES) * BLOCKS // 2, "the pages were live"
    assert open_s / closed_s <= MOST_RATIO
