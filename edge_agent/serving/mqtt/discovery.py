"""The message by which Home Assistant finds a device and its entities.

It is the device form of MQTT discovery: one retained message with ``device``, ``origin`` and ``components``. An entity
keeps its ``unique_id``, so that it remains the same entity when the classes change. ``default_entity_id`` determines
the names of entities. The description and the availability are retained. The state is not: an old answer must not look
like a new one. Entities have no ``expire_after``, because Home Assistant would then show them as unavailable after
every new description, such as that of an added class. The publisher reports itself when answers are too old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...version import __version__
from .topics import AnswerTopics

UNKNOWN = "unknown input"
"""The option for unknown inputs; in Home Assistant, the state ``unknown`` itself means that no state is known."""

EXPIRE_S = 300
"""Seconds without an answer after which the device is offline, and Home Assistant shows its entities as unavailable."""


@dataclass(frozen=True)
class DeviceDescription:
    """A device, as it is described to Home Assistant.

    Attributes:
        name: The device's name, for people.
        classes: The classes of the head; none if it answers with numbers.
        is_score: Whether the numbers of such a head are anomaly scores; otherwise they are predictions.
        expire_s: Seconds without an answer after which the device is offline.
        has_image: Whether the last image is published, too.
        page: The URL of the device's page; empty: other machines cannot reach it.
    """

    name: str
    classes: tuple[str, ...]
    is_score: bool = False
    expire_s: int = EXPIRE_S
    has_image: bool = False
    page: str = ""


def discovery_message(topics: AnswerTopics, description: DeviceDescription) -> dict[str, Any]:
    """Return the content of the message at ``topics.discovery``."""
    device: dict[str, Any] = {
        "identifiers": [f"headwater_{topics.device}"],
        "name": description.name,
        "manufacturer": "Headwater",
        "model": "personal model",
        "sw_version": __version__,
    }
    if description.page:
        device["configuration_url"] = description.page
    # The entities: the answer, whether inputs have changed, and the last image if it is published.
    components = _answer_entities(topics, description)
    components["inputs"] = {
        "platform": "binary_sensor",
        "name": "Inputs have changed",
        "unique_id": f"headwater_{topics.device}_inputs",
        "default_entity_id": f"binary_sensor.{_slug(topics.device)}_inputs_have_changed",
        "device_class": "problem",
        "entity_category": "diagnostic",
        "state_topic": topics.inputs,
    }
    if description.has_image:
        components["image"] = {
            "platform": "image",
            "name": "Last input",
            "unique_id": f"headwater_{topics.device}_image",
            "default_entity_id": f"image.{_slug(topics.device)}_last_input",
            "image_topic": topics.image,
        }
    return {
        "device": device,
        "origin": {"name": "Headwater", "sw_version": __version__},
        "availability": [{"topic": topics.availability}],
        "components": components,
    }


def _answer_entities(topics: AnswerTopics, description: DeviceDescription) -> dict[str, dict[str, Any]]:
    """Return the entities of the answer: a class with its probability, or a number."""
    if description.classes:
        answer = _sensor(topics, "answer", "Answer", "{{ value_json['class'] }}")
        answer |= {
            "device_class": "enum",
            # A class may have the name of the option; Home Assistant refuses an option that is there twice.
            "options": list(dict.fromkeys([*description.classes, UNKNOWN])),
            "json_attributes_topic": topics.state,
        }
        probability = _sensor(topics, "probability", "Probability", "{{ value_json['probability'] }}")
        probability |= {"unit_of_measurement": "%", "state_class": "measurement", "suggested_display_precision": 1}
        return {"answer": answer, "probability": probability}
    value = _sensor(topics, "value", "Score" if description.is_score else "Value", "{{ value_json['value'] }}")
    value |= {"state_class": "measurement", "json_attributes_topic": topics.state}
    if not description.is_score:
        return {"value": value}
    # The score has no anomaly before the first answer: Home Assistant reads 'None' as a state that is not known.
    is_anomaly = "value_json['anomaly']"
    template = f"{{{{ 'None' if {is_anomaly} is none else 'ON' if {is_anomaly} else 'OFF' }}}}"
    anomaly = _sensor(topics, "anomaly", "Anomaly", template)
    anomaly |= {
        "platform": "binary_sensor",
        "device_class": "problem",
        "default_entity_id": f"binary_sensor.{_slug(topics.device)}_anomaly",
    }
    return {"value": value, "anomaly": anomaly}


def _sensor(topics: AnswerTopics, key: str, name: str, template: str) -> dict[str, Any]:
    """Return a sensor that shows a part of the state message; ``template`` selects that part."""
    return {
        "platform": "sensor",
        "name": name,
        "unique_id": f"headwater_{topics.device}_{key}",
        "default_entity_id": f"sensor.{_slug(topics.device)}_{key}",
        "state_topic": topics.state,
        "value_template": template,
    }


def _slug(device: str) -> str:
    """Return the name of a device as a part of an entity id, which may not have hyphens."""
    return device.replace("-", "_")
