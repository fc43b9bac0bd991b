"""The updates of a site and their sum, as files of the relay.

An update that is whole lies in the folder under its SHA-256, one that is arriving in a folder of its agent, and a sum
under its own SHA-256 with the ending ``.sum``. Nobody else uses the folder.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import HeadwaterError, TensorsError, UpdateRejected
from ..core.storage import mapped, sha256_file, sha256_of, write_atomic
from ..core.weighted_sum import WeightedSum
from ..wire.blobs.chunks import CHUNK_BYTES, Incoming, Outgoing
from ..wire.messages.fields import BlobRef
from ..wire.messages.site_sums import MEMBERS, SiteRound, SummedUpdate, members_of, members_text
from ..wire.packed import pack, unpack
from ..wire.tensors import Spec, decode, inspect, pieces
from ..wire.update_file import read_update

log = logging.getLogger(__name__)

LARGEST_SUM_BYTES = 1 << 36
"""The most bytes of a sum of this relay that is read again after a restart."""

_NAME = re.compile(r"[0-9a-f]{64}(\.sum|\.part|\.chunks|\.whole)?")
"""The names of files of updates and sums: no other file of the folder is ours to remove."""


@dataclass(frozen=True)
class StoredSum:
    """A sum that is in the folder."""

    ref: BlobRef
    run: str
    round: int
    members: tuple[str, ...]
    """The agents whose updates are in it."""


class UpdateFiles:
    """The folder of a relay's updates and sums."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    # --- updates ---------------------------------------------------------------------------------------------------

    def receive(self, agent: str, ref: BlobRef) -> Incoming:
        """Begin to assemble an agent's update, or continue.

        Raises:
            OSError: The disk takes no more.
        """
        return Incoming(ref, self._folder / agent)

    def discard(self, agent: str, incoming: Incoming) -> None:
        """Remove what has arrived of an agent's update."""
        incoming.discard()
        self._remove_empty(agent)

    def store(self, agent: str, incoming: Incoming, expected: Mapping[str, Spec]) -> None:
        """Store an update that is complete and can be a part of a sum; nothing of another one stays.

        Raises:
            ChunkError: Its hash is wrong.
            TensorsError: It has other tensors than ``expected``.
            UpdateRejected: A value is not finite, or a variance is below 0.
            OSError: The disk takes no more.
        """
        path = self._path(incoming.ref.digest)
        try:
            incoming.finish(path, durable=True)
        except BaseException:
            self.discard(agent, incoming)
            raise
        self._remove_empty(agent)
        read_update(path, expected)

    def has(self, digest: str, expected: Mapping[str, Spec]) -> bool:
        """Return whether an update is here, whole, and can be a part of a sum."""
        path = self._path(digest)
        try:
            if not path.is_file() or sha256_file(path) != digest:
                return False
            read_update(path, expected)
        except (TensorsError, UpdateRejected, OSError):
            return False
        return True

    def remove(self, digest: str) -> None:
        """Remove an update."""
        self._path(digest).unlink(missing_ok=True)

    # --- sums ------------------------------------------------------------------------------------------------------

    def add_up(self, terms: SiteRound, members: tuple[SummedUpdate, ...]) -> StoredSum | None:
        """Write the sum of updates that are here; return None where its bits would depend on their order.

        Raises:
            OSError: An update cannot be read, or the sum not be written.
            TensorsError: The list of members is too long.
        """
        total = WeightedSum()
        for member in members:
            weight = 1.0
            if terms.weighting == "samples":
                weight = float(member.samples)
            total.add(weight, decode(mapped(self._path(member.digest))))
        if not total.is_exact:
            return None
        about = {"run": terms.run, "round": str(terms.round), MEMBERS: members_text(members)}
        data = pack(pieces(total.to_tensors(), about))
        digest = sha256_of(data)
        write_atomic(self._sum_path(digest), data)
        ref = BlobRef(digest=digest, size_bytes=len(data), chunk_bytes=CHUNK_BYTES)
        return StoredSum(ref, terms.run, terms.round, tuple(member.agent for member in members))

    def open_sum(self, ref: BlobRef) -> Outgoing:
        """Return a sum that is to be sent.

        Raises:
            StateError: It is not there any more.
        """
        return Outgoing.open(self._sum_path(ref.digest), ref.digest, ref.chunk_bytes)

    def find_sum(self) -> StoredSum | None:
        """Return the sum that an earlier process has left; None where there is none that is whole."""
        for path in sorted(self._folder.glob("*.sum")):
            if not _NAME.fullmatch(path.name):
                continue
            try:
                stored = _read_sum(path)
            except (HeadwaterError, OSError, KeyError, ValueError) as error:
                log.warning("sum_unreadable path=%s reason=%s", path, error)
                continue
            if stored is not None:
                return stored
        return None

    # --- what is not needed any more -------------------------------------------------------------------------------

    def keep_only(self, updates: Iterable[str], total: StoredSum | None, arriving: Collection[str]) -> None:
        """Remove all other files of ours.

        Args:
            updates: Digests of the updates that stay.
            total: The sum that stays; None: no sum does.
            arriving: The agents whose updates are arriving.
        """
        kept = set(updates)
        if total is not None:
            kept.add(self._sum_path(total.ref.digest).name)
        for path in self._our_files("*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
        for path in self._our_files("*/*"):
            agent = path.parent.name
            if agent not in arriving:
                path.unlink(missing_ok=True)
                self._remove_empty(agent)

    def _our_files(self, pattern: str) -> list[Path]:
        """Return the files under a pattern that have a name of an update or of a sum."""
        return [path for path in self._folder.glob(pattern) if _NAME.fullmatch(path.name) and path.is_file()]

    def _remove_empty(self, agent: str) -> None:
        """Remove the folder of an agent's update, where it is empty."""
        with contextlib.suppress(OSError):
            (self._folder / agent).rmdir()

    def _path(self, digest: str) -> Path:
        return self._folder / digest

    def _sum_path(self, digest: str) -> Path:
        return self._folder / f"{digest}.sum"


def _read_sum(path: Path) -> StoredSum | None:
    """Return the sum in a file; None where its content is not what its name says.

    Raises:
        HeadwaterError: It is no sum.
        OSError: It cannot be read.
        KeyError, ValueError: It does not say of which round it is.
    """
    digest = path.name.removesuffix(".sum")
    if sha256_file(path) != digest:
        return None
    data = mapped(path)
    _, about = inspect(unpack(data, LARGEST_SUM_BYTES))
    members = members_of(about.get(MEMBERS, ""))
    ref = BlobRef(digest=digest, size_bytes=len(data), chunk_bytes=CHUNK_BYTES)
    return StoredSum(ref, about["run"], int(about["round"]), tuple(member.agent for member in members))
