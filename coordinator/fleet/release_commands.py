"""What an operator does to releases, pins and devices, by a command or by the web view; both call these functions.

They write the journal of a state folder, beside a coordinator that serves or before it does. ``by`` is who did it.
"""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from edge_agent.errors import UsageError
from edge_agent.moments import moment_of

from ..state.journal import Kind, utc_now
from ..state.releases import Book, Plan, Release, plan_body, rollback_of
from ..state.store import StateFolder
from ..text import counted, listed


def create(folder: StateFolder, plan: Plan, run: str | None, by: str) -> int:
    """Release the newest bundle of a run, or of all runs; returns the number of the release.

    Raises:
        UnknownName: no such run.
        UsageError: the plan cannot be followed, or there is no bundle at hand.
    """
    plan.check()
    exported = [*folder.journal.entries(run, ("bundle_exported", "release_made"))]
    at_hand = [entry for entry in exported if entry.digest is not None and entry.digest in folder.blobs]
    if not at_hand:
        if run is not None:
            folder.journal.replay(run)  # names the runs that there are
        of = "no run" if run is None else run
        raise UsageError(
            f"{of} has a bundle that can be released; a run exports one at its end where export.after_run is true, "
            "'headwater report' says why it did not"
        )
    chosen, book = at_hand[-1], book_of(folder)
    older = book.for_everybody(plan.channel)
    body = {name: value for name, value in chosen.body.items() if name not in {"rolls_back", "plan"}}
    body |= {"plan": plan_body(plan), "by": by, "parent": older.bundle_id if older is not None else None}
    _release(folder, chosen.run, chosen.round, chosen.digest, body)
    return len(book.releases) + 1


def promote(folder: StateFolder, number: int | None, by: str) -> int:
    """Give a release to everybody; returns its number.

    Raises:
        UsageError: no such release, or it is not at its canary.
    """
    release = _chosen(book_of(folder), number)
    if release.stage not in {"canary", "paused"}:
        raise UsageError(_is_already(release, "only one at its canary can be promoted"))
    _append(folder, "release_stage", release, by, stage="everybody")
    return release.number


def hold(folder: StateFolder, number: int | None, reason: str, by: str) -> int:
    """Give a release to no further device; returns its number.

    Raises:
        UsageError: no such release, or devices do not get it any more.
    """
    release = _chosen(book_of(folder), number)
    if not release.is_open:
        raise UsageError(_is_already(release, "only one that devices still get can be held"))
    _append(folder, "release_held", release, by, reason=reason or f"held by {by}")
    return release.number


def resume(folder: StateFolder, number: int | None, by: str) -> int:
    """Continue a release that is held; returns its number.

    Raises:
        UsageError: no such release, or it is not held.
    """
    release = _chosen(book_of(folder), number)
    if release.stage != "held":
        raise UsageError(_is_already(release, "only one that is held can be resumed"))
    _append(folder, "release_resumed", release, by)
    return release.number


def rollback(folder: StateFolder, number: int | None, reason: str, by: str) -> int:
    """Return all devices that run a release to the one before it; returns the number of the release that does so.

    Raises:
        UsageError: no such release, it was rolled back, or there is none before it.
    """
    book = book_of(folder)
    release = _chosen(book, number)
    if release.rolled_back_by:
        raise UsageError(_is_already(release, f"by release {release.rolled_back_by}"))
    older, body = rollback_of(book, release, reason or f"rolled back by {by}", by)
    _release(folder, older.run, older.round, older.digest, body)
    return len(book.releases) + 1


def pin(folder: StateFolder, device: str, number: int | None, reason: str, until: str, by: str) -> dict[str, Any]:
    """Keep one device on one release (None: the one that it runs); returns what was journaled.

    Raises:
        UsageError: no such device or release, or ``until`` is over or no date.
    """
    if until and moment_of(until) <= utc_now():
        raise UsageError(f"--until {until} is over; give a date to come")
    book = book_of(folder)
    known = book.devices.get(device)
    if known is None:
        raise UsageError(f"no device '{device[:80]}' was heard; known: {listed(sorted(book.devices)) or 'none'}")
    if number is None:
        running = [one for one in book.releases if one.bundle_id == known.runs]
        if not running:
            raise UsageError(f"{device} runs no release that is known here; name one with --release")
        number = running[-1].number
    release = _chosen(book, number)
    body = {"release": release.number, "reason": reason, "until": until, "by": by}
    with contextlib.ExitStack() as stack:
        blob = None
        if release.bundle_id != known.runs:  # perhaps an older one
            blob = stack.enter_context(_file(folder, release.run, release.bundle_id, release.digest))
        folder.journal.append("device_pinned", agent=device, digest=blob, body=body)
    return body


def unpin(folder: StateFolder, device: str, by: str) -> None:
    """End the pin of a device.

    Raises:
        UsageError: it is not pinned.
    """
    if device not in (pins := book_of(folder).pins):
        raise UsageError(f"'{device[:80]}' is not pinned; pinned: {listed(sorted(pins)) or 'none'}")
    folder.journal.append("device_unpinned", agent=device, body={"by": by})


