from __future__ import annotations

import functools
import logging
import math

import numpy as np
import pytest
from feature_clouds import clouds

from edge_agent import heads
from edge_agent.core.errors import StateError, TrainingFailed
from edge_agent.heads import FitData, _layers, saved
from edge_agent.heads._features import fisher_score, keep_top
from edge_agent.heads.fedpick import FedPickHeadParams as Params
from edge_agent.heads.fedpick import Trainer, divergence, logistic_noise, negative_entropy, predict_mask, start

RNG = np.random.default_rng
data = functools.partial(clouds, size=8)


def fitted(found: FitData, seed: int = 0, **params):
    head = heads.create("fedpick", {"epochs": 30, "batch_size": 8, **params})
    head.fit(found, RNG(seed))
    return head


# --- training against torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": "soft"}, {"temperature": 0.5}, {"threshold": 0.7}, {"detach_targets": True}, {"weight_decay": 1e-3}],
)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-9), (np.float32, 1e-5)])
def test_mask_and_classifiers_are_torchs_over_twenty_steps(options, shared, dtype, tolerance):
    import torch
    from torch.nn import functional as F

    from edge_agent.training import losses
    from edge_agent.training.networks import feature_mask

    params = Params(
        lr=0.05, relevant_weight=1.2, irrelevant_weight=0.3, distillation_weight=0.8, mask_width=5, **options
    )
    tensors = {name: array.astype(dtype) for name, array in start(8, 3, params, RNG(1)).items()}
    net = torch.nn.ModuleDict({
        "mask": torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.ReLU(), torch.nn.Linear(5, 8)),
        "relevant_head": torch.nn.Linear(8, 3),
        "irrelevant_head": torch.nn.Linear(8, 3),
    }).to(torch.float64 if dtype == np.float64 else torch.float32)  # fmt: skip
    net.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in tensors.items()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5, weight_decay=params.weight_decay)
    trainer = Trainer(tensors, params, 20)
    rng = RNG(2)
    for step in range(20):
        n = 20 if step % 3 else 7
        z = rng.normal(size=(n, 8)).astype(dtype)
        labels = rng.integers(0, 3, n)
        noise = logistic_noise(np.empty((n, 8), np.float32), rng).astype(dtype)
        known = _layers.log_softmax(rng.normal(size=(n, 3)).astype(dtype)) if shared else None
        x = torch.from_numpy(z)
        y = torch.from_numpy(labels)
        b = feature_mask(
            net["mask"](x), torch.from_numpy(noise), temperature=params.temperature, threshold=params.threshold,
            hard=params.mask == "hard",
        )  # fmt: skip
        relevant = net["relevant_head"](x * b)
        rest = net["irrelevant_head"](x * (1 - b))
        value = 1.2 * F.cross_entropy(relevant, y) + 0.3 * losses.negative_entropy(rest)
        if known is not None:
            apart = losses.symmetric_divergence(torch.from_numpy(known), relevant, detach_first=params.detach_targets)
            value = value + 0.8 * apart
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        assert trainer.step(z, labels, known, noise) == pytest.approx(float(value.detach()), abs=tolerance)
    for name, expected in net.state_dict().items():
        np.testing.assert_allclose(tensors[name], expected.numpy(), atol=tolerance, err_msg=name)


def test_noise_is_standard_logistic_and_finite():
    noise = logistic_noise(np.empty((1000, 200), np.float32), RNG(0))
    assert np.isfinite(noise).all()
    # Mean 0, variance pi^2 / 3, P(noise > -s) = sigmoid(s); standard errors of 200,000 draws are below .005.
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.var() == pytest.approx(math.pi**2 / 3, rel=0.02)
    for score in (-2.0, 0.3, 1.5):
        assert (noise > -score).mean() == pytest.approx(1 / (1 + math.exp(-score)), abs=0.006)


def test_entropy_and_divergence_by_hand():
    # .7 ln .7 + .3 ln .3 = -.610864; KL both ways of (.7, .3) and (.5, .5) is .169460.
    logits = np.log(np.float32([[0.7, 0.3]]))
    assert negative_entropy(logits)[0] == pytest.approx(-0.610864, abs=1e-6)
    assert negative_entropy(np.zeros((3, 5), np.float32))[0] == pytest.approx(-math.log(5), abs=1e-6)
    assert divergence(logits, np.log(np.float32([[0.5, 0.5]])), both=True)[0] == pytest.approx(0.169460, abs=1e-6)
    value, error = divergence(logits, logits, both=True)
    assert max(abs(value), np.abs(error).max()) < 1e-6


