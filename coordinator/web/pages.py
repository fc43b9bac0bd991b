"""What the pages show: each is computed in a thread, from memory under the view's lock, and from files without it."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from edge_agent.core.errors import HeadwaterError, StateError, UnknownName, UsageError
from edge_agent.core.next_steps import NextStep
from edge_agent.core.storage import read_json, read_regular
from edge_agent.core.time_and_text import show_time

from ..journal.store import Entry
from ..runs.result_notes import SHOWN_CLIENTS
from ..state.fleet_columns import page_columns
from ..state.fleet_rows import AgentRow, Presence
from ..state.noise import Compared, Gain, classify_mean_gain
from ..state.privacy_spent import PrivacySpent
from ..state.release_rows import ReleaseRow, Standing, list_waits
from ..state.status_file import RefusedDevice, RunUnderWay, Status
from ..views.candidate import SCOPES
from ..views.history import AccuracyLine, BundleLine, HistoryLine, PinLine, RejectedLine, describe_entry
from ..views.releases import Book, Release, Result
from ..views.run_list import RunBundle, RunInfo
from ..views.timeline import Event
from ..views.values import as_number, as_text
from . import pictures
from .fleet_table import PAGE_ROWS, SHOWN, Mean, Query, Totals, page_of
from .folder_view import FolderView
from .render import figures, page, site_of
from .run_curves import RoundPoint, Spread

if TYPE_CHECKING:
    from edge_agent.bundle.manifest import Parity
    from edge_agent.bundle.trust import Release as SignedMetadata

MOST_COMPARED = 100
BUNDLES_ON_PAGE = 20
REPORT = "report.html"
ANALYSIS = "analysis"
"""The folder of a run's analysis, beside its report."""

REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FIRST_ROWS = 10
"""Rounds and log lines of a run that are shown at once; the others are folded."""

MOST_SETTINGS = 12
"""Columns of the table of settings in a comparison; a page with more is read by nobody."""

_KINDS = {"html": "text/html", "svg": "image/svg+xml", "json": "application/json"}

Handler = Callable[[Request], Response]


def shown(make: Handler) -> Handler:
    """Return a handler that reads what is new before it makes its page, unless another thread reads already."""

    @functools.wraps(make)
    def handle(request: Request) -> Response:
        view = site_of(request).view
        view.refresh()
        with view.lock:
            return make(request)

    return handle


@shown
def fleet(request: Request) -> Response:
    """Show all agents: search, filter, sort and pages."""
    view = site_of(request).view
    query = Query.of(request.query_params)
    agents = view.agents()
    table = page_of(agents, query)
    return page(
        request,
        "fleet.html",
        topic="fleet",
        query=query,
        table=table,
        figures=figures(pictures.of_fleet(table.rows)),
        totals=Totals.from_rows(agents),
        filters={name: title for name, (title, _) in SHOWN.items()},
        columns=page_columns(),
        run=_run_now(view),
        waiting=view.waiting(),
        rejected=_rejected(view.status),
        refused=_kept_out(view, agents),
        page_rows=PAGE_ROWS,
    )


def agent(request: Request) -> Response:
    """Show one agent: state, fault with remedy, accuracies, history."""
    view = site_of(request).view
    name = request.query_params.get("id", "")
    before = _whole(request, "before")
    view.refresh()
    with view.lock:
        row = view.agent(name)
        if row is None:
            raise _absent(view, f"No agent '{name[:80]}' was heard here. The fleet lists those that were.")
        older = [entry for entry in view.history_ids(name) if before is None or entry < before]
    chosen = older[-PAGE_ROWS:]
    entries = view.folder.journal.entries_with(chosen) if chosen else []  # without the lock: a disk may be slow
    with view.lock:
        return _agent_page(request, view, row, entries, chosen[0] if len(older) > len(chosen) else None)