def author() -> str:
    """The user of this process, for ``by``."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return "unknown"


def book_of(folder: StateFolder) -> Book:
    """All releases, devices and pins as of now."""
    book = Book()
    book.read(folder.journal)
    return book


# --- descriptions ----------------------------------------------------------------------------------------------------


def described(book: Book, release: Release, now: datetime) -> dict[str, Any]:
    """A release as JSON: its plan, where it stands, where it comes from, and what it scored where."""
    lineage = {"run": release.run, "round": release.round, **release.body.get("lineage", {})}
    return {
        "release": release.number,
        "bundle_id": release.bundle_id,
        "stage": release.stage,
        "waits_for": waits_for(book, release, now),
        "rolls_back": release.rolls_back or None,
        "rolled_back_by": release.rolled_back_by or None,
        "by": release.body.get("by"),
        "at": release.at,
        "plan": asdict(release.plan),
        "canary": list(release.canary),
        "outcomes": {name: count for name, count in sorted(release.count.items()) if count},
        "lineage": {**lineage, "parent": release.body.get("parent")},
        "results": {agent: asdict(result) for agent, result in sorted(release.results.items())},
    }


def waits_for(book: Book, release: Release, now: datetime) -> str:
    """What a release waits for, for whom and until when; empty where it is done."""
    number, pending = release.number, book.pending(release)
    whom = f": {listed(pending)}" if pending else ""
    if release.rolled_back_by:
        return ""
    if release.held:
        return f"{release.held}; continue with 'headwater release resume {number}', or 'rollback {number}'"
    wait_s, _ = release.plan.activation(now)
    until = f", which switch from {(now + timedelta(seconds=wait_s)).isoformat(timespec='minutes')} on"
    when = until if wait_s else ""
    if release.promoted:
        return f"waits for reports of {counted(len(pending), 'device')}{whom}{when}" if pending else ""
    if release.paused:
        return f"the canary succeeded; continue with 'headwater release promote {number}'"
    size = book.canary_size(release)
    if len(release.canary) < size:
        more = counted(size - len(release.canary), "more device")
        return f"waits for {more} of the canary to come online{whom}{when}"
    return f"waits for reports of {counted(len(pending), 'device')} of the canary{whom}{when}"


def device_rows(book: Book, now: datetime) -> list[dict[str, Any]]:
    """What each device runs and is to run, sorted by id; releases by number, None where no release fits."""
    rows = list[dict[str, Any]]()
    for agent, device in sorted(book.devices.items()):
        wanted, pin = book.wanted(device, now), book.pin(agent, now)
        runs = [one.number for one in book.releases if one.bundle_id == device.runs] if device.runs else []
        result = wanted.results.get(agent) if wanted is not None else None
        is_there = wanted is not None and wanted.number in runs
        rows.append(
            {
                "device": agent,
                "channel": device.channel,
                "bundle_id": device.runs,
                "runs": wanted.number if is_there and wanted is not None else runs[-1] if runs else None,
                "wanted": wanted.number if wanted is not None else None,
                "outcome": result.outcome if result is not None else None,
                "reason": result.reason if result is not None else "",
                "acc.personal": result.acc if result is not None else None,
                "pinned": None if pin is None else {"release": pin.release, "reason": pin.reason, "until": pin.until},
                "kept": device.kept,
            }
        )
    return rows


def open_releases(folder: StateFolder) -> list[dict[str, Any]]:
    """The releases that devices may get now, or that are held, in short: what each waits for."""
    book, now = book_of(folder), utc_now()
    current = [*book.current(), *(one for one in book.releases if one.held and not one.rolled_back_by)]
    return [
        {
            "release": one.number,
            "channel": one.plan.channel,
            "stage": one.stage,
            "bundle_id": one.bundle_id,
            "waits_for": waits_for(book, one, now),
        }
        for one in sorted(current, key=lambda one: one.number)
    ]


def standing_of(release: dict[str, Any]) -> str:
    """One of `open_releases` as a line of text."""
    waits = f": {release['waits_for']}" if release["waits_for"] else ""
    return f"release {release['release']} ({release['channel']}, {release['stage']}){waits}"


def releases_of_run(folder: StateFolder, run: str) -> list[dict[str, Any]]:
    """The releases of a run as JSON, see `described`."""
    book, now = book_of(folder), utc_now()
    return [described(book, one, now) for one in book.releases if one.run == run]


# --- inside ----------------------------------------------------------------------------------------------------------


def _chosen(book: Book, number: int | None) -> Release:
    """The release of that number; by default the newest that is no rollback and was not rolled back.

    Raises:
        UsageError: there is none.
    """
    if number is not None:
        release = book.get(number)
    else:
        release = next((one for one in reversed(book.releases) if not one.rolls_back and not one.rolled_back_by), None)
    if release is None:
        there = f"there are 1 to {len(book.releases)}" if book.releases else "'headwater release create' makes one"
        raise UsageError(f"no release {number or ''}".rstrip() + f"; {there}")
    return release


def _is_already(release: Release, why: str) -> str:
    return f"release {release.number} is at stage '{release.stage}'; {why}"


def _release(
    folder: StateFolder, run: str | None, number: int | None, digest: str | None, body: dict[str, Any]
) -> None:
    with _file(folder, run, body["bundle_id"], digest) as blob:
        folder.journal.append("release_made", run=run, round=number, digest=blob, body=body)


@contextlib.contextmanager
def _file(folder: StateFolder, run: str | None, bundle_id: str, digest: str | None) -> Iterator[str]:
    """The digest of a bundle's file, signed for now, as a blob that the journal is to name inside."""
    from ..state.release_keys import file_to_release  # loads cryptography

    content = file_to_release(folder, run or "", bundle_id, digest or "", utc_now())
    blob = folder.blobs.put(content)
    yield blob
    if blob not in folder.blobs:  # a coordinator at work removes what no entry names
        folder.blobs.put(content)


def _append(folder: StateFolder, kind: Kind, release: Release, by: str, **body: Any) -> None:
    folder.journal.append(kind, run=release.run or None, body={"release": release.number, "by": by, **body})
