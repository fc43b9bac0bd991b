"""What is special about MQTT: sockets that break, brokers that misbehave, passwords and certificates."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import queue
import random
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coordinator.broker import EmbeddedBroker, MosquittoBroker, find_mosquitto
from coordinator.broker.access import set_password
from edge_agent.config import BrokerConfig, TlsConfig
from edge_agent.errors import BrokerAway, ConfigError
from edge_agent.wire import mqtt
from edge_agent.wire.mqtt import MqttTransport, longest_pause_s
from edge_agent.wire.transport import Connected, Disconnected, Message, Subscribed

PATIENCE_S = 30.0
NEEDS_MOSQUITTO = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
REAL = [
    pytest.param(EmbeddedBroker, id="embedded", marks=pytest.mark.broker),
    pytest.param(MosquittoBroker, id="mosquitto", marks=[pytest.mark.broker, NEEDS_MOSQUITTO]),
]


def wait_for(transport, kind):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        event = transport.receive(1.0)
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind} within {PATIENCE_S:.0f} s")


@pytest.fixture
def open_transport():
    """A function that makes transports which are closed when the test ends."""
    made = []

    def make(config, name="porch", **options):
        made.append(MqttTransport(config, name, **options))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def listener():
    """A TCP socket that listens and whose connections a test answers by hand."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        yield server


def url_of(server) -> str:
    return f"mqtt://127.0.0.1:{server.getsockname()[1]}"


