"""Linear layers, rectified units and batch norm in numpy, trained by hand-written gradients as torch trains them.

Layers allocate their buffers once, for the largest batch, and write into them: the arrays that ``forward`` and
``backward`` return are overwritten by the next batch, and ``backward`` may overwrite its argument. All arrays have the
dtype of the weights, which is float32 outside of tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..core.errors import TrainingFailed
from ..core.graph import Graph, Value
from ..core.task import Tensors
from ._time import check_time

EPSILON = 1e-5
MOMENTUM = 0.1
"""The momentum of batch norm, torch's default."""

Pairs = list[tuple[np.ndarray, np.ndarray]]
"""Weights, each with the array that holds its gradient."""


class Linear:
    """A linear layer ``inputs @ weight.T + bias`` with ``weight`` (outputs, inputs), trained in place.

    ``rows`` is the size of the largest batch.
    """

    def __init__(self, weight: np.ndarray, bias: np.ndarray, rows: int) -> None:
        self.weight = weight
        self.bias = bias
        self._gradients = np.empty_like(weight), np.empty_like(bias)
        self._out = np.empty((rows, weight.shape[0]), weight.dtype)
        self._back = np.empty((rows, weight.shape[1]), weight.dtype)
        self._inputs = self._back[:0]

    def forward(self, inputs: np.ndarray, *, train: bool = True) -> np.ndarray:
        """Return the outputs (n, outputs)."""
        self._inputs = inputs
        out = np.matmul(inputs, self.weight.T, out=self._out[: len(inputs)])
        out += self.bias
        return out

    def backward(self, error: np.ndarray, *, to_inputs: bool = True) -> np.ndarray:
        """Store the gradients of weight and bias, and return the error of the inputs (n, inputs).

        Without ``to_inputs`` that error is not computed, and the result is empty.
        """
        weight_gradient, bias_gradient = self._gradients
        np.matmul(error.T, self._inputs, out=weight_gradient)
        np.sum(error, axis=0, out=bias_gradient)
        if not to_inputs:
            return self._back[:0]
        return np.matmul(error, self.weight, out=self._back[: len(error)])

    def pairs(self) -> Pairs:
        """Return weights and their gradients."""
        return [(self.weight, self._gradients[0]), (self.bias, self._gradients[1])]

    def write(self, graph: Graph, inputs: Value) -> Value:
        """Write what `forward` computes; ``inputs`` have the dtype of the weights."""
        return graph.linear(inputs, self.weight, self.bias)


class Rectify:
    """A rectified linear unit, max(0, x), which overwrites its inputs."""

    def __init__(self) -> None:
        self._out = np.empty((0, 0), np.float32)  # until the first batch

    def forward(self, inputs: np.ndarray, *, train: bool = True) -> np.ndarray:
        """Set negative values of ``inputs`` (n, size) to 0, and return the same array."""
        self._out = np.maximum(inputs, 0, out=inputs)
        return self._out

    def backward(self, error: np.ndarray, *, to_inputs: bool = True) -> np.ndarray:
        """Set ``error`` (n, size) to 0 where the last output was 0, and return the same array."""
        error *= self._out > 0
        return error

    def pairs(self) -> Pairs:
        """Return no weights, because there are none to train."""
        return []

    def write(self, graph: Graph, inputs: Value) -> Value:
        """Write what `forward` computes."""
        return graph.add("Relu", inputs)


