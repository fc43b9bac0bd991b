"""Bounds and robust rules, against numbers worked out by hand and against ByzFL."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import types

import numpy as np
import pytest
from federation_duties import TASK
from paper_methods import fedpac_update

from coordinator.config import AggregationConfig, CoordinatorConfig
from coordinator.rounds.aggregation import Decisions, aggregate, notes, refusal
from coordinator.rounds.bounds import norms_of
from coordinator.rounds.robust import (
    by_coordinate,
    distances,
    geometric_median_shares,
    gram,
    rank_by_krum,
)
from edge_agent import methods
from edge_agent.methods import Update

RULES = ("mean", "clipped", "trimmed_mean", "median", "krum", "multi_krum", "geometric_median", "centered_clipping")
UNBOUNDED = AggregationConfig().without_bounds()


@pytest.fixture(scope="module")
def byzfl():
    """ByzFL's aggregators. Its package imports its whole benchmark, and with it torchvision: only this part is read."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("byzfl is not installed (extra dev)")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    yield importlib.import_module("byzfl.aggregators.aggregators")
    for name in [name for name in sys.modules if name.split(".")[0] == "byzfl"]:
        del sys.modules[name]


def update(client, vector, weight=1.0):
    """An update of two tensors and a counter."""
    vector = np.asarray(vector, np.float32)
    split = (len(vector) + 1) // 2
    tensors = {"encoder.w": vector[:split], "head.weight": vector[split:], "encoder.bn.n": np.array(3, np.int64)}
    return Update(client, weight, tensors)


def vector_of(tensors):
    return np.concatenate([tensors["encoder.w"], tensors["head.weight"]])


def round_of(vectors, weights=None, start=None, method="fedavg", **config):
    """Result of one round as a vector, and the decisions; shares and directions are not bounded unless asked for."""
    config = {"max_share": None, "min_cosine": None, **config}
    weights = [1.0] * len(vectors) if weights is None else weights
    updates = [update(f"a{i}", v, w) for i, (v, w) in enumerate(zip(vectors, weights, strict=True))]
    state = update("", np.zeros(len(vectors[0])) if start is None else start).tensors
    after, decisions = aggregate(methods.create(method, {}), state, lambda: updates, AggregationConfig(**config))
    return vector_of(after), decisions


def random_vectors(count, size=7, seed=3):
    return np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_a_change_of_more_than_five_times_the_median_is_scaled_to_the_median():
    """Norms 3, 4, 5 and 40: the median is 4.5, and 40 / 4.5 = 8.9. What is left of the last one: 40 * 0.1125 = 4.5."""
    result, decisions = round_of([[3, 0], [0, 4], [5, 0], [0, -40]])
    np.testing.assert_allclose(result, [(3 + 5) / 4, (4 - 4.5) / 4], rtol=1e-6)
    assert decisions == Decisions(clipped={"a3": pytest.approx(0.1125)})
    assert notes(decisions.to_fact()) == {"a3": "clipped (x 0.113)"}


def test_a_change_is_measured_from_what_clients_received():
    """As above, moved by (100, -7): an update near the origin is the far one."""
    moved = [[103, -7], [100, -3], [105, -7], [100, -47]]
    result, decisions = round_of(moved, start=[100, -7])
    np.testing.assert_allclose(result, [102, -7 - 0.125], rtol=1e-6)
    assert decisions.clipped == {"a3": pytest.approx(0.1125)}


def test_more_samples_than_five_times_the_median_count_as_that_many():
    """Samples 10, 20, 30 and 1000: the median is 25, so that the last one counts as 125 of 185."""
    result, decisions = round_of([[1, 0], [1, 0], [1, 0], [0, 1]], weights=[10, 20, 30, 1000])
    np.testing.assert_allclose(result, [60 / 185, 125 / 185], rtol=1e-6)
    assert decisions == Decisions(capped={"a3": (1000, 125)})
    assert notes(decisions.to_fact()) == {"a3": "capped (1000 samples count as 125)"}


def test_absurd_norms_and_counts_are_suspect():
    _, decisions = round_of([[1, 0], [1, 0], [1, 0], [50, 0], [1, 0]], weights=[10, 10, 10, 10, 1e9])
    assert decisions.suspects == {
        "a3": "its change of the model is 50 times the median of the round",
        "a4": "declared 1e+09 samples, 2e+07 times the bound of the round",
    }


