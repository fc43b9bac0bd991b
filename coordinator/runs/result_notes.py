"""Notes beside a run's accuracies: warnings about its result, and what the coordinator computed on its own samples."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from edge_agent.core.worst_tenth import worst_tenth

from ..journal.entries import ProxyEvaluated, ProxyFailed, RunRequested, WarmStarted
from ..journal.sqlite import Journal
from ..journal.store import facts_of
from ..state.noise import STANDARD_ERRORS, adjusted, standard_error
from ..text import counted, listed
from ..views.runs import RunRecord
from .good_state import reason_of_restoration

log = logging.getLogger(__name__)

COLLAPSED = 0.5
"""A worst tenth below this share of the mean over all clients has collapsed."""

EXPLODED = 2.0
"""A loss above so many times both its first value and that of guessing, log K, has exploded."""

LOSS_ROUNDS = 3
"""The number of rounds over which a fall of the training loss is measured."""

STILL_FALLING = 0.97
"""A loss below this share of that before `LOSS_ROUNDS` rounds still falls: rounds differ by a percent or two."""

FEW_SAMPLES = 100
"""A device with fewer training samples has few: with batches of 32 an epoch has three steps."""

PERSONAL_METHODS = ("fedper", "fedrep", "fedavg_ft")
"""Methods with a personal part that work with their default parameters."""

SHOWN_CLIENTS = 10
"""Clients below their local baseline that get a line each in text and log; the result has all of them."""


Warned = dict[str, Any]
"""One warning: ``kind``, the ``clients`` it is about, and ``message`` for people."""


def warnings_of(
    agents: Sequence[Mapping[str, Any]], losses: Sequence[Mapping[str, float]], num_classes: int
) -> list[Warned]:
    """All warnings about a finished run.

    ``agents``: a record for each client with ``id``, ``acc`` by scope, ``local_model`` and ``better_alone``,
    ``support`` (held-out samples behind them) and ``one_class``. ``losses``: client -> training loss, for each round in
    order.
    """
    scored = [one for one in agents if one["acc"].get("personal") is not None and one["support"]]
    return [*_collapsed(scored), *_below_local(scored), *_exploded(losses, num_classes), *_one_class(agents)]


def absent_of(
    records: Sequence[Mapping[str, Any]], rounds: int, offline: Callable[[str], bool], failing: Mapping[str, str]
) -> Iterator[Warned]:
    """A warning for each agent that took part in a run and was offline at its end, or failed and was left out.

    ``records``: the figures of the closed rounds in order. ``failing``: agent -> why it delivers no more.
    """
    heard = dict[str, int]()
    delivered = dict[str, int]()
    for record in records:
        asked = (*record["agents"], *record["missing"], *(one["agent"] for one in record["rejected"]))
        heard.update(dict.fromkeys(asked, record["round"]))
        delivered.update(dict.fromkeys(record["agents"], record["round"]))
    for agent, number in sorted(heard.items()):
        last = f"its last update is of round {delivered[agent]}" if agent in delivered else "it delivered no update"
        if offline(agent):
            message = f"agent '{agent}' went offline during the run, last heard in round {number} of {rounds}; {last}"
            yield {"kind": "offline", "clients": [agent], "message": f"{message}, and its figures are missing here"}
        elif agent in failing:
            message = f"agent '{agent}' failed and was left out at the end, last asked in round {number} of {rounds}"
            said = f"{message}; {last}"
            reason = failing[agent]
            yield {"kind": "left_out", "clients": [agent], "message": f"{said}: {reason}", "without_reason": said}


def bounded_of(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Agent -> the rounds whose aggregate has its update only in part or not at all, and what was done in the last."""
    result: dict[str, dict[str, Any]] = {}
    for record in records:
        for agent, note in record.get("bounded", {}).items():
            one = result.setdefault(agent, {"rounds": [], "last": ""})
            one["rounds"].append(record["round"])
            one["last"] = note
    return dict(sorted(result.items()))


