"""Every failed enrolment and renewal names the step, the cause and the next command."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import itertools
import json
import shutil
import socket
import ssl
import stat
import subprocess
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from identity_harness import free_ports

from coordinator.config import IdentityConfig
from coordinator.identity import port
from coordinator.identity.authority import Authority, pem_of
from coordinator.identity.enrolment import MOST_CERTIFICATES, Enrolment
from coordinator.identity.ledger import Revoked, identity_folder, is_revoked
from coordinator.identity.port import AT_ONCE, AT_ONCE_OF_ONE, EnrolmentPort, _origin
from coordinator.identity.serving import BrokerFiles, IdentityService
from coordinator.state.backup import back_up
from coordinator.state.command_keys import CommandKeys
from coordinator.state.release_keys import ReleaseKeys
from coordinator.state.store import StateFolder
from edge_agent.agent import app
from edge_agent.bundle.trust import TrustStore
from edge_agent.cli.doctor import look
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.core.errors import BrokerAway, ConfigError, EnrolmentRefused, MessageError, StateError, UsageError
from edge_agent.core.storage import write_private
from edge_agent.identity.certificates import IdentityFolder, enroll, install_answer, show_utc
from edge_agent.identity.enrolment_port import MAX_LINE_BYTES, ask
from edge_agent.identity.keys import fingerprint, new_secret, signing_request, token_key
from edge_agent.identity.renewal import Renewal, renew_beside
from edge_agent.identity.tokens import Token
from edge_agent.wire.seal import AgentKey, read_key

DAY = timedelta(days=1)

LONG_S = 600.0
"""A time that no test takes, however busy its machine is."""


def until(condition, limit_s=10.0):
    """Wait for what another thread does."""
    end = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.01)


LIFE_S = 30 * 86_400


class Side:
    """A coordinator's enrolment port, with a clock that a test may set ahead."""

    def __init__(self, state, *, federation="home", ahead=timedelta(0), ports=None):
        self.state = state
        self.federation = federation
        self.ahead = ahead
        port, enroll_port = ports or free_ports()
        self.config = IdentityConfig(host="localhost", bind="127.0.0.1", port=port, enroll_port=enroll_port)
        if not (identity_folder(state) / "ca.key").exists():
            Authority.create(identity_folder(state), federation, self.now())
        self.enrolment = Enrolment(state, federation, self.config, now=self.now)
        files = BrokerFiles(self.enrolment)
        files.write(self.now())
        self.port = EnrolmentPort(self.enrolment, files.broker)

    def now(self):
        return datetime.now(timezone.utc) + self.ahead

    def __enter__(self):
        self.port.start()
        return self

    def __exit__(self, *_):
        self.port.stop()

    def token(self, name="porch", life=14 * DAY, **others):
        return self.enrolment.token(name, life, **others)

    def revoked(self):
        """Serials on the list that the broker reads."""
        return {f"{one.serial_number:x}" for one in x509.load_pem_x509_crl(self.enrolment.crl.read_bytes())}


@pytest.fixture
def side(tmp_path):
    with Side(tmp_path / "state") as side:
        yield side


@pytest.fixture
def device(tmp_path):
    """A function that makes the identity folder of another new device."""
    numbers = itertools.count()
    return lambda: IdentityFolder(tmp_path / f"device-{next(numbers)}")


def test_a_token_that_was_used_by_another_device_is_refused(side, device):
    token = side.token()
    enroll(token, device())
    with pytest.raises(
        EnrolmentRefused, match=r"^token: it was used at .* by a device with the key SHA256:.*'headwater en"
    ):
        enroll(token, device())


def test_a_device_whose_answer_was_lost_gets_the_same_certificate_again(side, device):
    token = side.token()
    folder = device()
    first = ask(token.address, side.enrolment.authority.der, folder.request("home", "porch", token.secret).model_dump())
    assert enroll(token, folder).serial == side.enrolment.ledger.get("porch").certificates[0].serial
    assert base64.b64decode(first["certificate"]) in ssl.PEM_cert_to_DER_cert(
        folder.file.read_text().partition("\n")[2].partition("-----END PRIVATE KEY-----\n")[2]
    )


def test_refused_enrolment_leaves_no_key_but_that_of_a_request_in_a_file(side, device):
    token = side.token()
    folder = device()
    other = device()
    enroll(token, device())
    other.pending_key()
    for one in (folder, other):
        with pytest.raises(EnrolmentRefused, match="it was used at"):
            enroll(token, one)
    assert (folder.pending.exists(), other.pending.exists()) == (False, True)


def test_an_expired_token_is_refused(side, device):
    token = side.token(life=DAY)
    side.ahead = DAY - timedelta(minutes=1)
    folder = device()
    side.ahead += timedelta(minutes=2)
    with pytest.raises(EnrolmentRefused, match=r"^token: it expired at .*'headwater enroll porch' .* makes a token"):
        enroll(token, folder, now=lambda: side.now().timestamp())