def test_methods_that_weigh_all_alike_have_no_cap():
    result, decisions = round_of([[1, 0], [1, 0], [0, 1]], weights=[1, 1, 1e9], method="fedbn")
    np.testing.assert_allclose(result, [2 / 3, 1 / 3], rtol=1e-6)
    assert decisions == Decisions()


@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedavgm", "scaffold", "pfedme"])
def test_honest_updates_give_the_bits_of_the_plain_mean(method, count):
    if method not in methods.names():
        pytest.skip("no such method")
    made = methods.create(method, {})
    # Honest changes have something in common: here it is (2, 2, ...), beside which each has its own.
    vectors = 2 + random_vectors(count) / 4
    weights = np.random.default_rng(1).integers(20, 25, count).astype(float)
    fresh = update("", np.zeros(7)).tensors
    state = made.start(fresh)
    extras = {name: array for name, array in state.items() if name.startswith("extra.")}
    updates = [
        Update(f"a{i}", weight, {**update("", vector).tensors, **extras})
        for i, (vector, weight) in enumerate(zip(vectors, weights, strict=True))
    ]
    bounded, decisions = aggregate(made, state, lambda: updates, AggregationConfig())
    plain = made.aggregate(state, iter(updates))
    assert decisions == Decisions()
    assert bounded.keys() == plain.keys()
    assert all(bounded[name].tobytes() == plain[name].tobytes() for name in plain)


def test_of_two_updates_only_an_absurd_one_is_bounded():
    """Nobody can tell which of two is right, but none doubles the model while the other changes it by a hundredth."""
    result, decisions = round_of([[101, 100], [1100, 100]], start=[100, 100], weights=[1, 1000])
    np.testing.assert_allclose(result, [101, 100], rtol=1e-6)
    assert decisions == Decisions(clipped={"a1": 0.001})
    result, decisions = round_of([[101, 100], [200, 100]], start=[100, 100], weights=[1, 1000])
    np.testing.assert_allclose(result, [(101 + 200_000) / 1001, 100], rtol=1e-6)
    assert decisions == Decisions()


def test_who_learns_when_the_others_have_learned_is_clipped_and_not_suspect():
    """A change of 20 times the median, which is less than a tenth of the model."""
    start = np.full(4, 1000.0)
    vectors = start + np.stack([*np.eye(4), np.array([0, 0, 0, 20])])
    _, decisions = round_of(vectors, start=start)
    assert decisions == Decisions(clipped={"a4": pytest.approx(0.05)})


def test_clients_without_a_change_do_not_make_the_median_zero():
    result, decisions = round_of([[0, 0], [0, 0], [0, 0], [1, 0], [0, 2], [3, 0]])
    np.testing.assert_allclose(result, [4 / 6, 2 / 6], rtol=1e-6)
    assert decisions == Decisions()


@pytest.mark.parametrize("rule", ["mean", "clipped"])
def test_where_half_change_nothing_a_change_is_bounded_by_a_tenth_of_the_model(rule):
    """The model's norm is 2, so that 0.2 is left of 2e6: a ninth of 0.1 in each of four numbers."""
    vectors = [*[np.ones(4)] * 8, np.full(4, 1e6 + 1)]
    result, decisions = round_of(vectors, start=np.ones(4), rule=rule)
    np.testing.assert_allclose(result, 1 + 0.1 / 9, rtol=1e-6)
    assert decisions.clipped == {"a8": pytest.approx(1e-7)}
    assert decisions.suspects == {
        "a8": "its change of the model is 1e+07 times the bound of a round in which half change nothing"
    }
    small, decisions = round_of([*vectors[:8], [1.1, 1, 1, 1]], start=np.ones(4), rule=rule)
    np.testing.assert_allclose(small, [1 + 0.1 / 9, 1, 1, 1], rtol=1e-6)
    assert decisions == Decisions()


def test_of_two_updates_one_changes_nothing_and_the_other_more_than_the_model():
    start = [3, 4]
    result, decisions = round_of([start, [3, 10]], start=start)
    np.testing.assert_allclose(result, start)
    assert decisions == Decisions(clipped={"a1": 0.0})
    assert round_of([start, [3, 8]], start=start)[1] == Decisions()


