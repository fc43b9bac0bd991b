"""Keys that sign releases of a federation: its root metadata, the signatures of bundles, and changes of keys."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import TypeAdapter, ValidationError

from edge_agent import __version__
from edge_agent.bundle import archive, manifest
from edge_agent.bundle.trust import (
    MAX_BYTES,
    MOST_ROOTS,
    ROLES,
    Envelope,
    Files,
    Key,
    KeyName,
    Member,
    Purpose,
    Release,
    Role,
    RoleName,
    Root,
    Roots,
    Scores,
    dump,
    follow_roots,
    moment,
    needs_newer,
    parse,
    public_bytes,
    read,
    seconds,
    signed_by,
    unsigned,
)
from edge_agent.core.config import credential
from edge_agent.core.errors import BundleError, BundleUntrusted, StateError, UsageError, cause
from edge_agent.core.locks import waited_lock
from edge_agent.core.storage import (
    IDENTITY,
    Access,
    private_folder,
    read_json,
    read_regular,
    sync_folder,
    write_atomic,
    write_private,
)

from ..journal.entries import ReleaseMade, ReleaseSigned
from ..journal.store import Entry
from ..views.releases import book_of
from .store import StateFolder

ROOT_LIFE = timedelta(days=3653)
RELEASE_LIFE = timedelta(days=365)
ROUND_LIFE = timedelta(days=30)
"""Of the signature of one round's encoder: a device whose clock is some days off still takes part."""

COORDINATOR = "coordinator"
"""Name of the key with which the coordinator signs by itself."""

_NAME = TypeAdapter(KeyName)
_PUBLIC = re.compile(rb"[0-9a-fA-F]{64}(\s|$)")

OLDEST_AGENT = "0.1"
"""Version of the agent from which on one verifies signatures."""


def new_key() -> Ed25519PrivateKey:
    """Return a new private key, which is nowhere on disk yet."""
    return Ed25519PrivateKey.generate()


class Public(NamedTuple):
    """A public key (32 bytes) and the name of whose it is, for people; empty: none was given."""

    public: bytes
    name: str = ""

    @property
    def id(self) -> str:
        """The id by which metadata name the key."""
        return Key.of(self.public).id


class Signers(NamedTuple):
    """A role with its keys, and the names of those that have one."""

    role: Role
    keys: Mapping[str, Key]
    names: Mapping[str, str]

    @classmethod
    def of(cls, root: Root, name: RoleName) -> Signers:
        """Return a role as a root has it."""
        role_in_root = root.roles[name]
        keys = {keyid: root.keys[keyid] for keyid in role_in_root.keyids}
        return cls(role_in_root, keys, {keyid: root.names[keyid] for keyid in keys if keyid in root.names})


def write_key(path: Path, key: Ed25519PrivateKey, access: Access | None = None, name: str = "") -> None:
    """Write a private key for its owner alone, and the public one, with its name, beside it in ``<path>.pub``.

    Raises:
        UsageError: it cannot be called so.
    """
    try:
        _NAME.validate_python(name or "-")
    except ValidationError as error:
        raise UsageError(
            f"'{name[:80]}' is no name of a key; expected up to 64 letters, digits, spaces and . @ + - _"
        ) from error
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomic(path, pem, access=access or Access.private())
    public = f"{public_bytes(key).hex()} {name}".rstrip()
    write_atomic(path.with_name(f"{path.name}.pub"), public.encode() + b"\n", access=access)


