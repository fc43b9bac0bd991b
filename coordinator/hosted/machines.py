"""One training by processes that somebody else starts, on one machine or on several: how they meet.

A launcher, such as ``torchrun``, or a person starts the processes and tells each by environment variables which one it
is (``RANK`` of ``WORLD_SIZE``), and where they meet: at ``MASTER_ADDR`` and ``MASTER_PORT`` listens the process of rank
0, or torchrun itself. There each process introduces itself, and waits until all have. Only if all train the same, with
the same software and the same samples, they connect with each other and begin.

What may be missing is another process: it is waited for, with a line now and then, until a deadline. Who is not there
by then is named, by all that are, and all end. A process that ends later closes its connections: then the exchange of
gradients fails in all others.

Neither the meeting nor the exchange knows passwords or encryption: both belong into a network of one's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import distributed

from edge_agent import __version__
from edge_agent.core.errors import TrainingFailed, UsageError, cause

from ..rounds.compute_requests import Travelling
from .spread import EXCHANGE_LIMIT_S, Gather, Rank

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that a launcher sets."""

MOST_PROCESSES = 1024

REPORT_S = 5.0
"""Seconds between two lines about what is waited for."""

LOOK_S = 0.1
"""Seconds between two looks at who has come."""

ENDING_S = 30.0
"""Seconds in which the others are done, too, where one is."""

_torch: Any = distributed
"""Torch does not declare all of these names to type checkers."""

Say = Callable[[str], None]
"""Shows a line about what is waited for."""


# --- which process this is -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """What a launcher has told this process.

    Attributes:
        number: The rank of this process, from 0.
        processes: How many there are, on all machines.
        local: The number of this process on its machine, from 0.
        host: The name or address at which they meet.
        port: The port there.
        has_store: Whether the launcher itself listens there.
        attempt: How often the launcher has started them all again.
    """

    number: int
    processes: int
    local: int
    host: str
    port: int
    has_store: bool = False
    attempt: int = 0

    @property
    def endpoint(self) -> str:
        """Where they meet, as ``host:port``."""
        return f"{self.host}:{self.port}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Launch | None:
        """Read what a launcher has set; None where it has set nothing, so that this process trains alone.

        Raises:
            UsageError: Some variables are missing or out of range; all mistakes are listed.
        """
        present = [name for name in VARIABLES if environment.get(name)]
        if not present:
            return None
        mistakes = [f"{name} is missing" for name in VARIABLES if name not in present]
        numbers = dict[str, int]()
        bounds = {
            "WORLD_SIZE": (1, MOST_PROCESSES),
            "RANK": (0, MOST_PROCESSES - 1),
            "LOCAL_RANK": (0, MOST_PROCESSES - 1),
            "MASTER_PORT": (1, 65535),
            "TORCHELASTIC_RESTART_COUNT": (0, 10**9),
        }
        for name, (least, most) in bounds.items():
            text = environment.get(name)
            if not text:
                continue
            if text.isascii() and text.isdigit() and least <= int(text[:12]) <= most:
                numbers[name] = int(text)
            else:
                mistakes.append(f"{name} = '{text[:40]}' is no number of {least}..{most}")
        if numbers.get("RANK", 0) >= numbers.get("WORLD_SIZE", MOST_PROCESSES + 1):
            mistakes.append(f"RANK = {numbers['RANK']} is not below WORLD_SIZE = {numbers['WORLD_SIZE']}")
        if mistakes:
            raise UsageError(
                f"the environment of a training on several machines: {'; '.join(mistakes)}; start it with torchrun, or "
                f"set {', '.join(VARIABLES)}; without any of them this process trains alone"
            )
        return cls(
            number=numbers["RANK"],
            processes=numbers["WORLD_SIZE"],
            local=numbers.get("LOCAL_RANK", 0),
            host=environment["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=numbers.get("TORCHELASTIC_RESTART_COUNT", 0),
        )


def device_of_process(local: int, device: str, devices: Sequence[str], gpus: int) -> str:
    """Return the device on which a process computes.

    Args:
        local: Its number on its machine, from 0.
        device: ``device`` of the configuration, for where it lists none.
        devices: ``devices`` of the configuration: those of one machine, with a process for each.
        gpus: How many GPUs this machine has.

    Raises:
        UsageError: There are more processes on this machine than devices.
    """
    if devices:
        if local < len(devices):
            return devices[local]
        raise UsageError(
            f"process {local} of this machine (LOCAL_RANK) has no device: [warm_start] devices lists {len(devices)}; "
            "list one for each process of a machine, or start fewer"
        )
    # Several processes that are left the choice would otherwise all take the first GPU.
    if device in {"auto", "cuda"} and gpus:
        if local < gpus:
            return f"cuda:{local}"
        raise UsageError(
            f"process {local} of this machine (LOCAL_RANK) has no GPU: there are {gpus}; start fewer processes, or "
            "list [warm_start] devices"
        )
    return device


# --- the meeting -----------------------------------------------------------------------------------------------------


class Introduction(Travelling):
    """What a process says of itself at the meeting."""

    machine: str = Field(max_length=300, description="the name of its machine")
    address: str = Field(max_length=300, description="the address at which others reach it")
    device: str = Field(max_length=64)
    headwater: str = Field(max_length=64, description="its version")
    torch: str = Field(max_length=64, description="its version")
    request: str = Field(max_length=64, description="SHA-256 (hex) of what is trained and how")
    samples: str = Field(max_length=64, description="SHA-256 (hex) of the samples")


class Store(Protocol):
    """As much of a store of ``torch.distributed`` as is used: texts by name, which all processes see."""

    def set(self, key: str, value: str) -> None:
        """Set the text of a name."""

    def get(self, key: str) -> bytes:
        """Return the text of a name, as bytes; wait for it where there is none."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all these names have a text."""


