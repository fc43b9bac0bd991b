"""Batch norm that stays on devices, asked for once outside the rounds, so that others can be given one encoder."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import TYPE_CHECKING

from edge_agent.task import Tensors
from edge_agent.wire.tensors import decode, pieces

from ..fleet.exclusion import without
from ..fleet.uploads import Collection, updates_of
from ..state.store import StateFolder
from .context import Waiting

if TYPE_CHECKING:
    from .round_loop import RunLoop

log = logging.getLogger(__name__)


def pool(loop: RunLoop, number: int) -> Generator[Waiting, None, Tensors]:
    """Batch norm of one common encoder after round ``number`` (as the generator's value).

    Empty where none stays on devices, none is given, or the configuration does not want it. What is pooled reaches
    neither the run's state nor the devices' own models.
    """
    if not loop.norm or not loop.fleet.config.export.pool_norm:
        return {}
    if known := pooled_before(loop.fleet.state, loop.run, number):
        return known
    agents = tuple(without(loop.fleet.roster.present("train"), loop.selection.left_out(number + 1)))
    collection = Collection(loop.run, loop.request.rounds + number, agents, loop.norm)
    yield from loop.collect_aside(collection, "pool")
    log.info("norm_pooled run=%s agents=%d of=%d", loop.run, len(collection.accepted), len(agents))
    return _keep(loop, number, collection) if collection.accepted else {}


def pooled_before(state: StateFolder, run: str, number: int) -> Tensors:
    """What was pooled after a round of a run; empty when nothing was."""
    for entry in state.journal.entries(run, ("norm_pooled",), round=number):
        if entry.digest is not None and entry.digest in state.blobs:
            return decode(state.blobs.read(entry.digest))
    return {}


def _keep(loop: RunLoop, number: int, collection: Collection) -> Tensors:
    from edge_agent.training.parts import pooled_norm

    state = loop.fleet.state
    pooled = pooled_norm((update.weight, update.tensors) for update in updates_of(state.blobs, collection))
    digest, clients = state.blobs.put(*pieces(pooled)), sorted(collection.accepted)
    state.journal.append("norm_pooled", run=loop.run, round=number, digest=digest, body={"clients": clients})
    loop.forget_blobs()
    return pooled
