"""How this program starts others of its own.

``python -m`` looks for modules in the working folder first: a ``queue.py`` that somebody keeps where they call us would
take the place of Python's own. Here nothing is imported from there, whatever the version of Python; all else that an
environment or ``PYTHONPATH`` offers is found as ever.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
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
