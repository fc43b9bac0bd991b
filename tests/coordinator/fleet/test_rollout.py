"""What the coordinator makes of devices' words about releases: whom it asks again, what speaks against a release."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from coordinator.fleet.rollout import COUNT_S, MOST_CHANGES, MOST_SIGNATURES, UNABLE_AGAIN_S, Rollout
from coordinator.journal.entries import DevicePinned, DeviceUnpinned, ReleaseHeld, fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.state import release_keys
from coordinator.state.store import StateFolder
from coordinator.views.releases import Device
from edge_agent.core.errors import UsageError
from edge_agent.wire.messages.up import Fault, Hello, Report

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)


class Fleet:
    """`Rollout` with a roster and a distributor of which nothing is asked here."""

    def __init__(self, folder):
        self.state = StateFolder(folder)
        self.now = [0.0]
        self.sent = []
        offers = SimpleNamespace(offer=lambda *_: None)
        roster = SimpleNamespace(present=lambda _tier: (), get=lambda _agent: None)
        self.state.journal = SqliteJournal(folder / "journal.db", now=self.wall)
        self.rollout = Rollout(self.state, roster, offers, self.send, lambda: self.now[0], self.wall)

    def wall(self):
        return NOON + timedelta(seconds=self.now[0])

    def send(self, agent, message):
        self.sent.append((agent, message))

    def make(self, letter, **plan):
        digest = self.state.blobs.put(letter.encode())
        body = {"bundle_id": letter * 64, "plan": plan}
        self.state.journal.append(fact_of("release_made", body), run="run-0001", round=1, digest=digest)
        self.now[0] += 1
        self.rollout.tick()

    def hello(self, name, runs="", channel="stable"):
        self.rollout.hello(
            name, Hello(software="", tier="head", samples=1, bundle_id=runs and runs * 64, channel=channel)
        )

    def says(self, name, letter, release, **more):
        about = letter * 64
        report = Report(run="run-0001", about=about, release=release, bundle_id=about, samples=1, **more)
        self.rollout.reported(name, report)

    def fails(self, name, release, code):
        self.rollout.fault(name, Fault(error="E", code=code, message="why", run="run-0001", release=release))


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path)
    with made.state.look(create=True):
        made.state.journal.request_run(fact_of("run_requested", {"id": f"run-0001-{'0' * 32}"}))
        yield made


@pytest.mark.parametrize(
    "code, outcome",
    [
        ("bundle-damaged", "failed"), ("head-mismatch", "failed"), ("bundle", "failed"), ("training", "failed"),
        ("untrusted", "unable"), ("data", "unable"), ("usage", "unable"), ("unknown-name", "unable"),
        ("missing-capability", "unable"), ("memory", "unable"), ("state", "unable"), ("config", "unable"),
        ("internal", "unable"), ("", "unable"),
    ],
)  # fmt: skip
def test_only_faults_of_a_bundle_speak_against_a_release(fleet, code, outcome):
    fleet.make("a", max_failed="0")
    fleet.make("b", max_failed="0")
    fleet.hello("d0", "a")
    fleet.fails("d0", 2, code)
    release = fleet.rollout.book.releases[1]
    assert release.results["d0"].outcome == outcome
    assert release.stage == ("rolled back" if outcome == "failed" else "everybody")
    count = len(fleet.sent)
    fleet.now[0] += UNABLE_AGAIN_S
    fleet.rollout.heartbeat("d0")
    assert len(fleet.sent) == count + (outcome == "unable"), "it is asked again"


def test_a_pinned_device_and_its_hello_do_not_decide_a_canary(fleet):
    """Its report was lost: it is asked for it, and nothing is made up that --min-gain would have to judge."""
    fleet.make("a")
    fleet.hello("d0", "a")
    fleet.make("b", canary="1", min_gain=0.9, auto_promote=True)
    release = fleet.rollout.book.releases[1]
    fleet.state.journal.append(fact_of("release_canary", {"release": 2, "agents": ["d0"]}))
    fleet.hello("d0", "b")
    assert (release.results, release.stage) == ({}, "canary")
    assert fleet.sent[-1][1].release == 2, "it answers from what it has installed, or measures again"
    fleet.says("d0", "b", 2, acc_personal=0.5, metrics={"acc.before": 0.5})
    assert release.results["d0"].outcome == "failed"


@pytest.mark.parametrize(
    "said, outcome",
    [
        ({"acc_personal": 0.5, "metrics": {"acc.before": 0.4}}, "ok"),
        ({"acc_personal": 0.3, "metrics": {"acc.before": 0.4}}, "failed"),
        ({"acc_personal": 0.5}, "unable"),
        ({"metrics": {"acc.before": 0.4}}, "unable"),
    ],
)
def test_a_gain_that_a_device_does_not_report_is_neither_success_nor_failure(fleet, said, outcome):
    """[privacy] metrics of the device may keep one of the two accuracies."""
    fleet.make("b", min_gain=0.0)
    fleet.hello("d0")
    fleet.says("d0", "b", 1, **said)
    assert fleet.rollout.book.releases[0].results["d0"].outcome == outcome


def test_a_release_that_fails_is_held_where_the_file_before_it_is_gone(fleet):
    fleet.make("a", channel="beta")
    fleet.make("a")
    fleet.hello("d0", "a")
    digest = fleet.rollout.book.releases[1].digest
    fleet.make("b", max_failed="0")
    fleet.hello("d0", "a")
    fleet.state.blobs.path(digest).unlink()
    fleet.fails("d0", 3, "bundle-damaged")
    assert fleet.rollout.book.releases[2].stage == "held"
    failed, then = fleet.rollout.book.releases[2].held.splitlines()
    assert failed.startswith("1 of 1 devices failed, 0 are allowed; d0")
    assert then.startswith("Not rolled back (no device runs it): ")
    fleet.state.blobs.put(b"a")
    fleet.hello("tester", channel="beta")
    assert fleet.sent[-1][0] == "tester", "others go on"


def test_what_commands_did_since_the_start_is_in_the_coordinators_log(fleet, caplog):
    caplog.set_level("INFO", "coordinator")
    append = fleet.state.journal.append
    append(DevicePinned(release=1, reason="early", by="alice"), agent="d0")
    fleet.make("a")
    fleet.hello("d0", "a")
    append(ReleaseHeld(release=1, reason="complaints", by="bob"))
    append(DeviceUnpinned(by="bob"), agent="d0")
    fleet.now[0] += 1
    fleet.rollout.tick()
    lines = [record.getMessage() for record in caplog.records if " by=" in record.getMessage()]
    assert lines == ["release_held release=1 by=bob reason=complaints", "device_unpinned device=d0 by=bob reason="]


def test_a_device_with_many_changes_is_limited_for_an_hour_and_its_last_word_counts(fleet):
    fleet.make("a")
    for number in range(3 * MOST_CHANGES):
        fleet.hello("d0", channel=f"c{number}")
    fleet.hello("d0", "a")
    entries = fleet.state.journal.entries(kinds=("device_reported",))
    assert len(entries) == MOST_CHANGES
    fleet.now[0] += COUNT_S
    fleet.rollout.tick()
    assert fleet.rollout.book.devices["d0"] == Device("d0", "a" * 64, "stable")


def test_a_release_is_signed_again_for_a_device_that_has_a_newer_one_but_not_without_end(fleet, monkeypatch):
    signed = iter("0123456789")
    monkeypatch.setattr(release_keys, "file_to_release", lambda *_: (next(signed).encode(), None))
    fleet.make("a", max_failed="0")
    release = fleet.rollout.book.releases[0]
    for name in ("d0", "d1"):
        fleet.hello(name)
    first = release.digest
    fleet.fails("d0", 1, "older")
    fleet.fails("d1", 1, "older")
    assert [message.blob.digest for _, message in fleet.sent] == [first, first, release.digest, release.digest]
    assert (release.results, first != release.digest) == ({}, True), "signed once for both"
    for _ in range(2 * MOST_SIGNATURES):
        fleet.fails("d0", 1, "older")
    assert len(fleet.state.journal.entries(kinds=("release_signed",))) == MOST_SIGNATURES
    assert (release.results["d0"].outcome, release.stage) == ("unable", "everybody")


def test_a_release_that_people_have_to_sign_again_says_so(fleet, monkeypatch):
    def refuse(*_):
        raise UsageError("'headwater keys sign FILE --again' gives it a new version")

    monkeypatch.setattr(release_keys, "file_to_release", refuse)
    fleet.make("a", max_failed="0")
    fleet.hello("d0")
    fleet.fails("d0", 1, "older")
    result = fleet.rollout.book.releases[0].results["d0"]
    assert (result.outcome, "--again" in result.reason) == ("unable", True)
