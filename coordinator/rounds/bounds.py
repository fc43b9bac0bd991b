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

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_high
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np

from edge_agent.core.task import State, Tensors
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.methods import Method, Update
from edge_agent.methods.base import CLASS_MEANS, is_learned
from edge_agent.methods.values import ClassStatistics

from ..config import AggregationConfig
from .class_statistics import StatisticBounds, find_statistic_bounds
from .directions import WEIGHTS, Direction, extra_group, find_directions, outliers
from .passes import Origin, Packet, Pass, PassValues, Reading, Updates, read
from .repeats import NEAR_BOUND, count_repeats, is_repeater
from .robust import LEAST_UPDATES
from .shares import limit_to_sum

STATISTICS = "statistics"
"""Group of the running statistics of batch norm."""

SUSPECT = 10.0
"""An update is suspect whose change exceeds the median so many times, or whose sample count its bound.

Changes of honest clients were at most 6 times the median (examples/results/poisoning.md). Of two updates, the larger is
scaled to the other one where it is so many times as large, and larger than the whole model.
"""

SUSPECT_SHARE = 0.1
"""A suspect change also exceeds this share of the model.

An honest agent changes the model more than most once these have learned their samples, if only by a little. Where half
of the updates change nothing, there is no median, and the others are scaled to this share of the model. The value is
a convention: half of it and twice as much give the same runs (examples/results/poisoning.md, "Other limits").
"""

STATISTICS_SPREAD = 4.0
"""Running statistics of batch norm of honest agents differ up to 8 times where their weights do up to 3 times.

Their bound is so many times looser, except for an agent whose weights are beyond theirs.
"""

OUTLIER_SHARE = 0.25
"""What an outlier (`directions.outliers`) adds to the sum at most, in medians of the round.

Of four updates that are alike otherwise it leaves the outlier a thirteenth of the sum. Half and twice as much cost the
same within 0.04 points; without the limit attacks cost up to 0.2 points more (examples/results/poisoning.md, "Other
limits").
"""

ROUNDING = 1e-9
"""A share of the sum that exceeds its bound by less than this part of it does so by rounding alone."""


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
            scaled = _scale(weighted, received, self.factors.get(update.client, {}), extras)
            yield self.statistics.apply(scaled)


def find_bounds(
    origin: Origin,
    updates: Updates,
    config: AggregationConfig,
    repeats: Mapping[str, int] = MappingProxyType({}),
) -> Reading[Bounds]:
    """Find what has to be done to the updates of a round.

    Args:
        origin: What the updates are changes of.
        updates: Gives the updates, for what is no pass over them.
        config: The bounds.
        repeats: Agent -> its count of rounds at a bound of size before this one.
    """
    method = origin.method
    class_arrays = method.class_statistics if config.max_class_mean is not None else None
    origin = replace(origin, received=_drop_class_arrays(origin.received, class_arrays))
    # Step 1: sizes and sample counts, each by itself.
    measured = yield from read(Measure(), origin)
    sizes = _bound_sizes(measured, _measure_model(origin.received), config)
    factors = _drop_class_means(sizes.factors, class_arrays)
    samples = _cap_samples(method, measured, config)
    caps = dict(samples.caps)
    suspects = {**sizes.suspects, **samples.suspects}
    if len(measured) < LEAST_UPDATES:
        # Directions and shares need a median. Nothing is a bound here, so nobody is at one: counts stay as they are.
        unchanged = {change.client: repeats[change.client] for change in measured if change.client in repeats}
        return Bounds(factors, caps, (), suspects, len(measured), repeats=unchanged)
    # Step 2: where the changes point. An update whose size is suspect keeps that reason: it says more than a cosine.
    judgement = yield from _judge_directions(origin, measured, config)
    suspects = {**_explain_directions(judgement.directions, config), **suspects}
    # Step 3: what each adds to the sum. It comes after both, as it follows from bounded sizes, counts and directions.
    counts: dict[str, int] = {}
    if config.max_share is not None:
        shares = _Shares(method, measured, factors, caps)
        counts = shares.count_repeats(config, repeats)
        repeaters = shares.find_repeaters(config, repeats)
        caps |= shares.bound(config, judgement, repeaters)
    # Step 4: what the updates say about classes, which no bound on the model sees.
    statistics = StatisticBounds()
    if class_arrays is not None:
        statistics = find_statistic_bounds(class_arrays, updates, config)
    suspects = {**statistics.suspects, **suspects}
    return Bounds(factors, caps, judgement.opposed, suspects, len(measured), statistics, counts)


