"""``headwater doctor``."""

from __future__ import annotations

from edge_agent import capabilities

from ..broker import find_mosquitto
from .options import Json, print_json, show, table


def doctor(as_json: Json = False) -> None:
    """What this machine can do as a coordinator, and what keeps it from doing more.

    Example: headwater doctor --json
    """
    found = capabilities.find()
    mosquitto = find_mosquitto()
    facts = {
        "python": found.python,
        "system": found.system,
        "machine": found.machine,
        "cores": found.cores,
        "memory_mb": None if found.memory_bytes is None else found.memory_bytes // 10**6,
        "accelerators": ", ".join(found.accelerators),
        "mosquitto": str(mosquitto) if mosquitto else None,
        **found.packages,
    }
    advice = [
        *found.advice(),
        *([] if mosquitto else ["no mosquitto: the embedded broker serves trials and small fleets"]),
    ]
    if as_json:
        print_json({**facts, "advice": advice})
        return
    show(table("this machine", ("what", "found"), list(facts.items()), left=2), *(f"- {line}" for line in advice))
