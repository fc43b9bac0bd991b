"""What the journal says of releases, pins and the bundles that devices run: a pure function of its entries.

A release is a bundle with a number and a `Plan`. Its stages: ``canary`` (a few devices), ``paused`` (they reported
success; waits for ``promote``), ``everybody``; besides ``held`` (no further device gets it) and ``rolled back``. A
rollback is a release as well: of the older bundle, and as old as that, so newer ones stay newer.
`Book.release_for` says which release a device is to run; the coordinator compares that with what the device runs, so
restarts and new, late and returning devices need no other code.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from edge_agent.core.errors import StateError, UsageError, nearest
from edge_agent.core.time_and_text import moment_of

from ..journal.entries import (
    BundleExported,
    DevicePinned,
    DeviceReported,
    DeviceRetired,
    DeviceUnpinned,
    InstallResult,
    Outcome,
    ReleaseCanary,
    ReleaseHeld,
    ReleaseMade,
    ReleasePlan,
    ReleaseResumed,
    ReleaseSigned,
    ReleaseStage,
)
from ..journal.kinds import Kind
from ..journal.store import Entry, Journal
from .follower import Follower

if TYPE_CHECKING:
    from edge_agent.bundle.trust import Scores

RELEASE_KINDS: tuple[Kind, ...] = (
    "release_made",
    "release_signed",
    "release_canary",
    "release_stage",
    "release_held",
    "release_resumed",
    "device_reported",
    "device_pinned",
    "device_unpinned",
    "device_retired",
)

HEARD_AGAIN = timedelta(days=7)
"""A device that is heard gets an entry at least so often, so that the journal knows which ones are gone."""

_AMOUNT = re.compile(r"([1-9][0-9]{0,6}|0)|((?:100|[1-9]?[0-9])(?:\.[0-9]{1,3})?)%")
_WINDOW = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")


def amount(text: str, total: int, *, up: bool) -> int:
    """Return how many devices of ``total`` an amount such as ``2`` or ``10%`` is; a share is rounded ``up``, or down.

    Raises:
        UsageError: it is none.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text[:40]}' is no number of devices; expected a number or a share, such as 2 or 10%")
    if match[1]:
        return int(match[1])
    exact = round(float(match[2]) * total / 100, 6)
    return math.ceil(exact) if up else math.floor(exact)


def _is_window(text: str) -> bool:
    """Return whether a text is two different times of day."""
    match = _WINDOW.fullmatch(text)
    return match is not None and match.groups()[:2] != match.groups()[2:]


class Verdict(NamedTuple):
    """What the reports so far say of a release, and why."""

    kind: Literal["", "stop", "succeeded"] = ""
    """``stop``: too many devices failed; ``succeeded``: the canary has; empty: nothing yet."""

    reason: str = ""


_Change = ReleaseSigned | ReleaseCanary | ReleaseStage | ReleaseHeld | ReleaseResumed

AUTOMATIC = "automatic rollback"
"""The author of a rollback that no person asked for: the release before it has failed."""

_AUTHORS = {"failures": AUTOMATIC}
"""As versions before wrote it -> author."""


