"""The bundle in use on a device: which one it is, whether it is on trial, and which releases the device declines."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from ...core.config import AgentConfig
from ...core.errors import HeadwaterError, StateError
from ...privacy.policy import public_report
from ...wire.messages.down import Install
from ...wire.messages.up import Report
from ..release_record import MOST_STARTS, PROVEN_S, ReleaseRecord, Trial, clean

log = logging.getLogger(__name__)


class BundleInUse:
    """The bundle that a device uses now, with the record of its releases.

    A new bundle is on trial until the agent has lived with it. Where the agent ends again and again instead, the device
    uses the bundle before and declines the release from then on.
    """

    def __init__(self, config: AgentConfig, tier: str, now: Callable[[], float], machine: Callable[[], str]) -> None:
        """``now``: as `time.time`. ``machine``: which start of the machine this is."""
        self._config = config
        self._tier = tier
        self._now = now
        self.machine = machine
        self.rolled_back = ""
        """Why the newest release is not in use; empty: it is, or there was none."""

        self.releases = ReleaseRecord(config.state)
        self.bundle_id = self._running_bundle()
        """Id of the bundle in use; empty where there is none, or it and its head cannot be used together."""

        self._lived_with: Trial | None = None
        self._lived_since = 0.0

    def note_start(self) -> None:
        """Note that the agent starts: where it did not live with the bundle in use, use the one before again."""
        if self._tier != "head" or not (self._config.state / "bundles").is_dir():
            return
        clean(self._config)
        try:
            trial = self.releases.count_start(self.machine())
            if trial is not None and trial.starts > MOST_STARTS:
                self._fall_back(trial)
        except HeadwaterError as error:  # the pair in use stays
            log.warning("trial_unknown reason=%s", error)

    def note_stop(self) -> None:
        """Note that the agent stops on purpose, which says nothing against the bundle in use or one in preparation."""
        try:
            self.releases.note_stop()
        except StateError as error:
            log.warning("trial_unknown reason=%s", error)

    @property
    def on_trial(self) -> Trial | None:
        """The bundle in use, where it has yet to show that the agent lives with it: call `end_trial` then."""
        return self.releases.on_trial

    def note_life(self, now: float) -> None:
        """Note that the agent is alive; a bundle with which it was for `PROVEN_S` is on trial no longer.

        The time of another bundle begins again. Where the end of a trial cannot be written, it is tried again after as
        long.

        Args:
            now: The time on the agent's clock, in seconds.
        """
        trial = self.on_trial
        if trial is None:
            self._lived_with = None
        elif self._lived_with is None or self._lived_with != trial:
            self._lived_with = trial
            self._lived_since = now
        elif now - self._lived_since >= PROVEN_S:
            self._lived_since = now
            self.end_trial(trial)

    def end_trial(self, trial: Trial) -> None:
        """Note that the agent lives with the bundle that is, or was, in use."""
        try:
            self.releases.end_trial(trial)
        except StateError as error:
            log.warning("trial_unknown reason=%s", error)

    def decline(self, message: Install, samples: int) -> Report | None:
        """Return the report about a release that this device does not try, or None where it tries it.

        Its owner, or the agent's end with that bundle, is the reason.

        Args:
            message: The coordinator's order.
            samples: How many training samples the device has.

        Raises:
            StateError: the record of releases is damaged.
        """
        why = self.releases.why_declined(message, self._now())
        if not why:
            return None
        self.rolled_back = why
        report = Report(
            run=message.run,
            about=message.bundle_id,
            release=message.release,
            bundle_id=self.bundle_id,
            rolled_back=why[:1000],
            kept=self.kept(),
            samples=samples,
            metrics={"rolled_back": 1.0},
        )
        return public_report(self._config.privacy, report)

    def kept(self) -> str:
        """Return why this device keeps its bundle by its owner's choice; empty where it takes what is released."""
        try:
            return self.releases.kept(self._now())[:1000]
        except StateError:  # reported when a release comes
            return ""

    @property
    def lacks_head(self) -> bool:
        """Whether there is a bundle in use, and no head that was fitted on its features."""
        if self.bundle_id or self._tier != "head" or not (self._config.state / "bundles").is_dir():
            return False
        from ...bundle.installed import current_id

        try:
            return bool(current_id(self._config.state / "bundles"))
        except HeadwaterError:  # logged when it was looked at
            return False

    def _fall_back(self, trial: Trial) -> None:
        """Use the bundle before again, with its head where that is still here; otherwise it is fitted again.

        Raises:
            StateError: there is no bundle before.
            BundleError: it is damaged.
        """
        from ...bundle import installed
        from ...heads import saved

        folder = self._config.state / "bundles"
        if installed.current_id(folder) == trial.bundle_id:
            bundle = installed.rollback(folder)
            with contextlib.suppress(HeadwaterError):
                saved.restore(self._config.state / "head", bundle.fingerprints)
        self.bundle_id = self._running_bundle()
        self.releases.note_fallback(trial, installed.current_id(folder), self._now())
        self.rolled_back = self.releases.refused()[-1].reason
        log.error("fell_back bundle=%s reason=%s", trial.bundle_id[:12], self.rolled_back)

    def _running_bundle(self) -> str:
        """Return the id of the bundle in use; empty when there is none, or its head does not fit it."""
        folder = self._config.state / "bundles"
        if not folder.is_dir():
            return ""
        from ...bundle import installed
        from ...heads import saved

        try:
            current = installed.current(folder)
            if current is None:
                return ""
            saved.load(self._config.state / "head", current.fingerprints)
        except HeadwaterError as error:
            log.warning("pair_unusable reason=%s", error)
            return ""
        return current.id