def read_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in a file.

    Raises:
        UsageError: there is none.
    """
    try:
        raw = read_regular(path)
        key = load_pem_private_key(raw, None)
    except OSError as error:
        raise UsageError(f"{path}: no private key: {cause(error)}; 'headwater keys new FILE' makes one") from error
    except (ValueError, TypeError) as error:
        is_public = _PUBLIC.match(raw) is not None
        kind = "the public half of a key" if is_public else "no private key, or one with a password"
        raise UsageError(
            f"{path}: {kind}; expected the file FILE without .pub that 'headwater keys new FILE' made"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path}: a key of another kind; expected Ed25519, as 'headwater keys new FILE' makes it")
    return key


def read_public(path: Path) -> Public:
    """Return the public key in a file that `write_key` made.

    Raises:
        UsageError: there is none.
    """
    try:
        raw = read_regular(path)
        digits, _, name = raw.decode().strip().partition(" ")
        if _PUBLIC.match(raw) is None:
            raise ValueError("no 64 hexadecimal digits")
        return Public(bytes.fromhex(digits), _NAME.validate_python(name) if name else "")
    except OSError as error:
        raise UsageError(f"{path}: no public key: {cause(error)}; expected the file FILE.pub of a key") from error
    except ValueError as error:
        kind = "a private key" if b"PRIVATE KEY" in raw else "no public key"
        raise UsageError(f"{path}: {kind}; expected the file FILE.pub that 'headwater keys new FILE' made") from error


def role(keys: Sequence[Public], threshold: int) -> Signers:
    """Return a role of these keys, ``threshold`` of which have to sign.

    Raises:
        UsageError: more than there are.
    """
    by_id = {key.id: Key.of(key.public) for key in keys}
    if not 1 <= threshold <= len(by_id):
        raise UsageError(f"threshold {threshold} of {len(by_id)} different keys; expected 1..{len(by_id)}")
    names = {key.id: key.name for key in keys if key.name}
    return Signers(Role(keyids=tuple(sorted(by_id)), threshold=threshold), by_id, names)


def root_of(federation: str, version: int, expires: datetime, root: Signers, release: Signers) -> Envelope:
    """Return root metadata that nobody has signed yet."""
    return unsigned(
        Root.model_validate(
            {
                "_type": "root",
                "version": version,
                "expires": moment(expires.timestamp()),
                "keys": {**root.keys, **release.keys},
                "roles": {name: root.role if name == "root" else release.role for name in ROLES},
                "federation": federation,
                "names": {**root.names, **release.names},
            }
        )
    )


def end_of(version: int, now: datetime, life: timedelta) -> datetime:
    """Return the end of a release that is signed now with this version.

    Devices take a version for the time of the signature. After a clock that was ahead, versions stay ahead of the time;
    the end has to be later than they are.
    """
    return max(now, datetime.fromtimestamp(version, timezone.utc)) + life


@dataclass(frozen=True)
class NewRelease:
    """The facts of a release that are not in its bundle.

    Attributes:
        version: Its version, higher than that of every release that devices have installed.
        expires: The time from which on no device installs it.
        min_agent: The oldest version of the agent that may install it.
        reported: The results that devices reported of the bundle before; None: none had it.
        purpose: Whether it is for use on devices, or for one round of training.
    """

    version: int
    expires: datetime
    min_agent: str = OLDEST_AGENT
    reported: Scores | None = None
    purpose: Purpose = "release"

    def to_metadata(self, files: Files, federation: str) -> Release:
        """Return the metadata of the release of these files."""
        return Release.model_validate(
            {
                "_type": "targets",
                "version": self.version,
                "expires": moment(self.expires.timestamp()),
                "targets": dict(files.files),
                "federation": federation,
                "bundle_id": files.bundle_id,
                "task": files.task,
                "min_agent": self.min_agent,
                "reported": self.reported,
                "purpose": self.purpose,
            }
        )


def sign_bundle(
    path: Path,
    roots: Sequence[Envelope],
    keys: Sequence[Ed25519PrivateKey],
    new_release: NewRelease,
    *,
    again: bool = False,
) -> tuple[Release, int, int]:
    """Sign the bundle at ``path``, and return its release, its number of signatures, and how many are needed.

    Where it has a release, the signatures are added to that, so that several people can sign one after another.

    Args:
        path: The bundle.
        roots: All roots of the federation.
        keys: The keys that sign.
        new_release: The facts of the release, where the bundle has none.
        again: Whether the bundle gets a new release also where it has one.

    Raises:
        BundleDamaged: There is no bundle.
        UsageError: A key is none of those that may sign releases.
    """
    opened = archive.open_bundle(path)
    files = manifest.files_of(opened.manifest)
    newest = read(Root, roots[-1], "root")
    allowed = newest.roles["targets"]
    for key in keys:
        keyid = Key.of(public_bytes(key)).id
        if keyid not in allowed.keyids:
            raise UsageError(
                f"key {keyid[:16]}… is none of the {len(allowed.keyids)} that sign releases of root {newest.version} "
                f"of federation '{newest.federation}'; 'headwater keys rotate' admits another"
            )
    if opened.release is not None and not again:
        envelope = parse(Member, opened.release, str(path)).release
        files.check(read(Release, envelope, str(path)))
    else:
        envelope = unsigned(new_release.to_metadata(files, newest.federation))
    for key in keys:
        envelope = envelope.with_signature(key)
    archive.attach(path, _member(envelope, roots))
    return read(Release, envelope, str(path)), len(envelope.signers(allowed, newest.keys)), allowed.threshold


def _member(release: Envelope, roots: Sequence[Envelope]) -> bytes:
    """Return the signatures that a bundle carries: its release, and as many of the newest roots as there is room for.

    A device that trusts an older root needs roots.json to follow.
    """
    for first in range(max(0, len(roots) - MOST_ROOTS), len(roots)):
        raw = dump(Member(release=release, roots=tuple(roots[first:])))
        if len(raw) <= MAX_BYTES:
            return raw
    raise UsageError(f"a release and one root take {len(raw)} bytes, at most {MAX_BYTES} are possible; use fewer keys")


def sign_change(roots: Sequence[Envelope], keys: Sequence[Ed25519PrivateKey]) -> list[Envelope]:
    """Return these roots, of which the last one is signed by these keys as well.

    Raises:
        UsageError: A key has no say in that change.
        BundleUntrusted: The roots before do not follow from each other.
    """
    before = follow_roots(roots[:1], roots[1:-1])
    change = roots[-1]
    old = read(Root, before[-1], "root")
    new = read(Root, change, "root")
    for key in keys:
        keyid = Key.of(public_bytes(key)).id
        if keyid not in {*old.roles["root"].keyids, *new.roles["root"].keyids}:
            raise UsageError(
                f"key {new.named(keyid)} signs changes of keys neither in root {old.version} nor in root {new.version} "
                f"of federation '{new.federation}'; those that do: "
                f"{', '.join(map(old.named, old.roles['root'].keyids))}"
            )
        change = change.with_signature(key)
    return [*before, change]


def missing(roots: Sequence[Envelope]) -> list[str]:
    """Return the signatures that the last of these roots lacks, of its predecessor's keys and of its own."""
    old, new = (read(Root, envelope, "root") for envelope in roots[-2:])
    lacks = []
    for by in (old, new):
        expected = by.roles["root"]
        signers = roots[-1].signers(expected, by.keys)
        if (count := expected.threshold - len(signers)) > 0:
            others = ", ".join(by.named(keyid) for keyid in expected.keyids if keyid not in signers)
            lacks.append(
                f"root {new.version} is signed by {len(signers)} of the keys of root {by.version}, "
                f"{expected.threshold} are needed: {count} more of {others}"
            )
    return lacks


