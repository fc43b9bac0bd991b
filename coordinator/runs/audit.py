"""Audit of a run: its journal, joined with the receipts that agents noted, figures, checkpoints and updates.

It derives from single rows what `coordinator.views.runs` and the round loop derive in their own way: every update is in
exactly one aggregation, and the model of a round is the aggregation of its updates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edge_agent import methods
from edge_agent.core.errors import HeadwaterError, StateError, cause
from edge_agent.core.storage import read_regular, sha256_of
from edge_agent.methods import Method
from edge_agent.run_folder.layout import RECEIPTS
from edge_agent.wire.messages.fields import OUTSIDE_ROUNDS
from edge_agent.wire.tensors import decode, pieces

from ..config import NO_BOUNDS, AggregationConfig
from ..journal.entries import RoundClosed, RoundOpened, UpdateAccepted
from ..journal.store import Entry
from ..rounds.aggregation import StoredUpdates
from ..rounds.request import Request
from ..state.store import StateFolder, blobs_needed
from ..views.runs import RunRecord, replay
from .release import pooled_before, sha256_of_encoder

Break = Callable[[str], None]
"""Called with each row that breaks."""


@dataclass
class AuditedRound:
    """What was compared of a closed round."""

    round: int
    updates: int
    checkpoint: str = "removed"
    """"ok" where its state is on disk with the right hash; "removed" where it is not needed any more."""

    is_aggregation: bool | None = None
    """Whether its updates give its state; None where they are masked, or not on disk any more as the state before."""

    confirmed: int = 0
    """Updates whose receipt its agent has noted, among the agents whose notes were given."""


@dataclass
class Audit:
    """What was compared of a run; `breaks` is empty when all of it agrees."""

    run: str
    status: str
    entries: int = 0
    rounds: list[AuditedRound] = field(default_factory=list)
    blobs: int = 0
    receipts: int = 0
    without_receipts: list[str] = field(default_factory=list)
    """Given state folders that have no receipts of this run."""

    unreadable_receipts: int = 0
    """Lines of receipts that a power cut, or a full disk, has torn: they are not compared."""

    agents: list[str] = field(default_factory=list)
    """Agents whose notes were compared."""

    encoder: str = "not compared"
    breaks: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether nothing breaks."""
        return not self.breaks

    def as_json(self) -> dict[str, Any]:
        """Return the audit as JSON."""
        return {"ok": self.is_ok, **asdict(self)}


@dataclass
class _Round:
    """What the journal says about one round, up to the entry that is read."""

    number: int
    cohort: set[str] = field(default_factory=set)
    """Agents that were asked for an update; empty before the round is opened."""

    accepted: dict[str, Entry] = field(default_factory=dict)
    """Agent -> the entry of its accepted update."""

    closed: Entry | None = None
    asked: dict[str, int] = field(default_factory=dict)
    """Agent -> the earlier round that its update is of, where rounds are buffered."""

    bases: dict[int, str] = field(default_factory=dict)
    """Round -> digest of the state that the agents asked in it started from, where rounds are buffered."""

    is_masked: bool = False
    """Whether only the sum of its updates is known."""

    @property
    def is_open(self) -> bool:
        """Whether agents were asked already."""
        return bool(self.cohort)

    def round_of(self, entry: Entry) -> int:
        """Return the number that an entry of this round has: that of an earlier round where rounds are buffered."""
        if entry.kind == "update_accepted":
            return self.asked.get(entry.agent or "", self.number)
        return self.number

    def open(self, opened: RoundOpened) -> None:
        """Note an attempt at the round: the first one, or one that adds agents."""
        self.cohort |= set(opened.cohort)
        if opened.session is not None:
            # Updates of one session are masked for each other: those of an earlier attempt do not count.
            self.accepted.clear()
            self.is_masked = True
        self.asked = dict(opened.asked)
        self.bases = dict(opened.bases)


@dataclass(frozen=True)
class _Receipt:
    """A line of an agent's receipts."""

    agent: str
    round: int
    purpose: str | None
    digest: str
    is_accepted: bool

    @classmethod
    def from_line(cls, line: bytes) -> _Receipt:
        """Parse a line of the file of receipts.

        Raises:
            ValueError, KeyError, TypeError, OverflowError, RecursionError: the line is no receipt.
        """
        raw = json.loads(line)
        return cls(
            agent=str(raw["agent"]),
            round=int(raw["round"]),
            purpose=raw["purpose"],
            digest=str(raw["digest"]),
            is_accepted=raw["accepted"] is True,
        )


