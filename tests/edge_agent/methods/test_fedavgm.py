from __future__ import annotations

import numpy as np

from edge_agent import methods
from edge_agent.methods.values import Update

VARIANCE = "encoder.1.running_var"


def updates(*values):
    return [
        Update(name, weight, {"w": np.float32([value]), VARIANCE: np.float32([value])})
        for name, weight, value in zip("ab", (1.0, 3.0), values, strict=True)
    ]


def test_two_steps_by_hand():
    # Means (1 + 3 * 5) / 4 = 4 and 2. From 1: v = 3, w = 1 + .5 * 3 = 2.5; v = .9 * 3 - .5 = 2.2, w = 2.5 + 1.1.
    method = methods.create("fedavgm", {"server_lr": 0.5})
    state = {"w": np.float32([1.0]), VARIANCE: np.float32([1.0])}
    for values, expected, variance in (((1.0, 5.0), 2.5, 4.0), ((2.0, 2.0), 3.6, 2.0)):
        state = method.aggregate(state, updates(*values))
        np.testing.assert_allclose(state["w"], [expected], rtol=1e-6)
        assert state[VARIANCE] == variance  # a step beyond the mean could make it negative
    np.testing.assert_allclose(state["server.velocity.w"], [2.2], rtol=1e-6)
    assert set(method.broadcast(state)) == {"w", VARIANCE}


def test_without_momentum_it_is_fedavg(federation):
    plain, still = (
        federation(methods.create(name, {"momentum": 0.0, "batch_size": 4, **extra}), rounds=2, seed=3).run()
        for name, extra in (("fedavg", {}), ("fedavgm", {"server_momentum": 0.0}))
    )
    for name in plain.shared:
        np.testing.assert_allclose(still.state[name], plain.state[name], rtol=1e-4, atol=1e-6, err_msg=name)
