"""Whether ``import export`` and ``import headwater`` find our packages, and not a user's files of those names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from edge_agent.core.errors import UsageError

_ROOT = Path(__file__).resolve().parents[1]
_OURS = _ROOT / "export"
_FRONT_DOORS = {_ROOT / "headwater" / "__init__.py", _ROOT / "configs" / "package" / "headwater" / "__init__.py"}
"""The package that re-exports the others, as it is installed and in a clone."""


def check_export() -> None:
    """Return quietly where the package is ours.

    Python looks beside the script first, and in the working folder of ``python -m`` and of notebooks.

    Raises:
        UsageError: something else is found first; it is named.
    """
    loaded = sys.modules.get("export")
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec("export")
    locations = (
        [] if spec is None else [*(spec.submodule_search_locations or []), *([spec.origin] if spec.origin else [])]
    )
    if any(_is_ours(Path(location)) for location in locations):
        return
    if not locations:
        raise UsageError(f"Headwater's package 'export' is not found; expected it at {_OURS}: install Headwater again")
    raise UsageError(
        f"{locations[0]} shadows Headwater's package 'export' ({_OURS}): Python finds it first. Rename it, or move the "
        "script to another folder"
    )


def file_before_headwater(folder: Path) -> Path | None:
    """Return the file in ``folder`` that scripts there find by ``import headwater`` in place of our package, if any.

    Such a file runs in place of our package, which therefore cannot say so itself. A folder without an ``__init__.py``
    hides nothing.
    """
    for file in (folder / "headwater" / "__init__.py", folder / "headwater.py"):
        if file.is_file() and file.resolve() not in _FRONT_DOORS:
            return file
    return None


def _is_ours(location: Path) -> bool:
    resolved = location.resolve()
    return resolved in {_OURS, _OURS / "__init__.py"}
