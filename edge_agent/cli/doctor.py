"""Show what this device can do, what would let it do more, and, with --broker, where the way to the broker ends.

Example:
  edge-agent doctor --broker mqtts://broker.example:8883 --ca ca.pem
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import cause
from . import show

if TYPE_CHECKING:
    from ..capabilities import Capabilities
    from ..config import BrokerConfig


@dataclass(frozen=True)
class Step:
    """One step of the way to the broker."""

    name: str
    is_ok: bool
    detail: str


_TIERS = {
    "train": "train: trains encoders and fits heads",
    "head": "head: runs encoders and fits heads",
    "idle": "none yet",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    parser.add_argument("--broker", metavar="URL", help="walk the way to this broker: mqtt://host or mqtts://host")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="trusted authorities for mqtts (default: the system's)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds for each step (default: 5)")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; exit code 75 where the broker cannot be reached."""
    from ..capabilities import find

    device = find()
    steps = list(walk(arguments.broker, arguments.ca, arguments.timeout)) if arguments.broker is not None else []
    content = {
        **device.model_dump(mode="json"),
        "tier": device.tier,
        "head": device.head,
        "advice": list(device.advice()),
        "verdict": _verdict(device, steps),
        "broker": [{"step": step.name, "ok": step.is_ok, "detail": step.detail} for step in steps],
    }
    show.result(arguments, content, lambda: _lines(device, steps))
    return 0 if all(step.is_ok for step in steps) else 75


def walk(url: str, ca: Path | None, timeout_s: float) -> Iterator[Step]:
    """The steps to the broker, in order, up to and with the first that fails.

    Raises:
        ConfigError: not a broker's URL.
    """
    from ..config import BrokerConfig, parse

    broker = parse(BrokerConfig, {"url": url}, where="--broker")
    steps: list[tuple[str, Callable[[], str]]] = [
        ("name", lambda: _resolve(broker)),
        ("tcp", lambda: _connect(broker, timeout_s)),
    ]
    if broker.uses_tls:
        steps.append(("tls", lambda: _greet(broker, ca, timeout_s)))
    for name, attempt in steps:
        step = _attempt(name, attempt)
        yield step
        if not step.is_ok:
            return


def _attempt(name: str, attempt: Callable[[], str]) -> Step:
    try:
        return Step(name, is_ok=True, detail=attempt())
    except OSError as error:  # name, connection and certificate errors are all kinds of OSError
        return Step(name, is_ok=False, detail=cause(error))


def _resolve(broker: BrokerConfig) -> str:
    found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    return f"{broker.host} is {', '.join(sorted({str(entry[4][0]) for entry in found}))}"


def _connect(broker: BrokerConfig, timeout_s: float) -> str:
    with socket.create_connection((broker.host, broker.port), timeout_s):
        return f"port {broker.port} is open"


def _greet(broker: BrokerConfig, ca: Path | None, timeout_s: float) -> str:
    import ssl

    context = ssl.create_default_context(cafile=str(ca) if ca is not None else None)
    with (
        socket.create_connection((broker.host, broker.port), timeout_s) as plain,
        context.wrap_socket(plain, server_hostname=broker.host) as secure,
    ):
        return f"{secure.version()}, certificate is trusted"


def _lines(device: Capabilities, steps: list[Step]) -> list[str]:
    lines = show.pairs(
        [
            ("python", f"{device.python}, {'64' if device.is_64bit else '32'} bit"),
            ("system", f"{device.system}, {device.machine}"),
            ("board", device.board),
            ("processor", f"{device.cores} cores"),
            ("memory", f"{show.size(device.memory_bytes)}, {show.size(device.available_bytes)} available"),
            ("accelerators", ", ".join(device.accelerators) or "none found"),
            ("packages", ", ".join(f"{name} {version}" for name, version in device.packages.items())),
            ("suggested tier", _TIERS[device.tier]),
            ("suggested head", f"{device.head} (logistic regression)"),
        ]
    )
    lines += [f"note: {advice}" for advice in device.advice()]
    lines += [f"broker {step.name}: {'ok' if step.is_ok else 'FAILED'}: {step.detail}" for step in steps]
    return [*lines, f"verdict: {_verdict(device, steps)}"]


def _verdict(device: Capabilities, steps: list[Step]) -> str:
    """What it all comes to, in one line."""
    failed = next((step for step in steps if not step.is_ok), None)
    if device.tier == "idle":
        return f"not ready: no encoder can run here; {next(iter(device.advice()), 'see the packages above')}"
    ready = f"ready as an agent of tier '{device.tier}'"
    if failed is not None:
        return f"{ready}, but the broker cannot be reached ({failed.name}: {failed.detail})"
    return f"{ready}, and the broker answers" if steps else f"{ready}; --broker URL looks at the way to a broker, too"
