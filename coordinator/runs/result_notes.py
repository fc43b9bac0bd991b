"""Notes beside a run's accuracies: warnings about its result, and what the coordinator computed on its own samples."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from edge_agent.core.next_steps import NextStep, RunEvidence, steps_after_run
from edge_agent.core.worst_tenth import worst_tenth

from ..journal.entries import ProxyEvaluated, ProxyFailed, RunFinished, RunRequested, WarmStarted, WeightsFile
from ..journal.store import Journal, facts_of
from ..rounds.good_state import reason_of_restoration
from ..state.noise import STANDARD_ERRORS, Compared, Gain, adjusted, classify_mean_gain, standard_error
from ..state.run_lines import AgentLine, RoundLine
from ..text import counted, listed
from ..views.runs import RunRecord

if TYPE_CHECKING:
    from ..rounds.request import Request

log = logging.getLogger(__name__)

COLLAPSED = 0.5
"""A worst tenth below this share of the mean over all clients has collapsed."""

EXPLODED = 2.0
"""A loss above so many times both its first value and that of guessing, log K, has exploded."""

SHOWN_CLIENTS = 10
"""Clients below their local baseline that get a line each in text and log; the result has all of them."""

OWN_LAYERS = "model"
"""The head of a client that answers with the layers that it has trained, see `Method.head_name`."""

BELOW_LOCAL = "below_local"
"""The ``kind`` of a warning about a client that is better off alone."""


@dataclass(frozen=True)
class ResultWarning:
    """One warning about a run's result."""

    kind: str
    clients: tuple[str, ...]
    """The clients that it is about; empty where it is about the run."""

    message: str
    """For people."""

    without_reason: str | None = None
    """The message without the reason, which other lines may have; None where the warning is of another kind."""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ResultWarning:
        """Return a warning of the summary of a run."""
        return cls(body["kind"], tuple(body.get("clients", ())), str(body["message"]), body.get("without_reason"))

    def to_json(self) -> dict[str, Any]:
        """Return the warning as the summary has it."""
        body: dict[str, Any] = {"kind": self.kind, "clients": [*self.clients], "message": self.message}
        if self.without_reason is not None:
            body["without_reason"] = self.without_reason
        return body


def find_warnings(
    agents: Sequence[AgentLine], losses: Sequence[Mapping[str, float]], num_classes: int
) -> list[ResultWarning]:
    """Return all warnings that the figures of a finished run give.

    Args:
        agents: What each client reports at the end.
        losses: Client -> training loss, for each round in order.
        num_classes: Classes of the task.
    """
    scored = list(_find_scored(agents))
    return [
        *_warn_of_collapse(scored),
        *_warn_below_local(scored),
        *_warn_of_exploded_loss(losses, num_classes),
        *_warn_of_one_class(agents),
    ]


def find_absent(
    lines: Sequence[RoundLine], rounds: int, offline: Callable[[str], bool], failing: Mapping[str, str]
) -> Iterator[ResultWarning]:
    """Yield a warning for each agent that took part in a run and was offline at its end, or failed and was left out.

    Args:
        lines: The figures of the closed rounds in order.
        rounds: How many rounds the run has.
        offline: Whether an agent is offline.
        failing: Agent -> why it delivers no more.
    """
    # Step 1: the last round that each agent was asked in, and the last one that has its update.
    heard = dict[str, int]()
    delivered = dict[str, int]()
    for line in lines:
        rejected = [rejection.agent for rejection in line.rejected]
        for agent in (*line.agents, *line.missing, *rejected):
            heard[agent] = line.round
        for agent in line.agents:
            delivered[agent] = line.round
    # Step 2: a warning for those that are away now.
    for agent, number in sorted(heard.items()):
        last = "it delivered no update"
        if agent in delivered:
            last = f"its last update is of round {delivered[agent]}"
        if offline(agent):
            message = f"agent '{agent}' went offline during the run, last heard in round {number} of {rounds}; {last}"
            yield ResultWarning("offline", (agent,), f"{message}, and its figures are missing here")
        elif agent in failing:
            message = f"agent '{agent}' failed and was left out at the end, last asked in round {number} of {rounds}"
            without_reason = f"{message}; {last}"
            yield ResultWarning("left_out", (agent,), f"{without_reason}: {failing[agent]}", without_reason)


