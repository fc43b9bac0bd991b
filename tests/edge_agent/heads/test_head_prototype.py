from __future__ import annotations

import numpy as np

from edge_agent import heads
from edge_agent.heads import FitData


def test_means_scale_and_probabilities_worked_out_by_hand():
    """Class 0: (0,0), (2,0): mean (1,0), squared distances 1, 1. Class 1: (5,1), (5,-1): mean (5,0), distances 1, 1.

    scale = mean of 1, 1, 1, 1 = 1. At (2,0): d0^2 = 1, d1^2 = 9, so p0 = 1 / (1 + exp(-8)).
    """
    features = np.array([[0, 0], [2, 0], [5, 1], [5, -1]], np.float32)
    head = heads.create("prototype")
    head.fit(FitData(features, np.array([0, 0, 1, 1]), 2), np.random.default_rng(0))
    assert head.arrays["means"].tolist() == [[1, 0], [5, 0]]
    assert head.arrays["scale"].tolist() == [1]
    found = head.predict_proba(np.array([[2, 0], [3, 7]], np.float32))
    assert np.allclose(found[0], [1 / (1 + np.exp(-8)), 1 / (1 + np.exp(8))], rtol=1e-12)
    assert np.allclose(found[1], [0.5, 0.5])


def test_one_sample_for_each_class_has_no_scatter_and_still_works():
    features = np.array([[0, 0], [3, 0]], np.float32)
    head = heads.create("prototype")
    head.fit(FitData(features, np.array([2, 4]), 5), np.random.default_rng(0))
    assert head.predict_proba(features).argmax(axis=1).tolist() == [2, 4]


def test_with_l2_only_the_direction_counts():
    features = np.array([[1, 0], [10, 0], [0, 1], [0, 20]], np.float32)
    head = heads.create("prototype", {"feature_norm": "l2"})
    head.fit(FitData(features, np.array([0, 0, 1, 1]), 2), np.random.default_rng(0))
    assert head.predict_proba(np.array([[100, 1], [0.01, 0.1]], np.float32)).argmax(axis=1).tolist() == [0, 1]
