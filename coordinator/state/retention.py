"""Which states of runs stay on disk while runs go on: the newest of each, and those that a run was asked to keep."""

from __future__ import annotations

from .journal import Journal
from .run_request import Request
from .store import StateFolder


def keep(journal: Journal, run: str, request: Request, number: int, digest: str) -> None:
    """Note that the state after round ``number`` (0: the fresh one) is to stay, where that was asked for.

    Called before the round's end is written, so that no kill can come between the end and this.
    """
    if request.keep_every and number % request.keep_every == 0:
        journal.append("state_kept", run=run, round=number, digest=digest)


def blobs_in_use(journal: Journal) -> set[str]:
    """Digests of what entries of the journal still need: releases, newest checkpoints of all runs, kept states."""
    kept = {e.digest for e in journal.entries(kinds=("release_made", "norm_pooled", "state_kept")) if e.digest}
    return kept | set(journal.checkpoints().values())


def states_of(state: StateFolder, run: str) -> dict[int, str]:
    """Round -> digest of the state after it, for those that are still there, in order; 0 is the fresh state."""
    record = state.journal.replay(run)
    known = {entry.round or 0: entry.digest for entry in state.journal.entries(run, ("state_kept",))}
    if record.checkpoint is not None:
        known[record.round] = record.checkpoint
    # A round that a kill left without its end was kept all the same: it does not count before it is closed.
    there = {n: sha for n, sha in known.items() if sha is not None and n <= record.round and sha in state.blobs}
    return dict(sorted(there.items()))