def _agent_page(
    request: Request, view: FolderView, row: AgentRow, entries: Sequence[Entry], more: int | None
) -> Response:
    """Make the page of one agent.

    Args:
        request: The request of the page.
        view: The state folder, locked.
        row: The agent.
        entries: The part of its history that the page shows, the oldest entry first.
        more: The entry before which the next part begins; None: there is none.
    """
    name = row.id
    described = [describe_entry(entry, view.book) for entry in entries]
    lines = [line for line in described if line is not None]
    results = [(as_text(line.at), line.running_accuracies) for line in lines if line.running_accuracies]
    runs = [run for run in reversed(list(view.runs)[-20:]) if run in view.begun_runs()]
    by_round = list[tuple[int, float | None, float | None]]()
    in_run = ""
    for run in runs:
        if by_round := list(view.curves(run).of_agent(name)):
            in_run = run
            break
    releases = [release for release in reversed(view.book.releases) if not release.rolled_back_by][:20]
    return page(
        request,
        "agent.html",
        topic=f"agent:{name}",
        row=row,
        figures=figures(pictures.of_agent(by_round, in_run) | pictures.of_history(results)),
        history=[_history_row(line, view.book) for line in reversed(lines)],
        more=more,
        faults=view.faults_of(name)[:PAGE_ROWS],
        releases=releases,
        pin=view.book.pin(name, view.now()),
        device=view.book.devices.get(name),
        can_enroll=site_of(request).enrolment is not None,
    )


def runs(request: Request) -> Response:
    """Show all runs, the newest first."""
    view = site_of(request).view
    before = _whole(request, "before")
    view.refresh()
    with view.lock:
        numbered = list(enumerate(view.runs.values(), 1))
    older = [(number, run) for number, run in numbered if before is None or number < before]
    chosen = older[-PAGE_ROWS:][::-1]
    more = chosen[-1][0] if len(older) > len(chosen) else None
    ends = _accuracies_at_end(view, [run for _, run in chosen])
    with view.lock:
        rows = [_standing(view, run, ends[run.id]) for _, run in chosen]
        return page(request, "runs.html", topic="runs", rows=rows, more=more, total=len(numbered), most=MOST_COMPARED)


def run(request: Request) -> Response:
    """Show one run: what it waits for, its curves, what went wrong, and its log."""
    view = site_of(request).view
    name = request.query_params.get("id", "")
    view.refresh()
    with view.lock:
        info = _run_named(view, name)
    events = list[Event]()  # these without the lock: a disk may be slow, and a summary has all agents
    with contextlib.suppress(HeadwaterError):  # the page says why the journal cannot be read
        events = view.log_of(name)
    end = _end_of(view, info) if info.is_over else None
    run_files = _files(view, name)
    with view.lock:
        return _run_page(request, view, info, events, end, run_files)


def _run_page(
    request: Request,
    view: FolderView,
    info: RunInfo,
    events: Sequence[Event],
    end: _EndOfRun | None,
    run_files: Sequence[tuple[str, int]],
) -> Response:
    """Make the page of one run.

    Args:
        request: The request of the page.
        view: The state folder, locked.
        info: The run.
        events: Its newest events.
        end: What its summary says; None where it has not ended, or has none that can be read.
        run_files: Name and bytes of each file in its folder.
    """
    curves = view.curves(info.id)
    points = curves.rounds()
    now = view.run_now()
    live = now if now is not None and now.id == info.id else None
    analysed = view.folder.run(info.id).folder / ANALYSIS
    charts = pictures.of_run(points)
    return page(
        request,
        "run.html",
        topic=f"run:{info.id}",
        info=info,
        standing=_standing(view, info, {} if end is None else end.means),
        live=live,
        cohort=[] if live is None else _cohort(live),
        waiting=None if live is None else view.waiting(),
        end=end,
        warnings=() if end is None else end.warnings,
        next_steps=() if end is None else end.next_steps,
        privacy=_privacy(live, end),
        best=_best(points),
        figures=figures(charts),
        words=pictures.WORDS,
        first_rows=FIRST_ROWS,
        table=_table_of_rounds(request, points),
        incidents=curves.incidents[-PAGE_ROWS:][::-1],
        events=events[-PAGE_ROWS:][::-1],
        incident_count=len(curves.incidents),
        damaged=curves.damaged,
        settings=_settings(info.request.to_body()),
        files=run_files,
        has_report=any(file == REPORT for file, _ in run_files),
        has_analysis=(analysed / "index.html").is_file(),
        equal_traffic="bytes" not in charts and bool(points),
        up=sum(point.bytes_up or 0.0 for point in points),
        down=sum(point.bytes_down or 0.0 for point in points),
        releases=[release for release in view.book.releases if release.run == info.id],
    )


