"""``headwater status``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from edge_agent import __version__
from edge_agent.cli.output import other_version, value_text
from edge_agent.core.errors import StateError
from edge_agent.core.time_and_text import show_time

from ..fleet.release_commands import open_releases, standing_of
from ..identity.revoked import revoked_agents
from ..journal.store import utc_now
from ..runs.result_notes import SHOWN_CLIENTS, coordinator_metrics, metric_lines, spent
from ..state.retention import usage
from ..state.store import RunFolder, StateFolder, read_agents, read_status
from ..text import counted, listed
from ..views.runs import replay
from .fleet import NO_AGENTS, notes_of, status_age_s
from .follow import advice, is_serving
from .options import Config, Json, State, state_path
from .output import fitted, is_live, present, print_line, stdout_console, table

SHOWN_AGENTS = 20
CONDITIONS = ("online", "fault", "stalled")

Condition = Literal["all", "online", "offline", "fault", "stalled", "notes"]
Shown = Annotated[int, typer.Option("--agents", min=0, help="Most agents on a page; 0: all.")]
Page = Annotated[int, typer.Option("--page", min=1, help="Which page of agents.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again until Ctrl-C.")]
Every = Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks of --watch.")]
Only = Annotated[Condition, typer.Option("--only", help="Only agents in this condition, or with notes.")]
Find = Annotated[str, typer.Option("--find", help="Only agents with this text in their id.")]


def status(
    config: Config = None,
    state: State = None,
    agents: Shown = SHOWN_AGENTS,
    page: Page = 1,
    only: Only = "all",
    find: Find = "",
    watch: Watch = False,
    every: Every = 2.0,
    as_json: Json = False,
) -> None:
    """What the coordinator does: runs, agents, and for whom it waits, why and until when.

    Of a large fleet, agents with a fault or a note and those offline come first. With --watch it is shown again every
    few seconds until Ctrl-C, of a large fleet with those agents alone that have a fault or a note; in a pipe, and with
    --json, one line for each change.

    Example: headwater status --config configs/coordinator.toml --only offline --page 2
    """
    path = state_path(config, state)
    with StateFolder(path).look() as folder:
        if not watch:
            result = _gathered(folder, agents=agents, page=page, only=only, find=find)
            present(result, _lines(result), as_json=as_json)
            return
        from edge_agent.core.children import stop_on_signals

        with stop_on_signals() as stop, _shown_again(as_json=as_json) as show_again:
            while True:
                show_again(_gathered(folder, agents=agents, page=page, only=only, find=find, watched=True))
                if stop.wait(every):
                    return


def _gathered(
    folder: StateFolder, *, agents: int, page: int, only: Condition, find: str, watched: bool = False
) -> dict[str, Any]:
    """The whole status, as JSON; ``watched``: of a large fleet no agents but those with a fault or a note."""
    path = folder.path
    ahead: str | None = None
    runs = list[dict[str, Any]]()
    for run in folder.journal.runs():
        record = replay(folder.journal, run)
        runs.append(
            {
                "id": record.run,
                "method": record.request.method,
                "status": record.status,
                "round": record.round,
                "rounds": record.request.rounds,
                "reason": record.reason,
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
        is_large = watched and written.get("fleet", {}).get("agents", 0) > SHOWN_AGENTS
        known = [one for one in written["agents"] if any(notes_of(one))] if is_large else read_agents(path)
        chosen = [one for one in known if find in one["id"] and _is(only, one)]
        if agents and len(chosen) > agents:
            chosen.sort(key=lambda one: (not any(notes_of(one)), one["present"], one["id"]))
        shown = chosen[(page - 1) * agents :][:agents] if agents else chosen
        revoked = revoked_agents(path)
        shown = [{**one, "revoked": one["id"] in revoked} for one in shown]
        result |= {"agents": shown, "agents_selected": len(chosen), "page": page, "pages": _pages(len(chosen), agents)}
    return result


# --- watching --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shown_again(*, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What to call with each status: on a terminal it takes the place of the one before, else its changes follow."""
    out = stdout_console(soft_wrap=False)
    if as_json or not is_live(out):
        yield _Changes(as_json=as_json)
        return
    from rich.console import Group
    from rich.live import Live

    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:

        def update(result: dict[str, Any]) -> None:
            parts = (fitted(part, out.width) if isinstance(part, Table) else Text(part) for part in _lines(result))
            live.update(Group(*parts), refresh=True)

        yield update


