"""``headwater status``: what the coordinator does, and for whom it waits, from the files of its state folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from ..journal.store import ServingOrder, utc_now
from ..runs.result_notes import BELOW_LOCAL, SHOWN_CLIENTS, CoordinatorMetrics
from ..runs.run_summary import RunSummary
from ..state.fleet_rows import HeardAgent, Presence
from ..state.privacy_spent import PrivacySpent
from ..state.release_rows import OpenRelease, open_releases
from ..state.retention import DiskUsage, usage
from ..state.status_file import (
    CLOCKS_APART_S,
    Awaited,
    FleetCounts,
    ListedAgent,
    PartitionStatus,
    RefusedDevice,
    SiteStatus,
    Status,
    read_agents,
    read_status,
)
from ..state.store import RunFolder, StateFolder
from ..text import about_time, counted, listed
from ..views.releases import book_of
from ..views.runs import replay
from .fleet import NO_AGENTS, notes_of, status_age_s
from .follow import advice, is_serving
from .options import Config, Json, State, state_path
from .output import fitted, is_live, present, print_line, stdout_console, table

SHOWN_AGENTS = 20

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
            gathered = gather_status(folder, selection)
            present(gathered.to_json(), _lines(gathered), as_json=as_json)
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

    def takes(self, listed_agent: ListedAgent) -> bool:
        """Return whether an agent of the status is in the wanted condition, and has the text in its id."""
        agent = listed_agent.agent
        return self.find in agent.id and self._is_in_condition(agent)

    def _is_in_condition(self, agent: HeardAgent) -> bool:
        if self.only == "online":
            return agent.is_present
        if self.only == "offline":
            return not agent.is_present
        if self.only == "notes":
            return any(notes_of(agent))
        return self.only in {"all", agent.condition}

    def cut(self, agents: list[ListedAgent]) -> list[ListedAgent]:
        """Return the page of these agents; of more than one page those with a note come first, then those offline."""
        if not self.most:
            return agents
        if len(agents) > self.most:

            def order(row: ListedAgent) -> tuple[bool, bool, str]:
                return not any(notes_of(row.agent)), row.agent.is_present, row.agent.id

            agents = sorted(agents, key=order)
        return agents[(self.page - 1) * self.most :][: self.most]

    def pages(self, count: int) -> int:
        """Return the number of pages of so many agents, at least one."""
        return max(1, math.ceil(count / self.most)) if self.most else 1


# --- what is gathered ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RunRow:
    """A run, and the unfinished one that it is queued behind."""

    id: str
    method: str
    status: str
    round: int
    rounds: int
    reason: str | None
    """Why it has ended or is stalled; None or empty: there is nothing to say."""

    queued_behind: str | None
    metrics: CoordinatorMetrics

    @property
    def note(self) -> str:
        """What it is queued behind, or why it has ended or is stalled; empty where there is nothing to say."""
        if self.queued_behind:
            return f"queued behind {self.queued_behind}"
        return self.reason or ""

    def to_json(self) -> dict[str, Any]:
        """Return the run as ``--json`` prints it."""
        return {
            "id": self.id,
            "method": self.method,
            "status": self.status,
            "round": self.round,
            "rounds": self.rounds,
            "reason": self.reason,
            "queued_behind": self.queued_behind,
            **self.metrics.to_json(),
        }


@dataclass(frozen=True)
class _AgentsPage:
    """The chosen page of agents, and how many were chosen on how many pages."""

    agents: list[ListedAgent]
    revoked: frozenset[str]
    """Those whose certificate is revoked."""

    selected: int
    page: int
    pages: int

    def to_json(self) -> dict[str, Any]:
        """Return the page as ``--json`` prints it: agents as the coordinator wrote them."""
        agents = [{**row.content, "revoked": row.agent.id in self.revoked} for row in self.agents]
        return {"agents": agents, "agents_selected": self.selected, "page": self.page, "pages": self.pages}


@dataclass(frozen=True)
class GatheredStatus:
    """What a state folder says of its coordinator, its runs, its releases and its agents."""

    written: Status
    """What the coordinator wrote last."""

    is_serving: bool
    state: Path
    order: ServingOrder | None
    """Who has the lease of the journal's database, and who waits for it; None: the journal has none."""

    better_alone: list[str]
    """The warnings about clients of the newest run that are better off alone."""

    privacy: PrivacySpent | None
    """What is spent of the privacy budget; None: no noise is added."""

    disk: DiskUsage
    runs: list[_RunRow]
    releases: list[OpenRelease]
    page: _AgentsPage | None
    """None: no coordinator has written about agents yet."""

    def to_json(self) -> dict[str, Any]:
        """Return the status as ``--json`` prints it, with all that the coordinator wrote."""
        result = {
            "better_alone": self.better_alone,
            "privacy": None if self.privacy is None else self.privacy.to_json(),
            "serving": self.is_serving,
            "state": str(self.state),
            "disk": self.disk.to_json(),
            "runs": [run.to_json() for run in self.runs],
            "releases": [release.to_json() for release in self.releases],
            **self.written.content,
        }
        if self.order is not None:
            result["lease"] = {"number": self.order.lease.fence, "holder": self.order.serving or None}
            result["standby"] = list(self.order.standbys)
        if self.page is not None:
            result |= self.page.to_json()
        return result


