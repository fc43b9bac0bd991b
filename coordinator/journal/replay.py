"""Where a run stands, derived from its entries one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edge_agent.errors import StateError

from .entry import WHAT_TO_DO, Entry

RunStatus = Literal["requested", "running", "finished", "failed", "cancelled"]
FINAL: dict[str, RunStatus] = {"run_finished": "finished", "run_failed": "failed", "run_cancelled": "cancelled"}


@dataclass(frozen=True)
class Accepted:
    """An update that has its receipt: where its bytes are, and what the agent said about them."""

    digest: str
    samples: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class OpenRound:
    """A round that was opened and not closed. A later attempt at it keeps the updates of the earlier ones."""

    round: int
    attempt: int
    cohort: tuple[str, ...]
    body: dict[str, Any]
    updates: dict[str, Accepted] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed_boots: dict[str, str] = field(default_factory=dict)
    """The start of each agent that was refused, when it failed; an agent that was restarted since has another."""

    def next_attempt(
        self,
        updates: Mapping[str, Accepted],
        refused: Mapping[str, str],
        failed_boots: Mapping[str, str],
        *,
        new: Sequence[str] = (),
        again: Sequence[str] = (),
        overdue: int = 0,
    ) -> OpenRound:
        """Another attempt that keeps all updates: agents in ``new`` take part, too, those in ``again`` once more.

        ``overdue``: how many attempts have ended because agents that were there did not deliver in time.
        """
        body = {**self.body, "again": list(again), "overdue": overdue}
        still = {agent: why for agent, why in refused.items() if agent not in again}
        return OpenRound(
            self.round, self.attempt + 1, (*self.cohort, *new), body, dict(updates), still, dict(failed_boots)
        )


@dataclass(frozen=True)
class RunRecord:
    """Where a run stands: ``round`` is the last closed one (0: none), ``checkpoint`` the state's digest after it."""

    run: str
    request: dict[str, Any]
    status: RunStatus = "requested"
    round: int = 0
    checkpoint: str | None = None
    open_round: OpenRound | None = None
    outcome: dict[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen in this run."""
        return self.status in FINAL.values()


def step(record: RunRecord, entry: Entry) -> RunRecord:
    """The record after one more entry; kinds that change nothing leave it as it is."""
    if entry.kind in {"run_started", "warm_started"}:
        return replace(record, status="running", checkpoint=entry.digest or record.checkpoint)
    if entry.kind == "round_opened":
        return replace(record, status="running", open_round=_opened(record, entry))
    if entry.kind == "round_closed":
        return _closed(record, entry)
    if entry.kind in {"update_accepted", "update_refused"}:
        return replace(record, open_round=_with_update(record.open_round, entry))
    if entry.kind in FINAL:
        return replace(record, status=FINAL[entry.kind], open_round=None, outcome=entry.body)
    return record


def _opened(record: RunRecord, entry: Entry) -> OpenRound:
    if entry.round != record.round + 1:
        raise _contradiction(entry, f"opens round {entry.round}, round {record.round} was closed last")
    body, cohort = entry.body, tuple(entry.body.get("cohort", ()))
    before = record.open_round
    if before is None or before.round != entry.round:
        return OpenRound(entry.round, int(body.get("attempt", 1)), cohort, body)
    known = set(before.cohort)
    new, again = [agent for agent in cohort if agent not in known], body.get("again", ())
    attempt = before.next_attempt(before.updates, before.refused, before.failed_boots, new=new, again=again)
    return replace(attempt, attempt=int(body.get("attempt", 1)), body=body)


def _closed(record: RunRecord, entry: Entry) -> RunRecord:
    is_open = record.open_round is not None and record.open_round.round == entry.round
    if not is_open or entry.round is None or entry.digest is None:
        raise _contradiction(entry, f"closes round {entry.round} with state {entry.digest}, which is not open")
    return replace(record, round=entry.round, checkpoint=entry.digest, open_round=None)


def _with_update(open_round: OpenRound | None, entry: Entry) -> OpenRound | None:
    """The open round with one more update or refusal; what belongs to no open round changes nothing."""
    if open_round is None or entry.round != open_round.round or entry.agent is None:
        return open_round
    if entry.kind == "update_refused":
        refused = {**open_round.refused, entry.agent: str(entry.body.get("reason", ""))}
        boots = {**open_round.failed_boots, entry.agent: str(entry.body.get("boot", ""))}
        return replace(open_round, refused=refused, failed_boots=boots)
    if entry.agent in open_round.updates or entry.digest is None:
        return open_round  # the first one has the receipt
    update = Accepted(entry.digest, float(entry.body.get("samples", 0)), dict(entry.body.get("metrics", {})))
    return replace(open_round, updates={**open_round.updates, entry.agent: update})


def _contradiction(entry: Entry, what: str) -> StateError:
    return StateError(f"journal entry {entry.id} of run '{entry.run}' {what}. {WHAT_TO_DO}")
