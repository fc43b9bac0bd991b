from __future__ import annotations

import numpy as np
import pytest

from edge_agent import data, heads
from edge_agent.core.task import WindowInput
from edge_agent.data import Samples
from edge_agent.heads import FitData, lr
from edge_agent.personal.local import models
from edge_agent.personal.local.features import convolution_features, learn_convolutions
from edge_agent.personal.local.models import fit_local


def test_hand_made_features_beat_raw_pixels_on_digits_before_photos():
    train, test = data.split(data.load("digits:photo?n=600"), 0.25, seed=0)
    model = fit_local(train, 10, np.random.default_rng(0))
    answers = model.predict_proba(test.ready().inputs).argmax(axis=1)
    assert model.name == "gradients and colours + lr"
    assert (answers == test.labels).mean() > 0.8  # logistic regression on raw pixels has about 0.5
    assert model.cross_validated["gradients and colours + lr"] > model.cross_validated["raw inputs + lr"] + 0.2
    again = fit_local(train, 10, np.random.default_rng(0))
    assert (again.head.arrays["weight"] == model.head.arrays["weight"]).all()


@pytest.mark.parametrize("kind", ["frequency", "level"])
def test_windows_are_told_apart_by_what_statistics_see(kind):
    rng = np.random.default_rng(0)
    labels = np.tile([0, 1], 40)
    time = np.arange(64)
    rate = np.where(labels == 1, 6, 3) if kind == "frequency" else np.full(80, 3)
    phase = rng.random(80)[:, None] * 2 * np.pi
    waves = np.sin(2 * np.pi * rate[:, None] * time / 64 + phase) + 0.5 * rng.standard_normal((80, 64))
    waves += (labels == 1)[:, None] * (1.0 if kind == "level" else 0.0)
    spec = WindowInput(channels=1, length=64, stride=64)
    samples = Samples(waves[:, None].astype(np.float32), labels, ("slow", "fast"), spec)
    model = fit_local(samples, 2, np.random.default_rng(0))
    assert max(model.cross_validated.values()) > 0.95
    assert model.name != "most frequent class"


def test_noise_leaves_the_most_frequent_class():
    rng = np.random.default_rng(3)
    labels = np.repeat([0, 1, 2], [8, 2, 2])
    spec = WindowInput(channels=1, length=16, stride=16)
    samples = Samples(rng.standard_normal((12, 1, 16)).astype(np.float32) * 0, labels, ("a", "b", "c"), spec)
    model = fit_local(samples, 3, rng)
    assert model.name == "most frequent class"
    assert model.predict_proba(samples.inputs).argmax(axis=1).tolist() == [0] * 12


def test_one_sample_is_answered_with_its_class():
    spec = WindowInput(channels=1, length=16, stride=16)
    model = fit_local(
        Samples(np.zeros((1, 1, 16), np.float32), np.array([2]), ("a", "b", "c"), spec), 3, np.random.default_rng(0)
    )
    assert model.predict_proba(np.ones((2, 1, 16), np.float32)).argmax(axis=1).tolist() == [2, 2]
    assert model.cross_validated == {}


def test_few_samples_of_many_features_are_fitted_in_fewer_dimensions_with_the_same_result():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((60, 200)).astype(np.float32)
    labels = np.tile([0, 2, 3], 20)
    features[labels == 2, 0] += 2
    found = heads.create("lr", {"tolerance": 1e-7, "in_span": True})
    found.fit(FitData(features, labels, 4), rng)
    plain = heads.create("lr", {"tolerance": 1e-7})
    plain.fit(FitData(features, labels, 4), rng)
    others = rng.standard_normal((9, 200)).astype(np.float32)
    assert found.predict_proba(others) == pytest.approx(plain.predict_proba(others), abs=1e-4)
    assert found.predict_proba(others)[:, 1].tolist() == [0] * 9


def test_many_samples_are_fitted_in_the_space_of_their_features(monkeypatch):
    """The axes of n samples take time with n cubed: beyond some hundreds the detour costs more than it saves."""
    monkeypatch.setattr(lr, "fit_in_span", lambda *_: pytest.fail("took the detour"))
    rng = np.random.default_rng(0)
    count = lr.MOST_IN_SPAN + 1
    features = rng.normal(size=(count, count + 1)).astype(np.float32)
    head = heads.create("lr", {"in_span": True, "max_iterations": 1})
    head.fit(FitData(features, np.arange(count) % 2, 2), rng)


@pytest.mark.parametrize("count", [10, 84, 200])
def test_thresholds_of_other_kernels_are_refused(count):
    """84 kernels look at windows of 16 values; a file may hold thresholds of fewer or more of them."""
    windows = np.random.default_rng(0).normal(size=(4, 1, 16)).astype(np.float32)
    learned = learn_convolutions(windows, np.random.default_rng(0))
    learned["thresholds"] = np.resize(learned["thresholds"], (count, learned["thresholds"].shape[1]))
    if count == 84:
        assert len(convolution_features(windows, learned)) == 4
        return
    with pytest.raises(ValueError, match="zip"):
        convolution_features(windows, learned)


def test_large_data_are_learned_from_in_part(monkeypatch):
    monkeypatch.setattr(models, "MOST_SAMPLES", 120)
    train = data.load("digits:optdigits?n=400")
    seen = []
    real = models.fitted
    monkeypatch.setattr(models, "fitted", lambda kind, rows, *rest: seen.append(len(rows)) or real(kind, rows, *rest))
    fit_local(train, 10, np.random.default_rng(0))
    assert seen[-1] == max(seen) == 120