def _drop_class_arrays(received: Tensors, class_arrays: ClassStatistics | None) -> Tensors:
    """Drop class means that travel as a part of the model (FedProto): they have bounds of their own."""
    if class_arrays is None:
        return received
    return {name: array for name, array in received.items() if name not in class_arrays.names}


def _drop_class_means(
    factors: dict[str, dict[str, float]], class_arrays: ClassStatistics | None
) -> dict[str, dict[str, float]]:
    """Drop the factors of class means where their lengths are bounded class by class, so that it is not done twice."""
    if class_arrays is None:
        return factors
    remaining: dict[str, dict[str, float]] = {}
    for agent, by_group in factors.items():
        others = {group: factor for group, factor in by_group.items() if group != CLASS_MEANS}
        if others:
            remaining[agent] = others
    return remaining


# --- sample counts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SampleBounds:
    """What is done to the sample counts of a round."""

    caps: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Agent -> declared and counted samples, of those that count with fewer."""

    suspects: Mapping[str, str] = field(default_factory=dict)
    """Agent -> why its sample count is suspect."""


def _cap_samples(method: Method, measured: Sequence[Measured], config: AggregationConfig) -> _SampleBounds:
    """Bound the sample counts of a round by ``max_weight`` times their median."""
    if method.weighting != "samples" or config.max_weight is None:
        return _SampleBounds()
    declared_samples = {change.client: change.weight for change in measured}
    # Of fewer updates nobody can tell which count is the usual one.
    if len(declared_samples) < LEAST_UPDATES:
        return _SampleBounds()
    bound = config.max_weight * median(declared_samples.values())
    # By default this is 50 times the median; counts of honest clients were at most 12 times it.
    suspect_count = SUSPECT * bound
    caps: dict[str, tuple[float, float]] = {}
    suspects: dict[str, str] = {}
    for agent, declared in sorted(declared_samples.items()):
        if declared > bound:
            caps[agent] = (declared, bound)
        if declared > suspect_count:
            times = _show_times(declared, bound)
            suspects[agent] = f"declared {declared:g} samples, {times} the bound of the round"
    return _SampleBounds(caps, suspects)


# --- directions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Judgement:
    """What the directions of a round's updates cost them."""

    directions: Mapping[str, Mapping[str, Direction]] = field(default_factory=dict)
    """Group of tensors -> agent -> its direction; empty where directions do not count."""

    trusts: Mapping[str, float] = field(default_factory=dict)
    """Agent -> share (0..1) of its weight that its directions leave it, of those below the limit."""

    opposed: tuple[str, ...] = ()
    """Agents that are left out of the round."""


def _judge_directions(origin: Origin, measured: Sequence[Measured], config: AggregationConfig) -> Reading[_Judgement]:
    """Judge the directions of the updates of a round, by the limit ``min_cosine``."""
    if config.min_cosine is None:
        return _Judgement()
    directions = yield from find_directions(origin, _norms_by_group(measured))
    # An agent is judged by the worst of its groups: one that sends an honest encoder may attack with its classifier.
    trusts: dict[str, float] = {}
    for _, agent, direction in _below_limit(directions, config.min_cosine):
        trusts[agent] = min(trusts.get(agent, 1.0), direction.trust(config.min_cosine))
    opposed = tuple(sorted(agent for agent, trust in trusts.items() if trust == 0))
    if 2 * len(opposed) >= len(measured):
        # Half of the updates point against the rest, and nobody can tell which half is right: no direction counts.
        return _Judgement()
    return _Judgement(directions, trusts, opposed)


