"""What an operator does to releases, pins and devices, by a command or by the web view; both call these functions.

They write the journal of a state folder, beside a coordinator that serves or before it does. ``by`` is who did it.
"""

from __future__ import annotations

import getpass
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
        number = Running(book).number(heard_device, book.wanted(heard_device, utc_now()))
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
    fact = release.made
    on_devices = book.scores(release.bundle_id)
    lineage = {"run": release.run, "round": release.round, **(fact.lineage or {})}
    scored = {
        "run": lineage.pop("scores", None),
        "devices": None if on_devices is None else on_devices.model_dump(),
        "held_out": fact.held_out,
        "parity_max_abs": fact.parity_max_abs,
        "int8_cosine": fact.int8_cosine,
    }
    steps = [*list_waits(book, release, now)]
    return {
        "release": release.number,
        "bundle_id": release.bundle_id,
        **asdict(Standing.from_release(book, release, now)),
        "waits_for": "; ".join(steps),
        "steps": steps,
        "by": release.author or None,
        "note": release.note,
        "undone_because": book.undone_because(release),
        "signed": fact.signed,
        "at": release.at,
        "plan": asdict(release.plan),
        "canary": list(release.canary),
        "outcomes": {name: count for name, count in sorted(release.count.items()) if count},
        "lineage": {**lineage, "parent": fact.parent},
        "scored": scored,
        "results": {agent: asdict(result) for agent, result in sorted(release.results.items())},
    }


@dataclass(frozen=True)
class Standing:
    """Where a release stands, and by number the releases that it undoes, or that undo or replace it."""

    stage: str
    rolls_back: int | None
    """The release that it undoes; None: it is no rollback."""

    rolled_back_by: int | None
    """The release that undoes it; None: there is none."""

    replaced_by: int | None
    """The newer release that everybody gets in its place; None: there is none."""

    @classmethod
    def from_release(cls, book: Book, release: Release, now: datetime) -> Standing:
        """Return where a release stands at a moment."""
        newer = book.replaced_by(release)
        return cls(
            stage=book.stage(release, now),
            rolls_back=release.rolls_back or None,
            rolled_back_by=release.rolled_back_by or None,
            replaced_by=None if newer is None else newer.number,
        )

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Standing:
        """Return the standing in the JSON of a release."""
        return cls(body["stage"], body["rolls_back"], body["rolled_back_by"], body["replaced_by"])

    @property
    def text(self) -> str:
        """The stage for people, with the number of the release that took its place or that it undoes."""
        if self.rolled_back_by:
            return f"rolled back by {self.rolled_back_by}"
        if self.replaced_by:
            return f"replaced by {self.replaced_by}"
        if self.rolls_back:
            return f"rolls back {self.rolls_back}, {self.stage}"
        return self.stage


def list_waits(book: Book, release: Release, now: datetime) -> Iterator[str]:
    """Yield what a release waits for, for whom and until when, what was done, and the next command, one line each.

    Of a release that is over there is nothing to say.
    """
    if release.rolled_back_by or book.replaced_by(release) is not None:
        return
    if release.held:
        yield from _list_waits_of_held(book, release)
        return
    # A device that could not try the bundle has answered, and is asked again; others have not answered yet.
    to_answer = book.pending(release, now)
    silent = [agent for agent in to_answer if agent not in release.results]
    unable = [agent for agent in to_answer if agent in release.results]
    if release.promoted:
        if silent:
            yield _wait_for_reports(release, silent, "", now)
        if unable:
            yield f"asks {counted(len(unable), 'device')} again that could not try it: {listed(unable)}"
    elif release.paused:
        yield f"the canary succeeded; continue with 'headwater release promote {release.number}'"
    else:
        missing = book.canary_size(release) - len(release.canary)
        if missing > 0:
            heard = counted(book.sizes[release.plan.channel], "device")
            where = f"of {heard} in channel '{release.plan.channel}' once online"
            yield f"the canary lacks {counted(missing, 'device')}, chosen {where}"
        if release.canary:
            yield _wait_for_reports(release, silent, " of the canary", now)


def _list_waits_of_held(book: Book, release: Release) -> Iterator[str]:
    """Yield why a release is held, and the commands that continue it or return its devices, one line each."""
    yield from release.held.splitlines()
    back = ""
    if book.before(release) is not None:
        back = f"; 'headwater release rollback {release.number}' returns devices"
    yield f"next: 'headwater release resume {release.number}' continues it{back}"


