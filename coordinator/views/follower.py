"""How the folds of a process are kept up to date: each entry of the journal is read once and given to all of them.

A process that decides (the coordinator) or shows (web view, metrics, ``headwater logs``) holds some folds and one
follower. Which entries a fold takes is said by the fold alone, so that nothing is read for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..journal.store import PAGE, Entry, Journal, JournalStore


class Fold(Protocol):
    """What follows from the entries of some kinds, given in their order."""

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of entries that `add` takes."""

    def add(self, entry: Entry) -> None:
        """Take the next entry of these kinds."""


class Follower:
    """Reads on in a journal, and gives each entry to those of its folds that take its kind, in their order.

    Attributes:
        after: The id of the newest entry that the folds have; 0 before the first.
    """

    def __init__(self, journal: JournalStore, *folds: Fold, run: str | None = None) -> None:
        """Make a follower at the beginning of a journal.

        Args:
            journal: The entries.
            folds: What they are given to; of an entry that several take, the first is given it first.
            run: The run whose entries alone are read; None: all.
        """
        self.after = 0
        self._journal = journal
        self._folds = folds
        self._run = run

    def fetch(self, limit: int = -1) -> list[Entry]:
        """Return the entries after those that the folds have, at most ``limit`` of them (-1: all); `feed` them next."""
        kinds = dict.fromkeys(kind for fold in self._folds for kind in fold.kinds)
        return self._journal.entries(run=self._run, kinds=tuple(kinds), after=self.after, limit=limit)

    def feed(self, entries: Iterable[Entry]) -> None:
        """Give the folds what `fetch` has returned."""
        for entry in entries:
            self.after = entry.id
            for fold in self._folds:
                if entry.kind in fold.kinds:
                    fold.add(entry)

    def read(self, limit: int = -1) -> list[Entry]:
        """Give the folds the entries that follow, at most ``limit`` of them (-1: all), and return these."""
        entries = self.fetch(limit)
        self.feed(entries)
        return entries

    def catch_up(self, page: int = PAGE) -> None:
        """Give the folds all that was written, some entries at a time: a journal may be larger than the memory."""
        while self.read(page):
            pass


def reopen(journal: Journal) -> bool:
    """Open a journal that other processes write, where it is closed or another file has taken its place.

    Returns:
        Whether it was opened by this call: then it may be another journal, and folds begin again.

    Raises:
        StateError: There is no journal, or it cannot be read.
    """
    if not journal.is_in_place:
        journal.close()
    if journal.is_open:
        return False
    journal.open(create=False)
    return True
