"""From the text of an option to a source."""

from __future__ import annotations

import zlib
from pathlib import Path

from ...core.config import BrokerConfig
from ...core.errors import UsageError
from ...wire.mqtt import MqttTransport
from .capture import CaptureSource
from .folder import FolderSource
from .mqtt_in import MqttLines, MqttSource
from .rpicam import RpicamSource
from .samples import Lines, PlayedAt, StreamLines
from .snapshot import SnapshotSource
from .source import Source


def camera_of(text: str) -> Source:
    """Return the camera that ``--camera`` names.

    ``auto`` is the camera on the ribbon cable where the machine has its program, else the first USB camera; ``rpicam``
    or ``rpicam:1`` is one on the cable; a number or a device is a USB camera; an address of HTTP gives pictures, any
    other a stream.

    Raises:
        UsageError: The text names none of these.
    """
    kind, _, rest = text.partition(":")
    if text == "auto":
        return RpicamSource() if RpicamSource.is_there() else CaptureSource("0")
    if kind == "rpicam":
        if rest and not rest.isdecimal():
            raise UsageError(f"--camera {text}: expected rpicam, or rpicam:N with the number of a camera")
        return RpicamSource(int(rest or 0))
    if kind in {"http", "https"}:
        return SnapshotSource(text)
    is_stream = "://" in text
    if text.isdecimal() or text.startswith("/dev/") or is_stream:
        return CaptureSource(text)
    raise UsageError(
        f"--camera {text}: expected auto, rpicam, the number of a USB camera, /dev/videoN, http://host/picture.jpg or "
        "rtsp://host/stream"
    )


def folder_of(path: Path) -> Source:
    """Return the folder that ``--watch`` names.

    Raises:
        UsageError: It is no folder.
    """
    if not path.is_dir():
        raise UsageError(f"--watch {path}: is no folder; make it first")
    return FolderSource(path)


def topic_of(topic: str, broker: BrokerConfig | None, own: str) -> Source:
    """Return the topic that ``--mqtt-in`` names.

    Args:
        topic: The topic, which may have wildcards.
        broker: The broker of ``--mqtt``; None: there is none.
        own: The beginning of the topics that this device publishes on.

    Raises:
        UsageError: There is no broker, or the device would answer its own answers.
    """
    return MqttSource(_subscriber("--mqtt-in", topic, broker, own), topic)


def sensor_of(text: str, rate: float | None, speed: float | None, broker: BrokerConfig | None, own: str) -> Lines:
    """Return the stream of samples that ``--sensor`` names.

    Args:
        text: ``-`` for standard input, ``mqtt:TOPIC``, or the path of a pipe, a device or a file.
        rate: Samples in a second, where the stream has no column for the time.
        speed: How many times as fast a recording is played as it was made; None: as fast as it is answered.
        broker: The broker of ``--mqtt``; None: there is none.
        own: The beginning of the topics that this device publishes on.

    Raises:
        UsageError: It is not there, or there is no broker.
    """
    if text.startswith("mqtt:"):
        topic = text.removeprefix("mqtt:")
        return MqttLines(_subscriber("--sensor", topic, broker, own), topic)
    due = None if speed is None else PlayedAt(speed, rate)
    if text == "-":
        return StreamLines(None, due)
    path = Path(text)
    if path.is_dir() or not path.exists():
        raise UsageError(
            f"--sensor {text}: expected -, mqtt:TOPIC, or a file, a pipe or a device with a sample in each line"
        )
    return StreamLines(path, due)


def _subscriber(option: str, topic: str, broker: BrokerConfig | None, own: str) -> MqttTransport:
    """Return a connection of its own for a topic.

    Raises:
        UsageError: There is no broker, or the topic is one of the device's own.
    """
    if broker is None:
        raise UsageError(f"{option} {topic}: name the broker with --mqtt")
    if not topic or topic == "#" or topic.startswith(own):
        raise UsageError(f"{option} {topic or '(empty)'}: expected a topic that this device does not publish on itself")
    return MqttTransport(broker, f"headwater-in-{zlib.crc32(topic.encode()):08x}")
