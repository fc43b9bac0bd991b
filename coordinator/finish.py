"""The end of a run: export the encoder, release it to head-tier devices, gather what everybody got, sum it up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.errors import ExportRejected, HeadwaterError
from edge_agent.store import sha256_file
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Install, Report
from edge_agent.work import Worker

from .collect import reason_of
from .fleet import Steps, Waiting
from .journal import utc_now
from .rounds import RunLoop

if TYPE_CHECKING:
    from export.bundle import Report as ExportReport

log = logging.getLogger(__name__)

EXPORT_LIMIT_S = 900.0
CALIBRATION_INPUTS = 128
RELEASE_DEADLINE_S = 180.0
"""How long the end of a run waits for head-tier devices to refit; later ones get the release when they come."""


@dataclass(frozen=True)
class _Released:
    """A bundle that went out."""

    path: Path
    fingerprint: str
    size_bytes: int
    parity_max_abs: float
    int8_cosine: float | None

    def body(self) -> dict[str, Any]:
        """As a summary shows it."""
        return {
            "path": str(self.path),
            "fingerprint": self.fingerprint,
            "bytes": self.size_bytes,
            "parity_max_abs": self.parity_max_abs,
            "int8_cosine": self.int8_cosine,
        }


class Finisher:
    """Called by the round loop when its rounds are over. ``exporter`` is replaceable for tests."""

    def __init__(self, worker: Worker, exporter: Callable[[RunLoop, Path], ExportReport] | None = None) -> None:
        self._worker, self._exporter = worker, exporter or export_run

    def __call__(self, loop: RunLoop) -> Steps:
        """Export and release where the configuration says so, then write summary and report."""
        released: _Released | None = None
        why_not = "export.after_run is false"
        if loop.fleet.config.export.after_run and any(name.startswith("encoder.") for name in loop.state):
            try:
                released = yield from self._export(loop)
            except ExportRejected as error:
                why_not = reason_of(error)
                log.error("export_rejected run=%s reason=%s", loop.run, why_not)
        elif loop.fleet.config.export.after_run:
            why_not = f"method '{loop.method.name}' shares no encoder"
        if released is not None:
            yield from self._release(loop, released)
        self._sum_up(loop, released, why_not)

    def _export(self, loop: RunLoop) -> Generator[Waiting, None, _Released]:
        """Export in the worker; returns what was released (as the generator's value)."""
        folder = loop.fleet.state.run(loop.run).folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{loop.run}.hwb"
        outcome: list[tuple[ExportReport | None, BaseException | None]] = []
        self._worker.submit("export", lambda: self._exporter(loop, path), lambda r, e: outcome.append((r, e)))
        until = loop.fleet.clock() + EXPORT_LIMIT_S
        while not outcome:
            yield Waiting("the encoder is being exported and checked", (), until)
        report, error = outcome[0]
        if report is None:
            raise error if isinstance(error, HeadwaterError) else ExportRejected(f"export broke: {error!r}")
        parity = report.manifest.parity
        return _Released(
            path, report.manifest.fingerprint, path.stat().st_size, float(parity.max_abs), parity.int8_cosine
        )

    def _release(self, loop: RunLoop, released: _Released) -> Steps:
        """Offer the bundle to every head-tier device that is there, and wait for what it makes of it."""
        fleet = loop.fleet
        digest = sha256_file(released.path)
        fleet.state.blobs.put(released.path.read_bytes())
        fleet.state.journal.append("release_made", run=loop.run, digest=digest, body=released.body())
        agents = tuple(fleet.roster.present("head"))
        if not agents:
            return
        blob = Outgoing.open(fleet.state.blobs.path(digest), digest)
        fleet.distributor.offer(blob, agents)
        install = Install(run=loop.run, fingerprint=released.fingerprint, blob=blob.ref)

        def ask(agent: str) -> None:
            fleet.send(agent, install)

        for agent in agents:
            ask(agent)
        yield from loop.answers.collect(agents, ask, RELEASE_DEADLINE_S)

    def _sum_up(self, loop: RunLoop, released: _Released | None, why_not: str) -> None:
        from .report import write_report

        fleet, folder = loop.fleet, loop.fleet.state.run(loop.run)
        agents = [_agent_record(loop, agent, report) for agent, report in sorted(loop.answers.reports.items())]
        for record in agents:
            folder.append_metrics({"kind": "agent", **record})
            fleet.state.journal.append("release_reported", run=loop.run, agent=record["id"], body=record)
        sha = loop.encoder_sha256()
        request = loop.request
        folder.write_summary(
            {
                "run_id": loop.run,
                "method": request.method,
                "params": loop.method.params.model_dump(mode="json"),
                "rounds": request.rounds,
                "seed": request.seed,
                "status": "finished",
                "at": utc_now().isoformat(timespec="seconds"),
                "seconds": round(fleet.clock() - loop.started_at, 3),
                "encoder_sha256": sha,
                "agents": agents,
                "faults": dict(sorted(loop.answers.faults.items())),
                "bundle": released.body() if released else None,
                "bundle_why_not": None if released else why_not,
            }
        )
        write_report(folder)
        fleet.state.journal.append("run_finished", run=loop.run, body={"encoder_sha256": sha})
        log.info("run_finished run=%s encoder_sha256=%s", loop.run, sha[:12])


def _agent_record(loop: RunLoop, agent: str, report: Report) -> dict[str, Any]:
    member, fleet = loop.fleet.roster.get(agent), loop.fleet
    return {
        "id": agent,
        "tier": member.tier if member else "",
        "samples": report.samples,
        "acc": {"local": report.acc_local, "global": report.acc_global, "personal": report.acc_personal},
        "head": report.head,
        "rss_mb": round(report.rss_mb, 1),
        "torch_loaded": report.torch_loaded,
        "bytes_up": fleet.collector.bytes_from.get(agent, 0),
        "bytes_down": fleet.distributor.bytes_to.get(agent, 0),
    }


def export_run(loop: RunLoop, path: Path) -> ExportReport:
    """The run's encoder as a bundle at ``path``.

    Raises:
        ExportRejected: a gate failed; a bundle that lay there stays.
    """
    from edge_agent import data
    from export.bundle import export_bundle, model_from_state, synthetic_inputs

    config, task = loop.fleet.config.export, loop.request.task
    if config.calibration is None:
        calibration = synthetic_inputs(task, seed=loop.request.seed)
    else:
        calibration = data.load(config.calibration, task.input, task.class_names).inputs[:CALIBRATION_INPUTS]
    return export_bundle(
        model_from_state(loop.method, task, loop.state),
        loop.method,
        task,
        calibration,
        path,
        name=loop.run,
        created=utc_now().isoformat(timespec="seconds"),
        global_head=loop.method.global_head(loop.state),
        exporter=config.exporter,
        int8=config.int8,
    )
