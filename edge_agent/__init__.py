"""The program that runs on a device, and all that a coordinator and an agent must agree on.

``Personalizer`` fits and uses a personal head on a bundle's encoder; ``Agent`` is the program that joins a federation.
Importing this package, or anything on its ground floor, never imports torch; its names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import heads, methods
    from .agent.event_loop import Agent
    from .data import load as load_data
    from .personal.personalizer import Personalizer, load_bundle

__all__ = ["Agent", "Personalizer", "__version__", "heads", "load_bundle", "load_data", "methods"]

_HOMES = {
    "Agent": (".agent.event_loop", "Agent"),
    "Personalizer": (".personal.personalizer", "Personalizer"),
    "load_bundle": (".personal.personalizer", "load_bundle"),
    "load_data": (".data", "load"),
}


def __getattr__(name: str) -> Any:
    if name in {"heads", "methods"}:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_agent' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(import_module(module, __name__), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
