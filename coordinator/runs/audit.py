"""Audit of a run: its journal, joined with the receipts that agents noted, figures, checkpoints and updates.

It derives from single rows what `coordinator.views.runs` and the round loop derive in their own way: every update is in
exactly one aggregation, and the model of a round is the aggregation of its updates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
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
from ..state.store import StateFolder, blobs_needed
from ..views.runs import replay
from .aggregation import StoredUpdates
from .release import pooled_before, sha256_of_encoder
from .request import Request

Break = Callable[[str], None]
"""Called with each row that breaks."""


@dataclass
class AuditedRound:
    """A closed round. ``checkpoint``: whether its state is on disk, with the right hash, or was removed as planned."""

    round: int
    updates: int
    checkpoint: str = "removed"
    is_aggregation: bool | None = None
    """Whether its updates give its state; None where they are masked, or not on disk any more as the state before."""

    confirmed: int = 0
    """Updates whose receipt its agent has noted, among the agents whose notes were given."""


@dataclass
class Audit:
    """What was compared. ``breaks`` is empty when all of it agrees."""

    run: str
    status: str
    entries: int = 0
    rounds: list[AuditedRound] = field(default_factory=list)
    blobs: int = 0
    receipts: int = 0
    without_receipts: list[str] = field(default_factory=list)
    """Given folders that have none of this run."""

    unreadable_receipts: int = 0
    """Lines of receipts that a power cut, or a full disk, has torn: they are left out."""

    agents: list[str] = field(default_factory=list)
    """Agents whose notes were compared."""

    encoder: str = "not compared"
    breaks: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether nothing breaks."""
        return not self.breaks

    def as_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"ok": self.is_ok, **asdict(self)}


@dataclass
class _Round:
    """What the journal says about a round."""

    number: int
    cohort: set[str] = field(default_factory=set)
    accepted: dict[str, Entry] = field(default_factory=dict)
    closed: Entry | None = None
    asked: dict[str, int] = field(default_factory=dict)
    """Agent -> the earlier round that its update is of, where rounds are buffered."""

    bases: dict[int, str] = field(default_factory=dict)
    """Round -> digest of the state that the agents asked in it started from, where rounds are buffered."""

    is_masked: bool = False
    """Whether only the sum of its updates is known."""

    def round_of(self, entry: Entry) -> int:
        """The number that an entry of this round has."""
        return self.asked.get(entry.agent or "", self.number) if entry.kind == "update_accepted" else self.number


@dataclass(frozen=True)
class _Receipt:
    """A line of an agent's receipts."""

    agent: str
    round: int
    purpose: str | None
    digest: str
    is_accepted: bool


def audit(state: StateFolder, run: str, agent_states: Iterable[Path] = ()) -> Audit:
    """Compare everything that is known of a run; ``agent_states`` are state folders of agents, or copies of them.

    The folders of hosted clients are compared in any case.

    Raises:
        UnknownName: no such run.
        StateError: an agent's file of receipts cannot be read.
    """
    record = replay(state.journal, run)
    result = Audit(run, record.status)
    try:
        state.journal.verify()
    except StateError as error:
        result.breaks.append(str(error))
        return result
    hosted = (path for path in sorted((state.path / "hosted").glob("*")) if path.is_dir())
    given = list(agent_states)
    id_ = str(record.request.id)
    folders = [folder / "runs" / id_ for folder in (*hosted, *given)]
    result.without_receipts = [str(one) for one in given if not (one / "runs" / id_ / RECEIPTS).is_file()]
    # Of a run at work: the journal has everything that receipts and figures tell of only if it is read after them.
    read = [_receipts(folder) for folder in folders]
    result.unreadable_receipts = sum(unreadable for _, unreadable in read)
    figures = state.run(run).metrics()
    entries = state.journal.entries(run)
    result.entries = len(entries)
    closed = list(_rounds(entries, result.breaks.append))
    result.rounds = [AuditedRound(one.number, len(one.accepted)) for one in closed]
    with_figures = record.round if record.is_over else record.round - 1  # the last ones are restored when it resumes
    _compare_figures(state.run(run).metrics_path, figures, closed, with_figures, result.breaks.append)
    sound = _compare_blobs(state, entries, result)
    request = Request.from_fact(record.request)
    method = methods.create(request.method_reference, request.params)
    _compare_states(state, method, entries, closed, sound, result)
    if record.status == "finished" and record.checkpoint in sound:
        try:
            state_after = decode(state.blobs.read(record.checkpoint or ""))
        except StateError:
            if not _removed(state, {record.checkpoint}):
                raise
        else:
            sha = sha256_of_encoder({**state_after, **pooled_before(state, run, record.round)})
            result.encoder = "equal" if sha == record.encoder_sha256 else "different"
        if result.encoder == "different":
            result.breaks.append(f"entry {entries[-1].id}: encoder {record.encoder_sha256}, the checkpoint has {sha}")
    _compare_receipts(entries, [one for receipts, _ in read for one in receipts], closed, result)
    return result


