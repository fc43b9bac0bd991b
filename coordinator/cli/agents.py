"""``headwater agents``: list, revoke and rename those who have certificates."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from edge_agent.errors import UsageError
from edge_agent.identity import shown

from ..identity.ledger import AgentRecord
from ..state.releases import book_of
from ..state.store import StateFolder
from ..text import counted
from .enroll import Expires, Name, duration, enrolment, print_token
from .options import Config, Json, State
from .output import present, table

app = typer.Typer(
    help="List, revoke or rename enrolled agents.\n\nExample: headwater agents list",
    no_args_is_help=True,
)

NewName = Annotated[str, typer.Argument(help="Its new id.")]


@app.command("list")
def list_agents(config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Show all agents with their certificates and tokens.

    Example: headwater agents list
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


@app.command()
def revoke(name: Name, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Shut an agent out: its certificates count no more, and a coordinator that serves ends its session within seconds.

    Example: headwater agents revoke porch
    """
    issuer = enrolment(config, state)
    before, record = issuer.ledger.get(name), issuer.revoke(name)
    with StateFolder(issuer.folder.parent).look(create=True) as folder:
        if name in book_of(folder.journal).devices:
            folder.journal.append("device_retired", agent=name, body={"reason": "revoked"})
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
    """Make a token by which an agent's device takes another name; its old one is revoked when the token is used.

    The device keeps its state folder, with bundle, head and samples.

    Example: headwater agents rename porch garden
    """
    issuer, life = enrolment(config, state), duration(expires)
    if issuer.ledger.get(name) is None:
        raise UsageError(f"no agent '{name}' is enrolled; 'headwater agents list' shows all")
    if (taken := issuer.ledger.get(new)) is not None and taken.certificates:
        raise UsageError(f"there is an agent '{new}' already; choose another name")
    print_token(issuer.token(new, life, replaces=name), as_json=as_json)


def _described(record: AgentRecord, now: float) -> dict[str, Any]:
    current, token = record.current(), record.token
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
        "until": shown(current.not_after) if current is not None else None,
        "key": current.key if current is not None else None,
        "token": shown(token.expires) if token is not None and is_open else None,
        "renames": (token.replaces or None) if token is not None and is_open else None,
        "owner": record.owner or None,
        "max_samples": record.max_samples,
    }
