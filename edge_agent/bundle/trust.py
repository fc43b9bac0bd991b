"""Signatures of bundles, which decide who may release to a device: metadata of The Update Framework (TUF), no servers.

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
from ..core.worst_tenth import mean_of_worst_tenth
from ..identity.signed_request import METADATA, canonical

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_BYTES = 256 * 1024
"""The most bytes of a release with its roots in a bundle: with 3 keys in each role, some 80 changes of keys."""

_TIME_STEP_S = 3600
"""Seconds that must have passed since the noted time before a later one is noted."""

MOST_KEYS = 16
"""The most keys of a role."""

MOST_ROOTS = 256
"""The most roots that a bundle carries."""

SPEC_VERSION = "1.0.31"
"""The version of TUF's specification whose form the metadata have."""

Purpose: TypeAlias = Literal["release", "round"]
RoleName: TypeAlias = Literal["root", "targets", "timestamp", "snapshot"]
ROLES: tuple[RoleName, ...] = ("root", "targets", "timestamp", "snapshot")
"""The roles of TUF. The last two have the keys of releases: there is no server whose lists they would sign."""

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Moment = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Version = Annotated[int, Field(ge=1, le=1 << 53)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,98}$")]
KeyName = Annotated[str, Field(pattern=r"^[\w.@+-]([\w .@+-]{0,62}[\w.@+-])?$", description="of a key, for people")]


class _Open(BaseModel):
    """Base of metadata, which may have fields of later versions: signatures cover these, and they are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class _Public(_Open):
    public: Hex


class Key(_Open):
    """A public key of Ed25519."""

    keytype: Literal["ed25519"] = "ed25519"
    scheme: Literal["ed25519"] = "ed25519"
    keyval: _Public

    @classmethod
    def of(cls, public: bytes) -> Key:
        """Return the public key with these 32 bytes."""
        return cls(keyval=_Public(public=public.hex()))

    @property
    def id(self) -> str:
        """The id that TUF gives the key: the SHA-256 (hex) of its canonical JSON."""
        return hashlib.sha256(canonical(self.model_dump())).hexdigest()


class Role(_Open):
    """The keys of a role, and how many of them have to sign."""

    keyids: tuple[Hex, ...] = Field(min_length=1, max_length=MOST_KEYS)
    threshold: int = Field(ge=1, le=MOST_KEYS)


class Root(_Open):
    """The keys of a federation, by role."""

    kind: Literal["root"] = Field("root", alias="_type")
    version: Version
    expires: Moment
    keys: dict[Hex, Key] = Field(max_length=2 * MOST_KEYS)
    roles: dict[RoleName, Role]
    federation: Name
    names: dict[Hex, KeyName] = Field(default_factory=dict, max_length=2 * MOST_KEYS)

    def named(self, keyid: str) -> str:
        """Return a key in the form for people: its name and the beginning of its id."""
        name = self.names.get(keyid)
        return f"{keyid[:16]}…" if name is None else f"{name} ({keyid[:8]}…)"


class _Hashes(_Open):
    sha256: Hex


class Target(_Open):
    """Size and hash of one file of a bundle."""

    length: int = Field(ge=0)
    hashes: _Hashes

    @classmethod
    def of(cls, length: int, sha256: str) -> Target:
        """Return the target of a file of ``length`` bytes with this SHA-256 (hex)."""
        return cls(length=length, hashes=_Hashes(sha256=sha256))


class Scores(_Open):
    """The accuracies acc.personal (0..1) of clients, each on its own held-out samples; no client is named."""

    clients: int = Field(ge=1, description="clients that measured it")
    support: int = Field(ge=0, description="their held-out samples; 0: not counted")
    mean: float = Field(ge=0, le=1, description="over clients")
    worst_tenth: float = Field(ge=0, le=1, description="mean of the lowest tenth of clients, at least one")

    @classmethod
    def of(cls, measured: Sequence[tuple[float, int]]) -> Scores | None:
        """Summarize pairs of a client's accuracy and its number of held-out samples; None where there is no client."""
        if not measured:
            return None
        ranked = sorted(share for share, _ in measured)
        return cls(
            clients=len(ranked),
            support=sum(support for _, support in measured),
            mean=round(math.fsum(ranked) / len(ranked), 6),
            worst_tenth=round(mean_of_worst_tenth(ranked), 6),
        )

    def __str__(self) -> str:
        samples = f", {self.support} held-out samples" if self.support else ""
        return f"mean {self.mean:.3f}, worst tenth {self.worst_tenth:.3f} ({self.clients} client(s){samples})"


