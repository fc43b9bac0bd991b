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
    return {
        f"{one.serial_number:x}": RevokedCertificate(
            agent="", revoked_at=one.revocation_date_utc.timestamp(), not_after=until
        )
        for one in listed
    }


def review(enrolment: Enrolment, sources: Iterable[Revocations], now: datetime) -> Review:
    """Merge later revocations into the records of a backup, and find the agents that it admits; write nothing."""
    before = {record.name: record for record in enrolment.ledger.records()}
    merged = dict(before)
    unknown = dict[str, RevokedCertificate]()
    kept_out = dict[str, KeptOut]()
    read = list(sources)
    for source in read:
        for name, record in source.records.items():
            merged[name] = _merge(merged.get(name), record)
        merged = {name: _revoke(record, source) for name, record in merged.items()}
        serials = {one.serial for record in merged.values() for one in record.certificates}
        unknown |= {serial: one for serial, one in source.certificates.items() if serial not in serials}
        for name, record in before.items():
            was_let_in = record.current() is not None
            if was_let_in and merged[name].current() is None and name not in kept_out:
                kept_out[name] = KeptOut(name, source.path)
    at = now.timestamp()
    certified = [record for record in merged.values() if record.current() is not None]
    invited = [record for record in merged.values() if record.current() is None and record.counts(at)]
    return Review(
        changed=tuple(record for name, record in sorted(merged.items()) if record != before.get(name)),
        unknown=unknown,
        admitted=tuple(sorted(record.name for record in certified)),
        invited=tuple(sorted(record.name for record in invited)),
        kept_out=tuple(kept_out[name] for name in sorted(kept_out)),
        sources=tuple(source.path for source in read),
    )


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
    certificates = {one.serial: one for one in own.certificates}
    for one in other.certificates:
        known = certificates.get(one.serial, one)
        revoked_at = _earliest(known.revoked_at, one.revoked_at)
        certificates[one.serial] = known.model_copy(update={"revoked_at": revoked_at})
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
        known = [one.revoked_at for one in source.certificates.values() if one.agent == record.name]
        at = max([*known, *(one.not_before for one in record.certificates)], default=0.0)
        return _ended(record, record.revoked(at))
    revoked = tuple(_listed(one, source.certificates) for one in record.certificates)
    if revoked == record.certificates:
        return record
    # Each revocation begins another key of commands (`AgentRecord`); a device that was let in again since has that one.
    changed = record.model_copy(update={"certificates": revoked, "generation": record.generation + 1})
    return _ended(record, changed)


def _ended(before: AgentRecord, after: AgentRecord) -> AgentRecord:
    """Drop the unused token of a record whose last certificate was just revoked: it was made for the same device."""
    if before.current() is None or after.current() is not None:
        return after
    is_open = after.token is not None and after.token.used_at is None
    return after.model_copy(update={"token": None}) if is_open else after


def _listed(one: CertificateRecord, listed: Mapping[str, RevokedCertificate]) -> CertificateRecord:
    """Return a certificate, marked as revoked where the list has its serial."""
    entry = listed.get(one.serial)
    if entry is None or one.revoked_at is not None:
        return one
    return one.model_copy(update={"revoked_at": entry.revoked_at})


def _earliest(one: float | None, other: float | None) -> float | None:
    known = [at for at in (one, other) if at is not None]
    return min(known, default=None)


def _fewest(one: int | None, other: int | None) -> int | None:
    known = [limit for limit in (one, other) if limit is not None]
    return min(known, default=None)


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
