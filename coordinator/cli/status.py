"""``headwater status``."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from ..serving import load_config
from ..store import StateFolder
from .follow import read_status
from .options import Config, Json, State, console, print_json, table
from .run import _is_serving


def status(config: Config = None, state: State = None, as_json: Json = False) -> None:  # noqa: FBT001, FBT002 - typer options
    """What the coordinator does: runs, agents, and for whom it waits, why and until when.

    Example: headwater status --config configs/coordinator.toml --json
    """
    settings = load_config(config, state)
    with StateFolder(settings.state).look() as folder:
        runs = [_run(folder, run) for run in folder.journal.runs()]
    said = read_status(settings.state)
    found = {"serving": _is_serving(settings), "state": str(settings.state), "runs": runs, **said}
    if as_json:
        print_json(found)
    else:
        _show(found)


def _run(folder: StateFolder, run: str) -> dict[str, Any]:
    record = folder.journal.replay(run)
    asked = record.request
    return {
        "id": run, "method": asked.get("method"), "status": record.status, "round": record.round,
        "rounds": asked.get("rounds"), "reason": record.outcome.get("reason"),
    }  # fmt: skip


def _show(found: dict[str, Any]) -> None:
    age = ""
    if "at" in found:
        seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(found["at"])).total_seconds()
        age = f" (said {seconds:.0f} s ago)"
    console.print(f"coordinator: {'serving' if found['serving'] else 'not running'}{age}, state in {found['state']}")
    waiting = found.get("waiting")
    if found["serving"] and waiting:
        whom = f" from {', '.join(waiting['whom'])}" if waiting["whom"] else ""
        left = f", at most {waiting['seconds_left']:.0f} s more" if waiting["seconds_left"] is not None else ""
        console.print(f"waits: {waiting['for']}{whom}{left}")
    rows = [(r["id"], r["method"], r["status"], f"{r['round']}/{r['rounds']}") for r in found["runs"]]
    console.print(table("runs", ("run", "method", "status", "round"), rows, left=3))
    agents = [
        (a["id"], a["tier"], "here" if a["present"] else "gone", a["fingerprint"][:12], f"{a['silent_s']:.0f}")
        for a in found.get("agents", [])
    ]
    console.print(table("agents", ("agent", "tier", "", "encoder", "silent s"), agents, left=4))
