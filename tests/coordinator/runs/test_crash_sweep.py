"""kill -9 of either side at every write, sync, rename, removal, entry and message: nothing lost, nothing twice.

`coordinator.runs.audit` joins the journal with the receipts that the agents noted, and aggregates every round again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from unittest import mock

import pytest
from federation_duties import TinyDuties, quick_params
from federation_harness import Federation
from full_disk import DyingProcess

from coordinator.runs.audit import audit
from coordinator.state import store
from edge_agent.core.storage import sweep

ROUNDS = 2
METHOD = "fedper"
"""Its clients keep a state of their own."""

EVERY = 9
"""The sweep of each test run; `-m slow` takes every point."""


def run_with(folder, side, number):
    """Hash and points of a run in which ``side`` (coordinator or a0) dies at a point, and is started again."""
    with Federation(folder, agents=2, tasks=TinyDuties) as fed, DyingProcess(folder / side).mounted() as process:
        fed.settle()
        process.publishes_with((fed.coordinator if side == "coordinator" else fed.agents[side]).transport)
        fed.request(METHOD, rounds=ROUNDS, params=quick_params(METHOD), keep_updates=True)
        fed.run_id  # noqa: B018 - known before the journal is closed
        process.writes.clear()
        process.full_at = number
        fed.until(lambda: not process.has_room or fed.record.is_over)
        fed.wait(1)
        points = list(process.writes)
        is_dead = not process.has_room
        process.started()
        if is_dead:
            if side == "coordinator":
                with mock.patch.object(store, "_BEGAN_S", time.time()):  # the new process is as old as this
                    fed.start_coordinator()
            else:
                sweep(folder / side)  # as `edge_agent.agent.app` begins
                fed.add(side)
        fed.finish()
        fed.wait(1)
        result = audit(fed.state, fed.run, [folder / name for name in fed.agents])
        assert result.breaks == []
        assert [one.is_aggregation for one in result.rounds] == [True] * ROUNDS
        assert [one.confirmed for one in result.rounds] == [len(fed.agents)] * ROUNDS, "receipts that agents noted"
        accepted = [(entry.round, entry.agent) for entry in fed.entries("update_accepted")]
        assert sorted(accepted) == [(number, name) for number in range(1, ROUNDS + 1) for name in ("a0", "a1")]
        assert [*(folder / side).rglob(".*.tmp")] == [], "temporary files of the dead process"
        return fed.encoder_sha256, points


def swept(folder, side, every, begin=0):
    """Kill ``side`` at every so manieth point; returns all points of an undisturbed run."""
    sha, points = run_with(folder / "undisturbed", side, None)
    kills = range(begin, len(points), every)
    for number in kills:
        got, _ = run_with(folder / str(number), side, number)
        assert got == sha, f"killed at {points[number]}"
    if (report := os.environ.get("CRASH_SWEEP")) is not None:
        with Path(report).open("a") as file:
            file.write(json.dumps({"side": side, "points": len(points), "kills": len(kills)}) + "\n")
    return points


def kinds(points):
    return {point.partition(" ")[0] for point in points}


def test_a_coordinator_killed_at_any_point_loses_nothing_and_ends_in_the_same_bits(tmp_path):
    points = swept(tmp_path, "coordinator", EVERY, begin=3)
    assert kinds(points) >= {"journal", "flush", "publish", "mkdir", "open", "write", "fsync", "replace"}


def test_an_agent_killed_at_any_point_loses_nothing_and_ends_in_the_same_bits(tmp_path):
    points = swept(tmp_path, "a0", EVERY, begin=4)
    assert kinds(points) >= {"publish", "mkdir", "open", "write", "fsync", "replace", "unlink"}


@pytest.mark.slow
@pytest.mark.parametrize("side", ["coordinator", "a0"])
def test_kills_at_every_point(tmp_path, side):
    swept(tmp_path, side, 1)
