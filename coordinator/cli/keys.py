"""``headwater keys``: the keys that sign releases, and signatures of bundle files."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_agent.errors import UsageError
from edge_agent.storage import write_atomic
from edge_agent.trust import Envelope, Key, RoleName, Roots, dump, parse, public_bytes, read
from edge_agent.trust import Root as RootMetadata

from ..config import load_config
from ..state.journal import utc_now
from ..state.release_keys import (
    COORDINATOR,
    OLDEST_AGENT,
    RELEASE_LIFE,
    Public,
    ReleaseKeys,
    missing,
    new_key,
    read_key,
    read_public,
    role,
    sign_bundle,
    sign_change,
    write_key,
)
from .options import Config, Json, State, state_path
from .output import present, ready_for

app = typer.Typer(
    help="Keys that sign releases: make, show and change them; sign bundle files.\n\nExample: headwater keys show",
    no_args_is_help=True,
)

_ROLES: dict[RoleName, str] = {"root": "changes of keys", "targets": "releases"}

KeyFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="File for the private key; FILE.pub gets the public one.")
]
BundleFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="Bundle file (*.hwb) or change of keys, which gets the signatures.")
]
ChangeFile = Annotated[Path, typer.Argument(metavar="FILE", help="File that 'headwater keys rotate --out' wrote.")]
Private = Annotated[
    list[Path] | None,
    typer.Option("--key", help="File of a private key that signs, besides those of the state folder."),
]
PublicFiles = Annotated[
    list[Path] | None, typer.Option("--release-key", help="Public key that signs releases; repeatable.")
]
RootPublic = Annotated[
    list[Path] | None, typer.Option("--root-key", help="Public key that signs changes of keys; repeatable.")
]
Threshold = Annotated[int, typer.Option("--threshold", min=1, max=16, help="How many release keys have to sign.")]
RootThreshold = Annotated[
    int, typer.Option("--root-threshold", min=1, max=16, help="How many keys have to sign a change of keys.")
]
Days = Annotated[int, typer.Option("--days", min=1, max=3650, help="Days for which the bundle may be installed.")]
MinAgent = Annotated[str, typer.Option("--min-agent", help="Oldest version of agents that may install it.")]
Again = Annotated[
    bool,
    typer.Option("--again", help="A new release of the bundle, newer than all others, instead of one more signature."),
]
Root = Annotated[
    Path | None, typer.Option("--root", help="The federation's roots.json, where its state folder is not here.")
]


@app.command("new")
def new(
    file: KeyFile,
    name: Annotated[str, typer.Option("--name", help="Whose it is. Every device that gets a bundle can read it.")] = "",
    as_json: Json = False,
) -> None:
    """Make a key pair for a person who signs releases; the public half goes to the coordinator.

    Example: headwater keys new alice.key --name Alice
    """
    ready_for(file)
    if file.exists():
        raise UsageError(f"{file} exists; name another file, or remove it")
    key = new_key()
    write_key(file, key, name=name)
    keyid = Key.of(public_bytes(key)).id
    result = {"key": str(file), "public": f"{file}.pub", "id": keyid, "name": name or None}
    present(result, [f"key {name or keyid[:16] + '…'} in {file}"], as_json=as_json)


@app.command("init")
def init_keys(
    release_key: PublicFiles = None,
    threshold: Threshold = 1,
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Make the release keys of a federation that has none; 'headwater init' does that for a new one.

    Devices that are enrolled later trust them; those that are there get root.json by bundle.trust.

    Example: headwater keys init --config coordinator.toml
    """
    settings = load_config(config, state)
    keys = ReleaseKeys(settings.state)
    keys.create(settings.federation, utc_now(), [read_public(file) for file in release_key or ()], threshold)
    _present(keys, as_json)


