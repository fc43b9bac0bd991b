"""Unknown inputs: both detectors against computations written another way, the rate, and the estimate of misses."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import binom
from sklearn.covariance import ledoit_wolf

from edge_agent.core.errors import StateError
from edge_agent.core.graph import Graph, Value
from edge_agent.personal.confidence import Confidence
from edge_agent.personal.detectors import DETECTORS, MOST_DIRECTIONS, ClassMeans, NearestRows, unit
from edge_agent.personal.unknown import MOST_LEFT_OUT, Misses, UnknownRule, estimate_misses

STRETCHED = (3.0, 3.0, *[0.3] * 10)
"""How much classes vary in each direction, so that the distance from their means tells more than that to rows."""


def clouds(count, classes=4, size=12, spread=0.3, seed=0, scales=None):
    """Rows of classes that lie apart by 1, and in some directions vary much more than in others."""
    world = np.random.default_rng(5)
    centres = np.eye(size)[:classes] + 1.0
    if scales is None:
        scales = np.geomspace(1.0, 0.05, size)
    turn = np.linalg.qr(world.normal(size=(size, size)))[0]
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    return (centres[labels] + spread * (rng.normal(size=(count, size)) * scales) @ turn).astype(np.float32), labels


def test_false_alarms_stay_below_the_rate_that_was_asked_for():
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(100):
        rule = UnknownRule.fit(rng.normal(size=(60, 8)).astype(np.float32), 0.1)
        rates.append(rule.is_unknown(rng.normal(size=(200, 8)).astype(np.float32)).mean())
    assert 0.03 < np.mean(rates) <= 0.1


def test_inputs_from_elsewhere_are_unknown():
    rng = np.random.default_rng(0)
    known = rng.normal(size=(100, 16)).astype(np.float32) + np.eye(16, dtype=np.float32)[0] * 5
    rule = UnknownRule.fit(known, 0.05)
    restored = Confidence.from_arrays(Confidence(unknown=rule).arrays(), 16).unknown
    assert rule.is_unknown(-known).mean() > 0.95
    np.testing.assert_array_equal(restored.scores(known[:9]), rule.scores(known[:9]))
    assert Confidence.from_arrays({}, 16) == Confidence()


def test_a_rate_needs_as_many_samples_as_can_show_it():
    rows = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    assert UnknownRule.fit(rows[:18], 0.05) is None
    assert UnknownRule.fit(rows[:19], 0.05) is not None
    assert UnknownRule.fit(rows[:8], 0.1) is None
    many = np.random.default_rng(0).normal(size=(4400, 2)).astype(np.float32)
    assert len(UnknownRule.fit(many, 0.05).rows) == 4096
    assert len(UnknownRule.fit(many, 1 / 4200).rows) == 4199


def test_neighbours_of_the_same_recording_do_not_count():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 5)
    rows = (rng.normal(size=(20, 6))[groups] + 0.01 * rng.normal(size=(100, 6))).astype(np.float32)
    # A new recording is far from the others; without groups every one of its windows would be a false alarm.
    other = rng.normal(size=(200, 6)).astype(np.float32)
    assert UnknownRule.fit(rows, 0.1).is_unknown(other).mean() > 0.8
    assert UnknownRule.fit(rows, 0.1, groups).is_unknown(other).mean() < 0.25


def test_drift_is_a_surplus_of_unknown_inputs_beyond_chance():
    rows = np.eye(2, dtype=np.float32)
    rule = UnknownRule(rows, 0.5, 0.05, NearestRows(rows))
    for total in (1, 50, 20_000):
        for count in range(0, total + 1, max(1, total // 50)):
            assert rule.has_drifted(count, total) == (binom.sf(count - 1, total, 0.05) < 0.001), (count, total)


def test_distances_are_those_to_the_third_nearest_direction():
    """By brute force with scipy, leave-one-out for the threshold."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(30, 5)).astype(np.float32)
    queries = rng.normal(size=(7, 5)).astype(np.float32)
    rule = UnknownRule.fit(rows, 0.1)
    unit, others = (array / np.linalg.norm(array, axis=1, keepdims=True) for array in (rows, queries))
    np.testing.assert_allclose(rule.scores(queries), np.sort(cdist(others, unit), axis=1)[:, 2], atol=1e-3)
    left_out = np.sort(cdist(unit, unit), axis=1)[:, 3]  # the first one is the sample itself
    assert rule.threshold == pytest.approx(np.sort(left_out)[int(np.ceil(31 * 0.9)) - 1], abs=1e-3)
    assert (left_out > rule.threshold + 1e-6).mean() <= 0.1


