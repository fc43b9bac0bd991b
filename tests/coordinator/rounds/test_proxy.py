"""The shared model on the coordinator's own samples: numbers by hand, beside the rounds, and never in their way."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch
from federation_duties import SMALL, TASK, TinyDuties
from federation_harness import Federation
from typer.testing import CliRunner

from coordinator.cli import command_tree
from coordinator.config import ProxyConfig
from coordinator.hosted.own_data import evaluate_on_proxy
from coordinator.hosted.run_hooks import PROXY_LIMIT_S, OwnDataHooks, _pending_states
from coordinator.journal.entries import fact_of
from coordinator.report import write_report
from coordinator.report.figures import read_run
from coordinator.report.page import render
from coordinator.runs.result_notes import CoordinatorMetrics
from edge_agent import methods
from edge_agent.core.children import InlineWorker
from edge_agent.core.errors import RunFailed
from edge_agent.core.storage import write_tensors
from edge_agent.core.task import ImageInput, Task, WindowInput

FLAT = Task(
    input=WindowInput(channels=1, length=4, stride=4),
    class_names=("a", "b"),
    encoder="linear",
    encoder_params={"feature_dim": 2},
)


@pytest.fixture
def windows(tmp_path):
    """Eight windows (v, 0, 0, 0) with v = 1..4 of class a and -1..-4 of class b."""
    values = np.array([1, 2, 3, 4, -1, -2, -3, -4], np.float32)
    inputs = np.zeros((8, 1, 4), np.float32)
    inputs[:, 0, 0] = values
    path = tmp_path / "own.npz"
    np.savez(path, inputs=inputs, labels=(values < 0).astype(int), class_names=np.array(["a", "b"]))
    return f"npz:{path}?kind=window"


def state_of(method, weight, bias):
    """A state whose encoder gives (max(v, 0), max(-v, 0)) or whatever its layers make of (v, -v)."""
    torch.manual_seed(0)
    made = methods.create(method, {})
    model = made.build(FLAT)
    state = {n: t.numpy() for n, t in model.state_dict().items() if n in made.shared_names(model)}
    first = next(name for name in state if name.startswith("encoder.") and name.endswith("weight"))
    matrix = np.zeros_like(state[first])
    matrix[0, 0] = 1
    matrix[1, 0] = -1
    state |= {first: matrix, first.replace("weight", "bias"): np.zeros(2, np.float32)}
    if "head.weight" in state:
        state |= {"head.weight": np.array(weight, np.float32), "head.bias": np.array(bias, np.float32)}
    return state


def evaluated(tmp_path, windows, method, state):
    write_tensors(tmp_path / "state", state)
    return evaluate_on_proxy(
        {
            "method": method, "params": {}, "task": FLAT.model_dump(mode="json"), "state": str(tmp_path / "state"),
            "data": windows, "folder": ".", "device": "cpu",
        }
    )  # fmt: skip


@pytest.mark.parametrize("bias, expected", [((0, 0), 1.0), ((0, 5), 0.75), ((0, 100), 0.5)])
def test_the_global_head_is_scored_where_there_is_one(tmp_path, windows, bias, expected):
    """Logits v and -v + bias: with 5 the windows of 1 and 2 (v < 5 - v) count as b, so 6 of 8 are right."""
    told = evaluated(tmp_path, windows, "fedavg", state_of("fedavg", [[1, 0], [0, 1]], bias))
    assert told == {"acc": expected, "samples": 8, "by": "global head", "norm": "shared"}


def test_features_are_probed_where_there_is_no_global_head(tmp_path, windows):
    """Half of each class makes the means, which are of different sign; the other four are told by them."""
    told = evaluated(tmp_path, windows, "fedper", state_of("fedper", 0, 0))
    assert told == {"acc": 1.0, "samples": 4, "by": "prototype probe", "norm": "shared"}


def test_batch_norm_that_stays_on_clients_takes_its_statistics_from_the_samples(tmp_path):
    images = "digits:optdigits?n=60"
    spec = ImageInput(channels=1, height=8, width=8)
    task = Task(class_names=tuple("0123456789"), encoder="small_cnn", input=spec)
    scores = {}
    for method in ("fedavg", "fedbn"):
        made = methods.create(method, {})
        torch.manual_seed(0)
        model = made.build(task)
        state = {n: t.numpy() for n, t in model.state_dict().items() if n in made.shared_names(model)}
        write_tensors(tmp_path / method, state)
        asked = {"method": method, "params": {}, "task": task.model_dump(mode="json"), "state": str(tmp_path / method)}
        scores[method] = evaluate_on_proxy({**asked, "data": images, "folder": ".", "device": "cpu"})
    assert scores["fedavg"]["norm"] == "shared"
    assert scores["fedbn"]["norm"] == "proxy"
    assert scores["fedbn"]["samples"] == 60


# --- beside a run ----------------------------------------------------------------------------------------------------


class Slow:
    """A worker whose jobs are done when the test says so; ``waiting`` holds them."""

    def __init__(self):
        self.waiting = []

    def submit(self, name, job, done):
        self.waiting.append((job, done))

    def collect(self):
        pass

    def close(self):
        pass

    def work(self):
        job, done = self.waiting.pop(0)
        InlineWorker().submit("", job, done)


def number_of(question):
    return int(question["state"].rpartition("-")[2].partition(".")[0])


class InProcess:
    """A `ComputeProcess` without a process; a round in ``fails`` cannot be evaluated."""

    def __init__(self, fails=()):
        self.fails = fails
        self.asked = []
        self.dropped = []

    def cancel(self, question):
        self.dropped.append(number_of(question))

    def submit(self, question):
        number = number_of(question)
        self.asked.append(number)
        if number in self.fails:
            raise RunFailed(f"no memory for round {number}")
        return evaluate_on_proxy(question)

    def end_if_idle(self):
        pass

    def close(self):
        pass


class Watched(Federation):
    def __init__(self, folder, proxy, worker=None, fails=(), **options):
        super().__init__(folder, agents=2, tasks=TinyDuties, **options)
        self.proxy = proxy
        self.worker = worker or InlineWorker()
        self.desk = InProcess(fails)

    def start_coordinator(self):
        def prepare(coordinator):
            coordinator.hooks = OwnDataHooks(self.proxy, self.desk, self.worker)

        return super().start_coordinator(prepare)

    def close_rounds(self, number):
        """Step until so many rounds are closed, and no further."""
        while len(self.entries("round_closed")) < number:
            if not self.step():
                self.clock.now += 0.1

    def waiting(self):
        """Rounds whose states are kept for figures that are still to come."""
        folder = self.state.run(self.run).folder
        return sorted(int(place.stem.partition("-")[2]) for place in folder.glob("proxy-*"))

    def proxy_results(self):
        return {entry.round: entry.body["acc"] for entry in self.entries("proxy_evaluated")}


@pytest.fixture
def own(tmp_path):
    """Samples of the coordinator for the task of the tiny clients."""
    rng = np.random.default_rng(5)
    labels = np.arange(30) % 3
    inputs = np.clip(rng.normal(60, 20, (30, 4, 4)) + 60 * labels[:, None, None], 0, 255).astype(np.uint8)
    np.savez(tmp_path / "own.npz", inputs=inputs, labels=labels, class_names=np.array(["a", "b", "c"]))
    return f"npz:{tmp_path / 'own.npz'}"


def test_each_round_is_evaluated_and_everybody_can_read_it(tmp_path, own):
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu")) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.finish()
        results = fed.proxy_results()
        folder = fed.state.run(fed.run)
        summary = folder.summary()
        metrics = [one for one in folder.metrics() if one["kind"] == "proxy"]
        page = write_report(folder).read_text()
        assert list(folder.folder.glob("proxy-*")) == [], "states are kept only until they are evaluated"
    assert sorted(results) == [1, 2, 3]
    assert {one["round"]: one["acc"] for one in summary["proxy"]} == results
    assert {one["round"]: one["acc"] for one in metrics} == results
    assert "acc.proxy" in page
    assert f"acc.proxy: {results[1]:.1%} after round 1, {results[3]:.1%} after round 3".replace("%", " %") in page


def test_every_other_round_and_the_last_one(tmp_path, own):
    with Watched(tmp_path, ProxyConfig(data=own, every=2, device="cpu")) as fed:
        fed.request("fedper", rounds=3, params=SMALL)
        fed.finish()
        assert sorted(fed.proxy_results()) == [2, 3]


def test_no_round_waits_for_it_and_the_end_does(tmp_path, own):
    """Nothing is evaluated until all rounds are over; each figure is still of the state after its own round."""
    with Watched(tmp_path / "quick", ProxyConfig(data=own, device="cpu")) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.finish()
        expected = fed.proxy_results()
    slow = Slow()
    with Watched(tmp_path / "slow", ProxyConfig(data=own, device="cpu"), slow) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.until(lambda: len(fed.entries("round_closed")) == 3)
        assert (fed.proxy_results(), len(slow.waiting)) == ({}, 1)
        fed.wait(5)
        assert not fed.record.is_over
        waits = fed.coordinator.status()["waiting"]
        assert waits["for"] == "acc.proxy after round 1 and 3, evaluated on the proxy samples"
        assert waits["whom"] == ["the coordinator"]
        while slow.waiting:
            slow.work()
        fed.finish()
        assert fed.proxy_results() == {1: expected[1], 3: expected[3]}


def test_where_rounds_are_faster_the_newest_waits_and_nothing_piles_up(tmp_path, own):
    """Of six rounds none is evaluated before the fifth is over: only two states are kept meanwhile."""
    slow = Slow()
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), slow) as fed:
        fed.request("fedavg", rounds=6, params=SMALL)
        fed.close_rounds(5)
        assert (len(slow.waiting), fed.waiting()) == (1, [1, 5])
        slow.work()
        assert fed.waiting() == [5]
        fed.close_rounds(6)
        while slow.waiting:
            slow.work()
        fed.finish()
        assert sorted(fed.proxy_results()) == [1, 5, 6]


def test_a_run_that_was_stalled_keeps_the_states_that_are_being_evaluated(tmp_path, own):
    slow = Slow()
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), slow) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.close_rounds(2)
        assert fed.waiting() == [1, 2]
        fed.coordinator.runs.stall(fed.run, OSError(errno.ENOSPC, "No space left on device"))
        fed.close_rounds(3)
        assert fed.waiting() == [1, 3]
        while slow.waiting:
            slow.work()
        fed.finish()
        assert sorted(fed.proxy_results()) == [1, 3]


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_what_is_asked_for_a_run_that_ends_is_dropped_and_hinders_no_other(tmp_path, own, ends):
    slow = Slow()
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), slow) as fed:
        fed.request("fedavg", rounds=5, params=SMALL)
        fed.close_rounds(3)
        assert len(fed.waiting()) == 2
        if ends == "cancelled":
            fed.state.journal.append(fact_of("cancel_requested", {"reason": "enough"}), run=fed.run)
            fed.wait(1)
        else:
            fed.coordinator.runs.fail(fed.run, RunFailed("no"))
        assert fed.record.status == ends
        assert (fed.waiting(), fed.desk.dropped) == ([], [1])
        over = fed.state.journal.last_id()
        slow.work()
        assert fed.state.journal.last_id() == over, "a figure that comes too late is nobody's"
        fed.coordinator.hooks._worker = InlineWorker()
        fed.request("fedavg", rounds=2, params=SMALL)
        fed.finish()
        assert sorted(fed.proxy_results()) == [1, 2]


def test_a_run_that_waits_long_enough_ends_without_the_figure_and_says_so(tmp_path, own):
    slow = Slow()
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), slow) as fed:
        fed.request("fedavg", rounds=1, params=SMALL)
        fed.finish(PROXY_LIMIT_S + 60)
        assert fed.record.status == "finished"
        (failed,) = fed.state.run(fed.run).summary()["proxy_failed"]
        slow.work()
        assert fed.entries()[-1].kind == "run_finished"
        assert fed.waiting() == []
    assert failed == {"round": 1, "reason": "no result 600 s after the last round"}


def test_states_of_runs_that_are_over_are_swept_when_the_coordinator_comes_back(tmp_path, own):
    slow = Slow()
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), slow) as fed:
        fed.request("fedavg", rounds=5, params=SMALL)
        fed.close_rounds(2)
        fed.kill_coordinator()
        over = fed.folder / "coordinator/runs/run-0000"
        going = fed.folder / "coordinator/runs/run-0001"
        over.mkdir()
        for name in ("proxy-9.safetensors", "warm.safetensors", "summary.json"):
            (over / name).write_bytes(b"{}")
        (going / "proxy-x.safetensors").write_bytes(b"of somebody else")
        fed.start_coordinator()
        assert [place.name for place in over.iterdir()] == ["summary.json"]
        assert len(list(going.glob("proxy-*"))) == 3


def test_pending_states_states_are_taken_in_the_order_of_rounds(tmp_path):
    for number in (10, 9, 100):
        (tmp_path / f"proxy-{number}.safetensors").touch()
    assert [number for number, _ in _pending_states(tmp_path)] == [9, 10, 100]


def test_a_failure_is_a_warning(tmp_path, own, caplog):
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), fails=(2,)) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.finish()
        assert fed.record.status == "finished"
        assert sorted(fed.proxy_results()) == [1, 3]
    assert "proxy_failed run=run-0001 round=2 reason=RunFailed: no memory" in caplog.text


def test_a_proxy_that_always_fails_is_told_once_wherever_people_look(tmp_path, own, caplog):
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), fails=(1, 2, 3)) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.finish()
        (entry,) = fed.entries("proxy_failed")
        folder = fed.state.run(fed.run)
        summary = folder.summary()
        page = write_report(folder).read_text()
    assert (entry.round, entry.body) == (1, {"reason": "RunFailed: no memory for round 1"})
    assert summary["proxy_failed"] == [{"round": 1, **entry.body}]
    line = "acc.proxy could not be computed, first after round 1: RunFailed: no memory for round 1"
    assert list(CoordinatorMetrics.from_summary(summary).lines()) == [line]
    assert line in page
    shown = CliRunner().invoke(
        command_tree(["status"]), ["status", "--state", str(fed.config.state)], terminal_width=200
    )
    assert f"run-0001: {line}" in shown.output.replace("\n", " ")
    assert caplog.text.count("proxy_failed run=run-0001") == 3


def test_what_is_not_known_is_not_shown_as_an_accuracy():
    warm = {"samples": 3, "data": "npz:x", "epochs": 1, "accuracy": None}
    proxy = {"round": 2, "acc": None, "samples": 0, "by": "global head"}
    first, second = CoordinatorMetrics.from_summary({"warm_start": warm, "proxy": [proxy]}).lines()
    assert first == "warm start: 3 samples of npz:x, 1 epoch, not evaluated (no held-out samples)"
    assert second == "acc.proxy after round 2: unknown on 0 samples, by global head"
    assert "3 samples, 1 epochs, not scored" in render(read_run("run-1", {"warm_start": warm}, []))


def test_a_figure_that_a_kill_has_taken_is_made_again(tmp_path, own):
    slow = Slow()
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), slow) as fed:
        fed.request("fedavg", rounds=2, params=SMALL)
        fed.until(lambda: fed.entries("round_closed", round=1))
        fed.kill_coordinator()
        fed.worker = InlineWorker()
        fed.start_coordinator()
        fed.finish()
        assert sorted(fed.proxy_results()) == [1, 2]


def test_a_run_that_shares_no_encoder_has_no_such_figure(tmp_path, own):
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu")) as fed:
        fed.request("local", rounds=2, params=SMALL)
        fed.finish()
        assert fed.proxy_results() == {}
        assert fed.state.run(fed.run).summary()["proxy"] == []
        assert fed.task is TASK
