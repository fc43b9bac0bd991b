"""A worker process, started as ``python -m coordinator.simulation.engines.worker DESCRIPTOR``.

One torch thread, one model object, the pools mapped. Whoever started it holds its standard input; when that ends,
because its owner was killed, say, the worker ends in the middle of whatever it does: nobody would hear of it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_agent.data.partition import Division
from edge_agent.storage import without_syncs
from edge_agent.wire.messages import Job

from ...processes.launch import heed_no_signals
from ..duties import Shared, answer
from .areas import Area
from .base import received
from .beginning import shared_by
from .line import Line


def main() -> None:
    """Say "ready", then answer one job after another until the owner hangs up."""
    heed_no_signals()
    threading.Thread(target=_end_with_owner, daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    line = Line(socket.socket(fileno=int(sys.argv[1])))
    with without_syncs():
        _serve(line)


def _serve(line: Line) -> None:
    try:
        shared = _begin(*line.receive())
        line.send({"ready": os.getpid()})
        while True:
            _work(shared, line)
    except (EOFError, BrokenPipeError):
        return


def _end_with_owner() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


def _begin(words: dict[str, Any], areas: list[Area]) -> Shared:
    folder, (pool,) = Path(words["folder"]), areas
    memory = pool.map()
    pool.close()
    return shared_by(words, memory, Division.read(folder / words["partition"]), folder / words["clients"])


def _work(shared: Shared, line: Line) -> None:
    words, areas = line.receive()
    job = Job.model_validate_json(words["job"])
    found = answer(shared, words["client"], job, received(_mapped(areas)))
    area = [Area.of(*found.content)] if found.content else []
    said = {"type": found.said.type, "said": found.said.model_dump_json(), "seconds": found.seconds}
    line.send(said, area)
    for one in area:
        one.close()


def _mapped(areas: Sequence[Area]) -> list[memoryview]:
    views = [area.map() for area in areas]
    for area in areas:
        area.close()
    return views


if __name__ == "__main__":
    main()
