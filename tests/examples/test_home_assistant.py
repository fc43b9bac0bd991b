"""What the page on Home Assistant has people send, through a real broker, as Home Assistant's MQTT sensor reads it.

Home Assistant 2024.3.3 itself (its MQTT integration, without its web server) was given the same messages once, by hand:
it made ``sensor.porch_camera`` of the first, and had its class and attributes after the second.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import jinja2
import paho.mqtt.client as mqtt
import pytest

from coordinator.broker import MosquittoBroker, find_mosquitto

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
PAGE = (Path(__file__).parents[2] / "examples/guides/home-assistant.md").read_text(encoding="utf-8")
TOPIC = re.compile(r"homeassistant/(?P<component>\w+)/(?:(?P<node>[\w-]+)/)?(?P<object>[\w-]+)/config")
"""Where Home Assistant looks for discovery messages, by its documentation."""

KNOWN = {
    "name": str,
    "unique_id": str,
    "state_topic": str,
    "value_template": str,
    "json_attributes_topic": str,
    "expire_after": int,
}
"""Keys of an MQTT sensor that the page uses, with their types, by Home Assistant's documentation."""


def connected(port):
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", port)
    client.loop_start()
    return client


def test_the_sensor_of_the_page_is_found_after_a_restart_and_shows_the_class():
    found = json.loads(re.search(r"<<'END'\n(.*?)\nEND", PAGE, re.DOTALL)[1])
    topic, options = re.search(r"mosquitto_pub .* -t (homeassistant/\S+) (.*)", PAGE).groups()
    assert TOPIC.fullmatch(topic)["component"] == "sensor"
    assert options == "--retain --file discovery.json"
    for name, value in found.items():
        assert type(value) is KNOWN[name], name
    answer = json.loads(
        re.search(r"```text\n(\{.*\})", PAGE)[1].replace('…"', 'mug"').replace("…", "0.9", 1).replace("…", "false")
    )
    published = re.search(r"-t (\S+) --file answer\.json", PAGE)[1]
    assert published == found["state_topic"] == found["json_attributes_topic"]

    with MosquittoBroker() as broker:
        port = int(broker.url.rpartition(":")[2])
        camera = connected(port)
        camera.publish(topic, json.dumps(found), retain=True).wait_for_publish(10)
        heard = []
        is_here = threading.Event()
        home = connected(port)  # Home Assistant starts later

        def on_message(client, _, message):
            heard.append((message.topic, json.loads(message.payload)))
            if message.topic == topic:
                client.subscribe(heard[0][1]["state_topic"])
            else:
                is_here.set()

        home.on_message = on_message
        home.on_subscribe = lambda *_: heard and camera.publish(published, json.dumps(answer))
        home.subscribe("homeassistant/#")
        assert is_here.wait(20), heard
        for client in (camera, home):
            client.disconnect()
            client.loop_stop()
    (_, config), (_, state) = heard
    rendered = jinja2.Environment(autoescape=True).from_string(config["value_template"]).render(value_json=state)
    assert (rendered, state["unknown"]) == ("mug", False)
