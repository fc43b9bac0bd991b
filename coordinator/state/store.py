"""The coordinator's state folder: journal, blobs named by their SHA-256, and one folder for each run.

Layout of a state folder::

    lock            held by the one coordinator that uses the folder
    journal.db      see `coordinator.journal`; everything else can be checked against it
    journal.json    in its place, where the journal is in a database (`coordinator.state.journal_location`)
    blobs/<sha256>  checkpoints, downlinks, updates, bundles
    aggregators/    what coordinator and aggregators exchange in files; not needed to resume
    backup/         what 'headwater backup' holds while it copies
    compute.log     output of the process that builds models and exports
    runs/<run>/     metrics.jsonl, summary.json, report.html: for people and plots, not needed to resume
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_agent.core.errors import StateError, UsageError, cause
from edge_agent.core.storage import read_json, read_regular, sha256_file, sha256_of, sync, write_atomic, write_json

from ..journal.entries import RunRequested, StateKept
from ..journal.kinds import CHECKPOINTS
from ..journal.store import Hold, Journal
from ..views.releases import release_blobs
from ..views.runs import RunRecord, replay
from .journal_location import journal_of
from .run_lines import ReleaseLine, RoundLine

log = logging.getLogger(__name__)

_BEGAN_S = time.time()
"""Start of this process, in seconds since 1970: temporary files from before it are abandoned."""

AGGREGATORS = "aggregators"
"""The folder by which coordinator and aggregators exchange what is too large for a message."""

SITES = "sites"
"""The folder of sums of relays that are on their way."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
"""Names of temporary files of `edge_agent.core.storage.write_atomic`."""


class BlobStore:
    """Files named by the SHA-256 of their content; a file under its final name is complete and on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, *data: bytes | memoryview) -> str:
        """Return the SHA-256 (hex) of the pieces of ``data``, on disk when this returns. A damaged copy is replaced."""
        sha = sha256_of(*data)
        path = self.path(sha)
        if not path.is_file() or sha256_file(path) != sha:
            write_atomic(path, *data)
        return sha

    def path(self, sha: str) -> Path:
        """Return the path of the blob with that hash, which may not exist.

        Raises:
            StateError: ``sha`` is not 64 hexadecimal digits.
        """
        if not _SHA256.fullmatch(sha):
            raise StateError(f"'{sha[:80]}' is not a SHA-256 in lower-case hexadecimal; no blob can have this name")
        return self.folder / sha

    def __contains__(self, sha: str) -> bool:
        return self.path(sha).is_file()

    def read(self, sha: str) -> bytes:
        """Return a blob's content, checked against its name.

        Raises:
            StateError: it is missing or damaged.
        """
        return read_regular(self.check(sha))

    def check(self, sha: str) -> Path:
        """Return the path of a blob that is complete and undamaged; its content is not held in memory.

        Raises:
            StateError: it is missing or damaged.
        """
        path = self.path(sha)
        try:
            result = sha256_file(path)
        except OSError as error:
            raise StateError(f"{path}: cannot be read ({cause(error)}); put it back from a backup") from error
        if result != sha:
            raise StateError(f"{path}: damaged, its SHA-256 is {result}; put it back from a backup")
        return path

    def names(self) -> set[str]:
        """Return the hashes of all blobs."""
        return {path.name for path in self.folder.glob("*") if _SHA256.fullmatch(path.name)}

    def remove(self, names: Iterable[str]) -> None:
        """Remove the blobs with these hashes."""
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove temporary files of interrupted writes, and empty folders of uploads.

        Only for the process that holds the folder's lock.
        """
        sweep(self.folder)
        for folder in (self.folder / "partial").glob("*"):
            sweep(folder)
            with contextlib.suppress(OSError):  # chunks are there: the upload is resumed
                folder.rmdir()


