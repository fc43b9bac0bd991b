"""Blobs of many small chunks."""

from __future__ import annotations

import numpy as np

from edge_agent.wire.chunks import Frame, Outgoing, decode_frame

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
