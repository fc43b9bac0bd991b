"""The coordinator's configuration: one TOML file, read with `edge_agent.core.config.load`.

Durations are seconds (``_s``). Relative paths count from the folder of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from edge_agent.bundle.starter import bundle_path
from edge_agent.core.config import (
    LEAST_CLIENTS,
    LEAST_NOISE,
    NAME_PATTERN,
    PRECISION,
    AgentConfig,
    BrokerConfig,
    DataConfig,
    FileKind,
    Precision,
    PrivacyConfig,
    TrainingConfig,
    is_loopback,
    load,
    zero_or_from,
)
from edge_agent.core.task import MAX_LABEL, Frozen, Task

from .journal.schemes import mistakes_in

Count = Annotated[int, Field(ge=0, le=1_000_000)]
PositiveCount = Annotated[int, Field(ge=1, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]


class EmbeddedConfig(Frozen):
    """The broker that the coordinator starts and watches itself; meant for trials and single hosts."""

    bind: str = Field(
        "127.0.0.1", min_length=1, max_length=253, description="address to listen on; 127.0.0.1 = this machine alone"
    )
    port: int = Field(1883, ge=0, le=65535, description="TCP port; 0 = any free one")
    password_file: Path | None = Field(
        None,
        description="users and password hashes, as 'headwater password' writes them; without it anyone may connect",
    )
    insecure: bool = Field(
        default=False,
        description="allow an address that other machines reach: passwords and models pass the network in clear",
    )

    @model_validator(mode="after")
    def _other_machines_need_tls(self) -> EmbeddedConfig:
        if not is_loopback(self.bind) and not self.insecure:
            raise ValueError(
                f"bind = '{self.bind}' is reached from other machines, and the embedded broker has no TLS; name a "
                "Mosquitto with TLS in [broker] url (configs/mosquitto.conf), or set insecure = true"
            )
        return self


class IdentityConfig(Frozen):
    """Certificates for agents, and the Mosquitto that the coordinator starts for them; 'headwater init' writes it.

    The broker lets in who has a certificate of the federation's authority. 'headwater enroll NAME' makes a token, for
    which a device gets one.
    """

    host: str = Field(
        pattern=r"^[A-Za-z0-9:._-]+$", max_length=253, description="name or address that devices connect to"
    )
    bind: str = Field("0.0.0.0", min_length=1, max_length=253, description="address to listen on; 0.0.0.0 = all")  # noqa: S104 - both ports are of TLS
    port: int = Field(8883, ge=1, le=65535, description="port of the broker, for devices with a certificate")
    enroll_port: int = Field(
        8884, ge=1, le=65535, description="port on which devices show a token, or renew an expired certificate"
    )
    certificate_days: float = Field(
        30.0, gt=0, le=3650, description="life of an agent's certificate; it is renewed at half of it"
    )
    grace_days: float = Field(
        90.0, ge=0, le=3650, description="an expired certificate can be renewed for so long, then a new token is needed"
    )
    agents_per_owner: PositiveCount | None = Field(
        None, description="'headwater enroll --owner' makes no token for more agents of one owner; none: no limit"
    )

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, host: str) -> str:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return host
        if ":" in host:
            raise ValueError("is no IPv6 address; expected a name or address alone, without scheme and port")
        if not all(1 <= len(label) <= 63 for label in host.split(".")) or host.replace(".", "").isdigit():
            raise ValueError("is neither an address nor a name, whose parts between dots have 1..63 characters")
        return host

    @model_validator(mode="after")
    def _two_ports(self) -> IdentityConfig:
        if self.port == self.enroll_port:
            raise ValueError(f"port and enroll_port are both {self.port}; broker and enrolment need one each")
        return self

    @property
    def url(self) -> str:
        """Of the broker, as devices connect to it."""
        return f"mqtts://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class RunConfig(Frozen):
    """What a run does when the request does not say otherwise."""

    method: str = Field("fedavg", max_length=64, description="a file name in edge_agent/methods")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that method")
    rounds: PositiveCount = Field(10, description="rounds of one run")
    seed: Seed = Field(0, description="seed of initial weights, cohorts and agents")
    keep_every: Count = Field(
        0, description="keep checkpoints of every n-th round, for 'headwater analyze'; 0 = the newest only"
    )
    keep_updates: bool = Field(
        False,
        description="keep updates and checkpoints of all rounds, so that 'headwater audit' can aggregate them again",
    )
    weights: Annotated[Path, AfterValidator(Path.expanduser), AfterValidator(bundle_path)] | None = Field(
        None,
        description="what the encoder begins with: a safetensors file of the encoder's or torchvision's names, a "
        "bundle of the same encoder, or starter (that of starter_cnn, which comes with this package); what stays on "
        "devices, such as batch norm in some methods, begins fresh",
    )
    peft: str | None = Field(
        None,
        max_length=MAX_LABEL,
        description="what of the encoder learns and travels: lora, bn or last_block; none: all of it. The rest stays "
        "as it is in weights or after a warm start",
    )
    peft_params: dict[str, Any] = Field(default_factory=dict, description="parameters of peft, such as rank of lora")


class CohortConfig(Frozen):
    """Who takes part in a round."""

    tier: Literal["train", "any", "head"] = Field(
        "train",
        description="any: also devices without torch, where the method has a part for them; head: those alone",
    )
    fraction: float = Field(1.0, gt=0, le=1, description="share of the available agents in a round")
    fraction_max: float | None = Field(
        None, gt=0, le=1, description="draw the share for each round between fraction and this"
    )
    full_last_round: bool = Field(
        False, description="all available agents take part in a run's last round, whatever fraction says"
    )
    min_agents: PositiveCount = Field(
        1, description="a round starts with this many agents of the tiers that take part, and waits for as many"
    )
    max_agents: PositiveCount | None = Field(None, description="upper bound of agents in a round")
    over_selection: float = Field(
        1.0, ge=1, le=4, description="select this many times the agents needed; 1.3 covers 10 % that drop out"
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> CohortConfig:
        if self.max_agents is not None and self.max_agents < self.min_agents:
            raise ValueError(f"max_agents = {self.max_agents} is below min_agents = {self.min_agents}; raise it")
        if self.fraction_max is not None and self.fraction_max < self.fraction:
            raise ValueError(f"fraction_max = {self.fraction_max} is below fraction = {self.fraction}; raise it")
        return self


class RoundConfig(Frozen):
    """When a round closes."""

    mode: Literal["synchronous", "buffered"] = Field(
        "synchronous",
        description="buffered: a round closes with its first updates, those of slower agents count in later rounds; "
        "for methods whose server step is a mean",
    )
    buffer: PositiveCount = Field(10, description="updates that close a buffered round, or all where agents are fewer")
    max_staleness: Count = Field(
        10, description="rounds after which an update that a buffered round still waits for is given up"
    )
    quorum: float = Field(
        0.8,
        gt=0,
        le=1,
        description="share of the agents that can still deliver; enough to close after the grace period",
    )
    grace_s: float = Field(10.0, ge=0, le=86_400, description="grace period for the rest, once the quorum is reached")
    deadline_s: float = Field(600.0, gt=0, le=7 * 86_400, description="an agent without an update by then is left out")
    lease_s: float = Field(
        45.0,
        gt=0,
        le=3600,
        description="an agent that is silent for this long is offline; without a task up to 360 s in large fleets",
    )
    adaptive: bool = Field(
        True,
        description="shorten grace period and deadline by the agents' own past times, and give agents that come too "
        "late less local training where the method allows that; false: grace_s and deadline_s as they are, all work "
        "for all",
    )
    max_attempts: int = Field(
        3, ge=1, le=1000, description="a run fails when a round lacks updates after this many deadlines"
    )


class AggregationConfig(Frozen):
    """How the updates of a round are combined, and what a single one can do. Bounds need three or more updates."""

    rule: Literal[
        "mean", "clipped", "trimmed_mean", "median", "krum", "multi_krum", "geometric_median", "centered_clipping"
    ] = Field(
        "mean",
        description="mean: the method's own, of bounded updates; clipped: every change is scaled down to the median "
        "one; the others replace the mean, for methods whose server step is one. median and krum cost accuracy where "
        "the agents' data differ",
    )
    attackers: Count = Field(
        1,
        description="agents in a round that may be hostile, for trimmed_mean, krum and multi_krum; fewer where the "
        "round is too small",
    )
    max_norm: float | None = Field(
        5.0,
        ge=1,
        le=1000,
        description="a change of the model that is larger than so many times the median of the round is scaled down "
        "to the median (rule mean), or to a tenth of the model where half of the changes are 0",
    )
    max_weight: float | None = Field(
        5.0, ge=1, le=1e6, description="an agent's samples count at most so many times the median of the round"
    )
    max_share: float | None = Field(
        3.0,
        ge=1,
        le=1e6,
        description="what an update adds to the sum of a round (its samples times the norm of its change) is at most "
        "so many times the median, and a third of the sum where that is above 1.5 times the median; for rules mean and "
        "clipped",
    )
    repeat_share: float | None = Field(
        2.0,
        ge=1,
        le=1e6,
        description="an agent whose updates were near max_share in two rounds more than below adds at most so many "
        "times the median and an eighth of the sum, until they stay below; none: as much as max_share allows",
    )
    min_cosine: float | None = Field(
        -0.1,
        ge=-1,
        le=0,
        description="an update loses weight, and from 0.15 below on all of it, whose change of the model has a "
        "smaller cosine both to the sum of the others' changes and to what the run has changed since its start",
    )
    max_class_mean: float | None = Field(
        2.0,
        ge=1,
        le=1000,
        description="a class mean (FedPAC, FedProto) that is longer than so many times the median of its class is "
        "scaled down to it, and statistics of a class that are much nearer to another class of the other agents are "
        "left out; none: neither",
    )
    max_loss: float | None = Field(
        2.0,
        ge=1,
        le=1000,
        description="when the median training loss of a synchronous round exceeds so many times both the lowest of the "
        "run and that of guessing, the last good state is restored, and the run continues with rule clipped instead of "
        "mean",
    )

    @field_validator(
        "max_norm", "max_weight", "max_share", "repeat_share", "min_cosine", "max_class_mean", "max_loss", mode="before"
    )
    @classmethod
    def _read_none(cls, value: object) -> object:
        """TOML has no null: the text "none" switches a bound off."""
        return None if value == "none" else value

    def without_bounds(self) -> AggregationConfig:
        """The same without bounds on single updates: nobody sees those, or noise was made for a sum without bounds."""
        return self.model_copy(update=NO_BOUNDS)


NO_BOUNDS: dict[str, None] = {
    "max_norm": None,
    "max_weight": None,
    "max_share": None,
    "repeat_share": None,
    "min_cosine": None,
    "max_class_mean": None,
}
"""Fields of `AggregationConfig` that switch all bounds on single updates off.

