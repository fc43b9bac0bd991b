"""Releases from the operator's command to the encoder that a device serves with, over real bundles and heads."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from release_site import ReleaseSite

from coordinator.cli import main as headwater
from coordinator.journal.store import utc_now
from coordinator.state.release_keys import NewRelease, ReleaseKeys, read_key, sign_bundle
from coordinator.state.store import blobs_needed
from edge_agent.agent import release_record
from edge_agent.bundle import installed
from edge_agent.cli import main
from edge_agent.core.config import BundleConfig
from edge_agent.personal.personalize import load_head
from edge_agent.wire.messages import down, up

FAR = datetime(2040, 1, 1, tzinfo=timezone.utc)
NAMES = tuple(f"d{number:02}" for number in range(20))


@pytest.fixture
def site(tmp_path, capsys):
    with ReleaseSite(tmp_path, capsys, capture=True) as opened:
        yield opened


def heads_fit(site):
    """Whether every device has a head that was fitted on the encoder in use."""
    for name in site.agents:
        bundle = installed.current(site.folder / name / "bundles")
        load_head(site.folder / name / "head", bundle)
    return True


@pytest.mark.parametrize(
    "spoilt, max_failed, returning, why",
    [
        ({"dim": 1}, "1", 2, "acc.personal is 0."),
        ({"dim": 24, "golden_error": 1.0}, "1", 0, "self-test"),
        ({"dim": 24, "golden_error": 1.0}, "10%", 0, "self-test"),
    ],
    ids=["less accurate", "fails its self-test", "the first failure is enough"],
)
def test_a_bad_encoder_to_20_devices_stops_at_its_canary_of_2(site, make_bundle, spoilt, max_failed, returning, why):
    """With a single feature, which each device would take, their accuracy falls by more than the operator allows."""
    site.export(make_bundle("good.hwb", dim=24))
    site.release("create", "--canary", "all")
    for name in NAMES:
        site.device(name)
    site.until(lambda: set(site.running().values()) == {1}, limit_s=60)
    site.export(make_bundle("bad.hwb", seed=5, **spoilt))
    bad = site.release("create", "--canary", 2, "--max-failed", max_failed, "--min-gain", "-0.05")
    assert bad["stage"] == "canary"
    site.until(lambda: len(site.stages()) == 3, limit_s=60)
    site.wait(30)
    assert site.stages() == ["everybody", "rolled back", "everybody"]
    saw = Counter(
        name
        for name in NAMES
        for message in site.messages(site.topics.down(name), down.Install)
        if message.bundle_id == bad["bundle_id"]
    )
    assert len(saw) == 2, "18 never see it"
    assert set(saw) == set(site.coordinator.releases.book.releases[1].canary)
    assert set(site.table().values()) == {(3, 3)}
    back = [name for name in NAMES if site.messages(site.topics.down(name), down.Install)[-1].release == 3]
    assert sorted(back) == sorted(saw)[:returning], "those that have switched return"
    assert {*site.running().values()} == {3}
    assert heads_fit(site)
    status = site.release("status")
    reason = status["releases"][2]["plan"]["note"]
    assert " of 2 devices failed" in reason
    assert why in reason
    site.restart(*NAMES[:3])
    site.wait(30)
    assert {*site.running().values()} == {3}, "the rollback stays"


@pytest.fixture
def made(make_bundle):
    return [make_bundle(f"{name}.hwb", dim=16, seed=seed) for seed, name in enumerate("abcd")]


def released(site, bundle, *words):
    site.export(bundle)
    return site.release("create", *(words or ("--canary", "all")))


def test_a_bundle_is_downloaded_at_once_and_used_in_its_window(site, made):
    """It is noon, the window is 02:00 to 03:00."""
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    site.agents["porch"].write_status()
    assert json.loads((site.folder / "porch" / "status.json").read_text())["waits_for"] is None, "it has a bundle"
    released(site, made[1], "--canary", "all", "--window", "02:00-03:00")
    site.wait(60)
    assert site.running() == {"porch": 1}
    chunks = len(site.published(site.topics.down_chunks("porch"))) + sum(
        topic.startswith(site.topics.broadcast("")) for topic, _ in site.broker.captured
    )
    site.agents["porch"].write_status()
    status = json.loads((site.folder / "porch" / "status.json").read_text())
    assert status["candidate"]["release"] == 2
    assert status["candidate"]["state"].startswith("switches in 503")
    site.clock.now += 14 * 3600 - 120
    site.wait(30)
    assert site.running() == {"porch": 1}
    took = site.until(lambda: site.running() == {"porch": 2}, limit_s=120)
    assert site.now().strftime("%H:%M") == "02:00", took
    sent = len(site.published(site.topics.down_chunks("porch"))) + sum(
        topic.startswith(site.topics.broadcast("")) for topic, _ in site.broker.captured
    )
    assert sent == chunks, "nothing was downloaded then"


def test_a_bundle_that_missed_its_window_waits_for_the_next_one(site, made):
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    released(site, made[1], "--canary", "all", "--window", "02:00-03:00")
    site.wait(5)
    site.kill("porch")
    site.clock.now += 16 * 3600
    site.device("porch")
    site.wait(120)
    assert site.running() == {"porch": 1}
    site.clock.now += 22 * 3600
    site.until(lambda: site.running() == {"porch": 2}, limit_s=600)


def test_a_bundle_that_waits_for_its_window_is_not_used_after_a_hold(site, made):
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    released(site, made[1], "--canary", "all", "--window", "02:00-03:00")
    site.wait(30)
    site.release("hold", "--reason", "a mistake in the labels")
    site.wait(30)
    site.clock.now += 14 * 3600
    site.wait(600)
    assert site.running() == {"porch": 1}
    site.agents["porch"].write_status()
    assert json.loads((site.folder / "porch" / "status.json").read_text())["candidate"] is None
    site.release("resume", 2)
    site.until(lambda: site.running() == {"porch": 2}, limit_s=120)


def test_a_bundle_that_was_held_while_the_coordinator_was_off_is_not_used_in_its_window(site, made):
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    released(site, made[1], "--canary", "all", "--window", "02:00-03:00")
    site.wait(30)
    site.kill_coordinator()
    site.release("hold", 2)
    site.clock.now += 13 * 3600
    site.start_coordinator()
    site.wait(60)
    site.clock.now += 3600
    site.wait(60)
    assert site.now().strftime("%H") == "02"
    assert site.running() == {"porch": 1}


def waiting(site, made, window="02:00-03:00"):
    """A device that runs release 1 and has release 2, whose window is in 14 hours, on its disk; both sides are off."""
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    released(site, made[1], "--canary", "all", *(["--window", window] if window else ["--activate-at", AT_TWO]))
    site.wait(30)
    assert site.running() == {"porch": 1}
    site.kill_coordinator()
    site.kill("porch")


AT_TWO = "2030-01-02T02:00"


def uses(site, bundle):
    """Whether the device has this bundle in use; also while there is no coordinator."""
    return installed.current_id(site.folder / "porch" / "bundles") == bundle.manifest.bundle_id


def candidate(site):
    site.agents["porch"].write_status()
    return json.loads((site.folder / "porch" / "status.json").read_text())["candidate"]


@pytest.mark.parametrize("window", ["02:00-03:00", ""], ids=["window", "from a moment on"])
def test_a_device_that_restarts_without_its_coordinator_switches_at_its_time(site, made, window):
    waiting(site, made, window)
    begin = site.now()
    site.clock.now += 13 * 3600
    site.device("porch")
    site.wait(120)
    assert uses(site, made[0])
    opens = datetime.fromisoformat(candidate(site)["state"].removeprefix("switches at "))
    assert (opens.hour, opens.minute) == (2, 0)
    assert 0 < (opens - begin).total_seconds() < 24 * 3600
    site.clock.now += (opens - site.now()).total_seconds() - 30
    site.wait(20)
    assert uses(site, made[0])
    site.until(lambda: uses(site, made[1]), limit_s=60)
    assert candidate(site) is None
    assert not (site.folder / "porch" / "waits.json").exists()
    site.start_coordinator()
    site.until(lambda: site.table() == {"porch": (2, 2)}, limit_s=60)


def test_a_device_that_starts_in_its_window_first_hears_of_a_hold(site, made):
    waiting(site, made)
    site.release("hold", 2)
    site.clock.now += 14 * 3600 + 600
    site.start_coordinator()
    site.device("porch")
    site.wait(600)
    assert uses(site, made[0])
    assert not (site.folder / "porch" / "waits.json").exists()


def test_a_device_whose_window_has_passed_while_it_was_off_waits_for_its_coordinator(site, made):
    waiting(site, made)
    site.clock.now += 16 * 3600
    site.device("porch")
    site.wait(600)
    assert uses(site, made[0])
    site.start_coordinator()
    site.clock.now += 22 * 3600
    site.until(lambda: uses(site, made[1]), limit_s=600)


@pytest.mark.parametrize("days, words", [(-400, "before"), (400, "long after")])
@pytest.mark.parametrize("window", ["02:00-03:00", ""], ids=["window", "from a moment on"])
def test_a_clock_a_year_off_postpones_the_switch_and_is_named(site, made, days, words, window):
    waiting(site, made, window)
    off = timedelta(days=days)
    site.clock.now += 14 * 3600 + 600
    site.add("porch", tier="head", now=lambda: (site.now() + off).timestamp())
    site.wait(300)
    assert uses(site, made[0])
    assert words in candidate(site)["state"]
    assert candidate(site)["state"].endswith("set the clock")
    site.start_coordinator()
    site.until(lambda: site.messages(site.topics.up("porch"), up.Fault), limit_s=60)
    fault = site.messages(site.topics.up("porch"), up.Fault)[-1]
    assert (fault.code, words in fault.message) == ("state", True)
    assert "failed" not in [result.outcome for result in site.coordinator.releases.book.releases[1].results.values()]
    site.until(lambda: uses(site, made[1]), limit_s=900)


def test_a_clock_that_is_set_right_lets_the_device_switch_in_its_window(site, made):
    waiting(site, made)
    off = [timedelta(days=-400)]
    site.clock.now += 14 * 3600 + 600
    site.add("porch", tier="head", now=lambda: (site.now() + off[0]).timestamp())
    site.wait(120)
    assert uses(site, made[0])
    off[0] = timedelta()
    site.until(lambda: uses(site, made[1]), limit_s=60)


@pytest.mark.parametrize("spoil", ["damaged", "declined", "no blob"])
def test_what_is_not_to_be_used_any_more_is_forgotten_at_the_start(site, made, spoil):
    waiting(site, made)
    state = site.folder / "porch"
    if spoil == "damaged":
        (state / "waits.json").write_text("{}")
    elif spoil == "declined":
        site.on_device("pin", "--state", state, "--reason", "a demo")
    else:
        for path in (state / "cache").rglob("*"):
            if path.is_file():
                path.unlink()
    site.clock.now += 14 * 3600 + 600
    site.device("porch")
    site.wait(300)
    assert uses(site, made[0])
    assert candidate(site) is None


def test_a_device_has_no_say_in_a_release_that_it_was_not_to_get(site, made):
    released(site, made[0])
    for name in ("porch", "hall", "attic"):
        site.device(name)
    site.until(lambda: set(site.running().values()) == {1}, limit_s=30)
    bundle_id = released(site, made[1], "--canary", 2)["bundle_id"]
    site.until(lambda: site.stages() == ["everybody", "paused"], limit_s=60)
    release = site.coordinator.releases.book.releases[1]
    (other,) = {"porch", "hall", "attic"} - set(release.canary)
    for reason in ("a lie", ""):
        report = up.Report(run=release.run, about=bundle_id, samples=5, rolled_back=reason, kept=reason)
        site.agents[other].link.send(report)
        site.wait(5)
    assert (other in release.results, site.stages()) == (False, ["everybody", "paused"])


def test_the_owner_pins_a_running_device_and_the_operator_sees_why(site, made):
    state = site.folder / "porch"
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    site.on_device("pin", "--state", state, "--reason", "exhibition", "--until", "2030-01-01T13:00")
    site.wait(20)
    released(site, made[1])
    site.wait(60)
    site.restart("porch")
    site.wait(60)
    assert site.running() == {"porch": 1}
    (device,) = site.release("status")["devices"]
    assert (device["outcome"], device["wanted"]) == ("declined", 2)
    assert "pinned on this device until 2030-01-01T13:00+00:00: exhibition" in device["kept"]
    assert site.stages() == ["everybody", "everybody"], "that is no failure"
    site.clock.now += 3600
    site.until(lambda: site.running() == {"porch": 2}, limit_s=60)
    (device,) = site.release("status")["devices"]
    assert (device["outcome"], device["kept"]) == ("ok", "")


def test_the_owner_sees_for_what_the_operator_pins_a_device(site, made, capsys):
    def pin():
        site.agents["porch"].write_status()
        return json.loads((site.folder / "porch" / "status.json").read_text())["operator_pin"]

    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    assert pin() is None
    site.release("pin", "porch", "--reason", "measurements", "--until", "2030-01-01T13:00")
    known = {"release": 1, "until": "2030-01-01T13:00+00:00", "reason": "measurements"}
    site.until(lambda: pin() == known, limit_s=5)
    config = site.folder / "porch.toml"
    config.write_text(f'id = "porch"\nstate = "{site.folder / "porch"}"\n[data]\nsource = "digits:optdigits?n=60"\n')
    main(["status", "--config", str(config)])
    row = "operator_pin release 1, until 2030-01-01T13:00+00:00: measurements; no other release comes before"
    assert row in " ".join(capsys.readouterr().out.split())
    site.restart("porch")
    site.until(lambda: pin() == known, limit_s=30)
    site.release("unpin", "porch")
    site.until(lambda: pin() is None, limit_s=5)
    site.release("pin", "porch", "--reason", "again", "--until", "2030-01-01T13:00")
    site.until(lambda: pin() is not None, limit_s=5)
    site.clock.now += 3600
    site.until(lambda: pin() is None, limit_s=5)


def test_unpin_lets_a_running_device_follow(site, made):
    state = site.folder / "porch"
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    site.on_device("pin", "--state", state, "--reason", "exhibition")
    released(site, made[1])
    site.wait(60)
    assert site.running() == {"porch": 1}
    site.on_device("unpin", "--state", state)
    site.until(lambda: site.running() == {"porch": 2}, limit_s=60)


def test_a_device_that_does_not_live_with_a_new_bundle_returns_to_the_one_before(site, made):
    """Killed within 300 s of three starts; a start that was stopped on purpose does not count."""
    state = site.folder / "porch"
    released(site, made[0])
    site.device("porch")
    site.device("hall")
    site.until(lambda: site.running() == {"porch": 1, "hall": 1}, limit_s=30)
    released(site, made[1], "--canary", "all", "--max-failed", "0")
    site.until(lambda: site.running() == {"porch": 2, "hall": 2}, limit_s=30)
    for number in range(4):
        assert site.running()["porch"] == 2, number
        site.kill("porch")
        site.device("porch")
        site.wait(200)
        if number == 1:
            site.agents.pop("porch").close()
            site.device("porch")
            site.wait(200)
    assert installed.current_id(state / "bundles") == made[0].manifest.bundle_id
    load_head(state / "head", installed.current(state / "bundles"))
    site.until(lambda: site.stages() == ["everybody", "rolled back", "everybody"], limit_s=60)
    site.until(lambda: site.running() == {"porch": 3, "hall": 3}, limit_s=60)
    status = site.release("status")
    assert "the agent ended 3 times within 300 s" in status["releases"][1]["results"]["porch"]["reason"]
    again = released(site, made[1])
    site.until(lambda: site.running()["porch"] == again["release"], limit_s=60)


def test_power_cuts_are_no_crashes(site, made, monkeypatch, tmp_path):
    boot_id = tmp_path / "boot_id"
    monkeypatch.setattr(release_record, "_BOOT_ID", boot_id)
    boot_id.write_text("boot-0\n")
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    released(site, made[1], "--canary", "all")
    site.until(lambda: site.running() == {"porch": 2}, limit_s=30)

    def ends_and_starts(boot):
        site.kill("porch")
        boot_id.write_text(f"boot-{boot}\n")
        site.device("porch")
        site.wait(100)
        return site.running()["porch"]

    assert [ends_and_starts(number) for number in range(1, 8)] == [2] * 7
    assert [ends_and_starts(7) for _ in range(2)] == [2, 2], "two crashes"
    assert ends_and_starts(8) == 2
    assert ends_and_starts(8) != 2, "the third"


def test_a_device_that_lives_with_a_new_bundle_keeps_it_whatever_happens_later(site, made):
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    released(site, made[1])
    site.until(lambda: site.running() == {"porch": 2}, limit_s=30)
    site.wait(301)
    for _ in range(6):
        site.kill("porch")
        site.device("porch")
        site.wait(10)
    assert site.running() == {"porch": 2}


def test_status_of_a_device_names_what_it_refused_and_what_is_pinned(site, make_bundle, made, tmp_path):
    state = site.folder / "porch"
    config = tmp_path / "agent.toml"
    config.write_text(f'id = "porch"\nstate = "{state}"\n[data]\nsource = "digits:optdigits?n=60"\n')
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    bad = make_bundle("bad.hwb", dim=16, seed=9, golden_error=1.0)
    released(site, bad)
    site.until(lambda: site.stages() == ["everybody", "rolled back", "everybody"], limit_s=30)
    site.on_device("pin", "--state", state, "--reason", "exhibition")
    site.kill("porch")
    shown = site.on_device("status", "--config", config)
    (refused,) = shown["refused"]
    assert (refused["bundle_id"], refused["crashed"]) == (bad.manifest.bundle_id, False)
    assert "self-test" in refused["reason"]
    pinned = shown["pinned"]
    assert (pinned["bundle_id"], pinned["reason"], pinned["holds"]) == (shown["bundle_id"], "exhibition", True)
    assert main(["rollback", "--state", str(state)]) == 2
    assert main(["import", str(made[1].path), "--state", str(state)]) == 2
    assert main(["pin", "--state", str(tmp_path), "--reason", "x"]) == 2
    assert main(["unpin", "--state", str(tmp_path)]) == 2


@pytest.mark.parametrize("content", ["[]", "{", '{"bundle_id": 1}', '{"bundle_id": "a", "reason": "b", "until": "x"}'])
def test_a_damaged_pin_is_a_fault_and_the_device_keeps_its_bundle(site, made, content):
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)
    (site.folder / "porch" / "pin.json").write_text(content)
    released(site, made[1])
    site.wait(30)
    assert site.running() == {"porch": 1}
    assert "remove it" in site.agents["porch"].condition.problem.message


def test_status_and_report_show_what_a_release_waits_for_and_what_it_scored_where(site, made, capsys):
    released(site, made[0])
    for name in ("porch", "hall", "attic"):
        site.device(name)
    site.until(lambda: set(site.running().values()) == {1}, limit_s=30)
    site.kill("attic")
    release = released(site, made[1], "--canary", 2, "--note", "more data")
    site.until(lambda: site.stages() == ["everybody", "paused"], limit_s=60)

    def shown(*words):
        with pytest.raises(SystemExit):
            headwater([*map(str, words), "--state", str(site.config.state)])
        return capsys.readouterr().out

    waits = "the canary succeeded; continue with 'headwater release promote 2'"
    assert f"release 2 (stable, paused): {waits}" in shown("status")
    site.release("promote")
    assert "release 2 (stable, everybody): waits for reports of 1 device: attic" in shown("status")
    text = shown("release", "status")
    assert "release 2 (stable, everybody), made 20" in text
    assert ": more data\n" in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith(("attic", "hall"))] == [
        ["attic", "stable"],
        ["hall", "stable"],
    ]
    run = release["lineage"]["run"]
    site.state.run(run).write_summary({"run_id": run, "status": "finished", "agents": []})
    page = Path(shown("report", "--run", run).strip()).read_text()
    book = site.coordinator.releases.book
    result = book.releases[1].results["hall"]
    assert result.outcome == "ok"
    scores = f"{100 * result.before:.1f} %", f"{100 * result.acc:.1f} %"
    for expected in ("Releases of the bundle", "more data", book.releases[0].bundle_id[:12], *scores):
        assert expected in page


@pytest.mark.parametrize(
    "words, message",
    [
        (("promote",), "'headwater release create' makes one"),
        (("create", "run-0009"), "unknown run 'run-0009'"),
        (("create",), "no run has a bundle that can be released"),
        (("create", "--canary", "many"), "'many' is no number of devices"),
        (("create", "--window", "night"), "window 'night' is none"),
        (("create", "--window", "02:00-05:00", "--activate-at", "9999-12-31T06:00"), "more than 400 days ahead"),
        (("create", "--canary", "2", "--success", "5"), "success is 5, and the canary has 2 devices; give 2 or less"),
        (("create", "--channel", "Stable beta"), "channel 'Stable beta' cannot be that of a device"),
        (("pin", "porch", "--reason", "x"), "no device 'porch' was heard"),
        (("pin", "porch", "--reason", "x", "--until", "2020-01-01"), "is over"),
        (("unpin", "porch"), "'porch' is not pinned"),
    ],
)
def test_commands_that_cannot_be_obeyed_say_what_to_do(site, words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        headwater(["release", *words, "--state", str(site.config.state)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "before, words, message",
    [
        ((), ("promote", 1), "only one at its canary can be promoted"),
        ((), ("resume", 1), "only one that is held can be resumed"),
        ((), ("rollback", 1), "there is nothing to return to"),
        ((("hold", 1),), ("hold", 1), "only one that devices still get can be held"),
        ((), ("hold", 2), "no release 2; there are 1 to 1"),
        ((("create", "run-0001"), ("promote", 2)), ("rollback", 2), "before it has the same bundle"),
    ],
)
def test_steps_out_of_order_are_refused(site, made, before, words, message, capsys):
    released(site, made[0])
    for step in before:
        site.release(*step)
    with pytest.raises(SystemExit) as ended:
        headwater(["release", *map(str, words), "--state", str(site.config.state)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_release_is_by_default_of_the_newest_run_and_a_rollback_cannot_be_held(site, made, capsys):
    for bundle in made[:2]:
        released(site, bundle)
    site.release("rollback", 2)
    with pytest.raises(SystemExit) as ended:
        headwater(["release", "hold", "3", "--state", str(site.config.state)])
    assert ended.value.code == 2
    assert "'headwater release rollback 3' goes further back" in capsys.readouterr().err
    run = site.export(made[2])
    site.release("create", "run-0001", "--canary", "all")
    newest = site.release("create", "--canary", "all")
    assert (newest["lineage"]["run"], newest["bundle_id"]) == (run, made[2].manifest.bundle_id)


def test_rollbacks_are_signed_again_for_devices_that_refuse_older_versions(site, make_bundle, capsys):
    """The coordinator signs the older bundle again; where people sign, it says how, and holds what failed."""
    keys = ReleaseKeys(site.config.state)
    keys.create("home", utc_now())
    trusting = BundleConfig(trust=keys.root)
    good = make_bundle("good.hwb", dim=24)
    bad = make_bundle("bad.hwb", dim=1, seed=5)
    runs = [site.export(good), site.export(bad)]
    for run, made in zip(runs, (good, bad), strict=True):
        path = site.state.run(run).folder / f"{run}.hwb"
        path.parent.mkdir(parents=True)
        path.write_bytes(made.path.read_bytes())
    site.release("create", runs[0], "--canary", "all")
    for name in ("porch", "hall"):
        site.add(name, tier="head", bundle=trusting)
    site.until(lambda: set(site.running().values()) == {1}, limit_s=30)

    site.release("create", runs[1], "--canary", "all", "--max-failed", 1, "--min-gain", "-0.05")
    site.until(lambda: site.stages() == ["everybody", "rolled back", "everybody"], limit_s=60)
    site.until(lambda: {*site.running().values()} == {3}, limit_s=60)

    site.release("create", runs[1], "--canary", "all", "--max-failed", "100%")
    site.until(lambda: {*site.running().values()} == {4}, limit_s=60)
    site.release("rollback", 4)
    site.until(lambda: {*site.running().values()} == {5}, limit_s=60)

    site.release("create", runs[1], "--canary", "all", "--max-failed", "100%")
    site.until(lambda: {*site.running().values()} == {6}, limit_s=60)
    site.release("pin", "porch", "--release", 1, "--reason", "measurements")
    site.until(lambda: site.running() == {"porch": 5, "hall": 6}, limit_s=60)  # 1 and 5 are one bundle
    book = site.coordinator.releases.book
    assert len({book.releases[0].digest, book.releases[2].digest, book.releases[4].digest}) == 3

    site.release("unpin", "porch")
    site.release("rollback", 6)
    site.until(lambda: {*site.running().values()} == {7}, limit_s=60)

    person = site.folder / "person.key"
    keys.release_key.rename(person)
    with pytest.raises(SystemExit):
        headwater(["release", "create", runs[1], "--canary", "all", "--state", str(site.config.state)])
    path = site.state.run(runs[1]).folder / f"{runs[1]}.hwb"
    assert f"'headwater keys sign {path} --key FILE' signs it" in capsys.readouterr().err
    sign_bundle(path, keys.roots(), [read_key(person)], NewRelease(keys.next_version(utc_now()), FAR))
    site.release("create", runs[1], "--canary", "all", "--max-failed", "0", "--min-gain", "-0.05")
    site.until(lambda: site.stages()[-1] == "held", limit_s=60)
    reason = site.release("status")["releases"][-1]["waits_for"]
    assert "Not rolled back" in reason
    assert "--key FILE' signs it for a release" in reason


def test_devices_that_return_to_their_channel_get_a_file_that_they_may_install(site, make_bundle):
    """The file of a pin, or of another channel, was signed later than that of the release that they return to."""
    keys = ReleaseKeys(site.config.state)
    keys.create("home", utc_now())
    trusting = BundleConfig(trust=keys.root)
    released(site, make_bundle("a.hwb", dim=16))
    for name in ("porch", "hall", "attic"):
        site.device(name, bundle=trusting)
    site.until(lambda: set(site.running().values()) == {1}, limit_s=30)
    released(site, make_bundle("b.hwb", dim=16, seed=1), "--canary", "all", "--max-failed", "0")
    site.until(lambda: set(site.running().values()) == {2}, limit_s=30)
    site.release("pin", "porch", "--release", 1, "--reason", "measurements")
    site.until(lambda: site.running()["porch"] == 1, limit_s=60)
    site.release("unpin", "porch")
    site.until(lambda: site.running()["porch"] == 2, limit_s=60)

    released(site, make_bundle("c.hwb", dim=16, seed=2), "--canary", "all", "--channel", "beta", "--new-channel")
    for channel, expected in (("beta", 3), ("stable", 2)):
        site.kill("hall")
        site.device("hall", bundle=trusting, channel=channel)
        site.until(lambda expected=expected: site.running()["hall"] == expected, limit_s=60)
    site.wait(60)
    assert site.running() == {"porch": 2, "hall": 2, "attic": 2}
    assert site.stages() == ["everybody", "everybody", "everybody"]
    assert [dict(one.count).get("failed", 0) for one in site.coordinator.releases.book.releases] == [0, 0, 0]
    signed = site.state.journal.entries(kinds=("release_signed",))
    assert [entry.body["release"] for entry in signed] == [1, 2, 2][: len(signed)]
    assert len(blobs_needed(site.state)) == 3 + 3, "of each run its export, of each release the newest file"


def test_a_device_whose_clock_or_data_are_wrong_does_not_stop_a_release(site, make_bundle, tmp_path):
    keys = ReleaseKeys(site.config.state)
    keys.create("home", utc_now())
    trusting = BundleConfig(trust=keys.root)
    released(site, make_bundle("a.hwb", dim=16))
    ahead_s = [0.0]
    for name in ("porch", "hall"):
        site.device(name, bundle=trusting)
    site.add("attic", tier="head", bundle=trusting, now=lambda: site.now().timestamp() + ahead_s[0])
    site.until(lambda: set(site.running().values()) == {1}, limit_s=30)
    ahead_s[0] = 2 * 365 * 86_400.0
    released(site, make_bundle("b.hwb", dim=16, seed=1), "--canary", "all", "--max-failed", "0")
    site.until(lambda: site.running() == {"porch": 2, "hall": 2, "attic": 1}, limit_s=30)
    site.wait(60)
    (row,) = [one for one in site.release("status")["devices"] if one["device"] == "attic"]
    assert (row["outcome"], "expired" in row["reason"]) == ("unable", True)
    assert site.stages() == ["everybody", "everybody"]
    ahead_s[0] = 0.0
    site.longest_pause_s = site.shortest_pause_s = 5.0  # ten minutes pass, and nothing asks for their seconds
    site.until(lambda: set(site.running().values()) == {2}, limit_s=700)
