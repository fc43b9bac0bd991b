"""An enrolled agent that is hostile, at a real Mosquitto with the federation's own rules: rows 31, 32, 33 and 42.

It knows its own password, the names of all agents and everything that it may read. Each try has its number in it, so a
leak is seen wherever it arrives: at another agent, or with a witness that reads all topics.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import random
import subprocess
import sys
import threading
import time

import pytest
from mqtt_harness import NEEDS_MOSQUITTO, wait_for
from paho.mqtt import client as paho

from coordinator.broker import MosquittoBroker
from coordinator.broker.access import COORDINATOR_USER, set_password
from edge_agent.core.config import BrokerConfig
from edge_agent.wire.messages import codec, down, up
from edge_agent.wire.mqtt import MqttTransport, session_of
from edge_agent.wire.topics import Topics, matches
from edge_agent.wire.transport import Disconnected, Message, Subscribed

pytestmark = [NEEDS_MOSQUITTO, pytest.mark.broker, pytest.mark.slow]
HONEST = tuple(f"h{number:02d}" for number in range(20))
TRIES = 10_000
TOPICS = Topics("home")
OWN = tuple(f"{TOPICS.root}/{end}" for end in ("a/mallory/up", "a/mallory/ub", "s/mallory", "h/mallory"))
READABLE = (TOPICS.down("mallory"), TOPICS.down_chunks("mallory"), TOPICS.broadcast("+"), TOPICS.announce)
CONFIG = """state = "state"
[broker]
url = "{url}"
user = "coordinator"
password_file = "coordinator.password"
[cohort]
min_agents = 1000
[task]
class_names = ["a", "b"]
encoder = "linear"
"""


def others(rng):
    """A topic or filter that the hostile agent has no right to: of any role, and of none."""
    victim = rng.choice([*HONEST, COORDINATOR_USER, "nobody", "+"])
    ends = ("a/{}/up", "a/{}/ub", "a/{}/dn", "a/{}/db", "s/{}", "h/{}", "a/{}/#", "a/{}", "+/{}", "a/{}/up/x")
    fixed = (
        "ann",
        "co",
        "b/" + "0" * 16,
        "b/x/y",
        "#",
        "a/#",
        "+/#",
        "a/+/+",
        "s/+",
        "h/#",
        "a/mallory",
        "a/mallory/#",
    )
    foreign = ("#", "+/+/#", "fl/#", "fl/1/office/a/mallory/up", "$SYS/#", "$SYS/broker/uptime", "fl/2/home/ann", "x")
    inside = [f"{TOPICS.root}/{end.format(victim)}" for end in ends] + [f"{TOPICS.root}/{end}" for end in fixed]
    return rng.choice(inside + list(foreign))


def may_read(topic):
    return any(matches(readable, topic) for readable in READABLE)


class Hostile:
    """A plain paho client as mallory; ``heard`` holds what reaches it."""

    def __init__(self, port, session, user="mallory", password="m", will=None):
        self.heard = queue.SimpleQueue()
        self.code = None
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, session, reconnect_on_failure=False)
        self.client.username_pw_set(user, password)
        if will:
            self.client.will_set(will, b"#will#", 1)
        self.connected = threading.Event()
        self.client.on_connect = self._connect
        self.client.on_message = lambda _c, _u, message: self.heard.put(message)
        self.client.max_queued_messages_set(0)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        assert self.connected.wait(20)

    def _connect(self, _client, _data, _flags, code, _properties):
        self.code = code
        self.connected.set()

    def close(self):
        self.client.disconnect()
        self.client.loop_stop()


class Honest:
    """An agent's connection that says hello again and again; ``took`` holds the seconds until each welcome."""

    def __init__(self, url, name, folder):
        config = BrokerConfig(url=url, user=name, password_file=folder / f"{name}.password")
        self.name = name
        self.transport = MqttTransport(config, name)
        self.took = []
        self.cuts = 0
        self.strange = []
        self.transport.subscribe(*TOPICS.for_agent(name))
        self.transport.start()
        wait_for(self.transport, Subscribed)

    def hello(self, limit_s=10.0):
        message = up.Hello(software="x", tier="train", samples=1, boot="b1", seq=len(self.took), connection=1)
        begin = time.monotonic()
        self.transport.publish(TOPICS.up(self.name), codec.encode(message))
        while time.monotonic() - begin < limit_s:
            event = self.transport.receive(0.5)
            if isinstance(event, Disconnected):
                self.cuts += 1
            if isinstance(event, Message):
                with contextlib.suppress(Exception):
                    if isinstance(codec.parse_from_coordinator(event.payload), down.Welcome):
                        self.took.append(time.monotonic() - begin)
                        return
                if b"#" in event.payload:
                    self.strange.append((event.topic, event.payload))
        self.took.append(limit_s)


