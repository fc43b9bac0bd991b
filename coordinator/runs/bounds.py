"""Bounds on what a single update of a round can do: its size, its sample count, its share of the sum, its direction.

Every rule measures each update's change: the tensors that all clients received, after training minus before; and what
else the method has bounded (`Method.bounded_extras`). In a round of three or more updates

1. a change of more than ``max_norm`` times the median is scaled down to the median (rules mean and clipped; by rule
   clipped every change above the median); where half of the updates change nothing, to a share of the model;
2. a sample count of more than ``max_weight`` times the median counts as that much;
3. an update that points against the others and the way of the run (`directions`) loses weight, or all of it;
4. what an update adds to the sum, its samples times the norm of its change, is at most ``max_share`` times the median;
   where it is above 1.5 times the median, at most a third of the sum; the median where its direction is towards
   neither the others nor the way of the run; and a quarter of the median for an outlier that points against the
   others as hardly any other does. Its weight is lowered to that, which bounds all of its tensors together;
5. an agent that was at ``max_share`` in two rounds more than below adds at most ``repeat_share`` medians and an eighth
   of the sum, until it stays below;
6. what an update says about its client's classes has bounds of its own (`class_statistics`).

The first two bounds alone would multiply: five times the change for five times the samples is 25 votes.

An update is suspect whose size, sample count or direction no honest agent would have: `selection.Exclusions` leaves out
an agent after some suspect updates in a row. What stays within these bounds is not touched: a round of honest updates
gives the bits of the plain mean. Bounds use medians, so they hold as long as more than half of the updates are honest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_high
from types import MappingProxyType

import numpy as np

from edge_agent.core.task import State, Tensors
from edge_agent.methods import Method, Update
from edge_agent.methods.base import CLASS_MEANS, is_learned
from edge_agent.methods.values import ClassStatistics

from ..config import AggregationConfig
from .class_statistics import StatisticBounds, find_statistic_bounds
from .directions import WEIGHTS, Comparison, Direction, extra_group, outliers
from .repeats import NEAR_BOUND, count_repeats, is_repeater
from .robust import LEAST_UPDATES
from .shares import limit_to_sum

SUSPECT, SUSPECT_SHARE = 10.0, 0.1
"""An update is suspect whose change exceeds the median so many times, or whose sample count its bound.

The change has to exceed that share of the model, too: an honest agent changes it more than most once these have learned
their samples. Of two updates one is scaled to the other that exceeds it so many times, and the whole model.
"""

STATISTICS_SPREAD = 4.0
"""Running statistics of batch norm of honest agents differ up to 8 times where their weights do up to 3 times.

Their bound is looser, except for an agent whose weights are beyond theirs.
"""

OUTLIER_SHARE = 0.25
"""What an outlier (`directions.outliers`) adds to the sum at most, in medians of the round."""

Updates = Callable[[], Iterable[Update]]
"""Gives the same updates in the same order each time."""


@dataclass(frozen=True)
class Bounds:
    """What is done to the updates of one round."""

    factors: dict[str, dict[str, float]] = field(default_factory=dict)
    """Agent -> group of tensors -> the factor (0..1) that its change is scaled by."""

    caps: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Agent -> the weight that it declared, and the one that it counts with."""

    opposed: tuple[str, ...] = ()
    """Agents whose updates are left out of the round: they point against all others."""

    suspects: dict[str, str] = field(default_factory=dict)
    """Agent -> why its update is suspect."""

    count: int = 0
    """How many updates the round has."""

    statistics: StatisticBounds = field(default_factory=StatisticBounds)
    """What is done to the statistics of classes that the updates carry."""

    repeats: dict[str, int] = field(default_factory=dict)
    """Agent -> its count of rounds at a bound of size (`repeats`), this round included, of those that have one."""

    @property
    def is_small_round(self) -> bool:
        """Whether there are too few updates to tell which are honest."""
        return self.count < LEAST_UPDATES

    def apply(self, updates: Iterable[Update], received: Tensors, extras: Mapping[str, str]) -> Iterator[Update]:
        """Yield the updates within the bounds, without those that are opposed."""
        for update in updates:
            if update.client in self.opposed:
                continue
            cap = self.caps.get(update.client)
            weighted = update if cap is None else replace(update, weight=cap[1])
            scaled = _scaled(weighted, received, self.factors.get(update.client, {}), extras)
            yield self.statistics.apply(scaled)


