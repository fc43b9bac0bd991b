"""Runs whose compute process is killed, hangs, or fails, and what is asked of it."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
from federation_duties import SMALL, TASK, TinyDuties, quick_params
from federation_harness import Federation, TimedWorker

from coordinator.config import NO_BOUNDS, AggregationConfig
from coordinator.journal.entries import fact_of
from coordinator.processes import compute as compute_module
from coordinator.processes.compute import ComputeProcess, InlineCompute
from coordinator.rounds.aggregation import StoredUpdates
from coordinator.rounds.compute_requests import MethodValues, OfMethod
from coordinator.rounds.server_side import Described, describe, method_of
from coordinator.runs import computations
from coordinator.state.store import BlobStore
from edge_agent import methods
from edge_agent.core.children import InlineWorker
from edge_agent.core.errors import RunFailed, StateError, TrainingFailed
from edge_agent.wire.tensors import decode, encode


def finished(folder, compute, method="scaffold", **export):
    with Federation(folder, tasks=TinyDuties, compute=compute, export=export) as fed:
        fed.request(method, rounds=3, params=quick_params(method))
        fed.finish()
        return fed.record, fed.entries("round_closed"), fed.state.run(fed.run).summary()


class Killed(ComputeProcess):
    """Its process is killed before the second aggregation, and ``then`` is called."""

    def __init__(self, log_file, then=lambda: None):
        super().__init__(log_file)
        self.then = then
        self.aggregations = 0
        self.pids = []

    def submit(self, request, limit_s=None):
        self.aggregations += request["do"].endswith(":aggregate")
        if self.aggregations == 2:
            self.aggregations += 1
            self.pids.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
            self.then()
        return super().submit(request, limit_s)


def test_a_killed_compute_process_is_started_again_and_changes_no_bit(tmp_path):
    _, expected, _ = finished(tmp_path / "here", None)
    compute = Killed(tmp_path / "compute.log")
    try:
        record, closed, _ = finished(tmp_path / "there", compute)
        assert record.status == "finished"
        assert [entry.digest for entry in closed] == [entry.digest for entry in expected]
        assert len(compute.pids) == 1
        assert compute.pid not in {None, *compute.pids}
    finally:
        compute.close()


def test_a_run_whose_compute_process_always_crashes_fails_with_the_reason(tmp_path, monkeypatch):
    broken = ("/bin/sh", "-c", "echo no memory; exit 9")
    compute = Killed(tmp_path / "compute.log", lambda: monkeypatch.setattr(compute_module, "COMMAND", broken))
    try:
        record, _, _ = finished(tmp_path, compute)
    finally:
        compute.close()
    assert record.status == "failed"
    assert "the compute process crashed 3 times, the last time with exit code 9; last output: no memory" in (
        record.reason
    )


class Broken(InlineCompute):
    """Of another process one function of which fails."""

    is_here = False

    def __init__(self, function, error):
        self.function = function
        self.error = error
        self.cancelled = []

    def submit(self, request, limit_s=None):
        if request["do"].endswith(f":{self.function}"):
            raise self.error
        return super().submit(request, limit_s)

    def cancel(self, request):
        self.cancelled.append(request["do"].partition(":")[2])


@pytest.mark.parametrize(
    "function, error, reason",
    [
        ("begin", RunFailed("no result within 600 s"), "RunFailed: no result within 600 s"),
        ("aggregate", TrainingFailed("nothing to average"), "RunFailed: round 1: nothing to average"),
        ("broadcast", RunFailed("ValueError: shapes"), "RunFailed: ValueError: shapes"),
        ("downlink", RunFailed("ValueError: shapes"), "RunFailed: ValueError: shapes"),
        ("objection", RunFailed("ValueError: shapes"), "RunFailed: ValueError: shapes"),
    ],
)
def test_a_function_that_fails_costs_its_run(tmp_path, function, error, reason):
    record, _, _ = finished(tmp_path, Broken(function, error), "fedkd" if function != "downlink" else "fedpac")
    assert (record.status, record.reason) == ("failed", reason)


def test_an_export_that_no_process_can_do_costs_the_bundle_alone(tmp_path):
    compute = Broken("export_bundle", RunFailed("the compute process crashed 3 times"))
    record, _, summary = finished(tmp_path, compute, "fedavg", after_run=True)
    assert record.status == "finished"
    assert "export failed: the compute process crashed 3 times" in summary["bundle_why_not"]
    assert compute.cancelled == ["export_bundle"]


@pytest.mark.parametrize("function", ["aggregate", "broadcast", "downlink", "objection"])
@pytest.mark.parametrize("error", [StateError("x: damaged"), OSError(28, "No space left on device")])
def test_a_disk_that_the_compute_process_cannot_use_stalls_the_run(tmp_path, function, error):
    compute = Broken(function, error)
    with Federation(tmp_path, tasks=TinyDuties, compute=compute) as fed:
        fed.request("fedpac", rounds=2, params=quick_params("fedpac"))
        fed.until(lambda: fed.coordinator.storage.stall is not None)
        compute.function = ""
        fed.finish()
        assert fed.record.status == "finished"


class Slow(TimedWorker):
    """Each computation of a method's own functions takes 40 s; ``names`` are those of the computations so far."""

    def __init__(self, clock):
        super().__init__(clock, 40.0)
        self.names = []

    def submit(self, name, job, done):
        self.names.append(name)
        is_own = name in {"objection", "broadcast", "downlink", "aggregate"}
        (super() if is_own else InlineWorker()).submit(name, job, done)


