"""Where a run stands, derived from its entries: nothing else stores it."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field, replace

from edge_agent.core.errors import StateError, UnknownName
from edge_agent.wire.faults import accused_by, names_before_colon
from edge_agent.wire.messages.fields import PRIVACY_REFUSED, REFUSALS, SHARES_WRONG
from edge_agent.wire.messages.up import Fault

from ..journal.entries import (
    RoundClosed,
    RoundOpened,
    RunCancelled,
    RunExtended,
    RunFailed,
    RunFinished,
    RunPruned,
    RunRequested,
    RunStarted,
    RunStopped,
    UpdateAccepted,
    UpdateRefused,
    WarmStarted,
)
from ..journal.kinds import FINAL, RunStatus
from ..journal.store import WHAT_TO_DO, Entry, Journal


@dataclass(frozen=True)
class Accepted:
    """An update that was acknowledged: the digest of its blob, and what the agent reported about it."""

    digest: str
    samples: float
    metrics: dict[str, float]
    sum: str = ""
    """Digest of the sum that it is in, in place of its own blob; empty: it has one."""

    @property
    def blob(self) -> str:
        """The digest of the blob in the store: that of the update, or of the sum that it is in."""
        return self.sum or self.digest


@dataclass(frozen=True)
class Rejection:
    """Why an agent has no update in a round, and will send none."""

    reason: str
    """The reason for people, on one line."""

    error: str = ""
    """The class of the agent's own error; empty where it sent an update, and the coordinator refused that."""

    accused: frozenset[str] = frozenset()
    """Agents whose shares of a secure sum it could not decrypt: then it has not failed itself."""

    boot: str = ""
    """The start of the agent when it failed; one that was restarted since has another."""

    @property
    def is_by_policy(self) -> bool:
        """Whether the agent's own ``[privacy]`` does not allow the job, which is no failure of it."""
        return self.error == PRIVACY_REFUSED

    @classmethod
    def from_fault(cls, message: Fault) -> Rejection:
        """Return the rejection of an agent that could not do its job."""
        reason = f"{message.error}: {message.message}"
        return cls(reason, message.error, accused_by(message), message.boot)

    @classmethod
    def from_fact(cls, fact: UpdateRefused) -> Rejection:
        """Return the rejection that the journal has noted."""
        if fact.error is not None:
            return cls(fact.reason, fact.error, frozenset(fact.accused), fact.boot)
        # Earlier versions have noted an agent's error, and whom it accuses, in the text alone.
        error, _, message = fact.reason.partition(": ")
        if error not in REFUSALS:
            return cls(fact.reason, boot=fact.boot)
        accused = names_before_colon(message) if error == SHARES_WRONG else frozenset[str]()
        return cls(fact.reason, error, accused, fact.boot)

    def to_fact(self) -> UpdateRefused:
        """Return the rejection for an entry of the journal."""
        fact = UpdateRefused(reason=self.reason[:MAX_REASON_CHARS], boot=self.boot, error=self.error)
        return fact.changed(accused=tuple(sorted(self.accused))) if self.accused else fact


MAX_REASON_CHARS = 1000
"""The most characters of a reason in the journal and in the receipt of a refused update."""


@dataclass(frozen=True)
class OpenRound:
    """A round that was opened and not closed. A later attempt at it keeps the updates of the earlier ones."""

    round: int
    attempt: int
    cohort: tuple[str, ...]
    fact: RoundOpened
    """What is journaled of the newest attempt, but for the attempt and the cohort, which are those above."""

    updates: dict[str, Accepted] = field(default_factory=dict)
    rejected: dict[str, Rejection] = field(default_factory=dict)

    @property
    def joining(self) -> tuple[str, ...]:
        """Members of the cohort that contribute without training the encoder."""
        return self.fact.joining

    def asked_in(self, agent: str) -> int:
        """Return the round that an update of this agent is of: an earlier one where rounds are buffered."""
        return self.fact.asked.get(agent, self.round)

    def takes(self, entry: Entry) -> bool:
        """Return whether the entry is an update of this round, accepted or rejected."""
        if entry.kind == UpdateAccepted.kind and entry.agent is not None:
            return entry.round == self.asked_in(entry.agent)
        return entry.kind == UpdateRefused.kind and entry.round == self.round

    def next_attempt(self, cohort: tuple[str, ...], fact: RoundOpened) -> OpenRound:
        """Another attempt; agents in ``fact.again`` are asked once more.

        It keeps all updates, unless they are masked for each other (``fact.session``): then all begin again.
        """
        is_masked = fact.session is not None or self.fact.session is not None
        updates = {} if is_masked else self.updates
        rejected = {agent: why for agent, why in self.rejected.items() if agent not in fact.again}
        return replace(self, attempt=self.attempt + 1, cohort=cohort, fact=fact, updates=updates, rejected=rejected)