class BatchNorm:
    """Batch norm as in torch, with weight, bias, running mean and running variance (size,), trained in place.

    In training the biased variance of the batch normalises, and the unbiased one enters the running variance.
    """

    def __init__(self, weight: np.ndarray, bias: np.ndarray, mean: np.ndarray, variance: np.ndarray, rows: int) -> None:
        self.weight = weight
        self.bias = bias
        self.mean = mean
        self.variance = variance
        self._gradients = np.empty_like(weight), np.empty_like(bias)
        self._normal, self._out = np.empty((2, rows, len(weight)), weight.dtype)
        self._scale = np.ones_like(weight)

    def forward(self, inputs: np.ndarray, *, train: bool = True) -> np.ndarray:
        """Return the normalised inputs (n, size); n >= 2 in training."""
        n = len(inputs)
        normal = self._normal[:n]
        out = self._out[:n]
        if train:
            mean = inputs.mean(axis=0)
            np.subtract(inputs, mean, out=normal)
            variance = np.einsum("ij,ij->j", normal, normal) / n
            self._move(self.mean, mean)
            self._move(self.variance, variance * (n / (n - 1)))
        else:
            np.subtract(inputs, self.mean, out=normal)
            variance = self.variance
        self._scale = 1 / np.sqrt(variance + EPSILON)
        normal *= self._scale
        np.multiply(normal, self.weight, out=out)
        out += self.bias
        return np.asarray(out)

    def backward(self, error: np.ndarray, *, to_inputs: bool = True) -> np.ndarray:
        """Store the gradients, and overwrite ``error`` (n, size) with the error of the last batch's inputs."""
        normal = self._normal[: len(error)]
        slopes, sums = self._gradients
        np.einsum("ij,ij->j", error, normal, out=slopes)
        np.sum(error, axis=0, out=sums)
        share = 1 / len(error)
        normal *= slopes * share  # not needed any more
        error -= normal
        error -= sums * share
        error *= self.weight * self._scale
        return error

    def pairs(self) -> Pairs:
        """Return weight (gamma) and bias (beta) with their gradients."""
        return [(self.weight, self._gradients[0]), (self.bias, self._gradients[1])]

    def write(self, graph: Graph, inputs: Value) -> Value:
        """Write what `forward` computes without training; ``inputs`` have the dtype of the weights."""
        normal = graph.add("Mul", graph.add("Sub", inputs, self.mean), 1 / np.sqrt(self.variance + EPSILON))
        return graph.add("Add", graph.add("Mul", normal, self.weight), self.bias)

    @staticmethod
    def _move(running: np.ndarray, batch: np.ndarray) -> None:
        """Move a running statistic (size,) towards that of the batch, in place."""
        running *= 1 - MOMENTUM
        running += MOMENTUM * batch


Layer = Linear | Rectify | BatchNorm


class Chain:
    """A network that runs its layers one after another."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers = tuple(layers)

    def forward(self, inputs: np.ndarray, *, train: bool = True) -> np.ndarray:
        """Return the outputs of the last layer."""
        for layer in self.layers:
            inputs = layer.forward(inputs, train=train)
        return inputs

    def backward(self, error: np.ndarray, *, to_inputs: bool = False) -> np.ndarray:
        """Store the gradients of all layers; returns the error of the inputs, which is empty without ``to_inputs``."""
        for index in reversed(range(len(self.layers))):
            error = self.layers[index].backward(error, to_inputs=to_inputs or index > 0)
        return error

    def write(self, graph: Graph, inputs: Value) -> Value:
        """Write what `forward` computes without training."""
        for layer in self.layers:
            inputs = layer.write(graph, inputs)
        return inputs

    def pairs(self) -> Pairs:
        """Return all weights and their gradients."""
        return [pair for layer in self.layers for pair in layer.pairs()]


def chain_of(tensors: Mapping[str, np.ndarray], part: str, rows: int) -> Chain:
    """Return the layers of arrays with torch's names in an ``nn.Sequential``: ``<part>.0.weight`` and so on.

    A two-dimensional weight is a linear layer's, a one-dimensional one batch norm's; a number left out is a rectified
    layer. The chain works on these very arrays.
    """
    layers: list[Layer] = []
    before = -1
    indices = sorted({int(name.split(".")[1]) for name in tensors if name.startswith(f"{part}.")})
    for index in indices:
        # A rectified layer has no arrays, so it shows as a gap in the numbers.
        if index - before > 1:
            layers.append(Rectify())
        weight = tensors[f"{part}.{index}.weight"]
        bias = tensors[f"{part}.{index}.bias"]
        if weight.ndim == 2:
            layers.append(Linear(weight, bias, rows))
        else:
            mean = tensors[f"{part}.{index}.running_mean"]
            variance = tensors[f"{part}.{index}.running_var"]
            layers.append(BatchNorm(weight, bias, mean, variance, rows))
        before = index
    return Chain(layers)


def fresh_linear(name: str, inputs: int, outputs: int, rng: np.random.Generator) -> Tensors:
    """Return arrays of a linear layer called ``name``, uniform in +-1/sqrt(inputs), as torch starts them."""
    weight, bias = uniform(inputs, outputs, rng)
    return {f"{name}.weight": weight.astype(np.float32), f"{name}.bias": bias.astype(np.float32)}


def uniform(inputs: int, outputs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (outputs, inputs) and biases (outputs,) float64 of a linear layer as torch starts them."""
    bound = 1.0 / np.sqrt(inputs)
    return rng.uniform(-bound, bound, (outputs, inputs)), rng.uniform(-bound, bound, outputs)


