"""Figures of this device for Prometheus, as a file for the textfile collector of node_exporter.

No label holds the id of the agent: the collector's own ``instance`` names the device. Written by hand, because an agent
needs no other package for a few lines of text.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..core.config import AgentConfig
from ..core.errors import cause
from ..core.storage import Access, write_atomic
from ..version import __version__
from ..wire.faults import CODES

log = logging.getLogger(__name__)

CONDITIONS = ("ok", "fault", "stalled")


@dataclass(frozen=True)
class Figures:
    """What the file says. ``accuracies``: scope -> 0..1; ``updates``: done, by what the coordinator said of them."""

    tier: str
    bundle_id: str
    condition: str
    is_connected: bool
    is_working: bool
    samples: int | None
    resident_bytes: int | None
    disk_free_bytes: int
    accuracies: Mapping[str, float | None] = field(default_factory=dict)
    updates: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    """Code -> times since the start."""

    better_alone: bool = False
    written_at: float = 0.0
    """Seconds since 1970 by the device's clock."""


def text(figures: Figures) -> str:
    """Return the figures in Prometheus' text format."""
    identity = {"version": __version__, "tier": figures.tier, "bundle": figures.bundle_id[:12]}
    lines = [
        *_family("info", "gauge", "Version, tier and bundle of this agent.", [(identity, 1)]),
        *_one(
            "written_timestamp_seconds",
            "When the agent wrote these figures; node_exporter serves the file of an agent that is gone, too.",
            figures.written_at,
        ),
        *_one("connected", "1 while a coordinator has welcomed this agent.", figures.is_connected),
        *_one("working", "1 while it trains, fits or tests.", figures.is_working),
        *_family(
            "condition",
            "gauge",
            "1 for the condition that the agent is in.",
            [({"condition": name}, name == figures.condition) for name in CONDITIONS],
        ),
        *_one("samples", "Training samples of this device.", figures.samples),
        *_one("resident_memory_bytes", "Memory of this process.", figures.resident_bytes),
        *_one("disk_free_bytes", "Free space on the disk of the state folder.", figures.disk_free_bytes),
        *_family(
            "accuracy_ratio",
            "gauge",
            "Accuracy on held-out samples of this device.",
            [({"scope": scope}, value) for scope, value in figures.accuracies.items()],
        ),
        *_one("better_alone", "1 where a model without the federation is more accurate here.", figures.better_alone),
        *_family(
            "updates_total",
            "counter",
            "Updates that the coordinator has accepted or rejected since the start.",
            [({"result": result}, figures.updates.get(result, 0)) for result in ("accepted", "rejected")],
        ),
        *_family(
            "faults_total",
            "counter",
            "Faults since the start, by code.",
            [({"code": code}, figures.faults.get(code, 0)) for code in sorted(CODES)],
        ),
    ]
    return "\n".join(lines) + "\n"


def write(path: Path, figures: Figures) -> None:
    """Replace the file at ``path``, for everybody to read: node_exporter is another user.

    Raises:
        OSError: it cannot be written.
    """
    access = Access(os.getuid(), os.getgid(), 0o644) if hasattr(os, "getuid") else None
    write_atomic(path, text(figures).encode(), durable=False, access=access)


class TextFile:
    """The file that ``[metrics] textfile`` names, as often as heartbeats are sent; a failure costs a line of log."""

    def __init__(self, config: AgentConfig, clock: Callable[[], float], now: Callable[[], float] = time.time) -> None:
        self._path = config.metrics.textfile
        self._every_s = config.heartbeat_s
        self._clock = clock
        self._now = now
        self._due_at = float("-inf")
        self._failure = ""

    def tick(self, figures: Callable[[], Figures]) -> None:
        """Write the file when it is due."""
        if self._path is None or self._clock() < self._due_at:
            return
        self._due_at = self._clock() + self._every_s
        self._write(self._path, figures)

    def end(self, figures: Callable[[], Figures]) -> None:
        """Write the file once more, as that of an agent that is not connected."""
        if self._path is not None:
            self._write(self._path, lambda: replace(figures(), is_connected=False, is_working=False))

    def _write(self, path: Path, figures: Callable[[], Figures]) -> None:
        """Write the figures of this moment; a failure is logged when it is another one than before."""
        try:
            write(path, replace(figures(), written_at=self._now()))
        # The collector's folder is no part of the agent's state, and the agent works without it.
        except OSError as error:
            reason = cause(error)
            if self._failure != reason:
                log.warning("metrics_not_written path=%s reason=%s", path, reason)
            self._failure = reason
        else:
            self._failure = ""


def _one(name: str, about: str, value: float | None) -> list[str]:
    return _family(name, "gauge", about, [({}, value)])


def _family(
    name: str, kind: Literal["gauge", "counter"], about: str, samples: Iterable[tuple[Mapping[str, str], float | None]]
) -> list[str]:
    """Return help, type and samples; nothing where no value is known."""
    finite_samples = [(labels, float(value)) for labels, value in samples if value is not None and math.isfinite(value)]
    if not finite_samples:
        return []
    full = f"headwater_agent_{name}"
    return [
        f"# HELP {full} {about}",
        f"# TYPE {full} {kind}",
        *(f"{full}{_labels(sample_labels)} {value!r}" for sample_labels, value in finite_samples),
    ]


def _labels(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    pairs = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""