def _rounds(entries: Iterable[Entry], breaks: Break) -> Iterator[_Round]:
    """The rounds of a run, each update in the one that was open when it was accepted."""
    current = _Round(1)
    for entry in entries:
        fact = entry.fact
        if not isinstance(fact, UpdateAccepted | RoundOpened | RoundClosed) or _is_outside_rounds(fact):
            continue
        if why := _contradiction(entry, current):
            breaks(f"{_row(entry)}: {why}")
        elif isinstance(fact, RoundOpened):
            current.cohort |= set(fact.cohort)
            if fact.session is not None:  # updates masked for each other: those of an earlier attempt do not count
                current.accepted.clear()
                current.is_masked = True
            current.asked = dict(fact.asked)
            current.bases = dict(fact.bases)
        elif entry.kind == "update_accepted":
            current.accepted[str(entry.agent)] = entry
        if entry.kind == "round_closed" and entry.round == current.number:
            current.closed = entry
            yield current
            current = _Round(current.number + 1)


def _is_outside_rounds(fact: object) -> bool:
    """Whether an entry says that an update came which is of no round."""
    return isinstance(fact, UpdateAccepted) and fact.purpose in OUTSIDE_ROUNDS


def _contradiction(entry: Entry, current: _Round) -> str:
    """Why an entry cannot be in the round that the entries before it have reached; empty when it can."""
    if entry.round != current.round_of(entry) or (entry.kind != "round_opened" and not current.cohort):
        lost = "lost: it was receipted, and no aggregation has it: " if entry.kind == "update_accepted" else ""
        return f"{lost}the journal is at round {current.number}, {'open' if current.cohort else 'not open'}"
    if entry.kind == "update_accepted" and entry.agent in current.accepted:
        return f"twice: entry {current.accepted[entry.agent].id} is of the same agent and round"
    if entry.kind == "update_accepted" and entry.agent not in current.cohort:
        return "the agent is not in the cohort of the round"
    fact = entry.fact
    if isinstance(fact, RoundClosed) and fact.clients != len(current.accepted):
        return f"{fact.clients} updates were aggregated, {len(current.accepted)} accepted"
    return ""


def _row(entry: Entry) -> str:
    agent = f" of {entry.agent}" if entry.agent else ""
    return f"entry {entry.id} ({entry.kind}{agent}, round {entry.round})"


def _compare_figures(
    path: Path, figures: Iterable[dict[str, Any]], closed: Iterable[_Round], last: int, breaks: Break
) -> None:
    """Each closed round has one line of figures, with the agents that were aggregated; after ``last`` it may lack."""
    lines = [line for line in figures if line.get("kind") == "round"]
    numbers = [line.get("round") for line in lines]
    rounds = list(closed)
    for one in rounds:
        count = numbers.count(one.number)
        if count != 1 and (count or one.number <= last):
            breaks(f"{path}: {count} lines of round {one.number}, expected 1")
        elif count and lines[numbers.index(one.number)].get("agents") != sorted(one.accepted):
            breaks(f"{path}: round {one.number} has other agents than the journal's {sorted(one.accepted)}")
    for number in sorted({*numbers} - {one.number for one in rounds}, key=str):
        breaks(f"{path}: round {number} is not closed in the journal")


def _compare_blobs(state: StateFolder, entries: Iterable[Entry], result: Audit) -> set[str]:
    """Digests of the blobs on disk with the right hash; a wrong one breaks, and one that is needed and gone."""
    needed = blobs_needed(state)
    sound = set[str]()
    wrong = list[tuple[Entry, StateError]]()
    for entry in entries:
        if entry.digest is None or entry.digest in sound:
            continue
        try:
            if entry.digest in state.blobs or entry.digest in needed:
                state.blobs.check(entry.digest)
                sound.add(entry.digest)
        except StateError as error:
            wrong.append((entry, error))
    removed = _removed(state, {entry.digest for entry, _ in wrong})
    result.breaks += [f"{_row(entry)}: {error}" for entry, error in wrong if entry.digest not in removed]
    result.blobs = len(sound)
    return sound


def _removed(state: StateFolder, digests: set[str | None]) -> set[str]:
    """Of these blobs, those that a coordinator at work has removed since, as nothing needs them any more."""
    gone = {digest for digest in digests if digest is not None and digest not in state.blobs}
    return gone - blobs_needed(state) if gone else gone


