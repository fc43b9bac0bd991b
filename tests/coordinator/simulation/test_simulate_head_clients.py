"""Simulated clients without torch: the same update as from those that train, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from coordinator import simulate
from coordinator.simulation import device_heads
from coordinator.simulation.trained import TrainedModel
from edge_agent.core.errors import UnknownName, UsageError
from edge_agent.personal.choice import candidates

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


def heads_of(result):
    """Client -> the head that it has fitted, in order of the clients."""
    folder = Path(result.folder) / "runs" / result.summary["run_id"]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {agent["id"]: agent["head"] for agent in summary["agents"]}


def test_they_fit_the_head_that_is_named(tmp_path):
    _, first = run(tmp_path / "first", head_clients=6)
    _, named = run(tmp_path / "named", head_clients=6, head="knn")
    assert set(heads_of(first).values()) == {"shared_classifier"}
    assert set(heads_of(named).values()) == {"knn"}


def test_auto_takes_the_surest_head_in_cross_validation_and_the_same_one_each_time(tmp_path):
    _, one = run(tmp_path / "one", head_clients=6, head="auto")
    _, again = run(tmp_path / "again", head_clients=6, head="auto")
    chosen = heads_of(one)
    assert "auto" not in chosen.values()
    assert chosen == heads_of(again)
    assert one.clients == again.clients


def test_the_shared_classifier_is_compared_where_it_has_not_learned_from_the_samples(tmp_path, monkeypatch):
    """Cross-validation on samples that it knows would be too kind to it; a new client's samples it does not know."""
    compared = []

    def note(offered, *, has_shared):
        compared.append(has_shared)
        return candidates(offered, has_shared=has_shared)

    monkeypatch.setattr(device_heads, "candidates", note)
    run(tmp_path / "took-part", head_clients=5, new_clients=1, head="auto")
    assert sorted(compared) == [False] * 5 + [True]


def test_new_clients_fit_it_as_well(tmp_path):
    _, result = run(tmp_path / "new", "fedavg", new_clients=2, head="prototype")
    assert [*heads_of(result).values()][-2:] == ["prototype", "prototype"]


@pytest.mark.parametrize(
    "settings, error, reason",
    [
        ({"head": "auto"}, UsageError, "no client fits it; give new_clients or head_clients as well"),
        ({"head": "lrr", "head_clients": 2}, UnknownName, "did you mean 'lr'"),
        ({"head": "ridge_prior", "head_clients": 2}, UsageError, "needs a bundle, which no simulation makes"),
        ({"head": "blend", "head_clients": 2}, UsageError, "needs a bundle, which no simulation makes"),
    ],
)
def test_a_head_that_nobody_can_fit_is_refused(tmp_path, settings, error, reason):
    with pytest.raises(error, match=reason):
        run(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