def test_a_newer_token_replaces_the_one_before(side, device):
    old = side.token()
    new = side.token()
    with pytest.raises(
        EnrolmentRefused, match=r"^token: it is not the newest one for 'porch'.*'headwater enroll porch'"
    ):
        enroll(old, device())
    assert enroll(new, device()).name == "porch"


def test_a_token_of_another_federation_is_refused_by_the_device_and_by_the_coordinator(side, device, tmp_path):
    folder = device()
    enroll(side.token(), folder)
    with (
        Side(tmp_path / "lab", federation="lab") as lab,
        pytest.raises(EnrolmentRefused, match=r"^state: .* is enrolled in federation 'home' .* for 'lab' .* --state"),
    ):
        enroll(lab.token(), folder)
    request = device().request("lab", "porch", side.token().secret)
    with pytest.raises(
        EnrolmentRefused, match=r"^federation: the request is for 'lab', and .* serves 'home'; 'headwater"
    ):
        side.enrolment.certify(request)


def test_another_authority_at_the_tokens_address_is_noticed_before_anything_is_sent(
    side, device, tmp_path, monkeypatch
):
    token = side.token()
    side.port.stop()
    asked = []
    monkeypatch.setattr(EnrolmentPort, "answer", _recording(EnrolmentPort.answer, asked))
    with (
        Side(tmp_path / "other", ports=(side.config.port, side.config.enroll_port)),
        pytest.raises(
            EnrolmentRefused, match=r"^authority: localhost:\d+ shows .* another federation, or somebody .*'hea"
        ),
    ):
        enroll(token, device())
    assert asked == [b'{"ask": "authority"}\n']
    side.port = EnrolmentPort(side.enrolment, BrokerFiles(side.enrolment).broker)


def _recording(answer, asked):
    def record(self, line, address=""):
        asked.append(line)
        return answer(self, line, address)

    return record


def test_somebody_who_shows_the_right_authority_but_has_not_its_key_is_refused(side, device, tmp_path):
    """A man in the middle can copy the authority's certificate, which is public."""
    token = side.token()
    side.port.stop()
    with Side(tmp_path / "other", ports=(side.config.port, side.config.enroll_port)) as other:
        other.enrolment.authority.certificate = side.enrolment.authority.certificate
        with pytest.raises(EnrolmentRefused, match=r"^tls: .* does not prove to be the coordinator .*compare"):
            enroll(token, device())
    side.port = EnrolmentPort(side.enrolment, BrokerFiles(side.enrolment).broker)


def test_an_enrolled_device_cannot_stand_for_the_coordinator(side, device):
    folder = device()
    enroll(side.token("mallory"), folder)
    token = side.token()
    side.port._certificate = folder.file
    with pytest.raises(EnrolmentRefused, match=r"^tls: .* does not prove to be the coordinator"):
        enroll(token, device())


def test_a_wiped_device_gets_its_name_back_and_its_old_certificate_is_revoked_then(side, device):
    lost = device()
    old = enroll(side.token(), lost)
    token = side.token()
    assert side.revoked() == set(), "a device that works is not shut out before another one shows the token"
    new = enroll(token, device())
    assert side.revoked() == {old.serial}
    assert side.enrolment.ledger.get("porch").current().serial == new.serial
    with pytest.raises(EnrolmentRefused, match=r"^certificate: it was revoked at .*'headwater enroll porch'"):
        Renewal(lost.path.parent).by_port()


@pytest.mark.parametrize("years", [-1, 1])
def test_a_clock_that_is_a_year_off_is_named_before_certificates_fail_because_of_it(side, device, years):
    now = side.now().timestamp() + years * 365 * 86_400
    with pytest.raises(
        EnrolmentRefused, match=r"^clock: this device's says 20\d\d-.*, the coordinator's 20\d\d.*set-ntp"
    ):
        enroll(side.token(life=400 * DAY), device(), now=lambda: now)


def test_a_coordinator_whose_clock_is_a_year_ahead_is_named_too(tmp_path, device):
    with (
        Side(tmp_path / "state", ahead=365 * DAY) as side,
        pytest.raises(EnrolmentRefused, match=r"^clock: .*try again"),
    ):
        enroll(side.token(), device())


def test_a_damaged_token_and_one_that_is_none_are_told_apart_from_tokens(side):
    text = side.token().text()
    assert Token.parse(f" {text}\n") == Token.parse(text)
    for cut in range(5, len(text) - 1):
        with pytest.raises(UsageError, match=r"^token: it is mistyped or cut off"):
            Token.parse(text[:cut])
    for place in range(4, len(text)):
        wrong = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        with pytest.raises(UsageError, match=r"^token: it is mistyped or cut off"):
            Token.parse(wrong)
    with pytest.raises(UsageError, match=r"^token: 'secret…' does not begin with hw1\.; copy the whole line"):
        Token.parse("secret")