@pytest.fixture
def site(tmp_path):
    """Mosquitto with the rules of the federation, a coordinator, and honest agents with their passwords."""
    users = tmp_path / "users"
    passwords = {COORDINATOR_USER: "c", "mallory": "m", **{name: f"p-{name}" for name in HONEST}}
    for user, password in passwords.items():
        set_password(users, user, password)
        (tmp_path / f"{user}.password").write_text(password)
    with MosquittoBroker(password_file=users) as broker, (tmp_path / "serve.log").open("wb") as log:
        (tmp_path / "coordinator.toml").write_text(CONFIG.format(url=broker.url))
        command = [sys.executable, "-m", "coordinator", "serve", "--config", "coordinator.toml"]
        serve = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        try:
            honest = [Honest(broker.url, name, tmp_path) for name in HONEST]
            honest[0].hello(60.0)
            honest[0].took.clear()
            yield broker, honest, serve, tmp_path
            for one in honest:
                one.transport.close()
        finally:
            serve.kill()
            serve.wait()


def keep_saying_hello(honest, stop):
    for one in itertools.cycle(honest):
        if stop.is_set():
            return
        one.hello()
        stop.wait(0.03)


def flood(port, stop):
    """As fast as one connection takes it, on its own topics: hellos, junk, heartbeats, chunks, presence."""
    hostile = Hostile(port, "mallory-flood")
    hello = codec.encode(up.Hello(software="x", tier="train", samples=1, boot="b6", seq=1, connection=1))
    junk = [(OWN[0], hello), (OWN[0], b"junk"), (OWN[3], b"{}"), (OWN[1], bytes(200)), (OWN[2], b"offline b6 1")]
    sent = 0
    for topic, payload in itertools.cycle(junk):
        if stop.is_set():
            break
        hostile.client.publish(topic, payload, qos=0)
        sent += 1
        if sent % 50 == 0:
            stop.wait(0.01)  # about 4,000 a second
    hostile.close()
    return sent


def p99(values):
    return sorted(values)[int(0.99 * (len(values) - 1))]


