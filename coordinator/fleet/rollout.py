"""Brings the bundles of releases to the devices: offers each device the release that it is to run, notes its answer.

What a device is to run follows from the journal (`coordinator.views.releases`); this compares it with what the device
runs, draws canaries, and stops a release that fails. It keeps nothing that a restart could lose.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from edge_agent.core.errors import BundleError, StateError, UsageError
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Cancel, Install, Pinned, Who
from edge_agent.wire.messages.fields import MAX_WAIT_S, Command
from edge_agent.wire.messages.up import Fault, Hello, Report

from ..journal.entries import (
    BundleExported,
    DevicePinned,
    DeviceReported,
    DeviceRetired,
    DeviceUnpinned,
    Outcome,
    ReleaseCanary,
    ReleaseHeld,
    ReleaseMade,
    ReleaseResumed,
    ReleaseSigned,
    ReleaseStage,
)
from ..journal.store import Entry, utc_now
from ..state.store import StateFolder
from ..views.follower import Follower
from ..views.releases import (
    AUTOMATIC,
    HEARD_AGAIN,
    Book,
    Device,
    Pin,
    Plan,
    Release,
    Result,
    release_of,
    rollback_of,
)
from .downloads import Distributor
from .roster import Roster

log = logging.getLogger(__name__)

_Command = ReleaseMade | ReleaseStage | ReleaseHeld | ReleaseResumed | DevicePinned | DeviceUnpinned
"""What commands write into the journal, with their author."""

COUNT_S = 3600.0
"""Pause between two looks at which devices are still heard."""

LOOK_S = 0.2
"""Pause between two looks at what commands have written into the journal."""

AGAIN_S = 60.0
"""A device that has not answered for so long gets the offer again: it, or its answer, was lost."""

UNABLE_AGAIN_S = 600.0
"""A device that could not try a bundle gets the offer again: its clock, data or keys may be right by then."""

OF_THE_BUNDLE = ("bundle-damaged", "head-mismatch", "bundle", "training")
"""Codes of faults that speak against a release; any other one is of the device alone."""

OFFERS_S = 0.02
"""How long one step goes on offering a release to a fleet: 10,000 offers take ten times that."""

MOST_CHANGES = 20
"""Changes of one device in an hour that are journaled at once; of more, as of a hostile one, the last one follows."""

MOST_SIGNATURES = 3
"""How often in an hour a release is signed again for one device."""


@dataclass
class _Offer:
    """What a device was offered last."""

    release: int
    digest: str
    """The digest of the offered file; it changes when the release is signed again."""

    again_at: float | None
    """When the device is asked again; None: it has answered."""


class Rollout:
    """The releases of a federation. Call `tick` often, and the others with what devices send."""

    def __init__(
        self,
        state: StateFolder,
        roster: Roster,
        distributor: Distributor,
        send: Callable[[str, Command], None],
        clock: Callable[[], float],
        now: Callable[[], datetime] = utc_now,
        gone_after: timedelta = timedelta(days=90),
    ) -> None:
        """``now``: the wall clock, for ends of pins and maintenance windows; devices retire after ``gone_after``."""
        self._state = state
        self._roster = roster
        self._distributor = distributor
        self._send = send
        self._clock = clock
        self._now = now
        self._gone_after = gone_after
        self.book = Book()
        self._follower = Follower(state.journal, self.book)
        self._has_read = False
        self._offers: dict[str, _Offer] = {}
        self._pinned: dict[str, Pin] = {}
        """The pins that devices know of since their last hello."""

        self._changes = Counter[str]()
        self._signatures = Counter[str]()
        self._late: dict[str, tuple[Device, Release | None, Result | None]] = {}
        """Changes of devices that have had many in this hour."""

        self._blobs: dict[str, Outgoing] = {}
        self._looked_at = float("-inf")
        self._version: object = None
        self._counted_at = clock()  # after a start, devices have time to come back
        self._change_at: datetime | None = None
        self._to_offer: dict[str, bool] = {}
        """Devices that are still to be offered what they are to run; true: also where they run it already."""

    # --- events ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Read what commands have asked for, and act on it.

        Raises:
            StateError: the journal, or the file of a release, is missing or damaged; devices keep what they run.
        """
        if not self._to_offer and self._clock() - self._looked_at < LOOK_S:
            return
        self._looked_at = self._clock()
        version = self._state.journal.version()
        is_due = self._change_at is not None and self._now() >= self._change_at
        if version != self._version or is_due:
            self._follow(is_due=is_due)
            self._version = version
        if self._clock() - self._counted_at >= COUNT_S:
            self._counted_at = self._clock()
            self._count_again()
            self._retire()
        # After the journal is read: an operator may have asked for something else meanwhile.
        self._offer_more()

    def make(
        self, run: str, number: int, digest: str, bundle: BundleExported, plan: Plan | None = None
    ) -> tuple[str, ...]:
        """Make a release, by default for everybody at once; returns the devices that are asked for a report of it.

        Those that run its bundle already, since a run that was killed at its end, are among them.
        """
        plan = plan or Plan()
        older = self.book.for_everybody(plan.channel)
        parent = None if older is None else older.bundle_id
        fact = release_of(bundle, plan=plan.to_fact(), by=None, parent=parent)
        self._state.journal.append(fact, run=run, round=number, digest=digest)
        self._follow()
        new_release = self.book.releases[-1]
        devices = tuple(agent for agent in self._roster.present("head") if self._wanted(agent) is new_release)
        self._to_offer |= dict.fromkeys(devices, True)
        return devices

    def hello(self, agent: str, message: Hello) -> None:
        """Note what a device of tier ``head`` runs, and offer it what it is to run."""
        self._offers.pop(agent, None)
        self._pinned.pop(agent, None)
        self._tell_pin(agent)
        self._note(Device(agent, message.bundle_id, message.channel, message.kept))
        self.offer(agent)

    def reported(self, agent: str, message: Report) -> None:
        """Note that a device has installed a bundle, gone back to the one before, or declined it."""
        device = self.book.devices.get(agent)
        if device is None:  # it sends a hello first
            return
        # Step 1: its answer has arrived, so it is not asked again.
        offer = self._offers.get(agent)
        if offer is not None and offer.release == message.release:
            offer.again_at = None
        # Step 2: journal what it runs now, and what that means for the release. A verdict may follow at once.
        reported_device = Device(agent, message.bundle_id or device.runs, device.channel, message.kept)
        release = self._release_of(agent, message)
        result = None if release is None else _judge_report(message, release.plan.min_gain)
        self._note(reported_device, release, result)
        # Step 3: offer what it is to run after that, if it is another release than the one that it was offered.
        to_run = self._wanted(agent)
        if to_run is None:
            return
        offer = self._offers.get(agent)
        is_offered = offer is not None and offer.release == to_run.number
        was_at_work_on_another = release is not None and release is not to_run
        if was_at_work_on_another or not is_offered:
            self.offer(agent)

    def fault(self, agent: str, message: Fault) -> None:
        """Note that a device could not install the bundle on offer, by its fault or by that of the bundle."""
        release = self._release_of(agent, message)
        offer = self._offers.get(agent)
        device = self.book.devices.get(agent)
        if release is None or device is None or offer is None:
            return
        if offer.release != release.number:  # it was offered another one meanwhile
            return
        reason = f"{message.error}: {message.message}"
        if message.code == "older":
            # The device goes back to no older version. With a signature of now it installs the same bundle.
            obstacle = self._sign_again(agent, release, offer.digest)
            if not obstacle:
                self.offer(agent)
                return
            reason = f"has installed a newer release, and this one is not signed again: {obstacle}"
        # A fault of the bundle is the answer; with one of the device alone, it may be able to install it later.
        outcome: Outcome = "failed"
        offer.again_at = None
        if message.code not in OF_THE_BUNDLE:
            outcome = "unable"
            offer.again_at = self._clock() + UNABLE_AGAIN_S
        self._note(device, release, Result(outcome, reason[:500]))

    def heartbeat(self, agent: str) -> None:
        """Ask a device again that is idle, where its answer is missing for long."""
        offer = self._offers.get(agent)
        if offer is not None and offer.again_at is not None and self._clock() >= offer.again_at:
            self.offer(agent)

    def offer(self, agent: str, *, anyway: bool = False) -> bool:
        """Offer a device the release that it is to run, and return whether an offer was sent.

        A device that runs it already gets none, unless ``anyway`` is set.

        Raises:
            StateError: the file of the release is missing or damaged; devices keep the bundle they run.
        """
        release = self._wanted(agent)
        if release is None or not release.digest:
            return False
        device = self.book.devices[agent]
        # A canary is to report how the release does, so it is asked for that even where it runs the bundle already.
        owes_report = release.stage == "canary" and agent not in release.results
        if device.runs == release.bundle_id and not anyway and not owes_report:
            return False
        wait_s, within_s = release.plan.activation(self._now())
        wait_s = min(wait_s, MAX_WAIT_S)
        # What an operator has ordered, and a way back, are installed even where they are worse than what runs now.
        is_pinned = self.book.pin(agent, self._now()) is not None
        is_ordered = is_pinned or self.book.goes_back(device, release)
        install = Install(
            run=release.run,
            bundle_id=release.bundle_id,
            release=release.number,
            blob=self._put_on_offer(release.digest, agent).ref,
            compare=not is_ordered,
            activate_in_s=wait_s,
            activate_within_s=within_s,
        )
        self._send(agent, install)
        self._offers[agent] = _Offer(release.number, release.digest, self._clock() + wait_s + AGAIN_S)
        return True

    def offer_again(self, agent: str, digest: str) -> None:
        """Offer a release again after a restart, when an agent requests a blob that is not on offer."""
        release = self._wanted(agent)
        if release is not None and digest == release.digest:
            self._put_on_offer(digest, agent)
            self._send(agent, Who())

    # --- inside ----------------------------------------------------------------------------------------------------

    def _wanted(self, agent: str) -> Release | None:
        """Return the release that a device is to run; None for a device that is not known, or has none."""
        device = self.book.devices.get(agent)
        if device is None:
            return None
        return self.book.release_for(device, self._now())

    def _release_of(self, agent: str, message: Report | Fault) -> Release | None:
        """Return the release that a message is about; None for one that the device was not to get, or has no say in."""
        release = self.book.get(message.release)
        if release is None:
            return None
        if isinstance(message, Report) and message.about != release.bundle_id:
            return None
        pin = self.book.pin(agent, self._now())
        is_pinned = pin is not None and pin.release == release.number
        if is_pinned or self.book.has_say(agent, release):
            return release
        return None

    def _sign_again(self, agent: str, release: Release, digest: str) -> str:
        """Give a release a version of now, for a device that has installed a newer one than ``digest``.

        Returns why that cannot be; empty where the release has another file now.
        """
        from ..state.release_keys import file_to_release  # loads cryptography

        if release.digest != digest:
            return ""
        if self._signatures[agent] >= MOST_SIGNATURES:
            return f"it was signed {MOST_SIGNATURES} times in this hour for this device"
        self._signatures[agent] += 1
        try:
            content, signed = file_to_release(self._state, release.run, release.bundle_id, release.digest, self._now())
        except (UsageError, BundleError) as error:  # people have to sign it
            return str(error)
        new_digest = self._state.blobs.put(content)
        fact = ReleaseSigned(release=release.number, signed=signed)
        self._state.journal.append(fact, run=release.run or None, digest=new_digest)
        self._blobs.pop(digest, None)
        log.info("release_signed release=%d for=%s: it has installed a newer version", release.number, agent)
        self._follow()
        return ""

    def _note(self, device: Device, release: Release | None = None, result: Result | None = None) -> None:
        """Journal what is new about a device, and act on it.

        Args:
            device: What it runs now.
            release: The release that it has answered to; None where it only says what it runs.
            result: Its answer.
        """
        # Step 1: nothing new is not journaled, but now and then, so that it is known that the device is still there.
        is_same_device = device == self.book.devices.get(device.id)
        if is_same_device and not _is_new(device, release, result):
            is_stale = self.book.is_stale(device.id, self._now() - HEARD_AGAIN)
            if not is_stale:
                return
        # Step 2: of a device that changes all the time, only the last change of the hour is journaled, at its end.
        if self._changes[device.id] >= MOST_CHANGES:
            if release is None and device.id in self._late:
                _, release, result = self._late[device.id]
            self._late[device.id] = (device, release, result)
            return
        self._changes[device.id] += 1
        # Step 3: the entry has all that is known of the device now, as a restart reads the newest one alone.
        fact = self._fact_about(device)
        if release is not None and result is not None:
            fact = fact.changed(release=release.number, result=result.to_fact())
        self._state.journal.append(fact, agent=device.id)
        self._follow(draws=False)

    def _fact_about(self, device: Device) -> DeviceReported:
        """Return what a device runs, with the figures that it has reported since it was heard, for the journal."""
        fact = DeviceReported(runs=device.runs, channel=device.channel, kept=device.kept)
        member = self._roster.get(device.id)
        if member is None:
            return fact
        candidate = None if member.candidate is None else member.candidate.to_fact()
        return fact.changed(running=member.figures.to_fact(), candidate=candidate)

    def _follow(self, *, is_due: bool = False, draws: bool = True) -> None:
        """Read new entries, decide what follows from them, and offer devices what they are to run now.

        ``draws``: whether a canary is filled, too. That looks at the whole fleet, so a report leaves it to the next
        `tick`: with 10,000 devices it took 2 ms for each.
        """
        is_due |= self._read()
        while self._decide(draws=draws):
            is_due |= self._read()
        now = self._now()
        self._change_at = self.book.next_change(now)
        if is_due:
            self._sweep()

    def _sweep(self) -> None:
        """Have every device that is present offered what it is to run and was not offered since its hello."""
        for agent in self._roster.present("head"):
            self._to_offer.setdefault(agent, False)

    def _offer_more(self) -> None:
        """Offer some more devices what they are to run: not all of a large fleet in one step."""
        damaged = dict[int, StateError]()
        begin = self._clock()
        while self._to_offer and self._clock() - begin < OFFERS_S:
            agent = next(iter(self._to_offer))
            anyway = self._to_offer.pop(agent)
            release = self._release_to_offer(agent)
            if release is None or release.number in damaged:
                continue
            try:
                self.offer(agent, anyway=anyway)
            except StateError as error:  # the other releases go on
                damaged[release.number] = error
        if damaged:
            raise damaged[min(damaged)]

    def _release_to_offer(self, agent: str) -> Release | None:
        """Return the release that a device is to be offered now; None where that was done, or there is none.

        If the device has not answered an offer of another release, that offer is withdrawn. A new pin is sent to the
        device.
        """
        offer = self._offers.get(agent)
        release = self._wanted(agent)
        self._tell_pin(agent)
        if offer is None:
            return release
        if release is not None and release.number == offer.release:
            return None
        if offer.again_at is not None:
            self._withdraw(agent, offer)
        return release

    def _tell_pin(self, agent: str) -> None:
        """Let a device know which release the operator has it stay with, for its own status, where that is new."""
        pin = self.book.pin(agent, self._now())
        if pin == self._pinned.get(agent):
            return
        if pin is None:
            del self._pinned[agent]
            self._send(agent, Pinned(release=0))
        else:
            self._pinned[agent] = pin
            self._send(agent, Pinned(release=pin.release, until=pin.until, reason=pin.reason[:1000]))

    def _withdraw(self, agent: str, offer: _Offer) -> None:
        """Tell a device that may still download a bundle, or wait for its time, that it is not to switch."""
        release = self.book.get(offer.release)
        del self._offers[agent]
        if release is not None:
            self._send(agent, Cancel(run=release.run, round=0, reason=f"release {release.number}: {release.stage}"))

    def _count_again(self) -> None:
        """Begin a new hour of changes, and journal what is left of the one before."""
        self._changes.clear()
        self._signatures.clear()
        while self._late:
            _, (device, release, result) = self._late.popitem()
            self._note(device, release, result)
            self.offer(device.id)

    def _retire(self) -> None:
        """Journal which devices are there, seldom, and which were not heard for so long that they count no more."""
        now = self._now()
        present = set(self._roster.present("head"))
        for agent in self.book.stale_devices(now - HEARD_AGAIN):
            if agent in present:
                device = self.book.devices[agent]
                fact = DeviceReported(runs=device.runs, channel=device.channel, kept=device.kept)
                self._state.journal.append(fact, agent=agent)
        for agent in self.book.stale_devices(now - self._gone_after):
            if agent not in present:
                reason = f"not heard for {self._gone_after.days} days"
                self._state.journal.append(DeviceRetired(reason=reason), agent=agent)
                log.info("device_retired agent=%s reason=%s", agent, reason)
        self._follow()

    def _read(self) -> bool:
        """Count new entries; return whether one of them may change what devices are to run."""
        is_first = not self._has_read
        self._has_read = True
        entries = self._follower.read()
        # What was in the journal before this start was logged then.
        if not is_first:
            for entry in entries:
                if isinstance(entry.fact, _Command) and entry.fact.by not in {None, AUTOMATIC}:
                    _log_command(entry, entry.fact)
        return any(entry.kind != "device_reported" for entry in entries)

    def _decide(self, *, draws: bool) -> bool:
        """Journal the next step of a release, if there is one; return whether there was.

        ``draws``: whether a canary is filled, too.
        """
        now = self._now()
        journal = self._state.journal
        for release in self.book.current():
            verdict, reason = self.book.verdict(release, now)
            if verdict == "stop":
                self._stop(release, reason)
                return True
            if verdict == "succeeded":
                stage = "everybody" if release.plan.auto_promote else "paused"
                journal.append(ReleaseStage(release=release.number, stage=stage, reason=reason))
                log.info("release_%s release=%d reason=%s", stage, release.number, reason)
                return True
            if not draws:
                continue
            agents = self.book.draw_canary(release, self._roster.present("head"), now)
            if agents != [*release.canary]:
                journal.append(ReleaseCanary(release=release.number, agents=tuple(agents)))
                log.info("release_canary release=%d agents=%s", release.number, ",".join(agents))
                return True
        return False

    def _stop(self, release: Release, reason: str) -> None:
        """Return the devices that run the release to the one before; hold it where there is none."""
        journal = self._state.journal
        from ..state.release_keys import file_to_release  # loads cryptography

        try:
            older, rollback = rollback_of(self.book, release, reason, AUTOMATIC)
            content, signed = file_to_release(self._state, older.run, older.bundle_id, older.digest, self._now())
            rollback = rollback.changed(signed=signed)
            digest = self._state.blobs.put(content)
        except (UsageError, BundleError, StateError, OSError) as error:  # no older one, unsigned, or its file is gone
            running = sum(device.runs == release.bundle_id for device in self.book.devices.values())
            on = f"{running} run it" if running else "no device runs it"
            lines = (reason, f"Not rolled back ({on}): {error}")
            journal.append(ReleaseHeld(release=release.number, reason="\n".join(lines)))
            log.error("release_held release=%d reason=%s", release.number, "; ".join(lines))
            return
        journal.append(rollback, run=older.run, round=older.round, digest=digest)
        log.error("release_rolled_back release=%d to=%d reason=%s", release.number, older.number, reason)

    def _put_on_offer(self, digest: str, agent: str) -> Outgoing:
        if digest not in self._blobs:
            try:
                self._state.blobs.check(digest)
            except StateError as error:
                consequence = "this is the released bundle, which no device can get now"
                raise StateError(f"{error}, or make a new release with a run: {consequence}") from error
            self._blobs[digest] = Outgoing.open(self._state.blobs.path(digest), digest)
        self._distributor.offer(self._blobs[digest], (agent,))
        return self._blobs[digest]


