"""``headwater agents``: all agents or one of them; show, revoke and rename their certificates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from edge_agent.core.errors import UsageError, nearest
from edge_agent.core.formats import pairs, value_text
from edge_agent.core.storage import IDENTITY
from edge_agent.core.time_and_text import show_time
from edge_agent.identity.certificates import show_utc

from ..identity.ledger import AgentRecord, Ledger
from ..journal.entries import DeviceRetired
from ..state.fleet_columns import to_json
from ..state.fleet_rows import AgentRow, describe_inputs
from ..state.history import AgentHistory, history_of
from ..state.store import StateFolder
from ..text import counted, listed
from ..views.candidate import SCOPES, Candidate
from ..views.history import AccuracyLine, BundleLine, PinLine
from ..views.releases import book_of
from .enroll import Expires, Name, duration, enrolment, print_token
from .fleet import NO_AGENTS, SortKey, ago, notes_of, rows_of, sort_key, table_of
from .options import Config, Json, State, state_path
from .output import present, table

SHOWN = 50


class _ShowByDefault(TyperGroup):
    """Without a sub-command, agents are shown: ``agents``, ``agents NAME``, ``agents --faults``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the sub-command in where there is none."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ShowByDefault,
    help="All agents, or one of them: state, version, bundle, accuracies, memory, last fault with its remedy.\n\n"
    "Without a sub-command it is 'agents show', whose --help has the options to sort and select; the others are about "
    "certificates.\n\n"
    "Example: headwater agents porch",
)

One = Annotated[str | None, typer.Argument(metavar="[NAME]", help="All of this agent, with its history.")]
Sort = Annotated[
    SortKey | None, typer.Option("--sort", help="Default: faults first. Accuracies: the worst first; memory: the most.")
]
Reverse = Annotated[bool, typer.Option("--reverse", help="The other way round.")]
Faults = Annotated[bool, typer.Option("--faults", help="Only agents with a fault or a note.")]
Limit = Annotated[int, typer.Option("--limit", min=0, help="At most so many; 0: all.")]
Find = Annotated[str, typer.Option("--find", help="Only agents with this text in their id.")]

NewName = Annotated[str, typer.Argument(help="Its new id.")]


