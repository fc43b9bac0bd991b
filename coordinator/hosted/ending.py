"""How a process has ended, in words."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

LAST_WORDS = 5
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
    """Exit code or signal, and the last lines of the file ``words``."""
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    last = words.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS:]
    return f"{how}; its last words: {' / '.join(last) or 'none'}"
