"""Export, check and release of encoders to head-tier devices, after a run or during it.

Batch norm that stays on devices is collected before, outside the rounds, so that other devices can use one encoder.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edge_agent.bundle.manifest import Lineage
from edge_agent.bundle.trust import Purpose
from edge_agent.core.errors import ExportRejected, HeadwaterError, RunFailed, UsageError
from edge_agent.core.storage import read_regular
from edge_agent.core.task import Tensors
from edge_agent.methods.base import pooled_norm
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.up import Report
from edge_agent.wire.tensors import Spec, decode, encode, pieces

from ..fleet.collection import Collection, updates_of
from ..journal.entries import BundleExported, NormPooled, RangesCollected
from ..journal.store import utc_now
from ..rounds.compute_requests import Exported, ExportRequest, StepCount
from ..rounds.context import Run, Steps, Waiting
from ..state.release_keys import ReleaseKeys, signature_of
from ..state.run_lines import ReleaseLine
from ..state.store import StateFolder, prune_blobs
from ..text import reason_of
from .lineage import lineage_of

log = logging.getLogger(__name__)

EXPORT_LIMIT_S = 900.0
"""How long the compute process may take to export and check a bundle."""

RELEASE_DEADLINE_S = 180.0
"""How long a run waits for head-tier devices to refit their heads; later ones get the release when they connect."""

NORM_NOTES = {
    "global": "",
    "local_stats": "means and variances of all clients' data, pooled",
    "local_all": "means and variances of all clients' data, gamma and beta weighted means; clients keep their own",
}
"""How batch norm that stays on devices was combined for one common encoder, for the bundle's manifest."""


@dataclass(frozen=True)
class Released:
    """A bundle that was exported for release; ``fact`` describes it, for journal and summary."""

    path: Path
    bundle_id: str
    digest: str
    """Of the file, which is also a blob."""

    fact: BundleExported


def export_bundle(run: Run, name: str, purpose: Purpose = "release") -> Generator[Waiting, None, Released]:
    """Export the run's encoder as ``<name>.hwb`` in the run's folder; returns it (as the generator's value).

    With ``purpose`` "release" it has all variants, for long use on devices; with "round" fp32 alone, for one round.
    The worker does that, so that messages of agents are handled meanwhile.

    Raises:
        ExportRejected: a check failed, or the exporter did.
    """
    folder = run.context.state.run(run.id).folder
    config = run.context.config
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.hwb"
    # A bundle of one round is removed after it: nobody asks where it came from.
    lineage = _lineage(run) if purpose == "release" else None
    request = ExportRequest(
        **vars(run.model_for_compute()),
        export=config.export,
        hosted=config.hosted,
        path=path,
        purpose=purpose,
        lineage=lineage,
    )
    # Step 1: export and check in the compute process. Whatever it raises there costs the bundle, not the run, but for
    # errors of files, after which the run is tried again.
    activity = "the encoder is being exported and checked"
    try:
        answer = yield from run.context.ask("export_bundle", request, activity, EXPORT_LIMIT_S)
    except RunFailed as error:  # no process could do it
        raise ExportRejected(f"export failed: {error}") from error
    except (HeadwaterError, OSError):
        raise
    except Exception as error:
        raise ExportRejected(f"export failed: {error!r}") from error
    # Step 2: sign first, as that changes the file; then put it where devices get it from, by its hash.
    is_signed = sign(path, run.context.state.path, purpose) is not None
    digest = run.context.state.blobs.put(read_regular(path))
    exported = Exported.from_json(answer)
    fact = BundleExported(path=str(path), bytes=path.stat().st_size, **exported.model_dump(exclude_unset=True))
    if is_signed:
        fact = fact.changed(signed=signature_of(path))
    if lineage is not None:
        params = run.method.all_params()
        fact = fact.changed(lineage={"method": run.request.method, "params": params, **lineage.model_dump(mode="json")})
    return Released(path, fact.bundle_id, digest, fact)


def sign(path: Path, state: Path, purpose: Purpose = "release") -> int | None:
    """Sign a bundle with the release key of a state folder.

    Returns:
        The version of its release. None where the federation has no release keys; None, and a warning, where it has
        some and people sign, or the key here is none of them.
    """
    keys = ReleaseKeys(state)
    if not keys.exist:
        return None
    try:
        if not keys.online_key.exists():
            log.warning(
                "not_signed bundle=%s: people sign releases here, 'headwater keys sign %s --key FILE'", path, path
            )
            return None
        release, count, needed = keys.sign(path, utc_now(), purpose=purpose)
    except UsageError as error:  # the run goes on: its bundle can be signed later
        log.warning("not_signed bundle=%s: %s", path, error)
        return None
    if count < needed:
        log.warning("not_signed bundle=%s: %d of %d signatures, 'headwater keys sign' adds them", path, count, needed)
    return release.version