def _explain_directions(directions: Mapping[str, Mapping[str, Direction]], config: AggregationConfig) -> dict[str, str]:
    """Return agent -> which of its tensors point against those of the others, of those below the limit."""
    reasons: dict[str, str] = {}
    if config.min_cosine is None:
        return reasons
    for group, agent, direction in _below_limit(directions, config.min_cosine):
        subject = "its change of the model points" if group == WEIGHTS else f"its {group} point"
        reason = f"{subject} against those of the others: {_show_cosines(direction)}"
        # Of several groups the first one says enough.
        reasons.setdefault(agent, reason)
    return reasons


def _below_limit(
    directions: Mapping[str, Mapping[str, Direction]], limit: float
) -> Iterator[tuple[str, str, Direction]]:
    """Yield group of tensors, agent and direction of each direction whose decisive cosine is below a limit."""
    for group, by_agent in directions.items():
        for agent, direction in by_agent.items():
            if direction.decisive < limit:
                yield group, agent, direction


def _show_cosines(direction: Direction) -> str:
    """Return the cosines of a direction as text."""
    to_others = f"cosine {direction.to_others:.2f}"
    if direction.along_way is None:
        return to_others
    return f"{to_others}, along the way of the run {direction.along_way:.2f}"


# --- shares of the sum -----------------------------------------------------------------------------------------------


class _Shares:
    """What each update adds to the sum of a round: its weight times the norm of its bounded change.

    Both factors have bounds of their own, which would multiply: five times the change for five times the samples is 25
    votes. So their product has one, too.
    """

    def __init__(
        self,
        method: Method,
        measured: Sequence[Measured],
        factors: Mapping[str, Mapping[str, float]],
        caps: Mapping[str, tuple[float, float]],
    ) -> None:
        """``factors`` and ``caps``: the bounds of sizes and sample counts, as in `Bounds`."""
        self._declared: dict[str, float] = {}
        """Agent -> the weight that it declared."""

        self._sent: dict[str, float] = {}
        """Agent -> what it would add without any bound."""

        self._weights: dict[str, float] = {}
        """Agent -> the weight that it counts with."""

        self._shares: dict[str, float] = {}
        """Agent -> what it adds within the bounds of sizes and sample counts."""

        for change in measured:
            agent = change.client
            declared = change.weight if method.weighting == "samples" else 1.0
            weight = caps[agent][1] if agent in caps else declared
            sent_norm = change.norms.get(WEIGHTS, 0.0)
            norm = sent_norm * factors.get(agent, {}).get(WEIGHTS, 1.0)
            self._declared[agent] = declared
            self._sent[agent] = declared * sent_norm
            self._weights[agent] = weight
            self._shares[agent] = weight * norm

    def count_repeats(self, config: AggregationConfig, before: Mapping[str, int]) -> dict[str, int]:
        """Count whose declared samples times their whole change come near to ``max_share`` medians, or exceed them."""
        if config.repeat_share is None or config.max_share is None:
            return {}
        bound = NEAR_BOUND * config.max_share * median(self._shares.values())
        at_bound = frozenset(agent for agent, sent in self._sent.items() if sent >= bound > 0)
        return count_repeats(before, self._sent, at_bound)

    def find_repeaters(self, config: AggregationConfig, before: Mapping[str, int]) -> frozenset[str]:
        """Return the agents that were at the bound again and again before this round."""
        if config.repeat_share is None:
            return frozenset()
        return frozenset(agent for agent in self._sent if is_repeater(before.get(agent, 0)))

    def bound(
        self, config: AggregationConfig, judgement: _Judgement, repeaters: frozenset[str]
    ) -> dict[str, tuple[float, float]]:
        """Return agent -> declared and counted weight, of those whose share of the sum is above its bound.

        Args:
            config: The bounds.
            judgement: Where the updates point. Those that are left out for it add nothing to the sum.
            repeaters: `find_repeaters` of the round.
        """
        middle = median(self._shares.values())
        # Where half of the updates add nothing there is no unit to bound the others by; the bound of sizes holds.
        if not middle > 0:
            return {}
        # Step 1: each by itself, in medians of the round, by where it points.
        directions = judgement.directions.get(WEIGHTS, {})
        far = outliers(directions)
        bounded: dict[str, float] = {}
        for agent, share in self._shares.items():
            if agent in judgement.opposed:
                continue
            most = _most_medians(config, directions.get(agent), is_outlier=agent in far, is_repeater=agent in repeaters)
            bounded[agent] = min(share, most * middle) * judgement.trusts.get(agent, 1.0)
        # Step 2: one after another against the sum of all. Their own bounds hold by now, so no sum is inflated.
        bounded = limit_to_sum(bounded, middle, repeaters)
        # Step 3: as weights. What rounding alone has changed stays as it is: honest rounds keep the bits of the mean.
        caps: dict[str, tuple[float, float]] = {}
        for agent, bound in bounded.items():
            share = self._shares[agent]
            if share > bound * (1 + ROUNDING):
                caps[agent] = (self._declared[agent], self._weights[agent] * bound / share)
        return caps