@dataclass(frozen=True)
class LeftOut:
    """Agents without an update in a round, for one reason that is the same for all of them."""

    agents: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class LastUpdates:
    """How many updates the last round of a run has, of the agents that could have contributed to it.

    Attributes:
        round: Number of that round.
        accepted: Updates that are in its aggregate.
        expected: Those, and the agents that were asked without success, or not asked because of an earlier refusal.
        left_out: Agents whose update was refused or rejected, or that were left out, by reason.
    """

    round: int
    accepted: int
    expected: int
    left_out: tuple[LeftOut, ...]

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]]) -> LastUpdates:
        """Count those of the last of the records of closed rounds."""
        if not records:
            return cls(round=0, accepted=0, expected=0, left_out=())
        record = records[-1]
        reasons = {one["agent"]: str(one["reason"]) for one in (*record["left_out"], *record["rejected"])}
        agents_by_reason: dict[str, list[str]] = {}
        for agent, reason in sorted(reasons.items()):
            agents_by_reason.setdefault(reason, []).append(agent)
        contributors = {*record["agents"], *record["missing"], *record["working"], *reasons}
        return cls(
            round=record["round"],
            accepted=len(record["agents"]),
            expected=len(contributors),
            left_out=tuple(LeftOut(tuple(agents), reason) for reason, agents in agents_by_reason.items()),
        )

    def summary(self) -> dict[str, Any]:
        """What the summary of a run says of it, as JSON: ``updates``, and the `note` as ``incomplete``."""
        left_out = [{"agents": [*one.agents], "reason": one.reason} for one in self.left_out]
        updates = {"round": self.round, "accepted": self.accepted, "expected": self.expected, "left_out": left_out}
        return {"updates": updates, "incomplete": self.note or None}

    def reason(self) -> dict[str, Any]:
        """What the journal says of it at the end of a run: the `note` as ``reason``, which status and pages show."""
        return {"reason": self.note} if self.left_out else {}

    def log(self, run: str) -> None:
        """Log the `note`, where there is one."""
        if self.left_out:
            log.warning("run_incomplete run=%s: %s", run, self.note)

    @property
    def note(self) -> str:
        """How many updates the round lacks, with each reason once; empty where no agent was left out."""
        if not self.left_out:
            return ""
        reasons = "; ".join(f"without {listed(one.agents)}: {one.reason}" for one in self.left_out)
        return f"{self.accepted} of {counted(self.expected, 'update')} in round {self.round}, {reasons}"


def restored_of(records: Iterable[Mapping[str, Any]]) -> Iterator[Warned]:
    """A warning for each round that restored an earlier state."""
    for record in records:
        if restored := record.get("restored"):
            message = f"round {record['round']}: {reason_of_restoration(restored)}"
            yield {"kind": "restored", "clients": [], "message": message}


def lines(warnings: Sequence[Mapping[str, Any]], most_clients: int = SHOWN_CLIENTS) -> Iterator[str]:
    """Yield one line for each warning, and one for all clients below their local baseline that have no line.

    Args:
        warnings: Those of a run.
        most_clients: Clients below their local baseline that get a line each; 0: one line names all of them.
    """
    below = [one for one in warnings if one["kind"] == "below_local"]
    if most_clients == 0 and len(below) > 1:
        yield from (str(one["message"]) for one in warnings if one["kind"] != "below_local")
        clients = [client for one in below for client in one["clients"]]
        yield (
            f"{len(clients)} clients are better off alone: acc.local is above acc.personal by more than noise "
            f"({listed(clients)}); the result has their figures"
        )
        return
    unshown = {id(one) for one in below[max(1, most_clients) :]}
    yield from (str(one["message"]) for one in warnings if id(one) not in unshown)
    if unshown:
        yield f"{counted(len(unshown), 'more client')} below acc.local by more than noise; the result names all of them"