def gather_status(folder: StateFolder, selection: Selection, *, is_watched: bool = False) -> GatheredStatus:
    """Return the whole status of a state folder.

    Args:
        folder: The state folder, opened.
        selection: The agents that it is to have.
        is_watched: Whether it is looked at again and again: then of a large fleet it has only agents with a note.
    """
    path = folder.path
    written = read_status(path)
    serving = is_serving(path)
    runs = _describe_runs(folder)
    disk = usage(folder)
    releases = open_releases(book_of(folder.journal), utc_now())
    if serving and written.run is not None and written.run.stall is not None:
        stalled = written.run
        runs = [replace(run, status="stalled", reason=stalled.stall) if run.id == stalled.id else run for run in runs]
    # What is known of the newest run beside the journal: warnings and the privacy that it has spent.
    summary = _newest_summary(path, runs)
    privacy = None if written.run is None else written.run.privacy
    if summary is not None:
        privacy = privacy or summary.privacy
        runs[-1] = replace(runs[-1], reason=runs[-1].reason or summary.stopped)
    warnings = () if summary is None else summary.warnings
    return GatheredStatus(
        written=written,
        is_serving=serving,
        state=path,
        order=folder.journal.read_order(),
        better_alone=[warning.message for warning in warnings if warning.kind == BELOW_LOCAL],
        privacy=privacy,
        disk=disk,
        runs=runs,
        releases=releases,
        page=_select_agents(path, written, selection, is_watched=is_watched) if written.has_agents else None,
    )


def _describe_runs(folder: StateFolder) -> list[_RunRow]:
    """Return all runs, each with the unfinished one that it is queued behind."""
    runs = list[_RunRow]()
    ahead: str | None = None
    for name in folder.journal.runs():
        record = replay(folder.journal, name)
        runs.append(
            _RunRow(
                id=record.run,
                method=record.request.method,
                status=record.status,
                round=record.round,
                rounds=record.request.rounds,
                reason=record.reason,
                queued_behind=None if record.is_over else ahead,
                metrics=CoordinatorMetrics.from_journal(folder.journal, name),
            )
        )
        if not record.is_over:
            ahead = name
    return runs


def _newest_summary(path: Path, runs: Sequence[_RunRow]) -> RunSummary | None:
    """Return the summary of the newest run; None where it has none, or a damaged one, which costs only its notes."""
    if not runs:
        return None
    with contextlib.suppress(StateError):
        summary = RunFolder(path / "runs" / runs[-1].id).summary()
        return None if summary is None else RunSummary.from_json(summary)
    return None


def _select_agents(path: Path, written: Status, selection: Selection, *, is_watched: bool) -> _AgentsPage:
    """Return the chosen page of agents."""
    is_large = written.fleet is not None and written.fleet.agents > SHOWN_AGENTS
    if is_watched and is_large:
        agents = [row for row in written.agents if any(notes_of(row.agent))]
    else:
        agents = list(read_agents(path))
    chosen = [row for row in agents if selection.takes(row)]
    shown = selection.cut(chosen)
    return _AgentsPage(shown, revoked_agents(path), len(chosen), selection.page, selection.pages(len(chosen)))


