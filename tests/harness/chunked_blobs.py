"""Blobs of many small chunks."""

from __future__ import annotations

import numpy as np

from edge_agent.wire.blobs.chunks import Frame, Outgoing, decode_frame

CHUNK = 64
"""The smallest chunk that a `BlobRef` allows, so that short blobs have many."""


def blob(size: int, seed: int = 0, chunk_bytes: int = CHUNK) -> tuple[bytes, Outgoing]:
    data = np.random.default_rng(seed).bytes(size)
    return data, Outgoing.of(data, chunk_bytes)


def blob_of(chunks: int) -> Outgoing:
    """So many chunks, all of them full."""
    return blob(chunks * CHUNK, seed=chunks)[1]


def frames_of(outgoing: Outgoing) -> list[Frame]:
    return [decode_frame(outgoing.frame(index)) for index in range(outgoing.count)]


def ranges_of(numbers: set[int]) -> list[tuple[int, int]]:
    """Half-open ranges of a set, found number by number."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found
