"""Figures of rounds and runs: ``metrics.jsonl``, restored from the journal after a kill, and ``summary.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edge_agent.errors import ExportRejected, HeadwaterError
from edge_agent.wire.messages import Report

from ..fleet.transfers import Collection, reason_of
from ..state.journal import FINAL, Accepted, Journal, OpenRound, RunRecord, step, utc_now
from ..state.store import StateFolder
from .context import Run, RunContext, Steps
from .release import EncoderReleaser, Released, encoder_sha256
from .result_notes import absent_of, coordinator_metrics, lines, warnings_of
from .selection import Exclusions

log = logging.getLogger(__name__)

FIGURES = ("seconds", "waiting_s", "bytes_up", "bytes_down", "late")
"""What only the process that did the round knows; it goes into the journal with the round's end."""


@dataclass
class RoundStats:
    """Time and bytes at the start of a round, and how much of the time went by in waiting for agents to come."""

    started_at: float
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]
    waiting_s: float = 0.0

    @classmethod
    def begin(cls, context: RunContext) -> RoundStats:
        """As they stand now."""
        return cls(context.stopwatch(), dict(context.collector.bytes_from), dict(context.distributor.bytes_to))

    def traffic(self, context: RunContext) -> dict[str, list[int]]:
        """Bytes up and down since then, by agent."""
        up, down = context.collector.bytes_from, context.distributor.bytes_to
        return {
            agent: [up.get(agent, 0) - self.bytes_up.get(agent, 0), down.get(agent, 0) - self.bytes_down.get(agent, 0)]
            for agent in sorted({*up, *down})
        }

    def figures(self, context: RunContext, collection: Collection) -> dict[str, Any]:
        """The round's `FIGURES`: ``seconds`` from sending out the work to the end, ``waiting_s`` before that.

        Beside them ``traffic``: the bytes of each agent.
        """
        traffic = {agent: moved for agent, moved in self.traffic(context).items() if any(moved)}
        return {
            "seconds": round(context.stopwatch() - self.started_at - self.waiting_s, 4),
            "waiting_s": round(self.waiting_s, 4),
            "bytes_up": sum(up for up, _ in traffic.values()),
            "bytes_down": sum(down for _, down in traffic.values()),
            "traffic": traffic,
            "late": [{"agent": agent, "round": number} for agent, number in collection.late],
        }


@dataclass(frozen=True)
class RunStats:
    """What a run takes, from its start on: rounds that earlier processes have closed are in it.

    What a process did in a round before it was killed is nowhere, and the time until the next one came does not count.
    """

    earlier_s: float
    earlier: Mapping[str, tuple[int, int]]
    now: RoundStats

    @classmethod
    def begin(cls, context: RunContext, run: str) -> RunStats:
        """State when this process starts or resumes the run."""
        seconds, earlier = 0.0, dict[str, tuple[int, int]]()
        for entry in context.state.journal.entries(run, ("round_closed",)):
            seconds += entry.body.get("seconds", 0.0) + entry.body.get("waiting_s", 0.0)
            for agent, (up, down) in entry.body.get("traffic", {}).items():
                before = earlier.get(agent, (0, 0))
                earlier[agent] = (before[0] + up, before[1] + down)
        return cls(seconds, earlier, RoundStats.begin(context))

    def seconds(self, context: RunContext) -> float:
        """Time at work on the run."""
        return self.earlier_s + context.stopwatch() - self.now.started_at

    def traffic(self, context: RunContext, agent: str) -> tuple[int, int]:
        """Bytes that came from an agent and that went to it."""
        (up, down), (more_up, more_down) = self.earlier.get(agent, (0, 0)), self.now.traffic(context).get(agent, (0, 0))
        return up + more_up, down + more_down