RunEnd = RunFinished | RunFailed | RunCancelled


@dataclass(frozen=True)
class RunRecord:
    """Where a run stands: ``round`` is the last closed one (0: none), ``checkpoint`` the state's digest after it."""

    run: str
    request: RunRequested = field(default_factory=RunRequested)
    status: RunStatus = "requested"
    round: int = 0
    checkpoint: str | None = None
    open_round: OpenRound | None = None
    end: RunEnd | None = None
    """What was journaled of its end; None: it has not ended."""

    bases: tuple[str, ...] = ()
    """Digests of the states that agents of buffered rounds have started from."""

    good: str | None = None
    """Digest of the last good state: `coordinator.rounds.good_state`."""

    start: str | None = None
    """Digest of the state that the first round began with: updates are compared with the way from there."""

    stopped: str = ""
    """Why no further round follows although there are some left; empty: they follow."""

    is_pruned: bool = False
    """Whether its checkpoints and bundles were removed: `coordinator.state.retention`."""

    @property
    def needed_start(self) -> str | None:
        """`start`, as long as a round may follow whose updates are compared with the way from there."""
        has_rounds_left = self.round < self.request.rounds
        return self.start if has_rounds_left else None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status in FINAL.values()

    @property
    def reason(self) -> str | None:
        """Why it has ended as it did; None: it has not, or no reason was noted."""
        return None if self.end is None else self.end.reason

    @property
    def encoder_sha256(self) -> str | None:
        """Hash of the encoder that it has finished with; None: it has not finished."""
        return self.end.encoder_sha256 if isinstance(self.end, RunFinished) else None


_CHANGING = frozenset(
    {
        *FINAL,
        *(
            fact.kind
            for fact in (RunStarted, WarmStarted, RunStopped, RunExtended, RunPruned, RoundOpened, RoundClosed)
        ),
        *(fact.kind for fact in (UpdateAccepted, UpdateRefused)),
    }
)
"""Kinds of entries that change a record; those of others are not read."""


def step(record: RunRecord, entry: Entry) -> RunRecord:
    """Return the record after one more entry; kinds that change nothing leave it as it is.

    Raises:
        StateError: the entry contradicts those before it.
    """
    if entry.kind not in _CHANGING:
        return record
    fact = entry.fact
    if isinstance(fact, RunStarted | WarmStarted):
        begun = entry.digest or record.checkpoint
        return replace(record, status="running", checkpoint=begun, start=begun)
    if isinstance(fact, RunFinished | RunFailed | RunCancelled):
        return replace(record, status=FINAL[entry.kind], open_round=None, end=fact)
    if isinstance(fact, RunStopped | RunExtended):
        return _change_rounds(record, fact)
    if isinstance(fact, RunPruned):
        return replace(record, is_pruned=True)
    return _step_in_rounds(record, entry)


def _change_rounds(record: RunRecord, fact: RunStopped | RunExtended) -> RunRecord:
    """Return the record of a run that has fewer rounds than it was requested with from now on, or more."""
    if isinstance(fact, RunStopped):
        return replace(record, stopped=fact.reason)
    request = _with_rounds(record.request, fact.rounds)
    return replace(record, request=request, status="running", end=None, stopped="")


def _with_rounds(request: RunRequested, rounds: int) -> RunRequested:
    """Return the request as if it had been for so many rounds."""
    simulated = request.simulation
    if simulated is not None:
        simulated = simulated.changed(plan={**simulated.plan, "rounds": rounds})
    return request.changed(rounds=rounds, simulation=simulated)


def _step_in_rounds(record: RunRecord, entry: Entry) -> RunRecord:
    """Return the record after an entry about a round.

    Raises:
        StateError: It contradicts those before it.
    """
    fact = entry.fact
    if isinstance(fact, RoundOpened):
        return _open_round(record, entry, fact)
    if isinstance(fact, RoundClosed):
        return _close_round(record, entry, fact)
    if record.open_round is not None and record.open_round.takes(entry):
        return replace(record, open_round=_with_update(record.open_round, entry))
    return record