def audit(state: StateFolder, run: str, agent_states: Iterable[Path] = ()) -> Audit:
    """Compare everything that is known of a run.

    Args:
        state: The coordinator's state folder.
        run: Id of the run.
        agent_states: State folders of agents, or copies of them. Those of hosted clients are compared in any case.

    Raises:
        UnknownName: no such run.
        StateError: an agent's file of receipts cannot be read.
    """
    record = replay(state.journal, run)
    result = Audit(run, record.status)
    # Step 1: a journal whose entries are damaged proves nothing, so nothing is compared with it.
    try:
        state.journal.verify()
    except StateError as error:
        result.breaks.append(str(error))
        return result
    # Step 2: read receipts and figures before the journal. Of a run at work the journal then has all that they tell of.
    receipts = _read_all_receipts(state, str(record.request.id), list(agent_states), result)
    figures = state.run(run).metrics()
    entries = state.journal.entries(run)
    result.entries = len(entries)
    # Step 3: compare the order of the entries, the figures and the blobs on disk.
    closed_rounds = list(_follow_rounds(entries, result.breaks.append))
    result.rounds = [AuditedRound(round_.number, len(round_.accepted)) for round_ in closed_rounds]
    last_with_figures = record.round
    if not record.is_over:
        last_with_figures -= 1  # the figures of the last round are restored when the run resumes
    metrics_path = state.run(run).metrics_path
    _compare_figures(metrics_path, figures, closed_rounds, last_with_figures, result.breaks.append)
    intact_blobs = _compare_blobs(state, entries, result)
    # Step 4: aggregate each round again, and compare the encoder with the last state.
    request = Request.from_fact(record.request)
    method = methods.create(request.method_reference, request.params)
    _compare_states(state, method, entries, closed_rounds, intact_blobs, result)
    if record.status == "finished" and record.checkpoint in intact_blobs:
        _compare_encoder(state, record, entries[-1], result)
    # Step 5: what agents know of their updates.
    _compare_receipts(entries, receipts, closed_rounds, result)
    return result


def _follow_rounds(entries: Iterable[Entry], breaks: Break) -> Iterator[_Round]:
    """Yield the closed rounds of a run, each update in the round that was open when it was accepted."""
    current = _Round(1)
    for entry in entries:
        fact = entry.fact
        if not isinstance(fact, UpdateAccepted | RoundOpened | RoundClosed) or _is_outside_rounds(fact):
            continue
        contradiction = _find_contradiction(entry, current)
        if contradiction:
            breaks(f"{_describe_entry(entry)}: {contradiction}")
        elif isinstance(fact, RoundOpened):
            current.open(fact)
        elif isinstance(fact, UpdateAccepted):
            current.accepted[str(entry.agent)] = entry
        # A round that closed with the wrong number of updates is closed all the same: the next entries are of the next.
        if isinstance(fact, RoundClosed) and entry.round == current.number:
            current.closed = entry
            yield current
            current = _Round(current.number + 1)


def _is_outside_rounds(fact: object) -> bool:
    """Return whether an entry says that an update came which is of no round."""
    return isinstance(fact, UpdateAccepted) and fact.purpose in OUTSIDE_ROUNDS


def _find_contradiction(entry: Entry, current: _Round) -> str:
    """Say why an entry cannot be in the round that the entries before it have reached; empty when it can."""
    fact = entry.fact
    # Only a round's opening can come before its cohort is known, and nothing can come from another round.
    is_too_early = not current.is_open and not isinstance(fact, RoundOpened)
    if entry.round != current.round_of(entry) or is_too_early:
        phase = "open" if current.is_open else "not open"
        reached = f"the journal is at round {current.number}, {phase}"
        if isinstance(fact, UpdateAccepted):
            return f"lost: it was receipted, and no aggregation has it: {reached}"
        return reached
    if isinstance(fact, UpdateAccepted):
        return _find_contradiction_of_update(entry, current)
    if isinstance(fact, RoundClosed) and fact.clients != len(current.accepted):
        return f"{fact.clients} updates were aggregated, {len(current.accepted)} accepted"
    return ""