class ReleaseKeys:
    """The release keys in a coordinator's state folder, below ``identity/release``.

    ``roots.json`` has all root metadata, ``root.json`` the newest one, for devices that are to trust it. ``root.key``
    signs changes of keys: it is needed for nothing else and should be kept elsewhere. ``release.key`` signs what the
    coordinator releases by itself; without it, people sign.
    """

    def __init__(self, state: Path) -> None:
        self.folder = state / IDENTITY / "release"
        self.root = self.folder / "root.json"
        self._roots = self.folder / "roots.json"
        self.root_key = self.folder / "root.key"
        self.release_key = self.folder / "release.key"
        self._next_key = self.folder / "release.key.next"

    @property
    def online_key(self) -> Path:
        """Where the key is with which the coordinator signs, which systemd may give it as a credential."""
        if self._next_key.exists() and self.exist:  # of a change of keys that was killed before its last step
            next_key = Key.of(public_bytes(read_key(self._next_key)))
            if next_key.id in self.newest().roles["targets"].keyids:
                return self._next_key
        return credential(self.release_key)

    @property
    def sign_alone(self) -> bool:
        """Whether a bundle that is exported here counts without a signature of people."""
        if not self.exist or not self.online_key.exists():
            return not self.exist
        signing = self.newest().roles["targets"]
        return signing.threshold == 1 and Key.of(public_bytes(read_key(self.online_key))).id in signing.keyids

    @property
    def exist(self) -> bool:
        """Whether the federation signs its releases."""
        return self._roots.exists()

    def create(self, federation: str, now: datetime, public: Sequence[Public] = (), threshold: int = 1) -> Root:
        """Make the first root metadata, for the given public keys, or else for a release key that is made here.

        Raises:
            UsageError: there are some already, or the threshold is impossible.
        """
        if self.exist:
            raise UsageError(
                f"{self.folder} has release keys already, which devices trust; 'headwater keys rotate' changes them"
            )
        root_key = new_key()
        private_folder(self.folder)
        release_key = None if public else new_key()
        keys = [*public] if release_key is None else [Public(public_bytes(release_key), COORDINATOR)]
        by_root = role([Public(public_bytes(root_key), "root.key")], 1)
        first_root = root_of(federation, 1, now + ROOT_LIFE, by_root, role(keys, threshold)).with_signature(root_key)
        write_key(self.root_key, root_key, Access.private_in(self.folder))
        if release_key is not None:
            write_key(self.release_key, release_key, Access.private_in(self.folder))
        self._write([first_root])
        return read(Root, first_root, "root")

    def roots(self) -> list[Envelope]:
        """Return all root metadata, the newest last.

        Raises:
            StateError: there are none, or they are damaged.
        """
        raw = read_json(self._roots)
        if raw is None:
            raise StateError(f"{self.folder}: no release keys; 'headwater init' or 'headwater keys init' makes them")
        try:
            return [*Roots.model_validate(raw).roots]
        except ValueError as error:
            raise StateError(f"{self._roots}: damaged; put it back from a backup") from error

    def newest(self) -> Root:
        """Return the newest root metadata."""
        return read(Root, self.roots()[-1], str(self._roots))

    def sign(
        self, path: Path, now: datetime, reported: Scores | None = None, purpose: Purpose = "release"
    ) -> tuple[Release, int, int]:
        """Sign a bundle with the release key here, as `sign_bundle`.

        Raises:
            StateError: there is no such key.
        """
        if not self.online_key.exists():
            raise StateError(
                f"{self.release_key}: it is not here, so {path.name} is not signed; 'headwater keys sign {path} --key "
                "FILE' signs it with the key of a person"
            )
        keys = [read_key(self.online_key)]
        version = self.next_version(now)
        life = RELEASE_LIFE if purpose == "release" else ROUND_LIFE
        new_release = NewRelease(version, end_of(version, now, life), reported=reported, purpose=purpose)
        return sign_bundle(path, self.roots(), keys, new_release, again=True)

    def next_version(self, now: datetime) -> int:
        """Return the version of a new release: seconds since 1970, so that people can sign elsewhere; always larger.

        Raises:
            StateError: the file with the last one is damaged.
        """
        path = self.folder / "version.json"
        private_folder(self.folder)
        with waited_lock(self.folder):
            before = (read_json(path) or {}).get("version", 0)
            if not isinstance(before, int):
                raise StateError(f"{path}: no version; remove it")
            version = max(int(now.timestamp()), before + 1)
            write_private(path, json.dumps({"version": version}).encode())
        return version

    def change(
        self,
        now: datetime,
        keys: Sequence[Ed25519PrivateKey],
        *,
        root: Signers | None = None,
        release: Signers | None = None,
        own: Ed25519PrivateKey | None = None,
    ) -> list[Envelope]:
        """Return all root metadata and one more with other keys, signed by ``keys``; a role not given keeps its own.

        ``own``: the coordinator's new key, which is written before the root that names it. Nothing else is changed:
        `accept` makes the change count, once `missing` finds nothing.
        """
        with waited_lock(self.folder):
            roots = self.roots()
            before = read(Root, roots[-1], str(self._roots))
            next_root = root_of(
                before.federation,
                before.version + 1,
                now + ROOT_LIFE,
                root or Signers.of(before, "root"),
                release or Signers.of(before, "targets"),
            )
            if self.online_key == self._next_key:
                self._take_next()
            if own is not None:
                write_key(self._next_key, own, Access.private_in(self.folder), COORDINATOR)
        return sign_change([*roots, next_root], keys)

    def next_key(self) -> Ed25519PrivateKey:
        """Return the coordinator's key of a change that others are still to sign; a new one where there is none."""
        is_pending = self._next_key.exists() and self.online_key != self._next_key
        return read_key(self._next_key) if is_pending else new_key()

    def accept(self, changed: Sequence[Envelope]) -> Root:
        """Make the last of these roots count here; returns it. Devices follow by the next bundle that is signed.

        Raises:
            UsageError: it does not follow the newest one here, or signatures are missing: whose is said.
        """
        with waited_lock(self.folder):
            roots = self.roots()
            try:
                if changed[:-1] == roots and (lacks := missing(changed)):
                    raise UsageError(f"root {changed[-1].signed['version']}: {'; '.join(lacks)}")
                after = follow_roots(roots, changed)
            except BundleUntrusted as error:
                raise UsageError(f"{error}; the change was made from other keys than those here") from error
            self._write(after)
            root = read(Root, after[-1], "root")
            signing = root.roles["targets"].keyids
            if self.online_key == self._next_key:
                self._take_next()
                return root
            for suffix in (".pub", ""):  # of a change that can count no more
                Path(f"{self._next_key}{suffix}").unlink(missing_ok=True)
            if self.release_key.exists() and Key.of(public_bytes(read_key(self.release_key))).id not in signing:
                self.release_key.unlink()  # which signs nothing any more
        return root

    def _take_next(self) -> None:
        for suffix in (".pub", ""):  # the key last: until then it is found where it is
            next_file = Path(f"{self._next_key}{suffix}")
            if next_file.exists():
                next_file.replace(f"{self.release_key}{suffix}")
        sync_folder(self.folder)

    def _write(self, roots: Sequence[Envelope]) -> None:
        write_private(self._roots, dump(Roots(roots=tuple(roots))))
        write_private(self.root, dump(roots[-1]))


