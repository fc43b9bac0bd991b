"""What a Mosquitto with certificates lets in and through: rows 31, 32, 34 and 49 of the test matrix."""

from __future__ import annotations

import ssl
import threading
import time
from datetime import datetime, timedelta, timezone

import paho.mqtt.client as paho
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from identity_harness import free_ports
from mqtt_harness import NEEDS_MOSQUITTO
from paho.mqtt.enums import CallbackAPIVersion
from pydantic import ValidationError

from coordinator.broker import MosquittoBroker
from coordinator.config import CoordinatorConfig, EmbeddedConfig, IdentityConfig
from coordinator.identity.authority import Authority, pem_of
from coordinator.identity.enrolment import Enrolment
from coordinator.identity.ledger import identity_folder
from coordinator.identity.serving import IdentityService
from coordinator.service.preflight import check_private
from edge_agent.core.config import BrokerConfig, TlsConfig, check_tls
from edge_agent.core.errors import BrokerAway, UsageError
from edge_agent.core.task import Task
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.topics import Topics

pytestmark = [NEEDS_MOSQUITTO, pytest.mark.broker]

LIMIT_S = 20.0
TOPICS = Topics("home")
NOW = datetime.now(timezone.utc)


class Certified:
    """A broker with certificates, and clients for it."""

    def __init__(self, folder):
        port, enroll_port = free_ports()
        config = IdentityConfig(host="localhost", bind="127.0.0.1", port=port, enroll_port=enroll_port)
        self.folder = folder
        self.port = port
        self.authority = Authority.create(identity_folder(folder), "home", NOW)
        self.service = IdentityService(Enrolment(folder, "home", config))
        self.clients = []

    def certificate(self, name, *, authority=None, begin=NOW, life=timedelta(hours=1), server=False):
        """A file with a key and its certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        path = self.folder / f"{name}-{len(self.clients)}.pem"
        authority = authority or self.authority
        if server:
            made = authority.for_server(["localhost", "127.0.0.1"], key.public_key(), begin, life)
        else:
            made = authority.for_client(name, key.public_key(), begin, life)
        path.write_bytes(pem_of(key) + made.public_bytes(Encoding.PEM))
        return path

    def client(self, file, client_id="x", *, user=None):
        one = Client(self.port, identity_folder(self.folder) / "ca.pem", file, client_id, user)
        self.clients.append(one)
        return one


class Client:
    """An MQTT client that notes whether it got in, what it heard, and whether it was thrown off."""

    def __init__(self, port, ca, file, client_id, user):
        self.heard = []
        self.is_in = threading.Event()
        self.ended = threading.Event()
        self.mqtt = paho.Client(CallbackAPIVersion.VERSION2, client_id=client_id, reconnect_on_failure=False)
        context = ssl.create_default_context(cafile=str(ca))
        if file is not None:
            context.load_cert_chain(file)
        self.mqtt.tls_set_context(context)
        if user is not None:
            self.mqtt.username_pw_set(user, "a password")
        self.mqtt.on_connect = lambda *a: self.is_in.set() if not a[3].is_failure else self.ended.set()
        self.mqtt.on_disconnect = lambda *_: self.ended.set()
        self.mqtt.on_message = lambda _client, _data, message: self.heard.append((message.topic, message.payload))
        self.mqtt.connect("127.0.0.1", port)
        self.mqtt.loop_start()

    def gets_in(self):
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until and not self.is_in.is_set() and not self.ended.wait(0.01):
            pass
        return self.is_in.is_set()

    def listens(self, *filters):
        done = threading.Event()
        self.mqtt.on_subscribe = lambda *_: done.set()
        self.mqtt.subscribe([(one, 1) for one in filters])
        assert done.wait(LIMIT_S)

    def says(self, topic, payload=b"x", qos=1):
        info = self.mqtt.publish(topic, payload, qos=qos)
        if qos:
            info.wait_for_publish(LIMIT_S)


@pytest.fixture
def site(tmp_path):
    site = Certified(tmp_path)
    site.service.start(NOW)
    yield site
    for client in site.clients:
        client.mqtt.disconnect()
        client.mqtt.loop_stop()
    site.service.stop()


def refused(site, file, **others):
    """Whether a client with this certificate does not get in; in TLS 1.3 it notices only after its own handshake."""
    try:
        return not site.client(file, **others).gets_in()
    except (ssl.SSLError, OSError):
        return True


def test_row_31_client_id_of_another_agent_takes_nothing_over(site):
    victim = site.client(site.certificate("porch"), "porch-1")
    assert victim.gets_in()
    mallory = site.certificate("mallory")
    for client_id in ("porch", "porch-1", "coordinator", ""):
        for user in (None, "porch", "coordinator"):
            assert site.client(mallory, client_id, user=user).gets_in(), "as mallory, whatever it says"
    spoken = site.client(mallory, "porch", user="porch")
    assert spoken.gets_in()
    ear = site.client(site.certificate("coordinator"), "c")
    ear.gets_in()
    ear.listens(f"{TOPICS.root}/#")
    spoken.says(TOPICS.up("porch"), b"as porch")
    spoken.says(TOPICS.up("mallory"), b"as mallory")
    wait_until(lambda: ear.heard)
    assert ear.heard == [(TOPICS.up("mallory"), b"as mallory")]
    assert not victim.ended.is_set(), "the victim's session goes on"
    victim.says(TOPICS.up("porch"), b"still here")
    wait_until(lambda: len(ear.heard) == 2)


def wait_until(condition):
    until = time.monotonic() + LIMIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < until
        pause.wait(0.01)


def test_row_32_enrolled_agent_reaches_no_topic_of_another_in_10_000_tries(site):
    victim = site.client(site.certificate("porch"))
    mallory = site.client(site.certificate("mallory"))
    chief = site.client(site.certificate("coordinator"))
    for one in (victim, mallory, chief):
        assert one.gets_in()
    victim.listens(*TOPICS.for_agent("porch"))
    chief.listens(f"{TOPICS.root}/#")
    mallory.listens("#", "+/#", f"{TOPICS.root}/#", f"{TOPICS.root}/a/+/dn", f"{TOPICS.root}/a/porch/+", "$SYS/#")
    foreign = [
        *(make("porch") for make in (TOPICS.up, TOPICS.down, TOPICS.up_chunks, TOPICS.down_chunks)),
        *(TOPICS.presence("porch"), TOPICS.heartbeat("porch"), TOPICS.announce, TOPICS.coordinators),
        *(TOPICS.broadcast("a" * 16), TOPICS.down("mallory"), TOPICS.down_chunks("mallory")),
        *("fl/1/other/a/mallory/up", f"{TOPICS.root}/claim/x", "$SYS/broker", f"{TOPICS.root}/a/mallory/up/x"),
    ]
    tries = 0
    while tries < 10_000:
        for topic in foreign:
            mallory.says(topic, b"leak", qos=0)
            tries += 1
    mallory.says(TOPICS.up("mallory"), b"done")
    for number in range(200):
        victim.says(TOPICS.up("porch"), b"secret %d" % number, qos=0)
        chief.says(TOPICS.down("porch"), b"secret %d" % number, qos=0)
    chief.says(TOPICS.announce, b"for all")
    wait_until(
        lambda: (TOPICS.announce, b"for all") in mallory.heard and (TOPICS.up("mallory"), b"done") in chief.heard
    )
    wait_until(lambda: (TOPICS.announce, b"for all") in victim.heard)
    assert [one for one in chief.heard if one[1] == b"leak"] == []
    assert [one for one in victim.heard if one[1] == b"leak"] == []
    assert [one for one in mallory.heard if not one[0].startswith("$SYS")] == [(TOPICS.announce, b"for all")]
    assert len([one for one in victim.heard if one[0] == TOPICS.down("porch")]) == 200, "and the victim hears its own"


def test_row_34_only_a_certificate_that_holds_now_and_is_of_this_authority_gets_in(site, tmp_path):
    assert site.client(site.certificate("porch")).gets_in()
    assert refused(site, None)
    assert refused(site, None, client_id="porch", user="coordinator")
    assert refused(site, site.certificate("porch", begin=NOW - timedelta(days=40), life=timedelta(days=30)))
    assert refused(site, site.certificate("porch", begin=NOW + timedelta(days=1)))
    other = Authority.create(tmp_path / "other", "home", NOW)
    assert refused(site, site.certificate("porch", authority=other))
    assert refused(site, site.certificate("coordinator", authority=other))
    assert refused(site, site.certificate("broker", server=True)), "the broker's own kind is for servers"
    assert refused(site, identity_folder(site.folder) / "broker.pem")


A_SOCKET_THAT_PAHO_LEAVES = pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket")
"""Where a TLS handshake fails, paho leaves the socket to the garbage collector."""


def transport(url, ca, cert=None):
    config = BrokerConfig(url=url, tls=TlsConfig(ca=ca, cert=cert), wait=False)
    return MqttTransport(config, "porch")


@A_SOCKET_THAT_PAHO_LEAVES
def test_row_49_an_agent_talks_to_no_broker_of_another_authority_or_without_tls(site, tmp_path):
    mine = identity_folder(site.folder) / "ca.pem"
    cert = site.certificate("porch")
    good = transport(f"mqtts://localhost:{site.port}", mine, cert)
    good.start()
    good.close()

    Authority.create(tmp_path / "other", "home", NOW)
    with pytest.raises(BrokerAway, match="certificate is not trusted"):
        transport(f"mqtts://localhost:{site.port}", tmp_path / "other" / "ca.pem", cert).start()
    with MosquittoBroker() as plain, pytest.raises(BrokerAway):  # no fallback to plain
        transport(f"mqtts://127.0.0.1:{plain.port}", mine, cert).start()


@A_SOCKET_THAT_PAHO_LEAVES
def test_row_49_an_enrolled_device_cannot_stand_for_the_broker(site):
    files = site.service.files
    real = files.broker.read_bytes()
    files.broker.write_bytes(site.certificate("mallory").read_bytes())
    site.service.broker.reload()
    try:
        with pytest.raises(BrokerAway, match="certificate is not trusted"):
            until = time.monotonic() + LIMIT_S
            while time.monotonic() < until:  # until Mosquitto has read it
                one = transport(f"mqtts://localhost:{site.port}", files.folder / "ca.pem", site.certificate("porch"))
                one.start()
                one.close()
    finally:
        files.broker.write_bytes(real)


@pytest.mark.parametrize("host", ["10.9.9.9", "broker.example", "0.0.0.0", "192.168.1.2"])
def test_row_49_a_broker_without_tls_on_another_machine_is_refused(host):
    with pytest.raises(UsageError, match=r"is without TLS and not on this machine: .*--insecure"):
        check_tls(BrokerConfig(url=f"mqtt://{host}:1883"))
    check_tls(BrokerConfig(url=f"mqtts://{host}:8883"))


def test_row_49_the_coordinator_opens_no_broker_without_tls_to_the_network(tmp_path):
    task = Task(class_names=("a", "b"))
    for bind in ("127.0.0.1", "localhost", "::1"):
        check_private(CoordinatorConfig(task=task, embedded=EmbeddedConfig(bind=bind)))
    for bind in ("0.0.0.0", "::", "10.0.0.1"):
        with pytest.raises(ValidationError, match=r"the embedded broker has no TLS"):
            EmbeddedConfig(bind=bind, password_file=tmp_path)
    with pytest.raises(UsageError, match="is without TLS"):
        check_private(CoordinatorConfig(task=task, broker=BrokerConfig(url="mqtt://10.0.0.1")))