# --- watching --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _status_shown_again(*, as_json: bool) -> Iterator[Callable[[GatheredStatus], None]]:
    """Yield what to call with each status: a terminal shows it in the place of the one before, else changes."""
    out = stdout_console(soft_wrap=False)
    if as_json or not is_live(out):
        yield _Changes(as_json=as_json)
        return
    from rich.console import Group
    from rich.live import Live

    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:

        def update(status: GatheredStatus) -> None:
            parts = (fitted(part, out.width) if isinstance(part, Table) else Text(part) for part in _lines(status))
            live.update(Group(*parts), refresh=True)

        yield update


class _Changes:
    """Prints what was not so at the last look, one line each."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._before: dict[str, str] = {}

    def __call__(self, status: GatheredStatus) -> None:
        now = dict(_facts(status))
        at = utc_now().isoformat(timespec="seconds")
        for about, text in now.items():
            if self._before.get(about) != text:
                print_line({"at": at, "about": about, "text": text} if self._as_json else f"{at} {about}: {text}")
        for about in self._before.keys() - now.keys():
            print_line({"at": at, "about": about, "text": ""} if self._as_json else f"{at} {about}: over")
        self._before = now


def _facts(status: GatheredStatus) -> Iterator[tuple[str, str]]:
    """Yield what a status says, by subject, without what changes with each look."""
    serving = status.is_serving
    yield "coordinator", "serving" if serving else "not running"
    awaited = status.written.awaited
    if serving and awaited is not None:
        whom = f", not yet from {listed(awaited.whom)}" if awaited.whom else ""
        yield "waits", f"{awaited.what}{whom}"
    for run in status.runs:
        text = f"{run.status}, round {run.round} of {run.rounds}"
        yield run.id, f"{text}, {run.note}" if run.note else text
    fleet = status.written.fleet
    if fleet is not None:
        yield "fleet", f"{fleet.agents} known, {_count_conditions(fleet)}"
    yield from _accuracies(status.written)
    for row in status.page.agents if status.page is not None else ():
        notes = "; ".join(notes_of(row.agent))
        if notes:
            yield row.agent.id, notes
    if serving:
        for refused in status.written.refused:
            about = f"refused {refused.id or 'device'} by {refused.by}"
            yield about, f"{refused.why.message}; {refused.why.remedy}"


def _count_conditions(fleet: FleetCounts) -> str:
    return f"{fleet.online} online, {fleet.fault} fault, {fleet.stalled} stalled"


def _accuracies(written: Status) -> Iterator[tuple[str, str]]:
    """Yield each accuracy that agents have reported, by its name, with its mean and its worst tenth."""
    for scope, acc in written.accuracies.items():
        agents = counted(acc.agents, "agent")
        text = f"{value_text(acc.mean)}, worst tenth {value_text(acc.worst_tenth)}, of {agents}"
        yield f"acc.{scope}", text


# --- as text ---------------------------------------------------------------------------------------------------------


def _lines(status: GatheredStatus) -> Iterator[Table | str]:
    """Yield the status for people: the coordinator, its folder, the runs, the fleet."""
    yield from _coordinator_lines(status)
    yield from (release.text for release in status.releases)
    disk = status.disk
    yield (
        f"disk: {counted(disk.blobs, 'blob')} of {disk.blob_bytes / 1e6:.1f} MB, checkpoints of "
        f"{counted(disk.ended_runs, 'ended run')}; {disk.free_bytes / 1e6:.0f} MB are free"
    )
    yield ""
    yield from _run_lines(status)
    yield ""
    if status.is_serving and status.written.partitions:
        yield _aggregator_table(status.written.partitions)
        yield ""
    if status.is_serving and status.written.sites:
        yield _site_table(status.written.sites)
        yield from _site_problems(status.written.sites)
        yield ""
    yield from _fleet_lines(status)


def _site_table(sites: Sequence[SiteStatus]) -> Table:
    """Return the table of the relays whose sums are taken."""
    rows = [
        (site.relay, site.host or ("–" if site.problem else "not online"), site.holds, site.sums, site.summed)
        for site in sites
    ]
    return table("relays that sum", ("relay", "host", "updates there", "sums", "updates in them"), rows, left=2)


def _site_problems(sites: Sequence[SiteStatus]) -> Iterator[str]:
    """Yield a line for each reason why sums are not taken."""
    for problem in dict.fromkeys(site.problem for site in sites if site.problem):
        relays = ", ".join(site.relay for site in sites if site.problem == problem)
        yield f"no sums are taken of {relays}: {problem}"


def _aggregator_table(partitions: Sequence[PartitionStatus]) -> Table:
    """Return the table of who takes the updates of which agents."""
    rows = []
    for partition in partitions:
        holder = "the coordinator: no aggregator is online"
        if partition.aggregator:
            holder = f"{partition.aggregator} ({partition.host}, process {partition.process})"
        rows.append((partition.partition, holder, listed(partition.stands_by), partition.updates))
    return table("partitions", ("partition", "served by", "stands by", "updates stored"), rows, left=3)


def _coordinator_lines(status: GatheredStatus) -> Iterator[str]:
    """Yield whether a coordinator serves, what it waits for, and what is wrong with it."""
    written = status.written
    serving = status.is_serving
    age_s = written.age_s(utc_now())
    age = "" if age_s is None else f" (heard {max(0.0, age_s):.0f} s ago)"
    yield f"coordinator: {'serving' if serving else 'not running'}{age}, state in {status.state}"
    yield from _version_note(status)
    if serving and abs(written.clock_ahead_s) >= CLOCKS_APART_S:
        apart = about_time(abs(written.clock_ahead_s))
        direction = "ahead of" if written.clock_ahead_s > 0 else "behind"
        yield (
            f"clock: the coordinator's is {apart} {direction} that of the state folder; set both ('timedatectl set-ntp "
            "true')"
        )
    if serving and written.awaited is not None:
        yield _waiting_line(written.awaited)
    if status.order is not None:
        yield from _order_lines(status.order)
    advised = advice(written)
    is_replaced = status.order is not None and (status.order.serving or status.order.standbys)
    if not serving and not is_replaced:
        yield "advice: 'headwater serve' starts it; 'headwater doctor --config FILE' tries its way to the broker"
    elif serving and advised:
        yield f"advice: {advised}"
    if status.privacy is not None:
        yield status.privacy.text
    if serving:
        yield from _trouble_lines(written)
    yield from _rejection_lines(written)
    if serving:
        yield from map(refusal_line, written.refused[:SHOWN_AGENTS])


def _order_lines(order: ServingOrder) -> Iterator[str]:
    """Yield which of several coordinators serves, and which ones would take over."""
    lease = order.lease
    if order.serving:
        yield f"lease: {lease.fence}, of {order.serving}"
    elif lease.fence:
        ending = "given back" if lease.is_free else "not renewed"
        yield f"lease: {lease.fence} was {ending} by {lease.holder}; nobody serves"
    else:
        yield "lease: nobody has served yet"
    if order.standbys:
        yield f"standby: {listed(order.standbys)}"
    else:
        yield "standby: none; 'headwater serve --standby' starts one, which takes over when the lease is not renewed"


def _waiting_line(awaited: Awaited) -> str:
    """Return what the coordinator waits for, for whom, and until when."""
    title = "idle" if awaited.is_idle else "waits"
    whom = f"; not yet from {listed(awaited.whom)}" if awaited.whom else ""
    left = f", at most {awaited.seconds_left:.0f} s more" if awaited.seconds_left is not None else ""
    return f"{title}: {awaited.what}{whom}{left}"


def _trouble_lines(written: Status) -> Iterator[str]:
    """Yield the coordinator's broker, and what disturbs it: its storage, and other coordinators."""
    if written.broker_connection is not None:
        yield f"broker: {written.broker_connection}"
    if written.blobs_by_http:
        yield f"blobs by HTTP: {written.blobs_by_http}"
    if written.storage:
        yield f"storage: {written.storage}"
    if written.other_coordinator:
        yield f"another coordinator: {written.other_coordinator}"
    if written.standby:
        yield f"standby: {written.standby}"


