"""A process that computes what it is asked, one question after another, beside the coordinator."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_agent.errors import RunFailed, cause

from ..processes.launch import command
from .ending import cause_of_death, exit_code
from .line import Line

log = logging.getLogger(__name__)

COMMAND = command("coordinator.hosted.computing")
MOST_DEATHS = 3
"""How often the process may die at one question before it is given up."""


Question = Mapping[str, Any]


class Desk:
    """Where questions are asked. The process comes with the first one, and again when it has died."""

    def __init__(self, words: Path) -> None:
        """``words``: the file that holds what the process says beside its answers."""
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._asking: Question | None = None
        self._unwanted = deque[Question](maxlen=16)

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Question) -> dict[str, Any]:
        """The answer; waits for it, so ask in a thread of your own, and one question at a time.

        Raises:
            RunFailed: it cannot be answered, or the process died at it again and again; or somebody called `drop`.
        """
        self._asking = question
        try:
            kind, answer = self._answer(question)
        finally:
            self._asking = None
        if kind == "failed":
            raise RunFailed(str(answer["message"]))
        return answer

    def drop(self, question: Question) -> None:
        """Nobody waits for the answer to this very question any more."""
        with self._starting:  # a process that is just being started is killed as soon as it is there
            self._unwanted.append(question)
            if self._asking is question:
                self._kill()

    def close(self) -> None:
        """End the process, whatever it does."""
        with self._starting:
            self._closed = True
        self._kill()
        if self._asking is None:  # else whoever waits for the answer notices
            self._bury()

    def _answer(self, question: Question) -> tuple[str, dict[str, Any]]:
        why = ""
        for _ in range(MOST_DEATHS):
            try:
                line = self._ready(question)
                line.send("ask", json.dumps(question).encode())
                kind, said = line.receive()
                return kind, json.loads(said)
            except (EOFError, OSError, ValueError) as error:
                why = self._bury() or cause(error)
            log.warning("computing_died of=%s", why)
        with self._starting:
            self._refuse_unwanted(question)
        raise RunFailed(f"the process that computes it died {MOST_DEATHS} times, at last of {why}")

    def _refuse_unwanted(self, question: Question) -> None:
        """Called under ``_starting``."""
        if self._closed or any(question is one for one in self._unwanted):
            raise RunFailed("nobody waits for it any more")

    def _ready(self, question: Question) -> Line:
        with self._starting:
            self._refuse_unwanted(question)
            if self._line is None:
                self._words.parent.mkdir(parents=True, exist_ok=True)
                with self._words.open("wb") as words:
                    pipe = subprocess.PIPE
                    self._process = process = subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=words)
                if process.stdin is None or process.stdout is None:
                    raise EOFError
                self._line = Line(process.stdout, process.stdin)
            return self._line

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()

    def _bury(self) -> str:
        """What the process died of; empty where there was none."""
        process, line = self._process, self._line
        self._process = self._line = None
        if process is None:
            return ""
        code = exit_code(process)
        if line is not None:
            line.close()
        return cause_of_death(code, self._words)