@dataclass(frozen=True)
class _RoundsPage:
    """A part of the table of rounds."""

    rounds: Sequence[RoundPoint]
    """The newest first."""

    is_older: bool
    """Whether it is not the part with the newest rounds."""

    more: int | None
    """The round before which the next part begins; None: there is none."""


def _table_of_rounds(request: Request, points: Sequence[RoundPoint]) -> _RoundsPage:
    """Return the part of the table of rounds that is asked for."""
    before = _whole(request, "before")
    older = [point for point in points if before is None or point.round < before]
    return _RoundsPage(
        rounds=older[-PAGE_ROWS:][::-1],
        is_older=before is not None,
        more=older[-PAGE_ROWS].round if len(older) > PAGE_ROWS else None,
    )


def report(request: Request) -> Response:
    """Send the page of a run that was written at its end; its scripts have no part in the session."""
    view = site_of(request).view
    name = request.query_params.get("id", "")
    view.refresh()
    with view.lock:
        path = view.folder.run(_run_named(view, name).id).folder / REPORT
    try:
        content = read_regular(path)
    except OSError:
        advice = f"It is written at the end of a run; 'headwater report {name}' writes it, too."
        raise HTTPException(404, f"{name} has no {REPORT}. {advice}") from None
    return Response(content, media_type="text/html", headers={"content-security-policy": REPORT_POLICY})


def analysis(request: Request) -> Response:
    """Send a file of a run's analysis: its page, which stands alone, its pictures and its numbers."""
    view = site_of(request).view
    run = request.path_params["run"]
    name = request.path_params["name"]
    view.refresh()
    with view.lock:
        folder = view.folder.run(_run_named(view, run).id).folder / ANALYSIS
    if (kind := _KINDS.get(name.rpartition(".")[2])) is None or not re.fullmatch(r"\w[\w-]*\.\w+", name, re.ASCII):
        raise HTTPException(404, "An analysis has no such file.")
    try:
        content = read_regular(folder / name)
    except OSError:
        advice = (
            f"'headwater analyze {run} --out STATE/runs/{run}/{ANALYSIS}' makes it, with the state folder as STATE."
        )
        raise HTTPException(404, f"{run} has no {name} of an analysis. {advice}") from None
    return Response(content, media_type=kind, headers={"content-security-policy": REPORT_POLICY})


def compare(request: Request) -> Response:
    """Show several runs on common axes, with the settings in which they differ."""
    view = site_of(request).view
    names = dict.fromkeys(request.query_params.getlist("run"))
    if len(names) > MOST_COMPARED:
        raise UsageError(f"{len(names)} runs are chosen, at most {MOST_COMPARED} can be compared; choose fewer")
    view.refresh()
    with view.lock:
        chosen = [_run_named(view, name) for name in names]
        if not chosen:
            chosen = [run for run in view.runs.values() if run.started_at][-10:]
    ends = _accuracies_at_end(view, chosen)
    with view.lock:
        return _comparison(request, view, chosen, ends)


def _comparison(
    request: Request, view: FolderView, chosen: Sequence[RunInfo], ends: Mapping[str, Mapping[str, float | None]]
) -> Response:
    """Make the page that compares the chosen runs; ``ends``: run -> `_accuracies_at_end`."""
    names = dict.fromkeys(request.query_params.getlist("run"))
    curves = [(run_info.id, view.curves(run_info.id)) for run_info in chosen]
    settings_of_runs = [_settings(run_info.request.to_body()) for run_info in chosen]
    wants_all = "all" in request.query_params
    keys = sorted(set().union(*settings_of_runs))
    if not wants_all:
        keys = [key for key in keys if _differs(key, settings_of_runs)]
    columns = keys[:MOST_SETTINGS]
    rows = [
        replace(_standing(view, run_info, ends[run_info.id]), settings=tuple(settings.get(key, "") for key in columns))
        for run_info, settings in zip(chosen, settings_of_runs, strict=True)
    ]
    return page(
        request,
        "compare.html",
        topic="runs",
        rows=rows,
        columns=columns,
        left_out=len(keys) - len(columns),
        wants_all=wants_all,
        query="&".join(f"run={quote(name)}" for name in names),
        figures=figures(pictures.of_compared(curves)),
    )


