"""The disk is full at every write in turn: no process ends, no run fails, and the result has the same bits."""

from __future__ import annotations

import pytest
from federation_duties import TinyDuties, quick_params
from federation_harness import Federation
from full_disk import FullDisk

from coordinator.runs.audit import audit

ROUNDS = 2
FULL_S = 20


def run_on(folder, side, full_at):
    """Hash and writes of a run; the disk of ``side`` (coordinator or a0) is full for 20 s from that write on."""
    agent = side != "coordinator"
    method = ("fedper", quick_params("fedper")) if agent else ("fedavg", {})
    with Federation(folder, agents=2, **({"tasks": TinyDuties} if agent else {})) as fed:
        fed.settle()
        fed.request(method[0], rounds=ROUNDS, params=method[1], keep_updates=True)
        with FullDisk(folder / side, full_at).mounted() as disk:
            fed.until(lambda: fed.record.is_over or not disk.has_room)
            if not disk.has_room:
                fed.wait(FULL_S)
                disk.has_room = True
                disk.full_at = None
            fed.finish()
            fed.wait(1)
        result = audit(fed.state, fed.run, [folder / name for name in fed.agents])
        assert result.breaks == []
        assert [one.is_aggregation for one in result.rounds] == [True] * ROUNDS
        summary = fed.state.run(fed.run).summary()
        reported = [one["id"] for one in summary["agents"]]
        missing = {*summary["faults"]}
        assert {*reported, *missing} == {"a0", "a1"}
        if missing:  # full after its last update: the run does not wait for the report of the final model, and says so
            assert disk.writes[:full_at].count("replace /outbox/update.json") == ROUNDS
            assert "disk cannot be written" in summary["faults"]["a0"]
        return fed.encoder_sha256, disk.writes


def swept(folder, side, numbers):
    sha, writes = run_on(folder / "undisturbed", side, None)
    for number in numbers(len(writes)):
        got, _ = run_on(folder / str(number), side, number)
        assert got == sha, f"full at {writes[number]}"
    return writes


def kinds(writes):
    return {write.partition(" ")[0] for write in writes}


def test_the_disk_of_the_coordinator_is_full_at_any_twelfth_write(tmp_path):
    writes = swept(tmp_path, "coordinator", lambda count: range(0, count, 12))
    assert kinds(writes) == {"journal", "mkdir", "open", "write", "pwrite", "fsync", "replace"}


def test_the_disk_of_an_agent_is_full_at_any_twelfth_write(tmp_path):
    writes = swept(tmp_path, "a0", lambda count: range(0, count, 12))
    assert kinds(writes) == {"mkdir", "open", "write", "pwrite", "fsync", "replace"}


@pytest.mark.slow
@pytest.mark.parametrize("side", ["coordinator", "a0"])
def test_the_disk_is_full_at_every_write(tmp_path, side):
    swept(tmp_path, side, range)