class Release(_Open):
    """The permission to install one bundle until a time, which the keys of a federation sign."""

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
    """One signature of metadata, in hexadecimal."""

    keyid: Hex
    sig: str = Field(pattern=r"^[0-9a-f]{128}$")


class Envelope(Frozen):
    """Metadata with the signatures over them."""

    signatures: tuple[Signature, ...] = Field(max_length=2 * MOST_KEYS)
    signed: dict[str, Any]

    def signers(self, role: Role, keys: Mapping[str, Key]) -> set[str]:
        """Return the ids of those keys of a role that have signed this."""
        content = canonical(self.signed)
        valid = set[str]()
        for signature in self.signatures:
            key = keys.get(signature.keyid)
            # By the id that follows from the key: one key under two names would count twice.
            if key is None or key.id != signature.keyid or signature.keyid not in role.keyids:
                continue
            if METADATA.is_valid(bytes.fromhex(key.keyval.public), bytes.fromhex(signature.sig), content):
                valid.add(signature.keyid)
        return valid

    def with_signature(self, key: Ed25519PrivateKey) -> Envelope:
        """Return the same metadata, signed with this key as well."""
        keyid = Key.of(public_bytes(key)).id
        signature = Signature(keyid=keyid, sig=METADATA.sign(key, canonical(self.signed)).hex())
        # A signature with the same key is replaced.
        earlier = [present for present in self.signatures if present.keyid != keyid]
        signatures = sorted((*earlier, signature), key=lambda signature: signature.keyid)
        return self.model_copy(update={"signatures": tuple(signatures)})


class Member(Frozen):
    """The signatures in a bundle file: its release, and the federation's newest roots, as many as there is room for."""

    release: Envelope
    roots: tuple[Envelope, ...] = Field(min_length=1, max_length=MOST_ROOTS)


Metadata = TypeVar("Metadata", Root, Release)
Content = TypeVar("Content", bound=Frozen)


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the 32 bytes of a private key's public half."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def unsigned(metadata: Root | Release) -> Envelope:
    """Return an envelope for metadata without any signature."""
    signed = metadata.model_dump(mode="json", by_alias=True)
    signed["spec_version"] = SPEC_VERSION
    if isinstance(metadata, Root):
        signed["consistent_snapshot"] = False
    return Envelope(signatures=(), signed=signed)


def dump(content: Frozen) -> bytes:
    """Return the content of a file of metadata; equal metadata give equal bytes."""
    return canonical(content.model_dump(mode="json")) + b"\n"


def parse(kind: type[Content], raw: bytes, where: str) -> Content:
    """Return the metadata in the bytes of a file; ``where`` names the file in messages.

    Raises:
        BundleUntrusted: The bytes are not signed metadata of this kind.
    """
    if len(raw) > MAX_BYTES:
        raise BundleUntrusted(f"{where}: metadata of {len(raw)} bytes, at most {MAX_BYTES} are read", is_public=True)
    try:
        result = kind.model_validate(parse_json(raw))
        if dump(result) == raw:
            return result
        reason = "not written as headwater writes them"
    except ValidationError as error:
        reason = f"{_wrong(error)} is wrong or missing"
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
    raise BundleUntrusted(f"{where}: metadata cannot be read: {reason}; fetch them again", is_public=True)


def read(kind: type[Metadata], envelope: Envelope, what: str) -> Metadata:
    """Return the metadata in an envelope, whoever has signed it; ``what`` names it in messages.

    Raises:
        BundleUntrusted: The envelope holds metadata of another kind.
    """
    try:
        return kind.model_validate(envelope.signed)
    except ValidationError as error:
        raise BundleUntrusted(
            f"{what}: the metadata are of another kind: {_wrong(error)} is wrong or missing", is_public=True
        ) from error


def _wrong(error: ValidationError) -> str:
    """Return the names of the fields that are wrong, 200 characters at most: a peer's own text is not repeated."""
    return ", ".join(sorted({".".join(map(str, detail["loc"])) for detail in error.errors()}))[:200]


