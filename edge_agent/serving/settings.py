"""From the configuration of serving to what `service` takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..core.config import BrokerConfig, ServeConfig, default_agent_id, parse
from .http_api.access import own_token
from .http_api.certificate import ServerCertificate
from .inputs import sound_options
from .mqtt.discovery import Described
from .mqtt.topics import AnswerTopics
from .service import HttpSettings, MqttSettings, Ways
from .sources.choose import Subscriptions, camera_of, folder_of, sensor_of, topic_of


def http_settings(config: ServeConfig, token_file: Path) -> HttpSettings:
    """Return where and for whom to serve; the token is made in ``token_file`` where there is none.

    Raises:
        ConfigError: The options of sounds are impossible.
        StateError: The token cannot be read or made.
        UsageError: The certificate cannot be used.
    """
    address: tuple[str, int] | Path = (config.host, config.port)
    if config.unix is not None:
        address = config.unix.absolute()
    return HttpSettings(
        address=address,
        token=own_token(token_file),
        host_names=frozenset(name.lower() for name in config.host_names),
        tls=None if config.cert is None else ServerCertificate(config.cert, config.key),
        sound=None if config.sound is None else sound_options(config.sound),
    )


def ways_of(config: ServeConfig) -> Ways:
    """Return where inputs come from besides requests, and to whom answers are published.

    Raises:
        UsageError: A camera or a folder cannot be as it was named.
        ConfigError: The broker cannot be as it was named.
    """
    mqtt = mqtt_settings(config)
    subscriptions = Subscriptions(None)
    if mqtt is not None:
        subscriptions = Subscriptions(mqtt.broker, mqtt.topics.published)
    topics = [topic_of(topic, subscriptions) for topic in config.mqtt_in]
    return Ways(
        mqtt=mqtt,
        votes=config.vote,
        sources=(*map(camera_of, config.camera), *map(folder_of, config.watch), *topics),
        every_s=config.every_s,
        sensors=tuple(sensor_of(text, config.rate, config.speed, subscriptions) for text in config.sensor),
        hop=config.hop,
        rate=config.rate,
    )


def mqtt_settings(config: ServeConfig) -> MqttSettings | None:
    """Return how answers are published; None where no broker is named.

    Raises:
        ConfigError: The broker cannot be as it was named.
    """
    if config.mqtt is None:
        return None
    broker: dict[str, Any] = {"url": config.mqtt, "user": config.mqtt_user, "password_file": config.mqtt_password_file}
    if config.mqtt_ca is not None:
        broker["tls"] = {"ca": config.mqtt_ca}
    # Ids of Home Assistant have letters, digits, "_" and "-" alone.
    device = default_agent_id()
    if config.name is not None:
        device = re.sub(r"[^a-z0-9_-]+", "-", config.name.lower()).strip("-_") or device
    described = Described(config.name or device, (), expire_s=config.expire_s, has_image=config.share_image)
    topics = AnswerTopics(device, prefix=config.discovery_prefix)
    return MqttSettings(parse(BrokerConfig, broker, where="broker of answers"), topics, described)