def _most_medians(
    config: AggregationConfig, direction: Direction | None, *, is_outlier: bool, is_repeater: bool
) -> float:
    """Return how many medians of the round an update adds to the sum at most.

    Args:
        config: The bounds.
        direction: Direction of its weights; None where that is not known.
        is_outlier: Whether it points against the others as hardly any other does.
        is_repeater: Whether its agent was at the bound again and again.
    """
    if is_outlier:
        return OUTLIER_SHARE
    # It pulls the model neither where the others do nor where the run goes: its size gives it no more votes.
    pulls_elsewhere = direction is not None and direction.decisive <= 0
    if pulls_elsewhere:
        return 1.0
    bounds = [math.inf]
    if config.max_share is not None:
        bounds.append(config.max_share)
    if is_repeater and config.repeat_share is not None:
        bounds.append(config.repeat_share)
    return min(bounds)


# --- sizes -----------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The size of one update; in JSON it is a list."""

    client: str
    weight: float
    norms: dict[str, float]
    """Group of tensors -> norm of the change."""


class MeasuredSizes(PassValues):
    """The answer of `Measure`."""

    sizes: list[Measured]


@dataclass(frozen=True)
class Measure(Pass[list[Measured]]):
    """The size of each update, in the order of agents."""

    name: ClassVar[str] = "measure"

    def over(self, origin: Origin, updates: Iterable[Update]) -> list[Measured]:
        """Return the sizes of these updates."""
        return [_measure(update, origin.received, origin.extras) for update in updates]

    def join(self, answers: Iterable[list[Measured]]) -> list[Measured]:
        """Return the sizes of all parts, in the order of agents."""
        return sorted(itertools.chain.from_iterable(answers), key=lambda change: change.client)

    def covers(self, answer: list[Measured], clients: Collection[str]) -> bool:
        """Return whether each of these clients has one size, and nobody else has."""
        return sorted(change.client for change in answer) == sorted(clients)

    def is_exact(self, answer: list[Measured]) -> bool:  # noqa: ARG002 - each size is of one update alone
        """Return True: each size is of one update alone."""
        return True

    def to_packet(self, clients: Sequence[str]) -> Packet:  # noqa: ARG002 - nothing is needed
        """Return nothing: a size depends on the update alone."""
        return Packet.from_values(PassValues())

    @classmethod
    def from_packet(cls, packet: Packet) -> Measure:  # noqa: ARG003 - nothing is needed
        """Return the pass, which needs nothing of the packet."""
        return cls()

    def pack(self, answer: list[Measured]) -> Packet:
        """Return agent, weight and norms of each update, as JSON."""
        return Packet.from_values(MeasuredSizes(sizes=answer))

    def unpack(self, packet: Packet) -> list[Measured]:
        """Return the sizes that `pack` has packed.

        Raises:
            TensorsError: The packet holds no sizes.
        """
        return packet.values_as(MeasuredSizes).sizes


