"""The process of hosted clients: ``python -m coordinator.hosted.process``. It begins as it is told, then takes part.

Its owner holds its standard input. When that ends, because the owner was killed, say, the process ends in the middle of
whatever it does: what it has kept on disk is whole, and nobody would hear of the rest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable

from edge_agent.config import AgentConfig
from edge_agent.storage import folder_lock, sweep
from edge_agent.wire.memory import MemoryTransport
from edge_agent.wire.messages import Job
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message
from edge_agent.worker import ThreadWorker

from ..processes.launch import heed_no_signals
from .crew import Crew
from .line import AT_WORK, Line


def main() -> None:
    """Take part until the owner hangs up."""
    heed_no_signals()
    words = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a method of somebody prints is no message
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    line = Line(sys.stdin.buffer, words)
    try:
        _, told = line.receive()
        configs = [AgentConfig.model_validate(one) for one in json.loads(told)]
        with contextlib.ExitStack() as stack:
            for config in configs:
                stack.enter_context(folder_lock(config.state, f"hosted client {config.id}"))
                sweep(config.state)
            _take_part(configs, line)
    except (EOFError, BrokenPipeError):
        return


def _take_part(configs: list[AgentConfig], line: Line) -> None:
    stir = threading.Event()

    def note(client: str, job: Job | None) -> None:
        what = None if job is None else [job.run, job.round, job.purpose]
        line.send(AT_WORK, json.dumps([client, what]).encode())

    crew = Crew(configs, ThreadWorker(stir.set), note=note)
    gate = crew.broker.transport()
    gate.subscribe(*Topics(configs[0].federation).for_coordinator())
    gate.start()
    threading.Thread(target=_listen, args=(line, crew, stir), name="listen", daemon=True).start()
    crew.start()
    while True:
        stir.clear()
        while crew.step():
            _pass_on(gate, line)
        _pass_on(gate, line)
        stir.wait(crew.idle_s())


def _listen(line: Line, crew: Crew, stir: threading.Event) -> None:
    try:
        while True:
            crew.broker.route(*line.receive())
            stir.set()
    finally:
        os._exit(0)


def _pass_on(gate: MemoryTransport, line: Line) -> None:
    """Everything that the agents have said so far."""
    for message in _messages(gate):
        line.send(message.topic, message.payload)


def _messages(gate: MemoryTransport) -> Iterable[Message]:
    while (event := gate.receive(0)) is not None:
        if isinstance(event, Message):
            yield event


if __name__ == "__main__":
    main()