@app.command("show")
def show(config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Show which keys sign releases and changes of keys.

    Example: headwater keys show
    """
    _present(ReleaseKeys(state_path(config, state)), as_json)


@app.command("rotate")
def rotate(
    release_key: PublicFiles = None,
    threshold: Threshold = 1,
    root_key: RootPublic = None,
    root_threshold: RootThreshold = 1,
    key: Private = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the change into this file for others to sign; nothing changes yet."),
    ] = None,
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Change the keys: without --release-key, the coordinator's own is replaced by a new one.

    With --root-key, those that sign changes are replaced, too. Enough of the old and of the new root keys have to sign:
    root.key of the state folder, where it is there, and each --key. Where others are on other machines, --out writes
    the change into a file, they sign that by 'headwater keys sign', and 'headwater keys accept' makes it count.
    Devices follow by the next bundle that is signed.

    Example: headwater keys rotate --key root.key
    """
    keys = ReleaseKeys(state_path(config, state))
    if not release_key and not root_key and not keys.online_key.exists():
        raise UsageError("people sign the releases of this federation: name all release keys with --release-key")
    signers = [read_key(path) for path in key or ()]
    if keys.root_key.exists():
        here = read_key(keys.root_key)
        if Key.of(public_bytes(here)).id in keys.newest().roles["root"].keyids:
            signers.append(here)
    own = None if release_key or root_key else keys.next_key()
    public = [Public(public_bytes(own), COORDINATOR)] if own is not None else [*map(read_public, release_key or ())]
    root = role([*map(read_public, root_key)], root_threshold) if root_key else None
    if out is not None:
        ready_for(out)
    changed = keys.change(utc_now(), signers, root=root, release=role(public, threshold) if public else None, own=own)
    if out is not None:
        write_atomic(out, dump(Roots(roots=tuple(changed))))
        _present_change(out, changed, as_json)
        return
    if lacks := missing(changed):
        raise UsageError(
            f"{'; '.join(lacks)}; name the files of these private keys with --key, or write the change with --out FILE "
            "for those who have them"
        )
    keys.accept(changed)
    _present(keys, as_json)


@app.command("accept")
def accept(file: ChangeFile, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Make a change of keys count that 'headwater keys rotate --out' wrote and people have signed since.

    Example: headwater keys accept change.json
    """
    keys = ReleaseKeys(state_path(config, state))
    keys.accept(_roots(file))
    _present(keys, as_json)


@app.command("sign")
def sign(
    bundle: BundleFile,
    key: Private = None,
    root: Root = None,
    again: Again = False,
    days: Days = RELEASE_LIFE.days,
    min_agent: MinAgent = OLDEST_AGENT,
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Sign a bundle file with the coordinator's key, or with --key; several people sign one file one after another.

    With --again, an older bundle becomes the newest release: that is how a federation goes back. The file may also be a
    change of keys that 'headwater keys rotate --out' wrote: it is shown what changes, and --key alone is needed.

    Example: headwater keys sign encoder.hwb --key alice.key --root roots.json
    """
    if _is_change(bundle):
        _sign_change(bundle, key or [], as_json)
        return
    if not re.fullmatch(r"\d{1,4}(\.\d{1,4}){0,3}", min_agent):
        raise UsageError(f"--min-agent {min_agent[:40]}: expected a version such as {OLDEST_AGENT}")
    keys = ReleaseKeys(state_path(config, state) if root is None else root.parent)
    now = utc_now()
    roots = keys.roots() if root is None else _roots(root)
    files = [*(key or ())] or [keys.online_key]
    version = keys.next_version(now) if root is None else int(now.timestamp())
    release, count, needed = sign_bundle(
        bundle,
        roots,
        [read_key(file) for file in files],
        version=version,
        expires=now + timedelta(days=days),
        min_agent=min_agent,
        again=again,
    )
    result = {
        "bundle": str(bundle),
        "bundle_id": release.bundle_id,
        "release": release.version,
        "expires": release.expires,
        "signatures": count,
        "needed": needed,
    }
    missing = f"; {needed - count} more needed" if count < needed else ""
    line = f"{bundle}: release {release.version}, installable until {release.expires}, {count} signature(s){missing}"
    present(result, [line], as_json=as_json)


def described(keys: ReleaseKeys) -> str:
    """Who signs the releases of a federation, in a line."""
    root = keys.newest()
    release = root.roles["targets"]
    who = "the coordinator signs them" if keys.online_key.exists() else "people sign them"
    return f"{who}, {release.threshold} of {len(release.keyids)} keys; root {root.version} until {root.expires}" + (
        f"; keep {keys.root_key} elsewhere" if keys.root_key.exists() else ""
    )


def _roots(path: Path) -> list[Envelope]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; expected the federation's roots.json") from error
    return [*parse(Roots, raw, str(path)).roots]


def _is_change(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError:  # said where it is read
        return False


def _sign_change(path: Path, files: list[Path], as_json: bool) -> None:
    if not files:
        raise UsageError(f"{path} is a change of keys; name the file of your private key with --key")
    roots = _roots(path)
    if len(roots) < 2:
        raise UsageError(f"{path} has one root and so no change; expected the file of 'headwater keys rotate --out'")
    changed = sign_change(roots, [*map(read_key, files)])
    write_atomic(path, dump(Roots(roots=tuple(changed))))
    _present_change(path, changed, as_json)


def _present_change(path: Path, changed: list[Envelope], as_json: bool) -> None:
    """What a change of keys changes, and what it lacks until it counts."""
    old, new = (read(RootMetadata, envelope, "root") for envelope in changed[-2:])
    lines, lacks = (
        [f"{path}: root {new.version} of federation '{new.federation}', after root {old.version}"],
        missing(changed),
    )
    for name, what in _ROLES.items():
        before, after = old.roles[name], new.roles[name]
        if before == after:
            lines.append(f"{what}: as before")
            continue
        lines.append(
            f"{what}: {after.threshold} of {len(after.keyids)} keys, {before.threshold} of {len(before.keyids)} before"
        )
        lines += [f"  new: {new.named(keyid)} {keyid}" for keyid in after.keyids if keyid not in before.keyids]
        lines += [f"  no more: {old.named(keyid)} {keyid}" for keyid in before.keyids if keyid not in after.keyids]
    lines += [f"missing: {one}" for one in lacks] or [f"complete: 'headwater keys accept {path}' makes it count"]
    result = {"file": str(path), "root": new.version, "missing": lacks}
    present(result, lines, as_json=as_json)


def _present(keys: ReleaseKeys, as_json: bool) -> None:
    root = keys.newest()
    result: dict[str, Any] = {
        "federation": root.federation,
        "root": root.version,
        "expires": root.expires,
        "file": str(keys.root),
        "root_keys": _shown(root, "root"),
        "release_keys": _shown(root, "targets"),
        "signs_here": keys.online_key.exists(),
    }
    lines = [f"federation '{root.federation}': {described(keys)}", f"devices trust {keys.root}"]
    for name, what in _ROLES.items():
        of = root.roles[name]
        lines += [
            f"{what}: {of.threshold} of",
            *(f"  {keyid} {root.names.get(keyid, '')}".rstrip() for keyid in of.keyids),
        ]
    present(result, lines, as_json=as_json)


def _shown(root: RootMetadata, name: RoleName) -> dict[str, Any]:
    of = root.roles[name]
    names = {keyid: root.names[keyid] for keyid in of.keyids if keyid in root.names}
    return {"threshold": of.threshold, "keys": list(of.keyids), "names": names}
