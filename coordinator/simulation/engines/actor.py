"""A worker on some machine of a cluster: it is told everything, answers jobs, and has no place on any disk."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent import __version__
from edge_agent.agent.local_state import ClientStateFiles, merge, split
from edge_agent.data.partition import Division
from edge_agent.task import Tensors
from edge_agent.wire.messages import Job
from edge_agent.wire.tensors import decode, pieces

from ..duties import Shared, answer
from .base import received
from .beginning import shared_by

Bytes = np.ndarray
"""Bytes (n,) uint8: arrays are what Ray hands on without copying them."""


def as_bytes(content: Sequence[bytes | memoryview]) -> Bytes:
    """The pieces, joined."""
    return np.frombuffer(b"".join(content), np.uint8)


class Carried(ClientStateFiles):
    """What a client keeps, brought along with its job and taken back with its answer."""

    def __init__(self, both: Bytes) -> None:
        super().__init__(Path(os.devnull))
        self._both = both
        self.round: int | None = None
        self.after: Bytes = as_bytes([])

    def before(self, round_number: int) -> tuple[Tensors, Tensors]:  # noqa: ARG002 - chosen by who has the files
        """What was brought."""
        return split(decode(self._both.data))

    def write(self, round_number: int, personal: Tensors, memory: Tensors) -> None:
        """Hold it until it is taken back."""
        self.round, self.after = round_number, as_bytes(pieces(merge(personal, memory)))


class Actor:
    """One torch thread, one model object, the pools mapped from the store of the machine that it is on."""

    def __init__(self, words: str, pools: Bytes) -> None:
        told = json.loads(words)
        division = Division.model_validate(told["division"])
        self._shared: Shared = shared_by(told, pools.data, division, Path(os.devnull))

    def ready(self) -> dict[str, Any]:
        """Who this is."""
        import torch

        return {"pid": os.getpid(), "software": __version__, "torch": torch.__version__}

    def work(self, client: str, job: str, kept: Bytes, *blobs: Bytes) -> tuple[str, Bytes, Bytes]:
        """(what the client says, its update, what it keeps), the first as JSON."""
        carried = Carried(kept)
        shared = replace(self._shared, carried=carried)
        tensors = received([blob.data for blob in blobs])
        found = answer(shared, client, Job.model_validate_json(job), tensors)
        words = {
            "type": found.said.type,
            "said": found.said.model_dump_json(),
            "seconds": found.seconds,
            "kept_round": carried.round,
        }
        return json.dumps(words), as_bytes(found.content), carried.after