@dataclass(frozen=True)
class Plan:
    """How a release goes out. Amounts are texts such as ``2`` or ``10%``; the defaults are a release at once."""

    channel: str = "stable"
    canary: str = ""
    """Devices that get it first; empty: everybody at once."""

    success: int = 0
    """Devices of the canary that have to report success; 0: all of them."""

    max_failed: str = "100%"
    """The most devices that may fail, as a number or a share (0, 10%); one more stops the release."""

    min_gain: float | None = None
    """Least change of acc.personal on a device; below it the device counts as failed. None: its own comparison does."""

    auto_promote: bool = False
    window: str = ""
    """Time of day (UTC) in which devices may switch, such as ``02:00-05:00``; they download before."""

    activate_at: str = ""
    """Before this time (ISO 8601) no device switches."""

    note: str = ""

    @classmethod
    def from_fact(cls, fact: ReleasePlan) -> Plan:
        """Return the plan in an entry of the journal."""
        return cls(**fact.model_dump())

    def to_fact(self) -> ReleasePlan:
        """Return the plan for an entry of the journal, without what is as by default."""
        default = asdict(Plan())
        return ReleasePlan(**{name: value for name, value in asdict(self).items() if value != default[name]})

    def check(self, now: datetime) -> None:
        """Check that every field can be understood, and that the release can be active within 400 days.

        Raises:
            UsageError: A field is wrong; the message says which.
        """
        from edge_agent.core.config import NAME_PATTERN  # not for 'headwater status', which looks often
        from edge_agent.wire.messages.fields import MAX_WAIT_S

        if not re.fullmatch(NAME_PATTERN, self.channel):
            raise UsageError(f"channel '{self.channel[:80]}' cannot be that of a device; expected {NAME_PATTERN}")
        # Amounts and bounds.
        if self.canary and not amount(self.canary, 1000, up=True):
            raise UsageError("a canary of no device tests nothing; expected 1 or more, or no canary")
        amount(self.max_failed, 1000, up=False)
        if self.min_gain is not None and not math.isfinite(self.min_gain):
            raise UsageError(f"min_gain {self.min_gain} is no number; expected a change of accuracy, such as -0.02")
        # Times.
        if self.window and not _is_window(self.window):
            raise UsageError(f"window '{self.window[:40]}' is none; expected two times of day in UTC, as 02:00-05:00")
        wait_s, _ = self.activation(now)
        if wait_s > MAX_WAIT_S:
            raise UsageError(
                f"activate_at '{self.activate_at[:40]}' is more than {MAX_WAIT_S / 86400:.0f} days ahead; give a "
                "nearer date, or release later"
            )
        self._check_canary()

    def _check_canary(self) -> None:
        """Check that the fields about a canary fit together.

        Raises:
            UsageError: They do not.
        """
        is_about_canary = self.success != 0 or self.auto_promote
        if is_about_canary and not self.canary:
            raise UsageError("success and auto-promote are about a canary; give --canary, for example 10%")
        if self.canary.isdecimal() and self.success > int(self.canary):
            raise UsageError(
                f"success is {self.success}, and the canary has {self.canary} devices; give {self.canary} or less"
            )

    def activation(self, now: datetime) -> tuple[float, float | None]:
        """Return the seconds until a device may switch, and for how many seconds it may then; None: without end.

        Where that is after the last day of the calendar, it is that day.
        """
        try:
            return self._activation(now)
        except OverflowError:
            return (datetime.max.replace(microsecond=0, tzinfo=timezone.utc) - now).total_seconds(), None

    def _activation(self, now: datetime) -> tuple[float, float | None]:
        """Return when a device may switch and for how long, as `activation` does within the calendar.

        Raises:
            OverflowError: A window is after the last day of the calendar.
        """
        begin = max(now, moment_of(self.activate_at)) if self.activate_at else now
        window = _WINDOW.fullmatch(self.window)
        if window is None:
            return (begin - now).total_seconds(), None
        # The first window that ends after that moment; the one that began yesterday may still be open.
        day = begin.replace(second=0, microsecond=0) - timedelta(days=1)
        while True:
            opens = day.replace(hour=int(window[1]), minute=int(window[2]))
            closes = day.replace(hour=int(window[3]), minute=int(window[4]))
            if closes <= opens:  # it goes on after midnight
                closes += timedelta(days=1)
            if closes > begin:
                first = max(begin, opens)
                return (first - now).total_seconds(), (closes - first).total_seconds()
            day += timedelta(days=1)


