"""What ``headwater release`` says of releases and devices, and which input it refuses, by the journal alone."""

from __future__ import annotations

import json
import re

import pytest

from coordinator.cli import main
from coordinator.journal.entries import fact_of
from coordinator.state.store import StateFolder


class Desk:
    """A state folder without a coordinator, and the commands of an operator; a bundle is a letter."""

    def __init__(self, path, capsys):
        self.path = path
        self._capsys = capsys
        with StateFolder(path).look(create=True):
            pass

    def write(self, kind, run=None, agent=None, digest=None, **body):
        with StateFolder(self.path).look() as folder:
            folder.journal.append(fact_of(kind, body), run=run, agent=agent, digest=digest, round=1 if run else None)

    def run(self, letter):
        """A run whose bundle is that letter."""
        with StateFolder(self.path).look() as folder:
            run = folder.journal.request_run(fact_of("run_requested", {"id": letter}))
            digest = folder.blobs.put(letter.encode())
        self.write("bundle_exported", run=run, digest=digest, bundle_id=letter * 64)
        return run

    def release(self, letter, *options):
        """``create``, of a run whose bundle is that letter."""
        return self.shown("create", self.run(letter), *options)

    def device(self, name, runs="", release=0, outcome="ok", reason="", **more):
        said = {"release": release, "result": {"outcome": outcome, "reason": reason}} if release else {}
        self.write("device_reported", agent=name, runs=runs * 64, **said, **more)

    def agents(self, **tiers):
        agents = [{"id": name, "tier": tier, "present": True} for name, tier in tiers.items()]
        (self.path / "status.json").write_text(json.dumps({"agents": agents}))

    def typed(self, *words):
        with pytest.raises(SystemExit) as ended:
            main(["release", *map(str, words), "--state", str(self.path)])
        said = self._capsys.readouterr()
        return ended.value.code, said.out, said.err

    def shown(self, *words):
        code, out, err = self.typed(*words)
        assert not code, err
        return out

    def refused(self, *words):
        code, out, err = self.typed(*words)
        assert (code, out) == (2, "")
        return err

    def rows(self):
        return {row["device"]: row for row in json.loads(self.shown("status", "--json"))["devices"]}


@pytest.fixture
def desk(tmp_path, capsys):
    return Desk(tmp_path / "state", capsys)


@pytest.fixture
def replaced(desk):
    """Release 1 paused, release 2 for everybody, which runs on one of two devices."""
    for name in ("hall", "porch"):
        desk.device(name)
    desk.release("a", "--canary", 1)
    desk.write("release_stage", release=1, stage="paused")
    desk.release("b", "--canary", "all", "--note", "more data")
    desk.device("hall", "b", release=2)
    return desk


def test_an_older_release_is_replaced_and_cannot_be_promoted(replaced):
    text = replaced.shown("status")
    assert [line.split()[2:5] for line in text.splitlines()[3:5]] == [
        ["replaced", "by", "2"],
        ["everybody", "b" * 12, "run-0002"],
    ]
    assert "continue with" not in text
    assert replaced.shown("status", 1).splitlines()[1].startswith("release 1 (stable, replaced by 2), made 20")
    assert "everybody gets release 2, which is newer; 'headwater release create run-0001'" in replaced.refused(
        "promote", 1
    )


def test_status_says_when_by_whom_and_what_for_and_no_row_is_wider_than_80_columns(replaced):
    text = replaced.shown("status")
    (line,) = (line for line in text.splitlines() if line.startswith("release 2 ("))
    assert line.startswith("release 2 (stable, everybody), made 20")
    assert line.endswith(": more data")
    assert " UTC by " in line
    assert "  from run-0002, round 1" in text
    assert max(len(line.rstrip()) for line in text.splitlines() if line[:1] != "r") <= 80


def test_a_release_that_failed_says_on_which_devices_and_why_line_by_line(desk):
    desk.device("e1")
    desk.device("e2")
    desk.release("a", "--canary", "all")
    for name in ("e1", "e2"):
        desk.device(name, "", 1, "failed", f"{name} has its reason")
    desk.write("release_held", release=1, reason="2 of 2 devices failed\nnot rolled back: it is the first")
    lines = desk.shown("status").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("release 1 (stable, held)"))
    assert lines[begin + 3 : begin + 8] == [
        "  release 1 failed on e1: e1 has its reason",
        "  release 1 failed on e2: e2 has its reason",
        "  2 of 2 devices failed",
        "  not rolled back: it is the first",
        "  next: 'headwater release resume 1' continues it",
    ]


def test_a_device_of_a_held_release_shows_that_and_its_outcome(desk):
    desk.device("hall")
    desk.release("a", "--canary", "all")
    desk.device("hall", "a", release=1)
    desk.shown("hold", 1)
    row = desk.rows()["hall"]
    assert (row["runs"], row["wanted"], row["held"], row["outcome"]) == (1, None, True, "ok")
    assert "1, held" in desk.shown("status")


def test_a_device_runs_the_release_of_its_own_channel(desk):
    desk.device("hall", "a", channel="stable")
    desk.release("a", "--canary", "all")
    desk.release("a", "--canary", "all", "--channel", "beta", "--new-channel")
    assert desk.rows()["hall"]["runs"] == 1
    desk.release("b", "--canary", "all")
    assert desk.rows()["hall"]["runs"] == 1
    assert "hall stays with release 1: x" in desk.shown("pin", "hall", "--reason", "x")