def _differs(key: str, settings_of_runs: Sequence[Mapping[str, str]]) -> bool:
    """Return whether a setting has more than one value in these runs; one that a run lacks counts as a value."""
    return len({str(settings.get(key)) for settings in settings_of_runs}) > 1


@shown
def releases(request: Request) -> Response:
    """Show all releases, the newest first, and the devices of one of them."""
    view = site_of(request).view
    before = _whole(request, "before")
    number = _whole(request, "number")
    book = view.book
    now = view.now()
    # 1. The releases of this page: the one that is named, or a part of the list.
    more = None
    devices = None
    named_row = None
    if number is None:
        older = [release for release in book.releases if before is None or release.number < before]
        chosen = older[-PAGE_ROWS:][::-1]
        if len(older) > len(chosen):
            more = chosen[-1].number
    else:
        named = book.get(number)
        if named is None:
            raise _absent(view, f"There is no release {number}. The page of releases lists those that there are.")
        chosen = [named]
        devices = _devices(book, named, request, now)
        named_row = ReleaseRow.from_release(book, named, now)
    # 2. Their rows. What is over cannot be changed.
    in_force = [*book.current(), *(release for release in book.releases if release.held)]
    can_be_changed = {release.number for release in in_force}
    running = Counter(device.runs for device in book.devices.values())
    rows = []
    for release in chosen:
        actions = list(_possible(release)) if release.number in can_be_changed else []
        rows.append(_release_panel(book, release, now, running[release.bundle_id], actions))
    return page(
        request,
        "releases.html",
        topic="releases",
        rows=rows,
        number=number,
        more=more,
        devices=devices,
        named=named_row,
        pins=sorted((name, pin) for name, pin in book.pins.items() if pin.holds(now))[:PAGE_ROWS],
        has_bundles=any(run_info.bundle for run_info in view.runs.values()),
    )


@dataclass(frozen=True)
class _ReleasePanel:
    """What the page of releases says of one."""

    release: Release
    stage: str
    kind: str
    """How the stage looks."""

    undone: int
    """Number of the release that was undone, this one or the one that it undoes; 0: none."""

    undone_because: str
    size: int
    """Devices of the canary; 0: it has none."""

    waits: tuple[str, ...]
    runs: int
    """Devices that run its bundle."""

    actions: Sequence[str]
    """What can be done to it."""


def _release_panel(book: Book, release: Release, now: datetime, runs: int, actions: Sequence[str]) -> _ReleasePanel:
    """Return what the page of releases says of one: where it stands, what undid it, and what it waits for."""
    undone = release.rolls_back
    if not undone and release.rolled_back_by:
        undone = release.number
    return _ReleasePanel(
        release=release,
        stage=_stage_text(book, release, now),
        kind=_stage_kind(book, release, now),
        undone=undone,
        undone_because=book.undone_because(release),
        size=book.canary_size(release) if release.plan.canary else 0,
        waits=tuple(list_waits(book, release, now)),
        runs=runs,
        actions=actions,
    )


def bundles(request: Request) -> Response:
    """Show all exported bundles: how close they are to what was trained, and who signed them."""
    view = site_of(request).view
    before = _whole(request, "before")
    view.refresh()
    by_bundle = dict[str, list[tuple[int, str, str]]]()
    with view.lock:
        numbered = [(number, run_info) for number, run_info in enumerate(view.runs.values(), 1) if run_info.bundle]
        for release in view.book.releases:
            stage = _stage_text(view.book, release, view.now())
            kind = _stage_kind(view.book, release, view.now())
            by_bundle.setdefault(release.bundle_id, []).append((release.number, stage, kind))
    older = [(number, run_info) for number, run_info in numbered if before is None or number < before]
    chosen = older[-BUNDLES_ON_PAGE:][::-1]
    rows = [  # without the lock: files of some megabytes are read and compared with their hashes, once
        _BundleRow(
            run=run_info,
            bundle=run_info.bundle,
            releases=by_bundle.get(run_info.bundle.fact.bundle_id, []),
            file=_bundle_file(view, run_info.bundle.digest),
        )
        for _, run_info in chosen
        if run_info.bundle is not None
    ]
    more = chosen[-1][0] if len(older) > len(chosen) else None
    with view.lock:
        return page(request, "bundles.html", topic="releases", rows=rows, more=more)


