"""How this program starts others of its own.

``python -m`` looks for modules in the working folder first: a ``queue.py`` that somebody keeps where they call us would
take the place of Python's own. Here nothing is imported from there, whatever the version of Python; all else that an
environment or ``PYTHONPATH`` offers is found as ever.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
"""Where these packages are, also if they were not installed; searched after Python's own modules."""

_BEGIN = (
    "import sys; sys.path[:1] = [place for place in sys.path[:1] if place]; "
    "at = [n for n, place in enumerate(sys.path) if place.endswith('-packages')] or [len(sys.path)]; "
    "sys.path.insert(at[0], sys.argv.pop(1)); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module as ``python -m module arguments`` would, without the working folder."""
    return (sys.executable, "-c", _BEGIN, _ROOT, module, *arguments)


ASKED_TO_END = (-signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a process that one of the signals has ended which ask for an end, perhaps of all processes at once."""

OWNERS_TURN_S = 1.0
"""How long the owner of a process that ended so waits: it may be about to hear the same signal."""


def heed_no_signals() -> None:
    """Leave it to the owner when this process ends.

    Ctrl-C reaches all processes of a terminal, and SIGTERM all processes of a systemd unit; the owner heeds both.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def wait_before_restart(stop: threading.Event, code: int, pause_s: float) -> None:
    """Wait ``pause_s``, and the owner's turn where the process was asked to end; no longer than until ``stop``."""
    stop.wait(max(pause_s, OWNERS_TURN_S) if code in ASKED_TO_END else pause_s)