def round_record(
    number: int,
    figures: Mapping[str, Any],
    accepted: Mapping[str, Accepted],
    rejected: Mapping[str, str],
    missing: tuple[str, ...],
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    """The round's line in ``metrics.jsonl``."""
    return {
        "kind": "round",
        "round": number,
        **{name: figures.get(name) for name in FIGURES},
        "agents": sorted(accepted),
        "missing": list(missing),
        "rejected": [{"agent": agent, "reason": why} for agent, why in sorted(rejected.items())],
        "left_out": [{"agent": agent, "reason": why} for agent, why in sorted(left_out.items())],
        "acc": {scope: _metric(accepted, f"acc.{scope}") for scope in ("global", "personal")},
        "loss": _metric(accepted, "loss"),
    }


def restore(state: StateFolder, run: str) -> None:
    """Put the lines of closed rounds that ``metrics.jsonl`` lacks into it: a kill came between journal and figures.

    Raises:
        StateError: the figures that are there are damaged.
    """
    closed = {entry.round for entry in state.journal.entries(run, ("round_closed",)) if entry.round is not None}
    if not closed:
        return
    folder = state.run(run)
    there = {record.get("round") for record in folder.metrics() if record.get("kind") == "round"}
    for number in sorted(closed - there):
        folder.append_metrics(_from_journal(state.journal, run, number))


def _from_journal(journal: Journal, run: str, number: int) -> dict[str, Any]:
    record, figures = RunRecord(run, {}, round=number - 1), dict[str, Any]()
    for entry in journal.entries(run, round=number):
        if entry.kind == "round_closed":
            figures = entry.body
            break  # what comes after it was late
        record = step(record, entry)
    opened = record.open_round or OpenRound(number, 1, (), {})
    missing = tuple(a for a in opened.cohort if a not in opened.updates and a not in opened.rejected)
    return round_record(number, figures, opened.updates, opened.rejected, missing, opened.body.get("left_out", {}))


def _metric(accepted: Mapping[str, Accepted], name: str) -> dict[str, float]:
    return {agent: update.metrics[name] for agent, update in sorted(accepted.items()) if name in update.metrics}


def finish_run(run: Run, releaser: EncoderReleaser, stats: RunStats, exclusions: Exclusions, stopped: str) -> Steps:
    """Export and release where the configuration says so, then write summary and report.

    ``stopped``: why the run ended before its last round; empty when it did not.
    """
    released: Released | None = None
    why_not = "export.after_run is false"
    if run.context.config.export.after_run and run.has_encoder:
        try:
            released = yield from releaser.export(run, run.id)
        except ExportRejected as error:
            why_not = reason_of(error)
            log.error("export_rejected run=%s reason=%s", run.id, why_not)
    elif run.context.config.export.after_run:
        why_not = f"method '{run.method.name}' shares no encoder"
    if released is not None:
        yield from releaser.release(run, released, run.request.rounds)
    bundle = {"bundle": released.body() if released else None, "bundle_why_not": None if released else why_not}
    _write_result(run, stats, exclusions, {"stopped": stopped or None, **bundle})


def _write_result(run: Run, stats: RunStats, exclusions: Exclusions, outcome: dict[str, Any]) -> None:
    from ..report import write_report

    state, request = run.context.state, run.request
    folder = state.run(run.id)
    agents = [_agent_record(run, stats, agent, report) for agent, report in sorted(run.reports.reports.items())]
    for record in agents:
        folder.append_metrics({"kind": "agent", **record})
        state.journal.append("release_reported", run=run.id, agent=record["id"], body=record)
    sha = encoder_sha256(run)
    records = [record for record in folder.metrics() if record.get("kind") == "round"]
    losses = [record["loss"] for record in records]
    absent = absent_of(records, request.rounds, lambda agent: _is_offline(run, agent), exclusions.failing)
    warnings = [*absent, *warnings_of(agents, losses, request.task.num_classes)]
    for line in lines(warnings):
        log.warning("result_warning run=%s: %s", run.id, line)
    folder.write_summary(
        {
            "run_id": run.id,
            "id": state.journal.replay(run.id).request.get("id"),
            "method": request.method,
            "params": run.method.params.model_dump(mode="json"),
            "rounds": request.rounds,
            "seed": request.seed,
            "status": "finished",
            "at": utc_now().isoformat(timespec="seconds"),
            "seconds": round(stats.seconds(run.context), 3),
            "encoder_sha256": sha,
            "agents": agents,
            "left_out": exclusions.body(),
            "warnings": warnings,
            "faults": dict(sorted(run.reports.faults.items())),
            **outcome,
            **coordinator_metrics(state.journal, run.id),
        }
    )
    write_report(folder)
    state.journal.append("run_finished", run=run.id, body={"encoder_sha256": sha})
    log.info("run_finished run=%s encoder_sha256=%s", run.id, sha[:12] or "none")


def _is_offline(run: Run, agent: str) -> bool:
    """Whether an agent is offline and has not reported its metrics."""
    member = run.context.roster.get(agent)
    return agent not in run.reports.reports and (member is None or not member.is_present)


def _agent_record(run: Run, stats: RunStats, agent: str, report: Report) -> dict[str, Any]:
    """One device's metrics; all are of the run's encoder, whichever the device runs now."""
    member = run.context.roster.get(agent)
    up, down = stats.traffic(run.context, agent)
    acc = {"local": report.acc_local, "global": report.acc_global, "personal": report.acc_personal}
    return {
        "id": agent,
        "tier": member.tier if member else "",
        "samples": report.samples,
        "acc": acc if report.samples else dict.fromkeys(acc),
        "head": report.head,
        "precision": report.precision or None,
        "fingerprint": report.fingerprint or None,
        "runs": report.bundle_id,
        "rolled_back": report.rolled_back or None,
        "support": report.support,
        "one_class": report.one_class,
        "rss_mb": round(report.rss_mb, 1),
        "torch_loaded": report.torch_loaded,
        "bytes_up": up,
        "bytes_down": down,
    }


def end_run(state: StateFolder, run: str, kind: Literal["run_failed", "run_cancelled"], reason: str) -> None:
    """End ``run`` for good. Only for the process that holds the folder's lock: nobody else may end a run.

    Raises:
        StateError: the journal cannot be written. (A summary that cannot be written is only logged.)
    """
    state.journal.append(kind, run=run, body={"reason": reason})
    try:
        restore(state, run)
        left_out = Exclusions.replay(state.journal, run).body()
        state.run(run).write_summary({**_summary(state.journal.replay(run), FINAL[kind], reason), "left_out": left_out})
    except (HeadwaterError, OSError) as error:
        log.warning("summary_not_written run=%s reason=%s", run, error)


def requested_cancels(state: StateFolder, after: int) -> tuple[dict[str, str], int]:
    """Run -> reason of the unfinished runs that somebody wants cancelled, and the journal entry looked at last."""
    entries = state.journal.entries(kinds=("cancel_requested",), after=after)
    if not entries:
        return {}, after
    unfinished = set(state.journal.unfinished())
    wanted = {e.run: str(e.body.get("reason", "")) for e in entries if e.run is not None and e.run in unfinished}
    return wanted, entries[-1].id


def _summary(record: RunRecord, status: str, reason: str) -> dict[str, object]:
    asked = record.request
    return {
        "run_id": record.run,
        **{key: asked.get(key) for key in ("method", "params", "rounds", "seed")},
        "status": status,
        "reason": reason,
        "round": record.round,
        "at": utc_now().isoformat(timespec="seconds"),
        "agents": [],
    }