def test_messages_are_handled_while_a_method_computes(tmp_path):
    """Updates wait for their verdict, each is sent once, and the result is that of a fast computation."""
    states = []
    for name in ("fast", "slow"):
        with Federation(tmp_path / name, tasks=TinyDuties, compute=There()) as fed:
            if name == "slow":
                fed.coordinator.worker = worker = Slow(fed.clock)
            fed.request("fedpac", rounds=2, params=quick_params("fedpac"))
            fed.finish(3000)
            assert fed.record.status == "finished"
            states.append([entry.digest for entry in fed.entries("round_closed")])
            assert not list(fed.state.blobs.folder.glob("partial/*/*"))
    assert states[0] == states[1]
    assert {name: worker.names.count(name) for name in ("objection", "aggregate")} == {"objection": 6, "aggregate": 2}


class Counting(InlineCompute):
    """Of another process; ``updates`` are the numbers of updates of its aggregations."""

    is_here = False

    def __init__(self):
        self.updates = []

    def submit(self, request, limit_s=None):
        if request["do"].endswith(":aggregate"):
            self.updates.append(len(request["updates"]["accepted"]))
        return super().submit(request, limit_s)


def test_updates_of_buffered_rounds_that_come_while_a_method_computes_count_later(tmp_path):
    """That of a2 comes 20 s after the round closed, and the aggregation takes 40 s."""
    compute = Counting()
    options = {"mode": "buffered", "buffer": 2}
    with Federation(tmp_path, agents=(), compute=compute, round=options) as fed:
        for name, training_s in (("a0", 10.0), ("a1", 10.0), ("a2", 30.0)):
            fed.add(name, training_s=training_s)
        fed.settle()
        fed.coordinator.worker = Slow(fed.clock)
        fed.request("fedavgm", rounds=3)
        fed.finish(3000)
        closed = fed.entries("round_closed")
        assert [entry.body["clients"] for entry in closed] == compute.updates
        assert closed[0].body["busy"] == {"a2": 1}
        assert any(entry.agent == "a2" and entry.round == 1 for entry in fed.entries("update_accepted"))


def test_a_run_that_is_cancelled_while_its_method_computes_asks_no_more(tmp_path):
    compute = Broken("", RunFailed(""))
    with Federation(tmp_path, tasks=TinyDuties, compute=compute) as fed:
        fed.coordinator.worker = worker = Slow(fed.clock)
        fed.request("fedpac", rounds=2, params=quick_params("fedpac"))
        fed.until(lambda: "objection" in worker.names)
        compute.function = "objection"
        compute.error = AssertionError("asked")
        fed.state.journal.append(fact_of("cancel_requested", {"reason": "enough"}), run=fed.run)
        fed.until(lambda: fed.record.status == "cancelled")
        fed.wait(60)
        assert fed.coordinator.loop is None


def test_a_described_method_decides_what_the_method_does():
    for name in methods.names():
        method = methods.create(name, quick_params(name))
        values = describe(method)
        there = Described(values)
        assert MethodValues.from_json(json.loads(json.dumps(values.to_json()))) == values, name
        for value in ("name", "shared", "norm", "weighting", "bounded_extras", "needs_last_round"):
            assert getattr(there, value) == getattr(method, value), (name, value)
        for value in ("all_params", "one_pass", "server_step_is_mean"):
            assert getattr(there, value)() == getattr(method, value)(), (name, value)


def functions_of(folder, name):
    about = OfMethod(method=name, params={}, blobs=folder)
    return method_of(describe(methods.create(name)), about, There(), folder)[1]


class There(InlineCompute):
    is_here = False


def test_the_compute_process_objects_to_an_update_on_disk(tmp_path):
    functions = functions_of(tmp_path, "fedkd")
    for energy, why in ((0.5, ""), (5.0, "'extra.energy' is 5, expected more than 0 and at most 1")):
        (tmp_path / "update").write_bytes(encode({"extra.energy": np.array([energy])}))
        assert functions.objection(tmp_path / "update") == why


def test_a_mean_by_hand_with_one_update_that_declares_too_much(tmp_path):
    """Samples 1, 1, 1 and 97 count 1, 1, 1 and 5: (1 + 2 + 3 + 5 * 10) / 8 = 7, with the bound on samples alone."""
    blobs = BlobStore(tmp_path)
    state = {"encoder.w": np.zeros(2, np.float32)}
    start = blobs.put(encode(state))
    values = {"a": (1.0, 1.0), "b": (2.0, 1.0), "c": (3.0, 1.0), "d": (10.0, 97.0)}
    accepted = {
        agent: (blobs.put(encode({"encoder.w": np.full(2, value, np.float32)})), samples)
        for agent, (value, samples) in values.items()
    }
    config = AggregationConfig(**{**NO_BOUNDS, "max_weight": 5.0})
    aggregated = functions_of(tmp_path, "spherefed").aggregate(start, StoredUpdates(accepted, 1), config)
    assert decode(blobs.read(aggregated.digest))["encoder.w"].tolist() == [7.0, 7.0]
    decided = aggregated.decisions.to_body()
    assert decided.keys() == {"capped", "suspects"}, "what was not decided is not journaled"
    assert decided["capped"] == {"d": [97.0, 5.0]}
    here, _ = StoredUpdates(accepted, 1).aggregate(blobs, methods.create("fedavg"), state, config)
    assert here["encoder.w"].tolist() == [7.0, 7.0]


def test_building_a_model_leaves_nothing_but_its_state(tmp_path):
    request = {"method": "fedavg", "params": SMALL, "task": TASK.model_dump(mode="json"), "seed": 3, "weights": None}
    first, second = (
        computations.begin({**request, "blobs": str(tmp_path), "is_new": is_new}) for is_new in (True, False)
    )
    assert second["digest"] is None
    assert {**first, "digest": None} == second
    assert [path.name for path in tmp_path.iterdir()] == [first["digest"]]
