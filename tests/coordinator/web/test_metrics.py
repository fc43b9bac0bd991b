"""Figures for Prometheus: parsed by its own client library, with numbers of a federation that was counted by hand."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime, timedelta, timezone

import asgi_client
import numpy as np
import pytest
from federation_duties import WIDE_TASK
from federation_harness import Federation
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from web_site import agent_status

from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.state import store
from coordinator.state.fleet_rows import HeardAgent
from coordinator.state.status_file import Status
from coordinator.state.store import StateFolder
from coordinator.views.counts import Counts, reason_label
from coordinator.web import health, metrics
from coordinator.web.metrics import Reader, Snapshot, exposition
from coordinator.web.run_curves import Spread
from edge_agent import __version__
from edge_agent.core.worst_tenth import worst_tenth
from edge_agent.wire.messages import codec, up

NOW = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
UNITS = ("seconds", "bytes", "ratio", "total", "info")


def parsed(text):
    """(name, labels) -> value, of all samples."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, "one series twice"
            found[key] = sample.value
    return found


def status(**more):
    return {"federation": "home", "at": NOW.isoformat(), "broker": "mqtt://b", "broker_away": False, **more}


def figures(**known):
    known = {"status": status(), **known}
    known["status"] = Status(known["status"])
    known["agents"] = [HeardAgent.from_body(agent) for agent in known.get("agents", ())]
    return parsed(exposition(Snapshot(NOW, **known)))


def test_a_federation_that_was_counted_by_hand(tmp_path):
    with Federation(tmp_path, task=WIDE_TASK) as fed:
        fed.request(rounds=3)
        fed.finish()
        fed.coordinator.catch_up()
        reader = Reader(fed.config.state)
        before = parsed(exposition(reader.snapshot()))
        closed = [entry.body for entry in fed.entries("round_closed")]
        fed.request(rounds=2)
        fed.finish()
        after = parsed(exposition(reader.snapshot()))
        afresh = parsed(exposition(Reader(fed.config.state).snapshot()))
        reader.close()
    assert before["headwater_info", ("federation", fed.config.federation), ("version", __version__)] == 1
    assert before["headwater_round_duration_seconds_count",] == 3
    assert before["headwater_round_duration_seconds_sum",] == pytest.approx(sum(one["seconds"] for one in closed))
    assert before["headwater_updates_accepted_total",] == 9, "three agents, three rounds"
    assert before["headwater_round_received_bytes_total",] == sum(one["bytes_up"] for one in closed) > 0
    assert before["headwater_runs", ("status", "finished")] == 1
    assert before["headwater_coordinator_starts_total",] == 1
    assert before["headwater_agents", ("state", "online"), ("tier", "train")] == 3
    assert before["headwater_coordinator_resident_memory_bytes",] > 1e6
    assert before["headwater_state_bytes", ("part", "journal")] > 0
    assert after["headwater_round_duration_seconds_count",] == 5, "read on from where it was"
    counted = [key for key in after if key[0].endswith(("_total", "_bucket", "_count", "_sum"))]
    assert {key: after[key] for key in counted} == {key: afresh[key] for key in counted}, "a new reader counts the same"
    assert "headwater_round_opened_timestamp_seconds" not in {name for name, *_ in after}


def test_rejected_late_and_failed_are_told_apart(tmp_path):
    with SqliteJournal(tmp_path / "journal.db", now=lambda: NOW) as journal:
        run = journal.request_run(fact_of("run_requested", {}))
        journal.append(fact_of("run_started", {}), run=run)
        journal.append(fact_of("round_opened", {"cohort": ["a", "b", "c"]}), run=run, round=1)
        for agent, reason in (("a", "UpdateRejected: NaN"), ("b", "DiskError: full"), ("c", "Evil{}\n: x")):
            journal.append(fact_of("update_refused", {"reason": reason}), run=run, round=1, agent=agent)
        reader = Reader(tmp_path, lambda: NOW)
        (tmp_path / "status.json").write_text(json.dumps(status()))
        opened = parsed(exposition(reader.snapshot()))
        body = {"clients": 0, "late": [], "seconds": 61.0, "waiting_s": 0.2}
        journal.append(fact_of("round_closed", body), run=run, round=1, digest="0" * 64)
        journal.append(fact_of("round_opened", {"cohort": ["a"]}), run=run, round=2)
        journal.append(fact_of("update_refused", {"reason": "the round is over"}), run=run, round=1, agent="d")
        journal.append(
            fact_of("round_closed", {**body, "late": [{"agent": "d", "round": 1}], "clients": 1}),
            run=run,
            round=2,
            digest="0" * 64,
        )
        journal.append(fact_of("run_failed", {}), run=run)
        closed = parsed(exposition(reader.snapshot()))
        reader.close()
    assert opened["headwater_round_opened_timestamp_seconds",] == NOW.timestamp()
    reasons = {key[1][1]: value for key, value in closed.items() if key[0] == "headwater_updates_rejected_total"}
    assert reasons == {"UpdateRejected": 1, "DiskError": 1, "other": 1}
    assert (closed["headwater_updates_late_total",], closed["headwater_updates_accepted_total",]) == (1, 1)
    buckets = {key[1][1]: v for key, v in closed.items() if key[0] == "headwater_round_duration_seconds_bucket"}
    assert (buckets["60.0"], buckets["120.0"], buckets["+Inf"]) == (0, 2, 2)
    assert closed["headwater_runs", ("status", "failed")] == 1