def _stage_text(book: Book, release: Release, now: datetime) -> str:
    """Return where a release stands, in the words of 'headwater release status'."""
    return Standing.from_release(book, release, now).text


def _stage_kind(book: Book, release: Release, now: datetime) -> str:
    """Return the word that decides the colour of a release's stage."""
    if not release.rolled_back_by and book.replaced_by(release) is not None:
        return "replaced"
    return book.stage(release, now)


@shown
def methods(request: Request) -> Response:
    """Show what leaves a device and what stays on it, for each method."""
    view = site_of(request).view
    run_infos = list(view.runs.values())
    used = Counter(as_text(run_info.request.method) for run_info in run_infos)
    newest = as_text(run_infos[-1].request.method) if run_infos else ""
    name = request.query_params.get("name", newest)
    our_methods = _methods()
    return page(
        request,
        "methods.html",
        topic="",
        known=our_methods,
        used=used,
        chosen=our_methods.get(name),
        wanted=name,
        is_newest="name" not in request.query_params,
        run=next((run_info for run_info in reversed(run_infos) if run_info.request.method == name), None),
    )


def failed(request: Request, error: Exception) -> Response:
    """Return the page of an error: what was found and what to do, and nothing of the inside."""
    if isinstance(error, HTTPException):
        status = error.status_code
        message = str(error.detail)
        message = message if status != 404 or message != "Not Found" else "There is no such page."
    elif isinstance(error, UnknownName):
        status = 404
        message = str(error)
    elif isinstance(error, UsageError):
        status = 400
        message = str(error)
    elif isinstance(error, HeadwaterError):
        status = 503
        message = str(error)
    else:
        status = 500
        message = "This page could not be made; the log of the web view has the reason."
    return page(request, "error.html", code=status, message=message)


# --- inside ----------------------------------------------------------------------------------------------------------


def _whole(request: Request, name: str) -> int | None:
    """Return a whole number in the address; None where it is not there.

    Raises:
        UsageError: it is no such number.
    """
    digits = request.query_params.get(name)
    if digits is None:
        return None
    if not digits.isascii() or not digits.isdigit() or len(digits) > 12:
        raise UsageError(f"{name}={digits[:40]} is no whole number")
    return int(digits)


def _absent(view: FolderView, message: str) -> HTTPException:
    """Return the error of something that is not there, or not yet known."""
    if view.is_loaded:
        return HTTPException(404, message)
    return HTTPException(503, "The state folder is still being read; load this page again in a few seconds.")


def _run_named(view: FolderView, name: str) -> RunInfo:
    if (info := view.runs.get(name)) is None:
        raise _absent(view, f"There is no run '{name[:80]}' in this state folder. The page of runs lists all.")
    return info


@dataclass(frozen=True)
class _RunStanding:
    """How far a run is, and what its accuracies over all agents are."""

    info: RunInfo
    status: str
    closed: int
    """Number of the newest closed round of which there are figures; 0: none."""

    is_being_read: bool
    """Whether its figures are not read to their end yet."""

    acc: Mapping[str, float]
    """Scope -> mean accuracy, 0..1."""

    spreads: Mapping[str, Spread]
    """Scope -> accuracies in the newest round that has any."""

    seconds: float
    """Of all closed rounds, with the waits before them."""

    live: RunUnderWay | None = None
    """What the coordinator last wrote of it, where it is the run under way."""

    settings: tuple[str, ...] = ()
    """The values in the columns of a comparison."""


def _run_now(view: FolderView) -> _RunStanding | None:
    now = view.run_now()
    info = None if now is None else view.runs.get(now.id)
    if info is None:
        return None
    return replace(_standing(view, info, {}), live=now)


def _standing(view: FolderView, info: RunInfo, at_end: Mapping[str, float | None]) -> _RunStanding:
    """Say how far a run is, and what its accuracies over all agents are.

    Args:
        view: The state folder; its lock is held.
        info: The run.
        at_end: Scope -> mean accuracy after the training (`_accuracies_at_end`). The last round's figures are of the
            model before that round, so they stand only for what is not known yet.
    """
    curves = view.curves(info.id)
    rounds = curves.rounds()
    newest = {scope: spread for point in rounds for scope, spread in point.acc.items()}
    means: dict[str, float] = {scope: spread.mean for scope, spread in newest.items()}
    means |= {scope: mean for scope, mean in at_end.items() if mean is not None}
    return _RunStanding(
        info=info,
        status=view.status_of(info),
        closed=rounds[-1].round if rounds else 0,
        is_being_read=info.is_over and not curves.is_read,
        acc=means,
        spreads=newest,
        seconds=sum(point.work_s + point.wait_s for point in rounds),
    )


