"""Configuration files: TOML in, frozen and checked models out, all mistakes reported at once.

Durations are seconds (``_s``), sizes are bytes (``_bytes``). Relative paths count from the folder of the file.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator, model_validator

from .errors import ConfigError, UsageError, cause, nearest
from .registry import is_reference, own_name
from .storage import read_regular_text, read_toml
from .task import Frozen

Model = TypeVar("Model", bound=BaseModel)
NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
"""Names of agents and federations: they become topic levels, and some brokers give other characters a meaning."""

LEAST_CLIENTS = 3
"""The smallest number of clients in a secure sum: with two, each knows the other's update from the sum."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class TlsConfig(Frozen):
    """The certificates by which the broker and this side prove who they are."""

    ca: Path | None = Field(None, description="file of trusted authorities; default: those of the system")
    cert: Path | None = Field(None, description="client certificate (PEM)")
    key: Path | None = Field(None, description="private key of the client certificate (PEM)")

    @model_validator(mode="after")
    def _key_has_certificate(self) -> TlsConfig:
        if self.key is not None and self.cert is None:
            raise ValueError(f"key is {self.key}, but cert is not set; name the certificate of this key as cert")
        return self


def _checked_url(url: object) -> str:
    """Return a URL of the form mqtt://host[:port] or mqtts://host[:port], without credentials, which logs would show.

    Raises:
        ValueError: The URL has another form.
    """
    if not isinstance(url, str):
        raise ValueError(f"{url!r} is no text; expected mqtt://host[:port] or mqtts://host[:port]")  # noqa: TRY004 - pydantic reports ValueError
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError("holds a user or a password, which would end up in logs; use user and password_file")
    has_address = parts.scheme in {"mqtt", "mqtts"} and bool(parts.hostname)
    has_extras = bool(parts.path.strip("/") or parts.query or parts.fragment)
    if not has_address or has_extras:
        raise ValueError(f"'{url}' is not mqtt://host[:port] or mqtts://host[:port]")
    if parts.port == 0:  # reading it raises ValueError on a port that is not a number below 65536
        raise ValueError(f"port 0 of '{url}' cannot be connected to; expected 1..65535")
    return url


def _check_brokers(urls: Sequence[str]) -> None:
    """Require different brokers that all have TLS, or all have none.

    Raises:
        ValueError: A broker is listed twice, or some have TLS and others have none.
    """
    # 1. A broker is its host and port: the default port may be written or not.
    first_of: dict[tuple[str, int], str] = {}
    for url in urls:
        address = ((urlsplit(url).hostname or "").lower(), _port_of(url))
        if address in first_of:
            raise ValueError(f"'{url}' is the broker '{first_of[address]}' again; name each broker once")
        first_of[address] = url
    # 2. Without TLS for all, a client would send in clear after a failover what it has encrypted before.
    in_clear = [url for url in urls if urlsplit(url).scheme == "mqtt"]
    if 0 < len(in_clear) < len(urls):
        raise ValueError(
            f"'{in_clear[0]}' is without TLS, and others of the list have it: what they encrypt would pass in clear "
            "after a failover; write mqtts:// for all"
        )


def _port_of(url: str) -> int:
    """Return the TCP port of a broker's URL; 1883, or 8883 with TLS, where it names none."""
    parts = urlsplit(url)
    if parts.port is not None:
        return parts.port
    return 8883 if parts.scheme == "mqtts" else 1883


MOST_BROKERS = 16
"""The most brokers in one list; clusters have three to seven nodes."""


