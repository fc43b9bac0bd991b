"""Simulated clients without torch: the same update as from those that train, and what is refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from coordinator import simulate
from coordinator.api import TrainedModel
from edge_agent.core.errors import UsageError

COMMON = {"clients": 6, "rounds": 1, "partition": "iid", "local": False, "engine": "serial", "encoder": "linear"}


def images(samples=120):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=samples)
    pictures = rng.integers(0, 60, (samples, 8, 8), dtype=np.uint8)
    for row, label in enumerate(labels):
        pictures[row, :, 2 * label] += 150
    return pictures, labels


def run(out, method="afl", **settings):
    """The state that a run ends with, and its result."""
    result = simulate(method, data=images(), out=out, **{**COMMON, **settings})
    return TrainedModel.of(out).state, result


@pytest.mark.parametrize("heads", [2, 6])
def test_clients_without_torch_send_what_the_others_would(tmp_path, heads):
    plain, _ = run(tmp_path / "plain")
    state, result = run(tmp_path / "heads", head_clients=heads)
    assert state.keys() == plain.keys()
    assert all(state[name].tobytes() == plain[name].tobytes() for name in plain)
    assert result.summary["head_clients"] == heads
    # They evaluate the final model as well.
    assert all(scores["acc.personal"] is not None for scores in result.clients.values())


def test_they_are_not_asked_for_what_they_do_not_send(tmp_path):
    state, _ = run(tmp_path / "run", "fedpac", head_clients=2, rounds=2)
    assert "extra.centroids" in state


def test_they_drop_out_like_others(tmp_path):
    whole, _ = run(tmp_path / "whole", head_clients=6)
    state, _ = run(tmp_path / "run", head_clients=6, dropout=0.5, seed=1)
    assert state["head.weight"].tobytes() != whole["head.weight"].tobytes()


def test_nothing_unexpected_is_sent_to_them(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="coordinator.simulation.client_pool"):
        run(tmp_path / "run", head_clients=2)
    assert "not_expected" not in caplog.text


def test_a_method_without_a_half_for_them_is_refused(tmp_path):
    with pytest.raises(UsageError, match="method 'fedavg' has no half for devices without torch"):
        run(tmp_path / "run", "fedavg", head_clients=1)


def test_more_than_take_part_are_refused(tmp_path):
    with pytest.raises(UsageError, match="head_clients = 6, but only 5 clients take part; give fewer"):
        run(tmp_path / "run", head_clients=6, new_clients=1)