def test_running_statistics_have_a_bound_of_their_own_and_stay_between_both():
    """They may be a hundred times larger than weights: an attack on weights does not hide behind them.

    a5 is beyond 5 x 4 times the median of 100, a6 within; a4's weights are beyond, so its statistics have no room.
    """
    received = {"encoder.w": np.ones(2, np.float32), "encoder.running_var": np.ones(2, np.float32)}

    def sent(client, weights, variance):
        tensors = {"encoder.w": weights, "encoder.running_var": variance}
        return Update(client, 1.0, {name: np.array(array, np.float32) for name, array in tensors.items()})

    updates = [sent(f"a{i}", [2, 1], [101, 1]) for i in range(4)]
    updates += [sent("a4", [61, 1], [401, 1]), sent("a5", [2, 1], [1e30, 1]), sent("a6", [2, 1], [1901, 1])]
    after, decisions = aggregate(methods.create("fedavg", {}), received, lambda: updates, AggregationConfig())
    assert decisions.clipped == {"a4": pytest.approx(1 / 60), "a5": pytest.approx(1e-28)}
    np.testing.assert_allclose(after["encoder.w"], [2, 1], rtol=1e-5)
    np.testing.assert_allclose(after["encoder.running_var"], [(6 * 101 + 1901) / 7, 1], rtol=1e-5)


def test_control_variates_of_scaffold_are_bounded_as_changes():
    method = methods.create("scaffold", {})
    fresh = {"encoder.w": np.zeros(2, np.float32)}
    state = method.start(fresh)
    (extra,) = [name for name in state if name.startswith("extra.")]

    def sent(client, change):
        return Update(client, 1.0, {"encoder.w": np.ones(2, np.float32), extra: np.array(change, np.float32)})

    updates = [sent("a0", [3, 4]), sent("a1", [4, 3]), sent("a2", [0, 1e20])]
    after, decisions = aggregate(method, state, lambda: updates, AggregationConfig())
    assert decisions.clipped == {"a2": pytest.approx(5e-20)}
    np.testing.assert_allclose(after[extra], [7 / 3, 12 / 3], rtol=1e-6)


def test_class_means_and_classifiers_of_fedpac_are_bounded_by_those_of_the_others():
    """Classifiers of norm 1 and 600, class means of norm 2 and 1000; that of one class alone counts as a whole."""

    def sent(client, head, *means):
        rows = [*map(list, means), *[[0.0, 0.0]] * (2 - len(means))]
        counts = tuple(5 * (number < len(means)) for number in range(2))
        return fedpac_update(client, head=[[head, 0], [0, 0]], h=np.zeros((2, 2)), centroids=rows, counts=counts)

    updates = [sent("a", 1, [0, 2], [2, 0]), sent("b", 1, [0, 2]), sent("c", 1, [0, 2], [2, 0])]
    method = methods.create("fedpac", {})
    state = {"encoder.w": np.float32([1])}
    assert norms_of(method, state, updates) == {
        "weights": {"a": 0.0, "b": 0.0, "c": 0.0},
        "classifiers": {"a": 1.0, "b": 1.0, "c": 1.0},
        "class means": {"a": 2.0, "b": 2.0, "c": 2.0},
    }
    assert aggregate(method, state, lambda: updates, AggregationConfig())[1] == Decisions()
    updates = [*updates, sent("d", 600, [0, 1000], [1000, 0])]
    after, decisions = aggregate(method, state, lambda: updates, AggregationConfig())
    assert decisions.clipped == {"d": pytest.approx(1 / 600)}
    assert decisions.suspects == {"d": "the norm of its class means is 500 times the median of the round"}
    np.testing.assert_allclose(after["extra.centroids"], [[0, 2], [2, 0]], rtol=1e-6)
    assert np.abs(after["clients.head.weight"]).max() <= 1 + 1e-6


@pytest.mark.parametrize("value", [1e30, -1e30, 3e38])
@pytest.mark.parametrize("rule", RULES)
def test_one_huge_update_moves_no_rule_beyond_the_honest_ones(rule, value):
    vectors = [*random_vectors(6), np.full(7, value, np.float32)]
    result, _ = round_of(vectors, rule=rule)
    assert np.linalg.norm(result) <= max(np.linalg.norm(vector) for vector in vectors[:6])


@pytest.mark.parametrize("rule", RULES)
def test_float64_updates_that_overflow_are_survived(rule):
    received = {"encoder.w": np.zeros(3)}
    vectors = [*np.eye(3), np.ones(3), np.array([1e308, -1e308, 1e308])]
    updates = [Update(f"a{i}", 1.0, {"encoder.w": vector}) for i, vector in enumerate(vectors)]
    after, _ = aggregate(methods.create("fedavg", {}), received, lambda: updates, AggregationConfig(rule=rule))
    assert np.isfinite(after["encoder.w"]).all()
    assert np.abs(after["encoder.w"]).max() <= 1


