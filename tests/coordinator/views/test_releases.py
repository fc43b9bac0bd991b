"""What follows from the journal's entries about releases: stages, who is to run what, when a release stops."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from coordinator.fleet.rollout import COUNT_S, Rollout
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.journal.store import utc_now
from coordinator.views.follower import Follower
from coordinator.views.releases import Book, Plan, amount, book_of, release_blobs, releases_in_use, rollback_of
from edge_agent.core.errors import UsageError
from edge_agent.core.time_and_text import moment_of

NOW = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
DEVICES = tuple(f"d{number:02}" for number in range(10))


@pytest.fixture
def journal(tmp_path):
    with SqliteJournal(tmp_path / "journal.db") as opened:
        yield opened


class Scene:
    """A journal that tests write as commands and the coordinator do, and its book."""

    def __init__(self, journal):
        self.journal = journal
        self.book = Book()
        self.follower = Follower(journal, self.book)

    def write(self, kind, agent=None, digest=None, **body):
        self.journal.append(fact_of(kind, body), agent=agent, digest=digest)
        self.follower.read()
        return self.book

    def make(self, letter, rolls_back=0, **plan):
        body = {"bundle_id": letter * 64, "plan": plan} | ({"rolls_back": rolls_back} if rolls_back else {})
        return self.write("release_made", digest=letter * 64, **body).releases[-1]

    def device(self, name, runs="", release=0, outcome="", reason="", **more):
        result = {"outcome": outcome, "reason": reason} if outcome else None
        said = {"release": release, "result": result} if outcome else {}
        self.write("device_reported", agent=name, runs=runs * 64, **said, **more)

    def wanted(self, name, now=NOW):
        release = self.book.release_for(self.book.devices[name], now)
        return None if release is None else release.number


@pytest.fixture
def scene(journal):
    made = Scene(journal)
    for name in DEVICES:
        made.device(name)
    return made


@pytest.mark.parametrize(
    "text, total, up, expected",
    [
        ("2", 10, True, 2), ("10%", 20, True, 2), ("10%", 21, True, 3), ("10%", 21, False, 2), ("0", 5, False, 0),
        ("100%", 7, False, 7), ("0.5%", 200, True, 1), ("0.5%", 199, False, 0), ("10%", 0, True, 0),
        ("30%", 10, True, 3),
    ],
)  # fmt: skip
def test_amounts(text, total, up, expected):
    assert amount(text, total, up=up) == expected


@pytest.mark.parametrize("text", ["", "-1", "ten", "101%", "1e3", "2 ", "%", "1.5", "10 %"])
def test_amounts_that_are_none(text):
    with pytest.raises(UsageError, match="no number of devices"):
        amount(text, 10, up=True)


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"canary": "0"}, "a canary of no device"),
        ({"canary": "1", "window": "2-5"}, "two times of day"),
        ({"window": "02:00-02:00"}, "two times of day"),
        ({"window": "24:00-02:00"}, "two times of day"),
        ({"activate_at": "soon"}, "not a date or time"),
        ({"success": 2}, "are about a canary"),
        ({"auto_promote": True}, "are about a canary"),
        ({"max_failed": "many"}, "no number of devices"),
        ({"min_gain": float("nan")}, "min_gain nan is no number"),
    ],
)
def test_plans_that_cannot_be_followed(plan, message):
    with pytest.raises(UsageError, match=message):
        Plan(**plan).check(NOW)


@pytest.mark.parametrize(
    "window, at, now, wait_h, within_h",
    [
        ("", "", "12:00", 0, None),
        ("02:00-05:00", "", "12:00", 14, 3),
        ("02:00-05:00", "", "03:00", 0, 2),
        ("02:00-05:00", "", "05:00", 21, 3),
        ("22:00-04:00", "", "12:00", 10, 6),
        ("22:00-04:00", "", "01:00", 0, 3),
        ("", "2030-01-01T18:00", "12:00", 6, None),
        ("02:00-05:00", "2030-01-03T03:00", "12:00", 39, 2),
        ("02:00-05:00", "2030-01-03T06:00", "12:00", 24 + 24 + 14, 3),
        ("", "2029-01-01", "12:00", 0, None),
        ("", "2030-01-01T18:00+02:00", "12:00", 4, None),
    ],
)
def test_when_devices_may_switch(window, at, now, wait_h, within_h):
    moment = NOW.replace(hour=int(now[:2]), minute=int(now[3:]))
    wait_s, within_s = Plan(window=window, activate_at=at).activation(moment)
    assert (wait_s / 3600, within_s and within_s / 3600) == (wait_h, within_h)


def test_a_release_at_once_is_wanted_by_everybody_and_by_new_devices(scene):
    scene.make("a")
    scene.device("new")
    assert {scene.wanted(name) for name in (*DEVICES, "new")} == {1}


def test_an_entry_of_an_older_version_is_a_release_at_once(scene):
    scene.write("release_made", digest="a" * 64, bundle_id="a" * 64)
    assert scene.wanted("d00") == 1
    assert scene.book.verdict(scene.book.releases[0], NOW) == ("", "")


def test_only_the_canary_gets_a_new_release_until_it_is_promoted(scene):
    scene.make("a")
    release = scene.make("b", canary="20%")
    assert {scene.wanted(name) for name in DEVICES} == {1}
    drawn = scene.book.draw_canary(release, DEVICES, NOW)
    assert len(drawn) == 2
    assert drawn == scene.book.draw_canary(release, reversed(DEVICES), NOW), "whoever comes first"
    scene.write("release_canary", release=2, agents=drawn)
    assert scene.book.draw_canary(release, DEVICES, NOW) == drawn
    assert {name for name in DEVICES if scene.wanted(name) == 2} == set(drawn)
    scene.write("release_stage", release=2, stage="paused")
    assert {name for name in DEVICES if scene.wanted(name) == 2} == set(drawn)
    scene.write("release_stage", release=2, stage="everybody")
    assert {scene.wanted(name) for name in DEVICES} == {2}


def test_other_releases_draw_other_canaries(scene):
    drawn = [tuple(scene.book.draw_canary(scene.make("b", canary="2"), DEVICES, NOW)) for _ in range(8)]
    assert len(set(drawn)) > 4


def test_a_device_that_declines_or_is_pinned_is_replaced_in_the_canary(scene):
    scene.make("a")
    release = scene.make("b", canary="2")
    first, second = scene.book.draw_canary(release, DEVICES, NOW)
    scene.write("release_canary", release=2, agents=[first, second])
    scene.device(first, "a", 2, "declined", "by hand", kept="by hand")
    kept, third = scene.book.draw_canary(release, DEVICES, NOW)
    assert kept == second
    scene.write("release_canary", release=2, agents=[second, third])
    scene.write("device_pinned", agent=second, release=1)
    kept, fourth = scene.book.draw_canary(release, DEVICES, NOW)
    assert kept == third
    assert len({first, second, third, fourth}) == 4


@pytest.mark.parametrize(
    "plan, failed, ok, expected",
    [
        ({"canary": "2", "max_failed": "0"}, 1, 0, "stop"),
        ({"canary": "2", "max_failed": "10%"}, 1, 0, "stop"),
        ({"canary": "2", "max_failed": "1"}, 1, 0, ""),
        ({"canary": "2", "max_failed": "1"}, 2, 0, "stop"),
        ({"canary": "2"}, 0, 1, ""),
        ({"canary": "2"}, 0, 2, "succeeded"),
        ({"canary": "5", "success": 3, "max_failed": "40%"}, 2, 2, ""),
        ({"canary": "5", "success": 3, "max_failed": "40%"}, 2, 3, "succeeded"),
        ({"canary": "5", "success": 3, "max_failed": "39%"}, 2, 3, "stop"),
        ({"max_failed": "20%"}, 2, 8, ""),
        ({"max_failed": "20%"}, 3, 7, "stop"),
        ({}, 10, 0, ""),
    ],
)
def test_when_a_release_stops_and_when_its_canary_has_succeeded(scene, plan, failed, ok, expected):
    scene.make("a")
    release = scene.make("b", **plan)
    scene.write("release_canary", release=2, agents=DEVICES[: failed + ok])
    for number, name in enumerate(DEVICES[: failed + ok]):
        scene.device(name, "a", 2, "failed" if number < failed else "ok", "bad")
    assert scene.book.verdict(release, NOW)[0] == expected


def test_a_device_that_fails_twice_counts_once_and_one_that_recovers_does_not(scene):
    release = scene.make("b", canary="3", max_failed="1")
    for outcome in ("failed", "failed", "ok"):
        scene.device("d00", "b", 1, outcome)
    scene.device("d01", "a", 1, "failed")
    assert release.count == {"failed": 1, "ok": 1}
    assert scene.book.verdict(release, NOW)[0] == ""


def test_hold_and_resume(scene):
    scene.make("a")
    release = scene.make("b", canary="2", max_failed="0")
    scene.write("release_canary", release=2, agents=["d00", "d01"])
    scene.device("d00", "b", 2, "ok")
    scene.device("d01", "a", 2, "failed", "bad")
    scene.write("release_held", release=2, reason="complaints")
    assert (scene.wanted("d00"), scene.wanted("d01"), scene.wanted("d02")) == (None, 1, 1), "who runs it keeps it"
    assert (release.stage, scene.book.verdict(release, NOW)) == ("held", ("", ""))
    scene.write("release_resumed", release=2)
    assert (scene.wanted("d00"), scene.wanted("d01"), scene.wanted("d02")) == (2, 2, 1)
    assert scene.book.verdict(release, NOW)[0] == "", "that failure was known"
    scene.device("d00", "a", 2, "failed", "bad")
    assert scene.book.verdict(release, NOW)[0] == "stop"


def test_a_rollback_is_a_release_of_the_older_bundle(scene):
    scene.make("a")
    second = scene.make("b")
    older, made = rollback_of(scene.book, second, "bad", "ops")
    assert (older.number, made.rolls_back, made.bundle_id) == (1, 2, "a" * 64)
    scene.make("a", rolls_back=2)
    assert (second.stage, second.rolled_back_by) == ("rolled back", 3)
    assert {scene.wanted(name) for name in DEVICES} == {3}
    scene.write("release_stage", release=2, stage="everybody")
    scene.write("release_resumed", release=2)
    assert {scene.wanted(name) for name in DEVICES} == {3}, "two commands at once: the rollback stays"


def test_a_rollback_skips_what_was_rolled_back_and_what_never_reached_everybody(scene):
    for letter, plan in (("a", {}), ("b", {}), ("c", {"canary": "1"})):
        scene.make(letter, **plan)
    scene.make("a", rolls_back=2)
    newest = scene.make("d")
    assert rollback_of(scene.book, newest, "", "")[0].number == 4
    other = scene.make("e", channel="beta")
    with pytest.raises(UsageError, match="first of channel 'beta'"):
        rollback_of(scene.book, other, "", "")


def test_a_rollback_to_the_same_bundle_says_that_there_is_no_other(scene):
    scene.make("a")
    second = scene.make("a")
    with pytest.raises(UsageError, match=r"release 1 before it has the same bundle aaaaaaaaaaaa, no other is left"):
        rollback_of(scene.book, second, "", "")


def test_a_release_is_done_when_every_device_of_its_channel_has_answered(scene):
    empty = scene.make("e", channel="empty")
    release = scene.make("a")
    scene.write("device_pinned", agent="d00", release=1)
    for name in DEVICES[1:]:
        assert (scene.book.stage(release, NOW), release.stage) == ("everybody", "everybody")
        scene.device(name, "a", 2, "ok")
    assert scene.book.stage(release, NOW) == "done"
    assert scene.book.stage(empty, NOW) == "everybody", "no device has answered"
    scene.device("new")
    assert scene.book.stage(release, NOW) == "everybody"
    scene.device("new", "", 2, "declined", kept="by hand")
    assert scene.book.stage(release, NOW) == "done"
    scene.make("b")
    assert scene.book.stage(release, NOW) == "everybody", "another took its place"


def test_retired_devices_count_in_no_share_and_count_again_when_they_are_heard(scene):
    release = scene.make("b", max_failed="20%")
    for name in DEVICES[:2]:
        scene.device(name, "a", 1, "failed", "bad")
    assert scene.book.verdict(release, NOW)[0] == "", "2 of 10"
    for name in DEVICES[5:]:
        scene.write("device_retired", agent=name)
    assert scene.book.sizes["stable"] == 5
    assert scene.book.verdict(release, NOW)[1].startswith("2 of 5 devices failed, 1 are allowed; d00")
    scene.write("device_retired", agent="d00")
    assert (release.count["failed"], scene.book.verdict(release, NOW)[0]) == (1, "stop"), "1 of 4, none is allowed"
    scene.device("d00", "a")
    scene.device("d05")
    assert (release.count["failed"], scene.book.sizes["stable"]) == (2, 6)
    scene.write("device_retired", agent="nobody")
    assert scene.book.sizes["stable"] == 6


def test_a_retired_device_is_replaced_in_the_canary_and_is_not_waited_for(scene):
    release = scene.make("b", canary="1")
    (first,) = scene.book.draw_canary(release, DEVICES, NOW)
    scene.write("release_canary", release=1, agents=[first])
    scene.write("device_retired", agent=first)
    assert scene.book.pending(release, NOW) == []
    (second,) = scene.book.draw_canary(release, DEVICES, NOW)
    assert second != first


def test_devices_that_are_not_heard_for_long_retire_and_those_that_are_there_do_not(journal):
    clock = [0.0]
    wall = [utc_now()]
    present = ["here"]
    roster = SimpleNamespace(present=lambda _tier: tuple(present))
    state = SimpleNamespace(journal=journal)
    rollout = Rollout(state, roster, None, None, lambda: clock[0], lambda: wall[0], gone_after=timedelta(days=30))
    for name in ("here", "gone"):
        journal.append(fact_of("device_reported", {"runs": ""}), agent=name)
    rollout.tick()
    wall[0] += timedelta(days=31)
    clock[0] += COUNT_S - 1
    rollout.tick()
    assert set(rollout.book.devices) == {"here", "gone"}, "after a start, devices have time to come back"
    clock[0] += 1
    rollout.tick()
    assert set(rollout.book.devices) == {"here"}
    assert [entry.agent for entry in journal.entries(kinds=("device_retired",))] == ["gone"]
    assert book_of(journal).sizes["stable"] == 1


def test_failures_that_were_known_are_those_of_their_devices(scene):
    release = scene.make("b", max_failed="0")
    scene.device("d00", "a", 1, "failed", "bad")
    scene.write("release_held", release=1, reason="why")
    scene.write("release_resumed", release=1)
    scene.write("device_retired", agent="d00")
    scene.device("d01", "a", 1, "failed", "bad")
    assert scene.book.verdict(release, NOW)[0] == "stop"


def test_channels_are_apart(scene):
    scene.make("a")
    scene.make("b", channel="beta")
    scene.device("tester", channel="beta")
    assert (scene.wanted("d00"), scene.wanted("tester")) == (1, 2)
    assert (scene.book.sizes["stable"], scene.book.sizes["beta"]) == (10, 1)
    scene.device("tester", channel="stable")
    assert (scene.wanted("tester"), scene.book.sizes["beta"]) == (1, 0)


def test_a_pin_wins_until_its_end(scene):
    scene.make("a")
    scene.make("b")
    end = NOW + timedelta(hours=1)
    scene.write("device_pinned", agent="d00", release=1, reason="measurements", until=end.isoformat())
    assert scene.wanted("d00") == 1
    assert scene.book.next_change(NOW) == end
    assert scene.wanted("d00", end - timedelta(seconds=1)) == 1
    assert scene.wanted("d00", end) == 2
    assert scene.book.next_change(end) is None
    scene.write("device_pinned", agent="d01", release=1, reason="x", until="")
    assert scene.wanted("d01", NOW + timedelta(days=4000)) == 1
    scene.write("device_unpinned", agent="d01")
    assert scene.wanted("d01") == 2


def test_files_of_releases_that_devices_may_return_to_stay(scene, journal):
    for letter in "abc":
        scene.make(letter)
    assert [one.number for one in releases_in_use(journal)] == [2, 3]
    scene.make("d", canary="1")
    scene.write("device_pinned", agent="d00", release=1)
    assert [one.number for one in releases_in_use(journal)] == [1, 2, 3, 4]
    scene.make("b", rolls_back=3)
    scene.write("device_unpinned", agent="d00")
    assert [one.number for one in releases_in_use(journal)] == [1, 2, 4, 5]


def test_moments_are_utc_unless_they_say_otherwise():
    assert moment_of("2030-01-31") == datetime(2030, 1, 31, tzinfo=timezone.utc)
    assert moment_of("2030-01-31T02:00+01:00") == datetime(2030, 1, 31, 1, tzinfo=timezone.utc)
    assert moment_of("2030-01-31T02:00:00Z") == datetime(2030, 1, 31, 2, tzinfo=timezone.utc)


def test_a_rollback_moves_only_devices_that_were_to_run_what_it_undoes(scene):
    """Newer releases stay newer: one for everybody, and a canary."""
    for letter in "abc":
        scene.make(letter)
    scene.make("a", rolls_back=2)
    assert {scene.wanted(name) for name in DEVICES} == {3}
    scene.make("d", canary="1")
    scene.write("release_canary", release=5, agents=["d00"])
    scene.make("a", rolls_back=3)
    assert (scene.wanted("d00"), scene.wanted("d01")) == (5, 6)
    scene.write("release_stage", release=5, stage="everybody")
    assert {scene.wanted(name) for name in DEVICES} == {5}, "what is promoted goes out"


def test_a_rollback_leaves_canaries_between_alone_and_takes_all_releases_of_the_bundle(scene):
    for letter, plan in (("a", {}), ("b", {"canary": "1"}), ("c", {}), ("c", {})):
        scene.make(letter, **plan)
    scene.write("release_canary", release=2, agents=["d00"])
    scene.make("a", rolls_back=4)
    assert [one.rolled_back_by for one in scene.book.releases] == [0, 0, 5, 5, 0]
    assert (scene.wanted("d00"), scene.wanted("d01")) == (2, 5)


def test_of_two_rollbacks_at_once_one_that_does_not_fit_any_more_changes_nothing(scene):
    """Each command has computed what it returns to from its own book."""
    for letter in "abc":
        scene.make(letter)
    scene.make("a", rolls_back=2)
    scene.make("b", rolls_back=3)  # that is back to release 2, which is gone by now
    assert [one.stage for one in scene.book.releases] == ["everybody", "rolled back", "everybody", "everybody"]
    scene.make("a", rolls_back=2)
    assert len(scene.book.releases) == 4, "twice the same"
    assert {scene.wanted(name) for name in DEVICES} == {3}


def test_a_rollback_cannot_be_held(scene):
    scene.make("a")
    scene.make("b")
    scene.make("a", rolls_back=2)
    scene.device("d00", "b")
    scene.write("release_held", release=3, reason="by a command that was slow")
    assert (scene.wanted("d00"), scene.book.releases[2].stage) == (3, "everybody")


def test_only_devices_of_the_canary_decide_it(scene):
    scene.make("a")
    release = scene.make("b", canary="2", max_failed="0")
    scene.write("release_canary", release=2, agents=["d00", "d01"])
    scene.device("d00", "b", 2, "ok")
    scene.device("d02", "b", 2, "ok")
    assert scene.book.verdict(release, NOW)[0] == "", "d02 is pinned to it, say"
    scene.device("d03", "a", 2, "failed", "bad")
    assert scene.book.verdict(release, NOW)[0] == ""
    scene.write("device_pinned", agent="d01", release=2, until="")
    scene.device("d01", "b", 2, "ok")
    assert scene.book.verdict(release, NOW)[0] == "", "a pin installs whatever the comparison says"
    scene.write("device_unpinned", agent="d01")
    assert scene.book.verdict(release, NOW)[0] == "succeeded"


def test_a_device_that_was_replaced_in_the_canary_stays_out_of_it(scene):
    """Its pin ends, it comes back to the channel, its clock is right again: a canary of two is of two."""
    scene.make("a")
    release = scene.make("b", canary="2")
    first, second = scene.book.draw_canary(release, DEVICES, NOW)
    scene.write("release_canary", release=2, agents=[first, second])
    end = NOW + timedelta(hours=1)
    scene.write("device_pinned", agent=first, release=1, until=end.isoformat())
    scene.device(second, "a", channel="beta")
    drawn = scene.book.draw_canary(release, DEVICES, NOW)
    assert len({*drawn, first, second}) == 4
    scene.write("release_canary", release=2, agents=drawn)
    scene.device(second, "a")
    assert [name for name in DEVICES if scene.book.release_for(scene.book.devices[name], end) is release] == sorted(
        drawn
    )
    scene.device(drawn[0], "a", 2, "unable", "its clock")
    assert len({*scene.book.draw_canary(release, DEVICES, NOW), *drawn}) == 3


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"canary": "11"}, "a canary of 11, and 10 devices were heard in channel 'stable'"),
        ({"canary": "20%", "success": 3}, "success is 3, and the canary has 2 devices; give 2 or less"),
    ],
)
def test_plans_that_the_fleet_is_too_small_for(scene, plan, message):
    with pytest.raises(UsageError, match=message):
        scene.book.check_fleet(Plan(**plan))
    scene.book.check_fleet(Plan(**plan, channel="not-heard-yet"))
    scene.book.check_fleet(Plan(canary="10", success=10))


def test_a_date_that_no_calendar_has_is_refused_and_one_in_a_journal_is_waited_for():
    for far in ("9999-12-31T06:00", "2031-02-10"):
        plan = Plan(window="02:00-05:00", activate_at=far)
        with pytest.raises(UsageError, match="more than 400 days ahead"):
            plan.check(NOW)
    Plan(window="02:00-05:00", activate_at="2031-02-01").check(NOW)
    wait_s, within_s = Plan(window="02:00-05:00", activate_at="9999-12-31T06:00").activation(NOW)
    assert (NOW + timedelta(seconds=wait_s)).year == 9999
    assert within_s is None


def test_pins_and_new_signatures_keep_one_file_of_each_release(scene, journal):
    for letter in "abc":
        scene.make(letter)
    before = release_blobs(journal, ())
    for digit in "01234":
        scene.write("release_signed", digest=digit * 64, release=1)
        scene.write("device_pinned", agent="d00", release=1)
        scene.write("device_unpinned", agent="d00")
    assert release_blobs(journal, ()) == before - {"a" * 64} | {"4" * 64}
    assert release_blobs(journal, {None, ""}) == {letter * 64 for letter in "bc"}, "those in use, of runs that are gone"
