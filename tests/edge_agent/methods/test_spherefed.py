from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.core.errors import ConfigError
from edge_agent.core.task import Task, WindowInput
from edge_agent.methods.spherefed import unpacked
from edge_agent.methods.values import Update
from edge_agent.training.loops import features_of

LABELS = {"a": [0, 1, 1, 0, 1], "b": [1, 2, 2, 2]}


def test_rows_are_orthonormal_and_no_round_of_training_moves_a_bit(tiny):
    fed = tiny("spherefed", LABELS, calibrate=False)
    start = fed.state["head.weight"]
    np.testing.assert_allclose(start @ start.T, np.eye(3), atol=1e-6)
    inner = fed.state["encoder.layers.1.weight"]
    fed.run()
    np.testing.assert_array_equal(fed.state["head.weight"], start)
    assert not np.array_equal(fed.state["encoder.layers.1.weight"], inner)
    assert fed.method.sends(fed.fresh_model(0), fed.task) == {}


def test_federated_calibration_is_the_pooled_ridge_regression(tiny):
    fed = tiny("spherefed", LABELS, ridge=0.3, lr=0.5, min_class_count=1)
    fed.run_round()
    fed.run_round()
    before = dict(fed.state)
    fed.run_round()  # the last one
    for name, array in before.items():
        assert np.array_equal(fed.state[name], array) == (name != "head.weight"), name
    # All samples in one place: |Z W' - Y|^2 + ridge |W|^2, as least squares of stacked rows.
    features = []
    labels = []
    for name, client in fed.clients.items():
        fed.download(name)
        features.append(features_of(client.model, client.train_inputs).double().numpy())
        labels.append(client.train_labels.numpy())
    z = np.concatenate(features)
    y = np.eye(3)[np.concatenate(labels)]
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    rows = np.vstack([z, np.sqrt(0.3) * np.eye(3)])
    targets = np.vstack([y, np.zeros((3, 3))])
    pooled = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    np.testing.assert_allclose(fed.state["head.weight"], pooled, rtol=1e-5, atol=1e-6)


def test_the_features_of_a_single_sample_are_not_told(tiny):
    """Client b has one sample of class 1, c one of each: what they send is that of their other samples."""
    alone, without = (
        tiny("spherefed", {"b": labels, "c": [0, 1]}, rounds=2, local_epochs=0) for labels in ([1, 2, 2, 2], [2, 2, 2])
    )
    without.clients["b"].train_inputs = alone.clients["b"].train_inputs[1:]
    for fed in (alone, without):
        fed.run_round()
    told, expected = ({update.client: update.tensors for update in fed.run_round()} for fed in (alone, without))
    for name in ("extra.gram", "extra.cross"):
        np.testing.assert_allclose(told["b"][name], expected["b"][name], rtol=1e-6)
        assert not told["c"][name].any()
    assert not told["b"]["extra.cross"][:, 1].any()


def test_statistics_are_sent_in_the_last_round_only(tiny):
    fed = tiny("spherefed", LABELS, min_class_count=1)
    for number in (1, 2, 3):
        for update in fed.run_round():
            gram = update.tensors["extra.gram"]
            cross = update.tensors["extra.cross"]
            assert (gram.shape, cross.shape) == ((6,), (3, 3))
            assert gram.any() == cross.any() == (number == 3)
            if number == 3:  # unit vectors: the trace is their number
                assert np.trace(unpacked(gram, 3)) == pytest.approx(update.weight)
    assert fed.method.objection(update.tensors) == ""


def test_a_run_of_one_round_trains(tiny):
    fed = tiny("spherefed", LABELS, rounds=1)
    before = dict(fed.state)
    fed.run()
    assert not np.array_equal(fed.state["encoder.layers.1.weight"], before["encoder.layers.1.weight"])
    np.testing.assert_array_equal(fed.state["head.weight"], before["head.weight"])


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_the_loss_by_hand(tiny, loss):
    fed = tiny("spherefed", LABELS, loss=loss, scale=4.0)
    client = fed.clients["a"]
    z = features_of(client.model, client.train_inputs).double().numpy()
    cosines = z / np.linalg.norm(z, axis=1, keepdims=True) @ client.model.head.weight.double().numpy().T
    y = client.train_labels.numpy()
    if loss == "mse":
        by_hand = ((cosines - np.eye(3)[y]) ** 2).mean()
    else:
        by_hand = (np.log(np.exp(4 * cosines).sum(axis=1)) - 4 * cosines[np.arange(5), y]).mean()
    value = fed.method.loss(client, {})(client.train_inputs, client.train_labels)
    assert value.item() == pytest.approx(by_hand, rel=1e-5)


