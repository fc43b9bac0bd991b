"""The front doors of the three packages under one name: ``import headwater as hw``, then ``hw.simulate(…)``.

All names of `coordinator`, `edge_agent` and `export` are here, and are theirs: ``hw.Personalizer`` is
``edge_agent.Personalizer``. A package is imported when a name is first looked up in it, and no package imports anything
heavy before it is used, so ``hw.Personalizer`` needs no torch. Nothing is defined here, and no module of Headwater
imports this one.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

_PACKAGES = ("edge_agent", "coordinator", "export")
"""Searched in this order: the device's package is the lightest."""

if TYPE_CHECKING:  # type checkers and editors see what each package offers, and refuse what none of them does
    from coordinator import *  # noqa: F403
    from edge_agent import *  # noqa: F403
    from export import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return __dir__()
        for package in _PACKAGES:
            module = _opened(package)
            if name in module.__all__:
                return getattr(module, name)
        raise AttributeError(f"module 'headwater' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({name for package in _PACKAGES for name in _opened(package).__all__})


def _opened(package: str) -> ModuleType:
    """Return the package; raises `UsageError` where a user's own ``export`` hides it, which is not run."""
    if package == "export":
        import_module("coordinator.shadowed").check_export()
    return import_module(package)
