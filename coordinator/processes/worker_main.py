"""The entry of child processes: ``python -m coordinator.processes.worker_main MODULE:FUNCTION [ARGUMENT ...]``.

The function is called with the pipe to the owner, which is standard input, and the arguments. Standard output is part
of the log, so that a method that prints does not disturb the pipe. SIGINT and SIGTERM, which reach all processes of a
terminal or a systemd unit, are left to the owner, who ends its children itself.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from .pipe import Frame, Pipe, owner_pipe


def main() -> None:
    """Serve until the owner closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    memory_mb = os.environ.get("HEADWATER_MEMORY_MB")
    cpu_s = os.environ.get("HEADWATER_CPU_S")
    if memory_mb or cpu_s:  # limits that a process can set for itself only, see `supervisor.Limits`
        import resource

        if memory_mb:
            resource.setrlimit(resource.RLIMIT_DATA, (int(memory_mb) * 10**6,) * 2)
        if cpu_s:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s),) * 2)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    pipe = owner_pipe()
    module, _, name = sys.argv[1].partition(":")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        getattr(importlib.import_module(module), name)(pipe, *sys.argv[2:])


def listen(pipe: Pipe, on_frame: Callable[[Frame], None]) -> None:
    """Call ``on_frame`` for each frame in its own thread; this process exits at once when its owner does."""

    def receive() -> None:
        try:
            while True:
                on_frame(pipe.receive())
        finally:
            os._exit(0)

    threading.Thread(target=receive, name="listen", daemon=True).start()


if __name__ == "__main__":
    main()
