"""The framed pipe between the coordinator and a child process: topics with payloads, and shared memory by descriptor.

Both ends are processes of this program on one machine. Arrays that several processes read are sent as descriptors of
shared memory; their bytes do not pass through the socket.
"""

from __future__ import annotations

import mmap
import os
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

_HEADER = struct.Struct("<HI")
MAX_BUFFERS = 8

_BLOCK_BYTES = 64 << 20
"""Bytes that are written to a buffer at once."""


class SharedBuffer:
    """Bytes in shared memory, behind a file descriptor that belongs to this object and is closed with it.

    The memory has no name, so nothing is left behind however the processes end.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def of(cls, *pieces: bytes | memoryview, on_disk: bool = False) -> SharedBuffer:
        """Return a new buffer that holds the pieces, one after another.

        Args:
            pieces: The bytes.
            on_disk: Whether they are in a file without a name, and in memory only while they are used.

        Raises:
            OSError: There is not enough memory, or room on the disk.
        """
        from edge_agent.core.large_arrays import release  # brings numpy, which starting a broker does without

        if hasattr(os, "memfd_create") and not on_disk:
            buffer = cls(os.memfd_create("headwater", os.MFD_CLOEXEC))
        else:
            import tempfile

            with tempfile.TemporaryFile() as file:
                buffer = cls(os.dup(file.fileno()))
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while view:
                    view = view[os.write(buffer.descriptor, view[:_BLOCK_BYTES]) :]
                    release(view)  # pieces may be on disk themselves
        except BaseException:
            buffer.close()
            raise
        return buffer

    def map(self) -> memoryview:
        """Return all bytes, read-only and not copied; they stay as long as the view is used, also after `close`."""
        size = os.fstat(self.descriptor).st_size
        if size == 0:  # nothing cannot be mapped
            return memoryview(b"")
        return memoryview(mmap.mmap(self.descriptor, size, access=mmap.ACCESS_READ))

    def close(self) -> None:
        """Close the descriptor; views and other processes keep what they have mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


class Frame(NamedTuple):
    """One message: its topic, its payload, and buffers of shared memory, which belong to the receiver."""

    topic: str
    payload: bytes
    buffers: tuple[SharedBuffer, ...] = ()


class Pipe:
    """One end of the pipe. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end; the other end receives EOFError."""
        self._end.close()

    def send(self, topic: str, payload: bytes = b"", buffers: Sequence[SharedBuffer] = ()) -> None:
        """Send a frame; waits until the other end takes it. The sender may close the buffers afterwards.

        Raises:
            OSError: the other end is closed.
        """
        name = topic.encode()
        content = b"".join((_HEADER.pack(len(name), len(payload)), name, payload))
        with self._sending:
            sent = 0
            if buffers:
                sent = socket.send_fds(self._end, [content[: _HEADER.size]], [one.descriptor for one in buffers])
            self._end.sendall(memoryview(content)[sent:])

    def wait(self, timeout_s: float | None) -> bool:
        """Return whether a frame, or the end of the pipe, arrives within ``timeout_s`` seconds; None: wait for ever."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def receive(self) -> Frame:
        """Wait for the next frame, and return it.

        Raises:
            EOFError: The other end is closed.
            UnicodeDecodeError: The bytes that came are not a frame.
        """
        if hasattr(socket, "recv_fds"):
            first, descriptors, *_ = socket.recv_fds(self._end, _HEADER.size, MAX_BUFFERS)
        else:
            first = self._end.recv(_HEADER.size)
            descriptors = []
        buffers = tuple(SharedBuffer(descriptor) for descriptor in descriptors)
        if not first:
            raise EOFError("the other end of the pipe is closed")
        name, size = _HEADER.unpack(first + self._exactly(_HEADER.size - len(first)))
        return Frame(self._exactly(name).decode(), self._exactly(size), buffers)

    def _exactly(self, size: int) -> bytes:
        """Return so many bytes from the pipe.

        Raises:
            EOFError: The other end was closed before.
        """
        result = bytearray()
        while len(result) < size:
            piece = self._end.recv(min(size - len(result), 1 << 20))
            if not piece:
                raise EOFError("the other end of the pipe is closed")
            result += piece
        return bytes(result)


def owner_pipe() -> Pipe:
    """Return, in a child process, the pipe to the process that started it, which is standard input."""
    return Pipe(socket.socket(fileno=os.dup(0)))