def _lineage(run: Run) -> Lineage:
    """Return where the encoder of a run comes from, for the bundle's manifest."""
    accuracies: dict[str, tuple[float, int]] = {}
    for agent, report in run.reports.reports.items():
        # A report about a bundle says how its release does, not what came of the training.
        is_of_training = report.samples and not report.about
        if is_of_training and report.acc_personal is not None:
            accuracies[agent] = (report.acc_personal, report.support)
    return lineage_of(run.context.state, run.id, run.request, encoder_sha256(run), accuracies)


def freeze(run: Run) -> Generator[Waiting, None, Outgoing]:
    """Export the current encoder as a blob on disk, for one round (the generator's value); the next one replaces it."""
    frozen = yield from export_bundle(run, "round", "round")
    return Outgoing.open(run.context.state.blobs.path(frozen.digest), frozen.digest)


def freeze_as_tensors(run: Run) -> Generator[Waiting, None, Outgoing]:
    """Return the current encoder as a blob of tensors, for clients of a simulation (the generator's value)."""
    yield from ()
    return Outgoing.of(encode(encoder_of(run)))


def release(run: Run, released: Released, number: int) -> Steps:
    """Release the bundle to every device of tier ``head`` at once, and wait for the reports of those present."""
    context = run.context
    run.reports.pop(context.roster.present("head"))
    run.reports.expect(released.bundle_id)
    devices = context.releases.make(run.id, number, released.digest, released.fact)
    offer = functools.partial(context.releases.offer, anyway=True)
    yield from run.reports.collect(devices, offer, RELEASE_DEADLINE_S)


def release_during_run(run: Run, number: int) -> Steps:
    """Release during the run, and record the accuracies of head-tier devices after this round in its metrics.

    A rejected export costs this release and nothing else.
    """
    folder = run.context.state.run(run.id)
    name_of_a_round = re.compile(rf"{re.escape(run.id)}-round-[0-9]+\.hwb")
    for older in folder.folder.glob(f"{run.id}-round-*.hwb"):
        if name_of_a_round.fullmatch(older.name):
            older.unlink()
    try:
        released = yield from export_bundle(run, f"{run.id}-round-{number}")
    except ExportRejected as error:
        log.error("export_rejected run=%s round=%d reason=%s", run.id, number, reason_of(error))
        return
    yield from release(run, released, number)
    reports = run.reports.pop(run.context.roster.present("head"))
    line = release_line(number, released, reports)
    folder.append_metrics(line.to_json())
    log.info("released run=%s round=%d agents=%d acc.personal=%s", run.id, number, len(reports), line.mean)


def release_line(number: int, released: Released, reports: dict[str, Report]) -> ReleaseLine:
    """Return a release's line in ``metrics.jsonl``."""
    acc = {agent: report.acc_personal for agent, report in sorted(reports.items()) if report.samples}
    values = [value for value in acc.values() if value is not None]
    return ReleaseLine(
        round=number,
        bundle_id=released.bundle_id,
        bytes=released.fact.bytes,
        acc=acc,
        rolled_back=tuple(sorted(agent for agent, report in reports.items() if report.rolled_back)),
        mean=round(sum(values) / len(values), 6) if values else None,
    )


def stop_reason(releases: Iterable[ReleaseLine], patience: int) -> str:
    """Say why a run should stop, given its releases so far; empty while it should continue.

    It stops when the last ``patience`` releases (0: never) brought no better mean acc.personal on head-tier devices
    than the best release before them.
    """
    means = [(release.mean, release.round) for release in releases if release.mean is not None]
    if not patience or len(means) <= patience:
        return ""
    best_mean, best_round = max(means[:-patience], key=lambda mean_and_round: mean_and_round[0])
    latest_mean = max(mean for mean, _ in means[-patience:])
    if latest_mean > best_mean:
        return ""
    return (
        f"head-tier devices got acc.personal {best_mean:.3f} from round {best_round} and at most "
        f"{latest_mean:.3f} from {patience} releases since"
    )


def encoder_of(run: Run) -> Tensors:
    """Return the tensors of the shared encoder, with pooled batch norm where it has no other."""
    tensors = {**run.state, **run.pooled}
    return {name: array for name, array in tensors.items() if name.startswith("encoder.")}


def encoder_sha256(run: Run) -> str:
    """Return the hash of the shared encoder's tensors; the same bits give the same one. Empty without an encoder."""
    return sha256_of_encoder(encoder_of(run))


