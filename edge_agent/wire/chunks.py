"""Blobs in pieces: the chunk frame, which chunks are there, and how a blob is read and assembled.

A frame is a fixed 40-byte little-endian header and raw bytes, with a checksum over both; it never exceeds the smallest
payload limit of the brokers and cloud services we know of. Chunks may come in any order, twice, or never; what counts
is the SHA-256 of the whole, which is also the blob's name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ChunkError, StateError, cause
from ..storage import sync, sync_folder, write_atomic
from .messages import MAX_RANGES, BlobRef

FRAME_BYTES = 61_440
"""Header and data of one chunk: 60 KiB, below every limit we know (Azure's 64 KiB is the lowest)."""

_FIELDS = struct.Struct("<2sBBQIIQII")  # magic, version, flags, transfer, index, count, offset, length, reserved
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
CHUNK_BYTES = FRAME_BYTES - HEADER_BYTES
_MAGIC, _VERSION = b"HW", 1
_SAVE_EVERY = 64  # chunks between two notes of what has arrived; at worst so many are sent again after a crash


@dataclass(frozen=True)
class Frame:
    """One chunk: number ``index`` of ``count``, the bytes from ``offset`` on; ``transfer`` says of which blob."""

    transfer: int
    index: int
    count: int
    offset: int
    data: bytes | memoryview

    def encode(self) -> bytes:
        """Header and data."""
        place = (self.transfer, self.index, self.count, self.offset)
        fields = _FIELDS.pack(_MAGIC, _VERSION, 0, *place, len(self.data), 0)
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
        """Whether all are there."""
        return self.present == self.count

    def add(self, index: int) -> bool:
        """Note one; False when it was there already."""
        if self._flags[index]:
            return False
        self._flags[index] = 1
        self.present += 1
        return True

    def missing(self, below: int | None = None, limit: int = MAX_RANGES) -> tuple[tuple[int, int], ...]:
        """The first ``limit`` half-open ranges of chunks that are not there."""
        end, ranges, position = self.count if below is None else below, list[tuple[int, int]](), 0
        while len(ranges) < limit and (start := self._flags.find(0, position, end)) >= 0:
            stop = self._flags.find(1, start, end)
            position = end if stop < 0 else stop
            ranges.append((start, position))
        return tuple(ranges)

    def prefix(self) -> int:
        """Number of chunks that are there without a gap from the first on."""
        gap = self._flags.find(0)
        return self.count if gap < 0 else gap

    def highest(self) -> int:
        """One more than the highest chunk that is there."""
        return self._flags.rfind(1) + 1


def expand(ranges: Iterable[tuple[int, int]], count: int) -> Iterator[int]:
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
        self.ref, self.count, self._data = ref, chunk_count(ref), data
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
            StateError: the file is not there or empty.
        """
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise StateError(f"{path}: blob cannot be opened: {cause(error)}") from error
        return cls(BlobRef(digest=digest, size_bytes=len(mapped), chunk_bytes=chunk_bytes), memoryview(mapped))

    @property
    def data(self) -> memoryview:
        """All of its bytes; not a copy."""
        return self._data

    @property
    def wire_bytes(self) -> int:
        """Bytes of all its frames."""
        return self.ref.size_bytes + self.count * HEADER_BYTES

    def frame(self, index: int) -> bytes:
        """Chunk number ``index``, ready to publish."""
        offset = index * self.ref.chunk_bytes
        data = self._data[offset : offset + self.ref.chunk_bytes]
        return Frame(self._transfer, index, self.count, offset, data).encode()


class Incoming:
    """A blob being put together in a file; survives a restart, and is believed only when its SHA-256 is right.

    The file gets its full length before the first chunk (sparse), so the caller must have agreed to the size.
    """

    def __init__(self, ref: BlobRef, folder: Path) -> None:
        self.ref, self.chunks = ref, Chunks(chunk_count(ref))
        self.received_bytes = 0
        self._path, self._notes = folder / f"{ref.digest}.part", folder / f"{ref.digest}.chunks"
        self._digest, self._hashed = hashlib.sha256(), 0
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, ref.size_bytes)

    @property
    def path(self) -> Path:
        """Where it is put together."""
        return self._path

    @property
    def is_open(self) -> bool:
        """Whether it is still being put together here: not finished, closed or discarded."""
        return self._file >= 0

    def add(self, frame: Frame) -> bool:
        """Keep one chunk; False when it was there already.

        Raises:
            ChunkError: the frame does not belong to this blob, or the disk is full; then it can be sent again.
        """
        self._check(frame)
        if frame.index in self.chunks:
            return False
        self._write(frame)
        self.chunks.add(frame.index)
        self.received_bytes += len(frame.data)
        if frame.index == self._hashed:  # in order: hash while the bytes are in the cache
            self._digest.update(frame.data)
            self._hashed += 1
        if self.chunks.present % _SAVE_EVERY == 0:
            self.save_notes()
        return True

    def finish(self, place: Path, *, durable: bool, is_final: bool = True) -> None:
        """Check the whole blob and move it to ``place``. ``is_final``: it stays there, and the move is to last, too.

        Raises:
            ChunkError: the bytes are not those that the digest names; everything is forgotten, to be sent again.
        """
        self._hash_rest()
        if self._digest.hexdigest() != self.ref.digest:
            self.discard()
            found = self._digest.hexdigest()[:16]
            raise ChunkError(f"blob {self.ref.digest[:16]}: SHA-256 begins {found}; everything is asked for again")
        place.parent.mkdir(parents=True, exist_ok=True)
        if durable:
            sync(self._file)
        self._close_file()
        self._path.replace(place)
        self._notes.unlink(missing_ok=True)
        if durable and is_final:
            sync_folder(place.parent)

    def save_notes(self) -> None:
        """Note on disk which chunks are there, for a restart. Damage shows in the hash, so no sync is needed."""
        notes = {"chunk_bytes": self.ref.chunk_bytes, "missing": self.chunks.missing(limit=self.chunks.count)}
        with contextlib.suppress(OSError):  # a full disk: the notes only save sending chunks again
            write_atomic(self._notes, json.dumps(notes).encode(), durable=False)

    def close(self) -> None:
        """Stop for now; what has arrived stays."""
        if self.is_open:
            self.save_notes()
            self._close_file()

    def discard(self) -> None:
        """Forget everything that has arrived."""
        self._close_file()
        self._path.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self.is_open:
            os.close(self._file)
            self._file = -1

    def _check(self, frame: Frame) -> None:
        ref = self.ref
        expected = min(ref.chunk_bytes, ref.size_bytes - frame.index * ref.chunk_bytes)
        if (frame.transfer, frame.count) != (transfer_id(ref.digest), self.chunks.count):
            raise ChunkError(f"chunk of another blob: count {frame.count}, expected {self.chunks.count}")
        if frame.offset != frame.index * ref.chunk_bytes or len(frame.data) != expected:
            raise ChunkError(f"chunk {frame.index}: {len(frame.data)} bytes at {frame.offset}, expected {expected}")

    def _write(self, frame: Frame) -> None:
        try:
            written = os.pwrite(self._file, frame.data, frame.offset)
        except OSError as error:
            raise ChunkError(f"chunk {frame.index} cannot be kept in {self._path.parent}: {cause(error)}") from error
        if written != len(frame.data):
            full = OSError(errno.ENOSPC, "no space left for all of it")
            raise ChunkError(f"chunk {frame.index} cannot be kept in {self._path.parent}: {cause(full)}") from full

    def _resume(self) -> None:
        """Take over what an earlier process left, where both of its files are whole."""
        try:
            notes = json.loads(self._notes.read_bytes())
            missing = set(expand(((a, b) for a, b in notes["missing"]), self.chunks.count))
            usable = notes["chunk_bytes"] == self.ref.chunk_bytes and self._path.stat().st_size == self.ref.size_bytes
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ChunkError):
            usable, missing = False, set[int]()
        if not usable:
            self._path.unlink(missing_ok=True)
            self._notes.unlink(missing_ok=True)
            return
        for index in range(self.chunks.count):
            if index not in missing:
                self.chunks.add(index)

    def _hash_rest(self) -> None:
        size = self.ref.chunk_bytes
        for index in range(self._hashed, self.chunks.count):
            self._digest.update(os.pread(self._file, size, index * size))
        self._hashed = self.chunks.count


_NAME = re.compile(r"[0-9a-f]{64}")


class BlobCache:
    """A folder of blobs, bounded by bytes. ``durable`` blobs survive a power cut; a cache does not need that."""

    def __init__(self, folder: Path, limit_bytes: int, *, durable: bool = False) -> None:
        self.folder, self.limit_bytes, self.durable = folder, limit_bytes, durable
        self._partial = folder / "partial"
        self._under_way: list[Incoming] = []

    def path(self, digest: str) -> Path:
        """Where the blob lies, or would lie."""
        return self.folder / digest

    def has(self, digest: str) -> bool:
        """Whether the blob is there (its content is checked when read)."""
        return self.path(digest).is_file()

    def put(self, data: bytes) -> str:
        """Keep ``data``; returns its digest."""
        digest = hashlib.sha256(data).hexdigest()
        if not self.has(digest):
            self.make_room(len(data))
            write_atomic(self.path(digest), data, durable=self.durable)
        return digest

    def read(self, digest: str) -> memoryview:
        """The blob's bytes, mapped; a damaged file is removed, so that it is fetched again.

        Raises:
            StateError: it is not there, or was damaged.
        """
        path = self.path(digest)
        try:
            data = _mapped(path)
        except OSError as error:
            raise StateError(f"blob {digest[:16]} is not in {self.folder}: {cause(error)}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            path.unlink(missing_ok=True)
            raise StateError(f"blob {digest[:16]} in {self.folder} was damaged and has been removed; fetch it again")
        os.utime(path)  # most recently used
        return data

    def receive(self, ref: BlobRef) -> Incoming:
        """Begin, or go on, putting a blob together."""
        incoming = Incoming(ref, self._partial)
        self._under_way.append(incoming)
        self.make_room(0)  # it has its full length already
        return incoming

    def finish(self, incoming: Incoming) -> Path:
        """Check a complete blob and keep it.

        Raises:
            ChunkError: wrong content; everything that had arrived is forgotten.
        """
        place = self.path(incoming.ref.digest)
        incoming.finish(place, durable=self.durable)
        return place

    def make_room(self, size_bytes: int) -> None:
        """Drop the least recently used blobs until ``size_bytes`` more fit; begun ones that nobody goes on with too."""
        self._under_way = [incoming for incoming in self._under_way if incoming.is_open]
        held = {incoming.path for incoming in self._under_way}
        idle = [path for path in self._files() if path not in held]
        used = sum(path.stat().st_size for path in idle) + sum(one.ref.size_bytes for one in self._under_way)
        for path in sorted(idle, key=lambda path: path.stat().st_mtime):
            if used + size_bytes <= self.limit_bytes:
                return
            used -= path.stat().st_size
            path.unlink()

    def _files(self) -> list[Path]:
        whole = [path for path in self.folder.glob("*") if _NAME.fullmatch(path.name)]
        return [*whole, *self._partial.glob("*.part")]


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
