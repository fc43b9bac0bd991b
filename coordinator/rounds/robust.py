"""Rules that take the place of the mean where some of a round's updates may be hostile.

A rule is a class with one method, `Rule.combine`: from the updates of a round to their combination. Rules look at all
updates at once, and none counts by its samples: a few agents that declare many would else be the majority.

trimmed_mean and median work on each coordinate by itself. krum, multi_krum, geometric_median and centered_clipping
give a weighted mean of the updates, whose weights follow from the inner products of their changes alone; the model is
read twice, however many steps a rule takes.

`CenteredClipping` is the one that remembers: its centre, the last combined change, lies in the state of the run as
``server.centre.*``. So it is part of each checkpoint: a run that is killed and resumed has the same bits, and an audit
that aggregates a round again starts from the same centre.

Sources: trimmed_mean, median: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning", ICML 2018.
krum, multi_krum: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries", NeurIPS 2017.
geometric_median: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022 (smoothed
Weiszfeld). centered_clipping: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", ICML
2021; the radius is the median distance here, and momentum is the server's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from edge_agent.core.task import State, Tensors
from edge_agent.methods import Update
from edge_agent.methods.base import SERVER_ONLY, is_learned, weighted_mean

from ..config import AggregationConfig

LEAST_UPDATES = 3
"""Of fewer updates nobody can tell which is the honest one, unless one is absurd."""

BLOCK_BYTES = 8 << 20
"""All updates' parts of a tensor that are looked at together, as float64."""

WEISZFELD_STEPS = 16
"""Steps to the geometric median."""

SMOOTHING = 1e-6
"""Least distance in a Weiszfeld step, as a share of the median change."""

CLIPPING_STEPS = 3
"""Steps of centred clipping; the paper finds that more change nothing."""

CENTRE = f"{SERVER_ONLY}centre."
"""Arrays of the state with names like this are the centre of centred clipping: the last combined change."""


@dataclass(frozen=True)
class Combination:
    """What a rule makes of the updates of a round."""

    tensors: Tensors
    unused: tuple[str, ...] = ()
    """Agents whose updates have no part in it."""

    memory: Tensors = field(default_factory=dict)
    """Arrays that the next round's combination starts from, by their names in the state."""


class Rule(Protocol):
    """A way to combine the updates of a round."""

    def combine(self, updates: Sequence[Update], received: Tensors, state: State) -> Combination:
        """Return the combination of a round's updates.

        Args:
            updates: The updates of the round.
            received: The tensors that their clients started from.
            state: The state of the run, which has the memory of the rule.
        """


@dataclass(frozen=True)
class ByCoordinate:
    """The median of each coordinate, or its mean without the ``trim`` largest and smallest values."""

    trim: int | None

    def combine(self, updates: Sequence[Update], received: Tensors, state: State) -> Combination:  # noqa: ARG002 - the contract's
        """Combine the updates coordinate by coordinate."""
        return Combination(by_coordinate(updates, self.trim))


@dataclass(frozen=True)
class Krum:
    """The mean of the updates with the nearest neighbours; all but ``attackers`` of them, or one alone."""

    attackers: int
    only_best: bool

    def combine(self, updates: Sequence[Update], received: Tensors, state: State) -> Combination:  # noqa: ARG002 - the contract's
        """Combine the chosen updates; the others are unused."""
        # A small round spares fewer than the configuration names, so that each update has a neighbour to be judged by.
        attackers = min(self.attackers, len(updates) - LEAST_UPDATES)
        count = 1 if self.only_best else len(updates) - attackers
        ranking = rank_by_krum(distances(gram(updates, received)), attackers)
        shares = [0.0] * len(updates)
        for index in ranking[:count]:
            shares[index] = 1.0
        return mean_by_shares(updates, shares)


class GeometricMedian:
    """The point with the least sum of distances to the updates."""

    def combine(self, updates: Sequence[Update], received: Tensors, state: State) -> Combination:  # noqa: ARG002 - the contract's
        """Combine the updates by the shares that Weiszfeld's steps end with."""
        return mean_by_shares(updates, geometric_median_shares(gram(updates, received)))


