"""Whether updates of a round point against the others and against the way of the run so far.

A lie that is small enough for every bound of size still has to pull the model back. It shows in two cosines of a
change of the weights:

- to the sum of the others' changes, each of them shortened to the median length, whatever sample counts they declare;
- to the way of the run: what the shared model has changed since its start.

Neither is enough alone. Clients with few classes point against the others once they have learned (cosines down to
-0.85 among four clients of two classes each), yet along the way, which their own updates have made. An update counts
as opposed where both cosines are below the limit; in the first round, which has no way behind it, where the first is.
Measured on digits with FedAvg, FedPAC and FedPick, 4 and 20 clients, Dirichlet 0.5 and 0.1, two classes each and
quantities by Dirichlet 0.5, 15 to 25 rounds: the larger of the two cosines of an honest update was never below -0.16,
and in all but a handful of rounds above -0.1. Updates turned round have -0.2 to -0.9.

Classifiers and class means that travel as extra arrays (FedPAC) are compared with those of the others alone: of honest
clients they were never below 0.3.

Two passes over the updates, one after another: memory is one exact sum, however many updates there are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, NamedTuple

import numpy as np

from edge_agent.core.exact_sum import ExactSum
from edge_agent.core.task import Tensors
from edge_agent.core.weighted_sum import exact_from_tensors, exact_to_tensors
from edge_agent.methods import Update
from edge_agent.methods.base import CLASS_MEANS, CLASSIFIERS, is_learned

from .passes import Origin, Packet, Pass, PassValues, Reading, read

WEIGHTS = "weights"
COMPARED = (WEIGHTS, CLASSIFIERS, CLASS_MEANS)
"""Groups of tensors whose direction is compared."""

RAMP = 0.15
"""An update this far below the limit counts nothing; between both its weight falls in proportion.

With the limit of -0.1 that is -0.25: below what honest updates had (-0.16 at the least), and above most that were
turned round.
"""

STRAIGHT_BACK = -0.3
"""Below this cosine along the way that to the others does not help: some that act together are aligned with each other.

Honest clients were above -0.23, but for the second round of FedPAC, whose way is a single step from a random head.
"""

AGAINST_OTHERS = -0.25
"""An update whose cosine to the others is below this may be an outlier; see `BELOW_MEDIAN`."""

BELOW_MEDIAN = 0.5
"""An outlier's cosine to the others is also so far below the median of the round.

Where all clients differ so much that most have cosines below `AGAINST_OTHERS`, nobody is an outlier. Honest clients of
two classes each have them down to -0.85.
"""

ROUNDING_OF_SUM = 1e-10
"""A sum of the others whose squared norm is below this part of that of all is nothing but rounding."""

BLOCK = 1 << 16
"""Numbers that are looked at together, so that no copy of a whole tensor is made."""


@dataclass(frozen=True)
class Direction:
    """The cosines of one update's group of tensors."""

    to_others: float
    along_way: float | None = None
    """None where there is no way: in the first round, and for groups other than the weights."""

    @property
    def decisive(self) -> float:
        """The cosine that counts: the larger one, but that along the way for an update that goes straight back."""
        if self.along_way is None:
            return self.to_others
        if self.along_way < STRAIGHT_BACK:
            return self.along_way
        return max(self.to_others, self.along_way)

    def trust(self, limit: float) -> float:
        """Return the share (0..1) of its weight that an update keeps: all of it at ``limit``, nothing `RAMP` below."""
        missing = limit - self.decisive
        return min(1.0, max(0.0, 1.0 - missing / RAMP))


def is_extra(name: str) -> bool:
    """Return whether an array of an update travels beside the model: it is no change of anything that was received."""
    return name.startswith("extra.")


def extra_group(name: str, extras: Mapping[str, str]) -> str:
    """Return the group of an extra array by the prefixes of `Method.bounded_extras`; empty where it is not bounded."""
    for prefix, group in extras.items():
        if name.startswith(prefix):
            return group
    return ""


