"""Weights of combined classifiers: for every client one quadratic programme over the simplex, in numpy alone.

With a vector h_j and a variance V_j of each client j, client i needs the weights ``a`` (a_j >= 0, sum 1) with

    min a' P_i a,   P_i = diag(V) + D_i D_i',   D_i has the rows h_i - h_j.

All of them come from one matrix of inner products S = H H', computed once: (D_i D_i')_jl = s_ii - s_ij - s_il + s_jl.
The objective is homogeneous, so ``a`` is ``b / sum(b)`` for the b >= 0 with P_i b >= 1 and equality where b_j > 0; this
linear complementarity problem is solved by exchanging whole blocks of the support (Judice and Pires, 1994; Kim and
Park, 2011), and one index at a time where blocks do not help. Each solve takes in only the current support.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

_RIDGE = 1e-10
"""The share of a client's squared lengths that is added to its variance.

It covers the rounding of S for thousands of clients, so that P_i stays definite, and is far below any variance that n
samples can have (squared length / n).
"""

_ROUNDING = 4e-15
"""The share of a number by which rounding may change it."""

_TOLERANCE = 1e-7
"""The violation of the conditions of optimality at which a row still counts as optimal."""

_TINY = 1e-150
"""The variance of a client of which all numbers are 0."""

_FIRST_SUPPORT = 32
"""The number of weights above 0 with which a row begins."""

_PATIENCE = 3
"""The exchanges without fewer wrong weights after which one weight at a time is exchanged, which comes to an end."""

_MAX_EXCHANGES = 300
"""The most exchanges of a row; 100 to 1,000 clients, in groups or with Dirichlet labels, took 4 to 8, at most 39."""

_BLOCK = 4096


def gram(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Return inner products (m, m) float64 of m arrays of one shape."""
    products = np.zeros((len(vectors), len(vectors)))
    for _, block in _blocks(vectors):
        products += block @ block.T
    return products