def signature_of(path: Path) -> dict[str, Any] | None:
    """Who has signed the bundle at ``path``, as `trust.signed_by`; None where nobody has."""
    raw = archive.open_bundle(path).release
    return None if raw is None else signed_by(parse(Member, raw, str(path)))


def _version(path: Path) -> int | None:
    """Return the version of the release of the bundle at ``path``; None where nobody has signed one."""
    raw = archive.open_bundle(path).release
    return None if raw is None else read(Release, parse(Member, raw, str(path)).release, str(path)).version


def file_to_release(
    state: StateFolder, run: str, bundle_id: str, digest: str, now: datetime
) -> tuple[bytes, dict[str, Any] | None]:
    """Return a run's bundle as devices are to get it now: the blob ``digest``, or signed with a version of now.

    Devices refuse a version that is older than one they have installed, so each release is signed when it is made:
    here, where the release key is, or before by people, who sign the file in the run's folder. Also returns who has
    signed, as `signature_of`; None where the federation has no keys.

    Raises:
        UsageError: people have to sign it first; the message has the command.
    """
    keys = ReleaseKeys(state.path)
    if not keys.exist:
        return state.blobs.read(digest), None
    if keys.online_key.exists():
        with tempfile.TemporaryDirectory(dir=state.path, prefix=".release-") as folder:
            copy = Path(folder) / f"{run}.hwb"
            copy.write_bytes(state.blobs.read(digest))
            _, count, needed = keys.sign(copy, now, book_of(state.journal).scores(bundle_id))
            if count >= needed:
                return read_regular(copy), signature_of(copy)
    return _signed_by_people(state, keys, run, bundle_id, digest, now)