@dataclass(frozen=True)
class Meeting:
    """How this process meets the others.

    Attributes:
        launch: What the launcher has told.
        limit_s: Seconds within which all have to come.
        say: Shows what is waited for.
        address: The address of this machine at which others reach it; empty: the one from which it reaches them.
        clock: Seconds of a clock that never goes back.
    """

    launch: Launch
    limit_s: float
    say: Say
    address: str = ""
    clock: Callable[[], float] = time.monotonic

    @contextlib.contextmanager
    def open(self, device: str, request: str, samples: str, parts: int) -> Iterator[tuple[Rank, Gather]]:
        """Meet the others, and yield the rank of this process and the exchange of gradients with them.

        Args:
            device: The device of this process.
            request: What is trained and how, as text that is the same everywhere.
            samples: SHA-256 (hex) of the samples.
            parts: How many parts a batch is cut into.

        Raises:
            UsageError: The port is taken, an address is wrong, or the processes differ in what has to be equal.
            TrainingFailed: Another process has not come in time, or has ended.
        """
        launch = self.launch
        until = self.clock() + self.limit_s
        listens = launch.number == 0 and not launch.has_store
        # 1. Where they meet. Torch would try in silence, so its store is opened when somebody listens.
        if not listens:
            self._reach(until)
        store = self._open_store(listens=listens)
        with _loss_as_failure(launch):
            own = Introduction(
                machine=socket.gethostname()[:300],
                address=self.address or self._own_address(),
                device=device,
                headwater=__version__,
                torch=metadata.version("torch"),
                request=hashlib.sha256(request.encode()).hexdigest(),
                samples=samples,
            )
            # 2. Who is there, and whether all want the same.
            everybody = self._introduce(store, own, until)
            self._wait_for_readers(store)
            check_equal(everybody)
            # 3. The connections, which fail as soon as a process has ended.
            group = GlooGroup(launch, self._connect(store, own.address))
        try:
            yield Rank(launch.number, tuple(other.device for other in everybody), parts), group.gather
            # Nobody ends, and closes its connections, before all have what they need.
            group.wait_for_all()
        finally:
            group.close()

    def _reach(self, until: float) -> None:
        """Wait until somebody listens where they meet.

        Raises:
            TrainingFailed: Nobody has until the deadline.
        """
        launch = self.launch
        reported_at = self.clock()
        pause = threading.Event()
        while True:
            try:
                socket.create_connection((launch.host, launch.port), timeout=REPORT_S).close()
            except OSError as error:
                reason = cause(error)
            else:
                return
            now = self.clock()
            if now >= until:
                raise TrainingFailed(
                    f"nobody listens at {launch.endpoint} ({reason}) after {self.limit_s:g} s; expected the process of "
                    f"rank 0, of {launch.processes}; start it there, correct MASTER_ADDR and MASTER_PORT, or raise "
                    "--wait"
                )
            if now - reported_at >= REPORT_S:
                self.say(f"waiting for rank 0 at {launch.endpoint} ({reason}), for {until - now:.0f} s more")
                reported_at = now
            pause.wait(LOOK_S)

    def _open_store(self, *, listens: bool) -> Store:
        """Open the store through which processes introduce themselves."""
        launch = self.launch
        limit = timedelta(seconds=self.limit_s)
        try:
            store = _torch.TCPStore(
                launch.host, launch.port, None, is_master=listens, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            act = "listen" if listens else "meet"
            raise UsageError(
                f"rank {launch.number} cannot {act} at {launch.endpoint} ({_first_line(error)}); MASTER_ADDR has to be "
                "an address of the machine of rank 0, and MASTER_PORT a free port there"
            ) from error
        result: Store = _torch.PrefixStore(f"headwater-{launch.attempt}", store)
        return result

    def _own_address(self) -> str:
        """Return the address from which this machine reaches the meeting."""
        with socket.create_connection((self.launch.host, self.launch.port), timeout=REPORT_S) as connection:
            return str(connection.getsockname()[0])

    def _introduce(self, store: Store, own: Introduction, until: float) -> list[Introduction]:
        """Introduce this process, and return the introductions of all, by rank.

        Raises:
            TrainingFailed: Some have not come until the deadline.
        """
        launch = self.launch
        store.set(f"rank-{launch.number}", own.model_dump_json())
        reported_at = self.clock()
        pause = threading.Event()
        while True:
            absent = [number for number in range(launch.processes) if not store.check([f"rank-{number}"])]
            if not absent:
                break
            who = f"{_ranks(absent)} of {launch.processes}"
            now = self.clock()
            if now >= until:
                raise TrainingFailed(
                    f"{who} did not come to {launch.endpoint} within {self.limit_s:g} s; start every process, with the "
                    "same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or raise --wait"
                )
            if now - reported_at >= REPORT_S:
                self.say(f"waiting for {who} at {launch.endpoint}, for {until - now:.0f} s more")
                reported_at = now
            pause.wait(LOOK_S)
        return [parse_introduction(number, store.get(f"rank-{number}")) for number in range(launch.processes)]

    def _wait_for_readers(self, store: Store) -> None:
        """Have the process that keeps the store stay until all have read in it, also where it then refuses to go on."""
        launch = self.launch
        store.set(f"read-{launch.number}", "")
        names = [f"read-{number}" for number in range(launch.processes)]
        until = self.clock() + ENDING_S
        pause = threading.Event()
        while launch.number == 0 and not store.check(names) and self.clock() < until:
            pause.wait(LOOK_S)

    def _connect(self, store: Store, address: str) -> Any:
        """Connect with all others, through this machine's address or the interface that the environment names."""
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if interface:
            device = _torch.ProcessGroupGloo.create_device(interface=interface)
        else:
            device = _torch.ProcessGroupGloo.create_device(hostname=address)
        # Torch has no other way to choose the address than these fields.
        options = _torch.ProcessGroupGloo._Options()  # noqa: SLF001 - see above
        options._devices = [device]  # noqa: SLF001 - see above
        options._timeout = timedelta(seconds=EXCHANGE_LIMIT_S)  # noqa: SLF001 - see above
        named = _torch.PrefixStore("gloo", store)
        return _torch.ProcessGroupGloo(named, self.launch.number, self.launch.processes, options)


@contextlib.contextmanager
def _loss_as_failure(launch: Launch) -> Iterator[None]:
    """Turn what torch and sockets raise where another process is gone into one error that says so.

    Raises:
        TrainingFailed: Another process has ended, or cannot be reached.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise TrainingFailed(
            f"rank {launch.number} of {launch.processes} lost another process, or cannot reach it "
            f"({_first_line(error)}); see what the others have printed, and start all of them again; where addresses "
            "are wrong, give each process its own by --address"
        ) from error


class GlooGroup:
    """The connections with all other processes, until `close`."""

    def __init__(self, launch: Launch, group: Any) -> None:
        self._launch = launch
        self._group: Any = group

    def gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows (n,) of all processes by rank, on the CPU; each gives one of the same length.

        Raises:
            TrainingFailed: Another process has ended, or has given nothing for `EXCHANGE_LIMIT_S`.
        """
        rows = [torch.empty_like(row) for _ in range(self._launch.processes)]
        with _loss_as_failure(self._launch):
            self._opened().allgather([rows], [row]).wait()
        return rows

    def wait_for_all(self) -> None:
        """Wait until all others have come here, too.

        Raises:
            TrainingFailed: Another process has ended before.
        """
        with _loss_as_failure(self._launch):
            self._opened().barrier().wait(timedelta(seconds=ENDING_S))

    def close(self) -> None:
        """Close the connections. A process that ends while an error still refers to some is aborted by torch."""
        self._group = None

    def _opened(self) -> Any:
        if self._group is None:
            raise RuntimeError("the connections with the other processes are closed")
        return self._group


def _first_line(error: Exception) -> str:
    """Return the reason of an error of torch, whose texts have a place in C++ before it and advice behind it."""
    lines = cause(error).splitlines() or [type(error).__name__]
    reason = re.sub(r"^\[\S+:\d+\] ", "", lines[0])
    return reason.partition(". ")[0][:300]


def parse_introduction(number: int, content: bytes) -> Introduction:
    """Return what a process has said of itself.

    Raises:
        UsageError: It is no introduction: something else came to the port, or another version.
    """
    try:
        return Introduction.model_validate_json(content)
    except ValueError as error:
        raise UsageError(
            f"rank {number} has introduced itself with {len(content)} bytes that are no introduction; give all "
            "machines the same Headwater, and this training a port of its own (MASTER_PORT)"
        ) from error


def check_equal(everybody: Sequence[Introduction]) -> None:
    """Require that all processes train the same, with the same software and samples, or the bits would differ.

    Args:
        everybody: What the processes have said of themselves, by rank.

    Raises:
        UsageError: Some differ from rank 0; all are listed.
    """
    first = everybody[0]
    mistakes = []
    for number, other in enumerate(everybody[1:], 1):
        if other.headwater != first.headwater:
            mistakes.append(f"rank {number} has Headwater {other.headwater}, rank 0 has {first.headwater}")
        if other.torch != first.torch:
            mistakes.append(f"rank {number} has torch {other.torch}, rank 0 has {first.torch}")
        if other.request != first.request:
            mistakes.append(f"rank {number} ({other.machine}) has another configuration or other options than rank 0")
        elif other.samples != first.samples:
            mistakes.append(
                f"rank {number} ({other.machine}) has other samples than rank 0 ({other.samples[:12]}, not "
                f"{first.samples[:12]})"
            )
    if mistakes:
        raise UsageError(f"{'; '.join(mistakes)}; give all machines the same software, configuration and data")


def _ranks(numbers: Sequence[int]) -> str:
    """Return ranks as words, the first few of many."""
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"