@dataclass(frozen=True)
class Bounded:
    """The rounds whose aggregate has an agent's update only in part or not at all."""

    rounds: tuple[int, ...]
    last: str
    """What was done to its update in the last of them."""

    def to_json(self) -> dict[str, Any]:
        """Return it as the summary has it."""
        return {"rounds": [*self.rounds], "last": self.last}


def find_bounded(lines: Sequence[RoundLine]) -> dict[str, Bounded]:
    """Return agent -> the rounds in which its update was bounded, sorted by agent."""
    bounded: dict[str, Bounded] = {}
    for line in lines:
        for agent, note in line.bounded.items():
            before = bounded[agent].rounds if agent in bounded else ()
            bounded[agent] = Bounded((*before, line.round), note)
    return dict(sorted(bounded.items()))


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
    def from_lines(cls, lines: Sequence[RoundLine]) -> LastUpdates:
        """Count the updates of the last one of these closed rounds."""
        if not lines:
            return cls(round=0, accepted=0, expected=0, left_out=())
        line = lines[-1]
        reasons = {excluded.agent: excluded.reason for excluded in (*line.left_out, *line.rejected)}
        agents_by_reason: dict[str, list[str]] = {}
        for agent, reason in sorted(reasons.items()):
            agents_by_reason.setdefault(reason, []).append(agent)
        contributors = {*line.agents, *line.missing, *line.working, *reasons}
        return cls(
            round=line.round,
            accepted=len(line.agents),
            expected=len(contributors),
            left_out=tuple(LeftOut(tuple(agents), reason) for reason, agents in agents_by_reason.items()),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what the summary of a run says of its last round, as JSON: ``updates``, and ``incomplete``: `note`."""
        left_out = [{"agents": [*group.agents], "reason": group.reason} for group in self.left_out]
        updates = {"round": self.round, "accepted": self.accepted, "expected": self.expected, "left_out": left_out}
        return {"updates": updates, "incomplete": self.note or None}

    def to_fact(self, encoder_sha256: str) -> RunFinished:
        """Return the entry of the end of the run, with the `note`, which status and pages show."""
        finished = RunFinished(encoder_sha256=encoder_sha256)
        return finished.changed(reason=self.note) if self.left_out else finished

    def log(self, run: str) -> None:
        """Log the `note`, where there is one."""
        if self.left_out:
            log.warning("run_incomplete run=%s: %s", run, self.note)

    @property
    def note(self) -> str:
        """How many updates the round lacks, with each reason once; empty where no agent was left out."""
        if not self.left_out:
            return ""
        reasons = "; ".join(f"without {listed(group.agents)}: {group.reason}" for group in self.left_out)
        return f"{self.accepted} of {counted(self.expected, 'update')} in round {self.round}, {reasons}"


def restored_of(lines: Iterable[RoundLine]) -> Iterator[ResultWarning]:
    """Yield a warning for each round that restored an earlier state."""
    for line in lines:
        if line.restored is not None:
            yield ResultWarning("restored", (), f"round {line.round}: {reason_of_restoration(line.restored)}")


def describe_warnings(warnings: Sequence[ResultWarning], most_clients: int = SHOWN_CLIENTS) -> Iterator[str]:
    """Yield one line for each warning, and one for all clients below their local baseline that have no line.

    Args:
        warnings: Those of a run.
        most_clients: Clients below their local baseline that get a line each; 0: one line names all of them.
    """
    below = [warning for warning in warnings if warning.kind == BELOW_LOCAL]
    if most_clients == 0 and len(below) > 1:
        yield from _lines_with_one_for_below(warnings, below)
        return
    # One of them has a line in any case, so that a person sees what the others are about.
    shown_below = max(1, most_clients)
    below_count = 0
    for warning in warnings:
        if warning.kind == BELOW_LOCAL:
            below_count += 1
            if below_count > shown_below:
                continue
        yield warning.message
    unshown = max(0, below_count - shown_below)
    if unshown:
        yield f"{counted(unshown, 'more client')} below acc.local by more than noise; the result names all of them"


def _lines_with_one_for_below(warnings: Sequence[ResultWarning], below: Sequence[ResultWarning]) -> Iterator[str]:
    """Yield one line for each other warning, and one that names all clients below their local baseline."""
    clients: list[str] = []
    for warning in below:
        clients += warning.clients
    for warning in warnings:
        if warning.kind != BELOW_LOCAL:
            yield warning.message
    yield (
        f"{len(clients)} clients are better off alone: acc.local is above acc.personal by more than noise "
        f"({listed(clients)}); the result has their figures"
    )


def next_steps(
    request: Request,
    agents: Sequence[AgentLine],
    losses: Sequence[Mapping[str, float]],
    *,
    has_bundle: bool,
    leaves_encoder: bool = False,
) -> list[NextStep]:
    """Return what can be tried next where clients are worse than alone, as far as the figures of the run say.

    That is where a client is better off alone by its own test, or all of them together in the mean by more than noise;
    otherwise there are no steps.

    Args:
        request: What the run was requested with.
        agents: What each client reports at the end.
        losses: Client -> training loss, for each round in order.
        has_bundle: Whether the encoder was exported.
        leaves_encoder: Whether the method leaves the encoder as it is.
    """
    scored = list(_find_scored(agents))
    losing = [client.agent for client in scored if client.agent.better_alone]
    if not losing and classify_mean_gain(_compared(scored, "local")) is not Gain.BELOW:
        return []
    shape = request.task.input.shape
    return steps_after_run(
        RunEvidence(
            method=request.method,
            num_classes=request.task.num_classes,
            encoder=request.task.encoder,
            input_kind=request.task.input.kind,
            input_side=min(shape[1:]),
            losses=[fmean(of_round.values()) for of_round in losses if of_round],
            samples=[agent.samples for agent in agents if agent.samples],
            personal_over_shared=_gain_over_shared(scored),
            answers_with_shared=all(client.personal == client.agent.acc.get("global") for client in scored),
            losing_with_own_layers=[agent.id for agent in losing if agent.head == OWN_LAYERS],
            has_bundle=has_bundle,
            local_epochs=request.params.get("local_epochs"),
            began_trained=request.weights is not None or request.warm_start is not None,
            leaves_encoder=leaves_encoder,
        )
    )


def _gain_over_shared(scored: Sequence[_Scored]) -> float | None:
    """Return the mean of acc.personal minus acc.global over clients that have both; None: within noise, or below."""
    compared = list(_compared(scored, "global"))
    if classify_mean_gain(compared) is not Gain.ABOVE:
        return None
    return fmean(pair.personal - pair.local for pair in compared)


def _compared(scored: Iterable[_Scored], scope: str) -> Iterator[Compared]:
    """Yield the personal accuracy of each client beside that of another scope, local or global, where it has both."""
    for client in scored:
        other = client.agent.acc.get(scope)
        if other is not None:
            yield Compared(other, client.personal, client.support)


def local_models(agents: Iterable[AgentLine]) -> str:
    """Return which models ``acc.local`` is of, with the number of clients of each where they differ; empty: of none."""
    counts = Counter(agent.local_model for agent in agents if agent.local_model)
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(f"{name} ({number} ×)" for name, number in counts.most_common())


@dataclass(frozen=True)
class _Scored:
    """A client whose personal model was scored on held-out samples."""

    agent: AgentLine
    personal: float
    """acc.personal, 0..1."""

    support: int
    """Held-out samples, at least one."""


def _find_scored(agents: Iterable[AgentLine]) -> Iterator[_Scored]:
    """Yield the clients whose personal model was scored."""
    for agent in agents:
        personal = agent.acc.get("personal")
        if personal is not None and agent.support:
            yield _Scored(agent, personal, agent.support)


def _warn_below_local(scored: Iterable[_Scored]) -> Iterator[ResultWarning]:
    """Yield a warning for each client that is better off alone."""
    for client in scored:
        agent = client.agent
        local = agent.acc.get("local")
        if local is None or not agent.better_alone:
            continue
        message = (
            f"client '{agent.id}' is better off alone: acc.local {local:.3f} ({agent.local_model}) is above "
            f"acc.personal {client.personal:.3f} by more than noise (McNemar's test on "
            f"{counted(client.support, 'held-out sample')})"
        )
        yield ResultWarning(BELOW_LOCAL, (agent.id,), message)


def _warn_of_collapse(scored: Sequence[_Scored]) -> Iterator[ResultWarning]:
    """Yield a warning where the worst tenth of the clients is far below the mean, by more than noise."""
    if len(scored) < 2:
        return
    mean = fmean(client.personal for client in scored)
    ranked = sorted(scored, key=lambda client: (client.personal, -client.support, client.agent.id))
    worst = worst_tenth(ranked)
    worst_mean = fmean(client.personal for client in worst)
    support = sum(client.support for client in worst)
    # Even the upper end of what their few samples allow is far below the mean.
    upper_end = adjusted(worst_mean, support) + STANDARD_ERRORS * standard_error(worst_mean, support)
    if upper_end < COLLAPSED * mean:
        clients = [client.agent.id for client in worst]
        message = (
            f"the worst tenth of the clients has collapsed: acc.personal {worst_mean:.3f} ({listed(clients)}), "
            f"{mean:.3f} over all clients"
        )
        yield ResultWarning("collapsed_tenth", tuple(clients), message)


def _warn_of_exploded_loss(losses: Sequence[Mapping[str, float]], num_classes: int) -> Iterator[ResultWarning]:
    """Yield a warning where the training loss of clients rose far above its first value and that of guessing."""
    first = dict[str, float]()
    last = dict[str, float]()
    for of_round in losses:
        for client, loss in of_round.items():
            first.setdefault(client, loss)
            last[client] = loss
    guessing = math.log(max(2, num_classes))
    exploded = [client for client, loss in last.items() if loss > EXPLODED * max(first[client], guessing)]
    if not exploded:
        return
    worst = max(exploded, key=lambda client: last[client])
    message = (
        f"the training loss exploded at {listed(sorted(exploded))}: at '{worst}' it rose from {first[worst]:.4g} to "
        f"{last[worst]:.4g}; lower the step size, or the weights of the loss's terms"
    )
    yield ResultWarning("exploding_loss", tuple(sorted(exploded)), message)


def _warn_of_one_class(agents: Iterable[AgentLine]) -> Iterator[ResultWarning]:
    """Yield a warning where clients have data of one class only."""
    clients = [agent.id for agent in agents if agent.one_class]
    if clients:
        message = (
            f"{counted(len(clients), 'client')} with data of one class only ({listed(clients)}): their accuracies say "
            "nothing about telling classes apart, and raise the means"
        )
        yield ResultWarning("one_class", tuple(clients), message)


@dataclass(frozen=True)
class ProxyRound:
    """The state after a round, evaluated on the coordinator's own samples."""

    round: int | None
    evaluated: ProxyEvaluated


@dataclass(frozen=True)
class ProxyFailure:
    """Why the state after a round could not be evaluated on the coordinator's own samples."""

    round: int | None
    failed: ProxyFailed


@dataclass(frozen=True)
class CoordinatorMetrics:
    """What the coordinator computed on its own samples in a run."""

    weights: WeightsFile | None = None
    """The weights that the run began with; None: its seed."""

    warm_start: WarmStarted | None = None
    """None: it had none."""

    proxy: tuple[ProxyRound, ...] = ()
    """The rounds that were evaluated, in order."""

    proxy_failed: tuple[ProxyFailure, ...] = ()
    """For each reason why a round was not evaluated, the round when it was first met."""

    @classmethod
    def from_journal(cls, journal: Journal, run: str) -> CoordinatorMetrics:
        """Return what the journal has of a run."""
        entries = journal.entries(run, ("run_requested", "warm_started", "proxy_evaluated", "proxy_failed"))
        requests = facts_of(entries, RunRequested)
        warm_starts = facts_of(entries, WarmStarted)
        # A round that was evaluated again after a restart counts once, with its last record.
        proxy = dict[int | None, ProxyRound]()
        failed = []
        for entry in entries:
            if isinstance(entry.fact, ProxyEvaluated):
                proxy[entry.round] = ProxyRound(entry.round, entry.fact)
            elif isinstance(entry.fact, ProxyFailed):
                failed.append(ProxyFailure(entry.round, entry.fact))
        return cls(
            weights=requests[0].weights if requests else None,
            warm_start=warm_starts[-1] if warm_starts else None,
            proxy=tuple(proxy[number] for number in sorted(proxy, key=lambda number: number or 0)),
            proxy_failed=tuple(failed),
        )

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> CoordinatorMetrics:
        """Return what the JSON of a summary has of it, see `to_json`."""
        weights = summary.get("weights")
        warm_start = summary.get("warm_start")
        return cls(
            weights=WeightsFile.model_validate(weights) if weights else None,
            warm_start=WarmStarted.model_validate(warm_start) if warm_start else None,
            proxy=tuple(
                ProxyRound(record["round"], ProxyEvaluated.model_validate(_without_round(record)))
                for record in summary.get("proxy") or ()
            ),
            proxy_failed=tuple(
                ProxyFailure(record["round"], ProxyFailed.model_validate(_without_round(record)))
                for record in summary.get("proxy_failed") or ()
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as part of the summary of the run, and as ``headwater status --json`` prints it."""
        return {
            "weights": None if self.weights is None else self.weights.to_body(),
            "warm_start": None if self.warm_start is None else self.warm_start.to_body(),
            "proxy": [{"round": record.round, **record.evaluated.to_body()} for record in self.proxy],
            "proxy_failed": [{"round": record.round, **record.failed.to_body()} for record in self.proxy_failed],
        }

    def lines(self) -> Iterator[str]:
        """Yield it as text, one line each; only the newest proxy metric."""
        if self.weights is not None:
            yield f"the encoder began with {self.weights.path} (SHA-256 {self.weights.sha256[:16]})"
        warm = self.warm_start
        if warm is not None:
            scored = "not evaluated (no held-out samples)"
            if warm.accuracy is not None:
                scored = f"acc.warm_start {warm.accuracy:.4f}"
            yield f"warm start: {warm.samples} samples of {warm.data}, {counted(warm.epochs, 'epoch')}, {scored}"
        if self.proxy:
            last = self.proxy[-1]
            acc = "unknown" if last.evaluated.acc is None else f"{last.evaluated.acc:.4f}"
            on = f"on {last.evaluated.samples} samples, by {last.evaluated.by}"
            yield f"acc.proxy after round {last.round}: {acc} {on}"
        for failure in self.proxy_failed:
            reason = failure.failed.reason
            yield f"acc.proxy could not be computed, first after round {failure.round}: {reason}"


def _without_round(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fact in a record of the summary, of which the round is not part."""
    return {name: value for name, value in record.items() if name != "round"}


def describe_progress(record: RunRecord) -> str:
    """Say how many rounds of a run are closed, as the rest of a sentence that begins with its name."""
    rounds = record.request.rounds
    if record.status == "requested":
        return f"has not begun with its {counted(rounds, 'round')}"
    return f"stands at round {record.round} of {rounds}"
