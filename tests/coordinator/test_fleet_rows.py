"""One set of rows for terminal and web view, from files that agents have contributed to."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime, timezone

import pytest
from web_site import FolderSite, agent_status

from coordinator.cli import main as headwater
from coordinator.state.fleet_rows import FleetFacts, Reported, reported_by, rows_of
from coordinator.state.journal import Entry
from coordinator.state.releases import Book
from coordinator.web.folder_view import FolderView
from edge_agent.storage import folder_lock

AT = datetime(2026, 1, 1, tzinfo=timezone.utc)


def entry(kind, agent="a", run=None, **body):
    return Entry(1, "", kind, run, None, agent, None, body, "", "")


def row_of(status=None, reported=None, **changes):
    facts = {"status": {"a": status} if status else {}, "reported": {"a": reported} if reported else {}}
    (row,) = rows_of(FleetFacts(**facts, book=Book(), now=AT, **changes))
    return row


@pytest.fixture
def site(tmp_path):
    made = FolderSite(tmp_path / "state")
    yield made
    made.close()


def test_terminal_and_web_view_show_the_same_of_each_agent(site, capsys):
    run = site.run(2, ("a", "b"), end="run_finished")
    site.report(run, "a", 0.5, 0.6, 0.75, better_alone=True, head="lr")
    site.report(run, "old", 0.5, 0.6, 0.4, better_alone=True, runs="f" * 64)
    site.device("c", "a", 1, "ok", reason="", acc=0.66, before=0.6, support=40)
    site.release("a")
    fault = {"error": "DataError", "message": "m", "remedy": "r", "at": "2026-01-01T00:00:00+00:00"}
    refused = {"id": "porch", "by": "broker", **fault, "times": 3}
    site.status(
        [agent_status("a", acc={"personal": 0.8}, rss_mb=77.0), agent_status("c", present=False, fault=fault)],
        refused_agents=[refused],
    )
    with contextlib.suppress(SystemExit), folder_lock(site.path, "a coordinator"):
        headwater(["agents", "--json", "--limit", "0", "--state", str(site.path)])
    printed = {one["id"]: one for one in json.loads(capsys.readouterr().out)["agents"]}
    view = FolderView(site.path)
    while not view.is_loaded:
        view.refresh()
    shown = {row.id: row for row in view.agents()}
    view.close()
    assert sorted(printed) == sorted(shown) == ["a", "c", "old", "porch"]
    for name, row in shown.items():
        one = printed[name]
        assert one["acc"] == {"local": row.local, "global": row.shared, "personal": row.personal}, name
        assert (one["better_alone"], one["rss_mb"], one["samples"]) == (row.better_alone, row.rss_mb, row.samples)
        assert (one["bundle_id"] or "", one["head"] or "", one["tier"] or "") == (row.bundle_id, row.head, row.tier)
        assert one["state"] == row.state, name
        assert (one["fault"] is None, list(row.notes)) == (row.fault is None, one["notes"])
    assert printed["a"]["acc"] == {"local": 0.5, "global": 0.6, "personal": 0.8}
    assert not printed["a"]["better_alone"], "said of older figures"
    assert (printed["old"]["better_alone"], printed["old"]["state"]) == (True, "not heard")
    assert (printed["c"]["acc"]["personal"], printed["c"]["state"]) == (0.66, "offline")
    assert (printed["porch"]["state"], printed["porch"]["fault"]["remedy"]) == ("refused", "r")


def test_newer_figures_win_and_those_of_a_run_under_way_only_over_older_reports():
    reported = Reported()
    reported.add(entry("release_reported", run="run-0001", acc={"local": 0.9, "global": 0.1, "personal": 0.2}))
    by_round = {"a": (None, 0.3)}
    row = row_of(reported=reported, run="run-0002", by_round=by_round)
    assert (row.local, row.shared, row.personal) == (0.9, 0.1, 0.3)
    assert row_of(reported=reported, run="run-0001", by_round=by_round).personal == 0.2, "its end is newer than a round"
    assert row_of(agent_status("a", acc={"personal": 0.4}), reported, run="run-0002", by_round=by_round).personal == 0.4


def test_states_of_agents():
    here, off = agent_status("a"), agent_status("a", present=False)
    refused = {"a": {"error": "LoginRefused", "message": "m", "remedy": "r", "at": ""}}
    assert [row_of(one).state for one in (here, off)] == ["online", "offline"]
    assert row_of(here, is_serving=False).state == "unknown"
    assert row_of(reported=Reported()).state == "not heard"
    assert row_of(off, refused=refused).state == "refused"
    assert row_of(here, refused=refused).state == "online", "another device tries its name"
    assert row_of(here, revoked=frozenset("a")).state == "revoked"
    assert row_of(here, status_at=100.0).seen_at == 97.0


@pytest.mark.parametrize("value", ["x", None, [], {}, float("inf"), 10**400, True])
def test_values_of_another_form_count_as_absent(value):
    status = agent_status("a", acc=value, rss_mb=value, samples=value, silent_s=value, fault=value, notes=value)
    reported = reported_by(
        [
            entry("release_reported", acc=value, rss_mb=value, samples=value),
            entry("release_reported", acc={"local": value}),
            entry("device_reported", result=value),
            entry("device_reported", result={"acc": value}),
        ]
    )["a"]
    row = row_of(status, reported)
    assert (row.local, row.personal, row.rss_mb, row.samples, row.seen_at) == (None,) * 5
    assert row.notes == ()
