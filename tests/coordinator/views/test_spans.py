"""Runs as OpenTelemetry traces: read by the SDK's own exporter in memory, times worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest
from federation_harness import Federation
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coordinator.cli import main
from coordinator.cli import traces as cli_traces
from coordinator.cli.traces import Ended, sender
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.views.spans import spans_of
from edge_agent.core.installation import install_command

BEGIN = datetime(2030, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def journaled(tmp_path):
    """A run of two rounds whose entries were written at these seconds."""
    now = [BEGIN]
    with SqliteJournal(tmp_path / "journal.db", now=lambda: now[0]) as journal:
        run = journal.request_run(fact_of("run_requested", {"method": "fedavg", "rounds": 3}))

        def at(seconds, kind, body=None, **more):
            now[0] = BEGIN + timedelta(seconds=seconds)
            journal.append(fact_of(kind, body or {}), run=run, **more)

        at(2, "run_started")
        at(5, "round_opened", round=1, body={"cohort": ["a", "b"]})
        at(8, "update_accepted", round=1, agent="a", digest="0" * 64)
        at(9, "round_opened", round=1, body={"cohort": ["a", "b"], "attempt": 2})
        at(10, "update_refused", round=1, agent="b", body={"reason": "NaN"})
        body = {"clients": 1, "waiting_s": 3.0, "bytes_up": 70, "bytes_down": 90, "late": [{"agent": "b", "round": 1}]}
        at(12, "round_closed", round=1, digest="1" * 64, body=body)
        at(13, "round_opened", round=2, body={"cohort": ["a"]})
        at(20, "run_failed", body={"reason": "no updates"})
        yield journal, run


def seconds(span):
    return (span.begin - BEGIN).total_seconds(), (span.end - BEGIN).total_seconds()


def test_spans_of_a_run_have_the_times_of_its_journal(journaled):
    journal, run = journaled
    spans = list(spans_of(journal.entries(run)))
    assert [(span.name, *seconds(span)) for span in spans] == [
        ("queue", 0, 2),
        ("members", 2, 5),
        ("updates", 5, 10),
        ("aggregate", 10, 12),
        ("round", 2, 12),
        ("run", 0, 20),
    ]
    _, *phases, a_round, whole = spans
    assert {span.parent for span in phases} == {a_round.id}
    assert (a_round.parent, whole.parent) == (whole.id, "")
    assert len({span.id for span in spans}) == 6
    assert len({span.trace for span in spans}) == 1
    assert a_round.attributes == {
        "headwater.run": run,
        "headwater.method": "fedavg",
        "headwater.rounds": 3,
        "headwater.round": 1,
        "headwater.attempts": 2,
        "headwater.cohort": 2,
        "headwater.clients": 1,
        "headwater.rejected": 1,
        "headwater.late": 1,
        "headwater.received_bytes": 70,
        "headwater.sent_bytes": 90,
    }
    assert (whole.error, whole.attributes["headwater.status"]) == ("no updates", "failed")
    assert list(spans_of([])) == []


def test_the_sdk_sees_the_same_spans(journaled):
    journal, run = journaled
    memory = InMemorySpanExporter()
    sender(memory)(spans_of(journal.entries(run)))
    got = {span.name: span for span in memory.get_finished_spans()}
    assert got.keys() == {"queue", "members", "updates", "aggregate", "round", "run"}
    assert got["updates"].parent.span_id == got["round"].context.span_id
    assert got["round"].parent.span_id == got["run"].context.span_id
    assert got["run"].parent is None
    assert (got["updates"].end_time - got["updates"].start_time) / 1e9 == 5
    assert (got["run"].status.is_ok, got["run"].status.description) == (False, "no updates")
    assert got["run"].resource.attributes["service.name"] == "headwater"
    json.loads(got["round"].to_json())


def test_a_restart_of_the_coordinator_does_not_break_the_trace(tmp_path, monkeypatch, capsys):
    """Looked at after each round, with a coordinator that is killed in between: every span once, all in one trace."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr(cli_traces, "exporter", lambda: memory)
    seen = []
    with Federation(tmp_path, agents=(), cohort={"min_agents": 3}) as fed:
        for name, seconds in (("a0", 1), ("a1", 2), ("a2", 3)):  # the clock stops between rounds
            fed.add(name, seconds=seconds)
        fed.request(rounds=3)
        fed.until(lambda: fed.record.round >= 1)
        ended = Ended(fed.state.journal)
        seen.append([span.id for span in ended.read()])
        assert ended.read() == []
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.finish()
        ended._journal = fed.state.journal
        seen.append(seen[0] + [span.id for span in ended.read()])
        main_exit(["traces", fed.run, "--state", str(fed.config.state), "--json"])
    assert len({*seen[1]}) == len(seen[1]) > len(seen[0]) >= 5
    assert json.loads(capsys.readouterr().out) == {"spans": len(seen[1]), "runs": 1}
    finished = memory.get_finished_spans()
    assert len({span.context.trace_id for span in finished}) == 1
    assert [span.name for span in finished].count("round") == 3
    assert [span.name for span in finished].count("run") == 1


def main_exit(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_a_collector_that_does_not_answer_is_named(journaled, monkeypatch, capsys):
    journal, _ = journaled

    class Away(SpanExporter):
        def export(self, _):
            return SpanExportResult.FAILURE

    monkeypatch.setattr(cli_traces, "exporter", Away)
    assert main_exit(["traces", "--state", str(journal.path.parent)]) == 1
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in capsys.readouterr().err
    assert main_exit(["traces", "run-0009", "--state", str(journal.path.parent)]) == 2


def test_without_the_extra_it_is_named_and_nothing_else_needs_it(tmp_path):
    code = """
import sys
sys.modules["opentelemetry"] = None
import coordinator.cli, coordinator.service.app, coordinator.views.spans
coordinator.cli.main(["traces", "--state", sys.argv[1]])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 5
    assert install_command("otel") in done.stderr