def test_a_key_that_was_exchanged_on_the_way_is_not_certified(side, device):
    token = side.token()
    folder = device()
    attacker = device()
    request = folder.request("home", "porch", token.secret)
    csr = base64.b64encode(signing_request(attacker.pending_key(), "porch")).decode()
    with pytest.raises(EnrolmentRefused, match=r"^token: it is not the newest one"):
        side.enrolment.certify(request.model_copy(update={"csr": csr}))
    assert side.enrolment.certify(request).serial, "and the token still counts for its device"


def test_the_state_folder_does_not_hold_what_would_let_a_reader_use_a_token(side):
    token = side.token()
    record = (side.enrolment.ledger.folder / "porch.json").read_text()
    private = token_key(token.secret).private_bytes_raw()
    assert token.secret not in record
    for form in (private.hex(), base64.b64encode(private).decode()):
        assert form not in record


def test_a_certificate_is_renewed_within_the_grace_and_not_after_it(side, device):
    folder = device()
    enroll(side.token(), folder)
    side.ahead = 30 * DAY + 89 * DAY
    request = folder.request("home", "porch")
    assert side.enrolment.certify(request).renews == folder.read().serial
    side.ahead = 30 * DAY + 91 * DAY
    with pytest.raises(
        EnrolmentRefused, match=r"^certificate: it expired at .*, and could be renewed until .*'headwater en"
    ):
        side.enrolment.certify(request)


def test_a_renewal_needs_the_key_of_the_certificate_that_it_names(side, device):
    mine = device()
    theirs = device()
    enroll(side.token("mallory"), mine)
    enroll(side.token("porch"), theirs)
    request = mine.request("home", "mallory").model_copy(update={"name": "porch"})
    with pytest.raises(EnrolmentRefused, match=r"^request: it is for \['mallory'\], and the message for 'porch'"):
        side.enrolment.certify(request)
    request = mine.request("home", "porch")
    with pytest.raises(EnrolmentRefused, match=r"^certificate: none of 'porch' is known here with"):
        side.enrolment.certify(request)
    serial = theirs.read().serial
    with pytest.raises(EnrolmentRefused, match=r"^certificate: none of 'porch' is known here with"):
        side.enrolment.certify(request.model_copy(update={"serial": serial}))


def test_certificate_is_renewed_from_a_quarter_of_its_life_on_and_a_lost_answer_at_any_time(side, device):
    """800 renewals in 13 s made a record of 630 kB, which every revocation reads."""
    folder = device()
    first = enroll(side.token(), folder)
    begin = first.not_before - side.now().timestamp()
    side.ahead = timedelta(seconds=begin + (first.not_after - first.not_before) / 4 - 5)
    request = folder.request("home", "porch")
    with pytest.raises(EnrolmentRefused, match=r"^certificate: it can be renewed from 20.* on.*try again then"):
        side.enrolment.certify(request)
    side.ahead += timedelta(seconds=10)
    made = side.enrolment.certify(request)
    folder.install(
        base64.b64decode(made.der),
        ca=side.enrolment.authority.der,
        name="porch",
        federation="home",
        host="localhost",
        port=1,
    )
    assert side.enrolment.certify(request) == made, "the answer was lost"
    with pytest.raises(EnrolmentRefused, match=r"^certificate: it can be renewed from"):
        side.enrolment.certify(folder.request("home", "porch"))


def test_an_agent_has_a_few_certificates_at_a_time(side, device, tmp_path):
    folder = device()
    enroll(side.token(), folder)
    side.ahead = 20 * DAY
    for number in range(MOST_CERTIFICATES):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(folder.path.parent, copy)
        request = IdentityFolder(copy).request("home", "porch")
        if number < MOST_CERTIFICATES - 1:
            side.enrolment.certify(request)
    with pytest.raises(EnrolmentRefused, match=r"^certificate: 'porch' has 8 that hold already"):
        side.enrolment.certify(request)
    side.ahead = 60 * DAY
    assert side.enrolment.certify(request).renews == folder.read().serial, "they have expired"
    for _ in range(10):
        assert len(side.enrolment.ledger.get("porch").certificates) <= 2 * MOST_CERTIFICATES
        side.ahead += 25 * DAY
        IdentityFolder(copy).install(
            base64.b64decode(side.enrolment.ledger.get("porch").certificates[-1].der),
            ca=side.enrolment.authority.der,
            name="porch",
            federation="home",
            host="localhost",
            port=1,
        )
        side.enrolment.certify(IdentityFolder(copy).request("home", "porch"))


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["garden", "porch"], ids=["renamed", "enrolled again"])
def test_what_a_token_replaces_is_revoked_whichever_write_of_the_enrolment_fails(side, device, name, monkeypatch):
    """A full disk left the old certificate valid for good: the second try found the token used, and stopped there."""
    folder = device()
    old = enroll(side.token(), folder)
    folder = folder if name == "garden" else device()
    token = side.token(name, replaces="porch" if name == "garden" else "")
    request = folder.request("home", name, token.secret)
    writes = 0
    for fails_at in range(6):
        left = itertools.count()

        def write(path, content, fails_at=fails_at, left=left):
            if next(left) == fails_at:
                raise FULL
            write_private(path, content)

        with monkeypatch.context() as patched:
            for module in ("enrolment", "ledger"):
                patched.setattr(f"coordinator.identity.{module}.write_private", write)
            try:
                made = side.enrolment.certify(request)
            except OSError:
                writes += 1
                continue
        break
    assert writes == 4, "record, revoked.json, crl.pem, record"
    assert side.revoked() == {old.serial}
    assert side.enrolment.ledger.get(name).current() == made
    assert side.enrolment.ledger.get(name).token.used_at is not None


