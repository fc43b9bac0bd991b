"""Engine stacked: what comes out equals one client after another up to rounding; and what cannot be stacked is not."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from simulation_harness import small_plan, write_images
from torch import nn

from coordinator.cli.simulate import reading
from coordinator.simulation.engines.stacked import ONE_BY_ONE, Starter, Trial
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from edge_agent import methods, models
from edge_agent.client import ClientState, Session
from edge_agent.client.stacked import Stack
from edge_agent.core.errors import TrainingFailed
from edge_agent.core.task import Frozen
from edge_agent.models.base import Layers, encoder
from edge_agent.wire.tensors import decode

PARAMS = {"local_epochs": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.5, "weight_decay": 1e-3}
SAME = {"rtol": 1e-5, "atol": 1e-5}


class TinyParams(Frozen):
    dropout: float = 0.0


@encoder("image", smallest=4, params=TinyParams)
def tiny_norm(task, params):
    """A convolution of 2 channels, batch norm, and 4 features; found by name."""
    drops = [nn.Dropout(params.dropout)] if params.dropout else []
    conv = [nn.Conv2d(1, 2, 3, padding=1, stride=2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()]
    return Layers(4, [*conv, *drops, nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU()])


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(models.registry._extra, "tiny_norm", tiny_norm)
    return {"encoder": "tiny_norm", "encoder_params": {}}


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 80)


def plan_for(images, **changes):
    """Four clients of 24, 18, 30 and 8 samples, a quarter of which are for tests."""
    wished = {
        "params": PARAMS,
        "partition": "quantity",
        "alpha": 1.0,
        "min_size": 3,
        "clients": 4,
        "seed": 3,
        "engine": "stacked",
        "stacked_always": True,
    }
    return small_plan(images, **{**wished, **changes})


def run(plan, folder, change=lambda engine: None):
    """The result, and by round and client what was sent and what was told."""
    with open_simulation(Prepared.of(plan), folder) as simulation:
        change(simulation.engine)
        take = simulation.engine.take
        sent = {}

        def watched():
            done = take()
            if done.blob is not None:
                job = done.work.job
                sent[job.round, done.work.client] = {n: a.copy() for n, a in decode(done.blob.data).items()}
            return done

        simulation.engine.take = watched
        result = simulation.finish()
        entries = simulation.state.journal.entries(simulation.run, ("update_accepted",))
        return result, sent, {(entry.round, entry.agent): entry.body["metrics"] for entry in entries}


def alone(plan):
    return plan.model_copy(update={"engine": "serial", "stacked_always": False})


def assert_same(one, other):
    assert one.keys() == other.keys() != set()
    for key, tensors in one.items():
        assert tensors.keys() == other[key].keys()
        for name, value in tensors.items():
            np.testing.assert_allclose(value, other[key][name], err_msg=f"{key} {name}", **SAME)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedavg_ft", "fedbabu", "fedbn"])
def test_two_rounds_of_clients_of_all_sizes_equal_one_after_another(method, images, tiny, tmp_path):
    """Personal parts stay where they are: what is sent in round 2 builds on them, and so do the last accuracies."""
    changes = tiny if method in {"fedbn", "fedavg"} else {"params": {**PARAMS, "optimizer": "adam"}}
    plan = plan_for(images, method=method, **changes)
    whole, expected, told = run(alone(plan), tmp_path / "alone")
    result, sent, heard = run(plan, tmp_path / "stacked")
    sizes = {len(share.train) for share in Prepared.of(plan).division.clients.values()}
    assert len({-(-size // 8) for size in sizes}) > 2, "they differ in their numbers of batches"
    assert_same(sent, expected)
    assert_same(heard, told)
    assert result["last"]["acc"] == whole["last"]["acc"]
    figures = result["stacked"]
    assert (figures["jobs"], figures["of"], figures["bits_of_serial"]) == (8, 8, False)
    assert "stacked: 8 of 8 jobs of training in one pass on cpu" in "\n".join(
        reading({**result, "curves": "", "report": "", "folder": ""})
    )


# --- the trial -------------------------------------------------------------------------------------------------------


def test_every_method_with_a_standard_update_trains_so(images, tiny, tmp_path):
    """In 64 bits, what is left of a difference is rounding."""
    standard = [name for name in methods.names() if methods.get(name).has_standard_update()]
    assert {"fedavg", "fedper", "local", "lg_fedavg", "fedavg_ft", "fedbn", "fedbabu"} <= set(standard)
    for name in standard:
        prepared = Prepared.of(plan_for(images, **tiny, method=name))
        sessions = [session_of(prepared, client) for client in ("c2", "c0")]
        fresh = prepared.model.fresh
        starters = [Starter(fresh, functools.partial(begun, session, fresh)) for session in sessions]
        trial = Trial(prepared.method, prepared.model.model, starters)
        assert trial.difference() < 1e-9, name
        assert {tensor.dtype for tensor in prepared.model.model.parameters()} == {torch.float32}


def session_of(prepared, client):
    train, test = prepared.pools.arrays(prepared.division.clients[client])
    return Session(prepared.method, prepared.task, client, train, test, seed=0, device="cpu", model=prepared.model)


def begun(session, received):
    return session.before_round(received, ClientState(), round_number=1, rounds=2)


def timed_by(seconds):
    """A change of an engine's clock: each way takes so long, whatever it does."""
    asked = []

    def change(engine):
        def measure(name, work):
            work()
            asked.append(name)
            return seconds[name]

        engine._measure = measure

    return change, asked