@dataclass(frozen=True)
class Shares:
    """The factors that shorten changes to the median length, so that nobody's counts for two in their sum."""

    by_group: Mapping[str, Mapping[str, float]]
    """Group of tensors -> agent -> its factor (0..1); changes of infinite length are left out."""

    @classmethod
    def from_norms(cls, norms: Mapping[str, Mapping[str, float]]) -> Shares:
        """Return the factors for changes of these norms: group of tensors -> agent -> norm."""
        by_group: dict[str, dict[str, float]] = {}
        for group, by_agent in norms.items():
            middle = median(by_agent.values())
            finite = {agent: norm for agent, norm in by_agent.items() if math.isfinite(norm)}
            by_group[group] = {agent: 1.0 if norm <= middle else middle / norm for agent, norm in finite.items()}
        return cls(by_group)

    def of_agents(self, agents: Collection[str]) -> dict[str, dict[str, float]]:
        """Return the factors of these agents alone: group of tensors -> agent -> factor."""
        return {
            group: {agent: share for agent, share in by_agent.items() if agent in agents}
            for group, by_agent in self.by_group.items()
        }

    def compared(self, origin: Origin, update: Update) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield group, name and array of the tensors of an update whose direction is compared."""
        for name, array in update.tensors.items():
            group = extra_group(name, origin.extras)
            if name in origin.received and is_learned(name, array):
                group = WEIGHTS
            if group not in COMPARED or array.dtype.kind != "f":
                continue
            if update.client in self.by_group.get(group, {}):
                yield group, name, array


class SharesOfAgents(PassValues):
    """What `SumOfChanges` needs of `Shares` for some of the agents."""

    shares: dict[str, dict[str, float]]


@dataclass(frozen=True)
class SumOfChanges(Pass[dict[str, ExactSum]]):
    """The sum of all changes, each at most as long as the median: name of a tensor -> sum (n,)."""

    name: ClassVar[str] = "sum-of-changes"
    shares: Shares

    def over(self, origin: Origin, updates: Iterable[Update]) -> dict[str, ExactSum]:
        """Return the sum of the changes of these updates."""
        sums: dict[str, ExactSum] = {}
        for update in updates:
            for group, name, array in self.shares.compared(origin, update):
                share = self.shares.by_group[group][update.client]
                if not share:
                    continue
                before = None if is_extra(name) else origin.received[name]
                sums.setdefault(name, ExactSum((array.size,))).add(array, share, before)
        return sums

    def join(self, answers: Iterable[dict[str, ExactSum]]) -> dict[str, ExactSum]:
        """Return the sums of all parts.

        Raises:
            TensorsError: Arrays of one name have different shapes.
        """
        joined: dict[str, ExactSum] = {}
        for sums in answers:
            for name, one in sums.items():
                joined.setdefault(name, ExactSum(one.coarse.shape)).merge(one)
        return joined

    def is_exact(self, answer: dict[str, ExactSum]) -> bool:
        """Return whether any division into parts gives these sums."""
        return all(one.is_exact for one in answer.values())

    def to_packet(self, clients: Sequence[str]) -> Packet:
        """Return the factors of these clients."""
        return Packet.from_values(SharesOfAgents(shares=self.shares.of_agents(frozenset(clients))))

    @classmethod
    def from_packet(cls, packet: Packet) -> SumOfChanges:
        """Return the pass with the factors that `to_packet` has packed.

        Raises:
            TensorsError: The packet holds no factors.
        """
        return cls(Shares(packet.values_as(SharesOfAgents).shares))

    def pack(self, answer: dict[str, ExactSum]) -> Packet:
        """Return the sums as named arrays."""
        return Packet.from_values(PassValues(), exact_to_tensors(answer))

    def unpack(self, packet: Packet) -> dict[str, ExactSum]:
        """Return the sums that `pack` has packed.

        Raises:
            TensorsError: The packet holds no sums, or damaged ones.
        """
        return exact_from_tensors(packet.tensors)


class Products(NamedTuple):
    """The inner products of one update's changes; in JSON they are a list."""

    with_sum: Mapping[str, float]
    """Group of tensors -> the product with the sum of all changes."""

    with_way: float
    """The product of its change of the weights with the way of the run; 0 where there is no way."""


