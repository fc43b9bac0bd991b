"""What coordinator and worker say to each other: a JSON object and descriptors of shared memory, over a socket pair.

Both ends are processes of ours on one machine. Bytes of tensors never pass through the socket.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from edge_agent.errors import StateError

from .areas import Area

_LENGTH = struct.Struct("<I")
MOST_AREAS = 8


class Line:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._end.fileno()

    def close(self) -> None:
        """Hang up."""
        self._end.close()

    def send(self, words: Mapping[str, Any], areas: Sequence[Area] = ()) -> None:
        """Say something and hand on areas, which the sender may close at once.

        Raises:
            OSError: nobody is there any more.
        """
        text = json.dumps(words, separators=(",", ":")).encode()
        first = _LENGTH.pack(len(text))
        descriptors = [area.descriptor for area in areas]
        sent = socket.send_fds(self._end, [first], descriptors) if descriptors else 0
        self._end.sendall(first[sent:] + text)

    def receive(self) -> tuple[dict[str, Any], list[Area]]:
        """The next thing that the other end says; waits for it.

        Raises:
            EOFError: the other end is gone.
            StateError: what came is no message.
        """
        first, descriptors, *_ = socket.recv_fds(self._end, _LENGTH.size, MOST_AREAS)
        areas = [Area(descriptor) for descriptor in descriptors]
        try:
            first += self._exactly(_LENGTH.size - len(first))
            words = json.loads(self._exactly(*_LENGTH.unpack(first)))
        except BaseException as error:
            for area in areas:
                area.close()
            if isinstance(error, ValueError):
                raise StateError(f"a process of the simulation says something that is no JSON ({error})") from error
            raise
        return words, areas

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            piece = self._end.recv(min(size - len(found), 1 << 20))
            if not piece:
                raise EOFError("the other end is gone")
            found += piece
        return bytes(found)
