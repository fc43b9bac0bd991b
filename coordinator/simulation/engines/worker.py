"""A worker process of a simulation: one torch thread, one model object, the pools mapped from shared memory."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Sequence
from pathlib import Path

from edge_agent.data.partition import Division
from edge_agent.storage import without_syncs
from edge_agent.wire.messages import Job

from ...processes.pipe import Frame, Pipe, SharedBuffer
from ...processes.worker_main import listen
from ..duties import Shared, answer
from .base import received
from .beginning import shared_by


def serve(pipe: Pipe) -> None:
    """The child process: report that it is ready, then run one job after another."""
    frames = queue.SimpleQueue[Frame]()
    listen(pipe, frames.put)
    with without_syncs():
        shared = _begin(frames.get())
        pipe.send("ready", json.dumps({"ready": os.getpid()}).encode())
        while True:
            _work(shared, frames.get(), pipe)


def _begin(frame: Frame) -> Shared:
    words, (memory,) = json.loads(frame.payload), _mapped(frame.buffers)
    folder = Path(words["folder"])
    return shared_by(words, memory, Division.read(folder / words["partition"]), folder / words["clients"])


def _work(shared: Shared, frame: Frame, pipe: Pipe) -> None:
    words = json.loads(frame.payload)
    job = Job.model_validate_json(words["job"])
    found = answer(shared, words["client"], job, received(_mapped(frame.buffers)))
    area = [SharedBuffer.of(*found.content)] if found.content else []
    said = {"type": found.said.type, "said": found.said.model_dump_json(), "seconds": found.seconds}
    pipe.send("done", json.dumps(said).encode(), area)
    for one in area:
        one.close()


def _mapped(buffers: Sequence[SharedBuffer]) -> list[memoryview]:
    views = [buffer.map() for buffer in buffers]
    for buffer in buffers:
        buffer.close()
    return views
