"""Keys that sign releases of a federation: its root metadata, the signatures of bundles, and changes of keys."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from edge_agent import bundle as bundles
from edge_agent.config import credential
from edge_agent.errors import BundleError, BundleUntrusted, StateError, UsageError, cause
from edge_agent.storage import (
    IDENTITY,
    Access,
    private_folder,
    read_json,
    sha256_of,
    sync_folder,
    waited_lock,
    write_atomic,
    write_private,
)
from edge_agent.trust import (
    ROLES,
    Envelope,
    Key,
    Member,
    Release,
    Role,
    Root,
    Roots,
    Scores,
    dump,
    followed,
    moment,
    parse,
    public_bytes,
    read,
    unsigned,
)

from .releases import book_of
from .store import StateFolder

ROOT_LIFE = timedelta(days=3653)
RELEASE_LIFE = timedelta(days=365)
OLDEST_AGENT = "0.1"
"""Version of the agent from which on one verifies signatures."""


def new_key() -> Ed25519PrivateKey:
    """A new key."""
    return Ed25519PrivateKey.generate()


def write_key(path: Path, key: Ed25519PrivateKey, access: Access | None = None) -> None:
    """Write a private key for its owner alone, and the public one beside it in ``<path>.pub``."""
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomic(path, pem, access=access or Access.private())
    write_atomic(path.with_name(f"{path.name}.pub"), public_bytes(key).hex().encode() + b"\n", access=access)


def read_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a file.

    Raises:
        UsageError: there is none.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path}: no private key that can be read: {cause(error)}; 'headwater keys new FILE' makes one"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path}: a key of another kind; expected Ed25519, as 'headwater keys new FILE' makes it")
    return key


def read_public(path: Path) -> bytes:
    """The public key (32 bytes) in a file that `write_key` made.

    Raises:
        UsageError: there is none.
    """
    try:
        public = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no public key: {cause(error)}; expected the file FILE.pub of a key") from error
    if len(public) != 32:
        raise UsageError(f"{path}: a public key of {len(public)} bytes, expected 32 in hexadecimal")
    return public


def role(keys: Sequence[bytes], threshold: int) -> tuple[Role, dict[str, Key]]:
    """A role of these public keys, ``threshold`` of which have to sign.

    Raises:
        UsageError: more than there are.
    """
    known = {key.id: key for key in map(Key.of, keys)}
    if not 1 <= threshold <= len(known):
        raise UsageError(f"threshold {threshold} of {len(known)} different keys; expected 1..{len(known)}")
    return Role(keyids=tuple(sorted(known)), threshold=threshold), known


def root_of(
    federation: str,
    version: int,
    expires: datetime,
    root: tuple[Role, dict[str, Key]],
    release: tuple[Role, dict[str, Key]],
) -> Envelope:
    """Root metadata that nobody has signed yet."""
    roles = {name: root[0] if name == "root" else release[0] for name in ROLES}
    return unsigned(
        Root.model_validate(
            {
                "_type": "root",
                "version": version,
                "expires": moment(expires.timestamp()),
                "keys": {**root[1], **release[1]},
                "roles": roles,
                "federation": federation,
            }
        )
    )


def sign_bundle(
    path: Path,
    roots: Sequence[Envelope],
    keys: Sequence[Ed25519PrivateKey],
    *,
    version: int,
    expires: datetime,
    min_agent: str = OLDEST_AGENT,
    again: bool = False,
    reported: Scores | None = None,
) -> tuple[Release, int, int]:
    """Sign the bundle at ``path``; returns its release, by how many keys it is signed now, and how many are needed.

    Where it has a release, the signatures are added to that, so that several people can sign one after another;
    ``again`` makes a new release of it, with ``version``, instead. ``reported``: what devices said of the bundle.

    Raises:
        BundleDamaged: there is no bundle.
        UsageError: a key is none of those that may sign releases.
    """
    opened = bundles.open_bundle(path)
    files, newest = bundles.files_of(opened.manifest), read(Root, roots[-1], "root")
    allowed = newest.roles["targets"]
    if strange := [Key.of(public_bytes(key)).id for key in keys if Key.of(public_bytes(key)).id not in allowed.keyids]:
        raise UsageError(
            f"key {strange[0][:16]}… is none of the {len(allowed.keyids)} that sign releases of root {newest.version} "
            f"of federation '{newest.federation}'; 'headwater keys rotate' admits another"
        )
    envelope: Envelope | None = None
    if opened.release is not None and not again:
        envelope = parse(Member, opened.release, str(path)).release
        files.check(read(Release, envelope, str(path)))
    if envelope is None:
        envelope = unsigned(
            Release.model_validate(
                {
                    "_type": "targets",
                    "version": version,
                    "expires": moment(expires.timestamp()),
                    "targets": dict(files.files),
                    "federation": newest.federation,
                    "bundle_id": files.bundle_id,
                    "task": files.task,
                    "min_agent": min_agent,
                    "reported": reported,
                }
            )
        )
    for key in keys:
        envelope = envelope.with_signature(key)
    bundles.attach(path, dump(Member(release=envelope, roots=tuple(roots))))
    return read(Release, envelope, str(path)), len(envelope.signers(allowed, newest.keys)), allowed.threshold


class ReleaseKeys:
    """The release keys in a coordinator's state folder, below ``identity/release``.

    ``roots.json`` has all root metadata, ``root.json`` the newest one, for devices that are to trust it. ``root.key``
    signs changes of keys: it is needed for nothing else and should be kept elsewhere. ``release.key`` signs what the
    coordinator releases by itself; without it, people sign.
    """

    def __init__(self, state: Path) -> None:
        self.folder = state / IDENTITY / "release"
        self.root, self._roots = self.folder / "root.json", self.folder / "roots.json"
        self.root_key, self.release_key = self.folder / "root.key", self.folder / "release.key"
        self._next_key = self.folder / "release.key.next"

    @property
    def online_key(self) -> Path:
        """Where the key is with which the coordinator signs, which systemd may give it as a credential."""
        if self._next_key.exists() and self.exist:  # of a change of keys that was killed before its last step
            made = Key.of(public_bytes(read_key(self._next_key)))
            if made.id in self.newest().roles["targets"].keyids:
                return self._next_key
        return credential(self.release_key)

    @property
    def exist(self) -> bool:
        """Whether the federation signs its releases."""
        return self._roots.exists()

    def create(self, federation: str, now: datetime, public: Sequence[bytes] = (), threshold: int = 1) -> Root:
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
        keys = [*public] if release_key is None else [public_bytes(release_key)]
        by_root = role([public_bytes(root_key)], 1)
        made = root_of(federation, 1, now + ROOT_LIFE, by_root, role(keys, threshold)).with_signature(root_key)
        write_key(self.root_key, root_key, Access.private_in(self.folder))
        if release_key is not None:
            write_key(self.release_key, release_key, Access.private_in(self.folder))
        self._write([made])
        return read(Root, made, "root")

    def roots(self) -> list[Envelope]:
        """All root metadata, the newest last.

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
        """The newest root metadata."""
        return read(Root, self.roots()[-1], str(self._roots))

    def sign(self, path: Path, now: datetime, reported: Scores | None = None) -> tuple[Release, int, int]:
        """Sign a bundle with the release key here, as `sign_bundle`.

        Raises:
            StateError: there is no such key.
        """
        if not self.online_key.exists():
            raise StateError(
                f"{self.release_key}: it is not here, so {path.name} is not signed; 'headwater keys sign {path} --key "
                "FILE' signs it with the key of a person"
            )
        keys, version = [read_key(self.online_key)], self.next_version(now)
        expires = now + RELEASE_LIFE
        return sign_bundle(path, self.roots(), keys, version=version, expires=expires, again=True, reported=reported)

    def next_version(self, now: datetime) -> int:
        """The version of a new release: seconds since 1970, so that people can sign elsewhere; always a larger one."""
        path = self.folder / "version.json"
        private_folder(self.folder)
        with waited_lock(self.folder):
            before = (read_json(path) or {}).get("version", 0)
            if not isinstance(before, int):
                raise StateError(f"{path}: no version; remove it")
            version = max(int(now.timestamp()), before + 1)
            write_private(path, json.dumps({"version": version}).encode())
        return version

    def rotate(
        self,
        now: datetime,
        keys: Sequence[Ed25519PrivateKey],
        *,
        root: tuple[Role, dict[str, Key]] | None = None,
        release: tuple[Role, dict[str, Key]] | None = None,
        own: Ed25519PrivateKey | None = None,
    ) -> Root:
        """Add root metadata with other keys; a role that is not given keeps those it has. Devices follow by a bundle.

        ``own``: the coordinator's new key, which is written before the root that names it.

        Raises:
            UsageError: ``keys`` are not enough of those of the root metadata before, or of the new ones.
        """
        with waited_lock(self.folder):
            roots = self.roots()
            before = read(Root, roots[-1], str(self._roots))
            kept = {name: (before.roles[name], self._keys_of(before, before.roles[name])) for name in ROLES[:2]}
            made = root_of(
                before.federation,
                before.version + 1,
                now + ROOT_LIFE,
                root or kept["root"],
                release or kept["targets"],
            )
            for key in keys:
                made = made.with_signature(key)
            try:
                after = followed(roots, [made])
            except BundleUntrusted as error:
                raise UsageError(f"{error}; name the files of these private keys with --key") from error
            if self.online_key == self._next_key:
                self._take_next()
            if own is not None:
                write_key(self._next_key, own, Access.private_in(self.folder))
            self._write(after)
            if own is not None:
                self._take_next()
        return read(Root, made, "root")

    def _take_next(self) -> None:
        for suffix in (".pub", ""):  # the key last: until then it is found where it is
            next_file = Path(f"{self._next_key}{suffix}")
            if next_file.exists():
                next_file.replace(f"{self.release_key}{suffix}")
        sync_folder(self.folder)

    @staticmethod
    def _keys_of(root: Root, of: Role) -> dict[str, Key]:
        return {name: root.keys[name] for name in of.keyids}

    def _write(self, roots: Sequence[Envelope]) -> None:
        write_private(self._roots, dump(Roots(roots=tuple(roots))))
        write_private(self.root, dump(roots[-1]))


