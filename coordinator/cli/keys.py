"""``headwater keys``: the keys that sign releases, and signatures of bundle files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge_agent import __version__
from edge_agent.bundle.trust import (
    Envelope,
    Key,
    Role,
    RoleName,
    Roots,
    dump,
    needs_newer,
    public_bytes,
    read,
    roots_in,
)
from edge_agent.bundle.trust import Root as RootMetadata
from edge_agent.core.errors import UsageError
from edge_agent.core.storage import open_regular, write_atomic

from ..config import load_config
from ..journal.store import utc_now
from ..state.release_keys import (
    COORDINATOR,
    OLDEST_AGENT,
    RELEASE_LIFE,
    NewRelease,
    Public,
    ReleaseKeys,
    Signers,
    end_of,
    missing,
    new_key,
    read_key,
    read_public,
    role,
    sign_bundle,
    sign_change,
    signature_of,
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
NewThreshold = Annotated[
    int | None,
    typer.Option("--threshold", min=1, max=16, help="How many release keys have to sign.", show_default="as before"),
]
NewRootThreshold = Annotated[
    int | None,
    typer.Option(
        "--root-threshold", min=1, max=16, help="How many keys have to sign a change of keys.", show_default="as before"
    ),
]
Days = Annotated[int, typer.Option("--days", min=1, max=3650, help="Days for which the bundle may be installed.")]
MinAgent = Annotated[str, typer.Option("--min-agent", help="Oldest version of agents that may install it.")]
Again = Annotated[
    bool,
    typer.Option("--again", help="A new version, newer than all others; signatures on the one before are discarded."),
]
Root = Annotated[
    Path | None,
    typer.Option("--root", help="roots.json of identity/release of the state folder, where that is not here."),
]


@app.command("new")
def new(
    file: KeyFile,
    name: Annotated[str, typer.Option("--name", help="Whose it is. Every device that gets a bundle can read it.")] = "",
    as_json: Json = False,
) -> None:
    """Make a key pair for a person who signs releases.

    The public half goes to the coordinator.

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
    """Make the release keys of a federation that has none.

    'headwater init' does that for a new one.

    Devices that are enrolled later trust them; those that are there get root.json by bundle.trust.

    Example: headwater keys init --config coordinator.toml
    """
    settings = load_config(config, state)
    keys = ReleaseKeys(settings.state)
    keys.create(settings.federation, utc_now(), [read_public(file) for file in release_key or ()], threshold)
    _present(keys, as_json)