class BrokerConfig(Frozen):
    """The address of the broker, or of several that share their messages, and how this side logs in."""

    url: str | tuple[str, ...] = Field(
        "mqtt://127.0.0.1:1883",
        description="mqtt://host[:port] or mqtts://host[:port]; a list of them for brokers that share their messages: "
        "the id of each client decides which one it tries first, and it goes to the next one when that is lost",
    )
    user: str | None = Field(None, description="MQTT user name; agents use their id")
    password_file: Path | None = Field(
        None, description="file whose first line is the password; a systemd credential of that name comes first"
    )
    keepalive_s: int = Field(30, ge=5, le=600, description="seconds between MQTT keep-alive messages")
    failover_s: float = Field(
        5.0,
        ge=2,
        le=600,
        description="with a list: seconds within which a lost or silent broker is replaced by the next one; an idle "
        "client asks its broker for a sign of life after a third of them",
    )
    return_after_s: float = Field(
        0.0,
        ge=0,
        le=604_800,
        description="with a list: a client that was connected to another broker for this long returns to its first "
        "one, once that lets it in; 0 = it stays until it loses the other one",
    )
    qos: Literal[0, 1] = Field(
        1,
        description="MQTT quality of service of subscriptions; with 0, a NATS cluster that has lost a node serves "
        "again within seconds; messages that are lost are sent again in any case",
    )
    wait: bool = Field(True, description="retry while the broker is away; false: end with exit code 75")
    max_packet_bytes: int = Field(122_880, ge=4096, le=1 << 20, description="largest MQTT payload that is published")
    tls: TlsConfig | None = None

    @field_validator("url", mode="before")
    @classmethod
    def _check_urls(cls, value: object) -> object:
        """Require one URL, or a list of different ones that agree on TLS; a list of one becomes its only URL."""
        urls = list(value) if isinstance(value, list | tuple) else [value]
        if not 1 <= len(urls) <= MOST_BROKERS:
            raise ValueError(f"is a list of {len(urls)} brokers; expected 1..{MOST_BROKERS}")
        checked = [_checked_url(url) for url in urls]
        if len(checked) == 1:
            return checked[0]
        _check_brokers(checked)
        return tuple(checked)

    @model_validator(mode="after")
    def _tls_is_used(self) -> BrokerConfig:
        if self.tls is not None and not self.uses_tls:
            raise ValueError(f"tls is set, but {self.names} connects without it; write mqtts://, or leave tls out")
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all brokers, in the order of the file."""
        return (self.url,) if isinstance(self.url, str) else self.url

    @property
    def names(self) -> str:
        """The URLs of all brokers, for people."""
        return ", ".join(self.urls)

    def at(self, url: str) -> BrokerConfig:
        """Return the configuration of one broker of the list."""
        return self.model_copy(update={"url": url})

    @property
    def host(self) -> str:
        """Host name or IP address of the broker; of a list of several, take one by `at` first."""
        return urlsplit(self._single_url()).hostname or ""

    @property
    def port(self) -> int:
        """TCP port of the only broker, see `host`; 1883, or 8883 with TLS, where the URL names none."""
        return _port_of(self._single_url())

    @property
    def uses_tls(self) -> bool:
        """Whether the connection has TLS; all brokers of a list have it, or none has."""
        return urlsplit(self.urls[0]).scheme == "mqtts"

    @property
    def is_local(self) -> bool:
        """Whether all brokers are on this machine, as far as their URLs tell."""
        return all(is_loopback(urlsplit(url).hostname or "") for url in self.urls)

    def _single_url(self) -> str:
        """Return the URL of the only broker.

        Raises:
            UsageError: The configuration has a list of brokers.
        """
        if not isinstance(self.url, str):
            raise UsageError(f"broker.url has {len(self.url)} brokers ({self.names}), and one was expected; name one")
        return self.url

    def password(self) -> str | None:
        """Return the first line of the password file; None where no file is configured.

        Raises:
            ConfigError: The password file cannot be read, or its first line is empty.
        """
        if self.password_file is None:
            return None
        path = credential(self.password_file)
        try:
            line = read_regular_text(path).partition("\n")[0].rstrip("\r")
        except (OSError, UnicodeDecodeError) as error:
            mistake = f"cannot read a line from {path}: {cause(error)}"
            raise ConfigError("broker.password_file", [mistake]) from error
        if not line:
            mistake = (
                f"cannot read a line from {path}: its first line is empty; 'headwater password' writes such a file"
            )
            raise ConfigError("broker.password_file", [mistake])
        return line


class AgentBrokerConfig(BrokerConfig):
    """The address of the broker, how this agent logs in, and which coordinator's commands it obeys."""

    command_key_file: Path | None = Field(
        None,
        description="file of 'headwater password' by which this agent knows its coordinator's commands; default: that "
        "of 'edge-agent enroll' in its state folder; without one, it obeys every sender that may publish on its topics",
    )


