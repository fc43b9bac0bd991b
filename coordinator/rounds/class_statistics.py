"""Bounds on what clients say about their classes: whose features they are, how long, and of how many samples.

Methods that exchange class means (FedPAC, FedProto) or sums of a class's features (SphereFed) draw all clients to
what some of them say, so a lie about a class works without any change of the model. A method declares such arrays
(`Method.class_statistics`); here they are compared between the clients of a round, class by class:

1. The features of each class, centred on the client's own classes, are compared with those of the other clients,
   centred on the same classes: a client's encoder may have moved all of its features, which says nothing about a class.
   The *margin* of a class is its cosine to the others' features of that class, minus the largest cosine to those of
   another class. A class whose margin is below `EXCHANGED` is left out; so are all statistics of a client whose mean
   margin is negative. A client whose mean margin is below `EXCHANGED` is suspect.
2. A class mean longer than ``max_class_mean`` times the median of its class is scaled down to the median.
3. What a client adds to a sum, and its sample counts, are at most ``max_share`` times the median, and a third of the
   sum where that is above 1.5 times the median; of a class that three or more have, also class by class.

Where half of the clients or classes would be left out, nobody can tell who is right, and none is. Statistics to which a
device has added so much noise that they are like no class are left out, too, where fewer than half send such. Measured
with FedPAC, FedProto and SphereFed, 4 and 20 clients, Dirichlet 0.5 and 0.1 and two classes each: the mean margin of an
honest client was never below 0.10, and single classes had a negative one mostly in the first rounds. With three clients
of a few samples single honest classes have negative margins in later rounds, too, so these alone leave nothing out.

The updates are read one after another, three times where all is well: memory is some arrays of the size of one client's
statistics, and the lengths of all clients' class means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from edge_agent.core.task import Tensors
from edge_agent.methods import Update
from edge_agent.methods.values import ClassStatistics

from ..config import AggregationConfig
from ..journal.entries import StatisticsCorrection
from .shares import limit_to_sum

ROUNDING = 1e-9
"""A size that exceeds its bound by less than this part of it does so by rounding alone."""

EXCHANGED = -0.5
"""Below this margin a class is passed for another one, and an agent whose mean margin is below it is suspect.