A journal of an earlier version lacks some of them: there was no such bound then.
"""


def _one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str) else value


AgentName = Annotated[str, Field(pattern=NAME_PATTERN)]


class AggregatorsConfig(Frozen):
    """Processes that take, check and sum the updates of rounds beside the coordinator: 'headwater aggregate'.

    They need the coordinator's state folder, on the same machine or as a shared folder. Buffered rounds and secure sums
    do without them.
    """

    partitions: int = Field(
        0,
        ge=0,
        le=1024,
        description="into how many partitions the agents are divided, each for one 'headwater aggregate --partition "
        "K/N'; the coordinator takes the updates of those that nobody serves; 0: none",
    )
    sites: tuple[AgentName, ...] = Field(
        (),
        max_length=256,
        description="relays ('edge-agent relay') whose sums of their site's updates are taken, where nothing looks at "
        "single updates: the bounds of [aggregation] are 'none', or privacy.clip is set; a relay in this list is "
        "trusted with the updates of its agents",
    )


class ExportConfig(Frozen):
    """What happens to the encoder of a run."""

    after_run: bool = Field(True, description="export the encoder when a run is finished")
    release: Literal["manual", "each_run"] = Field(
        "manual",
        description="manual: 'headwater release create' releases a run's bundle; each_run: every bundle goes to all "
        "devices at once",
    )
    int8: bool = Field(True, description="add a quantized variant")
    exporter: Literal["auto", "dynamo", "legacy"] = Field(
        "auto", description="auto: torch's dynamo exporter where onnxscript is installed, else the older one"
    )
    every: Count = Field(
        0,
        description="also export and release every n-th round, with release = each_run; 0 = only after the run",
    )
    patience: int = Field(
        0,
        ge=0,
        le=1000,
        description="end the run when this many releases in a row brought no better acc.personal; 0 = never",
    )
    pool_norm: bool = Field(
        True,
        description="collect batch norm statistics that stay on devices once, for the export; false: no export then",
    )
    client_ranges: bool = Field(
        False,
        description="ask training agents once, before an export, for the ranges of the encoder's activations on their "
        "samples: two numbers for each layer, from which int8 takes its ranges",
    )
    calibration: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], BeforeValidator(_one_or_more)] = Field(
        (),
        max_length=64,
        description="labelled data sources, one for each domain, that int8 takes its ranges from and is compared on, "
        "beside hosted clients' data; default: random inputs, and devices compare alone",
    )
    folder: Path = Field(Path(), description="base of relative paths in calibration; default: this file's folder")

    @model_validator(mode="after")
    def _rounds_are_released_at_once(self) -> ExportConfig:
        if self.every and self.release != "each_run":
            raise ValueError(
                f"every = {self.every} releases encoders while a run goes on, and release = 'manual' waits for a "
                "command; set release = 'each_run', or every = 0"
            )
        return self


RAY_ADDRESS = "HOST:PORT of the head of a running cluster; auto: the cluster that this machine is a part of"


class HostedConfig(Frozen):
    """A client whose data are where the coordinator is: it takes part as any agent does, in a process beside us."""

    id: str = Field(pattern=NAME_PATTERN, description="as of an agent; no agent may have the same")
    data: DataConfig = Field(description="as in an agent's configuration")
    device: str = Field(
        "auto", max_length=64, description="auto, cpu, cuda, cuda:1, mps; auto: cuda where there is one"
    )
    threads: int = Field(1, ge=0, le=256, description="torch threads; 0 = torch's default. 1 keeps results repeatable")
    precision: Precision = Field("float32", description=PRECISION)
    methods: tuple[str, ...] = Field((), max_length=100, description="as [training] methods of an agent")

    def agent(self, federation: str, state: Path, lease_s: float) -> AgentConfig:
        """Return the configuration of the agent that it is."""
        return AgentConfig(
            id=self.id,
            federation=federation,
            tier="train",
            state=state / "hosted" / self.id,
            heartbeat_s=min(15.0, lease_s / 3),
            data=self.data,
            training=TrainingConfig(
                device=self.device,
                threads=self.threads,
                precision=self.precision,
                methods=self.methods,
                folder=self.data.folder,
            ),
            privacy=PrivacyConfig(min_class_count=1, statistics=("*",)),  # its data are the coordinator's own
        )


class HostedRayConfig(Frozen):
    """The Ray cluster on which hosted clients compute; their data and their files stay where the coordinator is."""

    address: str = Field("auto", min_length=1, max_length=253, description=RAY_ADDRESS)
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="computations at a time; default: as many as the cluster has CPUs for, at most one for each client",
    )
    gpus: float = Field(
        0.0, ge=0, le=8, description="GPUs of each worker; 0.5: two workers share one. 0: workers compute on CPUs"
    )

    @field_validator("address")
    @classmethod
    def _is_no_remote_client(cls, address: str) -> str:
        if "://" in address:
            raise ValueError(f"'{address}' is a URL; expected HOST:PORT of the cluster's head, or auto")
        return address

    @field_validator("gpus")
    @classmethod
    def _are_whole_above_one(cls, gpus: float) -> float:
        if gpus > 1 and not gpus.is_integer():
            raise ValueError(
                f"{gpus:g}: Ray gives a share of one GPU, or whole ones; use a share up to 1, or 2, 3, ..."
            )
        return gpus


class OwnDataConfig(Frozen):
    """Samples of the coordinator itself, and the device that computes on them."""

    data: str = Field(max_length=1000, description="data source, as in an agent's configuration")
    folder: Path = Field(Path(), description="base of relative paths in data; default: this file's folder")
    device: str = Field("auto", max_length=64, description="auto (cuda where there is one), cpu, cuda, cuda:1, mps")

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices that compute."""
        return (self.device,)