def file_to_release(state: StateFolder, run: str, bundle_id: str, digest: str, now: datetime) -> bytes:
    """The file of a run's bundle as devices are to get it now: the blob ``digest``, or signed with a version of now.

    Devices refuse a version that is older than one they have installed, so each release is signed when it is made:
    here, where the release key is, or before by people, who sign the file in the run's folder.

    Raises:
        UsageError: people have to sign it first; the message has the command.
    """
    keys = ReleaseKeys(state.path)
    if not keys.exist:
        return state.blobs.read(digest)
    if keys.online_key.exists():
        with tempfile.TemporaryDirectory(dir=state.path, prefix=".release-") as folder:
            copy = Path(folder) / f"{run}.hwb"
            copy.write_bytes(state.blobs.read(digest))
            _, count, needed = keys.sign(copy, now, book_of(state.journal).scores(bundle_id))
            if count >= needed:
                return copy.read_bytes()
    path = state.run(run).folder / f"{run}.hwb"
    is_released = any(entry.digest == digest for entry in state.journal.entries(kinds=("release_made",)))
    again = " --again" if is_released else ""
    try:
        if bundles.open_bundle(path).manifest.bundle_id != bundle_id:
            raise BundleUntrusted(f"{path} is another bundle than {bundle_id[:16]}")
        bundles.verify(path, keys.roots()[-1])
        signed = path.read_bytes()
    except BundleError as error:
        raise UsageError(f"{error}; 'headwater keys sign {path} --key FILE{again}' signs it for a release") from error
    if is_released and sha256_of(signed) == digest:
        raise UsageError(
            f"devices that have installed newer releases refuse the version of {path}; 'headwater keys sign {path} "
            "--key FILE --again' gives it a new one, then repeat this command"
        )
    return signed
