"""Trials of new bundles on a device: an agent that does not survive them, an owner who pins meanwhile, their time."""

from __future__ import annotations

import fcntl
import json
import os
import threading

import pytest
from federation_harness import Killed
from release_site import ReleaseSite

from edge_agent.agent import head_tier
from edge_agent.agent.release_record import ReleaseRecord
from edge_agent.bundle import installed
from edge_agent.cli import main
from edge_agent.core.errors import DataError
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages import down, up

A = "a" * 64
B = "b" * 64
C = "c" * 64


def offer(bundle_id, release):
    return down.Install(run="run-0001", bundle_id=bundle_id, release=release, blob=Outgoing.of(b"x").ref)


@pytest.fixture
def site(tmp_path, capsys):
    with ReleaseSite(tmp_path, capsys, capture=True) as opened:
        yield opened


@pytest.fixture
def made(make_bundle):
    return [make_bundle(f"{name}.hwb", dim=16, seed=seed) for seed, name in enumerate("abc")]


def released(site, bundle, *words):
    site.export(bundle)
    return site.release("create", "--canary", "all", *words)


def first(site, made):
    """A device that runs release 1."""
    released(site, made[0])
    site.device("porch")
    site.until(lambda: site.running() == {"porch": 1}, limit_s=30)


def uses(site, bundle):
    return installed.current_id(site.folder / "porch" / "bundles") == bundle.manifest.bundle_id


# --- an agent that does not live with a bundle in use ----------------------------------------------------------------


def test_a_bundle_that_comes_while_another_is_on_trial_has_a_trial_of_its_full_time(site, made):
    """The time of the one before, 280 s, was counted for it, so 20 s after its switch it was on trial no more."""
    first(site, made)
    site.wait(280)
    released(site, made[1])
    site.until(lambda: site.running() == {"porch": 2}, limit_s=30)
    site.wait(25)
    for _ in range(4):
        site.kill("porch")
        site.device("porch")
        site.wait(5)
    assert uses(site, made[0])
    site.until(lambda: site.release("status")["releases"][1]["results"]["porch"]["outcome"] == "failed", limit_s=30)


def test_each_bundle_is_proved_after_its_own_300_s(site, made):
    first(site, made)
    site.wait(280)
    released(site, made[1])
    site.until(lambda: site.running() == {"porch": 2}, limit_s=30)
    tasks = site.tasks["porch"]
    site.wait(290)
    assert tasks.bundles.on_trial.bundle_id == made[1].manifest.bundle_id
    site.wait(12)
    assert tasks.bundles.on_trial is None
    assert ReleaseRecord(site.folder / "porch").count_start() is None, "also on the disk"


class NotedLock:
    """A lock that says when a thread has to wait for it."""

    def __init__(self, lock, waits):
        self._lock = lock
        self._waits = waits

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self._waits.set()
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


@pytest.mark.parametrize("change", ["proved", "stopped"])
def test_a_bundle_taken_while_the_loop_writes_the_record_stays_on_trial(tmp_path, monkeypatch, change):
    """The worker takes a bundle between the loop's read and its write, which put back what it had read."""
    record = ReleaseRecord(tmp_path)
    record.note_installed(offer(A, 1))
    (tmp_path / "bundles").mkdir()
    trial = record.on_trial
    over = threading.Event()
    real = record._read
    record._lock = NotedLock(record._lock, over)
    others = []

    def read():
        result = real()
        if not others:

            def take():
                record.note_installed(offer(B, 2))
                over.set()

            others.append(threading.Thread(target=take))
            others[0].start()
            assert over.wait(60)
        return result

    monkeypatch.setattr(record, "_read", read)
    if change == "proved":
        record.end_trial(trial)
    else:
        record.note_stop()
    others[0].join()
    assert record.on_trial.bundle_id == B
    again = ReleaseRecord(tmp_path)
    assert again.count_start().bundle_id == B
    assert again.put_by_hand(A, B).source.release == 2, "the bundle that was taken last"


def test_the_end_of_one_trial_is_not_that_of_another(tmp_path):
    record = ReleaseRecord(tmp_path)
    record.note_installed(offer(A, 1))
    before = record.on_trial
    record.note_installed(offer(B, 2))
    record.end_trial(before)
    assert record.on_trial.bundle_id == ReleaseRecord(tmp_path).count_start().bundle_id == B
    record.end_trial(record.on_trial)
    assert record.on_trial is ReleaseRecord(tmp_path).count_start() is None