def test_after_a_revocation_or_another_enrolment_the_key_of_commands_is_another_one(side, device):
    """The thief of a device that was revoked has its key, and could forge commands to the device that has its name."""
    keys = [side.enrolment.command_key("porch")]
    for revoke in (False, False, True):
        if revoke:
            side.enrolment.revoke("porch")
        folder = device()
        enroll(side.token(), folder)
        keys.append(folder.commands.read_text())
        assert keys[-1] == side.enrolment.command_key("porch")
    assert keys[0] == keys[1], "as before the first enrolment"
    assert len(set(keys)) == 3
    assert side.enrolment.revoked().generations == {"porch": 2}


def test_serving_coordinator_proves_its_commands_by_the_key_that_the_device_has_now(side, device):
    service = IdentityService(side.enrolment)
    service._look()
    keys = CommandKeys.of(side.state, "home", service.generation)
    for _ in range(2):
        folder = device()
        enroll(side.token(), folder)
        service.tick(0.0, side.now())
        assert keys.of_agent("porch").text() == folder.commands.read_text()


def test_log_tells_an_agent_that_is_shut_out_from_one_that_enrolled_again(side, device, caplog):
    caplog.set_level("INFO")
    service = IdentityService(side.enrolment)
    service._look()
    for _ in range(2):
        enroll(side.token(), device())
    assert service.tick(0.0, side.now()) == ["porch"]
    assert ("agent_enrolled_again agent=porch" in caplog.text, "agent_revoked" in caplog.text) == (True, False)
    side.enrolment.revoke("porch")
    assert service.tick(0.0, side.now()) == ["porch"]
    assert "agent_revoked agent=porch" in caplog.text


def test_damaged_record_stops_no_other_and_nobody_who_is_revoked_gets_in_again(side, device, caplog):
    stolen = enroll(side.token(), device())
    side.enrolment.revoke("porch")
    garden = enroll(side.token("garden"), device())
    record = side.enrolment.ledger.folder / "porch.json"
    service = IdentityService(side.enrolment)
    service._look()
    record.write_bytes(record.read_bytes()[:100])
    assert not service.admits("porch")
    BrokerFiles(side.enrolment).write(side.now())
    assert "record_damaged agent=porch" in caplog.text
    side.enrolment.revoke("garden")
    assert side.revoked() == {stolen.serial, garden.serial}
    assert set(side.enrolment.revoked().agents) == {"porch", "garden"}
    assert side.enrolment.revoked().generations == {"porch": 1, "garden": 1}
    with pytest.raises(
        StateError, match=r"porch\.json: damaged .* put it back from a backup, or enroll .* another name"
    ):
        side.token("porch")
    record.unlink()
    side.token("porch")
    BrokerFiles(side.enrolment).write(side.now())
    assert side.revoked() == {stolen.serial, garden.serial}
    side.ahead = 40 * DAY
    BrokerFiles(side.enrolment).write(side.now())
    assert side.revoked() == set(), "they have expired"


def test_damaged_list_of_revoked_certificates_is_made_again(side, device):
    old = enroll(side.token(), device())
    side.enrolment.revoke("porch")
    (side.enrolment.folder / "revoked.json").write_text("{")
    with pytest.raises(StateError, match=r"revoked\.json: damaged; 'headwater serve' writes it again"):
        side.enrolment.revoked()
    BrokerFiles(side.enrolment).write(side.now())
    assert set(side.enrolment.revoked().certificates) == {old.serial}


def test_request_with_algorithms_that_nobody_knows_is_refused(side, device, caplog):
    csr = base64.b64decode(device().request("home", "porch", side.token().secret).csr)
    for known in ("2a8648ce3d030107", "2a8648ce3d0201", "2a8648ce3d040302"):  # curve, key and signature
        oid = bytes.fromhex(known)
        assert oid in csr
        raw = {
            "federation": "home",
            "name": "porch",
            "csr": base64.b64encode(csr.replace(oid, oid[:-1] + b"\x77")).decode(),
            "signature": "AAAA",
        }
        assert side.port.answer(json.dumps(raw).encode())["refused"].startswith("request: ")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("what", ["certificate", "commands", "root", "signature"])
