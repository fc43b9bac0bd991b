"""Aggregation of a round's updates with bounds on what a single one of them can do, and robust rules in place of means.

Every rule measures each update's change: the tensors that all clients received, after training minus before; and what
else the method has bounded (`Method.bounded_extras`). In a round of three or more updates

- a change of more than ``max_norm`` times the median is scaled down to the median (rules mean and clipped; by rule
  clipped every change above the median); where half of the updates change nothing, to a share of the model;
- a sample count of more than ``max_weight`` times the median counts as that much;
- an update whose change or sample count no honest agent would have is suspect: `selection.Exclusions` leaves out an
  agent after some suspect updates in a row.

Sample counts have no part in the other rules: a few agents that declare many would else be the majority.

Of two updates only an absurd one is scaled down: nobody can tell which is right. What stays within these bounds is not
touched: a round of honest updates gives the bits of the plain mean. Bounds use medians, so they hold as long as more
than half of the updates are honest. They stop broken devices and plain attacks; against attackers that stay just below
the bounds and act together, choose multi_krum, trimmed_mean or geometric_median.

Sources: clipping to a median norm as in Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust
Optimization", ICML 2021 (there with momentum). trimmed_mean, median: Yin, Chen, Ramchandran, Bartlett,
"Byzantine-Robust Distributed Learning", ICML 2018. krum, multi_krum: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine
Learning with Adversaries", NeurIPS 2017. geometric_median: Pillutla, Kakade, Harchaoui, "Robust Aggregation for
Federated Learning", IEEE TSP 2022 (smoothed Weiszfeld).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_high
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from edge_agent.errors import TrainingFailed
from edge_agent.limits import allow_open_files
from edge_agent.methods import Method, Update
from edge_agent.methods.base import CLASS_MEANS, is_learned, weighted_mean
from edge_agent.storage import mapped
from edge_agent.task import State, Tensors
from edge_agent.wire.tensors import decode

from ..config import AggregationConfig, CoordinatorConfig
from ..state.store import BlobStore
from .buffered import rebased

LEAST_UPDATES = 3
"""Of fewer updates nobody can tell which is the honest one, unless one is absurd."""

SUSPECT, SUSPECT_SHARE = 10.0, 0.1
"""An update is suspect whose change exceeds the median so many times, or whose sample count its bound.

The change has to exceed that share of the model, too: an honest agent changes it more than most once these have learned
their samples. Of two updates one is scaled to the other that exceeds it so many times, and the whole model.
"""

STATISTICS_SPREAD = 4.0
"""Running statistics of batch norm of honest agents differ up to 8 times where their weights do up to 3 times.

Their bound is looser, except for an agent whose weights are beyond theirs.
"""

BLOCK_BYTES = 8 << 20
"""All updates' parts of a tensor that are looked at together, as float64."""

OTHER_FILES = 256
"""Open at once beside updates: journal, sockets, logs."""

WEISZFELD_STEPS = 16
SMOOTHING = 1e-6
"""Least distance in a Weiszfeld step, as a share of the median change."""

_BOUNDED = ("mean", "clipped")
"""Rules that are a mean of bounded updates, for every method."""


