"""What ``headwater release`` prints of releases and devices, for people; `state.release_rows` has the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from edge_agent.core.time_and_text import show_time

from ..state.release_rows import DeviceRow, Origin, ReleaseRow, Score, Signatures
from ..text import counted, listed
from .output import table

SHOWN_REASONS = 5
"""Devices that failed a release whose reasons are shown; --json has all."""


def release_lines(releases: Sequence[ReleaseRow], only: int | None = None) -> Iterator[Table | str]:
    """Yield a table of all releases, then what is known of those in force; or of the one with the number ``only``."""
    if not releases:
        yield "no releases yet; 'headwater release create' makes one of a run's bundle"
        return
    numbered = {release.number: release for release in releases}
    chosen = [release for release in releases if release.standing.is_in_force]
    if only is None:
        columns = ("release", "channel", "stage", "bundle", "run", "reports")
        yield table("releases", columns, [*map(_row, releases)], left=6)
    else:
        chosen = [numbered[only]]
    for release in chosen:
        yield ""
        yield from _details(release)
        if release.standing.rolls_back:
            yield from _failures(numbered[release.standing.rolls_back])
    if len(chosen) < len(releases) and only is None:
        yield ""
        yield "'headwater release status NUMBER' shows one that another has taken the place of"


def release_line(row: ReleaseRow) -> str:
    """Return a release in one line, without what it waits for."""
    bundle = row.release.bundle_id[:12]
    return f"release {row.number} of {row.origin.run}, bundle {bundle}: {row.standing.text}"


def device_lines(devices: Sequence[DeviceRow], count: int, others: Mapping[str, int]) -> Iterator[Table | str]:
    """Yield a table of ``devices``, of ``count`` in all, and notes; ``others``: agents by another tier."""
    shown = f", {len(devices)} shown (--devices 0: all)" if len(devices) < count else ""
    rows = [
        (
            f"{device.id} *" if device.note else device.id,
            device.channel,
            device.bundle_id[:12],
            device.runs,
            f"{device.runs}, held" if device.is_held else device.wanted,
            None if device.result is None else device.result.outcome,
        )
        for device in devices
    ]
    yield ""
    columns = ("device", "channel", "bundle", "runs", "wanted", "outcome")
    yield table(f"{counted(count, 'device')} of tier head{shown}", columns, rows, left=6)
    yield from (f"{device.id} *: {device.note}" for device in devices if device.note)
    yield from (f"also known: {line}" for line in other_tiers(others))


def other_tiers(others: Mapping[str, int]) -> Iterator[str]:
    """Yield how many agents take no releases, by their tier."""
    for tier, number in sorted(others.items()):
        agents = counted(number, "agent")
        yield f"{agents} of tier '{tier}', which takes no releases; tier = \"head\" in agent.toml takes them"


def _row(row: ReleaseRow) -> tuple[object, ...]:
    reports = ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())
    bundle = row.release.bundle_id[:12]
    return (row.number, row.plan.channel, row.standing.text, bundle, row.origin.run, reports)


def _details(row: ReleaseRow) -> Iterator[str]:
    """Yield when and by whom a release was made, its origin, scores, failures, and what it waits for."""
    release = row.release
    by = f" by {release.author}" if release.author else ""
    note = f": {release.note}" if release.note else ""
    made = f"made {show_time(release.at)}{by}"
    yield f"release {row.number} ({row.plan.channel}, {row.standing.text}), {made}{note}"
    if row.undone_because:
        undone = row.standing.rolls_back or row.number
        yield f"  release {undone} was rolled back: {row.undone_because}"
    yield f"  from {', '.join(_origin(row.origin))}"
    yield f"  signed by {_signers(row.signatures)}"
    scores = []
    if row.origin.score is not None:
        scores.append(f"in the run {_score_text(row.origin.score)}")
    if row.score_on_devices is not None:
        scores.append(f"on devices {_score_text(row.score_on_devices)}")
    if scores:
        yield f"  acc.personal {'; '.join(scores)}"
    if release.canary:
        yield f"  canary: {listed(list(release.canary))}"
    yield from _failures(row)
    yield from (f"  {step}" for step in row.steps)


def _origin(origin: Origin) -> Iterator[str]:
    """Yield what is known of the run that a release's bundle comes from."""
    yield f"{origin.run}, round {origin.round}"
    if origin.method is not None:
        yield f"method {origin.method}"
    if origin.seed is not None:
        yield f"seed {origin.seed}"
    if origin.clients is not None:
        yield f"{origin.clients} clients"
    if origin.partition_sha256:
        yield f"partition {origin.partition_sha256[:12]}"
    if origin.parent:
        yield f"after bundle {origin.parent[:12]}"


def _signers(signatures: Signatures | None) -> str:
    """Return who has signed a release, and how many of how many keys have to."""
    if signatures is None:
        return "nobody"
    names = ", ".join(signer.name or f"{signer.id[:8]}…" for signer in signatures.signers)
    return f"{names or 'nobody'}; {signatures.threshold} of {signatures.keys} needed"


def _score_text(score: Score) -> str:
    return f"{score.mean:.3f}, worst tenth {score.worst_tenth:.3f} of {counted(score.clients, 'client')}"


def _failures(row: ReleaseRow) -> Iterator[str]:
    """Yield which devices a release failed on, and why."""
    failed = [(agent, result.reason) for agent, result in row.results.items() if result.outcome == "failed"]
    for agent, reason in failed[:SHOWN_REASONS]:
        yield f"  release {row.number} failed on {agent}: {reason}"
    if len(failed) > SHOWN_REASONS:
        yield f"  and on {counted(len(failed) - SHOWN_REASONS, 'more device')} (--json: all)"