def _accuracies_at_end(view: FolderView, runs: Iterable[RunInfo]) -> dict[str, Mapping[str, float | None]]:
    """Return run -> scope -> mean accuracy after the training, empty for a run under way. The lock is not held."""
    accuracies = dict[str, Mapping[str, float | None]]()
    for run in runs:
        end = _end_of(view, run) if run.is_over else None
        accuracies[run.id] = {} if end is None else end.means
    return accuracies


@dataclass(frozen=True)
class _Member:
    """A member of the cohort of the open round."""

    agent: str
    state: str
    """working, rejected or done."""

    reason: str = ""


def _cohort(live: RunUnderWay) -> list[_Member]:
    """Return the members of the open round's cohort: those missing first, then those rejected, then those done."""
    accepted = set(live.accepted)
    reasons = live.rejected
    working: list[_Member] = []
    rejected: list[_Member] = []
    done: list[_Member] = []
    for agent in live.cohort:
        if agent in reasons:
            rejected.append(_Member(agent, "rejected", reasons[agent]))
        if agent in accepted:
            done.append(_Member(agent, "done"))
        if agent not in reasons and agent not in accepted:
            working.append(_Member(agent, "working"))
    return [*working, *rejected, *done]


def _kept_out(view: FolderView, agents: Sequence[AgentRow]) -> list[RefusedDevice]:
    """Return the refused devices that are no row of the table: without a name, or with that of another agent."""
    shown_as = {row.id for row in agents if row.presence is Presence.REFUSED}
    return [device for device in view.refused() if device.id not in shown_as]


def _rejected(status: Status) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Return what the coordinator has rejected since its start, with the most frequent causes."""
    result = []
    for kind in ("messages", "updates"):
        rejected = status.rejected(kind)
        if rejected.total:
            result.append((kind, rejected.total, list(rejected.causes.items())))
    return result


@dataclass(frozen=True)
class _EndOfRun:
    """What the summary of a run says, but for single agents."""

    means: Mapping[str, float | None]
    """Scope -> mean accuracy over agents, 0..1; None: no agent has it."""

    counts: Mapping[str, int]
    """Scope, or ``gain`` -> agents behind the mean."""

    gain: float | None
    """Mean of acc.personal minus acc.local; None: no agent has both."""

    gain_kind: Gain
    """Whether that is more than noise."""

    stopped: str
    """Why it has ended before its last round; empty: it has not."""

    warnings: tuple[str, ...]
    next_steps: tuple[str, ...]
    """What can be tried next where clients are worse than alone."""

    privacy: PrivacySpent | None


def _end_of(view: FolderView, info: RunInfo) -> _EndOfRun | None:
    """Return the end of a run; None where it has no summary, or a damaged one."""
    path = view.folder.run(info.id).summary_path
    try:
        stamp = path.stat().st_mtime_ns
        return _read_end(str(path), stamp)
    except (OSError, StateError):
        return None


@functools.lru_cache(256)
def _read_end(path: str, _stamp: int) -> _EndOfRun:
    """Return the end of a run from its summary's file; ``_stamp`` is the file's time.

    Agents have contributed to the file, so it is read here as JSON, and a value of another form counts as absent.
    """
    content = read_json(Path(path)) or {}
    agents = [agent for agent in content.pop("agents", None) or () if isinstance(agent, dict)]
    means = {scope: Mean.from_values(_accuracy_in(agent, scope) for agent in agents) for scope in SCOPES}
    compared = list(_compared(agents))
    gain = Mean.from_values(pair.personal - pair.local for pair in compared)
    counts = {scope: mean.agents for scope, mean in means.items()}
    return _EndOfRun(
        means={scope: mean.value for scope, mean in means.items()},
        counts={**counts, "gain": gain.agents},
        gain=gain.value,
        gain_kind=classify_mean_gain(pair for pair in compared if pair.support),
        stopped=as_text(content.get("stopped") or ""),
        warnings=tuple(_warnings(content)),
        next_steps=tuple(_next_steps(content)),
        privacy=PrivacySpent.from_body(content.get("privacy")),
    )


def _accuracy_in(agent: Mapping[str, Any], scope: str) -> float | None:
    """Return an accuracy of an agent in a summary; None where it has none."""
    acc = agent.get("acc")
    return as_number(acc.get(scope)) if isinstance(acc, dict) else None


def _compared(agents: Sequence[Mapping[str, Any]]) -> Iterator[Compared]:
    """Yield both accuracies of each agent of a summary that has both."""
    for agent in agents:
        local = _accuracy_in(agent, "local")
        personal = _accuracy_in(agent, "personal")
        if local is not None and personal is not None:
            yield Compared(local, personal, int(as_number(agent.get("support")) or 0))


def _warnings(summary: Mapping[str, Any]) -> list[str]:
    warnings = [warning for warning in summary.get("warnings") or () if isinstance(warning, dict)]
    texts = [as_text(warning.get("message")) for warning in warnings]
    more = len(texts) - 2 * SHOWN_CLIENTS
    return texts if more <= 0 else [*texts[: 2 * SHOWN_CLIENTS], f"and {more} more, in summary.json"]


def _next_steps(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the message of each next step in a summary."""
    steps = summary.get("next_steps")
    if not isinstance(steps, list):
        return
    for step in steps:
        if isinstance(step, (dict, str)):
            yield NextStep.from_json(step).message


