"""What is measured, the processes under measurement, figures as rows, and the machine that they come from."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from edge_agent.bundle import starter
from edge_agent.core.capabilities import cores
from edge_agent.core.child_process import module_command
from edge_agent.core.errors import MeasuringFailed, MissingCapability, UsageError
from edge_agent.core.task import Frozen

from ...processes.pipe import owner_pipe
from ...processes.supervisor import ChildProcess

PACKAGES = ("numpy", "paho-mqtt", "pydantic", "onnxruntime", "torch", "amqtt")
_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1_000_000, "GB": 1_000_000_000}
LARGEST_BYTES = 1 << 30
METHODS = ("fedavg", "fedpac")


def size_bytes(text: str) -> int:
    """Return the bytes of a size such as ``0.5MB``, ``45 MB`` or ``500000``; 1 MB are 10^6 bytes.

    Raises:
        UsageError: The text is not a size, or of a model that cannot be sent.
    """
    size = text.strip().upper()
    number = size.rstrip("KMGB").strip()
    unit = size[len(number) :].strip()
    try:
        count = round(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"--payload '{text}': expected a size such as 0.5MB, 45MB or 500000") from error
    if not 1000 <= count <= LARGEST_BYTES:
        raise UsageError(f"--payload '{text}' is {count} bytes; expected 1000 to {LARGEST_BYTES}")
    return count


class RoundPlan(Frozen):
    """The settings of ``bench round``, which times whole rounds."""

    agents: int = Field(4, ge=1, le=64, description="number of agents; each is a process")
    payload: str = Field("0.5MB", description="size of the model of workload noop: 0.5MB, 45MB, 500000")
    rounds: int = Field(20, ge=2, le=10_000, description="number of rounds to time")
    workload: Literal["noop", "w1"] = Field(
        "noop", description="noop: no training; w1: a CNN on 600 images for each agent"
    )
    broker: Literal["all", "mosquitto", "amqtt"] = Field(
        "all", description="all (those that are installed), mosquitto or amqtt"
    )

    @property
    def payload_bytes(self) -> int:
        """The size of the model in bytes.

        Raises:
            UsageError: The setting is not a size, or of a model that cannot be sent.
        """
        return size_bytes(self.payload)


class FleetPlan(Frozen):
    """The settings of ``bench fleet``, which counts what the messages of many agents cost."""

    agents: int = Field(100, ge=1, le=100_000, description="number of agents, all of them in one process")
    cohort: int = Field(0, ge=0, le=100_000, description="agents in a round; 0 = all")
    payload: str = Field("0.5MB", description="size of the model: 0.5MB, 500000")
    rounds: int = Field(2, ge=1, le=1000, description="number of rounds")
    idle_s: int = Field(60, ge=0, le=3600, description="seconds of heartbeats alone, before the rounds")
    transport: Literal["memory", "mosquitto", "amqtt"] = Field(
        "memory", description="memory (CPU by kind of message), mosquitto or amqtt"
    )
    aggregators: int = Field(
        0, ge=0, le=64, description="over a broker: so many aggregators take and sum the updates; 0 = the coordinator"
    )
    flood: Literal["none", "junk", "hello", "update"] = Field(
        "none", description="over a broker, at the end: 5,000 such messages a second from one agent, for 10 s"
    )

    @property
    def cohort_size(self) -> int:
        """The number of agents in a round."""
        return min(self.cohort or self.agents, self.agents)

    @property
    def payload_bytes(self) -> int:
        """The size of the model in bytes.

        Raises:
            UsageError: The setting is not a size, or of a model that cannot be sent.
        """
        return size_bytes(self.payload)


class CostPlan(Frozen):
    """The settings of ``bench costs``, which measures what ``headwater plan`` computes with."""

    largest: int = Field(10_000, ge=1000, le=100_000, description="fleets with more agents are not measured")
    idle_s: int = Field(60, ge=10, le=3600, description="seconds of heartbeats alone, for each fleet")
    repeats: int = Field(1, ge=1, le=10, description="measurements of each fleet")
    transport: Literal["mosquitto", "amqtt"] = Field("mosquitto", description="broker that is measured")


class SimulationSize(Frozen):
    """The settings of ``bench simulate``, which times simulated rounds; the defaults are those of workload W1."""

    rounds: int = Field(5, ge=1, le=1000, description="number of measured rounds")
    clients: int = Field(20, ge=1, le=10_000, description="number of clients")
    samples: int = Field(600, ge=10, le=3000, description="training samples of a client")
    workers: int = Field(0, ge=0, le=1024, description="worker processes; 0 = as many as cores")
    method: Literal["all", "fedavg", "fedpac"] = Field("all", description="all, fedavg or fedpac")
    engine: Literal["pool", "stacked"] = Field(
        "pool", description="pool: on the CPU; stacked: all clients at once on one device"
    )
    device: str = Field("auto", description="device of engine stacked: auto, cpu, cuda, cuda:1")

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods to measure."""
        if self.method == "all":
            return METHODS
        return (self.method,)

    @property
    def is_stacked(self) -> bool:
        """Whether all clients train at once on one device."""
        return self.engine == "stacked"


