"""What an operator does to releases, pins and devices, by a command or by the web view; both call these functions.

They write the journal of a state folder, beside a coordinator that serves or before it does. ``by`` is who did it.
"""

from __future__ import annotations

import getpass
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from edge_agent.core.errors import UsageError
from edge_agent.core.time_and_text import moment_of, show_time

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
from ..state.store import StateFolder, read_agents
from ..text import counted, listed
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
    at_hand = _bundles(folder, run, ("bundle_exported",))
    if not at_hand and run is not None:  # it did not end, or is of this release alone
        at_hand = [
            one
            for one in _bundles(folder, run, ("release_made",))
            if isinstance(one.fact, ReleaseMade) and not one.fact.rolls_back
        ]
    if not at_hand:
        if run is not None:
            replay(folder.journal, run)  # names the runs that there are
        of = "no run" if run is None else run
        raise UsageError(
            f"{of} has a bundle that can be released; a run exports one at its end where export.after_run is true, "
            "'headwater report' says why it did not"
        )
    chosen = at_hand[-1]
    book = book_of(folder.journal)
    if not new_channel:
        book.check_channel(plan.channel)
    book.check_fleet(plan)
    older = book.for_everybody(plan.channel)
    parent = None if older is None else older.bundle_id
    made = release_of(chosen.fact, plan=plan.to_fact(), by=by, parent=parent)
    _release(folder, chosen.run, chosen.round, chosen.digest, made)
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
    older, made = rollback_of(book, release, reason or f"rolled back by {by}", by)
    _release(folder, older.run, older.round, older.digest, made)
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
    known = book.devices.get(device)
    if known is None:
        tier = next((one["tier"] for one in read_agents(folder.path) if one["id"] == device), None)
        if tier is not None:
            raise UsageError(
                f"{device} is of tier '{tier}', which takes no releases; tier = \"head\" in its agent.toml does"
            )
        raise UsageError(f"no device '{device[:80]}' was heard; known: {listed(sorted(book.devices))}")
    if number is None:
        number = Running(book).number(known, book.wanted(known, utc_now()))
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


# --- descriptions ----------------------------------------------------------------------------------------------------


def describe_release(book: Book, release: Release, now: datetime) -> dict[str, Any]:
    """Return a release as JSON: its plan, where it stands, where it comes from, and what it scored where."""
    made = release.made
    on_devices = book.scores(release.bundle_id)
    lineage = {"run": release.run, "round": release.round, **(made.lineage or {})}
    scored = {
        "run": lineage.pop("scores", None),
        "devices": None if on_devices is None else on_devices.model_dump(),
        "held_out": made.held_out,
        "parity_max_abs": made.parity_max_abs,
        "int8_cosine": made.int8_cosine,
    }
    steps = [*list_waits(book, release, now)]
    return {
        "release": release.number,
        "bundle_id": release.bundle_id,
        **describe_standing(book, release, now),
        "waits_for": "; ".join(steps),
        "steps": steps,
        "by": release.author or None,
        "note": release.note,
        "undone_because": book.undone_because(release),
        "signed": made.signed,
        "at": release.at,
        "plan": asdict(release.plan),
        "canary": list(release.canary),
        "outcomes": {name: count for name, count in sorted(release.count.items()) if count},
        "lineage": {**lineage, "parent": made.parent},
        "scored": scored,
        "results": {agent: asdict(result) for agent, result in sorted(release.results.items())},
    }


def describe_standing(book: Book, release: Release, now: datetime) -> dict[str, Any]:
    """Return where a release stands, as JSON; `stage_text` says it to people."""
    newer = book.replaced_by(release)
    return {
        "stage": book.stage(release, now),
        "rolls_back": release.rolls_back or None,
        "rolled_back_by": release.rolled_back_by or None,
        "replaced_by": None if newer is None else newer.number,
    }


def list_waits(book: Book, release: Release, now: datetime) -> Iterator[str]:
    """Yield what a release waits for, for whom and until when, what was done, and the next command, one line each.

    Of a release that is over there is nothing to say.
    """
    if release.rolled_back_by or book.replaced_by(release) is not None:
        return
    number = release.number
    answers = book.pending(release, now)
    pending, unable = ([one for one in answers if (one in release.results) is has] for has in (False, True))
    if release.held:
        yield from release.held.splitlines()
        back = f"; 'headwater release rollback {number}' returns devices" if book.before(release) is not None else ""
        yield f"next: 'headwater release resume {number}' continues it{back}"
        return
    whom = f": {listed(pending)}" if pending else ""
    wait_s, _ = release.plan.activation(now)
    until = f", which switch from {show_time(now + timedelta(seconds=wait_s))} on"
    when = until if wait_s else ""
    reports = f"waits for reports of {counted(len(pending), 'device')}"
    if release.promoted:
        yield from [f"{reports}{whom}{when}"] if pending else []
        yield from (
            [f"asks {counted(len(unable), 'device')} again that could not try it: {listed(unable)}"] if unable else []
        )
    elif release.paused:
        yield f"the canary succeeded; continue with 'headwater release promote {number}'"
    else:
        if (more := book.canary_size(release) - len(release.canary)) > 0:
            known = counted(book.sizes[release.plan.channel], "device")
            where = f"of {known} in channel '{release.plan.channel}' once online"
            yield f"the canary lacks {counted(more, 'device')}, chosen {where}"
        if release.canary:
            yield f"{reports} of the canary{whom}{when}"


