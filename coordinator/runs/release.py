"""Encoders on their way to devices that do not train them: exported, checked, released; after a run or during it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edge_agent.errors import ExportRejected, HeadwaterError, StateError
from edge_agent.storage import sha256_file
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Command, Install, Report, Who
from edge_agent.wire.tensors import encode
from edge_agent.worker import Worker

from ..fleet.downloads import Distributor
from ..fleet.uploads import reason_of
from ..state.journal import Entry, Journal, utc_now
from ..state.store import StateFolder
from .context import Steps, Waiting

if TYPE_CHECKING:
    from export.bundle import Report as ExportReport

    from .round_loop import RunLoop

log = logging.getLogger(__name__)

EXPORT_LIMIT_S = 900.0
CALIBRATION_INPUTS = 128
RELEASE_DEADLINE_S = 180.0
"""How long a run waits for head-tier devices to refit; later ones get the release when they come."""

NORM_NOTES = {
    "global": "",
    "local_stats": "means and variances of all clients' data, pooled",
    "local_all": "means and variances of all clients' data, gamma and beta weighted means; clients keep their own",
}
"""How batch norm that stays on devices was settled for one common encoder."""

Purpose = Literal["release", "round"]
"""``release``: with everything that a device may use for months. ``round``: fp32 alone, for one round."""

Exporter = Callable[["RunLoop", Path, Purpose], "ExportReport"]


@dataclass(frozen=True)
class Released:
    """A bundle that went out."""

    path: Path
    bundle_id: str
    size_bytes: int
    parity_max_abs: float
    int8_cosine: float | None

    def body(self) -> dict[str, Any]:
        """As a summary shows it."""
        return {
            "path": str(self.path),
            "bundle_id": self.bundle_id,
            "bytes": self.size_bytes,
            "parity_max_abs": self.parity_max_abs,
            "int8_cosine": self.int8_cosine,
        }


class Encoders:
    """Exports in the worker, so that agents are heard meanwhile. ``exporter`` is replaceable for tests."""

    def __init__(self, worker: Worker, exporter: Exporter | None = None) -> None:
        self._worker, self._exporter = worker, exporter or export_run

    def export(self, loop: RunLoop, name: str, purpose: Purpose = "release") -> Generator[Waiting, None, Released]:
        """The run's encoder as ``<name>.hwb`` in the run's folder; returns what it is (as the generator's value).

        Raises:
            ExportRejected: a gate failed, or the exporter broke.
        """
        folder = loop.fleet.state.run(loop.run).folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.hwb"
        outcome: list[tuple[ExportReport | None, BaseException | None]] = []
        self._worker.submit("export", lambda: self._exporter(loop, path, purpose), lambda r, e: outcome.append((r, e)))
        until = loop.fleet.clock() + EXPORT_LIMIT_S
        while not outcome:
            yield Waiting("the encoder is being exported and checked", (), until)
        report, error = outcome[0]
        if report is None:
            raise error if isinstance(error, HeadwaterError | OSError) else ExportRejected(f"export broke: {error!r}")
        parity = report.manifest.parity
        size = path.stat().st_size
        return Released(path, report.manifest.bundle_id, size, float(parity.max_abs), parity.int8_cosine)

    def freeze(self, loop: RunLoop) -> Generator[Waiting, None, Outgoing]:
        """The encoder as it stands now, for one round, as a blob on disk; the next round's replaces it."""
        frozen = yield from self.export(loop, "round", "round")
        digest = loop.fleet.state.blobs.put(frozen.path.read_bytes())
        return Outgoing.open(loop.fleet.state.blobs.path(digest), digest)

    def release(self, loop: RunLoop, released: Released, number: int) -> Steps:
        """Offer the bundle to every head-tier device that is there, and wait for what it makes of it."""
        fleet = loop.fleet
        digest = sha256_file(released.path)
        fleet.state.blobs.put(released.path.read_bytes())
        fleet.state.journal.append("release_made", run=loop.run, round=number, digest=digest, body=released.body())
        agents = tuple(fleet.roster.present("head"))
        loop.answers.take(agents)
        loop.answers.about(released.bundle_id)
        if not agents:
            return
        blob = Outgoing.open(fleet.state.blobs.path(digest), digest)
        fleet.distributor.offer(blob, agents)
        number = release_number(fleet.state.journal)
        install = Install(run=loop.run, bundle_id=released.bundle_id, release=number, blob=blob.ref)

        def ask(agent: str) -> None:
            fleet.send(agent, install)

        for agent in agents:
            ask(agent)
        yield from loop.answers.collect(agents, ask, RELEASE_DEADLINE_S)

    def interim(self, loop: RunLoop, number: int) -> Steps:
        """A release during the run: what head-tier devices get from the encoder after this round goes into its figures.

        An export that is rejected costs this release and nothing else.
        """
        for older in loop.fleet.state.run(loop.run).folder.glob(f"{loop.run}-round-*.hwb"):
            older.unlink()
        try:
            released = yield from self.export(loop, f"{loop.run}-round-{number}")
        except ExportRejected as error:
            log.error("export_rejected run=%s round=%d reason=%s", loop.run, number, reason_of(error))
            return
        yield from self.release(loop, released, number)
        reports = loop.answers.take(loop.fleet.roster.present("head"))
        record = release_line(number, released, reports)
        loop.fleet.state.run(loop.run).append_metrics(record)
        log.info("released run=%s round=%d agents=%d acc.personal=%s", loop.run, number, len(reports), record["mean"])


def release_line(number: int, released: Released, reports: dict[str, Report]) -> dict[str, Any]:
    """A release's line in ``metrics.jsonl``; ``mean`` is that of acc.personal over the devices that have one."""
    acc = {agent: report.acc_personal for agent, report in sorted(reports.items()) if report.samples}
    known = [value for value in acc.values() if value is not None]
    return {
        "kind": "release",
        "round": number,
        "bundle_id": released.bundle_id,
        "bytes": released.size_bytes,
        "acc": {"personal": acc},
        "rolled_back": sorted(agent for agent, report in reports.items() if report.rolled_back),
        "mean": round(sum(known) / len(known), 6) if known else None,
    }


def encoder_sha256(loop: RunLoop) -> str:
    """Hash of the shared encoder's tensors, the same on every machine for the same bits; empty without any."""
    encoder = {n: array for n, array in {**loop.state, **loop.pooled}.items() if n.startswith("encoder.")}
    return hashlib.sha256(encode(encoder)).hexdigest() if encoder else ""


def export_run(loop: RunLoop, path: Path, purpose: Purpose = "release") -> ExportReport:
    """The run's encoder as a bundle at ``path``.

    Raises:
        ExportRejected: a gate failed; a bundle that lay there stays.
    """
    from edge_agent import data
    from export.bundle import export_bundle, model_from_state, synthetic_inputs

    config, task = loop.fleet.config.export, loop.request.task
    if config.calibration is None or purpose == "round":
        calibration = synthetic_inputs(task, seed=loop.request.seed)
    else:
        found = data.load(config.calibration, task.input, task.class_names, folder=config.folder)
        calibration = found.inputs[:CALIBRATION_INPUTS]
    quick = purpose == "round" and config.exporter == "auto"
    return export_bundle(
        model_from_state(loop.method, task, {**loop.state, **loop.pooled}),
        loop.method,
        task,
        calibration,
        path,
        name=loop.run,
        created=utc_now().isoformat(timespec="seconds"),
        global_head=loop.method.global_head(loop.state),
        exporter="legacy" if quick else config.exporter,  # seconds of each round otherwise; the gates are the same
        norm_note=NORM_NOTES[loop.method.norm] if loop.pooled else "",
        int8=config.int8 and purpose == "release",
    )


def release_number(journal: Journal) -> int:
    """The number of the newest release, counted from 1; 0 before the first."""
    return len(journal.entries(kinds=("release_made",)))


class Releases:
    """Offers the release to agents that lack it."""

    def __init__(self, state: StateFolder, distributor: Distributor, send: Callable[[str, Command], None]) -> None:
        self._state, self._distributor, self._send = state, distributor, send
        self._checked = ""

    def current(self) -> Entry | None:
        """The journal's entry of the newest release; None before the first."""
        releases = self._state.journal.entries(kinds=("release_made",))
        return releases[-1] if releases else None

    def offer(self, agent: str, running: str) -> None:
        """A head-tier device that runs another encoder than the released one gets the released one.

        Raises:
            StateError: the file of the release is missing or damaged; devices keep what they have.
        """
        release = self.current()
        if release is None or release.digest is None or release.body.get("bundle_id") == running:
            return
        blob = self._put_on_offer(release.digest, agent)
        number = release_number(self._state.journal)
        bundle_id = release.body["bundle_id"]
        self._send(agent, Install(run=release.run or "", bundle_id=bundle_id, release=number, blob=blob.ref))

    def offer_again(self, agent: str, digest: str) -> None:
        """An agent asks for something that is not on offer (any more): after a restart, offer a release again."""
        release = self.current()
        if release is not None and release.digest == digest:
            self._put_on_offer(digest, agent)
            self._send(agent, Who())

    def _put_on_offer(self, digest: str, agent: str) -> Outgoing:
        if self._checked != digest:
            try:
                self._state.blobs.check(digest)
            except StateError as error:
                what = "this is the released bundle, and no device can get it"
                raise StateError(f"{error}, or make a new release with a run: {what}") from error
            self._checked = digest
        blob = Outgoing.open(self._state.blobs.path(digest), digest)
        self._distributor.offer(blob, (agent,))
        return blob
