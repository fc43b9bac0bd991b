"""Command that makes this device an agent of a federation."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import formats
from ..core.config import AgentConfig, DataConfig, load
from ..core.errors import BrokerAway, StateError, UsageError
from ..core.locks import lock_holder
from ..core.storage import read_json, read_regular_text, read_toml, write_atomic
from ..identity.certificates import Identity, IdentityFolder, install_answer, make_request, show_utc
from ..identity.certificates import enroll as ask_for_certificate
from ..identity.tokens import Token
from ..relay.settings import RelayConfig
from . import output

NO_SOURCE = '# source = "images:/srv/photos"'
"""In a configuration that was written without data."""

START_S = 20.0
"""How many seconds a coordinator may take to start."""

AGAIN_S = 2.0
"""The pause between two tries, in seconds."""


def add_enroll_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent enroll``."""
    parser.add_argument(
        "token",
        metavar="TOKEN",
        help="the line that 'headwater enroll NAME' prints; -: asked for, or from stdin, so that nobody else sees it",
    )
    parser.add_argument(
        "--config", type=Path, help="TOML file that is written (default: agent.toml; for a relay relay.toml)"
    )
    parser.add_argument("--state", type=Path, help="the agent's state folder (default: agent-state, or as configured)")
    parser.add_argument("--relay", action="store_true", help="this device is the relay of a site, and no agent")
    by_file = parser.add_mutually_exclusive_group()
    by_file.add_argument("--csr", type=Path, metavar="FILE", help="write the request to a file, and connect to nobody")
    by_file.add_argument("--answer", type=Path, metavar="FILE", help="install what 'headwater sign' wrote for it")
    parser.add_argument("--data", metavar="SOURCE", help="local data, as for 'edge-agent fit'")
    parser.add_argument(
        "--tier",
        choices=("auto", "train", "head"),
        help="train: this device trains encoders; head: it takes releases; auto: train where torch is installed",
    )
    parser.add_argument(
        "--rename", action="store_true", help="take the token's name on a device that is enrolled by another one"
    )


def enroll(arguments: argparse.Namespace) -> int:
    """Make this device an agent of a federation: a key, its certificate, and agent.toml.

    The key is made here and never leaves the device. The coordinator has to prove that it belongs to the token's
    federation, whose authority's fingerprint both sides show. A token counts once; one whose answer was lost can be
    tried again. A running agent renews its certificate by itself. Where the device reaches the broker but not the
    coordinator's enrolment port, --csr writes the request to a file, 'headwater sign' answers it there, and --answer
    installs that.

    Example:
      edge-agent enroll - --data images:/srv/photos
    """
    if arguments.relay and (arguments.data is not None or arguments.tier is not None):
        raise UsageError("--relay: a relay has no data and trains nothing; leave --data and --tier out")
    arguments.config = arguments.config or Path("relay.toml" if arguments.relay else "agent.toml")
    token = Token.parse(_token_text(arguments))
    state = _relay_state(arguments, token) if arguments.relay else _state(arguments, token)
    if (holder := lock_holder(state)) is not None:
        raise StateError(f"state: {state} is in use by {holder}; stop that agent, then enroll", holder=str(holder))
    folder = IdentityFolder(state)
    before = folder.read()
    if before is not None and before.name not in {token.name, token.replaces} and not arguments.rename:
        raise UsageError(
            f"state: {state} is enrolled as '{before.name}', and the token is for '{token.name}'; 'headwater agents "
            f"rename {before.name} {token.name}' makes a token that renames it, --rename takes this one; for a second "
            "agent name another --state and --config"
        )
    if arguments.csr is not None:
        write_atomic(arguments.csr, make_request(token, folder).model_dump_json().encode() + b"\n")
        given = "" if arguments.data is None else f" --data {shlex.quote(arguments.data)}"
        given += "" if arguments.tier is None else f" --tier {arguments.tier}"
        given += " --relay" if arguments.relay else ""
        steps = (
            f"headwater sign {arguments.csr} --out answer.json",
            f"edge-agent enroll - --answer answer.json{given}",
        )
        lines = [f"next, on the coordinator: {steps[0]}", f"then, here: {steps[1]}"]
        output.result(arguments, {"name": token.name, "request": str(arguments.csr)}, lambda: lines)
        return 0
    if arguments.answer is not None:
        if (answer := read_json(arguments.answer)) is None:
            raise UsageError(f"--answer {arguments.answer}: no such file; 'headwater sign' writes it")
        identity = install_answer(token, folder, answer)
    else:
        identity = _patiently(lambda: ask_for_certificate(token, folder))
    if arguments.relay:
        written = _write_relay_config(arguments.config, token, state)
    else:
        written = _write_config(arguments, token, state, before)
        written = [*_tier_note(arguments.config), *written]
    result: dict[str, Any] = {
        "name": identity.name,
        "federation": identity.federation,
        "authority": identity.authority,
        "key": folder.key_fingerprint(),
        "until": show_utc(identity.not_after),
        "state": str(state),
        "config": str(arguments.config),
    }
    output.result(arguments, result, lambda: [*formats.pairs(result.items()), *written])
    return 0


