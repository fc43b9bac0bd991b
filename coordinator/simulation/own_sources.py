"""The sources of a user's own method and encoder, so that no run continues with another source than it began with."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_agent import methods, models
from edge_agent.core.errors import UsageError
from edge_agent.core.registry import PinnedFile, Registry, is_reference

from ..journal.entries import Simulated
from .plan import Plan


def own_sources(*, method: str | None = None, encoder: str | None = None) -> dict[str, str]:
    """Return ``method`` and ``encoder`` -> SHA-256 (hex) of their sources, of those that do not ship.

    Of a part in a file it is that of the whole file, of one in the calling program that of the class or function. What
    they import is not compared, and a part whose source Python cannot find is left out.

    Raises:
        UsageError: A file cannot be read.
    """
    sources = {}
    for kind, part, registry in (("method", method, methods.registry), ("encoder", encoder, models.registry)):
        source = "" if part is None else _source_of(kind, part, registry)
        if source:
            sources[kind] = source
    return sources


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return part -> how its hash has changed, in words, of the parts that both have with different sources."""
    changed = {}
    for part in before.keys() & now.keys():
        if before[part] != now[part]:
            changed[part] = f"{part} (SHA-256 {before[part][:16]}, now {now[part][:16]})"
    return dict(sorted(changed.items()))


def check_own_sources(begun: Simulated | None, plan: Plan, folder: Path) -> None:
    """Check that the user's own parts are those that the run in ``folder`` began with.

    Args:
        begun: What the journal has of the run; None: it is of a version that did not note it.
        plan: The settings to continue with.
        folder: The folder of the simulation.

    Raises:
        UsageError: The source of one has changed.
    """
    if begun is None:
        return
    changed = changed_sources(begun.own_sources, own_sources(method=plan.method, encoder=plan.encoder))
    if changed:
        raise UsageError(
            f"{folder}: its results are of another source of the {' and the '.join(changed.values())}; put the source "
            "back as it was, or begin a new run in another folder"
        )


def _source_of(kind: str, part: str, registry: Registry) -> str:
    """Return the hash of a part's source; empty where it ships, or where there is no source."""
    if is_reference(part):
        return PinnedFile.of(kind, part).sha256
    if registry.ships(part) or part not in registry.names():
        return ""
    member = registry.load(part)
    if isinstance(member, models.Encoder):
        member = member.build
    text = "\n".join(_texts_of(member))
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def _texts_of(part: Any) -> Iterator[str]:
    """Yield the text of a class or function; of a class that Python does not find, those of its functions."""
    try:
        yield inspect.getsource(part)
    except (OSError, TypeError):
        for member in vars(part).values() if isinstance(part, type) else ():
            if inspect.isfunction(member):
                yield from _texts_of(member)
