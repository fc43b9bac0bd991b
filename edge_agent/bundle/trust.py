"""Who may release bundles to a device: signed metadata in the form of The Update Framework (TUF), without its servers.

*Root* metadata name the keys of a federation, and how many of them have to sign. A *release* (TUF's role "targets")
names the files of one bundle with sizes and hashes, a version that only grows, and an end. Both are Ed25519 signatures
over canonical JSON, which TUF's own tools verify as well. A bundle file carries its release and all roots so far: a
device that was off follows from the root that it trusts to the newest one, each signed by its predecessor's keys too.

A release is installed until it expires, and serves for as long as the device likes: no clock and no later change of
keys takes a working encoder away. The device keeps the newest release that it has installed and refuses older ones. An
operator goes back by signing the older bundle again, with a new version. That floor counts while one of its signers
still signs releases: as in TUF, once all keys that drove a version up have been replaced, it does not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.errors import BundleOlder, BundleUntrusted, StateError, cause
from ..core.storage import read_regular, sha256_file, write_private
from ..core.task import Frozen, parse_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_BYTES = 256 * 1024
"""Of a release with its roots in a bundle: of 3 keys in each role, some 80 changes of keys."""

_TIME_STEP_S = 3600
"""Times less than this after the one that is noted are not noted."""

MOST_KEYS = 16
MOST_ROOTS = 256
"""In a bundle."""

SPEC_VERSION = "1.0.31"
"""Of TUF, whose form this is."""

Purpose: TypeAlias = Literal["release", "round"]
RoleName: TypeAlias = Literal["root", "targets", "timestamp", "snapshot"]
ROLES: tuple[RoleName, ...] = ("root", "targets", "timestamp", "snapshot")
"""Roles of TUF. The last two have the keys of releases: there is no server whose lists they would sign."""

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Moment = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Version = Annotated[int, Field(ge=1, le=1 << 53)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,98}$")]
KeyName = Annotated[str, Field(pattern=r"^[\w.@+-]([\w .@+-]{0,62}[\w.@+-])?$", description="of a key, for people")]


class _Open(BaseModel):
    """Metadata may hold more than this version knows: signatures cover it, and it is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class _Public(_Open):
    public: Hex


class Key(_Open):
    """A public key."""

    keytype: Literal["ed25519"] = "ed25519"
    scheme: Literal["ed25519"] = "ed25519"
    keyval: _Public

    @classmethod
    def of(cls, public: bytes) -> Key:
        """Return the key with these 32 bytes."""
        return cls(keyval=_Public(public=public.hex()))

    @property
    def id(self) -> str:
        """SHA-256 of the key, as TUF names it."""
        return hashlib.sha256(canonical(self.model_dump())).hexdigest()


class Role(_Open):
    """Keys, and how many of them have to sign."""

    keyids: tuple[Hex, ...] = Field(min_length=1, max_length=MOST_KEYS)
    threshold: int = Field(ge=1, le=MOST_KEYS)


class Root(_Open):
    """The keys of a federation."""

    kind: Literal["root"] = Field("root", alias="_type")
    version: Version
    expires: Moment
    keys: dict[Hex, Key] = Field(max_length=2 * MOST_KEYS)
    roles: dict[RoleName, Role]
    federation: Name
    names: dict[Hex, KeyName] = Field(default_factory=dict, max_length=2 * MOST_KEYS)

    def named(self, keyid: str) -> str:
        """Return a key as people are shown it: its name, and the beginning of its id."""
        name = self.names.get(keyid)
        return f"{keyid[:16]}…" if name is None else f"{name} ({keyid[:8]}…)"


class _Hashes(_Open):
    sha256: Hex


class Target(_Open):
    """One file."""

    length: int = Field(ge=0)
    hashes: _Hashes

    @classmethod
    def of(cls, length: int, sha256: str) -> Target:
        """Return the file with this many bytes and this SHA-256 (hex)."""
        return cls(length=length, hashes=_Hashes(sha256=sha256))


