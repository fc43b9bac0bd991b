"""The sources of a user's own method and encoder, so that no run continues with another source than it began with."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from edge_agent import methods, models
from edge_agent.core.errors import UsageError
from edge_agent.core.registry import PinnedFile, Registry, is_reference

from ..views.runs import RunRecord
from .plan import Plan


def own_sources(*, method: str | None = None, encoder: str | None = None) -> dict[str, str]:
    """Return ``method`` and ``encoder`` -> SHA-256 (hex) of their sources, of those that do not ship.

    Of a part in a file it is that of the whole file. Of one in the calling program it is that of the class or function,
    and of the classes beside it that it derives from or has as an attribute, such as ``Params``. What they import or
    call is not compared, and a part whose source cannot be found or read is left out.
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


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say of which parts of one run the sources have changed; empty: of none."""
    return " and ".join(f"the {change}" for change in changed_sources(before, now).values())


def check_own_sources(record: RunRecord, plan: Plan, folder: Path) -> None:
    """Check that the user's own parts are those that the run in ``folder`` began with.

    Args:
        record: Where the journal says that the run stands. Runs of earlier versions have no hashes of sources.
        plan: The settings to continue with.
        folder: The folder of the simulation.

    Raises:
        UsageError: The source of one has changed.
    """
    begun = record.request.simulation
    if begun is None:
        return
    changes = describe_changes(begun.own_sources, own_sources(method=plan.method, encoder=plan.encoder))
    if not changes:
        return
    if record.round == 0:
        raise UsageError(
            f"{folder}: it began with another source of {changes}, and no round is over; remove the folder and start "
            "again, or put the source back as it was"
        )
    raise UsageError(
        f"{folder}: its results are of another source of {changes}; put the source back as it was, or begin a new run "
        "in another folder"
    )


def _source_of(kind: str, part: str, registry: Registry) -> str:
    """Return the hash of a part's source; empty where it ships, or where there is no source."""
    if is_reference(part):
        # Whoever computes with the part says that its file is gone; a finished run is read without it.
        try:
            return PinnedFile.of(kind, part).sha256
        except UsageError:
            return ""
    if registry.ships(part) or part not in registry.names():
        return ""
    member = registry.load(part)
    if isinstance(member, models.Encoder):
        member = inspect.unwrap(member.build)
    text = "\n".join(filter(None, _texts_of(member)))
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def _texts_of(part: Any) -> Iterator[str]:
    """Yield the text of a function, or those of a class and of the classes beside it that it derives from or has."""
    if not isinstance(part, type):
        yield _text_of_function(part)
        return
    kinds = [kind for kind in part.__mro__ if kind.__module__ == part.__module__]
    # The list grows while it is read: what one class names, such as that of its parameters, names others.
    for kind in kinds:
        yield _text_of_class(kind)
        for member in vars(kind).values():
            is_of_module = isinstance(member, type) and member.__module__ == part.__module__
            if is_of_module and member not in kinds:
                kinds.append(member)


def _text_of_function(function: Any) -> str:
    """Return the text of a function; empty where Python does not find it."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _text_of_class(kind: type) -> str:
    """Return the text of a class; of one in a cell of a notebook, which Python does not find, that of its members.

    Those are its functions, attributes with plain values, and defaults of parameters.
    """
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(kind)
    texts = []
    for name, member in vars(kind).items():
        if isinstance(member, (staticmethod, classmethod)):
            texts.append(_text_of_function(member.__func__))
        elif isinstance(member, property):
            texts.append(_text_of_function(member.fget))
        elif inspect.isfunction(member):
            texts.append(_text_of_function(member))
        elif not name.startswith("__"):  # such a name has what Python notes of a class
            texts.append(_text_of_value(name, member))
    if issubclass(kind, BaseModel):
        own_fields = [name for name in inspect.get_annotations(kind) if name in kind.model_fields]
        texts += [_text_of_value(name, kind.model_fields[name].default) for name in own_fields]
    return "\n".join(filter(None, texts))


def _text_of_value(name: str, value: Any) -> str:
    """Return ``name = value`` for a plain value; empty for any other, whose text another process may not repeat."""
    try:
        return f"{name} = {json.dumps(value)}"
    except (TypeError, ValueError):
        return ""
