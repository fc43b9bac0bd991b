"""The sources of a user's own method and encoder, so that no run continues with another source than it began with."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
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
    hashes = {}
    if method is not None:
        hashes["method"] = _hash_of("method", method, methods.registry)
    if encoder is not None:
        hashes["encoder"] = _hash_of("encoder", encoder, models.registry)
    return {part: sha256 for part, sha256 in hashes.items() if sha256}


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


def _hash_of(kind: str, part: str, registry: Registry) -> str:
    """Return the hash of a part's source; empty where the part ships, or where its source is not found."""
    # 1. A part in a file.
    if is_reference(part):
        return _hash_of_file(kind, part)
    # 2. A part that ships, or that nobody has made known to this process.
    if registry.ships(part) or part not in registry.names():
        return ""
    # 3. A class or function of the calling program.
    member = registry.load(part)
    if isinstance(member, models.Encoder):
        member = inspect.unwrap(member.build)
    text = _text_of(member)
    if not text:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_of_file(kind: str, reference: str) -> str:
    """Return the hash of the file of ``PATH.py:NAME``; empty where it cannot be read.

    Whoever computes with the part says that its file is gone. A finished run is read without it.
    """
    try:
        return PinnedFile.of(kind, reference).sha256
    except UsageError:
        return ""


def _text_of(part: Any) -> str:
    """Return the text of a function, or those of a class and of the classes that belong to it."""
    if not isinstance(part, type):
        return _text_of_function(part)
    return _join(_text_of_class(kind) for kind in _classes_of(part))


def _classes_of(part: type) -> list[type]:
    """Return a class, and those of its module that it derives from, or that one of all these has as an attribute."""
    kinds = [kind for kind in part.__mro__ if kind.__module__ == part.__module__]
    # The list grows while it is read: what one class names, such as that of its parameters, names others.
    for kind in kinds:
        for member in vars(kind).values():
            if not isinstance(member, type) or member.__module__ != part.__module__:
                continue
            if member not in kinds:
                kinds.append(member)
    return kinds


def _text_of_function(function: Any) -> str:
    """Return the text of a function; empty where Python does not find it."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _text_of_class(kind: type) -> str:
    """Return the text of a class; of one in a cell of a notebook, which Python does not find, that of its members."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return _text_of_members(kind)


def _text_of_members(kind: type) -> str:
    """Return the texts of a class's functions, of its attributes with plain values, and of defaults of parameters."""
    texts = [_text_of_member(name, member) for name, member in vars(kind).items()]
    if issubclass(kind, BaseModel):
        # Pydantic takes the fields out of the attributes.
        for name in inspect.get_annotations(kind):
            field = kind.model_fields.get(name)
            if field is not None:
                texts.append(_text_of_value(name, field.default))
    return _join(texts)


def _text_of_member(name: str, member: Any) -> str:
    """Return the text of a function of a class, or of an attribute with a plain value; empty for anything else."""
    if isinstance(member, (staticmethod, classmethod)):
        return _text_of_function(member.__func__)
    if isinstance(member, property):
        return _text_of_function(member.fget)
    if inspect.isfunction(member):
        return _text_of_function(member)
    if name.startswith("__"):  # what Python notes of a class, such as its module
        return ""
    return _text_of_value(name, member)


def _text_of_value(name: str, value: Any) -> str:
    """Return ``name = value`` for a plain value; empty for any other, whose text another process may not repeat."""
    try:
        return f"{name} = {json.dumps(value)}"
    except (TypeError, ValueError):
        return ""


def _join(texts: Iterable[str]) -> str:
    """Return the texts that are not empty, one below the other."""
    return "\n".join(filter(None, texts))