def next_steps(
    method: str,
    agents: Sequence[Mapping[str, Any]],
    losses: Sequence[Mapping[str, float]],
    warnings: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return what can be tried next where clients are better off alone, as far as the figures of the run say.

    Args:
        method: The run's method.
        agents: As of `warnings_of`, with ``samples``.
        losses: Client -> training loss, for each round in order.
        warnings: The warnings of the run; without one of a client that is better off alone there is nothing to try.
    """
    if not any(warning["kind"] == "below_local" for warning in warnings):
        return []
    result = []
    means = [fmean(of_round.values()) for of_round in losses if of_round]
    if len(means) > LOSS_ROUNDS:
        before = means[-1 - LOSS_ROUNDS]
        if means[-1] < STILL_FALLING * before:
            result.append(
                f"more rounds (--rounds): the training loss still falls, from {before:.3g} to {means[-1]:.3g} in the "
                f"last {LOSS_ROUNDS} rounds"
            )
    samples = sorted(agent["samples"] for agent in agents if agent.get("samples"))
    if samples and samples[len(samples) // 2] < FEW_SAMPLES:
        result.append(
            f"an encoder that is trained already (--weights): half of the devices have {samples[len(samples) // 2]} "
            "samples or fewer"
        )
    others = [name for name in PERSONAL_METHODS if name != method]
    result.append(f"a method that keeps more on the device (--method {' or '.join(others[:2])})")
    return result


def spent(privacy: dict[str, Any]) -> str:
    """What is spent of the privacy budget, as a line."""
    epsilon, left, uncovered = (privacy.get(name) for name in ("epsilon", "epsilon_left", "rounds_without_noise"))
    rest = "no limit is set" if left is None else f"{left:g} left"
    used = "more spent than any epsilon bounds" if epsilon is None else f"epsilon {epsilon:g} spent"
    beside = f"; {counted(uncovered, 'round')} without noise, which epsilon does not cover" if uncovered else ""
    return f"differential privacy: {used}, {rest} (delta {privacy['delta']:g}){beside}"


def local_models(agents: Iterable[Mapping[str, Any]]) -> str:
    """Which models ``acc.local`` is of, with the number of clients of each where they differ; empty: of none."""
    counts = Counter(one["local_model"] for one in agents if one.get("local_model"))
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(f"{name} ({number} ×)" for name, number in counts.most_common())


def _below_local(scored: Iterable[Mapping[str, Any]]) -> Iterator[Warned]:
    for one in scored:
        personal = one["acc"]["personal"]
        local = one["acc"].get("local")
        if local is not None and one.get("better_alone"):
            message = (
                f"client '{one['id']}' is better off alone: acc.local {local:.3f} ({one['local_model']}) is above "
                f"acc.personal {personal:.3f} by more than noise (McNemar's test on "
                f"{counted(one['support'], 'held-out sample')})"
            )
            yield {"kind": "below_local", "clients": [one["id"]], "message": message}


def _collapsed(scored: Sequence[Mapping[str, Any]]) -> Iterator[Warned]:
    if len(scored) < 2:
        return
    mean = fmean(one["acc"]["personal"] for one in scored)
    ranked = sorted(scored, key=lambda one: (one["acc"]["personal"], -one["support"], one["id"]))
    worst = worst_tenth(ranked)
    theirs = fmean(one["acc"]["personal"] for one in worst)
    support = sum(one["support"] for one in worst)
    if adjusted(theirs, support) + STANDARD_ERRORS * standard_error(theirs, support) < COLLAPSED * mean:
        clients = [one["id"] for one in worst]
        message = (
            f"the worst tenth of the clients has collapsed: acc.personal {theirs:.3f} ({listed(clients)}), "
            f"{mean:.3f} over all clients"
        )
        yield {"kind": "collapsed_tenth", "clients": clients, "message": message}


def _exploded(losses: Sequence[Mapping[str, float]], num_classes: int) -> Iterator[Warned]:
    first = dict[str, float]()
    last = dict[str, float]()
    for of_round in losses:
        for client, loss in of_round.items():
            first.setdefault(client, loss)
            last[client] = loss
    guessing = math.log(max(2, num_classes))
    result = [client for client, loss in last.items() if loss > EXPLODED * max(first[client], guessing)]
    if result:
        most = max(result, key=lambda client: last[client])
        message = (
            f"the training loss exploded at {listed(sorted(result))}: at '{most}' it rose from {first[most]:.4g} to "
            f"{last[most]:.4g}; lower the step size, or the weights of the loss's terms"
        )
        yield {"kind": "exploding_loss", "clients": sorted(result), "message": message}


def _one_class(agents: Iterable[Mapping[str, Any]]) -> Iterator[Warned]:
    clients = [one["id"] for one in agents if one.get("one_class")]
    if clients:
        message = (
            f"{counted(len(clients), 'client')} with data of one class only ({listed(clients)}): their accuracies say "
            "nothing about telling classes apart, and raise the means"
        )
        yield {"kind": "one_class", "clients": clients, "message": message}


def coordinator_metrics(journal: Journal, run: str) -> dict[str, Any]:
    """``weights`` that a run began with and its ``warm_start`` (None: it had none), and two lists.

    ``proxy``: one record for each round that was evaluated. ``proxy_failed``: for each reason why one was not, the
    round when it was first met.
    """
    entries = journal.entries(run, ("run_requested", "warm_started", "proxy_evaluated", "proxy_failed"))
    asked = facts_of(entries, RunRequested)
    weights = asked[0].weights if asked else None
    warm = facts_of(entries, WarmStarted)
    proxy = {}
    failed = []
    for entry in entries:
        if isinstance(entry.fact, ProxyEvaluated):
            proxy[entry.round] = {"round": entry.round, **entry.fact.to_body()}
        elif isinstance(entry.fact, ProxyFailed):
            failed.append({"round": entry.round, **entry.fact.to_body()})
    return {
        "weights": None if weights is None else weights.to_body(),
        "warm_start": warm[-1].to_body() if warm else None,
        "proxy": [proxy[n] for n in sorted(proxy, key=lambda n: n or 0)],
        "proxy_failed": failed,
    }


def metric_lines(metrics: Mapping[str, Any]) -> Iterator[str]:
    """`coordinator_metrics` as text, one line each; only the newest proxy metric."""
    if weights := metrics.get("weights"):
        yield f"the encoder began with {weights['path']} (SHA-256 {weights['sha256'][:16]})"
    if warm := metrics.get("warm_start"):
        known = warm.get("accuracy")
        scored = "not evaluated (no held-out samples)" if known is None else f"acc.warm_start {known:.4f}"
        yield f"warm start: {warm['samples']} samples of {warm['data']}, {counted(warm['epochs'], 'epoch')}, {scored}"
    if proxy := metrics.get("proxy"):
        last = proxy[-1]
        known = last.get("acc")
        acc = "unknown" if known is None else f"{known:.4f}"
        yield f"acc.proxy after round {last['round']}: {acc} on {last['samples']} samples, by {last['by']}"
    for failed in metrics.get("proxy_failed") or ():
        yield f"acc.proxy could not be computed, first after round {failed['round']}: {failed['reason']}"


def standing(record: RunRecord) -> str:
    """How many rounds of a run are closed, as the rest of a sentence."""
    rounds = record.request.rounds
    if record.status == "requested":
        return f"has not begun with its {counted(rounds, 'round')}"
    return f"stands at round {record.round} of {rounds}"