class RunFolder:
    """Results of one run, for reports: they are derived from the journal and may be written twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder.name
        self.metrics_path = folder / "metrics.jsonl"
        """One JSON object in each line."""

        self.summary_path = folder / "summary.json"
        """One JSON object: the request and the result."""

        self.report_path = folder / "report.html"
        """The page that `coordinator.report` writes."""

    def append_metrics(self, *records: Mapping[str, Any]) -> None:
        """Add a line for each record, on disk when this returns.

        An incomplete line of an earlier crash is removed first.

        Raises:
            StateError: a record is not JSON (NaN and infinity are not).
        """
        try:
            texts = [json.dumps(dict(record), separators=(",", ":"), allow_nan=False) for record in records]
        except (TypeError, ValueError) as error:
            raise StateError(f"{self.metrics_path}: a record is not JSON ({error}); nothing was written") from error
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.metrics_path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read() not in {b"", b"\n"}:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.writelines(text.encode() + b"\n" for text in texts)
            file.flush()
            sync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """Return all records in order as JSON, without an incomplete last line of a crash; empty before the first.

        `round_lines` and `release_lines` are for those who want to know a field; this is for readers of the file that
        take nothing in it for granted.

        Raises:
            StateError: a line is not a JSON object.
        """
        try:
            lines = read_regular(self.metrics_path).split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        records = []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise StateError(
                    f"{self.metrics_path}: line {number} is not JSON ({error}); remove the line"
                ) from error
            if not isinstance(record, dict):
                raise StateError(f"{self.metrics_path}: line {number} is not a JSON object; remove the line")
            records.append(record)
        return records

    def round_lines(self) -> list[RoundLine]:
        """Return the closed rounds among `metrics`, in the order in which they were written.

        Raises:
            StateError: a line is not a JSON object.
        """
        return [RoundLine.from_json(record) for record in self.metrics() if record.get("kind") == "round"]

    def release_lines(self) -> list[ReleaseLine]:
        """Return the releases among `metrics`, in the order in which they were written.

        Raises:
            StateError: a line is not a JSON object.
        """
        return [ReleaseLine.from_json(record) for record in self.metrics() if record.get("kind") == "release"]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace the run's ``summary.json``."""
        write_json(self.summary_path, summary)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary; None before there is one.

        Raises:
            StateError: the file is damaged.
        """
        return read_json(self.summary_path)

    def touched_ns(self) -> int:
        """Return when anything in the folder was last written, in nanoseconds since 1970."""
        return max((path.stat().st_mtime_ns for path in (self.folder, *self.folder.iterdir())), default=0)


class StateFolder:
    """The files of one coordinator. `open` is for the coordinator, `look` for commands beside it.

    Args:
        path: The folder.
        journal: Its journal, not opened; None: the one that the folder names.

    Raises:
        StateError: The file that names the database is damaged.
    """

    def __init__(self, path: Path, journal: Journal | None = None) -> None:
        self.path = path
        self.journal = journal or journal_of(path)
        self.blobs = BlobStore(path / "blobs")
        self._lock: Hold | None = None

    @contextlib.contextmanager
    def open(self, owner: str) -> Iterator[StateFolder]:
        """Yield this folder, locked for this process, with all entries of the journal verified.

        Raises:
            DuplicateCoordinator: another coordinator has the lease of a journal that several reach.
            StateError: another process works here, or the journal is damaged, truncated or missing.
        """
        with self.journal.hold(self.path, owner, self._has_content) as self._lock:
            self.journal.verify_new()
            if self.journal.repair_indexes():
                log.warning("journal_repaired path=%s: an index was damaged, and made again", self.journal.location)
            self.blobs.sweep()
            for folder in (self.path, self.path / "runs", *(self.path / "runs").glob("*")):
                sweep(folder, older_than_s=_BEGAN_S)
            yield self

    def is_held(self) -> bool:
        """Return whether the lock of `open` is still this process's; a standby removes that of a silent process."""
        return self._lock is None or self._lock.is_held()

    @contextlib.contextmanager
    def look(self, *, create: bool = False) -> Iterator[StateFolder]:
        """Yield this folder without the lock: to read, and to request runs while a coordinator works here.

        Raises:
            StateError: there is no journal (and ``create`` does not allow to make one), or it is damaged.
        """
        with contextlib.closing(self.journal.open(create=create, is_begun=self._has_content())):
            yield self

    def run(self, run: str) -> RunFolder:
        """Return the folder of one run, which may not exist yet.

        Raises:
            UsageError: ``run`` cannot be the name of a run.
        """
        from edge_agent.core.config import NAME_PATTERN  # brings more than 'headwater status' needs

        if not re.fullmatch(NAME_PATTERN, run):
            raise UsageError(f"'{run[:80]}' cannot be a run; runs are named like 'run-0001', see 'headwater status'")
        return RunFolder(self.path / "runs" / run)

    def runs(self) -> list[RunFolder]:
        """Return the folders of all runs that have results, the latest written one last."""
        folders = [RunFolder(path) for path in (self.path / "runs").glob("*") if path.is_dir()]
        return sorted(folders, key=lambda folder: (folder.touched_ns(), folder.run))

    def _has_content(self) -> bool:
        """Return whether there are blobs or runs: then an empty journal is a damaged one, not that of a new folder.

        Raises:
            StateError: There are blobs or runs, and no journal.
        """
        has_blobs = any(self.blobs.folder.glob("*"))
        has_runs = any((self.path / "runs").glob("*"))
        if not has_blobs and not has_runs:
            return False
        if not self.journal.exists:
            raise StateError(
                f"{self.path}: there are blobs or runs but no journal.db; put it back from a backup, "
                "or choose a new state folder (a fresh start is never made silently)"
            )
        return True


