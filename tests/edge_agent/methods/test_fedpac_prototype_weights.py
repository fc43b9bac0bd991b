"""FedPAC's weights from losses on class means, the report's modification, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from paper_methods import fedpac
from paper_methods import fedpac_update as update

from edge_agent.methods.fedpac import prototype_losses
from edge_agent.methods.values import Update


def modified(**params):
    return fedpac(weights="prototype_loss", **params)


def test_prototype_losses_by_hand():
    """Identity head, class means 2 e_k: CE = log(1 + e^-2) = .126928; swapped means: 2 more. Weights 1 : e^-2."""
    ups = [update("a", centroids=2 * np.eye(2)), update("b", centroids=2 * np.eye(2)[::-1])]
    members = [Update(u.client, u.weight, {n.removeprefix("extra."): a for n, a in u.tensors.items()}) for u in ups]
    np.testing.assert_allclose(prototype_losses(members, by_prior=False), [[0.126928, 2.126928]] * 2, atol=1e-6)
    weights = modified().aggregate({}, ups)["mixing.weights"]
    np.testing.assert_allclose(weights, [[0.880797, 0.119203]] * 2, atol=1e-6)


def test_with_source_heads_rows_and_columns_change_places():
    """Heads I and 0, own means 2 e_k: target 1's means give .126928 under head I and log 2 under head 0."""
    ups = [update("a", centroids=2 * np.eye(2)), update("b", centroids=2 * np.eye(2), head=np.zeros((2, 2)))]
    by_target = modified().aggregate({}, ups)["mixing.weights"]
    np.testing.assert_allclose(by_target, 0.5, atol=1e-6)  # each head meets two equal sets of means
    by_source = modified(direction="source_head").aggregate({}, ups)["mixing.weights"]
    good = np.exp(-0.126928)
    idle = 0.5
    np.testing.assert_allclose(by_source, [[good / (good + idle), idle / (good + idle)]] * 2, atol=1e-6)


def test_label_priors_weigh_classes_by_their_owner():
    """Source b: class 0 right (.126928) in 9 of 10 samples, class 1 wrong (2.126928) in one."""
    ups = [update("a", centroids=2 * np.eye(2)), update("b", centroids=[[2, 0], [2, 0]], counts=(9, 1))]
    for weighting, loss in (("uniform", 1.126928), ("label_prior", 0.326928)):
        weights = modified(class_weighting=weighting).aggregate({}, ups)["mixing.weights"]
        odds = np.exp(-np.array([0.126928, loss]))
        np.testing.assert_allclose(weights[0], odds / odds.sum(), atol=1e-6)


def test_absent_classes_do_not_count_in_the_loss():
    ups = [update("a", centroids=[[2, 0], [0, 0]], counts=(5, 0)), update("b", centroids=2 * np.eye(2))]
    np.testing.assert_allclose(modified().aggregate({}, ups)["mixing.weights"], 0.5, atol=1e-6)


def test_temperature_sharpens():
    ups = [update("a", centroids=2 * np.eye(2)), update("b", centroids=2 * np.eye(2)[::-1])]
    weights = modified(temperature=0.5).aggregate({}, ups)["mixing.weights"]
    assert weights[0, 0] == pytest.approx(1 / (1 + np.exp(-4)), abs=1e-6)


def test_identical_clients_share_evenly_in_both_modes():
    for method in (fedpac(), modified(), modified(direction="source_head", class_weighting="label_prior")):
        weights = method.aggregate({}, [update(name) for name in "abcd"])["mixing.weights"]
        np.testing.assert_allclose(weights, 0.25, atol=1e-5)


def test_the_modification_sends_no_variance_and_no_label_shares(federation):
    fed = federation(modified())
    declared = fed.method.sends(fed.clients["a"].model, fed.task)
    assert set(declared) == {"extra.head.weight", "extra.head.bias", "extra.centroids", "extra.counts"}
    for sent in fed.run_round():
        assert set(sent.tensors) == {*fed.shared, *declared}
        assert fed.method.objection(sent.tensors) == ""
