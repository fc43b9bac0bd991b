"""``headwater status``: what the coordinator does, and for whom it waits, from the files of its state folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from edge_agent import __version__
from edge_agent.core.errors import StateError
from edge_agent.core.formats import other_version, value_text
from edge_agent.core.time_and_text import show_time

from ..identity.revoked import revoked_agents
from ..journal.store import utc_now
from ..runs.result_notes import SHOWN_CLIENTS, coordinator_metrics, describe_spent, metric_lines
from ..state.fleet_rows import Presence, presence_of
from ..state.release_rows import OpenRelease, Standing, open_releases
from ..state.retention import usage
from ..state.store import RunFolder, StateFolder, read_agents, read_status
from ..text import counted, listed
from ..views.releases import book_of
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
    """Show what the coordinator does: runs, agents, and for whom it waits, why and until when.

    Of a large fleet, agents with a fault or a note and those offline come first. With --watch it is shown again every
    few seconds until Ctrl-C, of a large fleet with those agents alone that have a fault or a note; in a pipe, and with
    --json, one line for each change.

    Example: headwater status --config configs/coordinator.toml --only offline --page 2
    """
    path = state_path(config, state)
    selection = Selection(agents, page, only, find)
    with StateFolder(path).look() as folder:
        if not watch:
            result = gather_status(folder, selection)
            present(result, _lines(result), as_json=as_json)
            return
        from edge_agent.core.children import stop_on_signals

        with stop_on_signals() as stop, _status_shown_again(as_json=as_json) as show_again:
            while True:
                show_again(gather_status(folder, selection, is_watched=True))
                if stop.wait(every):
                    return


@dataclass(frozen=True)
class Selection:
    """Which agents a status is to have."""

    most: int = SHOWN_AGENTS
    """Agents on a page; 0: all."""

    page: int = 1
    only: Condition = "all"
    find: str = ""
    """Text that their ids contain."""

    def takes(self, agent: Mapping[str, Any]) -> bool:
        """Return whether an agent of the status is in the wanted condition, and has the text in its id."""
        return self.find in agent["id"] and self._is_in_condition(agent)

    def _is_in_condition(self, agent: Mapping[str, Any]) -> bool:
        if self.only == "online":
            return bool(agent["present"])
        if self.only == "offline":
            return not agent["present"]
        if self.only == "notes":
            return any(notes_of(dict(agent)))
        return self.only == "all" or agent.get("condition") == self.only

    def cut(self, agents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the page of these agents; of more than one page those with a note come first, then those offline."""
        if not self.most:
            return agents
        if len(agents) > self.most:
            agents = sorted(agents, key=lambda agent: (not any(notes_of(agent)), agent["present"], agent["id"]))
        return agents[(self.page - 1) * self.most :][: self.most]

    def pages(self, count: int) -> int:
        """Return the number of pages of so many agents, at least one."""
        return max(1, math.ceil(count / self.most)) if self.most else 1


def gather_status(folder: StateFolder, selection: Selection, *, is_watched: bool = False) -> dict[str, Any]:
    """Return the whole status as JSON, as ``--json`` prints it.

    Args:
        folder: The state folder, opened.
        selection: The agents that it is to have.
        is_watched: Whether it is looked at again and again: then of a large fleet it has only agents with a note.
    """
    path = folder.path
    written = read_status(path)
    now = written.get("run") or {}
    serving = is_serving(path)
    runs = _describe_runs(folder)
    disk = usage(folder)
    releases = open_releases(book_of(folder.journal), utc_now())
    if serving and now.get("stalled"):
        for run in runs:
            if run["id"] == now["id"]:
                run |= {"status": "stalled", "reason": now["stalled"].get("reason")}
    # What is known of the newest run beside the journal: warnings and the privacy that it has spent.
    summary = _newest_summary(path, runs)
    privacy = now.get("privacy")
    if summary is not None:
        privacy = privacy or summary.get("privacy")
        runs[-1]["reason"] = runs[-1]["reason"] or summary.get("stopped")
    warnings = (summary or {}).get("warnings", [])
    alone = [warning["message"] for warning in warnings if warning["kind"] == "below_local"]
    result = {"better_alone": alone, "privacy": privacy, "serving": serving, "state": str(path), "disk": disk}
    result |= {"runs": runs, "releases": [release.to_json() for release in releases], **written}
    if "agents" in written:
        result |= _select_agents(path, written, selection, is_watched=is_watched)
    return result


def _describe_runs(folder: StateFolder) -> list[dict[str, Any]]:
    """Return all runs as JSON, each with the unfinished one that it is queued behind."""
    runs = list[dict[str, Any]]()
    ahead: str | None = None
    for name in folder.journal.runs():
        record = replay(folder.journal, name)
        runs.append(
            {
                "id": record.run,
                "method": record.request.method,
                "status": record.status,
                "round": record.round,
                "rounds": record.request.rounds,
                "reason": record.reason,
                "queued_behind": None if record.is_over else ahead,
                **coordinator_metrics(folder.journal, name),
            }
        )
        if not record.is_over:
            ahead = name
    return runs


