"""How a process has ended, in words."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

LAST_WORDS = 5
MOST_READ_BYTES = 1 << 16
"""Of the end of a file of words, which may be long."""

PATIENCE_S = 3.0
"""How long a process that has hung up may take to vanish."""


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that has hung up; negative where a signal ended it."""
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:  # it lives on, and nobody will ever hear of it again
        process.kill()
        return process.wait()


def cause_of_death(code: int, words: Path) -> str:
    """Exit code or signal, and the last lines of the file ``words``, which may be gone."""
    how = f"signal {-code}{_name(-code)}" if code < 0 else f"exit code {code}"
    try:
        last = _end(words).decode(errors="replace").splitlines()[-LAST_WORDS:]
    except OSError:
        return f"{how}; its last words are lost: {words} cannot be read"
    return f"{how}; its last words: {' / '.join(last) or 'none'}"


def _name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:  # of most real-time signals there is no name
        return ""


def _end(words: Path) -> bytes:
    with words.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MOST_READ_BYTES))
        return file.read()
