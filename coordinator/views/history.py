"""What an agent did before, line by line: its accuracies, bundles, pins and rejected updates."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass
from typing import Any

from ..journal.entries import (
    DevicePinned,
    DeviceReported,
    DeviceUnpinned,
    Outcome,
    ReleaseReported,
    UpdateAccepted,
    UpdateRefused,
)
from ..journal.kinds import Kind
from ..journal.store import Entry
from .candidate import SCOPES
from .releases import Book
from .values import as_number

KINDS: tuple[Kind, ...] = (
    "release_reported",
    "device_reported",
    "device_pinned",
    "device_unpinned",
    "update_refused",
)
"""Entries of an agent that have a line, beside ``update_accepted``, of which there is one in each round."""

Accuracies = dict[str, float | None]
"""Scope (local, global, personal) -> accuracy, 0..1; None: not measured."""


@dataclass(frozen=True)
class _Line:
    """A line of the history of an agent.

    Attributes:
        at: When its entry was written (ISO 8601, UTC).
    """

    at: str

    @property
    def accuracies(self) -> Accuracies:
        """The accuracies that the line shows; empty: it has none."""
        return {}

    @property
    def running_accuracies(self) -> Accuracies:
        """The accuracies of what the agent ran afterwards: not those of a bundle that it went back from."""
        return self.accuracies

    def to_json(self) -> dict[str, Any]:
        """Return the line as ``--json`` prints it."""
        return asdict(self)


@dataclass(frozen=True)
class AccuracyLine(_Line):
    """The accuracies that came with an update, or at the end of a run (``round`` is None)."""

    run: str | None
    round: int | None
    acc: Accuracies
    better_alone: bool = False
    rolled_back: str | None = None
    """Why the agent went back from the bundle that the accuracies are of; None: it did not."""

    bundle_id: str | None = None
    before: float | None = None
    """acc.personal of the pair that it has kept."""

    @property
    def accuracies(self) -> Accuracies:
        """The accuracies that were reported."""
        return {scope: as_number(self.acc.get(scope)) for scope in SCOPES}

    @property
    def running_accuracies(self) -> Accuracies:
        """The accuracies that were reported, or that of the pair which the agent has kept."""
        return _personal(self.before) if self.rolled_back else self.accuracies


@dataclass(frozen=True)
class BundleLine(_Line):
    """A bundle that a device ran or tried; ``outcome``, ``reason`` and accuracies are None where it only runs it."""

    bundle_id: str
    runs: str
    """Id of the bundle that it ran afterwards."""

    release: int | None
    kept: str | None
    """Why the device stays with its bundle by its owner's choice."""

    outcome: Outcome | None = None
    reason: str | None = None
    acc: float | None = None
    """acc.personal with the release's encoder."""

    before: float | None = None
    """acc.personal with the pair before, on the same held-out samples."""

    @property
    def accuracies(self) -> Accuracies:
        """The accuracy with the release's encoder."""
        return _personal(self.acc)

    @property
    def running_accuracies(self) -> Accuracies:
        """The accuracy with the release's encoder, or that of the pair to which the device went back."""
        return self.accuracies if self.bundle_id == self.runs else _personal(self.before)


@dataclass(frozen=True)
class PinLine(_Line):
    """A pin of a device; one that was ended has no release."""

    release: int | None
    until: str | None
    reason: str | None
    by: str | None


@dataclass(frozen=True)
class RejectedLine(_Line):
    """A rejected update."""

    run: str | None
    round: int | None
    reason: str


HistoryLine = AccuracyLine | BundleLine | PinLine | RejectedLine


def describe_entry(entry: Entry, book: Book) -> HistoryLine | None:
    """Return the line of a journal entry in the history of its agent.

    Args:
        entry: An entry of one of `KINDS`, or ``update_accepted``.
        book: The releases, which entries name by their numbers.

    Returns:
        The line; None where the entry says nothing to people.
    """
    fact = entry.fact
    if isinstance(fact, UpdateRefused):
        return RejectedLine(entry.at, entry.run, entry.round, fact.reason)
    if isinstance(fact, DevicePinned | DeviceUnpinned):
        return _describe_pin(entry, fact)
    if isinstance(fact, DeviceReported):
        return _describe_bundle(entry, fact, book)
    if isinstance(fact, UpdateAccepted):
        return _describe_update(entry, fact)
    if isinstance(fact, ReleaseReported):
        return _describe_end_of_run(entry, fact)
    return None


def _describe_pin(entry: Entry, fact: DevicePinned | DeviceUnpinned) -> PinLine:
    """Return the pin of a device, or that it was ended."""
    if isinstance(fact, DeviceUnpinned):
        return PinLine(entry.at, release=None, until=None, reason=None, by=fact.by)
    return PinLine(entry.at, fact.release, fact.until, fact.reason, fact.by)


def _describe_bundle(entry: Entry, fact: DeviceReported, book: Book) -> BundleLine | None:
    """Return what a device reported of a release; None for a device that has no bundle yet."""
    result = fact.result
    kept = fact.kept or None
    number = fact.release or None
    if result is None:
        if not fact.runs:
            return None
        return BundleLine(entry.at, fact.runs, fact.runs, number, kept)
    # Outcome and accuracy are of the release's bundle, which the device may have gone back from.
    release = book.get(fact.release)
    tried = fact.runs if release is None else release.bundle_id
    return BundleLine(
        entry.at, tried, fact.runs, number, kept, result.outcome, result.reason, result.acc, result.before
    )


def _describe_update(entry: Entry, fact: UpdateAccepted) -> AccuracyLine | None:
    """Return the accuracies that came with an update; None for one without any."""
    acc = {scope: fact.metrics.get(f"acc.{scope}") for scope in SCOPES}
    if all(value is None for value in acc.values()):
        return None
    return AccuracyLine(entry.at, entry.run, entry.round, acc)


def _describe_end_of_run(entry: Entry, fact: ReleaseReported) -> AccuracyLine:
    """Return the accuracies that an agent reports at the end of a run."""
    reported = fact.acc or {}
    return AccuracyLine(
        entry.at,
        entry.run,
        entry.round,
        {scope: reported.get(scope) for scope in SCOPES},
        fact.better_alone,
        rolled_back=fact.rolled_back or None,
        bundle_id=fact.about or None,
        before=fact.before,
    )


def _personal(accuracy: object) -> Accuracies:
    """Return an accuracy of the personal model by its scope; empty where it was not measured."""
    number = as_number(accuracy)
    return {} if number is None else {"personal": number}


class HistoryIndex:
    """Agent -> ids of its newest entries that have a line, oldest first; their bodies stay in the journal."""

    kinds = KINDS

    def __init__(self, most: int) -> None:
        """Hold at most twice ``most`` ids of each agent, and never fewer than ``most`` of those that there were."""
        self.ids: dict[str, array[int]] = {}
        self._most = most

    def add(self, entry: Entry) -> None:
        """Take the next entry of `KINDS`."""
        if entry.agent is None:
            return
        ids = self.ids.setdefault(entry.agent, array("q"))
        ids.append(entry.id)
        if len(ids) > 2 * self._most:
            del ids[: self._most]