@dataclass(frozen=True)
class Result:
    """What a device said about a release."""

    outcome: Outcome
    reason: str = ""
    acc: float | None = None
    """acc.personal with the release's encoder."""

    before: float | None = None
    """acc.personal with the pair before, on the same held-out samples."""

    support: int = 0
    at: str = ""

    @classmethod
    def from_fact(cls, fact: InstallResult, at: str) -> Result:
        """Return the result in an entry of the journal, which was written at that time."""
        return cls(fact.outcome, fact.reason, fact.acc, fact.before, fact.support, at)

    def to_fact(self) -> InstallResult:
        """Return the result for an entry of the journal, which has its time itself."""
        return InstallResult(
            outcome=self.outcome, reason=self.reason, acc=self.acc, before=self.before, support=self.support
        )


@dataclass
class Release:
    """One release as the journal has it so far."""

    number: int
    run: str
    round: int | None
    digest: str
    bundle_id: str
    at: str
    plan: Plan
    made: ReleaseMade
    promoted: bool
    paused: bool = False
    held: str = ""
    """Why no further device gets it; empty: they do."""

    rolls_back: int = 0
    """Number of the release that this one undoes; 0: none."""

    rolled_back_by: int = 0
    forgiven: frozenset[str] = frozenset()
    """Devices that had failed when an operator resumed the release; their failures do not count any more."""

    canary: dict[str, None] = field(default_factory=dict)
    """The devices that get it first, in the order in which they were drawn."""

    results: dict[str, Result] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)
    """Outcome -> devices that are not retired."""

    @property
    def stage(self) -> str:
        """Where the release stands, as a word; `Book.stage` also says that it is done."""
        if self.rolled_back_by:
            return "rolled back"
        if self.held:
            return "held"
        if self.promoted:
            return "everybody"
        return "paused" if self.paused else "canary"

    @property
    def author(self) -> str:
        """Who made it, as text; empty: a run did."""
        by = self.made.by or ""
        return _AUTHORS.get(by, by)

    @property
    def note(self) -> str:
        """What its maker said of it. A rollback has none: its plan says why the release was undone that it undoes."""
        return "" if self.rolls_back else self.plan.note

    @property
    def is_open(self) -> bool:
        """Whether devices still get it or may."""
        return not self.rolled_back_by and not self.held

    def add_result(self, agent: str, result: Result) -> None:
        """Take a device's newest word about this release."""
        before = self.results.get(agent)
        if before is not None:
            self.count[before.outcome] -= 1
        self.results[agent] = result
        self.count[result.outcome] += 1

    def agents_with(self, outcome: Outcome) -> list[str]:
        """Return the devices whose newest word about this release is that outcome."""
        return [agent for agent, result in self.results.items() if result.outcome == outcome]


@dataclass(frozen=True)
class Pin:
    """A device stays with one release, whatever comes, until a moment (ISO 8601; empty: until it is unpinned)."""

    release: int
    reason: str
    until: str
    at: str

    def holds(self, now: datetime) -> bool:
        """Return whether it counts at that moment."""
        return not self.until or now < moment_of(self.until)


@dataclass(frozen=True)
class Device:
    """A device of tier ``head`` as it was heard last: its bundle, its channel, why it keeps that by its own choice."""

    id: str
    runs: str = ""
    channel: str = "stable"
    kept: str = ""


