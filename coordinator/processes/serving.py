"""A process that answers inputs as ``edge-agent serve`` does, for a demonstration or a measurement."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edge_agent.core.child_process import module_command
from edge_agent.core.errors import HeadwaterError
from edge_agent.core.storage import read_regular_text

from .supervisor import ChildProcess

_START_S = 60.0
_LOOK_S = 0.01


class Served:
    """A server that runs."""

    def __init__(self, process: ChildProcess, page: str) -> None:
        self.process = process
        self.page = page
        """The address of its page, with the token behind ``#token=``."""

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.page.partition("/#")[0].rpartition(":")[2])


@contextlib.contextmanager
def serving(options: Sequence[str], log: Path) -> Iterator[Served]:
    """Run ``edge-agent serve`` on a free port while the context lasts.

    Args:
        options: Its options, which say what answers.
        log: Where its output goes.

    Raises:
        HeadwaterError: The server does not start.
    """
    process = ChildProcess(module_command("edge_agent", "serve", *options, "--port", "0", "--json"), log)
    try:
        yield Served(process, _wait_for_page(process, log))
    finally:
        process.terminate()
        process.stop()


def _wait_for_page(process: ChildProcess, log: Path) -> str:
    """Return the address that a server prints once it answers."""
    pause = threading.Event()
    for _ in range(int(_START_S / _LOOK_S)):
        # The log holds one line of JSON: the address, or the error.
        for line in read_regular_text(log).splitlines():
            with contextlib.suppress(ValueError):
                content: dict[str, Any] = json.loads(line)
                if "page" in content:
                    return str(content["page"])
        if not process.is_running:
            raise HeadwaterError(f"the device answers nothing: {process.exit_reason()}; look at {log}")
        pause.wait(_LOOK_S)
    raise HeadwaterError(f"the device has not begun to answer within {_START_S:.0f} s; look at {log}")
