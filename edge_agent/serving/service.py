"""Serving as one program: connects the pair in use, the predictor, the sources of inputs and the outputs."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.config import AgentConfig, BrokerConfig, is_loopback
from ..core.errors import UsageError
from ..core.task import WindowInput
from ..data.wav import WavOptions
from .announcement import Announcement, announced
from .corrections import Corrections
from .history import History
from .http_api.access import Guard
from .http_api.certificate import ServerCertificate
from .http_api.classify import ClassifyRoutes
from .http_api.health import HealthRoutes
from .http_api.messages import Route, Routes
from .http_api.metrics import Metrics
from .http_api.open_inference import OpenInferenceRoutes
from .http_api.page import PageRoutes
from .http_api.server import HttpLimits, HttpServer
from .inputs import Decoder
from .inputs_state import record_file
from .inputs_watch import InputsWatch
from .mqtt.discovery import DeviceDescription
from .mqtt.login import ANSWERS_ADVICE
from .mqtt.publisher import Publisher, offline_will
from .mqtt.topics import AnswerTopics
from .pair import Pair
from .pair_source import PairSource, PairWatch
from .predictor import Predictor
from .sources.feed import Feed
from .sources.loop import SourceLoop
from .sources.samples import LineSource
from .sources.sensor_feed import SensorFeed
from .sources.source import Source
from .vote import Vote

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpSettings:
    """Where and to whom answers are served over HTTP.

    Attributes:
        address: Host and port (0: any free one), or the path of a Unix socket.
        token: The secret that clients send; see `edge_agent.serving.http_api.access`.
        host_names: Names by which clients may address the server, besides loopback addresses and ``localhost``.
        limits: The resources that clients may use.
        tls: The certificate and key of the server; None: without TLS.
        sound: How sounds are converted to inputs; None: sounds are rejected.
    """

    address: tuple[str, int] | Path
    token: str
    host_names: frozenset[str] = frozenset()
    limits: HttpLimits = field(default_factory=HttpLimits)
    tls: ServerCertificate | None = None
    sound: WavOptions | None = None

    @property
    def is_local(self) -> bool:
        """Whether the address can be reached from this machine only."""
        return isinstance(self.address, Path) or is_loopback(self.address[0])

    def url(self, port: int) -> str:
        """Return the URL of the page at this port, for a browser; for a Unix socket, ``unix:`` and its path.

        If other machines can connect, they can use the URL, too.
        """
        if isinstance(self.address, Path):
            return f"unix:{self.address}"
        scheme = "http" if self.tls is None else "https"
        host = self.address[0]
        # With TLS, clients accept the names in the certificate only.
        names = [] if self.tls is None or self.is_local else self.tls.names()
        if names and host not in names:
            host = names[0]
        elif host in {"0.0.0.0", "::"}:  # noqa: S104 - all addresses of this machine; one of them is shown
            host = find_own_address(host)
        name = f"[{host}]" if ":" in host else host
        return f"{scheme}://{name}:{port}/"


def find_own_address(wildcard: str) -> str:
    """Return an address of this machine that others on its network can use; ``localhost`` where it has none.

    Args:
        wildcard: All addresses of this machine: ``0.0.0.0``, or ``::`` for those of IPv6, too.
    """
    targets = [(socket.AF_INET, "192.0.2.1")]
    if wildcard == "::":
        targets.append((socket.AF_INET6, "2001:db8::1"))
    for family, address in targets:
        # The system chooses the address from which it would send to this address, which is of examples. To connect a
        # socket for datagrams sends nothing.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own = str(probe.getsockname()[0])
            if not is_loopback(own):
                return own
    return "localhost"


def describe_what_leaves(http: HttpSettings, mqtt: MqttSettings | None) -> str:
    """Return what of the inputs and answers leaves the device, in sentences for people."""
    sentences = []
    if mqtt is None:
        sentences.append("Nothing on this page is sent from the device.")
    elif mqtt.description.has_image:
        sentences.append(f"The last image, answers, classes and changes of inputs are sent to {mqtt.broker.names}.")
    else:
        sentences.append(f"Answers, classes and changes of inputs are sent to {mqtt.broker.names}; inputs are not.")
    if not http.is_local:
        sentences.append("Other machines can open this page with the token.")
    return " ".join(sentences)


@dataclass(frozen=True)
class Device:
    """The device whose samples may be corrected.

    Attributes:
        config: Its configuration; None: there is no state folder, and corrections are rejected.
        why_not: Why corrections are rejected here, for people; empty: they are accepted.
    """

    config: AgentConfig | None = None
    why_not: str = ""


@dataclass(frozen=True)
class MqttSettings:
    """How answers are published over MQTT.

    Attributes:
        broker: The address of the broker, and the login.
        topics: The topics to publish on.
        description: The device, as Home Assistant shows it.
    """

    broker: BrokerConfig
    topics: AnswerTopics
    description: DeviceDescription


@dataclass(frozen=True)
class IoSettings:
    """Where inputs come from besides HTTP requests, and where answers are published.

    Attributes:
        mqtt: How answers are published over MQTT; None: they are not.
        votes: How many equal answers in a row change the state; at least 1.
        sources: Cameras, addresses, folders and topics whose inputs are answered.
        every_s: The least number of seconds between two answers to the same source.
        sensors: Streams of samples, which are cut into windows.
        hop: Samples between the starts of two windows; None: the stride of the task.
        rate: Samples per second of the sensors whose streams have no time column; None: not known.
    """

    mqtt: MqttSettings | None = None
    votes: int = 1
    sources: tuple[Source, ...] = ()
    every_s: float = 1.0
    sensors: tuple[LineSource, ...] = ()
    hop: int | None = None
    rate: float | None = None


class Service:
    """Answers inputs with a personal model until it is closed."""

    def __init__(self, source: PairSource, http: HttpSettings, device: Device, io: IoSettings | None = None) -> None:
        """Create all parts and open the address. Nothing is answered before `start`.

        Args:
            source: Where the pair in use comes from.
            http: Where and to whom to serve.
            device: The device whose samples may be corrected.
            io: Inputs besides HTTP requests, and where answers are published; None: neither.

        Raises:
            UsageError: The address cannot be used.
        """
        io = IoSettings() if io is None else io
        # 1. The predictor and its observers. They receive an answer in this order: `InputsWatch` reads the history.
        self.predictor = Predictor()
        self.metrics = Metrics()
        self.predictor.observe(self.metrics)
        self.history = History()
        self.predictor.observe(self.history)
        self.vote = Vote(io.votes)
        self.predictor.observe(self.vote)
        self.publisher = None if io.mqtt is None else self._create_publisher(io.mqtt)
        self.inputs = InputsWatch(
            self.history,
            None if device.config is None else record_file(device.config.state),
            on_change=None if self.publisher is None else self.publisher.on_inputs,
        )
        self.predictor.observe(self.inputs)
        # 2. What changes the pair.
        self.corrections = Corrections(device.config, self.history, device.why_not)
        self.watch = PairWatch(source, self.predictor)
        # 3. Where inputs come from.
        self.feeds = self._create_feeds(io, http.sound)
        self.metrics.show_sources(self.feeds)
        self.metrics.show_inputs(self.inputs)
        guard = Guard(http.token, http.is_local, http.host_names)
        self.http = HttpServer(http.address, self._routes(http, io), guard, http.limits, http.tls)

    def _create_feeds(self, io: IoSettings, sound: WavOptions | None) -> list[SourceLoop[Any]]:
        """Return a loop for each source and each sensor."""

        def create_decoder(pair: Pair) -> Decoder:
            return Decoder(pair.input, sound)

        feeds = [Feed(source, self.predictor, create_decoder, io.every_s) for source in io.sources]
        sensor_feeds = [SensorFeed(lines, self.predictor, hop=io.hop, rate=io.rate) for lines in io.sensors]
        return [*feeds, *sensor_feeds]

    def _routes(self, http: HttpSettings, io: IoSettings) -> list[Route]:
        """Return the routes of the HTTP server."""
        status_parts = {
            "sources": lambda: [feed.as_json() for feed in self.feeds],
            "inputs": self.inputs.as_json,
            "needs_token": lambda: not http.is_local,
            "leaves": lambda: describe_what_leaves(http, io.mqtt),
        }
        groups: list[Routes] = [
            ClassifyRoutes(self.predictor, http.sound),
            OpenInferenceRoutes(self.predictor),
            HealthRoutes(self.predictor),
            self.metrics,
            PageRoutes(self.predictor, self.history, self.corrections, status_parts),
        ]
        return [route for group in groups for route in group.routes()]

    def start(self) -> None:
        """Load the pair, and answer from now on.

        Raises:
            HeadwaterError: The pair cannot be used.
            UsageError: There are sensors, and the encoder takes no windows.
        """
        self.watch.start()
        self._check_sensors()
        if self.publisher is not None:
            self.publisher.start()
        self.http.start()
        for feed in self.feeds:
            feed.start()

    def _check_sensors(self) -> None:
        """Require an encoder of windows where there are sensors; while no pair is in use nothing can be said."""
        sensors = [feed.name for feed in self.feeds if isinstance(feed, SensorFeed)]
        if not sensors or not self.predictor.is_ready:
            return
        pair = self.predictor.pair
        if not isinstance(pair.input, WindowInput):
            raise UsageError(
                f"--sensor {', '.join(sensors)}: a stream of samples, and the encoder of bundle "
                f"'{pair.bundle.manifest.name}' takes images; leave the sensor out, or serve a bundle for windows"
            )

    def announce_sources(self, announcement: Announcement) -> None:
        """Write the states of the sources into the record of the server, now and whenever one changes."""

        def write() -> None:
            announcement.show_sources(feed.record() for feed in self.feeds)

        if self.feeds:
            for feed in self.feeds:
                feed.on_change(write)
            write()

    def _create_publisher(self, settings: MqttSettings) -> Publisher:
        """Return a publisher that observes every answer and the state."""
        from ..wire.mqtt import MqttTransport

        client_id = f"headwater-{settings.topics.device}"
        transport = MqttTransport(settings.broker, client_id, will=offline_will(settings.topics), advice=ANSWERS_ADVICE)
        publisher = Publisher(transport, settings.topics, settings.description, time.monotonic)
        self.predictor.observe(publisher)
        self.vote.observe(publisher)
        return publisher

    def close(self) -> None:
        """Stop answering, and release the address."""
        for feed in self.feeds:
            feed.close()
        self.http.close()
        self.corrections.close()
        self.watch.close()
        if self.publisher is not None:
            self.publisher.close()


@contextlib.contextmanager
def serving(
    source: PairSource, http: HttpSettings, device: Device, io: IoSettings, on_started: Callable[[Service], None]
) -> Iterator[Service]:
    """Serve while the context lasts; ``on_started`` is called once the service answers."""
    service = Service(source, http, device, io)
    state = None if device.config is None else device.config.state
    try:
        service.start()
        # The server is announced once it answers, because its port is known only then.
        with announced(state, http.url(service.http.port)) as announcement:
            service.announce_sources(announcement)
            on_started(service)
            yield service
    finally:
        service.close()
