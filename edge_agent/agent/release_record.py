"""Releases as one device knows them: the bundle in use and on trial, refused and pinned ones, and one that waits."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ..core.config import AgentConfig
from ..core.errors import HeadwaterError, StateError, UsageError, cause
from ..core.locks import waited_lock
from ..core.own_folders import FolderKind, holds_only, remove_folder
from ..core.storage import read_json, write_json
from ..core.task import Frozen
from ..core.time_and_text import moment_of, utc_text
from ..wire.messages.down import Install
from ..wire.messages.fields import FederationId

log = logging.getLogger(__name__)

PROVEN_S = 300.0
"""An agent that has been up for so long lives with the bundle in use."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

MOST_STARTS = 3
"""Starts that may end earlier; after that the agent uses the bundle before again."""

MOST_REFUSED = 8
"""Bundles that were refused, of which the reason is known."""


def machine_start() -> str:
    """Return what the kernel calls this start of the machine: another text after each; empty where it does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()[:64]
    except (OSError, ValueError):
        return ""


class _Released(Frozen):
    """A bundle, the number of its release, and the federation that counts it; 0 where it came by hand."""

    bundle_id: str
    release: int = Field(0, ge=0)
    federation: FederationId = ""


class _Taken(_Released):
    """The bundle that was taken last; none where the id is empty."""

    bundle_id: str = ""


class RolledBack(Frozen):
    """Another bundle was installed by hand in place of ``source``."""

    source: _Taken
    runs: str
    """Id of the bundle that is to stay."""

    def is_over_with(self, message: Install) -> bool:
        """Return whether a release ends the rollback: a newer one, of another bundle."""
        # The numbers of another federation say nothing about those of this one.
        newest = self.source.release if self.source.federation == message.federation else 0
        return message.bundle_id != self.source.bundle_id and message.release > newest

    def __str__(self) -> str:
        source = self.source
        by_release = f" (release {source.release})" if source.release else ""
        return (
            f"keeps bundle {self.runs[:12]}: this device was rolled back by hand from bundle "
            f"{source.bundle_id[:12]}{by_release}; it takes a newer release"
        )


class Refused(_Released):
    """A bundle that this device tried and does not use."""

    reason: str
    at: str
    crashed: bool = False
    """Whether the agent did not live with it; it is not tried again then."""

    def ends_agent_in(self, message: Install) -> bool:
        """Return whether a release holds this bundle, with which the agent has ended; a newer release may be tried."""
        is_same_bundle = self.crashed and self.bundle_id == message.bundle_id
        return is_same_bundle and self.federation == message.federation and message.release <= self.release


class Trial(_Released):
    """A bundle that is prepared, or is in use, and has yet to show that the agent lives with it."""

    starts: int = Field(0, ge=0)
    """Starts of the preparation, or of the agent with the bundle, that did not end well; the present one included."""

    machine: str = Field("", max_length=64)
    """Start of the machine, see `machine_start`, in which the last of them was; empty: unknown."""

    def with_start(self, machine: str) -> Trial:
        """Return the trial with one more start, in this start of the machine.

        The start before does not count where the machine has started since: power was cut, or somebody restarted it,
        which says nothing against the bundle. Where this is unknown, it counts.
        """
        is_same_machine_start = not machine or not self.machine or machine == self.machine
        starts = self.starts + 1 if is_same_machine_start else max(self.starts, 1)
        return self.model_copy(update={"starts": starts, "machine": machine})

    def without_start(self) -> Trial:
        """Return the trial without the last start, which was ended on purpose."""
        return self.model_copy(update={"starts": max(0, self.starts - 1)})


class Pin(Frozen):
    """The owner keeps a bundle, whatever is released, until a moment (ISO 8601; empty: until it is unpinned)."""

    bundle_id: str
    reason: str
    until: str = ""

    def holds(self, now: float) -> bool:
        """Return whether it counts at that time (as `time.time`)."""
        return not self.until or now < moment_of(self.until).timestamp()

    def __str__(self) -> str:
        until = f" until {self.until}" if self.until else ""
        return f"keeps bundle {self.bundle_id[:12]}: pinned on this device{until}: {self.reason}"


class _Record(Frozen):
    """The content of ``releases.json``."""

    taken: _Taken = _Taken()
    rolled_back: RolledBack | None = None
    refused: tuple[Refused, ...] = ()
    prepared: Trial | None = None
    """A bundle whose preparation has begun and not ended."""

    is_preparing: bool = False
    """Whether that is under way; where the agent starts: whether it did not survive it."""

    on_trial: Trial | None = None


class ReleaseRecord:
    """The record in one agent's state folder; the agent's loop and its worker may change it at the same time.

    Pins are in a file of their own, because commands write it while the agent runs.
    """

    def __init__(self, state: Path) -> None:
        self._path = state / "releases.json"
        self._pin_path = state / "pin.json"
        self._bundles = state / "bundles"
        self._lock = threading.RLock()
        self.on_trial: Trial | None = None
        """The bundle in use, where this agent has started it or started with it, and has yet to show that it lives with
        it: call `end_trial` then."""

    def begin_preparation(self, message: Install, machine: str = "") -> int:
        """Note that the preparation of a bundle begins, in this start of the ``machine``, and return its number.

        That is 1, and one more for each preparation of it in a row that the agent did not survive; see
        `Trial.with_start`.
        """
        with self._lock:
            before = self._read()
            about = _about(message)
            last = before.prepared
            if last is None or last.model_dump(include={*about}) != about:
                last = Trial(**about)
            trial = last.with_start(machine)
            self._write(before.model_copy(update={"prepared": trial, "is_preparing": True}))
            return trial.starts

    def end_preparation(self) -> None:
        """Note that the preparation has ended without saying anything of the bundle."""
        with self._lock:
            self._write(self._read().model_copy(update={"prepared": None, "is_preparing": False}))

    def note_installed(self, message: Install, machine: str = "") -> None:
        """Note that the bundle of this release is in use now, on trial, since this start of the ``machine``."""
        about = _about(message)
        with self._lock:
            refused = tuple(bundle for bundle in self._read().refused if bundle.bundle_id != message.bundle_id)
            trial = Trial(**about, machine=machine)
            self._write(_Record(taken=_Taken(**about), refused=refused, on_trial=trial))
            self.on_trial = trial

    def refuse(self, message: Install, reason: str, at: float, *, crashed: bool = False) -> None:
        """Note that the bundle of this release was tried, and is not used."""
        with self._lock:
            self._write(_refused(self._read(), _about(message), reason, at, crashed=crashed))

    def count_start(self, machine: str = "") -> Trial | None:
        """Count a start of the agent; returns the bundle on trial, None where there is none.

        ``machine``: as for `note_installed`. Where the agent ended in the preparation of another bundle, that one is to
        blame.
        """
        with self._lock:
            before = self._read()
            trial = before.on_trial
            if trial is not None:
                if before.is_preparing:
                    trial = trial.without_start()
                trial = trial.with_start(machine)
            if trial is not None or before.is_preparing:
                self._write(before.model_copy(update={"on_trial": trial, "is_preparing": False}))
            self.on_trial = trial
            return trial

    def note_stop(self) -> None:
        """Note that the agent was stopped on purpose: neither this start counts nor the preparation that it ends."""
        with self._lock:
            before = self._read()
            changes: dict[str, Any] = {}
            if before.on_trial is not None:
                changes["on_trial"] = before.on_trial.without_start()
            if before.is_preparing and before.prepared is not None:
                changes |= {"prepared": before.prepared.without_start(), "is_preparing": False}
            if changes:
                self._write(before.model_copy(update=changes))

    def end_trial(self, trial: Trial) -> None:
        """Note that the agent lives with this bundle; without effect where another one is on trial meanwhile."""
        with self._lock:
            if self.on_trial == trial:
                self._write(self._read().model_copy(update={"on_trial": None}))
                self.on_trial = None

    def note_fallback(self, trial: Trial, runs: str, at: float) -> None:
        """Note that the agent did not live with a bundle, and uses the one before again."""
        reason = (
            f"keeps bundle {runs[:12]} because the agent ended {trial.starts - 1} times within {PROVEN_S:.0f} s of its "
            f"start with bundle {trial.bundle_id[:12]}"
        )
        with self._lock:
            before = self._read().model_copy(update={"on_trial": None})
            self._write(_refused(before, _about(trial), reason, at, crashed=True))
            self.on_trial = None

    def refused(self) -> tuple[Refused, ...]:
        """Return bundles that were tried and are not used, the latest last."""
        return self._read().refused

    def pin(self, pin: Pin | None) -> None:
        """Keep the bundle in use; None: take releases again.

        Raises:
            UsageError: another bundle is in use.
        """
        if pin is None:
            self._pin_path.unlink(missing_ok=True)
            return
        from ..bundle.installed import current_id

        with waited_lock(self._bundles):
            runs = current_id(self._bundles)
            if runs != pin.bundle_id:
                raise UsageError(
                    f"{self._bundles}: bundle {runs[:12] or 'none'} is in use now, expected {pin.bundle_id[:12]}: the "
                    "agent has just switched; look at 'edge-agent status', and pin again"
                )
            write_json(self._pin_path, pin.model_dump(mode="json"))

    @contextlib.contextmanager
    def switching(self, message: Install, now: float) -> Iterator[str]:
        """Keep commands from pinning the bundle in use for the moment of the switch; gives `why_declined`."""
        with waited_lock(self._bundles):
            yield self.why_declined(message, now)

    def pinned(self) -> Pin | None:
        """Return the pin, also one that is over; None where there is none.

        Raises:
            StateError: its file is damaged.
        """
        raw = read_json(self._pin_path)
        try:
            pin = None if raw is None else Pin.model_validate(raw)
            if pin is not None and pin.until:
                moment_of(pin.until)
        except (ValidationError, UsageError) as error:
            raise StateError(f"{self._pin_path}: not what 'edge-agent pin' writes; remove it to unpin") from error
        return pin

    def release_of(self, bundle_id: str) -> int | None:
        """Return the number of the release by which a bundle came.

        It is None where the bundle came by hand, or is not the one that was taken last.
        """
        newest = self._read().taken
        # Number 0 means that the bundle came by hand.
        if newest.bundle_id != bundle_id or newest.release == 0:
            return None
        return newest.release

    def check(self) -> None:
        """Return quietly where the record can be read, or there is none yet.

        Raises:
            StateError: it is damaged.
        """
        self._read()

    def put_by_hand(self, bundle_id: str, instead_of: str) -> RolledBack | None:
        """Note a bundle that came by hand, ``instead_of`` another (empty: of none); return the rollback that now holds.

        Installing again the bundle that was rolled back ends the rollback.
        """
        before = self._read()
        if bundle_id == instead_of:
            return before.rolled_back
        if before.rolled_back is not None and bundle_id == before.rolled_back.source.bundle_id:
            self._write(_Record(taken=before.rolled_back.source, refused=before.refused))
            return None
        if before.rolled_back is not None:
            source = before.rolled_back.source
        elif instead_of:
            source = before.taken if before.taken.bundle_id == instead_of else _Taken(bundle_id=instead_of)
        else:
            return None
        now = RolledBack(source=source, runs=bundle_id)
        self._write(_Record(rolled_back=now, refused=before.refused))
        return now

    def why_declined(self, message: Install, now: float) -> str:
        """Return why this device does not even try a release; empty where it does. ``now``: as `time.time`."""
        # Its owner's pin counts before anything else.
        record = self._read()
        pin = self.pinned()
        if pin is not None and pin.holds(now):
            return "" if message.bundle_id == pin.bundle_id else str(pin)
        for refused in record.refused:
            if refused.ends_agent_in(message):
                return refused.reason
        # After a rollback by hand a newer release of another bundle is taken.
        if record.rolled_back is None or record.rolled_back.is_over_with(message):
            return ""
        return str(record.rolled_back)

    def kept(self, now: float) -> str:
        """Return why this device keeps its bundle by its owner's choice; empty where it does not."""
        pin = self.pinned()
        if pin is not None and pin.holds(now):
            return str(pin)
        return self.rolled_back()

    def rolled_back(self) -> str:
        """Return that another bundle was installed by hand in place of a release, and which; else empty."""
        rolled_back = self._read().rolled_back
        return "" if rolled_back is None else str(rolled_back)

    def _read(self) -> _Record:
        """Return the record; an empty one where nothing was written yet.

        Raises:
            StateError: its file is damaged.
        """
        raw = read_json(self._path)
        try:
            return _Record() if raw is None else _Record.model_validate(raw)
        except ValidationError as error:
            raise StateError(
                f"{self._path}: not what an agent writes; remove it to take every release again"
            ) from error

    def _write(self, record: _Record) -> None:
        """Replace the record on the disk."""
        write_json(self._path, record.model_dump(mode="json"))