class Running:
    """By which number a device runs a release: several releases may be of one bundle."""

    def __init__(self, book: Book) -> None:
        self._newest = dict[str, int]()
        self._in_channel = dict[tuple[str, str], int]()
        for release in book.releases:
            self._newest[release.bundle_id] = release.number
            self._in_channel[release.plan.channel, release.bundle_id] = release.number

    def number(self, device: Device, wanted: Release | None) -> int | None:
        """Return the release that it is to run where it does, else the newest of its bundle, first in its channel."""
        if not device.runs:
            return None
        if wanted is not None and wanted.bundle_id == device.runs:
            return wanted.number
        return self._in_channel.get((device.channel, device.runs), self._newest.get(device.runs))


def device_rows(book: Book, now: datetime) -> list[dict[str, Any]]:
    """Return what each device runs and is to run, sorted by id; releases by number, None where no release fits.

    ``held``: it stays with what it runs, because that release is held.
    """
    rows = list[dict[str, Any]]()
    running = Running(book)
    for agent, device in sorted(book.devices.items()):
        wanted = book.wanted(device, now)
        pin = book.pin(agent, now)
        runs = running.number(device, wanted)
        about = wanted if wanted is not None else book.get(runs or 0)
        result = about.results.get(agent) if about is not None else None
        rows.append(
            {
                "device": agent,
                "channel": device.channel,
                "bundle_id": device.runs,
                "runs": runs,
                "wanted": wanted.number if wanted is not None else None,
                "held": wanted is None and about is not None and bool(about.held),
                "outcome": result.outcome if result is not None else None,
                "reason": result.reason if result is not None else "",
                "acc.personal": result.acc if result is not None else None,
                "pinned": None if pin is None else {"release": pin.release, "reason": pin.reason, "until": pin.until},
                "kept": device.kept,
            }
        )
    return rows


def tiers_without_releases(path: Path) -> Counter[str]:
    """Agents by their tier, of those that take no releases."""
    return Counter(one["tier"] for one in read_agents(path) if one["tier"] != "head")


def open_releases(folder: StateFolder) -> list[dict[str, Any]]:
    """Return the releases that devices may get now, or that are held, in short: what each waits for."""
    book = book_of(folder.journal)
    now = utc_now()
    held = (one for one in book.releases if one.held and not one.rolled_back_by and book.replaced_by(one) is None)
    return [
        {
            "release": one.number,
            "channel": one.plan.channel,
            **describe_standing(book, one, now),
            "bundle_id": one.bundle_id,
            "waits_for": "; ".join(list_waits(book, one, now)),
        }
        for one in sorted([*book.current(), *held], key=lambda one: one.number)
    ]


def describe_open_release(release: dict[str, Any]) -> str:
    """Return one of `open_releases` as a line of text."""
    waits = f": {release['waits_for']}" if release["waits_for"] else ""
    return f"release {release['release']} ({release['channel']}, {stage_text(release)}){waits}"


def stage_text(release: Mapping[str, Any]) -> str:
    """Return where a release stands, with the number of the release that took its place or that it undoes."""
    if release["rolled_back_by"]:
        return f"rolled back by {release['rolled_back_by']}"
    if release["replaced_by"]:
        return f"replaced by {release['replaced_by']}"
    return f"rolls back {release['rolls_back']}, {release['stage']}" if release["rolls_back"] else release["stage"]


def releases_of_run(folder: StateFolder, run: str) -> list[dict[str, Any]]:
    """Return the releases of a run as JSON, see `describe_release`."""
    book = book_of(folder.journal)
    now = utc_now()
    return [describe_release(book, one, now) for one in book.releases if one.run == run]


# --- inside ----------------------------------------------------------------------------------------------------------


def find_release(book: Book, number: int | None) -> Release:
    """Return the release of that number; by default the newest that is no rollback and was not rolled back.

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


def _release(folder: StateFolder, run: str | None, number: int | None, digest: str | None, made: ReleaseMade) -> None:
    from ..state.release_keys import file_to_release  # loads cryptography

    content, signed = file_to_release(folder, run or "", made.bundle_id, digest or "", utc_now())
    blob = folder.blobs.put(content)
    folder.journal.append(made.changed(signed=signed), run=run, round=number, digest=blob)
    if blob not in folder.blobs:  # a coordinator at work removes what no entry names
        folder.blobs.put(content)


def _bundles(folder: StateFolder, run: str | None, kinds: tuple[Kind, ...]) -> list[Entry]:
    """Return the entries about bundles, of a run or all, whose file is here."""
    entries = folder.journal.entries(run, kinds)
    return [entry for entry in entries if entry.digest is not None and entry.digest in folder.blobs]


def _append(folder: StateFolder, release: Release, fact: ReleaseStage | ReleaseHeld | ReleaseResumed) -> None:
    folder.journal.append(fact, run=release.run or None)