def test_names_follow_prometheus_and_no_label_grows_with_fleet_or_time(request):
    """Hostile ids, faults and reasons of a thousand agents make no series of their own."""
    agents = [
        {
            "id": f'a{n}"}}\n evil',
            "tier": "train" if n % 2 else f"tier-{n}",
            "present": n % 3 > 0,
            "condition": "fault",
            "fault": {"code": f"code-{n}" if n % 2 else "data"},
        }
        for n in range(1000)
    ]
    few = figures(agents=agents[:10], counts=Counts())
    many = figures(agents=agents, counts=Counts())
    assert few.keys() == many.keys()
    assert sum(value for key, value in many.items() if key[0] == "headwater_agents") == 1000
    faults = {key[1][1]: value for key, value in many.items() if key[0] == "headwater_agents_with_fault"}
    assert (faults["data"], faults["other"]) == (333, 333)
    labels = {label for _, *pairs in many for label, _ in pairs}
    assert labels <= {"tier", "state", "code", "status", "stage", "outcome", "reason", "le", "part", "version"} | {
        "federation"
    }
    for name, *_ in many:
        assert re.fullmatch(r"headwater_[a-z_]+", name)
        assert not re.search(r"_(ms|s|mb|kb|minutes|percent)(_|$)", name), "base units, in full words"
    assert len(many) < 120


def test_privacy_waiting_and_accuracy():
    run = {"id": "run-0001", "round": 3, "rounds": 10}
    run["privacy"] = {"epsilon": 1.5, "epsilon_left": 0.5, "delta": 1e-5, "rounds_without_noise": 2}
    waiting = {"for": "updates", "whom": ["a"], "count": 4, "seconds_left": 12.5}
    accuracies = {"personal": [0.1 * n for n in range(1, 11)]}
    found = figures(status=status(run=run, waiting=waiting), accuracies=accuracies)
    assert (found["headwater_privacy_epsilon",], found["headwater_privacy_epsilon_left",]) == (1.5, 0.5)
    assert (found["headwater_waiting_agents",], found["headwater_waiting_left_seconds",]) == (4, 12.5)
    assert found["headwater_accuracy_ratio", ("scope", "personal"), ("statistic", "mean")] == pytest.approx(0.55)
    assert found["headwater_accuracy_ratio", ("scope", "personal"), ("statistic", "worst_tenth")] == 0.1


def test_the_worst_tenth_is_the_same_agents_in_status_metrics_and_pages(tmp_path):
    """Of 15 agents the worst two, 0.00 and 0.01; each tenth is rounded up."""
    with Federation(tmp_path, agents=()) as fed:
        fed.settle()
        for number in range(15):
            said = up.Hello(software="x", tier="train", samples=1, boot="b1", connection=1)
            fed.coordinator.handle(f"m{number}", "up", codec.encode(said))
            fed.coordinator.roster.trained(f"m{number}", {"acc.personal": number / 100})
        in_status = fed.coordinator.roster.accuracies()["personal"].worst_tenth
    scraped = figures(accuracies={"personal": [number / 100 for number in range(15)]})
    in_metrics = scraped["headwater_accuracy_ratio", ("scope", "personal"), ("statistic", "worst_tenth")]
    on_page = Spread.of(np.arange(15) / 100).worst
    assert [in_status, in_metrics, on_page] == pytest.approx([0.005] * 3)
    assert [len(worst_tenth(range(number))) for number in (1, 9, 10, 11, 30, 250)] == [1, 1, 1, 2, 3, 25]


