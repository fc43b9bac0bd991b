"""Command lines that start other processes of this program.

``python -m`` looks for modules in the working folder first: a user's ``queue.py`` there would replace Python's own.
These command lines import nothing from the working folder, whatever the version of Python. Everything else on the
module path, ``PYTHONPATH`` included, is found as usual.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
"""The folder that holds these packages, also if they were not installed; searched after Python's own modules."""

_BEGIN = (
    "import sys; sys.path[:1] = [path for path in sys.path[:1] if path]; "
    "at = [n for n, path in enumerate(sys.path) if path.endswith('-packages')] or [len(sys.path)]; "
    "sys.path.insert(at[0], sys.argv.pop(1)); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module as ``python -m module arguments`` would, without the working folder."""
    return (sys.executable, "-c", _BEGIN, _ROOT, module, *arguments)


def worker_command(function: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a child that calls ``function`` (``module:name``) with its pipe and these arguments."""
    return command("coordinator.processes.worker_main", function, *arguments)