class BoundsOfClients(PassValues):
    """What `SumBounded` needs of `Bounds` for some of the clients."""

    factors: dict[str, dict[str, float]]
    caps: dict[str, tuple[float, float]]
    opposed: tuple[str, ...]


@dataclass(frozen=True)
class SumBounded(Pass[WeightedSum]):
    """The sum of the updates within their bounds, from which the method makes the next state."""

    name: ClassVar[str] = "sum"
    bounds: Bounds = field(default_factory=Bounds)

    def over(self, origin: Origin, updates: Iterable[Update]) -> WeightedSum:
        """Return the sum of these updates, each within its bounds."""
        total = WeightedSum()
        for update in self.bounds.apply(updates, origin.received, origin.extras):
            origin.method.fold(total, update)
        return total

    def join(self, answers: Iterable[WeightedSum]) -> WeightedSum:
        """Return the sum of all parts.

        Raises:
            TensorsError: Arrays of one name have different shapes.
        """
        total = WeightedSum()
        for one in answers:
            total.merge(one)
        return total

    def is_exact(self, answer: WeightedSum) -> bool:
        """Return whether any division into parts gives this sum.

        Of a single update methods take the arrays themselves (`WeightedSum.only`), which no partial sum has.
        """
        return answer.is_exact and answer.count != 1

    def covers(self, answer: WeightedSum, clients: Collection[str]) -> bool:
        """Return whether the sum has as many addends as there are clients whose updates are not left out."""
        return answer.count == sum(client not in self.bounds.opposed for client in clients)

    def to_packet(self, clients: Sequence[str]) -> Packet:
        """Return the bounds of these clients; none has bounds on statistics of classes."""
        factors = {client: self.bounds.factors[client] for client in clients if client in self.bounds.factors}
        caps = {client: self.bounds.caps[client] for client in clients if client in self.bounds.caps}
        opposed = tuple(client for client in clients if client in self.bounds.opposed)
        return Packet.from_values(BoundsOfClients(factors=factors, caps=caps, opposed=opposed))

    @classmethod
    def from_packet(cls, packet: Packet) -> SumBounded:
        """Return the pass with the bounds that `to_packet` has packed.

        Raises:
            TensorsError: The packet holds no bounds.
        """
        bounds = packet.values_as(BoundsOfClients)
        return cls(Bounds(bounds.factors, bounds.caps, bounds.opposed))

    def pack(self, answer: WeightedSum) -> Packet:
        """Return the sum as named arrays."""
        return Packet.from_values(PassValues(), answer.to_tensors())

    def unpack(self, packet: Packet) -> WeightedSum:
        """Return the sum that `pack` has packed.

        Raises:
            TensorsError: The packet holds no sum, or a damaged one.
        """
        return WeightedSum.from_tensors(packet.tensors)


def _group(name: str, array: np.ndarray, received: Tensors, extras: Mapping[str, str]) -> str:
    """Return the group of tensors whose common norm has a bound; empty for an array that has none.

    Weights, running statistics and bounded extras have norms of their own size.
    """
    if array.dtype.kind != "f":
        return ""
    if name.startswith("extra."):
        return extra_group(name, extras)
    if name not in received:
        return ""
    return WEIGHTS if is_learned(name, array) else STATISTICS


def _origin(name: str, received: Tensors) -> np.ndarray | float:
    """Return what an array of an update is a change from; extra arrays are bounded as they are."""
    return 0.0 if name.startswith("extra.") else received[name]


def norms_of(method: Method, state: State, updates: Iterable[Update]) -> dict[str, dict[str, float]]:
    """Group of tensors (weights, statistics, those of `Method.bounded_extras`) -> agent -> norm of its change."""
    return _norms_by_group(Measure().over(Origin(method, method.broadcast(state)), updates))