def test_gradients_of_entropy_and_divergence_are_finite_differences():
    rng = RNG(4)
    logits = rng.normal(size=(3, 4))  # float64 passes through both
    known = _layers.log_softmax(rng.normal(size=(3, 4)))
    for function in (negative_entropy, lambda x: divergence(x, known, both=True)):
        slope = function(logits)[1]
        for place in np.ndindex(3, 4):
            step = np.zeros_like(logits)
            step[place] = 1e-5
            by_hand = (function(logits + step)[0] - function(logits - step)[0]) / 2e-5
            assert slope[place] == pytest.approx(by_hand, abs=1e-8)


@pytest.mark.parametrize(
    "params, expected", [({}, [1, 0, 0]), ({"threshold": 0.57}, [1, 0, 0]), ({"threshold": 0.58}, [0, 0, 0])]
)
def test_the_mask_at_inference_is_the_sign_of_the_logit(params, expected):
    # A mask network that answers (.3, -.2, 0) whatever it sees; sigmoid(.3) = .5744.
    arrays = {
        "mask.0.weight": np.zeros((2, 3), np.float32), "mask.0.bias": np.zeros(2, np.float32),
        "mask.2.weight": np.zeros((3, 2), np.float32), "mask.2.bias": np.float32([0.3, -0.2, 0]),
    }  # fmt: skip
    rows = RNG(0).normal(size=(4, 3)).astype(np.float32)
    assert predict_mask(arrays, rows, Params(**params)).tolist() == [expected] * 4
    soft = predict_mask(arrays, rows, Params(mask="soft", temperature=2.0))
    np.testing.assert_allclose(soft, [[1 / (1 + math.exp(-s / 2)) for s in (0.3, -0.2, 0)]] * 4, atol=1e-6)


# --- head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "params", [{}, {"mask": "soft"}, {"selector": "fisher"}, {"ensemble": "logits"}, {"detach_targets": True}]
)
def test_it_learns(params, shared):
    head = fitted(data(shared=shared), **params)
    unseen = data(1)
    answer = head.predict_proba(unseen.features)
    assert (answer.argmax(axis=1) == unseen.labels).mean() > 0.9
    np.testing.assert_allclose(answer.sum(axis=1), 1, atol=1e-6)


def test_without_ensemble_the_shared_classifier_answers_alone():
    found = data(shared=True)
    logits = found.features.astype(np.float64) @ found.global_head["weight"].T + found.global_head["bias"]
    expected = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        fitted(found, ensemble="none", shared_c=None).predict_proba(found.features), expected, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["probs", "logits"])
def test_the_answer_is_that_of_both_classifiers(kind):
    found = data(shared=True)
    head = fitted(found, ensemble=kind, shared_c=None)
    a = head.arrays
    scores = np.maximum(found.features @ a["mask.0.weight"].T + a["mask.0.bias"], 0) @ a["mask.2.weight"].T
    relevant = (found.features * (scores + a["mask.2.bias"] > 0)) @ a["relevant_head.weight"].T
    logits = [
        relevant + a["relevant_head.bias"],
        found.features @ found.global_head["weight"].T + found.global_head["bias"],
    ]

    def softmax(x):
        grown = np.exp(x - x.max(axis=1, keepdims=True))
        return grown / grown.sum(axis=1, keepdims=True)

    expected = softmax(sum(logits)) if kind == "logits" else sum(map(softmax, logits)) / 2
    np.testing.assert_allclose(head.predict_proba(found.features), expected, atol=1e-5)


def test_a_shared_classifier_of_other_clients_does_not_spoil_the_answer():
    """Others have hardly any class but the first: as it came, distillation and its half of the answer follow it."""
    found = data(shared=True)
    biased = {**found.global_head, "bias": np.where(np.arange(found.num_classes) == 0, 30, 0).astype(np.float32)}
    given = FitData(found.features, found.labels, found.num_classes, biased)
    answers = {c: fitted(given, shared_c=c).predict_proba(found.features).argmax(axis=1) for c in (None, 1)}
    right = {c: (answer == found.labels).mean() for c, answer in answers.items()}
    assert right[1] > right[None] + 0.2