@pytest.mark.parametrize("count, size", [(90, 12), (20, 40)])
def test_distances_from_class_means_are_mahalanobis_distances_with_a_shrunk_covariance(count, size):
    rows, labels = clouds(count, size=size)
    rows = unit(rows).astype(np.float64)
    queries = unit(clouds(7, size=size, seed=3)[0])
    means = np.stack([rows[labels == label].mean(axis=0) for label in range(4)])
    covariance, shrinkage = ledoit_wolf(rows - means[labels], assume_centered=True)
    assert 0.01 < shrinkage < 0.9
    expected = cdist(queries, means, "mahalanobis", VI=np.linalg.inv(covariance)).min(axis=1)
    np.testing.assert_allclose(ClassMeans.fit(rows, labels).scores(queries), expected, rtol=1e-5)


def test_of_many_directions_the_strongest_are_kept():
    rng = np.random.default_rng(0)
    rows = unit(1 + 0.3 * rng.normal(size=(400, 100)) * np.geomspace(1, 0.01, 100))
    labels = np.zeros(400, np.int64)
    found = ClassMeans.fit(rows, labels)
    assert found.directions.shape == (100, MOST_DIRECTIONS)
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    inverse = np.linalg.inv(ledoit_wolf(centred, assume_centered=True)[0])
    exact = np.sqrt(np.einsum("ij,jk,ik->i", centred, inverse, centred))
    assert np.corrcoef(found.scores(rows), exact)[0, 1] > 0.99


def test_samples_that_are_all_alike_have_distances_too():
    rows = np.tile(unit(np.ones((1, 5))), (30, 1))
    found = ClassMeans.fit(rows, np.zeros(30, np.int64))
    assert found.scores(rows).max() < 1e-3
    assert np.isfinite(found.scores(-rows)).all()


def test_misses_are_those_of_a_class_left_out_by_hand():
    rows, labels = clouds(80)
    rows = unit(rows)
    alone = np.arange(80)
    found = estimate_misses(NearestRows, rows, labels, alone, 0.1)
    missed = []
    for label in range(4):
        others = rows[labels != label]
        usual = np.sort(np.sort(cdist(others, others), axis=1)[:, 3])
        strange = np.sort(cdist(rows[labels == label], others), axis=1)[:, 2]
        missed.append(np.mean(strange <= usual[int(np.ceil(61 * 0.9)) - 1] + 1e-6))
    assert found == Misses(tuple(missed))


def test_the_estimate_of_misses_foretells_those_of_a_new_class():
    for spread in (0.3, 0.8, 2.0):
        rows, labels = clouds(1200, classes=6, spread=spread, seed=1)
        known = labels < 5
        rule = UnknownRule.fit(rows[known][:250], 0.05, labels=labels[known][:250])
        missed = 1 - rule.is_unknown(rows[~known]).mean()
        assert rule.misses.share == pytest.approx(missed, abs=0.2), spread


def test_the_detector_is_the_one_that_misses_fewer():
    rows, labels = clouds(240, scales=STRETCHED)
    rule = UnknownRule.fit(rows, 0.05, labels=labels)
    alone = np.arange(240)
    shares = [estimate_misses(kind, unit(rows), labels, alone, 0.05).share for kind in DETECTORS]
    assert shares[1] < shares[0], "directions that vary much say little here"
    assert isinstance(rule.detector, ClassMeans)
    assert rule.misses.share == min(shares)
    assert rule.is_unknown(clouds(400, scales=STRETCHED, seed=9)[0]).mean() < 0.1


def test_features_that_do_not_separate_are_called_that():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 16)).astype(np.float32)
    rule = UnknownRule.fit(rows, 0.05, labels=rng.integers(0, 4, 200))
    assert not rule.tells_apart
    assert rule.misses_text.startswith("unknown inputs cannot be told apart here: of classes left out in turn ")
    apart = UnknownRule.fit(*(clouds(200)[0], 0.05), labels=clouds(200)[1])
    assert apart.tells_apart
    assert (
        Misses((0.25, 0.5)).text
        == "misses about 37.5 % of inputs of an unknown class (25.0 % to 50.0 % of 2 classes left out in turn)"
    )
    alike = Misses((0.5,)).text
    assert alike == "misses about 50.0 % of inputs of an unknown class (as of 1 class left out in turn)"
    assert apart.misses_text == apart.misses.text