def test_the_exported_classifier_names_the_same_classes(tiny):
    fed = tiny("spherefed", LABELS).run()
    client = fed.clients["b"]
    fed.download("b")
    inputs = torch.randn(50, 1, 4, generator=torch.Generator().manual_seed(3))
    head = fed.method.global_head(fed.state)
    logits = features_of(client.model, inputs).numpy() @ head["weight"].T + head["bias"]
    found = fed.method.predict_global(client, inputs).argmax(dim=1).numpy()
    np.testing.assert_array_equal(logits.argmax(axis=1), found)
    assert len(set(found)) > 1
    assert fed.method.head_params("lr") == {"feature_norm": "l2"}


def test_more_classes_than_features_are_refused():
    task = Task(
        input=WindowInput(channels=1, length=4),
        class_names=("a", "b", "c"),
        encoder="linear",
        encoder_params={"feature_dim": 2},
    )
    with pytest.raises(ConfigError, match="2 features for 3 classes"):
        methods.create("spherefed").build(task)


def test_a_packed_matrix_comes_back():
    np.testing.assert_array_equal(unpacked(np.array([1.0, 2, 3, 4, 5, 6]), 3), [[1, 2, 3], [2, 4, 5], [3, 5, 6]])


@pytest.mark.parametrize(
    "gram, cross, why",
    [
        ([1.0, 0, -2], [[0.0], [0]], "a sum of squares of -2"),
        ([1.0, 9, 1], [[0.0], [0]], "'extra.gram' reaches 9"),
        ([1.0, 0, 1], [[0.0], [3]], "'extra.cross' reaches 3, expected at most 2"),
        ([1.0, 1.5, 1], [[0.0], [0]], "cannot be of the same unit vectors"),
        ([0.0, 0, 2], [[1.0], [0]], "cannot be of the same unit vectors"),
        ([1e9, 0, 1e9], [[0.0], [0]], "is of 2e+09 vectors, expected at most 1000000000"),
    ],
)
def test_statistics_that_no_unit_vectors_have(gram, cross, why):
    tensors = {"extra.gram": np.array(gram), "extra.cross": np.array(cross)}
    assert why in methods.create("spherefed").objection(tensors)


def test_statistics_count_for_no_more_vectors_than_the_update_has_samples():
    """c sends ten samples' A and B as those of a million: they count as ten."""
    method = methods.create("spherefed", {"ridge": 1.0})
    state = {"encoder.w": np.float32([0])}

    def sent(client, times):
        statistics = {"extra.gram": times * np.array([6.0, 0, 4]), "extra.cross": times * np.array([[6.0, 0], [0, 4]])}
        return Update(client, 10.0, {"encoder.w": np.float32([0]), **statistics})

    assert method.objection(sent("c", 1e5).tensors) == ""
    honest = method.aggregate(state, [sent("a", 1.0), sent("b", 1.0), sent("c", 1.0)])
    np.testing.assert_allclose(honest["head.weight"], [[18 / 19, 0], [0, 12 / 13]], rtol=1e-6)
    lied = method.aggregate(state, [sent("a", 1.0), sent("b", 1.0), sent("c", 1e5)])
    np.testing.assert_allclose(lied["head.weight"], honest["head.weight"], rtol=1e-6)


def test_the_calibrated_classifier_knows_the_stripes(federation, images):
    method = methods.create("spherefed", {"lr": 0.3, "batch_size": 8, "ridge": 0.1})
    fed = federation(method, rounds=4, labels={"a": [0, 1, 2] * 8, "b": [0, 1, 2] * 8}).run()
    fed.download("a")
    inputs, wanted = images([0, 1, 2] * 20, seed=99)
    found = method.predict(fed.clients["a"], inputs).argmax(dim=1)
    assert (found == wanted).double().mean() > 0.8