def test_where_one_after_another_is_faster_it_is_left_at_that_with_the_bits_of_that(images, tiny, tmp_path, caplog):
    plan = plan_for(images, **tiny, stacked_always=False)
    _, expected, told = run(alone(plan), tmp_path / "alone")
    change, asked = timed_by({ONE_BY_ONE: 1e-3, "grouped": 1e3, "unfolded": 1e4})
    result, sent, heard = run(plan, tmp_path / "stacked", change)
    figures = result["stacked"]
    assert (figures["jobs"], figures["of"], figures["bits_of_serial"]) == (0, 8, True)
    assert asked == [ONE_BY_ONE] * 4 + ["grouped", "unfolded"], "once in a run"
    assert figures["because"].startswith("a client's step takes one by one 0.")
    assert "one_by_one device=cpu because=a client's step takes" in caplog.text
    assert heard == told
    assert all(np.array_equal(sent[key][name], expected[key][name]) for key in expected for name in expected[key])


def test_the_fastest_way_is_taken_and_a_trial_leaves_no_trace(images, tiny, tmp_path):
    """Convolutions as products of matrices, which are the same convolutions."""
    plan = plan_for(images, **tiny, stacked_always=False)
    _, expected, told = run(alone(plan), tmp_path / "alone")
    change, asked = timed_by({ONE_BY_ONE: 1e3, "grouped": 1.0, "unfolded": 1e-3})
    result, sent, heard = run(plan, tmp_path / "stacked", change)
    assert asked == [ONE_BY_ONE] * 4 + ["grouped", "unfolded"]
    assert (result["stacked"]["jobs"], result["stacked"]["convolutions"]) == (8, "unfolded")
    assert result["stacked"]["seconds_of_a_step"]["unfolded"] == pytest.approx(1e-3 / 12), "4 clients, 3 steps"
    assert_same(sent, expected)
    assert_same(heard, told)


def test_a_method_that_claims_a_standard_update_and_has_none_is_found_out(images, tmp_path, monkeypatch):
    """FedProx pulls clients back to what they received."""
    monkeypatch.setattr(methods.get("fedprox"), "has_standard_update", classmethod(lambda cls: True))
    params = {**PARAMS, "mu": 10.0}
    result, _, _ = run(plan_for(images, method="fedprox", params=params, rounds=1), tmp_path / "stacked")
    assert result["stacked"]["jobs"] == 0
    assert "it would differ from method 'fedprox' by 0." in result["stacked"]["because"]


