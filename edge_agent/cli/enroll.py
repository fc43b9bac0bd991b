"""Command that makes this device an agent of a federation."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import AgentConfig, load
from ..errors import BrokerAway, StateError, UsageError
from ..identity import Identity, IdentityFolder, Token, answered, requested, shown
from ..identity import enroll as ask_for_certificate
from ..storage import lock_holder, read_json, write_atomic
from . import output

START_S, AGAIN_S = 20.0, 2.0
"""How long a coordinator may take to start, and the pause between two tries."""


def add_enroll_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent enroll``."""
    parser.add_argument("token", metavar="TOKEN", help="the line that 'headwater enroll NAME' prints; - reads stdin")
    parser.add_argument(
        "--config", type=Path, default=Path("agent.toml"), help="TOML file that is written (default: agent.toml)"
    )
    parser.add_argument("--state", type=Path, help="the agent's state folder (default: agent-state, or as configured)")
    by_file = parser.add_mutually_exclusive_group()
    by_file.add_argument("--csr", type=Path, metavar="FILE", help="write the request to a file, and connect to nobody")
    by_file.add_argument("--answer", type=Path, metavar="FILE", help="install what 'headwater sign' wrote for it")
    parser.add_argument("--data", metavar="SOURCE", help="local data, as for 'edge-agent fit'")


def enroll(arguments: argparse.Namespace) -> int:
    """Make this device an agent of a federation: a key, its certificate, and agent.toml.

    The key is made here and never leaves the device. The coordinator has to prove that it belongs to the token's
    federation, whose authority's fingerprint both sides show. A token counts once; one whose answer was lost can be
    tried again. A running agent renews its certificate by itself. Where the device reaches the broker but not the
    coordinator's enrolment port, --csr writes the request to a file, 'headwater sign' answers it there, and --answer
    installs that.

    Example:
      edge-agent enroll TOKEN --data images:/srv/photos
    """
    token = Token.parse(arguments.token if arguments.token != "-" else sys.stdin.readline())  # noqa: S105 - where it is read
    state = _state(arguments, token)
    if (holder := lock_holder(state)) is not None:
        raise StateError(f"state: {state} is in use by {holder}; stop that agent, then enroll")
    folder = IdentityFolder(state)
    before = folder.read()
    if arguments.csr is not None:
        write_atomic(arguments.csr, requested(token, folder).model_dump_json().encode() + b"\n")
        steps = (f"headwater sign {arguments.csr} --out answer.json", "edge-agent enroll TOKEN --answer answer.json")
        lines = [f"next, on the coordinator: {steps[0]}", f"then, here: {steps[1]}"]
        output.result(arguments, {"name": token.name, "request": str(arguments.csr)}, lambda: lines)
        return 0
    if arguments.answer is not None:
        identity = answered(token, folder, read_json(arguments.answer) or {})
    else:
        identity = _patiently(lambda: ask_for_certificate(token, folder))
    written = _write_config(arguments, token, state, before)
    result: dict[str, Any] = {
        "name": identity.name,
        "federation": identity.federation,
        "authority": identity.authority,
        "key": folder.key_fingerprint(),
        "until": shown(identity.not_after),
        "state": str(state),
        "config": str(arguments.config),
    }
    output.result(arguments, result, lambda: [*output.pairs(result.items()), *written])
    return 0


def _patiently(ask: Callable[[], Identity], pause: Callable[[float], None] = time.sleep) -> Identity:
    """What ``ask`` returns; tried again for `START_S` while no coordinator answers: it may just be starting.

    Raises:
        BrokerAway: none has answered.
    """
    until = time.monotonic() + START_S
    while True:
        try:
            return ask()
        except BrokerAway as error:
            if time.monotonic() + AGAIN_S > until:
                raise
            print(f"{error}; trying again for {until - time.monotonic():.0f} s", file=sys.stderr)
            pause(AGAIN_S)


def _state(arguments: argparse.Namespace, token: Token) -> Path:
    """The state folder; an existing configuration has to be one of this federation.

    Raises:
        UsageError: the configuration is of another federation or broker, or names another folder.
    """
    path = arguments.config
    if not path.exists():
        return Path(arguments.state or "agent-state").absolute()
    config = load(AgentConfig, path, None if arguments.data is None else {"data": {"source": arguments.data}})
    if (config.federation, config.broker.url) != (token.federation, token.url):
        raise UsageError(
            f"config: {path} is for federation '{config.federation}' at {config.broker.url}, and the token for "
            f"'{token.federation}' at {token.url}; name another --config, or remove that file"
        )
    if arguments.state is not None and arguments.state.absolute() != config.state:
        raise UsageError(
            f"config: {path} names the state folder {config.state}, not {arguments.state}; leave --state out"
        )
    return config.state


def _write_config(arguments: argparse.Namespace, token: Token, state: Path, before: Identity | None) -> list[str]:
    """Write agent.toml where there is none, and the agent's new id where it was renamed; what else is to be done."""
    path: Path = arguments.config
    next_step = f"next: edge-agent run --config {path}"
    if path.exists():
        text = path.read_text(encoding="utf-8")
        old = f'id = "{before.name}"' if before is not None else ""
        if before is not None and before.name != token.name and text.count(old) == 1:
            write_atomic(path, text.replace(old, f'id = "{token.name}"').encode())
            return [f"{path}: the id is '{token.name}' now", next_step]
        if load(AgentConfig, path).id != token.name:
            return [f'set id = "{token.name}" in {path}, then: edge-agent run --config {path}']
        return [next_step]
    folder = IdentityFolder(state)
    source = f"source = {json.dumps(arguments.data)}" if arguments.data else '# source = "images:/srv/photos"'
    text = f"""\
# Written by 'edge-agent enroll'. All keys: configs/README.md of the project.
id = "{token.name}"
federation = "{token.federation}"
state = {json.dumps(str(state))}

[broker]
url = "{token.url}"
tls = {{ ca = {json.dumps(str(folder.ca))}, cert = {json.dumps(str(folder.file))} }}

[data]
{source}
folder = {json.dumps(str(Path.cwd()))}
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
    return [next_step] if arguments.data else [f"next: name this device's data in {path}, [data] source", next_step]
