"""Aggregation of a round's updates: by the method's own mean of bounded updates, or by a rule in place of the mean.

What a single update can do is bounded by `bounds`, and by its direction (`directions`); `robust` has the rules. Here is
the order of things: measure, bound, leave out, combine, and record what was done to whom.

Of two updates only an absurd one is scaled down: nobody can tell which is right. Bounds stop broken devices, and single
attackers or a few that stay below each of them (examples/results/poisoning.md has the measurements). Against more that
act together, choose a rule by that table.

Source of rule clipped: clipping to a median norm as in Karimireddy, He, Jaggi, "Learning from History for Byzantine
Robust Optimization", ICML 2021.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from edge_agent.core.errors import TrainingFailed
from edge_agent.core.limits import allow_open_files
from edge_agent.core.storage import mapped
from edge_agent.core.task import State
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.methods import Method, Update
from edge_agent.methods.base import require_arrays
from edge_agent.wire.packed import unpack
from edge_agent.wire.tensors import decode

from ..config import NO_BOUNDS, AggregationConfig, CoordinatorConfig
from ..journal.entries import Aggregation
from ..state.store import BlobStore
from . import class_statistics
from .bounds import Bounds, SumBounded, find_bounds
from .class_statistics import Correction
from .passes import Origin, Reading, Updates, read, read_here
from .repeats import is_repeater
from .robust import rule_of
from .staleness import rebased

OTHER_FILES = 256
"""Files that are open at once beside updates: journal, sockets, logs."""

_BOUNDED = ("mean", "clipped")
"""Rules that are a mean of bounded updates, for every method."""


LARGEST_SUM_BYTES = 1 << 36
"""The most bytes of a sum in the store, unpacked."""


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

    statistics: dict[str, Correction] = field(default_factory=dict)
    """Agent -> what was done to the statistics of its classes."""

    repeats: dict[str, int] = field(default_factory=dict)
    """Agent -> its count of rounds at a bound of size (`repeats`), this round included, of those that have one."""

    def to_fact(self) -> Aggregation:
        """Return the decisions for the entry of the round, which has the settings as well, without what is empty."""
        fields = {
            "clipped": {agent: float(f"{factor:.3g}") for agent, factor in self.clipped.items()},
            "capped": {agent: [declared, counted] for agent, (declared, counted) in self.capped.items()},
            "unused": list(self.unused),
            "statistics": {agent: correction.body() for agent, correction in self.statistics.items()},
            "suspects": self.suspects,
            "repeats": self.repeats,
        }
        return Aggregation.model_validate({name: value for name, value in fields.items() if value})


def refusal(method: Method, config: CoordinatorConfig) -> str:
    """Return why updates of this method cannot be combined as configured; empty where they can."""
    about_tiers = _refusal_of_tiers(method, config)
    if about_tiers:
        return about_tiers
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


def _refusal_of_tiers(method: Method, config: CoordinatorConfig) -> str:
    """Return why devices without torch cannot take part as configured; empty where they can, or are not asked."""
    if config.cohort.tier == "train":
        return ""
    if not method.takes_contributions():
        if config.cohort.tier == "any":
            return ""
        return (
            f"cohort.tier = 'head' needs a method with a half for devices without torch, and '{method.name}' has none; "
            "choose another, such as afl ([run] method), or set cohort.tier = 'train' or 'any'"
        )
    sends_tensors = method.returned is None or len(method.returned) > 0
    if config.privacy.secure_sum and sends_tensors:
        return (
            f"privacy.secure_sum = true needs cohort.tier = 'train' with method '{method.name}': of its updates "
            "devices without torch send a part only, which adds up with no other; or choose another method"
        )
    return ""


def notes(decided: Aggregation) -> dict[str, str]:
    """Return agent -> what was done to its update, as text, from the ``aggregation`` of a closed round."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for agent, factor in decided.clipped.items():
        texts[agent].append(f"clipped (x {factor:g})")
    for agent, (declared, counted) in decided.capped.items():
        texts[agent].append(f"capped ({declared:g} samples count as {counted:.4g})")
    # By a mean all updates are used, but for those that point against the others.
    rule = decided.settings.rule
    not_used = "not used" if rule in _BOUNDED else f"not used by rule {rule}".rstrip()
    for agent in decided.unused:
        texts[agent].append(not_used)
    for agent, correction in decided.statistics.items():
        texts[agent].append(class_statistics.describe(correction))
    for agent, count in decided.repeats.items():
        if is_repeater(count):
            texts[agent].append(f"near the bound in round after round ({count} more than below)")
    for agent, reason in decided.suspects.items():
        texts[agent].append(f"suspect: {reason}")
    return {agent: ", ".join(of_agent) for agent, of_agent in sorted(texts.items())}


