"""State of an agent on its disk: client state of runs, the federation that it follows, and the releases it installed.

Client state is what a client keeps of a run between rounds, restarts and missed rounds: personal tensors and named
memory. There is one file for each of the last two rounds, and for those rounds that are to be kept. A round starts from
the newest file of an earlier round, so doing a round again after a crash starts from the same state and ends in the
same bits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ..config import AgentConfig
from ..errors import CodecError, HeadwaterError, StateError, UsageError, cause
from ..moments import moment_of
from ..storage import oldest_first, read_json, read_tensors, size_of, waited_lock, write_json, write_tensors
from ..task import Frozen, Tensors
from ..wire.chunks import BlobCache
from ..wire.messages import Command, Epoch, FederationId, Install, UpdateManifest

log = logging.getLogger(__name__)

_PERSONAL, _MEMORY = "personal.", "memory."
GENERATIONS = 2


def remove_ended_runs(folder: Path, current: str, keep: int) -> list[str]:
    """Remove the oldest runs' folders below ``folder``, so that ``keep`` are left, ``current`` among them.

    Returns the names of those removed. A device that takes part in run after run would fill its disk otherwise; a run
    that is resumed after so many others begins afresh here, as on a device that is new to it.
    """
    others = [path for path in folder.glob("*") if path.is_dir() and path.name != current]
    removed = oldest_first(others)[: max(0, len(others) - max(keep - 1, 0))]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in removed)


def make_room(config: AgentConfig, cache: BlobCache, needed_bytes: int, wanted: Collection[str]) -> int:
    """Remove caches until ``needed_bytes`` more leave ``min_free_bytes`` of the disk; returns the bytes freed.

    Old downloads go first, out of ``cache``, then cached features, each the oldest first. Blobs in ``wanted``, by their
    digests, stay; so does client state, which cannot be had again and whose run may be paused.
    """
    state = config.state
    short = needed_bytes + config.min_free_bytes - shutil.disk_usage(state).free
    if short <= 0:
        return 0
    downloads = cache.free(short, wanted)
    features = 0
    # No hidden files: those are being written, by the worker or another process (`storage.write_atomic`).
    for path in oldest_first((state / "features").glob("[!.]*")):
        if downloads + features >= short:
            break
        features += size_of(path)
        path.unlink(missing_ok=True)
    log.info("room_made of=%d downloads_bytes=%d features_bytes=%d", short, downloads, features)
    return downloads + features


def disk_usage(config: AgentConfig) -> dict[str, int]:
    """What the agent has on its disk, and its bounds, in bytes."""
    state = config.state
    return {
        "runs": sum(path.is_dir() for path in (state / "runs").glob("*")),
        "keep_runs": config.keep_runs,
        "runs_bytes": size_of(state / "runs"),
        "downloads_bytes": size_of(state / "cache"),
        "cache_bytes": config.cache_bytes,
        "features": size_of(state / "features"),
        "features_bytes": config.features_bytes,
        "free_bytes": shutil.disk_usage(state).free,
        "min_free_bytes": config.min_free_bytes,
    }


RECEIPTS = "receipts.jsonl"


def note_receipt(folder: Path, agent: str, update: UpdateManifest, *, accepted: bool) -> None:
    """Add a line to the receipts of a run, in its ``folder``: what became of an update of this agent.

    'headwater audit' compares them with the coordinator's journal. Nothing waits for the disk; a full one, or a power
    cut, costs the line alone.
    """
    about = {"agent": agent, "round": update.round, "purpose": update.purpose, "digest": update.blob.digest}
    line = json.dumps({**about, "accepted": accepted}).encode() + b"\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / RECEIPTS).open("ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if end and file.read(1) != b"\n":  # a line that a power cut tore
                line = b"\n" + line
            if file.write(line) != len(line):
                file.truncate(end)
                raise OSError(errno.ENOSPC, "no space left for all of it")
    except OSError as error:
        log.debug("receipt_not_noted folder=%s reason=%s", folder, cause(error))


class ClientStateFiles:
    """The files of one run. With ``keep_every`` k, the state after rounds k, 2 k, … stays as well."""

    def __init__(self, folder: Path, keep_every: int = 0) -> None:
        self.folder, self._keep_every = folder, keep_every

    def write(self, round_number: int, personal: Tensors, memory: Tensors) -> None:
        """Save the state after a round; on disk when this returns. A client that never keeps anything has no file.

        The state of later rounds is removed: a client that does an earlier one now was set back to it.
        """
        both, before = merge(personal, memory), self.rounds()
        if not both and not before:
            return
        write_tensors(self._path(round_number), both)
        for later in (number for number in before if number > round_number):
            self._path(later).unlink(missing_ok=True)
        for old, following in list(pairwise(self.rounds()))[: 1 - GENERATIONS or None]:
            every = self._keep_every
            if not every or (following - 1) // every * every < old:  # it was not current after a round that is kept
                self._path(old).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """The rounds that have a file, in order."""
        return sorted(int(path.stem.removeprefix("kept-")) for path in self.folder.glob("kept-*.safetensors"))

    def before(self, round_number: int) -> tuple[Tensors, Tensors]:
        """(personal tensors, memory) of the newest round before this one; empty when there is none.

        Raises:
            StateError: the newest file is damaged; it says how to start afresh.
        """
        earlier = [number for number in self.rounds() if number < round_number]
        if not earlier:
            return {}, {}
        path = self._path(earlier[-1])
        try:
            return split(read_tensors(path))
        except CodecError as error:
            raise StateError(
                f"{path}: damaged ({error}); put it back from a backup, or remove it to go on from an earlier round, "
                "or from the beginning, with other results than without the damage"
            ) from error

    def _path(self, round_number: int) -> Path:
        return self.folder / f"kept-{round_number:07d}.safetensors"


CHECKPOINT_BYTES_PER_S = 200_000
"""What checkpoints inside trainings may write on average, 17 GB in a whole day of training: SD cards wear out."""

TRAINING_FILE = "training.safetensors"
"""In the folder of a run: the checkpoint inside the training under way."""


class TrainingCheckpointFile:
    """The checkpoint inside one training (`methods.values.TrainingCheckpoint`), of which the last one stays.

    ``training`` says which training it is, with everything that its result depends on; a checkpoint of another one is
    ignored. It is due ``every_s`` seconds of ``clock`` after the last one, later where writing would take more than a
    twentieth of the time, or more than `CHECKPOINT_BYTES_PER_S`; 0: never.
    """

    def __init__(self, folder: Path, training: str, every_s: float, clock: Callable[[], float]) -> None:
        self._path, self._training, self._every_s, self._clock = folder / TRAINING_FILE, training, every_s, clock
        self._due_at = clock() + every_s

    def is_due(self) -> bool:
        """Whether the state should be saved now."""
        return self._every_s > 0 and self._clock() >= self._due_at

    def save(self, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Save a state; on disk when this returns. Where it cannot be written, training continues without."""
        begin = self._clock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(self._path, tensors, {"training": self._training, "notes": json.dumps(notes)})
        except OSError as error:
            log.warning("checkpoint_not_written path=%s reason=%s", self._path, cause(error))
        now, size = self._clock(), sum(array.nbytes for array in tensors.values())
        self._due_at = now + max(self._every_s, 20 * (now - begin), size / CHECKPOINT_BYTES_PER_S)

    def load(self) -> tuple[Tensors, dict[str, Any]] | None:
        """The state that was saved last; None where there is none of this training, or it is damaged."""
        from ..wire.tensors import decode, inspect  # brings numpy, which an idle agent does without

        try:
            data = self._path.read_bytes()
            _, metadata = inspect(data)
            if metadata.get("training") != self._training:
                return None
            tensors, notes = decode(data), json.loads(metadata["notes"])
        except FileNotFoundError:
            return None
        except (CodecError, OSError, ValueError, KeyError) as error:
            log.warning("checkpoint_unreadable path=%s reason=%s: training restarts", self._path, cause(error))
            return None
        log.info("training_resumed epoch=%s batch=%s", notes.get("epoch"), notes.get("batch"))
        return tensors, notes

    def end(self, state: Callable[[], tuple[Tensors, dict[str, Any]]]) -> None:
        """Nothing is kept: the training is over with its one call of `train`."""

    def remove(self) -> None:
        """The training is over."""
        if self._every_s > 0:  # simulated clients have no folder
            self._path.unlink(missing_ok=True)


