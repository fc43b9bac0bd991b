"""The program in the data center, and federated learning simulated on one machine.

``simulate`` runs a method on many clients. ``compare`` tunes several methods alike and runs each with the same seeds;
``sweep`` tunes one. ``federate`` runs a coordinator and agents in one process. ``Coordinator`` serves a federation of
devices, as `CoordinatorConfig` says, which ``load_config`` reads from a TOML file. All names are imported when they are
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edge_agent import __version__

if TYPE_CHECKING:
    from edge_agent.core.errors import StopRun

    from .api import federate, simulate
    from .config import CoordinatorConfig, load_config
    from .research.compare.interface import compare, sweep
    from .service.coordinator import Coordinator
    from .simulation.engines.kept_workers import workers
    from .simulation.notebook.result import SimulationResult

__all__ = [
    "Coordinator",
    "CoordinatorConfig",
    "SimulationResult",
    "StopRun",
    "__version__",
    "compare",
    "federate",
    "load_config",
    "simulate",
    "sweep",
    "workers",
]

_HOMES = {
    "Coordinator": ".service.coordinator",
    "CoordinatorConfig": ".config",
    "SimulationResult": ".simulation.notebook.result",
    "StopRun": "edge_agent.core.errors",
    "compare": ".research.compare.interface",
    "federate": ".api",
    "load_config": ".config",
    "simulate": ".api",
    "sweep": ".research.compare.interface",
    "workers": ".simulation.engines.kept_workers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'coordinator' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
