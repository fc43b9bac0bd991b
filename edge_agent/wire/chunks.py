"""Blobs in chunks: the frame of a chunk, the set of chunks that have arrived, assembly on disk, and flow control.

A frame is a fixed 40-byte little-endian header and raw bytes, with a checksum over both; it never exceeds the smallest
payload limit of the brokers and cloud services we know of. Chunks may come in any order, twice, or never; what counts
is the SHA-256 of the whole, which is also the blob's name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ChunkError, StateError, cause
from ..storage import mapped, sync, write_atomic
from .messages import MAX_RANGES, BlobRef

FRAME_BYTES = 61_440
"""Header and data of one chunk: 60 KiB, below every limit we know (Azure's 64 KiB is the lowest)."""

_FIELDS = struct.Struct("<2sBBQIIQII")  # magic, version, flags, transfer, index, count, offset, length, reserved
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
CHUNK_BYTES = FRAME_BYTES - HEADER_BYTES
_MAGIC, _VERSION = b"HW", 1
_SAVE_EVERY = 64  # chunks between two notes of what has arrived; at worst so many are sent again after a crash

Spans = Iterable[tuple[int, int]]
"""Half-open ranges of chunk numbers."""


@dataclass(frozen=True)
class Frame:
    """One chunk: number ``index`` of ``count``, the bytes from ``offset`` on; ``transfer`` identifies the blob."""

    transfer: int
    index: int
    count: int
    offset: int
    data: bytes | memoryview

    def encode(self) -> bytes:
        """Header and data."""
        position = (self.transfer, self.index, self.count, self.offset)
        fields = _FIELDS.pack(_MAGIC, _VERSION, 0, *position, len(self.data), 0)
        return b"".join((fields, _CHECKSUM.pack(zlib.crc32(self.data, zlib.crc32(fields))), self.data))


def decode_frame(payload: bytes) -> Frame:
    """The frame in ``payload``; its data are a view, not a copy.

    Raises:
        ChunkError: not a frame, cut short, or its checksum is wrong.
    """
    if len(payload) < HEADER_BYTES:
        raise ChunkError(f"{len(payload)} bytes cannot hold a chunk header of {HEADER_BYTES}")
    magic, version, flags, transfer, index, count, offset, length, reserved = _FIELDS.unpack_from(payload)
    if (magic, version, flags, reserved) != (_MAGIC, _VERSION, 0, 0):
        raise ChunkError(f"chunk begins {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}")
    data = memoryview(payload)[HEADER_BYTES:]
    if length != len(data) or index >= count:
        raise ChunkError(f"chunk {index} of {count} promises {length} bytes and holds {len(data)}")
    (checksum,) = _CHECKSUM.unpack_from(payload, _FIELDS.size)
    if zlib.crc32(data, zlib.crc32(memoryview(payload)[: _FIELDS.size])) != checksum:
        raise ChunkError(f"chunk {index} of {count}: checksum is wrong, the bytes were changed on the way")
    return Frame(transfer, index, count, offset, data)


def transfer_id(digest: str) -> int:
    """Number that marks the chunks of a blob: the first 8 bytes of its digest."""
    return int(digest[:16], 16)


def chunk_count(ref: BlobRef) -> int:
    """Number of chunks of a blob."""
    return -(-ref.size_bytes // ref.chunk_bytes)


class Chunks:
    """A set of chunk numbers out of ``count``."""

    def __init__(self, count: int) -> None:
        self.count, self.present = count, 0
        self._flags = bytearray(count)

    def __contains__(self, index: int) -> bool:
        return bool(self._flags[index])

    @property
    def complete(self) -> bool:
        """Whether all are present."""
        return self.present == self.count

    def add(self, index: int) -> bool:
        """Add one; False when it was present already."""
        if self._flags[index]:
            return False
        self._flags[index] = 1
        self.present += 1
        return True

    def missing(self, below: int | None = None, limit: int = MAX_RANGES) -> tuple[tuple[int, int], ...]:
        """The first ``limit`` half-open ranges of chunks that are not present."""
        end, ranges, position = self.count if below is None else below, list[tuple[int, int]](), 0
        while len(ranges) < limit and (start := self._flags.find(0, position, end)) >= 0:
            stop = self._flags.find(1, start, end)
            position = end if stop < 0 else stop
            ranges.append((start, position))
        return tuple(ranges)


def expand(ranges: Spans, count: int) -> Iterator[int]:
    """Chunk numbers in ``ranges``, checked.

    Raises:
        ChunkError: a range that is not within 0..count.
    """
    for start, stop in ranges:
        if not 0 <= start < stop <= count:
            raise ChunkError(f"range {start}..{stop} of a blob with {count} chunks")
        yield from range(start, stop)


class Outgoing:
    """A blob to be sent: a file, mapped, or bytes."""

    def __init__(self, ref: BlobRef, data: memoryview) -> None:
        self.ref, self.count, self.data = ref, chunk_count(ref), data
        self._transfer = transfer_id(ref.digest)

    @classmethod
    def of(cls, data: bytes, chunk_bytes: int = CHUNK_BYTES) -> Outgoing:
        """A blob in memory."""
        digest = hashlib.sha256(data).hexdigest()
        return cls(BlobRef(digest=digest, size_bytes=len(data), chunk_bytes=chunk_bytes), memoryview(data))

    @classmethod
    def open(cls, path: Path, digest: str, chunk_bytes: int = CHUNK_BYTES) -> Outgoing:
        """A blob on disk, mapped.

        Raises:
            StateError: the file is missing or empty.
        """
        try:
            data = mapped(path)
        except OSError as error:
            raise StateError(f"{path}: blob cannot be opened: {cause(error)}") from error
        if not data:
            raise StateError(f"{path}: blob cannot be opened: the file is empty")
        return cls(BlobRef(digest=digest, size_bytes=len(data), chunk_bytes=chunk_bytes), data)

    @property
    def wire_bytes(self) -> int:
        """Bytes of all its frames."""
        return self.ref.size_bytes + self.count * HEADER_BYTES

    def frame(self, index: int) -> bytes:
        """Chunk number ``index``, ready to publish."""
        offset = index * self.ref.chunk_bytes
        data = self.data[offset : offset + self.ref.chunk_bytes]
        return Frame(self._transfer, index, self.count, offset, data).encode()


class Incoming:
    """A blob that is assembled in a file; survives a restart, and counts only when its SHA-256 is right.

    The file gets its full length before the first chunk (sparse), so the caller must have agreed to the size.
    """

    def __init__(self, ref: BlobRef, folder: Path) -> None:
        self.ref, self.chunks = ref, Chunks(chunk_count(ref))
        self.path, self._notes = folder / f"{ref.digest}.part", folder / f"{ref.digest}.chunks"
        self._digest, self._hashed = hashlib.sha256(), 0
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, ref.size_bytes)

    @property
    def is_open(self) -> bool:
        """Whether it is still being assembled here: not finished, closed or discarded."""
        return self._file >= 0

    def add(self, frame: Frame) -> bool:
        """Store one chunk; False when it was present already.

        Raises:
            ChunkError: the frame does not belong to this blob, or the disk is full; then it can be sent again.
        """
        ref = self.ref
        expected = min(ref.chunk_bytes, ref.size_bytes - frame.index * ref.chunk_bytes)
        if (frame.transfer, frame.count) != (transfer_id(ref.digest), self.chunks.count):
            raise ChunkError(f"chunk of another blob: count {frame.count}, expected {self.chunks.count}")
        if frame.offset != frame.index * ref.chunk_bytes or len(frame.data) != expected:
            raise ChunkError(f"chunk {frame.index}: {len(frame.data)} bytes at {frame.offset}, expected {expected}")
        if frame.index in self.chunks:
            return False
        try:
            if os.pwrite(self._file, frame.data, frame.offset) != expected:
                raise OSError(errno.ENOSPC, "no space left for all of it")
        except OSError as error:
            raise ChunkError(f"chunk {frame.index} cannot be kept in {self.path.parent}: {cause(error)}") from error
        self.chunks.add(frame.index)
        if frame.index == self._hashed:  # in order: hash while the bytes are in the cache
            self._digest.update(frame.data)
            self._hashed += 1
        if self.chunks.present % _SAVE_EVERY == 0:
            self.save_notes()
        return True

    def finish(self, path: Path, *, durable: bool) -> None:
        """Check the whole blob and move it to ``path``; ``durable``: its content is on disk when this returns.

        Raises:
            ChunkError: the bytes are not those that the digest names; all of them are discarded, to be sent again.
        """
        size = self.ref.chunk_bytes
        for index in range(self._hashed, self.chunks.count):
            self._digest.update(os.pread(self._file, size, index * size))
        digest = self._digest.hexdigest()
        if digest != self.ref.digest:
            self.discard()
            raise ChunkError(
                f"blob {self.ref.digest[:16]}: SHA-256 begins {digest[:16]}; everything is asked for again"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        if durable:
            sync(self._file)
        self._close_file()
        self.path.replace(path)
        self._notes.unlink(missing_ok=True)

    def save_notes(self) -> None:
        """Write which chunks are present, for a restart. Damage shows in the hash, so no sync is needed."""
        notes = {"chunk_bytes": self.ref.chunk_bytes, "missing": self.chunks.missing(limit=self.chunks.count)}
        with contextlib.suppress(OSError):  # a full disk: the notes only save sending chunks again
            write_atomic(self._notes, json.dumps(notes).encode(), durable=False)

    def close(self) -> None:
        """Stop for now; what has arrived stays on disk."""
        if self.is_open:
            self.save_notes()
            self._close_file()

    def discard(self) -> None:
        """Remove everything that has arrived."""
        self._close_file()
        self.path.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self.is_open:
            os.close(self._file)
            self._file = -1

    def _resume(self) -> None:
        """Continue with what an earlier process left, where both of its files are intact."""
        try:
            notes = json.loads(self._notes.read_bytes())
            missing = set(expand(((a, b) for a, b in notes["missing"]), self.chunks.count))
            usable = notes["chunk_bytes"] == self.ref.chunk_bytes and self.path.stat().st_size == self.ref.size_bytes
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ChunkError):
            usable, missing = False, set[int]()
        if not usable:
            self.path.unlink(missing_ok=True)
            self._notes.unlink(missing_ok=True)
            return
        for index in range(self.chunks.count):
            if index not in missing:
                self.chunks.add(index)


_NAME = re.compile(r"[0-9a-f]{64}")


class BlobCache:
    """A folder of blobs, bounded by bytes; their content is checked when read, so nothing is synced."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._partial = folder / "partial"
        self._under_way: list[Incoming] = []

    def path(self, digest: str) -> Path:
        """Where the blob is, or would be."""
        return self.folder / digest

    def has(self, digest: str) -> bool:
        """Whether the blob is present."""
        return self.path(digest).is_file()

    def read(self, digest: str) -> memoryview:
        """The blob's bytes, mapped; a damaged file is removed, so that it is fetched again.

        Raises:
            StateError: it is missing, or was damaged.
        """
        path = self.path(digest)
        try:
            data = mapped(path)
        except OSError as error:
            raise StateError(f"blob {digest[:16]} is not in {self.folder}: {cause(error)}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            path.unlink(missing_ok=True)
            raise StateError(f"blob {digest[:16]} in {self.folder} was damaged and has been removed; fetch it again")
        os.utime(path)  # most recently used
        return data

    def receive(self, ref: BlobRef) -> Incoming:
        """Begin, or continue, to assemble a blob."""
        incoming = Incoming(ref, self._partial)
        self._under_way.append(incoming)
        self.make_room(0)  # it has its full length already
        return incoming

    def finish(self, incoming: Incoming) -> Path:
        """Check a complete blob and add it; returns its path.

        Raises:
            ChunkError: wrong content; everything that had arrived is discarded.
        """
        path = self.path(incoming.ref.digest)
        incoming.finish(path, durable=False)
        return path

    def make_room(self, size_bytes: int) -> None:
        """Remove the least recently used blobs until ``size_bytes`` more fit; abandoned partial ones, too."""
        self._under_way = [incoming for incoming in self._under_way if incoming.is_open]
        held = {incoming.path for incoming in self._under_way}
        whole = (path for path in self.folder.glob("*") if _NAME.fullmatch(path.name))
        idle = [path for path in (*whole, *self._partial.glob("*.part")) if path not in held]
        used = sum(path.stat().st_size for path in idle) + sum(one.ref.size_bytes for one in self._under_way)
        for path in sorted(idle, key=lambda path: path.stat().st_mtime):
            if used + size_bytes <= self.limit_bytes:
                return
            used -= path.stat().st_size
            path.unlink()


WINDOW_BYTES = 1 << 20
"""How much one upload may have under way unacknowledged; a broken link costs at most this much again."""

AHEAD_BYTES = 4 << 20
"""How far a broadcast may be ahead of the slowest receiver that still makes progress: brokers drop silently beyond some
1,000 queued messages for a client."""

REPORT_EVERY = 8  # frames between two reports of a receiver: twice in each upload window, so that it never runs dry
DOWNLOAD_REPORT_EVERY = 32  # the same for a broadcast; each report costs the coordinator as much as three chunks
REPORT_AFTER_S = 0.5
IDLE_S = 1.0
"""Silence after which a receiver asks again for what it lacks."""
STALL_S = 2.0
"""Time without progress after which a receiver no longer holds up the others of a broadcast."""


class Sending:
    """Chunks on their way to one or more receivers."""

    def __init__(
        self, blob: Outgoing, ranges: Spans, receivers: Iterable[str], *, ahead_bytes: int, now: float
    ) -> None:
        self.blob = blob
        self.ahead = max(2, ahead_bytes // blob.ref.chunk_bytes)
        self.sent = 0
        self._queue = deque(expand(ranges, blob.count))
        self._flight, self._settled = deque[int](), 0
        self._seen = dict.fromkeys(receivers, 0)
        self._moved = dict.fromkeys(self._seen, now)

    @property
    def receivers(self) -> tuple[str, ...]:
        """Those that have not reported that they are done."""
        return tuple(self._seen)

    @property
    def done(self) -> bool:
        """Whether everything is sent, or no receiver is left."""
        return not self._queue or not self._seen

    def due(self, now: float) -> Iterator[bytes]:
        """Frames that may be published now."""
        moving = [seen for name, seen in self._seen.items() if now - self._moved[name] < STALL_S]
        limit = min(moving or self._seen.values(), default=0) + self.ahead
        while self._queue and self._seen and self.sent < limit:
            self.sent += 1
            index = self._queue.popleft()
            self._flight.append(index)
            yield self.blob.frame(index)

    def saw(self, receiver: str, seen: int, now: float) -> None:
        """A receiver reports how many frames it has seen."""
        if receiver in self._seen and seen > self._seen[receiver]:
            self._seen[receiver] = min(seen, self.sent)
            self._moved[receiver] = now

    def leave(self, receiver: str) -> None:
        """A receiver is done or offline."""
        self._seen.pop(receiver, None)

    def again(self, ranges: Spans) -> None:
        """The receivers lack these: those that were lost go to the front and no longer count as under way.

        Frames arrive in the order in which they were sent, so of the first ``seen`` that arrived, and of what went out
        between them, everything that is missing was lost; whatever went out later may still come.
        """
        missing, lost = set(expand(ranges, self.blob.count)), list[int]()
        seen = min(self._seen.values(), default=0)
        while self._flight and self._settled < seen:
            index = self._flight.popleft()
            if index in missing:
                lost.append(index)
            else:
                self._settled += 1
        self._queue.extendleft(reversed(lost))
        self.sent -= len(lost)


class Receiving:
    """Chunks coming in for one blob, and when to report or to ask again."""

    def __init__(self, incoming: Incoming, now: float, report_every: int = REPORT_EVERY) -> None:
        self.incoming, self._every = incoming, report_every
        self.restart(now)

    def restart(self, now: float) -> None:
        """What is missing has just been asked for."""
        self.seen = self._reported = 0
        self._reported_at = self._heard_at = now
        self._last = max((stop for _, stop in self.incoming.chunks.missing()), default=0) - 1
        self._highest = 0
        self._passed = False

    def add(self, frame: Frame, now: float) -> bool:
        """Store a chunk; True when the blob is complete.

        Raises:
            ChunkError: the frame is not of this blob.
        """
        self.incoming.add(frame)
        self.seen += 1
        self._heard_at = now
        self._highest = max(self._highest, frame.index + 1)
        self._passed = self._passed or frame.index == self._last
        return self.incoming.chunks.complete

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """What is missing below the highest chunk seen since the last request: those were lost on the way."""
        return self.incoming.chunks.missing(below=self._highest)

    def report_due(self, now: float) -> bool:
        """Whether to report to the sender how much has been seen; True counts as reported."""
        news = self.seen - self._reported
        if news >= self._every or (news and now - self._reported_at >= REPORT_AFTER_S):
            self._reported, self._reported_at = self.seen, now
            return True
        return False

    def ask_due(self, now: float) -> bool:
        """Whether to ask (again) for what is missing: after silence, or when the last chunk asked for has passed.

        Chunks are sent in ascending order, so once the last one is here, what is missing was lost. True counts as
        asked.
        """
        if self.incoming.chunks.complete:
            return False
        if self._passed or now - self._heard_at >= IDLE_S:
            self._passed = False
            self._heard_at = now
            return True
        return False

    def due_in(self, now: float) -> float:
        """Seconds until a report or a request may be due."""
        report = self._reported_at + REPORT_AFTER_S - now if self.seen > self._reported else IDLE_S
        return max(0.0, min(report, self._heard_at + IDLE_S - now))