def _privacy(live: RunUnderWay | None, end: _EndOfRun | None) -> str:
    """Return what is spent of the privacy budget, as a line; empty where no noise is added."""
    spent = None if live is None else live.privacy
    if spent is None and end is not None:
        spent = end.privacy
    return "" if spent is None else spent.text


def _best(points: Sequence[RoundPoint]) -> dict[str, tuple[int, float]]:
    """Return scope -> number and mean accuracy of its best round, the first one of equals."""
    result = dict[str, tuple[int, float]]()
    for point in points:
        for scope, spread in point.acc.items():
            if scope not in result or spread.mean > result[scope][1]:
                result[scope] = point.round, spread.mean
    return result


def _settings(request: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run was requested with, as text by dotted name, without its id."""
    settings = dict(_flatten("", dict(request)))
    settings.pop("id", None)
    return settings


def _flatten(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the values within a value as text, by their dotted names; empty and deep tables are values themselves."""
    if isinstance(value, dict) and value and len(name) < 60:
        for key, part in value.items():
            yield from _flatten(f"{name}.{as_text(key)}" if name else as_text(key), part)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _files(view: FolderView, run: str) -> list[tuple[str, int]]:
    folder = view.folder.run(run).folder
    try:
        return sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())[:PAGE_ROWS]
    except OSError:
        return []


@dataclass(frozen=True)
class _HistoryRow:
    """A line of an agent's history as the page shows it."""

    at: str
    what: str
    note: str
    bundle: str
    release: int | None
    acc: Mapping[str, float | None]
    by: str


def _history_row(line: HistoryLine, book: Book) -> _HistoryRow:
    """Return a line of an agent's history for its page, with the release by which its bundle came."""
    bundle = ""
    number = None
    by = ""
    if isinstance(line, AccuracyLine | BundleLine):
        bundle = as_text(line.bundle_id or "")
        by_bundle = {release.bundle_id: release.number for release in book.releases}
        number = by_bundle.get(bundle) if bundle else None
    if isinstance(line, BundleLine) and line.outcome:
        number = line.release
    if isinstance(line, PinLine):
        by = as_text(line.by or "")
    event, note = _say_history(line)
    return _HistoryRow(line.at, event, as_text(note or ""), bundle, number, line.accuracies, by)


def _say_history(line: HistoryLine) -> tuple[str, str | None]:
    """Return what happened, and the note beside it."""
    if isinstance(line, AccuracyLine):
        note = "better off alone" if line.better_alone else line.rolled_back
        return f"finished {line.run}", note
    if isinstance(line, BundleLine):
        event = f"release {line.release}: {line.outcome}" if line.outcome else "says what it runs"
        return event, line.reason or line.kept
    if isinstance(line, RejectedLine):
        return f"update rejected, {line.run}, round {line.round}", line.reason
    if line.release is None:
        return "unpinned", ""
    until = f" until {show_time(line.until)}" if line.until else ""
    return f"pinned to release {line.release}{until}", line.reason