def merge(personal: Tensors, memory: Tensors) -> Tensors:
    """Personal tensors and memory under names that `split` recognises."""
    both = {_PERSONAL + name: array for name, array in personal.items()}
    return {**both, **{_MEMORY + name: array for name, array in memory.items()}}


def split(both: Tensors) -> tuple[Tensors, Tensors]:
    """(personal tensors, memory) of the result of `merge`."""
    return _under(_PERSONAL, both), _under(_MEMORY, both)


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


FOLLOW_S = 10.0
"""How long the agent's own coordinator may not answer hello before the agent follows another that answers."""

SAID_AGAIN_S, NOTED_S = 60.0, 60.0
"""How often the log repeats that commands are ignored, and how long after the last one the status shows it."""


class _Followed(Frozen):
    federation: FederationId
    epoch: Epoch


@dataclass
class _Other:
    """A coordinator of another federation than the agent's own. Times are monotonic seconds."""

    federation: str
    epoch: int
    since: float
    heard_at: float


class Membership:
    """The federation that an agent follows, saved at ``path``; empty before its first welcome."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self.federation, self.epoch = "", 0
        try:
            if (raw := read_json(path)) is not None:
                followed = _Followed.model_validate(raw)
                self.federation, self.epoch = followed.federation, followed.epoch
        except (StateError, ValidationError) as error:  # the next welcome writes it again
            log.warning("federation_unreadable path=%s reason=%s", path, cause(error))
        self._other: _Other | None = None
        self._ignored = ""
        self._ignored_at = self._said_at = float("-inf")

    def allows(self, message: Command) -> bool:
        """Whether the message is of the federation that is followed, and not of a coordinator before the last known."""
        return not self.federation or (message.federation == self.federation and message.epoch >= self.epoch)

    def is_current(self, message: Command) -> bool:
        """Whether the message is of the coordinator that has welcomed this agent last: its commands are obeyed."""
        return (message.federation, message.epoch) == (self.federation, self.epoch)

    def ignored(self, message: Command) -> None:
        """Note a message that is not allowed: a line in the log from time to time, and who may have to be followed."""
        now = self._clock()
        if message.federation == self.federation:
            why = f"of epoch {message.epoch}, epoch {self.epoch} has been heard"
        else:
            why = f"of federation {message.federation[:12]}, this agent follows {self.federation[:12]}"
            if self._other is None or self._other.federation != message.federation:
                self._other = _Other(message.federation, message.epoch, now, now)
            else:
                self._other.epoch, self._other.heard_at = max(self._other.epoch, message.epoch), now
        self._ignored, self._ignored_at = f"{why}: two coordinators, or a state folder that was replaced", now
        if now - self._said_at >= SAID_AGAIN_S:
            self._said_at = now
            log.warning("order_ignored type=%s %s", message.type, self._ignored)

    def answered(self) -> None:
        """The agent's own coordinator is online, or the broker is not: no other is to be followed now."""
        self._other = None

    def to_follow(self) -> tuple[str, int] | None:
        """Federation and epoch to follow from now on; None almost always.

        Those of another coordinator that was online for all the time that the own one had for an answer.
        """
        other, now = self._other, self._clock()
        if other is None:
            return None
        if now - other.since >= FOLLOW_S and other.heard_at - other.since >= FOLLOW_S / 2:
            self._other = None
            return other.federation, other.epoch
        if now - other.heard_at >= FOLLOW_S:
            self._other = None
        return None

    def note(self) -> str | None:
        """That commands were ignored in the last `NOTED_S` seconds, for the status; None where there were none."""
        return f"ignores orders {self._ignored}" if self._clock() - self._ignored_at < NOTED_S else None

    def accept(self, federation: str, epoch: int) -> None:
        """Follow that federation and epoch from now on. A disk that cannot be written is logged, not raised."""
        if (federation, epoch) == (self.federation, self.epoch):
            return
        self.federation, self.epoch = federation, epoch
        self._ignored_at = float("-inf")  # the sender that was ignored may be the one that it follows now
        try:
            write_json(self._path, {"federation": federation, "epoch": epoch})
        except OSError as error:
            log.warning("federation_not_written path=%s reason=%s", self._path, cause(error))