def take(peer, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = peer.recv(min(count - len(found), 4096))
        assert piece, "the client hung up"
        found += piece
    return found


def packet(peer) -> tuple[int, bytes]:
    """First byte and body of the next MQTT packet, read by the letter of the standard."""
    first, length, shift = take(peer, 1)[0], 0, 0
    while True:
        digit = take(peer, 1)[0]
        length |= (digit & 127) << shift
        if digit < 128:
            return first, take(peer, length)
        shift += 7


CONNACK = b"\x20\x02\x00\x00"


# --- waiting, and not waiting ----------------------------------------------------------------------------------------


def test_pauses_grow_and_stay_below_half_a_minute_for_ever():
    assert [longest_pause_s(failures) for failures in (0, 1, 2, 3)] == [0.5, 1.0, 2.0, 4.0]
    assert {longest_pause_s(failures) for failures in (6, 100, 1023, 1024, 10**6)} == {30.0}


def test_who_does_not_want_to_wait_is_told_at_once_that_nobody_listens(open_transport):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = url_of(server)
    began = time.monotonic()
    with pytest.raises(BrokerAway, match=rf"broker {url}: nobody listens on that port .*is it running"):
        open_transport(BrokerConfig(url=url, wait=False)).start()
    assert time.monotonic() - began < mqtt.CONNECT_TIMEOUT_S / 2
    assert BrokerAway.exit_code == 75


def test_who_does_not_want_to_wait_gives_up_on_a_broker_that_says_nothing(open_transport, listener, monkeypatch):
    monkeypatch.setattr(mqtt, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(mqtt, "LEAVE_TIMEOUT_S", 0.1)
    with pytest.raises(BrokerAway, match="no answer within"):
        open_transport(BrokerConfig(url=url_of(listener), wait=False)).start()


def test_who_waits_is_told_of_each_attempt_and_why_it_failed(open_transport):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = url_of(server)
    transport = open_transport(BrokerConfig(url=url), rng=random.Random(1))
    transport.start()
    for _ in range(2):
        gone = wait_for(transport, Disconnected)
        assert gone.reason == "nobody listens on that port (connection refused)"
        assert 0 < gone.retry_in_s <= 30


@pytest.mark.parametrize(
    "nonsense", [b"", b"\xff" * 64, b"\x20\x02\x00", b"\x20\x7f", b"HTTP/1.1 400 Bad Request\r\n\r\n"]
)
def test_a_broker_that_talks_nonsense_is_left_and_tried_again(open_transport, listener, nonsense):
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(nonsense)
    assert wait_for(transport, Disconnected).reason
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)


BROKEN = {
    "a publish without a topic": b"\x32\x01\x00",
    "a publish whose topic is longer than itself": b"\x32\x04\xff\xffab",
    "a topic that is not UTF-8": b"\x30\x05\x00\x02\xff\xfex",
    "a suback without a number": b"\x90\x01\x00",
    "a suback that nobody asked for": b"\x90\x03\x12\x34\x01",
    "an unknown packet": b"\xf0\x00",
    "a second connack": b"\x20\x01\x00",
    "a length without an end": b"\x30\xff\xff\xff\xff\xff",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_no_broken_packet_ends_the_transport(open_transport, listener, broken):
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.subscribe("t")
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        peer.sendall(broken)
    wait_for(transport, Disconnected)
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        peer.sendall(b"\x30\x05\x00\x01txy")
        assert wait_for(transport, Message) == Message("t", b"xy")


def test_each_connection_is_a_clean_session_of_a_client_of_its_own(open_transport, listener):
    """A broker that holds an old queue for the old client id must not be able to keep us out (RabbitMQ does)."""
    transport = open_transport(BrokerConfig(url=url_of(listener)), "porch")
    transport.start()
    ids = []
    for _ in range(2):
        with listener.accept()[0] as peer:
            first, body = packet(peer)
            assert first == 0x10
            assert body[:7] == b"\x00\x04MQTT\x04", "MQTT 3.1.1"
            assert body[7] == 0b10, "clean session, nothing else"
            assert int.from_bytes(body[8:10], "big") == 30, "keepalive"
            ids.append(body[12:].decode())
    assert all(name.startswith("porch-") for name in ids)
    assert len(set(ids)) == 2


def test_two_threads_never_tear_each_others_packets_apart(open_transport, listener):
    """The reader is slow, so packets go out in parts: each must be continued with its own rest."""
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    count, size = 200, 61_440
    payloads = queue.SimpleQueue()

    def read_slowly(peer):
        try:
            for _ in range(count):
                first, body = packet(peer)
                payloads.put((first, body[3:]))
        except BaseException as error:
            payloads.put(error)
            raise

    peer = listener.accept()[0]
    with peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        reader = threading.Thread(target=read_slowly, args=(peer,), daemon=True)
        reader.start()
        sent = [bytes([number]) * size for number in range(count)]
        for payload in sent:
            transport.publish("t", payload, qos=0)
        for payload in sent:
            assert payloads.get(timeout=PATIENCE_S) == (0x30, payload)
        reader.join(PATIENCE_S)


def test_confirmations_are_never_missed_however_fast_the_broker_is(open_transport, listener):
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    rounds = 200

    def confirm(peer):
        for _ in range(rounds):
            first, body = packet(peer)
            assert first == 0x82
            peer.sendall(b"\x90\x03" + body[:2] + b"\x01")

    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        broker = threading.Thread(target=confirm, args=(peer,), daemon=True)
        broker.start()
        for number in range(rounds):
            transport.subscribe(f"t/{number}")
            assert wait_for(transport, Subscribed).filters == (f"t/{number}",)
        broker.join(PATIENCE_S)


def test_a_refused_filter_is_not_reported_as_confirmed(open_transport, listener, caplog):
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.subscribe("good", "bad")
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        _, body = packet(peer)
        peer.sendall(b"\x90\x04" + body[:2] + b"\x01\x80")
        assert wait_for(transport, Subscribed).filters == ("good",)
    assert "subscription_refused filters=bad" in caplog.text


def test_a_reader_that_is_stuck_costs_messages_but_not_memory(open_transport, listener, monkeypatch):
    monkeypatch.setattr(mqtt, "INBOX_BYTES", 1000)
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.subscribe("t")
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        for _ in range(10):
            peer.sendall(b"\x30\xcb\x01" + b"\x00\x01t" + bytes(200))
        peer.sendall(b"\xd0\x00")
        deadline = time.monotonic() + PATIENCE_S
        while transport.traffic.messages_down < 10 and time.monotonic() < deadline:
            os.sched_yield()
        assert transport.traffic.dropped == 5
        assert [len(wait_for(transport, Message).payload) for _ in range(5)] == [200] * 5
        peer.sendall(b"\x30\x04\x00\x01tx")
        assert wait_for(transport, Message).payload == b"x", "once it reads again, all is well"


def test_close_comes_back_soon_even_when_the_broker_has_stopped_reading(open_transport, listener, monkeypatch):
    monkeypatch.setattr(mqtt, "LEAVE_TIMEOUT_S", 0.1)
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        for _ in range(300):
            transport.publish("t", bytes(61_440), qos=0)
        began = time.monotonic()
        transport.close()
        assert time.monotonic() - began < 5
        assert not transport._thread.is_alive()


def test_close_while_a_connection_is_being_made_ends_the_thread(open_transport, listener, monkeypatch):
    monkeypatch.setattr(mqtt, "LEAVE_TIMEOUT_S", 0.1)
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)  # it has asked, and waits for an answer that never comes
        transport.close()
    assert not transport._thread.is_alive()


# --- passwords -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def passwords(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passwords")
    set_password(folder / "users", "porch", "right")
    (folder / "right").write_text("right\nsecond line\n", encoding="utf-8")
    (folder / "wrong").write_text("wrong\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", REAL)
def test_only_the_right_password_lets_an_agent_in(open_transport, passwords, kind):
    with kind(password_file=passwords / "users") as broker:
        url = broker.url
        open_transport(BrokerConfig(url=url, user="porch", password_file=passwords / "right", wait=False)).start()
        by_its_id = BrokerConfig(url=url, password_file=passwords / "right", wait=False)
        open_transport(by_its_id, "porch").start()
        for wrong in (
            BrokerConfig(url=url, wait=False),
            BrokerConfig(url=url, user="porch", wait=False),
            BrokerConfig(url=url, user="porch", password_file=passwords / "wrong", wait=False),
            BrokerConfig(url=url, user="garage", password_file=passwords / "right", wait=False),
        ):
            with pytest.raises(BrokerAway, match="let in"):
                open_transport(wrong).start()


@pytest.mark.parametrize("kind", REAL)
def test_who_waits_with_a_wrong_password_is_told_what_the_broker_says(open_transport, passwords, kind):
    with kind(password_file=passwords / "users") as broker:
        config = BrokerConfig(url=broker.url, user="porch", password_file=passwords / "wrong")
        transport = open_transport(config)
        transport.start()
        assert "refuses" in wait_for(transport, Disconnected).reason


def test_a_password_file_that_is_not_there_is_told_at_once(open_transport, tmp_path):
    with pytest.raises(ConfigError, match="cannot read a line from"):
        open_transport(BrokerConfig(user="porch", password_file=tmp_path / "none")).start()


def test_a_password_file_that_is_being_replaced_does_not_end_the_transport(open_transport, listener, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("old", encoding="utf-8")
    config = BrokerConfig(url=url_of(listener), user="porch", password_file=secret)
    transport = open_transport(config)
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        secret.unlink()
    wait_for(transport, Disconnected)
    assert "cannot read a line from" in wait_for(transport, Disconnected).reason
    secret.write_text("new", encoding="utf-8")
    with listener.accept()[0] as peer:
        assert packet(peer)[1].endswith(b"\x00\x05porch\x00\x03new")
        peer.sendall(CONNACK)
        wait_for(transport, Connected)


# --- certificates ----------------------------------------------------------------------------------------------------


class Authority:
    """A certificate authority for one test run, with short elliptic keys: they are made in a millisecond."""

    def __init__(self, folder, name):
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._signed(self.name, self.key, is_authority=True))

    def issue(self, name, *addresses):
        """Paths of a certificate and its key for ``name``."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert, private = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        cert.write_bytes(self._signed(subject, key, addresses=addresses))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert, private

    def _signed(self, subject, key, *, is_authority=False, addresses=()):
        now = dt.datetime.now(dt.timezone.utc)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=is_authority,
            crl_sign=is_authority,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if addresses:
            names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class TlsMosquitto(MosquittoBroker):
    """Mosquitto that speaks TLS only and takes the client certificate's name for the user."""

    lines: tuple[str, ...] = ()

    def command(self):
        line = super().command()
        with Path(line[-1]).open("a", encoding="utf-8") as settings:
            settings.write("\n".join([*self.lines, ""]))
        return line


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    authority, stranger = Authority(folder, "authority"), Authority(folder, "stranger")
    cert, key = authority.issue("broker", "127.0.0.1")
    broker = TlsMosquitto()
    broker.lines = (
        f"cafile {authority.ca}",
        f"certfile {cert}",
        f"keyfile {key}",
        "require_certificate true",
        "use_identity_as_username true",
    )
    broker.start()
    ours = TlsConfig(ca=authority.ca, **dict(zip(("cert", "key"), authority.issue("porch"), strict=True)))
    theirs = dict(zip(("cert", "key"), stranger.issue("mallory"), strict=True))
    yield broker, ours, stranger, theirs
    broker.stop()


@NEEDS_MOSQUITTO
@pytest.mark.broker
def test_tls_with_an_own_authority_and_a_client_certificate_carries_bulk_in_both_directions(open_transport, tls):
    broker, ours, _, _ = tls
    config = BrokerConfig(url=f"mqtts://127.0.0.1:{broker.port}", tls=ours, wait=False)
    one, two = open_transport(config, "one"), open_transport(config, "two")
    for transport, name in ((one, "one"), (two, "two")):
        transport.subscribe(f"fl/{name}")
        transport.start()
        wait_for(transport, Subscribed)
    chunks = [os.urandom(61_440) for _ in range(20)]
    for chunk in chunks:
        one.publish("fl/two", chunk)
        two.publish("fl/one", chunk)
    for transport in (one, two):
        assert [wait_for(transport, Message).payload for _ in chunks] == chunks


# paho leaves the socket of a failed handshake to the garbage collector, which says so.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*SSLSocket:pytest.PytestUnraisableExceptionWarning")
@NEEDS_MOSQUITTO
@pytest.mark.broker
@pytest.mark.parametrize(
    "case, reason",
    [
        ("only the system's authorities are trusted", "certificate is not trusted"),
        ("another authority is trusted", "certificate is not trusted"),
        ("the broker's certificate is for another name", "certificate is not trusted"),
        ("no client certificate", "."),
        ("a client certificate of another authority", "."),
        ("no TLS at all", "."),
    ],
)
def test_tls_that_does_not_fit_is_refused_and_never_falls_back_to_plain(open_transport, tls, case, reason):
    broker, ours, stranger, theirs = tls
    url = f"mqtts://127.0.0.1:{broker.port}"
    config = {
        "only the system's authorities are trusted": BrokerConfig(url=url, wait=False),
        "another authority is trusted": BrokerConfig(url=url, wait=False, tls=TlsConfig(ca=stranger.ca)),
        "the broker's certificate is for another name": BrokerConfig(
            url=f"mqtts://localhost:{broker.port}", wait=False, tls=ours
        ),
        "no client certificate": BrokerConfig(url=url, wait=False, tls=TlsConfig(ca=ours.ca)),
        "a client certificate of another authority": BrokerConfig(
            url=url, wait=False, tls=TlsConfig(ca=ours.ca, **theirs)
        ),
        "no TLS at all": BrokerConfig(url=f"mqtt://127.0.0.1:{broker.port}", wait=False),
    }[case]
    transport = open_transport(config)
    with pytest.raises(BrokerAway, match=reason):
        transport.start()
    transport.publish("fl/x", b"secret")
    assert transport.traffic.messages_up == 0


@pytest.mark.parametrize("broken", ["ca", "cert"])
def test_certificates_that_cannot_be_read_are_told_before_anything_is_sent(open_transport, tmp_path, broken):
    (tmp_path / "bad.pem").write_text("not a certificate", encoding="utf-8")
    for path in (tmp_path / "bad.pem", tmp_path / "none.pem"):
        with pytest.raises(ConfigError, match="certificates cannot be loaded"):
            open_transport(BrokerConfig(url="mqtts://127.0.0.1", tls=TlsConfig(**{broken: path}))).start()


@NEEDS_MOSQUITTO
@pytest.mark.broker
def test_a_broker_that_hangs_is_noticed_and_found_again(open_transport):
    """Stopped, not killed: the connection stands and nothing comes. Only the keepalive can tell."""
    with MosquittoBroker() as broker:
        impatient = BrokerConfig(url=broker.url).model_copy(update={"keepalive_s": 1})
        transport = open_transport(impatient, "porch")
        transport.start()
        wait_for(transport, Connected)
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            wait_for(transport, Disconnected)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        wait_for(transport, Connected)
