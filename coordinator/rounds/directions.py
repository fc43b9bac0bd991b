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

Two passes over the updates, one after another: memory is one model, however many updates there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from edge_agent.core.task import State, Tensors
from edge_agent.methods import Update
from edge_agent.methods.base import CLASS_MEANS, CLASSIFIERS, is_learned

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

Updates = Callable[[], Iterable[Update]]
"""Gives the same updates in the same order each time."""


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


@dataclass
class Comparison:
    """The comparison of one round's updates with each other, and with the way of the run."""

    received: Tensors
    """What the clients started from."""

    extras: Mapping[str, str]
    """`Method.bounded_extras`."""

    norms: Mapping[str, Mapping[str, float]]
    """Group of tensors -> agent -> norm of its change."""

    start: State | None = None
    """The state that the run began with; None where it is not known."""

    _sums: dict[str, np.ndarray] = field(default_factory=dict)
    """Name of a tensor -> sum of the shortened changes, float32."""

    def directions(self, updates: Updates) -> dict[str, dict[str, Direction]]:
        """Return group of tensors -> agent -> its direction.

        An agent is left out whose change is 0 or infinite, or whose others have changes that add up to 0.
        """
        # Step 1: the sum of all changes, each at most as long as the median, so that nobody's counts for two.
        for update in updates():
            for group, name, array in self._compared(update):
                share = self._share(group, update.client)
                if share:
                    self._add(name, array, share)
        # Step 2: the cosines of each change to that sum without itself, and to the way. They need the whole sum, so
        # the updates are read a second time.
        way_length = self._length_of_way()
        squared_sums = self._squared_sums()
        directions: dict[str, dict[str, Direction]] = {}
        for update in updates():
            products, product_with_way = self._multiply(update, has_way=way_length > 0)
            for group, product in products.items():
                norm = self.norms[group][update.client]
                share = self._share(group, update.client)
                to_others = _cosine_to_rest(product, norm, share, squared_sums[group])
                if to_others is None:
                    continue
                along_way = None
                if group == WEIGHTS and way_length:
                    along_way = product_with_way / (norm * way_length)
                directions.setdefault(group, {})[update.client] = Direction(to_others, along_way)
        return directions

    def _multiply(self, update: Update, *, has_way: bool) -> tuple[dict[str, float], float]:
        """Return the inner products of an update's changes with the sums by group, and with the way of the run.

        ``has_way``: whether the second one is computed; it is 0 otherwise.
        """
        products: dict[str, float] = {}
        product_with_way = 0.0
        for group, name, array in self._compared(update):
            products[group] = products.get(group, 0.0) + self._product(name, array, self._sums[name])
            if group == WEIGHTS and has_way:
                product_with_way += self._product_with_way(name, array)
        return products, product_with_way

    def _compared(self, update: Update) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield group, name and array of the tensors whose direction is compared, of groups with a finite norm."""
        for name, array in update.tensors.items():
            group = extra_group(name, self.extras)
            if name in self.received and is_learned(name, array):
                group = WEIGHTS
            if group not in COMPARED or array.dtype.kind != "f":
                continue
            if np.isfinite(self.norms[group][update.client]):
                yield group, name, array

    def _share(self, group: str, client: str) -> float:
        """Return the factor that shortens a client's change to the median length; 1 where it is no longer."""
        norm = self.norms[group][client]
        middle = median(self.norms[group].values())
        if norm <= middle:
            return 1.0
        return middle / norm

    def _add(self, name: str, array: np.ndarray, share: float) -> None:
        """Add the change of a tensor to the sum of the changes, shortened by a factor."""
        total = self._sums.setdefault(name, np.zeros(array.size, np.float32))
        for begin, change in self._blocks(name, array):
            total[begin : begin + BLOCK] += share * change

    def _product(self, name: str, array: np.ndarray, other: np.ndarray) -> float:
        """Return the inner product of the change of a tensor with another array (n,)."""
        total = 0.0
        for begin, change in self._blocks(name, array):
            total += float(change @ other[begin : begin + BLOCK].astype(np.float64))
        return total

    def _product_with_way(self, name: str, array: np.ndarray) -> float:
        """Return the inner product of the change of a tensor with what the run has changed it by since its start."""
        if self.start is None or name not in self.start:
            return 0.0
        now = self.received[name].reshape(-1)
        then = self.start[name].reshape(-1)
        total = 0.0
        for begin, change in self._blocks(name, array):
            part = slice(begin, begin + BLOCK)
            total += float(change @ (now[part].astype(np.float64) - then[part]))
        return total

    def _length_of_way(self) -> float:
        """Return the norm of what the run has changed the weights by; 0 where that is not known."""
        if self.start is None:
            return 0.0
        total = 0.0
        for name, array in self.received.items():
            if name in self.start and is_learned(name, array):
                total += sum(float(part @ part) for _, part in _differences(array, self.start[name]))
        return float(np.sqrt(total))

    def _squared_sums(self) -> dict[str, float]:
        """Return group of tensors -> squared norm of its sum."""
        totals: dict[str, float] = {}
        for name, array in self._sums.items():
            group = extra_group(name, self.extras) or WEIGHTS
            flat = array.astype(np.float64)
            totals[group] = totals.get(group, 0.0) + float(flat @ flat)
        return totals

    def _blocks(self, name: str, array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield begin and values (float64) of the blocks of a change; extra arrays are compared as they are."""
        origin = None if is_extra(name) else self.received[name]
        return _differences(array, origin)


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