def find_bounds(
    method: Method,
    received: Tensors,
    updates: Updates,
    config: AggregationConfig,
    start: State | None,
    repeats: Mapping[str, int] = MappingProxyType({}),
) -> Bounds:
    """Find what has to be done to the updates of a round.

    Args:
        method: The method that they are of.
        received: What its clients started from.
        updates: Gives the updates, as often as it is called.
        config: The bounds.
        start: The state that the run began with; None where it is not known.
        repeats: Agent -> its count of rounds at a bound of size before this one.
    """
    extras = method.bounded_extras
    class_arrays = method.class_statistics if config.max_class_mean is not None else None
    received = _without_class_arrays(received, class_arrays)
    # Step 1: sizes and sample counts, each by itself.
    measured = [_measure(update, received, extras) for update in updates()]
    factors, suspects = _clip(measured, _sizes(received), config)
    factors = _without_class_means(factors, class_arrays)
    caps, overstated = _cap_samples(method, measured, config)
    suspects |= overstated
    if len(measured) < LEAST_UPDATES:
        # Nothing is a bound here, so nobody is at one: counts stay as they are.
        kept = {one.client: repeats[one.client] for one in measured if one.client in repeats}
        return Bounds(factors, caps, (), suspects, len(measured), repeats=kept)
    # Step 2: where they point.
    comparison = Comparison(received, extras, _norms_by_group(measured), start)
    directions, trusts, opposed = _judge_directions(comparison, updates, len(measured), config)
    suspects = {**_against(directions, config), **suspects}
    # Step 3: what each adds to the sum, by all of that.
    counts: dict[str, int] = {}
    if config.max_share is not None:
        shares = _Shares(method, measured, factors, caps)
        counts = shares.count_repeats(config, repeats)
        repeaters = shares.repeaters(config, repeats)
        caps |= shares.caps(config, trusts, opposed, directions.get(WEIGHTS, {}), repeaters)
    # Step 4: what they say about classes.
    statistics = StatisticBounds()
    if class_arrays is not None:
        statistics = find_statistic_bounds(class_arrays, updates, config)
    suspects = {**statistics.suspects, **suspects}
    return Bounds(factors, caps, opposed, suspects, len(measured), statistics, counts)


def _without_class_arrays(received: Tensors, class_arrays: ClassStatistics | None) -> Tensors:
    """Drop class means that travel as a part of the model (FedProto): they have bounds of their own."""
    if class_arrays is None:
        return received
    return {name: array for name, array in received.items() if name not in class_arrays.names}


def _without_class_means(
    factors: dict[str, dict[str, float]], class_arrays: ClassStatistics | None
) -> dict[str, dict[str, float]]:
    """Drop the factors of class means where their lengths are bounded class by class, so that it is not done twice."""
    if class_arrays is None:
        return factors
    result: dict[str, dict[str, float]] = {}
    for agent, by_group in factors.items():
        others = {group: factor for group, factor in by_group.items() if group != CLASS_MEANS}
        if others:
            result[agent] = others
    return result


def _cap_samples(
    method: Method, measured: Sequence[_Measured], config: AggregationConfig
) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """Return agent -> declared and counted samples, of those that are capped, and who of them is suspect, and why."""
    if method.weighting != "samples":
        return {}, {}
    caps = _cap({one.client: one.weight for one in measured}, config.max_weight)
    suspects: dict[str, str] = {}
    for agent, (declared, bound) in caps.items():
        if declared > SUSPECT * bound:
            suspects[agent] = f"declared {declared:g} samples, {_times(declared, bound)} the bound of the round"
    return caps, suspects


def _judge_directions(
    comparison: Comparison, updates: Updates, count: int, config: AggregationConfig
) -> tuple[dict[str, dict[str, Direction]], dict[str, float], tuple[str, ...]]:
    """Return the directions of ``count`` updates, what weight they leave to some, and who is left out for them."""
    if config.min_cosine is None:
        return {}, {}, ()
    directions = comparison.directions(updates)
    trusts = _trusts(directions, config)
    opposed = tuple(sorted(agent for agent, trust in trusts.items() if trust == 0))
    if 2 * len(opposed) >= count:
        # Half of the updates point against the rest, and nobody can tell which half is right: no direction counts.
        return {}, {}, ()
    return directions, trusts, opposed


def _trusts(directions: Mapping[str, Mapping[str, Direction]], config: AggregationConfig) -> dict[str, float]:
    """Agent -> share of its weight that its directions leave it, of those below the limit."""
    trusts: dict[str, float] = {}
    limit = config.min_cosine
    for by_agent in directions.values():
        for agent, direction in by_agent.items():
            if limit is not None and direction.decisive < limit:
                trusts[agent] = min(trusts.get(agent, 1.0), direction.trust(limit))
    return trusts


def _against(directions: Mapping[str, Mapping[str, Direction]], config: AggregationConfig) -> dict[str, str]:
    """Agent -> which of its tensors point against those of the others, of those below the limit."""
    reasons: dict[str, str] = {}
    limit = config.min_cosine
    for group, by_agent in directions.items():
        what = "its change of the model points" if group == WEIGHTS else f"its {group} point"
        for agent, direction in by_agent.items():
            if limit is not None and direction.decisive < limit:
                reasons.setdefault(agent, f"{what} against those of the others: {_cosines(direction)}")
    return reasons


