"""AFL: the ridge regression of all samples from any division of them, and statistics that nobody can have."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from edge_agent import methods
from edge_agent.core.errors import ConfigError, TrainingFailed
from edge_agent.core.task import Tensors
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.heads import FitData
from edge_agent.methods.afl import AFL, GRAM, SHARES, SUMS, pack, solve, statistics, unpack
from edge_agent.methods.values import Update
from edge_agent.privacy.noise import Mechanism
from edge_agent.privacy.secure_sum import tensors as layout
from edge_agent.wire.tensors import specs_of

CLASSES = 5
SIZE = 24
EXACT = {"min_class_count": 1, "ridge": 1e-3, "scale": 1.0}


def cloud(samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features (n, d) float32 around a centre for each class, none of them around zero, and their labels (n,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=samples)
    centres = 3 * rng.random((CLASSES, SIZE)) + 1
    return (centres[labels] + rng.standard_normal((samples, SIZE))).astype(np.float32), labels


def central_ridge(features: np.ndarray, labels: np.ndarray, ridge: float, classes: int = CLASSES) -> Tensors:
    """The ridge regression of one-hot labels with an intercept, by least squares on rows that stand for the penalty."""
    rows = features.astype(np.float64)
    targets = np.eye(classes)[labels]
    penalty = ridge * float((rows**2).sum()) / rows.shape[1]
    middle = targets.mean(axis=0)
    mean = rows.mean(axis=0)
    stacked = np.concatenate([rows - mean, np.sqrt(penalty) * np.eye(rows.shape[1])])
    goals = np.concatenate([targets - middle, np.zeros((rows.shape[1], classes))])
    weight = np.linalg.lstsq(stacked, goals, rcond=None)[0].T
    return {"head.weight": weight, "head.bias": middle - weight @ mean}


def method(**params: Any) -> AFL:
    made = methods.create("afl", {**EXACT, **params})
    assert isinstance(made, AFL)
    return made


def updates_of(made: AFL, features: np.ndarray, labels: np.ndarray, owners: np.ndarray) -> list[Update]:
    """What the owners of the samples send."""
    params = made.params.model_dump()
    updates = []
    for owner in np.unique(owners):
        rows = owners == owner
        tensors = statistics(features[rows], labels[rows], CLASSES, params)
        updates.append(Update(f"c{owner:04d}", float(rows.sum()), tensors))
    return updates


def divided(labels: np.ndarray, how: str, clients: int = 20) -> np.ndarray:
    """The owner (n,) of each sample."""
    rng = np.random.default_rng(3)
    if how == "one place":
        return np.zeros(len(labels), np.int64)
    if how == "iid":
        return rng.integers(clients, size=len(labels))
    if how == "one class each":
        return labels + CLASSES * rng.integers(clients // CLASSES, size=len(labels))
    owners = np.zeros(len(labels), np.int64)
    for label in range(CLASSES):
        rows = np.flatnonzero(labels == label)
        owners[rows] = rng.choice(clients, size=len(rows), p=rng.dirichlet([0.05] * clients))
    return owners


def close(state: Tensors, expected: Tensors, tolerance: float = 1e-6) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, atol=tolerance, rtol=0, err_msg=name)


# --- the same as at one place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["one place", "iid", "dirichlet 0.05", "one class each"])
def test_any_division_gives_the_ridge_regression_of_all_samples(how):
    features, labels = cloud(600)
    made = method()
    state = made.aggregate({}, updates_of(made, features, labels, divided(labels, how)))
    close(state, central_ridge(features, labels, 1e-3))


def test_it_is_the_ridge_regression_of_another_library():
    linear_model = pytest.importorskip("sklearn.linear_model")
    features, labels = cloud(300)
    made = method()
    state = made.aggregate({}, updates_of(made, features, labels, divided(labels, "iid")))
    penalty = 1e-3 * float((features.astype(np.float64) ** 2).sum()) / SIZE
    fitted = linear_model.Ridge(alpha=penalty, tol=1e-12).fit(features.astype(np.float64), np.eye(CLASSES)[labels])
    close(state, {"head.weight": fitted.coef_, "head.bias": fitted.intercept_})


def test_half_of_the_clients_dropped_out_is_the_ridge_regression_of_the_others():
    features, labels = cloud(600)
    owners = divided(labels, "dirichlet 0.05")
    made = method()
    here = [update for number, update in enumerate(updates_of(made, features, labels, owners)) if number % 2]
    rows = np.isin(owners, [int(update.client[1:]) for update in here])
    close(made.aggregate({}, here), central_ridge(features[rows], labels[rows], 1e-3))


def test_it_equals_the_aggregation_law_of_the_paper_with_its_regularisation_removed():
    """Solutions W_k and C_k = G_k + gamma I, combined pairwise, and gamma taken off at the end."""
    features, labels = cloud(200)
    owners = divided(labels, "one class each", clients=10)
    gamma = 1.0
    combined_c = np.zeros((SIZE, SIZE))
    combined_w = np.zeros((SIZE, CLASSES))
    clients = np.unique(owners)
    for client in clients:
        rows = features[owners == client].astype(np.float64)
        own_c = rows.T @ rows + gamma * np.eye(SIZE)
        own_w = np.linalg.solve(own_c, rows.T @ np.eye(CLASSES)[labels[owners == client]])
        both = combined_c + own_c
        combined_w = np.linalg.solve(both, combined_c @ combined_w + own_c @ own_w)
        combined_c = both
    law = np.linalg.solve(combined_c - len(clients) * gamma * np.eye(SIZE), combined_c @ combined_w)
    made = methods.create("afl", paper=True)
    close(made.aggregate({}, updates_of(made, features, labels, owners)), {"head.weight": law.T})


def test_numbers_by_hand():
    """Two samples of class 0 at (1, 0), one of class 1 at (0, 2): without intercept and penalty W is diagonal."""
    features = np.float32([[1, 0], [1, 0], [0, 2]])
    params = {"min_class_count": 1, "sent_as": "float64"}
    tensors = statistics(features, np.array([0, 0, 1]), 2, params)
    # z z' sums to diag(2, 4) over three samples, and its upper triangle is row by row.
    np.testing.assert_allclose(tensors[GRAM], np.array([2, 0, 4]) / 3)
    np.testing.assert_allclose(tensors[SUMS], np.array([[2, 0], [0, 2]]) / 3)
    np.testing.assert_allclose(tensors[SHARES], np.array([2, 1]) / 3)
    weight, bias = solve(unpack(tensors[GRAM], 2), tensors[SUMS], tensors[SHARES], 0.0, has_intercept=False)
    np.testing.assert_allclose(weight, [[1, 0], [0, 0.5]], atol=1e-12)
    np.testing.assert_allclose(bias, [0, 0])


def test_features_in_fewer_directions_than_there_are_give_the_shortest_solution():
    """The pseudo-inverse, as in the paper: what no sample has gets no weight."""
    features, labels = cloud(300)
    features[:, -4:] = 0.0
    features[:, -5] = features[:, 0]
    made = method(ridge=0.0, intercept=False)
    state = made.aggregate({}, updates_of(made, features, labels, divided(labels, "iid")))
    expected = np.linalg.lstsq(features.astype(np.float64), np.eye(CLASSES)[labels], rcond=1e-9)[0]
    close(state, {"head.weight": expected.T})


def test_the_order_of_clients_changes_no_bit():
    features, labels = cloud(400)
    made = method()
    updates = updates_of(made, features, labels, divided(labels, "dirichlet 0.05"))
    assert_same_bits(made.aggregate({}, updates), made.aggregate({}, updates[::-1]))


def test_partial_sums_give_the_bits_of_the_whole():
    features, labels = cloud(400)
    made = method()
    updates = updates_of(made, features, labels, divided(labels, "dirichlet 0.05"))
    total = WeightedSum()
    for part in (updates[::2], updates[1::2]):
        partial = WeightedSum()
        for update in part:
            made.fold(partial, update)
        total.merge(partial)
    assert_same_bits(made.next_state({}, total), made.aggregate({}, updates))


def test_a_secure_sum_gives_the_same_bits():
    features, labels = cloud(400)
    made = method()
    updates = updates_of(made, features, labels, divided(labels, "dirichlet 0.05"))
    forms = specs_of(updates[0].tensors)
    total = np.zeros(layout.size_of(forms) + 1, np.uint64)
    for update in updates:
        total += layout.as_integers(update.tensors, forms, update.weight, len(updates))
    summed = Update("sum", 1.0, layout.mean_of(total, forms))
    assert_same_bits(made.aggregate({}, [summed]), made.aggregate({}, updates))


def assert_same_bits(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name


# --- clients that come and go ----------------------------------------------------------------------------------------


def test_a_client_that_returns_replaces_what_it_sent_and_later_ones_are_added():
    features, labels = cloud(300)
    owners = np.arange(300) % 3
    made = method(remember=True)
    first = updates_of(made, features, labels, owners)
    state = made.aggregate({}, first[:2])
    # Client 0 returns with half of its samples, and client 2 comes late.
    rows = (owners != 0) | (np.arange(300) < 150)
    returned = updates_of(made, features[rows], labels[rows], owners[rows])
    state = made.aggregate(state, [returned[0], returned[2]])
    close(state, central_ridge(features[rows], labels[rows], 1e-3))


def test_a_client_is_taken_out_as_if_it_had_never_been_there():
    features, labels = cloud(300)
    owners = np.arange(300) % 3
    made = method(remember=True)
    updates = updates_of(made, features, labels, owners)
    state = made.aggregate({}, updates)
    without = made.without(state, ["c0001"])
    assert_same_bits(without, made.aggregate({}, [updates[0], updates[2]]))
    with pytest.raises(TrainingFailed, match="no statistics of c0009 are kept; a run with remember=true keeps them"):
        made.without(state, ["c0009"])


def test_new_classes_are_new_rows_and_nobody_is_asked_again():
    features, labels = cloud(400)
    made = method(remember=True)
    is_old = labels < 3
    params = made.params.model_dump()
    old = Update("old", float(is_old.sum()), statistics(features[is_old], labels[is_old], 3, params))
    state = made.with_classes(made.aggregate({}, [old]), [0, 1, 2], CLASSES)
    new = Update("new", float((~is_old).sum()), statistics(features[~is_old], labels[~is_old], CLASSES, params))
    close(made.aggregate(state, [new]), central_ridge(features, labels, 1e-3))


def test_classes_of_few_samples_are_left_out_at_the_client():
    features, labels = cloud(40)
    labels[:] = 0
    labels[7] = 1
    params = {"min_class_count": 2, "sent_as": "float64"}
    tensors = statistics(features, labels, CLASSES, params)
    rest = np.delete(features, 7, axis=0).astype(np.float64)
    np.testing.assert_allclose(tensors[GRAM], pack(rest.T @ rest) / 40)
    assert not tensors[SUMS][1].any()
    assert tensors[SHARES].tolist() == [39 / 40, 0, 0, 0, 0]


def test_a_round_in_which_no_class_counts_keeps_the_classifier():
    tensors = statistics(
        np.ones((2, SIZE), np.float32), np.array([0, 1]), CLASSES, method(min_class_count=2).params.model_dump()
    )
    before = {"head.weight": np.ones((CLASSES, SIZE), np.float32), "head.bias": np.zeros(CLASSES, np.float32)}
    assert_same_bits(method().aggregate(before, [Update("a", 2.0, tensors)]), before)


def test_nobody_is_refused():
    with pytest.raises(TrainingFailed, match="no update"):
        method().aggregate({}, [])


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_both_tiers_send_the_same(federation):
    fed = federation(methods.create("afl"))
    client = fed.clients["a"]
    received = fed.download("a")
    from edge_agent.training.loops import features_of

    features = features_of(client.model, client.train_inputs).numpy()
    data = FitData(features, client.train_labels.numpy(), 3, None, fed.method.all_params())
    sent = fed.method.local_update(client, received)
    assert_same_bits(methods.contribution("afl")(data, {}, np.random.default_rng(0)), sent)


def test_the_half_for_devices_without_torch_loads_none():
    code = (
        "import sys, numpy as np\n"
        "from edge_agent import methods\n"
        "from edge_agent.heads import FitData\n"
        "params = methods.create('afl').all_params()\n"
        "data = FitData(np.ones((4, 3), np.float32), np.array([0, 0, 1, 1]), 2, None, params)\n"
        "print(sorted(methods.contribution('afl')(data, {}, np.random.default_rng(0))))\n"
        "print(sorted({'torch', 'torchvision', 'onnx', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["['extra.gram', 'extra.shares', 'extra.sums']", "[]"]


def test_single_precision_halves_the_bytes():
    features, labels = cloud(50)
    sizes = {}
    for kind in ("float64", "float32"):
        made = method(sent_as=kind)
        (update,) = updates_of(made, features, labels, divided(labels, "one place"))
        sizes[kind] = sum(array.nbytes for array in update.tensors.values())
        assert made.objection(update.tensors) == ""
    numbers = SIZE * (SIZE + 1) // 2 + CLASSES * SIZE + CLASSES
    assert sizes == {"float64": 8 * numbers, "float32": 4 * numbers}


@pytest.mark.parametrize("name", ["afl", "fedcof"])
@pytest.mark.parametrize("param", ["scale", "ridge"])
def test_numbers_that_float32_cannot_hold_are_refused(name, param):
    """With a scale of 1e38 weights are infinite, and a classifier of chance was saved without a word."""
    with pytest.raises(ConfigError, match=f"{param} = 1e\\+38: Input should be less than or equal to"):
        methods.create(name, {param: 1e38})


def test_other_batch_norm_for_each_client_is_refused():
    with pytest.raises(ConfigError, match="gives each client other features, which do not add up"):
        methods.create("afl", {"norm": "local_stats"})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.01, 1.0, 10.0])
def test_statistics_with_noise_are_still_those_of_some_samples(noise, seed):
    features, labels = cloud(80, seed)
    made = method()
    (update,) = updates_of(made, features, labels, divided(labels, "one place"))
    mechanism = Mechanism(clip=1.0, clip_statistics=1.0, noise=noise)
    noisy = mechanism.apply(made, update.tensors, {}, np.random.default_rng(seed))
    assert specs_of(noisy) == specs_of(update.tensors)
    assert made.objection(noisy) == ""
    assert any(not np.array_equal(noisy[name], update.tensors[name]) for name in noisy)


# --- statistics that nobody has --------------------------------------------------------------------------------------


def honest() -> Tensors:
    features, labels = cloud(100)
    made = method()
    (update,) = updates_of(made, features, labels, np.zeros(100, np.int64))
    assert made.objection(update.tensors) == ""
    return update.tensors


def test_a_matrix_with_a_negative_eigenvalue_is_refused():
    tensors = honest()
    matrix = unpack(tensors[GRAM], SIZE)
    matrix[0, 1] = matrix[1, 0] = 3 * matrix[0, 0]
    assert "cannot be of the same samples" in method().objection({**tensors, GRAM: pack(matrix)})


def test_sums_that_are_longer_than_the_squares_allow_are_refused():
    tensors = honest()
    assert "cannot be of the same samples" in method().objection({**tensors, SUMS: 2 * tensors[SUMS]})


def test_shares_that_overflow_are_refused():
    tensors = honest()
    for shares in (1e300 * tensors[SHARES], 3 * tensors[SHARES], tensors[SHARES] - 0.5):
        assert "expected shares of 1" in method().objection({**tensors, SHARES: shares})


def test_features_of_a_class_without_samples_are_refused():
    tensors = honest()
    shares = tensors[SHARES].copy()
    shares[2] = 0.0
    assert "a class whose share is 0" in method().objection({**tensors, SHARES: shares})


def test_absurd_squares_are_refused():
    tensors = honest()
    assert "mean squares from" in method().objection({**tensors, GRAM: 1e13 * tensors[GRAM]})
    assert "no class has samples" in method().objection(
        {GRAM: tensors[GRAM], SUMS: 0 * tensors[SUMS], SHARES: 0 * tensors[SHARES]}
    )