def fresh_norm(name: str, size: int) -> Tensors:
    """Return the arrays (size,) of a new batch norm layer called ``name``, which changes nothing yet but the mean."""
    starts = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
    return {f"{name}.{key}": np.full(size, start, np.float32) for key, start in starts.items()}


class Sgd:
    """SGD with the ``lr``, ``momentum`` and ``weight_decay`` of ``params``, on weights in place, as torch's.

    The gradients are used up.
    """

    def __init__(self, pairs: Pairs, params: Any) -> None:
        self._pairs = [(weight, gradient, np.zeros_like(weight)) for weight, gradient in pairs]
        self._lr = params.lr
        self._momentum = params.momentum
        self._decay = params.weight_decay

    def step(self) -> None:
        """Take one step along the present gradients."""
        for weight, gradient, speed in self._pairs:
            if self._decay:
                np.add(gradient, self._decay * weight, out=gradient)
            np.multiply(speed, self._momentum, out=speed)
            np.add(speed, gradient, out=speed)
            np.subtract(weight, np.multiply(speed, self._lr, out=gradient), out=weight)


def batches(samples: int, batch_size: int, rng: np.random.Generator, smallest: int = 2) -> Iterator[np.ndarray]:
    """Yield the rows of one epoch's batches in random order; a last one below ``smallest`` joins the one before it."""
    order = rng.permutation(samples)
    cuts = list(range(batch_size, samples, batch_size))
    if cuts and samples - cuts[-1] < min(smallest, batch_size):
        cuts.pop()
    yield from np.split(order, cuts)


def train(
    head: str,
    tensors: Tensors,
    step: Callable[[np.ndarray], float | None],
    samples: int,
    params: Any,
    rng: np.random.Generator,
    *,
    suspects: Mapping[str, float],
    smallest: int = 2,
) -> None:
    """Train ``tensors`` by ``params.epochs`` passes over the samples.

    ``step`` learns from the rows of one of the `batches` and returns its loss, if it knows it. ``suspects`` are named,
    with their values, where training diverges.

    Raises:
        TrainingFailed: The loss or a weight is not finite, or the time limit is reached.
    """
    with np.errstate(all="ignore"):  # numbers that are not finite show in the sum
        for epoch in range(1, params.epochs + 1):
            loss = 0.0
            for rows in batches(samples, params.batch_size, rng, smallest):
                check_time()
                loss += len(rows) * (step(rows) or 0.0)
            total = loss / samples + squares(tensors.values())
            if not np.isfinite(total):
                values = " and ".join(f"{name} {value:g}" for name, value in suspects.items())
                advice = "lower one of them"
                if len(suspects) == 1:
                    advice = "lower it"
                raise TrainingFailed(
                    f"head '{head}': loss or weights became {total} in epoch {epoch} of {params.epochs} at {values}; "
                    f"expected a finite number; {advice}",
                    is_public=True,
                )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the row-wise logarithm of softmax, in the dtype of ``logits`` (n, k)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return np.asarray(shifted)


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean softmax cross entropy, and its gradient (n, k) by ``logits`` (n, k); ``labels`` (n,) below k."""
    log_q = log_softmax(logits)
    rows = np.arange(len(labels))
    loss = -float(log_q[rows, labels].mean())
    error = np.exp(log_q)
    error[rows, labels] -= 1
    error /= len(labels)
    return loss, error


def squares(arrays: Iterable[np.ndarray]) -> float:
    """Return the sum of squares of all numbers; it overflows where training has diverged but each number is finite."""
    return sum(float(np.vdot(array, array)) for array in arrays)


Objective = Callable[[np.ndarray], "tuple[float, np.ndarray]"]

_ROUNDING = 4 * float(np.finfo(np.float64).eps)
"""The share of an objective's value below which a difference is rounding: 9e-16."""


