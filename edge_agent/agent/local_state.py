"""State of an agent on its disk: client state of runs, room for it, and the federation that the agent follows.

Client state is what a client keeps of a run between rounds, restarts and missed rounds: personal tensors and named
memory. There is one file for each of the last two rounds, and for those rounds that are to be kept. A round starts from
the newest file of an earlier round, so doing a round again after a crash starts from the same state and ends in the
same bits.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..core.config import AgentConfig
from ..core.errors import CodecError, StateError, cause
from ..core.own_folders import FolderKind, holds_only, is_own_folder, make_folder, remove_folder
from ..core.storage import oldest_first, read_json, read_regular, read_tensors, size_of, write_json, write_tensors
from ..core.task import Frozen, Tensors
from ..wire.blobs.chunks import BlobCache
from ..wire.messages.fields import Command, Epoch, FederationId
from ..wire.messages.up import UpdateManifest

log = logging.getLogger(__name__)

_PERSONAL = "personal."
_MEMORY = "memory."
GENERATIONS = 2

RECEIPTS = "receipts.jsonl"

TRAINING_FILE = "training.safetensors"
"""In the folder of a run: the checkpoint inside the training under way."""

PRECISION_FILE = "precision.json"
"""In the folder of a run: the precision of its training steps, and the times that decided it."""

_NAMED = "|".join(map(re.escape, (TRAINING_FILE, RECEIPTS, PRECISION_FILE)))
_OF_A_RUN = re.compile(rf"kept-[0-9]+\.safetensors|{_NAMED}|encoders|\..+\.[0-9a-f]{{8}}\.tmp")


def _is_earlier_run(folder: Path) -> bool:
    return holds_only(folder, _OF_A_RUN)


RUN_FOLDER = FolderKind("run of an agent", _is_earlier_run)
"""The folder of one run on a device."""


def remove_ended_runs(folder: Path, current: str, keep: int) -> list[str]:
    """Remove the oldest runs' folders below ``folder``, so that ``keep`` are left, ``current`` among them.

    Returns the names of those removed. A device that takes part in run after run would fill its disk otherwise; a run
    that is resumed after so many others begins afresh here, as on a device that is new to it.
    """
    others = [path for path in folder.glob("*") if path.name != current and is_own_folder(path, RUN_FOLDER)]
    oldest = oldest_first(others)[: max(0, len(others) - max(keep - 1, 0))]
    return sorted(path.name for path in oldest if remove_folder(path, RUN_FOLDER))


def remove_all_runs(folder: Path) -> int:
    """Remove the folders of all runs below ``folder``; returns their number. What is not of a run stays."""
    return sum(remove_folder(path, RUN_FOLDER) for path in folder.glob("*") if is_own_folder(path, RUN_FOLDER))


def make_room(config: AgentConfig, cache: BlobCache, needed_bytes: int, wanted: Collection[str]) -> int:
    """Remove caches until ``needed_bytes`` more leave ``min_free_bytes`` of the disk; returns the bytes freed.

    Old downloads go first, out of ``cache``, then cached features, each the oldest first. Blobs in ``wanted``, by their
    digests, stay; so does client state, which cannot be had again and whose run may be paused.
    """
    from ..personal.encoder import feature_files  # brings numpy, which an idle agent does without

    state = config.state
    short = needed_bytes + config.min_free_bytes - shutil.disk_usage(state).free
    if short <= 0:
        return 0
    downloads = cache.free(short, wanted)
    features = 0
    # Files of the cache alone. Hidden ones are being written, here or by another process (`storage.write_atomic`).
    for path in feature_files(state / "features"):
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


def note_receipt(folder: Path, agent: str, update: UpdateManifest, *, accepted: bool) -> None:
    """Add a line to the receipts of a run, in its ``folder``: what became of an update of this agent.

    'headwater audit' compares them with the coordinator's journal. Nothing waits for the disk; a full one, or a power
    cut, costs the line alone.
    """
    about = {"agent": agent, "round": update.round, "purpose": update.purpose, "digest": update.blob.digest}
    line = json.dumps({**about, "accepted": accepted}).encode() + b"\n"
    try:
        make_folder(folder, RUN_FOLDER)
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
        self.folder = folder
        self._keep_every = keep_every

    def write(self, round_number: int, personal: Tensors, memory: Tensors) -> None:
        """Save the state after a round; on disk when this returns. A client that never keeps anything has no file.

        The state of later rounds is removed: a client that does an earlier one now was set back to it.
        """
        both = merge(personal, memory)
        before = self.rounds()
        if not both and not before:
            return
        make_folder(self.folder, RUN_FOLDER)
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


class TrainingCheckpointFile:
    """The checkpoint inside one training (`methods.values.TrainingCheckpoint`), of which the last one stays.

    ``training`` says which training it is, with everything that its result depends on; a checkpoint of another one is
    ignored. It is due ``every_s`` seconds of ``clock`` after the last one, later where writing would take more than a
    twentieth of the time, or more than `CHECKPOINT_BYTES_PER_S`; 0: never.
    """

    def __init__(self, folder: Path, training: str, every_s: float, clock: Callable[[], float]) -> None:
        self._path = folder / TRAINING_FILE
        self._training = training
        self._every_s = every_s
        self._clock = clock
        self._due_at = clock() + every_s

    def is_due(self) -> bool:
        """Whether the state should be saved now."""
        return self._every_s > 0 and self._clock() >= self._due_at

    def save(self, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Save a state; on disk when this returns. Where it cannot be written, training continues without."""
        begin = self._clock()
        try:
            make_folder(self._path.parent, RUN_FOLDER)
            write_tensors(self._path, tensors, {"training": self._training, "notes": json.dumps(notes)})
        except OSError as error:
            log.warning("checkpoint_not_written path=%s reason=%s", self._path, cause(error))
        now = self._clock()
        size = sum(array.nbytes for array in tensors.values())
        self._due_at = now + max(self._every_s, 20 * (now - begin), size / CHECKPOINT_BYTES_PER_S)

    def load(self) -> tuple[Tensors, dict[str, Any]] | None:
        """The state that was saved last; None where there is none of this training, or it is damaged."""
        from ..wire.tensors import decode, inspect  # brings numpy, which an idle agent does without

        try:
            data = read_regular(self._path)
            _, metadata = inspect(data)
            if metadata.get("training") != self._training:
                return None
            tensors = decode(data)
            notes = json.loads(metadata["notes"])
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
        self._path = path
        self._clock = clock
        self.federation = ""
        self.epoch = 0
        try:
            if (raw := read_json(path)) is not None:
                followed = _Followed.model_validate(raw)
                self.federation = followed.federation
                self.epoch = followed.epoch
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
                self._other.epoch = max(self._other.epoch, message.epoch)
                self._other.heard_at = now
        self._ignored = f"{why}: two coordinators, or a state folder that was replaced"
        self._ignored_at = now
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
        other = self._other
        now = self._clock()
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
        self.federation = federation
        self.epoch = epoch
        self._ignored_at = float("-inf")  # the sender that was ignored may be the one that it follows now
        try:
            write_json(self._path, {"federation": federation, "epoch": epoch})
        except OSError as error:
            log.warning("federation_not_written path=%s reason=%s", self._path, cause(error))
