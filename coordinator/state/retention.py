"""Retention: the newest ended runs keep their checkpoints and bundles, those of older ones are removed.

Never of a run that has not ended, nor of those whose releases are in use. Figures, summary and journal of every run
stay. The removal is journaled before the first file goes, so that a missing checkpoint is known to be no damage.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..journal.entries import RunPruned
from ..journal.kinds import FINAL
from ..views.releases import releases_in_use
from .store import StateFolder, blobs_needed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prunable:
    """An ended run beyond retention, and its files that no other run needs."""

    run: str
    status: str
    files: tuple[Path, ...]
    size_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON."""
        return {"run": self.run, "status": self.status, "files": len(self.files), "bytes": self.size_bytes}


def runs_beyond(state: StateFolder, keep: int) -> list[str]:
    """Return the ended runs that retention does not keep; those that ended first come first.

    Args:
        state: The state folder.
        keep: The number of runs that ended last, of those with checkpoints, which are kept.
    """
    journal = state.journal
    ends = [entry.run for entry in journal.entries(kinds=tuple(FINAL)) if entry.run is not None]
    # A run that had more rounds since has ended again, or not yet: its last end counts.
    goes_on = journal.unfinished()
    last_ends = reversed(dict.fromkeys(reversed(ends)))
    ended = [run for run in last_ends if run not in goes_on]
    pruned = {entry.run for entry in journal.entries(kinds=("run_pruned",))}
    released = on_offer(state)
    with_states = journal.checkpoints()
    candidates = [run for run in ended if run in with_states and run not in pruned]
    older = candidates[: max(0, len(candidates) - keep)]
    return [run for run in older if run not in released]


def on_offer(state: StateFolder) -> list[str]:
    """Return the runs whose releases devices run, may get, or may return to; they stay whatever their age."""
    return sorted({release.run for release in releases_in_use(state.journal) if release.run})


def prunable(state: StateFolder, runs: Sequence[str]) -> list[Prunable]:
    """Return what can be removed with these runs of `runs_beyond`, for each run."""
    needed = blobs_needed(state, runs)
    result = list[Prunable]()
    for run in runs:
        entries = state.journal.entries(run)
        digests = {entry.digest for entry in entries if entry.digest is not None} - needed
        needed |= digests  # a file that several of these runs have counts for the first
        blobs = (state.blobs.path(digest) for digest in sorted(digests))
        sizes = _sizes((*_bundles(state, run), *blobs))
        status = next(FINAL[entry.kind] for entry in entries if entry.kind in FINAL)
        result.append(Prunable(run, status, tuple(sizes), sum(sizes.values())))
    return result


def _bundles(state: StateFolder, run: str) -> list[Path]:
    """Return the bundles of a run that the coordinator has exported, by name: somebody may have put others there."""
    name_of_export = re.compile(rf"({re.escape(run)}(-round-[0-9]+)?|round)\.hwb")
    return sorted(path for path in state.run(run).folder.glob("*.hwb") if name_of_export.fullmatch(path.name))


def prune_runs(state: StateFolder, runs: Sequence[str]) -> list[Prunable]:
    """Remove the checkpoints and bundles of these runs of `runs_beyond`; return what was removed.

    Only the process that holds the folder's lock may call it, between two of its writes.

    Raises:
        StateError: The journal cannot be written.
        OSError: A file cannot be removed.
    """
    if not runs:
        return []
    removed = prunable(state, runs)
    for run in removed:
        # Bundles are copies that no entry names, so they may go before the removal is in the journal; after a kill in
        # between, the blobs are still there and named.
        bundles = [path for path in run.files if path.suffix == ".hwb"]
        for path in bundles:
            path.unlink(missing_ok=True)
        state.journal.append(RunPruned(files=len(run.files), bytes=run.size_bytes), run=run.run)
        for path in run.files[len(bundles) :]:
            path.unlink(missing_ok=True)
        log.info("run_pruned run=%s files=%d bytes=%d", run.run, len(run.files), run.size_bytes)
    return removed


@dataclass(frozen=True)
class DiskUsage:
    """What a state folder takes of its disk."""

    blobs: int
    blob_bytes: int
    ended_runs: int
    """Runs that are over and have checkpoints, which could be removed."""

    free_bytes: int
    """Of the disk."""

    def to_json(self) -> dict[str, int]:
        """Return it as ``--json`` prints it."""
        return asdict(self)


def usage(state: StateFolder) -> DiskUsage:
    """Return what a state folder takes of its disk now."""
    journal = state.journal
    ended = {entry.run for entry in journal.entries(kinds=tuple(FINAL))}
    ended -= {entry.run for entry in journal.entries(kinds=("run_pruned",))}
    blobs = _sizes(state.blobs.folder.glob("*"))
    return DiskUsage(
        blobs=len(blobs),
        blob_bytes=sum(blobs.values()),
        ended_runs=len(ended & journal.checkpoints().keys()),
        free_bytes=shutil.disk_usage(state.path).free,
    )


def _sizes(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the bytes of each path that is a file; a coordinator at work may remove one at any moment."""
    result = dict[Path, int]()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                result[path] = status.st_size
    return result
