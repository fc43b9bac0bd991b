"""Runs that begin with weights from a file: simulated ones, runs over a network, warm starts, and what cannot be."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from federation_duties import TASK, TinyDuties
from federation_harness import Federation
from safetensors.numpy import load_file, save_file
from simulation_harness import closed_rounds, learned_anywhere, run, small_plan, write_images

from coordinator.config import CoordinatorConfig
from coordinator.hosted.own_data import train_warm
from coordinator.journal.entries import fact_of
from coordinator.research.analyze.simulations import SimulationTarget
from coordinator.rounds.request import Request, Weights
from coordinator.service.preflight import checked_method, fresh_on_devices, without_lost_weights
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from edge_agent import methods
from edge_agent.core.errors import ConfigError, UsageError, WeightsError
from edge_agent.core.storage import read_tensors
from edge_agent.training.parts import to_arrays

HARDLY = {"lr": 1e-12, "local_epochs": 1}
"""After a step of this size the weights are what they were, but for rounding."""


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz")


def _write(path, task, shift=0.0):
    """Weights of the task's encoder, 0, 0.01, 0.02 and so on, which no generator draws."""
    model = methods.create("fedavg", {}).build(task)
    names = [name for name in model.state_dict() if name.startswith("encoder.")]
    arrays = to_arrays(model, names)
    made = {n: (shift + np.arange(a.size) / 100).reshape(a.shape).astype(a.dtype) for n, a in arrays.items()}
    save_file({name.removeprefix("encoder."): array for name, array in made.items()}, path)
    return made


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_simulation_begins_with_them_also_where_nothing_is_shared(images, tmp_path, method):
    plan = small_plan(images, method, params=HARDLY, rounds=1, keep_every=1)
    made = _write(tmp_path / "w.safetensors", Prepared.of(plan).task)
    run(plan.model_copy(update={"weights": tmp_path / "w.safetensors"}), tmp_path / "sim")
    if method == "fedavg":
        with open_simulation(Prepared.of(plan), tmp_path / "sim") as again:
            entry = again.state.journal.entries(kinds=("round_closed",))[-1]
            found = read_tensors(again.state.blobs.path(entry.digest))
    else:
        kept = next(path for path in (tmp_path / "sim/clients/c0").rglob("*.safetensors"))
        found = {name.partition(".")[2]: array for name, array in load_file(kept).items()}
    for name, array in made.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)


@pytest.mark.parametrize("engine", ["serial", pytest.param("pool", marks=pytest.mark.slow)])
def test_a_simulation_has_a_copy_and_goes_on_with_that_whatever_becomes_of_the_file(images, tmp_path, engine):
    path = tmp_path / "w.safetensors"
    plan = small_plan(images, "local", rounds=2, clients=2)
    _write(path, Prepared.of(plan).task)
    plan = plan.model_copy(update={"weights": path})
    undisturbed = run(plan, tmp_path / "whole")
    plan = plan.model_copy(update={"engine": engine, "workers": 1 if engine == "pool" else None})
    with open_simulation(Prepared.of(plan).shared(), tmp_path / "sim") as simulation:
        assert simulation.step() is not None
        path.unlink()
        for pid in simulation.engine.pids:
            os.kill(pid, signal.SIGKILL)
        while closed_rounds(simulation) < 1:
            simulation.step()
    with open_simulation(Prepared.of(plan, tmp_path / "sim/partition.json").shared(), tmp_path / "sim") as simulation:
        result = simulation.finish()
    assert learned_anywhere(result) == learned_anywhere(undisturbed)
    assert result["weights"] == {"path": str(path), "sha256": undisturbed["weights"]["sha256"]}
    subject = SimulationTarget.at(tmp_path / "sim", ())
    assert subject.clients == ("c0", "c1")


def test_a_personal_model_begins_with_them_too(images, tmp_path):
    """Ditto's clients are scored with their own model, which they have before they ever trained."""
    plan = small_plan(images, "ditto", rounds=1, params=HARDLY)
    made = _write(tmp_path / "w.safetensors", Prepared.of(plan).task)
    fresh = Prepared.of(plan.model_copy(update={"weights": tmp_path / "w.safetensors"})).model.fresh
    for name, array in made.items():
        np.testing.assert_array_equal(fresh[f"personal.{name}"], array)


def test_weights_of_another_encoder_are_refused_on_the_command_line(images, tmp_path, call):
    save_file({"0.weight": np.ones((1, 1), np.float32)}, tmp_path / "w.safetensors")
    words = ["simulate", "-d", images, "-n", "2", "--weights", str(tmp_path / "w.safetensors"), "-o", "sim"]
    code, _, err = call(*words)
    assert code == 2
    assert "does not hold this encoder" in err
    assert "Traceback" not in err


