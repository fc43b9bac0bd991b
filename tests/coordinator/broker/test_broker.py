from __future__ import annotations

import contextlib
import os
import queue
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from paho.mqtt import client as mqtt

from coordinator.broker import (
    EmbeddedBroker,
    ManagedMosquitto,
    MosquittoBroker,
    find_mosquitto,
    held_port,
    settings_text,
)
from coordinator.broker.access import (
    ALL_AGENTS,
    Rules,
    add_rules,
    hash_password,
    is_password,
    mosquitto_acl,
    read_passwords,
    read_relays,
    relays_file,
    set_password,
    set_relay,
)
from coordinator.config import EmbeddedConfig
from edge_agent.core.config import is_loopback, parse
from edge_agent.core.errors import BrokerAway, ConfigError, MissingCapability, StateError, UsageError
from edge_agent.wire.transport import DEFAULT_MAX_PAYLOAD_BYTES

PATIENCE_S = 20
BROKERS = [
    pytest.param(EmbeddedBroker, id="embedded"),
    pytest.param(
        MosquittoBroker,
        id="mosquitto",
        marks=pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
    ),
]


class Client:
    """A paho client whose callbacks only put things into queues."""

    def __init__(self, port, name, user=None, password=None, will=None):
        self.connects = queue.Queue()
        self.subscribed = queue.Queue()
        self.messages = queue.Queue()
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id=name, reconnect_on_failure=True)
        self.client.reconnect_delay_set(1, 1)
        self.client.on_connect = lambda _c, _u, _f, reason, _p: self.connects.put(not reason.is_failure)
        self.client.on_subscribe = lambda _c, _u, _m, codes, _p: self.subscribed.put(codes)
        self.client.on_message = lambda _c, _u, message: self.messages.put((message.topic, message.payload))
        if user:
            self.client.username_pw_set(user, password)
        if will:
            self.client.will_set(will, b"gone", qos=1)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.disconnect()
        self.client.loop_stop()

    def is_let_in(self):
        return self.connects.get(timeout=PATIENCE_S)

    def listen(self, topic):
        self.client.subscribe(topic, qos=1)
        return self.subscribed.get(timeout=PATIENCE_S)

    def say(self, topic, payload):
        self.client.publish(topic, payload, qos=1)

    def hear(self):
        return self.messages.get(timeout=PATIENCE_S)


def wait_until(condition):
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.01)


@pytest.mark.broker
@pytest.mark.parametrize("kind", BROKERS)
def test_message_larger_than_a_chunk_goes_through(kind):
    payload = os.urandom(200 * 1024)
    with kind() as broker, Client(broker.port, "listener") as listener, Client(broker.port, "speaker") as speaker:
        assert listener.is_let_in()
        listener.listen("fl/1/home/#")
        speaker.say("fl/1/home/a/porch/up", payload)
        assert listener.hear() == ("fl/1/home/a/porch/up", payload)
        assert broker.config().url == broker.url == f"mqtt://127.0.0.1:{broker.port}"


@pytest.mark.broker
@pytest.mark.parametrize("kind", BROKERS)
def test_killed_broker_comes_back_on_its_port_and_clients_find_it(kind):
    with kind() as broker, Client(broker.port, "listener") as listener:
        assert listener.is_let_in()
        port = broker.port
        first = broker.pid
        os.kill(first, signal.SIGKILL)
        assert listener.is_let_in(), "paho has connected a second time"
        assert broker.is_alive
        assert (broker.port, broker.restarts) == (port, 1)
        assert broker.pid != first
        listener.listen("t")
        listener.say("t", b"again")
        assert listener.hear() == ("t", b"again")


@pytest.mark.broker
@pytest.mark.parametrize("kind", BROKERS)
def test_stopped_broker_is_gone_and_stays_gone(kind):
    broker = kind()
    broker.start()
    pid = broker.pid
    port = broker.port
    broker.stop()
    assert not broker.is_alive
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with held_port("127.0.0.1", port) as free:
        assert free == port
    assert broker.restarts == 0
    broker.stop()