def _find_contradiction_of_update(entry: Entry, current: _Round) -> str:
    """Say why an update cannot be in the round that is open; empty when it can."""
    agent = entry.agent or ""
    if agent in current.accepted:
        return f"twice: entry {current.accepted[agent].id} is of the same agent and round"
    if agent not in current.cohort:
        return "the agent is not in the cohort of the round"
    return ""


def _describe_entry(entry: Entry) -> str:
    agent = f" of {entry.agent}" if entry.agent else ""
    return f"entry {entry.id} ({entry.kind}{agent}, round {entry.round})"


def _compare_figures(
    path: Path,
    figures: Iterable[dict[str, Any]],
    closed_rounds: Sequence[_Round],
    last_with_figures: int,
    breaks: Break,
) -> None:
    """Compare the lines of figures with the closed rounds: one line for each, with the agents that were aggregated.

    Args:
        path: File of the figures, for the rows that break.
        figures: Its lines: JSON as it was read.
        closed_rounds: The rounds that are closed in the journal.
        last_with_figures: Rounds after this one may have no line yet.
        breaks: Called with each row that breaks.
    """
    lines_by_round: dict[Any, list[dict[str, Any]]] = {}
    for line in figures:
        if line.get("kind") == "round":
            lines_by_round.setdefault(line.get("round"), []).append(line)
    for round_ in closed_rounds:
        lines = lines_by_round.pop(round_.number, [])
        is_written_later = not lines and round_.number > last_with_figures
        if is_written_later:
            continue
        if len(lines) != 1:
            breaks(f"{path}: {len(lines)} lines of round {round_.number}, expected 1")
        elif lines[0].get("agents") != sorted(round_.accepted):
            breaks(f"{path}: round {round_.number} has other agents than the journal's {sorted(round_.accepted)}")
    for number in sorted(lines_by_round, key=str):
        breaks(f"{path}: round {number} is not closed in the journal")


def _compare_blobs(state: StateFolder, entries: Iterable[Entry], result: Audit) -> set[str]:
    """Check the hash of each blob that the journal names; a wrong one breaks, and one that is needed and gone.

    Returns:
        The digests of those on disk with the right hash.
    """
    needed = blobs_needed(state)
    intact_blobs = set[str]()
    wrong = list[tuple[Entry, StateError]]()
    for entry in entries:
        if entry.digest is None or entry.digest in intact_blobs:
            continue
        try:
            # A blob that nothing needs any more may be gone.
            if entry.digest in state.blobs or entry.digest in needed:
                state.blobs.check(entry.digest)
                intact_blobs.add(entry.digest)
        except StateError as error:
            wrong.append((entry, error))
    removed = _find_removed(state, {entry.digest for entry, _ in wrong})
    for entry, reason in wrong:
        if entry.digest not in removed:
            result.breaks.append(f"{_describe_entry(entry)}: {reason}")
    result.blobs = len(intact_blobs)
    return intact_blobs


def _find_removed(state: StateFolder, digests: set[str | None]) -> set[str]:
    """Return which of these blobs a coordinator at work has removed since, as nothing needs them any more."""
    missing = {digest for digest in digests if digest is not None and digest not in state.blobs}
    if not missing:
        return missing
    return missing - blobs_needed(state)


@dataclass(frozen=True)
class _AggregationInputs:
    """What the aggregation of one closed round is repeated from."""

    before: str | None
    """Digest of the state that the round began with; None where the journal names none."""

    start: str | None
    """Digest of the state that the run began with; None where directions along the way of the run do not count."""

    bases: frozenset[str]
    """Digests of the states that agents started from, where rounds are buffered."""

    updates: Mapping[str, Entry]
    """Agent -> the entry of its accepted update, of those whose update is on disk."""

    settings: AggregationConfig
    """The rule and its bounds."""

    repeats: Mapping[str, int]
    """Agent -> its count of rounds at a bound of size before the round."""

    @property
    def states(self) -> set[str | None]:
        """Digests of all states that are needed."""
        states: set[str | None] = {self.before, *self.bases}
        if self.start is not None:
            states.add(self.start)
        return states

    @property
    def removable(self) -> set[str | None]:
        """Digests of the blobs that a coordinator at work may remove while the audit reads them."""
        return {self.before, *self.bases, *(entry.digest for entry in self.updates.values())}