LEAST_IN_A_PART = 2
"""The least samples of a part of a batch: batch norm cannot learn from one."""


class WarmStartConfig(OwnDataConfig):
    """What the encoder learns before the first round, from data that the coordinator has."""

    epochs: int = Field(5, ge=1, le=100_000, description="passes over the data")
    lr: float = Field(0.01, gt=0, le=1000, description="step size of SGD")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(0.0, ge=0, le=1000, description="of SGD")
    batch_size: PositiveCount = Field(50, description="samples in one step")
    test_fraction: float = Field(0.1, gt=0, lt=1, description="share of the samples that is held out for evaluation")
    seed: Seed = Field(0, description="seed of that split")
    threads: int = Field(1, ge=0, le=256, description="torch threads; 0 = torch's default. 1 keeps results repeatable")
    devices: tuple[Annotated[str, Field(max_length=64)], ...] = Field(
        (),
        max_length=64,
        description="devices of this machine that train together, with a process for each, such as cuda:0 and cuda:1; "
        "default: device alone",
    )
    parts: int = Field(
        0,
        ge=0,
        le=1024,
        description="parts into which each batch is cut; their gradients are added up in their order, so that any "
        "number of devices of one kind ends in the same bits; 0 = as many as devices",
    )

    @model_validator(mode="after")
    def _devices_share_the_parts(self) -> WarmStartConfig:
        """Require that each device has a part of each batch, and each part enough samples."""
        mistakes = []
        if self.devices and self.device != "auto":
            mistakes.append("device and devices exclude each other; keep the one that is meant")
        if "auto" in self.devices:
            mistakes.append("devices has 'auto'; name devices, such as cuda:0 or cpu")
        if 0 < self.parts < len(self.devices):
            mistakes.append(
                f"parts = {self.parts} leaves some of {len(self.devices)} devices without work; raise parts"
            )
        least = LEAST_IN_A_PART * self.parts_of_batches
        if self.parts_of_batches > 1 and self.batch_size < least:
            mistakes.append(
                f"batch_size = {self.batch_size} is too small for {self.parts_of_batches} parts; expected {least} or "
                "more"
            )
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices that train: ``devices``, or ``device`` alone."""
        return self.devices or (self.device,)

    @property
    def parts_of_batches(self) -> int:
        """The number of parts of each batch: ``parts``, or one for each device."""
        return self.parts or len(self.device_names)


class ProxyConfig(OwnDataConfig):
    """Samples of the coordinator on which the shared model is evaluated after rounds, beside the next one.

    Where rounds are faster, the newest one is evaluated next, and those before it are left out.
    """

    every: PositiveCount = Field(1, description="evaluate every n-th round; the last one always")


class DifferentialPrivacyConfig(Frozen):
    """Privacy of a run: what devices do with their updates before these leave.

    Differential privacy of the released models: devices clip their updates and add noise.

    Where the server's step is made from the mean of the updates, each device adds a part, so that their sum has noise
    of ``noise * clip`` or more; a round closes with no fewer updates than ``cohort.min_agents`` then, and a run whose
    round is open fails when these settings change. Rounds without noise are counted, and not part of ``epsilon``. That
    protects all data of a device against everybody who sees the models, and trusts the
    coordinator and the other devices. With other methods each device adds all of it. What protects a device from the
    coordinator its own ``[privacy]`` says.
    """

    clip: float | None = Field(
        None, gt=0, le=1e9, description="largest L2 norm of a device's change; default: no clipping"
    )
    clip_statistics: float | None = Field(
        None, gt=0, le=1e9, description="the same for statistics beside the model, FedPAC's for example; default: clip"
    )
    noise: Annotated[float, zero_or_from(LEAST_NOISE)] = Field(
        0.0,
        ge=0,
        le=1e9,
        description="noise multiplier: standard deviation over clip of the noise in a round's sum"
        " (in each update, where the server's step is no mean)",
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="budget of all rounds of all runs in the state folder; a run ends before it is exceeded",
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="delta of that epsilon")
    secure_sum: bool = Field(
        False,
        description="add up updates under masks, so that the coordinator sees their sum alone; for methods whose "
        "server step is a mean",
    )

    @model_validator(mode="after")
    def _noise_has_a_scale(self) -> DifferentialPrivacyConfig:
        if self.clip is None and (self.noise or self.epsilon is not None or self.clip_statistics is not None):
            raise ValueError("noise, epsilon and clip_statistics need clip, the largest norm of a change; set it")
        if self.epsilon is not None and not self.noise:
            raise ValueError(f"epsilon = {self.epsilon:g} needs noise, and noise is 0; set it")
        return self


class RetentionConfig(Frozen):
    """What stays in the state folder. The run that is under way and the release on offer always stay."""

    runs: PositiveCount = Field(
        10,
        description="ended runs whose checkpoints and bundles stay, the newest; metrics, summaries and journal of all",
    )
    devices_days: int = Field(
        90,
        ge=14,
        le=36_500,
        description="devices that were not heard for so long do not count in shares and thresholds of releases, until "
        "they are heard again",
    )


class WebConfig(Frozen):
    """The web view of fleet, runs and releases, a process beside the coordinator; without this section there is none.

    Everybody who reaches the address may look. Actions need the token in ``web/token`` of the state folder.
    """

    listen: str = Field(
        "127.0.0.1:8470",
        pattern=r"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$",
        max_length=260,
        description="address and TCP port; port 0 = any free one. 127.0.0.1 = this machine alone",
    )
    hosts: tuple[Annotated[str, Field(max_length=253)], ...] = Field(
        (), max_length=32, description="names by which browsers reach it, beside the address; others are refused"
    )
    cert: Path | None = Field(
        None, description="certificate (PEM) for TLS; default: with [identity], the broker's, which 'init' makes"
    )
    key: Path | None = Field(None, description="private key (PEM) of that certificate; default: in the same file")
    insecure: bool = Field(
        default=False, description="allow an address that other machines reach without TLS: the token passes in clear"
    )

    @property
    def address(self) -> tuple[str, int]:
        """Host, without brackets, and port."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.address[0])

    @model_validator(mode="after")
    def _is_an_address(self) -> WebConfig:
        if self.address[1] > 65535:
            raise ValueError(f"listen = '{self.listen}': ports end at 65535")
        if self.key is not None and self.cert is None:
            raise ValueError("key needs cert, the certificate that it belongs to")
        return self


