"""Which engine, and how many workers."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from edge_agent.client.session import choose_device
from edge_agent.errors import MissingCapability

from ..plan import EngineName, Plan
from .connection import imported


@dataclass(frozen=True)
class Choice:
    """An engine and its number of workers; 0: as many as a cluster has room for."""

    engine: EngineName = "serial"
    workers: int = 1

    @classmethod
    def of(cls, plan: Plan, clients: int) -> Choice:
        """What was asked for, else what suits: several workers where several cores can serve several clients.

        Raises:
            MissingCapability: this system cannot share memory between processes in our way, or Ray is not installed.
        """
        workers = min(plan.workers or cores(), clients)
        engine = plan.engine or ("pool" if plan.workers else _suitable(plan, workers))
        if engine in {"serial", "stacked"}:
            return cls(engine)
        if engine == "ray":
            imported()
            return cls("ray", workers if plan.address is None else min(plan.workers or 0, clients))
        if not can_share():
            raise MissingCapability("engine pool needs sockets that hand on descriptors (Linux, macOS); take serial")
        return cls(engine, workers)


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def can_share() -> bool:
    """Whether memory can be handed from process to process here."""
    return hasattr(socket, "send_fds")


def _suitable(plan: Plan, workers: int) -> EngineName:
    """A GPU is one: several processes would only share it, and each would need a context of its own."""
    is_cpu = choose_device(plan.device).type == "cpu"
    return "pool" if is_cpu and workers > 1 and can_share() else "serial"