@dataclass(frozen=True)
class Decisions:
    """What was done to the updates of a round beyond their mean."""

    clipped: dict[str, float] = field(default_factory=dict)
    """Agent -> the factor (0..1) that its change was scaled by."""

    capped: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Agent -> the samples that it declared, and those that it counts."""

    unused: tuple[str, ...] = ()
    """Agents whose updates the rule has not used."""

    suspects: dict[str, str] = field(default_factory=dict)
    """Agent -> why its update is suspect."""

    def body(self) -> dict[str, Any]:
        """As JSON, without what is empty."""
        texts = {
            "clipped": {agent: float(f"{factor:.3g}") for agent, factor in self.clipped.items()},
            "capped": {agent: list(both) for agent, both in self.capped.items()},
            "unused": list(self.unused),
            "suspects": self.suspects,
        }
        return {name: value for name, value in texts.items() if value}


def refusal(method: Method, config: CoordinatorConfig) -> str:
    """Why updates of this method cannot be combined as configured; empty where they can."""
    if method.server_step_is_mean():
        return ""
    if config.round.mode == "buffered":
        return (
            "round.mode = 'buffered' needs a method whose server step is a mean of the updates; "
            f"'{method.name}' computes its own from the updates of one round; set round.mode = 'synchronous'"
        )
    if config.privacy.secure_sum:
        return (
            "privacy.secure_sum = true needs a method whose server step is a mean of the updates; "
            f"'{method.name}' computes its own from each of them; choose another method, or set it to false"
        )
    if config.aggregation.rule in _BOUNDED:
        return ""
    return (
        f"aggregation.rule = '{config.aggregation.rule}' needs a method whose server step is a mean of the updates; "
        f"'{method.name}' computes its own from each of them; set aggregation.rule = 'mean' or 'clipped'"
    )


def notes(body: Mapping[str, Any]) -> dict[str, str]:
    """Agent -> what was done to its update, from the ``aggregation`` of a closed round."""
    result: dict[str, list[str]] = {}
    for agent, factor in body.get("clipped", {}).items():
        result.setdefault(agent, []).append(f"clipped (x {factor:g})")
    for agent, (declared, counted) in body.get("capped", {}).items():
        result.setdefault(agent, []).append(f"capped ({declared:g} samples count as {counted:g})")
    for agent in body.get("unused", ()):
        result.setdefault(agent, []).append(f"not used by rule {body.get('settings', {}).get('rule', '')}".rstrip())
    for agent, why in body.get("suspects", {}).items():
        result.setdefault(agent, []).append(f"suspect: {why}")
    return {agent: ", ".join(texts) for agent, texts in sorted(result.items())}


def aggregate(
    method: Method, state: State, updates: Callable[[], Iterable[Update]], config: AggregationConfig
) -> tuple[State, Decisions]:
    """The method's next state, by the configured rule, and what was done to single updates.

    ``updates`` is called once for each pass: it gives the same updates in the same order each time, mapped from disk.

    Raises:
        TrainingFailed: no update with a positive weight; more updates than files that may be open, for a robust rule.
    """
    if config.rule == "mean" and config.max_norm is None and config.max_weight is None:
        return method.aggregate(state, updates()), Decisions()
    received = method.broadcast(state)
    measured = [_measure(update, received, method.bounded_extras) for update in updates()]
    factors, suspects = _clip(measured, _sizes(received), config)
    caps: dict[str, tuple[float, float]] = {}
    if method.weighting == "samples":
        caps = _cap({one.client: one.weight for one in measured}, config.max_weight)
        for agent, (declared, bound) in caps.items():
            if declared > SUSPECT * bound:
                suspects[agent] = f"declared {declared:g} samples, {_times(declared, bound)} the bound of the round"

    def capped() -> Iterator[Update]:
        for update in updates():
            bound = caps.get(update.client)
            yield replace(update, weight=bound[1]) if bound else update

    if config.rule in _BOUNDED or len(measured) < LEAST_UPDATES:
        bounded = (_scaled(one, received, factors.get(one.client, {}), method.bounded_extras) for one in capped())
        clipped = {agent: min(by_group.values()) for agent, by_group in sorted(factors.items())}
        return method.aggregate(state, bounded), Decisions(clipped, caps, (), suspects)
    unused: tuple[str, ...] = ()
    _allow_open(len(measured))
    if config.rule in {"trimmed_mean", "median"}:
        result = by_coordinate(list(updates()), config.attackers if config.rule == "trimmed_mean" else None)
    else:
        shares = shares_of(gram(list(updates()), received), config)
        result = weighted_mean((share, one.tensors) for share, one in zip(shares, updates(), strict=True) if share)
        unused = tuple(one.client for share, one in zip(shares, measured, strict=True) if not share)
    return method.aggregate(state, [Update(config.rule, 1.0, result)]), Decisions({}, {}, unused, suspects)


@dataclass(frozen=True)
class StoredUpdates:
    """The accepted updates of a round, in the blob store."""

    accepted: dict[str, tuple[str, float]]
    """Agent -> digest of its update, and its sample count."""

    number: int
    """The round."""

    asked: dict[str, int] = field(default_factory=dict)
    """Agent -> the earlier round that its update is of (buffered rounds)."""

    bases: dict[int, str] = field(default_factory=dict)
    """Round -> digest of the state that its agents started from."""

    def aggregate(
        self, blobs: BlobStore, method: Method, state: State, settings: AggregationConfig
    ) -> tuple[State, Decisions]:
        """`aggregate` of these updates in the order of agent ids, each mapped only when its turn comes."""

        @functools.cache
        def base(number: int) -> State:
            return decode(blobs.read(self.bases[number]))

        def each() -> Iterator[Update]:
            for agent, (digest, samples) in sorted(self.accepted.items()):
                yield Update(agent, samples, decode(mapped(blobs.path(digest))))

        def updates() -> Iterator[Update]:
            return rebased(each(), state, self.asked, self.number, base) if self.asked else each()

        return aggregate(method, state, updates, settings)

    def as_json(self) -> dict[str, Any]:
        """As JSON."""
        body: dict[str, Any] = _UPDATES.dump_python(self, mode="json")
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StoredUpdates:
        """From JSON."""
        return _UPDATES.validate_python(body)


_UPDATES = TypeAdapter(StoredUpdates)


# --- bounds ----------------------------------------------------------------------------------------------------------


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
        return next((what for prefix, what in extras.items() if name.startswith(prefix)), "")
    if name not in received:
        return ""
    return "weights" if is_learned(name, array) else "statistics"


def _origin(name: str, received: Tensors) -> np.ndarray | float:
    """What an array of an update is a change from; extra arrays are bounded as they are."""
    return 0.0 if name.startswith("extra.") else received[name]


def norms_of(method: Method, state: State, updates: Iterable[Update]) -> dict[str, dict[str, float]]:
    """Group of tensors (weights, statistics, those of `Method.bounded_extras`) -> agent -> norm of its change."""
    received, result = method.broadcast(state), dict[str, dict[str, float]]()
    for update in updates:
        for group, norm in _measure(update, received, method.bounded_extras).norms.items():
            result.setdefault(group, {})[update.client] = norm
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
    flat, total = array.reshape(-1), 0.0
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
        size, looser = sizes.get(group, 0.0), STATISTICS_SPREAD if group == "statistics" else 1.0
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


# --- rules -----------------------------------------------------------------------------------------------------------


def _allow_open(updates: int) -> None:
    """Let this process have so many updates mapped at once, each of which takes a descriptor, beside all else.

    Raises:
        TrainingFailed: the system does not allow so many.
    """
    needed = updates + OTHER_FILES
    allowed = allow_open_files(needed)
    if allowed is not None and allowed < needed:
        raise TrainingFailed(
            f"the rule looks at {updates} updates at once, which takes {needed} open files, and this process may have "
            f"{allowed}; raise that limit (LimitNOFILE= of the unit, ulimit -Hn), set cohort.max_agents, or use "
            "aggregation.rule = 'mean' or 'clipped'"
        )


def by_coordinate(updates: Sequence[Update], trim: int | None) -> Tensors:
    """Of each coordinate the median over the updates, or their mean without the ``trim`` largest and smallest ones.

    Where that many cannot be spared, it is the median. Integer arrays (counters) take the lower median.
    """
    result: Tensors = {}
    for name in sorted({name for update in updates for name in update.tensors}):
        arrays = [update.tensors[name] for update in updates if name in update.tensors]
        out = np.empty(arrays[0].size, arrays[0].dtype)
        for begin, end in _blocks(out.size, len(arrays)):
            block = np.stack([array.reshape(-1)[begin:end] for array in arrays])
            block.sort(axis=0)
            if block.dtype.kind != "f":
                out[begin:end] = block[(len(arrays) - 1) // 2]
            else:
                cut = (len(arrays) - 1) // 2 if trim is None else min(trim, (len(arrays) - 1) // 2)
                out[begin:end] = block[cut : len(arrays) - cut].astype(np.float64).mean(axis=0)
        result[name] = out.reshape(arrays[0].shape)
    return result


def gram(updates: Sequence[Update], received: Tensors) -> np.ndarray:
    """Inner products (n, n) float64 of the updates' changes; infinite where an update overflows."""
    result = np.zeros((len(updates), len(updates)))
    with np.errstate(over="ignore", invalid="ignore"):
        for name in sorted(received):
            arrays = [update.tensors.get(name, received[name]).reshape(-1) for update in updates]
            if not all(_group(name, array, received, {}) for array in arrays):
                continue
            before = received[name].reshape(-1)
            for begin, end in _blocks(before.size, len(arrays)):
                block = np.stack([array[begin:end] for array in arrays]).astype(np.float64)
                block -= before[begin:end]
                result += block @ block.T
    return result


