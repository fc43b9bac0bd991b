"""The message by which Home Assistant finds a device and its entities.

It is the device form of MQTT discovery: one retained message with ``device``, ``origin`` and ``components``. An entity
keeps its ``unique_id``, so that it stays the same one when classes come and go. Names of entities follow from
``default_entity_id``. Configuration and availability are retained, and the state is not: an old answer must not look
like a new one. Entities have no ``expire_after``: Home Assistant takes every description for the end of what it knew,
and would show them as unavailable whenever a class is added. The publisher says itself when answers are too old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...version import __version__
from .topics import AnswerTopics

UNKNOWN = "unknown input"
"""The option for inputs that are unlike all training samples: the state ``unknown`` has a meaning of its own there."""

EXPIRE_S = 300
"""Seconds without an answer after which the device is offline, and Home Assistant shows its entities as unavailable."""


@dataclass(frozen=True)
class Described:
    """What is described to Home Assistant.

    Attributes:
        name: The device's name, for people.
        classes: The classes; none where the head answers with numbers.
        is_score: Of a head that answers with numbers: whether the number says how unusual an input is.
        expire_s: Seconds without an answer after which the device is offline.
        has_image: Whether the last image is published, too.
        page: The address of the device's page; empty: it has none that others reach.
    """

    name: str
    classes: tuple[str, ...]
    is_score: bool = False
    expire_s: int = EXPIRE_S
    has_image: bool = False
    page: str = ""


def discovery_message(topics: AnswerTopics, described: Described) -> dict[str, Any]:
    """Return the content of the message at ``topics.discovery``."""
    device: dict[str, Any] = {
        "identifiers": [f"headwater_{topics.device}"],
        "name": described.name,
        "manufacturer": "Headwater",
        "model": "personal model",
        "sw_version": __version__,
    }
    if described.page:
        device["configuration_url"] = described.page
    components = _answers(topics, described)
    components["inputs"] = {
        "platform": "binary_sensor",
        "name": "Inputs have changed",
        "unique_id": f"headwater_{topics.device}_inputs",
        "default_entity_id": f"binary_sensor.{_slug(topics.device)}_inputs_have_changed",
        "device_class": "problem",
        "entity_category": "diagnostic",
        "state_topic": topics.inputs,
    }
    if described.has_image:
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


def _answers(topics: AnswerTopics, described: Described) -> dict[str, dict[str, Any]]:
    """Return the entities for what is answered: a class with its probability, or a number."""
    if described.classes:
        answer = _sensor(topics, "answer", "Answer", "{{ value_json['class'] }}")
        answer |= {
            "device_class": "enum",
            "options": [*described.classes, UNKNOWN],
            "json_attributes_topic": topics.state,
        }
        probability = _sensor(topics, "probability", "Probability", "{{ value_json['probability'] }}")
        probability |= {"unit_of_measurement": "%", "state_class": "measurement", "suggested_display_precision": 1}
        return {"answer": answer, "probability": probability}
    value = _sensor(topics, "value", "Score" if described.is_score else "Value", "{{ value_json['value'] }}")
    value |= {"state_class": "measurement", "json_attributes_topic": topics.state}
    if not described.is_score:
        return {"value": value}
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
    """Return a sensor whose value is a part of the state message."""
    return {
        "platform": "sensor",
        "name": name,
        "unique_id": f"headwater_{topics.device}_{key}",
        "default_entity_id": f"sensor.{_slug(topics.device)}_{key}",
        "state_topic": topics.state,
        "value_template": template,
    }


def _slug(device: str) -> str:
    """Return a device's name as a part of an entity id, which has no hyphens."""
    return device.replace("-", "_")
