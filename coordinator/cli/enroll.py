"""``headwater enroll``."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.core.config import NAME_PATTERN
from edge_agent.core.errors import UsageError

from ..broker.access import ALL_AGENTS, check_user
from .options import Config, Json, State
from .output import console, print_json

if TYPE_CHECKING:
    from edge_agent.identity.tokens import Token

    from ..identity.enrolment import Enrolment


Name = Annotated[str, typer.Argument(help="The device's id in the federation.")]
Expires = Annotated[str, typer.Option("--expires", help="How long the token counts: 30m, 12h, 14d or 8w.")]

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


Owner = Annotated[
    str | None, typer.Option("--owner", help="Whose device it is; identity.agents_per_owner limits a person's devices.")
]
MaxSamples = Annotated[
    int | None,
    typer.Option("--max-samples", min=1, help="Count no more samples of it, whatever it declares; default: no limit."),
]


RelayFor = Annotated[
    list[str] | None,
    typer.Option(
        "--relay-for",
        metavar="AGENT",
        help="The device is the relay of a site, and speaks for this agent; may be repeated; '*': for all agents.",
    ),
]


def enroll(
    name: Name,
    expires: Expires = "14d",
    owner: Owner = None,
    max_samples: MaxSamples = None,
    relay_for: RelayFor = None,
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Make a token for a device: one line, on stdout, that 'edge-agent enroll' takes there. It counts once.

    A device that was wiped, or that is replaced, gets its name back by a new token; when that is used, its old
    certificate is revoked. Works while the coordinator serves, and before.

    Example: headwater enroll porch --expires 14d
    """
    life = duration(expires)
    if owner and not re.fullmatch(NAME_PATTERN, owner):
        raise UsageError(f"owner '{owner[:80]}' does not match {NAME_PATTERN}")
    relayed = None if relay_for is None else tuple(relay_for)
    for agent in relayed or ():
        if agent != ALL_AGENTS:
            check_user(agent)
    issuer = enrolment(config, state)
    token = issuer.token(name, life, owner=owner, max_samples=max_samples, relay_for=relayed)
    if relayed is not None:
        from ..identity.serving import BrokerFiles

        BrokerFiles(issuer).write_rules()
    print_token(token, as_json=as_json, is_relay=relayed is not None)


def enrolment(config: Path | None, state: Path | None) -> Enrolment:
    """Return the enrolment of the federation that a configuration names.

    Raises:
        UsageError: its devices have no certificates.
        StateError: there is no authority in the state folder.
    """
    from ..config import load_config
    from ..identity.enrolment import Enrolment

    settings = load_config(config, state)
    if settings.identity is None:
        raise UsageError(
            "the configuration has no section [identity]: 'headwater init --config FILE' adds certificates; for a "
            "broker with users, 'headwater password NAME --users FILE' makes a password"
        )
    hosted = frozenset(client.id for client in settings.hosted)
    return Enrolment(settings.state, settings.federation, settings.identity, taken=hosted)


def duration(text: str) -> timedelta:
    """Return a duration from text such as 14d.

    Raises:
        UsageError: it is none, or not between a minute and a year.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    life = timedelta(**{UNITS[match[2]]: int(match[1])}) if match else timedelta(0)
    if not timedelta(0) < life <= timedelta(days=366):
        raise UsageError(f"'{text[:40]}' is no duration up to a year; expected a number and m, h, d or w, such as 14d")
    return life


def print_token(token: Token, *, as_json: bool, is_relay: bool = False) -> None:
    """Print the token alone on stdout, and what to do with it on stderr.

    The command reads the token from its input: on the command line everybody on the device could see it.
    """
    from edge_agent.identity.certificates import show_utc

    if as_json:
        content = {"name": token.name, "token": token.text(), "authority": token.authority, "expires": token.expires}
        print_json(content)
        return
    console.print(f"on the device, once, until {show_utc(token.expires)}:", soft_wrap=True)
    options = "--relay" if is_relay else "--data SOURCE"
    console.print(f"  edge-agent enroll - {options}", soft_wrap=True)
    console.print("it asks for the token, which is a secret: paste the line below", soft_wrap=True)
    console.print(f"authority {token.authority}", soft_wrap=True)
    print(token.text())