COLLECT_EVERY_S = 5.0
"""How often an agent looks for samples that were added on its device."""

SETTLED_S = 5.0
"""For so long a file of the watch folder has to be unchanged: one that is being copied is not whole yet."""

REFIT_AGAIN_S, REFIT_SELDOM_S = 60.0, 3600.0
"""Pauses between tries of a fit that fails: they double from the first to the longest.

New samples end a pause, at most once in the shorter time: a camera that adds some all the time would leave no pause.
"""


def samples_folder(config: AgentConfig) -> Path:
    """Where samples are that were labelled on this device: the data source ``collected:DIR``, or beside another one."""
    kind, _, path = config.data.source.partition(":")
    return config.data.folder / Path(path).expanduser() if kind == "collected" else config.state / "samples"


def candidate_folder(config: AgentConfig) -> Path:
    """Where the head of a bundle that is not in use yet is put."""
    return config.state / "candidate"


def clean(config: AgentConfig) -> None:
    """Remove what is left of a bundle that did not come into use, and take its head back: a kill may have left it."""
    from .. import bundle as bundles
    from ..heads import saved

    root = config.state / "bundles"
    shutil.rmtree(candidate_folder(config), ignore_errors=True)
    try:
        if (manifest := bundles.current_manifest(root)) is not None:
            fingerprints = {name: variant.fingerprint for name, variant in manifest.variants.items()}
            saved.settle(config.state / "head", fingerprints)
        bundles.remove_unused(root)
    except (HeadwaterError, OSError) as error:  # a damaged pair: nothing is known of what is to stay; or a full disk
        log.warning("not_cleaned reason=%s", error)


