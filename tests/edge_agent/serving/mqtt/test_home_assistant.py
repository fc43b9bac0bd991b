"""What ``edge-agent serve --mqtt`` publishes, through a real broker, as Home Assistant's MQTT integration reads it."""

from __future__ import annotations

import http.client
import json
import queue
import re
import subprocess
import sys
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from serving_site import fit_squares, png, square

from coordinator.broker import MosquittoBroker, find_mosquitto
from edge_agent.serving.mqtt.discovery import UNKNOWN

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
PAGE = (Path(__file__).parents[4] / "examples/guides/home-assistant.md").read_text(encoding="utf-8")
WAIT_S = 60
CONFIG = "homeassistant/device/headwater_porch/config"


class Home:
    """A client that listens as Home Assistant does, and keeps what it receives in order."""

    def __init__(self, port):
        self.received = queue.Queue()
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        self.client.on_message = lambda _client, _data, message: self.received.put(message)
        self.client.connect("127.0.0.1", port)
        self.client.subscribe("#")
        self.client.loop_start()

    def next_on(self, topic):
        """The next message on a topic; others are passed over."""
        while True:
            message = self.received.get(timeout=WAIT_S)
            if message.topic == topic:
                return message

    def close(self):
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def broker():
    with MosquittoBroker() as running:
        yield int(running.url.rpartition(":")[2])


@pytest.fixture
def serve(broker, make_bundle, tmp_path):
    """A function that starts the command of the page with the broker of the test; returns process and port."""
    bundle = make_bundle().path
    head = fit_squares(bundle, tmp_path / "head", tmp_path / "cache")
    processes = []

    def start():
        command = [sys.executable, "-m", "edge_agent", "serve", "--bundle", str(bundle), "--head", str(head)]
        command += ["--cache", str(tmp_path / "cache"), "--port", "0", "--json"]
        command += ["--mqtt", f"mqtt://127.0.0.1:{broker}", "--name", "Porch", "--vote", "2"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        started = json.loads(process.stdout.readline())
        return process, int(started["url"].rstrip("/").rpartition(":")[2])

    yield start
    for process in processes:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()


def send(port, pixels):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("POST", "/classify", png(pixels))
    assert connection.getresponse().status == 200
    connection.close()


def test_the_device_is_found_shows_its_class_and_goes_offline_when_it_is_killed(broker, serve):
    home = Home(broker)
    process, port = serve()
    described = json.loads(home.next_on(CONFIG).payload)
    assert {"answer", "probability", "inputs"} == described["components"].keys()
    answer = described["components"]["answer"]
    assert sorted(answer["options"]) == ["blue", "green", "red", UNKNOWN]
    availability = described["availability"][0]["topic"]
    assert home.next_on(availability).payload == b"online"
    for _ in range(2):  # one of them changes nothing yet
        send(port, square("red"))
    state = json.loads(home.next_on(answer["state_topic"]).payload)
    assert (state["class"], state["unknown"]) == ("red", False)
    assert re.search(r"value_json\['class'\]", answer["value_template"])
    process.kill()
    assert home.next_on(availability).payload == b"offline"
    home.close()


def test_home_assistant_that_starts_later_finds_everything(broker, serve):
    _, port = serve()
    for _ in range(2):
        send(port, square("blue"))
    early = Home(broker)
    described = early.next_on(CONFIG)
    assert described.retain
    early.client.publish("homeassistant/status", "online")
    state_topic = json.loads(described.payload)["components"]["answer"]["state_topic"]
    state = early.next_on(state_topic)
    assert not state.retain
    assert json.loads(state.payload)["class"] == "blue"
    early.close()


def test_the_page_names_the_entities_that_there_are():
    from edge_agent.serving.mqtt.discovery import DeviceDescription, discovery_message
    from edge_agent.serving.mqtt.topics import AnswerTopics

    named = set(re.findall(r"`((?:binary_)?sensor\.porch_\w+|image\.porch_\w+)`", PAGE))
    there = set()
    for described in (
        DeviceDescription("Porch", ("cat",), has_image=True),
        DeviceDescription("Porch", (), is_score=True),
    ):
        components = discovery_message(AnswerTopics("porch"), described)["components"]
        there |= {component["default_entity_id"] for component in components.values()}
    assert named == there