def test_a_damaged_record_does_not_end_the_agent_whose_bundle_is_on_trial(site, made):
    first(site, made)
    (site.folder / "porch" / "releases.json").write_text("{")
    site.wait(400)
    assert site.agents["porch"].welcomed
    site.agents.pop("porch").close()
    assert site.messages(site.topics.up("porch"), up.Bye)


# --- an agent that does not survive a preparation --------------------------------------------------------------------


def dies(monkeypatch):
    """Whatever fits a head kills the agent, as a system out of memory may."""

    def killed(*_, **__):
        raise Killed

    monkeypatch.setattr(head_tier, "personalize", killed)


def test_a_bundle_whose_preparation_kills_the_agent_is_refused_after_three_times(site, made, monkeypatch):
    first(site, made)
    released(site, made[1], "--max-failed", "100%", "--activate-at", "2030-01-01T12:05")
    site.wait(200)
    with monkeypatch.context() as patched:
        dies(patched)
        site.until(lambda: not site.agents, limit_s=200)
        survived = []
        while len(survived) < 10 and not any(survived):
            assert uses(site, made[0])
            site.device("porch")
            site.wait(30)
            survived.append(bool(site.agents))
        assert survived == [False, False, True], "the start after the third end"
    assert site.tasks["porch"].bundles.on_trial.starts == 1, (
        "the bundle in use is on trial as well, and is not to blame"
    )
    results = site.release("status")["releases"][1]["results"]
    assert results["porch"]["outcome"] == "failed"
    assert "because the agent ended 3 times while it prepared bundle" in results["porch"]["reason"]
    (refused,) = site.tasks["porch"].bundles.releases.refused()
    assert (refused.bundle_id, refused.crashed) == (made[1].manifest.bundle_id, True)
    site.restart("porch")
    site.wait(60)
    assert uses(site, made[0])
    again = released(site, made[1])
    site.until(lambda: site.running()["porch"] == again["release"], limit_s=60)


def test_a_first_bundle_that_kills_the_agent_is_a_fault_after_three_times(site, made, monkeypatch):
    dies(monkeypatch)
    released(site, made[0], "--max-failed", "100%")
    for _ in range(3):
        site.device("porch")
        site.until(lambda: not site.agents, limit_s=60)
    site.device("porch")
    site.until(lambda: "porch" in site.release("status")["releases"][0]["results"], limit_s=60)
    assert site.agents
    fault = site.messages(site.topics.up("porch"), up.Fault)[-1]
    assert (fault.error, "ended 3 times" in fault.message) == ("BundleError", True)


def test_what_counts_as_a_preparation_that_the_agent_did_not_survive(tmp_path):
    def begins(bundle_id=B, release=2, machine="boot-1"):
        return ReleaseRecord(tmp_path).begin_preparation(offer(bundle_id, release), machine)

    assert [begins(), begins(), begins()] == [1, 2, 3]
    assert begins(machine="boot-2") == 3, "power was cut"
    assert [begins(release=3), begins(C, 3), begins(C, 3)] == [1, 1, 2]
    record = ReleaseRecord(tmp_path)
    assert record.begin_preparation(offer(C, 3), "boot-1") == 3
    record.note_stop()
    assert begins(C, 3) == 3, "it was stopped on purpose"
    record.count_start()
    record.note_stop()
    assert begins(C, 3) == 4, "it was stopped while it prepared nothing"
    for end in (
        record.end_preparation,
        lambda: record.refuse(offer(C, 3), "x", 0),
        lambda: record.note_installed(offer(C, 3)),
    ):
        end()
        assert [begins(C, 3), begins(C, 3)] == [1, 2]


def test_an_error_of_a_preparation_is_no_end_of_the_agent(site, made, monkeypatch):
    first(site, made)

    def fails(*_, **__):
        raise DataError("no samples")

    monkeypatch.setattr(head_tier, "personalize", fails)
    tasks = site.tasks["porch"]
    path = made[1].path
    order = down.Install(
        run="run-0001", bundle_id=made[1].manifest.bundle_id, release=2, blob=Outgoing.of(path.read_bytes()).ref
    )
    for _ in range(5):
        with pytest.raises(DataError, match="no samples"):
            tasks.install(order, path)
    assert json.loads((site.folder / "porch" / "releases.json").read_text())["prepared"] is None


