from __future__ import annotations

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.core.errors import ConfigError, TrainingFailed
from edge_agent.heads import FitData
from edge_agent.heads.fedrir_global import FedRIRGlobalParams as Params
from edge_agent.heads.fedrir_global import train

CENTRES = np.random.default_rng(8).normal(size=(3, 6)) * 2


def data(labels=None, seed: int = 0) -> FitData:
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, 3, 90) if labels is None else np.asarray(labels)
    features = CENTRES[wanted] + rng.normal(size=(len(wanted), 6))
    return FitData(features.astype(np.float32), wanted, 3)


def fitted(given: FitData, seed: int = 0, **params) -> heads.Head:
    head = heads.create("fedrir_global", params)
    head.fit(given, np.random.default_rng(seed))
    return head


def test_twenty_steps_equal_those_of_torch():
    import torch

    rng = np.random.default_rng(1)
    layer = {"weight": rng.normal(size=(3, 6)), "bias": rng.normal(size=3)}
    inputs = rng.normal(size=(35, 6))
    labels = rng.integers(0, 3, 35)
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in layer.items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=0.01)
    order = np.random.default_rng(2)
    for _ in range(5):  # of four batches: 10, 10, 10, 5
        for batch in np.split(order.permutation(35), [10, 20, 30]):
            optimizer.zero_grad()
            logits = torch.tensor(inputs[batch]) @ leaves["weight"].T + leaves["bias"]
            torch.nn.functional.cross_entropy(logits, torch.tensor(labels[batch])).backward()
            optimizer.step()
    train(layer, inputs, np.eye(3)[labels], Params(epochs=5, batch_size=10, lr=0.01), np.random.default_rng(2))
    for name, leaf in leaves.items():
        np.testing.assert_allclose(layer[name], leaf.detach().numpy(), atol=1e-9, err_msg=name)


def test_one_step_by_hand():
    # Zero weights, two classes: error = 1/2 - target. Adam's first step is lr * gradient / (|gradient| + 1e-8).
    layer = {"weight": np.zeros((2, 1)), "bias": np.zeros(2)}
    train(layer, np.array([[4.0]]), np.array([[1.0, 0.0]]), Params(epochs=1, lr=0.1), np.random.default_rng(0))
    np.testing.assert_allclose(layer["weight"], [[0.1], [-0.1]], rtol=1e-7)
    np.testing.assert_allclose(layer["bias"], [0.1, -0.1], rtol=1e-7)


def test_it_learns_what_is_separable():
    given = data()
    head = fitted(given)
    assert (head.predict_proba(given.features).argmax(axis=1) == given.labels).mean() > 0.9


def test_arrays_are_one_layer_on_the_features_as_they_are():
    head = fitted(data(), epochs=1)
    shapes = {name: array.shape for name, array in head.arrays.items()}
    assert shapes == {"classes": (3,), "weight": (3, 6), "bias": (3,)}
    features = data(seed=1).features
    logits = features.astype(np.float64) @ head.arrays["weight"].T + head.arrays["bias"]
    by_hand = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(head.predict_proba(features), by_hand, atol=1e-12)


def test_the_same_generator_gives_the_same_head():
    one, same, other = (fitted(data(), seed, epochs=2).arrays["weight"] for seed in (0, 0, 1))
    assert (one == same).all()
    assert (one != other).any()


def test_a_class_that_is_absent_gets_probability_zero():
    head = fitted(data([0, 2] * 10))
    found = head.predict_proba(data([0, 1, 2]).features)
    assert (found[:, 1] == 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    assert found[[0, 2]].argmax(axis=1).tolist() == [0, 2]


@pytest.mark.parametrize("labels", [[1], [1] * 7], ids=["one sample", "one class"])
def test_one_class_is_always_the_answer(labels):
    assert (fitted(data(labels)).predict_proba(data().features)[:, 1] == 1).all()


@pytest.mark.parametrize("count", [2, 101])
def test_any_number_of_samples_beside_the_batch_works(count):
    found = fitted(data([0, 1, 2, 0, 1][:count] if count < 5 else [0, 1] * 50 + [2]), epochs=3)
    assert np.isfinite(found.predict_proba(data().features)).all()


def test_a_step_size_that_diverges_is_reported():
    with pytest.raises(TrainingFailed, match=r"'fedrir_global': loss or weights became .* at lr 1e.308; .*lower it"):
        fitted(data(), lr=1e308, epochs=20)


def test_unknown_parameters_are_refused():
    with pytest.raises(ConfigError, match="epoch: unknown key; did you mean 'epochs'"):
        heads.create("fedrir_global", {"epoch": 3})