def _possible(release: Release) -> Iterator[str]:
    """Yield what can be done to a release now."""
    if release.stage in {"canary", "paused"}:
        yield "promote"
    if release.is_open and not release.rolls_back:
        yield "hold"
    if release.stage == "held":
        yield "resume"
    if not release.rolled_back_by:
        yield "rollback"


@dataclass(frozen=True)
class _DevicesPage:
    """A part of the devices that a release is about."""

    rows: Sequence[tuple[int, str, str, Result | None]]
    """Place in the order of outcomes, device, outcome, and what the device said; None: it has not answered."""

    total: int
    more: str
    """The device after which the next part begins; empty: there is none."""

    canary: frozenset[str]


def _devices(book: Book, release: Release, request: Request, now: datetime) -> _DevicesPage:
    """Return one page of the devices that a release is about: those that failed first, then those that are awaited."""
    order = {"failed": 0, "unable": 1, "pending": 2, "declined": 3, "ok": 4}
    pending = set(book.pending(release, now)) - set(release.results)  # a device that was unable is asked again
    rows: list[tuple[int, str, str, Result | None]] = []
    rows += [(order[result.outcome], name, result.outcome, result) for name, result in release.results.items()]
    rows += [(order["pending"], name, "pending", None) for name in pending]
    rows.sort(key=lambda row: row[:2])
    after = request.query_params.get("after", "")
    position = next((at + 1 for at, row in enumerate(rows) if row[1] == after), 0) if after else 0
    chosen = rows[position : position + PAGE_ROWS]
    more = chosen[-1][1] if position + PAGE_ROWS < len(rows) else ""
    return _DevicesPage(rows=chosen, total=len(rows), more=more, canary=frozenset(release.canary))


@dataclass(frozen=True)
class _BundleFile:
    """What the file of a bundle says of itself."""

    figures: Mapping[str, Any] | None = None
    """`edge_agent.bundle.manifest.variant_figures`, as commands of devices print them; None: the file is gone."""

    parity: Parity | None = None
    feature_dim: int = 0
    heads: Sequence[str] = ()
    classes: Sequence[str] = ()
    signers: Sequence[str] = ()
    signed: SignedMetadata | None = None
    """The release that the signers have signed; None: nobody has."""

    gone: str = ""
    """Why the file cannot be read; empty: it can."""


@dataclass(frozen=True)
class _BundleRow:
    """A bundle on the page of bundles."""

    run: RunInfo
    bundle: RunBundle
    releases: Sequence[tuple[int, str, str]]
    """Number of each release of it, where that stands, and how this looks."""

    file: _BundleFile


def _bundle_file(view: FolderView, digest: str) -> _BundleFile:
    """Return what a bundle's file says of itself; ``gone`` where the file was removed."""
    try:
        path = view.folder.blobs.path(digest)
        return _read_bundle_file(str(path), path.stat().st_mtime_ns)
    except (OSError, HeadwaterError) as error:
        return _BundleFile(gone=as_text(error)[:200])


@functools.lru_cache(64)
def _read_bundle_file(path: str, _stamp: int) -> _BundleFile:
    """Return what the bundle in a file says of itself, and who signed it; ``_stamp`` is the file's time."""
    from edge_agent.bundle.archive import open_bundle
    from edge_agent.bundle.manifest import variant_figures
    from edge_agent.bundle.trust import Member, Release, parse, read

    opened = open_bundle(Path(path))
    signers = list[str]()
    signed = None
    if opened.release is not None:
        member = parse(Member, opened.release, path)
        signers = [signature.keyid for signature in member.release.signatures]
        signed = read(Release, member.release, "release")
    manifest = opened.manifest
    return _BundleFile(
        figures=variant_figures(manifest),
        parity=manifest.parity,
        feature_dim=manifest.feature_dim,
        heads=sorted(manifest.heads),
        classes=manifest.task.class_names,
        signers=signers,
        signed=signed,
    )


@functools.cache
def _methods() -> dict[str, dict[str, Any]]:
    """Return our own methods as 'headwater methods' lists them."""
    content: dict[str, dict[str, Any]] = json.loads(files("coordinator.cli").joinpath("methods.json").read_bytes())
    return content
