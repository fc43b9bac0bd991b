"""Releases and devices as rows: where each stands, what it waits for, and what it scored.

Terminal, web view and the page of a run show these rows and compute nothing from them. ``to_json`` of a row is what
``headwater release`` and ``headwater status`` print with ``--json``: JSON begins there, and nowhere before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from edge_agent.core.time_and_text import show_time

from ..text import counted, listed
from ..views.releases import Book, Device, Pin, Plan, Release, Result

if TYPE_CHECKING:
    from edge_agent.bundle.trust import Scores


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

    @property
    def is_in_force(self) -> bool:
        """Whether no other release has undone it or taken its place."""
        return not self.rolled_back_by and not self.replaced_by


# --- one release ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """acc.personal of several clients."""

    mean: float
    """0..1, over clients."""

    worst_tenth: float
    """0..1, mean of the lowest tenth of the clients, at least of one."""

    clients: int

    @classmethod
    def from_journal(cls, scores: Mapping[str, Any] | None) -> Score | None:
        """Return the score in the lineage that the journal has of a bundle; None where there is none."""
        if not scores:
            return None
        return cls(scores["mean"], scores["worst_tenth"], scores["clients"])

    @classmethod
    def from_scores(cls, scores: Scores | None) -> Score | None:
        """Return the score of the devices that reported; None where none did."""
        if scores is None:
            return None
        return cls(scores.mean, scores.worst_tenth, scores.clients)


@dataclass(frozen=True)
class Origin:
    """Where the bundle of a release comes from; None: not known, as in releases of earlier versions."""

    run: str
    round: int | None
    method: str | None
    seed: int | None
    clients: int | None
    """Clients whose updates were accepted."""

    partition_sha256: str | None
    parent: str | None
    """Id of the bundle that everybody was to run before."""

    score: Score | None
    """acc.personal of the clients at the end of the run."""

    @classmethod
    def from_release(cls, release: Release) -> Origin:
        """Return the origin of a release's bundle."""
        lineage = _lineage(release)
        return cls(
            run=lineage["run"],
            round=lineage["round"],
            method=lineage.get("method"),
            seed=lineage.get("seed"),
            clients=lineage.get("clients"),
            partition_sha256=lineage.get("partition_sha256"),
            parent=release.made.parent,
            score=Score.from_journal(lineage.get("scores")),
        )


@dataclass(frozen=True)
class Signer:
    """A key that has signed a bundle; its name is None where the root of the keys gives it none."""

    id: str
    name: str | None


@dataclass(frozen=True)
class Signatures:
    """Who has signed the bundle of a release, and how many of how many keys have to."""

    signers: tuple[Signer, ...]
    threshold: int
    keys: int

    @classmethod
    def from_journal(cls, signed: Mapping[str, Any] | None) -> Signatures | None:
        """Return the signatures that the journal has of a bundle; None where nobody has signed it."""
        if not signed:
            return None
        signers = tuple(Signer(signer["id"], signer["name"]) for signer in signed["signers"])
        return cls(signers, signed["threshold"], signed["keys"])


@dataclass(frozen=True)
class ReleaseRow:
    """One release: its plan, where it stands, where it comes from, and what it scored where."""

    release: Release
    standing: Standing
    steps: tuple[str, ...]
    """What it waits for, and the next command, one line each; empty where it is over."""

    undone_because: str
    """Why it was rolled back, or why it undoes another; empty: neither."""

    origin: Origin
    signatures: Signatures | None
    on_devices: Scores | None
    """acc.personal of the devices that reported its bundle; None: none did."""

    @classmethod
    def from_release(cls, book: Book, release: Release, now: datetime) -> ReleaseRow:
        """Return the row of a release at a moment."""
        return cls(
            release=release,
            standing=Standing.from_release(book, release, now),
            steps=tuple(list_waits(book, release, now)),
            undone_because=book.undone_because(release),
            origin=Origin.from_release(release),
            signatures=Signatures.from_journal(release.made.signed),
            on_devices=book.scores(release.bundle_id),
        )

    @property
    def number(self) -> int:
        """The number of the release."""
        return self.release.number

    @property
    def plan(self) -> Plan:
        """How the release goes out."""
        return self.release.plan

    @property
    def score_on_devices(self) -> Score | None:
        """acc.personal of the devices that reported its bundle, as `origin` has that of its run."""
        return Score.from_scores(self.on_devices)

    @property
    def outcomes(self) -> dict[str, int]:
        """Outcome -> devices that reported it, sorted by outcome; those without a device are left out."""
        return {name: count for name, count in sorted(self.release.count.items()) if count}

    @property
    def results(self) -> dict[str, Result]:
        """Device -> what it said of the release, sorted by device."""
        return dict(sorted(self.release.results.items()))

    def to_json(self) -> dict[str, Any]:
        """Return the release as ``--json`` prints it, with all that the journal has of its origin."""
        fact = self.release.made
        lineage = _lineage(self.release)
        scored = {
            "run": lineage.pop("scores", None),
            "devices": None if self.on_devices is None else self.on_devices.model_dump(),
            "held_out": fact.held_out,
            "parity_max_abs": fact.parity_max_abs,
            "int8_cosine": fact.int8_cosine,
        }
        return {
            "release": self.number,
            "bundle_id": self.release.bundle_id,
            **asdict(self.standing),
            "waits_for": "; ".join(self.steps),
            "steps": [*self.steps],
            "by": self.release.author or None,
            "note": self.release.note,
            "undone_because": self.undone_because,
            "signed": fact.signed,
            "at": self.release.at,
            "plan": asdict(self.plan),
            "canary": list(self.release.canary),
            "outcomes": self.outcomes,
            "lineage": {**lineage, "parent": fact.parent},
            "scored": scored,
            "results": {agent: asdict(result) for agent, result in self.results.items()},
        }