def shares_of(products: np.ndarray, config: AggregationConfig) -> list[float]:
    """Of each update its share in the mean that rule krum, multi_krum or geometric_median is; 0: not used.

    ``products`` (n, n) float64: inner products of the n updates.
    """
    if config.rule == "geometric_median":
        return geometric_median_shares(products)
    attackers = min(config.attackers, len(products) - LEAST_UPDATES)
    count = 1 if config.rule == "krum" else len(products) - attackers
    chosen = closest(distances(products), attackers)[:count]
    return [1.0 if index in chosen else 0.0 for index in range(len(products))]


def distances(products: np.ndarray) -> np.ndarray:
    """Squared distances (n, n) by inner products; infinite to an update that is too large for float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.diag(products)
        result = squares[:, None] + squares[None] - 2 * products
    return np.where(np.isfinite(result), np.maximum(result, 0.0), np.inf)


def closest(squares: np.ndarray, attackers: int) -> list[int]:
    """Indices of the updates by Krum's score, the sum over the n - f - 2 nearest others; ties by index.

    ``squares`` (n, n): squared distances, of which f = ``attackers`` updates are taken to be hostile. Source: Blanchard
    et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017.
    """
    count = len(squares)
    others = np.where(np.eye(count, dtype=bool), np.inf, squares)
    others.sort(axis=1)
    scores = others[:, : max(1, count - attackers - 2)].sum(axis=1)
    return [int(index) for index in np.argsort(scores, kind="stable")]


def geometric_median_shares(products: np.ndarray) -> list[float]:
    """Shares (n,) of the updates in the mean that is the geometric median of their changes.

    Each iterate of Weiszfeld's steps is a mean of the updates, so that inner products are all that it takes: the model
    is read twice, however many steps there are. The shares are rounded to float32, so that another order of sums in
    the inner products (another number of threads) gives the same bits.
    """
    squares = np.diag(products)
    usable = np.isfinite(squares)
    finite = np.where(usable[:, None] & usable[None], products, 0.0)
    # The median is 0 where half change nothing; the other half, which may be hostile, does not choose the scale then.
    least = SMOOTHING * float(np.median(np.sqrt(squares[usable])) or 1.0)
    shares = np.zeros(len(products))  # the state itself: the first step is the mean of the directions
    for _ in range(WEISZFELD_STEPS):
        toward = finite @ shares
        squared = np.maximum(shares @ toward - 2 * toward + np.diag(finite), 0.0)
        shares = usable / np.maximum(np.sqrt(squared), max(least, np.finfo(np.float64).tiny))
        shares /= shares.sum()
    return [float(share) for share in shares.astype(np.float32)]


def _blocks(size: int, count: int) -> Iterator[tuple[int, int]]:
    step = max(1024, BLOCK_BYTES // (8 * count))
    for begin in range(0, size, step):
        yield begin, min(size, begin + step)
