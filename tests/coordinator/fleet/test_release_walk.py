"""Random walks of an operator, devices and restarts: what each device is to run, against a twin that counts by hand.

The devices check signatures as real ones do: each refuses a file whose version is older than the newest that it has
installed. Files are JSON here, `sign` gives them versions; bundles, heads and the wire are in other tests.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

import pytest

from coordinator.fleet.rollout import Rollout
from coordinator.journal.entries import fact_of
from coordinator.state import release_keys
from coordinator.state.store import StateFolder
from coordinator.views.releases import RELEASE_KINDS, book_of, rollback_of
from edge_agent.core.errors import UsageError
from edge_agent.wire.messages.down import Cancel, Pinned
from edge_agent.wire.messages.up import Fault, Hello, Report

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
STEPS = 60
SETTLES = 12
BAD = frozenset("ef")
"""Bundles that fail their self-test on every device."""


@dataclass
class Slot:
    """One release of a channel."""

    number: int
    bundle: str
    for_all: bool
    held: bool = False
    canary: set[str] = field(default_factory=set)


class Twin:
    """The bundle that each device is to run: a channel is a stack of releases, and a rollback takes some out."""

    def __init__(self):
        self.slots = {}
        self.pins = {}
        self.bundles = []
        self.seen = 0

    def read(self, journal):
        for entry in journal.entries(kinds=RELEASE_KINDS, after=self.seen):
            self.seen = entry.id
            body = entry.body
            if entry.kind == "release_made":
                self._made(body)
            elif entry.kind == "device_pinned":
                self.pins[entry.agent] = (body["release"], body.get("until", ""))
            elif entry.kind == "device_unpinned":
                del self.pins[entry.agent]
            elif (slot := self._slot(body.get("release"))) is not None:
                if entry.kind == "release_canary":
                    slot.canary = set(body["agents"])
                elif entry.kind == "release_stage":
                    slot.for_all |= body["stage"] == "everybody"
                elif entry.kind in {"release_held", "release_resumed"}:
                    slot.held = entry.kind == "release_held"

    def _made(self, body):
        plan = body.get("plan", {})
        self.bundles.append(body["bundle_id"])
        if body.get("rolls_back"):
            slots = self.slots[plan["channel"]]
            above = []
            while (slot := slots.pop()).number != body["rolls_back"]:
                above.append(slot)
            bad = slot.bundle
            while not (slots[-1].for_all and not slots[-1].held and slots[-1].bundle != bad):
                if (slot := slots.pop()).bundle != bad:
                    above.append(slot)
            assert slots[-1].bundle == body["bundle_id"]
            slots += [Slot(len(self.bundles), body["bundle_id"], for_all=True), *reversed(above)]
        else:
            made = Slot(len(self.bundles), body["bundle_id"], not plan.get("canary"))
            self.slots.setdefault(plan.get("channel", "stable"), []).append(made)

    def _slot(self, number):
        return next((slot for slots in self.slots.values() for slot in slots if slot.number == number), None)

    def wanted(self, device, now):
        """The bundle that a device is to run: that which it runs, where no release is for it."""
        number, until = self.pins.get(device.name, (0, ""))
        if number and (not until or now < datetime.fromisoformat(until)):
            return self.bundles[number - 1]
        for slot in reversed(self.slots.get(device.channel, [])):
            if slot.held and device.runs == slot.bundle:
                break
            if not slot.held and (slot.for_all or device.name in slot.canary):
                return slot.bundle
        return device.runs


@dataclass
class Device:
    """A device that installs what is signed and good, and keeps its bundle while its owner says so."""

    name: str
    channel: str = "stable"
    runs: str = ""
    newest: int = 0
    kept: str = ""
    clock_is_wrong: bool = False

    def answer(self, install, file):
        about = {"run": install.run, "release": install.release}
        if self.kept:
            return Report(**about, about=install.bundle_id, bundle_id=self.runs, samples=1, kept=self.kept)
        if self.clock_is_wrong:
            return Fault(**about, purpose=None, error="BundleUntrusted", code="untrusted", message="it has expired")
        if file["version"] < self.newest:
            return Fault(**about, purpose=None, error="BundleOlder", code="older", message="older than installed")
        if file["bundle_id"][0] in BAD:
            return Fault(**about, purpose=None, error="BundleDamaged", code="bundle-damaged", message="self-test")
        self.runs = file["bundle_id"]
        self.newest = file["version"]
        return Report(**about, about=self.runs, bundle_id=self.runs, samples=1)


class World:
    """An operator, a coordinator's releases, and devices: both may be away, and a lost message cuts a connection."""

    def __init__(self, state, rng, bad, monkeypatch):
        """``bad``: share of the releases whose bundle no device can use."""
        self.rng = rng
        self.state = state
        self.bad = bad
        self.clock = 1000.0
        self.version = 0
        self.devices = {}
        self.present = set()
        self.twin = Twin()
        self.inbox = []
        self.made = 0
        self.largest = {}
        self.cut = set()
        monkeypatch.setattr(release_keys, "file_to_release", self.sign)
        monkeypatch.setattr(state.journal, "_now", self.now)
        self.start()

    def now(self):
        return NOON + timedelta(seconds=self.clock - 1000.0)

    def start(self):
        self.rollout = Rollout(self.state, Roster(self), self, self.send, lambda: self.clock, self.now)
        self.rollout.tick()
        for name in sorted(self.present):
            self.hello(name)

    def sign(self, state, run, bundle_id, digest, now):
        self.version += 1
        return json.dumps({"bundle_id": bundle_id, "version": self.version}).encode(), None

    # What `Rollout` uses of roster and distributor.

    def present_devices(self):
        return tuple(sorted(self.present))

    def offer(self, outgoing, agents):
        pass

    # Messages.

    def send(self, agent, message):
        if isinstance(message, Cancel):
            self.inbox = [one for one in self.inbox if one[0] != agent]
            return
        if isinstance(message, Pinned):  # only shown on the device
            return
        self.twin.read(self.state.journal)
        known = self.rollout.book.devices[agent]
        wanted = self.twin.wanted(Device(agent, known.channel, known.runs), self.now())
        assert message.bundle_id == wanted, f"{agent} is offered {message.bundle_id[0]}"
        if self.rng.random() < 0.1:
            self.cut.add(agent)
        else:
            self.inbox.append((agent, message))

    def hello(self, name):
        device = self.devices[name]
        self.rollout.hello(
            name,
            Hello(software="", tier="head", samples=1, bundle_id=device.runs, channel=device.channel, kept=device.kept),
        )

    def deliver(self):
        while self.inbox:
            agent, install = self.inbox.pop(self.rng.randrange(len(self.inbox)))
            if agent not in self.present:
                continue
            path = self.state.blobs.path(install.blob.digest)
            said = self.devices[agent].answer(install, json.loads(path.read_bytes()))
            if self.rng.random() < 0.1:
                self.cut.add(agent)
                continue
            getattr(self.rollout, "reported" if isinstance(said, Report) else "fault")(agent, said)

    def wait(self, seconds=1.0):
        self.clock += seconds
        self.rollout.tick()
        cut = self.cut
        self.cut = set()
        for name in sorted(self.present):
            if name in cut:
                self.hello(name)
            self.rollout.heartbeat(name)
        self.deliver()

    # Steps; each does nothing where it cannot be done.

    def release(self, journal, body):
        content, _ = self.sign(None, "", body["bundle_id"], "", None)
        journal.append(fact_of("release_made", body), run="run-0001", round=1, digest=self.state.blobs.put(content))

    def make(self):
        rng = self.rng
        is_bad = self.rng.random() < self.bad
        bundle = rng.choice("ef" if is_bad else "abcd") + f"{self.made:063x}"
        self.made += 1
        plan = {"max_failed": rng.choice(["0", "10%", "50%"]), "channel": rng.choice(["stable", "stable", "beta"])}
        if rng.random() < 0.6:
            plan |= {"canary": rng.choice(["1", "2", "30%"]), "auto_promote": rng.random() < 0.5}
        self.release(self.state.journal, {"bundle_id": bundle, "plan": plan})

    def _one(self, *stages):
        book = book_of(self.state.journal)
        found = [one for one in book.releases if one.stage in stages]
        return (book, self.rng.choice(found)) if found else (book, None)

    def promote(self):
        _, release = self._one("canary", "paused")
        if release is not None:
            self.state.journal.append(fact_of("release_stage", {"release": release.number, "stage": "everybody"}))

    def hold(self):
        _, release = self._one("canary", "paused", "everybody")
        if release is not None and not release.rolls_back:
            self.state.journal.append(fact_of("release_held", {"release": release.number, "reason": "operator"}))

    def resume(self):
        _, release = self._one("held")
        if release is not None:
            self.state.journal.append(fact_of("release_resumed", {"release": release.number}))

    def rollback(self):
        book, release = self._one("canary", "paused", "everybody", "held")
        if release is None:
            return
        try:
            _, made = rollback_of(book, release, "operator", "operator")
        except UsageError:
            return
        others = {n: self.twin.wanted(d, self.now()) for n, d in self.devices.items()}
        self.release(self.state.journal, made.to_body())
        self.twin.read(self.state.journal)
        for name, device in self.devices.items():
            before = others[name]
            after = self.twin.wanted(device, self.now())
            assert before == after or before == release.bundle_id or device.runs == release.bundle_id, "moved"
            assert before == after or after != release.bundle_id, "is still on the bad bundle"

    def pin(self):
        _, release = self._one("canary", "paused", "everybody", "rolled back", "held")
        if release is not None and self.devices and release.bundle_id[0] not in BAD:
            until = self.now() + timedelta(hours=self.rng.randint(1, 5))
            body = {"release": release.number, "until": self.rng.choice(["", until.isoformat()])}
            self.state.journal.append(fact_of("device_pinned", body), agent=self.rng.choice([*self.devices]))

    def unpin(self):
        if pins := book_of(self.state.journal).pins:
            self.state.journal.append(fact_of("device_unpinned", {}), agent=self.rng.choice([*pins]))

    def add(self):
        name = f"d{len(self.devices):02}"
        self.devices[name] = Device(name, self.rng.choice(["stable", "stable", "beta"]))
        self.present.add(name)
        self.hello(name)

    def switch(self):
        """A device goes, or comes back, perhaps in another channel, with another wish of its owner, another clock."""
        if not self.devices:
            return
        name = self.rng.choice([*self.devices])
        self.present ^= {name}
        if name in self.present:
            device = self.devices[name]
            device.channel = self.rng.choice(["stable", "beta", device.channel, device.channel])
            device.kept = self.rng.choice(["", "", "by hand"])
            device.clock_is_wrong = self.rng.random() < 0.1
            self.hello(name)

    def wait_for_long(self):
        self.wait(3600.0 * self.rng.random())

    def check(self):
        self.rollout.tick()
        book = self.rollout.book
        now = self.now()
        self.twin.read(self.state.journal)
        assert book == book_of(self.state.journal), "restart equality"
        for name in self.devices:
            known = book.devices[name]
            wanted = book.release_for(book.devices[name], now)
            seen = Device(name, known.channel, known.runs)
            assert (seen.runs if wanted is None else wanted.bundle_id) == self.twin.wanted(seen, now)
        for release in book.releases:
            if not release.plan.canary:
                continue
            size = book.canary_size(release)
            self.largest[release.number] = max(size, self.largest.get(release.number, 0))
            alone = [
                a for a in release.canary if book.release_for(book.devices[a], now) is release and not release.promoted
            ]
            assert sum(book.pin(a, now) is None for a in alone) <= self.largest[release.number]

    def settle(self):
        """Everybody present comes to run what it is to run, whatever was lost before."""
        for device in self.devices.values():
            device.kept = ""
            device.clock_is_wrong = False
        for name in sorted(self.present):
            self.hello(name)
        for _ in range(SETTLES):
            self.clock += 0.3
            self.check()
            for _ in range(2):
                self.wait(700.0)
        self.check()
        for name in sorted(self.present):
            device = self.devices[name]
            if (wanted := self.twin.wanted(device, self.now()))[:1] not in BAD:
                assert device.runs == wanted, name


