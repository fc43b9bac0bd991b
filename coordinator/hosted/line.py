"""What the coordinator and a process of its own say to each other: topics with payloads, over two pipes."""

from __future__ import annotations

import struct
import threading
from typing import IO

_HEADER = struct.Struct("<HI")

AT_WORK = "at work"
"""Topic of what only the owner hears: which client is at work, and at what job; null when it is done."""


class Line:
    """One end. `send` may be called from several threads, `receive` from one."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._sending = threading.Lock()

    def send(self, topic: str, payload: bytes) -> None:
        """Say something; waits until the other end takes it.

        Raises:
            OSError: nobody is there any more.
        """
        name = topic.encode()
        with self._sending:
            self._outgoing.write(b"".join((_HEADER.pack(len(name), len(payload)), name, payload)))
            self._outgoing.flush()

    def receive(self) -> tuple[str, bytes]:
        """The next topic and payload; waits for them.

        Raises:
            EOFError: the other end is gone.
        """
        name, size = _HEADER.unpack(self._exactly(_HEADER.size))
        return self._exactly(name).decode(), self._exactly(size)

    def close(self) -> None:
        """Hang up."""
        for end in (self._outgoing, self._incoming):
            try:
                end.close()
            except OSError:  # what was still to be written goes nowhere
                continue

    def _exactly(self, size: int) -> bytes:
        found = self._incoming.read(size) if size else b""
        if len(found) < size:
            raise EOFError("the other end is gone")
        return found
