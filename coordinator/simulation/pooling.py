"""Batch norm of one common encoder from what the clients of a simulation have kept, so that it can be exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edge_agent.data.partition import Division
from edge_agent.methods import Method
from edge_agent.task import Task, Tensors
from edge_agent.training.parts import norm_names, pooled_norm

from .duties import kept_in
from .folder import CLIENTS, PARTITION, planned


def pooled_of(folder: Path, run: str, number: int, method: Method, task: Task) -> Tensors:
    """Batch norm that stays with clients, pooled over those who have trained until round ``number``.

    Empty where ``folder`` holds no simulation, or none of it stays with them.

    Raises:
        StateError: what a client has kept is damaged.
    """
    if planned(folder) is None or "encoder" not in method.shared:
        return {}
    model = method.build(task)
    names = norm_names(model, method.shared_names(model))
    kept = list(_kept(folder, run, number, names)) if names else []
    return pooled_norm(kept) if kept else {}


def _kept(folder: Path, run: str, number: int, names: tuple[str, ...]) -> Iterator[tuple[float, Tensors]]:
    for client, share in Division.read(folder / PARTITION).clients.items():
        personal, _ = kept_in(folder / CLIENTS, client, run).before(number + 1)
        if all(name in personal for name in names):
            yield float(len(share.train)), {name: personal[name] for name in names}
