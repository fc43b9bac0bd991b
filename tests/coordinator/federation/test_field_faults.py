"""Faults that fleets meet and no other file covers: very slow devices, replays, clocks that jump, damage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from federation_duties import WIDE_TASK
from federation_harness import Federation, undisturbed_hash
from process_site import AGENTS, DIGITS, Site
from slow_link import LinkedFederation

from edge_agent.core.errors import StateError

ROUNDS = 3


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_hash(lambda folder: Federation(folder, task=WIDE_TASK), tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.slow
def test_ten_of_a_hundred_devices_at_one_byte_a_second_hold_up_no_round_after_the_third(tmp_path):
    """They upload a byte a second from the first round on. Rounds take 5 % longer at most once that is known.

    Others train for 10 s; broadcasts wait 0.35 s for the requests of those in the cohort.
    """
    seconds = {}
    for name, slow in (("without", 0), ("with", 10)):
        rates = dict.fromkeys((f"a{number}" for number in range(100)), 1e6)
        options = {"cohort": {"min_agents": 80}, "round": {"quorum": 0.9, "deadline_s": 120}}
        with LinkedFederation(tmp_path / name, agents=(), rates=rates, **options) as fed:
            for agent in rates:
                fed.add(agent, seconds=10)
            fed.until(lambda fed=fed: len(fed.coordinator.roster.present()) == 100)
            for number in range(slow):
                fed.line(f"a{number}", "up").rate = 1.0
            fed.request(rounds=6)
            fed.finish(3600)
            rounds = fed.metrics()
            assert min(len(line["agents"]) for line in rounds) >= 90
            seconds[name] = [line["seconds"] for line in rounds]
    assert max(seconds["with"][1:3]) <= 1.6 * max(seconds["without"][1:3]), seconds
    assert max(seconds["with"][3:]) <= 1.05 * max(seconds["without"][3:]), seconds


@pytest.mark.parametrize("restart", [False, True], ids=["at once", "after a restart of the coordinator"])
def test_a_whole_upload_of_an_earlier_round_that_is_sent_again_counts_nothing(tmp_path, undisturbed, restart):
    with Federation(tmp_path, agents=(), task=WIDE_TASK, cohort={"min_agents": 3}, capture=True) as fed:
        for number, name in enumerate(("a0", "a1", "a2")):
            fed.add(name, seconds=2 + number)
        fed.request(rounds=ROUNDS)
        fed.until(lambda: fed.record.round == 1)
        up = fed.topics.up("a1")
        chunks = fed.topics.up_chunks("a1")
        recorded = [(topic, payload) for topic, payload in fed.broker.captured if topic in {up, chunks}]
        assert sum(topic == chunks for topic, _ in recorded) > 8
        fed.until(lambda: fed.entries("round_opened", round=2))
        if restart:
            fed.kill_coordinator()
            fed.start_coordinator()
            fed.settle()
        before = fed.coordinator.rejected.total
        for topic, payload in recorded:
            fed.broker.route(topic, payload)
        fed.settle()
        assert fed.coordinator.rejected.total > before, "they are counted"
        fed.finish()
        accepted = [(entry.round, entry.agent) for entry in fed.entries("update_accepted")]
        assert sorted(accepted) == [(number, name) for number in (1, 2, 3) for name in ("a0", "a1", "a2")]
        assert fed.encoder_sha256 == undisturbed


FAKETIME = next((path for path in Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime")
@pytest.mark.parametrize("jump", ["+2d", "-365d"])
def test_a_clock_that_jumps_on_either_side_costs_no_round_and_no_bit(tmp_path, monkeypatch, jump):
    """In round 2 of 4 the wall clock of all processes jumps, and in round 3 back again."""
    offset = tmp_path / "offset"
    for name in ("undisturbed", "jumping"):
        (tmp_path / name).mkdir()
    offset.write_text("+0d")
    with Site(tmp_path / "undisturbed", DIGITS) as site:
        undisturbed = site.finish(site.request(4, local_epochs=30))
    preload = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1"}
    for name, value in {**preload, "DONT_FAKE_MONOTONIC": "1"}.items():
        monkeypatch.setenv(name, value)
    clock = [sys.executable, "-c", "import time; print(time.time())"]
    offset.write_text(jump)
    seen = float(subprocess.run(clock, capture_output=True, check=True, env={**os.environ}).stdout)
    assert abs(seen - time.time()) > 86_400, "the clock does jump"
    offset.write_text("+0d")
    rules = f"[cohort]\nmin_agents = {len(AGENTS)}\n[round]\nquorum = 1.0\ndeadline_s = 300"
    with Site(tmp_path / "jumping", DIGITS, rules=rules) as site:
        begin = time.monotonic()
        run = site.request(4, local_epochs=30)
        for number, offset_then in ((2, jump), (3, "+0d")):
            site.until(lambda number=number: (number, 1) in site.opened(run), f"round {number} opens")
            offset.write_text(offset_then)
        assert site.finish(run) == undisturbed
        assert site.opened(run) == [(number, 1) for number in range(1, 5)], "no round was opened again"
        assert time.monotonic() - begin < 3600
        with site.state.look() as state:
            state.journal.verify()


DAMAGED = ["an entry", "an index", "blobs", "runs/run-0001/metrics.jsonl", "status.json", "agents.json"]
LEAF_PAGES = {"an entry": 0x0D, "an index": 0x0A}
"""SQLite's type, in the first byte of a page, of those with rows and those with keys of an index."""


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position(data)] ^= 0x20
    path.write_bytes(data)


def word_on(page_type):
    """Where a page of that type has the kind of an entry."""

    def position(data, word=b"update_accepted"):
        pages = (start for start in range(4096, len(data), 4096) if data[start] == page_type)
        return next(at for start in pages if (at := data.find(word, start, start + 4096)) >= 0)

    return position


@pytest.mark.parametrize("name", DAMAGED)
def test_each_damaged_state_file_is_refused_or_made_again_and_never_begins_at_round_0(tmp_path, undisturbed, name):
    """One byte of each file is flipped while the coordinator is down; blobs all at once."""
    with Federation(tmp_path, agents=(), task=WIDE_TASK, cohort={"min_agents": 3}) as fed:
        for number, agent in enumerate(("a0", "a1", "a2")):
            fed.add(agent, seconds=2 + number)
        fed.request(rounds=ROUNDS)
        fed.until(lambda: fed.record.round == 2)
        fed.kill_coordinator()
        state = fed.config.state
        shutil.copytree(state, tmp_path / "backup")
        if name in LEAF_PAGES:
            flip(state / "journal.db", word_on(LEAF_PAGES[name]))
        else:
            files = [path for path in (state / name).glob("*") if path.is_file()] or [state / name]
            for file in files:
                if file.exists():
                    flip(file, lambda data: len(data) // 2)
        if name == "an entry":
            with pytest.raises(StateError, match="put back"):
                fed.start_coordinator()
            shutil.copyfile(tmp_path / "backup" / "journal.db", state / "journal.db")
        fed.start_coordinator()
        if name == "an index":
            assert len(fed.entries("update_accepted")) == 6
        if (advice := {"blobs": "put it back", DAMAGED[3]: "remove the line"}.get(name)) is not None:
            fed.wait(5)
            assert advice in fed.coordinator.status()["run"]["stalled"]["reason"]
            shutil.copytree(tmp_path / "backup" / "blobs", state / "blobs", dirs_exist_ok=True)
            shutil.copyfile(tmp_path / "backup" / DAMAGED[3], state / DAMAGED[3])
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        assert [entry.round for entry in fed.entries("round_closed")] == [1, 2, 3]
        fed.state.journal.verify()
