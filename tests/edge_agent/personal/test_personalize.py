from __future__ import annotations

import functools
import inspect
import itertools
import json
import stat
import time

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.bundle import installed
from edge_agent.core.errors import BundleDamaged, FingerprintMismatch, UnknownName
from edge_agent.data import Samples, load, split
from edge_agent.heads import FitData
from edge_agent.personal import personalize as module
from edge_agent.personal.choice import BASELINES, choose
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.fitting import FitOptions
from edge_agent.personal.personalize import evaluate_heads, extract, load_head, personalize
from edge_agent.personal.personalizer import load_bundle


@pytest.fixture
def ready(make_bundle, tmp_path):
    made = make_bundle(dim=48, global_head=True, int8=True)
    bundle = installed.install(made.path, tmp_path / "bundles")
    task = bundle.manifest.task
    return made, bundle, Encoder.open(bundle, "fp32"), load("digits?n=300", task.input, task.class_names)


def test_scores_are_those_that_scikit_learn_and_plain_numpy_get(ready):
    """The same split, the features worked out by a matrix product, the heads by scikit-learn."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    made, bundle, encoder, samples = ready
    result = personalize(bundle, samples, encoder, FitOptions(params={"feature_norm": "none"}, seed=3))
    train, test = split(samples, 0.25, 3)
    assert (result.n_train, result.n_test) == (len(train), len(test))
    # c = 0.5 is what the bundle's manifest suggests.
    personal = LogisticRegression(C=0.5, max_iter=5000).fit(made.features(train.inputs), train.labels)
    expected = personal.score(made.features(test.inputs), test.labels)
    assert result.scores.personal == pytest.approx(expected, abs=1.01 / len(test))
    shared = bundle.global_head()
    logits = made.features(test.inputs) @ shared["weight"].T + shared["bias"]
    assert result.scores.overall == pytest.approx((logits.argmax(axis=1) == test.labels).mean())
    raw = [part.inputs.reshape(len(part), -1) for part in (train, test)]
    spread = raw[0].std(axis=0)
    spread = np.maximum(spread, 0.01 * np.sqrt((spread**2).mean()))  # pixels at the edge are nearly constant
    local = KNeighborsClassifier(5, weights="distance").fit(raw[0] / spread, train.labels)
    assert result.scores.local == pytest.approx(local.score(raw[1] / spread, test.labels), abs=1.01 / len(test))
    assert result.scores.local_model == "raw inputs + knn"
    assert result.scores.personal > 0.8


def test_other_load_on_the_machine_takes_no_time_from_the_comparison_of_heads(ready, monkeypatch):
    """The comparison has its own clock, of this process alone; here it stands still, however slow the CPU is."""
    assert inspect.signature(choose).parameters["clock"].default is time.process_time
    monkeypatch.setattr("edge_agent.personal.fitting.choose", functools.partial(choose, clock=lambda: 0.0))
    _, bundle, encoder, samples = ready
    hours = itertools.count(0, 3600)
    result = personalize(bundle, samples, encoder, FitOptions("auto", local=False, clock=lambda: next(hours)))
    assert result.choice is not None
    assert not [trial.name for trial in result.choice.trials if "no time" in trial.dropped]


def test_metrics_carry_their_scope_and_are_shares(ready):
    _, bundle, encoder, samples = ready
    times = iter([10.0, *[11.0] * 6, 12.5])
    result = personalize(bundle, samples, encoder, FitOptions(clock=lambda: next(times)))
    metrics = result.metrics()
    assert {"acc.personal", "acc.global", "acc.local", "n_train", "n_test", "seconds", "head"} <= metrics.keys()
    assert all(0 <= metrics[name] <= 1 for name in ("acc.personal", "acc.global", "acc.local"))
    assert metrics["seconds"] == 2.5
    assert (metrics["head"], metrics["exactness"], metrics["precision"]) == ("lr", "exact", "fp32")
    json.dumps(metrics, allow_nan=False)


def test_the_same_seed_gives_the_same_head(ready):
    _, bundle, encoder, samples = ready
    one, two, three = (personalize(bundle, samples, encoder, FitOptions("mlp", seed=seed)) for seed in (1, 1, 2))
    assert all((one.head.arrays[name] == two.head.arrays[name]).all() for name in one.head.arrays)
    assert (one.head.arrays["weight0"] != three.head.arrays["weight0"]).any()


def test_without_a_shared_classifier_there_is_no_global_score(make_bundle, tmp_path):
    bundle = installed.install(make_bundle().path, tmp_path / "bundles")
    samples = load("digits?n=60", bundle.manifest.task.input)
    assert personalize(bundle, samples, Encoder.open(bundle, "fp32")).scores.overall is None


def test_too_few_samples_to_hold_back_give_a_head_without_scores(ready):
    _, bundle, encoder, samples = ready
    one_each = samples.take(np.array([np.flatnonzero(samples.labels == label)[0] for label in range(10)]))
    result = personalize(bundle, one_each, encoder)
    assert result.scores.accuracies() == {"acc.personal": None, "acc.global": None, "acc.local": None}
    assert (result.n_train, result.n_test) == (10, 0)


def test_features_are_computed_once_and_again_only_when_something_changed(ready, tmp_path, monkeypatch):
    _, bundle, encoder, samples = ready
    runs: list[int] = []
    real = Encoder.features
    monkeypatch.setattr(
        Encoder, "features", lambda self, inputs, *rest: runs.append(len(inputs)) or real(self, inputs, *rest)
    )
    first = personalize(bundle, samples, encoder, FitOptions(cache=tmp_path / "c"))
    second = personalize(bundle, samples, encoder, FitOptions("prototype", cache=tmp_path / "c"))
    assert runs == [first.n_train, first.n_test]
    assert second.n_train == first.n_train
    changed = Samples(samples.inputs + np.float32(0.1), samples.labels, samples.class_names, samples.input)
    personalize(bundle, changed, encoder, FitOptions(cache=tmp_path / "c"))
    assert len(runs) == 4


def test_only_new_samples_pass_the_encoder(ready, tmp_path, monkeypatch):
    _, _, encoder, samples = ready
    runs: list[int] = []
    real = Encoder.features
    monkeypatch.setattr(
        Encoder, "features", lambda self, inputs, *rest: runs.append(len(inputs)) or real(self, inputs, *rest)
    )
    module.features_of(samples.take(np.arange(40)), encoder, tmp_path)
    module.features_of(samples.take(np.arange(60, 80)), encoder, tmp_path)
    more = samples.take(np.array([70, 3, 100, 101, 39]))
    result = module.features_of(more, encoder, tmp_path)
    assert runs == [40, 20, 2]
    np.testing.assert_allclose(result, real(encoder, more.inputs), atol=1e-5)


def test_cache_that_people_share_stays_theirs_and_features_in_it_are_private(ready, make_bundle, tmp_path):
    """A refused bundle already took the group's rights to the folder away."""
    _, _, encoder, samples = ready
    cache = tmp_path / "of the lab"
    cache.mkdir()
    cache.chmod(0o2775)
    (tmp_path / "x.hwb").write_bytes(b"no bundle")
    with pytest.raises(BundleDamaged):
        load_bundle(tmp_path / "x.hwb", cache)
    load_bundle(make_bundle("y.hwb").path, cache)
    module.features_of(samples, encoder, cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o2775
    assert [stat.S_IMODE(path.stat().st_mode) for path in cache.glob("features-*")] == [0o600]


@pytest.mark.parametrize("damage", [b"", b"junk" * 50])
def test_a_damaged_cache_is_computed_again(ready, tmp_path, damage):
    _, _, encoder, samples = ready
    good = module.features_of(samples, encoder, tmp_path / "c")
    next((tmp_path / "c").iterdir()).write_bytes(damage)
    assert (module.features_of(samples, encoder, tmp_path / "c") == good).all()
    assert (module.features_of(samples, encoder, tmp_path / "c") == good).all()


def test_a_saved_head_belongs_to_its_bundle(ready, make_bundle, tmp_path):
    _, bundle, encoder, samples = ready
    personalize(bundle, samples, encoder).save(tmp_path / "head")
    assert load_head(tmp_path / "head", bundle).head.name == "lr"
    assert load_head(tmp_path / "head", bundle, "fp32").metrics["head"] == "lr"
    with pytest.raises(FingerprintMismatch):
        load_head(tmp_path / "head", bundle, "int8")
    other = installed.install(make_bundle("other.hwb", seed=1).path, tmp_path / "others")
    with pytest.raises(FingerprintMismatch):
        load_head(tmp_path / "head", other)


def renamed(samples, names):
    """The samples of the first classes, which are called ``names`` now."""
    rows = samples.take(np.flatnonzero(samples.labels < len(names)))
    return Samples(rows.inputs, rows.labels, names, rows.input)


def test_a_head_may_have_classes_that_the_bundle_does_not_know(ready, tmp_path):
    """The numbers are those of the same samples under the bundle's names, but for the shared classifier's."""
    _, bundle, encoder, samples = ready
    names = ("cat", "dog", "tree")
    own = personalize(bundle, renamed(samples, names), encoder)
    known = personalize(bundle, renamed(samples, samples.class_names[:3]), encoder)
    assert own.scores.personal == known.scores.personal > 0.9
    assert own.scores.local == known.scores.local
    assert own.scores.overall is None
    assert own.metrics()["no_global"] == "the bundle's shared classifier does not know cat, dog, tree"
    own.save(tmp_path)
    again = load_head(tmp_path, bundle)
    assert again.class_names == names
    rows = encoder.features(samples.inputs)
    np.testing.assert_allclose(again.head.predict_proba(rows), own.head.predict_proba(rows), atol=1e-12)


@pytest.mark.parametrize("head", ["dualfed", "fedpac", "fedpick", "knn", "lr", "prototype"])
def test_heads_work_without_the_shared_classifier_where_it_does_not_know_the_classes(ready, head):
    """A shared classifier of other classes takes no part: heads are those of a bundle without one."""
    _, bundle, encoder, samples = ready
    own = renamed(samples, ("cat", "dog", "tree"))
    features = encoder.features(own.inputs)
    fitted = module.fit(bundle, features, own.labels, FitOptions(head), own.class_names)
    alone = heads.create(head, {"c": 0.5} if head == "lr" else None)  # as the bundle suggests
    alone.fit(FitData(features, own.labels, 3), np.random.default_rng(0))
    np.testing.assert_array_equal(fitted.predict_proba(features), alone.predict_proba(features))
    result = personalize(bundle, own, encoder, FitOptions(head))
    assert result.exactness == ("exact" if head == "lr" else "approximate")


def test_heads_are_compared_best_first_and_failures_explained(ready, monkeypatch):
    _, bundle, encoder, samples = ready
    results, failed = evaluate_heads(extract(bundle, samples, encoder))
    assert {result.head.name for result in results} == {*BASELINES, "blend"}
    scores = [result.scores.personal for result in results]
    assert scores == sorted(scores, reverse=True)
    assert failed == {}
    results, failed = evaluate_heads(extract(bundle, samples, encoder), ["prototype", "lrr"])
    assert [result.head.name for result in results] == ["prototype"]
    assert "'lr'" in failed["lrr"]


def test_an_unknown_head_is_named(ready):
    _, bundle, encoder, samples = ready
    with pytest.raises(UnknownName):
        personalize(bundle, samples, encoder, FitOptions("lrr"))
