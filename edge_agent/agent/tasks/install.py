"""Install a bundle that the coordinator has released: verify, test, refit, compare, and keep the better pair."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

from ...core.config import AgentConfig
from ...core.errors import BundleError
from ...privacy.policy import public_report
from ...wire.messages.down import Install
from ...wire.messages.up import Report
from ..release_record import MOST_STARTS
from .bundles import BundleInUse
from .purpose import Clock
from .resources import resident_mb


class HeadDevice(Protocol):
    """What the common part of an agent (`TaskRunner`) offers to tasks with bundles and heads."""

    config: AgentConfig
    """The device's configuration."""

    samples: int
    """How many training samples the device has; a task that reads them sets it."""

    bundles: BundleInUse
    """The bundle in use, which a task that switches it changes."""

    @property
    def now(self) -> Clock:
        """The wall clock, as `time.time`."""


class InstallTask:
    """The install of released bundles."""

    def __init__(self, *, beside: bool) -> None:
        """``beside``: whether new bundles are prepared in a child process."""
        self._beside = beside

    def run(self, device: HeadDevice, message: Install, path: Path) -> Report:
        """Verify a bundle, test it, refit the head and keep the better pair.

        The bundle is not tried, or not used, where its owner keeps another one meanwhile, nor where the agent has ended
        in `MOST_STARTS` preparations of it.

        Args:
            device: What the common part of the agent offers.
            message: The coordinator's order.
            path: The file of the bundle.

        Returns:
            The report, which says which bundle is in use now and why.

        Raises:
            BundleError: the bundle is damaged, or its encoder does not do what it did where it was made.
            DataError: local data do not fit its task.
        """
        bundles = device.bundles
        releases = bundles.releases
        declined = bundles.decline(message, device.samples)
        if declined is not None:
            return declined
        # This preparation is noted on disk before it begins: the agent may end in it.
        crashes = releases.begin_preparation(message, bundles.machine()) - 1
        has_crashed = crashes >= MOST_STARTS
        try:
            report = self._prepared(device, message, path, crashes)
        except BundleError as error:
            releases.refuse(message, str(error), device.now(), crashed=has_crashed)
            raise
        except Exception:
            releases.end_preparation()
            raise
        # The record says what became of the release: it is on trial, waits for its owner, or is not tried again.
        bundles.bundle_id = report.bundle_id
        bundles.rolled_back = report.rolled_back
        device.samples = report.samples
        if report.bundle_id == message.bundle_id:
            releases.note_installed(message, bundles.machine())
        elif report.kept:
            releases.end_preparation()
        else:
            releases.refuse(message, report.rolled_back, device.now(), crashed=has_crashed)
        memory = {"rss_mb": resident_mb(), "torch_loaded": "torch" in sys.modules}
        return public_report(device.config.privacy, report.model_copy(update=memory))

    def _prepared(self, device: HeadDevice, message: Install, path: Path, crashes: int) -> Report:
        """Return the report of the trial; a bundle in whose trial the agent has ended too often is not tried again.

        Raises:
            BundleError: as `run`.
            DataError: as `run`.
        """
        from ..candidate import prepare_beside
        from ..head_tier import install_bundle, prepare_here, rejected

        if crashes >= MOST_STARTS:
            why = f"the agent ended {crashes} times while it prepared bundle {message.bundle_id[:12]}"
            return rejected(device.config, message, BundleError(why, is_public=True)).report
        prepare = prepare_beside if self._beside else prepare_here
        return install_bundle(
            device.config,
            message,
            path,
            device.now,
            prepare=prepare,
            switching=lambda: device.bundles.releases.switching(message, device.now()),
        )