def test_why_a_device_keeps_its_bundle_is_not_said_where_it_runs_what_it_is_to_run(desk):
    desk.release("a", "--canary", "all")
    desk.device("hall", "a", kept="rolled back by hand")
    assert "rolled back by hand" not in desk.shown("status")
    desk.release("b", "--canary", "all")
    assert "hall *: rolled back by hand" in desk.shown("status")


def test_a_mistyped_channel_is_refused_with_the_nearest_name(desk):
    desk.release("a", "--canary", "all", "--channel", "beta")  # before any device is heard, any may be meant
    desk.device("hall", channel="garden")
    desk.device("porch", "a", channel="gone")
    desk.device("porch", "a", channel="garden")
    run = desk.run("b")
    before = desk.shown("status")
    for typed, meant in (("gardne", "did you mean 'garden'? known: beta, garden; "), ("gone", "")):
        said = desk.refused("create", run, "--channel", typed)
        assert f"no device of channel '{typed}' was heard, and nothing was released to it; {meant}" in said
        assert "--new-channel" in said
    assert desk.shown("status") == before, "nothing was released"
    desk.shown("create", run, "--channel", "beta", "--canary", "all")
    assert "stable" in desk.shown("create", run, "--channel", "stable", "--canary", "all", "--new-channel")


def test_a_new_release_says_what_keeps_it_from_devices(desk):
    desk.agents(g1="train", g2="train")
    text = desk.release("a", "--canary", 2)
    assert "the canary lacks 2 devices, chosen of 0 devices in channel 'stable' once online" in text
    assert "note: no device of channel 'stable' was heard; channels with devices: none" in text
    assert "note: 2 agents of tier 'train', which takes no releases" in text
    assert "note: no coordinator serves; 'headwater serve'" in text
    assert "g1 is of tier 'train', which takes no releases" in desk.refused("pin", "g1", "--reason", "x")
    desk.device("hall")
    assert "release 1 of channel 'stable' is at stage 'canary', and is older" in desk.release("b", "--canary", 1)
    text = desk.release("c", "--canary", 1, "--channel", "nope", "--new-channel")
    assert "no device of channel 'nope' was heard; channels with devices: stable" in text
    assert "is older" not in text


@pytest.mark.parametrize(
    "words, message",
    [
        (("create", "run-0001", "--activate-at", "2001-01-01"), "--activate-at 2001-01-01 is over"),
        (("pin", "hall", "--reason", " "), "--reason is empty"),
        (("status", "7"), "no release 7; there are 1 to 1"),
    ],
)
def test_input_that_says_nothing_is_refused(desk, words, message):
    desk.device("hall")
    desk.release("a", "--canary", "all")
    assert message in desk.refused(*words)


def test_a_pin_says_when_it_ends_and_which_pin_it_replaces(desk):
    desk.device("hall", "a")
    desk.release("a", "--canary", "all")
    text = desk.shown("pin", "hall", "--reason", "paper", "--until", "2099-11-30")
    assert text == "hall stays with release 1 until 2099-11-30T00:00+00:00: paper\n"
    text = desk.shown("pin", "hall", "--reason", "again")
    assert "the pin before is replaced: release 1, until 2099-11-30T00:00+00:00: paper" in text


def test_a_rollback_of_a_rollback_asks_which_release_is_meant(desk):
    for letter in "ab":
        desk.release(letter, "--canary", "all")
    desk.shown("rollback", 2)
    said = desk.refused("rollback")
    assert "the newest release, 3, is itself a rollback, of release 2; no earlier one is left to return to" in said
    assert "release 3 (stable, rolls back 2, everybody)" in desk.shown("status")


def test_a_rollback_of_a_rollback_names_the_command_that_goes_further_back(desk):
    for letter in "abc":
        desk.release(letter, "--canary", "all")
    desk.shown("rollback", 3)
    assert "'headwater release rollback 4' goes further back, to release 1" in desk.refused("rollback")
    desk.shown("rollback", 4)
    status = desk.shown("status")
    assert re.search(r"5 +stable +rolls back 4, everybody +a{12}", status), status


def test_a_pin_takes_device_and_release_by_position_and_needs_no_reason(desk):
    desk.device("hall", "b")
    for letter in "ab":
        desk.release(letter, "--canary", "all")
    assert "hall stays with release 1: pinned by " in desk.shown("pin", "hall", 1)
    assert "hall stays with release 2: why" in desk.shown("pin", "hall", "--release", 2, "--reason", "why")
    assert "RELEASE is given twice, as 1 and as 2" in desk.refused("pin", "hall", 1, "--release", 2)


@pytest.mark.parametrize("group, command", [("release", "promote"), ("keys", "rotate")])
def test_the_list_of_commands_cuts_no_sentence(capsys, group, command):
    with pytest.raises(SystemExit):
        main([group, "--help"])
    text = capsys.readouterr().out.replace("[ARGS]...", "")
    assert command in text
    assert "..." not in text
    assert "…" not in text
