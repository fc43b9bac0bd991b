"""A backup lets nobody in that was revoked since, as far as that can be known, and nobody unseen."""

from __future__ import annotations

import base64
import shutil
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.config import IdentityConfig
from coordinator.identity.authority import Authority
from coordinator.identity.enrolment import Enrolment
from coordinator.identity.ledger import CertificateRecord, identity_folder
from coordinator.identity.restore import apply, read_revocations, review, sources_in_reach
from edge_agent.core.errors import StateError, UsageError

BACKUP = datetime(2030, 1, 1, tzinfo=timezone.utc)
CONFIG = IdentityConfig(host="localhost", bind="127.0.0.1")


class Folder:
    """A federation's state folder as far as certificates go; its clock stands at the time of the backup."""

    def __init__(self, path):
        self.path = path
        if not identity_folder(path).exists():
            Authority.create(identity_folder(path), "home", BACKUP - timedelta(days=1))
        self.now = BACKUP
        self.enrolment = Enrolment(path, "home", CONFIG, now=lambda: self.now)

    def enroll(self, name):
        """Give an agent a certificate, as its token does; those of before end."""
        if self.enrolment.ledger.get(name) is None:
            self.enrolment.token(name, timedelta(days=14))
        made = self.enrolment.authority.for_client(
            name, ec.generate_private_key(ec.SECP256R1()).public_key(), self.now, timedelta(days=30)
        )
        record = self.enrolment.ledger.get(name)
        one = CertificateRecord(
            serial=f"{made.serial_number:x}",
            der=base64.b64encode(made.public_bytes(Encoding.DER)).decode(),
            key=name,
            not_before=made.not_valid_before_utc.timestamp(),
            not_after=made.not_valid_after_utc.timestamp(),
        )
        used = None if record.token is None else record.token.model_copy(update={"used_at": self.now.timestamp()})
        changed = {"certificates": (*record.certificates, one), "token": used}
        with self.enrolment.ledger.changing() as ledger:
            ledger.put(record.model_copy(update=changed))
            self.enrolment.write_crl()

    def revoke(self, name):
        self.now = BACKUP + timedelta(hours=1)
        self.enrolment.revoke(name)

    def record(self, name):
        return self.enrolment.ledger.get(name)

    def serials_on_list(self):
        return {f"{one.serial_number:x}" for one in x509.load_pem_x509_crl(self.enrolment.crl.read_bytes())}


@pytest.fixture
def former(tmp_path):
    """The state folder that goes on after the backup: porch, hall and attic are enrolled, shed is invited."""
    folder = Folder(tmp_path / "former")
    for name in ("porch", "hall", "attic"):
        folder.enroll(name)
    folder.enrolment.token("shed", timedelta(days=14))
    shutil.copytree(folder.path, tmp_path / "restored")
    return folder


@pytest.fixture
def restored(former, tmp_path):
    return Folder(tmp_path / "restored")


def merged(restored, *paths):
    read = [read_revocations(path, restored.enrolment.authority) for path in paths]
    reviewed = review(restored.enrolment, read, BACKUP + timedelta(days=1))
    apply(restored.enrolment, reviewed)
    return reviewed


def test_without_a_former_folder_all_of_the_backup_are_named_and_nothing_changes(former, restored):
    former.revoke("porch")
    reviewed = merged(restored)
    assert reviewed.admitted == ("attic", "hall", "porch")
    assert reviewed.invited == ("shed",)
    assert (reviewed.changed, reviewed.kept_out, reviewed.sources) == ((), (), ())


def test_who_was_revoked_after_the_backup_stays_revoked_where_the_former_folder_is_there(former, restored):
    former.revoke("porch")
    former.revoke("shed")
    reviewed = merged(restored, former.path)
    assert reviewed.admitted == ("attic", "hall")
    assert reviewed.invited == ()
    assert [one.agent for one in reviewed.kept_out] == ["porch"]
    assert restored.record("porch").is_revoked
    assert restored.record("porch") == former.record("porch")
    assert restored.record("shed").token is None
    assert restored.serials_on_list() == former.serials_on_list() != set()
    assert restored.enrolment.revoked().agents == ("porch",)