def _about(message: Install | Trial) -> dict[str, Any]:
    """Return the fields of `_Released` for a release."""
    return {"bundle_id": message.bundle_id, "release": message.release, "federation": message.federation}


def _refused(before: _Record, about: dict[str, Any], reason: str, at: float, *, crashed: bool) -> _Record:
    """Return the record with one refused bundle more, and nothing that is prepared."""
    new = Refused(**about, reason=reason[:1000], at=utc_text(at), crashed=crashed)
    earlier = [bundle for bundle in before.refused if bundle.bundle_id != new.bundle_id]
    latest = (*earlier, new)[-MOST_REFUSED:]
    return before.model_copy(update={"refused": latest, "prepared": None, "is_preparing": False})


START_GRACE_S = 60.0
"""After its start an agent leaves its coordinator so long to say that a bundle is not to be used any more."""

CLOCK_OFF_S = 30 * 86_400.0
"""A clock that is so long after the time to switch is taken to be wrong: devices are seldom off for longer."""


class Waiting(Frozen):
    """A bundle that waits for the time to switch to it; times as `time.time`, because a restart ends other clocks."""

    install: Install
    at: float
    """When the device was asked."""

    opens: float
    """From when on the device may switch."""

    closes: float | None = None
    """Until when it may; None: as long as its clock can be right."""

    @classmethod
    def of(cls, install: Install, now: float) -> Waiting:
        """Return what an offer that has just come means."""
        opens = now + install.activate_in_s
        closes = None
        if install.activate_within_s is not None:
            closes = opens + install.activate_within_s
        return cls(install=install, at=now, opens=opens, closes=closes)

    def is_open(self, now: float) -> bool:
        """Return whether the device may switch at that time by its clock."""
        closes = self.opens + CLOCK_OFF_S if self.closes is None else self.closes
        return self.opens <= now <= closes

    def why_not(self, now: float) -> str:
        """Return why the device cannot know by its clock when to switch, and waits for its coordinator.

        It is empty where it can.
        """
        clock = f"its clock says {utc_text(now)}" if abs(now) < 1e11 else "its clock is out of range"
        about = f"bundle {self.install.bundle_id[:12]} waits for the coordinator: {clock}"
        if now < self.at:
            return f"{about}, before {utc_text(self.at)}, when the bundle was offered; set the clock"
        if now > self.opens + CLOCK_OFF_S:
            return f"{about}, long after {utc_text(self.opens)}, when the device was to switch; set the clock"
        return ""