class BlobsConfig(Frozen):
    """Large blobs by HTTP, for agents that move them so; without this section all blobs go in chunks over MQTT.

    Either the coordinator serves them itself (``serve``), or it puts them where others serve them (``store``). Agents
    that do not reach the URLs get chunks.
    """

    serve: str | None = Field(
        None,
        pattern=r"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$",
        max_length=260,
        description="address and TCP port at which the coordinator serves blobs; port 0 = any free one",
    )
    url: str | None = Field(
        None,
        pattern=r"^https?://[A-Za-z0-9._:\[\]-]+(/[A-Za-z0-9._~/-]*)?$",
        max_length=400,
        description="beginning of the URLs at which agents reach that address, or the folder of store; default: with "
        "[identity] its host and the port of serve, otherwise the address of serve",
    )
    store: str | None = Field(
        None,
        max_length=400,
        description="where blobs are put for others to serve: s3://BUCKET/PREFIX (extra 's3'), of which agents get "
        "presigned URLs, or the absolute path of a folder that a web server serves at url",
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^https?://[!-~]+$",
        max_length=400,
        description="address of an S3-compatible store that is not Amazon's; keys come from the environment",
    )
    above_bytes: int = Field(1_000_000, ge=0, le=1 << 40, description="only blobs of more bytes go by HTTP")
    uploads: bool = Field(
        default=True,
        description="whether large updates of agents go the same way, to serve or to s3://, beside what agents "
        "download; not where aggregators take them",
    )
    valid_s: float = Field(
        600.0, ge=10, le=86_400, description="how long a URL holds; a download that has begun goes on after that"
    )
    cert: Path | None = Field(
        None, description="certificate (PEM) for TLS of serve; default: with [identity], the broker's"
    )
    key: Path | None = Field(None, description="private key (PEM) of that certificate; default: in the same file")
    insecure: bool = Field(
        default=False, description="allow an address that other machines reach without TLS: models pass in clear"
    )

    @property
    def address(self) -> tuple[str, int]:
        """Host, without brackets, and port of ``serve``."""
        host, _, port = (self.serve or "").rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_object_store(self) -> bool:
        """Whether ``store`` is reached by a protocol, and is no folder of this machine."""
        return self.store is not None and "://" in self.store

    @model_validator(mode="after")
    def _one_way(self) -> BlobsConfig:
        mistakes = [*self._mistakes_of_endpoint(), *self._mistakes_of_folder()]
        if (self.serve is None) == (self.store is None):
            mistakes.append("[blobs] needs either serve, an address of this machine, or store, where blobs are put")
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self

    def _mistakes_of_endpoint(self) -> Iterator[str]:
        """Yield what is wrong with the address and the certificate of the coordinator's own endpoint."""
        if self.serve is not None and self.address[1] > 65535:
            yield f"serve = '{self.serve}': ports end at 65535"
        if self.key is not None and self.cert is None:
            yield "key needs cert, the certificate that it belongs to"

    def _mistakes_of_folder(self) -> Iterator[str]:
        """Yield what is wrong with a store that is a folder of this machine."""
        if self.store is None or self.is_object_store:
            return
        if self.url is None:
            yield f"store = '{self.store}' is a folder; give url, at which a web server serves it"
        if not Path(self.store).is_absolute():
            yield f"store = '{self.store}' is neither s3://BUCKET/PREFIX nor an absolute path"


