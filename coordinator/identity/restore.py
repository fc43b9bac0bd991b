"""Merge revocations that came after a backup into its ledger, before the backup admits agents.

A device that was revoked after the backup is still enrolled in it. So before an agent is admitted, later revocations
are looked for in the former state folder, or in the broker's list of revoked certificates (``crl.pem``). Merging them
only excludes devices: what the backup has revoked stays revoked. Then an operator confirms the agents that are left
(`coordinator.service.first_start`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from edge_agent.core.errors import StateError, UsageError, cause
from edge_agent.core.storage import read_regular, write_private

from .authority import Authority
from .enrolment import Enrolment
from .ledger import REVOKED, AgentRecord, CertificateRecord, Ledger, Revoked, RevokedCertificate, identity_folder

log = logging.getLogger(__name__)

CRL = "crl.pem"
"""Name of the list of revoked certificates that Mosquitto reads, in the folder of a federation's identity."""


@dataclass(frozen=True)
class Revocations:
    """The revocations that one source has."""

    path: Path
    records: Mapping[str, AgentRecord] = field(default_factory=dict)
    """Agent -> its record; empty for a list of certificates alone."""

    certificates: Mapping[str, RevokedCertificate] = field(default_factory=dict)
    """Serial (hexadecimal) -> the certificate; its agent is empty where the source names none."""

    agents: frozenset[str] = frozenset()
    """Agents whose certificates are all revoked."""


@dataclass(frozen=True)
class KeptOut:
    """An agent that the backup would admit, and that was revoked after it."""

    agent: str
    path: Path
    """The source that has the revocation."""


@dataclass(frozen=True)
class Review:
    """The records of a backup merged with later revocations; nothing is written yet."""

    changed: tuple[AgentRecord, ...]
    """Records that differ from those of the backup."""

    unknown: Mapping[str, RevokedCertificate]
    """Serial -> a revoked certificate that no record has, because it was issued after the backup."""

    admitted: tuple[str, ...]
    """Agents with a certificate that counts, sorted."""

    invited: tuple[str, ...]
    """Agents without one whose token can still be used, sorted."""

    kept_out: tuple[KeptOut, ...]
    sources: tuple[Path, ...]
    """The sources that were read."""


def read_revocations(source: Path, authority: Authority) -> Revocations:
    """Read the revocations in a state folder, or in a file with a list of revoked certificates.

    Args:
        source: A state folder, or a CRL (PEM or DER).
        authority: The federation's authority, which has signed the list.

    Raises:
        UsageError: The source is neither, or belongs to another federation.
        StateError: The source cannot be read.
    """
    if not source.exists():
        raise UsageError(f"{source}: no such file or folder; expected a state folder, or a broker's list ({CRL})")
    if source.is_file():
        return Revocations(source, certificates=_read_crl(source, authority))
    folder = identity_folder(source)
    if not (folder / "ca.pem").is_file():
        raise UsageError(f"{source}: there is no {folder.name}/ca.pem; expected a state folder, or a list ({CRL})")
    try:
        shown = x509.load_pem_x509_certificate(read_regular(folder / "ca.pem"))
    except (OSError, ValueError) as error:
        raise StateError(f"{folder / 'ca.pem'}: cannot be read ({cause(error)})") from error
    if shown != authority.certificate:
        raise UsageError(f"{source}: its certificate authority is of another federation; name the former state folder")
    certificates = dict[str, RevokedCertificate]()
    if (folder / CRL).is_file():
        certificates |= _read_crl(folder / CRL, authority)
    agents = frozenset[str]()
    try:
        listed = Revoked.read(folder)
        certificates |= listed.certificates
        agents = frozenset(listed.agents)
    except StateError as error:  # the records and the broker's list hold the same revocations
        log.warning("revocations_damaged reason=%s", error)
    records = {record.name: record for record in Ledger(folder / "agents").records()}
    # An agent that was enrolled again is on the list until the next one is written; its record says that it counts.
    agents -= {name for name, record in records.items() if not record.is_revoked}
    return Revocations(source, records, certificates, agents)