class _Changes:
    """Prints what was not so at the last look, one line each."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._before: dict[str, str] = {}

    def __call__(self, result: dict[str, Any]) -> None:
        now = dict(_facts(result))
        at = utc_now().isoformat(timespec="seconds")
        for about, text in now.items():
            if self._before.get(about) != text:
                print_line({"at": at, "about": about, "text": text} if self._as_json else f"{at} {about}: {text}")
        for about in self._before.keys() - now.keys():
            print_line({"at": at, "about": about, "text": ""} if self._as_json else f"{at} {about}: over")
        self._before = now


def _facts(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a status says, by subject, without what changes with each look."""
    serving = result["serving"]
    yield "coordinator", "serving" if serving else "not running"
    if serving and (waiting := result.get("waiting")):
        whom = f", not yet from {listed(waiting['whom'])}" if waiting["whom"] else ""
        yield "waits", f"{waiting['for']}{whom}"
    for run in result["runs"]:
        note = f", queued behind {run['queued_behind']}" if run["queued_behind"] else ""
        note = note or (f", {run['reason']}" if run["reason"] else "")
        yield run["id"], f"{run['status']}, round {run['round']} of {run['rounds']}{note}"
    if fleet := result.get("fleet"):
        yield "fleet", f"{fleet['agents']} known, {', '.join(f'{fleet[one]} {one}' for one in CONDITIONS)}"
    for scope, acc in (result.get("acc") or {}).items():
        yield f"acc.{scope}", _accuracy(acc)
    for one in result.get("agents", ()):
        if said := "; ".join(notes_of(one)):
            yield one["id"], said
    for one in result.get("refused_agents", ()) if serving else ():
        yield f"refused {one['id'] or 'device'} by {one['by']}", f"{one['message']}; {one['remedy']}"


def _accuracy(acc: dict[str, Any]) -> str:
    of = counted(acc["agents"], "agent")
    return f"{value_text(acc['mean'])}, worst tenth {value_text(acc['worst_tenth'])}, of {of}"


def _is(condition: Condition, agent: dict[str, Any]) -> bool:
    if condition in {"online", "offline"}:
        return bool(agent["present"]) == (condition == "online")
    if condition == "notes":
        return any(notes_of(agent))
    return condition == "all" or agent.get("condition") == condition


def _pages(count: int, size: int) -> int:
    return max(1, -(-count // size)) if size else 1


def _lines(result: dict[str, Any]) -> Iterator[Table | str]:
    serving = result["serving"]
    runs = result["runs"]
    agents = result.get("agents", [])
    age = ""
    if "at" in result:
        seconds = status_age_s(result, utc_now())
        age = f" (heard {seconds:.0f} s ago)"
    yield f"coordinator: {'serving' if serving else 'not running'}{age}, state in {result['state']}"
    yield from _version_note(result)
    if serving and (waiting := result.get("waiting")):
        whom = f"; not yet from {listed(waiting['whom'])}" if waiting["whom"] else ""
        left = f", at most {waiting['seconds_left']:.0f} s more" if waiting["seconds_left"] is not None else ""
        yield f"{'idle' if waiting.get('idle') else 'waits'}: {waiting['for']}{whom}{left}"
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
    yield from map(refusal_line, result.get("refused_agents", ())[:SHOWN_AGENTS] if serving else ())
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
        counts = ", ".join(f"{fleet[name]} {name}" for name in CONDITIONS)
        about = f"page {result['page']} of {result['pages']} of {counted(result['agents_selected'], 'agent')}"
        yield f"fleet: {counted(fleet['agents'], 'agent')}, {counts}; {about} (--page, --agents, --only, --find)"
    yield from (f"acc.{scope}: {_accuracy(acc)}" for scope, acc in (result.get("acc") or {}).items())
    yield _agents(result)
    yield from (f"{agent['id']} *: {note}" for agent in agents for note in notes_of(agent))


def _version_note(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line where the coordinator at work is of another version than this command."""
    other = other_version(result.get("version"), __version__, "'headwater serve'")
    if result["serving"] and other:
        yield f"version: {other}"


def _agents(result: dict[str, Any]) -> Table | str:
    """The table of those that were chosen, or why there is none."""
    if agents := result.get("agents"):
        age_s = 0.0 if result["serving"] else status_age_s(result, utc_now())
        return _table_of_agents(agents, is_serving=result["serving"], age_s=age_s)
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


def _table_of_agents(agents: list[dict[str, Any]], *, is_serving: bool, age_s: float) -> Table:
    conditions = {"ok": "online", "fault": "online, fault", "stalled": "online, stalled"}
    rows = [
        (
            f"{agent['id']} *" if any(notes_of(agent)) else agent["id"],
            agent["tier"],
            agent.get("transport", "mqtt"),
            "revoked"
            if agent["revoked"]
            else "unknown"
            if not is_serving
            else conditions[agent.get("condition", "ok")]
            if agent["present"]
            else "offline",
            agent["bundle_id"][:12],
            None if agent["silent_s"] is None else f"{agent['silent_s'] + age_s:.0f} s",
        )
        for agent in agents
    ]
    return table("agents", ("agent", "tier", "by", "is", "bundle", "silent"), rows, left=5)


def refusal_line(refused: dict[str, Any]) -> str:
    """A device that is kept out, why, and what to do."""
    who = f"agent '{refused['id']}'" if refused["id"] else "a device"
    by = {"broker": "the broker", "enrolment": "the enrolment port", "coordinator": "the coordinator"}[refused["by"]]
    seen = f"{refused['times']} ×, last at {show_time(refused['at'])}"
    return f"refused: {who} by {by} ({seen}): {refused['message']}; {refused['remedy']}"
