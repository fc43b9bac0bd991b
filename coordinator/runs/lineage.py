"""Where a run's encoder comes from, for its bundle: counts, hashes and averages, for every device reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from edge_agent.bundle.manifest import Lineage
from edge_agent.bundle.trust import Scores

from ..journal.entries import ReleaseReported, UpdateAccepted, WarmStarted
from ..journal.store import facts_of
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
    number = replay(state.journal, run).round
    # Step 1: who has trained, on how many samples, and what these agents measured in the last round.
    samples: dict[str, float | None] = {}
    accuracies_in_round: dict[str, float | None] = {}
    for entry in entries:
        if not isinstance(entry.fact, UpdateAccepted) or entry.agent is None:
            continue
        samples[entry.agent] = entry.fact.samples
        if entry.round == number:
            accuracies_in_round[entry.agent] = entry.fact.metrics.get("acc.personal")
    warm_starts = facts_of(entries, WarmStarted)
    # Step 2: what they measured with the final encoder.
    if reports is None:
        reports = {}
        for entry in entries:
            if isinstance(entry.fact, ReleaseReported) and entry.agent:
                acc = entry.fact.acc or {}
                reports[entry.agent] = acc.get("personal"), entry.fact.support or 0
    at_end = [(acc, support) for agent, (acc, support) in reports.items() if agent in samples and acc is not None]
    in_round = [(acc, 0) for acc in accuracies_in_round.values() if acc is not None]
    older = released_to_all(state.journal, "stable")
    return Lineage(
        run=run,
        round=number,
        seed=request.seed,
        clients=len(samples),
        partition_sha256=hashlib.sha256(json.dumps(sorted(samples.items())).encode()).hexdigest(),
        encoder_sha256=encoder_sha256,
        weights_sha256=None if request.weights is None else request.weights.sha256,
        warm_start_sha256=warm_starts[-1].encoder_sha256 if warm_starts else None,
        parent=None if older is None else older.bundle_id,
        scores=Scores.of(at_end or in_round),
    )
