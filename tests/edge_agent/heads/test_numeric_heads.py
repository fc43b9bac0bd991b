"""Heads that answer with a number, compared with scikit-learn, and the commands and files around them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from edge_agent import Personalizer, heads
from edge_agent.cli import main
from edge_agent.core.errors import ConfigError, DataError, StateError, UnknownName, UsageError
from edge_agent.heads import numeric, saved
from edge_agent.heads.numeric import NumericData
from edge_agent.heads.numeric.mahalanobis import distances, gaussian
from edge_agent.heads.saved import SavedNumeric
from edge_agent.personal.numeric import auroc


def parts(count, folds=5):
    rows = np.arange(count)
    return [(rows[rows % folds != number], rows[rows % folds == number]) for number in range(folds)]


def drawn(count=200, size=12, seed=0, scale=None):
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(count, size)) @ np.random.default_rng(99).normal(size=(size, size))
    return (mixed * (1 if scale is None else scale)).astype(np.float32)


@pytest.mark.parametrize("count, size", [(200, 12), (15, 40)])
def test_distances_are_those_of_scikit_learns_shrunk_covariance(count, size):
    covariance = pytest.importorskip("sklearn.covariance")
    features = drawn(count, size)
    others = drawn(30, size, seed=1)
    known = gaussian(features)
    oracle = covariance.LedoitWolf().fit(features.astype(np.float64))
    expected = oracle.mahalanobis(others.astype(np.float64))
    np.testing.assert_allclose(distances(others, known) ** 2 * size, expected, rtol=1e-6)


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_the_rate_of_false_alarms_is_the_one_asked_for(rate):
    """Mean of 40 draws of 60 normal samples, skewed ones; a little below, as fits on 48 samples set the threshold."""
    reached = []
    for seed in range(40):
        head = numeric.create("mahalanobis", {"false_alarms": rate})
        head.fit(NumericData(np.abs(drawn(60, 6, seed)), None, parts(60)))
        reached.append(float((head.predict(np.abs(drawn(500, 6, seed + 1000))) > head.threshold).mean()))
    assert rate - 0.04 < np.mean(reached) < rate + 0.015


def test_a_feature_that_fires_in_one_normal_sample_does_not_decide():
    """Rectified features often do: on digits they made normal samples 60 times as far away as others."""
    features = np.abs(drawn(60, 6))
    new = np.abs(drawn(60, 6, seed=1))
    quiet = np.zeros((60, 1), np.float32)
    once = quiet.copy()
    again = quiet.copy()
    once[3] = 0.01
    again[5] = 0.3
    head = numeric.create("mahalanobis")
    head.fit(NumericData(np.hstack([features, once]), None, parts(60)))
    scores = head.predict(np.hstack([new, again]))
    assert scores[5] < 2 * np.median(scores)


def test_too_few_normal_samples_give_scores_without_a_threshold():
    """19 samples are the fewest for one false alarm of twenty: 1 / 0.05 - 1."""
    for count, known in ((18, False), (19, True)):
        head = numeric.create("mahalanobis")
        head.fit(NumericData(drawn(count, 4), None, parts(count)))
        assert (head.threshold is not None) is known
        assert head.predict(drawn(3, 4)).shape == (3,)


def test_numbers_are_predicted_as_scikit_learns_ridge_does():
    linear = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(1)
    features = drawn(120, 10)
    targets = features @ rng.normal(size=10) * 3 + 1000 + rng.normal(size=120)
    head = numeric.create("ridge_regression")
    head.fit(NumericData(features, targets))
    rows = (features - features.mean(axis=0)) / features.std(axis=0)
    oracle = linear.RidgeCV(np.logspace(-3, 4, 15)).fit(rows, (targets - targets.mean()) / targets.std())
    expected = oracle.predict(rows) * targets.std() + targets.mean()
    np.testing.assert_allclose(head.predict(features), expected, rtol=1e-5)
    assert np.sqrt(np.mean((head.predict(features) - targets) ** 2)) < 1.2  # the noise has 1


def test_the_area_under_the_curve_is_scikit_learns():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    low = rng.integers(0, 20, 50) / 4
    high = rng.integers(5, 30, 40) / 4
    expected = metrics.roc_auc_score(np.repeat([0, 1], [50, 40]), np.concatenate([low, high]))
    assert auroc(low, high) == pytest.approx(expected)
    assert auroc(np.empty(0), high) is None


@pytest.mark.parametrize("name", numeric.names())
def test_a_saved_head_answers_the_same_and_is_checked(tmp_path, name):
    features = drawn(40, 5)
    head = numeric.create(name)
    head.fit(NumericData(features, np.arange(40.0), parts(40)))
    saved.save_numeric(tmp_path, SavedNumeric(head, "0" * 64, "fp32", {"n_train": 40}))
    assert saved.is_numeric(tmp_path)
    again = saved.load_numeric(tmp_path, {"fp32": "0" * 64}).head
    np.testing.assert_array_equal(again.predict(features), head.predict(features))
    assert again.threshold == head.threshold
    with pytest.raises(StateError, match="answers with numbers, expected classes"):
        saved.load(tmp_path)
    with pytest.raises(StateError, match=r"features \(2, 3\)"):
        again.predict(np.zeros((2, 3), np.float32))
    card = json.loads((tmp_path / "head.json").read_text())
    (tmp_path / "head.json").write_text(json.dumps({**card, "feature_dim": 4}))
    with pytest.raises(StateError, match="the arrays do not fit head"):
        saved.load_numeric(tmp_path)


@pytest.mark.parametrize("name", numeric.names())
def test_what_cannot_be_learned_from_is_refused(name):
    with pytest.raises(StateError, match="has not been fitted"):
        numeric.create(name).predict(np.zeros((1, 2), np.float32))
    with pytest.raises(DataError, match="1 samples to fit a head on; expected at least two"):
        NumericData(np.zeros((1, 2), np.float32))
    for features, targets in ((np.full((3, 2), np.nan), np.zeros(3)), (np.zeros((3, 2)), np.array([0, np.inf, 1]))):
        with pytest.raises(DataError, match="NaN or infinity"):
            NumericData(features, targets)
    with pytest.raises(ConfigError, match="nope"):
        numeric.create(name, {"nope": 1})
    with pytest.raises(UnknownName, match="did you mean"):
        numeric.create(name[:-1])
    with pytest.raises(DataError, match="all samples have the same features"):
        gaussian(np.ones((4, 3), np.float32))


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(make_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    make_bundle(dim=32)
    return tmp_path


def answer(capsys, *words, code=0):
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def photos(folder, count, dark, bright, seed=0):
    """Photos of 8 x 8 whose left half has one brightness and whose right half has another."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = np.concatenate([rng.normal(dark, 8, (8, 4, 3)), rng.normal(bright, 8, (8, 4, 3))], axis=1)
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{number}.png")