PARENT = """
import sys, time
from coordinator import broker
running = getattr(broker, sys.argv[1])()
running.start()
print(running.pid, running.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.broker
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system cannot wait for a process that is no child")
@pytest.mark.parametrize("kind", BROKERS)
def test_broker_goes_with_a_parent_that_is_killed(kind):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, kind.__name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid, port = (int(word) for word in parent.stdout.readline().split())
        broker = os.pidfd_open(pid)
        os.kill(parent.pid, signal.SIGKILL)
        ended, _, _ = select.select([broker], [], [], PATIENCE_S)
        os.close(broker)
    assert ended, "a process's descriptor becomes readable when the process ends"
    with held_port("127.0.0.1", port) as free:
        assert free == port


@pytest.fixture
def passwords(tmp_path):
    path = tmp_path / "users"
    for user in ("coordinator", "porch", "attic"):
        set_password(path, user, f"secret of {user}")
    return path


@pytest.mark.broker
@pytest.mark.parametrize("kind", BROKERS)
def test_a_relay_speaks_and_listens_for_its_agents_and_for_no_others(kind, passwords):
    set_password(passwords, "north", "secret of north")
    set_relay(passwords, "north", ("porch",))
    with kind(password_file=passwords) as broker:
        boss_password = broker.config().password() or "secret of coordinator"
        with (
            Client(broker.port, "boss", "coordinator", boss_password) as boss,
            Client(broker.port, "north", "north", "secret of north") as north,
        ):
            assert boss.is_let_in()
            assert north.is_let_in()
            boss.listen("fl/1/home/a/+/up")
            boss.listen("fl/1/home/p/+/+/up")
            north.say("fl/1/home/a/attic/up", b"forged")
            north.say("fl/1/home/p/1-of-2/porch/up", b"of the porch")
            assert boss.hear() == ("fl/1/home/p/1-of-2/porch/up", b"of the porch")
            north.listen("fl/1/home/a/attic/dn")
            north.listen("fl/1/home/a/porch/dn")
            boss.say("fl/1/home/a/attic/dn", b"for the attic")
            boss.say("fl/1/home/a/porch/dn", b"for the porch")
            assert north.hear() == ("fl/1/home/a/porch/dn", b"for the porch")


def test_a_relay_for_all_agents_commands_none():
    rules = Rules("home", {"north": (ALL_AGENTS,)})
    assert rules.may_publish("north", "fl/1/home/a/porch/up")
    assert rules.may_subscribe("north", "fl/1/home/a/porch/dn")
    assert not rules.may_publish("north", "fl/1/home/a/porch/dn")
    assert not rules.may_publish("north", "fl/1/home/ann")
    assert rules.may_publish("north", "fl/1/home/r/north/up")
    assert not rules.may_publish("north", "fl/1/home/r/north/dn")
    assert not rules.may_publish("north", "fl/1/home/r/south/up")
    assert not rules.may_publish("porch", "fl/1/home/r/porch/up")
    assert not rules.may_publish("porch", "fl/1/home/a/attic/up")


def test_what_a_user_relays_is_replaced_and_written_into_the_acl(tmp_path):
    users, acl = tmp_path / "users", tmp_path / "acl"
    set_password(users, "north", "secret")
    assert read_relays(users) == {}
    set_relay(users, "north", ("porch", "attic"))
    relays = set_relay(users, "north", ("porch",))
    assert relays == read_relays(users) == {"north": ("porch",)}
    assert add_rules(acl, "home", relays)
    assert "user north\ntopic write fl/1/home/a/porch/up\n" in acl.read_text()
    assert "attic" not in acl.read_text()
    assert not add_rules(acl, "home", relays)


@pytest.mark.parametrize("content", ["[]", '{"north": "porch"}', '{"north": ["a b"]}', '{"n h": ["a"]}', "{"])
def test_a_damaged_list_of_relays_is_an_error(tmp_path, content):
    users = tmp_path / "users"
    relays_file(users).write_text(content)
    with pytest.raises(StateError, match=r"users\.relays"):
        read_relays(users)


def test_a_relay_for_no_name_of_an_agent_is_refused(tmp_path):
    with pytest.raises(UsageError, match="a b"):
        set_relay(tmp_path / "users", "north", ("a b",))


@pytest.mark.broker
@pytest.mark.parametrize("kind", BROKERS)
def test_users_are_let_in_by_password_and_kept_to_their_topics(kind, passwords):
    """The attic says something on the porch's topic and listens to it; a message on its own topic follows each try."""
    with kind(password_file=passwords) as broker, Client(broker.port, "stranger") as stranger:
        boss_password = broker.config().password() or "secret of coordinator"
        assert not stranger.is_let_in()
        with Client(broker.port, "liar", "porch", "secret of attic") as liar:
            assert not liar.is_let_in()
        with (
            Client(broker.port, "boss", "coordinator", boss_password) as boss,
            Client(broker.port, "attic", "attic", "secret of attic") as attic,
        ):
            assert boss.is_let_in()
            assert attic.is_let_in()
            boss.listen("fl/1/home/a/+/up")
            attic.say("fl/1/home/a/porch/up", b"forged")
            attic.say("fl/1/home/a/attic/up", b"mine")
            assert boss.hear() == ("fl/1/home/a/attic/up", b"mine")
            attic.listen("fl/1/home/a/porch/dn")
            attic.listen("fl/1/home/#")
            attic.listen("fl/1/home/a/attic/dn")
            boss.say("fl/1/home/a/porch/dn", b"for the porch")
            boss.say("fl/1/home/a/attic/dn", b"for the attic")
            assert attic.hear() == ("fl/1/home/a/attic/dn", b"for the attic")
            assert attic.messages.empty()