def test_answer_in_a_file_that_was_changed_on_its_way_is_not_installed(side, device, what, tmp_path):
    ReleaseKeys(side.state).create("home", side.now())
    token = side.token()
    folder = device()
    request = folder.request("home", "porch", token.secret)
    answer = side.enrolment.answer("porch", side.enrolment.certify(request))
    thief = AgentKey("home", "porch", bytes(32), bytes(32)).text()
    others = ReleaseKeys(tmp_path)
    others.create("home", side.now())
    changed = {
        "certificate": answer["authority"],
        "commands": thief,
        "root": others.root.read_text(),
        "signature": answer["authority"],
    }
    for wrong in ({**answer, what: changed[what]}, {key: answer[key] for key in answer if key != what}):
        with pytest.raises(MessageError, match=r"^answer: "):
            install_answer(token, folder, wrong)
        assert folder.read() is None
        assert not folder.commands.exists()
        assert TrustStore(folder.path.parent / "bundles").known() is None
    assert install_answer(token, folder, answer).name == "porch"
    assert folder.commands.read_text() == side.enrolment.command_key("porch")


@pytest.mark.parametrize("name", ["coordinator", "broker"])
def test_no_device_gets_the_name_of_a_program(side, name):
    with pytest.raises(UsageError, match=r"is the name of a program"):
        side.token(name)


@pytest.mark.parametrize("name", ["../x", "a/b", "UP", "#", "+", "", "a" * 64])
def test_names_that_are_no_topic_level_or_no_file_are_refused(side, name):
    with pytest.raises(UsageError, match=r"cannot be an agent's name"):
        side.token(name)


def test_nobody_asks_for_a_name_without_a_token(side, device):
    with pytest.raises(
        EnrolmentRefused, match=r"^token: it is not the newest one for 'ghost'.*'headwater enroll ghost'"
    ):
        side.enrolment.certify(device().request("home", "ghost", side.token().secret))


def test_a_renamed_agent_takes_its_new_name_and_the_old_one_is_revoked(side, device):
    folder = device()
    old = enroll(side.token("porch"), folder)
    new = enroll(side.token("garden", replaces="porch"), folder)
    assert (folder.read().name, side.revoked()) == ("garden", {old.serial})
    assert new.serial != old.serial
    assert side.enrolment.ledger.get("porch").is_revoked


def test_row_43_one_owner_has_no_more_agents_than_the_quota(side, device):
    issuer = Enrolment(
        side.state,
        "home",
        side.config.model_copy(update={"agents_per_owner": 2}),
        now=side.now,
        taken=frozenset({"hall"}),
    )
    tokens = [issuer.token(name, 14 * DAY, owner="anna", max_samples=500) for name in ("porch", "shed")]
    with pytest.raises(UsageError, match=r"owner 'anna' has 2 agents \(porch, shed\).*'headwater agents revoke NAME'"):
        issuer.token("attic", 14 * DAY, owner="anna")
    issuer.token("attic", 14 * DAY, owner="ben")
    issuer.token("porch", 14 * DAY)  # the same agent again is no other one, and keeps its owner and its limit
    assert (issuer.ledger.get("porch").owner, issuer.ledger.get("porch").max_samples) == ("anna", 500)
    issuer.token("garden", 14 * DAY, replaces="porch")
    assert (issuer.ledger.get("garden").owner, issuer.ledger.get("garden").max_samples) == ("anna", 500)
    enroll(tokens[1], device())
    side.ahead = 20 * DAY  # the tokens that nobody used have expired: shed alone is left
    issuer.token("attic", 14 * DAY, owner="anna")
    with pytest.raises(UsageError, match=r"owner 'anna' has 2 agents \(attic, shed\)"):
        issuer.token("cellar", 14 * DAY, owner="anna")
    issuer.revoke("shed")
    issuer.token("cellar", 14 * DAY, owner="anna")
    with pytest.raises(UsageError, match=r"'hall' is a client that this coordinator hosts"):
        issuer.token("hall", 14 * DAY)


def test_both_secrets_may_be_credentials_of_systemd_and_lie_nowhere_in_the_state_folder(side, tmp_path, monkeypatch):
    fingerprint = side.enrolment.authority.fingerprint
    key = side.enrolment.command_key("porch")
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    for name in ("ca.key", "master.key"):
        (identity_folder(side.state) / name).rename(credentials / name)
    with pytest.raises(StateError, match=r"no certificate authority"):
        Enrolment(side.state, "home", side.config)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    again = Enrolment(side.state, "home", side.config)
    assert (again.authority.fingerprint, again.command_key("porch")) == (fingerprint, key)
    again.token("porch", DAY)
    again.revoke("porch")  # which signs the list
    assert not (identity_folder(side.state) / "master.key").exists()