def test_a_review_alone_writes_nothing(former, restored):
    former.revoke("porch")
    before = {path: path.read_bytes() for path in restored.path.rglob("*") if path.is_file()}
    review(restored.enrolment, [read_revocations(former.path, restored.enrolment.authority)], BACKUP)
    assert {path: path.read_bytes() for path in restored.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("form", ["pem", "der"])
def test_the_brokers_list_alone_keeps_a_revoked_device_out(former, restored, tmp_path, form):
    former.revoke("porch")
    listed = former.enrolment.crl.read_bytes()
    file = tmp_path / "list"
    file.write_bytes(listed if form == "pem" else x509.load_pem_x509_crl(listed).public_bytes(Encoding.DER))
    reviewed = merged(restored, file)
    assert reviewed.admitted == ("attic", "hall")
    assert restored.record("porch").certificates[0].revoked_at == (BACKUP + timedelta(hours=1)).timestamp()
    assert restored.record("porch").generation == former.record("porch").generation == 1
    assert restored.serials_on_list() == former.serials_on_list()


def test_merging_is_no_replacing_what_the_backup_has_revoked_stays_revoked(former, restored):
    restored.revoke("attic")
    former.revoke("porch")
    merged(restored, former.path)
    assert restored.record("attic").is_revoked
    assert restored.enrolment.revoked().agents == ("attic", "porch")
    merged(restored, former.path)
    assert restored.enrolment.revoked().agents == ("attic", "porch"), "a second time changes nothing"


def test_a_certificate_that_was_issued_and_revoked_after_the_backup_stays_on_the_list(former, restored, tmp_path):
    former.enroll("late")
    former.revoke("late")
    serial = former.record("late").certificates[0].serial
    shutil.copy(former.enrolment.crl, tmp_path / "crl.pem")
    reviewed = merged(restored, tmp_path / "crl.pem")
    assert set(reviewed.unknown) == {serial}
    assert serial in restored.serials_on_list()
    restored.revoke("hall")
    assert serial in restored.serials_on_list(), "also when the list is written again"
    merged(restored, former.path)
    assert restored.record("late").is_revoked


def test_a_device_that_was_let_in_again_after_its_revocation_is_let_in(former, restored):
    former.revoke("porch")
    former.enrolment.token("porch", timedelta(days=14))
    former.enroll("porch")
    reviewed = merged(restored, former.path)
    assert "porch" in reviewed.admitted
    assert restored.record("porch").generation == 1, "its commands are proven by the key that it has now"
    assert len(restored.serials_on_list()) == 1


def test_a_token_that_was_used_after_the_backup_is_not_used_again(former, restored):
    former.enroll("shed")
    merged(restored, former.path)
    assert restored.record("shed").token.used_at is not None


def test_a_damaged_record_of_the_former_folder_does_not_let_its_device_in(former, restored):
    former.revoke("porch")
    (identity_folder(former.path) / "agents" / "porch.json").write_text("{")
    reviewed = merged(restored, former.path)
    assert reviewed.admitted == ("attic", "hall")
    assert restored.record("porch").is_revoked


def test_folders_and_lists_of_others_are_refused_and_named(former, restored, tmp_path):
    stranger = Folder(tmp_path / "stranger")
    stranger.enroll("porch")
    stranger.revoke("porch")
    authority = restored.enrolment.authority
    with pytest.raises(UsageError, match=r"stranger: its certificate authority is of another federation"):
        read_revocations(stranger.path, authority)
    with pytest.raises(UsageError, match=r"crl.pem: the list is not signed by this federation's authority \(SHA256:"):
        read_revocations(stranger.enrolment.crl, authority)
    with pytest.raises(UsageError, match="no such file or folder; expected a state folder"):
        read_revocations(tmp_path / "nothing", authority)
    (tmp_path / "words").write_text("porch is revoked")
    with pytest.raises(StateError, match=r"not a list of revoked certificates .*expected PEM or DER"):
        read_revocations(tmp_path / "words", authority)


def test_the_former_folder_is_found_once_and_one_that_cannot_be_read_is_named_in_the_log(
    former, restored, tmp_path, caplog
):
    stranger = Folder(tmp_path / "stranger")
    candidates = [former.path, tmp_path / "gone", restored.path, former.path, stranger.path]
    found = list(sources_in_reach(restored.path, candidates, restored.enrolment.authority))
    assert [source.path for source in found] == [former.path]
    assert "revocations_not_read" in caplog.text
    assert str(stranger.path) in caplog.text