class CenteredClipping:
    """The last combined change, moved by the mean of the changes' differences from it, each at most median length."""

    def combine(self, updates: Sequence[Update], received: Tensors, state: State) -> Combination:
        """Combine the updates around the centre in the state, and make what results the next centre."""
        # Step 1: the share of each update. The centre is one more "update", so that it has inner products, too.
        centre = centre_of(state, received)
        reference = Update(CENTRE, 1.0, {name: received[name] + centre[name] for name in centre})
        *shares, centre_share = centered_clipping_shares(gram([*updates, reference], received))
        # Step 2: the mean of the updates by their shares.
        combination = mean_by_shares(updates, shares)
        mean = combination.tensors
        # Step 3: the shares and that of the centre add up to 1, so what the updates lack of it is the centre's part.
        tensors = dict(mean)
        memory: Tensors = {}
        for name in centre:
            mean_change = mean[name].astype(np.float64) - received[name]
            change = (1.0 - centre_share) * mean_change + centre_share * centre[name]
            tensors[name] = (received[name] + change).astype(mean[name].dtype)
            memory[f"{CENTRE}{name}"] = change.astype(np.float32)
        return Combination(tensors, combination.unused, memory)


def rule_of(config: AggregationConfig) -> Rule:
    """Make the rule that a configuration names; not a mean of bounded updates, which each method makes itself."""
    rules: dict[str, Rule] = {
        "trimmed_mean": ByCoordinate(config.attackers),
        "median": ByCoordinate(None),
        "krum": Krum(config.attackers, only_best=True),
        "multi_krum": Krum(config.attackers, only_best=False),
        "geometric_median": GeometricMedian(),
        "centered_clipping": CenteredClipping(),
    }
    return rules[config.rule]


def mean_by_shares(updates: Sequence[Update], shares: Sequence[float]) -> Combination:
    """Return the mean of the updates weighted by ``shares``; those of share 0 are unused."""
    weighted: list[tuple[float, Tensors]] = []
    unused: list[str] = []
    for update, share in zip(updates, shares, strict=True):
        if share:
            weighted.append((share, update.tensors))
        else:
            unused.append(update.client)
    return Combination(weighted_mean(iter(weighted)), tuple(unused))


def centre_of(state: State, received: Tensors) -> Tensors:
    """Return the last combined change of each array of weights; zeros in the first round.

    Running statistics of batch norm have none: a step beyond their mean could make a variance negative.
    """
    centre: Tensors = {}
    for name, array in received.items():
        if is_learned(name, array):
            zeros = np.zeros(array.shape, np.float32)
            centre[name] = state.get(f"{CENTRE}{name}", zeros)
    return centre


def centered_clipping_shares(products: np.ndarray) -> list[float]:
    """Return the shares of n updates and of the centre in the mean that centred clipping ends with; they add up to 1.

    The radius is the median of the distances from the centre.

    Args:
        products: Inner products (n + 1, n + 1) float64 of the changes, the centre last.

    Returns:
        n + 1 shares, rounded to float32 as those of `geometric_median_shares`.
    """
    count = len(products) - 1
    usable, finite = _drop_infinite(products)
    # The first point is the centre itself.
    shares = np.zeros(count + 1)
    shares[count] = 1.0
    radius = 0.0
    for step in range(CLIPPING_STEPS):
        squared = _squared_distances_from(shares, finite)[:count]
        lengths = np.where(usable[:count], np.sqrt(squared), np.inf)
        if step == 0:
            radius = float(np.median(lengths))
        # Half of the updates overflow: there is no radius, and the centre stays where it is.
        if not np.isfinite(radius):
            break
        # An update within the radius moves the centre by its whole difference, another by that of median length.
        with np.errstate(invalid="ignore", divide="ignore"):
            factors = np.where(lengths > radius, radius / lengths, 1.0)
        factors = np.where(usable[:count], factors, 0.0) / count
        shares *= 1.0 - factors.sum()
        shares[:count] += factors
    return [float(share) for share in shares.astype(np.float32)]


def by_coordinate(updates: Sequence[Update], trim: int | None) -> Tensors:
    """Combine the updates coordinate by coordinate.

    Args:
        updates: The updates of the round; an array is combined over the updates that have it.
        trim: How many of the largest and of the smallest values the mean leaves out. Where that many cannot be spared,
            or without a number (None), the median is taken.

    Returns:
        Name -> array. Integer arrays (counters) have the lower median, which is a value that a client has sent.
    """
    combined: Tensors = {}
    names = set[str]()
    for update in updates:
        names.update(update.tensors)
    for name in sorted(names):
        arrays = [update.tensors[name] for update in updates if name in update.tensors]
        combined[name] = _combine_coordinates(arrays, trim)
    return combined


