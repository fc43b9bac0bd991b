"""What the journal says of each agent: its newest report at the end of a run, or about a release."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..journal.entries import DeviceReported, ReleaseReported, RunningFigures
from ..journal.kinds import Kind
from ..journal.store import Entry
from .candidate import SCOPES, Candidate, accuracies_of
from .releases import Book
from .values import as_number, as_text

REPORTS: tuple[Kind, ...] = ("release_reported", "device_reported")
"""Kinds of entries that a `FleetView` takes."""


@dataclass(slots=True)
class Reported:
    """What an agent has reported of the bundle that it runs, after its newest entries."""

    acc: dict[str, float | None] = field(default_factory=dict)
    """Scope (local, global, personal) -> accuracy, 0..1; None: not measured."""

    better_alone: bool = False
    rss_mb: float | None = None
    tier: str = ""
    run: str = ""
    """The run at whose end it reported last; empty: it has not."""

    samples: int | None = None
    bundle_id: str = ""
    head: str = ""
    candidate: Candidate | None = None
    """A bundle that it has tried last and does not run."""

    support: int | None = None
    """The held-out samples behind the accuracies."""

    def add(self, entry: Entry, book: Book) -> None:
        """Take a newer entry of `REPORTS` about this agent.

        Args:
            entry: The entry.
            book: The releases, which entries of earlier versions name by their numbers.
        """
        fact = entry.fact
        if isinstance(fact, ReleaseReported):
            self._add_result_of_run(entry.run or "", fact)
        elif isinstance(fact, DeviceReported):
            self.tier = "head"
            if fact.running is None:
                self._add_result_of_earlier_version(fact, book)
            else:
                self._take_figures(fact.running)
                self.candidate = Candidate.from_fact(fact.candidate)

    def _add_result_of_run(self, run: str, fact: ReleaseReported) -> None:
        """Take the report of an agent at the end of a run, whose figures are of the encoder of that run."""
        self.run = run
        self.tier = as_text(fact.tier)
        self.bundle_id = as_text(fact.runs)
        self.samples = fact.samples
        reason = as_text(fact.rolled_back or "")
        if not reason:
            self._take_figures(fact)
            self.candidate = None
            return
        # It has rolled the encoder back: the figures are those of a candidate, and of its own pair it has said only
        # the accuracy beside.
        self._take_accuracy_of_own_pair(fact.before)
        acc = accuracies_of(fact.acc or {})
        self.candidate = Candidate(as_text(fact.about or ""), self.run, fact.release, reason, acc)

    def _take_figures(self, figures: ReleaseReported | RunningFigures) -> None:
        """Take figures of the bundle that the agent runs."""
        acc = figures.acc or {}
        self.acc = {scope: as_number(acc.get(scope)) for scope in SCOPES}
        self.better_alone = figures.better_alone
        self.rss_mb = as_number(figures.rss_mb) or None
        self.head = as_text(figures.head)
        self.support = figures.support

    def _add_result_of_earlier_version(self, fact: DeviceReported, book: Book) -> None:
        """Take the result of a release from a version that did not say which bundle the figures are of.

        They are of the release's bundle, which the device runs, or has tried and gone back from.
        """
        result = fact.result
        if result is None:
            return
        personal = as_number(result.acc)
        release = book.get(fact.release)
        if release is None or release.bundle_id == fact.runs:
            if personal is not None:
                self.acc = {**self.acc, "personal": personal}
                self.support = result.support or self.support
            self.candidate = None
            return
        self._take_accuracy_of_own_pair(result.before)
        acc = {} if personal is None else {"personal": personal}
        self.candidate = Candidate(release.bundle_id, release.run, fact.release, as_text(result.reason), acc)

    def _take_accuracy_of_own_pair(self, before: object) -> None:
        """Take acc.personal of the pair that the device kept, as it was measured beside the candidate."""
        personal = as_number(before)
        if personal is not None:
            self.acc = {**self.acc, "personal": personal}


class FleetView:
    """Agent -> what it has reported. In a `Follower` it comes after the book of releases, which it looks into."""

    kinds = REPORTS

    def __init__(self, book: Book) -> None:
        self.reported: dict[str, Reported] = {}
        self._book = book

    def add(self, entry: Entry) -> None:
        """Take the next entry of `REPORTS`."""
        if entry.agent is not None:
            self.reported.setdefault(entry.agent, Reported()).add(entry, self._book)


def reported_by(entries: Iterable[Entry], book: Book) -> dict[str, Reported]:
    """Return agent -> what it has reported, of entries in order."""
    view = FleetView(book)
    for entry in entries:
        view.add(entry)
    return view.reported