Classes that are exchanged have about -1; features that are noise have -0.3 at 32 dimensions, and less at more.
"""

FEWEST_HOLDERS = 3
"""Of a class that fewer clients have, none can be told to be too long by the others of that class alone."""

Updates = Callable[[], Iterable[Update]]
"""Gives the same updates in the same order each time."""


@dataclass(frozen=True)
class Correction:
    """What is done to the class statistics of one client."""

    is_left_out: bool = False
    """Whether none of them counts."""

    classes_left_out: tuple[int, ...] = ()
    """Classes that do not count, as they are much nearer to another class of the others than to the same one."""

    lengths: Mapping[int, float] = field(default_factory=dict)
    """Class -> the factor (0..1) that its mean is scaled by."""

    counts: Mapping[int, float] = field(default_factory=dict)
    """Class -> the factor (0..1) that its sample count is scaled by."""

    sums: float = 1.0
    """The factor (0..1) that what is summed over samples is scaled by."""

    def __bool__(self) -> bool:
        """Return whether anything is changed."""
        return self.is_left_out or bool(self.classes_left_out or self.lengths or self.counts) or self.sums < 1.0

    def body(self) -> dict[str, Any]:
        """Return the correction as JSON, for the journal: classes are numbers, factors have three digits.

        It has no names of what is not done.
        """
        if self.is_left_out:
            return {"left_out": "all"}
        body: dict[str, Any] = {}
        if self.classes_left_out:
            body["left_out"] = list(self.classes_left_out)
        if self.lengths:
            body["shortened"] = {str(label): _round_factor(factor) for label, factor in self.lengths.items()}
        counted = _round_factor(min([*self.counts.values(), self.sums]))
        if counted != 1.0:
            body["counted"] = counted
        return body

    def apply(self, declared: ClassStatistics, tensors: Tensors) -> Tensors:
        """Return the tensors of an update with these changes; arrays that are no class statistics are the same objects.

        Args:
            declared: Which arrays are class statistics.
            tensors: Those of the update.
        """
        corrected = dict(tensors)
        if self.is_left_out:
            for name in declared.names:
                corrected[name] = np.zeros_like(tensors[name])
            return corrected
        for name in (*declared.means, *declared.sums):
            rows = _rows(tensors[name], declared).astype(np.float64)
            rows[list(self.classes_left_out)] = 0.0
            if name in declared.means:
                for label, factor in self.lengths.items():
                    rows[label] *= factor
            else:
                rows *= self.sums
            by_class = np.moveaxis(rows, 0, declared.class_axis)
            corrected[name] = np.ascontiguousarray(by_class.astype(tensors[name].dtype))
        # Moments are sums over all classes of a client: what is left out of single classes cannot be told apart there.
        for name in declared.moments:
            corrected[name] = (tensors[name].astype(np.float64) * self.sums).astype(tensors[name].dtype)
        if declared.counts:
            corrected[declared.counts] = self._correct_counts(tensors[declared.counts])
        return corrected

    def _correct_counts(self, counts: np.ndarray) -> np.ndarray:
        """Return the sample counts (K,) with these changes."""
        corrected = np.array(counts)
        for label, factor in self.counts.items():
            # A class that a client has stays one that it has.
            corrected[label] = max(1, round(corrected[label] * factor))
        corrected[list(self.classes_left_out)] = 0
        return corrected


def _round_factor(factor: float) -> float:
    """Round a factor to three digits."""
    return float(f"{factor:.3g}")


def describe(correction: StatisticsCorrection) -> str:
    """Say in words what was done to the class statistics of one agent, as it is journaled."""
    if correction.left_out == "all":
        return "class statistics not used"
    texts: list[str] = []
    if correction.left_out:
        classes = ", ".join(str(label) for label in correction.left_out)
        texts.append(f"without classes {classes}")
    if correction.shortened:
        texts.append(f"means of classes {', '.join(correction.shortened)} shortened")
    if correction.counted is not None:
        texts.append(f"counted x {correction.counted:g}")
    return f"class statistics {', '.join(texts)}"


@dataclass(frozen=True)
class StatisticBounds:
    """What is done to the class statistics of a round."""

    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Agent -> what is done to its statistics, of those whose statistics are changed."""

    suspects: Mapping[str, str] = field(default_factory=dict)
    """Agent -> why its statistics are suspect."""

    declared: ClassStatistics = field(default_factory=ClassStatistics)
    """Which arrays of the updates they are."""

    def apply(self, update: Update) -> Update:
        """Return the update with its class statistics within the bounds."""
        correction = self.corrections.get(update.client)
        if correction is None:
            return update
        return replace(update, tensors=correction.apply(self.declared, update.tensors))


def find_statistic_bounds(declared: ClassStatistics, updates: Updates, config: AggregationConfig) -> StatisticBounds:
    """Find what has to be done to the class statistics of a round's updates.

    Args:
        declared: Which arrays they are.
        updates: Gives the updates, as often as it is called; those without the arrays are passed over.
        config: The bounds.
    """
    if config.max_class_mean is None:
        return StatisticBounds()
    measured = _measure(declared, updates)
    if len(measured) < FEWEST_HOLDERS:
        return StatisticBounds()
    # Step 1: whose classes are those of the others. Who is wrong here is in no median of the next step.
    margins, wrong = _find_wrong(declared, updates, len(measured))
    classes_left_out = _find_exchanged(margins, wrong)
    # Step 2: lengths and numbers of those that remain.
    remaining = {agent: sizes for agent, sizes in measured.items() if agent not in wrong}
    lengths = _shorten(declared, remaining, config.max_class_mean)
    counts = _bound_counts(remaining, config.max_share)
    sums = _bound_sums(remaining, config.max_share)
    # Step 3: together, and who is suspect.
    corrections: dict[str, Correction] = {}
    for agent in sorted(measured):
        correction = Correction(
            is_left_out=agent in wrong,
            classes_left_out=classes_left_out.get(agent, ()),
            lengths=lengths.get(agent, {}),
            counts=counts.get(agent, {}),
            sums=sums.get(agent, 1.0),
        )
        if correction:
            corrections[agent] = correction
    suspects: dict[str, str] = {}
    for agent in sorted(wrong):
        margin = _mean_margin(margins[agent])
        if margin < EXCHANGED:
            suspects[agent] = f"its classes are nearer to other classes of the others than to the same: {margin:.2f}"
    return StatisticBounds(corrections, suspects, declared)


