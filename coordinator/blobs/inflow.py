"""What has arrived of updates by HTTP, between the threads that receive it and the coordinator's loop.

Threads hand over frames of whole chunks and wait while the loop has too many of them, so that memory is bounded and a
sender goes no faster than the disk. Nothing is handed over for an update that the loop does not expect (any more).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterator

from edge_agent.core.errors import ChunkError
from edge_agent.wire.blobs.chunks import Frame, chunk_count, transfer_id
from edge_agent.wire.messages.fields import BlobRef

from ..fleet.upload_urls import ArrivedPart, ExpectedUpload

PART_BYTES = 64 * 1024
"""The most bytes of a part."""

MOST_PARTS = 64
"""The parts that wait for the loop: 4 MiB."""

LOOK_S = 0.5
"""The seconds between two looks of a thread that waits at whether its update is still expected."""


def fits(ref: BlobRef) -> bool:
    """Return whether an update can come by HTTP: its agent chooses the size of its chunks, and whole ones are held."""
    return ref.chunk_bytes <= PART_BYTES


def part_bytes(ref: BlobRef) -> int:
    """Return the bytes of a part of an update that `fits`: whole chunks."""
    return PART_BYTES // ref.chunk_bytes * ref.chunk_bytes


def frame_of(ref: BlobRef, position: int, data: bytes) -> Frame:
    """Return bytes of an update, which begin with a chunk, in the form in which they would have come over MQTT."""
    index = position // ref.chunk_bytes
    return Frame(transfer_id(ref.digest), index, chunk_count(ref), position, data)


class Inflow:
    """The updates that are expected, and what has come of them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Expect nothing; ``wake`` is called in other threads when something has come."""
        self._wake = wake
        self._lock = threading.Lock()
        self._expected: dict[str, ExpectedUpload] = {}
        self._parts: queue.Queue[ArrivedPart] = queue.Queue(MOST_PARTS)
        self._is_awake = threading.Event()
        """Set while the loop is about to look: it is not woken again for each part."""

    # --- the loop -----------------------------------------------------------------------------------------------------

    def expect(self, upload: ExpectedUpload) -> None:
        """Take this update of its agent from now on, and none that was expected before."""
        with self._lock:
            self._expected[upload.agent] = upload

    def release(self, agent: str) -> ExpectedUpload | None:
        """Take nothing of an agent any more, and return what was expected of it."""
        with self._lock:
            return self._expected.pop(agent, None)

    def others_than(self, agents: Collection[str]) -> list[str]:
        """Return the agents of which something is expected, but for these."""
        with self._lock:
            return [agent for agent in self._expected if agent not in agents]

    def take_arrived(self) -> Iterator[ArrivedPart]:
        """Yield what has arrived, at most `MOST_PARTS` of it; for what comes later the loop is woken again."""
        self._is_awake.clear()
        for _ in range(MOST_PARTS):
            try:
                yield self._parts.get_nowait()
            except queue.Empty:
                return
        self._wake_once()

    # --- other threads ------------------------------------------------------------------------------------------------

    def expected_of(self, agent: str) -> ExpectedUpload | None:
        """Return the update that is expected of an agent now."""
        with self._lock:
            return self._expected.get(agent)

    def hand_over(self, part: ArrivedPart) -> None:
        """Hand a part to the loop, and wait while that has too many.

        Raises:
            ChunkError: Its update is not expected any more.
        """
        while self.expected_of(part.upload.agent) == part.upload:
            with contextlib.suppress(queue.Full):
                self._parts.put(part, timeout=LOOK_S)
                self._wake_once()
                return
        raise ChunkError("the update is not expected any more")

    def _wake_once(self) -> None:
        """Wake the loop, unless that was done since it has looked last."""
        if not self._is_awake.is_set():
            self._is_awake.set()
            self._wake()