def test_a_number_is_learned_and_predicted(place, capsys):
    """The target is the brightness of an image; the encoder's features are rectified linear ones."""
    rng = np.random.default_rng(0)
    light = rng.uniform(40, 200, 120)
    inputs = np.clip(rng.normal(light[:, None, None, None], 10, (120, 8, 8, 3)), 0, 255).astype(np.uint8)
    np.savez("x.npz", inputs=inputs, labels=light / 10)
    fit = ("fit", "--bundle", "b.hwb", "--data", "npz:x.npz", "--head", "ridge_regression", "--out", "h")
    found = answer(capsys, *fit)
    assert (found["n_train"], found["n_test"], found["threshold"]) == (90, 30, None)
    assert found["rmse.mean"] == pytest.approx(160 / 10 / np.sqrt(12), rel=0.15)  # of a uniform distribution
    assert found["rmse.personal"] < 0.15 * found["rmse.mean"]
    assert found["r2.personal"] > 0.97
    assert found["mae.personal"] <= found["rmse.personal"]
    assert found["rmse.local"] > 0
    scored = answer(capsys, "evaluate", "--bundle", "b.hwb", "--data", "npz:x.npz", "--head", "h")
    names = [name for name in found if name.startswith(("rmse", "mae", "r2"))]
    assert {name: scored[name] for name in names} == {name: found[name] for name in names}
    rows = answer(capsys, "predict", "--bundle", "b.hwb", "--data", "npz:x.npz", "--head", "h")["predictions"]
    assert np.mean(np.abs([row["value"] for row in rows] - light / 10)) < 0.6
    assert main(fit) == 0
    assert "rmse.mean" in capsys.readouterr().out
    np.savez("noise.npz", inputs=inputs, labels=rng.normal(size=120))
    assert main(["evaluate", "--bundle", "b.hwb", "--data", "npz:noise.npz", "--head", "h"]) == 0
    assert "no better than always answering the mean" in capsys.readouterr().out


