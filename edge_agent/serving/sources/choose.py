"""From the text of an option to a source."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from ...core.config import BrokerConfig
from ...core.errors import UsageError
from ...wire.mqtt import MqttTransport
from ...wire.topics import matches
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


@dataclass(frozen=True)
class Subscriptions:
    """Where topics are subscribed to.

    Attributes:
        broker: The broker of ``--mqtt``; None: there is none.
        published: The topics that this device publishes on.
    """

    broker: BrokerConfig | None
    published: tuple[str, ...] = ()

    def transport(self, option: str, topic: str) -> MqttTransport:
        """Return a connection of its own for a topic that an option names.

        Raises:
            UsageError: There is no broker, or the device would answer its own answers.
        """
        if self.broker is None:
            raise UsageError(f"{option} {topic}: name the broker with --mqtt")
        if not topic:
            raise UsageError(f"{option}: the topic is empty; name one")
        for published in self.published:
            if matches(topic, published):
                raise UsageError(
                    f"{option} {topic}: this device publishes on {published} itself, and would answer its own answers; "
                    "name another topic"
                )
        return MqttTransport(self.broker, f"headwater-in-{zlib.crc32(topic.encode()):08x}")


def topic_of(topic: str, subscriptions: Subscriptions) -> Source:
    """Return the topic that ``--mqtt-in`` names; it may have wildcards.

    Raises:
        UsageError: It cannot be subscribed to.
    """
    return MqttSource(subscriptions.transport("--mqtt-in", topic), topic)


def sensor_of(text: str, rate: float | None, speed: float | None, subscriptions: Subscriptions) -> Lines:
    """Return the stream of samples that ``--sensor`` names.

    Args:
        text: ``-`` for standard input, ``mqtt:TOPIC``, or the path of a pipe, a device or a file.
        rate: Samples in a second, where the stream has no column for the time.
        speed: How many times as fast a recording is played as it was made; None: as fast as it is answered.
        subscriptions: Where topics are subscribed to.

    Raises:
        UsageError: It is not there, or its topic cannot be subscribed to.
    """
    if text.startswith("mqtt:"):
        topic = text.removeprefix("mqtt:")
        return MqttLines(subscriptions.transport("--sensor", topic), topic)
    due = None if speed is None else PlayedAt(speed, rate)
    if text == "-":
        return StreamLines(None, due)
    path = Path(text)
    if path.is_dir() or not path.exists():
        raise UsageError(
            f"--sensor {text}: expected -, mqtt:TOPIC, or a file, a pipe or a device with a sample in each line"
        )
    return StreamLines(path, due)
