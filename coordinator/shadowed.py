"""Whether ``import export`` finds Headwater's package, and not a file or folder of that name beside a user's script."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from edge_agent.core.errors import UsageError

_OURS = Path(__file__).resolve().parents[1] / "export"


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


def _is_ours(location: Path) -> bool:
    resolved = location.resolve()
    return resolved in {_OURS, _OURS / "__init__.py"}
