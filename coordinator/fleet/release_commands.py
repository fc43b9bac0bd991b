"""What an operator does to releases, pins and devices, by a command or by the web view; both call these functions.

They write the journal of a state folder, beside a coordinator that serves or before it does. ``by`` is who did it.
"""

from __future__ import annotations

import getpass
from collections import Counter
from pathlib import Path

from edge_agent.core.errors import UsageError
from edge_agent.core.time_and_text import moment_of

from ..journal.entries import (
    DevicePinned,
    DeviceUnpinned,
    ReleaseHeld,
    ReleaseMade,
    ReleaseResumed,
    ReleaseStage,
)
from ..journal.kinds import Kind
from ..journal.store import Entry, utc_now
from ..state.release_rows import ReleaseRow, Running
from ..state.status_file import read_agents
from ..state.store import StateFolder
from ..text import listed
from ..views.releases import Book, Device, Pin, Plan, Release, book_of, release_of, rollback_of
from ..views.runs import replay


def create(folder: StateFolder, plan: Plan, run: str | None, by: str, *, new_channel: bool = False) -> int:
    """Release the newest bundle of a run, or of all runs; returns the number of the release.

    ``new_channel``: devices of the plan's channel are yet to come.

    Raises:
        UnknownName: no such run.
        UsageError: the plan cannot be followed, or there is no bundle at hand.
    """
    plan.check(utc_now())
    if plan.activate_at and moment_of(plan.activate_at) <= utc_now():
        raise UsageError(f"--activate-at {plan.activate_at} is over; leave it out, or give a time to come")
    newest = _newest_bundle(folder, run)
    book = book_of(folder.journal)
    if not new_channel:
        book.check_channel(plan.channel)
    book.check_fleet(plan)
    older = book.for_everybody(plan.channel)
    parent = None if older is None else older.bundle_id
    release = release_of(newest.fact, plan=plan.to_fact(), by=by, parent=parent)
    _release(folder, newest.run, newest.round, newest.digest, release)
    return len(book.releases) + 1


def promote(folder: StateFolder, number: int | None, by: str) -> int:
    """Give a release to everybody; returns its number.

    Raises:
        UsageError: no such release, or it is not at its canary.
    """
    book = book_of(folder.journal)
    release = find_release(book, number)
    if (newer := book.replaced_by(release)) is not None:
        raise UsageError(
            f"release {release.number} cannot be promoted: everybody gets release {newer.number}, which is newer; "
            f"'headwater release create {release.run}' makes a new release of that bundle"
        )
    if release.stage not in {"canary", "paused"}:
        raise UsageError(_is_already(release, "only one at its canary can be promoted"))
    _append(folder, release, ReleaseStage(release=release.number, by=by, stage="everybody"))
    return release.number


def hold(folder: StateFolder, number: int | None, reason: str, by: str) -> int:
    """Give a release to no further device; returns its number.

    Raises:
        UsageError: no such release, or devices do not get it any more.
    """
    release = find_release(book_of(folder.journal), number)
    if not release.is_open:
        raise UsageError(_is_already(release, "only one that devices still get can be held"))
    if release.rolls_back:
        raise UsageError(
            f"release {release.number} is a rollback, which cannot be held: devices would stay with what it undoes; "
            f"'headwater release rollback {release.number}' goes further back, a new release replaces it"
        )
    _append(folder, release, ReleaseHeld(release=release.number, by=by, reason=reason or f"held by {by}"))
    return release.number


def resume(folder: StateFolder, number: int | None, by: str) -> int:
    """Continue a release that is held; returns its number.

    Raises:
        UsageError: no such release, or it is not held.
    """
    release = find_release(book_of(folder.journal), number)
    if release.stage != "held":
        raise UsageError(_is_already(release, "only one that is held can be resumed"))
    _append(folder, release, ReleaseResumed(release=release.number, by=by))
    return release.number


def rollback(folder: StateFolder, number: int | None, reason: str, by: str) -> int:
    """Return all devices that run a release to the one before it, not those that run, or are to run, a newer one.

    Returns the number of the release that does so.

    Raises:
        UsageError: no such release, it was rolled back, or there is none before it; or none is named and the newest is
            itself a rollback.
    """
    book = book_of(folder.journal)
    if number is None and book.releases and book.releases[-1].rolls_back:
        raise UsageError(_after_rollback(book))
    release = find_release(book, number)
    if release.rolled_back_by:
        raise UsageError(_is_already(release, f"by release {release.rolled_back_by}"))
    older, way_back = rollback_of(book, release, reason or f"rolled back by {by}", by)
    _release(folder, older.run, older.round, older.digest, way_back)
    return len(book.releases) + 1


def pin(
    folder: StateFolder, device: str, number: int | None, reason: str, until: str, by: str
) -> tuple[DevicePinned, Pin | None]:
    """Keep one device on one release (None: the one that it runs); returns what was journaled, and the pin before.

    Raises:
        UsageError: no such device or release, or ``until`` is over or no date.
    """
    if reason and not reason.strip():
        raise UsageError("--reason is empty; say why, or leave it out")
    reason = reason.strip() or f"pinned by {by}"
    if until and moment_of(until) <= utc_now():
        raise UsageError(f"--until {until} is over; give a date to come")
    until = moment_of(until).isoformat(timespec="minutes") if until else ""
    book = book_of(folder.journal)
    heard_device = _find_device(folder, book, device)
    if number is None:
        number = Running(book).number(heard_device, book.release_for(heard_device, utc_now()))
        if number is None:
            raise UsageError(f"{device} runs no release that is known here; name one")
    release = find_release(book, number)
    fact = DevicePinned(release=release.number, reason=reason, until=until, by=by)
    folder.journal.append(fact, agent=device)
    return fact, book.pin(device, utc_now())