HOSTILE = [
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\xfe\n",
    b"[" * 5000 + b"\n",
    b'{"ask": "authority", "ask": "authority"}\n',
    b'{"federation": "home", "name": "porch", "csr": "AAAA", "signature": "AAAA"}\n',
    b'{"federation": "home", "name": "../../x", "csr": "AAAA", "signature": "AAAA"}\n',
    b'{"federation": ["home"], "name": {}, "csr": 1, "signature": null}\n',
    b"x" * (MAX_LINE_BYTES + 10),
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bytes_are_refused_and_the_port_serves_on(side, device, line):
    side.token()
    context = ssl.create_default_context(cadata=side.enrolment.authority.der)
    with (
        socket.create_connection(("127.0.0.1", side.config.enroll_port), 5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(line)
        answer = secure.recv(4096)
        assert not answer or "refused" in json.loads(answer)
    assert enroll(side.token(), device()).name == "porch"


def test_port_listens_on_after_a_connection_could_not_be_accepted(side, device, monkeypatch, caplog):
    """With all files in use accept fails, and a failed accept ended the port for good, without a line in the log."""
    failures = [OSError(errno.EMFILE, "Too many open files")]
    accept = socket.socket.accept

    def failing_once(listener):
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing_once)
    socket.create_connection(("127.0.0.1", side.config.enroll_port)).close()  # ends the call that waits now
    until(lambda: "enrolment_not_accepted reason=Too many open files" in caplog.text)
    assert enroll(side.token(), device()).name == "porch"


def test_port_listens_on_after_a_thread_could_not_be_started(side, device, monkeypatch, caplog):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, pytest.raises(BrokerAway):
        patched.setattr(threading.Thread, "start", fail)
        enroll(side.token(), device())
    assert "enrolment_not_served from=127.0.0.1 reason=can't start new thread" in caplog.text
    assert enroll(side.token(), device()).name == "porch"


def test_silent_stranger_with_many_connections_holds_no_renewal_up(side, device, monkeypatch):
    """Devices behind other addresses are served at once; the port stops although slots are taken."""
    monkeypatch.setattr("coordinator.identity.port.HANDSHAKE_S", LONG_S)
    folder = device()
    enroll(side.token(), folder)
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", side.config.enroll_port)
        for _ in range(3 * AT_ONCE):
            stack.enter_context(socket.create_connection(address, 5))
        until(lambda: side.port._served == {"127.0.0.1": AT_ONCE_OF_ONE})
        side.ahead = DAY * 20
        connect = functools.partial(socket.create_connection, source_address=("127.0.0.2", 0))
        monkeypatch.setattr("edge_agent.identity.enrolment_port.socket.create_connection", connect)
        Renewal(folder.path.parent, wall=lambda: side.now().timestamp()).by_port()
        assert side.port._served["127.0.0.1"] == AT_ONCE_OF_ONE, "the stranger's connections are all still there"


def test_silent_connection_is_closed_after_the_time_for_the_handshake(side, monkeypatch):
    monkeypatch.setattr("coordinator.identity.port.HANDSHAKE_S", 0.05)
    with socket.create_connection(("127.0.0.1", side.config.enroll_port), 5) as silent:
        assert silent.recv(1) == b""
    until(lambda: not side.port._served)


def test_port_stops_while_all_slots_are_taken(side, monkeypatch):
    monkeypatch.setattr("coordinator.identity.port.HANDSHAKE_S", LONG_S)
    monkeypatch.setattr("coordinator.identity.port.AT_ONCE_OF_ONE", AT_ONCE)
    with contextlib.ExitStack() as stack:
        for _ in range(AT_ONCE):
            stack.enter_context(socket.create_connection(("127.0.0.1", side.config.enroll_port), 5))
        until(lambda: side.port._served == {"127.0.0.1": AT_ONCE})
        begin = time.monotonic()
        side.port.stop()
        assert time.monotonic() - begin < LONG_S / 2, "it waits for nobody's handshake"


@pytest.mark.parametrize(
    "address, origin",
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_one_peer_is_an_address_or_a_network_of_ipv6(address, origin):
    assert _origin(address) == origin


def test_no_tls_and_nobody_there_are_told_apart(side, device):
    token = side.token()
    side.port.stop()
    with pytest.raises(BrokerAway, match=r"^connect: .* does not answer .*'headwater serve' has to run there"):
        enroll(token, device())
    with socket.create_server(("127.0.0.1", side.config.enroll_port)) as listener:
        listener.settimeout(5)

        def talk():
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"220 mail.example\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(BrokerAway, match=r"^connect: "):
            enroll(token, device())
        thread.join()
    side.port = EnrolmentPort(side.enrolment, BrokerFiles(side.enrolment).broker)


def certificate_of_a_stranger(side, folder):
    """A file with key and certificate of an authority that nobody here knows."""
    key = ec.generate_private_key(ec.SECP256R1())
    other = Authority.create(folder, "x", side.now())
    certificate = other.for_server(["localhost"], key.public_key(), side.now(), DAY)
    file = folder / "stranger.pem"
    file.write_bytes(pem_of(key) + certificate.public_bytes(Encoding.PEM))
    return file


@pytest.mark.parametrize(
    "answer", [{"refused": "go away"}, {"time": 0}, {"time": 10**400}, {"time": True}, {"time": None}, {}], ids=str
)
def test_strangers_answer_ends_no_agent_whose_certificate_has_expired(side, device, tmp_path, monkeypatch, answer):
    """It ended with exit code 2, after which systemd does not start it again."""
    folder = device()
    enroll(side.token(), folder)
    side.ahead = 40 * DAY
    renewal = Renewal(folder.path.parent, wall=lambda: side.now().timestamp())
    with monkeypatch.context() as patched:
        patched.setattr(EnrolmentPort, "answer", lambda *_: answer)
        patched.setattr(side.port, "_certificate", certificate_of_a_stranger(side, tmp_path))
        with pytest.raises(BrokerAway, match=r"^tls: .* does not prove to be the coordinator"):
            renewal.by_port()
    with monkeypatch.context() as patched:
        patched.setattr(EnrolmentPort, "answer", lambda *_: answer)
        with pytest.raises(BrokerAway):  # proven, but no refusal of a certificate
            renewal.by_port()
    assert renewal.by_port().not_after > side.now().timestamp()


def test_device_asks_whether_its_certificate_counts_and_is_told_what_a_renewal_would_be(side, device):
    folder = device()
    other = device()
    identity = enroll(side.token(), folder)
    enroll(side.token("garden"), other)
    renewal = Renewal(folder.path.parent)
    records = side.enrolment.ledger.get("porch").certificates
    assert renewal.standing() == show_utc(identity.not_after)
    forged = {**other.question("home", "garden").model_dump(), "name": "porch", "serial": identity.serial}
    with pytest.raises(EnrolmentRefused, match=r"none of 'porch' is known here with the serial and the key"):
        ask(("localhost", side.config.enroll_port), folder.ca_der(), forged)
    side.enrolment.revoke("porch")
    reason = r"^certificate: it was revoked at .*; 'headwater enroll porch' on the coordinator makes a token"
    with pytest.raises(EnrolmentRefused, match=reason):
        renewal.standing()
    with pytest.raises(EnrolmentRefused, match=reason):
        renew_beside(folder.path.parent, "standing")
    config = AgentConfig(id="porch", state=folder.path.parent, data=DataConfig(source="digits:optdigits"))
    steps = {step.name: step for step in look(config)}
    assert (steps["enrolment"].exit_code, steps["enrolment"].detail[:18]) == (2, "certificate: it wa")
    side.port.stop()
    with pytest.raises(BrokerAway):
        renewal.standing()
    assert next(step for step in look(config) if step.name == "enrolment").detail.startswith("not asked: ")
    assert len(side.enrolment.ledger.get("porch").certificates) == len(records), "nothing was certified"
    side.port = EnrolmentPort(side.enrolment, BrokerFiles(side.enrolment).broker)


def test_status_says_who_is_revoked_and_not_who_enrolled_again(side, device):
    for name in ("porch", "hall"):
        enroll(side.token(name), device())
        side.enrolment.revoke(name)
    enroll(side.token("hall"), device())
    listed = Revoked.read(identity_folder(side.state)).agents
    assert {name for name in listed if is_revoked(identity_folder(side.state), name)} == {"porch"}


@pytest.mark.usefixtures("children")
def test_renewal_that_cannot_be_tried_at_the_start_ends_no_agent(side, device, monkeypatch, caplog):
    folder = device()
    enroll(side.token(), folder)
    renewal = Renewal(folder.path.parent, wall=lambda: side.now().timestamp() + 2 * LIFE_S)

    def fail(*_, **__):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(subprocess, "Popen", fail)
    app._renew_expired(renewal)
    assert "certificate_not_renewed" in caplog.text


def test_refusal_of_the_coordinator_itself_is_final_and_its_clock_is_not(side, device):
    folder = device()
    enroll(side.token(), folder)
    side.ahead = 40 * DAY
    with pytest.raises(BrokerAway, match=r"^clock: .*set-ntp"):
        Renewal(folder.path.parent, wall=lambda: 0.0).by_port()
    side.enrolment.revoke("porch")
    with pytest.raises(EnrolmentRefused, match=r"^certificate: it was revoked"):
        Renewal(folder.path.parent, wall=lambda: side.now().timestamp()).by_port()


def test_time_is_asked_of_a_coordinator_whose_certificate_does_not_hold_now(side, device, tmp_path, monkeypatch):
    """With a wrong clock here no certificate holds; then the clock is named, not the certificate."""
    folder = device()
    enroll(side.token(), folder)
    key = ec.generate_private_key(ec.SECP256R1())
    before = side.now() - 400 * DAY
    certificate = side.enrolment.authority.for_server(["localhost"], key.public_key(), before, DAY)
    file = tmp_path / "expired.pem"
    file.write_bytes(pem_of(key) + certificate.public_bytes(Encoding.PEM))
    monkeypatch.setattr(side.port, "_certificate", file)
    with pytest.raises(BrokerAway, match=r"^clock: "):
        Renewal(folder.path.parent, wall=lambda: before.timestamp()).by_port()
    with pytest.raises(BrokerAway, match=r"^tls: .*expired"):
        Renewal(folder.path.parent, wall=lambda: side.now().timestamp()).by_port()


def test_an_answer_with_another_certificate_is_not_installed(side, device):
    folder = device()
    other = device()
    enroll(side.token("mallory"), other)
    wrong = base64.b64decode(side.enrolment.ledger.get("mallory").certificates[0].der)
    side.token()
    with pytest.raises(MessageError, match=r"^certificate: the answer is for \['mallory'\]"):
        folder.install(
            wrong, ca=side.enrolment.authority.der, name="porch", federation="home", host="localhost", port=1
        )
    assert folder.read() is None


def test_enrolled_agent_knows_commands_also_by_a_configuration_that_was_there_before(side, device):
    """Such a file was left as it was, without the key's name, and the agent obeyed everybody."""
    folder = device()
    config = AgentConfig(id="porch", federation="home", state=folder.path.parent, data={"source": "none:"})
    assert read_key(config) is None
    enroll(side.token(), folder)
    assert read_key(config) == CommandKeys.of(side.state, "home").of_agent("porch")
    with pytest.raises(ConfigError, match=r"the key of agent 'porch' .*expected that of 'hall'.*enrolling again"):
        read_key(config.model_copy(update={"id": "hall"}))


def test_fingerprint_is_the_one_that_openssl_computes(side, tmp_path):
    pem = identity_folder(side.state) / "ca.pem"
    done = subprocess.run(
        ["openssl", "x509", "-in", str(pem), "-noout", "-fingerprint", "-sha256"], check=True, capture_output=True
    )
    digest = bytes.fromhex(done.stdout.decode().partition("=")[2].strip().replace(":", ""))
    assert fingerprint(side.enrolment.authority.der) == "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def test_a_backup_has_the_authority_and_the_ledger_and_its_key_stays_private(side, device, tmp_path):
    enroll(side.token(), device())
    with StateFolder(side.state).look(create=True) as state:
        back_up(state, tmp_path / "copy")
    copied = identity_folder(tmp_path / "copy")
    assert stat.S_IMODE((copied / "ca.key").stat().st_mode) == 0o600
    restored = Enrolment(tmp_path / "copy", "home", side.config)
    assert restored.authority.fingerprint == side.enrolment.authority.fingerprint
    assert restored.ledger.get("porch") == side.enrolment.ledger.get("porch")


def forged_requests(side, device):
    """Requests that a stranger may send, for names of which nothing, and of which something, is known."""
    token_only = "token-only"
    enrolled = "enrolled"
    revoked = "revoked"
    side.token(token_only)
    enroll(side.token(enrolled), device())
    serial = side.enrolment.ledger.get(enrolled).certificates[0].serial
    enroll(side.token(revoked), device())
    side.enrolment.revoke(revoked)
    side.token("withdrawn")
    side.enrolment.revoke("withdrawn")
    names = ("ghost", token_only, enrolled, revoked, "withdrawn", "coordinator")
    stranger = device()
    for name in names:
        by_token = stranger.request("home", name, new_secret())
        yield name, "token", by_token
        by_certificate = by_token.model_copy(update={"serial": serial, "signature": by_token.signature})
        yield name, "certificate", by_certificate
        yield name, "standing", by_certificate.model_copy(update={"csr": ""})


def test_stranger_accuses_no_agent_and_learns_nothing_of_any(side, device):
    accused = []
    answers = {}
    side.port.on_refused = lambda *about: accused.append(about)
    for name, how, request in forged_requests(side, device):
        answer = side.port.answer(request.model_dump_json().encode(), "192.0.2.1")
        uniform = json.dumps(answer).replace(f"'{name}'", "NAME").replace(f"enroll {name}'", "NAME")
        answers.setdefault(how, set()).add(uniform)
    assert accused == []
    assert {how: len(different) for how, different in answers.items()} == {"token": 1, "certificate": 1, "standing": 1}
    assert not any("UTC" in text for (text,) in answers.values()), "a time is told"


def test_refused_device_that_proves_its_identity_is_named_to_the_operator(side, device):
    accused = []
    folder = device()
    enroll(side.token(), folder)
    side.enrolment.revoke("porch")
    side.port.on_refused = lambda *about: accused.append(about)
    question = folder.question("home", "porch").model_dump_json().encode()
    assert "it was revoked at" in side.port.answer(question, "192.0.2.1")["refused"]
    ((name, message, remedy),) = accused
    assert name == "porch"
    assert "headwater enroll" not in message, "the remedy stands beside it, and would be read twice"
    assert remedy == "'headwater enroll porch' on the coordinator makes a token"


def test_flood_of_requests_that_prove_nothing_leaves_a_few_lines_in_the_log(side, device, caplog, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(side.port, "clock", lambda: clock[0])
    request = device().request("home", "porch", new_secret()).model_dump_json().encode()
    for number in range(300):
        side.port.answer(request if number % 2 else b"{", "192.0.2.1")
    lines = [record for record in caplog.records if record.getMessage().startswith("enrolment_refused")]
    assert len(lines) == port.STRANGERS_LOGGED
    assert side.port.unproven_requests == 300
    clock[0] += port.STRANGERS_EVERY_S
    side.port.answer(request, "192.0.2.1")
    messages = [record.getMessage() for record in caplog.records]
    assert f"more={300 - port.STRANGERS_LOGGED} " in "\n".join(messages)
