"""``headwater password``."""

from __future__ import annotations

import re
import secrets
import stat
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.core.config import NAME_PATTERN
from edge_agent.core.errors import UsageError
from edge_agent.core.storage import Access, access_of, write_atomic

from ..broker.access import (
    BROKER_ACCOUNT,
    COORDINATOR_USER,
    Relays,
    access_for,
    add_rules,
    check_user,
    read_relays,
    set_password,
    set_relay,
)
from ..state.command_keys import MASTER, CommandKeys
from .options import Config, Json, state_path
from .output import present, ready_for

Agent = Annotated[
    str, typer.Argument(help=f"The agent's id, which is its MQTT user; '{COORDINATOR_USER}' is possible too.")
]
Users = Annotated[Path, typer.Option("--users", help="The broker's password file; created where there is none.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="File for the password; default: <agent>.password in this folder.")
]
Acl = Annotated[
    Path | None, typer.Option("--acl", help="Mosquitto's ACL file; the rules of --federation are added where missing.")
]
Federation = Annotated[str, typer.Option("--federation", help="The federation whose rules are added to --acl.")]
RelayFor = Annotated[
    list[str] | None,
    typer.Option(
        "--relay-for",
        metavar="AGENT",
        help="The user is the relay of a site, and speaks for this agent; may be repeated; '*': for all agents.",
    ),
]
Account = Annotated[
    str | None,
    typer.Option(
        "--account",
        help="Account that the broker runs as, which gets the files. Default: their owner stays; what only root could "
        f"read goes to the folder's owner, else to '{BROKER_ACCOUNT}' where there is such an account.",
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="The coordinator's state folder, for a key by which the agent knows its commands; default: that of "
        "the configuration, if there is one.",
    ),
]

PASSWORD_BYTES = 24


def password(
    agent: Agent,
    users: Users,
    out: Out = None,
    acl: Acl = None,
    federation: Federation = "home",
    relay_for: RelayFor = None,
    account: Account = None,
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Create an agent's password, and the key by which it knows its coordinator's commands.

    The password is hashed for the broker, and in a file that the agent's configuration names. The key is beside it, in
    <agent>.commands.key; it stays the same as long as the coordinator's state folder does. The embedded broker and
    mosquitto read the same password file. Another call replaces the password. A running Mosquitto has to reload its
    files; the embedded broker does so by itself.

    Example: headwater password porch --users users --out porch.password
    """
    # 1. What is asked for, and the folder with the secret of commands, where there is one.
    path = out or Path(f"{agent}.password")
    check_user(agent)
    if not re.fullmatch(NAME_PATTERN, federation):
        raise UsageError(f"federation '{federation[:80]}' does not match {NAME_PATTERN}")
    if state is None and (config is not None or Path("coordinator.toml").exists()):
        state = state_path(config, None)
    lacked_secret = state is not None and not (state / MASTER).exists()
    # 2. Everything that can be refused is, before anything changes.
    ready_for(users)
    ready_for(path)
    if acl is not None:
        ready_for(acl)
    access_for(users, account)
    # 3. The password for the broker and for the agent, the key, and the topic rules.
    secret = secrets.token_urlsafe(PASSWORD_BYTES)
    was_there = set_password(users, agent, secret, account=account)
    _write_password(path, secret)
    key_file = _write_key(path, agent, federation, state)
    relays = _note_relay(users, agent, relay_for, account)
    has_changed = acl is not None and add_rules(acl, federation, relays, account=account)
    # 4. What was done, and what is left to do.
    owner = _owner_of(users)
    mode = f"{stat.S_IMODE(users.stat().st_mode):o}"
    result = {
        "agent": agent,
        "users": str(users),
        "password_file": str(path),
        "command_key_file": None if key_file is None else str(key_file),
        "replaced": was_there,
        "owner": owner,
        "mode": mode,
        "acl_changed": has_changed,
        "relay_for": list(relays.get(agent, ())),
    }
    lines = [f"{agent} is in {users}; its password is in {path}"]
    if was_there:
        lines[0] += "; the previous password is invalid"
    lines.append(f'broker.user = "{agent}", broker.password_file = "{path}"')
    lines += _relay_lines(agent, relays)
    if key_file is not None:
        lines.append(f'broker.command_key_file = "{key_file}"')
        if lacked_secret:
            lines.append(f"{state} had no secret of commands, and has one now; is it the coordinator's folder?")
    lines.append(f"{users} belongs to '{owner}' (mode {mode})")
    if key_file is None and agent != COORDINATOR_USER:
        lines.append(f"{_without_key(agent, relays)}: name the coordinator's state folder with --state")
    if owner != BROKER_ACCOUNT:
        lines.append(f"a broker that runs as another user cannot read it: sudo chown <its user> {users}")
    if acl is not None:
        change = "has got" if has_changed else "already had"
        lines.append(f"{acl} {change} the rules of federation '{federation}'")
    lines.append(
        "a running Mosquitto reads this after 'systemctl reload mosquitto' or 'kill -HUP <its process>'; the embedded "
        "broker reads it by itself"
    )
    present(result, lines, as_json=as_json)


def _note_relay(users: Path, agent: str, relay_for: list[str] | None, account: str | None) -> Relays:
    """Note for whom a user speaks, where that was said, and return all relays."""
    if relay_for is None:
        return read_relays(users)
    return set_relay(users, agent, tuple(relay_for), account=account)


def _without_key(agent: str, relays: Relays) -> str:
    """Return what it means that no key was made."""
    if agent in relays:
        return "no key was made, so this relay sums no updates"
    return "no key for the agent's commands was made"


def _relay_lines(agent: str, relays: Relays) -> list[str]:
    """Return for whom a user speaks; nothing where it is no relay."""
    if agent not in relays:
        return []
    return [f"it is a relay, and may speak for: {', '.join(relays[agent])}"]


def _write_password(path: Path, secret: str) -> None:
    """Write the file of an agent's password; one that is there keeps its owner and mode, a new one is private."""
    access = Access.private()
    if path.exists():
        access = access_of(path)
    write_atomic(path, f"{secret}\n".encode(), access=access)


def _owner_of(file: Path) -> str:
    """Return the name of the account that a file belongs to; its number where it has no name, as in many containers."""
    try:
        return file.owner()
    except KeyError:
        return str(file.stat().st_uid)


def _write_key(password_file: Path, agent: str, federation: str, state: Path | None) -> Path | None:
    """Write the agent's key beside its password, and return its file; None where no state folder is known."""
    if agent == COORDINATOR_USER or state is None:
        return None
    path = password_file.with_name(f"{agent}.commands.key")
    key = CommandKeys.of(state, federation).of_agent(agent)
    write_atomic(path, key.text().encode(), access=access_of(path) if path.exists() else Access.private())
    return path
