"""Defaults hold where classes are unevenly spread over small clients: ten of them, hardly more than one class each."""

from __future__ import annotations

import pytest

from coordinator.simulation.plan import Plan
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared

LEAST = {"dualfed": 0.85, "fedpick": 0.9, "fedrir": 0.9}


def personal(method, folder, *, paper):
    plan = Plan(
        method=method,
        paper=paper,
        data=("digits:optdigits",),
        partition="dirichlet",
        alpha=0.05,
        clients=10,
        rounds=10,
        evaluate_every=0,
        encoder_params={"feature_dim": 32, "width": 8},
        engine="serial",
        device="cpu",
    )
    with open_simulation(Prepared.of(plan), folder) as simulation:
        return simulation.finish()["last"]["acc"]["personal"]["clients_mean"]


@pytest.mark.slow  # 15 to 30 CPU seconds for each method
@pytest.mark.parametrize("method", LEAST)
def test_defaults_do_not_collapse_where_the_papers_values_do_worse(method, tmp_path):
    ours = personal(method, tmp_path / "ours", paper=False)
    assert ours > LEAST[method]
    assert ours > personal(method, tmp_path / "paper", paper=True)
