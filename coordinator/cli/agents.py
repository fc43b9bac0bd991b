"""``headwater agents``: all agents or one of them; show, revoke and rename their certificates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
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
from ..state.history import history_of
from ..state.store import StateFolder
from ..text import counted, listed
from ..views.candidate import SCOPES
from ..views.releases import book_of
from .enroll import Expires, Name, duration, enrolment, print_token
from .fleet import NO_AGENTS, Row, SortKey, ago, has_problem, notes_of, rows_of, sort_key, table_of
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
            if (row := next((one for one in rows if one["id"] == name), None)) is None:
                record = Ledger(path / IDENTITY / "agents").get(name)
                if record is not None:
                    raise UsageError(
                        f"agent '{name}' ({_described(record, time.time())['state']}) was not heard yet; on the device "
                        "'edge-agent run' starts it and 'edge-agent doctor' says what keeps it away"
                    )
                close = nearest(name, [one["id"] for one in rows])
                hint = f"did you mean '{close}'? " if close else ""
                raise UsageError(f"unknown agent '{name}': {hint}'headwater agents' shows those that are known")
            result = {**row, "history": history_of(folder, name)}
            present(result, _one(result), as_json=as_json)
            return
    chosen = [row for row in rows if find in row["id"] and (has_problem(row) or not faults)]
    chosen.sort(key=sort_key(sort), reverse=reverse)
    shown = chosen[:limit] if limit else chosen
    counts = dict(sorted(Counter(row["state"] for row in rows).items()))
    result = {"agents": shown, "selected": len(chosen), "known": len(rows), "states": counts}
    present(result, _all(result), as_json=as_json)


def _all(result: dict[str, Any]) -> Iterator[Table | str]:
    shown: list[Row] = result["agents"]
    if not result["known"]:
        yield NO_AGENTS
        return
    states = ", ".join(f"{count} {state}" for state, count in result["states"].items())
    yield f"{counted(result['known'], 'agent')}: {states}"
    if not shown:
        yield "none of them is selected (--faults, --find)"
        return
    part = f"{len(shown)} of {result['selected']} selected" if len(shown) < result["selected"] else "agents"
    yield table_of(shown, part)
    yield from (f"{row['id']} *: {note}" for row in shown for note in notes_of(row))
    if any(row["better_alone"] for row in shown):
        alone = [row["id"] for row in shown if row["better_alone"]]
        yield f"better off alone, acc.local above acc.personal by more than noise: {listed(alone)}"


def _one(agent: dict[str, Any]) -> Iterator[Table | str]:
    seen = ago(agent["last_seen_s"])
    history = agent["history"]
    alone = {True: "yes: acc.local is above acc.personal by more than noise", False: "no"}
    known = any(value is not None for value in agent["acc"].values())
    facts = {
        "agent": agent["id"],
        "state": agent["state"],
        "tier": agent["tier"],
        "last seen": f"{seen} ago" if seen else None,
        "version": agent["software"],
        "bundle": agent["bundle_id"],
        "head": agent["head"],
        "samples": agent["samples"],
        **{f"acc.{scope}": value for scope, value in agent["acc"].items()},
        "better off alone": alone[agent["better_alone"]] if known else None,
        "memory": None if agent["rss_mb"] is None else f"{agent['rss_mb']:.1f} MB",
    }
    if candidate := agent["candidate"]:
        facts["tried, not in use"] = _candidate_text(candidate)
    yield from pairs(facts.items())
    if fault := agent["fault"]:
        yield from pairs([("fault", f"{fault['error']}: {fault['message']}"), ("remedy", fault["remedy"])])
    yield from (f"note: {note}" for note in agent["notes"])
    if history["accuracy"]:
        rows = [
            (show_time(one["at"]), one["run"], one["round"] or "end", *(one["acc"][scope] for scope in SCOPES))
            for one in history["accuracy"]
        ]
        yield ""
        yield table("accuracy", ("at", "run", "round", *(f"acc.\n{scope}" for scope in SCOPES)), rows, left=2)
    if history["bundles"]:
        rows = [
            (
                show_time(one["at"]),
                (one["bundle_id"] or "")[:12],
                one["release"],
                one["outcome"],
                one["acc"],
                one["reason"],
            )
            for one in history["bundles"]
        ]
        yield ""
        yield table("bundles", ("at", "bundle", "release", "outcome", "acc.personal", "reason"), rows, left=6)
    for one in history["pins"]:
        until = f" until {show_time(one['until'])}" if one["until"] else ""
        what = "unpinned" if one["release"] is None else f"pinned to release {one['release']}{until}: {one['reason']}"
        yield f"{show_time(one['at'])} {what} ({one['by']})"
    for fault in history["faults"]:
        yield f"{show_time(fault['at'])} fault: {fault['error']}: {fault['message']}; {fault['remedy']}"
    for one in history["rejected"]:
        yield f"{show_time(one['at'])} update of {one['run']}, round {one['round']}, rejected: {one['reason']}"


def _candidate_text(candidate: dict[str, Any]) -> str:
    """Say which bundle an agent went back from, and what it reached there."""
    by = f"release {candidate['release']}" if candidate["release"] else candidate["run"]
    acc = ", ".join(f"acc.{scope} {value_text(value)}" for scope, value in candidate["acc"].items())
    return f"bundle {candidate['bundle_id'][:12] or 'unknown'} of {by}{f': {acc}' if acc else ''}"


@app.command("certificates")
def show_certificates(config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Show all agents with their certificates and tokens.

    Example: headwater agents certificates
    """
    now = time.time()
    agents = [_described(record, now) for record in enrolment(config, state).ledger.records()]
    columns = ("agent", "state", "valid until", "key", "token until", "renames", "owner", "samples at most")
    keys = ("name", "state", "until", "key", "token", "renames", "owner", "max_samples")
    rows = [tuple(str(agent[key] or "") for key in keys) for agent in agents]
    parts = (
        [table(counted(len(agents), "agent"), columns, rows, left=7)]
        if agents
        else ["no agents; 'headwater enroll NAME'"]
    )
    present({"agents": agents}, parts, as_json=as_json)


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


def _described(record: AgentRecord, now: float) -> dict[str, Any]:
    current = record.current()
    token = record.token
    is_open = token is not None and token.used_at is None
    if current is not None:
        state = "enrolled" if current.not_after >= now else "expired"
    elif token is None or not is_open:
        state = "revoked"
    elif token.expires >= now:
        state = "invited"
    else:
        state = "revoked" if record.is_revoked else "token expired"
    return {
        "name": record.name,
        "state": state,
        "until": show_utc(current.not_after) if current is not None else None,
        "key": current.key if current is not None else None,
        "token": show_utc(token.expires) if token is not None and is_open else None,
        "renames": (token.replaces or None) if token is not None and is_open else None,
        "owner": record.owner or None,
        "max_samples": record.max_samples,
    }
