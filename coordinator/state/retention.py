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
from dataclasses import dataclass
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
        """As JSON."""
        return {"run": self.run, "status": self.status, "files": len(self.files), "bytes": self.size_bytes}


def runs_beyond(state: StateFolder, keep: int) -> list[str]:
    """The ended runs with checkpoints but the ``keep`` that ended last; those that ended first come first."""
    journal = state.journal
    ended = [entry.run for entry in journal.entries(kinds=tuple(FINAL)) if entry.run is not None]
    pruned = {entry.run for entry in journal.entries(kinds=("run_pruned",))}
    released = on_offer(state)
    with_states = journal.checkpoints()
    candidates = [run for run in ended if run in with_states and run not in pruned]
    return [run for run in candidates[: max(0, len(candidates) - keep)] if run not in released]


def on_offer(state: StateFolder) -> list[str]:
    """The runs whose releases devices run, may get, or may return to; they stay whatever their age."""
    return sorted({release.run for release in releases_in_use(state.journal) if release.run})


def prunable(state: StateFolder, runs: Sequence[str]) -> list[Prunable]:
    """What can be removed with these runs of `runs_beyond`; a file that several of them have counts for the first."""
    needed = blobs_needed(state, runs)
    result = list[Prunable]()
    for run in runs:
        entries = state.journal.entries(run)
        digests = {entry.digest for entry in entries if entry.digest is not None} - needed
        needed |= digests
        blobs = (state.blobs.path(digest) for digest in sorted(digests))
        sizes = _sizes((*_bundles(state, run), *blobs))
        status = next(FINAL[entry.kind] for entry in entries if entry.kind in FINAL)
        result.append(Prunable(run, status, tuple(sizes), sum(sizes.values())))
    return result


def _bundles(state: StateFolder, run: str) -> list[Path]:
    """The bundles of a run that the coordinator has exported: by name, as somebody may have put others beside them."""
    name_of_export = re.compile(rf"({re.escape(run)}(-round-[0-9]+)?|round)\.hwb")
    return sorted(path for path in state.run(run).folder.glob("*.hwb") if name_of_export.fullmatch(path.name))


def prune_runs(state: StateFolder, runs: Sequence[str]) -> list[Prunable]:
    """Remove the checkpoints and bundles of these runs of `runs_beyond`; returns what was removed.

    Only for the process that holds the folder's lock, between two of its writes.

    Raises:
        StateError: the journal cannot be written.
        OSError: a file cannot be removed.
    """
    removed = prunable(state, runs) if runs else []
    for one in removed:
        bundles = [path for path in one.files if path.suffix == ".hwb"]  # copies: all others are named by the journal
        for path in bundles:
            path.unlink(missing_ok=True)
        state.journal.append(RunPruned(files=len(one.files), bytes=one.size_bytes), run=one.run)
        for path in one.files[len(bundles) :]:
            path.unlink(missing_ok=True)
        log.info("run_pruned run=%s files=%d bytes=%d", one.run, len(one.files), one.size_bytes)
    return removed


def usage(state: StateFolder) -> dict[str, int]:
    """Blobs in the folder, their bytes, the ended runs that have checkpoints, and the bytes that the disk has free."""
    journal = state.journal
    over = {entry.run for entry in journal.entries(kinds=tuple(FINAL))}
    over -= {entry.run for entry in journal.entries(kinds=("run_pruned",))}
    blobs = _sizes(state.blobs.folder.glob("*"))
    return {
        "blobs": len(blobs),
        "blob_bytes": sum(blobs.values()),
        "ended_runs": len(over & journal.checkpoints().keys()),
        "free_bytes": shutil.disk_usage(state.path).free,
    }


def _sizes(paths: Iterable[Path]) -> dict[Path, int]:
    """File -> bytes, of those that are files; a coordinator at work may remove one at any moment."""
    result = dict[Path, int]()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                result[path] = status.st_size
    return result
