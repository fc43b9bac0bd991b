"""``edge-agent doctor --config`` beside the agent of that configuration, on a real broker: it disturbs nothing."""

from __future__ import annotations

import json
import threading
import time

import paho.mqtt.client as paho
import pytest
from mqtt_harness import NEEDS_MOSQUITTO, PATIENCE_S, wait_for
from paho.mqtt.enums import CallbackAPIVersion

from coordinator.broker import EmbeddedBroker, MosquittoBroker
from edge_agent.agent.event_loop import will_of
from edge_agent.cli import main
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Disconnected, Message, Subscribed

TOPICS = Topics("home")


KINDS = [
    pytest.param(EmbeddedBroker, id="amqtt"),
    pytest.param(MosquittoBroker, id="mosquitto", marks=NEEDS_MOSQUITTO),
]


@pytest.fixture(params=KINDS)
def broker(request):
    with request.param("127.0.0.1", 0) as broker:
        yield broker.config()


def events_of(transport, seconds):
    found = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (event := transport.receive(0.1)) is not None:
            found.append(event)
    return found


@pytest.mark.broker
def test_doctor_leaves_session_will_and_messages_of_the_live_agent(broker, tmp_path, capsys, request):
    config = AgentConfig(id="porch", state=tmp_path / "porch", broker=broker, data=DataConfig(source="none:"))
    file = tmp_path / "agent.toml"
    file.write_text(
        f'id = "porch"\nstate = "{tmp_path / "porch"}"\n[broker]\nurl = "{broker.url}"\n[data]\nsource = "none:"\n'
    )
    agent = MqttTransport(broker, "porch", will=will_of(config, "b1"))
    watch = MqttTransport(broker, "watch")
    agent.subscribe(*TOPICS.for_agent("porch"))
    watch.subscribe(TOPICS.presence("porch"), TOPICS.up("porch"), TOPICS.heartbeat("porch"))
    for transport in (agent, watch):
        transport.start()
        wait_for(transport, Subscribed)
    namesake = paho.Client(CallbackAPIVersion.VERSION2, client_id="porch-doctor")
    breaks = []
    namesake.on_disconnect = lambda *_: breaks.append("put out")
    namesake.connect("127.0.0.1", broker.port)
    namesake.loop_start()
    visitors = 2
    orders = []
    heard = []
    doctors = [
        threading.Thread(target=main, args=(["doctor", "--json", "--config", str(file)],)) for _ in range(visitors)
    ]
    for doctor in doctors:
        doctor.start()
    while any(doctor.is_alive() for doctor in doctors):
        orders.append(b"%d" % len(orders))
        watch.publish(TOPICS.down("porch"), orders[-1])
        while not heard or getattr(heard[-1], "payload", b"") != orders[-1]:
            event = agent.receive(PATIENCE_S)
            assert event is not None, "the agent hears what is said to it"
            heard.append(event)
    said = [event for event in events_of(watch, 1) if isinstance(event, Message)]
    heard += events_of(agent, 0.5)
    broken = list(breaks)
    namesake.disconnect()
    namesake.loop_stop()
    agent.close()
    watch.close()
    assert broken == [], "no client id is one that another program may have"
    assert [event for event in heard if isinstance(event, Disconnected)] == [], "the agent was not put out"
    assert [event.payload for event in heard if isinstance(event, Message)] == orders
    assert [event for event in said if event.topic == TOPICS.presence("porch") or event.retained] == []
    assert len({event.payload for event in said}) == visitors, "each has spoken as a separate start"
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(step["ok"] for found in told for step in found["broker"])
    name = "mosquitto version 2" if "mosquitto" in request.node.name else "not known, which is no fault"
    for found in told:
        (kind,) = [step["detail"] for step in found["broker"] if step["step"] == "kind"]
        assert kind.startswith(name)
    if "mosquitto" in request.node.name:
        assert len([event for event in said if event.topic == TOPICS.up("porch")]) == visitors
        assert not any("as far as" in step["detail"] for found in told for step in found["broker"])


@pytest.mark.broker
def test_the_verdict_says_what_a_step_that_failed_means(broker, tmp_path, capsys):
    file = tmp_path / "agent.toml"
    source = "digits:optdigits?n=100"
    broker_and_data = f'[broker]\nurl = "{broker.url}"\n[data]\nsource = "{source}"\n'
    file.write_text(f'id = "porch"\ntier = "head"\nstate = "porch"\n{broker_and_data}')
    assert main(["doctor", "--json", "--timeout", "0.5", "--config", str(file)]) == 75
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    begin = "not ready: the broker has no coordinator for it (coordinator: none of federation 'home' answered"
    assert verdict.startswith(begin)