def test_what_a_silent_coordinator_said_last_is_not_shown_as_what_is(tmp_path):
    old = status(at=(NOW - timedelta(seconds=31)).isoformat(), run={"id": "run-0001", "rounds": 3})
    found = figures(status=old, agents=[{"tier": "head", "present": True, "condition": "ok"}])
    assert (found["headwater_coordinator_up",], found["headwater_coordinator_ready",]) == (0, 0)
    assert not {"headwater_agents", "headwater_run_active", "headwater_broker_up"} & {name for name, *_ in found}


def test_a_folder_that_is_missing_damaged_or_replaced_costs_no_scrape(tmp_path):
    state = tmp_path / "state"
    reader = Reader(state, lambda: NOW)
    assert parsed(exposition(reader.snapshot()))["headwater_journal_up",] == 0
    with StateFolder(state).open("test") as folder:
        folder.journal.request_run(fact_of("run_requested", {}))
    assert parsed(exposition(reader.snapshot()))["headwater_runs", ("status", "requested")] == 1
    shutil.rmtree(state)
    assert parsed(exposition(reader.snapshot()))["headwater_journal_up",] == 0
    with StateFolder(state).open("test"):
        pass
    assert parsed(exposition(reader.snapshot()))["headwater_runs", ("status", "requested")] == 0, "of the new folder"
    reader.close()
    (state / "journal.db").write_bytes(b"no database" * 1000)
    (state / "status.json").write_text("{half")
    assert parsed(exposition(reader.snapshot()))["headwater_journal_up",] == 0


def test_updates_of_a_closed_round_are_read_once_and_in_pieces(tmp_path, monkeypatch):
    """Seven agents, three entries in a transaction; accuracies 0.1 to 0.7, and then one of 0.9."""
    monkeypatch.setattr(metrics, "ENTRIES_AT_ONCE", 3)
    asked = []
    entries = SqliteJournal.entries

    def noted(journal, *args, **kwargs):
        found = entries(journal, *args, **kwargs)
        asked.append((kwargs["kinds"], len(found)))
        return found

    def mean():
        return figures(accuracies=reader.snapshot().accuracies)[
            "headwater_accuracy_ratio", ("scope", "personal"), ("statistic", "mean")
        ]

    def close(number, *accuracies):
        for agent, accuracy in enumerate(accuracies):
            body = {"metrics": {"acc.personal": accuracy, "loss": 9.0}}
            journal.append(fact_of("update_accepted", body), run=run, round=number, agent=f"a{agent}")
        journal.append(fact_of("round_closed", {"clients": len(accuracies)}), run=run, round=number, digest="0" * 64)

    with SqliteJournal(tmp_path / "journal.db", now=lambda: NOW) as journal:
        run = journal.request_run(fact_of("run_requested", {}))
        close(1, *(n / 10 for n in range(1, 8)))
        reader = Reader(tmp_path, lambda: NOW)
        monkeypatch.setattr(SqliteJournal, "entries", noted)
        assert mean() == pytest.approx(0.4)
        updates = [found for kinds, found in asked if "update_accepted" in kinds]
        assert updates == [3, 3, 1, 0]
        assert max(found for _, found in asked) == 3
        asked.clear()
        assert mean() == pytest.approx(0.4)
        assert [found for _, found in asked] == [0], "nothing is new"
        close(2, 0.9)
        assert mean() == pytest.approx(0.9)
        assert reader.snapshot().counts.accepted == 8
        reader.close()


def test_who_asks_while_the_folder_is_read_gets_the_figures_before(tmp_path, monkeypatch):
    app = Starlette(routes=metrics.routes(tmp_path, lambda: NOW))
    first = asgi_client.get(app, "/metrics").content
    monkeypatch.setattr(metrics, "LEAST_PAUSE_S", 0.0)
    second = []

    def slow(_):
        second.append(asgi_client.get(app, "/metrics").content)  # another client, meanwhile
        return Snapshot(NOW, Status(status()))

    monkeypatch.setattr(Reader, "snapshot", slow)
    assert asgi_client.get(app, "/metrics").content != first
    assert second == [first]