def test_a_fisher_mask_is_the_top_share_with_scikit_learns_regression():
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    found = data()
    head = fitted(found, selector="fisher", keep_ratio=0.5)
    kept = keep_top(fisher_score(found.features, found.labels), 0.5)
    assert head.arrays["mask.kept"].astype(bool).tolist() == kept.tolist()
    assert kept.sum() == 4
    assert (head.arrays["relevant_head.weight"][:, ~kept] == 0).all()
    scaler = StandardScaler().fit(found.features[:, kept])
    twin = LogisticRegression(max_iter=5000, tol=1e-9).fit(scaler.transform(found.features[:, kept]), found.labels)
    unseen = data(1).features
    expected = twin.predict_proba(scaler.transform(unseen[:, kept]))
    np.testing.assert_allclose(head.predict_proba(unseen), expected, atol=2e-3)


def test_noise_features_are_left_out_by_a_fisher_mask():
    found = data(size=4)
    noisy = FitData(np.hstack([found.features, RNG(5).normal(size=(60, 12)).astype(np.float32)]), found.labels, 3)
    head = fitted(noisy, selector="fisher", keep_ratio=0.25)
    assert np.flatnonzero(head.arrays["mask.kept"]).tolist() == [0, 1, 2, 3]


def test_classes_that_never_occurred_get_nothing():
    whole = data(classes=4, shared=True, count=80)
    rows = whole.labels != 1
    for selector in ("learned", "fisher"):
        head = fitted(FitData(whole.features[rows], whole.labels[rows], 4, whole.global_head), selector=selector)
        answer = head.predict_proba(whole.features)
        assert (answer[:, 1] == 0).all()
        np.testing.assert_allclose(answer.sum(axis=1), 1, atol=1e-6)


def test_one_class_alone_is_the_answer():
    head = fitted(FitData(np.ones((4, 6), np.float32), np.full(4, 2), 3))
    assert head.predict_proba(np.zeros((2, 6), np.float32)).tolist() == [[0, 0, 1]] * 2


@pytest.mark.parametrize("selector", ["learned", "fisher"])
@pytest.mark.parametrize("count", [2, 3, 9, 17])
def test_few_samples_and_a_last_batch_of_one_are_enough(count, selector):
    head = fitted(data(count=count, classes=2, shared=True), selector=selector)
    assert np.isfinite(head.predict_proba(data().features)).all()


def test_many_rows_are_predicted_in_blocks_that_join():
    head = fitted(data(shared=True))
    rows = data(2, count=1500).features
    np.testing.assert_allclose(head.predict_proba(rows)[700:800], head.predict_proba(rows[700:800]), atol=1e-6)


def test_the_generator_alone_decides():
    arrays = [fitted(data(), seed).arrays["mask.0.weight"] for seed in (0, 0, 1)]
    assert (arrays[0] == arrays[1]).all()
    assert (arrays[0] != arrays[2]).any()


@pytest.mark.parametrize("selector", ["learned", "fisher"])
def test_from_disk_it_predicts_the_same_bits(tmp_path, selector):
    head = fitted(data(shared=True), selector=selector)
    saved.save(tmp_path, saved.SavedHead(head, "ab" * 32, "fp32", ("a", "b", "c"), {}))
    found = saved.load(tmp_path).head
    assert (found.predict_proba(data().features) == head.predict_proba(data().features)).all()


@pytest.mark.parametrize(
    "change",
    [
        {"mask.2.bias": None}, {"relevant_head.weight": None}, {"mask.2.weight": np.zeros((3, 3), np.float32)},
        {"mask.first.weight": np.zeros((3, 3), np.float32)}, {"shared.bias": None},
    ],
)  # fmt: skip
def test_a_saved_head_of_other_arrays_is_refused(tmp_path, change):
    head = fitted(data(shared=True))
    for name, array in change.items():
        if array is None:
            del head.arrays[name]
        else:
            head.arrays[name] = array
    saved.save(tmp_path, saved.SavedHead(head, "ab" * 32, "fp32", ("a", "b", "c"), {}))
    with pytest.raises(StateError, match="do not fit head 'fedpick'"):
        saved.load(tmp_path)


@pytest.mark.parametrize("bias, words", [(-50.0, "almost no feature"), (50.0, "almost every feature")])
def test_a_mask_that_selects_nothing_or_everything_is_warned_of(caplog, monkeypatch, bias, words):
    from edge_agent.heads import fedpick

    def extreme(*arguments):
        tensors = start(*arguments)
        tensors["mask.2.bias"][:] = bias
        return tensors

    monkeypatch.setattr(fedpick, "start", extreme)
    with caplog.at_level(logging.WARNING):
        fitted(data(), epochs=1)
    assert words in caplog.text


def test_a_step_size_that_makes_training_diverge_is_named():
    with pytest.raises(TrainingFailed, match=r"head 'fedpick': .* lr 1e\+30"):
        fitted(data(), lr=1e30)