def file_mark(path: Path) -> tuple[int, int] | None:
    """Time of the last change, nanoseconds, and size of a file; None where it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def is_settled(mark: tuple[int, int], now: float) -> bool:
    """Whether a file did not change lately; ``now`` as `time.time`. A clock that was set leaves no file waiting."""
    return abs(now - mark[0] / 1e9) >= SETTLED_S


class NewSamples:
    """Notices samples that were added and files in the watch folder, from the names and times of files alone.

    A fit that failed is due again after a pause, also where nothing has changed. ``now``: as `time.time`.
    """

    def __init__(self, config: AgentConfig, clock: Callable[[], float], now: Callable[[], float] = time.time) -> None:
        self._index, self._watch = samples_folder(config) / "index.json", config.data.watch
        self._clock, self._now = clock, now
        self._seen: tuple[tuple[str, tuple[int, int]], ...] = ()
        self._looked_at = float("-inf")
        self._failures, self._reason, self._again_at = 0, "", float("inf")
        self._early_at = float("-inf")

    def is_due(self) -> bool:
        """Whether something has changed since the last time that this was so, or a fit is to be tried again.

        At most every `COLLECT_EVERY_S`. Call `tried` with what came out.
        """
        if self._clock() - self._looked_at < COLLECT_EVERY_S:
            return False
        now = self._looked_at = self._clock()
        if self._failures and now < self._again_at and now < self._early_at + REFIT_AGAIN_S:
            return False
        with contextlib.suppress(OSError):  # a folder that goes while it is looked at: next time
            files = sorted(self._watch.glob("[!.]*/[!.]*")) if self._watch is not None else []
            marks = {path: mark for path in (self._index, *files) if (mark := file_mark(path)) is not None}
            present = tuple(
                (str(path), mark)
                for path, mark in marks.items()
                if path == self._index or is_settled(mark, self._now())
            )
            if present != self._seen:
                self._seen = present
                if self._failures and present:
                    self._early_at = now
                return bool(present)
        return now >= self._again_at

    def tried(self, error: BaseException | None) -> None:
        """A fit came to this end; None: it is done, or nothing was to be fitted."""
        if error is None:
            self._failures, self._reason, self._again_at = 0, "", float("inf")
            return
        # From the sixth doubling on the pause is the longest; 2.0**1024 would raise after as many failures.
        pause = min(REFIT_AGAIN_S * 2.0 ** min(self._failures, 6), REFIT_SELDOM_S)
        self._failures, self._reason = self._failures + 1, f"{type(error).__name__}: {error}"
        self._again_at = self._clock() + pause
        log.warning("refit_failed tries=%d next_try_s=%.0f", self._failures, pause)

    def failure(self) -> dict[str, str | int] | None:
        """Of a fit that failed, for the status: how often in a row, why, and when it is tried again (UTC, ISO 8601)."""
        if not self._failures:
            return None
        moment = datetime.fromtimestamp(self._now() + max(0.0, self._again_at - self._clock()), timezone.utc)
        return {
            "tries": self._failures,
            "reason": self._reason[:2000],
            "next_try": moment.isoformat(timespec="seconds"),
        }


PROVEN_S = 300.0
"""An agent that has been up for so long lives with the bundle in use."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