class FactorsOfProducts(SharesOfAgents):
    """What `MultiplyChanges` needs beside the sums."""

    has_way: bool


class ProductsOfAgents(PassValues):
    """The answer of `MultiplyChanges`."""

    products: dict[str, Products]


@dataclass(frozen=True)
class MultiplyChanges(Pass[dict[str, Products]]):
    """The inner products of each change with the sum of all, and with the way of the run: agent -> products."""

    name: ClassVar[str] = "multiply-changes"
    shares: Shares
    sums: Tensors
    """Name of a tensor -> sum of the changes (n,) float32."""

    has_way: bool
    """Whether the run has changed the weights since its start."""

    def over(self, origin: Origin, updates: Iterable[Update]) -> dict[str, Products]:
        """Return the products of these updates."""
        products: dict[str, Products] = {}
        for update in updates:
            with_sum: dict[str, float] = {}
            with_way = 0.0
            for group, name, array in self.shares.compared(origin, update):
                for begin, change in _blocks_of_change(origin, name, array):
                    part = slice(begin, begin + BLOCK)
                    product = _inner_product(change, self.sums[name][part])
                    with_sum[group] = with_sum.get(group, 0.0) + product
                    if group == WEIGHTS and self.has_way:
                        with_way += _product_with_way(origin, name, change, part)
            products[update.client] = Products(with_sum, with_way)
        return products

    def join(self, answers: Iterable[dict[str, Products]]) -> dict[str, Products]:
        """Return the products of all parts, in the order of agents."""
        joined: dict[str, Products] = {}
        for products in answers:
            joined |= products
        return dict(sorted(joined.items()))

    def covers(self, answer: dict[str, Products], clients: Collection[str]) -> bool:
        """Return whether each of these clients has products, and nobody else has."""
        return answer.keys() == set(clients)

    def is_exact(self, answer: dict[str, Products]) -> bool:  # noqa: ARG002 - each product is of one update alone
        """Return True: each product is of one update alone."""
        return True

    def to_packet(self, clients: Sequence[str]) -> Packet:
        """Return the factors of these clients, and the sums."""
        shares = self.shares.of_agents(frozenset(clients))
        return Packet.from_values(FactorsOfProducts(shares=shares, has_way=self.has_way), self.sums)

    @classmethod
    def from_packet(cls, packet: Packet) -> MultiplyChanges:
        """Return the pass with the factors and sums that `to_packet` has packed.

        Raises:
            TensorsError: The packet holds no factors.
        """
        factors = packet.values_as(FactorsOfProducts)
        return cls(Shares(factors.shares), packet.tensors, factors.has_way)

    def pack(self, answer: dict[str, Products]) -> Packet:
        """Return the products of each agent, as JSON."""
        return Packet.from_values(ProductsOfAgents(products=answer))

    def unpack(self, packet: Packet) -> dict[str, Products]:
        """Return the products that `pack` has packed.

        Raises:
            TensorsError: The packet holds no products.
        """
        return packet.values_as(ProductsOfAgents).products


def find_directions(
    origin: Origin, norms: Mapping[str, Mapping[str, float]]
) -> Reading[dict[str, dict[str, Direction]]]:
    """Return group of tensors -> agent -> its direction.

    An agent is left out whose change is 0 or infinite, or whose others have changes that add up to 0.

    Args:
        origin: What the updates are changes of.
        norms: Group of tensors -> agent -> norm of its change.
    """
    # Step 1: the sum of all changes, each at most as long as the median, so that nobody's counts for two.
    shares = Shares.from_norms({group: by_agent for group, by_agent in norms.items() if group in COMPARED})
    exact = yield from read(SumOfChanges(shares), origin)
    sums = {name: exact.pop(name).total().astype(np.float32) for name in sorted(exact)}
    # Step 2: the cosines of each change to that sum without itself, and to the way. They need the whole sum, so the
    # updates are read a second time.
    way_length = _length_of_way(origin)
    squared_sums = _squared_sums(sums, origin.extras)
    products = yield from read(MultiplyChanges(shares, sums, has_way=way_length > 0), origin)
    directions: dict[str, dict[str, Direction]] = {}
    for agent, of_agent in products.items():
        for group, product in of_agent.with_sum.items():
            norm = norms[group][agent]
            to_others = _cosine_to_rest(product, norm, shares.by_group[group][agent], squared_sums[group])
            if to_others is None:
                continue
            along_way = None
            if group == WEIGHTS and way_length:
                along_way = of_agent.with_way / (norm * way_length)
            directions.setdefault(group, {})[agent] = Direction(to_others, along_way)
    return directions


