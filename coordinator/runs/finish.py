"""The end of a run: export the encoder, release it to head-tier devices, and write summary and report."""

from __future__ import annotations

import logging
from typing import Any, Literal

from edge_agent.errors import ExportRejected, HeadwaterError
from edge_agent.wire.messages import Report

from ..fleet.transfers import reason_of
from ..state.journal import FINAL, RunRecord, utc_now
from ..state.store import StateFolder
from .context import Run, Steps
from .metrics import RunStats, restore
from .proxy_metrics import coordinator_metrics
from .release import EncoderReleaser, Released, encoder_sha256
from .result_warnings import absent_of, lines, warnings_of
from .selection import Exclusions

log = logging.getLogger(__name__)


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