def check_signed(envelope: Envelope, by: Root, role: RoleName, what: str) -> None:
    """Require that enough keys of a role of the root ``by`` have signed an envelope.

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


def follow_roots(trusted: Sequence[Envelope], offered: Iterable[Envelope]) -> list[Envelope]:
    """Return the trusted roots and those that follow them among the offered ones, in order of their versions.

    Raises:
        BundleUntrusted: A root is not signed by the thresholds of its predecessor and its own, or a version is missing.
    """
    result = [*trusted]
    trusted_by_version = {envelope.signed.get("version"): envelope for envelope in trusted}
    newest = read(Root, result[-1], "trusted root")
    for envelope in offered:
        root = read(Root, envelope, "root")
        root_name = f"root {root.version}"
        if root.federation != newest.federation:
            raise BundleUntrusted(
                f"{root_name} is of federation '{root.federation}', trusted is '{newest.federation}'; expected a "
                "bundle or root of that one",
                is_public=True,
            )
        if trusted_by_version.get(root.version, envelope).signed != envelope.signed:
            raise BundleUntrusted(
                f"{root_name} of federation '{root.federation}' differs from the trusted one: it is of another "
                "federation of that name; expected one that the trusted keys have signed",
                is_public=True,
            )
        if root.version <= newest.version:
            continue
        # A change of keys counts only if the keys before and the keys after it have signed the new root.
        if root.version != newest.version + 1:
            raise BundleUntrusted(
                f"{root_name} follows root {newest.version}: those between are missing", is_public=True
            )
        check_signed(envelope, newest, "root", root_name)
        check_signed(envelope, root, "root", root_name)
        result.append(envelope)
        newest = root
    return result


def signed_by(member: Member) -> dict[str, Any]:
    """Return who has signed a bundle's release, as JSON, by the newest root that the bundle carries.

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
    """The part of a bundle that signatures cover: its id, the SHA-256 of its task, and its files with the manifest."""

    bundle_id: str
    task: str
    files: Mapping[str, Target]

    def check(self, release: Release) -> None:
        """Require that a release is that of this bundle.

        Raises:
            BundleUntrusted: The release belongs to another bundle.
        """
        if (release.bundle_id, release.task, release.targets) == (self.bundle_id, self.task, dict(self.files)):
            return
        names = {*release.targets, *self.files}
        different = sorted(name for name in names if release.targets.get(name) != self.files.get(name))
        raise BundleUntrusted(
            f"bundle {self.bundle_id[:16]}…: its release is of bundle {release.bundle_id[:16]}… "
            f"(different: {', '.join(different[:5]) or 'task'}); fetch the bundle again",
            is_public=True,
        )


