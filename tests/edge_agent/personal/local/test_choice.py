from __future__ import annotations

import itertools

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.core.errors import HeadwaterError, TrainingFailed
from edge_agent.core.task import ImageInput
from edge_agent.data import Samples
from edge_agent.heads import FitData
from edge_agent.heads._time import time_limit
from edge_agent.personal.choice import MOST_ROWS, Trial, candidates, choose, thin_out
from edge_agent.personal.local.validation import folds


def problem(count=120, spread=1.0, seed=0):
    """Three classes, of which the last two lie on a ring around the first: no straight line separates them."""
    rng = np.random.default_rng(seed)
    labels = np.tile([0, 1, 2], count // 3)
    angle = rng.random(count) * np.pi + (labels == 2) * np.pi
    radius = np.where(labels == 0, 0.0, 4.0)
    features = np.stack([radius * np.cos(angle), radius * np.sin(angle), rng.normal(size=count)], axis=1)
    return (features + spread * 0.4 * rng.normal(size=features.shape)).astype(np.float32), labels


def divided(labels, count=5):
    spec = ImageInput(channels=1, height=4, width=4)
    empty = Samples(np.zeros((len(labels), *spec.shape), np.float32), labels, ("a", "b", "c"), spec)
    return folds(empty, count, np.random.default_rng(0))


def fitting(features, labels, calls=None):
    def fit(name, rows):
        if calls is not None:
            calls.append(name)
        head = heads.create(name)
        head.fit(FitData(features[rows], labels[rows], 3), np.random.default_rng(0))
        return head

    return fit


def test_the_head_that_answers_best_on_samples_it_has_not_seen_is_chosen():
    features, labels = problem()
    choice = choose(["prototype", "ridge", "knn"], fitting(features, labels), features, labels, divided(labels))
    assert choice.name == "knn"
    assert choice.trials[0].name == "knn"
    # A twin without racing: plain 5-fold cross-validation.
    right = []
    for fold in divided(labels):
        head = fitting(features, labels)("knn", fold.train)
        right.append(head.predict_proba(features[fold.test]).argmax(axis=1) == labels[fold.test])
    assert choice.trials[0].accuracy == pytest.approx(np.concatenate(right).mean())
    row = choice.trials[0].as_json()
    assert row["low"] < row["accuracy"] < row["high"]
    assert row["spread"] == pytest.approx(np.std([part.mean() for part in right]))


def test_a_head_that_is_worse_beyond_noise_is_not_tried_further():
    features, labels = problem()
    calls = []
    choice = choose(["ridge", "knn"], fitting(features, labels, calls), features, labels, divided(labels))
    assert calls.count("knn") == 5
    assert calls.count("ridge") < 5
    assert "worse than knn after" in next(trial for trial in choice.trials if trial.name == "ridge").dropped


def test_what_there_is_no_time_for_is_dropped_and_one_head_is_always_left():
    features, labels = problem(spread=0.0)
    seconds = itertools.count(0, 2)
    choice = choose(
        ["prototype", "knn"],
        fitting(features, labels),
        features,
        labels,
        divided(labels),
        budget_s=5,
        clock=lambda: next(seconds),
    )
    assert choice.trials[0].name == choice.name
    assert len(choice.trials[0].right) >= 1
    assert all("no time for more than" in trial.dropped for trial in choice.trials[1:])


def test_a_head_that_cannot_be_fitted_is_reported_and_the_others_go_on():
    features, labels = problem()
    choice = choose(
        ["shared_classifier", "no-such-head", "knn"], fitting(features, labels), features, labels, divided(labels)
    )
    assert choice.name == "knn"
    dropped = {trial.name: trial.dropped for trial in choice.trials}
    assert "no shared classifier" in dropped["shared_classifier"]
    assert "unknown head" in dropped["no-such-head"]


def test_a_head_whose_answers_are_no_numbers_is_not_the_best():
    features, labels = problem()
    fit = fitting(features, labels)

    def fit_with_nan(name, rows):
        head = fit("knn", rows)
        if name == "broken":
            right_answers = head.predict_proba
            head.predict_proba = lambda rows: np.nan * right_answers(rows)
        return head

    choice = choose(["broken", "knn"], fit_with_nan, features, labels, divided(labels))
    assert choice.name == "knn"
    assert choice.trials[1].dropped == "its answers hold NaN or infinity"


def test_one_sample_of_each_class_takes_the_first_head_that_can_be_fitted():
    features, labels = problem(3)
    choice = choose(
        ["shared_classifier", "prototype", "lr"], fitting(features, labels), features, labels, divided(labels)
    )
    assert choice.name == "prototype"
    assert "too few samples" in choice.why
    with pytest.raises(HeadwaterError, match="no shared classifier"):
        choose(["shared_classifier"], fitting(features, labels), features, labels, divided(labels))


class Answers:
    """A head that is right on the rows of a given set, and gives the class that it answers this share."""

    def __init__(self, right, labels, share=1.0):
        self._right = right
        self._labels = labels
        self._share = share

    def predict_proba(self, rows):
        rows = rows[:, 0].astype(int)
        told = np.where(np.isin(rows, self._right), self._labels[rows], (self._labels[rows] + 1) % 3)
        return np.where(np.eye(3)[told] == 1, self._share, (1 - self._share) / 2)


def suggested(features, labels, params):
    """Fits as a bundle suggests it that offers heads with these parameters."""

    def fit(name, rows):
        head = heads.create(name, params.get(name))
        head.fit(FitData(features[rows], labels[rows], 3), np.random.default_rng(0))
        return head

    return fit


@pytest.mark.parametrize(
    "name, params",
    [
        ("mlp", {"epochs": 10_000, "hidden": 64}),
        ("dualfed", {"epochs": 10_000}),
        ("fedrir_global", {"epochs": 10_000, "batch_size": 1}),
        ("svm", {"max_iterations": 100_000, "tolerance": 1e-300, "c": 1e6, "feature_norm": "none"}),
    ],
)
def test_parameters_of_a_bundle_that_take_hours_cost_a_device_seconds(name, params):
    """The clock of this device advances by 0.5 s with every look at it, so with every step of a fit.

    Features of such different units cost a convex solver 900 steps and more, by whichever BLAS kernel; without them it
    is at the last bit after 30 to 70, and how the CPU rounds would decide whether the 60 steps are enough.
    """
    features, labels = problem()
    features = features * np.array([1.0, 1e-2, 1e-4], np.float32)
    now = itertools.count()
    choice = choose(
        [name, "knn"],
        suggested(features, labels, {name: params}),
        features,
        labels,
        divided(labels),
        clock=lambda: 0.5 * next(now),
    )
    (slow,) = [trial for trial in choice.trials if trial.name == name]
    assert slow.dropped == "not fitted within 30 s; lower its epochs, iterations or sizes"
    assert choice.name == "knn"
    assert next(now) < 150, "60 steps of the slow head, and what the folds of the other take"


def test_without_folds_a_head_that_takes_hours_is_given_up_as_well():
    features, labels = problem(3)
    fit = suggested(features, labels, {"mlp": {"epochs": 10_000}})
    now = itertools.count()
    choice = choose(["mlp", "prototype"], fit, features, labels, [], clock=lambda: 0.5 * next(now))
    assert choice.name == "prototype"
    assert "not fitted within 30 s" in choice.trials[0].dropped


def test_a_fit_in_a_child_process_gets_the_time_that_is_left():
    features, labels = problem()
    with time_limit(0.0, lambda: 0.0), pytest.raises(TrainingFailed, match="not fitted within 0 s"):
        suggested(features, labels, {"svm": {"kernel": "rbf", "timeout_s": 1e9}})("svm", np.arange(len(labels)))


def scripted(right_of, cost=None, count=150):
    """A choice among heads that are right on given rows, each fit taking ``cost`` seconds."""
    features = np.arange(count, dtype=np.float32)[:, None]
    labels = np.arange(count) % 3
    now = [0.0]

    def fit(name, rows):
        now[0] += (cost or {}).get(name, 0.0)
        return Answers(right_of[name], labels)

    return choose(list(right_of), fit, features, labels, divided(labels), clock=lambda: now[0])


def test_of_equally_accurate_heads_the_one_that_knows_where_it_errs_is_taken():
    """Both are wrong on the same 30 of 150; one is as sure there as elsewhere, the other gives 0.4 of 1 there."""
    features = np.arange(150, dtype=np.float32)[:, None]
    labels = np.arange(150) % 3

    class Careful(Answers):
        def predict_proba(self, rows):
            is_sure = np.isin(rows[:, :1].astype(int), self._right)
            careful = Answers(self._right, self._labels, 0.4).predict_proba(rows)
            return np.where(is_sure, super().predict_proba(rows), careful)

    kinds = {"sure": Answers, "careful": Careful}
    choice = choose(
        ["sure", "careful"], lambda name, _: kinds[name](range(120), labels, 0.9), features, labels, divided(labels)
    )
    assert choice.name == "careful"
    rows = {trial.name: trial.as_json() for trial in choice.trials}
    assert rows["sure"]["accuracy"] == rows["careful"]["accuracy"] == 0.8
    # By hand: 120 answers of 0.9, and 30 where the right class has (1 - 0.9) / 2 or (1 - 0.4) / 2; a temperature helps.
    plain = {
        name: -(0.8 * np.log(0.9) + 0.2 * np.log((1 - share) / 2)) for name, share in (("sure", 0.9), ("careful", 0.4))
    }
    for name, loss in plain.items():
        assert rows[name]["log_loss"] < loss + 1e-4
    # The best temperature of 'sure' gives its answers the share of right ones, 0.8: entropy and a coin for the rest.
    assert rows["sure"]["log_loss"] == pytest.approx(-(0.8 * np.log(0.8) + 0.2 * np.log(0.1)), abs=0.01)


def test_a_surer_head_that_is_less_accurate_beyond_noise_is_not_surer():
    """Where they differ 'first' is right on 8 and 'second' on none, p = 2 / 2^8; 'near' lacks one."""
    right = {"first": np.arange(100) < 80, "second": np.arange(100) < 72, "near": np.arange(100) < 79}
    trials = {
        name: Trial(name, [rows], [np.full((100, 1), loss)])
        for (name, rows), loss in zip(right.items(), (0.6, 0.5, 0.5), strict=True)
    }
    assert trials["near"].is_surer_than(trials["first"])
    assert not trials["first"].is_surer_than(trials["near"])
    assert not trials["second"].is_surer_than(trials["first"])
    assert not Trial("none").is_surer_than(trials["first"])


def test_of_the_same_answers_the_simplest_head_is_taken():
    right = list(range(120))
    assert scripted({"simple": right, "costly": right}).name == "simple"
    assert scripted({"simple": right, "better": list(range(123))}).name == "better"


def test_a_slow_head_is_taken_only_where_it_is_better_beyond_noise_on_what_it_was_tried_on():
    fast = list(range(0, 150, 2))
    costs = {"slow": 3.0}
    much = scripted({"fast": fast, "slow": list(range(150))}, costs)
    assert much.name == "slow"
    assert len(much.trials[0].right) < 5
    first = divided(np.arange(150) % 3)[0].test.tolist()
    one_more = sorted({*fast, next(row for row in first if row % 2)})
    assert scripted({"fast": fast, "slow": one_more}, costs).name == "fast", "one answer of thirty is noise"
    hardly = scripted({"fast": fast, "slow": fast}, costs)
    assert hardly.name == "fast"
    assert "no time for more than 1 of 5 folds" in hardly.trials[1].dropped


def test_slow_heads_of_different_numbers_of_folds_are_compared_on_what_both_were_tried_on():
    """On the first fold, of 30, 14 answers of 'fast', 18 of 'one' and 17 of 'two' are right, elsewhere all."""
    first = divided(np.arange(150) % 3)[0].test
    rest = np.setdiff1d(np.arange(150), first)
    rights = {"fast": first[:14], "one": first[:18], "two": first[13:]}
    rights = {name: [*right, *rest] for name, right in rights.items()}
    choice = scripted(rights, {"fast": 0.01, "one": 2.0, "two": 0.7})
    assert {trial.name: len(trial.right) for trial in choice.trials} == {"fast": 5, "one": 1, "two": 2}
    assert choice.name == "one"


def test_many_samples_are_thinned_and_few_are_not():
    labels = np.arange(5000) % 3
    parts = thin_out(labels, divided(labels), np.random.default_rng(0))
    assert sum(len(part.test) for part in parts) == MOST_ROWS
    assert all(not np.isin(part.train, part.test).any() for part in parts)
    few = divided(labels[:100])
    assert thin_out(labels[:100], few, np.random.default_rng(0)) == few


def test_baselines_are_tried_before_the_bundles_own_heads():
    assert candidates(("fedpac",), has_shared=False) == ("prototype", "ridge", "lr", "svm", "knn", "fedpac")
    names = candidates(("fedpac", "lr", "svm"), has_shared=True)
    assert names[-1] == "fedpac"
    assert len(set(names)) == len(names)
    assert set(names) <= set(heads.names())
