"""``headwater init``."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.core.config import NAME_PATTERN, is_loopback, parse
from edge_agent.core.errors import MissingCapability, UsageError
from edge_agent.core.storage import read_regular, read_regular_text, read_toml, write_atomic

from ..config import IdentityConfig, load_config
from .options import Json
from .output import present

if TYPE_CHECKING:
    from ..identity.authority import Authority
    from ..state.release_keys import Public


Folder = Annotated[Path | None, typer.Argument(metavar="DIR", help="New folder for coordinator.toml and its state.")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="A configuration that gets certificates, instead of a new one.")
]
Host = Annotated[
    str | None, typer.Option("--host", help="Name or address that devices connect to; default: this machine's name.")
]
Federation = Annotated[str, typer.Option("--federation", help="Name of the federation, in a new configuration.")]
BrokerPort = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the broker.")]
EnrollPort = Annotated[int, typer.Option("--enroll-port", min=1, max=65535, help="Port on which devices enroll.")]

Keys = Annotated[
    list[Path] | None,
    typer.Option(
        "--release-key",
        help="File with the public key of a person who signs releases, as 'headwater keys new' writes it; repeatable. "
        "Default: the coordinator signs them itself, with a key that is made here.",
    ),
]
Threshold = Annotated[
    int, typer.Option("--threshold", min=1, max=16, help="How many of the release keys have to sign.")
]

NEW = """\
# The coordinator's configuration: headwater serve --config coordinator.toml
# All keys: configs/README.md of the project.

federation = {federation}
state = "state"   # journal, runs, and identity: the certificate authority; back it up

[task]            # put your own here before the first run
class_names = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
encoder = "small_cnn"
input = {{ kind = "image", channels = 3, height = 32, width = 32 }}
"""

SECTION = """
# Certificates: 'headwater enroll NAME' lets a device in. 'headwater serve' starts Mosquitto with them.
[identity]
host = {host}
bind = {bind}
port = {port}
enroll_port = {enroll_port}
"""


def init(
    folder: Folder = None,
    config: Config = None,
    host: Host = None,
    federation: Federation = "home",
    port: BrokerPort = 8883,
    enroll_port: EnrollPort = 8884,
    release_key: Keys = None,
    threshold: Threshold = 1,
    as_json: Json = False,
) -> None:
    """Make a federation whose devices have certificates: an authority, the broker's files, and a configuration.

    It has release keys as well: enrolled devices install bundles that are signed with them, and no others.

    Then 'headwater serve' starts Mosquitto with TLS, and 'headwater enroll NAME' makes a token for each device. With
    --config, an existing configuration gets the section [identity].

    Example: headwater init fleet --host coordinator.example
    """
    from ..broker import find_mosquitto
    from ..identity.ledger import identity_folder
    from ..state.release_keys import Public, ReleaseKeys, read_public, role
    from .keys import described

    if (folder is None) == (config is None):
        raise UsageError(
            "name either a new folder (headwater init DIR) or an existing file (headwater init --config FILE)"
        )
    if not re.fullmatch(NAME_PATTERN, federation):
        raise UsageError(f"federation '{federation[:80]}' does not match {NAME_PATTERN}")
    host = host or socket.gethostname()
    own, every = ("::1", "::") if ":" in host else ("127.0.0.1", "0.0.0.0")  # noqa: S104 - both ports are of TLS
    wanted = {"host": host, "bind": own if is_loopback(host) else every, "port": port, "enroll_port": enroll_port}
    identity = parse(IdentityConfig, wanted, where="options")
    section = SECTION.format(**{name: json.dumps(value) for name, value in wanted.items()})
    path = config or (folder or Path()) / "coordinator.toml"
    if config is not None:
        content = read_toml(config)
        if taken := [name for name in ("identity", "broker", "embedded") if name in content]:
            raise UsageError(
                f"{config} has the section [{taken[0]}]; "
                + (
                    "its devices have certificates already; change that section in the file"
                    if taken[0] == "identity"
                    else "remove it, then run this again"
                )
            )
        text = read_regular_text(config).rstrip("\n") + "\n" + section
    else:
        if path.exists():
            raise UsageError(
                f"{path} exists with [identity]; to change it: identity.host in that file; 'headwater serve' makes the "
                "broker's new certificate at its start"
                if "identity" in read_toml(path)
                else f"{path} exists; 'headwater init --config {path}' adds certificates to it"
            )
        text = NEW.format(federation=json.dumps(federation)) + section
    public = [read_public(file) for file in release_key or ()]
    role(public or [Public(bytes(32))], threshold)
    before = read_regular(path) if path.exists() else None
    made = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomic(path, text.encode())
        settings = load_config(path)
        authority = _make(settings.state, settings.federation, identity, public, threshold)
    except BaseException:  # the file is as it was, so that the command can be repeated
        if before is not None:
            write_atomic(path, before)
        else:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there is more in it now
                if made:
                    path.parent.rmdir()
        raise
    lines = [
        f"federation '{settings.federation}': authority {authority.fingerprint}",
        f"releases: {described(ReleaseKeys(settings.state))}",
        f"configuration in {path}, keys in {identity_folder(settings.state)} (back it up, show it to nobody)",
        f"devices connect to {host}, ports {port} and {enroll_port}; open both in a firewall",
        *_next_steps(path, is_new=config is None),
    ]
    if find_mosquitto() is None:
        lines.append(f"note: {MissingCapability.__name__}: mosquitto is not installed: apt-get install mosquitto")
    result = {
        "federation": settings.federation,
        "config": str(path),
        "authority": authority.fingerprint,
        "release_keys": list(ReleaseKeys(settings.state).newest().roles["targets"].keyids),
        "host": host,
        "port": port,
        "enroll_port": enroll_port,
    }
    present(result, lines, as_json=as_json)


def _next_steps(path: Path, *, is_new: bool) -> Iterator[str]:
    """Yield what to do after the files are made; a new configuration has the task of the demonstration."""
    if is_new:
        yield (
            f"first: put the classes and the size of your inputs into [task] of {path}; "
            "what is there fits digits of 32 x 32 pixels"
        )
    yield f"next: headwater serve --config {path}"
    yield f"then, for each device: headwater enroll NAME --config {path}"


def _make(
    state: Path, federation: str, identity: IdentityConfig, public: Sequence[Public], threshold: int
) -> Authority:
    from ..identity.authority import Authority
    from ..identity.enrolment import Enrolment
    from ..identity.ledger import identity_folder
    from ..identity.serving import BrokerFiles
    from ..journal.store import utc_now
    from ..state.command_keys import CommandKeys
    from ..state.release_keys import ReleaseKeys

    folder = identity_folder(state)
    now = utc_now()
    keys = ReleaseKeys(state)
    if keys.exist and (other := keys.newest().federation) != federation:
        raise UsageError(
            f"{keys.folder} has the release keys of federation '{other}', not of '{federation}'; name that federation, "
            "or another state folder"
        )
    if not (folder / "ca.key").exists():  # else this command failed before, or the configuration was lost
        Authority.create(folder, federation, now)
    CommandKeys.of(state, federation)
    if not keys.exist:
        keys.create(federation, now, public, threshold)
    enrolment = Enrolment(state, federation, identity)
    BrokerFiles(enrolment).write(now)
    return enrolment.authority