MOST_STARTS = 3
"""Starts that may end earlier; after that the agent uses the bundle before again."""

MOST_REFUSED = 8
"""Bundles that were refused, of which the reason is known."""


def machine_start() -> str:
    """What the kernel calls this start of the machine: another text after each; empty where it does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()[:64]
    except (OSError, ValueError):
        return ""


class _Released(Frozen):
    """A bundle, the number of its release, and the federation that counts it; 0 where it came by hand."""

    bundle_id: str
    release: int = Field(0, ge=0)
    federation: FederationId = ""


class _Taken(_Released):
    """The bundle that was taken last; none where the id is empty."""

    bundle_id: str = ""


class RolledBack(Frozen):
    """Another bundle was installed by hand in place of ``source``."""

    source: _Taken
    runs: str
    """Id of the bundle that is to stay."""

    def __str__(self) -> str:
        source = self.source
        of = f" (release {source.release})" if source.release else ""
        return (
            f"keeps bundle {self.runs[:12]}: this device was rolled back by hand from bundle "
            f"{source.bundle_id[:12]}{of}; it takes a newer release"
        )


class Refused(_Released):
    """A bundle that this device tried and does not use."""

    reason: str
    at: str
    crashed: bool = False
    """Whether the agent did not live with it; it is not tried again then."""


class Trial(_Released):
    """A bundle that is prepared, or is in use, and has yet to show that the agent lives with it."""

    starts: int = Field(0, ge=0)
    """Starts of the preparation, or of the agent with the bundle, that did not end well; the present one included."""

    machine: str = Field("", max_length=64)
    """Start of the machine, see `machine_start`, in which the last of them was; empty: unknown."""

    def started(self, machine: str) -> Trial:
        """With one more start, in this start of the machine.

        The start before does not count where the machine has started since: power was cut, or somebody restarted it,
        which says nothing against the bundle. Where this is unknown, it counts.
        """
        was_cut = machine and self.machine and machine != self.machine
        starts = max(self.starts, 1) if was_cut else self.starts + 1
        return self.model_copy(update={"starts": starts, "machine": machine})

    def stopped(self) -> Trial:
        """Without the last start, which was ended on purpose."""
        return self.model_copy(update={"starts": max(0, self.starts - 1)})


class Pin(Frozen):
    """The owner keeps a bundle, whatever is released, until a moment (ISO 8601; empty: until it is unpinned)."""

    bundle_id: str
    reason: str
    until: str = ""

    def holds(self, now: float) -> bool:
        """Whether it counts at that time (as `time.time`)."""
        return not self.until or now < moment_of(self.until).timestamp()

    def __str__(self) -> str:
        until = f" until {self.until}" if self.until else ""
        return f"keeps bundle {self.bundle_id[:12]}: pinned on this device{until}: {self.reason}"


class _Record(Frozen):
    taken: _Taken = _Taken()
    rolled_back: RolledBack | None = None
    refused: tuple[Refused, ...] = ()
    prepared: Trial | None = None
    """A bundle whose preparation has begun and not ended."""

    is_preparing: bool = False
    """Whether that is under way; where the agent starts: whether it did not survive it."""

    on_trial: Trial | None = None


class ReleaseRecord:
    """The record in one agent's state folder; the agent's loop and its worker may change it at the same time.

    Pins are in a file of their own, because commands write it while the agent runs.
    """

    def __init__(self, state: Path) -> None:
        self._path, self._pin_path, self._bundles = state / "releases.json", state / "pin.json", state / "bundles"
        self._lock = threading.RLock()
        self.on_trial: Trial | None = None
        """The bundle in use, where this agent has started it or started with it, and has yet to show that it lives with
        it: call `proved` then."""

    def prepares(self, message: Install, machine: str = "") -> int:
        """The preparation of a bundle begins, in this start of the ``machine``; returns its number.

        That is 1, and one more for each preparation of it in a row that the agent did not survive, see `Trial.started`.
        """
        with self._lock:
            before, about = self._read(), _about(message)
            last = before.prepared
            if last is None or last.model_dump(include={*about}) != about:
                last = Trial(**about)
            trial = last.started(machine)
            self._write(before.model_copy(update={"prepared": trial, "is_preparing": True}))
            return trial.starts

    def ended(self) -> None:
        """The preparation has ended without saying anything of the bundle."""
        with self._lock:
            self._write(self._read().model_copy(update={"prepared": None, "is_preparing": False}))

    def took(self, message: Install, machine: str = "") -> None:
        """The bundle of this release is in use now, on trial, since this start of the ``machine``."""
        about = _about(message)
        with self._lock:
            refused = tuple(one for one in self._read().refused if one.bundle_id != message.bundle_id)
            trial = Trial(**about, machine=machine)
            self._write(_Record(taken=_Taken(**about), refused=refused, on_trial=trial))
            self.on_trial = trial

    def refuse(self, message: Install, reason: str, at: float, *, crashed: bool = False) -> None:
        """The bundle of this release was tried, and is not used."""
        with self._lock:
            self._write(_refused(self._read(), _about(message), reason, at, crashed=crashed))

    def started(self, machine: str = "") -> Trial | None:
        """Count a start of the agent; returns the bundle on trial, None where there is none.

        ``machine``: as for `took`. Where the agent ended in the preparation of another bundle, that one is to blame.
        """
        with self._lock:
            before = self._read()
            trial = before.on_trial
            if trial is not None:
                trial = (trial.stopped() if before.is_preparing else trial).started(machine)
            if trial is not None or before.is_preparing:
                self._write(before.model_copy(update={"on_trial": trial, "is_preparing": False}))
            self.on_trial = trial
            return trial

    def stopped(self) -> None:
        """The agent was stopped on purpose: neither this start counts nor the preparation that it ends."""
        with self._lock:
            before = self._read()
            changes: dict[str, Any] = {}
            if before.on_trial is not None:
                changes["on_trial"] = before.on_trial.stopped()
            if before.is_preparing and before.prepared is not None:
                changes |= {"prepared": before.prepared.stopped(), "is_preparing": False}
            if changes:
                self._write(before.model_copy(update=changes))

    def proved(self, trial: Trial) -> None:
        """The agent lives with this bundle; without effect where another one is on trial meanwhile."""
        with self._lock:
            if self.on_trial == trial:
                self._write(self._read().model_copy(update={"on_trial": None}))
                self.on_trial = None

    def fell_back(self, trial: Trial, runs: str, at: float) -> None:
        """The agent did not live with a bundle, and uses the one before again."""
        reason = (
            f"keeps bundle {runs[:12]} because the agent ended {trial.starts - 1} times within {PROVEN_S:.0f} s of its "
            f"start with bundle {trial.bundle_id[:12]}"
        )
        with self._lock:
            before = self._read().model_copy(update={"on_trial": None})
            self._write(_refused(before, _about(trial), reason, at, crashed=True))
            self.on_trial = None

    def refused(self) -> tuple[Refused, ...]:
        """Bundles that were tried and are not used, the latest last."""
        return self._read().refused

    def pin(self, pin: Pin | None) -> None:
        """Keep the bundle in use; None: take releases again.

        Raises:
            UsageError: another bundle is in use.
        """
        if pin is None:
            self._pin_path.unlink(missing_ok=True)
            return
        from ..bundle import current_id

        with waited_lock(self._bundles):
            if (runs := current_id(self._bundles)) != pin.bundle_id:
                raise UsageError(
                    f"{self._bundles}: bundle {runs[:12] or 'none'} is in use now, expected {pin.bundle_id[:12]}: the "
                    "agent has just switched; look at 'edge-agent status', and pin again"
                )
            write_json(self._pin_path, pin.model_dump(mode="json"))

    @contextlib.contextmanager
    def switching(self, message: Install, now: float) -> Iterator[str]:
        """Inside, no command pins the bundle in use; gives `why_declined`. For the moment of the switch alone."""
        with waited_lock(self._bundles):
            yield self.why_declined(message, now)

    def pinned(self) -> Pin | None:
        """The pin, also one that is over; None where there is none.

        Raises:
            StateError: its file is damaged.
        """
        raw = read_json(self._pin_path)
        try:
            pin = None if raw is None else Pin.model_validate(raw)
            if pin is not None and pin.until:
                moment_of(pin.until)
        except (ValidationError, UsageError) as error:
            raise StateError(f"{self._pin_path}: not what 'edge-agent pin' writes; remove it to unpin") from error
        return pin

    def release_of(self, bundle_id: str) -> int | None:
        """Number of the release by which a bundle came; None: it came by hand, or is none that was taken last."""
        taken = self._read().taken
        return taken.release or None if taken.bundle_id == bundle_id else None

    def check(self) -> None:
        """Return quietly where the record can be read, or there is none yet.

        Raises:
            StateError: it is damaged.
        """
        self._read()

    def put_by_hand(self, bundle_id: str, instead_of: str) -> RolledBack | None:
        """A bundle was installed by hand, ``instead_of`` another (empty: of none); returns the rollback that now holds.

        Installing again the bundle that was rolled back ends the rollback.
        """
        before = self._read()
        if bundle_id == instead_of:
            return before.rolled_back
        if before.rolled_back is not None and bundle_id == before.rolled_back.source.bundle_id:
            self._write(_Record(taken=before.rolled_back.source, refused=before.refused))
            return None
        if before.rolled_back is not None:
            source = before.rolled_back.source
        elif instead_of:
            source = before.taken if before.taken.bundle_id == instead_of else _Taken(bundle_id=instead_of)
        else:
            return None
        now = RolledBack(source=source, runs=bundle_id)
        self._write(_Record(rolled_back=now, refused=before.refused))
        return now

    def why_declined(self, message: Install, now: float) -> str:
        """Why this device does not even try a release; empty where it does. ``now``: as `time.time`."""
        record, pin = self._read(), self.pinned()
        if pin is not None and pin.holds(now):
            return "" if message.bundle_id == pin.bundle_id else str(pin)
        for one in record.refused:
            is_known = one.crashed and one.bundle_id == message.bundle_id
            if is_known and one.federation == message.federation and message.release <= one.release:
                return one.reason
        if record.rolled_back is None:
            return ""
        source = record.rolled_back.source
        newest = source.release if source.federation == message.federation else 0
        is_newer = message.bundle_id != source.bundle_id and message.release > newest
        return "" if is_newer else str(record.rolled_back)

    def kept(self, now: float) -> str:
        """Why this device keeps its bundle by its owner's choice; empty where it does not."""
        pin = self.pinned()
        return str(pin) if pin is not None and pin.holds(now) else self.rolled_back()

    def rolled_back(self) -> str:
        """That another bundle was installed by hand in place of a release, and which; else empty."""
        return str(self._read().rolled_back or "")

    def _read(self) -> _Record:
        raw = read_json(self._path)
        try:
            return _Record() if raw is None else _Record.model_validate(raw)
        except ValidationError as error:
            raise StateError(
                f"{self._path}: not what an agent writes; remove it to take every release again"
            ) from error

    def _write(self, record: _Record) -> None:
        write_json(self._path, record.model_dump(mode="json"))