# --- whose classes they are ------------------------------------------------------------------------------------------

_Margins = dict[str, dict[int, float]]
"""Array -> class -> margin."""


def _find_wrong(declared: ClassStatistics, updates: Updates, count: int) -> tuple[dict[str, _Margins], frozenset[str]]:
    """Find the clients whose classes are nearer to other classes, among the ``count`` ones that send statistics.

    Returns:
        The margins of all clients, by the statistics of those that remain; and those whose mean margin is negative,
        nobody where they would be half of all.
    """
    wrong: frozenset[str] = frozenset()
    while True:
        # 1. The mean margin of each client, by the statistics of those that are not known to be wrong.
        margins = _find_margins(declared, updates, wrong)
        means = {agent: _mean_margin(by_array) for agent, by_array in margins.items()}
        remaining = {agent: mean for agent, mean in means.items() if agent not in wrong}
        worst = min(remaining.values(), default=0.0)
        if worst >= 0:
            break
        # 2. The worst ones are wrong: among a few clients a single one that is wrong makes others look wrong, too. All
        #    that are more than half as bad go with it, so that there are a few steps only.
        wrong |= {agent for agent, mean in remaining.items() if mean <= worst / 2}
        if 2 * len(wrong) >= count:
            # Half of them point elsewhere, and nobody can tell which half is right.
            return margins, frozenset()
    # 3. Compared with those that remain, some of the others may be right after all.
    return margins, frozenset(agent for agent in wrong if means[agent] < 0)


def _find_margins(declared: ClassStatistics, updates: Updates, without: frozenset[str]) -> dict[str, _Margins]:
    """Return agent -> margins of its classes, by the features of all others but those ``without``."""
    names = (*declared.means, *declared.sums)
    # Step 1: the sum of all clients' features, by class. Each class of each client counts alike, whatever its length
    # and sample count.
    sums: dict[str, np.ndarray] = {}
    holders: dict[str, np.ndarray] = {}
    for update in _with_statistics(declared, updates):
        if update.client in without:
            continue
        for name in names:
            directions, has_class = _directions(_rows(update.tensors[name], declared))
            sums[name] = sums.get(name, 0.0) + directions
            holders[name] = holders.get(name, 0) + has_class.astype(np.int64)
    # Step 2: each client beside that sum without itself. The updates are read again, so that none is kept in memory.
    margins: dict[str, _Margins] = {}
    for update in _with_statistics(declared, updates):
        by_array: _Margins = {}
        # Without anybody else there is nothing to compare with.
        for name, others in sums.items():
            directions, has_class = _directions(_rows(update.tensors[name], declared))
            others_holders = holders[name]
            if update.client in without:
                by_array[name] = _margins_of(directions, has_class, others, others_holders)
            else:
                by_array[name] = _margins_of(directions, has_class, others - directions, others_holders - has_class)
        margins[update.client] = by_array
    return margins


def _margins_of(
    directions: np.ndarray, has_class: np.ndarray, others: np.ndarray, others_holders: np.ndarray
) -> dict[int, float]:
    """Return class -> margin, of the classes of one client that others have, too.

    Args:
        directions: The client's features by class (K, d), of length 1 or 0.
        has_class: Which classes it has (K,).
        others: Sum of the others' (K, d).
        others_holders: How many others have each class (K,).
    """
    others_have = others_holders > 0
    common = others_have & has_class
    # A margin needs a class to compare with, and another one that it may be taken for.
    if not common.any() or others_have.sum() < 2:
        return {}
    # Step 1: move both by the mean of the classes that they share: an encoder may have moved all of its features.
    centres = others / np.maximum(others_holders, 1)[:, None]
    if common.sum() > 1:
        origin = centres[common].mean(axis=0)
        own_origin = directions[common].mean(axis=0)
    else:
        # Of a single class nobody knows how far the client's encoder has moved it: it is compared as it is.
        origin = centres[others_have].mean(axis=0)
        own_origin = origin
    centred, _ = _directions(centres - origin)
    # Step 2: how much nearer each class is to the same class of the others than to the nearest other one.
    margins: dict[int, float] = {}
    for label in np.flatnonzero(common).tolist():
        own_directions, _ = _directions((directions[label] - own_origin)[None])
        cosines = centred @ own_directions[0]
        is_other = others_have.copy()
        is_other[label] = False
        margins[label] = float(cosines[label] - cosines[is_other].max())
    return margins


