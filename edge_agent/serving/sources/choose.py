"""Creates the source that an option of the command line, or a key of ``[serve]``, names."""

from __future__ import annotations

import importlib.util
import zlib
from dataclasses import dataclass
from pathlib import Path

from ...core.config import BrokerConfig
from ...core.errors import MissingCapability, UsageError
from ...wire.topics import matches
from ...wire.transport import Transport
from ..mqtt.login import ANSWERS_ADVICE
from .capture import CaptureSource
from .folder import FolderSource
from .mqtt_in import MqttLineSource, MqttSource
from .rpicam import RpicamSource
from .samples import LineSource, PlaybackSchedule, StreamLineSource
from .snapshot import SnapshotSource
from .source import Source


def create_camera_source(text: str) -> Source:
    """Return the camera that ``--camera`` names.

    Args:
        text: ``rpicam`` or ``rpicam:1`` is a camera on the ribbon cable of a Raspberry Pi. A number or a device is a
            USB camera. An HTTP address is fetched for single pictures, any other address is a stream. ``auto`` is the
            ribbon cable if ``rpicam-vid`` is installed, else the first USB camera.

    Raises:
        UsageError: The text names none of these.
        MissingCapability: OpenCV is not installed, which USB cameras and streams need.
    """
    kind, _, rest = text.partition(":")
    if text == "auto":
        return RpicamSource() if RpicamSource.is_installed() else _create_capture_source("0")
    if kind == "rpicam":
        if rest and not rest.isdecimal():
            raise UsageError(f"--camera {text}: expected rpicam, or rpicam:N with the number of a camera")
        return RpicamSource(int(rest or 0))
    if kind in {"http", "https"}:
        return SnapshotSource(text)
    is_stream = "://" in text
    if text.isdecimal() or text.startswith("/dev/") or is_stream:
        return _create_capture_source(text)
    raise UsageError(
        f"--camera {text}: expected auto, rpicam, the number of a USB camera, /dev/videoN, http://host/picture.jpg or "
        "rtsp://host/stream"
    )


def _create_capture_source(where: str) -> Source:
    """Return a USB camera or a stream, after a check that OpenCV is installed: the import itself takes a second."""
    if importlib.util.find_spec("cv2") is None:
        raise MissingCapability.package("cv2", "camera", "reading videos and cameras")
    return CaptureSource(where)


def create_folder_source(path: Path) -> Source:
    """Return the folder that ``--watch`` names.

    Raises:
        UsageError: The path is not a folder.
    """
    if not path.is_dir():
        raise UsageError(f"--watch {path}: is not a folder; create it first")
    return FolderSource(path)


@dataclass(frozen=True)
class Subscriptions:
    """The broker on which topics are subscribed to.

    Attributes:
        broker: The broker of ``--mqtt``; None: none is named.
        published: The topics on which this device publishes, which it may not subscribe to.
    """

    broker: BrokerConfig | None
    published: tuple[str, ...] = ()

    def transport(self, option: str, topic: str) -> Transport:
        """Return a new connection for a topic; ``option`` is named in errors.

        Raises:
            UsageError: No broker is named, the topic is empty, or it matches a topic on which this device publishes.
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
        from ...wire.mqtt import MqttTransport

        return MqttTransport(self.broker, f"headwater-in-{zlib.crc32(topic.encode()):08x}", advice=ANSWERS_ADVICE)


def create_topic_source(topic: str, subscriptions: Subscriptions) -> Source:
    """Return the source that ``--mqtt-in`` names by a topic, which may have wildcards.

    Raises:
        UsageError: The topic cannot be subscribed to; see `Subscriptions.transport`.
    """
    return MqttSource(subscriptions.transport("--mqtt-in", topic), topic)


def create_sensor_source(
    text: str, rate: float | None, speed: float | None, subscriptions: Subscriptions
) -> LineSource:
    """Return the stream of samples that ``--sensor`` names.

    Args:
        text: ``-`` for standard input, ``mqtt:TOPIC``, or the path of a pipe, a device or a file.
        rate: Samples per second, for streams without a time column; None: not known.
        speed: Speed at which a recording is replayed, as a multiple of real time; None: as fast as it is answered.
        subscriptions: The broker on which topics are subscribed to.

    Raises:
        UsageError: The path does not exist, or the topic cannot be subscribed to.
    """
    if text.startswith("mqtt:"):
        topic = text.removeprefix("mqtt:")
        return MqttLineSource(subscriptions.transport("--sensor", topic), topic)
    schedule = None if speed is None else PlaybackSchedule(speed, rate)
    if text == "-":
        return StreamLineSource(None, schedule)
    path = Path(text)
    if path.is_dir() or not path.exists():
        what_it_is = "is a folder" if path.is_dir() else "is not there"
        raise UsageError(
            f"--sensor {text}: {what_it_is}; expected -, mqtt:TOPIC, or a file, pipe or device with one sample a line"
        )
    return StreamLineSource(path, schedule)