def sweep(folder: Path, older_than_s: float | None = None) -> None:
    """Remove temporary files of interrupted writes in ``folder``; only those last written before that moment.

    Newer ones may belong to other processes, which write a report or a status.
    """
    for path in folder.glob(".*.tmp"):
        if not TEMPORARY.fullmatch(path.name):
            continue
        with contextlib.suppress(FileNotFoundError):  # it was renamed, or removed by another process
            if older_than_s is None or path.stat().st_mtime < older_than_s:
                path.unlink()


def retain_checkpoint(journal: Journal, run: str, keep_every: int, number: int, digest: str) -> None:
    """Record that the state after round ``number`` (0: the initial one) stays on disk, by ``keep_every``.

    Call it before the round's end is written, so that a kill between the two loses nothing.
    """
    if keep_every and number % keep_every == 0:
        journal.append(StateKept(), run=run, round=number, digest=digest)


def prune_blobs(state: StateFolder) -> None:
    """Remove blobs that are no longer needed: updates of closed rounds, older checkpoints."""
    # The blobs are listed before the journal is read, and the journal is looked at again before anything goes: if this
    # process was suspended meanwhile, what its successor has written is not in the list.
    present = state.blobs.names()
    unneeded = present - blobs_needed(state)
    state.journal.check_newest()
    state.blobs.remove(unneeded)


def blobs_needed(state: StateFolder, pruned: Sequence[str] = (), blobs: BlobStore | None = None) -> set[str]:
    """Return the digests of the blobs that runs other than ``pruned`` need, in the past or to be resumed.

    Runs that were pruned before need none; releases in use stay whichever run they are of.

    Args:
        state: The folder whose journal names the blobs.
        pruned: Runs that do not count.
        blobs: The place where the blobs are; None: the same folder.
    """
    journal = state.journal
    present = state.blobs if blobs is None else blobs
    pruned_runs = {*pruned, *(entry.run for entry in journal.entries(kinds=("run_pruned",)))}
    # 1. Releases in use, and the newest checkpoint of each run.
    checkpoints = {run: digest for run, digest in journal.checkpoints().items() if run not in pruned_runs}
    needed = {*checkpoints.values()} | release_blobs(journal, pruned_runs)
    # 2. What a run has made beside its checkpoints: bundles, pooled statistics, states that are retained. A run whose
    # request says so keeps every checkpoint and every update.
    retained = journal.digests(("bundle_exported", "norm_pooled", "ranges_collected", "state_kept"))
    for request in journal.entries(kinds=("run_requested",)):
        keeps_updates = isinstance(request.fact, RunRequested) and request.fact.keep_updates
        if keeps_updates and request.run in checkpoints:
            retained |= journal.digests((*CHECKPOINTS, "update_accepted"), request.run)
    needed |= {digest for run, digest in retained if run not in pruned_runs}
    # 3. What a run that has not ended needs to be resumed.
    for run in journal.unfinished():
        needed |= _blobs_to_resume(replay(journal, run), present)
    return needed


def _blobs_to_resume(record: RunRecord, present: BlobStore) -> set[str]:
    """Return the digests of the blobs that a run needs to be resumed, beside its newest checkpoint."""
    # The states that agents of buffered rounds started from.
    needed = set(record.bases)
    # The last good state, to which a run returns after its loss has exploded.
    if record.good is not None:
        needed.add(record.good)
    # The state that the run began with, where it is there: earlier versions did not keep it, and updates are combined
    # without it.
    if record.needed_start is not None and record.needed_start in present:
        needed.add(record.needed_start)
    # The accepted updates of the open round.
    if record.open_round is not None:
        needed |= {update.blob for update in record.open_round.updates.values()}
    return needed


def states_of(state: StateFolder, run: str) -> dict[int, str]:
    """Return the digests of a run's states that are still on disk, by the round after which they were, in order.

    Round 0 stands for the initial state.
    """
    record = replay(state.journal, run)
    digests = {entry.round or 0: entry.digest for entry in state.journal.entries(run, ("state_kept",))}
    if record.checkpoint is not None:
        digests[record.round] = record.checkpoint
    on_disk = {}
    for number, digest in sorted(digests.items()):
        # A state may have been retained just before a kill, without the end of its round: it counts once that is there.
        is_closed = number <= record.round
        if digest is not None and is_closed and digest in state.blobs:
            on_disk[number] = digest
    return on_disk
