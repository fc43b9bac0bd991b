"""Memory that processes share: written once by one of them, mapped by all, and gone with the last of them.

It has no name, only a file descriptor that is handed on, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile

Piece = bytes | memoryview


class Area:
    """Bytes in shared memory, behind a descriptor that belongs to this object and goes with it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def of(cls, *pieces: Piece) -> Area:
        """A new area that holds the pieces, one after another.

        Raises:
            OSError: there is not enough memory.
        """
        area = cls(_anonymous())
        try:
            for piece in pieces:
                _write(area.descriptor, memoryview(piece).cast("B"))
        except BaseException:
            area.close()
            raise
        return area

    def map(self) -> memoryview:
        """All bytes, read-only and not copied; they stay for as long as the view is used, whatever is closed."""
        size = os.fstat(self.descriptor).st_size
        return memoryview(mmap.mmap(self.descriptor, size, access=mmap.ACCESS_READ) if size else b"")

    def close(self) -> None:
        """Let go of the descriptor; views and other processes keep what they have."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headwater", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # no name either; the system decides whether it ever reaches a disk
        return os.dup(file.fileno())


def _write(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]