def unpin(folder: StateFolder, device: str, by: str) -> None:
    """End the pin of a device.

    Raises:
        UsageError: it is not pinned.
    """
    if device not in (pins := book_of(folder.journal).pins):
        raise UsageError(f"'{device[:80]}' is not pinned; pinned: {listed(sorted(pins)) or 'none'}")
    folder.journal.append(DeviceUnpinned(by=by), agent=device)


def current_user() -> str:
    """Return the name of the user of this process, for ``by``."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return "unknown"


def tiers_without_releases(path: Path) -> Counter[str]:
    """Return how many agents there are of each tier that takes no releases."""
    return Counter(row.agent.tier for row in read_agents(path) if row.agent.tier != "head")


def releases_of_run(folder: StateFolder, run: str) -> list[ReleaseRow]:
    """Return the releases of a run."""
    book = book_of(folder.journal)
    now = utc_now()
    return [ReleaseRow.from_release(book, release, now) for release in book.releases if release.run == run]


# --- inside ----------------------------------------------------------------------------------------------------------


def find_release(book: Book, number: int | None) -> Release:
    """Return the release of that number; by default the newest that is no rollback and was not rolled back.

    Raises:
        UsageError: there is none.
    """
    if number is not None:
        release = book.get(number)
    else:
        forward = [release for release in book.releases if not release.rolls_back and not release.rolled_back_by]
        release = forward[-1] if forward else None
    if release is None:
        there = f"there are 1 to {len(book.releases)}" if book.releases else "'headwater release create' makes one"
        raise UsageError(f"no release {number or ''}".rstrip() + f"; {there}")
    return release


def _after_rollback(book: Book) -> str:
    """Return why the newest release, a rollback, is not rolled back itself, and which command goes one step further."""
    newest = book.releases[-1]
    said = f"the newest release, {newest.number}, is itself a rollback, of release {newest.rolls_back}"
    older = book.before(newest)
    if older is None:
        return f"{said}; no earlier one is left to return to, see 'headwater release status'"
    return f"{said}; 'headwater release rollback {newest.number}' goes further back, to release {older.number}"


def _is_already(release: Release, why: str) -> str:
    return f"release {release.number} is at stage '{release.stage}'; {why}"


def _release(folder: StateFolder, run: str | None, number: int | None, digest: str | None, fact: ReleaseMade) -> None:
    """Sign the file of a bundle for a release, and journal the release.

    Args:
        folder: The state folder.
        run: Name of the bundle's run.
        number: The round of that run after which the bundle was exported.
        digest: Digest of the bundle's file.
        fact: The release, without its signature.
    """
    from ..state.release_keys import file_to_release  # loads cryptography

    content, signed = file_to_release(folder, run or "", fact.bundle_id, digest or "", utc_now())
    blob = folder.blobs.put(content)
    folder.journal.append(fact.changed(signed=signed), run=run, round=number, digest=blob)
    if blob not in folder.blobs:  # a coordinator at work removes what no entry names
        folder.blobs.put(content)


def _newest_bundle(folder: StateFolder, run: str | None) -> Entry:
    """Return the entry about the newest bundle of a run, or of all runs, that can be released.

    Raises:
        UnknownName: no such run.
        UsageError: there is no bundle at hand.
    """
    bundles = _bundles(folder, run, ("bundle_exported",))
    if not bundles and run is not None:
        # The run did not end, or its bundle was exported for a release alone.
        for entry in _bundles(folder, run, ("release_made",)):
            if isinstance(entry.fact, ReleaseMade) and not entry.fact.rolls_back:
                bundles.append(entry)
    if not bundles:
        if run is not None:
            replay(folder.journal, run)  # names the runs that there are
        of = "no run" if run is None else run
        raise UsageError(
            f"{of} has a bundle that can be released; a run exports one at its end where export.after_run is true, "
            "'headwater report' says why it did not"
        )
    return bundles[-1]


def _find_device(folder: StateFolder, book: Book, name: str) -> Device:
    """Return a device that takes releases.

    Raises:
        UsageError: it was not heard, or is of a tier that takes none.
    """
    device = book.devices.get(name)
    if device is not None:
        return device
    for row in read_agents(folder.path):
        tier = row.agent.tier
        if row.agent.id == name and tier:
            raise UsageError(
                f"{name} is of tier '{tier}', which takes no releases; tier = \"head\" in its agent.toml does"
            )
    raise UsageError(f"no device '{name[:80]}' was heard; known: {listed(sorted(book.devices))}")


def _bundles(folder: StateFolder, run: str | None, kinds: tuple[Kind, ...]) -> list[Entry]:
    """Return the entries about bundles, of a run or all, whose file is here."""
    entries = folder.journal.entries(run, kinds)
    return [entry for entry in entries if entry.digest is not None and entry.digest in folder.blobs]


def _append(folder: StateFolder, release: Release, fact: ReleaseStage | ReleaseHeld | ReleaseResumed) -> None:
    folder.journal.append(fact, run=release.run or None)