def test_anomalies_are_told_apart_without_examples_of_them(place, capsys):
    photos(place / "p" / "normal", 80, 60, 160)
    photos(place / "p" / "broken", 20, 160, 60)
    photos(place / "flat", 60, 60, 160, seed=1)
    fit = ("fit", "--bundle", "b.hwb", "--data", "images:p", "--head", "mahalanobis", "--out", "h")
    found = answer(capsys, *fit)
    assert (found["auroc"], found["n_train"]) == (1, 60), "of 100 photos three quarters train, 60 of them normal"
    assert found["detected"] == 1
    assert found["false_alarms"] <= 0.25
    predict = ("predict", "--bundle", "b.hwb", "--head", "h", "--input")
    assert answer(capsys, *predict, "p/broken/1.png")["predictions"][0]["anomaly"] is True
    rows = answer(capsys, *predict[:-1], "--data", "images:flat")["predictions"]
    assert sum(row["anomaly"] for row in rows) < 0.2 * len(rows)
    unlabelled = answer(capsys, *fit[:4], "images:flat", *fit[5:])
    assert (unlabelled["n_train"], unlabelled["auroc"]) == (45, None)
    assert answer(capsys, *predict, "p/broken/1.png")["predictions"][0]["anomaly"] is True
    assert main([*predict, "flat/1.png"]) == 0
    assert "anomaly" in capsys.readouterr().out
    assert main([*fit, "--param", "false_alarms=0.001"]) == 0
    assert "no threshold: fewer than 999 normal samples, which 0.1 % false alarms need" in capsys.readouterr().out
    assert answer(capsys, *predict, "flat/1.png")["predictions"][0]["anomaly"] is None


@pytest.mark.parametrize(
    "given, words",
    [
        (("--head", "ridge_regression", "--data", "images:p"), "predicts numbers, and the data name none; give csv:"),
        (
            ("--head", "mahalanobis", "--param", "normal=good", "--data", "images:p"),
            "no class 'good' among broken, norm",
        ),
        (("--head", "mahalanobis", "--param", "false_alarms=2", "--data", "images:p"), "false_alarms = 2"),
        (("--head", "ridge_regresion", "--data", "images:p"), "unknown head 'ridge_regresion'"),
    ],
)
def test_mistakes_are_messages(place, capsys, given, words):
    photos(place / "p" / "normal", 3, 60, 160)
    photos(place / "p" / "broken", 3, 160, 60)
    assert main(["fit", "--bundle", "b.hwb", "--out", "h", *given]) == 2
    assert words in capsys.readouterr().err


def test_agents_and_comparisons_say_that_they_use_other_heads(place, capsys):
    with pytest.raises(UsageError, match="answers with numbers and not with classes"):
        heads.create("mahalanobis")
    assert main(["evaluate", "--bundle", "b.hwb", "--data", "digits?n=20", "--heads", "lr,mahalanobis"]) == 2
    assert "answers with numbers" in capsys.readouterr().err


def test_numeric_heads_from_python(place):
    rng = np.random.default_rng(0)
    light = rng.uniform(40, 200, 60)
    inputs = np.clip(rng.normal(light[:, None, None, None], 10, (60, 8, 8, 3)), 0, 255).astype(np.uint8)
    opened = Personalizer.open(place / "b.hwb")
    opened.fit(inputs[:40], light[:40], head="ridge_regression")
    scores = opened.evaluate(inputs[40:], light[40:])
    errors = opened.predict(inputs[40:]) - light[40:]
    assert scores["rmse.personal"] == pytest.approx(np.sqrt(np.mean(errors**2)))
    opened.save(place / "h")
    again = Personalizer.open(place / "b.hwb").load(place / "h")
    np.testing.assert_array_equal(again.predict(inputs), opened.predict(inputs))
    with pytest.raises(DataError, match=r"60 inputs, targets \(40,\)"):
        opened.fit(inputs, light[:40], head="ridge_regression")
    with pytest.raises(DataError, match="the data name none"):
        opened.fit(inputs, head="ridge_regression")
    opened.fit(inputs[light < 120], head="mahalanobis")
    assert opened.predict(255 - inputs[:3]).shape == (3,)
    labels = np.where(light < 120, "normal", "bright")
    assert opened.evaluate(inputs, labels)["auroc"] > 0.9
    opened.fit(inputs, np.array(list("0123456789"))[np.arange(60) % 10])
    assert opened.numeric is None
    kept = opened.head
    with pytest.raises(DataError):
        opened.fit(inputs, head="ridge_regression")
    assert opened.head is kept
    opened.fit(inputs, light, head="ridge_regression")
    assert opened.head is None, "it is of no use with the encoder of another fit"
    opened.fit(inputs, np.array(list("0123456789"))[np.arange(60) % 10])
    opened.load(place / "h")
    assert (opened.head, opened.numeric is None) == (None, False)
    opened.fit(inputs, np.array(list("0123456789"))[np.arange(60) % 10])
    with pytest.raises(UsageError, match="y is missing"):
        opened.evaluate(inputs)