def _is_new(device: Device, release: Release | None, result: Result | None) -> bool:
    """Return whether a device's answer to a release differs from the one that the journal has, but for its time."""
    if release is None or result is None:
        return result is not None
    journaled = release.results.get(device.id)
    return journaled is None or asdict(journaled) | {"at": ""} != asdict(result)


def _judge_report(report: Report, min_gain: float | None) -> Result:
    """Return what a report means for the release that it is about.

    Args:
        report: The device's report.
        min_gain: Least gain of acc.personal that the release allows; None: any.
    """
    acc = report.acc_personal
    before = report.metrics.get("acc.before")
    outcome: Outcome = "ok"
    reason = report.kept or report.rolled_back
    if report.kept:
        outcome = "declined"
    elif report.rolled_back:
        outcome = "failed"
    elif min_gain is not None:
        if before is None or acc is None:
            outcome = "unable"
            reason = "its gain is not known: it reports no acc.personal, or none of the pair before"
        elif acc < before + min_gain:
            outcome = "failed"
            reason = f"acc.personal is {acc:.3f}, {before:.3f} before; {min_gain:+g} is allowed"
    return Result(outcome, reason[:500], acc, before, report.support)


def _log_command(entry: Entry, fact: _Command) -> None:
    """Log what a command has written into the journal, which others are to see as well."""
    if entry.agent:
        about = f"device={entry.agent}"
    elif isinstance(fact, ReleaseMade | DeviceUnpinned):
        about = "release=new"
    else:
        about = f"release={fact.release}"
    reason = ""
    if isinstance(fact, ReleaseStage | ReleaseHeld | DevicePinned):
        reason = fact.reason
    log.info("%s %s by=%s reason=%s", entry.kind, about, fact.by, reason)
