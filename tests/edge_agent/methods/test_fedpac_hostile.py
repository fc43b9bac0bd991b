"""Updates of FedPAC that cannot be honest, and parameters that cannot be meant."""

from __future__ import annotations

import numpy as np
import pytest
from paper_methods import fedpac
from paper_methods import fedpac_update as update

from edge_agent import methods
from edge_agent.core.errors import ConfigError


@pytest.mark.parametrize(
    "wrong, why",
    [
        ({"v": -1e-9}, "variance V is -1e-09, expected 0"),
        ({"v": 1e13}, "variance V is 1e+13"),
        ({"counts": (5, -1)}, "class counts from -1 to 5"),
        ({"counts": (5, 2_000_000_000)}, "class counts from 5 to 2000000000"),
        ({"h": [[1e7, 0], [0, 0]]}, "'extra.weighted_means' reaches 1e+07"),
        ({"centroids": [[0, 0], [0, -2e6]]}, "'extra.centroids' reaches 2e+06"),
        ({"head": [[1e30, 0], [0, 0]]}, "'extra.head.weight' reaches 1e+30"),
        ({"counts": (5, 0)}, "'extra.centroids' has values for a class whose count is 0"),
        ({"counts": (5, 0), "centroids": [[1, 1], [0, 0]]}, "'extra.weighted_means' has values for a class"),
    ],
)
def test_objections(wrong, why):
    assert why in fedpac().objection(update("a", **wrong).tensors)


def test_honest_updates_meet_no_objection():
    assert fedpac().objection(update("a").tensors) == ""
    assert (
        fedpac().objection(update("a", v=0, counts=(5, 0), h=[[1, 0], [0, 0]], centroids=[[1, 0], [0, 0]]).tensors)
        == ""
    )


def test_an_accepted_hostile_update_leaves_the_round_finite():
    """Everything at its limit, beside two honest clients."""
    extreme = update("c", v=1e12, h=1e6 * np.ones((2, 2)), head=-1e6 * np.eye(2), centroids=1e6 * np.ones((2, 2)))
    assert fedpac().objection(extreme.tensors) == ""
    state = fedpac().aggregate({}, [update("a", v=0.1), update("b", v=0.1), extreme])
    assert all(np.isfinite(array).all() for array in state.values())
    np.testing.assert_allclose(state["mixing.weights"][:2, :2], 0.5, atol=1e-3)


def test_impossible_parameters_are_all_named():
    with pytest.raises(ConfigError) as caught:
        methods.create("fedpac", {"weights": "best", "temperature": 0, "min_class_count": 0, "lambda": 1})
    assert len(caught.value.mistakes) == 4