def _cosines(direction: Direction) -> str:
    text = f"cosine {direction.to_others:.2f}"
    return text if direction.along_way is None else f"{text}, along the way of the run {direction.along_way:.2f}"


class _Shares:
    """What each update adds to the sum of a round: its weight times the norm of its bounded change."""

    def __init__(
        self,
        method: Method,
        measured: Sequence[_Measured],
        factors: Mapping[str, Mapping[str, float]],
        caps: Mapping[str, tuple[float, float]],
    ) -> None:
        self._declared: dict[str, float] = {}
        self._sent: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        for one in measured:
            declared = one.weight if method.weighting == "samples" else 1.0
            weight = caps[one.client][1] if one.client in caps else declared
            norm = one.norms.get(WEIGHTS, 0.0) * factors.get(one.client, {}).get(WEIGHTS, 1.0)
            self._declared[one.client] = declared
            self._sent[one.client] = declared * one.norms.get(WEIGHTS, 0.0)
            self._weights[one.client] = weight
            self._shares[one.client] = weight * norm

    def count_repeats(self, config: AggregationConfig, before: Mapping[str, int]) -> dict[str, int]:
        """Count whose declared samples times their whole change come near to ``max_share`` medians, or exceed them."""
        if config.repeat_share is None or config.max_share is None:
            return {}
        bound = NEAR_BOUND * config.max_share * median(self._shares.values())
        at_bound = frozenset(agent for agent, sent in self._sent.items() if sent >= bound > 0)
        return count_repeats(before, self._sent, at_bound)

    def repeaters(self, config: AggregationConfig, before: Mapping[str, int]) -> frozenset[str]:
        """Return the agents that were at the bound again and again before this round."""
        if config.repeat_share is None:
            return frozenset()
        return frozenset(agent for agent in self._sent if is_repeater(before.get(agent, 0)))

    def caps(
        self,
        config: AggregationConfig,
        trusts: Mapping[str, float],
        opposed: Sequence[str],
        directions: Mapping[str, Direction],
        repeaters: frozenset[str],
    ) -> dict[str, tuple[float, float]]:
        """Agent -> declared and counted weight, of those whose share of the sum is above its bound."""
        middle = median(self._shares.values())
        if not middle > 0:
            return {}
        far = outliers(directions)
        # Step 1: each by itself, in medians of the round, by where it points.
        bounded: dict[str, float] = {}
        for agent, share in self._shares.items():
            if agent in opposed:
                continue
            direction = directions.get(agent)
            allowed = config.max_share or math.inf
            if agent in repeaters:
                allowed = min(allowed, config.repeat_share or math.inf)
            if agent in far:
                allowed = OUTLIER_SHARE
            elif direction is not None and direction.decisive <= 0:
                allowed = 1.0
            bounded[agent] = min(share, allowed * middle) * trusts.get(agent, 1.0)
        # Step 2: one after another against the sum of all.
        bounded = limit_to_sum(bounded, middle, repeaters)
        # Step 3: as weights. What rounding alone has changed stays as it is.
        caps: dict[str, tuple[float, float]] = {}
        for agent, bound in bounded.items():
            share = self._shares[agent]
            if share > bound * (1 + 1e-9):
                caps[agent] = (self._declared[agent], self._weights[agent] * bound / share)
        return caps


# --- sizes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    client: str
    weight: float
    norms: dict[str, float]
    """Group of tensors -> norm of the change."""


def _group(name: str, array: np.ndarray, received: Tensors, extras: Mapping[str, str]) -> str:
    """Weights, running statistics and bounded extras have norms of their own size; empty: not bounded."""
    if array.dtype.kind != "f":
        return ""
    if name.startswith("extra."):
        return extra_group(name, extras)
    if name not in received:
        return ""
    return WEIGHTS if is_learned(name, array) else "statistics"


def _origin(name: str, received: Tensors) -> np.ndarray | float:
    """What an array of an update is a change from; extra arrays are bounded as they are."""
    return 0.0 if name.startswith("extra.") else received[name]


def norms_of(method: Method, state: State, updates: Iterable[Update]) -> dict[str, dict[str, float]]:
    """Group of tensors (weights, statistics, those of `Method.bounded_extras`) -> agent -> norm of its change."""
    received = method.broadcast(state)
    return _norms_by_group([_measure(update, received, method.bounded_extras) for update in updates])


def _norms_by_group(measured: Sequence[_Measured]) -> dict[str, dict[str, float]]:
    """Group of tensors -> agent -> norm."""
    result: dict[str, dict[str, float]] = {}
    for one in measured:
        for group, norm in one.norms.items():
            result.setdefault(group, {})[one.client] = norm
    return result