class Roster:
    """`World` as a roster."""

    def __init__(self, world):
        self._world = world

    def get(self, _agent):
        return None

    def present(self, tier):
        return self._world.present_devices()


def walk(folder, seed, bad, monkeypatch):
    """The book after a random walk in which everything was checked after each step."""
    rng = random.Random(seed)
    with StateFolder(folder).look(create=True) as state:
        state.journal.request_run(fact_of("run_requested", {"id": f"run-0001-{'0' * 32}"}))
        world = World(state, rng, bad, monkeypatch)
        steps = [world.make, world.promote, world.hold, world.resume, world.rollback, world.pin, world.unpin]
        steps += [world.add, world.switch, world.switch, world.start, world.wait, world.wait, world.wait_for_long]
        for _ in range(4):
            world.add()
        for _ in range(STEPS):
            rng.choice(steps)()
            world.clock += 0.3
            world.check()
        world.settle()
        return book_of(state.journal)


@pytest.mark.parametrize("seed", range(40))
def test_devices_run_what_their_operator_wants_in_random_walks(tmp_path, seed, monkeypatch):
    walk(tmp_path, seed, 0.25, monkeypatch)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_speaks_against_good_bundles_in_random_walks(tmp_path, seed, monkeypatch):
    """Pins and their ends, other channels, wrong clocks, owners who keep a bundle are no fault of a release."""
    releases = walk(tmp_path, seed, 0.0, monkeypatch).releases
    assert not any(release.count["failed"] for release in releases)
    assert {release.held for release in releases} <= {"", "operator"}
    assert {one.made.by for one in releases if one.rolls_back} <= {"operator"}