# --- rules, by hand --------------------------------------------------------------------------------------------------


def test_clipped_scales_every_change_above_the_median():
    """Norms 1, 2 and 4."""
    result, decisions = round_of([[1, 0], [0, 2], [4, 0]], rule="clipped")
    np.testing.assert_allclose(result, [(1 + 2) / 3, 2 / 3], rtol=1e-6)
    assert decisions.clipped == {"a2": 0.5}
    assert not decisions.suspects


def test_median_and_trimmed_mean_of_five():
    columns = [[1, 50], [2, 40], [3, 30], [4, 20], [1000, -1000]]
    assert round_of(columns, rule="median")[0].tolist() == [3, 30]
    assert round_of(columns, rule="trimmed_mean", attackers=1)[0].tolist() == [3, 30]
    assert round_of(columns[:4], rule="median")[0].tolist() == [2.5, 35]
    assert round_of(columns, rule="trimmed_mean", attackers=9)[0].tolist() == [3, 30], "as many as can be spared"


def test_a_counter_takes_the_lower_median():
    updates = [Update(str(i), 1.0, {"n": np.array([n], np.int64)}) for i, n in enumerate((3, 9, 1, 4))]
    assert by_coordinate(updates, None)["n"].tolist() == [3]


def test_krum_takes_the_update_with_the_nearest_neighbours():
    """On a line at 0, 1, 3, 4, 100; f = 1: scores of the two nearest others are 10, 5, 5, 10, 18625."""
    vectors = [[0, 0], [1, 0], [3, 0], [4, 0], [100, 0]]
    result, decisions = round_of(vectors, rule="krum", attackers=1)
    assert result.tolist() == [1, 0], "the first of two with the same score"
    assert decisions.unused == ("a0", "a2", "a3", "a4")
    result, decisions = round_of(vectors, rule="multi_krum", attackers=1, weights=[1, 1, 1, 5, 1])
    assert result.tolist() == [(0 + 1 + 3 + 4) / 4, 0], "sample counts have no part in it"
    assert decisions.unused == ("a4",)
    decided = decisions.to_fact().changed(settings={"rule": "multi_krum"})
    assert notes(decided)["a4"].startswith("not used by rule multi_krum")


def test_geometric_median_of_a_point_of_the_majority_is_that_point():
    """Wherever the others are, and whatever samples they declare."""
    result, _ = round_of([[1, 2], [50, 60], [1, 2], [-70, 80], [1, 2]], [1, 9, 1, 9, 1], rule="geometric_median")
    np.testing.assert_allclose(result, [1, 2], atol=1e-3)


@pytest.mark.parametrize("unchanged, others", [(4, ()), (300, ()), (4, (1.1, 1.2)), (3, (1.0, 1e6))])
def test_geometric_median_of_a_majority_that_changes_nothing_is_the_model(unchanged, others):
    vectors = [*[np.ones(4)] * unchanged, *[np.full(4, value) for value in others]]
    result, _ = round_of(vectors, start=np.ones(4), rule="geometric_median")
    np.testing.assert_allclose(result, 1, atol=1e-5)


def test_geometric_median_has_no_shorter_sum_of_distances_nearby():
    vectors = random_vectors(9, 4)
    rng = np.random.default_rng(0)

    def total(point):
        return np.linalg.norm(vectors - point, axis=1).sum()

    result, _ = round_of(vectors, rule="geometric_median")
    nearby = result + rng.normal(scale=0.05, size=(500, 4))
    assert total(result) <= min(map(total, nearby)) + 1e-4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_small_rounds_have_a_result_by_every_rule(rule, count):
    result, _ = round_of(np.ones((count, 2)), rule=rule, attackers=3)
    assert result.tolist() == [1, 1]


MANY_UPDATES = """
import resource, sys
from pathlib import Path
import numpy as np
from coordinator.config import AggregationConfig
from coordinator.rounds.aggregation import StoredUpdates
from coordinator.state.store import BlobStore
from edge_agent import methods
from edge_agent.wire.tensors import pieces

resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[2])))
blobs = BlobStore(Path(sys.argv[1]))
digests = [blobs.put(*pieces({"encoder.w": np.full(4, number, np.float32)})) for number in range(120)]
updates = StoredUpdates({f"a{n:03}": (digest, 10.0) for n, digest in enumerate(digests)}, 1)
state, settings = {"encoder.w": np.ones(4, np.float32)}, AggregationConfig(rule="median", min_cosine=None)
after, _ = updates.aggregate(blobs, methods.create("fedavg"), state, settings)
print(after["encoder.w"].tolist())
"""