@pytest.mark.parametrize("reason, label", [("StateError: x", "StateError"), ("log: x", "other"), ("", "other")])
def test_reasons_are_classes_of_our_tree(reason, label):
    assert reason_label(reason) == label


@pytest.mark.parametrize(
    "written, code, words",
    [
        (None, 503, "has not written a status yet"),
        ("{half", 503, "has not written a status yet"),
        (status(), 200, None),
        (status(at=(NOW - timedelta(seconds=60)).isoformat()), 503, "nothing heard from the coordinator for 60 s"),
        (status(broker_away=True), 503, "the broker at mqtt://b does not answer"),
        (status(other_coordinator="boot 7"), 503, "another coordinator serves: boot 7"),
        (status(run={"id": "run-1", "stalled": {"reason": "disk full"}}), 503, "run-1 is stalled: disk full"),
    ],
)
def test_live_and_ready(tmp_path, written, code, words):
    if written is not None:
        (tmp_path / "status.json").write_text(written if isinstance(written, str) else json.dumps(written))
    app = Starlette(routes=[*health.routes(tmp_path, lambda: NOW), *metrics.routes(tmp_path, lambda: NOW)])
    assert json.loads(asgi_client.get(app, "/live").content) == {"live": True}
    answer = asgi_client.get(app, "/ready")
    reason = json.loads(answer.content)["reason"]
    assert answer.status == code
    assert reason is None if words is None else words in reason
    assert health.main(["--state", str(tmp_path), "--ready"], lambda: NOW) == (code != 200)
    is_silent = words is not None and ("not written" in words or "nothing heard" in words)
    assert health.main(["--state", str(tmp_path)], lambda: NOW) == is_silent, "a restart brings no broker back"
    scraped = asgi_client.get(app, "/metrics")
    assert scraped.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert parsed(scraped.content)["headwater_coordinator_ready",] == (code == 200)


def test_an_unchanged_status_is_parsed_once_and_a_changed_one_at_once(tmp_path, monkeypatch):
    parsed_files = []
    loads = store.json.loads
    monkeypatch.setattr(store.json, "loads", lambda data: parsed_files.append(1) or loads(data))
    path = tmp_path / "status.json"
    path.write_text(json.dumps(status()))
    app = Starlette(routes=health.routes(tmp_path, lambda: NOW))
    assert [asgi_client.get(app, "/ready").status for _ in range(20)] == [200] * 20
    assert len(parsed_files) == 1
    path.write_text(json.dumps(status(broker_away=True)))
    assert asgi_client.get(app, "/ready").status == 503
    path.write_text(json.dumps(status()))
    assert asgi_client.get(app, "/ready").status == 200
    path.write_text("{half")
    assert asgi_client.get(app, "/ready").status == 200, "being written: the one before counts until it is too old"
    path.unlink()
    assert asgi_client.get(app, "/ready").status == 503


def test_a_flood_of_questions_reads_the_folder_once_a_second(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Reader, "snapshot", lambda _: asked.append(1) or Snapshot(NOW, Status(status())))
    monkeypatch.setattr(metrics.time, "monotonic", lambda: 100.0)
    app = Starlette(routes=metrics.routes(tmp_path))
    assert {asgi_client.get(app, "/metrics").status for _ in range(50)} == {200}
    assert len(asked) == 1


def test_agents_that_tell_of_their_inputs_are_counted():
    said = {"a": 0.0, "b": 1.7e9, "c": 1.7e9, "d": None}
    found = figures(agents=[agent_status(name, inputs_since=since) for name, since in said.items()])
    assert found["headwater_agents_by_inputs", ("inputs", "changed")] == 2
    assert found["headwater_agents_by_inputs", ("inputs", "as fitted")] == 1


def test_a_fault_of_an_agent_is_counted_by_its_code(tmp_path):
    with Federation(tmp_path, task=WIDE_TASK) as fed:
        fed.until(lambda: len(fed.coordinator.roster.ready) == 3)
        fault = up.Fault(
            error="DataError", code="data", message="no samples", remedy="add some", boot=fed.agents["a0"].boot
        )
        fed.coordinator.handle("a0", "up", codec.encode(fault))
        fed.coordinator._status_writer._write(fed.coordinator.status)
        found = parsed(exposition(Reader(fed.config.state).snapshot()))
    assert found["headwater_agents_with_fault", ("code", "data")] == 1
    assert found["headwater_agents", ("state", "fault"), ("tier", "train")] == 1