@app.command("show")
def show(
    key: Annotated[Path | None, typer.Option("--key", help="Show the id and the name of this key alone.")] = None,
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Show which keys sign releases and changes of keys.

    With --key, the key in a file FILE or FILE.pub.

    Example: headwater keys show --key alice.key.pub
    """
    if key is None:
        _present(ReleaseKeys(state_path(config, state)), as_json)
        return
    public = read_public(key if key.suffix == ".pub" else key.with_name(f"{key.name}.pub"))
    result = {"file": str(key), "id": public.id, "name": public.name or None}
    present(result, [f"{key}: {public.id} {public.name}".rstrip()], as_json=as_json)


@app.command("rotate")
def rotate(
    release_key: PublicFiles = None,
    threshold: NewThreshold = None,
    root_key: RootPublic = None,
    root_threshold: NewRootThreshold = None,
    key: Private = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the change into this file for others to sign; nothing changes yet."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Also where fewer keys have to sign than before, or no key changes.")
    ] = False,
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Change the keys.

    Without --release-key, the coordinator's own is replaced by a new one, and others stay.

    Thresholds stay as they are where none is given. With --root-key, those that sign changes are replaced, too.

    Enough of the old and of the new root keys have to sign:
    root.key of the state folder, where it is there, and each --key. Where others are on other machines, --out writes
    the change into a file, they sign that by 'headwater keys sign', and 'headwater keys accept' makes it count.
    Devices follow by the next bundle that is signed.

    Example: headwater keys rotate --key root.key
    """
    keys = ReleaseKeys(state_path(config, state))
    names_change = bool(release_key or root_key or threshold or root_threshold)
    if not names_change and not keys.online_key.exists():
        raise UsageError("people sign the releases of this federation: name all release keys with --release-key")
    newest = keys.newest()
    signers = [read_key(path) for path in key or ()]
    signers += _root_keys_here(keys, newest)
    # Without a word on keys or thresholds, the coordinator's own release key is the one that changes.
    own = None if names_change else keys.next_key()
    if own is None:
        release = _new_role(Signers.of(newest, "targets"), map(read_public, release_key or ()), threshold)
    else:
        release = _with_own(keys, Signers.of(newest, "targets"), Public(public_bytes(own), COORDINATOR))
    root = _new_role(Signers.of(newest, "root"), map(read_public, root_key or ()), root_threshold)
    if not yes:
        _check_wanted(newest, {"root": root.role, "targets": release.role})
    # The place is checked before a new key of the coordinator is kept.
    if out is not None:
        ready_for(out)
    changed = keys.change(utc_now(), signers, root=root, release=release, own=own)
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


def _root_keys_here(keys: ReleaseKeys, newest: RootMetadata) -> list[Ed25519PrivateKey]:
    """Return the root key of the state folder in a list; an empty one where it is elsewhere or counts no more."""
    if not keys.root_key.exists():
        return []
    root_key = read_key(keys.root_key)
    counts = Key.of(public_bytes(root_key)).id in newest.roles["root"].keyids
    return [root_key] if counts else []


@app.command("accept")
def accept(file: ChangeFile, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Make a change of keys count.

    'headwater keys rotate --out' wrote it, and people have signed it since.

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
    """Sign a bundle file, or a change of keys.

    With the coordinator's key, or with --key; several people sign one file one after another.

    With --again, an older bundle gets a newer version, which devices install: that is how a federation goes back.

    The file may also be a change of keys that 'headwater keys rotate --out' wrote: it is shown what changes, and --key
    alone is needed.

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
    signing = [read_key(file) for file in key or [keys.online_key]]
    before = signature_of(bundle)
    version = keys.next_version(now) if root is None else int(now.timestamp())
    new_release = NewRelease(version, end_of(version, now, timedelta(days=days)), min_agent)
    release, count, needed = sign_bundle(bundle, roots, signing, new_release, again=again)
    after = signature_of(bundle)
    result = {
        "bundle": str(bundle),
        "bundle_id": release.bundle_id,
        "version": release.version,
        "expires": release.expires,
        "signatures": count,
        "needed": needed,
        "signed": after,
    }
    line = f"{bundle}: version {release.version}, installable until {release.expires}"
    line += f", signed by {_name_signers(_signers_in(after))}: {count} of {needed} needed"
    if count < needed:
        line += f"; {needed - count} more needed: 'headwater keys sign {bundle} --key FILE'"
    lines = [line]
    if before is not None:
        lines += _compare_with_before(before, release.version, signing)
    if needs_newer(release, __version__):
        lines.append(
            f"warning: only agents of version {release.min_agent} or newer install it, and this is headwater "
            f"{__version__}, which will not release it; sign it with --again and an older --min-agent"
        )
    present(result, lines, as_json=as_json)


def _compare_with_before(before: Mapping[str, Any], version: int, signing: Iterable[Ed25519PrivateKey]) -> list[str]:
    """Say what became of the signatures that a bundle had before it was signed.

    Args:
        before: What `signature_of` said of it then.
        version: The version that the bundle has now. Signatures on another one are discarded.
        signing: The keys that signed now.
    """
    if before["version"] != version:
        if not before["signers"]:
            return []
        signers = _name_signers(before["signers"])
        return [f"discarded: the signature(s) of {signers} on version {before['version']}"]
    ids = {Key.of(public_bytes(key)).id for key in signing}
    twice = [signer for signer in before["signers"] if signer["id"] in ids]
    return [f"{_name_signers(twice)} had signed this version already"] if twice else []


def _signers_in(signed: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return who signed a bundle, of an answer of `signature_of`."""
    return () if signed is None else signed["signers"]


def _name_signers(signers: Sequence[Mapping[str, Any]]) -> str:
    """Return the names of keys in one line; the beginning of its id for a key without a name."""
    return ", ".join(signer["name"] or f"{signer['id'][:16]}…" for signer in signers) or "no key"


def _new_role(before: Signers, public: Iterable[Public], threshold: int | None) -> Signers:
    """Return a role with these keys, where there are any, and with this threshold, where one is given."""
    keys = [*public] or _publics_of(before)
    return role(keys, threshold or before.role.threshold)


def _publics_of(signers: Signers) -> list[Public]:
    """Return the keys of a role with their names."""
    return [
        Public(bytes.fromhex(key.keyval.public), signers.names.get(keyid, "")) for keyid, key in signers.keys.items()
    ]


def _with_own(keys: ReleaseKeys, before: Signers, own: Public) -> Signers:
    """Return the release keys with another one of the coordinator, where the present one is among them."""
    present_id = Key.of(public_bytes(read_key(keys.online_key))).id
    if present_id not in before.keys:
        raise UsageError(
            f"{keys.online_key}: its key signs no releases (any more); name all release keys with --release-key"
        )
    others = before._replace(keys={keyid: key for keyid, key in before.keys.items() if keyid != present_id})
    return role([*_publics_of(others), own], before.role.threshold)


def _check_wanted(before: RootMetadata, after: Mapping[RoleName, Role]) -> None:
    """Require that a change of keys changes something, and weakens nothing."""
    falls = [
        f"the threshold of {what} falls from {before.roles[name].threshold} to {after[name].threshold}"
        for name, what in _ROLES.items()
        if after[name].threshold < before.roles[name].threshold
    ]
    if falls:
        raise UsageError(f"{'; '.join(falls)}; nothing was changed, --yes does it")
    if all(_is_same(before.roles[name], after[name]) for name in _ROLES):
        raise UsageError(
            f"these keys count since root {before.version}, which ends at {before.expires}; nothing was changed, "
            "--yes makes one more root with a later end"
        )


def _is_same(before: Role, after: Role) -> bool:
    """Return whether the same keys, as many of them, sign in a role; their order says nothing."""
    return set(before.keyids) == set(after.keyids) and before.threshold == after.threshold


def describe_keys(keys: ReleaseKeys) -> str:
    """Return in one line who signs the releases of a federation."""
    root = keys.newest()
    release = root.roles["targets"]
    who = "the coordinator signs them" if keys.online_key.exists() else "people sign them"
    return f"{who}, {release.threshold} of {len(release.keyids)} keys; root {root.version} until {root.expires}" + (
        f"; keep {keys.root_key} elsewhere" if keys.root_key.exists() else ""
    )


def _roots(path: Path) -> list[Envelope]:
    try:
        roots = roots_in(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; expected the federation's roots.json") from error
    if (first := read(RootMetadata, roots[0], str(path)).version) != 1:
        raise UsageError(
            f"{path} begins with root {first}, as root.json does; expected roots.json, which is beside that in the "
            "coordinator's state folder (identity/release) and has all roots"
        )
    return [*roots]


def _is_change(path: Path) -> bool:
    try:
        with open_regular(path) as file:
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
    """Print what a change of keys changes, and what it lacks until it counts."""
    old, new = (read(RootMetadata, envelope, "root") for envelope in changed[-2:])
    lines = [f"{path}: root {new.version} of federation '{new.federation}', after root {old.version}"]
    lacks = missing(changed)
    for name, what in _ROLES.items():
        before = old.roles[name]
        after = new.roles[name]
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
    lines = [f"federation '{root.federation}': {describe_keys(keys)}", f"devices trust {keys.root}"]
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