@pytest.mark.broker
def test_embedded_broker_refuses_a_will_on_the_topic_of_another(passwords):
    with EmbeddedBroker(password_file=passwords) as broker:
        with Client(broker.port, "attic", "attic", "secret of attic", will="fl/1/home/s/porch") as forger:
            assert not forger.is_let_in()
        with Client(broker.port, "attic", "attic", "secret of attic", will="fl/1/home/s/attic") as honest:
            assert honest.is_let_in()


@pytest.mark.broker
def test_embedded_broker_knows_users_that_are_enrolled_while_it_runs(tmp_path):
    path = tmp_path / "users"
    with EmbeddedBroker(password_file=path) as broker:
        set_password(path, "cellar", "two")
        with Client(broker.port, "cellar", "cellar", "two") as cellar:
            assert cellar.is_let_in()


def test_taken_port_is_a_usage_error_that_names_it():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port} .*choose another"):
            EmbeddedBroker(port=port).start()


def test_address_of_another_machine_is_a_usage_error():
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        EmbeddedBroker("192.0.2.1").start()


def test_broker_that_ends_at_once_is_reported_with_its_last_words():
    class Broken(EmbeddedBroker):
        def command(self):
            return [sys.executable, "-c", "raise SystemExit('no such plugin')"]

    broker = Broken()
    with pytest.raises(BrokerAway, match="no such plugin"):
        broker.start()
    assert not broker.is_alive


SLOW_TO_START = """
import select, signal, socket, sys
from pathlib import Path

listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
select.select([listener], [], [], 20)  # a client is connected to the system, not to this program
select.select([], [], [], 0.3)
signal.signal(signal.SIGHUP, lambda *_: Path(sys.argv[2]).write_text("files read again"))
while True:
    client, _ = listener.accept()
    while client.recv(100):
        pass
    client.close()
"""
"""A broker that opens its port long before it handles SIGHUP, as Mosquitto does on a machine that is busy."""


def test_reload_does_not_end_a_broker_that_has_just_started_or_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.broker.find_mosquitto", lambda: Path("mosquitto"))
    done = tmp_path / "reloaded"

    class SlowToStart(ManagedMosquitto):
        def command(self):
            return [sys.executable, "-c", SLOW_TO_START, str(self.port), str(done)]

    def reload_and_wait(broker):
        pid = broker.pid
        broker.reload()
        wait_until(done.exists)
        assert (broker.pid, broker.is_alive) == (pid, True)
        done.unlink()

    with SlowToStart("127.0.0.1", 0, tmp_path / "mosquitto.conf") as broker:
        reload_and_wait(broker)
        first = broker.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: broker.pid != first)
        reload_and_wait(broker)
        assert broker.restarts == 1


