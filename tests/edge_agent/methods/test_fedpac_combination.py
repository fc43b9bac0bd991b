"""FedPAC's quadratic programme against hand-worked numbers, two other solvers, and hostile scales."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from edge_agent.methods._simplex import Problem, best_weights, combined, gram, pruned, soft_smallest

H = np.array([[[4 / 3, 0], [0, 2 / 3]], [[4 / 3, 0], [0, 2 / 3]], [[0, 4 / 3], [4 / 3, 0]]])
V = np.array([22, 16, 40]) / 27


def solve(variances, vectors):
    weights, solved = best_weights(np.asarray(variances, float), gram([np.asarray(v) for v in vectors]))
    assert solved.all()
    return weights


def matrix(row, variances, vectors):
    """P of one client from its definition, differences first."""
    apart = np.stack([np.ravel(vectors[row]) - np.ravel(v) for v in vectors])
    return np.diag(variances) + apart @ apart.T


def clients(count, size=6, groups=3, seed=0, noise=0.1):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(groups, 2, size))
    vectors = centres[np.arange(count) % groups] + noise * rng.normal(size=(count, 2, size))
    return rng.uniform(0.5, 2.0, count) * noise, list(vectors)


def test_three_clients_by_hand():
    """Clients 1 and 2 have the same h: P_1 = diag(22/27, 16/27, 40/27 + |h_1 - h_3|^2 = 40/27 + 52/9 = 7.259259).

    A diagonal P gives a_j ~ 1 / P_jj. For client 3, D_31 = D_32 = 52/9 with equal rows of D, so P is not diagonal.
    """
    weights = solve(V, H)
    inverse = 1 / np.array([22 / 27, 16 / 27, 196 / 27])
    np.testing.assert_allclose(weights[0], inverse / inverse.sum(), atol=1e-8)
    np.testing.assert_allclose(weights[:2], [[0.402051, 0.552821, 0.045128]] * 2, atol=1e-6)
    np.testing.assert_allclose(weights[2], [0.082051, 0.112821, 0.805128], atol=1e-6)


def test_two_clients_share_by_variance_and_distance():
    """a_11 = (V_2 + D) / (V_1 + V_2 + D) with D = 52/9: 7.259259 / 8.074074 = .899083."""
    weights = solve(V[[0, 2]], H[[0, 2]])
    assert weights[0, 0] == pytest.approx(0.899083, abs=1e-6)
    assert weights[1, 1] == pytest.approx((V[0] + 52 / 9) / (V[0] + V[2] + 52 / 9), abs=1e-8)


def test_equal_statistics_share_by_inverse_variance():
    np.testing.assert_allclose(solve([1, 2, 4], [H[0]] * 3), [[4 / 7, 2 / 7, 1 / 7]] * 3, atol=1e-7)
    np.testing.assert_allclose(solve([3.0] * 5, [H[0]] * 5), np.full((5, 5), 0.2), atol=1e-7)


def test_a_client_alone_keeps_its_head():
    np.testing.assert_allclose(solve([0.3], H[:1]), [[1.0]])
    np.testing.assert_allclose(solve([0.0], np.zeros((1, 2, 2))), [[1.0]])


@pytest.mark.parametrize("row", [0, 1, 2])
def test_nothing_on_a_grid_is_better(row):
    variances, vectors = clients(3, noise=0.8, seed=4)
    weights = solve(variances, vectors)
    p = matrix(row, variances, vectors)
    steps = np.arange(201) / 200
    grid = np.array([[a, b, 1 - a - b] for a in steps for b in steps if a + b <= 1 + 1e-12])
    values = np.einsum("ni,ij,nj->n", grid, p, grid)
    best = weights[row] @ p @ weights[row]
    assert best <= values.min() + 1e-12
    assert np.abs(grid[values.argmin()] - weights[row]).max() < 0.02
    assert values.min() - best < 1e-3 * best + 1e-3


@pytest.mark.parametrize("count, noise", [(4, 0.1), (9, 0.5), (24, 0.2)])
def test_sequential_quadratic_programming_finds_the_same(count, noise):
    variances, vectors = clients(count, noise=noise, seed=count)
    weights = solve(variances, vectors)
    for row in range(count):
        p = matrix(row, variances, vectors)
        p /= np.trace(p) / count
        found = optimize.minimize(
            lambda a, p=p: a @ p @ a,
            np.full(count, 1 / count),
            jac=lambda a, p=p: 2 * p @ a,
            bounds=[(0, 1)] * count,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones_like(a)},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert weights[row] @ p @ weights[row] <= found.fun + 1e-9
        np.testing.assert_allclose(weights[row], found.x, atol=2e-4)


@pytest.mark.parametrize("count", [3, 40, 120])
def test_least_squares_with_a_heavy_row_finds_the_same(count):
    """A = [diag(sqrt V); D'], |A a|^2 = a' P a; the row 1e4 (1 ... 1) a = 1e4 holds the sum at 1."""
    variances, vectors = clients(count, noise=0.3, seed=count)
    weights = solve(variances, vectors)
    for row in range(0, count, max(1, count // 6)):
        apart = np.stack([(vectors[row] - v).ravel() for v in vectors])
        system = np.vstack([np.diag(np.sqrt(variances)), apart.T, np.full((1, count), 1e4)])
        found, _ = optimize.nnls(system, np.append(np.zeros(len(system) - 1), 1e4))
        np.testing.assert_allclose(weights[row], found / found.sum(), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 30),
    size=st.integers(1, 8),
    groups=st.integers(1, 4),
    noise=st.floats(1e-3, 3.0),
    seed=st.integers(0, 10_000),
)
def test_conditions_of_optimality_hold(count, size, groups, noise, seed):
    variances, vectors = clients(count, size, groups, seed, noise)
    weights = solve(variances, vectors)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
    for row in range(count):
        slopes = matrix(row, variances, vectors) @ weights[row]
        objective = weights[row] @ slopes
        assert (slopes >= objective * (1 - 1e-4)).all()
        np.testing.assert_allclose(slopes[weights[row] > 0], objective, rtol=1e-4)


def test_scale_and_order_do_not_matter():
    variances, vectors = clients(12, seed=3)
    weights = solve(variances, vectors)
    for scale in (1e-8, 1e8):
        scaled = solve(variances * scale, [v * np.sqrt(scale) for v in vectors])
        np.testing.assert_allclose(scaled, weights, atol=1e-7)
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_allclose(
        solve(variances[order], [vectors[i] for i in order]), weights[np.ix_(order, order)], atol=1e-7
    )


def test_far_apart_clients_keep_their_own():
    for distance in (1e3, 1e6, 1e9):
        weights = solve([1.0, 2.0, 1.0], distance * np.eye(3))
        np.testing.assert_allclose(weights, np.eye(3), atol=4 / distance**2 + 1e-9)


def test_one_absurd_client_gets_no_weight_and_spoils_no_optimum():
    """An outlier at 1e6 times the size of the rest: even a weight of 1e-8 of it moves a combination a little."""
    variances, vectors = clients(9, seed=5)
    alone = solve(variances, vectors)
    together = solve([*variances, 1e9], [*vectors, np.full_like(vectors[0], 1e6)])
    assert together[:9, 9].max() < 1e-7
    assert together[9, 9] == pytest.approx(1, abs=1e-3)
    for row in range(9):
        p = matrix(row, [*variances, 1e9], [*vectors, np.full_like(vectors[0], 1e6)])
        padded = np.append(alone[row], 0)
        assert together[row] @ p @ together[row] <= (padded @ p @ padded) * (1 + 1e-6)


def test_a_client_without_variance_keeps_its_own_and_its_twins_share():
    weights = solve([0.0, 1.0, 1.0], H)
    np.testing.assert_allclose(weights[0], [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(weights[1], [1, 0, 0], atol=1e-6)  # the same h, and nothing to lose
    np.testing.assert_allclose(solve([0.0, 0.0, 1.0], H)[0], [0.5, 0.5, 0], atol=1e-6)


@pytest.mark.parametrize("count", [2, 7, 150])
def test_identical_clients_without_any_variance_share_evenly(count):
    for vector in (H[0], np.zeros((2, 2)), 1e6 * H[2]):
        np.testing.assert_allclose(solve(np.zeros(count), [vector] * count), 1 / count, rtol=1e-2)


def test_copies_of_clients_share_what_one_had():
    """Twice the same client is one client of half the variance, for those who only look at it from afar."""
    variances, vectors = clients(5, seed=8, groups=2, noise=0.4)
    once = solve([*variances[:4], variances[4] / 2], vectors)
    twice = solve([*variances, variances[4]], [*vectors, vectors[4]])
    np.testing.assert_allclose(twice[:4, 4] + twice[:4, 5], once[:4, 4], atol=1e-6)
    np.testing.assert_allclose(twice[:4, 4], twice[:4, 5], atol=1e-6)


def test_groups_of_clients_find_each_other():
    variances, vectors = clients(60, groups=5, size=40, noise=0.05)
    same = (np.arange(60)[:, None] - np.arange(60)) % 5 == 0
    assert (solve(variances, vectors) * same).sum(axis=1).min() > 0.95


def test_violation_tells_how_far_from_optimal():
    products = gram(list(H))
    weights = solve(V, H)
    assert (Problem(V, products).violations(weights) < 1e-7).all()
    assert (Problem(V, products).violations(np.full((3, 3), 1 / 3)) > 0.1).all()
    assert np.isinf(Problem(V, products).violations(np.full((3, 3), 0.5))).all()
    assert np.isinf(Problem(V, products).violations(np.full((3, 3), np.nan))).all()


def test_a_row_that_has_no_solution_keeps_its_own_head():
    products = gram(list(H))
    products[0] = products[:, 0] = np.nan
    weights, solved = best_weights(V, products)
    assert not solved.any()  # each row sees client 0
    np.testing.assert_array_equal(weights, np.eye(3))


def test_inner_products_are_summed_in_double_precision():
    rng = np.random.default_rng(0)
    vectors = [rng.normal(size=(7, 1000)).astype(np.float32) for _ in range(3)]
    wide = np.stack([v.ravel() for v in vectors]).astype(np.float64)
    np.testing.assert_allclose(gram(vectors), wide @ wide.T, rtol=1e-13)


def test_combining_heads_is_combining_their_answers():
    rng = np.random.default_rng(1)
    heads = [rng.normal(size=(3, 5000)).astype(np.float32) for _ in range(4)]
    weights = rng.dirichlet(np.ones(4), size=4)
    features = rng.normal(size=5000)
    mixed = combined(weights, heads)
    assert mixed.dtype == np.float32
    by_logits = np.einsum("ij,jk->ik", weights, np.stack([head @ features for head in heads]))
    np.testing.assert_allclose(mixed @ features, by_logits, atol=1e-3)


def test_small_weights_are_cut_off_and_the_rest_sums_to_one():
    weights = np.array([[0.999, 0.001, 0.0], [0.5, 0.4985, 0.0015], [0.0, 0.0, 1.0]])
    found = pruned(weights, 1e-3)
    np.testing.assert_allclose(found[0], [1, 0, 0])
    np.testing.assert_allclose(found[1], weights[1])
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_an_even_share_of_very_many_is_not_cut_off():
    np.testing.assert_allclose(pruned(np.full((2000, 2000), 1 / 2000), 1e-3), 1 / 2000)


def test_soft_smallest_by_hand():
    """exp(-.126928) : exp(-2.126928) = 1 : e^-2 -> .880797, .119203."""
    found = soft_smallest(np.array([[0.126928, 2.126928], [2.126928, 0.126928]]), 1.0)
    np.testing.assert_allclose(found, [[0.880797, 0.119203], [0.119203, 0.880797]], atol=1e-6)
    cold = soft_smallest(np.array([[0.126928, 2.126928], [2.126928, 0.126928]]), 0.5)
    assert cold[0, 0] == pytest.approx(1 / (1 + np.exp(-4)), abs=1e-6)
    np.testing.assert_allclose(soft_smallest(np.full((4, 4), 800.0), 1e-3), 0.25)


def test_sources_without_class_means_weigh_nothing():
    inf = np.inf
    found = soft_smallest(np.array([[0.0, inf, 0.0], [inf, inf, inf], [1e9, inf, 0.0]]), 1.0)
    np.testing.assert_allclose(found, [[0.5, 0, 0.5], [0, 1, 0], [0, 0, 1]])


def test_the_solver_needs_no_torch_and_no_scipy():
    code = (
        "import sys; from edge_agent.methods import _simplex\n"
        "print(sorted({'torch', 'scipy', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.bench
@pytest.mark.parametrize("kind", ["alike", "groups", "dirichlet 0.1", "dirichlet 0.5"])
@pytest.mark.parametrize("classes", [10, 100])
def test_a_thousand_clients_are_combined_in_ten_seconds(kind, classes):
    variances, vectors = labelled_clients(1000, classes, 512, kind)
    begin = time.perf_counter()
    products = gram(vectors)
    middle = time.perf_counter()
    weights, solved = best_weights(variances, products)
    end = time.perf_counter()
    support = (weights > 0).sum(axis=1).mean()
    print(f"{kind}, K = {classes}: gram {middle - begin:.2f} s, weights {end - middle:.2f} s, support {support:.0f}")
    assert solved.all()
    assert end - begin < 10


def labelled_clients(count, classes, size, kind, samples=600):
    """V and h of clients with the given label shares: class means with the noise of their samples."""
    rng = np.random.default_rng(0)
    means = np.maximum(2 * rng.normal(size=(classes, size)) + 1, 0)
    shares = np.full((count, classes), 1 / classes)
    if kind == "groups":
        wide = 3 * classes // 10
        shares *= 0.2
        for client in range(count):
            shares[client, (2 * wide * (client % 5) // 3 + np.arange(wide)) % classes] += 0.8 / wide
    elif kind != "alike":
        shares = rng.dirichlet(np.full(classes, float(kind.split()[1])), size=count)
    counts = np.stack([rng.multinomial(samples, share) for share in shares])
    vectors = []
    variances = np.empty(count)
    for client, row in enumerate(counts):
        own = means + rng.normal(size=means.shape) / np.sqrt(np.maximum(row, 1))[:, None]
        lengths = (own**2).sum(axis=1)
        share = row / samples
        variances[client] = (share @ (lengths + size) - share**2 @ lengths) / samples
        vectors.append((share[:, None] * own).astype(np.float32))
    return variances, vectors
