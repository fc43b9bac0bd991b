"""Whether the list of what leaves a device (`edge_agent.privacy.disclosure`) is complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from edge_agent.privacy.disclosure import EVERY, Item, messages


def is_listed(listed: Iterable[Item], where: str, name: str) -> bool:
    """Whether the list has a tensor of this name for this job."""
    return any(item.where == where and fnmatchcase(name, item.name) for item in listed)


def unlisted(payload: bytes) -> list[str]:
    """Names of fields in a control message of an agent that the list does not have; empty when it is complete."""
    raw: dict[str, Any] = json.loads(payload)
    listed = {item.name for item in messages() if item.where in {EVERY, raw.get("type")}}

    def names(fields: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, value in fields.items():
            if isinstance(value, dict):
                yield from names(value, f"{path}{name}.")
            else:
                yield f"{path}{name}"

    return [name for name in names(raw) if not any(fnmatchcase(name, pattern) for pattern in listed)]