@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_mosquitto_lives_on_when_it_is_reloaded_at_once(tmp_path):
    settings = tmp_path / "mosquitto.conf"

    class Plain(ManagedMosquitto):
        def command(self):
            settings.write_text(settings_text(self.bind, self.port))
            return super().command()

    with Plain("127.0.0.1", 0, settings) as broker:
        pid = broker.pid
        broker.reload()
        with Client(broker.port, "porch") as porch:
            assert porch.is_let_in()
        assert (broker.pid, broker.restarts) == (pid, 0)


def test_coordinator_keeps_its_password_and_is_put_back_where_somebody_removed_it(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.broker.SupervisedBroker.start", lambda self: None)
    path = tmp_path / "users"
    broker = EmbeddedBroker(port=1883, password_file=path)
    broker.start()
    first = broker.config()
    assert first.user == "coordinator"
    assert len(first.password()) > 40
    assert is_password(first.password(), read_passwords(path)["coordinator"])
    assert first.password_file.stat().st_mode & 0o777 == 0o600
    set_password(path, "porch", "one")
    before = path.read_bytes()
    broker.start()
    assert path.read_bytes() == before, "nothing to do the second time"
    path.unlink()
    set_password(path, "porch", "one")
    broker.start()
    assert broker.config().password() == first.password()
    assert sorted(read_passwords(path)) == ["coordinator", "porch"]


def test_missing_amqtt_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "amqtt", None)
    with pytest.raises(MissingCapability, match=r"'amqtt'.*pip install .*\.\[coordinator\]'"):
        EmbeddedBroker().start()


def test_open_door_on_a_public_address_is_warned_about(monkeypatch, caplog):
    monkeypatch.setattr("coordinator.broker.SupervisedBroker.start", lambda self: None)
    EmbeddedBroker("0.0.0.0").start()
    assert "insecure_broker bind=0.0.0.0: without TLS on a public address: anybody who can connect" in caplog.text
    caplog.clear()
    EmbeddedBroker("127.0.0.1").start()
    assert caplog.text == ""