class Scores(_Open):
    """acc.personal (0..1) of clients, each on its own held-out samples; no client is named."""

    clients: int = Field(ge=1, description="clients that measured it")
    support: int = Field(ge=0, description="their held-out samples; 0: not counted")
    mean: float = Field(ge=0, le=1, description="over clients")
    worst_tenth: float = Field(ge=0, le=1, description="mean of the lowest tenth of clients, at least one")

    @classmethod
    def of(cls, measured: Sequence[tuple[float, int]]) -> Scores | None:
        """Those of clients with this accuracy on so many samples each; None where there is no client."""
        if not measured:
            return None
        ranked = sorted(share for share, _ in measured)
        worst = ranked[: math.ceil(len(ranked) / 10)]
        return cls(
            clients=len(ranked),
            support=sum(support for _, support in measured),
            mean=round(math.fsum(ranked) / len(ranked), 6),
            worst_tenth=round(math.fsum(worst) / len(worst), 6),
        )

    def __str__(self) -> str:
        of = f", {self.support} held-out samples" if self.support else ""
        return f"mean {self.mean:.3f}, worst tenth {self.worst_tenth:.3f} ({self.clients} client(s){of})"


class Release(_Open):
    """What may be installed."""

    kind: Literal["targets"] = Field("targets", alias="_type")
    version: Version
    expires: Moment
    targets: dict[FileName, Target] = Field(max_length=80)
    federation: Name
    bundle_id: Hex
    task: Hex
    min_agent: str = Field(pattern=r"^\d{1,4}(\.\d{1,4}){0,3}$", description="oldest version of the agent")
    purpose: Purpose = Field(
        "release", description="release: for use on devices; round: for one round of training, and never installed"
    )
    reported: Scores | None = Field(
        None, description="what devices that had installed the bundle before reported; None: none had"
    )


class Signature(Frozen):
    """One signature, in hexadecimal."""

    keyid: Hex
    sig: str = Field(pattern=r"^[0-9a-f]{128}$")


class Envelope(Frozen):
    """Metadata with the signatures over it."""

    signatures: tuple[Signature, ...] = Field(max_length=2 * MOST_KEYS)
    signed: dict[str, Any]

    def signers(self, role: Role, keys: Mapping[str, Key]) -> set[str]:
        """Ids of those keys of a role that have signed this."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        content = canonical(self.signed)
        valid = set[str]()
        for signature in self.signatures:
            key = keys.get(signature.keyid)
            # By the id that follows from the key: one key under two names would count twice.
            if key is None or key.id != signature.keyid or signature.keyid not in role.keyids:
                continue
            try:
                Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.keyval.public)).verify(
                    bytes.fromhex(signature.sig), content
                )
            except InvalidSignature:
                continue
            valid.add(signature.keyid)
        return valid

    def with_signature(self, key: Ed25519PrivateKey) -> Envelope:
        """Return the same metadata, signed with this key as well."""
        known = Key.of(public_bytes(key))
        made = Signature(keyid=known.id, sig=key.sign(canonical(self.signed)).hex())
        others = (one for one in self.signatures if one.keyid != known.id)
        return self.model_copy(update={"signatures": tuple(sorted((*others, made), key=lambda one: one.keyid))})


class Member(Frozen):
    """What a bundle file carries: its release, and the federation's roots, of which the newest that have room."""

    release: Envelope
    roots: tuple[Envelope, ...] = Field(min_length=1, max_length=MOST_ROOTS)


Metadata = TypeVar("Metadata", Root, Release)
Content = TypeVar("Content", bound=Frozen)