def _combine_coordinates(arrays: Sequence[np.ndarray], trim: int | None) -> np.ndarray:
    """Combine arrays of one shape coordinate by coordinate, as `by_coordinate` says."""
    count = len(arrays)
    # What is left out at each end for the median: all but the one or two values in the middle.
    most_trim = (count - 1) // 2
    trimmed = most_trim if trim is None else min(trim, most_trim)
    combined = np.empty(arrays[0].size, arrays[0].dtype)
    for begin, end in _blocks(combined.size, count):
        block = np.stack([array.reshape(-1)[begin:end] for array in arrays])
        block.sort(axis=0)
        if block.dtype.kind == "f":
            combined[begin:end] = block[trimmed : count - trimmed].astype(np.float64).mean(axis=0)
        else:
            combined[begin:end] = block[most_trim]
    return combined.reshape(arrays[0].shape)


def gram(updates: Sequence[Update], received: Tensors) -> np.ndarray:
    """Return the inner products (n, n) float64 of the updates' changes; infinite where an update overflows."""
    products = np.zeros((len(updates), len(updates)))
    with np.errstate(over="ignore", invalid="ignore"):
        for name in sorted(received):
            # An update without an array has not changed it.
            arrays = [update.tensors.get(name, received[name]).reshape(-1) for update in updates]
            are_floats = {array.dtype.kind for array in arrays} <= {"f"}
            if not are_floats:
                continue  # counters are no direction
            before = received[name].reshape(-1)
            for begin, end in _blocks(before.size, len(arrays)):
                block = np.stack([array[begin:end] for array in arrays]).astype(np.float64)
                block -= before[begin:end]
                products += block @ block.T
    return products


def distances(products: np.ndarray) -> np.ndarray:
    """Return the squared distances (n, n) by inner products; infinite to an update that is too large for float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.diag(products)
        squares = norms[:, None] + norms[None] - 2 * products
    # Rounding makes some of them a little less than 0.
    return np.where(np.isfinite(squares), np.maximum(squares, 0.0), np.inf)


def rank_by_krum(squares: np.ndarray, attackers: int) -> list[int]:
    """Return the indices of the updates by Krum's score, the best first; ties by index.

    Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017.

    Args:
        squares: Squared distances (n, n).
        attackers: How many of the updates are taken to be hostile (f).
    """
    count = len(squares)
    others = np.where(np.eye(count, dtype=bool), np.inf, squares)
    others.sort(axis=1)
    # The score is the sum over the n - f - 2 nearest others.
    neighbours = max(1, count - attackers - 2)
    scores = others[:, :neighbours].sum(axis=1)
    return [int(index) for index in np.argsort(scores, kind="stable")]


def geometric_median_shares(products: np.ndarray) -> list[float]:
    """Return the n shares of the updates in the mean that is the geometric median of their changes.

    Each iterate of Weiszfeld's steps is a mean of the updates, so that inner products are all that it takes: the model
    is read twice, however many steps there are. The shares are rounded to float32, so that another order of sums in
    the inner products (another number of threads) gives the same bits.
    """
    usable, finite = _drop_infinite(products)
    # The median is 0 where half change nothing; the other half, which may be hostile, does not choose the scale then.
    typical_norm = float(np.median(np.sqrt(np.diag(products)[usable])))
    if typical_norm == 0:
        typical_norm = 1.0
    least_distance = max(SMOOTHING * typical_norm, np.finfo(np.float64).tiny)
    # The first point is the state itself, so that the first step is the mean of the directions.
    shares = np.zeros(len(products))
    for _ in range(WEISZFELD_STEPS):
        lengths = np.sqrt(_squared_distances_from(shares, finite))
        shares = usable / np.maximum(lengths, least_distance)
        shares /= shares.sum()
    return [float(share) for share in shares.astype(np.float32)]


def _drop_infinite(products: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which changes (n,) bool are finite, and their inner products (n, n) with 0 for all others."""
    usable = np.isfinite(np.diag(products))
    finite = np.where(usable[:, None] & usable[None], products, 0.0)
    return usable, finite


def _squared_distances_from(shares: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Return the squared distance (n,) of each change from their mean by ``shares`` (n,), by inner products (n, n)."""
    toward = products @ shares
    # Rounding makes some of them a little less than 0.
    return np.asarray(np.maximum(shares @ toward - 2 * toward + np.diag(products), 0.0))


def _blocks(size: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the parts of ``size`` numbers that are looked at together, of ``count`` updates."""
    step = max(1024, BLOCK_BYTES // (8 * count))
    for begin in range(0, size, step):
        yield begin, min(size, begin + step)