def _open_round(record: RunRecord, entry: Entry, fact: RoundOpened) -> RunRecord:
    """Return the record after a round has begun, or another attempt at it.

    Raises:
        StateError: Another round follows.
    """
    number = record.round + 1
    if entry.round != number:
        raise _contradiction(entry, f"opens round {entry.round}, round {record.round} was closed last")
    if record.open_round is None:
        opened = OpenRound(number, fact.attempt, fact.cohort, fact)
    else:
        opened = record.open_round.next_attempt(fact.cohort, fact)
    return replace(record, status="running", open_round=opened, bases=tuple(fact.bases.values()))


def _close_round(record: RunRecord, entry: Entry, fact: RoundClosed) -> RunRecord:
    """Return the record after a round is over.

    Raises:
        StateError: It is not open, or has left no state.
    """
    opened = record.open_round
    if opened is None or opened.round != entry.round or entry.digest is None:
        raise _contradiction(entry, f"closes round {entry.round} with state {entry.digest}, which is not open")
    good = None if fact.good is None else fact.good.digest
    bases = tuple(fact.bases.values())
    return replace(record, round=opened.round, checkpoint=entry.digest, open_round=None, bases=bases, good=good)


def _with_update(opened: OpenRound, entry: Entry) -> OpenRound:
    """Return the open round with one more accepted or rejected update."""
    fact = entry.fact
    if entry.agent is None:
        return opened
    if isinstance(fact, UpdateRefused):
        return replace(opened, rejected={**opened.rejected, entry.agent: Rejection.from_fact(fact)})
    if not isinstance(fact, UpdateAccepted) or entry.agent in opened.updates or entry.digest is None:
        return opened  # the first one was acknowledged
    own = fact.summed or entry.digest
    total = entry.digest if fact.summed else ""
    update = Accepted(own, float(fact.samples), dict(fact.metrics), total)
    return replace(opened, updates={**opened.updates, entry.agent: update})


def _contradiction(entry: Entry, what: str) -> StateError:
    return StateError(f"journal entry {entry.id} of run '{entry.run}' {what}. {WHAT_TO_DO}")


@dataclass
class RunView:
    """Where one run stands after the entries that were added; entries of other runs have no place here."""

    record: RunRecord

    def add(self, entry: Entry) -> None:
        """Take the next entry of the run.

        Raises:
            StateError: It contradicts those before it.
        """
        if entry.kind == RunRequested.kind and isinstance(entry.fact, RunRequested):
            self.record = replace(self.record, request=entry.fact)
        else:
            self.record = step(self.record, entry)


@dataclass
class _Replayed:
    """Where the runs of one store stand, as they were derived from its entries so far.

    Attributes:
        losses: What the store said of its losses then; another number: derive all of it again.
        runs: The newest entry, whichever run's, when a run was derived last, and what it was then.
        lock: Held while a run is derived.
    """

    losses: int
    runs: dict[str, tuple[int, RunRecord]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


_REPLAYED: weakref.WeakKeyDictionary[Journal, _Replayed] = weakref.WeakKeyDictionary()
_CHOOSING = threading.Lock()


def _replayed_of(journal: Journal) -> _Replayed:
    """Return what was derived from a store, which is nothing where entries were lost since."""
    with _CHOOSING:
        replayed = _REPLAYED.get(journal)
        if replayed is None or replayed.losses != journal.losses:
            replayed = _Replayed(journal.losses)
            _REPLAYED[journal] = replayed
        return replayed


def replay(journal: Journal, run: str) -> RunRecord:
    """Return where ``run`` stands, derived from its entries; only those since the last call are read.

    Raises:
        UnknownName: no such run.
        StateError: the entries contradict each other.
    """
    replayed = _replayed_of(journal)
    with replayed.lock:
        after, record = replayed.runs.get(run, (0, RunRecord(run)))
        newest = journal.last_id()  # before the entries: another process may append in between
        entries = journal.entries(run, after=after) if newest > after else []
        if not after and (not entries or entries[0].kind != RunRequested.kind):
            raise UnknownName("run", run, journal.runs())
        view = RunView(record)
        for entry in entries:
            view.add(entry)
        # The newest entry may be of another run: nothing of this one is between.
        read = max([newest, *(entry.id for entry in entries[-1:])])
        replayed.runs[run] = (read, view.record)
        return view.record
