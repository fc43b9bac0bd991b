"""The samples by domain that a coordinator has for int8: sources, hosted clients, and the clients of a simulation."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from simulation_harness import run, small_plan, write_images

from coordinator.config import ExportConfig, HostedConfig
from coordinator.runs.calibration import own_domains
from coordinator.simulation.results import training_samples
from edge_agent.bundle.archive import open_bundle
from edge_agent.core.task import ImageInput, Task
from edge_agent.data import load
from edge_agent.data.partition import Division

TASK = Task(input=ImageInput(channels=1, height=4, width=4), class_names=("a", "b", "c"), encoder="linear")


def hosted(name, source):
    return HostedConfig.model_validate({"id": name, "data": {"source": source, "test_fraction": 0.25}})


def test_sources_and_hosted_clients_are_domains_and_held_out_samples_stay_out(tmp_path):
    """Twelve of each class; a quarter of a hosted client's samples is held out."""
    config = ExportConfig.model_validate({"calibration": write_images(tmp_path / "porch.npz", 36)})
    found = own_domains(TASK, config, [hosted("hall", write_images(tmp_path / "hall.npz", 48, seed=1))])
    assert {name: len(samples) for name, samples in found.items()} == {"porch.npz": 36, "hall": 36}
    held_out = own_test(tmp_path / "hall.npz")
    known = {row.tobytes() for row in found["hall"].inputs}
    assert not known & {row.tobytes() for row in held_out}


def own_test(path):
    from edge_agent.core.config import DataConfig
    from edge_agent.data.partition import own_samples

    return own_samples(DataConfig(source=f"npz:{path}"), "hall", TASK.input, TASK.class_names)[1].inputs


def test_a_hosted_client_without_readable_data_costs_only_itself(tmp_path, caplog):
    clients = [hosted("hall", write_images(tmp_path / "hall.npz", 48)), hosted("gone", f"npz:{tmp_path / 'gone.npz'}")]
    with caplog.at_level(logging.WARNING):
        assert [*own_domains(TASK, ExportConfig(), clients)] == ["hall"]
    assert "no_calibration_data client=gone" in caplog.text


def test_a_simulation_is_exported_with_the_training_samples_of_all_its_clients(tmp_path, call):
    source = write_images(tmp_path / "images.npz", 240)
    plan = small_plan(source, clients=4, new_clients=1)
    run(plan, tmp_path / "sim")
    found = training_samples(plan, tmp_path / "sim")
    shares = Division.read(tmp_path / "sim/partition.json").clients
    everything = load(source, TASK.input, TASK.class_names).inputs
    trained = list(shares)[:3]
    assert [*found] == trained
    for name in trained:
        np.testing.assert_allclose(found[name].ready().inputs, everything[list(shares[name].train)], atol=1e-6)
    code, out, err = call("export", "--state", tmp_path / "sim", "--out", tmp_path / "e.hwb", "--json")
    assert code == 0, err
    made = open_bundle(tmp_path / "e.hwb").manifest.quantization
    assert set(made.held_out) == set(trained)
    assert set(json.loads(out)["figures"]["domains"]) == set(trained)


def test_a_simulation_whose_data_are_gone_is_exported_without_figures(tmp_path, call):
    source = write_images(tmp_path / "images.npz")
    run(small_plan(source), tmp_path / "sim")
    (tmp_path / "images.npz").unlink()
    code, _, err = call("export", "--state", tmp_path / "sim", "--out", tmp_path / "e.hwb")
    assert code == 0, err
    made = open_bundle(tmp_path / "e.hwb").manifest.quantization
    assert made.ranges == "128 inputs without labels"
    assert "not measured" in made.note


@pytest.mark.parametrize("given", ["digits", ["digits:photo", "digits:inverted"]])
def test_one_source_needs_no_brackets(given):
    expected = (given,) if isinstance(given, str) else tuple(given)
    assert ExportConfig.model_validate({"calibration": given}).calibration == expected
