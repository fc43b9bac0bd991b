"""What a message costs the coordinator does not depend on the number of agents."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest
from federation_duties import WIDE_TASK
from federation_harness import Clock, Federation

from coordinator.fleet.downloads import SLOW_SAMPLES
from coordinator.fleet.roster import Roster
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.rounds.request import Request
from coordinator.service import coordinator as service
from coordinator.state.store import StateFolder
from edge_agent.wire.messages import codec, down, up


def heartbeat(agent, boot="b1", **about):
    return codec.encode(up.Heartbeat(boot=boot, seq=1, **about))


def hello(boot="b1", condition="ok"):
    return up.Hello(software="x", tier="train", samples=1, boot=boot, condition=condition, connection=1)


def joined(fed, count):
    """A coordinator with so many agents in a round; they only exist in its tables."""
    for number in range(count):
        fed.coordinator.handle(f"m{number:04d}", "up", codec.encode(hello()))


def calls(function):
    """Calls of Python functions, each step of a generator included."""
    count = 0

    def profile(_frame, event, _arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", ["idle", "at_work"])
def test_a_heartbeat_takes_as_many_steps_with_400_agents_as_with_20(tmp_path, kind):
    counts = []
    for size in (20, 400):
        with Federation(tmp_path / str(size), agents=(), cohort={"min_agents": size}) as fed:
            fed.settle()
            joined(fed, size)
            run = {}
            if kind == "at_work":
                fed.request(rounds=1)
                fed.until(lambda fed=fed: fed.coordinator.collector.open_round)
                run = {"run": fed.run_id, "round": 1}
            payload = heartbeat("m0007", **run)
            fed.coordinator.handle("m0007", "h", payload)
            counts.append(calls(lambda fed=fed, payload=payload: fed.coordinator.handle("m0007", "h", payload)))
    assert counts[0] == counts[1]


def test_a_report_on_a_broadcast_takes_as_many_steps_with_400_agents_as_with_20(tmp_path):
    """Whether its agent is too slow to listen with the others was decided by the rates of all of them."""
    counts = []
    for size in (20, 400):
        with Federation(
            tmp_path / str(size), agents=(), cohort={"min_agents": size}, task=WIDE_TASK, capture=True
        ) as fed:
            fed.settle()
            joined(fed, size)
            fed.request(rounds=1)
            fed.until(lambda fed=fed: fed.coordinator.collector.open_round)
            digest = fed.messages(fed.topics.down("m0000"), down.Job)[0].blobs[0].digest
            offer = fed.coordinator.distributor._offers[digest]

            def say(agent, message, fed=fed):
                stamped = message.model_copy(update={"boot": "b1", "seq": 1})
                fed.coordinator.handle(agent, "up", codec.encode(stamped))

            agents = fed.coordinator.collector.open_round.cohort
            for agent in agents:
                say(agent, up.Want(digest=digest, ranges=((0, 103),), direct=False))
            for arrived in range(1, 7):
                fed.clock.now += 0.2
                fed.coordinator.step(0)
                for agent in agents:
                    say(agent, up.Progress(digest=digest, missing=((2 * arrived, 103),)))
            pace = fed.coordinator.distributor._paces["m0007"]
            assert len(offer.carousel.listeners) == size
            assert pace.samples >= SLOW_SAMPLES
            assert pace.rate > 0
            report = up.Progress(digest=digest, missing=((20, 103),))
            counts.append(calls(lambda say=say, report=report: say("m0007", report)))
    assert counts[0] == counts[1]


class Looks:
    """Counts how often the coordinator looks at its run, which takes ``look_s`` of the clock."""

    def __init__(self, fed, look_s):
        self.times = []
        self.look_s = look_s
        advance = fed.coordinator.runs.advance

        def look():
            self.times.append(fed.clock.now)
            fed.clock.now += self.look_s
            advance()

        fed.coordinator.runs.advance = look


def feed(fed, messages, apart_s):
    """So many heartbeats, handled as they come."""
    for _ in range(messages):
        fed.broker.route(fed.topics.heartbeat("m0000"), heartbeat("m0000"))
        fed.clock.now += apart_s
        assert fed.coordinator.step(0)


def test_messages_share_a_look_at_the_run_where_it_takes_long(tmp_path):
    """1,000 messages in a second, and 10 ms for a look: with one for each message nothing else would be done."""
    with Federation(tmp_path, agents=()) as fed:
        fed.settle()
        joined(fed, 1)
        looks = Looks(fed, look_s=0.01)
        feed(fed, 300, 0.001)
        looks.times.clear()
        feed(fed, 1000, 0.001)
        apart = [b - a for a, b in zip(looks.times, looks.times[1:], strict=False)]
        assert 8 <= len(looks.times) <= 12
        assert max(apart) <= service.ADVANCE_S + 0.01 + 0.0011  # the look itself, and the message after it


def test_looks_take_the_share_of_the_time_that_the_guide_names(tmp_path):
    """Messages come so densely that each look that is due begins at once."""
    page = Path(service.__file__).parents[2] / "examples/guides/runs.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    (named,) = re.findall(r"looks of up to (\d+ ms take .*?)\. ", text)
    shares = re.findall(r"(\d+) ms(?: take)? (\d+) %", named)
    assert [took_ms for took_ms, _ in shares] == ["5", "20"]
    up_to = shares[0][1]
    for took_ms, percent in [("1", up_to), ("2", up_to), *shares]:
        with Federation(tmp_path / took_ms, agents=()) as fed:
            fed.settle()
            joined(fed, 1)
            looks = Looks(fed, look_s=int(took_ms) / 1000)
            feed(fed, 2000, 0.0001)
            looks.times.clear()
            since = fed.clock.now
            feed(fed, 5000, 0.0001)
            took_s = len(looks.times) * looks.look_s
            assert 100 * took_s / (fed.clock.now - since) == pytest.approx(int(percent), abs=1)


def test_a_short_look_follows_each_message_at_once(tmp_path):
    """With a few agents a look takes some 20 us, and nothing waits for it."""
    with Federation(tmp_path, agents=()) as fed:
        fed.settle()
        joined(fed, 1)
        looks = Looks(fed, look_s=0.00002)
        feed(fed, 100, 0.001)
        assert len(looks.times) == 100


def test_one_long_look_does_not_delay_the_messages_after_it(tmp_path):
    """An aggregation of 10 s, and then short looks as before: each message has its own."""
    with Federation(tmp_path, agents=()) as fed:
        fed.settle()
        joined(fed, 1)
        looks = Looks(fed, look_s=0.00002)
        feed(fed, 10, 0.001)
        looks.look_s = 10.0
        feed(fed, 1, 0.001)
        looks.look_s = 0.00002
        looks.times.clear()
        feed(fed, 20, 0.001)
        assert len(looks.times) >= 19


def test_the_look_that_messages_wait_for_comes_without_another_message(tmp_path):
    """It is due within 100 ms, and `idle_s` says when."""
    with Federation(tmp_path, agents=()) as fed:
        fed.settle()
        joined(fed, 1)
        looks = Looks(fed, look_s=0.002)
        feed(fed, 30, 0.001)
        while fed.coordinator.idle_s() == 0.0 or not fed.coordinator._is_behind:
            feed(fed, 1, 0.001)
        looks.times.clear()
        pause_s = fed.coordinator.idle_s()
        assert 0 < pause_s <= service.ADVANCE_S
        fed.clock.now += pause_s
        assert not fed.coordinator.step(0)
        assert len(looks.times) == 1


class PlainRoster:
    """Leases by a search through all agents, which is slow and plainly right."""

    def __init__(self, lease_s):
        self.lease_s = lease_s
        self.heard = {}
        self.stalled = set()
        self.since = 0.0

    def expire(self, now):
        if self.since is None:
            return []
        silent = sorted(a for a, at in self.heard.items() if now - max(at, self.since) > self.lease_s)
        for agent in silent:
            del self.heard[agent]
        return silent

    def present(self):
        return sorted(self.heard.keys() - self.stalled)


@pytest.mark.parametrize("seed", range(5))
def test_leases_and_presence_are_those_of_a_plain_search(seed):
    rng = random.Random(seed)
    clock = Clock(0.0)
    roster = Roster(clock, lease_s=10)
    plain = PlainRoster(10)
    names = [f"a{number}" for number in range(12)]
    for _ in range(3000):
        agent = rng.choice(names)
        action = rng.randrange(8)
        if action <= 1:
            condition = rng.choice(["ok", "stalled"])
            roster.hello(agent, hello(condition=condition))
            plain.heard[agent] = clock.now
            (plain.stalled.add if condition == "stalled" else plain.stalled.discard)(agent)
        elif action <= 4 and roster.heard(agent, "b1"):
            plain.heard[agent] = clock.now
        elif action == 5:
            roster.mark_offline(agent)
            plain.heard.pop(agent, None)
        elif action == 6 and rng.random() < 0.05:
            roster.disconnected() if plain.since is not None else roster.connected()
            plain.since = clock.now if plain.since is None else None
        else:
            clock.now += rng.choice([0.0, 0.25, 1.0, 3.0])
            assert roster.expire() == plain.expire(clock.now)
        assert roster.present() == plain.present()
        assert roster.ready == set(plain.present())


def test_a_coordinator_at_rest_reads_its_journal_only_when_it_has_changed(tmp_path, monkeypatch):
    """A look for requests came five times a second, and read all runs that there have ever been."""
    with Federation(tmp_path, agents=2) as fed:
        fed.request(rounds=1)
        fed.finish()
        fed.wait(1)
        reads = []
        plain = SqliteJournal.entries
        monkeypatch.setattr(SqliteJournal, "entries", lambda *a, **k: reads.append(k or a) or plain(*a, **k))
        fed.wait(20)
        assert reads == []
        with StateFolder(fed.config.state).look() as other:  # as 'headwater run --no-wait' in another process
            fed.run = other.journal.request_run(fact_of("run_requested", Request("fedavg", {}, 1, 0, fed.task).body()))
        monkeypatch.undo()
        fed.finish()
        assert fed.record.status == "finished"
