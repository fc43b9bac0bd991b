from __future__ import annotations

import numpy as np
import pytest

from edge_agent.training.networks import orthonormal, simplex

sizes = pytest.mark.parametrize("classes, size", [(2, 2), (3, 3), (3, 12), (10, 64)])


@sizes
def test_orthonormal_rows_have_length_one_at_right_angles(classes, size):
    rows = orthonormal(classes, size, seed=1)
    assert rows.shape == (classes, size)
    np.testing.assert_allclose(rows @ rows.T, np.eye(classes), atol=1e-12)


@sizes
def test_a_simplex_has_unit_rows_at_one_and_the_same_angle_and_sum_zero(classes, size):
    rows = simplex(classes, size, seed=1)
    gram = np.full((classes, classes), -1 / (classes - 1))
    np.fill_diagonal(gram, 1.0)
    np.testing.assert_allclose(rows @ rows.T, gram, atol=1e-12)
    np.testing.assert_allclose(rows.sum(axis=0), 0, atol=1e-12)


def test_three_directions_of_a_simplex_meet_at_cosine_minus_one_half():
    gram = simplex(3, 5, seed=0) @ simplex(3, 5, seed=0).T
    np.testing.assert_allclose(gram, [[1, -0.5, -0.5], [-0.5, 1, -0.5], [-0.5, -0.5, 1]], atol=1e-12)


def test_one_class_alone_gets_one_unit_vector():
    assert np.linalg.norm(simplex(1, 4, seed=0)) == pytest.approx(1.0)


@pytest.mark.parametrize("make", [orthonormal, simplex])
def test_the_seed_decides(make):
    np.testing.assert_array_equal(make(3, 6, 4), make(3, 6, 4))
    assert not np.allclose(make(3, 6, 4), make(3, 6, 5))