class WaitFile:
    """What a device waits for, in its state folder."""

    def __init__(self, state: Path) -> None:
        self._path = state / "waits.json"

    def write(self, waiting: Waiting) -> None:
        """Save it. On a disk that cannot be written, a restart forgets it, and the coordinator offers it again."""
        try:
            write_json(self._path, waiting.model_dump(mode="json"))
        except OSError as error:
            log.warning("wait_not_written path=%s reason=%s", self._path, cause(error))

    def read(self) -> Waiting | None:
        """Return what was saved; None where nothing was, or it is damaged."""
        try:
            raw = read_json(self._path)
            return None if raw is None else Waiting.model_validate(raw)
        except (StateError, ValidationError) as error:
            log.warning("wait_unreadable path=%s reason=%s", self._path, cause(error))
            return None

    def remove(self) -> None:
        """Note that the device waits for nothing."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


_OF_A_HEAD = re.compile(r"head\.json|before\.json|arrays-[0-9a-f]{16}\.safetensors|\..+\.[0-9a-f]{8}\.tmp")


def _is_earlier_candidate(folder: Path) -> bool:
    """Return whether a folder without a mark is one that an earlier version made for a candidate."""
    return holds_only(folder, _OF_A_HEAD)


CANDIDATE_FOLDER = FolderKind("candidate head", _is_earlier_candidate)


def candidate_folder(config: AgentConfig) -> Path:
    """Return where the head of a bundle that is not in use yet is put."""
    return config.state / "candidate"


def clean(config: AgentConfig) -> None:
    """Remove what is left of a bundle that did not come into use, and take its head back: a kill may have left it."""
    from ..bundle import installed
    from ..heads import saved

    root = config.state / "bundles"
    remove_folder(candidate_folder(config), CANDIDATE_FOLDER)
    try:
        manifest = installed.current_manifest(root)
        if manifest is not None:
            fingerprints = {name: variant.fingerprint for name, variant in manifest.variants.items()}
            saved.settle(config.state / "head", fingerprints)
        installed.remove_unused(root)
    except (HeadwaterError, OSError) as error:  # a damaged pair: nothing is known of what is to stay; or a full disk
        log.warning("not_cleaned reason=%s", error)
