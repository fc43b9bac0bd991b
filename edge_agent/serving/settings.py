"""Turns the configuration ``[serve]``, or the options of the command line, into the settings of `service`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..core.config import BrokerConfig, ServeConfig, default_agent_id, parse
from .http_api.access import load_or_create_token
from .http_api.certificate import ServerCertificate
from .inputs import sound_options
from .mqtt.discovery import DeviceDescription
from .mqtt.topics import AnswerTopics
from .service import HttpSettings, IoSettings, MqttSettings
from .sources.choose import (
    Subscriptions,
    create_camera_source,
    create_folder_source,
    create_sensor_source,
    create_topic_source,
)


def http_settings(config: ServeConfig, token_file: Path) -> HttpSettings:
    """Return where and to whom to serve. The token is read from ``token_file``, which is created if it is missing.

    Raises:
        ConfigError: The options of sounds are unknown or out of range.
        StateError: The token cannot be read or created.
        UsageError: The certificate cannot be used.
    """
    address: tuple[str, int] | Path = (config.host, config.port)
    if config.unix is not None:
        address = config.unix.absolute()
    return HttpSettings(
        address=address,
        token=load_or_create_token(token_file),
        host_names=frozenset(name.lower() for name in config.host_names),
        tls=None if config.cert is None else ServerCertificate(config.cert, config.key),
        sound=None if config.sound is None else sound_options(config.sound),
    )


def io_settings(config: ServeConfig) -> IoSettings:
    """Return where inputs come from besides HTTP requests, and where answers are published.

    Raises:
        UsageError: A camera, a folder, a topic or a sensor cannot be used as it is named.
        ConfigError: The address of the broker is invalid.
    """
    mqtt = mqtt_settings(config)
    subscriptions = Subscriptions(None)
    if mqtt is not None:
        subscriptions = Subscriptions(mqtt.broker, mqtt.topics.published)
    cameras = [create_camera_source(text) for text in config.camera]
    folders = [create_folder_source(path) for path in config.watch]
    topics = [create_topic_source(topic, subscriptions) for topic in config.mqtt_in]
    sensors = [create_sensor_source(text, config.rate, config.speed, subscriptions) for text in config.sensor]
    return IoSettings(
        mqtt=mqtt,
        votes=config.vote,
        sources=(*cameras, *folders, *topics),
        every_s=config.every_s,
        sensors=tuple(sensors),
        hop=config.hop,
        rate=config.rate,
    )


def mqtt_settings(config: ServeConfig) -> MqttSettings | None:
    """Return how answers are published over MQTT; None if no broker is named.

    Raises:
        ConfigError: The address of the broker is invalid.
    """
    if config.mqtt is None:
        return None
    broker: dict[str, Any] = {"url": config.mqtt, "user": config.mqtt_user, "password_file": config.mqtt_password_file}
    if config.mqtt_ca is not None:
        broker["tls"] = {"ca": config.mqtt_ca}
    # Home Assistant allows only letters, digits, "_" and "-" in ids. A name without any of these falls back to the
    # default id of the agent.
    device = default_agent_id()
    if config.name is not None:
        device = re.sub(r"[^a-z0-9_-]+", "-", config.name.lower()).strip("-_") or device
    # The classes are those of the pair in use; the publisher fills them in.
    description = DeviceDescription(config.name or device, (), expire_s=config.expire_s, has_image=config.share_image)
    topics = AnswerTopics(device, prefix=config.discovery_prefix)
    return MqttSettings(parse(BrokerConfig, broker, where="broker of answers"), topics, description)
