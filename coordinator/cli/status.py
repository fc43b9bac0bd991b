"""``headwater status``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from rich.table import Table

from ..runs.result_notes import coordinator_metrics, metric_lines
from ..state.journal import RunRecord
from ..state.store import StateFolder
from ..text import counted
from .follow import advice, is_serving, read_status
from .options import Config, Json, State, state_path
from .output import print_json, show, table

NOBODY = (
    "no agents have been heard; 'edge-agent run' starts one, 'edge-agent doctor --config FILE' says what keeps it away"
)


def status(config: Config = None, state: State = None, as_json: Json = False) -> None:
    """What the coordinator does: runs, agents, and for whom it waits, why and until when.

    Example: headwater status --config configs/coordinator.toml --json
    """
    path = state_path(config, state)
    with StateFolder(path).look() as folder:
        ahead: str | None = None
        runs = []
        for run in folder.journal.runs():
            record = folder.journal.replay(run)
            runs.append({**_run(record, ahead), **coordinator_metrics(folder.journal, run)})
            ahead = ahead if record.is_over else run
    said = read_status(path)
    serving = is_serving(path)
    if serving and (stalled := (said.get("run") or {}).get("stalled")):
        runs = [one | _stalled(stalled) if one["id"] == said["run"]["id"] else one for one in runs]
    result = {"serving": serving, "state": str(path), "runs": runs, **said}
    if as_json:
        print_json(result)
    else:
        show(*_lines(result))


def _run(record: RunRecord, ahead: str | None) -> dict[str, Any]:
    asked = record.request
    return {
        "id": record.run, "method": asked.get("method"), "status": record.status, "round": record.round,
        "rounds": asked.get("rounds"), "reason": record.outcome.get("reason"),
        "queued_behind": None if record.is_over else ahead,
    }  # fmt: skip


def _stalled(stalled: dict[str, Any]) -> dict[str, Any]:
    """What a run that is held up by its files shows instead of what the journal knows."""
    return {"status": "stalled", "reason": stalled.get("reason")}


def _lines(found: dict[str, Any]) -> Iterator[Table | str]:
    age = ""
    if "at" in found:
        seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(found["at"])).total_seconds()
        age = f" (heard {seconds:.0f} s ago)"
    yield f"coordinator: {'serving' if found['serving'] else 'not running'}{age}, state in {found['state']}"
    waiting = found.get("waiting")
    if found["serving"] and waiting:
        whom = f" from {', '.join(waiting['whom'])}" if waiting["whom"] else ""
        left = f", at most {waiting['seconds_left']:.0f} s more" if waiting["seconds_left"] is not None else ""
        yield f"waits: {waiting['for']}{whom}{left}"
    if not found["serving"]:
        yield "advice: 'headwater serve' starts it; 'headwater doctor --config FILE' tries its way to the broker"
    elif advised := advice(found):
        yield f"advice: {advised}"
    if found["serving"] and (trouble := found.get("storage")):
        yield f"storage: {trouble}"
    if found["serving"] and found.get("other_coordinator"):
        yield f"another coordinator: {found['other_coordinator']}"
    yield from _rejected(found)
    yield ""
    yield _runs(found["runs"]) if found["runs"] else "no runs yet; 'headwater run' starts one"
    yield from _own(found["runs"][-1:])
    yield ""
    agents = found.get("agents", [])
    yield _agents(agents) if agents else NOBODY
    yield from (f"{agent['id']} *: {note}" for agent in agents for note in _notes(agent))


def _runs(runs: list[dict[str, Any]]) -> Table:
    rows = [(r["id"], r["method"], r["status"], f"{r['round']}/{r['rounds']}", _note(r)) for r in runs]
    return table("runs", ("run", "method", "status", "round", "note"), rows, left=5)


def _own(runs: list[dict[str, Any]]) -> Iterator[str]:
    """What the coordinator has computed itself for these runs."""
    yield from (f"{run['id']}: {line}" for run in runs for line in metric_lines(run))


def _note(run: dict[str, Any]) -> str:
    return f"queued behind {run['queued_behind']}" if run["queued_behind"] else run["reason"] or ""


def _rejected(found: dict[str, Any]) -> Iterator[str]:
    """Rejected messages and updates since the coordinator's start, with the most frequent causes."""
    for what in ("messages", "updates"):
        if number := found.get(f"rejected_{what}", 0):
            most = (found.get("rejected_most") or {}).get(what, {})
            causes = "; ".join(f"{cause} ({times} ×)" for cause, times in most.items())
            yield f"rejected: {counted(number, what[:-1])}{f', most of all {causes}' if causes else ''}"


def _agents(agents: list[dict[str, Any]]) -> Table:
    rows = [
        (
            _marked(a),
            a["tier"],
            a.get("transport", "mqtt"),
            _state(a),
            a["bundle_id"][:12],
            None if a["silent_s"] is None else f"{a['silent_s']:.0f} s",
        )
        for a in agents
    ]
    return table("agents", ("agent", "tier", "by", "is", "bundle", "silent"), rows, left=5)


def _marked(agent: dict[str, Any]) -> str:
    return f"{agent['id']} *" if any(_notes(agent)) else str(agent["id"])


def _state(agent: dict[str, Any]) -> str:
    if not agent["present"]:
        return "gone"
    return {"ok": "here", "fault": "here, fault", "stalled": "here, stalled"}[agent.get("condition", "ok")]


def _notes(agent: dict[str, Any]) -> Iterator[str]:
    """What people should know of an agent: what it failed at, and what to do; then the rest."""
    if fault := agent.get("fault"):
        yield f"{fault['error']}: {fault['message']}; {fault['remedy']} (at {fault['at']})"
    yield from agent.get("notes", ())
