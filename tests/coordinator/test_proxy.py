"""The shared model on the coordinator's own samples: numbers by hand, beside the rounds, and never in their way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation_harness import SMALL, TASK, Federation, TinyDuties

from coordinator.config import ProxyConfig
from coordinator.hosted.own import OwnWork
from coordinator.hosted.proxy import evaluate_on_proxy
from coordinator.report import write_report
from edge_agent import methods
from edge_agent.errors import RunFailed
from edge_agent.store import write_tensors
from edge_agent.task import ImageInput, Task, WindowInput
from edge_agent.work import InlineWorker

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
    matrix[0, 0], matrix[1, 0] = 1, -1
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


class DeskHere:
    """A desk without a process; a round in ``fails`` cannot be evaluated."""

    def __init__(self, fails=()):
        self.fails, self.asked = fails, []

    def ask(self, question):
        number = int(question["state"].rpartition("-")[2].partition(".")[0])
        self.asked.append(number)
        if number in self.fails:
            raise RunFailed("no memory")
        return evaluate_on_proxy(question)

    def close(self):
        pass


class Watched(Federation):
    def __init__(self, folder, proxy, worker=None, fails=(), **options):
        super().__init__(folder, agents=2, duties=TinyDuties, **options)
        self.proxy, self.worker, self.desk = proxy, worker or InlineWorker(), DeskHere(fails)

    def start_coordinator(self):
        def prepare(coordinator):
            coordinator.aside = OwnWork(self.proxy, self.desk, self.worker)

        return super().start_coordinator(prepare)

    def told(self):
        return {entry.round: entry.body["acc"] for entry in self.entries("proxy_evaluated")}


@pytest.fixture
def own(tmp_path):
    """Samples of the coordinator for the task of the tiny clients."""
    rng, labels = np.random.default_rng(5), np.arange(30) % 3
    inputs = np.clip(rng.normal(60, 20, (30, 4, 4)) + 60 * labels[:, None, None], 0, 255).astype(np.uint8)
    np.savez(tmp_path / "own.npz", inputs=inputs, labels=labels, class_names=np.array(["a", "b", "c"]))
    return f"npz:{tmp_path / 'own.npz'}"


def test_each_round_is_evaluated_and_everybody_can_read_it(tmp_path, own):
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu")) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.finish()
        told, folder = fed.told(), fed.state.run(fed.run)
        summary, metrics = folder.summary(), [one for one in folder.metrics() if one["kind"] == "proxy"]
        page = write_report(folder).read_text()
        assert list(folder.folder.glob("proxy-*")) == [], "states are kept only until they are evaluated"
    assert sorted(told) == [1, 2, 3]
    assert {one["round"]: one["acc"] for one in summary["proxy"]} == told
    assert {one["round"]: one["acc"] for one in metrics} == told
    assert "acc.proxy" in page
    assert f"acc.proxy: {told[1]:.3f} in round 1, {told[3]:.3f} in round 3" in page


def test_every_other_round_and_the_last_one(tmp_path, own):
    with Watched(tmp_path, ProxyConfig(data=own, every=2, device="cpu")) as fed:
        fed.request("fedper", rounds=3, params=SMALL)
        fed.finish()
        assert sorted(fed.told()) == [2, 3]


def test_no_round_waits_for_it_and_the_end_does(tmp_path, own):
    """Nothing is evaluated until all rounds are over; each figure is still of the state after its own round."""
    with Watched(tmp_path / "quick", ProxyConfig(data=own, device="cpu")) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.finish()
        expected = fed.told()
    slow = Slow()
    with Watched(tmp_path / "slow", ProxyConfig(data=own, device="cpu"), slow) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.until(lambda: len(fed.entries("round_closed")) == 3)
        assert (fed.told(), len(slow.waiting)) == ({}, 3)
        fed.wait(5)
        assert not fed.record.is_over
        assert "evaluated on the proxy samples" in fed.coordinator.status()["waiting"]["for"]
        while slow.waiting:
            slow.work()
        fed.finish()
        assert fed.told() == expected


def test_a_failure_is_a_warning(tmp_path, own, caplog):
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), fails=(2,)) as fed:
        fed.request("fedavg", rounds=3, params=SMALL)
        fed.finish()
        assert fed.record.status == "finished"
        assert sorted(fed.told()) == [1, 3]
    assert "proxy_failed run=run-0001 round=2 reason=RunFailed: no memory" in caplog.text


def test_a_figure_that_a_kill_has_taken_is_made_again(tmp_path, own):
    slow = Slow()
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu"), slow) as fed:
        fed.request("fedavg", rounds=2, params=SMALL)
        fed.until(lambda: fed.entries("round_closed", round=1))
        fed.kill_coordinator()
        fed.worker = InlineWorker()
        fed.start_coordinator()
        fed.finish()
        assert sorted(fed.told()) == [1, 2]


def test_a_run_that_shares_no_encoder_has_no_such_figure(tmp_path, own):
    with Watched(tmp_path, ProxyConfig(data=own, device="cpu")) as fed:
        fed.request("local", rounds=2, params=SMALL)
        fed.finish()
        assert fed.told() == {}
        assert fed.state.run(fed.run).summary()["proxy"] == []
        assert fed.task is TASK
