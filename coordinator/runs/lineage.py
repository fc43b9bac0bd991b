"""Where a run's encoder comes from, for its bundle: counts, hashes and averages, for every device reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping

from edge_agent.bundle.manifest import Lineage
from edge_agent.bundle.trust import Scores

from ..journal.entries import ReleaseReported, UpdateAccepted, WarmStarted
from ..journal.store import Entry, facts_of
from ..rounds.request import Request
from ..state.store import StateFolder
from ..views.releases import released_to_all
from ..views.runs import replay


def lineage_of(
    state: StateFolder,
    run: str,
    request: Request,
    encoder_sha256: str,
    reports: Mapping[str, tuple[float | None, int]] | None = None,
) -> Lineage:
    """Return the lineage of a run's encoder after its last closed round.

    ``partition_sha256`` is the hash of the sorted pairs of agent and sample count of all updates in the journal.

    Args:
        state: The state folder.
        run: Name of the run.
        request: What it was requested with.
        encoder_sha256: Hash of the encoder.
        reports: Agent -> acc.personal with this encoder, and held-out samples behind it; default: those in the
            journal. They count for agents whose updates were accepted; without any, what these measured in the last
            round does.
    """
    entries = state.journal.entries(run, ("update_accepted", "warm_started", "release_reported"))
    last_round = replay(state.journal, run).round
    # Step 1: who has trained, on how many samples.
    samples: dict[str, float | None] = {}
    for entry in entries:
        if isinstance(entry.fact, UpdateAccepted) and entry.agent is not None:
            samples[entry.agent] = entry.fact.samples
    # Step 2: what these agents measured, with the final encoder if any of them did.
    if reports is None:
        reports = _reports_in_journal(entries)
    measured = _measured_at_end(reports, samples.keys()) or _measured_in_round(entries, last_round)
    # Step 3: what the encoder began with, and which release it follows.
    warm_starts = facts_of(entries, WarmStarted)
    older = released_to_all(state.journal, "stable")
    return Lineage(
        run=run,
        round=last_round,
        seed=request.seed,
        clients=len(samples),
        partition_sha256=hashlib.sha256(json.dumps(sorted(samples.items())).encode()).hexdigest(),
        encoder_sha256=encoder_sha256,
        weights_sha256=None if request.weights is None else request.weights.sha256,
        warm_start_sha256=warm_starts[-1].encoder_sha256 if warm_starts else None,
        parent=None if older is None else older.bundle_id,
        scores=Scores.of(measured),
    )


def _reports_in_journal(entries: Iterable[Entry]) -> dict[str, tuple[float | None, int]]:
    """Return for each agent the acc.personal of its newest report of a release, and the samples behind it."""
    reports: dict[str, tuple[float | None, int]] = {}
    for entry in entries:
        if isinstance(entry.fact, ReleaseReported) and entry.agent:
            accuracies = entry.fact.acc or {}
            reports[entry.agent] = accuracies.get("personal"), entry.fact.support or 0
    return reports


def _measured_at_end(
    reports: Mapping[str, tuple[float | None, int]], trained: Collection[str]
) -> list[tuple[float, int]]:
    """Return the acc.personal that agents report which have ``trained``, each with the samples behind it."""
    measured = []
    for agent, (accuracy, support) in reports.items():
        if agent in trained and accuracy is not None:
            measured.append((accuracy, support))
    return measured


def _measured_in_round(entries: Iterable[Entry], number: int) -> list[tuple[float, int]]:
    """Return the acc.personal that agents measured in a round; on how many samples is not known, so each has 0."""
    accuracies: dict[str, float | None] = {}
    for entry in entries:
        if isinstance(entry.fact, UpdateAccepted) and entry.agent is not None and entry.round == number:
            accuracies[entry.agent] = entry.fact.metrics.get("acc.personal")
    return [(accuracy, 0) for accuracy in accuracies.values() if accuracy is not None]