def _rejection_lines(written: Status) -> Iterator[str]:
    """Yield what was rejected since the coordinator's start, with the most frequent causes."""
    for singular, rejected in (("message", written.rejected("messages")), ("update", written.rejected("updates"))):
        if rejected.total:
            causes = "; ".join(f"{cause} ({times} ×)" for cause, times in rejected.causes.items())
            yield f"rejected: {counted(rejected.total, singular)}" + (f", most of all {causes}" if causes else "")


def _run_lines(status: GatheredStatus) -> Iterator[Table | str]:
    """Yield the table of runs, and what is to know of the newest one."""
    if not status.runs:
        yield "no runs yet; 'headwater run' starts one"
        return
    newest = status.runs[-1]
    yield _table_of_runs(status.runs)
    yield from (f"{newest.id}: {line}" for line in newest.metrics.lines())
    yield from (f"{newest.id}: {line}" for line in status.better_alone[:SHOWN_CLIENTS])


def _fleet_lines(status: GatheredStatus) -> Iterator[Table | str]:
    """Yield the counts of a fleet of several pages, its accuracies, and the table of the chosen agents."""
    page = status.page
    fleet = status.written.fleet
    if fleet is not None and page is not None and page.selected > len(page.agents):
        about = f"page {page.page} of {page.pages} of {counted(page.selected, 'agent')}"
        counts = f"{counted(fleet.agents, 'agent')}, {_count_conditions(fleet)}"
        yield f"fleet: {counts}; {about} (--page, --agents, --only, --find)"
    yield from (f"{name}: {text}" for name, text in _accuracies(status.written))
    yield _agents(status)
    for row in page.agents if page is not None else ():
        yield from (f"{row.agent.id} *: {note}" for note in notes_of(row.agent))


