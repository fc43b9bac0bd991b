"""The final evaluation of a large fleet: agents are asked in turn, looked at now and then, and recorded together."""

from __future__ import annotations

import json
from types import SimpleNamespace

from federation_harness import Federation

from coordinator.journal.sqlite import SqliteJournal
from coordinator.rounds import context
from coordinator.rounds.context import LOOK_AGAIN_S, Reports
from coordinator.runs import results, run_loop

AGENTS = 7


def jobs_under_way(fed):
    """The most agents at a time that were asked for the final evaluation and had not got the model yet."""
    asked = set()
    most = 0
    for topic, payload in fed.broker.captured:
        if not topic.endswith(("/up", "/dn")):
            continue
        agent = topic.split("/")[-2]
        message = json.loads(payload)
        if message["type"] == "job" and message.get("purpose") == "personalize":
            asked.add(agent)
            most = max(most, len(asked))
        elif message["type"] == "have":
            asked.discard(agent)
    return most


def test_agents_are_asked_in_turn_and_all_of_them_report(tmp_path, monkeypatch):
    monkeypatch.setattr(run_loop, "ASKED_AT_ONCE", 3)
    with Federation(tmp_path, agents=AGENTS, capture=True) as fed:
        fed.request(rounds=1)
        fed.finish()
        assert 0 < jobs_under_way(fed) <= 3
        assert len(fed.entries("release_reported")) == AGENTS


def test_agents_with_slow_links_delay_the_next_ones_by_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(run_loop, "ASKED_AT_ONCE", 2)
    with Federation(tmp_path, agents=4, capture=True) as fed:
        monkeypatch.setattr(type(fed.coordinator.distributor), "waiting_for_blobs", lambda *_: 2)
        begin = fed.clock.now
        fed.request(rounds=1)
        fed.finish()
        assert run_loop.TURN_S <= fed.clock.now - begin < 3 * run_loop.TURN_S
        assert len(fed.entries("release_reported")) == 4


def test_results_of_many_agents_reach_the_disk_in_few_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RECORDED_AT_ONCE", 3)
    written = []
    append = SqliteJournal.append

    def noting(journal, fact, **columns):
        if fact.kind == "release_reported":
            written.append(journal.has_deferred)
        return append(journal, fact, **columns)

    with Federation(tmp_path, agents=AGENTS) as fed:
        monkeypatch.setattr(SqliteJournal, "append", noting)
        fed.request(rounds=1)
        fed.finish()
        agents = [record["id"] for record in fed.coordinator.state.run(fed.run).metrics() if record["kind"] == "agent"]
        assert agents == [f"a{number}" for number in range(AGENTS)]
        assert [entry.agent for entry in fed.entries("release_reported")] == agents
    assert written == [False, True, True, False, True, True, False], "each part waits for the disk once"


def test_ten_thousand_pending_agents_are_not_looked_at_after_each_message():
    agents = tuple(f"a{number:05}" for number in range(10_000))
    clock = SimpleNamespace(now=0.0)
    looked_at = []
    roster = SimpleNamespace(ready=set(agents), heard_s=lambda: clock.now, deaf_s=0.0, patience=lambda _: None)
    reports = Reports(SimpleNamespace(roster=roster, clock=lambda: clock.now))
    is_pending = reports._is_pending
    reports._is_pending = lambda agent: looked_at.append(agent) or is_pending(agent)
    steps = reports.collect(agents, lambda _: None)
    for _ in range(100):
        clock.now += LOOK_AGAIN_S / 100
        waiting = next(steps)
    assert len(looked_at) <= 2 * len(agents)
    assert waiting.whom == agents
    for agent in agents[: -context.FEW_AGENTS]:
        reports.fault(agent, "gone")
    assert len(next(steps).whom) == context.FEW_AGENTS, "few are looked at each time"
    roster.ready.clear()
    assert next(steps, None) is None
