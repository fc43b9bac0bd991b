"""The end of a run: export the encoder, release it to head-tier devices, gather what everybody got, sum it up."""

from __future__ import annotations

import logging
from typing import Any, Literal

from edge_agent.errors import ExportRejected, HeadwaterError
from edge_agent.wire.messages import Report

from ..fleet.exclusion import Exclusions
from ..fleet.uploads import reason_of
from ..state.journal import FINAL, RunRecord, utc_now
from ..state.store import StateFolder
from .context import Steps
from .metrics import restore
from .proxy_metrics import own_figures
from .release import Encoders, Released, encoder_sha256
from .result_warnings import absent_of, lines, warnings_of
from .round_loop import RunLoop

log = logging.getLogger(__name__)


class Finisher:
    """Called by the round loop when its rounds are over."""

    def __init__(self, encoders: Encoders) -> None:
        self._encoders = encoders

    def __call__(self, loop: RunLoop) -> Steps:
        """Export and release where the configuration says so, then write summary and report."""
        released: Released | None = None
        why_not = "export.after_run is false"
        if loop.fleet.config.export.after_run and any(name.startswith("encoder.") for name in loop.state):
            try:
                released = yield from self._encoders.export(loop, loop.run)
            except ExportRejected as error:
                why_not = reason_of(error)
                log.error("export_rejected run=%s reason=%s", loop.run, why_not)
        elif loop.fleet.config.export.after_run:
            why_not = f"method '{loop.method.name}' shares no encoder"
        if released is not None:
            yield from self._encoders.release(loop, released, loop.request.rounds)
        self._sum_up(loop, released, why_not)

    def _sum_up(self, loop: RunLoop, released: Released | None, why_not: str) -> None:
        from ..report import write_report

        fleet, folder = loop.fleet, loop.fleet.state.run(loop.run)
        agents = [_agent_record(loop, agent, report) for agent, report in sorted(loop.answers.reports.items())]
        for record in agents:
            folder.append_metrics({"kind": "agent", **record})
            fleet.state.journal.append("release_reported", run=loop.run, agent=record["id"], body=record)
        sha = encoder_sha256(loop)
        request = loop.request
        records = [record for record in folder.metrics() if record.get("kind") == "round"]
        losses = [record["loss"] for record in records]
        absent = absent_of(
            records, request.rounds, lambda agent: _is_offline(loop, agent), loop.selection.exclusions.failing
        )
        warnings = [*absent, *warnings_of(agents, losses, request.task.num_classes)]
        for line in lines(warnings):
            log.warning("result_warning run=%s: %s", loop.run, line)
        folder.write_summary(
            {
                "run_id": loop.run,
                "id": fleet.state.journal.replay(loop.run).request.get("id"),
                "method": request.method,
                "params": loop.method.params.model_dump(mode="json"),
                "rounds": request.rounds,
                "stopped": loop.stopped or None,
                "seed": request.seed,
                "status": "finished",
                "at": utc_now().isoformat(timespec="seconds"),
                "seconds": round(loop.account.seconds(fleet), 3),
                "encoder_sha256": sha,
                "agents": agents,
                "left_out": loop.selection.exclusions.body(),
                "warnings": warnings,
                "faults": dict(sorted(loop.answers.faults.items())),
                "bundle": released.body() if released else None,
                "bundle_why_not": None if released else why_not,
                **own_figures(fleet.state.journal, loop.run),
            }
        )
        write_report(folder)
        fleet.state.journal.append("run_finished", run=loop.run, body={"encoder_sha256": sha})
        log.info("run_finished run=%s encoder_sha256=%s", loop.run, sha[:12] or "none")


def _is_offline(loop: RunLoop, agent: str) -> bool:
    """Whether an agent is offline and has not reported its metrics."""
    member = loop.fleet.roster.get(agent)
    return agent not in loop.answers.reports and (member is None or not member.is_present)


def _agent_record(loop: RunLoop, agent: str, report: Report) -> dict[str, Any]:
    """What one device got; all figures are of the run's encoder, whichever the device runs now."""
    member, fleet = loop.fleet.roster.get(agent), loop.fleet
    up, down = loop.account.traffic(fleet, agent)
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
