"""Settings are tried out on a part of the training samples: nobody meets a test sample."""

from __future__ import annotations

import pytest
from simulation_harness import learned, run, write_idx

from coordinator.simulation import setup as simulation_folder
from coordinator.simulation.plan import Plan
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared


@pytest.fixture
def idx(tmp_path):
    return write_idx(tmp_path / "idx", 300, 100, classes=2, side=4)


def test_validation_scores_on_training_samples_alone(idx):
    """Nobody meets a test sample, of the set's own test part or of what a device would hold back."""
    for source in (idx, f"{idx}?split=train"):
        plain = Plan(data=(source,), clients=4, encoder="linear", device="cpu")
        tested = Prepared.of(plain)
        validated = Prepared.of(plain.model_copy(update={"validation": 0.25}))
        assert validated.pools.test is None
        for client, share in validated.division.clients.items():
            whole = tested.division.clients[client]
            assert sorted(share.train + share.test) == sorted(whole.train)
            assert len(share.test) == pytest.approx(len(whole.train) / 4, abs=5)  # rounded class by class
        assert validated.division.sha256 != tested.division.sha256


def test_a_validated_run_says_so_and_goes_on_as_one(idx, tmp_path):
    plain = Plan(data=(idx,), clients=3, rounds=2, encoder="linear", device="cpu", engine="serial")
    plan = plain.model_copy(update={"validation": 0.3})
    whole = run(plan, tmp_path / "whole")
    assert whole["scored_on"] == "validation"
    assert run(plain, tmp_path / "plain")["scored_on"] == "test"
    folder = tmp_path / "stopped"
    with open_simulation(Prepared.of(plan), folder) as simulation:
        simulation.step()
    found = simulation_folder.read_plan(folder)
    with open_simulation(Prepared.of(found, folder / simulation_folder.PARTITION), folder) as simulation:
        assert learned(simulation.finish()) == learned(whole)