def test_agents_receive_them_in_the_first_round_and_a_changed_file_fails_the_run(tmp_path):
    path = tmp_path / "w.safetensors"
    made = _write(path, TASK)
    with Federation(tmp_path / "fed", agents=1, tasks=TinyDuties) as fed:
        for shift, status in ((None, "finished"), (5.0, "failed")):
            wanted = Request("fedavg", HARDLY, 1, 0, TASK, weights=Weights.of(path))
            if shift is not None:
                _write(path, TASK, shift)
            fed.run = fed.state.journal.request_run(fact_of("run_requested", wanted.body()))
            fed.until(lambda: fed.record.is_over)
            assert fed.record.status == status
        assert "has changed since the run was requested" in fed.record.reason
        state = fed.state.blobs.path(fed.state.journal.entries(kinds=("round_closed",))[-1].digest)
        found = read_tensors(state)
    for name, array in made.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)


def test_a_warm_start_begins_where_they_are(images, tmp_path):
    made = _write(tmp_path / "w.safetensors", TASK)
    question = {
        "method": "fedavg",
        "params": {},
        "task": TASK.model_dump(mode="json"),
        "seed": 0,
        "into": str(tmp_path / "warm.safetensors"),
        "weights": Weights.of(tmp_path / "w.safetensors").model_dump(mode="json"),
        "settings": {"data": images, "epochs": 1, "lr": 1e-12, "device": "cpu"},
    }
    train_warm(json.loads(json.dumps(question)))
    found = read_tensors(tmp_path / "warm.safetensors")
    for name, array in made.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)


def test_a_coordinator_looks_at_them_before_anything_is_done(tmp_path):
    _write(tmp_path / "w.safetensors", TASK)
    (tmp_path / "text").write_text("nothing")

    def config(name):
        return CoordinatorConfig.model_validate({"task": TASK, "run": {"weights": tmp_path / name}})

    assert checked_method(config("w.safetensors"), "fedavg", {}).name == "fedavg"
    with pytest.raises(UsageError, match="shares no encoder"):
        checked_method(config("w.safetensors"), "local", {})
    for name, words in (("text", "no safetensors"), ("absent", "cannot be read")):
        with pytest.raises((WeightsError, ConfigError), match=words):
            checked_method(config(name), "fedavg", {})


def test_what_stays_on_devices_is_named():
    task = TASK.model_copy(update={"encoder": "small_cnn", "encoder_params": {}})
    assert fresh_on_devices(methods.create("fedavg", {}), task) == ()
    norms = fresh_on_devices(methods.create("fedbn", {}), task)
    assert {name.rpartition(".")[2] for name in norms} == {"weight", "bias", "running_mean", "running_var"}
    ditto = fresh_on_devices(methods.create("ditto", {}), task)
    assert ditto
    assert all(name.startswith("personal.encoder.") for name in ditto)


def test_serving_does_not_end_for_weights_that_are_away(tmp_path, caplog):
    config = CoordinatorConfig.model_validate({"task": TASK, "run": {"weights": tmp_path / "away"}})
    assert without_lost_weights(config).run.weights is None
    assert "weights_missing" in caplog.text
    assert config.model_validate({"task": TASK, "run": {"weights": "~/w"}}).run.weights == Path.home() / "w"


def test_a_wrong_encoder_is_told_once(tmp_path):
    wrong = TASK.model_copy(update={"encoder": "linaer"})
    config = CoordinatorConfig.model_validate({"task": wrong, "run": {"weights": tmp_path / "away"}})
    with pytest.raises(UsageError, match="linaer") as caught:
        checked_method(config, "fedavg", {})
    assert str(caught.value).count("linaer") == 1


def test_paths_in_a_file_count_from_it_also_with_other_data(images, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    _write(tmp_path / "sub/w.safetensors", Prepared.of(small_plan(images)).task)
    content = (
        'weights = "w.safetensors"\nclients = 3\nrounds = 1\nencoder = "linear"\nencoder_params = { feature_dim = 4 }'
    )
    (tmp_path / "sub/sim.toml").write_text(content)
    code, out, err = call("simulate", "-c", "sub/sim.toml", "-d", images, "-o", "sim", "--engine", "serial", "--json")
    assert code == 0, err
    assert json.loads(out)["weights"]["path"] == str(tmp_path / "sub/w.safetensors")