def test_with_one_class_misses_cannot_be_estimated():
    rows, _ = clouds(60, classes=1)
    rule = UnknownRule.fit(rows, 0.05, labels=np.zeros(60, np.int64))
    assert (rule.misses, rule.tells_apart) == (None, True)
    assert "cannot be estimated" in rule.misses_text
    few = UnknownRule.fit(clouds(20, classes=2)[0], 0.05, labels=clouds(20, classes=2)[1])
    assert few.misses is None, "10 samples of the other class cannot show 5 %"


def test_many_classes_and_samples_are_estimated_from_a_part():
    rows, labels = clouds(3000, classes=12)
    found = estimate_misses(ClassMeans, unit(rows), labels, np.arange(3000), 0.05)
    assert len(found.shares) == MOST_LEFT_OUT


def test_recordings_stay_together_when_class_means_score_their_own_samples():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 6)
    labels = groups % 3
    rows = unit(rng.normal(size=(30, 20))[groups] + 0.01 * rng.normal(size=(180, 20)))
    together = ClassMeans.fit(rows, labels).score_as_new(rows, labels, groups)
    apart = ClassMeans.fit(rows, labels).score_as_new(rows, labels, np.arange(180))
    assert np.median(together) > 1.3 * np.median(apart)


def test_a_rule_by_class_means_is_kept_and_written_as_operators():
    rows, labels = clouds(240, scales=STRETCHED)
    rule = UnknownRule.fit(rows, 0.05, labels=labels)
    restored = Confidence.from_arrays(Confidence(unknown=rule).arrays(), 12).unknown
    queries = clouds(50, seed=4, spread=1, scales=STRETCHED)[0]
    np.testing.assert_array_equal(restored.scores(queries), rule.scores(queries))
    assert restored.misses == rule.misses
    graph = Graph()
    scores, is_unknown = rule.write(graph, Value("rows"))
    np.testing.assert_allclose(run(graph, queries, scores)[:, 0], rule.scores(queries), rtol=1e-5)
    np.testing.assert_array_equal(run(graph, queries, is_unknown)[:, 0], rule.is_unknown(queries))


def run(graph, rows, output):
    """Compute a tensor of a graph by ONNX Runtime."""
    make = onnx.helper
    nodes = [make.make_node(node.operator, node.inputs, node.outputs, **attributes(node)) for node in graph.nodes]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in graph.constants.items()]
    given = make.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, ["n", rows.shape[1]])
    asked = onnx.ValueInfoProto(name=output)
    model = make.make_graph(nodes, "rule", [given], [asked], constants)
    content = make.make_model(model, opset_imports=[make.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run([output], {"rows": rows})[0]


def attributes(node):
    """An operator's attributes, with data types by their numbers."""
    types = {"float32": onnx.TensorProto.FLOAT, "float64": onnx.TensorProto.DOUBLE}
    return {name: types[value] if name == "to" else value for name, value in node.attributes.items()}


@pytest.mark.parametrize(
    "change",
    [
        {"unknown_means": np.zeros((4, 5))},
        {"unknown_means": np.zeros((0, 12))},
        {"unknown_directions": np.zeros((12, 3))},
        {"unknown_weights": np.array([])},
        {"unknown_weights": np.full(13, np.nan)},
        {"unknown_means": None},
    ],
)
def test_damaged_class_means_are_refused(change):
    rows, labels = clouds(240, scales=STRETCHED)
    arrays = {**Confidence(unknown=UnknownRule.fit(rows, 0.05, labels=labels)).arrays(), **change}
    with pytest.raises(StateError, match="confidence"):
        Confidence.from_arrays({name: array for name, array in arrays.items() if array is not None}, 12)


def test_an_earlier_version_finds_no_rule_of_a_kind_that_it_does_not_know():
    rows, labels = clouds(240, scales=STRETCHED)
    assert "unknown" not in UnknownRule.fit(rows, 0.05, labels=labels).arrays()
    assert "unknown" in UnknownRule.fit(rows, 0.05).arrays()