def _compare_states(
    state: StateFolder, method: Method, entries: list[Entry], closed: list[_Round], sound: set[str], result: Audit
) -> None:
    """Aggregate the updates of each round again, from the state before it, where these are on disk."""
    before = next((e.digest for e in reversed(entries) if e.kind in {"run_started", "warm_started"} and e.digest), None)
    states = {0: before}
    repeats: dict[str, int] = {}
    for one, audited in zip(closed, result.rounds, strict=True):
        fact = None if one.closed is None else one.closed.fact
        if one.closed is None or not isinstance(fact, RoundClosed):
            continue
        if one.closed.digest in sound:
            audited.checkpoint = "ok"
        states[one.number] = one.closed.digest
        repeats_before = repeats
        repeats = dict(fact.repeats)
        if fact.restored is not None:
            before = one.closed.digest
            audited.is_aggregation = before == states.get(fact.restored.round)
            result.breaks += [] if audited.is_aggregation else [f"{_row(one.closed)}: no state of the run was restored"]
            continue
        updates = {agent: entry for agent, entry in one.accepted.items() if entry.digest in sound}
        bases = {one.bases[one.asked[agent]] for agent in updates if agent in one.asked}
        settings = _settings(fact)
        start = states[0] if settings.min_cosine is not None else None
        has_states = {before, *bases, *filter(None, (start,))} <= sound
        if not one.is_masked and has_states and len(updates) == len(one.accepted):
            row = _row(one.closed)
            try:
                sha = _aggregated(state, method, before or "", updates, one, settings, start, repeats_before)
            except (HeadwaterError, OSError) as error:
                if not _removed(state, {before, *bases, *(entry.digest for entry in updates.values())}):
                    audited.is_aggregation = False
                    result.breaks.append(f"{row}: its updates cannot be aggregated: {cause(error)}")
            else:
                audited.is_aggregation = sha == one.closed.digest
                if not audited.is_aggregation:
                    result.breaks.append(f"{row}: state {one.closed.digest}, its updates aggregate to {sha}")
        before = one.closed.digest


def _settings(closed: RoundClosed) -> AggregationConfig:
    """How the updates of a closed round were aggregated."""
    journaled = closed.aggregation.settings.to_body()
    # Bounds that an earlier version did not have are not in its journal: they were off.
    return AggregationConfig.model_validate({**NO_BOUNDS, **journaled})


def _aggregated(
    state: StateFolder,
    method: Method,
    before: str,
    updates: dict[str, Entry],
    one: _Round,
    settings: AggregationConfig,
    start: str | None,
    repeats: dict[str, int],
) -> str:
    """Return the hash of the state that these updates give.

    Args:
        state: The state folder.
        method: The method of the run.
        before: Digest of the state that the round began with.
        updates: Agent -> the entry of its accepted update.
        one: The round.
        settings: The rule and its bounds.
        start: Digest of the state that the run began with.
        repeats: Agent -> its count of rounds at a bound of size before the round.
    """
    accepted: dict[str, tuple[str, float]] = {}
    for agent, entry in updates.items():
        samples = entry.fact.samples if isinstance(entry.fact, UpdateAccepted) else 0
        accepted[agent] = (entry.digest or "", float(samples))
    stored = StoredUpdates(accepted, one.number, dict(one.asked), dict(one.bases), start, repeats)
    after, _ = stored.aggregate(state.blobs, method, decode(state.blobs.read(before)), settings)
    return sha256_of(*pieces(after))


def _compare_receipts(
    entries: Iterable[Entry], receipts: list[_Receipt], closed: Iterable[_Round], result: Audit
) -> None:
    """An update that its agent knows as accepted is in the journal, and one that it knows as rejected is not.

    The last receipt of an update counts: a coordinator on a restored backup rejects those of later rounds first.
    """
    accepted = {(e.agent, e.round, e.digest): e for e in entries if e.kind == "update_accepted"}
    confirmed = set()
    for one in {(one.agent, one.round, one.digest): one for one in receipts}.values():
        entry = accepted.get((one.agent, one.round, one.digest))
        row = f"receipt of {one.agent}, round {one.round}, {one.digest[:16]}"
        if one.is_accepted and entry is None:
            result.breaks.append(f"{row}: lost: the agent's receipt says accepted, and the journal has no such entry")
        elif not one.is_accepted and entry is not None:
            result.breaks.append(f"{row}: the agent's receipt says rejected, and entry {entry.id} has accepted it")
        elif entry is not None and not _is_outside_rounds(entry.fact):
            confirmed.add((one.agent, one.round))
    result.receipts = len(receipts)
    result.agents = sorted({one.agent for one in receipts})
    for one_round, audited in zip(closed, result.rounds, strict=True):
        audited.confirmed = sum((agent, entry.round) in confirmed for agent, entry in one_round.accepted.items())


def _receipts(folder: Path) -> tuple[list[_Receipt], int]:
    """The receipts that an agent noted of a run, without an incomplete last line, and how many lines are none.

    Raises:
        StateError: they cannot be read.
    """
    path = folder / RECEIPTS
    try:
        lines = read_regular(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {cause(error)}") from error
    result = []
    unreadable = 0
    for line in lines:
        try:
            raw = json.loads(line)
            receipt = _Receipt(
                str(raw["agent"]), int(raw["round"]), raw["purpose"], str(raw["digest"]), raw["accepted"] is True
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            unreadable += 1
        else:
            result.append(receipt)
    return result, unreadable
