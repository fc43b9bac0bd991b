"""Simulations in which a part of the encoder learns alone: engines, bytes, weights to begin with, resuming, options."""

from __future__ import annotations

import numpy as np
import pytest
from simulation_harness import closed_rounds, learned, run, small_plan, updates_of, write_images

from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from edge_agent.core.errors import UsageError
from edge_agent.core.storage import write_tensors
from edge_agent.training.parts import to_arrays
from edge_agent.wire.tensors import decode

CNN = {"encoder": "small_cnn", "encoder_params": {"feature_dim": 6, "width": 2}}


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 80)


def plan_for(images, choice="lora", **changes):
    return small_plan(images, **{**CNN, "peft": choice, "rounds": 3, **changes})


def state_after(plan, folder):
    with open_simulation(Prepared.of(plan), folder) as simulation:
        result = simulation.finish()
        record = simulation.state.journal
        digest = [entry.digest for entry in record.entries(simulation.run, ("round_closed",))][-1]
        return result, decode(bytes(simulation.state.blobs.read(digest)))


@pytest.mark.parametrize("choice", ["lora", "bn", "last_block"])
def test_engine_stacked_equals_one_after_another_up_to_rounding(choice, images, tmp_path):
    alone, serial = state_after(plan_for(images, choice), tmp_path / "serial")
    together, stacked = state_after(
        plan_for(images, choice, engine="stacked", stacked_always=True), tmp_path / "stacked"
    )
    assert together["stacked"]["jobs"] == 9
    assert alone["rounds"][0]["bytes_up"] == together["rounds"][0]["bytes_up"]
    assert serial.keys() == stacked.keys()
    for name, array in serial.items():
        np.testing.assert_allclose(stacked[name], array, rtol=1e-5, atol=1e-5)


def test_engine_pool_gives_the_bits_of_engine_serial(images, tmp_path):
    _, serial = state_after(plan_for(images), tmp_path / "serial")
    _, pool = state_after(plan_for(images, engine="pool", workers=2), tmp_path / "pool")
    assert all(pool[name].tobytes() == array.tobytes() for name, array in serial.items())


def test_each_client_gets_what_is_frozen_once(images, tmp_path):
    result, _ = state_after(plan_for(images), tmp_path / "run")
    whole, _ = state_after(plan_for(images, None), tmp_path / "whole")
    first, second, third = (row["bytes_down"] for row in result["rounds"])
    assert second == third < first
    assert all(row["bytes_up"] < whole["rounds"][0]["bytes_up"] / 2 for row in result["rounds"])
    assert [row["bytes_down"] for row in whole["rounds"]] == [whole["rounds"][0]["bytes_down"]] * 3


def test_training_begins_with_the_weights_of_a_file(images, tmp_path):
    """They are those of an ordinary encoder, and what is frozen of them is in the last state, bit for bit."""
    prepared = Prepared.of(plan_for(images, None, seed=7))
    encoder = prepared.model.model.encoder
    weights = to_arrays(encoder, encoder.state_dict())
    path = tmp_path / "encoder.safetensors"
    write_tensors(path, weights)
    _, state = state_after(plan_for(images, seed=1, weights=path), tmp_path / "run")
    for name, array in weights.items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_array_equal(state[f"encoder.{name}"], array)
    assert np.abs(state["encoder.layers.0.lora_b"]).max() > 0


def test_a_simulation_that_was_stopped_goes_on_with_the_same_results(images, tmp_path):
    plan = plan_for(images)
    undisturbed = learned(run(plan, tmp_path / "undisturbed"))
    with open_simulation(Prepared.of(plan), tmp_path / "stopped") as simulation:
        while closed_rounds(simulation) < 1:
            simulation.step()
        began = updates_of(simulation)
    assert began
    assert {**learned(run(plan, tmp_path / "stopped")), "run_id": ""} == {**undisturbed, "run_id": ""}


def test_new_clients_get_a_head_on_the_adapted_encoder(images, tmp_path):
    result = run(plan_for(images, new_clients=1, evaluate_every=0), tmp_path / "run")
    assert 0 <= result["last"]["acc"]["new"]["clients_mean"] <= 1


@pytest.mark.parametrize(
    "changes, mistake",
    [
        ({"peft": "lorra"}, "did you mean 'lora'"),
        ({"peft_params": {"rank": 0}}, "rank"),
        ({"peft": None, "peft_params": {"rank": 2}}, "without peft"),
        ({"method": "ditto", "params": {}}, "second network"),
        ({"peft": "bn", "encoder": "linear", "encoder_params": {}}, "no normalisation layers"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(changes, mistake, images, tmp_path):
    with pytest.raises(UsageError, match=mistake):
        Prepared.of(plan_for(images, **changes))


def test_a_resumed_simulation_keeps_its_choice(images, tmp_path):
    run(plan_for(images), tmp_path / "run")
    with (
        pytest.raises(UsageError, match="peft"),
        open_simulation(Prepared.of(plan_for(images, "bn")), tmp_path / "run"),
    ):
        pass