def minimise(
    objective: Objective, start: np.ndarray, *, max_iterations: int, tolerance: float, memory: int = 10
) -> np.ndarray:
    """Return the point (p,) float64 where no entry of the gradient exceeds ``tolerance``, or the best reached.

    ``objective`` gives value and gradient (p,). Stops early when a step lowers neither the value, beyond rounding, nor
    the largest entry of the gradient.
    """
    point = start.astype(np.float64)
    value, gradient = objective(point)
    pairs: deque[tuple[np.ndarray, np.ndarray, float]] = deque(maxlen=memory)
    for _ in range(max_iterations):
        check_time()
        if np.abs(gradient).max() <= tolerance:
            break
        # 1. A step that lowers the objective; where none does, this point is the best that can be reached.
        direction = _direction(gradient, pairs)
        accepted = _line_search(objective, point, value, gradient, direction)
        if accepted is None:
            break
        step, value, new_gradient = accepted
        # 2. What the step says about the curvature; a pair without positive curvature would spoil the directions.
        change = new_gradient - gradient
        curvature = float(change @ step)
        if curvature > 1e-12 * float(change @ change):
            pairs.append((step, change, 1.0 / curvature))
        point = point + step
        gradient = new_gradient
    return point


def _direction(gradient: np.ndarray, pairs: deque[tuple[np.ndarray, np.ndarray, float]]) -> np.ndarray:
    """Return the direction of the two-loop recursion (Nocedal and Wright, Algorithm 7.4)."""
    if not pairs:
        return np.asarray(-gradient / max(1.0, float(np.linalg.norm(gradient))))
    # First loop: from the newest pair to the oldest.
    rest = gradient.copy()
    weights = []
    for step, change, inverse in reversed(pairs):
        weight = inverse * float(step @ rest)
        weights.append(weight)
        rest -= weight * change
    # The start of the inverse Hessian is a multiple of the identity, of the newest pair's scale.
    step, change, inverse = pairs[-1]
    rest /= inverse * float(change @ change)
    # Second loop: from the oldest pair to the newest.
    for (step, change, inverse), weight in zip(pairs, reversed(weights), strict=True):
        rest += step * (weight - inverse * float(change @ rest))
    return np.asarray(-rest)


def _line_search(
    objective: Objective, point: np.ndarray, value: float, gradient: np.ndarray, direction: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray] | None:
    """Return the first of the steps 1, 1/2, 1/4 … that lowers the value enough (Armijo, 1e-4); None when none does.

    Next to the minimum the slope vanishes beside the value, so that a step that changes nothing but the last bit is
    enough by that rule. There the gradient decides, which is still exact: without this, some CPUs stop after 40 steps
    and others go on, without getting anywhere, for as long as they may.
    """
    slope = float(gradient @ direction)
    if not slope < 0:
        return None
    largest_entry = float(np.abs(gradient).max())
    for halvings in range(30):
        step = direction * 0.5**halvings
        new_value, new_gradient = objective(point + step)
        if new_value > value + 1e-4 * slope * 0.5**halvings:
            continue
        lowers_value = value - new_value > _ROUNDING * abs(value)
        if lowers_value or float(np.abs(new_gradient).max()) < largest_entry:
            return step, new_value, new_gradient
    return None