# --- an owner who pins meanwhile -------------------------------------------------------------------------------------


def test_a_pin_holds_for_a_bundle_that_waits_for_its_window_without_a_coordinator(site, made):
    state = site.folder / "porch"
    first(site, made)
    released(site, made[1], "--window", "02:00-03:00")
    site.wait(30)
    site.kill_coordinator()
    site.on_device("pin", "--state", state, "--reason", "exhibition")
    site.clock.now += 14 * 3600
    site.wait(300)
    assert uses(site, made[0])
    site.start_coordinator()
    site.wait(60)
    (device,) = site.release("status")["devices"]
    assert (device["outcome"], "exhibition" in device["kept"]) == ("declined", True)
    assert uses(site, made[0])
    site.on_device("unpin", "--state", state)
    site.until(lambda: uses(site, made[1]), limit_s=120)


def test_a_pin_holds_for_a_bundle_that_is_prepared(site, made, monkeypatch):
    """The owner pins when the new bundle is ready, and before the agent switches to it."""
    state = site.folder / "porch"
    prepared = []
    first(site, made)

    def pins(*given, real=head_tier.prepare_here):
        candidate = real(*given)
        if not prepared:
            site.on_device("pin", "--state", state, "--reason", "exhibition")
        prepared.append(candidate)
        return candidate

    monkeypatch.setattr(head_tier, "prepare_here", pins)
    released(site, made[1])
    site.wait(60)
    assert len(prepared) == 1
    assert uses(site, made[0])
    (device,) = site.release("status")["devices"]
    assert (device["outcome"], "exhibition" in device["kept"]) == ("declined", True)
    assert site.tasks["porch"].bundles.releases.refused() == (), "nothing was wrong with it"
    assert site.stages() == ["everybody", "everybody"]
    site.on_device("unpin", "--state", state)
    site.until(lambda: uses(site, made[1]), limit_s=120)
    assert len(prepared) == 2, "it is prepared again, not remembered as declined"


def test_nobody_pins_while_the_agent_switches(site, made, monkeypatch):
    first(site, made)
    was_held = []

    def switches(*given, real=installed.switch):
        descriptor = os.open(site.folder / "porch" / "bundles", os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            was_held.append(False)
        except BlockingIOError:
            was_held.append(True)
        finally:
            os.close(descriptor)
        real(*given)

    monkeypatch.setattr(installed, "switch", switches)
    released(site, made[1])
    site.until(lambda: uses(site, made[1]), limit_s=30)
    assert was_held == [True]


def test_a_pin_of_a_bundle_that_has_just_been_replaced_is_refused(site, made, monkeypatch, capsys):
    first(site, made)
    old = made[0].manifest.bundle_id
    real = installed.current_id
    answers = iter([old])
    released(site, made[1])
    site.until(lambda: uses(site, made[1]), limit_s=30)
    monkeypatch.setattr(installed, "current_id", lambda root: next(answers, None) or real(root))
    assert main(["pin", "--state", str(site.folder / "porch"), "--reason", "x"]) == 2
    assert f"bundle {made[1].manifest.bundle_id[:12]} is in use now, expected {old[:12]}" in capsys.readouterr().err
    assert not (site.folder / "porch" / "pin.json").exists()


# --- the end of a window ---------------------------------------------------------------------------------------------


def test_a_bundle_whose_download_outlasts_its_open_window_is_not_used_after_it(site, made):
    """The coordinator goes in the middle of the download, which another device's broadcast completes."""
    first(site, made)
    site.kill_coordinator()
    agent = site.agents["porch"]
    content = made[1].path.read_bytes()
    order = down.Install(
        run="run-0001",
        bundle_id=made[1].manifest.bundle_id,
        release=2,
        blob=Outgoing.of(content).ref,
        activate_within_s=60,
    )
    agent.jobs.on_install(order)
    site.wait(59)
    assert agent.jobs.candidate()["state"] == "is downloaded"
    site.wait(2)
    assert agent.jobs.candidate() is None
    agent.cache.path(order.blob.digest).write_bytes(content)
    agent.jobs.go_on()
    assert uses(site, made[0])
    agent.jobs.on_install(order)
    site.wait(1)
    assert uses(site, made[1]), "offered again, in time"
