"""Blobs in chunks: frames, the set of chunks that have arrived, and assembly on disk. `flow` decides what is sent when.

A frame is a fixed 40-byte little-endian header and the raw bytes of one or more consecutive chunks, with a checksum
over both; it never exceeds the smallest payload limit of the brokers and cloud services we know of. Chunks are small,
so that one of them passes a link of 8 kB/s in 0.7 s; a fast link has many of them in a frame. They may come in
any order, twice, or never; what counts is the SHA-256 of the whole, which is also the blob's name.
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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ChunkError, StateError, cause
from ...core.storage import mapped, oldest_first, read_regular, size_of, sync, write_atomic
from ..messages.fields import MAX_RANGES, BlobRef

FRAME_BYTES = 61_440
"""The most bytes of a frame: 60 KiB, below every known limit of a broker (Azure's 64 KiB is the lowest)."""

_FIELDS = struct.Struct("<2sBBQIIQII")  # magic, version, flags, transfer, index, count, offset, length, reserved
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
"""The bytes of a frame's header."""

CHUNK_BYTES = (FRAME_BYTES - HEADER_BYTES) // 12
"""The bytes of a chunk, of which the largest frame holds twelve."""

_MAGIC = b"HW"
_VERSION = 1
_REPORT = 1
"""The flag of a frame after which the sender waits for a report."""

_SAVE_BYTES = 4 << 20
"""The bytes that arrive between two notes of what is present; at most as many are sent again after a crash."""

_READ_BYTES = 1 << 20
"""The bytes of a file that are hashed at once."""

Spans = Iterable[tuple[int, int]]
"""Half-open ranges of chunk numbers."""


@dataclass(frozen=True)
class Frame:
    """Consecutive chunks of a blob in one message.

    Attributes:
        transfer: The number that identifies the blob.
        index: The number of the first chunk.
        count: The number of all chunks of the blob.
        offset: The byte of the blob at which the data begin.
        data: The bytes of the chunks.
        report: Whether the sender waits for a report of what has arrived.
    """

    transfer: int
    index: int
    count: int
    offset: int
    data: bytes | memoryview
    report: bool = False

    def encode(self) -> bytes:
        """Return the frame as bytes: header and data."""
        position = (self.transfer, self.index, self.count, self.offset)
        fields = _FIELDS.pack(_MAGIC, _VERSION, _REPORT * self.report, *position, len(self.data), 0)
        return b"".join((fields, _CHECKSUM.pack(zlib.crc32(self.data, zlib.crc32(fields))), self.data))


def decode_frame(payload: bytes) -> Frame:
    """Return the frame in ``payload``; its data are a view, not a copy.

    Raises:
        ChunkError: The payload is not a frame, is truncated, or has a wrong checksum.
    """
    if len(payload) < HEADER_BYTES:
        raise ChunkError(f"{len(payload)} bytes cannot hold a chunk header of {HEADER_BYTES}")
    magic, version, flags, transfer, index, count, offset, length, reserved = _FIELDS.unpack_from(payload)
    if (magic, version, flags & ~_REPORT, reserved) != (_MAGIC, _VERSION, 0, 0):
        raise ChunkError(f"chunk begins {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}")
    data = memoryview(payload)[HEADER_BYTES:]
    if length != len(data) or index >= count:
        raise ChunkError(f"chunk {index} of {count} states {length} bytes and holds {len(data)}")
    (checksum,) = _CHECKSUM.unpack_from(payload, _FIELDS.size)
    if zlib.crc32(data, zlib.crc32(memoryview(payload)[: _FIELDS.size])) != checksum:
        raise ChunkError(f"chunk {index} of {count}: the checksum is wrong, the bytes were changed on the way")
    return Frame(transfer, index, count, offset, data, bool(flags))


def transfer_id(digest: str) -> int:
    """Return the number that marks the chunks of a blob: the first 8 bytes of its digest."""
    return int(digest[:16], 16)


def chunk_count(ref: BlobRef) -> int:
    """Return the number of chunks of a blob."""
    return -(-ref.size_bytes // ref.chunk_bytes)


def chunks_per_frame(ref: BlobRef) -> int:
    """Return how many chunks of a blob the largest frame holds."""
    return max(1, (FRAME_BYTES - HEADER_BYTES) // ref.chunk_bytes)


class Chunks:
    """A set of chunk numbers out of ``count``."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.present = 0
        self._flags = bytearray(count)

    def __contains__(self, index: int) -> bool:
        return bool(self._flags[index])

    @property
    def complete(self) -> bool:
        """Whether all chunks are present."""
        return self.present == self.count

    def add(self, start: int, stop: int) -> None:
        """Add the chunks ``start..stop``; some of them may be present already."""
        self.present += self._flags.count(0, start, stop)
        self._flags[start:stop] = b"\1" * (stop - start)

    def missing(self, start: int = 0, stop: int | None = None, limit: int = MAX_RANGES) -> tuple[tuple[int, int], ...]:
        """Return the first ``limit`` half-open ranges of chunks within ``start..stop`` that are not present."""
        end = self.count if stop is None else stop
        ranges = list[tuple[int, int]]()
        position = start
        while len(ranges) < limit:
            first = self._flags.find(0, position, end)
            if first < 0:
                break
            position = self._flags.find(1, first, end)
            if position < 0:
                position = end
            ranges.append((first, position))
        return tuple(ranges)


def flags_of(ranges: Spans, count: int) -> bytearray:
    """Return one byte for each of ``count`` chunks: 1 in ``ranges``, 0 elsewhere.

    Raises:
        ChunkError: A range is not within 0..count.
    """
    flags = bytearray(count)
    for start, stop in ranges:
        if not 0 <= start < stop <= count:
            raise ChunkError(f"range {start}..{stop} of a blob with {count} chunks")
        flags[start:stop] = b"\1" * (stop - start)
    return flags


class Outgoing:
    """A blob to be sent: a memory-mapped file, or bytes."""

    def __init__(self, ref: BlobRef, data: memoryview) -> None:
        self.ref = ref
        self.count = chunk_count(ref)
        self.data = data
        self._transfer = transfer_id(ref.digest)

    @classmethod
    def of(cls, data: bytes, chunk_bytes: int = CHUNK_BYTES) -> Outgoing:
        """Return a blob of these bytes."""
        digest = hashlib.sha256(data).hexdigest()
        return cls(BlobRef(digest=digest, size_bytes=len(data), chunk_bytes=chunk_bytes), memoryview(data))

    @classmethod
    def open(cls, path: Path, digest: str, chunk_bytes: int = CHUNK_BYTES) -> Outgoing:
        """Return a blob whose bytes are a file, which is memory-mapped.

        Raises:
            StateError: The file is missing or empty.
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
        """The bytes of all frames of the blob together, each as large as possible."""
        return self.ref.size_bytes + -(-self.count // chunks_per_frame(self.ref)) * HEADER_BYTES

    def frame(self, start: int, stop: int | None = None, *, report: bool = False) -> bytes:
        """Return the frame of the chunks ``start..stop`` (None: one chunk); ``report`` asks for what has arrived."""
        offset = start * self.ref.chunk_bytes
        if stop is None:
            stop = start + 1
        end = stop * self.ref.chunk_bytes
        return Frame(self._transfer, start, self.count, offset, self.data[offset:end], report).encode()


class Incoming:
    """A blob that is assembled in a file, survives a restart, and counts only when its SHA-256 is right.

    The file gets its full length before the first chunk (sparse), so the caller must have accepted the size.
    """

    def __init__(self, ref: BlobRef, folder: Path) -> None:
        """Make the file of the blob in ``folder``, or resume the one that an earlier process left there.

        Raises:
            OSError: The file cannot be opened or gets no space.
        """
        self.ref = ref
        self.chunks = Chunks(chunk_count(ref))
        self.path = folder / f"{ref.digest}.part"
        self._notes = folder / f"{ref.digest}.chunks"
        self._digest = hashlib.sha256()
        self._hashed = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        self._saved = self.chunks.present
        self.is_open = True
        """Whether the blob is still being assembled: not finished, closed or discarded."""

        self._file: int | None = None
        """The descriptor of the file; None while the file is not needed."""

        os.ftruncate(self._descriptor(), ref.size_bytes)

    def add(self, frame: Frame) -> int:
        """Store the chunks of a frame that were not present, and return how many chunks the frame holds.

        Raises:
            ChunkError: The frame does not belong to this blob, or the disk is full; it can then be sent again.
        """
        # 1. The frame has to be of this blob, and as large as its chunks are.
        size = self.ref.chunk_bytes
        count = -(-len(frame.data) // size)
        expected = min(count * size, self.ref.size_bytes - frame.index * size)
        if (frame.transfer, frame.count) != (transfer_id(self.ref.digest), self.chunks.count):
            raise ChunkError(f"chunk of another blob: count {frame.count}, expected {self.chunks.count}")
        if frame.offset != frame.index * size or len(frame.data) != expected or not count:
            raise ChunkError(f"chunk {frame.index}: {len(frame.data)} bytes at {frame.offset}, expected {expected}")
        # 2. Chunks that are present are never written again: they may have been hashed.
        for start, stop in self.chunks.missing(frame.index, frame.index + count, count):
            self._store(start, stop, frame.data[(start - frame.index) * size : (stop - frame.index) * size])
        if (self.chunks.present - self._saved) * size >= _SAVE_BYTES:
            self.save_notes()
        return count

    def _store(self, start: int, stop: int, data: bytes | memoryview) -> None:
        """Write the chunks ``start..stop``, none of which is present, to the file."""
        try:
            if os.pwrite(self._descriptor(), data, start * self.ref.chunk_bytes) != len(data):
                raise OSError(errno.ENOSPC, "no space left for all of it")
        except OSError as error:
            raise ChunkError(f"chunk {start} cannot be stored in {self.path.parent}: {cause(error)}") from error
        self.chunks.add(start, stop)
        if start == self._hashed:  # in order: hash while the bytes are in the cache
            self._digest.update(data)
            self._hashed = stop

    def finish(self, path: Path, *, durable: bool) -> None:
        """Check the whole blob and move it to ``path``; with ``durable`` its content is synced to the disk first.

        Raises:
            ChunkError: The bytes do not match the digest; all of them are discarded, to be sent again.
        """
        for position in range(self._hashed * self.ref.chunk_bytes, self.ref.size_bytes, _READ_BYTES):
            self._digest.update(os.pread(self._descriptor(), _READ_BYTES, position))
        digest = self._digest.hexdigest()
        if digest != self.ref.digest:
            self.discard()
            raise ChunkError(
                f"blob {self.ref.digest[:16]}: its SHA-256 begins {digest[:16]}; all of it is requested again"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        if durable:
            sync(self._descriptor())
        self._end()
        self.path.replace(path)
        self._notes.unlink(missing_ok=True)

    def save_notes(self) -> None:
        """Write which chunks are present, for a restart; without a sync, because the hash shows damage."""
        self._saved = self.chunks.present
        notes = {"chunk_bytes": self.ref.chunk_bytes, "missing": self.chunks.missing(limit=self.chunks.count)}
        with contextlib.suppress(OSError):  # a full disk: the notes only save sending chunks again
            write_atomic(self._notes, json.dumps(notes).encode(), durable=False)

    def close(self) -> None:
        """Stop assembling the blob for now; the chunks that have arrived stay on disk."""
        if self.is_open:
            self.save_notes()
            self._end()

    def discard(self) -> None:
        """Stop assembling the blob, and remove everything that has arrived."""
        self._end()
        self.path.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)

    def release_file(self) -> None:
        """Close the file until the next chunk arrives; nothing else changes."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _descriptor(self) -> int:
        """Return the descriptor of the file, which is opened if it is not open.

        Raises:
            OSError: The partial file cannot be opened, or the blob is finished, closed or discarded.
        """
        if not self.is_open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self.path))
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        return self._file

    def _end(self) -> None:
        """Close the file for good."""
        self.release_file()
        self.is_open = False

    def _resume(self) -> None:
        """Continue with the chunks that an earlier process has stored, if both of its files are intact."""
        missing = self._noted_missing()
        if missing is None:
            self.path.unlink(missing_ok=True)
            self._notes.unlink(missing_ok=True)
            return
        count = self.chunks.count
        start = missing.find(0)
        while start >= 0:
            stop = missing.find(1, start)
            if stop < 0:
                stop = count
            self.chunks.add(start, stop)
            start = missing.find(0, stop)

    def _noted_missing(self) -> bytearray | None:
        """Return the flags of the chunks that the notes of an earlier process call missing; None: not to be used."""
        try:
            notes = json.loads(read_regular(self._notes))
            missing = flags_of(((start, stop) for start, stop in notes["missing"]), self.chunks.count)
            is_usable = notes["chunk_bytes"] == self.ref.chunk_bytes and self.path.stat().st_size == self.ref.size_bytes
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ChunkError):
            return None
        return missing if is_usable else None


_NAME = re.compile(r"[0-9a-f]{64}")
"""The pattern of the names of blobs in a cache."""

MOST_BLOBS = 256
"""The most blobs in a cache: a run brings one for each round, and tiny models would fill a disk with files."""


class BlobCache:
    """A folder of blobs, bounded by bytes and number; their content is checked when read, so nothing is synced."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._partial = folder / "partial"
        self._under_way: list[Incoming] = []

    def path(self, digest: str) -> Path:
        """Return the path at which the blob is, or would be."""
        return self.folder / digest

    def has(self, digest: str) -> bool:
        """Return whether the blob is present."""
        return self.path(digest).is_file()

    def missing_bytes(self, ref: BlobRef) -> int:
        """Return the bytes of the disk that the blob takes beyond those of its partial file; 0 if it is present."""
        if self.has(ref.digest):
            return 0
        return max(0, ref.size_bytes - size_of(self._partial / f"{ref.digest}.part"))

    def read(self, digest: str) -> memoryview:
        """Return the blob's bytes as a memory map; a damaged file is removed, so that it is fetched again.

        Raises:
            StateError: The blob is missing, or was damaged.
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
        """Begin or continue to assemble a blob."""
        incoming = Incoming(ref, self._partial)
        self._under_way.append(incoming)
        self.make_room(0)  # it has its full length already
        return incoming

    def finish(self, incoming: Incoming) -> Path:
        """Check a complete blob, add it to the cache, and return its path.

        Raises:
            ChunkError: The content does not match the digest; everything that had arrived is discarded.
        """
        path = self.path(incoming.ref.digest)
        incoming.finish(path, durable=False)
        return path

    def make_room(self, size_bytes: int) -> None:
        """Remove the least recently used blobs, and abandoned partial ones, until ``size_bytes`` more fit.

        At most `MOST_BLOBS` stay, counting those that are being assembled.
        """
        idle = self._idle()
        surplus = max(0, len(idle) + len(self._under_way) - MOST_BLOBS)
        for path in idle[:surplus]:
            _remove_file(path)
        idle = idle[surplus:]
        used = sum(map(_length, idle)) + sum(incoming.ref.size_bytes for incoming in self._under_way)
        _remove(idle, used + size_bytes - self.limit_bytes, _length)

    def free(self, size_bytes: int, wanted: Collection[str]) -> int:
        """Remove the least recently used blobs until the disk has ``size_bytes`` more, and return the bytes removed.

        Blobs whose digests are in ``wanted`` stay.
        """
        return _remove([path for path in self._idle() if path.stem not in wanted], size_bytes, size_of)

    def _idle(self) -> list[Path]:
        """Return the files of blobs, also of partial ones that are not under way, the least recently used first."""
        self._under_way = [incoming for incoming in self._under_way if incoming.is_open]
        held = {incoming.path for incoming in self._under_way}
        whole = (path for path in self.folder.glob("*") if _NAME.fullmatch(path.name))
        return oldest_first(path for path in (*whole, *self._partial.glob("*.part")) if path not in held)


def _length(path: Path) -> int:
    return path.stat().st_size


def _remove(files: Iterable[Path], least_bytes: int, size: Callable[[Path], int]) -> int:
    """Remove files one after another until ``least_bytes`` are removed, or all, and return the bytes removed."""
    removed_bytes = 0
    for path in files:
        if removed_bytes >= least_bytes:
            break
        removed_bytes += size(path)
        _remove_file(path)
    return removed_bytes


def _remove_file(path: Path) -> None:
    """Remove the file of a blob, and the notes of one that is partial."""
    path.unlink(missing_ok=True)
    path.with_suffix(".chunks").unlink(missing_ok=True)
