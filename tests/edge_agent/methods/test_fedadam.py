from __future__ import annotations

import math

import numpy as np

from edge_agent import methods
from edge_agent.methods.values import Update

VARIANCE = "encoder.1.running_var"


def test_two_steps_by_hand():
    """Changes D of 3 and then of 1: m and v are written out as Algorithm 2 has them, v from tau^2."""
    method = methods.create("fedadam", {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99, "adaptivity": 0.01})
    state = {"w": np.float32([1.0]), VARIANCE: np.float32([1.0])}
    w = 1.0
    m = 0.0
    v = 0.01**2
    for change in (3.0, 1.0):
        values = (float(state["w"][0]) + change - 3, float(state["w"][0]) + change + 1)  # mean by 1 : 3 is w + change
        ups = [
            Update(name, weight, {"w": np.float32([value]), VARIANCE: np.float32([2.0])})
            for name, weight, value in zip("ab", (1.0, 3.0), values, strict=True)
        ]
        state = method.aggregate(state, ups)
        m = 0.9 * m + 0.1 * change
        v = 0.99 * v + 0.01 * change**2
        w += 0.1 * m / (math.sqrt(v) + 0.01)
        np.testing.assert_allclose(state["w"], [w], rtol=1e-5)
        assert state[VARIANCE] == 2.0
    np.testing.assert_allclose([state["server.mean.w"][0], state["server.square.w"][0]], [m, v], rtol=1e-5)
    assert set(method.broadcast(state)) == {"w", VARIANCE}


def test_the_first_step_has_nearly_the_same_length_for_every_weight():
    # |D| >> tau: m / sqrt(v) = .1 D / (.1 |D|) = sign(D), times the step size.
    method = methods.create("fedadam", {"server_lr": 0.01})
    update = Update("a", 1.0, {"w": np.float32([5.0, -0.5, 0.0])})
    after = method.aggregate({"w": np.zeros(3, np.float32)}, [update])["w"]
    np.testing.assert_allclose(after, [0.01, -0.01, 0.0], rtol=0.03)
