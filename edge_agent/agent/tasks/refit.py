"""Fit the head of the bundle in use again: after a bundle that came by hand, and when there are new samples."""

from __future__ import annotations

from .install import HeadDevice


class RefitTask:
    """The fit of a head for a bundle that was put on the device by hand."""

    def run(self, device: HeadDevice) -> None:
        """Fit the head that the configuration names for the bundle in use, after its self-test.

        Raises:
            BundleError: the bundle is damaged, or does not do what it did where it was made.
            DataError: local data do not fit its task.
        """
        from ..head_tier import refit_current

        device.bundles.bundle_id, device.samples = refit_current(device.config)


class CollectTask:
    """The fit of a head on samples that were added on the device."""

    def run(self, device: HeadDevice) -> bool:
        """Take in new samples, and refit where there are any, or no head.

        Returns:
            Whether the head was refitted.

        Raises:
            HeadwaterError: as `RefitTask.run`; the head in use stays.
        """
        from ..head_tier import collect

        refitted = collect(device.config, device.now, lacks_head=device.bundles.lacks_head)
        if refitted is None:
            return False
        device.bundles.bundle_id, device.samples = refitted
        return True
