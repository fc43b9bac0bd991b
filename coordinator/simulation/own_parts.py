"""Parts of a simulation that do not ship: a method or an encoder from a file or from the calling program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from edge_agent import methods, models
from edge_agent.core.errors import MissingCapability, UsageError
from edge_agent.core.registry import absolute, is_reference, load_reference, own_name
from edge_agent.core.storage import read_regular

from .plan import Plan


def register(plan: Plan) -> None:
    """Load the method and the encoder that the plan names as ``PATH.py:NAME``; every process of a run calls this.

    Raises:
        UsageError: no such file or name, the file cannot be imported, or what it names is no method or encoder.
    """
    prepare_torchvision([plan.method, plan.encoder or "", *plan.data])
    if is_reference(plan.method):
        add_method(load_reference("method", plan.method))
    if plan.encoder is not None and is_reference(plan.encoder):
        add_encoder(load_reference("encoder", plan.encoder))


def prepare_torchvision(references: Iterable[str]) -> None:
    """Make ``import torchvision`` work in this process where one of the files that are named mentions it.

    To import it takes a second and 90 MB, so that it is not done for files that have nothing to do with it. What is
    wrong with torchvision beyond its compiled part, the import in the file says itself.
    """
    for reference in references:
        file, _, _ = reference.partition("?")
        path = Path(absolute(file).rpartition(":")[0])
        if is_reference(file) and path.is_file() and b"torchvision" in read_regular(path):
            with contextlib.suppress(MissingCapability):
                models.import_torchvision()
            return


def add_method(kind: Any) -> str:
    """Make a method known to this process, and return its name; see `edge_agent.methods.add`."""
    return methods.add(kind)


def add_encoder(factory: Any) -> str:
    """Make a factory of modules known to this process under its own name, which is returned.

    Raises:
        UsageError: it cannot be called, or has the name of an encoder that ships.
    """
    from torch import nn

    from edge_agent.models.base import own_encoder

    if isinstance(factory, nn.Module) or not callable(factory):
        raise UsageError(f"encoder {_shown(factory)}: expected a class or function that makes a torch.nn.Module")
    name = _free_name("encoder", factory, models.registry)
    models.registry.add(name, own_encoder(name, factory))
    return name


def _free_name(what: str, part: Any, registry: Any) -> str:
    name = own_name(getattr(part, "__name__", type(part).__name__))
    if registry.ships(name):
        raise UsageError(f"{what} '{name}': there is one of this name already; give yours another name")
    return name


def _shown(part: Any) -> str:
    return f"'{part.__name__}'" if hasattr(part, "__name__") else f"of type {type(part).__name__}"


def reference(part: Any, add: Callable[[Any], str]) -> tuple[str, bool]:
    """Return how a plan names a class or factory, and whether other processes can load it: from a file they can.

    ``add``: `add_method` or `add_encoder`.
    """
    module = sys.modules.get(getattr(part, "__module__", ""))
    file = getattr(module, "__file__", None)
    name = getattr(part, "__qualname__", "")
    is_loadable = module is not None and module.__name__ != "__main__" and getattr(module, name, None) is part
    known_as = add(part)
    if is_loadable and is_reference(f"{file}:{name}"):
        return f"{Path(str(file)).resolve()}:{name}", True
    return known_as, False
