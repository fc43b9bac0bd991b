"""All of serving as one program: a pair, the predictor, and the ways in and out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.config import AgentConfig, BrokerConfig, is_loopback
from ..data.wav import WavOptions
from ..wire.mqtt import MqttTransport
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
from .mqtt.discovery import Described
from .mqtt.publisher import Publisher, will_of
from .mqtt.topics import AnswerTopics
from .pair_source import PairSource, PairWatch
from .predictor import Predictor
from .sources.feed import Feed
from .sources.loop import SourceLoop
from .sources.samples import Lines
from .sources.sensor_feed import SensorFeed
from .sources.source import Source
from .vote import Vote

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpSettings:
    """Where and for whom answers are served over HTTP.

    Attributes:
        address: Host and port (0: any that is free), or the path of a Unix socket.
        token: The secret of `edge_agent.serving.http_api.access`.
        host_names: Names besides addresses and ``localhost`` by which the server may be called.
        limits: What clients may take.
        tls: The certificate and key of the server; None: without TLS.
        sound: How sounds become inputs; None: they are refused.
    """

    address: tuple[str, int] | Path
    token: str
    host_names: frozenset[str] = frozenset()
    limits: HttpLimits = field(default_factory=HttpLimits)
    tls: ServerCertificate | None = None
    sound: WavOptions | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address."""
        return isinstance(self.address, Path) or is_loopback(self.address[0])

    def url(self, port: int) -> str:
        """Return where the page is, for a browser; of a Unix socket, its path."""
        if isinstance(self.address, Path):
            return f"unix:{self.address}"
        scheme = "http" if self.tls is None else "https"
        host = self.address[0]
        if host in {"0.0.0.0", "::"}:  # noqa: S104 - every address of this machine, of which one is shown
            host = "localhost"
        name = f"[{host}]" if ":" in host else host
        return f"{scheme}://{name}:{port}/"


@dataclass(frozen=True)
class Device:
    """The device whose samples people may correct.

    Attributes:
        config: Its configuration; None: there is no state folder, and nothing can be corrected.
        why_not: Why nothing can be corrected here, for people; empty: it can.
    """

    config: AgentConfig | None = None
    why_not: str = ""


@dataclass(frozen=True)
class MqttSettings:
    """How answers are published.

    Attributes:
        broker: Where the broker is, and how to log in.
        topics: Where to publish.
        described: The device, as Home Assistant shows it.
    """

    broker: BrokerConfig
    topics: AnswerTopics
    described: Described


@dataclass(frozen=True)
class Ways:
    """The ways in and out besides HTTP.

    Attributes:
        mqtt: How answers are published; None: they are not.
        votes: How many equal answers change what holds.
        sources: Cameras, addresses and folders whose inputs are answered.
        every_s: Seconds between two inputs of a source, at least.
        sensors: Streams of samples whose windows are answered.
        hop: Samples between the starts of two windows; None: the task's.
        rate: Samples of sensors in a second, where their streams do not say the time.
    """

    mqtt: MqttSettings | None = None
    votes: int = 1
    sources: tuple[Source, ...] = ()
    every_s: float = 1.0
    sensors: tuple[Lines, ...] = ()
    hop: int | None = None
    rate: float | None = None


class Service:
    """A personal model that answers until it is closed."""

    def __init__(self, source: PairSource, http: HttpSettings, device: Device, ways: Ways | None = None) -> None:
        """Open the address; nothing is answered before `start`.

        Args:
            source: Which pair answers.
            http: Where and for whom.
            device: The device whose samples people may correct.
            ways: The ways in and out besides HTTP.

        Raises:
            UsageError: The address cannot be used.
        """
        ways = Ways() if ways is None else ways
        self.predictor = Predictor()
        self.metrics = Metrics()
        self.predictor.observe(self.metrics)
        self.history = History()
        self.predictor.observe(self.history)
        self.vote = Vote(ways.votes)
        self.predictor.observe(self.vote)
        self.publisher = None if ways.mqtt is None else self._publisher_of(ways.mqtt)
        self.corrections = Corrections(device.config, self.history, device.why_not)
        self.inputs = InputsWatch(
            self.history,
            None if device.config is None else record_file(device.config.state),
            tell=None if self.publisher is None else self.publisher.see_inputs,
        )
        self.predictor.observe(self.inputs)
        self.watch = PairWatch(source, self.predictor)
        self.feeds: list[SourceLoop[Any]] = []
        for inputs in ways.sources:
            self.feeds.append(Feed(inputs, self.predictor, lambda pair: Decoder(pair.input, http.sound), ways.every_s))
        for lines in ways.sensors:
            self.feeds.append(SensorFeed(lines, self.predictor, hop=ways.hop, rate=ways.rate))
        self.metrics.show_sources(self.feeds)
        self.metrics.show_inputs(self.inputs)
        parts = {"sources": lambda: [feed.as_json() for feed in self.feeds], "inputs": self.inputs.as_json}
        groups: list[Routes] = [
            ClassifyRoutes(self.predictor, http.sound),
            OpenInferenceRoutes(self.predictor),
            HealthRoutes(self.predictor),
            self.metrics,
            PageRoutes(self.predictor, self.history, self.corrections, parts),
        ]
        routes: list[Route] = [route for group in groups for route in group.routes()]
        guard = Guard(http.token, http.is_local, http.host_names)
        self.http = HttpServer(http.address, routes, guard, http.limits, http.tls)

    def start(self) -> None:
        """Load the pair and answer from now on.

        Raises:
            HeadwaterError: The pair cannot be used.
        """
        self.watch.start()
        if self.publisher is not None:
            self.publisher.start()
        self.http.start()
        for feed in self.feeds:
            feed.start()

    def _publisher_of(self, settings: MqttSettings) -> Publisher:
        """Return a publisher that sees every answer and what holds."""
        transport = MqttTransport(settings.broker, f"headwater-{settings.topics.device}", will=will_of(settings.topics))
        publisher = Publisher(transport, settings.topics, settings.described, time.monotonic)
        self.predictor.observe(publisher)
        self.vote.observe(publisher)
        return publisher

    def close(self) -> None:
        """Answer no more, and release the address."""
        for feed in self.feeds:
            feed.close()
        self.http.close()
        self.corrections.close()
        self.watch.close()
        if self.publisher is not None:
            self.publisher.close()


@contextlib.contextmanager
def serving(
    source: PairSource, http: HttpSettings, device: Device, ways: Ways, shown: Callable[[Service], None]
) -> Iterator[Service]:
    """Serve while the context lasts; ``shown`` is called once everything answers."""
    service = Service(source, http, device, ways)
    try:
        service.start()
        shown(service)
        yield service
    finally:
        service.close()
