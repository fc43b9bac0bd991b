"""Statistics of a federation in a bundle: what a device reads of them, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.bundle.archive import open_bundle, pack
from edge_agent.bundle.installed import install
from edge_agent.core.errors import BundleDamaged
from edge_agent.data import Samples
from edge_agent.methods import Update
from edge_agent.methods.afl import statistics, unpack
from edge_agent.personal.fitting import FitOptions, fit, has_high_leverage, heads_to_compare, shared_statistics
from edge_agent.training.parts import to_arrays
from edge_agent.wire.tensors import decode, encode
from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, synthetic_inputs

PARAMS = {"min_class_count": 1, "scale": 1.0}


@pytest.fixture(scope="module")
def afl():
    return methods.create("afl", PARAMS)


@pytest.fixture(scope="module")
def exported(task, images, afl, tmp_path_factory):
    """The state of a round, and the bundle of it."""
    torch.manual_seed(0)
    model = afl.build(task).eval()
    rng = np.random.default_rng(0)
    updates = []
    for name in ("a", "b"):
        labels = rng.integers(task.num_classes, size=40)
        features = (rng.standard_normal((40, 12)) + np.eye(task.num_classes, 12)[labels]).astype(np.float32)
        updates.append(Update(name, 40.0, statistics(features, labels, task.num_classes, afl.all_params())))
    state = afl.aggregate(afl.start(to_arrays(model, afl.shared_names(model))), updates)
    trained = TrainedEncoder(model, afl, task, afl.global_head(state), afl.shared_statistics(state))
    out = tmp_path_factory.mktemp("bundle") / "afl.hwb"
    options = BundleOptions("run-1", exporter="legacy", int8=False, own_norm=False)
    build_bundle(trained, Calibration.from_inputs(synthetic_inputs(task)), out, options)
    return state, out


def test_a_device_reads_the_classifier_and_the_statistics_of_all(exported, tmp_path, afl):
    state, path = exported
    bundle = install(path, tmp_path)
    np.testing.assert_array_equal(bundle.global_head()["weight"], state["head.weight"])
    known = bundle.shared_statistics()
    for name, array in afl.shared_statistics(state).items():
        np.testing.assert_allclose(known[name], array, rtol=1e-6, atol=1e-7)
    assert all(array.dtype == np.float32 for array in known.values())


def test_classes_are_matched_by_their_names(exported, tmp_path, task):
    _, path = exported
    bundle = install(path, tmp_path)
    whole = bundle.shared_statistics()
    last = task.class_names[-1]
    found = shared_statistics(bundle, (last, "of the device alone"))
    np.testing.assert_array_equal(found["sums"][0], whole["sums"][-1])
    assert not found["sums"][1].any()
    assert found["shares"].tolist() == [whole["shares"][-1], 0.0]
    # The mean of the features is that of all samples, as their products are.
    np.testing.assert_allclose(found["mean"], whole["sums"].sum(axis=0), rtol=1e-5)
    assert unpack(found["gram"], 12).trace() == pytest.approx(unpack(whole["gram"], 12).trace())


def test_samples_that_were_left_out_are_no_part_of_the_means(exported, tmp_path, task):
    """Classes of one sample at a client are not sent: what the device reads are the means over all other samples."""
    _, path = exported
    rng = np.random.default_rng(0)
    features = (rng.random((100, 12)) + 3).astype(np.float32)
    labels = np.array([0] * 60 + [1] * 39 + [2])
    counted = features[:99].astype(np.float64)
    sent = statistics(features, labels, task.num_classes, methods.create("afl", {"min_class_count": 2}).all_params())
    arrays = {name.removeprefix("extra."): array for name, array in sent.items()}
    bundle = install(changed(path, tmp_path / "b.hwb", arrays), tmp_path / "bundles")
    given = shared_statistics(bundle, task.class_names)
    gram = unpack(given["gram"], 12)
    np.testing.assert_allclose(gram, counted.T @ counted / 99, rtol=1e-6)
    np.testing.assert_allclose(given["mean"], counted.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(given["sums"][0], counted[:60].sum(axis=0) / 99, rtol=1e-6)
    np.testing.assert_allclose(given["shares"], [60 / 99, 39 / 99, 0], rtol=1e-6)
    # Products and means of the same samples: the scatter around the mean is positive in all directions.
    assert np.linalg.eigvalsh(gram - np.outer(given["mean"], given["mean"])).min() > 0


def test_a_personal_head_begins_with_them(exported, tmp_path, task):
    _, path = exported
    bundle = install(path, tmp_path)
    rng = np.random.default_rng(5)
    labels = np.arange(8) % task.num_classes
    features = (rng.standard_normal((8, 12)) + np.eye(task.num_classes, 12)[labels]).astype(np.float32)
    head = fit(bundle, features, labels, FitOptions(head="ridge_prior"))
    assert head.arrays["prior_samples"][0] > 0
    assert "ridge_prior" in heads_to_compare(bundle, eight_samples(task), FitOptions())


def eight_samples(task):
    """Samples of a device, of which only the number and the classes count here."""
    return Samples(np.zeros((8, 1)), np.zeros(8, np.int64), task.class_names, task.input)


def test_heads_that_know_a_devices_own_samples_are_not_compared_on_them(exported, tmp_path, task):
    """With 12 features and 8 samples the classifier that both have fitted repeats the labels of these samples."""
    _, path = exported
    bundle = install(path, tmp_path)
    as_new = heads_to_compare(bundle, eight_samples(task), FitOptions())
    took_part = heads_to_compare(bundle, eight_samples(task), FitOptions(took_part=True))
    assert set(as_new) - set(took_part) == {"shared_classifier", "tuned", "ridge_prior"}
    # A head that would mix the shared classifier in learns without it.
    rng = np.random.default_rng(5)
    features = rng.standard_normal((8, 12)).astype(np.float32)
    labels = np.arange(8) % task.num_classes
    mixed, alone = (
        fit(bundle, features, labels, FitOptions("knn", withholds_shared=is_withheld)).predict_proba(features)
        for is_withheld in (False, True)
    )
    assert np.abs(mixed - alone).max() > 0.01
    many = Samples(np.zeros((200, 1)), np.zeros(200, np.int64), task.class_names, task.input)
    assert heads_to_compare(bundle, many, FitOptions(took_part=True)) == as_new


@pytest.mark.parametrize("own, clients, known", [(60, 4, True), (60, 90, True), (60, 91, False), (5440, 0, False)])
def test_leverage_is_features_over_samples(own, clients, known):
    """544 features: a tenth of that is reached with 5,440 samples, which 60 samples have with 90.7 clients."""
    assert has_high_leverage(own, clients, 544) is known


def test_a_bundle_without_statistics_offers_no_such_head(exported, tmp_path, task):
    _, path = exported
    without = changed(path, tmp_path / "without.hwb", None)
    bundle = install(without, tmp_path / "bundles")
    assert bundle.shared_statistics() is None
    assert "ridge_prior" not in heads_to_compare(bundle, eight_samples(task), FitOptions())
    assert b"shared_statistics" not in (bundle.folder / "manifest.json").read_bytes()


@pytest.mark.parametrize("array", ["gram", "sums", "shares"])
def test_statistics_of_another_encoder_are_refused(exported, tmp_path, array):
    _, path = exported
    known = decode(open_bundle(path).read("shared_statistics.safetensors"))
    bundle = install(changed(path, tmp_path / "b.hwb", {**known, array: known[array][:-1]}), tmp_path / "bundles")
    with pytest.raises(BundleDamaged, match="shared statistics have"):
        bundle.shared_statistics()


def test_statistics_that_are_not_finite_are_refused(exported, tmp_path):
    _, path = exported
    known = {
        name: np.array(array) for name, array in decode(open_bundle(path).read("shared_statistics.safetensors")).items()
    }
    known["gram"][0] = np.nan
    bundle = install(changed(path, tmp_path / "b.hwb", known), tmp_path / "bundles")
    with pytest.raises(BundleDamaged, match="'gram' holds NaN or infinity"):
        bundle.shared_statistics()


@pytest.mark.parametrize("shares", [[0.5, -0.1, 0.5], [0, 0, 0], [0.5, 0.5, 0.5], [1e-30, 0, 0]])
def test_shares_that_no_samples_have_are_refused(exported, tmp_path, shares):
    _, path = exported
    known = dict(decode(open_bundle(path).read("shared_statistics.safetensors")))
    known["shares"] = np.array(shares, np.float32)
    bundle = install(changed(path, tmp_path / "b.hwb", known), tmp_path / "bundles")
    with pytest.raises(BundleDamaged, match="shares of classes from"):
        bundle.shared_statistics()


def changed(path, out, known):
    """A bundle like the one at ``path`` with other statistics; None: with none."""
    opened = open_bundle(path)
    fields = json.loads(opened.manifest.model_dump_json())
    files = {name: opened.read(name) for name in opened.manifest.files}
    fields["variants"] = {precision: variant["file"] for precision, variant in fields["variants"].items()}
    del fields["files"]
    if known is None:
        del files["shared_statistics.safetensors"]
        fields["shared_statistics"] = None
    else:
        files["shared_statistics.safetensors"] = encode(known)
    pack(out, fields, files)
    return out