@dataclass
class Book:
    """All releases, devices and pins, as a fold of the journal."""

    kinds: ClassVar[tuple[Kind, ...]] = RELEASE_KINDS

    releases: list[Release] = field(default_factory=list)
    devices: dict[str, Device] = field(default_factory=dict)
    channels: dict[str, list[Release]] = field(default_factory=dict)
    """Channel -> its releases, the newest last; a rollback comes right after the release that it returns to."""

    pins: dict[str, Pin] = field(default_factory=dict)
    heard: dict[str, str] = field(default_factory=dict)
    """Device -> time (ISO 8601) of its newest entry; one that is there gets another each `HEARD_AGAIN`."""

    sizes: Counter[str] = field(default_factory=Counter)
    """Channel -> devices."""

    def add(self, entry: Entry) -> None:
        """Count one more entry; what contradicts those before it (two commands at once) changes nothing."""
        fact = entry.fact
        if isinstance(fact, ReleaseMade):
            self._add_release(entry, fact)
        elif isinstance(fact, ReleaseSigned | ReleaseCanary | ReleaseStage | ReleaseHeld | ReleaseResumed):
            release = self.get(fact.release)
            if release is not None:
                self._change(release, fact, entry.digest or "")
        elif entry.agent is not None:
            self._add_of_device(entry.agent, entry)

    def _add_of_device(self, agent: str, entry: Entry) -> None:
        """Count an entry about a single device."""
        fact = entry.fact
        if isinstance(fact, DeviceReported):
            self._add_report(agent, entry.at, fact)
        elif isinstance(fact, DevicePinned):
            self.pins.pop(agent, None)  # the newest pin comes last
            self.pins[agent] = Pin(fact.release, fact.reason, fact.until, entry.at)
        elif isinstance(fact, DeviceUnpinned):
            self.pins.pop(agent, None)
        elif isinstance(fact, DeviceRetired):
            self._retire(agent)

    def _change(self, release: Release, fact: _Change, digest: str) -> None:
        """Count what was done to a release; ``digest``: of its file, where it was signed again."""
        if isinstance(fact, ReleaseSigned):
            release.digest = digest
            release.made = release.made.changed(signed=fact.signed)
        elif not release.rolled_back_by:  # what was rolled back is over
            self._change_progress(release, fact)

    def _change_progress(
        self, release: Release, fact: ReleaseCanary | ReleaseStage | ReleaseHeld | ReleaseResumed
    ) -> None:
        """Count a step of a release that is not rolled back."""
        if isinstance(fact, ReleaseCanary):
            release.canary = dict.fromkeys(fact.agents)
        elif isinstance(fact, ReleaseStage):
            release.paused = True
            release.promoted = release.promoted or fact.stage == "everybody"
        elif isinstance(fact, ReleaseResumed):
            release.held = ""
            release.forgiven = frozenset(release.agents_with("failed"))
        elif not release.rolls_back:  # a rollback is never held
            release.held = fact.reason or "by 'headwater release hold'"

    def get(self, number: int) -> Release | None:
        """Return the release of that number."""
        return self.releases[number - 1] if 0 < number <= len(self.releases) else None

    def _add_release(self, entry: Entry, fact: ReleaseMade) -> None:
        """Count a new release; a rollback that another command has made impossible changes nothing."""
        plan = Plan.from_fact(fact.plan)
        release = Release(
            number=len(self.releases) + 1,
            run=entry.run or "",
            round=entry.round,
            digest=entry.digest or "",
            bundle_id=fact.bundle_id,
            at=entry.at,
            plan=plan,
            made=fact,
            promoted=not plan.canary,
            rolls_back=fact.rolls_back,
        )
        order = self.channels.setdefault(plan.channel, [])
        if not release.rolls_back:
            order.append(release)
        elif not self._place_rollback(release, order):
            return  # another command was faster
        self.releases.append(release)

    def _place_rollback(self, rollback: Release, order: list[Release]) -> bool:
        """Put a rollback behind the release that it returns to, and mark those that it undoes.

        Args:
            rollback: The release that undoes another one.
            order: The releases of its channel.

        Returns:
            Whether it still can: the other one is not rolled back yet, and the bundle is the one that it goes back to.
        """
        undone = self.get(rollback.rolls_back)
        if undone is None or undone.rolled_back_by:
            return False
        older = self.before(undone)
        if older is None or older.bundle_id != rollback.bundle_id:
            return False
        begin = _index(order, older) + 1
        for release in order[begin : _index(order, undone) + 1]:
            if release.bundle_id == undone.bundle_id and not release.rolled_back_by:
                release.rolled_back_by = rollback.number
        order.insert(begin, rollback)
        return True

    def _add_report(self, agent: str, at: str, fact: DeviceReported) -> None:
        """Count a device as it was heard at that time, and what it says of a release."""
        before = self.devices.get(agent)
        if before is not None:
            self.sizes[before.channel] -= 1
        device = Device(agent, fact.runs, fact.channel, fact.kept)
        self.devices[agent] = device
        self.heard[agent] = at
        if before is None:  # it may come back, and what it said counts again
            self._count(agent, 1)
        self.sizes[device.channel] += 1
        release = self.get(fact.release)
        if release is not None and fact.result is not None:
            release.add_result(agent, Result.from_fact(fact.result, at))

    def _retire(self, agent: str) -> None:
        """Take out a device that is revoked, or was not heard for long, until it is heard again."""
        device = self.devices.pop(agent, None)
        if device is None:
            return
        self.sizes[device.channel] -= 1
        self.heard.pop(agent)
        self._count(agent, -1)

    def _count(self, agent: str, change: int) -> None:
        """Count what a device said of each release in or out; ``change``: 1 or -1."""
        for release in self.releases:
            result = release.results.get(agent)
            if result is not None:
                release.count[result.outcome] += change

    # --- what follows from it ------------------------------------------------------------------------------------

    def pin(self, agent: str, now: datetime) -> Pin | None:
        """Return the pin of a device that counts now."""
        pin = self.pins.get(agent)
        return pin if pin is not None and pin.holds(now) else None

    def release_for(self, device: Device, now: datetime) -> Release | None:
        """Return the release that a device is to run now; None: it keeps what it has."""
        # 1. A pin counts more than any release.
        pin = self.pin(device.id, now)
        if pin is not None:
            return self.get(pin.release)
        # 2. The newest release of its channel that is for this device.
        for release in self._of_channel(device.channel):
            if release.rolled_back_by:
                continue
            # A release that is held stays on the devices that have it, and reaches no other.
            if release.held and device.runs == release.bundle_id:
                return None
            is_for_device = release.promoted or device.id in release.canary
            if is_for_device and not release.held:
                return release
        return None

    def before(self, release: Release) -> Release | None:
        """Return what devices go back to when a release is rolled back: the newest for everybody before it."""
        order = self.channels[release.plan.channel]
        for other in reversed(order[: _index(order, release)]):
            if other.promoted and other.is_open and other.bundle_id != release.bundle_id:
                return other
        return None

    def goes_back(self, device: Device, release: Release) -> bool:
        """Return whether a device that is to run a release goes back by that: it runs the bundle of a newer one."""
        if release.rolls_back:
            return True
        newer = self.releases[release.number :]
        return any(other.bundle_id == device.runs for other in newer if not other.rolls_back)

    def for_everybody(self, channel: str) -> Release | None:
        """Return the newest release that everybody in a channel is to run; it is the parent of the next one."""
        return next((release for release in self._of_channel(channel) if release.promoted and release.is_open), None)

    def replaced_by(self, release: Release) -> Release | None:
        """Return the newer release that everybody in its channel gets instead; None where there is none."""
        for newer in self._of_channel(release.plan.channel):
            if newer is release:
                return None
            if newer.promoted and newer.is_open:
                return newer
        return None

    def current(self) -> Iterator[Release]:
        """Yield the releases that devices may get now: of each channel the newest for everybody, and newer ones."""
        for channel in sorted(self.channels):
            for release in self._of_channel(channel):
                if release.is_open:
                    yield release
                    if release.promoted:
                        break

    def in_use(self) -> list[Release]:
        """Return the releases that a device may get, or return to by a rollback; no cleaning takes their files."""
        used = {release.number: release for channel in self.channels for release in self._in_use_of(channel)}
        for pin in self.pins.values():
            pinned = self.get(pin.release)
            if pinned is not None:
                used[pinned.number] = pinned
        return [used[number] for number in sorted(used)]

    def _in_use_of(self, channel: str) -> Iterator[Release]:
        """Yield the releases of a channel that are not rolled back, down to the second bundle for everybody."""
        bundles = set[str]()
        for release in self._of_channel(channel):
            if release.promoted and release.is_open:
                bundles.add(release.bundle_id)
            if not release.rolled_back_by:
                yield release
            if len(bundles) > 1:  # a rollback returns to this one
                return

    def canary_size(self, release: Release) -> int:
        """Return how many devices the canary is to have, in a fleet of this size."""
        return max(1, amount(release.plan.canary, self.sizes[release.plan.channel], up=True))

    def check_channel(self, channel: str) -> None:
        """Check that a channel has devices or releases; while no device was heard at all, every channel passes.

        Raises:
            UsageError: it has neither, as where its name is mistyped: nothing would ever take the release away again.
        """
        with_devices = {name for name, size in self.sizes.items() if size}
        channels = sorted(with_devices | self.channels.keys())
        if channel in channels or not with_devices:
            return
        nearest_channel = nearest(channel, channels)
        suggestion = ""
        if nearest_channel:
            suggestion = f"did you mean '{nearest_channel}'? "
        raise UsageError(
            f"no device of channel '{channel}' was heard, and nothing was released to it; {suggestion}known: "
            f"{', '.join(channels)}; --new-channel is for devices that are yet to come"
        )

    def check_fleet(self, plan: Plan) -> None:
        """Check that a channel has devices enough for a plan; while none was heard there, every plan passes.

        Raises:
            UsageError: It has too few.
        """
        heard = self.sizes[plan.channel]
        if not heard:
            return
        size = heard
        if plan.canary:
            size = max(1, amount(plan.canary, heard, up=True))
        if size > heard:
            raise UsageError(
                f"a canary of {size}, and {heard} devices were heard in channel '{plan.channel}'; give fewer, or 'all' "
                "to release to everybody at once"
            )
        if plan.success > size:
            raise UsageError(f"success is {plan.success}, and the canary has {size} devices; give {size} or less")

    def draw_canary(self, release: Release, candidates: Iterable[str], now: datetime) -> list[str]:
        """Return the devices that are to be a release's canary, drawn from the candidates, who can be reached now.

        They are drawn by a hash of device and release, so that no device is always the first. A device that is out is
        replaced, and stays so: it is pinned, in another channel or retired, declines the release, or is unable.
        """
        earlier = list(release.canary)
        if release.stage != "canary":
            return earlier
        # 1. How many devices are missing.
        remaining = [agent for agent in earlier if not self._is_out(agent, release, now)]
        missing = self.canary_size(release) - len(remaining)
        if missing <= 0:
            return earlier
        # 2. As many others as there are. Where there is none, those that are out keep their places.
        others = [agent for agent in candidates if agent not in release.canary]
        free = [agent for agent in others if not self._is_out(agent, release, now)]
        replacements = sorted(free, key=lambda agent: draw_key(agent, release.number))[:missing]
        if not replacements:
            return earlier
        return [*remaining, *replacements]

    def _is_out(self, agent: str, release: Release, now: datetime) -> bool:
        """Return whether a device cannot be of a release's canary; see `draw_canary`."""
        device = self.devices.get(agent)
        if device is None or device.channel != release.plan.channel or self.pin(agent, now) is not None:
            return True
        result = release.results.get(agent)
        if result is None:
            # It has not answered, and declines where its owner keeps another bundle.
            return bool(device.kept)
        return result.outcome in {"declined", "unable"}

    def has_say(self, agent: str, release: Release) -> bool:
        """Return whether a device is among those that are to get a release, so that what it says of it counts."""
        device = self.devices.get(agent)
        is_there = device is not None and device.channel == release.plan.channel
        return is_there and (release.promoted or agent in release.canary)

    def verdict(self, release: Release, now: datetime) -> Verdict:
        """Return what the reports so far say of a release, and why; ``Rollout._decide`` of `fleet` acts on it."""
        if not release.is_open:
            return Verdict()
        asked = self.sizes[release.plan.channel] if release.promoted else self.canary_size(release)
        allowed = amount(release.plan.max_failed, asked, up=False)
        failed = self._failed(release, now, beyond=allowed)
        if len(failed) > allowed:
            reason = release.results[failed[0]].reason
            text = f"{len(failed)} of {asked} devices failed, {allowed} are allowed; {failed[0]}: {reason}"
            return Verdict("stop", text)
        if release.stage != "canary":
            return Verdict()
        needed = release.plan.success or self.canary_size(release)
        succeeded = self._succeeded(release, now, least=needed)
        if succeeded < needed:
            return Verdict()
        return Verdict("succeeded", f"{succeeded} of the canary's devices reported success")

    def _failed(self, release: Release, now: datetime, beyond: int) -> list[str]:
        """Return the devices whose failure counts against a release, sorted; none where ``beyond`` or fewer failed.

        The count is looked at first: a verdict is asked for with each report of a large fleet.
        """
        if release.count["failed"] <= beyond:
            return []
        failed = set(release.agents_with("failed")) - release.forgiven
        return sorted(agent for agent in failed if self.has_say(agent, release) and self.pin(agent, now) is None)

    def _succeeded(self, release: Release, now: datetime, least: int) -> int:
        """Return how many devices of a canary reported success; 0 where fewer than ``least`` devices did at all."""
        if release.count["ok"] < least:
            return 0
        succeeded = set(release.agents_with("ok"))
        return sum(agent in succeeded and not self._is_out(agent, release, now) for agent in release.canary)

    def pending(self, release: Release, now: datetime) -> list[str]:
        """Return the devices that are to run the release by now and have not answered."""
        agents = sorted(self.devices if release.promoted else release.canary)
        return [agent for agent in agents if self._is_pending(agent, release, now)]

    def _is_pending(self, agent: str, release: Release, now: datetime) -> bool:
        """Return whether a device is to run a release and has neither its bundle nor answered."""
        device = self.devices.get(agent)
        if device is None or device.channel != release.plan.channel or device.runs == release.bundle_id:
            return False
        # A device that was unable tries again, so its answer is still to come.
        result = release.results.get(agent)
        has_answered = result is not None and result.outcome != "unable"
        return not has_answered and self.pin(agent, now) is None

    def stage(self, release: Release, now: datetime) -> str:
        """`Release.stage`; ``done`` where a channel's newest for everybody has the answers of all its devices."""
        is_newest = self.for_everybody(release.plan.channel) is release
        if release.stage == "everybody" and is_newest and self.sizes[release.plan.channel]:
            return release.stage if self.pending(release, now) else "done"
        return release.stage

    def undone_because(self, release: Release) -> str:
        """Return why this release was rolled back or, if it is a rollback itself, why it was made; empty: neither."""
        rollback = release if release.rolls_back else self.get(release.rolled_back_by)
        return "" if rollback is None else rollback.plan.note

    def stale_devices(self, before: datetime) -> list[str]:
        """Return the devices whose newest entry is older than that."""
        return sorted(agent for agent in self.heard if self.is_stale(agent, before))

    def is_stale(self, agent: str, before: datetime) -> bool:
        """Return whether the newest entry of a device is older than that."""
        return moment_of(self.heard[agent]) < before

    def scores(self, bundle_id: str) -> Scores | None:
        """Return acc.personal of the devices that reported a bundle, each by its newest report; None where none did."""
        from edge_agent.bundle.trust import Scores  # brings more than `headwater status` needs

        results = dict[str, Result]()
        for release in self.releases:
            if release.bundle_id == bundle_id:
                results |= release.results
        return Scores.of([(result.acc, result.support) for result in results.values() if result.acc is not None])

    def next_change(self, now: datetime) -> datetime | None:
        """Return when `release_for` changes by the clock alone: the first end of a pin."""
        ends = [moment_of(pin.until) for pin in self.pins.values() if pin.until]
        return min((end for end in ends if end > now), default=None)

    def _of_channel(self, channel: str) -> Iterator[Release]:
        """Return the releases of a channel, the newest first."""
        return reversed(self.channels.get(channel, []))