def _token_text(arguments: argparse.Namespace) -> str:
    """Return the token: the argument, or a line of the input, which no other user of this device sees."""
    if arguments.token != "-":  # noqa: S105 - where it is read
        return str(arguments.token)
    if sys.stdin.isatty():
        print("token: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _tier_note(path: Path) -> list[str]:
    """Return a note that this device trains and takes no releases, where nobody chose that."""
    if "tier" in read_toml(path) or importlib.util.find_spec("torch") is None:
        return []
    note = "note: torch is installed, so this device trains where its memory allows that, and takes no releases then"
    return [f'{note}; tier = "head" in {path} takes them, as does --tier head when it is enrolled']


def _patiently(ask: Callable[[], Identity], pause: Callable[[float], None] = time.sleep) -> Identity:
    """Return what ``ask`` returns; for `START_S` it is called again while no coordinator answers.

    Raises:
        BrokerAway: none has answered.
    """
    until = time.monotonic() + START_S
    said = ""
    while True:
        try:
            return ask()
        except BrokerAway as error:
            if time.monotonic() + AGAIN_S > until:
                raise
            if (reason := str(error)) != said:  # once each, not with every try
                print(f"{reason}; trying again for {until - time.monotonic():.0f} s", file=sys.stderr)
                said = reason
            pause(AGAIN_S)


def _state(arguments: argparse.Namespace, token: Token) -> Path:
    """Return the state folder; an existing configuration has to be of this federation, and the data have to be there.

    Raises:
        UsageError: the configuration is of another federation or broker, or names another folder or other data; or
            there are no such data.
    """
    from ..data.partition import check_own

    path = arguments.config
    if not path.exists():
        if arguments.data is not None:
            check_own(DataConfig(source=arguments.data, folder=Path.cwd()), token.name)
        return Path(arguments.state or "agent-state").absolute()
    written = read_toml(path)
    tier = written.get("tier", "auto")
    named = written.get("data", {}).get("source")
    if arguments.tier not in {None, tier}:
        raise UsageError(f"config: {path} says tier = \"{tier}\", not '{arguments.tier}'; change it there")
    config = _configured(path, named or arguments.data)
    if arguments.data is not None:
        if named not in {None, arguments.data}:
            raise UsageError(
                f"config: {path} names the data '{named}', not '{arguments.data}'; change source under [data] there, "
                "and leave --data out"
            )
        check_own(config.data, config.id)
    if config.federation != token.federation or token.url not in config.broker.urls:
        raise UsageError(
            f"config: {path} is for federation '{config.federation}' at {config.broker.names}, and the token for "
            f"'{token.federation}' at {token.url}; name another --config, or remove that file"
        )
    if arguments.state is not None and arguments.state.absolute() != config.state:
        raise UsageError(
            f"config: {path} names the state folder {config.state}, not {arguments.state}; leave --state out"
        )
    return config.state


def _relay_state(arguments: argparse.Namespace, token: Token) -> Path:
    """Return the state folder of a relay; an existing configuration has to be of the token's federation.

    Raises:
        UsageError: It is of another one, or names another folder.
    """
    path: Path = arguments.config
    if not path.exists():
        return Path(arguments.state or "relay-state").absolute()
    config = load(RelayConfig, path)
    if config.federation != token.federation or token.url not in config.broker.urls:
        raise UsageError(
            f"config: {path} is for federation '{config.federation}' at {config.broker.names}, and the token for "
            f"'{token.federation}' at {token.url}; name another --config, or remove that file"
        )
    if arguments.state is not None and arguments.state.absolute() != config.state:
        raise UsageError(
            f"config: {path} names the state folder {config.state}, not {arguments.state}; leave --state out"
        )
    return config.state


def _write_relay_config(path: Path, token: Token, state: Path) -> list[str]:
    """Write relay.toml where there is none, and return what else is to be done."""
    next_step = f"next: name the broker of the site in {path}, [site] url, then: edge-agent relay --config {path}"
    if path.exists():
        if load(RelayConfig, path).id != token.name:
            return [f'set id = "{token.name}" in {path}', next_step]
        return [next_step]
    folder = IdentityFolder(state)
    text = f"""\
# Written by 'edge-agent enroll --relay'. All keys: configs/README.md of the project.
id = "{token.name}"
federation = "{token.federation}"
state = {json.dumps(str(state))}

# The coordinator's broker: the only connection of the site.
[broker]
url = "{token.url}"
tls = {{ ca = {json.dumps(str(folder.ca))}, cert = {json.dumps(str(folder.file))} }}

# The broker of the site, to which its agents connect.
[site]
url = "mqtt://127.0.0.1:1883"
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
    return [next_step]


def _configured(path: Path, source: str | None) -> AgentConfig:
    """Return the configuration at ``path``, whose data are perhaps not named yet."""
    return load(AgentConfig, path, {"data": {"source": source or "none"}})


def _write_config(arguments: argparse.Namespace, token: Token, state: Path, before: Identity | None) -> list[str]:
    """Write agent.toml where there is none, and the agent's new id where it was renamed; what else is to be done."""
    path: Path = arguments.config
    next_step = f"next: edge-agent run --config {path}"
    source = f"source = {json.dumps(arguments.data)}" if arguments.data else NO_SOURCE
    if path.exists():
        text = read_regular_text(path)
        if arguments.data is not None and text.count(NO_SOURCE) == 1:
            text = text.replace(NO_SOURCE, source)
            write_atomic(path, text.encode())
        if "source" not in read_toml(path).get("data", {}):
            next_step = f"next: name this device's data in {path}, [data] source, then: edge-agent run --config {path}"
        old = f'id = "{before.name}"' if before is not None else ""
        if before is not None and before.name != token.name and text.count(old) == 1:
            write_atomic(path, text.replace(old, f'id = "{token.name}"').encode())
            return [f"{path}: the id is '{token.name}' now", next_step]
        if _configured(path, arguments.data).id != token.name:
            return [f'set id = "{token.name}" in {path}, then: edge-agent run --config {path}']
        return [next_step]
    folder = IdentityFolder(state)
    tier = "" if arguments.tier is None else f'tier = "{arguments.tier}"\n'
    text = f"""\
# Written by 'edge-agent enroll'. All keys: configs/README.md of the project.
id = "{token.name}"
federation = "{token.federation}"
{tier}state = {json.dumps(str(state))}

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