def _newest_summary(path: Path, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the summary of the newest run; None where it has none, or a damaged one, which costs only its notes."""
    if not runs:
        return None
    with contextlib.suppress(StateError):
        return RunFolder(path / "runs" / runs[-1]["id"]).summary()
    return None


def _select_agents(path: Path, written: Mapping[str, Any], selection: Selection, *, is_watched: bool) -> dict[str, Any]:
    """Return the chosen page of agents as JSON, and how many were chosen on how many pages."""
    is_large = written.get("fleet", {}).get("agents", 0) > SHOWN_AGENTS
    if is_watched and is_large:
        agents = [agent for agent in written["agents"] if any(notes_of(agent))]
    else:
        agents = read_agents(path)
    chosen = [agent for agent in agents if selection.takes(agent)]
    revoked = revoked_agents(path)
    shown = [{**agent, "revoked": agent["id"] in revoked} for agent in selection.cut(chosen)]
    pages = selection.pages(len(chosen))
    return {"agents": shown, "agents_selected": len(chosen), "page": selection.page, "pages": pages}


# --- watching --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _status_shown_again(*, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield what to call with each status: a terminal shows it in the place of the one before, else changes."""
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
    """Yield what a status says, by subject, without what changes with each look."""
    serving = result["serving"]
    yield "coordinator", "serving" if serving else "not running"
    waiting = result.get("waiting")
    if serving and waiting:
        whom = f", not yet from {listed(waiting['whom'])}" if waiting["whom"] else ""
        yield "waits", f"{waiting['for']}{whom}"
    for run in result["runs"]:
        note = _run_note(run)
        text = f"{run['status']}, round {run['round']} of {run['rounds']}"
        yield run["id"], f"{text}, {note}" if note else text
    fleet = result.get("fleet")
    if fleet:
        yield "fleet", f"{fleet['agents']} known, {_count_conditions(fleet)}"
    yield from _accuracies(result)
    for agent in result.get("agents", ()):
        notes = "; ".join(notes_of(agent))
        if notes:
            yield agent["id"], notes
    if serving:
        for refused in result.get("refused_agents", ()):
            about = f"refused {refused['id'] or 'device'} by {refused['by']}"
            yield about, f"{refused['message']}; {refused['remedy']}"


def _run_note(run: Mapping[str, Any]) -> str:
    """Return what a run is queued behind, or why it has ended or is stalled; empty where there is nothing to say."""
    if run["queued_behind"]:
        return f"queued behind {run['queued_behind']}"
    return run["reason"] or ""


def _count_conditions(fleet: Mapping[str, Any]) -> str:
    return ", ".join(f"{fleet[name]} {name}" for name in CONDITIONS)


def _accuracies(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each accuracy that agents have reported, by its name, with its mean and its worst tenth."""
    for scope, acc in (result.get("acc") or {}).items():
        agents = counted(acc["agents"], "agent")
        text = f"{value_text(acc['mean'])}, worst tenth {value_text(acc['worst_tenth'])}, of {agents}"
        yield f"acc.{scope}", text


def _lines(result: dict[str, Any]) -> Iterator[Table | str]:
    """Yield the status for people: the coordinator, its folder, the runs, the fleet."""
    yield from _coordinator_lines(result)
    yield from map(_release_line, result["releases"])
    disk = result["disk"]
    yield (
        f"disk: {counted(disk['blobs'], 'blob')} of {disk['blob_bytes'] / 1e6:.1f} MB, checkpoints of "
        f"{counted(disk['ended_runs'], 'ended run')}; {disk['free_bytes'] / 1e6:.0f} MB are free"
    )
    yield ""
    yield from _run_lines(result)
    yield ""
    yield from _fleet_lines(result)


def _release_line(release: Mapping[str, Any]) -> str:
    standing = Standing(release["stage"], release["rolls_back"], release["rolled_back_by"], release["replaced_by"])
    row = OpenRelease(release["release"], release["channel"], standing, release["bundle_id"], release["waits_for"])
    return row.text


def _coordinator_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield whether a coordinator serves, what it waits for, and what is wrong with it."""
    serving = result["serving"]
    age = ""
    if "at" in result:
        age = f" (heard {status_age_s(result, utc_now()):.0f} s ago)"
    yield f"coordinator: {'serving' if serving else 'not running'}{age}, state in {result['state']}"
    yield from _version_note(result)
    waiting = result.get("waiting")
    if serving and waiting:
        yield _waiting_line(waiting)
    advised = advice(result)
    if not serving:
        yield "advice: 'headwater serve' starts it; 'headwater doctor --config FILE' tries its way to the broker"
    elif advised:
        yield f"advice: {advised}"
    if result["privacy"]:
        yield describe_spent(result["privacy"])
    if serving:
        yield from _trouble_lines(result)
    yield from _rejection_lines(result)
    if serving:
        yield from map(refusal_line, result.get("refused_agents", ())[:SHOWN_AGENTS])


def _waiting_line(waiting: Mapping[str, Any]) -> str:
    """Return what the coordinator waits for, for whom, and until when."""
    title = "idle" if waiting.get("idle") else "waits"
    whom = f"; not yet from {listed(waiting['whom'])}" if waiting["whom"] else ""
    left = f", at most {waiting['seconds_left']:.0f} s more" if waiting["seconds_left"] is not None else ""
    return f"{title}: {waiting['for']}{whom}{left}"


def _trouble_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what disturbs the coordinator: its storage, and other coordinators."""
    titles = {"storage": "storage", "other_coordinator": "another coordinator", "standby": "standby"}
    for key, title in titles.items():
        trouble = result.get(key)
        if trouble:
            yield f"{title}: {'; '.join(trouble) if isinstance(trouble, list) else trouble}"


def _rejection_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was rejected since the coordinator's start, with the most frequent causes."""
    for what, singular in (("messages", "message"), ("updates", "update")):
        number = result.get(f"rejected_{what}", 0)
        if number:
            most = (result.get("rejected_most") or {}).get(what, {})
            causes = "; ".join(f"{cause} ({times} ×)" for cause, times in most.items())
            yield f"rejected: {counted(number, singular)}" + (f", most of all {causes}" if causes else "")


def _run_lines(result: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield the table of runs, and what is to know of the newest one."""
    runs = result["runs"]
    if not runs:
        yield "no runs yet; 'headwater run' starts one"
        return
    newest = runs[-1]
    yield _table_of_runs(runs)
    yield from (f"{newest['id']}: {line}" for line in metric_lines(newest))
    yield from (f"{newest['id']}: {line}" for line in result["better_alone"][:SHOWN_CLIENTS])


def _fleet_lines(result: dict[str, Any]) -> Iterator[Table | str]:
    """Yield the counts of a fleet of several pages, its accuracies, and the table of the chosen agents."""
    agents = result.get("agents", [])
    fleet = result.get("fleet")
    if fleet and result["agents_selected"] > len(agents):
        about = f"page {result['page']} of {result['pages']} of {counted(result['agents_selected'], 'agent')}"
        counts = f"{counted(fleet['agents'], 'agent')}, {_count_conditions(fleet)}"
        yield f"fleet: {counts}; {about} (--page, --agents, --only, --find)"
    yield from (f"{name}: {text}" for name, text in _accuracies(result))
    yield _agents(result)
    yield from (f"{agent['id']} *: {note}" for agent in agents for note in notes_of(agent))


def _version_note(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line where the coordinator at work is of another version than this command."""
    other = other_version(result.get("version"), __version__, "'headwater serve'")
    if result["serving"] and other:
        yield f"version: {other}"


def _agents(result: dict[str, Any]) -> Table | str:
    """Return the table of the chosen agents, or why there is none."""
    agents = result.get("agents")
    if agents:
        age_s = 0.0 if result["serving"] else status_age_s(result, utc_now())
        return _table_of_agents(agents, is_serving=result["serving"], age_s=age_s)
    count = (result.get("fleet") or {}).get("agents")
    if count:
        return f"none of {counted(count, 'agent')} is chosen (--page, --only, --find)"
    return NO_AGENTS


def _table_of_runs(runs: list[dict[str, Any]]) -> Table:
    rows = [
        (run["id"], run["method"], run["status"], f"{run['round']}/{run['rounds']}", _run_note(run)) for run in runs
    ]
    return table("runs", ("run", "method", "status", "round", "note"), rows, left=5)


_PRESENCE_TEXT = {Presence.FAULT: "online, fault", Presence.STALLED: "online, stalled"}
"""What the table says of agents that are there and have a problem; of others it says their presence."""


def _table_of_agents(agents: list[dict[str, Any]], *, is_serving: bool, age_s: float) -> Table:
    """Return the table of agents; ``age_s``: how old the status is, where no coordinator writes it any more."""
    rows = []
    for agent in agents:
        presence = _presence(agent, is_serving=is_serving)
        silent_s = agent["silent_s"]
        rows.append(
            (
                f"{agent['id']} *" if any(notes_of(agent)) else agent["id"],
                agent["tier"],
                agent.get("transport", "mqtt"),
                _PRESENCE_TEXT.get(presence, presence.value),
                agent["bundle_id"][:12],
                None if silent_s is None else f"{silent_s + age_s:.0f} s",
            )
        )
    return table("agents", ("agent", "tier", "by", "is", "bundle", "silent"), rows, left=5)


def _presence(agent: Mapping[str, Any], *, is_serving: bool) -> Presence:
    """Return whether an agent of the status is there."""
    if agent["revoked"]:
        return Presence.REVOKED
    if not is_serving:
        return Presence.UNKNOWN
    return presence_of(is_present=bool(agent["present"]), condition=agent.get("condition", "ok"))


def refusal_line(refused: dict[str, Any]) -> str:
    """Return a line about a device that is kept out, why, and what to do."""
    who = f"agent '{refused['id']}'" if refused["id"] else "a device"
    by = {"broker": "the broker", "enrolment": "the enrolment port", "coordinator": "the coordinator"}[refused["by"]]
    seen = f"{refused['times']} ×, last at {show_time(refused['at'])}"
    return f"refused: {who} by {by} ({seen}): {refused['message']}; {refused['remedy']}"