def _index(order: list[Release], release: Release) -> int:
    """Return the place of this release, and not that of one with equal fields."""
    return next(index for index, other in enumerate(order) if other is release)


def draw_key(agent: str, release: int) -> str:
    """Return what devices are sorted by for a canary: other ones come first in each release."""
    return hashlib.sha256(f"{release} {agent}".encode()).hexdigest()


def book_of(journal: Journal) -> Book:
    """Return the book of a journal as it is now."""
    book = Book()
    Follower(journal, book).read()
    return book


def releases_in_use(journal: Journal) -> list[Release]:
    """Return the releases of a journal that a device may get or return to; see `Book.in_use`."""
    return _without_devices(journal).in_use()


def release_blobs(journal: Journal, pruned: Collection[str | None]) -> set[str]:
    """Return the digests of the newest file of each release that is in use, or of a run that was not ``pruned``."""
    book = _without_devices(journal)
    used = {release.number for release in book.in_use()}
    needed = [release for release in book.releases if release.number in used or release.run not in pruned]
    return {release.digest for release in needed if release.digest}


def released_to_all(journal: Journal, channel: str) -> Release | None:
    """Return the newest release for everybody of a channel in a journal; see `Book.for_everybody`."""
    return _without_devices(journal).for_everybody(channel)