class ServePlan(Frozen):
    """The settings of ``bench serve``, which times answers over HTTP."""

    bundle: Path = Field(Path(starter.NAME), description="bundle file (*.hwb)")
    head: Path | None = Field(None, description="saved head; default: the shared classifier of the bundle")
    input: Path = Field(description="an image, or a recording (.npy, .csv), that is answered again and again")
    rate: float = Field(50.0, gt=0, le=10_000, description="requests in a second")
    seconds: float = Field(10.0, gt=0, le=3600, description="seconds of each of both measurements")


@dataclass(frozen=True)
class Row:
    """A figure of a table: name, value and unit."""

    name: str
    value: float
    unit: str

    def as_json(self) -> dict[str, Any]:
        """Return the figure as a JSON object."""
        return {"name": self.name, "value": rounded(self.value), "unit": self.unit}


def rounded(value: float, digits: int = 4) -> float:
    """Return a value with so many significant digits; 0, infinity and NaN are returned as they are."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all do not exceed; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    index = math.ceil(share * len(ordered)) - 1
    return ordered[max(0, index)]


def machine() -> dict[str, Any]:
    """Return processor, cores, load and versions as JSON: what figures depend on."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    load = None
    if hasattr(os, "getloadavg"):
        load = rounded(os.getloadavg()[0], 3)
    return {
        "processor": _processor(),
        "cores": cores(),
        "load": load,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": versions,
    }


