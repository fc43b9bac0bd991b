"""Brings the bundles of releases to the devices: offers each device the release that it is to run, notes its answer.

What a device is to run follows from the journal (`coordinator.state.releases`); this compares it with what the device
runs, draws canaries, and stops a release that fails. It keeps nothing that a restart could lose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from edge_agent.errors import StateError, UsageError
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import MAX_WAIT_S, Cancel, Command, Fault, Hello, Install, Report, Who

from ..state.journal import utc_now
from ..state.releases import HEARD_AGAIN, Book, Device, Outcome, Plan, Release, Result, plan_body, rollback_of
from ..state.store import StateFolder
from .registry import Roster
from .transfers import Distributor

log = logging.getLogger(__name__)

COUNT_S = 3600.0
"""Pause between two looks at which devices are still heard."""

LOOK_S = 0.2
"""Pause between two looks at what commands have written into the journal."""

AGAIN_S = 60.0
"""A device that has not answered for so long gets the offer again: it, or its answer, was lost."""

OF_THE_DEVICE = ("state", "system", "config")
"""Codes of faults that say nothing of a bundle: the device is asked again."""

OFFERS_S = 0.02
"""How long one step goes on offering a release to a fleet: 10,000 offers take ten times that."""

MOST_CHANGES = 20
"""Changes of one device, between two releases, that are journaled: more are those of a broken or hostile one."""


@dataclass
class _Offer:
    release: int
    at: float
    is_answered: bool = False


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
        self._state, self._roster, self._distributor, self._send = state, roster, distributor, send
        self._clock, self._now, self._gone_after = clock, now, gone_after
        self.book = Book()
        self._offers: dict[str, _Offer] = {}
        self._changes: dict[str, int] = {}
        self._blobs: dict[str, Outgoing] = {}
        self._looked_at, self._version = float("-inf"), (-1, -1)
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
        self._offer_more()
        if self._clock() - self._looked_at < LOOK_S:
            return
        self._looked_at, version = self._clock(), self._state.journal.version()
        is_due = self._change_at is not None and self._now() >= self._change_at
        if version != self._version or is_due:
            self._follow(is_due=is_due)
            self._version = version
        if self._clock() - self._counted_at >= COUNT_S:
            self._counted_at = self._clock()
            self._retire()

    def make(
        self, run: str, number: int, digest: str, body: Mapping[str, Any], plan: Plan | None = None
    ) -> tuple[str, ...]:
        """Make a release, by default for everybody at once; returns the devices that are asked for a report of it.

        Those that run its bundle already, since a run that was killed at its end, are among them.
        """
        plan = plan or Plan()
        older = self.book.for_everybody(plan.channel)
        content = {**body, "plan": plan_body(plan), "parent": None if older is None else older.bundle_id}
        self._state.journal.append("release_made", run=run, round=number, digest=digest, body=content)
        self._follow()
        made = self.book.releases[-1]
        asked = tuple(agent for agent in self._roster.present("head") if self._wanted(agent) is made)
        self._to_offer |= dict.fromkeys(asked, True)
        return asked

    def hello(self, agent: str, message: Hello) -> None:
        """A device of tier ``head`` says what it runs; it is offered what it is to run."""
        self._offers.pop(agent, None)
        device = Device(agent, message.bundle_id, message.channel, message.kept)
        wanted = self.book.wanted(device, self._now())
        is_there = wanted is not None and wanted.stage == "canary" and wanted.bundle_id == message.bundle_id
        if wanted is not None and is_there and agent not in wanted.results:  # its report was lost
            self._note(device, wanted, Result("ok", "runs it"))
        else:
            self._note(device)
        self.offer(agent)

    def reported(self, agent: str, message: Report) -> None:
        """A device has installed a bundle, gone back to the one before, or declined it."""
        device = self.book.devices.get(agent)
        if device is None:  # it sends a hello first
            return
        runs = Device(agent, message.bundle_id or device.runs, device.channel, message.kept)
        release = self._release_of(agent, message.about)
        if release is not None:
            if (offer := self._offers.get(agent)) is not None and offer.release == release.number:
                offer.is_answered = True
            self._note(runs, release, _result_of(message, release.plan.min_gain))
        else:
            self._note(runs)
        wanted, offer = self._wanted(agent), self._offers.get(agent)
        if wanted is not None and (offer is None or offer.release != wanted.number):  # it was at work meanwhile
            self.offer(agent)

    def fault(self, agent: str, message: Fault) -> None:
        """A device could not install the bundle that it was offered, for a reason that says something of the bundle."""
        offer, device = self._offers.get(agent), self.book.devices.get(agent)
        is_about_bundle = not message.round and message.purpose is None and message.code not in OF_THE_DEVICE
        if offer is None or device is None or not is_about_bundle:
            return
        release = self.book.get(offer.release)
        if release is not None and release.run == message.run:
            offer.is_answered = True
            self._note(device, release, Result("failed", f"{message.error}: {message.message}"[:500]))

    def heartbeat(self, agent: str) -> None:
        """A device is idle: where its answer is missing for long, it is asked again."""
        offer = self._offers.get(agent)
        if offer is not None and not offer.is_answered and self._clock() - offer.at >= AGAIN_S:
            self.offer(agent)

    def offer(self, agent: str, *, anyway: bool = False) -> bool:
        """Offer a device the release that it is to run, ``anyway`` also where it runs that; whether it was offered.

        Raises:
            StateError: the file of the release is missing or damaged; devices keep the bundle they run.
        """
        release = self._wanted(agent)
        if release is None or not release.digest or (not anyway and self._runs(agent, release)):
            return False
        wait_s, within_s = release.plan.activation(self._now())
        pin = self.book.pin(agent, self._now())
        digest = release.digest if pin is None else pin.digest or release.digest
        install = Install(
            run=release.run,
            bundle_id=release.bundle_id,
            release=release.number,
            blob=self._put_on_offer(digest, agent).ref,
            compare=not release.rolls_back and pin is None,
            activate_in_s=min(wait_s, MAX_WAIT_S),
            activate_within_s=within_s,
        )
        self._send(agent, install)
        self._offers[agent] = _Offer(release.number, self._clock() + wait_s)
        return True

    def offer_again(self, agent: str, digest: str) -> None:
        """An agent requests a blob that is not on offer: after a restart, offer the release again."""
        release, pin = self._wanted(agent), self.book.pin(agent, self._now())
        if release is not None and digest in {release.digest, "" if pin is None else pin.digest}:
            self._put_on_offer(digest, agent)
            self._send(agent, Who())

    # --- inside ----------------------------------------------------------------------------------------------------

    def _wanted(self, agent: str) -> Release | None:
        device = self.book.devices.get(agent)
        return None if device is None else self.book.wanted(device, self._now())

    def _runs(self, agent: str, release: Release) -> bool:
        return self.book.devices[agent].runs == release.bundle_id

    def _release_of(self, agent: str, bundle_id: str) -> Release | None:
        """The release that a report of this bundle is about: the one that was offered, or else the newest of it.

        None for a release that this device was not to get: it has no say in that one.
        """
        offer = self._offers.get(agent)
        offered = None if offer is None else self.book.get(offer.release)
        if offered is not None and offered.bundle_id == bundle_id:
            return offered
        newest = next((one for one in reversed(self.book.releases) if bundle_id and one.bundle_id == bundle_id), None)
        return newest if newest is not None and (newest.promoted or agent in newest.canary) else None

    def _note(self, device: Device, release: Release | None = None, result: Result | None = None) -> None:
        """Journal what is new about a device."""
        known = None if release is None else release.results.get(device.id)
        is_new = result is not None and (known is None or asdict(known) | {"at": ""} != asdict(result))
        is_known = device == self.book.devices.get(device.id)
        if is_known and not is_new and not self.book.is_stale(device.id, self._now() - HEARD_AGAIN):
            return
        if self._changes.get(device.id, 0) >= MOST_CHANGES:
            return
        self._changes[device.id] = self._changes.get(device.id, 0) + 1
        body: dict[str, Any] = {"runs": device.runs, "channel": device.channel, "kept": device.kept}
        if release is not None and result is not None:
            body |= {"release": release.number, "result": {k: v for k, v in asdict(result).items() if k != "at"}}
        self._state.journal.append("device_reported", agent=device.id, body=body)
        self._follow(draws=False)

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
            self._changes.clear()
            self._sweep()

    def _sweep(self) -> None:
        """Have every device that is present offered what it is to run and was not offered since its hello."""
        for agent in self._roster.present("head"):
            self._to_offer.setdefault(agent, False)

    def _offer_more(self) -> None:
        """Offer some more devices what they are to run: not all of a large fleet in one step."""
        damaged, begin = dict[int, StateError](), self._clock()
        while self._to_offer and self._clock() - begin < OFFERS_S:
            agent = next(iter(self._to_offer))
            anyway = self._to_offer.pop(agent)
            offer, release = self._offers.get(agent), self._wanted(agent)
            if offer is not None and not offer.is_answered and (release is None or release.number != offer.release):
                self._withdraw(agent, offer)
            if release is None or release.number in damaged or (offer is not None and offer.release == release.number):
                continue
            try:
                self.offer(agent, anyway=anyway)
            except StateError as error:  # the other releases go on
                damaged[release.number] = error
        if damaged:
            raise damaged[min(damaged)]

    def _withdraw(self, agent: str, offer: _Offer) -> None:
        """Tell a device that may still download a bundle, or wait for its time, that it is not to switch."""
        release = self.book.get(offer.release)
        del self._offers[agent]
        if release is not None:
            self._send(agent, Cancel(run=release.run, round=0, reason=f"release {release.number}: {release.stage}"))

    def _retire(self) -> None:
        """Journal which devices are there, seldom, and which were not heard for so long that they count no more."""
        now, present = self._now(), set(self._roster.present("head"))
        for agent in self.book.gone(now - HEARD_AGAIN):
            if agent in present:
                device = self.book.devices[agent]
                body = {"runs": device.runs, "channel": device.channel, "kept": device.kept}
                self._state.journal.append("device_reported", agent=agent, body=body)
        for agent in self.book.gone(now - self._gone_after):
            if agent not in present:
                reason = f"not heard for {self._gone_after.days} days"
                self._state.journal.append("device_retired", agent=agent, body={"reason": reason})
                log.info("device_retired agent=%s reason=%s", agent, reason)
        self._follow()

    def _read(self) -> bool:
        """Count new entries; whether one of them may change what devices are to run."""
        entries = self.book.read(self._state.journal)
        return any(entry.kind != "device_reported" for entry in entries)

    def _decide(self, *, draws: bool) -> bool:
        """Journal the next step of a release, if there is one."""
        now, journal = self._now(), self._state.journal
        for release in self.book.current():
            verdict, reason = self.book.verdict(release)
            if verdict == "stop":
                self._stop(release, reason)
                return True
            if verdict == "succeeded":
                stage = "everybody" if release.plan.auto_promote else "paused"
                journal.append("release_stage", body={"release": release.number, "stage": stage, "reason": reason})
                log.info("release_%s release=%d reason=%s", stage, release.number, reason)
                return True
            if draws and (agents := self.book.canary_to_add(release, self._roster.present("head"), now)):
                journal.append("release_canary", body={"release": release.number, "agents": agents})
                log.info("release_canary release=%d agents=%s", release.number, ",".join(agents))
                return True
        return False

    def _stop(self, release: Release, reason: str) -> None:
        """Return the devices that run the release to the one before; hold it where there is none."""
        journal = self._state.journal
        from ..state.release_keys import file_to_release  # loads cryptography

        try:
            older, body = rollback_of(self.book, release, reason, "failures")
            content, signed = file_to_release(self._state, older.run, older.bundle_id, older.digest, self._now())
            body, digest = {**body, "signed": signed}, self._state.blobs.put(content)
        except UsageError as error:  # there is no older one, or people have to sign it
            held = f"{reason}. Not rolled back: {error}"
            journal.append("release_held", body={"release": release.number, "reason": held})
            log.error("release_held release=%d reason=%s", release.number, held)
            return
        journal.append("release_made", run=older.run, round=older.round, digest=digest, body=body)
        log.error("release_rolled_back release=%d to=%d reason=%s", release.number, older.number, reason)

    def _put_on_offer(self, digest: str, agent: str) -> Outgoing:
        if digest not in self._blobs:
            try:
                self._state.blobs.check(digest)
            except StateError as error:
                what = "this is the released bundle, which no device can get now"
                raise StateError(f"{error}, or make a new release with a run: {what}") from error
            self._blobs[digest] = Outgoing.open(self._state.blobs.path(digest), digest)
        self._distributor.offer(self._blobs[digest], (agent,))
        return self._blobs[digest]


def _result_of(report: Report, min_gain: float | None) -> Result:
    """What a report means for the release that it is about."""
    before = report.metrics.get("acc.before")
    outcome: Outcome = "ok"
    reason = report.kept or report.rolled_back
    if report.kept:
        outcome = "declined"
    elif report.rolled_back:
        outcome = "failed"
    elif min_gain is not None and before is not None and (acc := report.acc_personal or 0.0) < before + min_gain:
        outcome, reason = "failed", f"acc.personal is {acc:.3f}, {before:.3f} before; {min_gain:+g} is allowed"
    return Result(outcome, reason[:500], report.acc_personal, before, report.support)
