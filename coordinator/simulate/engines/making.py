"""An engine made ready for a prepared simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..duties import Shared
from ..prepared import Prepared
from .areas import Area
from .base import Engine
from .pool import Beginning, Pool
from .serial import Serial

LOGS = "workers"


def engine_for(prepared: Prepared, folder: Path, *, partition: str, clients: str, setup: Sequence[str]) -> Engine:
    """The engine that was chosen; names of files and folders are those in the simulation's ``folder``."""
    plan = prepared.plan
    if prepared.choice.engine == "serial":
        shared = Shared(
            prepared.pools,
            prepared.division,
            prepared.model,
            folder / clients,
            plan.device,
            evaluate_after=plan.evaluate_after,
            keep_every=plan.keep_every,
            newcomers=frozenset(prepared.newcomers),
        )
        return Serial(shared)
    words = {
        "plan": plan.model_dump(mode="json"),
        "task": prepared.task.model_dump(mode="json"),
        "folder": str(folder.absolute()),
        "partition": partition,
        "clients": clients,
        "newcomers": list(prepared.newcomers),
        "setup": list(setup),
    }
    memory = prepared.memory or Area.of(*prepared.pools.content())
    threads = {"OMP_NUM_THREADS": str(plan.threads), "MKL_NUM_THREADS": str(plan.threads)} if plan.threads else {}
    return Pool(Beginning(words, memory, folder / LOGS, threads), prepared.choice.workers)