def _compare_states(
    state: StateFolder,
    method: Method,
    entries: Sequence[Entry],
    closed_rounds: Iterable[_Round],
    intact_blobs: set[str],
    result: Audit,
) -> None:
    """Aggregate the updates of each round again, from the state before it, where these are on disk."""
    before = _find_first_state(entries)
    states = {0: before}
    """Round -> digest of its state; 0: the state that the run began with."""

    repeats: Mapping[str, int] = {}
    for round_, audited in zip(closed_rounds, result.rounds, strict=True):
        closed = round_.closed
        if closed is None or not isinstance(closed.fact, RoundClosed):
            continue
        if closed.digest in intact_blobs:
            audited.checkpoint = "ok"
        states[round_.number] = closed.digest
        if closed.fact.restored is not None:
            # A round whose loss exploded has the state of an earlier one: there is nothing to aggregate.
            audited.is_aggregation = closed.digest == states.get(closed.fact.restored.round)
            if not audited.is_aggregation:
                result.breaks.append(f"{_describe_entry(closed)}: no state of the run was restored")
        else:
            settings = _read_settings(closed.fact)
            updates = {agent: entry for agent, entry in round_.accepted.items() if entry.digest in intact_blobs}
            inputs = _AggregationInputs(
                before=before,
                # Without a limit for cosines no update is compared with the way of the run.
                start=states[0] if settings.min_cosine is not None else None,
                bases=_base_states(round_, updates),
                updates=updates,
                settings=settings,
                repeats=repeats,
            )
            # The sum of masked updates cannot be repeated from them, nor any sum of which something is gone.
            has_all = len(updates) == len(round_.accepted) and inputs.states <= intact_blobs
            if has_all and not round_.is_masked:
                _compare_aggregation(state, method, round_, closed, inputs, audited, result)
        # The next round began from this state, and with these counts.
        before = closed.digest
        repeats = dict(closed.fact.repeats)


def _base_states(round_: _Round, agents: Iterable[str]) -> frozenset[str]:
    """Return the digests of the earlier states that updates of these agents started from, in a buffered round."""
    asked_earlier = [agent for agent in agents if agent in round_.asked]
    return frozenset(round_.bases[round_.asked[agent]] for agent in asked_earlier)


def _find_first_state(entries: Sequence[Entry]) -> str | None:
    """Return the digest of the state that the run began with: the last one that its start names."""
    for entry in reversed(entries):
        if entry.kind in {"run_started", "warm_started"} and entry.digest:
            return entry.digest
    return None


def _read_settings(closed: RoundClosed) -> AggregationConfig:
    """Return how the updates of a closed round were aggregated."""
    journaled = closed.aggregation.settings.to_body()
    # Bounds that an earlier version did not have are not in its journal: they were off.
    return AggregationConfig.model_validate({**NO_BOUNDS, **journaled})


def _compare_aggregation(
    state: StateFolder,
    method: Method,
    round_: _Round,
    closed: Entry,
    inputs: _AggregationInputs,
    audited: AuditedRound,
    result: Audit,
) -> None:
    """Compare the state of a closed round with what its updates aggregate to now."""
    row = _describe_entry(closed)
    try:
        digest = _aggregate_again(state, method, round_, inputs)
    except (HeadwaterError, OSError) as error:
        # A coordinator at work may have removed an input meanwhile: then nothing is known about the round.
        if _find_removed(state, inputs.removable):
            return
        audited.is_aggregation = False
        result.breaks.append(f"{row}: its updates cannot be aggregated: {cause(error)}")
        return
    audited.is_aggregation = digest == closed.digest
    if not audited.is_aggregation:
        result.breaks.append(f"{row}: state {closed.digest}, its updates aggregate to {digest}")


def _aggregate_again(state: StateFolder, method: Method, round_: _Round, inputs: _AggregationInputs) -> str:
    """Return the hash of the state that the updates of a round give."""
    accepted: dict[str, tuple[str, float]] = {}
    sums = set[str]()
    for agent, entry in inputs.updates.items():
        fact = entry.fact if isinstance(entry.fact, UpdateAccepted) else UpdateAccepted()
        digest = entry.digest or ""
        if fact.summed:
            sums.add(digest)
        else:
            accepted[agent] = (digest, float(fact.samples))
    stored = StoredUpdates(
        accepted,
        round_.number,
        dict(round_.asked),
        dict(round_.bases),
        inputs.start,
        dict(inputs.repeats),
        tuple(sorted(sums)),
    )
    before = decode(state.blobs.read(inputs.before or ""))
    after, _ = stored.aggregate(state.blobs, method, before, inputs.settings)
    return sha256_of(*pieces(after))


