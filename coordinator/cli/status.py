"""``headwater status``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from edge_agent.errors import StateError
from edge_agent.storage import IDENTITY

from ..fleet.release_commands import open_releases, standing_of
from ..runs.result_notes import SHOWN_CLIENTS, coordinator_metrics, metric_lines, spent
from ..state.retention import usage
from ..state.store import RunFolder, StateFolder, read_agents, read_status
from ..text import counted, listed
from .follow import advice, is_serving
from .options import Config, Json, State, state_path
from .output import present, table

SHOWN_AGENTS = 20

NO_AGENTS = (
    "no agents have been heard; 'edge-agent run' starts one, 'edge-agent doctor --config FILE' says what keeps it away"
)


Condition = Literal["all", "online", "offline", "fault", "stalled", "notes"]
Shown = Annotated[int, typer.Option("--agents", min=0, help="Most agents on a page; 0: all.")]
Page = Annotated[int, typer.Option("--page", min=1, help="Which page of agents.")]
Only = Annotated[Condition, typer.Option("--only", help="Only agents in this condition, or with notes.")]
Find = Annotated[str, typer.Option("--find", help="Only agents with this text in their id.")]


def status(
    config: Config = None,
    state: State = None,
    agents: Shown = SHOWN_AGENTS,
    page: Page = 1,
    only: Only = "all",
    find: Find = "",
    as_json: Json = False,
) -> None:
    """What the coordinator does: runs, agents, and for whom it waits, why and until when.

    Of a large fleet, agents with a fault or a note and those offline come first.

    Example: headwater status --config configs/coordinator.toml --only offline --page 2
    """
    path = state_path(config, state)
    with StateFolder(path).look() as folder:
        ahead: str | None = None
        runs = list[dict[str, Any]]()
        for run in folder.journal.runs():
            record = folder.journal.replay(run)
            runs.append(
                {
                    "id": record.run,
                    "method": record.request.get("method"),
                    "status": record.status,
                    "round": record.round,
                    "rounds": record.request.get("rounds"),
                    "reason": record.outcome.get("reason"),
                    "queued_behind": None if record.is_over else ahead,
                    **coordinator_metrics(folder.journal, run),
                }
            )
            ahead = ahead if record.is_over else run
        disk = usage(folder)
        releases = open_releases(folder)
    summary = None
    with contextlib.suppress(StateError):  # a damaged summary costs its notes, not the status
        summary = RunFolder(path / "runs" / runs[-1]["id"]).summary() if runs else None
    written = read_status(path)
    serving = is_serving(path)
    if serving and (stalled := (written.get("run") or {}).get("stalled")):
        for one in runs:
            if one["id"] == written["run"]["id"]:
                one |= {"status": "stalled", "reason": stalled.get("reason")}
    alone = [one["message"] for one in (summary or {}).get("warnings", []) if one["kind"] == "below_local"]
    privacy = (written.get("run") or {}).get("privacy")
    if summary is not None:
        privacy = privacy or summary.get("privacy")
        runs[-1]["reason"] = runs[-1]["reason"] or summary.get("stopped")
    result = {"better_alone": alone, "privacy": privacy, "serving": serving, "state": str(path), "disk": disk}
    result |= {"runs": runs, "releases": releases, **written}
    if "agents" in written:
        chosen = [one for one in read_agents(path) if find in one["id"] and _is(only, one)]
        if agents and len(chosen) > agents:
            chosen.sort(key=lambda one: (not any(_notes(one)), one["present"], one["id"]))
        shown = chosen[(page - 1) * agents :][:agents] if agents else chosen
        revoked = _revoked(path, [one["id"] for one in shown])
        shown = [{**one, "revoked": one["id"] in revoked} for one in shown]
        result |= {"agents": shown, "agents_selected": len(chosen), "page": page, "pages": _pages(len(chosen), agents)}
    present(result, _lines(result), as_json=as_json)


def _revoked(state: Path, agents: list[str]) -> set[str]:
    """Those of these agents that are shut out."""
    folder = state / IDENTITY
    if not (folder / "revoked.json").exists():
        return set()
    from ..identity.ledger import Revoked, is_revoked  # brings pydantic, which takes as long as all the rest

    with contextlib.suppress(StateError, OSError):  # a damaged list costs a word, not the status
        listed_there = set(Revoked.read(folder).agents)
        return {agent for agent in agents if agent in listed_there and is_revoked(folder, agent)}
    return set()


def _is(condition: Condition, agent: dict[str, Any]) -> bool:
    if condition in {"online", "offline"}:
        return bool(agent["present"]) == (condition == "online")
    if condition == "notes":
        return any(_notes(agent))
    return condition == "all" or agent.get("condition") == condition


def _pages(count: int, size: int) -> int:
    return max(1, -(-count // size)) if size else 1


def _lines(result: dict[str, Any]) -> Iterator[Table | str]:
    serving, runs, agents = result["serving"], result["runs"], result.get("agents", [])
    age = ""
    if "at" in result:
        seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(result["at"])).total_seconds()
        age = f" (heard {seconds:.0f} s ago)"
    yield f"coordinator: {'serving' if serving else 'not running'}{age}, state in {result['state']}"
    if serving and (waiting := result.get("waiting")):
        whom = f"; not yet from {listed(waiting['whom'])}" if waiting["whom"] else ""
        left = f", at most {waiting['seconds_left']:.0f} s more" if waiting["seconds_left"] is not None else ""
        yield f"waits: {waiting['for']}{whom}{left}"
    if not serving:
        yield "advice: 'headwater serve' starts it; 'headwater doctor --config FILE' tries its way to the broker"
    elif advised := advice(result):
        yield f"advice: {advised}"
    yield from map(spent, filter(None, [result["privacy"]]))
    titles = {"storage": "storage", "other_coordinator": "another coordinator", "standby": "standby"}
    for key, title in titles.items() if serving else ():
        if said := result.get(key):
            yield f"{title}: {'; '.join(said) if isinstance(said, list) else said}"
    for what in ("messages", "updates"):  # since the coordinator's start, with the most frequent causes
        if number := result.get(f"rejected_{what}", 0):
            most = (result.get("rejected_most") or {}).get(what, {})
            causes = "; ".join(f"{cause} ({times} ×)" for cause, times in most.items())
            yield f"rejected: {counted(number, what[:-1])}{f', most of all {causes}' if causes else ''}"
    yield from map(standing_of, result["releases"])
    disk = result["disk"]
    yield (
        f"disk: {counted(disk['blobs'], 'blob')} of {disk['blob_bytes'] / 1e6:.1f} MB, checkpoints of "
        f"{counted(disk['ended_runs'], 'ended run')}; {disk['free_bytes'] / 1e6:.0f} MB are free"
    )
    yield ""
    yield _table_of_runs(runs) if runs else "no runs yet; 'headwater run' starts one"
    yield from (f"{run['id']}: {line}" for run in runs[-1:] for line in metric_lines(run))
    yield from (f"{runs[-1]['id']}: {line}" for line in result["better_alone"][:SHOWN_CLIENTS])
    yield ""
    if (fleet := result.get("fleet")) and result["agents_selected"] > len(agents):
        counts = ", ".join(f"{fleet[name]} {name}" for name in ("online", "fault", "stalled"))
        about = f"page {result['page']} of {result['pages']} of {counted(result['agents_selected'], 'agent')}"
        yield f"fleet: {counted(fleet['agents'], 'agent')}, {counts}; {about} (--page, --agents, --only, --find)"
    yield _agents(result)
    yield from (f"{agent['id']} *: {note}" for agent in agents for note in _notes(agent))


def _agents(result: dict[str, Any]) -> Table | str:
    """The table of those that were chosen, or why there is none."""
    if agents := result.get("agents"):
        return _table_of_agents(agents)
    if count := (result.get("fleet") or {}).get("agents"):
        return f"none of {counted(count, 'agent')} is chosen (--page, --only, --find)"
    return NO_AGENTS


def _table_of_runs(runs: list[dict[str, Any]]) -> Table:
    rows = [
        (
            run["id"],
            run["method"],
            run["status"],
            f"{run['round']}/{run['rounds']}",
            f"queued behind {run['queued_behind']}" if run["queued_behind"] else run["reason"] or "",
        )
        for run in runs
    ]
    return table("runs", ("run", "method", "status", "round", "note"), rows, left=5)


def _table_of_agents(agents: list[dict[str, Any]]) -> Table:
    conditions = {"ok": "online", "fault": "online, fault", "stalled": "online, stalled"}
    rows = [
        (
            f"{agent['id']} *" if any(_notes(agent)) else agent["id"],
            agent["tier"],
            agent.get("transport", "mqtt"),
            "revoked"
            if agent["revoked"]
            else conditions[agent.get("condition", "ok")]
            if agent["present"]
            else "offline",
            agent["bundle_id"][:12],
            None if agent["silent_s"] is None else f"{agent['silent_s']:.0f} s",
        )
        for agent in agents
    ]
    return table("agents", ("agent", "tier", "by", "is", "bundle", "silent"), rows, left=5)


def _notes(agent: dict[str, Any]) -> Iterator[str]:
    """Why an agent failed and what to do about it, then its other notes."""
    if fault := agent.get("fault"):
        yield f"{fault['error']}: {fault['message']}; {fault['remedy']} (at {fault['at']})"
    yield from agent.get("notes", ())