def urls_of(text: str) -> str | list[str]:
    """Return the URL that an option on a command line gives, or a list of several that are separated by commas."""
    urls = [url.strip() for url in text.split(",")]
    return urls if len(urls) > 1 else text


def check_tls(broker: BrokerConfig) -> None:
    """Require a connection that nobody on the network can read or change: with TLS, or within this machine.

    Raises:
        UsageError: The broker is on another machine and its URL does not ask for TLS.
    """
    if not broker.uses_tls and not broker.is_local:
        raise UsageError(
            f"broker {broker.names} is without TLS and not on this machine: anybody on the network path can read and "
            "change models and passwords; use mqtts:// ('headwater init' makes certificates, 'edge-agent enroll -' "
            "gets one), or allow this with --insecure"
        )


def credential(path: Path) -> Path:
    """Return where a secret file is to be read: among the credentials that systemd gave this service, or at ``path``.

    ``LoadCredential=agent.password:/etc/headwater/agent.password`` in a unit lets a service that runs as a user of its
    own read what only root may read. The credential is looked up by the file's name, so that commands of root use the
    same configuration.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not folder:
        return path
    from_systemd = Path(folder) / path.name
    return from_systemd if from_systemd.is_file() else path


class DataConfig(Frozen):
    """The local data of one device, which never leave it."""

    source: str = Field(description="kind:where[?option=value], see 'edge-agent fit --help'")
    folder: Path = Field(Path(), description="base of relative paths in source; default: this file's folder")
    test_fraction: float = Field(0.25, gt=0, lt=1, description="share of the samples that is held out for evaluation")
    seed: int = Field(0, ge=0, description="seed of that split")
    test: str | None = Field(None, description="source of the held-out samples; all of 'source' is for training then")
    strict: bool | None = Field(
        False,
        description="refuse data with images, recordings or other files of data that cannot be used, instead of "
        "leaving those out",
    )
    partition: Path | None = Field(
        None, description="partition file; this device uses only its client's rows of the source"
    )
    client: str | None = Field(
        None, pattern=NAME_PATTERN, description="client in the partition; default: the agent's id"
    )

    watch: Path | None = Field(
        None,
        description="folder with one sub-folder for each class: files put there become samples, and are removed there",
    )
    budget: int = Field(2000, ge=1, description="samples of the watch folder and of 'edge-agent add' that are kept")

    @model_validator(mode="after")
    def _check_split(self) -> DataConfig:
        """Require that only one setting decides which samples are held out: a partition, ``test``, or a fraction."""
        fields = type(self).model_fields
        changed = [name for name in ("seed", "test_fraction") if getattr(self, name) != fields[name].default]
        if self.partition is not None:
            self._check_partition_alone(changed)
        if self.test is not None and "test_fraction" in changed:
            raise ValueError(f"test_fraction with test = '{self.test}', which is held out as a whole; leave one out")
        if self.test == self.source:
            raise ValueError(f"test = '{self.test}' is the source itself; expected other samples, or leave it out")
        if self.partition is None and self.client is not None:
            raise ValueError(f"client = '{self.client}' without partition; name the file that has this client")
        return self

    def _check_partition_alone(self, changed: list[str]) -> None:
        """Require that nothing beside the partition file says which rows are held out; ``changed``: fields set."""
        if self.test is not None:
            raise ValueError(
                f"test = '{self.test}' with a partition, which already names the held-out rows; leave one out"
            )
        if changed:
            raise ValueError(
                f"{' and '.join(changed)} with a partition, which already names the held-out rows; leave it out"
            )


Precision = Literal["float32", "bfloat16"]
PRECISION = (
    "of training steps; bfloat16: mixed precision with float32 weights, only where a step, timed before the first one, "
    "is faster; results differ slightly"
)


def _reference(text: str) -> str:
    if not is_reference(text):
        raise ValueError("expected PATH.py:CLASS")
    return text


class TrainingConfig(Frozen):
    """The resources and options of local training on a device of tier train."""

    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    threads: int = Field(
        1,
        ge=0,
        le=256,
        description="threads of torch, ONNX Runtime and numpy; 0 = their default. 1 keeps results repeatable",
    )
    precision: Precision = Field("float32", description=PRECISION)
    methods: tuple[Annotated[str, AfterValidator(_reference)], ...] = Field(
        (),
        max_length=100,
        description="methods in files of this device, as 'my.py:Class', for runs that the operator starts with such a "
        "file; it has to be the same, byte for byte",
    )
    folder: Path = Field(Path(), description="base of relative paths in methods; default: this file's folder")
    checkpoint_s: float = Field(
        5.0,
        ge=0,
        le=86_400,
        description="seconds between checkpoints inside local training, from which a killed agent resumes, more where "
        "the model is large (5 for each MB); 0 = none",
    )


def own_methods(training: TrainingConfig) -> tuple[str, ...]:
    """Return names of the methods in files of this device; nothing is read."""
    return tuple(own_name(reference.rpartition(":")[2]) for reference in training.methods)


LEAST_NOISE = 1e-3
"""The smallest noise multiplier but 0: one round with less costs an epsilon of a million."""


def zero_or_from(least: float) -> AfterValidator:
    """Return a pydantic check of noise multipliers, which must be 0 or at least ``least``."""

    def check(noise: float) -> float:
        if 0 < noise < least:
            raise ValueError(f"a noise of {noise:g} protects nothing; expected 0 (no noise), or at least {least:g}")
        return noise

    return AfterValidator(check)


class PrivacyConfig(Frozen):
    """The privacy policy of this device.

    A job that asks for more is refused, whatever the coordinator's settings are.
    """

    methods: tuple[str, ...] | None = Field(
        None, description="methods that this device takes part in, [] for none; default: all"
    )
    min_class_count: int = Field(
        2,
        ge=1,
        description="classes of fewer samples have no statistics (class means, for example) in any update: runs with a "
        "smaller min_class_count of their method are refused ('headwater run -p min_class_count=N')",
    )
    samples: Literal["exact", "rounded"] = Field(
        "exact",
        description="rounded: counts of samples leave as the nearest power of two, and methods whose updates carry "
        "statistics of classes are refused, because these tell the counts",
    )
    statistics: tuple[str, ...] = Field(
        (),
        max_length=100,
        description="names of arrays beside the model that updates may carry ('extra.gram'; * stands for any text) "
        "although this device cannot tell what they say of single samples. Methods that ship with Headwater need no "
        "entry; updates of others are refused without one, unless these arrays are statistics of classes that obey "
        "min_class_count",
    )
    metrics: tuple[str, ...] = Field(
        ("*",), description="names of the metrics that may leave, * stands for any text; [] for none"
    )
    batch_norm_stats: bool = Field(
        True, description="running statistics of batch norm may leave, in updates and once for the export"
    )
    activation_ranges: bool = Field(
        True, description="ranges of the encoder's activations on own samples may leave, for int8"
    )
    inputs_since: bool = Field(
        False,
        description="since when the inputs of the server on this device have changed, or that they are as fitted, may "
        "leave as one number: 'headwater agents' then counts the devices whose inputs have changed",
    )
    clip: float | None = Field(
        None, gt=0, le=1e9, description="largest L2 norm of the change in an update; the smaller of this and the run's"
    )
    noise: Annotated[float, zero_or_from(LEAST_NOISE)] = Field(
        0.0,
        ge=0,
        le=1e9,
        description="standard deviation over clip of the noise in each update; the larger of this and the run's",
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="budget of all updates of this device, in all runs; what would go beyond is refused",
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="delta of that epsilon")
    secure_sum: Literal["allowed", "required"] = Field(
        "allowed",
        description="required: updates leave masked, as parts of a sum over three or more devices, or not at all; runs "
        "without privacy.secure_sum are refused",
    )

    @property
    def wants_noise(self) -> bool:
        """Whether updates of this device leave clipped, with noise or within a budget, whatever a run asks for."""
        return self.clip is not None or self.noise > 0 or self.epsilon is not None


class HeadConfig(Frozen):
    """The personal head of a head-tier device."""

    name: str = Field(
        "auto", description="a file name in edge_agent/heads; auto: the best of them in cross-validation on local data"
    )
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that head")
    precision: Literal["auto", "fp32", "int8"] = Field(
        "auto", description="auto: int8 where it is faster on this device and as accurate on local data, else fp32"
    )
    unknown: float = Field(
        0.05, ge=0, lt=1, description="share of inputs like the training samples that may be called unknown; 0: none"
    )
    own_classes: bool = Field(False, description="the data may hold classes that the bundle does not know; tier head")
    norm: Literal["auto", "own", "shipped"] = Field(
        "auto",
        description="batch norm statistics of the fp32 encoder: own are of local inputs; auto: own, where a head on "
        "local data does not answer worse with them",
    )
    min_gain: float = Field(
        -0.02,
        ge=-1,
        le=1,
        description="a new encoder and head replace the old only if acc.personal changes by at least this",
    )
    local: bool = Field(
        default=True, description="find what this device reaches alone (acc.local), which takes it some seconds"
    )
    blend: bool = Field(
        default=True,
        description="head auto also tries to blend the best head with what this device reaches alone; needs local",
    )
    allow_local: bool = Field(
        default=False,
        description="use that model, without the encoder, where it is better beyond noise or surer in cross-validation",
    )

    @model_validator(mode="after")
    def _own_norm_is_fp32(self) -> HeadConfig:
        if (self.precision, self.norm) == ("int8", "own"):
            raise ValueError(
                "norm = 'own' is computed in fp32, int8 has the shipped one; set precision = 'fp32' or 'auto'"
            )
        return self


class BundleConfig(Frozen):
    """The trust in bundles: whose this device installs. An enrolled one trusts the release keys of its federation."""

    trust: Path | None = Field(
        None, description="root.json of the federation whose signed bundles are installed; no others are from then on"
    )
    first_use: bool = Field(False, description="trust the keys of the first signed bundle that the coordinator sends")
    unsigned: bool | None = Field(
        None,
        description="install unsigned bundles as long as no keys are trusted; default: where the broker is on this "
        "machine, or 'edge-agent run --insecure' says so",
    )


def default_agent_id() -> str:
    """Return the host name, reduced to the characters that a topic may hold."""
    allowed = re.sub(r"[^a-z0-9_-]", "-", socket.gethostname().lower())
    return allowed.strip("-_")[:63] or "agent"


class DownloadsConfig(Frozen):
    """How this device gets models and bundles: in chunks over MQTT, and by HTTP where the coordinator offers that."""

    by_http: bool = Field(
        default=True, description="whether blobs are fetched by HTTP where the coordinator names URLs of them"
    )
    hosts: tuple[Annotated[str, Field(min_length=1, max_length=253)], ...] = Field(
        (), max_length=32, description="the only hosts that may be asked by HTTP; default: all that it names"
    )


class UploadsConfig(Frozen):
    """How this device sends updates: in chunks over MQTT, and by HTTP where the coordinator offers that."""

    by_http: bool = Field(default=True, description="whether updates go by HTTP where the coordinator names URLs")
    hosts: tuple[Annotated[str, Field(min_length=1, max_length=253)], ...] = Field(
        (), max_length=32, description="the only hosts that updates go to by HTTP; default: all that it names"
    )


class MetricsConfig(Frozen):
    """Figures of this device for Prometheus."""

    textfile: Path | None = Field(
        None, description="file that ends in .prom, for node_exporter's textfile collector; written every heartbeat_s"
    )

    @field_validator("textfile")
    @classmethod
    def _is_collected(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix != ".prom":
            raise ValueError(f"the name ends in '{path.suffix}', but node_exporter reads only .prom files; rename it")
        return path


class ServeConfig(Frozen):
    """Answers from the pair in use, beside the agent, or by ``edge-agent serve``."""

    host: str = Field("127.0.0.1", description="address to listen on; others than this machine's need the token")
    port: int = Field(8480, ge=0, le=65535, description="port, 0 = any that is free")
    unix: Path | None = Field(None, description="a Unix socket to listen on instead")
    host_names: tuple[str, ...] = Field((), max_length=20, description="names by which browsers call this server")
    token_file: Path | None = Field(None, description="file of the token; default: serve/token in the state folder")
    cert: Path | None = Field(None, description="certificate of this server (PEM): connections are encrypted")
    key: Path | None = Field(None, description="private key of that certificate (PEM); default: in the same file")
    sound: str | None = Field(
        None, description="how sounds become inputs: options of the data of the encoder, 'rate=16000&form=image'"
    )
    camera: tuple[str, ...] = Field((), max_length=16, description="cameras to answer, as 'edge-agent serve --camera'")
    watch: tuple[Path, ...] = Field((), max_length=16, description="folders whose new files are answered, and stay")
    every_s: float = Field(1.0, ge=0, le=86_400, description="seconds between two pictures of a camera")
    mqtt_in: tuple[str, ...] = Field(
        (), max_length=16, description="topics of the broker of mqtt: each message is an input"
    )
    sensor: tuple[str, ...] = Field(
        (), max_length=16, description="streams of samples, a line each: a pipe, a device, a file, or mqtt:TOPIC"
    )
    hop: int | None = Field(None, ge=1, description="samples between two windows; default: the stride of the task")
    rate: float | None = Field(None, gt=0, description="samples in a second, where streams do not say the time")
    speed: float | None = Field(None, gt=0, description="a file is played so many times as fast as it was made")
    vote: int = Field(1, ge=1, le=1000, description="equal answers in a row that change the state")
    mqtt: str | None = Field(None, description="broker for answers, such as mqtt://homeassistant.local")
    mqtt_user: str | None = Field(None, description="user there")
    mqtt_password_file: Path | None = Field(None, description="file whose first line is the password")
    mqtt_ca: Path | None = Field(None, description="certificates that an mqtts broker may show")
    name: str | None = Field(None, max_length=63, description="what the device is called there; default: host name")
    discovery_prefix: str = Field("homeassistant", pattern=r"^[A-Za-z0-9_/-]+$", description="Home Assistant's")
    expire_s: int = Field(300, ge=10, le=86_400, description="without answers for so long: unavailable")
    share_image: bool = Field(default=False, description="publish the last image, too; it leaves the device")

    @model_validator(mode="after")
    def _key_has_certificate(self) -> ServeConfig:
        if self.key is not None and self.cert is None:
            raise ValueError(f"key is {self.key}, but cert is not set; name the certificate of this key as cert")
        return self


@dataclass(frozen=True)
class FileKind:
    """The hints that `load` gives about one kind of configuration file; its model has them as ``file_kind``."""

    if_missing: str
    """The advice of the error message where there is no such file."""
    foreign_keys: frozenset[str]
    """Top-level keys of another kind of file, which this one never has."""
    foreign: str
    """The explanation of a file with such keys, and what to do."""


class AgentConfig(Frozen):
    """The configuration of one device's agent."""

    file_kind: ClassVar[FileKind] = FileKind(
        if_missing=(
            "'edge-agent enroll -' makes it for a federation (a coordinator's 'headwater enroll NAME' prints the "
            "token), --config FILE names another; a device without a coordinator needs none: 'edge-agent import "
            "BUNDLE --state DIR', then --state DIR"
        ),
        foreign_keys=frozenset({"task", "cohort", "round", "run", "embedded", "identity"}),
        foreign="this is the configuration of a coordinator, for 'headwater serve'; that of an agent is made by "
        "'edge-agent enroll -' (example: configs/agent-train.toml)",
    )

    id: str = Field(
        default_factory=default_agent_id,
        pattern=NAME_PATTERN,
        description="unique in the federation; default: the host name",
    )
    federation: str = Field("home", pattern=NAME_PATTERN, description="name of the federation, as at the coordinator")
    tier: Literal["auto", "train", "head"] = Field(
        "auto", description="auto: train where torch is installed and head.own_classes is false"
    )
    channel: str = Field(
        "stable", pattern=NAME_PATTERN, description="whose releases this device takes, as at 'headwater release create'"
    )
    state: Path = Field(Path("agent-state"), description="folder for bundles, heads and client state")
    cache_bytes: int = Field(
        512 * 1024 * 1024,
        ge=1 << 20,
        description="downloaded blobs kept on disk, at most 256 of them, oldest dropped first",
    )
    features_bytes: int = Field(
        128 * 1024 * 1024,
        ge=1 << 20,
        description="cached features kept on disk, oldest dropped first; those of the head in use stay in any case",
    )
    keep_runs: int = Field(3, ge=1, le=1000, description="runs whose client state stays here, the newest")
    min_free_bytes: int = Field(
        64 * 1024 * 1024,
        ge=0,
        description="disk that stays free of caches: before a download that would take it, old downloads go, then "
        "features; client state stays",
    )
    heartbeat_s: float = Field(15.0, gt=0, le=300, description="seconds between heartbeats to the coordinator")
    broker: AgentBrokerConfig = Field(default_factory=AgentBrokerConfig)
    downloads: DownloadsConfig = Field(default_factory=DownloadsConfig)
    uploads: UploadsConfig = Field(default_factory=UploadsConfig)
    data: DataConfig
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    privacy: PrivacyConfig = Field(default_factory=PrivacyConfig)
    head: HeadConfig = Field(default_factory=HeadConfig)
    bundle: BundleConfig = Field(default_factory=BundleConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    serve: ServeConfig | None = None

    @property
    def takes_unsigned(self) -> bool:
        """Whether unsigned bundles are installed as long as no keys are trusted."""
        return self.broker.is_local if self.bundle.unsigned is None else self.bundle.unsigned

    @field_validator("broker", mode="before")
    @classmethod
    def _accept_plain_broker(cls, broker: Any) -> Any:
        """Accept a `BrokerConfig`, as the coordinator has it, for a broker without a command key."""
        return broker.model_dump() if type(broker) is BrokerConfig else broker

    @model_validator(mode="after")
    def _own_classes_stay_here(self) -> AgentConfig:
        if self.head.own_classes and (self.tier == "train" or self.data.partition is not None):
            conflict = "data.partition divides samples of the task's classes"
            if self.tier == "train":
                conflict = "tier is train"
            raise ValueError(f"head.own_classes is true, but {conflict}; own classes need tier 'head' and its own data")
        return self


def load(model: type[Model], path: Path, overrides: Mapping[str, Any] | None = None) -> Model:
    """Return the model that a TOML file describes; ``overrides`` (nested) win over the file.

    Raises:
        ConfigError: The file does not exist, is not TOML, belongs to another program, or has mistakes. Every mistake is
            listed, with the nearest known key.
    """
    return parse(model, _merge(read_file(model, path), overrides or {}), where=str(path), base=path.parent)


def read_file(model: type[BaseModel], path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file for ``model``, before they are checked.

    Raises:
        ConfigError: The file does not exist, is not TOML, or belongs to another program.
    """
    kind: FileKind | None = getattr(model, "file_kind", None)
    if kind is None:
        return read_toml(path)
    if not path.exists():
        raise ConfigError(str(path), [f"no such file; {kind.if_missing}"])
    raw = read_toml(path)
    foreign_keys = sorted(kind.foreign_keys & raw.keys())
    if foreign_keys:
        raise ConfigError(str(path), [f"it has {', '.join(foreign_keys)}: {kind.foreign}"])
    return raw


def parse(model: type[Model], raw: Mapping[str, Any], *, where: str, base: Path | None = None) -> Model:
    """Return the model that ``raw`` describes; relative paths count from ``base``.

    Raises:
        ConfigError: ``raw`` has mistakes; every one is listed.
    """
    try:
        parsed = model.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError(where, mistakes_of(error, model)) from error
    return _anchor(parsed, base) if base is not None else parsed


def mistakes_of(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return a line for each mistake that pydantic found, with the nearest known key for each unknown one."""
    return [_describe_mistake(detail, model) for detail in error.errors(include_url=False, include_context=False)]


def _describe_mistake(detail: Mapping[str, Any], model: type[BaseModel]) -> str:
    """Return one mistake as a line: the key, its value where it is wrong, and the reason or the nearest known key."""
    path = tuple(str(step) for step in detail["loc"])
    key = ".".join(path)
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        fields = _fields_at(model, path[:-1])
        close = nearest(path[-1], fields)
        hint = f"did you mean '{close}'?" if close else f"known: {', '.join(sorted(fields)) or 'none'}"
        return f"{key}: unknown key; {hint}"
    if detail["type"] == "missing":
        return f"{key}: is missing"
    if not key:
        return message
    value = re.sub(r"//[^/@\s]*@", "//…@", repr(detail.get("input")))  # no password out of a URL into a log
    value = re.sub(r"(password=)[^&\s'\"]+", r"\1…", value)
    if len(value) > 60:
        value = value[:59] + "…"
    return f"{key} = {value}: {message}"


def _fields_at(model: type[BaseModel], path: Iterable[str]) -> list[str]:
    """Return the field names of the nested model at ``path``; empty where more than one model may be there."""
    candidates = [model]
    for step in path:
        # The index of a list item: all its models are of one kind.
        if step.isdigit():
            continue
        # The step after a union is the kind of the member that pydantic chose.
        if len(candidates) > 1:
            candidates = [candidate for candidate in candidates if _kind_of(candidate) == step]
            continue
        if not candidates:
            return []
        field = candidates[0].model_fields.get(step)
        if field is None:
            return []
        candidates = _models_in(field.annotation)
    return list(candidates[0].model_fields) if len(candidates) == 1 else []


def _kind_of(model: type[BaseModel]) -> Any:
    """Return the default of the model's field ``kind``, by which it is told from others; None where it has none."""
    field = model.model_fields.get("kind")
    return None if field is None else field.default


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in the type of a field, such as both of ``A | B | None``."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    models: list[type[BaseModel]] = []
    for part in getattr(annotation, "__args__", ()):
        models += _models_in(part)
    return models


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` with the values of ``above`` in their place; tables in both are merged key by key."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, Mapping):
            merged[key] = _merge(under, value)
        else:
            merged[key] = value
    return merged


def _anchor(model: Model, base: Path) -> Model:
    """Return ``model`` with every relative path, also those of nested models, counted from ``base``."""
    changes: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        anchored = _anchor_value(value, base)
        # A table without paths stays as it is: a changed field counts as given, also where it has its default.
        if anchored is not value:
            changes[name] = anchored
    return model.model_copy(update=changes) if changes else model


def _anchor_value(value: Any, base: Path) -> Any:
    """Return the value of a field with its paths counted from ``base``; the same object where it has no such path."""
    if isinstance(value, Path) and not value.is_absolute():
        return (base / value).resolve()  # shown to people: without dots on the way
    if isinstance(value, BaseModel):
        return _anchor(value, base)
    if isinstance(value, tuple) and any(isinstance(item, BaseModel | Path) for item in value):
        return tuple(_anchor_value(item, base) for item in value)
    return value
