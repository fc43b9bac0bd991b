"""Batch norm that stays on devices, collected outside the rounds so that other devices can use one common encoder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace

from edge_agent.task import Tensors
from edge_agent.wire.tensors import Spec, decode, pieces

from ..fleet.transfers import Collection, updates_of
from ..state.store import StateFolder, prune_blobs
from .context import Run, Steps, Waiting

log = logging.getLogger(__name__)


def with_pooled_norm(
    run: Run, number: int, norm: Mapping[str, Spec], agents: tuple[str, ...], collect: Callable[[Collection], Steps]
) -> Generator[Waiting, None, Run]:
    """The run with batch norm of one common encoder after round ``number`` in ``pooled`` (the generator's value).

    ``norm``: the encoder's batch norm tensors that stay on devices. ``pooled`` is empty where there are none, no agent
    sends any, or the configuration turns this off. It changes neither the run's state nor the devices' own models.
    """
    state = run.context.state
    if not norm or not run.context.config.export.pool_norm:
        return replace(run, pooled={})
    if known := pooled_before(state, run.id, number):
        return replace(run, pooled=known)
    collection = Collection(run.id, number, agents, norm, purpose="batch_norm_stats")
    yield from collect(collection)
    log.info("norm_pooled run=%s agents=%d of=%d", run.id, len(collection.accepted), len(agents))
    if not collection.accepted:
        return replace(run, pooled={})
    from edge_agent.training.parts import pooled_norm

    pooled = pooled_norm((update.weight, update.tensors) for update in updates_of(state.blobs, collection))
    digest, clients = state.blobs.put(*pieces(pooled)), sorted(collection.accepted)
    state.journal.append("norm_pooled", run=run.id, round=number, digest=digest, body={"clients": clients})
    prune_blobs(state, run.checkpoint)
    return replace(run, pooled=pooled)


def pooled_before(state: StateFolder, run: str, number: int) -> Tensors:
    """What was pooled after a round of a run; empty when nothing was."""
    for entry in state.journal.entries(run, ("norm_pooled",), round=number):
        if entry.digest is not None and entry.digest in state.blobs:
            return decode(state.blobs.read(entry.digest))
    return {}
