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

from edge_agent.core.class_names import parse_class_names
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

Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        help="The classes of all devices, in a new configuration: names with commas, or a file with one a line.",
    ),
]

DIGITS = tuple("0123456789")
"""The classes of a new configuration unless --classes names others: those of the demonstration."""

NEW = """\
# The coordinator's configuration: headwater serve --config coordinator.toml
# All keys: configs/README.md of the project.

federation = {federation}
state = "state"   # journal, runs, and identity: the certificate authority; back it up

[task]            # put your own here before the first run
class_names = {class_names}
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
    classes: Classes = None,
    as_json: Json = False,
) -> None:
    """Make a federation whose devices have certificates: an authority, the broker's files, and a configuration.

    It has release keys as well: enrolled devices install bundles that are signed with them, and no others.

    Then 'headwater serve' starts Mosquitto with TLS, and 'headwater enroll NAME' makes a token for each device. With
    --config, an existing configuration gets the section [identity].

    Example: headwater init fleet --host coordinator.example --classes cat,dog,fox
    """
    from ..broker import find_mosquitto
    from ..identity.ledger import identity_folder
    from ..state.release_keys import Public, ReleaseKeys, read_public, role
    from .keys import describe_keys

    if (folder is None) == (config is None):
        raise UsageError(
            "name either a new folder (headwater init DIR) or an existing file (headwater init --config FILE)"
        )
    if config is not None and classes is not None:
        raise UsageError(f"--classes is for a new configuration; {config} has class_names in its section [task]")
    if not re.fullmatch(NAME_PATTERN, federation):
        raise UsageError(f"federation '{federation[:80]}' does not match {NAME_PATTERN}")
    # 1. Everything is checked before the first file is written: options, configuration and keys.
    host = host or socket.gethostname()
    values = {"host": host, "bind": _bind_address(host), "port": port, "enroll_port": enroll_port}
    identity = parse(IdentityConfig, values, where="options")
    section = SECTION.format(**{name: json.dumps(value) for name, value in values.items()})
    if config is not None:
        path = config
        text = _with_section(config, section)
    else:
        path = (folder or Path()) / "coordinator.toml"
        _check_is_new(path)
        class_names = DIGITS if classes is None else parse_class_names(classes)
        listed_names = json.dumps(class_names, ensure_ascii=False)
        text = NEW.format(federation=json.dumps(federation), class_names=listed_names) + section
    public_keys = [read_public(file) for file in release_key or ()]
    role(public_keys or [Public(bytes(32))], threshold)
    # 2. The configuration is written first, because it says where the state folder with the keys is. Where the keys
    #    cannot be made it is put back, so that the command can be repeated.
    with _put_back_on_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
        settings = load_config(path)
        authority = _make_keys(settings.state, settings.federation, identity, public_keys, threshold)
    # 3. Say what was made, and what to do next.
    lines = [
        f"federation '{settings.federation}': authority {authority.fingerprint}",
        f"releases: {describe_keys(ReleaseKeys(settings.state))}",
        f"configuration in {path}, keys in {identity_folder(settings.state)} (back it up, show it to nobody)",
        f"devices connect to {host}, ports {port} and {enroll_port}; open both in a firewall",
        *_next_steps(path, is_new=config is None, has_classes=classes is not None),
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


def _bind_address(host: str) -> str:
    """Return the address to listen on: all of the machine's, or its own where nobody else is to connect.

    Both ports are of TLS, and devices have to show a certificate or a token.
    """
    is_ipv6 = ":" in host
    if is_loopback(host):
        return "::1" if is_ipv6 else "127.0.0.1"
    return "::" if is_ipv6 else "0.0.0.0"  # noqa: S104 - see above


def _with_section(config: Path, section: str) -> str:
    """Return the text of an existing configuration with the section [identity] at its end.

    Raises:
        UsageError: It has that section, or another one that says where the broker is.
    """
    content = read_toml(config)
    if "identity" in content:
        raise UsageError(
            f"{config} has the section [identity]; its devices have certificates already; change that section in the "
            "file"
        )
    for name in ("broker", "embedded"):
        if name in content:
            raise UsageError(f"{config} has the section [{name}]; remove it, then run this again")
    return read_regular_text(config).rstrip("\n") + "\n" + section


def _check_is_new(path: Path) -> None:
    """Return quietly where there is no configuration at ``path`` yet.

    Raises:
        UsageError: There is one.
    """
    if not path.exists():
        return
    if "identity" in read_toml(path):
        raise UsageError(
            f"{path} exists with [identity]; to change it: identity.host in that file; 'headwater serve' makes the "
            "broker's new certificate at its start"
        )
    raise UsageError(f"{path} exists; 'headwater init --config {path}' adds certificates to it")


@contextlib.contextmanager
def _put_back_on_error(path: Path) -> Iterator[None]:
    """Leave the file at ``path`` as it was, or remove it with its new folder, where the context ends with an error."""
    content_before = read_regular(path) if path.exists() else None
    is_new_folder = not path.parent.exists()
    try:
        yield
    except BaseException:
        if content_before is not None:
            write_atomic(path, content_before)
        else:
            path.unlink(missing_ok=True)
            if is_new_folder:
                with contextlib.suppress(OSError):  # there is more in it by now
                    path.parent.rmdir()
        raise


def _next_steps(path: Path, *, is_new: bool, has_classes: bool) -> Iterator[str]:
    """Yield what to do after the files are made; a new configuration has the task of the demonstration."""
    if is_new:
        missing = "size" if has_classes else "classes and the size"
        fits = "pictures" if has_classes else "digits"
        yield (
            f"first: put the {missing} of your inputs into [task] of {path}; what is there fits {fits} of 32 x 32 "
            "pixels (for photos, 'headwater run --from starter' brings encoder and size)"
        )
    yield f"next: headwater serve --config {path}"
    yield f"then, for each device: headwater enroll NAME --config {path}"


def _make_keys(
    state: Path, federation: str, identity: IdentityConfig, public_keys: Sequence[Public], threshold: int
) -> Authority:
    """Make what a federation with certificates has in its state folder, and return its authority.

    What an earlier try has made is kept: this command may have failed there, or the configuration was lost.

    Raises:
        UsageError: The folder has the release keys of another federation.
    """
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
    if keys.exist:
        owner = keys.newest().federation
        if owner != federation:
            raise UsageError(
                f"{keys.folder} has the release keys of federation '{owner}', not of '{federation}'; name that "
                "federation, or another state folder"
            )
    if not (folder / "ca.key").exists():
        Authority.create(folder, federation, now)
    CommandKeys.of(state, federation)
    if not keys.exist:
        keys.create(federation, now, public_keys, threshold)
    enrolment = Enrolment(state, federation, identity)
    BrokerFiles(enrolment).write(now)
    return enrolment.authority