def _read_crl(path: Path, authority: Authority) -> dict[str, RevokedCertificate]:
    """Read a list of revoked certificates: serial -> certificate, without agents, because the list has no names.

    Raises:
        StateError: The list is damaged.
        UsageError: The list is not signed by the federation's authority.
    """
    try:
        content = read_regular(path)
        is_pem = content.lstrip().startswith(b"-----BEGIN")
        listed = x509.load_pem_x509_crl(content) if is_pem else x509.load_der_x509_crl(content)
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: not a list of revoked certificates ({cause(error)}); expected PEM or DER") from error
    key = authority.certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not listed.is_signature_valid(key):
        raise UsageError(f"{path}: the list is not signed by this federation's authority ({authority.fingerprint})")
    # When such a certificate ends is not in the list: it is kept as long as the authority itself.
    until = authority.certificate.not_valid_after_utc.timestamp()
    certificates = {}
    for entry in listed:
        revoked_at = entry.revocation_date_utc.timestamp()
        certificates[f"{entry.serial_number:x}"] = RevokedCertificate(agent="", revoked_at=revoked_at, not_after=until)
    return certificates


def review(enrolment: Enrolment, sources: Iterable[Revocations], now: datetime) -> Review:
    """Merge later revocations into the records of a backup, and find the agents that it admits; write nothing."""
    before = {record.name: record for record in enrolment.ledger.records()}
    merged = dict(before)
    unknown = dict[str, RevokedCertificate]()
    kept_out = dict[str, KeptOut]()
    paths = []
    for source in sources:
        paths.append(source.path)
        # 1. Records of both sides become one; then the source's list revokes what it names, in all records.
        for name, record in source.records.items():
            merged[name] = _merge(merged.get(name), record)
        merged = {name: _revoke(record, source) for name, record in merged.items()}
        # 2. What no record has was issued after the backup; the broker's list has to have it all the same.
        recorded = _serials_of(merged.values())
        for serial, certificate in source.certificates.items():
            if serial not in recorded:
                unknown[serial] = certificate
        # 3. The first source that keeps an agent out is the one that is named to the operator.
        for name in _find_kept_out(before, merged):
            kept_out.setdefault(name, KeptOut(name, source.path))
    # 4. Whom the merged records let in: with a certificate, or with a token that was not used.
    certified = []
    invited = []
    for name, record in sorted(merged.items()):
        if record.current() is not None:
            certified.append(name)
        elif record.counts(now.timestamp()):
            invited.append(name)
    return Review(
        changed=tuple(record for name, record in sorted(merged.items()) if record != before.get(name)),
        unknown=unknown,
        admitted=tuple(certified),
        invited=tuple(invited),
        kept_out=tuple(kept_out[name] for name in sorted(kept_out)),
        sources=tuple(paths),
    )


def _find_kept_out(before: Mapping[str, AgentRecord], merged: Mapping[str, AgentRecord]) -> Iterator[str]:
    """Yield the agents that the records of the backup admit, and the merged records do not."""
    for name, record in before.items():
        was_admitted = record.current() is not None
        is_admitted = merged[name].current() is not None
        if was_admitted and not is_admitted:
            yield name


def _serials_of(records: Iterable[AgentRecord]) -> set[str]:
    """Return the serials of all certificates in these records."""
    serials = set[str]()
    for record in records:
        serials.update(certificate.serial for certificate in record.certificates)
    return serials


def apply(enrolment: Enrolment, reviewed: Review) -> None:
    """Write the merged records and the broker's list; no revocation is removed from either."""
    with enrolment.ledger.changing() as ledger:
        for record in reviewed.changed:
            ledger.put(record)
        if reviewed.unknown:
            _add_to_list(enrolment, reviewed.unknown)
        enrolment.write_crl()


