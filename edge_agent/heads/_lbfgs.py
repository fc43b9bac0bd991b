"""Limited-memory BFGS for smooth convex functions, in numpy: scipy would cost a device 144 MB of disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

Objective = Callable[[np.ndarray], "tuple[float, np.ndarray]"]


def minimise(
    objective: Objective, start: np.ndarray, *, max_iterations: int, tolerance: float, memory: int = 10
) -> np.ndarray:
    """Point (p,) float64 where no entry of the gradient exceeds ``tolerance``, or the best one found.

    ``objective`` gives value and gradient (p,). Stops early when a step no longer lowers the value.
    """
    point = start.astype(np.float64)
    value, gradient = objective(point)
    pairs: deque[tuple[np.ndarray, np.ndarray, float]] = deque(maxlen=memory)
    for _ in range(max_iterations):
        if np.abs(gradient).max() <= tolerance:
            break
        direction = _direction(gradient, pairs)
        found = _line_search(objective, point, value, gradient, direction)
        if found is None:
            break
        step, value, new_gradient = found
        change = new_gradient - gradient
        curvature = float(change @ step)
        if curvature > 1e-12 * float(change @ change):
            pairs.append((step, change, 1.0 / curvature))
        point, gradient = point + step, new_gradient
    return point


def _direction(gradient: np.ndarray, pairs: deque[tuple[np.ndarray, np.ndarray, float]]) -> np.ndarray:
    """The two-loop recursion (Nocedal and Wright, Algorithm 7.4)."""
    if not pairs:
        return np.asarray(-gradient / max(1.0, float(np.linalg.norm(gradient))))
    rest, weights = gradient.copy(), []
    for step, change, inverse in reversed(pairs):
        weights.append(inverse * float(step @ rest))
        rest -= weights[-1] * change
    step, change, inverse = pairs[-1]
    rest /= inverse * float(change @ change)
    for (step, change, inverse), weight in zip(pairs, reversed(weights), strict=True):
        rest += step * (weight - inverse * float(change @ rest))
    return np.asarray(-rest)


def _line_search(
    objective: Objective, point: np.ndarray, value: float, gradient: np.ndarray, direction: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray] | None:
    """First of the steps 1, 1/2, 1/4 … that lowers the value enough (Armijo, 1e-4); None when none does."""
    slope = float(gradient @ direction)
    if not slope < 0:
        return None
    for halvings in range(30):
        step = direction * 0.5**halvings
        new_value, new_gradient = objective(point + step)
        if new_value <= value + 1e-4 * slope * 0.5**halvings:
            return step, new_value, new_gradient
    return None