def _mean_margin(margins: _Margins) -> float:
    """Return the least mean margin over the arrays of a client; 0 where a single class says nothing about it."""
    means = [float(np.mean(list(by_class.values()))) for by_class in margins.values() if len(by_class) > 1]
    return min(means, default=0.0)


def _find_exchanged(margins: Mapping[str, _Margins], wrong: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Return agent -> its classes that are passed for others, of agents whose other classes count.

    None where half of all classes are: nobody can tell then which half is right.
    """
    exchanged: dict[str, tuple[int, ...]] = {}
    class_count = 0
    exchanged_count = 0
    for agent, by_array in margins.items():
        if agent in wrong:
            continue
        compared: set[int] = set()
        passed_for_others: set[int] = set()
        for by_class in by_array.values():
            compared |= by_class.keys()
            passed_for_others |= {label for label, margin in by_class.items() if margin < EXCHANGED}
        class_count += len(compared)
        exchanged_count += len(passed_for_others)
        if passed_for_others:
            exchanged[agent] = tuple(sorted(passed_for_others))
    if 2 * exchanged_count >= class_count:
        return {}
    return exchanged


def _rows(array: np.ndarray, declared: ClassStatistics) -> np.ndarray:
    """Return an array of class statistics as (K, d), one row for each class."""
    by_class = np.moveaxis(array, declared.class_axis, 0)
    return by_class.reshape(len(by_class), -1)


def _directions(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows (K, d) float64 of length 1, zeros where there is nothing; and where there is something (K,) bool."""
    values = rows.astype(np.float64)
    lengths = np.linalg.norm(values, axis=1)
    has_length = lengths > 0
    return values / np.where(has_length, lengths, 1.0)[:, None], has_length


# --- lengths and numbers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """The sizes of one client's class statistics."""

    lengths: Mapping[str, np.ndarray]
    """Array of means -> length of each class's (K,)."""

    counts: np.ndarray
    """Samples of each class (K,); of no length where they do not travel."""

    sums: Mapping[str, float]
    """Array that is summed over samples -> its size."""


def _with_statistics(declared: ClassStatistics, updates: Updates) -> Iterable[Update]:
    """Yield the updates that carry statistics of any class: all arrays, and a feature that is not 0."""
    for update in updates():
        if not declared.names <= update.tensors.keys():
            continue
        has_features = any(update.tensors[name].any() for name in (*declared.means, *declared.sums))
        if has_features:
            yield update


def _measure(declared: ClassStatistics, updates: Updates) -> dict[str, _Sizes]:
    """Return agent -> sizes of its statistics."""
    measured: dict[str, _Sizes] = {}
    for update in _with_statistics(declared, updates):
        tensors = update.tensors
        lengths = {name: _lengths(tensors[name], declared) for name in declared.means}
        sums = {name: float(_lengths(tensors[name], declared).sum()) for name in declared.sums}
        for name in declared.moments:
            sums[name] = float(np.linalg.norm(tensors[name].astype(np.float64)))
        counts = np.zeros(0)
        if declared.counts:
            counts = tensors[declared.counts].astype(np.float64)
        measured[update.client] = _Sizes(lengths, counts, sums)
    return measured


def _lengths(array: np.ndarray, declared: ClassStatistics) -> np.ndarray:
    """Return the length (K,) of the features of each class."""
    return np.asarray(np.linalg.norm(_rows(array, declared).astype(np.float64), axis=1))


def _shorten(declared: ClassStatistics, measured: Mapping[str, _Sizes], most: float) -> dict[str, dict[int, float]]:
    """Return agent -> class -> factor, of class means that are longer than ``most`` times the median of their class."""
    factors: dict[str, dict[int, float]] = {}
    for name in declared.means:
        lengths = {agent: sizes.lengths[name] for agent, sizes in measured.items()}
        for label, middle in enumerate(_median_lengths(list(lengths.values()))):
            for agent, by_class in lengths.items():
                length = float(by_class[label])
                if length > most * middle:
                    # Of several arrays of means the one that is longest beside its median decides.
                    by_label = factors.setdefault(agent, {})
                    by_label[label] = min(middle / length, by_label.get(label, 1.0))
    return factors


def _median_lengths(lengths: Sequence[np.ndarray]) -> list[float]:
    """Return the median length of each class over the clients that have it.

    A class that few clients have is measured by all classes: of two lengths nobody can tell which one is too long.

    Args:
        lengths: Of each client the lengths of its class means (K,); 0 where it does not have the class.
    """
    all_lengths = np.concatenate(lengths)
    median_of_all = 0.0
    if all_lengths.any():
        median_of_all = float(np.median(all_lengths[all_lengths > 0]))
    medians = []
    for label in range(len(lengths[0])):
        of_holders = [by_class[label] for by_class in lengths if by_class[label] > 0]
        if len(of_holders) >= FEWEST_HOLDERS:
            medians.append(float(median(of_holders)))
        else:
            medians.append(median_of_all)
    return medians


def _bound_counts(measured: Mapping[str, _Sizes], most: float | None) -> dict[str, dict[int, float]]:
    """Return agent -> class -> factor of its sample count, of those that count for more than their share."""
    counts = {agent: sizes.counts for agent, sizes in measured.items() if sizes.counts.size}
    if most is None or not counts:
        return {}
    # Step 1: all classes of a client together.
    totals = {agent: float(by_class.sum()) for agent, by_class in counts.items()}
    overall = _factors(totals, most)
    factors = {agent: np.full(by_class.shape, overall.get(agent, 1.0)) for agent, by_class in counts.items()}
    # Step 2: each class by itself, by what is left of the counts.
    class_count = len(next(iter(counts.values())))
    for label in range(class_count):
        _bound_counts_of_class(label, counts, factors)
    # Step 3: what rounding alone has changed stays as it is.
    lowered: dict[str, dict[int, float]] = {}
    for agent, by_class in factors.items():
        is_lowered = (by_class < 1 - ROUNDING) & (counts[agent] > 0)
        labels = np.flatnonzero(is_lowered).tolist()
        if labels:
            lowered[agent] = {label: float(by_class[label]) for label in labels}
    return lowered


def _bound_counts_of_class(label: int, counts: Mapping[str, np.ndarray], factors: Mapping[str, np.ndarray]) -> None:
    """Lower the factors of a class so that no client has more than its share of all samples of the class.

    A class that fewer than `FEWEST_HOLDERS` clients have stays as it is.

    Args:
        label: The class.
        counts: Agent -> its sample counts (K,).
        factors: Agent -> the factors (K,) that its counts are scaled by so far; changed in place.
    """
    counted: dict[str, float] = {}
    for agent, by_class in counts.items():
        if by_class[label] > 0:
            counted[agent] = float(by_class[label]) * factors[agent][label]
    if len(counted) < FEWEST_HOLDERS:
        return
    limited = limit_to_sum(counted, median(counted.values()))
    for agent, count in counted.items():
        factors[agent][label] *= limited[agent] / count


def _bound_sums(measured: Mapping[str, _Sizes], most: float | None) -> dict[str, float]:
    """Return agent -> factor of what it adds to sums over samples, of those that add more than their share."""
    factors: dict[str, float] = {}
    if most is None:
        return factors
    names = set[str]()
    for sizes in measured.values():
        names.update(sizes.sums)
    for name in sorted(names):
        of_array = {agent: sizes.sums[name] for agent, sizes in measured.items()}
        # Arrays belong together, as feature sums and moments do: the least factor of an agent counts for all of them.
        for agent, factor in _factors(of_array, most).items():
            factors[agent] = min(factor, factors.get(agent, 1.0))
    return factors


def _factors(sizes: Mapping[str, float], most: float) -> dict[str, float]:
    """Return agent -> factor below 1 that bounds its size by ``most`` medians and by its share of the sum.

    Agents whose size is within both bounds are left out.
    """
    if not sizes:
        return {}
    middle = median(sizes.values())
    by_median = {agent: min(size, most * middle) for agent, size in sizes.items()}
    limited = limit_to_sum(by_median, middle)
    return {agent: limited[agent] / size for agent, size in sizes.items() if limited[agent] < size * (1 - ROUNDING)}