def canonical(content: Mapping[str, Any]) -> bytes:
    """Canonical JSON, for metadata without control characters in texts that of TUF."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the 32 bytes of a private key's public half."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def unsigned(metadata: Root | Release) -> Envelope:
    """Metadata that nobody has signed yet."""
    more = {"spec_version": SPEC_VERSION, **({"consistent_snapshot": False} if isinstance(metadata, Root) else {})}
    return Envelope(signatures=(), signed={**metadata.model_dump(mode="json", by_alias=True), **more})


def dump(content: Frozen) -> bytes:
    """Return a file of metadata; equal ones give equal bytes."""
    return canonical(content.model_dump(mode="json")) + b"\n"


def parse(kind: type[Content], raw: bytes, where: str) -> Content:
    """Return the content of a file of metadata.

    Raises:
        BundleUntrusted: The bytes are not signed metadata of this kind.
    """
    if len(raw) > MAX_BYTES:
        raise BundleUntrusted(f"{where}: metadata of {len(raw)} bytes, at most {MAX_BYTES} are read", is_public=True)
    try:
        result = kind.model_validate(parse_json(raw))
        if dump(result) == raw:
            return result
        why = "not written as headwater writes them"
    except ValidationError as error:
        why = f"{_wrong(error)} is wrong or missing"
    except (ValueError, RecursionError) as error:
        why = str(error).partition("\n")[0]
    raise BundleUntrusted(f"{where}: metadata cannot be read: {why}; fetch them again", is_public=True)


def read(kind: type[Metadata], envelope: Envelope, what: str) -> Metadata:
    """Return what an envelope holds, whoever has signed it.

    Raises:
        BundleUntrusted: The envelope holds metadata of another kind.
    """
    try:
        return kind.model_validate(envelope.signed)
    except ValidationError as error:
        raise BundleUntrusted(
            f"{what}: no such metadata: {_wrong(error)} is wrong or missing", is_public=True
        ) from error


def _wrong(error: ValidationError) -> str:
    return ", ".join(sorted({".".join(map(str, detail["loc"])) for detail in error.errors()}))[:200]


def check_signed(envelope: Envelope, by: Root, role: RoleName, what: str) -> None:
    """Return where enough keys of a role have signed.

    Raises:
        BundleUntrusted: Fewer keys than the threshold have signed.
    """
    expected = by.roles.get(role)
    if expected is None:
        raise BundleUntrusted(f"root {by.version} has no role '{role}'", is_public=True)
    count = len(envelope.signers(expected, by.keys))
    if count < expected.threshold:
        raise BundleUntrusted(
            f"{what} is signed by {count} of the keys of root {by.version} of federation '{by.federation}', "
            f"{expected.threshold} of {len(set(expected.keyids))} are needed; ask that federation's operator for one "
            "with more signatures",
            is_public=True,
        )


def followed(trusted: Sequence[Envelope], offered: Iterable[Envelope]) -> list[Envelope]:
    """Return the trusted roots and those that follow them among the offered ones, in order of their versions.

    Raises:
        BundleUntrusted: A root is not signed by the thresholds of its predecessor and its own, or a version is missing.
    """
    result = [*trusted]
    known = {envelope.signed.get("version"): envelope for envelope in trusted}
    newest = read(Root, result[-1], "trusted root")
    for envelope in offered:
        root = read(Root, envelope, "root")
        what = f"root {root.version}"
        if root.federation != newest.federation:
            raise BundleUntrusted(
                f"{what} is of federation '{root.federation}', trusted is '{newest.federation}'; expected a bundle or "
                "root of that one",
                is_public=True,
            )
        if known.get(root.version, envelope).signed != envelope.signed:
            raise BundleUntrusted(
                f"{what} of federation '{root.federation}' is another one than that trusted: it is of another "
                "federation of that name; expected one that the trusted keys have signed",
                is_public=True,
            )
        if root.version <= newest.version:
            continue
        if root.version != newest.version + 1:
            raise BundleUntrusted(f"{what} follows root {newest.version}: those between are missing", is_public=True)
        check_signed(envelope, newest, "root", what)
        check_signed(envelope, root, "root", what)
        result.append(envelope)
        newest = root
    return result


def signed_by(member: Member) -> dict[str, Any]:
    """Who has signed a bundle's release, as JSON, by the newest root that the bundle carries.

    Raises:
        BundleUntrusted: The metadata cannot be parsed.
    """
    release = read(Release, member.release, "release")
    root = read(Root, member.roots[-1], "root")
    expected = root.roles["targets"]
    signers = sorted(member.release.signers(expected, root.keys))
    return {
        "version": release.version,
        "expires": release.expires,
        "root": root.version,
        "threshold": expected.threshold,
        "keys": len(expected.keyids),
        "signers": [{"id": keyid, "name": root.names.get(keyid)} for keyid in signers],
    }


@dataclass(frozen=True)
class Files:
    """What a bundle is: id, digest of its task, and its files, the manifest among them."""

    bundle_id: str
    task: str
    files: Mapping[str, Target]

    def check(self, release: Release) -> None:
        """Return where a release is that of this bundle.

        Raises:
            BundleUntrusted: The release belongs to another bundle.
        """
        if (release.bundle_id, release.task, release.targets) != (self.bundle_id, self.task, dict(self.files)):
            different = sorted(
                name for name in {*release.targets, *self.files} if release.targets.get(name) != self.files.get(name)
            )
            raise BundleUntrusted(
                f"bundle {self.bundle_id[:16]}…: its release is of bundle {release.bundle_id[:16]}… "
                f"(different: {', '.join(different[:5]) or 'task'}); fetch the bundle again",
                is_public=True,
            )


def verified(member: Member, files: Files, root: Root) -> Release:
    """Return the release of a bundle, signed by the keys of ``root``. Its expiry and version are not looked at.

    Raises:
        BundleUntrusted: The release is not signed by the keys of ``root``, or belongs to another bundle or federation.
    """
    release = read(Release, member.release, "release")
    check_signed(member.release, root, "targets", f"the release of bundle {files.bundle_id[:16]}…")
    if release.federation != root.federation:
        raise BundleUntrusted(
            f"the release is of federation '{release.federation}', trusted is '{root.federation}'; expected a bundle "
            "of that one",
            is_public=True,
        )
    files.check(release)
    return release


def signed_at(release: Release) -> float:
    """The Unix time at which a release was signed, which its version is; 0 where that is no time before its end."""
    return release.version if release.version < seconds(release.expires) else 0.0


def needs_newer(release: Release, agent: str) -> bool:
    """Return whether a release needs a newer version of headwater than this one."""
    return _numbers(agent) < _numbers(release.min_agent)


def check_installable(release: Release, root: Root, now: float, agent: str, seen: float = 0.0) -> None:
    """Return where a verified release may be installed now by an agent of this version.

    ``seen``: the newest time that is known to be over, which counts where the clock (``now``) is behind it.

    Raises:
        BundleUntrusted: The release or its root has expired, or the release needs a newer agent.
    """
    for what, expires in (("release", release.expires), ("root", root.expires)):
        if max(now, seen) >= seconds(expires):
            behind = f", and {moment(seen)} is over by what was installed here" if seen > now else ""
            raise BundleUntrusted(
                f"the {what} expired at {expires}, and this device's clock says {moment(now)}{behind}: it is not "
                "installed, what runs stays; set the clock if it is wrong, else ask the operator of federation "
                f"'{release.federation}' to sign it again",
                is_public=True,
            )
    if needs_newer(release, agent):
        raise BundleUntrusted(
            f"the release needs agents of version {release.min_agent}, this is {agent}; upgrade headwater here",
            is_public=True,
        )


def _numbers(version: str) -> list[int]:
    parts = ("".join(c for c in part if c.isdigit()) for part in version.split("."))
    numbers = [int(part or 0) for part in parts]
    return [*numbers, 0, 0, 0, 0][:4]


def moment(unix_s: float) -> str:
    """Return a time as metadata write it."""
    return datetime.fromtimestamp(min(max(unix_s, 0), 253_402_300_799), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Return the Unix time of a `moment`; 0, long ago, where no calendar has it."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return 0.0


class Roots(Frozen):
    """The roots that a device has trusted, the newest last."""

    roots: tuple[Envelope, ...] = Field(min_length=1, max_length=1024)
    before: tuple[Hex, ...] = Field(
        (), description="SHA-256 of manifests that were installed before anybody was trusted"
    )


def roots_in(path: Path) -> tuple[Envelope, ...]:
    """Return the roots in a file root.json or roots.json of a federation, or in all such files of a folder, by version.

    Raises:
        BundleUntrusted: The files hold no root, or two different roots of one version.
        OSError: A file cannot be read.
    """
    if path.is_dir():
        roots = [root for file in sorted(path.glob("*.json")) for root in roots_in(file)]
    else:
        raw = read_regular(path)
        try:
            roots = [parse(Envelope, raw, str(path))]
        except BundleUntrusted as error:
            try:
                roots = [*parse(Roots, raw, str(path)).roots]
            except BundleUntrusted:
                raise error from None
    versions = {read(Root, one, str(path)).version: one for one in roots}
    if not roots or any(versions[read(Root, one, "root").version].signed != one.signed for one in roots):
        what = "two roots of one version" if roots else "no root"
        raise BundleUntrusted(f"{path}: {what}; expected root.json or roots.json of one federation")
    return tuple(versions[number] for number in sorted(versions))


class TrustStore:
    """What a folder of bundles trusts: ``roots.json``, and ``newest.json``, the newest release installed there.

    Without the first file nothing is trusted, and nothing is verified. ``time`` is the newest time at which a release
    was good: a clock that is behind does not bring back what has expired. What a clock that is ahead says is not noted
    where releases have expired by it, so it is never later than the end of one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._roots = folder / "roots.json"
        self._newest = folder / "newest.json"
        self._clock = folder / "time"

    def known(self) -> Roots | None:
        """Return the trusted roots; None where nothing is trusted.

        Raises:
            StateError: The file of trusted roots is damaged.
        """
        raw = _read(self._roots)
        try:
            return None if raw is None else Roots.model_validate(parse_json(raw))
        except (ValueError, RecursionError) as error:
            raise StateError(
                f"{self._roots}: damaged; remove it, and let this device trust its root again ('edge-agent enroll', "
                "bundle.trust, or 'edge-agent import --root')"
            ) from error

    def newest_root(self) -> Root | None:
        """Return the root that counts now; None where nothing is trusted."""
        known = self.known()
        return None if known is None else read(Root, known.roots[-1], str(self._roots))

    def anchor(self, root: Envelope, between: Iterable[Envelope] = ()) -> None:
        """Trust this root, of whose origin the caller is sure. Bundles that are here already may go on serving.

        Where another one is trusted here already, that has to lead to it, through roots of ``between`` where there were
        several changes; these may come from anywhere, for each is signed by the keys of its predecessor.

        Raises:
            BundleUntrusted: The root is not signed by its own keys.
            StateError: Another root is trusted here already and this one does not follow it, or roots between the two
                are missing.
        """
        known = self.known()
        if known is not None and any(one.signed == root.signed for one in known.roots):
            return
        made = read(Root, root, "root")
        if known is None:
            check_signed(root, made, "root", f"root {made.version}")
            digests = (sha256_file(path) for path in sorted(self._folder.glob("*/manifest.json")))
            self._write_roots(Roots(roots=(root,), before=tuple(digests)))
            return
        newest = read(Root, known.roots[-1], str(self._roots))
        advice = f"remove {self._roots} to trust another federation"
        if made.version <= newest.version:
            raise StateError(
                f"this device trusts root {newest.version} of federation '{newest.federation}', which does not come "
                f"from root {made.version} of '{made.federation}'; {advice}"
            )
        steps = {envelope.signed.get("version"): envelope for envelope in between}
        missed = range(newest.version + 1, made.version)
        if made.federation == newest.federation and (lacking := [str(one) for one in missed if one not in steps]):
            raise StateError(
                f"this device trusts root {newest.version} of federation '{newest.federation}', root {made.version} "
                f"is {len(missed) + 1} changes of keys later: root {', '.join(lacking)} is missing; bring roots.json, "
                "which has them all, from the coordinator's state folder (identity/release/roots.json), or a bundle "
                "that was signed since"
            )
        try:
            chain = [*(steps[one] for one in missed if one in steps), root]
            self._write_roots(known.model_copy(update={"roots": tuple(followed(known.roots, chain))}))
        except BundleUntrusted as error:
            raise StateError(f"{error}; {advice}") from error

    def follow(self, offered: Iterable[Envelope]) -> None:
        """Trust the newer ones of these roots that follow from those that are trusted.

        Raises:
            BundleUntrusted: A newer root does not follow from its predecessor.
        """
        if (known := self.known()) is None:
            return
        if len(roots := followed(known.roots, offered)) > len(known.roots):
            self._write_roots(known.model_copy(update={"roots": tuple(roots)}))

    def admit(
        self,
        raw: bytes | None,
        files: Files,
        now: float,
        agent: str,
        first: Envelope | None = None,
        purpose: Purpose = "release",
    ) -> Member | None:
        """The metadata of a bundle that may be installed here; None where nothing is trusted. Newer roots are followed.

        ``first``: the root that counts where none is trusted yet; it is not trusted by this.

        Raises:
            BundleUntrusted: The bundle may not be installed; the message says why.
        """
        known = self.known() or (None if first is None else Roots(roots=(first,)))
        if known is None:
            return None
        if raw is None:
            raise BundleUntrusted(
                f"bundle {files.bundle_id[:16]}… is not signed, and this device trusts federation "
                f"'{read(Root, known.roots[-1], 'root').federation}' alone; ask its operator for a "
                "signed bundle",
                is_public=True,
            )
        member = parse(Member, raw, "release")
        self.follow(member.roots)
        root = read(Root, followed(known.roots, member.roots)[-1], "root")
        release = verified(member, files, root)
        newest = self.newest(root)
        if (
            purpose == "release"  # rounds of several runs may come in any order
            and newest is not None
            and (
                release.version < newest[0].version
                or (release.version == newest[0].version and member.release.signed != newest[1].signed)
            )
        ):  # before its end: the coordinator signs again what is older
            raise BundleOlder(
                f"version {release.version} of bundle {files.bundle_id[:16]}… is older than version "
                f"{newest[0].version}, which was installed here; to go back, the operator signs the older bundle again "
                "with a new version ('headwater keys sign --again')",
                is_public=True,
            )
        seen = max(self._seen(root), signed_at(release))
        check_installable(release, root, now, agent, seen)
        if release.purpose != purpose:
            raise BundleUntrusted(
                f"bundle {files.bundle_id[:16]}… is signed for purpose '{release.purpose}', it came for '{purpose}'",
                is_public=True,
            )
        if now - self._time() >= _TIME_STEP_S and self.known() is not None:
            write_private(self._clock, moment(now).encode())
        return member

    def check_loaded(self, raw: bytes | None, files: Files) -> None:
        """Return where a bundle that was installed here may serve: its release counted under a root trusted here.

        Raises:
            BundleUntrusted: The release did not count under any root that is trusted here.
        """
        known = self.known()
        if known is None or files.files["manifest.json"].hashes.sha256 in known.before:
            return
        if raw is None:
            raise BundleUntrusted(f"bundle {files.bundle_id[:16]}… is not signed; install a signed one", is_public=True)
        member = parse(Member, raw, "release")
        problems = list[BundleUntrusted]()
        for envelope in reversed(known.roots):
            try:
                verified(member, files, read(Root, envelope, "root"))
            except BundleUntrusted as error:
                problems.append(error)
            else:
                return
        raise problems[0]

    def described(self, now: float) -> dict[str, Any]:
        """Return what is trusted, and the newest release that was installed, as JSON; ``now``: Unix time."""
        if (root := self.newest_root()) is None:
            return {"root": None}
        newest = self.newest(root)
        result: dict[str, Any] = {"root": root.version, "federation": root.federation, "version": None}
        if newest is not None:
            expires = newest[0].expires
            expired = max(now, self._seen(root)) >= seconds(expires)
            result |= {"version": newest[0].version, "expires": expires, "expired": expired}
        return result

    def record(self, member: Member) -> None:
        """From now on, refuse releases older than this one."""
        write_private(self._newest, dump(member.release))

    def newest(self, root: Root) -> tuple[Release, Envelope] | None:
        """The newest release that was installed here; None where there is none that one of ``root``'s keys has signed.

        One is enough, whatever the threshold: a change of some of the keys is no reason to take an older release.

        Raises:
            StateError: The file is damaged; without it an older release could be installed.
        """
        raw = _read(self._newest)
        if raw is None:
            return None
        try:
            envelope = parse(Envelope, raw, str(self._newest))
        except BundleUntrusted as error:
            raise StateError(f"{error}; remove that file to take any release that is signed") from error
        signing = root.roles.get("targets")
        if signing is None or not envelope.signers(signing, root.keys):
            return None
        return read(Release, envelope, str(self._newest)), envelope

    def _seen(self, root: Root) -> float:
        """Return the newest time that is over by what was verified here; Unix time, 0 where there is none."""
        newest = self.newest(root)
        return max(self._time(), 0.0 if newest is None else signed_at(newest[0]))

    def _time(self) -> float:
        return seconds((_read(self._clock) or b"").decode(errors="replace"))

    def _write_roots(self, known: Roots) -> None:
        write_private(self._roots, dump(known))


def _read(path: Path) -> bytes | None:
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {cause(error)}; it decides whom this device trusts") from error
