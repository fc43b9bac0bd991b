"""Runs serving as a child process of the agent, and restarts it when it ends.

Training and fitting take processor time and memory, and may fail. Answers come from a process of their own, so that
they continue meanwhile. The process watches the state folder, switches to each pair that the agent puts in use, and
ends with the agent.
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
"""Seconds before the first restart of a process that has ended; each further pause is twice as long."""

LONGEST_PAUSE_S = 60.0
"""The longest of these pauses, in seconds."""

_STEADY_S = 60.0
"""Seconds after which a process counts as healthy: if it ends later, the pauses start from the first one again."""

_END_TOGETHER_S = 1.0
"""Seconds within which the agent ends, too, if both were told to."""

_ENDED_WELL = "code 0"

_EXIT_LIMIT_S = 5.0
"""Seconds that the process has to exit before it is killed."""


class ServingSupervisor:
    """Keeps the serving process running until it is closed."""

    def __init__(self, config: AgentConfig) -> None:
        """Create the supervisor; no process runs before `start`. ``config``: the agent's, with ``[serve]``."""
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
            self._thread.join(2 * _EXIT_LIMIT_S)

    def _run(self) -> None:
        """Run the process again and again, with growing pauses, until `close` is called."""
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            has_been_steady = threading.Event()
            timer = threading.Timer(_STEADY_S, has_been_steady.set)
            timer.start()
            reason = self._run_once()
            timer.cancel()
            # A signal to the whole group, such as Ctrl+C, ends the process a moment before it ends the agent.
            if self._stop.wait(_END_TOGETHER_S if reason == _ENDED_WELL else 0.0):
                return
            pause_s = FIRST_PAUSE_S if has_been_steady.is_set() else min(2 * pause_s, LONGEST_PAUSE_S)
            log.warning("answers_ended reason=%s again_in_s=%.0f", reason, pause_s)
            self._stop.wait(pause_s)

    def _run_once(self) -> str:
        """Run the process until it ends, and return how it ended, for the log."""
        try:
            child = Child(function_command(__name__, main.__name__), streams=Streams(output=None, errors=None))
        except OSError as error:
            return f"it cannot be started: {error}"
        self._child = child
        try:
            request = {"config": self._config.model_dump(mode="json"), "parent": os.getpid()}
            child.write_input(json.dumps(request).encode())
            while child.is_running:
                if self._stop.wait(0.2):
                    child.terminate()
                    child.wait_or_kill(_EXIT_LIMIT_S)
            return f"code {child.wait()}"
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        finally:
            self._child = None
            child.close()


def main() -> None:
    """Run as the child of `ServingSupervisor`. The agent's configuration comes as JSON on stdin."""
    request: dict[str, Any] = json.load(sys.stdin)
    end_with(request["parent"])
    config = AgentConfig.model_validate(request["config"])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=TEXT)
    limit_threads(None)
    try:
        _serve(config, ServeConfig() if config.serve is None else config.serve)
    except HeadwaterError as error:
        log.error("answers_failed reason=%s", error)
        sys.exit(error.exit_code)


def _serve(config: AgentConfig, serve_config: ServeConfig) -> None:
    """Answer with the pair in use until SIGTERM."""
    from .pair_source import StatePair
    from .service import Device, Service, serving
    from .settings import http_settings, io_settings

    settings = http_settings(serve_config, serve_config.token_file or config.state / "serve" / "token")

    def log_address(service: Service) -> None:
        log.info("answers_at url=%s", settings.url(service.http.port))

    source = StatePair(config.state)
    io = io_settings(serve_config)
    with stop_on_signals() as stop, serving(source, settings, Device(config), io, log_address):
        stop.wait()