def _lineage(release: Release) -> dict[str, Any]:
    """Return what the journal has of the origin of a release's bundle, as JSON, at least its run and round."""
    return {"run": release.run, "round": release.round, **(release.made.lineage or {})}


@dataclass(frozen=True)
class OpenRelease:
    """A release that devices may get now, or that is held, in short."""

    number: int
    channel: str
    standing: Standing
    bundle_id: str
    waits_for: str
    """What it waits for, in one line; empty: nothing."""

    @property
    def text(self) -> str:
        """The release in one line, for people."""
        waits = f": {self.waits_for}" if self.waits_for else ""
        return f"release {self.number} ({self.channel}, {self.standing.text}){waits}"

    def to_json(self) -> dict[str, Any]:
        """Return the release as ``headwater status --json`` prints it."""
        return {
            "release": self.number,
            "channel": self.channel,
            **asdict(self.standing),
            "bundle_id": self.bundle_id,
            "waits_for": self.waits_for,
        }


def open_releases(book: Book, now: datetime) -> list[OpenRelease]:
    """Return the releases that devices may get now, or that are held, by their numbers."""
    held = [release for release in book.releases if _is_held_now(book, release)]
    releases = sorted([*book.current(), *held], key=lambda release: release.number)
    rows = []
    for release in releases:
        standing = Standing.from_release(book, release, now)
        waits_for = "; ".join(list_waits(book, release, now))
        rows.append(OpenRelease(release.number, release.plan.channel, standing, release.bundle_id, waits_for))
    return rows


def _is_held_now(book: Book, release: Release) -> bool:
    """Return whether a release is held, and no other one has taken its place or undone it."""
    return bool(release.held) and not release.rolled_back_by and book.replaced_by(release) is None


# --- what a release waits for --------------------------------------------------------------------------------------


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


# --- devices -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceRow:
    """What a device of tier ``head`` runs and is to run."""

    id: str
    channel: str
    bundle_id: str
    """The bundle that it runs; empty: none."""

    runs: int | None
    """Number of the release that it runs; None: no release fits its bundle."""

    wanted: int | None
    """Number of the release that it is to run; None: none."""

    is_held: bool
    """Whether it stays with what it runs because that release is held."""

    result: Result | None
    """Its answer to the release that it is to run; where there is none, to the one that it runs. None: no answer."""

    pin: Pin | None
    kept: str
    """Why it keeps its bundle by its own choice; empty: it does not."""

    @property
    def note(self) -> str:
        """What is to be said about it: its pin, or why it does not run what it is to run; empty: nothing."""
        if self.pin is not None:
            until = f" until {show_time(self.pin.until)}" if self.pin.until else ""
            return f"pinned{until}: {self.pin.reason}"
        reason = "" if self.result is None else self.result.reason
        is_there = self.runs is not None and self.runs == self.wanted
        if is_there:
            return reason
        return self.kept or reason

    def to_json(self) -> dict[str, Any]:
        """Return the device as ``headwater release status --json`` prints it."""
        pinned = None
        if self.pin is not None:
            pinned = {"release": self.pin.release, "reason": self.pin.reason, "until": self.pin.until}
        return {
            "device": self.id,
            "channel": self.channel,
            "bundle_id": self.bundle_id,
            "runs": self.runs,
            "wanted": self.wanted,
            "held": self.is_held,
            "outcome": None if self.result is None else self.result.outcome,
            "reason": "" if self.result is None else self.result.reason,
            "acc.personal": None if self.result is None else self.result.acc,
            "pinned": pinned,
            "kept": self.kept,
        }


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


def device_rows(book: Book, now: datetime) -> list[DeviceRow]:
    """Return what each device runs and is to run at a moment, sorted by id."""
    running = Running(book)
    return [_device_row(book, running, device, now) for _, device in sorted(book.devices.items())]


def _device_row(book: Book, running: Running, device: Device, now: datetime) -> DeviceRow:
    """Return the row of one device, see `device_rows`."""
    to_run = book.release_for(device, now)
    runs = running.number(device, to_run)
    # The answer is that to the release which it is to run; where there is none, to the one that it runs.
    release = to_run if to_run is not None else book.get(runs or 0)
    return DeviceRow(
        id=device.id,
        channel=device.channel,
        bundle_id=device.runs,
        runs=runs,
        wanted=None if to_run is None else to_run.number,
        is_held=to_run is None and release is not None and bool(release.held),
        result=None if release is None else release.results.get(device.id),
        pin=book.pin(device.id, now),
        kept=device.kept,
    )