def _compare_encoder(state: StateFolder, record: RunRecord, last_entry: Entry, result: Audit) -> None:
    """Compare the hash of the encoder that a finished run tells with that of its last checkpoint."""
    try:
        state_after = decode(state.blobs.read(record.checkpoint or ""))
    except StateError:
        if not _find_removed(state, {record.checkpoint}):
            raise
        return
    digest = sha256_of_encoder({**state_after, **pooled_before(state, result.run, record.round)})
    if digest == record.encoder_sha256:
        result.encoder = "equal"
        return
    result.encoder = "different"
    result.breaks.append(f"entry {last_entry.id}: encoder {record.encoder_sha256}, the checkpoint has {digest}")


def _compare_receipts(
    entries: Iterable[Entry], receipts: Sequence[_Receipt], closed_rounds: Iterable[_Round], result: Audit
) -> None:
    """Compare what agents know with the journal: it has each accepted update, and none that was rejected."""
    accepted = {}
    for entry in entries:
        if entry.kind == "update_accepted":
            # The receipt of an update that came as a part of a sum names the update.
            summed = entry.fact.summed if isinstance(entry.fact, UpdateAccepted) else ""
            accepted[entry.agent, entry.round, summed or entry.digest] = entry
    # 1. The last receipt of an update counts: a coordinator on a restored backup rejects those of later rounds first.
    last_receipts = {(receipt.agent, receipt.round, receipt.digest): receipt for receipt in receipts}
    confirmed = set[tuple[str | None, int | None]]()
    for key, receipt in last_receipts.items():
        journaled = accepted.get(key)
        contradiction = _contradiction_to_receipt(receipt, journaled)
        if contradiction:
            row = f"receipt of {receipt.agent}, round {receipt.round}, {receipt.digest[:16]}"
            result.breaks.append(f"{row}: {contradiction}")
        elif journaled is not None and not _is_outside_rounds(journaled.fact):
            confirmed.add((receipt.agent, receipt.round))
    # 2. How many updates of each aggregation are confirmed by the agents that sent them.
    result.receipts = len(receipts)
    result.agents = sorted({receipt.agent for receipt in receipts})
    for round_, audited in zip(closed_rounds, result.rounds, strict=True):
        in_aggregation = {(agent, entry.round) for agent, entry in round_.accepted.items()}
        audited.confirmed = len(in_aggregation & confirmed)


def _contradiction_to_receipt(receipt: _Receipt, journaled: Entry | None) -> str:
    """Return how a receipt contradicts the journal; empty where both say the same.

    Args:
        receipt: The last receipt of an update.
        journaled: The entry that has accepted the update; None: there is none.
    """
    if journaled is None and receipt.is_accepted:
        return "lost: the agent's receipt says accepted, and the journal has no such entry"
    if journaled is not None and not receipt.is_accepted:
        return f"the agent's receipt says rejected, and entry {journaled.id} has accepted it"
    return ""


def _read_all_receipts(state: StateFolder, run_id: str, given: Sequence[Path], result: Audit) -> list[_Receipt]:
    """Read the receipts of hosted clients and of the given state folders; the result notes what is missing or torn.

    Raises:
        StateError: a file of receipts cannot be read.
    """
    hosted = [path for path in sorted((state.path / "hosted").glob("*")) if path.is_dir()]
    receipts = list[_Receipt]()
    for folder in (*hosted, *given):
        noted, unreadable = _read_receipts(folder / "runs" / run_id)
        receipts += noted
        result.unreadable_receipts += unreadable
    for folder in given:
        if not (folder / "runs" / run_id / RECEIPTS).is_file():
            result.without_receipts.append(str(folder))
    return receipts


def _read_receipts(folder: Path) -> tuple[list[_Receipt], int]:
    """Return the receipts that an agent noted of a run, and how many lines of their file are none.

    An incomplete last line is passed over: the agent is writing it, or was killed while it did.

    Raises:
        StateError: the file cannot be read.
    """
    path = folder / RECEIPTS
    try:
        lines = read_regular(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {cause(error)}") from error
    receipts = []
    unreadable = 0
    for line in lines:
        try:
            receipt = _Receipt.from_line(line)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            unreadable += 1
        else:
            receipts.append(receipt)
    return receipts, unreadable
