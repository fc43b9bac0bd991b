"""What ``headwater release`` prints of releases and devices, for people; `release_commands` has the JSON of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from edge_agent.core.time_and_text import show_time

from ..fleet.release_commands import stage_text
from ..text import counted, listed
from .output import table

Shown = Mapping[str, Any]
"""A release or a device as JSON."""

SHOWN_REASONS = 5
"""Devices that failed a release whose reasons are shown; --json has all."""


def release_lines(releases: Sequence[Shown], only: int | None = None) -> Iterator[Table | str]:
    """Yield a table of all releases, then what is known of those in force; or of the one with the number ``only``."""
    if not releases:
        yield "no releases yet; 'headwater release create' makes one of a run's bundle"
        return
    numbered = {one["release"]: one for one in releases}
    chosen = [one for one in releases if not (one["rolled_back_by"] or one["replaced_by"])]
    if only is None:
        columns = ("release", "channel", "stage", "bundle", "run", "reports")
        yield table("releases", columns, [*map(_row, releases)], left=6)
    else:
        chosen = [numbered[only]]
    for one in chosen:
        yield ""
        yield from _details(one)
        if one["rolls_back"]:
            yield from _failures(numbered[one["rolls_back"]])
    if len(chosen) < len(releases) and only is None:
        yield ""
        yield "'headwater release status NUMBER' shows one that another has taken the place of"


def release_line(release: Shown) -> str:
    """Return a release in one line, without what it waits for."""
    return f"release {release['release']} of {release['lineage']['run']}, bundle {release['bundle_id'][:12]}: " + (
        stage_text(release)
    )


def device_lines(devices: Sequence[Shown], count: int, others: Mapping[str, int]) -> Iterator[Table | str]:
    """Yield a table of ``devices``, of ``count`` in all, and notes; ``others``: agents by another tier."""
    shown = f", {len(devices)} shown (--devices 0: all)" if len(devices) < count else ""
    rows = [
        (
            f"{one['device']} *" if _note(one) else one["device"],
            one["channel"],
            one["bundle_id"][:12],
            one["runs"],
            f"{one['runs']}, held" if one["held"] else one["wanted"],
            one["outcome"],
        )
        for one in devices
    ]
    yield ""
    columns = ("device", "channel", "bundle", "runs", "wanted", "outcome")
    yield table(f"{counted(count, 'device')} of tier head{shown}", columns, rows, left=6)
    yield from (f"{one['device']} *: {note}" for one in devices if (note := _note(one)))
    yield from (f"also known: {line}" for line in other_tiers(others))


def other_tiers(others: Mapping[str, int]) -> Iterator[str]:
    """Yield how many agents take no releases, by their tier."""
    for tier, number in sorted(others.items()):
        agents = counted(number, "agent")
        yield f"{agents} of tier '{tier}', which takes no releases; tier = \"head\" in agent.toml takes them"


def _row(release: Shown) -> tuple[object, ...]:
    reports = ", ".join(f"{count} {outcome}" for outcome, count in release["outcomes"].items())
    bundle = release["bundle_id"][:12]
    run = release["lineage"]["run"]
    return (release["release"], release["plan"]["channel"], stage_text(release), bundle, run, reports)


def _details(release: Shown) -> Iterator[str]:
    """Yield when and by whom a release was made, its origin, scores, failures, and what it waits for."""
    plan = release["plan"]
    scored = release["scored"]
    by = f" by {release['by']}" if release["by"] else ""
    note = f": {release['note']}" if release["note"] else ""
    made = f"made {show_time(release['at'])}{by}"
    yield f"release {release['release']} ({plan['channel']}, {stage_text(release)}), {made}{note}"
    if release["undone_because"]:
        undone = release["rolls_back"] or release["release"]
        yield f"  release {undone} was rolled back: {release['undone_because']}"
    yield f"  from {', '.join(_origin(release['lineage']))}"
    yield f"  signed by {_signers(release['signed'])}"
    where = {"run": "in the run", "devices": "on devices"}
    scores = [f"{text} {_scores(scored[key])}" for key, text in where.items() if scored[key] is not None]
    yield from [f"  acc.personal {'; '.join(scores)}"] if scores else []
    yield from [f"  canary: {listed(release['canary'])}"] if release["canary"] else []
    yield from _failures(release)
    yield from (f"  {step}" for step in release["steps"])


def _origin(lineage: Shown) -> Iterator[str]:
    yield f"{lineage['run']}, round {lineage['round']}"
    for name, text in {"method": "method {}", "seed": "seed {}", "clients": "{} clients"}.items():
        if lineage.get(name) is not None:
            yield text.format(lineage[name])
    for name, text in {"partition_sha256": "partition", "parent": "after bundle"}.items():
        if lineage.get(name):
            yield f"{text} {lineage[name][:12]}"


def _signers(signed: Shown | None) -> str:
    """Return who has signed a release, and how many of how many keys have to."""
    if signed is None:
        return "nobody"
    names = ", ".join(one["name"] or f"{one['id'][:8]}…" for one in signed["signers"])
    return f"{names or 'nobody'}; {signed['threshold']} of {signed['keys']} needed"


def _scores(scores: Shown) -> str:
    return f"{scores['mean']:.3f}, worst tenth {scores['worst_tenth']:.3f} of {counted(scores['clients'], 'client')}"


def _failures(release: Shown) -> Iterator[str]:
    """Yield which devices a release failed on, and why."""
    failed = [(agent, one["reason"]) for agent, one in release["results"].items() if one["outcome"] == "failed"]
    for agent, reason in failed[:SHOWN_REASONS]:
        yield f"  release {release['release']} failed on {agent}: {reason}"
    if len(failed) > SHOWN_REASONS:
        yield f"  and on {counted(len(failed) - SHOWN_REASONS, 'more device')} (--json: all)"


def _note(device: Shown) -> str:
    if pin := device["pinned"]:
        until = f" until {show_time(pin['until'])}" if pin["until"] else ""
        return f"pinned{until}: {pin['reason']}"
    is_there = device["runs"] is not None and device["runs"] == device["wanted"]
    return str(("" if is_there else device["kept"]) or device["reason"])
