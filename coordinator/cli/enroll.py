"""``headwater enroll``."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.store import write_atomic

from ..broker.access import COORDINATOR_USER, check_user, set_password
from .options import Json, print_json, ready_for, show

Agent = Annotated[
    str, typer.Argument(help=f"The agent's id, which is its MQTT user; '{COORDINATOR_USER}' is possible, too.")
]
Users = Annotated[Path, typer.Option("--users", help="The broker's password file; made where there is none.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="File for the password; default: <agent>.password in this folder.")
]

PASSWORD_BYTES = 24


def enroll(agent: Agent, users: Users, out: Out = None, as_json: Json = False) -> None:
    """Give an agent a password: hashed for the broker, and in a file that its configuration names.

    The embedded broker and mosquitto read the same password file. Enrolling again replaces the password.

    Example: headwater enroll porch --users users --out porch.password
    """
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    path = out or Path(f"{agent}.password")
    check_user(agent)
    for place in (users, path):
        ready_for(place)
    before = os.umask(0o077)  # nobody else may read the password, not even while it is being written
    try:
        set_password(users, agent, password)
        write_atomic(path, f"{password}\n".encode())
    finally:
        os.umask(before)
    if as_json:
        print_json({"agent": agent, "users": str(users), "password_file": str(path)})
        return
    show(
        f"{agent} is in {users}; its password is in {path}", f'broker.user = "{agent}", broker.password_file = "{path}"'
    )