def test_a_robust_rule_raises_its_limit_of_open_files_and_names_one_that_is_too_low(tmp_path):
    """120 updates at a limit of 100 files, which a process may raise to 1000, or to 200. The median is 59.5."""
    run = lambda most: subprocess.run(
        [sys.executable, "-c", MANY_UPDATES, str(tmp_path), str(most)], capture_output=True, text=True, check=False
    )
    assert run(1000).stdout == "[59.5, 59.5, 59.5, 59.5]\n"
    assert "120 updates at once, which takes 376 open files, and this process may have 200" in run(200).stderr


@pytest.mark.parametrize("rule", RULES)
def test_large_tensors_are_looked_at_in_blocks(rule, monkeypatch):
    """The same whatever the size of a block; 1,024 columns at least."""
    vectors = random_vectors(5, 9000)
    whole, _ = round_of(vectors, rule=rule)
    monkeypatch.setattr("coordinator.rounds.robust.BLOCK_BYTES", 1)
    parts, _ = round_of(vectors, rule=rule)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


def test_rules_other_than_means_are_refused_for_methods_with_a_step_of_their_own():
    def refused(method, rule):
        config = CoordinatorConfig.model_validate({"task": TASK, "aggregation": {"rule": rule}})
        return refusal(methods.create(method, {}), config)

    why = refused("fedpac", "krum")
    assert why == (
        "aggregation.rule = 'krum' needs a method whose server step is a mean of the updates; 'fedpac' computes its "
        "own from each of them; set aggregation.rule = 'mean' or 'clipped'"
    )
    assert not refused("fedpac", "clipped")
    assert not refused("fedadam", "krum")


# --- rules, by another library ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, attackers", [(5, 1), (10, 2), (20, 4), (21, 9)])
def test_median_and_trimmed_mean_are_those_of_byzfl(byzfl, count, attackers):
    vectors = random_vectors(count, 31)
    theirs = byzfl.TrMean(f=attackers)(vectors)
    np.testing.assert_allclose(round_of(vectors, rule="trimmed_mean", attackers=attackers)[0], theirs, rtol=1e-5)
    np.testing.assert_allclose(round_of(vectors, rule="median")[0], byzfl.Median()(vectors), rtol=1e-5)


@pytest.mark.parametrize("count, attackers", [(5, 1), (10, 2), (20, 4), (21, 8)])
def test_krum_and_multi_krum_are_those_of_byzfl(byzfl, count, attackers):
    """ByzFL's score has one neighbour more than the paper's n - f - 2, so it is asked for one attacker more."""
    for seed in range(20):
        vectors = random_vectors(count, 31, seed)
        theirs = byzfl.Krum(f=attackers + 1)(vectors)
        np.testing.assert_allclose(round_of(vectors, rule="krum", attackers=attackers)[0], theirs, rtol=1e-5)
        order = rank_by_krum(distances(vectors.astype(np.float64) @ vectors.T.astype(np.float64)), attackers - 1)
        theirs = byzfl.MultiKrum(f=attackers)(vectors)
        np.testing.assert_allclose(vectors[order[: count - attackers]].mean(axis=0), theirs, rtol=1e-4, atol=1e-6)


def test_geometric_median_is_that_of_byzfl(byzfl):
    vectors = random_vectors(9, 31)
    theirs = byzfl.GeometricMedian(nu=1e-6, T=16)(vectors.astype(np.float64))
    np.testing.assert_allclose(round_of(vectors, rule="geometric_median")[0], theirs, rtol=1e-4, atol=1e-6)


def test_shares_do_not_hang_on_the_order_of_sums():
    vectors = random_vectors(12, 5000).astype(np.float64)
    products = vectors @ vectors.T
    noisy = products * (1 + 1e-15 * np.random.default_rng(0).normal(size=products.shape))
    assert geometric_median_shares(products) == geometric_median_shares(noisy)


def test_inner_products_are_of_the_changes():
    received = update("", [1, 1, 1]).tensors
    updates = [update("a", [2, 1, 1]), update("b", [2, 3, 1])]
    assert gram(updates, received).tolist() == [[1, 1], [1, 5]]