def _without_devices(journal: Journal) -> Book:
    """Return the book without reports of devices, which are by far the most entries and are not read."""
    book = Book()
    for entry in journal.entries(kinds=[kind for kind in RELEASE_KINDS if kind != "device_reported"]):
        book.add(entry)
    return book


def rollback_of(book: Book, release: Release, reason: str, by: str) -> tuple[Release, ReleaseMade]:
    """Return the older release that a rollback returns to, and what is journaled of the new one.

    Raises:
        UsageError: there is no older one.
    """
    older = book.before(release)
    if older is None:
        same = [
            str(earlier.number)
            for earlier in book.releases[: release.number - 1]
            if earlier.plan.channel == release.plan.channel and earlier.bundle_id == release.bundle_id
        ]
        why = f"release {release.number} is the first of channel '{release.plan.channel}' that was for everybody"
        if same:
            why = f"release {', '.join(same)} before it has the same bundle {release.bundle_id[:12]}, no other is left"
        raise UsageError(
            f"{why}, so there is nothing to return to; 'headwater release hold {release.number}' gives it to no "
            "further device, a new release replaces it"
        )
    plan = ReleasePlan(channel=release.plan.channel, note=reason)
    return older, older.made.changed(rolls_back=release.number, by=by, plan=plan)


def release_of(bundle: object, plan: ReleasePlan, by: str | None, parent: str | None) -> ReleaseMade:
    """Return what is journaled of a release of a bundle.

    Args:
        bundle: What is journaled of the bundle: that it was exported, or an earlier release of it.
        plan: How the release goes out.
        by: Who releases it; None: a run does.
        parent: Id of the bundle that everybody was to run before; None: there was none.

    Raises:
        StateError: The journal does not say what a bundle is.
    """
    if isinstance(bundle, ReleaseMade):
        made = bundle.without("rolls_back", "plan")
    elif isinstance(bundle, BundleExported):
        made = ReleaseMade.of_bundle(bundle)
    else:
        raise StateError(f"the journal has {type(bundle).__name__} in place of a bundle; export it again")
    made = made.changed(plan=plan, parent=parent)
    return made if by is None else made.changed(by=by)
