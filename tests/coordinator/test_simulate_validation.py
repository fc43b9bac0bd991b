"""Settings are tried out on a part of the training samples: nobody meets a test sample."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator import simulate
from coordinator.simulate import Plan, Prepared, open_simulation


def idx_folder(folder):
    """300 and 100 images of 4 x 4 of two classes, in the four files of MNIST."""
    rng = np.random.default_rng(0)
    for stem, count in (("train", 300), ("t10k", 100)):
        arrays = {"labels-idx1": np.arange(count) % 2, "images-idx3": rng.integers(0, 256, (count, 4, 4))}
        for name, array in arrays.items():
            header = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
            (folder / f"{stem}-{name}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
    return f"idx:{folder}"


def run(plan, folder):
    with open_simulation(Prepared.of(plan), folder) as simulation:
        return simulation.finish()


def learned(result):
    """All but time and traffic, which are those of the process that closed a round."""
    rounds = [{**one, "seconds": None, "bytes_up": None, "bytes_down": None} for one in result["rounds"]]
    return {**result, "rounds": rounds, "seconds": None}


def test_validation_scores_on_training_samples_alone(tmp_path):
    """Nobody meets a test sample, of the set's own test part or of what a device would hold back."""
    idx = idx_folder(tmp_path)
    for source in (idx, f"{idx}?split=train"):
        plain = Plan(data=(source,), clients=4, encoder="linear", device="cpu")
        tested, validated = Prepared.of(plain), Prepared.of(plain.model_copy(update={"validation": 0.25}))
        assert validated.pools.test is None
        for client, share in validated.division.clients.items():
            whole = tested.division.clients[client]
            assert sorted(share.train + share.test) == sorted(whole.train)
            assert len(share.test) == pytest.approx(len(whole.train) / 4, abs=5)  # rounded class by class
        assert validated.division.sha256 != tested.division.sha256


def test_a_validated_run_says_so_and_goes_on_as_one(tmp_path):
    plain = Plan(data=(idx_folder(tmp_path),), clients=3, rounds=2, encoder="linear", device="cpu", engine="serial")
    plan = plain.model_copy(update={"validation": 0.3})
    whole = run(plan, tmp_path / "whole")
    assert whole["scored_on"] == "validation"
    assert run(plain, tmp_path / "plain")["scored_on"] == "test"
    folder = tmp_path / "stopped"
    with open_simulation(Prepared.of(plan), folder) as simulation:
        simulation.step()
    found = simulate.planned(folder)
    with open_simulation(Prepared.of(found, folder / simulate.PARTITION), folder) as simulation:
        assert learned(simulation.finish()) == learned(whole)