def combined(weights: np.ndarray, vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Return each row of ``weights`` (m, m) applied to m arrays of one shape: (m, ...) float32, summed in float64."""
    sums = np.empty((len(weights), vectors[0].size), np.float32)
    for part, block in _blocks(vectors):
        sums[:, part] = weights @ block
    return sums.reshape(len(weights), *vectors[0].shape)


def _blocks(vectors: Sequence[np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the arrays as rows of a matrix, some columns at a time: no float64 copy of all of them."""
    rows = [vector.reshape(-1) for vector in vectors]
    for begin in range(0, rows[0].size if rows else 0, _BLOCK):
        part = slice(begin, begin + _BLOCK)
        yield part, np.stack([row[part] for row in rows]).astype(np.float64)


def best_weights(variances: np.ndarray, products: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return optimal weights (m, m), row i those of client i, and which rows (m,) bool are known to be optimal.

    ``variances`` (m,) are V >= 0, ``products`` (m, m) is the `gram` of the h. Where V is 0 for several clients that are
    alike, they share equally. A row that could not be solved keeps its own head: weight 1 for itself.
    """
    problem = Problem(variances, products)
    weights = problem.all_at_once()
    for row in np.flatnonzero(~(problem.violations(weights, forgive=False) < _TOLERANCE)):
        weights[row] = problem.solve(int(row))
    solved = problem.violations(weights) < _TOLERANCE
    weights[~solved] = np.eye(len(weights))[~solved]
    return weights, solved


def pruned(weights: np.ndarray, least: float) -> np.ndarray:
    """Return weights (m, m) whose entries at or below ``least`` are 0, rows divided by their sums again.

    Among more than 0.1 / least clients 0.1 / m takes its place: an even share of 1 / m must not count as nothing.
    """
    threshold = min(least, 0.1 / max(1, weights.shape[1]))
    kept = np.where(weights > threshold, weights, 0.0)
    return np.asarray(kept / kept.sum(axis=1, keepdims=True))


def soft_smallest(losses: np.ndarray, temperature: float) -> np.ndarray:
    """Return exp(-loss / temperature) with rows divided by their sums (m, m); infinite losses weigh 0.

    A row of infinite losses alone keeps its own head: weight 1 for itself.
    """
    hopeless = ~np.isfinite(losses).any(axis=1)
    usable = np.where(hopeless[:, None], np.where(np.eye(len(losses), dtype=bool), 0.0, np.inf), losses)
    shifted = np.exp(-(usable - usable.min(axis=1, keepdims=True)) / temperature)
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))


class Problem:
    """All clients' programmes. ``raised`` (m, m): row i is V with what keeps P_i definite, above 0."""

    def __init__(self, variances: np.ndarray, products: np.ndarray) -> None:
        self.products = np.asarray(products, np.float64)
        lengths = np.sqrt(np.maximum(np.diag(self.products), 0.0))
        self.reach = lengths[:, None] + lengths
        self.raised = np.asarray(variances, np.float64) + _RIDGE * self.reach**2 + _TINY

    def violations(self, weights: np.ndarray, *, forgive: bool = True) -> np.ndarray:
        """Return how far each row (m,) violates the conditions of optimality, in units of its objective a' P a.

        0: optimal.

        (P a)_j must be a' P a where a_j > 0, and no less elsewhere; what rounding can do is forgiven. Infinite where a
        row is no point of the simplex.
        """
        s = self.products
        used = weights > 0
        with np.errstate(all="ignore"):
            slopes = weights @ s - s - np.einsum("ij,ij->i", weights, s)[:, None] + np.diag(s)[:, None]
            slopes += self.raised * weights
            objective = np.einsum("ij,ij->i", weights, slopes)[:, None]
            off = np.where(used, np.abs(slopes - objective), objective - slopes)
            longest = np.where(used, self.reach, 0.0).max(axis=1, keepdims=True)
            off -= _ROUNDING * self.reach * longest if forgive else 0.0
            worst = np.maximum(off.max(axis=1), 0.0) / np.maximum(objective[:, 0], _TINY)
        on_simplex = (weights.min(axis=1) >= 0) & (np.abs(weights.sum(axis=1) - 1) < 1e-9)
        return np.where(on_simplex & np.isfinite(worst), worst, np.inf)

    def all_at_once(self) -> np.ndarray:
        """Return weights (m, m) with only sum(a) = 1 demanded: right for every row in which none of them is negative.

        With sum(a) = 1, a' P_i a = a' (S + diag V) a - 2 s_i' a + s_ii: one factorisation serves all rows.
        """
        matrix = self.products + np.diag(np.diag(self.raised))
        scale = 1 / np.sqrt(np.diag(matrix))
        matrix *= scale[:, None] * scale
        targets = np.column_stack([self.products, np.ones(len(matrix))])
        try:
            answers = scale[:, None] * np.linalg.solve(matrix, scale[:, None] * targets)
        except np.linalg.LinAlgError:
            return np.eye(len(matrix))
        free = answers[:, :-1]
        towards_one = answers[:, -1]
        with np.errstate(all="ignore"):
            weights = free + towards_one[:, None] * ((1 - free.sum(axis=0)) / towards_one.sum())
        return np.ascontiguousarray(weights.T)

    def solve(self, row: int) -> np.ndarray:
        """Return the weights (m,) of one client; NaN when exchanges do not come to an end."""
        s = self.products
        squares = np.diag(self.products)
        diagonal = self.raised[row] + np.maximum(squares + squares[row] - 2 * s[row], 0.0)
        inside = np.zeros(len(s), dtype=bool)
        inside[np.argsort(diagonal, kind="stable")[:_FIRST_SUPPORT]] = True
        inside[row] = True
        fewest = len(s) + 1
        patience = _PATIENCE
        for _ in range(_MAX_EXCHANGES):
            support = np.flatnonzero(inside)
            # P b = 1 on the support. The row's own head stands alone in P (its D is 0), so its b is 1 / V.
            b = 1 / diagonal[support]
            others = support != row
            chosen = support[others]
            scale = 1 / np.sqrt(diagonal[chosen])
            matrix = s[np.ix_(chosen, chosen)] - s[chosen, row][:, None] - s[row, chosen] + s[row, row]
            matrix *= scale[:, None] * scale
            np.fill_diagonal(matrix, 1.0)
            b[others] = scale * np.linalg.solve(matrix, scale)
            # P b - 1, and what rounding can do to it; b must not be below 0 inside the support, this not outside.
            gap = b @ s[support] - s[row] * b.sum() - s[row, support] @ b + s[row, row] * b.sum() - 1.0
            noise = _ROUNDING * self.reach[row] * self.reach[row, support].max(initial=0.0) * np.abs(b).sum()
            wrong = gap < -(1e-10 + noise)
            wrong[support] = b < 0
            wrong[row] = False
            if not wrong.any():
                weights = np.zeros(len(s))
                weights[support] = b / b.sum()
                return weights
            patience = _PATIENCE if wrong.sum() < fewest else patience - 1
            fewest = min(fewest, int(wrong.sum()))
            if patience >= 0:
                # All that is wrong leaves the support, but only the most urgent half as many enter it: letting all of
                # them in makes the support twenty times as large as it ends up to be.
                entering = np.flatnonzero(wrong & ~inside)
                limit = max(8, int(inside.sum()) // 2)
                urgent = np.argsort((gap / np.sqrt(diagonal))[entering], kind="stable")[:limit]
                wrong &= inside
                wrong[entering[urgent]] = True
            else:  # one index at a time, always the last wrong one, comes to an end (Murty, 1974)
                wrong = np.arange(len(s)) == np.flatnonzero(wrong)[-1]
            inside ^= wrong
        return np.full(len(s), np.nan)