def sha256_of_encoder(tensors: Tensors) -> str:
    """Return `encoder_sha256` of a state, of which only the encoder's tensors count."""
    encoder = {name: array for name, array in tensors.items() if name.startswith("encoder.")}
    if not encoder:
        return ""
    return hashlib.sha256(encode(encoder)).hexdigest()


def with_pooled_norm(
    run: Run, number: int, norm: Mapping[str, Spec], agents: tuple[str, ...], collect: Callable[[Collection], Steps]
) -> Generator[Waiting, None, Run]:
    """Return the run with batch norm of one common encoder after round ``number`` (the generator's value).

    ``norm``: the encoder's batch norm tensors that stay on devices. ``pooled`` is empty where there are none, no agent
    sends any, or the configuration turns this off. It changes neither the run's state nor the devices' own models.
    """
    state = run.context.state
    config = run.context.config
    # In a run with secure sums the coordinator would see the statistics of each device.
    is_wanted = config.export.pool_norm and not config.privacy.secure_sum
    if not norm or not is_wanted:
        return replace(run, pooled={})
    # A run that was killed after they were collected does not ask for them again.
    collected = pooled_before(state, run.id, number)
    if collected:
        return replace(run, pooled=collected)
    collection = Collection(run.id, number, agents, norm, purpose="batch_norm_stats")
    yield from collect(collection)
    log.info("norm_pooled run=%s agents=%d of=%d", run.id, len(collection.accepted), len(agents))
    if not collection.accepted:
        return replace(run, pooled={})
    pooled = pooled_norm((update.weight, update.tensors) for update in updates_of(state.blobs, collection))
    digest = state.blobs.put(*pieces(pooled))
    clients = tuple(sorted(collection.accepted))
    state.journal.append(NormPooled(clients=clients), run=run.id, round=number, digest=digest)
    prune_blobs(state)
    return replace(run, pooled=pooled)


def pooled_before(state: StateFolder, run: str, number: int) -> Tensors:
    """Return the pooled tensors after a round of a run; empty when there are none."""
    for entry in state.journal.entries(run, ("norm_pooled",), round=number):
        if entry.digest is not None and entry.digest in state.blobs:
            return decode(state.blobs.read(entry.digest))
    return {}


def with_client_ranges(
    run: Run, number: int, agents: tuple[str, ...], collect: Callable[[Collection], Steps]
) -> Generator[Waiting, None, Run]:
    """Return the run with the activation ranges of its clients after round ``number`` (the generator's value).

    They are those of the encoder that is exported, and empty where the configuration asks for none, there is no such
    encoder, or no agent sends any.
    """
    state = run.context.state
    export = run.context.config.export
    run = replace(run, client_ranges={})
    if not export.client_ranges or not export.int8 or "encoder" not in run.method.shared:
        return run
    # A run that was killed after they were collected does not ask for them again.
    collected = ranges_before(state, run.id, number)
    if collected:
        return replace(run, client_ranges=collected)
    activity = "the steps of the encoder are being counted"
    try:
        answer = yield from run.context.ask("count_steps", run.model_for_compute(), activity, EXPORT_LIMIT_S)
    except ExportRejected:  # which the export itself reports
        return run
    specs = {"ranges": Spec(np.dtype(np.float32), (StepCount.from_json(answer).steps, 2))}
    collection = Collection(run.id, number, agents, specs, objection=ranges_objection, purpose="activation_ranges")
    yield from collect(collection)
    log.info("ranges_collected run=%s agents=%d of=%d", run.id, len(collection.accepted), len(agents))
    if not collection.accepted:
        return run
    ranges = {update.client: update.tensors["ranges"].copy() for update in updates_of(state.blobs, collection)}
    digest = state.blobs.put(*pieces(ranges))
    fact = RangesCollected(clients=tuple(sorted(ranges)))
    state.journal.append(fact, run=run.id, round=number, digest=digest)
    prune_blobs(state)
    return replace(run, client_ranges=ranges)


def ranges_objection(tensors: Tensors) -> str:
    """Say why ranges cannot be those of activations; empty when they can. What is merely wrong is outvoted later."""
    low, high = tensors["ranges"].T
    inverted = int((low > high).sum())
    if not inverted:
        return ""
    return f"{inverted} of {len(low)} activation ranges end before they begin"


def ranges_before(state: StateFolder, run: str, number: int) -> Tensors:
    """Return the activation ranges of clients after a round of a run; empty when there are none."""
    for entry in state.journal.entries(run, ("ranges_collected",), round=number):
        if entry.digest is not None and entry.digest in state.blobs:
            return decode(state.blobs.read(entry.digest))
    return {}