def _version_note(status: GatheredStatus) -> Iterator[str]:
    """Yield a line where the coordinator at work is of another version than this command."""
    other = other_version(status.written.version, __version__, "'headwater serve'")
    if status.is_serving and other:
        yield f"version: {other}"


def _agents(status: GatheredStatus) -> Table | str:
    """Return the table of the chosen agents, or why there is none."""
    if status.page is not None and status.page.agents:
        age_s = 0.0 if status.is_serving else status_age_s(status.written, utc_now())
        return _table_of_agents(status.page, is_serving=status.is_serving, age_s=age_s)
    fleet = status.written.fleet
    if fleet is not None and fleet.agents:
        return f"none of {counted(fleet.agents, 'agent')} is chosen (--page, --only, --find)"
    return NO_AGENTS


def _table_of_runs(runs: Sequence[_RunRow]) -> Table:
    rows = [(run.id, run.method, run.status, f"{run.round}/{run.rounds}", run.note) for run in runs]
    return table("runs", ("run", "method", "status", "round", "note"), rows, left=5)


_PRESENCE_TEXT = {Presence.FAULT: "online, fault", Presence.STALLED: "online, stalled"}
"""What the table says of agents that are there and have a problem; of others it says their presence."""


def _table_of_agents(page: _AgentsPage, *, is_serving: bool, age_s: float) -> Table:
    """Return the table of agents; ``age_s``: how old the status is, where no coordinator writes it any more."""
    rows = []
    for row in page.agents:
        agent = row.agent
        presence = agent.presence if is_serving else Presence.UNKNOWN
        if agent.id in page.revoked:
            presence = Presence.REVOKED
        rows.append(
            (
                f"{agent.id} *" if any(notes_of(agent)) else agent.id,
                agent.tier or None,
                agent.transport or "mqtt",
                _PRESENCE_TEXT.get(presence, presence.value),
                agent.bundle_id[:12],
                None if agent.silent_s is None else f"{agent.silent_s + age_s:.0f} s",
            )
        )
    return table("agents", ("agent", "tier", "by", "is", "bundle", "silent"), rows, left=5)


def refusal_line(refused: RefusedDevice) -> str:
    """Return a line about a device that is kept out, why, and what to do."""
    who = f"agent '{refused.id}'" if refused.id else "a device"
    by = {"broker": "the broker", "enrolment": "the enrolment port", "coordinator": "the coordinator"}[refused.by]
    seen = f"{refused.times} ×, last at {show_time(refused.why.at)}"
    return f"refused: {who} by {by} ({seen}): {refused.why.message}; {refused.why.remedy}"
