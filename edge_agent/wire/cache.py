"""Blobs on disk by content: the file name is the SHA-256, checked when read, oldest dropped first."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from pathlib import Path

from ..errors import StateError, cause
from ..store import write_atomic
from .chunks import Incoming
from .messages import BlobRef

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