def aggregate(
    method: Method,
    state: State,
    updates: Updates,
    config: AggregationConfig,
    start: State | None = None,
    repeats: Mapping[str, int] = MappingProxyType({}),
) -> tuple[State, Decisions]:
    """Return the method's next state, by the configured rule, and what was done to single updates.

    Args:
        method: The method whose updates they are.
        state: The state that the round began with.
        updates: Called once for each pass: gives the same updates in the same order each time, mapped from disk.
        config: The rule and its bounds.
        start: The state that the run began with, which directions are compared by; None where it is not known.
        repeats: Agent -> its count of rounds at a bound of size before this one.

    Raises:
        TrainingFailed: No update has a positive weight; or a robust rule gets more updates than files may be open.
    """
    origin = Origin(method, method.broadcast(state), start)
    combined = read_here(combine(origin, state, updates, config, repeats), updates)
    if combined.state is not None:
        return combined.state, combined.decisions
    after = method.next_state(state, combined.total)
    return require_arrays(f"{type(method).__name__}.next_state", after), combined.decisions


@dataclass(frozen=True)
class Combined:
    """What has become of the updates of a round."""

    decisions: Decisions
    state: State | None = None
    """The next state; None where the method makes it of ``total``."""

    total: WeightedSum = field(default_factory=WeightedSum)
    """The sum of the updates within their bounds."""


def combine(
    origin: Origin,
    state: State,
    updates: Updates,
    config: AggregationConfig,
    repeats: Mapping[str, int] = MappingProxyType({}),
) -> Reading[Combined]:
    """Combine the updates of a round by the configured rule, and say what was done to single ones.

    Args:
        origin: What the updates are changes of.
        state: The state that the round began with.
        updates: Gives the updates, for what is no pass over them.
        config: The rule and its bounds.
        repeats: Agent -> its count of rounds at a bound of size before this one.

    Raises:
        TrainingFailed: See `aggregate`.
    """
    if sums_are_enough(config):
        return (yield from _sum(origin, state, updates, Bounds(), Decisions()))
    # 1. Measure all updates, and find how far each may move the model, and which point against the others.
    bounds = yield from find_bounds(origin, updates, config, repeats)
    # 2. By a mean, the bounded updates are streamed through the method's own server step. So are those of a round that
    #    has few, because no robust rule can tell which of them are right.
    is_mean = config.rule in _BOUNDED
    if is_mean or bounds.is_small_round:
        clipped = {agent: min(by_group.values()) for agent, by_group in sorted(bounds.factors.items())}
        corrections = dict(bounds.statistics.corrections)
        decisions = Decisions(clipped, bounds.caps, bounds.opposed, bounds.suspects, corrections, bounds.repeats)
        return (yield from _sum(origin, state, updates, bounds, decisions))
    # 3. A robust rule looks at all of them at once, and gives one update in place of the mean.
    _allow_open(bounds.count)
    rule = rule_of(config)
    used = [update for update in updates() if update.client not in bounds.opposed]
    combination = rule.combine(used, origin.received, state)
    after = _next_state(origin.method, state, [Update(config.rule, 1.0, combination.tensors)])
    unused = tuple(sorted({*bounds.opposed, *combination.unused}))
    decisions = Decisions({}, {}, unused, bounds.suspects)
    return Combined(decisions, {**after, **combination.memory})


def sums_are_enough(config: AggregationConfig) -> bool:
    """Return whether nothing depends on single updates: the rule is the mean, and no update has a bound."""
    return config.rule == "mean" and all(getattr(config, name) is None for name in NO_BOUNDS)