def _blocks_of_change(origin: Origin, name: str, array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield begin and values (float64) of the blocks of a change; extra arrays are compared as they are."""
    return _differences(array, None if is_extra(name) else origin.received[name])


def _product_with_way(origin: Origin, name: str, change: np.ndarray, part: slice) -> float:
    """Return the inner product of a block of a change with what the run has changed it by since its start."""
    if origin.start is None or name not in origin.start:
        return 0.0
    now = origin.received[name].reshape(-1)[part].astype(np.float64)
    then = origin.start[name].reshape(-1)[part]
    return _inner_product(change, now - then)


def _length_of_way(origin: Origin) -> float:
    """Return the norm of what the run has changed the weights by; 0 where that is not known."""
    if origin.start is None:
        return 0.0
    total = 0.0
    for name, array in origin.received.items():
        if name in origin.start and is_learned(name, array):
            total += sum(_inner_product(part, part) for _, part in _differences(array, origin.start[name]))
    return math.sqrt(total)


def _squared_sums(sums: Tensors, extras: Mapping[str, str]) -> dict[str, float]:
    """Return group of tensors -> squared norm of its sum."""
    totals: dict[str, float] = {}
    for name, array in sums.items():
        group = extra_group(name, extras) or WEIGHTS
        flat = array.astype(np.float64)
        totals[group] = totals.get(group, 0.0) + _inner_product(flat, flat)
    return totals


def _inner_product(change: np.ndarray, other: np.ndarray) -> float:
    """Return the inner product of two arrays (n,), computed in float64, with the same bits on every processor.

    The last bits of ``change @ other`` are those of a BLAS that is made for the processor at hand, so aggregators on
    unlike machines would disagree. numpy adds in one order everywhere.
    """
    return float(np.multiply(change, other, dtype=np.float64).sum())


def _differences(array: np.ndarray, origin: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield begin and values (float64) of the blocks of array - origin; of the array itself without an origin."""
    flat = array.reshape(-1)
    before = None if origin is None else origin.reshape(-1)
    for begin in range(0, flat.size, BLOCK):
        part = flat[begin : begin + BLOCK].astype(np.float64)
        if before is not None:
            part -= before[begin : begin + BLOCK]
        yield begin, part


def _cosine_to_rest(product: float, norm: float, share: float, total: float) -> float | None:
    """Return the cosine of a change to the sum of the others' changes; None where either is 0, or not finite.

    Args:
        product: Inner product of the change with the sum of all.
        norm: Norm of the change.
        share: The factor that the change is in that sum with.
        total: Squared norm of that sum.
    """
    # The change itself is taken out of product and sum, so that no third reading of the updates is needed.
    rest_product = product - share * norm**2
    rest_square = total - 2 * share * product + (share * norm) ** 2
    # What is left of a sum that cancels out is rounding, in float32.
    has_rest = rest_square > ROUNDING_OF_SUM * total
    if not norm > 0 or not has_rest or not np.isfinite(rest_product):
        return None
    return rest_product / (norm * float(np.sqrt(rest_square)))


def outliers(directions: Mapping[str, Direction]) -> frozenset[str]:
    """Return the agents whose changes of the weights point against the others' as hardly any other's does."""
    if not directions:
        return frozenset()
    typical = median(direction.to_others for direction in directions.values())
    limit = min(AGAINST_OTHERS, typical - BELOW_MEDIAN)
    return frozenset(agent for agent, direction in directions.items() if direction.to_others < limit)
