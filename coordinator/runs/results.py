"""Figures of rounds and runs: ``metrics.jsonl``, restored from the journal after a kill, and ``summary.json``."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edge_agent.core.errors import ExportRejected, HeadwaterError, StateError
from edge_agent.wire.messages.up import Report

from ..journal import entries as facts
from ..journal.entries import CancelRequested, ReleaseReported, RoundClosed, RunCancelled
from ..journal.kinds import FINAL
from ..journal.store import Entry, utc_now
from ..rounds.context import Run, Steps, Waiting
from ..rounds.figures import Stats, round_line
from ..rounds.privacy import PrivacyBudget
from ..rounds.selection import Exclusions
from ..state.run_lines import AgentLine
from ..state.store import StateFolder
from ..text import reason_of
from ..views.runs import RunRecord, replay, step
from .release import Released, encoder_sha256, export_bundle, release
from .result_notes import (
    SHOWN_CLIENTS,
    CoordinatorMetrics,
    LastUpdates,
    describe_warnings,
    find_absent,
    find_bounded,
    find_warnings,
    next_steps,
    restored_of,
)

log = logging.getLogger(__name__)


def restore(state: StateFolder, run: str) -> None:
    """Add closed rounds to ``metrics.jsonl`` that are missing there after a kill between journal and figures.

    Raises:
        StateError: the file is damaged, or has rounds that the journal lacks.
    """
    # 1. Which rounds have closed, and which of them have a record. The file must not be ahead of the journal.
    closed = {entry.round or 0: entry for entry in state.journal.entries(run, ("round_closed",))}
    folder = state.run(run)
    recorded = {line.round for line in folder.round_lines()}
    later = recorded - closed.keys()
    if later:
        raise StateError(
            f"{folder.metrics_path} has round {max(later)}, the last closed one in {state.journal.location} is "
            f"{max(closed, default=0)}: the journal is an older copy, or was copied without journal.db-wal. Put the "
            "newer journal back, or the whole state folder from a backup; to repeat those rounds, remove their lines"
        )
    # 2. The records that are missing, in the order of their rounds.
    for number in sorted(closed.keys() - recorded):
        end = closed[number]
        record = _record_before(state, run, closed.get(number - 1), end, number)
        if record.open_round is not None and isinstance(end.fact, RoundClosed):
            folder.append_metrics(round_line(record.open_round, end.fact).to_json())


def _record_before(state: StateFolder, run: str, end_before: Entry | None, end: Entry, number: int) -> RunRecord:
    """Return the record of a run just before a round closed: its open round is as it was then.

    Args:
        state: The state folder.
        run: Name of the run.
        end_before: The entry with which the round before closed; None: it is the first one.
        end: The entry with which this round closed.
        number: The round's number.
    """
    record = RunRecord(run, round=number - 1)
    begin = 0 if end_before is None else end_before.id
    for entry in state.journal.entries(run, after=begin):
        if entry.id < end.id:  # what comes after it was late
            record = step(record, entry)
    return record


RECORDED_AT_ONCE = 500
"""Agents whose results are written together."""


def finish_run(run: Run, stats: Stats, exclusions: Exclusions, stopped: str) -> Steps:
    """Export, and release, where the configuration says so, then write summary and report.

    Args:
        run: The run, after its last round.
        stats: Time and bytes since it began.
        exclusions: The agents that it has left out.
        stopped: Why it ended before its last round; empty when it did not.
    """
    from ..report import write_report

    context = run.context
    state = context.state
    request = run.request
    folder = state.run(run.id)
    # Step 1: the bundle. Its release waits for reports of head-tier devices, which belong into the results.
    export = yield from _export_after_run(run)
    # Step 2: what each agent reports of the final model, before the summary that says so.
    _note_stalled(run)
    agents = [_agent_line(run, stats, agent, report) for agent, report in sorted(run.reports.reports.items())]
    yield from _record_agents(run, agents)
    # Step 3: warnings, from the figures of all rounds.
    lines = folder.round_lines()
    losses = [line.loss for line in lines]
    present = {*run.reports.reports, *(member.id for member in context.roster.members() if member.is_present)}
    warnings = [
        *find_absent(lines, request.rounds, lambda agent: agent not in present, exclusions.failing),
        *restored_of(lines),
        *find_warnings(agents, losses, request.task.num_classes),
    ]
    # A simulation has many clients, and its result has all of them.
    shown_clients = 0 if context.is_simulation else SHOWN_CLIENTS
    has_bundle = export.released is not None
    steps = next_steps(request, agents, losses, has_bundle=has_bundle, leaves_encoder=run.method.leaves_encoder)
    # The log of a coordinator is where its operator looks; a simulation shows the warnings of its result itself.
    level = logging.INFO if context.is_simulation else logging.WARNING
    for line in describe_warnings(warnings, shown_clients):
        log.log(level, "result_warning run=%s: %s", run.id, line)
    # Step 4: summary and report first, the journal last: a kill before that repeats this function, and nobody who sees
    # that the run is finished misses its summary.
    sha256 = encoder_sha256(run)
    updates = LastUpdates.from_lines(lines)
    spent = PrivacyBudget(context.config, state.journal, run.method.server_step_is_mean()).figures()
    folder.write_summary(
        {
            "run_id": run.id,
            "id": replay(state.journal, run.id).request.id,
            "method": request.method,
            "params": run.method.all_params(),
            "peft": request.task.peft,
            "peft_params": request.task.peft_params,
            "rounds": request.rounds,
            "seed": request.seed,
            "status": "finished",
            **updates.to_json(),
            "at": utc_now().isoformat(timespec="seconds"),
            "seconds": round(stats.seconds(context), 3),
            "encoder_sha256": sha256,
            "agents": [agent.to_json() for agent in agents],
            "left_out": exclusions.body(),
            "bounded": {agent: bounded.to_json() for agent, bounded in find_bounded(lines).items()},
            "warnings": [warning.to_json() for warning in warnings],
            "next_steps": [next_step.to_json() for next_step in steps],
            "faults": dict(sorted(run.reports.faults.items())),
            "stopped": stopped or None,
            "privacy": None if spent is None else spent.to_json(),
            "bundle": None if export.released is None else export.released.fact.to_body(),
            "bundle_why_not": export.why_not,
            **CoordinatorMetrics.from_journal(state.journal, run.id).to_json(),
        },
    )
    write_report(folder)
    state.journal.append(updates.to_fact(sha256), run=run.id)
    log.info("run_finished run=%s encoder_sha256=%s", run.id, sha256[:12] or "none")
    updates.log(run.id)


@dataclass(frozen=True)
class _Export:
    """The bundle of a run that has ended, or why there is none."""

    released: Released | None = None
    why_not: str | None = None


def _export_after_run(run: Run) -> Generator[Waiting, None, _Export]:
    """Export the encoder of a run that has ended, and release it, where the configuration says so.

    A rejected export costs the bundle, not the run (the generator's value is an `_Export`).
    """
    config = run.context.config.export
    if not config.after_run:
        return _Export(why_not="export.after_run is false")
    if not run.has_encoder:
        return _Export(why_not=f"method '{run.method.name}' shares no encoder")
    try:
        released = yield from export_bundle(run, run.id)
    except ExportRejected as error:
        why_not = reason_of(error)
        log.error("export_rejected run=%s reason=%s", run.id, why_not)
        return _Export(why_not=why_not)
    journal = run.context.state.journal
    journal.append(released.fact, run=run.id, round=run.request.rounds, digest=released.digest)
    if config.release == "each_run":
        yield from release(run, released, run.request.rounds)
    return _Export(released)


def _note_stalled(run: Run) -> None:
    """Note a fault of each agent that was not waited for because its disk cannot be written."""
    for member in run.context.roster.members():
        if member.condition != "stalled" or member.id in run.reports.reports:
            continue
        reason = "its disk cannot be written" if member.fault is None else member.fault.message
        run.reports.fault(member.id, f"no report of the final model, it was not waited for: {reason}")


def _record_agents(run: Run, agents: Sequence[AgentLine]) -> Steps:
    """Write the results of all agents to metrics and journal.

    In parts, each of which reaches the disk together: ten thousand agents would otherwise be ten thousand waits for the
    disk, in which nobody's heartbeat is read.
    """
    state = run.context.state
    for begin in range(0, len(agents), RECORDED_AT_ONCE):
        part = agents[begin : begin + RECORDED_AT_ONCE]
        with state.journal.deferring():
            for line in part:
                state.journal.append(ReleaseReported(**line.to_json()), run=run.id, agent=line.id)
            state.run(run.id).append_metrics(*({"kind": "agent", **line.to_json()} for line in part))
        state.journal.flush()
        yield Waiting(f"{run.id}: the results of its agents are written", about="results")


def _agent_line(run: Run, stats: Stats, agent: str, report: Report) -> AgentLine:
    """Return the metrics of one device; all are of the run's encoder, even if the device now runs another one."""
    member = run.context.roster.get(agent)
    up, down = stats.traffic(run.context, agent)
    acc = {"local": report.acc_local, "global": report.acc_global, "personal": report.acc_personal}
    return AgentLine(
        id=agent,
        tier=member.tier if member else "",
        samples=report.samples,
        acc=acc if report.samples else dict.fromkeys(acc),
        local_model=report.local_model,
        better_alone=report.better_alone,
        head=report.head,
        precision=report.precision or None,
        fingerprint=report.fingerprint or None,
        runs=report.bundle_id,
        rolled_back=report.rolled_back or None,
        about=report.about or None,
        release=report.release,
        before=report.metrics.get("acc.before"),
        support=report.support,
        one_class=report.one_class,
        rss_mb=round(report.rss_mb, 1),
        torch_loaded=report.torch_loaded,
        bytes_up=up,
        bytes_down=down,
    )


def end_run(state: StateFolder, run: str, kind: Literal["run_failed", "run_cancelled"], reason: str) -> None:
    """End ``run`` for good; only for the process that holds the folder's lock.

    Raises:
        StateError: the journal cannot be written. (A summary that cannot be written is only logged.)
    """
    fact = facts.RunFailed(reason=reason) if kind == "run_failed" else RunCancelled(reason=reason)
    state.journal.append(fact, run=run)
    try:
        restore(state, run)
        record = replay(state.journal, run)
        summary: dict[str, Any] = {
            "run_id": run,
            **record.request.settings(),
            "status": FINAL[kind],
            "reason": reason,
            "round": record.round,
            "at": utc_now().isoformat(timespec="seconds"),
            "agents": [],
            "left_out": Exclusions.replay(state.journal, run).body(),
        }
        state.run(run).write_summary(summary)
    except (HeadwaterError, OSError) as error:
        log.warning("summary_not_written run=%s reason=%s", run, error)


def requested_cancels(state: StateFolder, after: int) -> tuple[dict[str, str], int]:
    """Return run -> reason of the unfinished runs that are to be cancelled, and the id of the last entry that was read.

    Args:
        state: The state folder.
        after: Id of the last entry that was read before.
    """
    entries = state.journal.entries(kinds=("cancel_requested",), after=after)
    if not entries:
        return {}, after
    unfinished = set(state.journal.unfinished())
    cancels: dict[str, str] = {}
    for entry in entries:
        if entry.run in unfinished and isinstance(entry.fact, CancelRequested):
            cancels[entry.run] = entry.fact.reason
    return cancels, entries[-1].id