# --- what is not done at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"method": "fedprox"}, "method 'fedprox' trains in its own way"),
        (
            {"encoder": "tiny_norm", "encoder_params": {"dropout": 0.5}},
            "'encoder.layers.4' draws random numbers (Dropout)",
        ),
    ],
)
def test_what_cannot_be_stacked_is_done_one_by_one_with_the_bits_of_that(
    changes, reason, images, tiny, tmp_path, caplog
):
    plan = plan_for(images, **changes, rounds=1)
    _, expected, told = run(alone(plan), tmp_path / "alone")
    result, sent, heard = run(plan, tmp_path / "stacked")
    assert heard == told
    assert all(np.array_equal(sent[key][name], expected[key][name]) for key in expected for name in expected[key])
    figures = result["stacked"]
    assert (figures["jobs"], figures["of"], figures["because"], figures["bits_of_serial"]) == (0, 4, reason, True)
    assert caplog.text.count("one_by_one device=cpu because=") == 1
    assert reason in caplog.text


def test_where_memory_is_short_fewer_are_done_at_once(images, tiny, tmp_path, monkeypatch, caplog):
    plan = plan_for(images, **tiny)
    _, expected, told = run(alone(plan), tmp_path / "alone")
    train = Stack.train

    def short(self, clients, *rest):
        if len(clients) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return train(self, clients, *rest)

    monkeypatch.setattr(Stack, "train", short)
    result, sent, heard = run(plan, tmp_path / "stacked")
    assert result["stacked"]["jobs"] == 8
    assert caplog.text.count("fewer_at_once device=cpu clients=2") == 1, "remembered in the second round"
    assert_same(sent, expected)
    assert_same(heard, told)


def test_what_turns_out_to_be_impossible_is_done_one_by_one(images, tmp_path, monkeypatch):
    def impossible(*_):
        raise RuntimeError("vmap: called a random operation\nmore")

    monkeypatch.setattr(Stack, "train", impossible)
    result, sent, _ = run(plan_for(images), tmp_path / "stacked")
    assert len(sent) == 8
    assert result["stacked"]["because"] == "it cannot be done: vmap: called a random operation more"


def test_a_client_with_a_single_sample_goes_alone_where_there_is_batch_norm(images, tiny, tmp_path):
    """Alone, it says so; at once with others, its variance would be no number."""
    plan = plan_for(images, **tiny, min_size=1, alpha=0.15, rounds=1, fraction=1.0)
    sizes = {name: len(share.train) for name, share in Prepared.of(plan).division.clients.items()}
    assert 1 in sizes.values()
    with pytest.raises(TrainingFailed) as stacked:
        run(plan, tmp_path / "stacked")
    with pytest.raises(TrainingFailed) as serial:
        run(alone(plan), tmp_path / "alone")
    assert str(stacked.value) == str(serial.value)
    assert "batch norm needs at least 2" in str(serial.value)


def test_a_loss_that_is_no_number_is_told_as_one_by_one(images, tmp_path):
    plan = plan_for(images, params={**PARAMS, "lr": 1e30}, rounds=1)
    with pytest.raises(TrainingFailed, match=r"client 'c\d': loss became nan in epoch 1 of 2 at lr 1e\+30"):
        run(plan, tmp_path / "stacked")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"workers": 2}, "workers = 2 has no effect on engine stacked"),
        ({"engine": "serial"}, "stacked_always has no effect on engine serial"),
    ],
)
def test_what_cannot_be_asked_for_is_told(images, changes, words):
    with pytest.raises(ValueError, match=words):
        plan_for(images, **changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_on_a_gpu_the_numbers_are_those_of_one_after_another(images, tiny, tmp_path):
    plan = plan_for(images, **tiny, device="cuda")
    _, expected, _ = run(alone(plan), tmp_path / "alone")
    result, sent, _ = run(plan, tmp_path / "stacked")
    assert result["stacked"]["device"] == torch.cuda.get_device_name()
    for key, tensors in expected.items():
        for name, value in tensors.items():
            np.testing.assert_allclose(sent[key][name], value, rtol=1e-2, atol=1e-3, err_msg=name)