def _signed_version(entry: Entry) -> int:
    """Return the version that the release of an entry is signed with; 0: it is not signed."""
    fact = entry.fact
    if not isinstance(fact, ReleaseMade | ReleaseSigned) or fact.signed is None:
        return 0
    version = fact.signed.get("version")
    return version if isinstance(version, int) else 0


def _signed_by_people(
    state: StateFolder, keys: ReleaseKeys, run: str, bundle_id: str, digest: str, now: datetime
) -> tuple[bytes, dict[str, Any] | None]:
    """Return the bundle in the run's folder, which people have signed; see `file_to_release`.

    Raises:
        UsageError: Devices that have installed all releases so far would not install it now.
    """
    path = state.run(run).folder / f"{run}.hwb"
    again = ""
    newest = _newest_version(state, digest)
    # 1. The bundle has to be the one of the release, signed by enough people.
    try:
        if archive.open_bundle(path).manifest.bundle_id != bundle_id:
            raise BundleUntrusted(f"{path} is another bundle than {bundle_id[:16]}")
        version = _version(path)
        if version is None:
            raise BundleUntrusted(f"{path} is not signed, {keys.newest().roles['targets'].threshold} people have to")
        again = " --again" if version <= newest else ""
        release, _ = archive.verify(path, keys.roots()[-1])
        content = read_regular(path)
    except BundleError as error:
        raise UsageError(f"{error}; 'headwater keys sign {path} --key FILE{again}' signs it for a release") from error
    # 2. Devices have to take it now.
    obstacle = ""
    if again:
        obstacle = f"devices that have installed newer releases refuse the version of {path}"
    elif now.timestamp() >= seconds(release.expires):
        obstacle = f"{path}: what was signed expired at {release.expires}"
    elif needs_newer(release, __version__):
        needed = f"agents of version {release.min_agent} (--min-agent)"
        obstacle = f"{path} needs {needed}, and this is headwater {__version__}"
    if obstacle:
        sign = f"'headwater keys sign {path} --key FILE --again'"
        raise UsageError(f"{obstacle}; {sign} signs it for a new release, then repeat this command")
    return content, signature_of(path)


def _newest_version(state: StateFolder, digest: str) -> int:
    """Return the newest version of all releases so far; devices refuse one that is no newer. 0: none was signed.

    ``digest``: the file of the bundle, whose signature counts where it was released before.
    """
    released = state.journal.entries(kinds=("release_made", "release_signed"))
    versions = [_signed_version(entry) for entry in released]
    if digest in {entry.digest for entry in released}:
        versions.append(_version(state.blobs.path(digest)) or 0)
    return max(versions, default=0)
