"""Answers beside the agent: a process of its own, which the agent starts, and starts again when it ends.

Training and fits of the agent take a processor's time and memory, and may fail; answers come from another process, so
that they go on. The process watches the state folder, takes over what the agent puts in use, and ends with the agent.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from typing import Any

from ..core.child_process import Child, Streams, function_command
from ..core.children import stop_on_signals
from ..core.config import AgentConfig, ServeConfig
from ..core.errors import HeadwaterError
from ..core.limits import end_with, limit_threads
from ..core.logs import TEXT

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""Seconds before a process that has ended is started again for the first time; the pauses double from then on."""

LONGEST_PAUSE_S = 60.0
"""The longest of these pauses."""

_STEADY_S = 60.0
"""A process that has run for so long begins again with the first pause."""

_END_S = 5.0
"""Seconds that the process has to end before it is killed."""


class AnswersBeside:
    """Keeps the process while the agent runs."""

    def __init__(self, config: AgentConfig) -> None:
        """Prepare; nothing is started before `start`. ``config``: that of the agent, which has ``[serve]``."""
        self._config = config
        self._stop = threading.Event()
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def start(self) -> None:
        """Start the process."""
        self._thread.start()

    def close(self) -> None:
        """End the process."""
        self._stop.set()
        child = self._child
        if child is not None:
            child.terminate()
        if self._thread.is_alive():
            self._thread.join(2 * _END_S)

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            started = threading.Event()
            timer = threading.Timer(_STEADY_S, started.set)
            timer.start()
            reason = self._run_once()
            timer.cancel()
            if self._stop.is_set():
                return
            pause_s = FIRST_PAUSE_S if started.is_set() else min(2 * pause_s, LONGEST_PAUSE_S)
            log.warning("answers_ended reason=%s again_in_s=%.0f", reason, pause_s)
            self._stop.wait(pause_s)

    def _run_once(self) -> str:
        """Run the process until its end, and return how it ended."""
        try:
            child = Child(function_command(__name__, main.__name__), streams=Streams(output=None, errors=None))
        except OSError as error:
            return f"it cannot be started: {error}"
        self._child = child
        try:
            question = {"config": self._config.model_dump(mode="json"), "parent": os.getpid()}
            child.write_input(json.dumps(question).encode())
            while child.is_running:
                if self._stop.wait(0.2):
                    child.terminate()
                    child.wait_or_kill(_END_S)
            return f"code {child.wait()}"
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        finally:
            self._child = None
            child.close()


def main() -> None:
    """Run as the child of `AnswersBeside`: the agent's configuration comes as JSON on stdin."""
    question: dict[str, Any] = json.load(sys.stdin)
    end_with(question["parent"])
    config = AgentConfig.model_validate(question["config"])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=TEXT)
    limit_threads(None)
    try:
        _serve(config, ServeConfig() if config.serve is None else config.serve)
    except HeadwaterError as error:
        log.error("answers_failed reason=%s", error)
        sys.exit(error.exit_code)


def _serve(config: AgentConfig, wanted: ServeConfig) -> None:
    """Answer from the pair in use until SIGTERM."""
    from .pair_source import StatePair
    from .service import Device, Service, serving
    from .settings import http_settings, ways_of

    settings = http_settings(wanted, wanted.token_file or config.state / "serve" / "token")

    def show(service: Service) -> None:
        log.info("answers_at url=%s", settings.url(service.http.port))

    with stop_on_signals() as stop, serving(StatePair(config.state), settings, Device(config), ways_of(wanted), show):
        stop.wait()