def _processor() -> str:
    """Return the name of the processor as Linux has it, or its architecture where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def caveat(of: dict[str, Any], not_shown: str) -> str:
    """Return the sentences that a reader needs before comparing figures.

    Args:
        of: The machine that they are of, as `machine` returns it.
        not_shown: A sentence on what the measurement does not show.
    """
    versions = ", ".join(f"{name} {version}" for name, version in of["packages"].items())
    return (
        f"Caveats: {of['processor']}, {of['cores']} cores, load {of['load']} at the start, Python {of['python']}, "
        f"{versions}. {not_shown} Compare ratios of one run, not times of two machines."
    )


@dataclass(frozen=True)
class Usage:
    """The CPU time and the memory that one process has used so far; MB are 10^6 bytes."""

    cpu_s: float
    """CPU seconds of the process and of its children that have ended."""

    rss_mb: float
    """Memory in RAM now."""

    own_mb: float
    """The part of that memory that does not belong to files."""

    peak_mb: float
    """The most memory in RAM so far."""


def usage(pid: int) -> Usage:
    """Return what process ``pid`` has used.

    Raises:
        MissingCapability: This system has no /proc.
        MeasuringFailed: There is no such process.
    """
    process = Path("/proc") / str(pid)
    if not Path("/proc/self/status").exists():
        raise MissingCapability("measuring processes needs Linux and its /proc; run this command there")
    try:
        # 1. Memory, which the kernel states in units of 1,024 bytes.
        status = (process / "status").read_text(encoding="ascii")
        sizes = dict(line.split(":", 1) for line in status.splitlines())
        megabytes = [int(sizes[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon", "VmHWM")]
        # 2. CPU: user and system time of its threads and of children that have ended. The fields follow the program's
        #    name in brackets, which may hold anything.
        stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rsplit(")", 1)[1].split()
        ticks = sum(map(int, fields[11:15]))
    except (OSError, KeyError) as error:
        raise MeasuringFailed(f"process {pid} ended while it was measured ({error})") from error
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), *megabytes)


def forget_peak(pid: int) -> None:
    """Let the peak of process ``pid`` count from now on (nothing happens where the kernel does not offer it)."""
    with contextlib.suppress(OSError):
        (Path("/proc") / str(pid) / "clear_refs").write_text("5", encoding="ascii")


class Measured(ChildProcess):
    """A process under measurement. It may answer through its pipe, see `send_line` and `lines`."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Start the process; ``environment`` is added to that of this process."""
        self.name = name
        super().__init__(command, log, environment=environment)

    def check(self) -> None:
        """Check that the process still runs.

        Raises:
            MeasuringFailed: It has ended.
        """
        if not self.is_running:
            raise MeasuringFailed(f"{self.name} ended: {self.exit_reason()}")

    def stopped(self) -> str:
        """End the process, and return its exit code with the last lines that it logged."""
        self.stop()
        return self.exit_reason()

    def send(self, line: str = "") -> None:
        """Send the measured process a line."""
        self.pipe.send("line", line.encode())

    def answer(self) -> str:
        """Return the next line that the process sends.

        Raises:
            MeasuringFailed: It ended instead.
        """
        try:
            return self.pipe.receive().payload.decode()
        except (EOFError, OSError) as error:
            raise MeasuringFailed(f"{self.name} ended: {self.exit_reason()}") from error


@contextlib.contextmanager
def module(
    name: str, arguments: Sequence[object], folder: Path, *, module: str, environment: Mapping[str, str] | None = None
) -> Iterator[Measured]:
    """Run ``python -m module arguments`` as long as the context lasts; its output goes to ``folder/name.log``."""
    command = module_command(module, *map(str, arguments))
    process = Measured(name, command, folder / f"{name}.log", environment or {})
    try:
        yield process
    finally:
        process.stop()
        process.close()


def send_line(line: str) -> None:
    """Send a line from a measured process to the one that waits in `Measured.answer`."""
    owner_pipe().send("line", line.encode())


def lines() -> Iterator[str]:
    """Yield, in a measured process, the lines that `Measured.send` sends, until that process ends."""
    pipe = owner_pipe()
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield pipe.receive().payload.decode()


def wait_for(
    condition: Callable[[], bool], processes: Iterable[Measured], *, what: str, limit_s: float, every_s: float = 0.1
) -> None:
    """Return as soon as ``condition()`` is true.

    Raises:
        MeasuringFailed: It is not true within ``limit_s``, or one of ``processes`` has ended.
    """
    watched = tuple(processes)
    pause = threading.Event()
    until = time.monotonic() + limit_s
    while not condition():
        for measured in watched:
            measured.check()
        if time.monotonic() > until:
            ends = "\n".join(f"[{measured.name}] {measured.stopped()}" for measured in watched)
            raise MeasuringFailed(f"{what}: not within {limit_s:.0f} s; stopped:\n{ends}")
        pause.wait(every_s)


@contextlib.contextmanager
def scratch(root: Path | None) -> Iterator[Path]:
    """Give a temporary folder; on the disk of ``root`` if given, because the cost of syncs depends on the disk."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=root) as folder:
        yield Path(folder)
