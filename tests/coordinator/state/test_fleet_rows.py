"""One set of rows for terminal and web view, from files that agents have contributed to."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime, timezone

import pytest
from federation_harness import Federation
from web_site import FolderSite, agent_status

from coordinator.cli import main as headwater
from coordinator.cli.fleet import rows_of as terminal_rows
from coordinator.journal.entries import fact_of
from coordinator.journal.store import Entry
from coordinator.state.fleet_columns import to_json
from coordinator.state.fleet_rows import FleetFacts, HeardAgent, rows_of
from coordinator.state.history import history_of
from coordinator.state.store import StateFolder
from coordinator.views.fleet import Reported, reported_by
from coordinator.views.releases import Book
from coordinator.web.folder_view import FolderView
from edge_agent.core.locks import folder_lock
from edge_agent.wire.messages import codec, up

AT = datetime(2026, 1, 1, tzinfo=timezone.utc)


def entry(kind, agent="a", run=None, **body):
    return Entry(1, "", kind, run, None, agent, None, body, "", "")


def row_of(status=None, reported=None, **changes):
    facts = {
        "heard": {"a": HeardAgent.from_body(status)} if status else {},
        "reported": {"a": reported} if reported else {},
    }
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
        assert one["state"] == row.presence, name
        assert (one["fault"] is None, list(row.notes)) == (row.fault is None, one["notes"])
    assert printed["a"]["acc"] == {"local": 0.5, "global": 0.6, "personal": 0.8}
    assert not printed["a"]["better_alone"], "said of older figures"
    assert (printed["old"]["better_alone"], printed["old"]["state"]) == (True, "not heard")
    assert (printed["c"]["acc"]["personal"], printed["c"]["state"]) == (0.66, "offline")
    assert (printed["porch"]["state"], printed["porch"]["fault"]["remedy"]) == ("refused", "r")


def test_newer_figures_win_and_those_of_a_run_under_way_only_over_older_reports():
    reported = Reported()
    acc = {"local": 0.9, "global": 0.1, "personal": 0.2}
    reported.add(entry("release_reported", run="run-0001", acc=acc), Book())
    by_round = {"a": (None, 0.3)}
    row = row_of(reported=reported, run="run-0002", by_round=by_round)
    assert (row.local, row.shared, row.personal) == (0.9, 0.1, 0.3)
    assert row_of(reported=reported, run="run-0001", by_round=by_round).personal == 0.2, "its end is newer than a round"
    assert row_of(agent_status("a", acc={"personal": 0.4}), reported, run="run-0002", by_round=by_round).personal == 0.4


def test_states_of_agents():
    here = agent_status("a")
    off = agent_status("a", present=False)
    refused = {"a": {"error": "LoginRefused", "message": "m", "remedy": "r", "at": ""}}
    assert [row_of(one).presence for one in (here, off)] == ["online", "offline"]
    assert row_of(here, is_serving=False).presence == "unknown"
    assert row_of(reported=Reported()).presence == "not heard"
    assert row_of(off, refused=refused).presence == "refused"
    assert row_of(here, refused=refused).presence == "online", "another device tries its name"
    assert row_of(here, revoked=frozenset("a")).presence == "revoked"
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
            entry("device_reported", running=value, candidate=value),
            entry("device_reported", running={"acc": value}, candidate={"acc": value, "release": value}),
        ],
        Book(),
    )["a"]
    row = row_of(status, reported)
    assert (row.local, row.personal, row.rss_mb, row.samples, row.seen_at) == (None,) * 5
    assert all(note.startswith("rolled back the encoder of a run") for note in row.notes)


# --- a release that a device goes back from --------------------------------------------------------------------------

RUNNING = "a" * 64
TRIED = "b" * 64
WHY = "keeps bundle aaaaaaaaaaaa because acc.personal fell from 0.750 to 0.250"


class Camera:
    """A device of tier ``head`` at a coordinator: it takes the first release, and goes back from the second."""

    def __init__(self, fed):
        self.fed = fed
        self.run_id = {}

    def say(self, message):
        self.fed.coordinator.handle("cam", "up", codec.encode(message))
        self.fed.settle()

    def hello(self, runs=""):
        self.say(up.Hello(boot="b1", software="1", tier="head", samples=24, bundle_id=runs))

    def release(self, bundle_id):
        journal = self.fed.state.journal
        run = journal.request_run(fact_of("run_requested", {"id": f"run-{len(self.run_id):04}-{'0' * 32}"}))
        journal.append(fact_of("run_cancelled", {}), run=run)
        self.run_id[bundle_id] = journal.entries(run, ("run_requested",))[0].body["id"]
        digest = self.fed.state.blobs.put(bundle_id.encode())
        journal.append(fact_of("release_made", {"bundle_id": bundle_id, "plan": {}}), run=run, round=1, digest=digest)
        self.fed.wait(1)

    def report(self, bundle_id, number, runs, local, shared, personal, **more):
        self.say(
            up.Report(
                boot="b1",
                run=self.run_id[bundle_id],
                about=bundle_id,
                release=number,
                bundle_id=runs,
                samples=24,
                support=24,
                head="lr",
                acc_local=local,
                acc_global=shared,
                acc_personal=personal,
                rss_mb=50.0,
                **more,
            )
        )

    def tries_two(self):
        self.hello()
        self.release(RUNNING)
        self.report(RUNNING, 1, RUNNING, 0.6, 0.7, 0.75)
        self.release(TRIED)
        self.report(TRIED, 2, RUNNING, 0.6, 0.1, 0.25, rolled_back=WHY, metrics={"acc.before": 0.75})


@pytest.fixture
def camera(tmp_path):
    with Federation(tmp_path, agents=()) as fed:
        fed.settle()
        made = Camera(fed)
        made.tries_two()
        yield made


def rows_by_place(fed):
    """What terminal (and its JSON), pages, and a coordinator's status say of the device, in this order."""
    fed.wait(2)
    fed.coordinator.catch_up()
    with StateFolder(fed.config.state).look() as folder:
        (printed,) = map(to_json, terminal_rows(folder))
    view = FolderView(fed.config.state)
    while not view.is_loaded:
        view.refresh()
    (row,) = view.agents()
    view.close()
    shown = {"local": row.local, "global": row.shared, "personal": row.personal}
    candidate = None if row.candidate is None else row.candidate.body()
    return [
        (printed["acc"], printed["bundle_id"], printed["candidate"], tuple(printed["notes"])),
        (shown, row.bundle_id, candidate, row.notes),
    ]