def _wait_for_reports(release: Release, silent: Sequence[str], group: str, now: datetime) -> str:
    """Say for whose reports a release waits, and from when on these devices switch to it.

    Args:
        release: The release.
        silent: The devices that have not answered.
        group: What they are part of, with a space before it; empty: all devices.
        now: The time, from which the wait for a maintenance window counts.
    """
    whom = f": {listed(silent)}" if silent else ""
    wait_s, _ = release.plan.activation(now)
    when = f", which switch from {show_time(now + timedelta(seconds=wait_s))} on" if wait_s else ""
    return f"waits for reports of {counted(len(silent), 'device')}{group}{whom}{when}"


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
    running = Running(book)
    return [_device_row(book, running, device, now) for _, device in sorted(book.devices.items())]


def _device_row(book: Book, running: Running, device: Device, now: datetime) -> dict[str, Any]:
    """Return the row of one device, see `device_rows`."""
    to_run = book.wanted(device, now)
    pin = book.pin(device.id, now)
    runs = running.number(device, to_run)
    # The answer is that to the release which it is to run; where there is none, to the one that it runs.
    release = to_run if to_run is not None else book.get(runs or 0)
    result = None if release is None else release.results.get(device.id)
    return {
        "device": device.id,
        "channel": device.channel,
        "bundle_id": device.runs,
        "runs": runs,
        "wanted": None if to_run is None else to_run.number,
        "held": to_run is None and release is not None and bool(release.held),
        "outcome": None if result is None else result.outcome,
        "reason": "" if result is None else result.reason,
        "acc.personal": None if result is None else result.acc,
        "pinned": None if pin is None else {"release": pin.release, "reason": pin.reason, "until": pin.until},
        "kept": device.kept,
    }


def tiers_without_releases(path: Path) -> Counter[str]:
    """Return how many agents there are of each tier that takes no releases."""
    return Counter(agent["tier"] for agent in read_agents(path) if agent["tier"] != "head")


def open_releases(folder: StateFolder) -> list[dict[str, Any]]:
    """Return the releases that devices may get now, or that are held, in short: what each waits for."""
    book = book_of(folder.journal)
    now = utc_now()
    held = [release for release in book.releases if _is_held_now(book, release)]
    releases = sorted([*book.current(), *held], key=lambda release: release.number)
    return [
        {
            "release": release.number,
            "channel": release.plan.channel,
            **asdict(Standing.from_release(book, release, now)),
            "bundle_id": release.bundle_id,
            "waits_for": "; ".join(list_waits(book, release, now)),
        }
        for release in releases
    ]


def _is_held_now(book: Book, release: Release) -> bool:
    """Return whether a release is held, and no other one has taken its place or undone it."""
    return bool(release.held) and not release.rolled_back_by and book.replaced_by(release) is None


def describe_open_release(release: dict[str, Any]) -> str:
    """Return one of `open_releases` as a line of text."""
    waits = f": {release['waits_for']}" if release["waits_for"] else ""
    return f"release {release['release']} ({release['channel']}, {stage_text(release)}){waits}"


def stage_text(release: Mapping[str, Any]) -> str:
    """Return where a release stands, for people; ``release`` is its JSON, see `describe_release`."""
    return Standing.from_body(release).text


def releases_of_run(folder: StateFolder, run: str) -> list[dict[str, Any]]:
    """Return the releases of a run as JSON, see `describe_release`."""
    book = book_of(folder.journal)
    now = utc_now()
    return [describe_release(book, release, now) for release in book.releases if release.run == run]


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
    for agent in read_agents(folder.path):
        if agent["id"] == name and agent["tier"] is not None:
            raise UsageError(
                f"{name} is of tier '{agent['tier']}', which takes no releases; tier = \"head\" in its agent.toml does"
            )
    raise UsageError(f"no device '{name[:80]}' was heard; known: {listed(sorted(book.devices))}")


def _bundles(folder: StateFolder, run: str | None, kinds: tuple[Kind, ...]) -> list[Entry]:
    """Return the entries about bundles, of a run or all, whose file is here."""
    entries = folder.journal.entries(run, kinds)
    return [entry for entry in entries if entry.digest is not None and entry.digest in folder.blobs]


def _append(folder: StateFolder, release: Release, fact: ReleaseStage | ReleaseHeld | ReleaseResumed) -> None:
    folder.journal.append(fact, run=release.run or None)