@pytest.mark.parametrize(
    "bind, expected", [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_loopback_is_told_from_public(bind, expected):
    assert is_loopback(bind) is expected
    assert not is_loopback("broker.example")


@pytest.mark.parametrize(
    "user, topic, allowed",
    [
        ("porch", "fl/1/home/a/porch/up", True),
        ("porch", "fl/1/home/a/porch/ub", True),
        ("porch", "fl/1/home/s/porch", True),
        ("porch", "fl/1/home/h/porch", True),
        ("porch", "fl/1/home/a/porch/dn", False),
        ("porch", "fl/1/home/a/attic/up", False),
        ("porch", "fl/1/home/s/attic", False),
        ("porch", "fl/1/home/ann", False),
        ("porch", "fl/1/home/b/0123456789abcdef", False),
        ("porch", "fl/1/other/a/porch/up", False),
        ("porch", "$SYS/broker", False),
        ("coordinator", "fl/1/home/ann", True),
        ("coordinator", "fl/1/other/ann", False),
        ("+", "fl/1/home/a/attic/up", False),
        ("#", "fl/1/home/a/attic/up", False),
        ("", "fl/1/home/a//up", False),
    ],
)
def test_rules_of_publishing(user, topic, allowed):
    assert Rules("home").may_publish(user, topic) is allowed


@pytest.mark.parametrize(
    "user, topic_filter, allowed",
    [
        ("porch", "fl/1/home/a/porch/dn", True),
        ("porch", "fl/1/home/a/porch/db", True),
        ("porch", "fl/1/home/b/0123456789abcdef", True),
        ("porch", "fl/1/home/ann", True),
        ("porch", "fl/1/home/a/+/dn", False),
        ("porch", "fl/1/home/a/porch/up", False),
        ("porch", "fl/1/home/a/attic/dn", False),
        ("porch", "fl/1/home/#", False),
        ("porch", "#", False),
        ("coordinator", "fl/1/home/a/+/up", True),
        ("coordinator", "#", False),
    ],
)
def test_rules_of_subscribing(user, topic_filter, allowed):
    assert Rules("home").may_subscribe(user, topic_filter) is allowed


@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_more_silent_connections_than_a_system_allows_files_shut_nobody_out_of_mosquitto():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        broker = stack.enter_context(MosquittoBroker())
        for _ in range(250):
            stack.enter_context(socket.create_connection(("127.0.0.1", broker.port), 5))
        honest = stack.enter_context(socket.create_connection(("127.0.0.1", broker.port), 5))
        honest.sendall(bytes.fromhex("100c00044d5154540402003c0000"))
        assert honest.recv(4).hex() == "20020000"


def test_mosquitto_rules_say_the_same():
    assert mosquitto_acl("home").splitlines() == [
        "user coordinator",
        "topic readwrite fl/1/home/#",
        "topic read $SYS/broker/version",
        "",
        "pattern write fl/1/home/a/%u/up",
        "pattern write fl/1/home/a/%u/ub",
        "pattern write fl/1/home/s/%u",
        "pattern write fl/1/home/h/%u",
        "pattern write fl/1/home/p/+/%u/up",
        "pattern write fl/1/home/p/+/%u/ub",
        "pattern read fl/1/home/a/%u/dn",
        "pattern read fl/1/home/a/%u/db",
        "pattern read fl/1/home/b/+",
        "pattern read fl/1/home/ann",
    ]


def test_mosquitto_settings_close_the_door_when_there_are_passwords(tmp_path):
    text = settings_text("127.0.0.1", 1883, (tmp_path / "users", tmp_path / "acl"))
    assert "listener 1883 127.0.0.1" in text
    assert "allow_anonymous false" in text
    assert f"acl_file {tmp_path / 'acl'}" in text
    assert "allow_anonymous true" in settings_text("127.0.0.1", 1883)


def test_password_hash_is_that_of_another_implementation():
    """PBKDF2-HMAC-SHA512 from the cryptography package."""
    import base64

    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.pbkdf2 import PBKDF2HMAC

    digest = PBKDF2HMAC(hashes.SHA512(), 64, b"twelve bytes", 10_000).derive(b"geheim")
    expected = f"$7$10000${base64.b64encode(b'twelve bytes').decode()}${base64.b64encode(digest).decode()}"
    assert hash_password("geheim", b"twelve bytes") == expected


def test_only_the_right_password_opens():
    hashed = hash_password("geheim", b"salt")
    assert is_password("geheim", hashed)
    assert not is_password("Geheim", hashed)
    assert not is_password("", hashed)


@pytest.mark.parametrize(
    "hashed",
    ["", "geheim", "$6$x$y", "$7$0$c2FsdA==$aGFzaA==", "$7$10$c2FsdA==$aGFzaA==", "$7$10$!$!", "$7$99999999$a$b"],
)
def test_malformed_hash_opens_for_nobody(hashed):
    assert not is_password("geheim", hashed)


def test_password_file_is_private_and_changes_one_user(tmp_path):
    path = tmp_path / "users"
    set_password(path, "porch", "one", salt=b"a")
    set_password(path, "attic", "two", salt=b"b")
    before = read_passwords(path)
    set_password(path, "porch", "three", salt=b"c")
    after = read_passwords(path)
    assert sorted(after) == ["attic", "porch"]
    assert after["attic"] == before["attic"]
    assert is_password("three", after["porch"])
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"porch\n", b"porch:secret\n", b"\xff\xfe", b"\n", b"a:$7$1$eA==$eA==\n"])
def test_damaged_password_file_is_an_error(tmp_path, content):
    path = tmp_path / "users"
    path.write_bytes(content)
    with pytest.raises(StateError):
        read_passwords(path)


@pytest.mark.parametrize("user", ["a:b", "a\nb", "porch\n", "", "Porch", "a/b", "+"])
def test_user_that_could_be_taken_for_something_else_is_refused(tmp_path, user):
    with pytest.raises(UsageError, match="does not match"):
        set_password(tmp_path / "users", user, "one")


# --- the embedded broker, where somebody is hostile --------------------------------------------------------------