class CoordinatorConfig(Frozen):
    """One coordinator. Without ``[broker]`` it runs its own, see ``[embedded]``."""

    file_kind: ClassVar[FileKind] = FileKind(
        if_missing=(
            "'headwater init DIR' makes one for a federation over a network, --config FILE names another; "
            "configs/coordinator.toml is an example"
        ),
        foreign_keys=frozenset({"id", "tier", "data", "head", "training"}),
        foreign="this is the configuration of an agent, for 'edge-agent run'; that of a coordinator is made by "
        "'headwater init DIR' (example: configs/coordinator.toml)",
    )

    federation: str = Field("home", pattern=NAME_PATTERN, description="name of the federation; agents use the same")
    state: Path = Field(Path("state"), description="folder for journal, blobs and runs")
    journal: str | None = Field(
        None,
        max_length=2000,
        description="URL of a database for the journal, postgresql://user@host/database?passfile=/path, that "
        "coordinators with one state folder share; a password is read from passfile, PGPASSFILE or PGPASSWORD; "
        "default: SQLite in the state folder",
    )
    broker: BrokerConfig | None = Field(None, description="an existing broker")
    embedded: EmbeddedConfig = Field(
        default_factory=EmbeddedConfig, description="the broker that the coordinator starts without [broker]"
    )
    identity: IdentityConfig | None = Field(
        None, description="certificates for agents, and a Mosquitto that the coordinator starts for them"
    )
    task: Task = Field(description="inputs, classes and encoder")
    run: RunConfig = Field(default_factory=RunConfig, description="defaults of a run")
    cohort: CohortConfig = Field(default_factory=CohortConfig, description="who takes part in a round")
    round: RoundConfig = Field(default_factory=RoundConfig, description="when a round closes")
    aggregation: AggregationConfig = Field(
        default_factory=AggregationConfig, description="how updates are combined, and what a single one can do"
    )
    aggregators: AggregatorsConfig = Field(
        default_factory=AggregatorsConfig, description="processes that take and sum updates beside the coordinator"
    )
    export: ExportConfig = Field(default_factory=ExportConfig, description="what happens to the encoder of a run")
    privacy: DifferentialPrivacyConfig = Field(
        default_factory=DifferentialPrivacyConfig,
        description="differential privacy of the released models, and secure sums",
    )
    retention: RetentionConfig = Field(default_factory=RetentionConfig, description="what stays in the state folder")
    web: WebConfig | None = Field(None, description="the web view of fleet, runs and releases; default: none")
    blobs: BlobsConfig | None = Field(
        None, description="large blobs by HTTP; default: all blobs go in chunks over MQTT"
    )
    evaluate_every: Count = Field(1, description="agents evaluate every n-th round; 0 = only after the last")
    hosted: tuple[HostedConfig, ...] = Field(
        (), max_length=10_000, description="clients with data on this machine; they take part like agents"
    )
    hosted_processes: int | None = Field(
        None, ge=1, le=1024, description="processes of the hosted clients; default: as many as cores, or one with a GPU"
    )
    hosted_devices: tuple[Annotated[str, Field(max_length=64)], ...] = Field(
        (),
        max_length=1024,
        description="devices of the hosted clients, with a process for each: clients that name no device are spread "
        "over all; a device may be there several times. Default: each client as its device says",
    )
    hosted_ray: HostedRayConfig | None = Field(
        None, description="the Ray cluster on which hosted clients compute; default: they compute on this machine"
    )
    warm_start: WarmStartConfig | None = Field(
        None, description="training of the encoder on this machine before round 1"
    )
    proxy: ProxyConfig | None = Field(
        None, description="evaluation of the shared model on samples of this machine, after rounds"
    )

    @property
    def run_task(self) -> Task:
        """The task of a run by this configuration: ``task``, with what of the encoder learns as ``run`` says."""
        return self.task.with_peft(self.run.peft, self.run.peft_params)

    def digests(self) -> dict[str, str]:
        """Section -> 8 hexadecimal digits of it, of those that a run takes from the coordinator and not from a request.

        Neither secrets nor paths can be read from them.
        """
        left_out = {"state", "journal", "task", "run", "warm_start", "web", "blobs"}
        sections = self.model_dump(mode="json", exclude=left_out)
        texts = {name: json.dumps(section, sort_keys=True) for name, section in sections.items()}
        return {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in texts.items()}

    @field_validator("journal")
    @classmethod
    def _journal_is_at_a_url(cls, journal: str | None) -> str | None:
        mistakes = [] if journal is None else mistakes_in(journal)
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return journal

    @model_validator(mode="after")
    def _peft_is_of_a_run(self) -> CoordinatorConfig:
        if self.task.peft is not None:
            raise ValueError(f"task.peft = '{self.task.peft}' is a setting of a run; set run.peft instead")
        return self

    @model_validator(mode="after")
    def _each_hosted_once(self) -> CoordinatorConfig:
        ids = [client.id for client in self.hosted]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"hosted clients {', '.join(twice)} occur twice; give each its own id")
        return self

    @model_validator(mode="after")
    def _hosted_devices_are_those_of_clients(self) -> CoordinatorConfig:
        """Require that each hosted client has a process on the device that it names."""
        if not self.hosted_devices:
            return self
        mistakes = []
        if self.hosted_processes is not None:
            mistakes.append("hosted_processes and hosted_devices exclude each other; keep the one that is meant")
        if "auto" in self.hosted_devices:
            mistakes.append("hosted_devices has 'auto'; name devices, such as cpu or cuda:1")
        homeless = [client for client in self.hosted if client.device not in {"auto", *self.hosted_devices}]
        mistakes.extend(
            f"hosted client '{client.id}' has device = '{client.device}', which is not in hosted_devices; add it "
            "there, or leave the client's device out"
            for client in homeless
        )
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self

    @model_validator(mode="after")
    def _hosted_clients_can_be_on_ray(self) -> CoordinatorConfig:
        """Require that the cluster is the only placement of hosted clients, and has what each of them needs."""
        cluster = self.hosted_ray
        if cluster is None:
            return self
        mistakes = []
        if not self.hosted:
            mistakes.append("[hosted_ray] without [[hosted]] clients has no effect; add clients, or leave it out")
        if self.hosted_processes is not None or self.hosted_devices:
            mistakes.append(
                "[hosted_ray] excludes hosted_processes and hosted_devices, which are of this machine; keep one of them"
            )
        for client in self.hosted:
            if client.device not in {"auto", "cpu", "cuda"}:
                mistakes.append(
                    f"hosted client '{client.id}' has device = '{client.device}', but a worker on a cluster sees only "
                    "the GPUs that Ray gives it; use auto, cpu or cuda"
                )
            elif client.device == "cuda" and not cluster.gpus:
                mistakes.append(
                    f"hosted client '{client.id}' has device = 'cuda', but hosted_ray.gpus = 0; raise gpus, or leave "
                    "the client's device out"
                )
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self

    @model_validator(mode="after")
    def _web_has_tls_on_a_network(self) -> CoordinatorConfig:
        web = self.web
        if web is not None and not web.is_local and web.cert is None and self.identity is None and not web.insecure:
            raise ValueError(
                f"web.listen = '{web.listen}' is reached from other machines and has no TLS; give web.cert, or make "
                "certificates with 'headwater init', or set web.insecure = true"
            )
        return self

    @model_validator(mode="after")
    def _blobs_have_tls_on_a_network(self) -> CoordinatorConfig:
        blobs = self.blobs
        if blobs is None or blobs.serve is None or is_loopback(blobs.address[0]):
            return self
        has_tls = blobs.cert is not None or self.identity is not None
        if not has_tls and not blobs.insecure:
            raise ValueError(
                f"blobs.serve = '{blobs.serve}' is reached from other machines and has no TLS; give blobs.cert, or "
                "make certificates with 'headwater init', or set blobs.insecure = true"
            )
        if blobs.url is None and self.identity is None:
            raise ValueError(
                f"blobs.serve = '{blobs.serve}' does not say by which name agents reach it; give blobs.url"
            )
        return self

    @model_validator(mode="after")
    def _no_release_between_buffered_rounds(self) -> CoordinatorConfig:
        if self.round.mode == "buffered" and self.export.every:
            raise ValueError(
                f"export.every = {self.export.every} needs rounds that end, and buffered ones overlap; "
                "set export.every = 0"
            )
        return self

    @model_validator(mode="after")
    def _buffered_rounds_train(self) -> CoordinatorConfig:
        if self.round.mode == "buffered" and self.cohort.tier == "head":
            raise ValueError(
                "cohort.tier = 'head' needs round.mode = 'synchronous': in buffered rounds devices train at their own "
                "pace, and those without torch do not train"
            )
        return self

    @model_validator(mode="after")
    def _noise_adds_up_within_a_round(self) -> CoordinatorConfig:
        if self.privacy.clip is not None and self.round.mode == "buffered":
            raise ValueError(
                "privacy.clip needs rounds whose updates are of that round, and buffered ones count those of earlier "
                "rounds with other weights; set round.mode = 'synchronous'"
            )
        if self.privacy.clip is not None and self.aggregation.rule != "mean":
            raise ValueError(
                f"privacy.clip needs aggregation.rule = 'mean': what '{self.aggregation.rule}' makes of one update "
                "depends on the others, for which the noise is not made"
            )
        if self.privacy.clip is not None and self.cohort.tier != "train":
            raise ValueError("privacy.clip needs cohort.tier = 'train': devices without torch add no noise")
        return self

    @model_validator(mode="after")
    def _sum_hides_its_terms(self) -> CoordinatorConfig:
        if not self.privacy.secure_sum:
            return self
        reasons = []
        if self.cohort.min_agents < LEAST_CLIENTS:
            reasons.append(
                f"cohort.min_agents = {LEAST_CLIENTS} or more, because a sum of fewer updates hides nobody; it is "
                f"{self.cohort.min_agents}"
            )
        if self.aggregation.rule != "mean":
            reasons.append(f"aggregation.rule = 'mean', because '{self.aggregation.rule}' looks at single updates")
        bounds = {"max_norm", "max_weight", "max_share", "min_cosine"} & self.aggregation.model_dump(
            exclude_defaults=True, exclude_none=True
        ).keys()
        if bounds:
            reasons.append(
                f"no aggregation.{min(bounds)}, because nobody sees the single updates that it bounds; privacy.clip "
                "has the devices shorten their changes"
            )
        if self.round.mode == "buffered":
            reasons.append("round.mode = 'synchronous', because masks are of one round and buffered rounds overlap")
        if self.export.client_ranges:
            reasons.append("export.client_ranges = false, because it asks each device for figures of its data")
        if self.hosted:
            reasons.append("no [[hosted]] clients, because the coordinator could take their updates out of the sum")
        if reasons:
            raise ValueError(f"privacy.secure_sum = true needs {'; it needs '.join(reasons)}")
        return self

    @model_validator(mode="after")
    def _one_broker(self) -> CoordinatorConfig:
        if self.broker is not None and "embedded" in self.model_fields_set:
            raise ValueError("[broker] and [embedded] exclude each other; keep the one that is meant")
        if self.identity is not None and (self.broker is not None or "embedded" in self.model_fields_set):
            raise ValueError("[identity] starts its own Mosquitto; leave [broker] and [embedded] out")
        return self


DEFAULT_CONFIG = Path("coordinator.toml")


def load_config(path: Path | str | None = None, state: Path | None = None) -> CoordinatorConfig:
    """Return the configuration in ``path`` (``coordinator.toml`` by default); ``state`` replaces its state folder.

    Example:
        >>> from pathlib import Path
        >>> from coordinator import load_config
        >>> pictures = '{ kind = "image", channels = 3, height = 32, width = 32 }'
        >>> task = f'{{ class_names = ["cat", "dog"], encoder = "small_cnn", input = {pictures} }}'
        >>> _ = Path("coordinator.toml").write_text(f"task = {task}")
        >>> load_config("coordinator.toml").task.class_names
        ('cat', 'dog')

    Raises:
        ConfigError: no such file, or mistakes, all of them listed.
    """
    chosen = DEFAULT_CONFIG if path is None else Path(path)
    return load(CoordinatorConfig, chosen, {"state": str(state.absolute())} if state else None)