def _add_to_list(enrolment: Enrolment, unknown: Mapping[str, RevokedCertificate]) -> None:
    """Add revoked certificates that no record has to the ledger, so that the broker's list has them from now on."""
    try:
        listed = enrolment.revoked()
    except StateError as error:
        log.error("revocations_damaged reason=%s", error)
        listed = Revoked()
    longer = listed.model_copy(update={"certificates": {**unknown, **listed.certificates}})
    write_private(enrolment.folder / REVOKED, longer.model_dump_json().encode())


def _merge(own: AgentRecord | None, other: AgentRecord) -> AgentRecord:
    """Unite two records of an agent: each certificate of both, revoked where one of them says so."""
    if own is None:
        return other
    certificates = {certificate.serial: certificate for certificate in own.certificates}
    for certificate in other.certificates:
        same = certificates.get(certificate.serial, certificate)
        revoked_at = _earliest(same.revoked_at, certificate.revoked_at)
        certificates[certificate.serial] = same.model_copy(update={"revoked_at": revoked_at})
    # A revocation and a used token are newer than the backup's open token. One too few costs another 'enroll'.
    token = own.token
    if other.token is None or (token is not None and other.token.made_at >= token.made_at):
        token = other.token
    return own.model_copy(
        update={
            "certificates": tuple(certificates.values()),
            "token": token,
            "generation": max(own.generation, other.generation),
            "max_samples": _fewest(own.max_samples, other.max_samples),
        }
    )


def _revoke(record: AgentRecord, source: Revocations) -> AgentRecord:
    """Revoke the certificates of a record that a list names, all of them where the agent itself is listed."""
    if record.name in source.agents:
        # The list says when each certificate was revoked, and not when the agent was: no earlier than the latest of
        # those moments, and than the begin of any certificate here.
        moments = [entry.revoked_at for entry in source.certificates.values() if entry.agent == record.name]
        moments.extend(certificate.not_before for certificate in record.certificates)
        return _drop_open_token(record, record.revoked(max(moments, default=0.0)))
    certificates = tuple(_mark_revoked(certificate, source.certificates) for certificate in record.certificates)
    if certificates == record.certificates:
        return record
    # Each revocation begins another key of commands (`AgentRecord`); a device that was let in again since has that one.
    changed = record.model_copy(update={"certificates": certificates, "generation": record.generation + 1})
    return _drop_open_token(record, changed)


def _drop_open_token(before: AgentRecord, after: AgentRecord) -> AgentRecord:
    """Drop the unused token of a record whose last certificate was just revoked: it was made for the same device."""
    was_just_revoked = before.current() is not None and after.current() is None
    has_open_token = after.token is not None and after.token.used_at is None
    if was_just_revoked and has_open_token:
        return after.model_copy(update={"token": None})
    return after


def _mark_revoked(certificate: CertificateRecord, revoked: Mapping[str, RevokedCertificate]) -> CertificateRecord:
    """Return a certificate, marked as revoked where the list has its serial."""
    entry = revoked.get(certificate.serial)
    if entry is None or certificate.revoked_at is not None:
        return certificate
    return certificate.model_copy(update={"revoked_at": entry.revoked_at})


def _earliest(first: float | None, second: float | None) -> float | None:
    """Return the earlier of two moments, of which each may be unknown."""
    moments = [moment for moment in (first, second) if moment is not None]
    return min(moments, default=None)


def _fewest(first: int | None, second: int | None) -> int | None:
    """Return the lower of two limits, of which each may not exist."""
    limits = [limit for limit in (first, second) if limit is not None]
    return min(limits, default=None)


def sources_in_reach(state: Path, candidates: Sequence[Path], authority: Authority) -> Iterator[Revocations]:
    """Read the former state folders that still exist; the log names one that cannot be read, and it is left out."""
    seen = {state.resolve()}
    for candidate in candidates:
        folder = candidate.resolve()
        if folder in seen or not identity_folder(folder).is_dir():
            continue
        seen.add(folder)
        try:
            yield read_revocations(folder, authority)
        except (UsageError, StateError, OSError) as error:
            log.warning("revocations_not_read source=%s reason=%s", folder, error)