def objection_to_sums(config: CoordinatorConfig) -> str:
    """Return why sums of updates are not enough for the rounds of this configuration; empty: they are."""
    if config.round.mode != "synchronous":
        return f"round.mode = '{config.round.mode}' combines single updates; expected 'synchronous'"
    if config.privacy.secure_sum:
        return "privacy.secure_sum masks single updates, and has sums of its own; relays pass them on"
    # The rule under differential privacy has no bounds.
    if config.privacy.clip is not None:
        return ""
    aggregation = config.aggregation
    bounds = [name for name in (*NO_BOUNDS, "max_loss") if getattr(aggregation, name) is not None]
    wanted = [f"{name} = 'none'" for name in bounds]
    if aggregation.rule != "mean":
        wanted.insert(0, "rule = 'mean'")
    if not wanted:
        return ""
    return f"[aggregation] looks at single updates; expected {', '.join(wanted)} there"


def _sum(origin: Origin, state: State, updates: Updates, bounds: Bounds, decisions: Decisions) -> Reading[Combined]:
    """Sum the updates within their bounds; where the method needs more than a sum, let it make the next state.

    Raises:
        TensorsError: It makes no state.
    """
    if origin.method.server_step_is_sum():
        return Combined(decisions, total=(yield from read(SumBounded(bounds), origin)))
    bounded = bounds.apply(updates(), origin.received, origin.extras)
    return Combined(decisions, _next_state(origin.method, state, bounded))


def _next_state(method: Method, state: State, updates: Iterable[Update]) -> State:
    """Return what the method makes of the updates.

    Raises:
        TensorsError: It is no state.
    """
    return require_arrays(f"{type(method).__name__}.aggregate", method.aggregate(state, updates))


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

    start: str | None = None
    """Digest of the state that the run began with."""

    repeats: dict[str, int] = field(default_factory=dict)
    """Agent -> its count of rounds at a bound of size before this one."""

    sums: tuple[str, ...] = ()
    """Digests of sums of further updates, which relays have made."""

    def aggregate(
        self, blobs: BlobStore, method: Method, state: State, settings: AggregationConfig
    ) -> tuple[State, Decisions]:
        """Aggregate these updates in the order of agent ids, each mapped only when its turn comes; see `aggregate`.

        Raises:
            TrainingFailed: No update has a positive weight, or the rule looks at single updates where there are sums.
        """
        if self.sums:
            return require_arrays(
                f"{type(method).__name__}.next_state", method.next_state(state, self.total(blobs, method, settings))
            ), Decisions()

        @functools.cache
        def base(number: int) -> State:
            return decode(blobs.read(self.bases[number]))

        def updates() -> Iterator[Update]:
            if not self.asked:
                return self.read(blobs)
            return rebased(self.read(blobs), state, self.asked, self.number, base)

        # A run that an earlier version began may have no such state any more.
        start: State | None = None
        if self.start is not None and self.start in blobs:
            start = decode(mapped(blobs.path(self.start)))
        return aggregate(method, state, updates, settings, start, self.repeats)

    def total(self, blobs: BlobStore, method: Method, settings: AggregationConfig) -> WeightedSum:
        """Return the sum of all updates, of which some came as parts of sums.

        Raises:
            TrainingFailed: The rule looks at single updates.
            TensorsError: A sum in the store is damaged.
        """
        if not sums_are_enough(settings):
            raise TrainingFailed(
                "some updates of this round came as parts of sums, and [aggregation] looks at single updates now; set "
                "its bounds to 'none' until the round is over"
            )
        total = WeightedSum()
        for update in self.read(blobs):
            method.fold(total, update)
        for digest in self.sums:
            # Its size was checked before it was accepted.
            data = unpack(mapped(blobs.path(digest)), LARGEST_SUM_BYTES)
            total.merge(WeightedSum.from_tensors(decode(data)))
        return total

    def read(self, blobs: BlobStore) -> Iterator[Update]:
        """Yield the updates in the order of agent ids, each mapped only when its turn comes."""
        for agent, (digest, samples) in sorted(self.accepted.items()):
            yield Update(agent, samples, decode(mapped(blobs.path(digest))))


def _allow_open(updates: int) -> None:
    """Let this process have so many updates mapped at once, each of which takes a descriptor, beside all else.

    Raises:
        TrainingFailed: The system does not allow so many.
    """
    needed = updates + OTHER_FILES
    allowed = allow_open_files(needed)
    if allowed is not None and allowed < needed:
        raise TrainingFailed(
            f"the rule looks at {updates} updates at once, which takes {needed} open files, and this process may have "
            f"{allowed}; raise that limit (LimitNOFILE= of the unit, ulimit -Hn), set cohort.max_agents, or use "
            "aggregation.rule = 'mean' or 'clipped'"
        )