def _about(message: Install | Trial) -> dict[str, Any]:
    return {"bundle_id": message.bundle_id, "release": message.release, "federation": message.federation}


def _refused(before: _Record, about: dict[str, Any], reason: str, at: float, *, crashed: bool) -> _Record:
    """The record with one refused bundle more, and nothing that is prepared."""
    moment = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds")
    new = Refused(**about, reason=reason[:1000], at=moment, crashed=crashed)
    others = [one for one in before.refused if one.bundle_id != new.bundle_id]
    return before.model_copy(
        update={"refused": (*others, new)[-MOST_REFUSED:], "prepared": None, "is_preparing": False}
    )


START_GRACE_S = 60.0
"""After its start an agent leaves its coordinator so long to say that a bundle is not to be used any more."""

CLOCK_OFF_S = 30 * 86_400.0
"""A clock that is so long after the time to switch is taken to be wrong: devices are seldom off for longer."""


def utc_text(at: float) -> str:
    """A time (as `time.time`) in ISO 8601, UTC."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds")


class Waiting(Frozen):
    """A bundle that waits for the time to switch to it; times as `time.time`, because a restart ends other clocks."""

    install: Install
    at: float
    """When the device was asked."""

    opens: float
    closes: float | None = None

    @classmethod
    def of(cls, install: Install, now: float) -> Waiting:
        """What an offer that has just come means."""
        opens, within_s = now + install.activate_in_s, install.activate_within_s
        return cls(install=install, at=now, opens=opens, closes=None if within_s is None else opens + within_s)

    def is_open(self, now: float) -> bool:
        """Whether the device may switch at that time by its clock."""
        return self.opens <= now <= (self.opens + CLOCK_OFF_S if self.closes is None else self.closes)

    def why_not(self, now: float) -> str:
        """Why the device cannot know by its clock when to switch, and waits for its coordinator; empty: it can."""
        clock = f"its clock says {utc_text(now)}" if abs(now) < 1e11 else "its clock is out of range"
        about = f"bundle {self.install.bundle_id[:12]} waits for the coordinator: {clock}"
        if now < self.at:
            return f"{about}, before {utc_text(self.at)}, when the bundle was offered; set the clock"
        if now > self.opens + CLOCK_OFF_S:
            return f"{about}, long after {utc_text(self.opens)}, when the device was to switch; set the clock"
        return ""


class WaitFile:
    """What a device waits for, in its state folder."""

    def __init__(self, state: Path) -> None:
        self._path = state / "waits.json"

    def write(self, waiting: Waiting) -> None:
        """Save it. On a disk that cannot be written, a restart forgets it, and the coordinator offers it again."""
        try:
            write_json(self._path, waiting.model_dump(mode="json"))
        except OSError as error:
            log.warning("wait_not_written path=%s reason=%s", self._path, cause(error))

    def read(self) -> Waiting | None:
        """What was saved; None where nothing was, or it is damaged."""
        try:
            raw = read_json(self._path)
            return None if raw is None else Waiting.model_validate(raw)
        except (StateError, ValidationError) as error:
            log.warning("wait_unreadable path=%s reason=%s", self._path, cause(error))
            return None

    def remove(self) -> None:
        """The device waits for nothing."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