def verify_release(member: Member, files: Files, root: Root) -> Release:
    """Return the release of a bundle, verified to be signed by the keys of ``root``; its expiry is not checked.

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
    """Return the Unix time at which a release was signed, which is its version; 0 if that is not before its expiry."""
    return release.version if release.version < seconds(release.expires) else 0.0


def needs_newer(release: Release, agent: str) -> bool:
    """Return whether a release needs a newer version of headwater than this one."""
    return _numbers(agent) < _numbers(release.min_agent)


def check_installable(release: Release, root: Root, now: float, agent: str, seen: float = 0.0) -> None:
    """Require that a verified release may be installed now by an agent of this version.

    Args:
        release: The release.
        root: The root whose keys have signed it.
        now: The time by this device's clock, in seconds since 1970.
        agent: The version of the agent.
        seen: The newest time that is known to be over, which counts where the clock is behind it.

    Raises:
        BundleUntrusted: The release or its root has expired, or the release needs a newer agent.
    """
    for role, expires in (("release", release.expires), ("root", root.expires)):
        if max(now, seen) >= seconds(expires):
            behind = f", and {moment(seen)} is over, as releases installed here show" if seen > now else ""
            raise BundleUntrusted(
                f"the {role} expired at {expires}, and this device's clock says {moment(now)}{behind}: it is not "
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
    """Return the first four numbers of a version, 0 for those that it does not have."""
    parts = ("".join(c for c in part if c.isdigit()) for part in version.split("."))
    numbers = [int(part or 0) for part in parts]
    return [*numbers, 0, 0, 0, 0][:4]


def moment(unix_s: float) -> str:
    """Return a Unix time in the form of metadata, ``2030-01-31T02:00:00Z``."""
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
        roots: list[Envelope] = []
        for file in sorted(path.glob("*.json")):
            roots += roots_in(file)
    else:
        roots = _roots_in_file(path)
    if not roots:
        raise BundleUntrusted(f"{path}: no root; expected root.json or roots.json of one federation")
    by_version: dict[int, Envelope] = {}
    for root in roots:
        version = read(Root, root, str(path)).version
        if by_version.setdefault(version, root).signed != root.signed:
            raise BundleUntrusted(
                f"{path}: two roots of one version; expected root.json or roots.json of one federation"
            )
        by_version[version] = root
    return tuple(by_version[version] for version in sorted(by_version))


def _roots_in_file(path: Path) -> list[Envelope]:
    """Return the roots in a file of one root, or in one of all roots that a device has trusted."""
    raw = read_regular(path)
    try:
        return [parse(Envelope, raw, str(path))]
    except BundleUntrusted as error:
        try:
            return [*parse(Roots, raw, str(path)).roots]
        except BundleUntrusted:
            raise error from None


class TrustStore:
    """The trust of a folder of bundles: its roots, the newest release installed there, and the newest known time.

    ``roots.json`` holds the roots; without it nothing is trusted, and nothing is verified. ``newest.json`` holds the
    newest release. ``time`` holds the newest time at which a release was valid, so that a clock that is behind does not
    bring back an expired one. The time of a clock that is ahead is not noted where releases have expired by it, so the
    noted time is never later than the expiry of one.
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
        known_roots = self.known()
        return None if known_roots is None else read(Root, known_roots.roots[-1], str(self._roots))

    def anchor(self, root: Envelope, between: Iterable[Envelope] = ()) -> None:
        """Trust this root, of whose origin the caller is sure; bundles that are here already may go on serving.

        Where another root is trusted here already, this one has to follow from it, through the roots of ``between`` if
        keys have changed several times; these may come from anywhere, because each is signed by the keys before it.

        Raises:
            BundleUntrusted: The root is not signed by its own keys.
            StateError: Another root is trusted here already and this one does not follow it, or roots between the two
                are missing.
        """
        trusted = self.known()
        if trusted is None:
            self._anchor_first(root)
        elif not any(envelope.signed == root.signed for envelope in trusted.roots):
            self._anchor_later(root, trusted, between)

    def _anchor_first(self, root: Envelope) -> None:
        """Trust the first root; the bundles that are here already are noted, because they may go on serving."""
        content = read(Root, root, "root")
        check_signed(root, content, "root", f"root {content.version}")
        digests = [sha256_file(path) for path in sorted(self._folder.glob("*/manifest.json"))]
        self._write_roots(Roots(roots=(root,), before=tuple(digests)))

    def _anchor_later(self, root: Envelope, trusted: Roots, between: Iterable[Envelope]) -> None:
        """Trust a root that follows from those trusted already, through those of ``between``."""
        content = read(Root, root, "root")
        newest = read(Root, trusted.roots[-1], str(self._roots))
        advice = f"remove {self._roots} to trust another federation"
        if content.version <= newest.version:
            raise StateError(
                f"this device trusts root {newest.version} of federation '{newest.federation}', which does not come "
                f"from root {content.version} of '{content.federation}'; {advice}"
            )
        # Each change of keys in between is needed: its root is signed by the keys before it.
        steps = {envelope.signed.get("version"): envelope for envelope in between}
        skipped = range(newest.version + 1, content.version)
        lacking = [str(version) for version in skipped if version not in steps]
        if content.federation == newest.federation and lacking:
            raise StateError(
                f"this device trusts root {newest.version} of federation '{newest.federation}', root {content.version} "
                f"is {len(skipped) + 1} changes of keys later: root {', '.join(lacking)} is missing; bring roots.json, "
                "which has them all, from the coordinator's state folder (identity/release/roots.json), or a bundle "
                "that was signed since"
            )
        chain = [steps[version] for version in skipped if version in steps]
        try:
            roots = follow_roots(trusted.roots, [*chain, root])
        except BundleUntrusted as error:
            raise StateError(f"{error}; {advice}") from error
        self._write_roots(trusted.model_copy(update={"roots": tuple(roots)}))

    def follow(self, offered: Iterable[Envelope]) -> None:
        """Trust the newer ones of these roots that follow from those that are trusted.

        Raises:
            BundleUntrusted: A newer root does not follow from its predecessor.
        """
        trusted = self.known()
        if trusted is None:
            return
        roots = follow_roots(trusted.roots, offered)
        if len(roots) > len(trusted.roots):
            self._write_roots(trusted.model_copy(update={"roots": tuple(roots)}))

    def admit(
        self,
        raw: bytes | None,
        files: Files,
        now: float,
        agent: str,
        first: Envelope | None = None,
        purpose: Purpose = "release",
    ) -> Member | None:
        """Check that a bundle may be installed here, and trust the newer roots that it carries.

        Args:
            raw: The signatures in the bundle's file; None where it has none.
            files: The part of the bundle that they cover.
            now: The time by this device's clock, in seconds since 1970.
            agent: The version of the agent.
            first: The root that counts where none is trusted yet; it does not become trusted.
            purpose: What the bundle is to be used for.

        Returns:
            The signatures; None where nothing is trusted, and so nothing is checked.

        Raises:
            BundleUntrusted: The bundle may not be installed; the message says why.
        """
        trusted = self.known()
        if trusted is None:
            if first is None:
                return None
            trusted = Roots(roots=(first,))
        if raw is None:
            raise BundleUntrusted(
                f"bundle {files.bundle_id[:16]}… is not signed, and this device trusts federation "
                f"'{read(Root, trusted.roots[-1], 'root').federation}' alone; ask its operator for a "
                "signed bundle",
                is_public=True,
            )
        # 1. The keys: roots that follow from the trusted ones, of which the newest has to have signed the release.
        member = parse(Member, raw, "release")
        self.follow(member.roots)
        root = read(Root, follow_roots(trusted.roots, member.roots)[-1], "root")
        release = verify_release(member, files, root)
        # 2. The version, before the expiry: an older release is signed again by the coordinator. The encoders of rounds
        # have no order, because those of several runs may arrive in any.
        if purpose == "release":
            self._check_not_older(release, member, files, root)
        # 3. The expiry, by the clock or by the newest signature seen here, if the clock is behind that.
        seen = max(self._seen(root), signed_at(release))
        check_installable(release, root, now, agent, seen)
        if release.purpose != purpose:
            raise BundleUntrusted(
                f"bundle {files.bundle_id[:16]}… is signed for purpose '{release.purpose}', it came for '{purpose}'",
                is_public=True,
            )
        # 4. The time, now that a release was valid at it.
        if now - self._time() >= _TIME_STEP_S and self.known() is not None:
            write_private(self._clock, moment(now).encode())
        return member

    def _check_not_older(self, release: Release, member: Member, files: Files, root: Root) -> None:
        """Require that a release is not older than the newest that was installed here, nor another of its version.

        Raises:
            BundleOlder: The release is older.
        """
        newest = self.newest(root)
        if newest is None:
            return
        installed, envelope = newest
        is_another = release.version == installed.version and member.release.signed != envelope.signed
        if release.version < installed.version or is_another:
            raise BundleOlder(
                f"version {release.version} of bundle {files.bundle_id[:16]}… is older than version "
                f"{installed.version}, which was installed here; to go back, the operator signs the older bundle again "
                "with a new version ('headwater keys sign --again')",
                is_public=True,
            )

    def check_loaded(self, raw: bytes | None, files: Files) -> None:
        """Require that a bundle that was installed here may serve: its release counted under a root trusted here.

        Raises:
            BundleUntrusted: The release did not count under any root that is trusted here.
        """
        trusted = self.known()
        if trusted is None or files.files["manifest.json"].hashes.sha256 in trusted.before:
            return
        if raw is None:
            raise BundleUntrusted(f"bundle {files.bundle_id[:16]}… is not signed; install a signed one", is_public=True)
        member = parse(Member, raw, "release")
        problems = list[BundleUntrusted]()
        for envelope in reversed(trusted.roots):
            try:
                verify_release(member, files, read(Root, envelope, "root"))
            except BundleUntrusted as error:
                problems.append(error)
            else:
                return
        raise problems[0]

    def described(self, now: float) -> dict[str, Any]:
        """Return the trusted root and the newest release that was installed, as JSON; ``now`` is a Unix time."""
        root = self.newest_root()
        if root is None:
            return {"root": None}
        newest = self.newest(root)
        result: dict[str, Any] = {"root": root.version, "federation": root.federation, "version": None}
        if newest is not None:
            expires = newest[0].expires
            expired = max(now, self._seen(root)) >= seconds(expires)
            result |= {"version": newest[0].version, "expires": expires, "expired": expired}
        return result

    def record(self, member: Member) -> None:
        """Note the newest installed release: older ones are refused from now on."""
        write_private(self._newest, dump(member.release))

    def newest(self, root: Root) -> tuple[Release, Envelope] | None:
        """Return the newest release installed here; None where there is none, or no key of ``root`` has signed it.

        One key is enough, whatever the threshold: a change of some of the keys must not let an older release in.

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
        """Return the newest Unix time that is over, as verified releases prove; 0 where there is none."""
        newest = self.newest(root)
        if newest is None:
            return max(self._time(), 0.0)
        return max(self._time(), signed_at(newest[0]))

    def _time(self) -> float:
        """Return the noted Unix time; 0 where none is."""
        return seconds((_read(self._clock) or b"").decode(errors="replace"))

    def _write_roots(self, roots: Roots) -> None:
        write_private(self._roots, dump(roots))


def _read(path: Path) -> bytes | None:
    """Return the content of a file of the store; None where there is none.

    Raises:
        StateError: The file cannot be read.
    """
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {cause(error)}; it decides whom this device trusts") from error