def _norms_by_group(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return group of tensors -> agent -> norm."""
    norms: dict[str, dict[str, float]] = {}
    for change in measured:
        for group, norm in change.norms.items():
            norms.setdefault(group, {})[change.client] = norm
    return norms


def _measure(update: Update, received: Tensors, extras: Mapping[str, str]) -> Measured:
    """Measure the norm of an update's change in each group of tensors."""
    squares: dict[str, float] = {}
    for name, array in update.tensors.items():
        group = _group(name, array, received, extras)
        if not group:
            continue
        square = _square(array, _origin(name, received))
        if group == CLASS_MEANS:
            # Agents have more or fewer classes, so it is the norm of the mean class.
            square /= max(1, int(array.any(axis=1).sum()))
        squares[group] = squares.get(group, 0.0) + square
    return Measured(update.client, update.weight, _roots(squares))


def _measure_model(received: Tensors) -> dict[str, float]:
    """Return group of tensors -> norm of what clients received."""
    squares: dict[str, float] = {}
    for name, array in received.items():
        group = _group(name, array, received, {})
        if group:
            squares[group] = squares.get(group, 0.0) + _square(array, 0.0)
    return _roots(squares)


def _roots(squares: Mapping[str, float]) -> dict[str, float]:
    """Return group of tensors -> norm, from the sums of squares."""
    return {group: float(np.sqrt(square)) for group, square in squares.items()}


def _square(array: np.ndarray, origin: np.ndarray | float, block: int = 1 << 16) -> float:
    """Return the sum of squares of array - origin, float64, computed in blocks that stay in cache."""
    flat = array.reshape(-1)
    total = 0.0
    before = origin.reshape(-1) if isinstance(origin, np.ndarray) else None
    # An update that is too large for float64 has the norm infinity, and is scaled to nothing.
    with np.errstate(over="ignore"):
        for begin in range(0, flat.size, block):
            part = flat[begin : begin + block].astype(np.float64)
            if before is not None:
                part -= before[begin : begin + block]
            total += float(np.square(part, out=part).sum())
    return total


@dataclass
class _SizeBounds:
    """What is done to the sizes of a round's changes."""

    factors: dict[str, dict[str, float]] = field(default_factory=dict)
    """Agent -> group of tensors -> the factor (0..1) that its change is scaled by, of those that are scaled down."""

    suspects: dict[str, str] = field(default_factory=dict)
    """Agent -> why the size of its change is suspect."""

    def scale(self, agent: str, group: str, factor: float) -> None:
        """Scale an agent's change of a group of tensors by a factor."""
        self.factors.setdefault(agent, {})[group] = factor


def _bound_sizes(
    measured: Sequence[Measured], model_norms: Mapping[str, float], config: AggregationConfig
) -> _SizeBounds:
    """Scale down changes that are far larger than the others', and name the agents that sent absurd ones.

    Args:
        measured: The round's changes with the norm of each group of tensors.
        model_norms: Norm of each group of the model that clients received.
        config: The bounds.
    """
    bounds = _SizeBounds()
    groups = set[str]()
    for change in measured:
        groups.update(change.norms)
    # Weights come first: an agent whose weights are scaled down has no looser bound for its statistics.
    for group in sorted(groups, reverse=True):
        norms = {change.client: change.norms[group] for change in measured if group in change.norms}
        model_norm = model_norms.get(group, 0.0)
        # Two updates have no median, so only one that is absurd beside the other is touched.
        if len(norms) < LEAST_UPDATES:
            _bound_pair(bounds, group, norms, model_norm, config)
        else:
            _bound_by_median(bounds, group, norms, model_norm, config)
    return bounds


def _bound_pair(
    bounds: _SizeBounds, group: str, norms: Mapping[str, float], model_norm: float, config: AggregationConfig
) -> None:
    """Scale the larger of two changes to the other one, where it is absurd beside that and beside the model.

    Neither agent is marked as a suspect, because with two agents nobody can tell which one is honest. A single change
    is not scaled.
    """
    if len(norms) < 2 or config.max_norm is None:
        return
    least = min(norms.values())
    bound = max(SUSPECT * _spread_of(group) * least, model_norm)
    for agent, norm in norms.items():
        if norm > bound > 0:
            bounds.scale(agent, group, least / norm)


def _bound_by_median(
    bounds: _SizeBounds, group: str, norms: Mapping[str, float], model_norm: float, config: AggregationConfig
) -> None:
    """Scale changes down to the median of the round that exceed it too many times.

    Args:
        bounds: Gets the factors and the suspects.
        group: The group of tensors.
        norms: Agent -> norm of its change of the group, of three or more agents.
        model_norm: Norm of the group in the model that clients received.
        config: The bounds.
    """
    # By rule "clipped" every change above the median is too large.
    most_medians = 1.0 if config.rule == "clipped" else config.max_norm
    if most_medians is None:
        return
    # Step 1: what changes are measured by. That is the median; where half of the updates change nothing there is no
    # usual change, and what the others change the model by is measured by the model itself.
    middle = _median_norm(norms)
    unit = middle
    unit_name = "the median of the round"
    is_mostly_unchanged = middle == 0
    if is_mostly_unchanged:
        unit = SUSPECT_SHARE * model_norm
        unit_name = "the bound of a round in which half change nothing"
    # Step 2: what no honest agent sends, far beyond the others, and large beside the model itself.
    spread = _spread_of(group)
    suspect_norm = max(SUSPECT * spread * middle, SUSPECT_SHARE * model_norm)
    subject = f"the norm of its {group}"
    if group in {WEIGHTS, STATISTICS}:
        subject = "its change of the model"
    for agent, norm in norms.items():
        # The unit itself is the bound where it is no median, and for whoever is beyond a bound in another group.
        is_strict = is_mostly_unchanged or agent in bounds.factors
        bound = unit if is_strict else unit * (most_medians * spread)
        if norm > bound:
            bounds.scale(agent, group, unit / norm)
        if unit and norm > suspect_norm:
            bounds.suspects[agent] = f"{subject} is {_show_times(norm, unit)} {unit_name}"


def _median_norm(norms: Mapping[str, float]) -> float:
    """Return the median of agent -> norm.

    Clients without a change count, or the others' median would be that of few, who may all be hostile. Of two norms in
    the middle the larger is the median then: half way between no change and another one is nobody's change.
    """
    has_unchanged = 0.0 in norms.values()
    if has_unchanged:
        return median_high(norms.values())
    return median(norms.values())


def _spread_of(group: str) -> float:
    """Return how many times looser the bound of a group of tensors is than that of the weights."""
    return STATISTICS_SPREAD if group == STATISTICS else 1.0


def _show_times(value: float, unit: float) -> str:
    """Return how many times a value is as large as a unit, as text."""
    return f"{value / unit:.3g} times"


def _scale(update: Update, received: Tensors, factors: Mapping[str, float], extras: Mapping[str, str]) -> Update:
    """Return the update with the changes of each group scaled by its factor; itself where there are none."""
    if not factors:
        return update
    tensors = {}
    for name, array in update.tensors.items():
        factor = factors.get(_group(name, array, received, extras), 1.0)
        if factor < 1.0:
            tensors[name] = _scale_change(array, _origin(name, received), factor)
        else:
            tensors[name] = array
    return replace(update, tensors=tensors)


def _scale_change(array: np.ndarray, origin: np.ndarray | float, factor: float) -> np.ndarray:
    """Return the array with its difference from the origin scaled by a factor (0..1), in the type of the array."""
    before = np.asarray(origin, np.float64)
    # Without this order two values of opposite sign near the largest float64 would make an infinity.
    scaled = before * (1.0 - factor) + array.astype(np.float64) * factor
    return scaled.astype(array.dtype)