@pytest.mark.parametrize("moment", ["at once", "restarted", "restarted and heard"])
def test_the_accuracy_of_a_bundle_that_a_device_went_back_from_is_not_that_of_what_it_runs(camera, moment):
    """Two fields, derived from the journal: the same everywhere, and after a restart of the coordinator."""
    fed = camera.fed
    if moment != "at once":
        fed.kill_coordinator()
        (fed.config.state / "status.json").unlink()
        fed.start_coordinator()
        fed.settle()
    if moment == "restarted and heard":
        camera.hello(RUNNING)
    tried = {"bundle_id": TRIED, "run": "run-0002", "release": 2, "reason": WHY}
    tried["acc"] = {"local": 0.6, "global": 0.1, "personal": 0.25}
    note = f"rolled back the encoder of run-0002: {WHY}"
    expected = ({"local": 0.6, "global": 0.7, "personal": 0.75}, RUNNING, tried, (note,))
    assert rows_by_place(fed) == [expected, expected]
    if moment != "restarted":
        (agent,) = fed.coordinator.status()["agents"]
        assert (agent["acc"], agent["candidate"], agent["notes"]) == (expected[0], tried, [note])
        assert fed.coordinator.status()["acc"]["personal"]["mean"] == 0.75


def test_the_history_has_the_accuracy_of_a_candidate_beside_its_own_bundle(camera):
    with StateFolder(camera.fed.config.state).look() as folder:
        bundles = history_of(folder, "cam").bundles
    shown = [(line.release, line.outcome, line.bundle_id, line.runs, line.acc) for line in bundles]
    assert shown == [(1, "ok", RUNNING, RUNNING, 0.75), (2, "failed", TRIED, RUNNING, 0.25)]


def test_a_device_that_takes_the_next_release_has_no_candidate(camera):
    camera.release("c" * 64)
    camera.report("c" * 64, 3, "c" * 64, 0.6, 0.8, 0.9)
    ((acc, bundle_id, candidate, notes), pages) = rows_by_place(camera.fed)
    assert (acc["personal"], bundle_id, candidate, notes) == (0.9, "c" * 64, None, ())
    assert pages == (acc, bundle_id, candidate, notes)


def test_a_trained_run_keeps_the_candidate_apart_too():
    """The record at the end of a run has the figures of its encoder, also where the device went back from it."""
    reported = Reported()
    reported.add(entry("release_reported", run="run-0001", runs=RUNNING, acc={"personal": 0.75}), Book())
    went_back = {"runs": RUNNING, "about": TRIED, "release": 2, "rolled_back": WHY, "before": 0.74}
    reported.add(entry("release_reported", run="run-0002", acc={"personal": 0.25}, **went_back), Book())
    row = row_of(reported=reported)
    assert (row.personal, row.candidate.acc, row.candidate.bundle_id) == (0.74, {"personal": 0.25}, TRIED)


@pytest.mark.parametrize("before", [0.7, None])
def test_entries_of_versions_that_had_one_accuracy_are_told_apart_by_the_release(site, before):
    site.release("a")
    site.release("b", run="run-0002")
    site.device("c", "a", 1, "ok", acc=0.75)
    site.device("c", "a", 2, "failed", acc=0.25, before=before, reason="worse")
    view = FolderView(site.path)
    while not view.is_loaded:
        view.refresh()
    (row,) = view.agents()
    view.close()
    assert row.personal == (0.75 if before is None else 0.7)
    assert (row.candidate.bundle_id, row.candidate.release, row.candidate.acc) == ("b" * 64, 2, {"personal": 0.25})
