"""An engine made ready for a prepared simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from edge_agent.client.session import choose_device

from ...processes.pipe import SharedBuffer
from ...processes.supervisor import Limits
from ..duties import Sessions, Shared
from ..prepared import Prepared
from .base import Engine
from .beginning import words_for
from .cluster import Cluster, Orders
from .pool import Beginning, Pool
from .serial import Serial
from .stacked import Stacked

LOGS = "workers"
SPARE_BYTES = 1 << 30
"""Of the host's memory, for samples that stay with their clients between rounds."""


def engine_for(prepared: Prepared, folder: Path, *, partition: str, clients: str, setup: Sequence[str]) -> Engine:
    """The engine that was chosen; names of files and folders are those in the simulation's ``folder``."""
    plan, choice = prepared.plan, prepared.choice
    if choice.engine == "serial":
        return Serial(_shared(prepared, folder / clients))
    if choice.engine == "stacked":
        sessions = Sessions(_spare_bytes(choose_device(plan.device)))
        return Stacked(replace(_shared(prepared, folder / clients), sessions=sessions), always=plan.stacked_always)
    words = words_for(prepared, setup)
    if choice.engine == "ray":
        orders = Orders(words, prepared.pools.content, prepared.division, folder / clients, plan)
        return Cluster(orders, choice.workers)
    words |= {"folder": str(folder.absolute()), "partition": partition, "clients": clients}
    memory = prepared.memory or SharedBuffer.of(*prepared.pools.content())
    return Pool(Beginning(words, memory, folder / LOGS, Limits(threads=plan.threads or None)), choice.workers)


def _shared(prepared: Prepared, clients: Path) -> Shared:
    """What clients that compute in this process have in common."""
    plan = prepared.plan
    return Shared(
        prepared.pools,
        prepared.division,
        prepared.model,
        clients,
        plan.device,
        precision=plan.precision,
        evaluate_after=plan.evaluate_after,
        keep_every=plan.keep_every,
        newcomers=frozenset(prepared.newcomers),
    )


def _spare_bytes(device: torch.device) -> int:
    """A quarter of a GPU, where samples would else be sent again in each round."""
    if device.type != "cuda":
        return SPARE_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory) // 4