def connect_packet(user, password):
    """A CONNECT by the letter of MQTT 3.1.1."""

    def text(value):
        return struct.pack("!H", len(value)) + value.encode()

    body = text("MQTT") + bytes([4, 0xC2, 0, 30]) + text(f"s-{secrets.token_hex(4)}") + text(user) + text(password)
    return bytes([0x10]) + bytes([len(body)]) + body


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.broker
def test_embedded_broker_gives_no_retained_message_to_a_new_session(passwords):
    """amqtt gave those of other agents to every new session, past its rules."""
    with (
        EmbeddedBroker(password_file=passwords) as broker,
        Client(broker.port, "porch", "porch", "secret of porch") as porch,
    ):
        assert porch.is_let_in()
        porch.client.publish("fl/1/home/a/porch/up", b"private", 1, retain=True).wait_for_publish(PATIENCE_S)
        with Client(broker.port, "attic", "attic", "secret of attic") as attic:
            assert attic.is_let_in()
            attic.listen("fl/1/home/a/attic/dn")
            attic.say("fl/1/home/a/attic/up", b"x")
            with pytest.raises(queue.Empty):
                attic.messages.get(timeout=1.0)


@pytest.mark.broker
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_row_30_embedded_broker_ends_the_session_of_an_oversize_packet_before_it_is_read(passwords):
    with EmbeddedBroker(password_file=passwords) as broker:
        before = resident_bytes(broker.pid)
        with socket.create_connection(("127.0.0.1", broker.port), PATIENCE_S) as peer:
            peer.sendall(connect_packet("porch", "secret of porch"))
            assert peer.recv(4) == b"\x20\x02\x00\x00"
            peer.sendall(b"\x30" + b"\x80\x80\x80\x32")  # a publish of 100 MiB
            with contextlib.suppress(OSError):
                for _ in range(100):
                    peer.sendall(bytes(1 << 20))
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b""
        assert resident_bytes(broker.pid) - before < 4 << 20
        with (
            Client(broker.port, "porch", "porch", "secret of porch") as porch,
            Client(broker.port, "boss", "coordinator", broker.config().password()) as boss,
        ):
            assert porch.is_let_in()
            assert boss.is_let_in()
            boss.listen("fl/1/home/a/+/ub")
            porch.say("fl/1/home/a/porch/ub", bytes(DEFAULT_MAX_PAYLOAD_BYTES))
            assert len(boss.hear()[1]) == DEFAULT_MAX_PAYLOAD_BYTES


@pytest.mark.broker
def test_row_41_wrong_passwords_that_wait_to_be_checked_delay_no_honest_message_and_no_login(tmp_path, monkeypatch):
    """Messages and logins of honest clients do not wait until the passwords before them have been checked.

    The event loop once checked them itself, and nobody's message passed meanwhile. Here a check takes about a second:
    most wrong passwords are still unchecked when all honest clients have their answers, however busy the machine is.
    """
    passwords = tmp_path / "users"
    for user in ("coordinator", "porch"):
        set_password(passwords, user, f"secret of {user}")
    monkeypatch.setattr("coordinator.broker.access.ITERATIONS", 2_500_000)
    set_password(passwords, "victim", "secret of victim")
    with EmbeddedBroker(password_file=passwords) as broker, contextlib.ExitStack() as stack:
        boss = stack.enter_context(Client(broker.port, "boss", "coordinator", broker.config().password()))
        porch = stack.enter_context(Client(broker.port, "porch", "porch", "secret of porch"))
        assert boss.is_let_in()
        assert porch.is_let_in()
        boss.listen("fl/1/home/a/+/up")
        liars = []
        for number in range(20):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", broker.port), PATIENCE_S))
            peer.sendall(connect_packet("victim", f"wrong {number}"))
            liars.append(peer)
        for number in range(5):
            porch.say("fl/1/home/a/porch/up", b"hello %d" % number)
            assert boss.hear() == ("fl/1/home/a/porch/up", b"hello %d" % number)
            with Client(broker.port, f"porch-{number}", "porch", "secret of porch") as again:
                assert again.is_let_in(), "its password was right before, and is known"
        answered, _, _ = select.select(liars, [], [], 0)
        assert len(answered) < len(liars) / 2, "the others wait for their check"


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "192.0.2.1", "broker.example"])
def test_embedded_broker_on_an_address_of_other_machines_needs_the_word_insecure(bind):
    with pytest.raises(ConfigError, match=r"has no TLS; name a Mosquitto.*or set insecure = true"):
        parse(EmbeddedConfig, {"bind": bind, "password_file": "users"}, where="x")
    assert parse(EmbeddedConfig, {"bind": bind, "insecure": True}, where="x").bind == bind