def test_rows_31_32_33_42_a_hostile_client_reaches_nothing_and_delays_nobody(site, record_property):
    broker, honest, serve, folder = site
    rng = random.Random(16)
    with contextlib.ExitStack() as stack:
        witness = Hostile(broker.port, "witness", COORDINATOR_USER, "c")
        stack.callback(witness.close)
        witness.client.subscribe([(f"{TOPICS.root}/#", 1)])
        mallory = Hostile(broker.port, "mallory-1")
        stack.callback(mallory.close)
        stop = threading.Event()
        sent = []
        threads = [
            threading.Thread(target=keep_saying_hello, args=(honest, stop)),
            threading.Thread(target=lambda: sent.append(flood(broker.port, stop))),
        ]
        for thread in threads:
            thread.start()
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(stop.set)
        recorded = []
        for number in range(TRIES):
            topic = others(rng)
            if number % 2:
                mallory.client.subscribe(topic, 1)
            elif "+" not in topic and "#" not in topic and not topic.startswith("$"):
                message = down.Announce(
                    software=f"#{number}#", boot="b6", seq=number, federation="f" * 32, epoch=1 << 40
                )
                mallory.client.publish(
                    topic, rng.choice(recorded or [codec.encode(message)]), 1, retain=number % 4 == 0
                )
                if number < 2000:  # later it replays what it has made
                    recorded.append(codec.encode(message))
            else:
                mallory.client.publish(rng.choice(OWN), b"#own-%d#" % number, 1, retain=True)
            if number % 100 == 0:  # it takes over every session whose id it can think of
                victim = rng.choice(HONEST)
                session = rng.choice([victim, f"{victim}-0", f"{victim}-{rng.getrandbits(24):x}", "home-coordinator"])
                Hostile(broker.port, session, will=TOPICS.presence(victim)).close()
                assert Hostile(broker.port, session, victim).code.is_failure
                stop.wait(0.2)
        until = time.monotonic() + 30
        while len([s for one in honest for s in one.took]) < 200 and time.monotonic() < until:
            stop.wait(0.2)
        marker = codec.encode(up.Bye(boot="b6", seq=1))
        mallory.client.publish(OWN[0], marker, 1).wait_for_publish(30)  # everything before it has gone through
    arrived = [witness.heard.get() for _ in range(witness.heard.qsize())]
    forged = [
        (message.topic, message.payload)
        for message in arrived
        if message.topic not in OWN and (b"#" in message.payload or b'"boot":"b6"' in message.payload)
    ]
    heard = [mallory.heard.get() for _ in range(mallory.heard.qsize())]
    leaked = [(message.topic, message.payload[:80]) for message in heard if not may_read(message.topic)]
    took = [seconds for one in honest for seconds in one.took]
    figures = {"hellos": len(took), "p50": sorted(took)[len(took) // 2], "p99": p99(took), "flood": sent[0]}
    record_property("figures", figures)
    print(json.dumps(figures))
    assert forged == []
    assert leaked == []
    assert [one.strange for one in honest] == [[]] * len(honest)
    assert [one.cuts for one in honest] == [0] * len(honest), "nobody lost a session"
    assert len(took) >= 100
    assert p99(took) < 1.0
    assert serve.poll() is None
    assert b"message_broke" not in (folder / "serve.log").read_bytes()


def test_row_33_what_a_hostile_client_has_left_at_the_broker_is_not_obeyed(site):
    """Retained messages on its own topics are all that it can leave; the coordinator counts them."""
    broker, honest, _, folder = site
    mallory = Hostile(broker.port, "mallory-1")
    hello = codec.encode(up.Hello(software="x", tier="train", samples=1, boot="b6", seq=1, connection=1))
    for topic in (*OWN, TOPICS.announce, TOPICS.down(HONEST[0]), TOPICS.down_chunks(HONEST[0]), TOPICS.coordinators):
        mallory.client.publish(topic, hello, 1, retain=True).wait_for_publish(20)
    mallory.close()
    late = Hostile(broker.port, "late", COORDINATOR_USER, "c")
    late.client.subscribe(f"{TOPICS.root}/#", 1)
    honest[0].hello()
    retained = set()
    with contextlib.suppress(queue.Empty):
        while True:
            message = late.heard.get(timeout=1.0)
            retained |= {message.topic} if message.retain else set()
    late.close()
    assert retained == set(OWN)
    honest[0].hello()
    assert honest[0].took[-1] < 1.0
    status = json.loads((folder / "state" / "status.json").read_bytes())
    ids = {agent["id"] for agent in status["agents"]}
    assert HONEST[0] in ids
    assert ids <= {HONEST[0], "mallory"}, (
        "on its own topic its hello counts once, as it is sent; nobody else is made up"
    )


def test_row_31_who_knows_the_ids_of_sessions_of_the_past_cannot_guess_the_next():
    """Mosquitto gives a session to whoever connects with its id; 64 random bits for each connection are in it."""
    sessions = {session_of("porch") for _ in range(100)}
    assert len(sessions) == 100
    assert all(len(session) == len("porch-") + 16 for session in sessions)
