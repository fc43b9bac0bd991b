"""FedPAC's steps on cached features, against hand-worked numbers and against torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent import heads
from edge_agent.core.errors import TrainingFailed
from edge_agent.heads import FitData
from edge_agent.heads.fedpac import FedPACHead, class_means, statistics, train
from edge_agent.heads.fedpac import FedPACHeadParams as Params
from edge_agent.heads.fedpac import settings as settings_of


def sample(count=200, size=6, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    return ((rng.normal(size=(classes, size)))[labels] + rng.normal(size=(count, size))).astype(np.float32), labels


def shared_head(size=6, classes=4, seed=1):
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.normal(size=(classes, size)).astype(np.float32),
        "bias": rng.normal(size=classes).astype(np.float32),
    }


@pytest.mark.parametrize(
    "features, labels, h, v",
    [
        ([[1, 0], [3, 0], [0, 2]], [0, 0, 1], [[4 / 3, 0], [0, 2 / 3]], 22 / 27),
        ([[2, 0], [2, 0], [0, 2]], [0, 0, 1], [[4 / 3, 0], [0, 2 / 3]], 16 / 27),
        ([[0, 4], [2, 0], [2, 0]], [0, 1, 1], [[0, 4 / 3], [4 / 3, 0]], 40 / 27),
    ],
)
def test_statistics_by_hand(features, labels, h, v):
    """First: p = (2/3, 1/3), mu = (2, 0), (0, 2); V = (2/3 * 5 + 1/3 * 4 - 4/9 * 4 - 1/9 * 4) / 3 = 22/27."""
    found_v, found_h = statistics(np.array(features, np.float32), np.array(labels), 2)
    assert found_v == pytest.approx(v, abs=1e-9)
    np.testing.assert_allclose(found_h, h, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 40), size=st.integers(1, 5), classes=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_the_variance_is_that_of_the_mean_of_label_times_features(count, size, classes, seed):
    """n V = trace Cov(onehot(y) (x) z), h its mean; twice the same data halve V and keep h."""
    rng = np.random.default_rng(seed)
    features = rng.normal(3, 2, (count, size)).astype(np.float32)
    labels = rng.integers(0, classes, count)
    products = (np.eye(classes)[labels][:, :, None] * features.astype(np.float64)[:, None, :]).reshape(count, -1)
    v, h = statistics(features, labels, classes)
    np.testing.assert_allclose(h.ravel(), products.mean(axis=0), atol=1e-9)
    assert v * count == pytest.approx(((products - products.mean(axis=0)) ** 2).mean(axis=0).sum(), abs=1e-6)
    assert v >= 0
    double_v, double_h = statistics(np.tile(features, (2, 1)), np.tile(labels, 2), classes)
    assert double_v == pytest.approx(v / 2, abs=1e-9)
    np.testing.assert_allclose(double_h, h, atol=1e-9)


def test_classes_of_too_few_samples_appear_nowhere():
    features = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    labels = np.array([0, 2, 2])
    means, counts = class_means(features, labels, 4, least=2)
    np.testing.assert_array_equal(counts, [0, 0, 2, 0])
    np.testing.assert_allclose(means, [[0, 0], [0, 0], [4, 5], [0, 0]])
    v, h = statistics(features, labels, 4, least=2)
    np.testing.assert_allclose(h, [[0, 0], [0, 0], [8 / 3, 10 / 3], [0, 0]])
    # 2/3 of the mean of 25 and 61, less 4/9 of 41, over 3 samples
    assert v == pytest.approx((2 / 3 * 43 - 4 / 9 * 41) / 3)


def test_one_sample_has_no_variance():
    v, h = statistics(np.array([[0.1, 0.7]], np.float32), np.array([1]), 2)
    assert v == pytest.approx(0, abs=1e-7)
    np.testing.assert_allclose(h, [[0, 0], [0.1, 0.7]], rtol=1e-6)


def test_an_epoch_of_the_classifier_equals_torchs():
    """20 steps of SGD with lr 0.1, momentum 0.5, weight decay 5e-4; a last batch of one joins the one before."""
    import torch

    features, labels = sample(201)
    params = Params(batch_size=10)
    found = train(shared_head(), features, labels, params, np.random.default_rng(7))
    twin = torch.nn.Linear(6, 4)
    with torch.no_grad():
        for name, array in shared_head().items():
            getattr(twin, name).copy_(torch.from_numpy(array))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5, weight_decay=5e-4)
    order = np.random.default_rng(7).permutation(201)
    for rows in np.split(order, range(10, 200, 10)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            twin(torch.from_numpy(features[rows])), torch.from_numpy(labels[rows])
        ).backward()
        optimizer.step()
    np.testing.assert_allclose(found["weight"], twin.weight.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(found["bias"], twin.bias.detach().numpy(), atol=1e-5)


def test_training_leaves_the_head_that_it_starts_from_alone():
    start = shared_head()
    for array in start.values():
        array.flags.writeable = False  # as arrays from a bundle are
    features, labels = sample()
    found = train(start, features, labels, Params(), np.random.default_rng(0))
    np.testing.assert_array_equal(start["weight"], shared_head()["weight"])
    assert not np.array_equal(found["weight"], start["weight"])


def test_zero_epochs_are_the_shared_head_restricted_to_the_devices_classes():
    features, labels = sample(60)
    kept = labels != 2
    head = heads.create("fedpac", {"epochs": 0, "c": None})
    head.fit(FitData(features[kept], labels[kept], 4, shared_head()), np.random.default_rng(0))
    logits = features.astype(np.float64) @ shared_head()["weight"].T + shared_head()["bias"]
    odds = np.exp(logits) * [1, 1, 0, 1]
    np.testing.assert_allclose(head.predict_proba(features), odds / odds.sum(axis=1, keepdims=True), atol=1e-6)


def test_the_head_improves_on_the_one_it_starts_from_and_learns_from_nothing():
    features, labels = sample(400, seed=3)
    scores = {}
    for name, start, params in [
        ("before", shared_head(), {"epochs": 0, "c": None}),
        ("after", shared_head(), {"c": None}),
        ("converged", shared_head(), {}),
        ("alone", None, {}),
    ]:
        head = heads.create("fedpac", params)
        head.fit(FitData(features, labels, 4, start), np.random.default_rng(0))
        scores[name] = (head.predict_proba(features).argmax(axis=1) == labels).mean()
    assert scores["after"] > scores["before"] + 0.1
    assert scores["converged"] >= scores["after"]
    assert scores["alone"] > 0.6


def test_one_epoch_of_few_steps_is_not_enough_for_a_new_device():
    """Six steps from a classifier of other clients, as a device of 300 samples in batches of 50 takes them."""
    train_rows, test_rows = (sample(300, size=20, seed=seed) for seed in (5, 5))
    rng = np.random.default_rng(6)
    test_features = test_rows[0] + 0.3 * rng.normal(size=test_rows[0].shape).astype(np.float32)
    scores = {}
    for name, params in (("epoch", {"c": None}), ("converged", {})):
        head = heads.create("fedpac", params)
        head.fit(FitData(*train_rows, 4, shared_head(size=20)), np.random.default_rng(0))
        scores[name] = (head.predict_proba(test_features).argmax(axis=1) == test_rows[1]).mean()
    assert scores["converged"] > scores["epoch"] + 0.05


def test_one_class_and_one_sample_fit():
    for labels in ([2], [2, 2, 2]):
        head = heads.create("fedpac")
        head.fit(
            FitData(np.ones((len(labels), 6), np.float32), np.array(labels), 4, shared_head()), np.random.default_rng(0)
        )
        np.testing.assert_array_equal(head.predict_proba(np.zeros((1, 6), np.float32)), [[0, 0, 1, 0]])


def test_a_step_size_that_diverges_is_named():
    features, labels = sample()
    with pytest.raises(TrainingFailed, match=r"lr 1e\+38.*lower"):
        train(shared_head(), features * 1e6, labels, Params(lr=1e38), np.random.default_rng(0))


def test_the_methods_parameters_become_the_heads():
    found = settings_of(
        {"head_lr": 0.2, "head_epochs": 3, "lr": 9.0, "momentum": 0.1, "batch_size": 7, "weights": "qp"}
    )
    assert found == Params(lr=0.2, epochs=3, momentum=0.1, batch_size=7)


def data(labels=None, **params):
    features, own = sample(80)
    own = own if labels is None else np.array(labels)
    return FitData(features[: len(own)], own, 4, method_params={"batch_size": 8, **params})


def test_a_contribution_starts_from_what_was_received_then_from_the_bundle_then_from_zeros():
    received = {f"head.{name}": array for name, array in shared_head().items()}
    nothing = {"head_epochs": 0}
    one = FedPACHead.contribute(data(**nothing), received, np.random.default_rng(0))
    np.testing.assert_array_equal(one["extra.head.weight"], shared_head()["weight"])
    with_bundle = FitData(*sample(80), 4, shared_head(seed=2), nothing)
    two = FedPACHead.contribute(with_bundle, {}, np.random.default_rng(0))
    np.testing.assert_array_equal(two["extra.head.bias"], shared_head(seed=2)["bias"])
    three = FedPACHead.contribute(data(**nothing), {}, np.random.default_rng(0))
    assert not three["extra.head.weight"].any()


@pytest.mark.parametrize("labels", [[1], [1, 1, 1], [0, 2] * 5, [0, 1, 2, 3]])
def test_a_contribution_of_awkward_data_is_finite_and_whole(labels):
    for params in ({}, {"min_class_count": 1}, {"weights": "prototype_loss"}):
        found = FedPACHead.contribute(data(labels, **params), {}, np.random.default_rng(0))
        expected = {
            "extra.head.weight": (4, 6),
            "extra.head.bias": (4,),
            "extra.centroids": (4, 6),
            "extra.counts": (4,),
        }
        if "weights" not in params:
            expected |= {"extra.variance": (1,), "extra.weighted_means": (4, 6)}
        assert {name: array.shape for name, array in found.items()} == expected
        assert all(np.isfinite(array).all() for array in found.values())
        counts = np.bincount(labels, minlength=4)
        least = params.get("min_class_count", 2)
        np.testing.assert_array_equal(found["extra.counts"], np.where(counts >= least, counts, 0))


def test_the_head_needs_no_torch():
    code = (
        "import sys, numpy as np; from edge_agent import heads; from edge_agent.heads.fedpac import FedPACHead\n"
        "d = heads.FitData(np.ones((4, 3), np.float32), np.array([0, 0, 1, 1]), 2)\n"
        "FedPACHead.contribute(d, {}, np.random.default_rng(0)); heads.create('knn').fit(d, np.random.default_rng(0))\n"
        "print(sorted({'torch', 'sklearn', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