def _measure(update: Update, received: Tensors, extras: Mapping[str, str]) -> _Measured:
    squares: dict[str, float] = {}
    for name, array in update.tensors.items():
        if group := _group(name, array, received, extras):
            # Of class means that of the mean class: agents have more or fewer classes.
            parts = max(1, int(array.any(axis=1).sum())) if group == CLASS_MEANS else 1
            squares[group] = squares.get(group, 0.0) + _square(array, _origin(name, received)) / parts
    return _Measured(update.client, update.weight, {group: float(np.sqrt(square)) for group, square in squares.items()})


def _sizes(received: Tensors) -> dict[str, float]:
    """Group of tensors -> norm of what clients received."""
    squares: dict[str, float] = {}
    for name, array in received.items():
        if group := _group(name, array, received, {}):
            squares[group] = squares.get(group, 0.0) + _square(array, 0.0)
    return {group: float(np.sqrt(square)) for group, square in squares.items()}


def _square(array: np.ndarray, origin: np.ndarray | float, block: int = 1 << 16) -> float:
    """Sum of squares of array - origin, float64, in blocks that stay in cache."""
    flat = array.reshape(-1)
    total = 0.0
    before = origin.reshape(-1) if isinstance(origin, np.ndarray) else None
    with np.errstate(over="ignore"):  # infinity is a norm, too
        for begin in range(0, flat.size, block):
            part = flat[begin : begin + block].astype(np.float64)
            if before is not None:
                part -= before[begin : begin + block]
            total += float(np.square(part, out=part).sum())
    return total


def _clip(
    measured: Sequence[_Measured], sizes: Mapping[str, float], config: AggregationConfig
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Agent -> factor of each group of its tensors that is scaled down, and the agents whose changes are suspect.

    ``sizes``: norm of each group of what clients received.
    """
    factors: dict[str, dict[str, float]] = {}
    suspects: dict[str, str] = {}
    for group in sorted({group for one in measured for group in one.norms}, reverse=True):  # weights come first
        norms = {one.client: one.norms[group] for one in measured if group in one.norms}
        size = sizes.get(group, 0.0)
        looser = STATISTICS_SPREAD if group == "statistics" else 1.0
        if len(norms) < LEAST_UPDATES:
            if len(norms) > 1 and config.max_norm is not None:
                least = min(norms.values())
                bound = max(SUSPECT * looser * least, size)
                absurd = {agent: norm for agent, norm in norms.items() if norm > bound > 0}
                factors |= {agent: {**factors.get(agent, {}), group: least / norm} for agent, norm in absurd.items()}
            continue
        most = 1.0 if config.rule == "clipped" else config.max_norm
        if most is None:
            continue
        # Clients without a change count, or the others' median would be that of few, who may all be hostile.
        middle = (median_high if 0.0 in norms.values() else median)(norms.values())
        unit = middle or SUSPECT_SHARE * size
        what = "its change of the model" if group in {"weights", "statistics"} else f"the norm of its {group}"
        for agent, norm in norms.items():
            if norm > unit * (1.0 if agent in factors or not middle else most * looser):
                factors.setdefault(agent, {})[group] = unit / norm
            if unit and norm > max(SUSPECT * looser * middle, SUSPECT_SHARE * size):
                than = "the median of the round" if middle else "the bound of a round in which half change nothing"
                suspects[agent] = f"{what} is {_times(norm, unit)} {than}"
    return factors, suspects


def _cap(weights: Mapping[str, float], most: float | None) -> dict[str, tuple[float, float]]:
    """Agent -> declared and counted samples, of those that declared more than ``most`` times the median."""
    if most is None or len(weights) < LEAST_UPDATES:
        return {}
    bound = most * median(weights.values())
    return {agent: (weight, bound) for agent, weight in sorted(weights.items()) if weight > bound}


def _times(value: float, unit: float) -> str:
    return f"{value / unit:.3g} times"


def _scaled(update: Update, received: Tensors, factors: Mapping[str, float], extras: Mapping[str, str]) -> Update:
    """The update with the changes of each group scaled by its factor; itself where there are none."""
    if not factors:
        return update
    tensors = {}
    for name, array in update.tensors.items():
        factor = factors.get(_group(name, array, received, extras), 1.0)
        if factor < 1.0:
            origin = np.asarray(_origin(name, received), np.float64)
            # Without this order two values of opposite sign near the largest float64 would make an infinity.
            scaled = origin * (1.0 - factor) + array.astype(np.float64) * factor
            array = scaled.astype(array.dtype)  # noqa: PLW2901 - the same array, scaled
        tensors[name] = array
    return replace(update, tensors=tensors)