@app.command("show")
def show_agents(
    name: One = None,
    sort: Sort = None,
    reverse: Reverse = False,
    faults: Faults = False,
    limit: Limit = SHOWN,
    find: Find = "",
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """List all agents, or show one of them with its history.

    Example: headwater agents show --sort acc.personal --limit 10
    """
    path = state_path(config, state)
    with StateFolder(path).look() as folder:
        rows = rows_of(folder)
        if name is not None:
            row = _find_agent(rows, name, path)
            history = history_of(folder, name)
            present({**to_json(row), "history": history.to_json()}, _show_agent(row, history), as_json=as_json)
            return
    selected = [row for row in rows if find in row.id and (row.has_problem or not faults)]
    selected.sort(key=sort_key(sort), reverse=reverse)
    shown = selected[:limit] if limit else selected
    fleet = _Fleet(
        shown=shown,
        selected=len(selected),
        known=len(rows),
        states=dict(sorted(Counter(row.presence.value for row in rows).items())),
        inputs=describe_inputs(row.inputs_since for row in rows),
    )
    present(fleet.to_json(), _show_fleet(fleet), as_json=as_json)


@dataclass(frozen=True)
class _Fleet:
    """The agents that were asked for, and counts of all agents."""

    shown: list[AgentRow]
    selected: int
    """Agents that were asked for; the page may have fewer."""

    known: int
    states: dict[str, int]
    """Presence, as a word -> agents."""

    inputs: str
    """On how many agents the inputs have changed; empty where none tells it."""

    def to_json(self) -> dict[str, Any]:
        """Return the agents as ``--json`` prints them."""
        return {
            "agents": [to_json(row) for row in self.shown],
            "selected": self.selected,
            "known": self.known,
            "states": self.states,
            "inputs": self.inputs,
        }


def _find_agent(rows: list[AgentRow], name: str, state: Path) -> AgentRow:
    """Return the row of an agent.

    Raises:
        UsageError: The coordinator has not heard it. The message says whether it is enrolled, and otherwise which
            agent has a similar name.
    """
    for row in rows:
        if row.id == name:
            return row
    record = Ledger(state / IDENTITY / "agents").get(name)
    if record is not None:
        raise UsageError(
            f"agent '{name}' ({_enrolment_state(record, time.time())}) was not heard yet; on the device "
            "'edge-agent run' starts it and 'edge-agent doctor' says what keeps it away"
        )
    close = nearest(name, [row.id for row in rows])
    hint = f"did you mean '{close}'? " if close else ""
    raise UsageError(f"unknown agent '{name}': {hint}'headwater agents' shows those that are known")


def _show_fleet(fleet: _Fleet) -> Iterator[Table | str]:
    """Yield the table of the selected agents, with what is to be said about single ones below."""
    shown = fleet.shown
    if not fleet.known:
        yield NO_AGENTS
        return
    states = ", ".join(f"{count} {state}" for state, count in fleet.states.items())
    yield f"{counted(fleet.known, 'agent')}: {states}"
    if fleet.inputs:
        yield f"inputs: {fleet.inputs}"
    if not shown:
        yield "none of them is selected (--faults, --find)"
        return
    is_cut = len(shown) < fleet.selected
    yield table_of(shown, f"{len(shown)} of {fleet.selected} selected" if is_cut else "agents")
    for row in shown:
        for note in notes_of(row):
            yield f"{row.id} *: {note}"
    alone = [row.id for row in shown if row.better_alone]
    if alone:
        yield f"better off alone, acc.local above acc.personal by more than noise: {listed(alone)}"


def _show_agent(row: AgentRow, history: AgentHistory) -> Iterator[Table | str]:
    """Yield what is known of one agent: what it is now, then its history, a table or line for each kind of event."""
    yield from pairs(_facts_of(row).items())
    if row.fault is not None:
        yield from pairs([("fault", f"{row.fault.error}: {row.fault.message}"), ("remedy", row.fault.remedy)])
    for note in row.notes:
        yield f"note: {note}"
    if history.accuracy:
        yield ""
        yield _table_of_accuracy(history.accuracy)
    if history.bundles:
        yield ""
        yield _table_of_bundles(history.bundles)
    for pin in history.pins:
        yield _describe_pin(pin)
    for fault in history.faults:
        yield f"{show_time(fault.at)} fault: {fault.error}: {fault.message}; {fault.remedy}"
    for update in history.rejected:
        yield f"{show_time(update.at)} update of {update.run}, round {update.round}, rejected: {update.reason}"


def _facts_of(row: AgentRow) -> dict[str, object]:
    """Name -> value of what an agent is now; None where it is not known."""
    seen = ago(row.silent_s)
    facts: dict[str, object] = {
        "agent": row.id,
        "state": row.presence.value,
        "tier": row.tier or None,
        "last seen": f"{seen} ago" if seen else None,
        "relay": row.relay or None,
        "version": row.software or None,
        "bundle": row.bundle_id or None,
        "head": row.head or None,
        "samples": row.samples,
        "acc.local": row.local,
        "acc.global": row.shared,
        "acc.personal": row.personal,
    }
    facts["better off alone"] = _describe_better_alone(row)
    facts["memory"] = None if row.rss_mb is None else f"{row.rss_mb:.1f} MB"
    if row.candidate is not None:
        facts["tried, not in use"] = _describe_candidate(row.candidate)
    return facts


def _describe_better_alone(row: AgentRow) -> str | None:
    """Say whether local training serves an agent better; None where no accuracy of it is known."""
    if row.local is None and row.shared is None and row.personal is None:
        return None
    if row.better_alone:
        return "yes: acc.local is above acc.personal by more than noise"
    return "no"


def _table_of_accuracy(lines: Sequence[AccuracyLine]) -> Table:
    rows = [
        (show_time(line.at), line.run, line.round or "end", *(line.acc[scope] for scope in SCOPES)) for line in lines
    ]
    return table("accuracy", ("at", "run", "round", *(f"acc.\n{scope}" for scope in SCOPES)), rows, left=2)


def _table_of_bundles(lines: Sequence[BundleLine]) -> Table:
    rows = [
        (show_time(line.at), (line.bundle_id or "")[:12], line.release, line.outcome, line.acc, line.reason)
        for line in lines
    ]
    return table("bundles", ("at", "bundle", "release", "outcome", "acc.personal", "reason"), rows, left=6)


def _describe_pin(pin: PinLine) -> str:
    """Say when and by whom an agent was pinned to a release or unpinned."""
    until = f" until {show_time(pin.until)}" if pin.until else ""
    decision = f"pinned to release {pin.release}{until}: {pin.reason}"
    if pin.release is None:
        decision = "unpinned"
    return f"{show_time(pin.at)} {decision} ({pin.by})"


def _describe_candidate(candidate: Candidate) -> str:
    """Say which bundle an agent went back from, and what it reached there."""
    source = f"release {candidate.release}" if candidate.release else candidate.run
    text = f"bundle {candidate.bundle_id[:12] or 'unknown'} of {source}"
    acc = ", ".join(f"acc.{scope} {value_text(value)}" for scope, value in candidate.acc.items())
    return f"{text}: {acc}" if acc else text


@app.command("certificates")
def show_certificates(config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Show all agents with their certificates and tokens.

    Example: headwater agents certificates
    """
    now = time.time()
    agents = [_describe_enrolment(record, now) for record in enrolment(config, state).ledger.records()]
    if not agents:
        present({"agents": agents}, ["no agents; 'headwater enroll NAME'"], as_json=as_json)
        return
    columns = ("agent", "state", "valid until", "key", "token until", "renames", "owner", "samples at most")
    keys = ("name", "state", "until", "key", "token", "renames", "owner", "max_samples")
    rows = [tuple(str(agent[key] or "") for key in keys) for agent in agents]
    present({"agents": agents}, [table(counted(len(agents), "agent"), columns, rows, left=7)], as_json=as_json)


@app.command("list", hidden=True)
def show_certificates_by_old_name(config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Do the same as 'agents certificates', which was called so."""
    show_certificates(config, state, as_json)


@app.command()
def revoke(name: Name, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Revoke the certificate of an agent, which shuts it out.

    Its certificates count no more, and a coordinator that serves ends its session within seconds.

    Example: headwater agents revoke porch
    """
    issuer = enrolment(config, state)
    before = issuer.ledger.get(name)
    record = issuer.revoke(name)
    with StateFolder(issuer.folder.parent).look(create=True) as folder:
        if name in book_of(folder.journal).devices:
            folder.journal.append(DeviceRetired(reason="revoked"), agent=name)
    if before is not None and before.current() is not None:
        line = f"{name} is revoked: a coordinator that serves ends its session within seconds"
    elif before is not None and before.token is not None and before.token.used_at is None:
        line = f"{name} is invited no more: its token does not count"
    else:
        line = f"{name} was revoked before"
    line += f"; 'headwater enroll {name}' lets a device in under this name again"
    present({"name": name, "certificates": len(record.certificates)}, [line], as_json=as_json)


@app.command()
def rename(
    name: Name,
    new: NewName,
    expires: Expires = "14d",
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Make a token for another name of a device.

    Its old name is revoked when the token is used. The device keeps its state folder, with bundle, head and samples.

    Example: headwater agents rename porch garden
    """
    issuer = enrolment(config, state)
    life = duration(expires)
    if issuer.ledger.get(name) is None:
        raise UsageError(f"no agent '{name}' is enrolled; 'headwater agents certificates' shows all")
    if (taken := issuer.ledger.get(new)) is not None and taken.certificates:
        raise UsageError(f"there is an agent '{new}' already; choose another name")
    print_token(issuer.token(new, life, replaces=name), as_json=as_json)


def _describe_enrolment(record: AgentRecord, now: float) -> dict[str, Any]:
    """Return what ``--json`` prints of an agent's certificates and tokens; ``now`` in seconds since 1970.

    The table of this module shows the same values, under the same names.
    """
    certificate = record.current()
    token = record.token
    if token is not None and token.used_at is not None:
        token = None  # it let a device in, and says nothing about the future
    return {
        "name": record.name,
        "state": _enrolment_state(record, now),
        "until": None if certificate is None else show_utc(certificate.not_after),
        "key": None if certificate is None else certificate.key,
        "token": None if token is None else show_utc(token.expires),
        "renames": None if token is None else token.replaces or None,
        "owner": record.owner or None,
        "max_samples": record.max_samples,
    }


def _enrolment_state(record: AgentRecord, now: float) -> str:
    """Name the state of an agent's enrolment at ``now``, in seconds since 1970."""
    certificate = record.current()
    if certificate is not None:
        return "enrolled" if certificate.not_after >= now else "expired"
    token = record.token
    if token is None or token.used_at is not None:
        return "revoked"
    if token.expires >= now:
        return "invited"
    return "revoked" if record.is_revoked else "token expired"
