"""All runs in the order of their requests, with what a list of them shows; `runs` has where each round stands."""

from __future__ import annotations

from dataclasses import dataclass

from ..journal.entries import BundleExported, RunCancelled, RunExtended, RunFailed, RunFinished, RunRequested
from ..journal.kinds import FINAL
from ..journal.store import Entry
from .values import as_text


@dataclass(frozen=True)
class RunBundle:
    """The bundle that a run has exported last."""

    fact: BundleExported
    digest: str
    """SHA-256 (hex) of its file, which is a blob."""

    at: str
    """When it was exported (ISO 8601, UTC)."""


@dataclass
class RunInfo:
    """One run as its entries in the journal have it; times are ISO 8601 in UTC, empty before they have come."""

    id: str
    request: RunRequested
    requested_at: str
    started_at: str = ""
    ended_at: str = ""
    status: str = "queued"
    reason: str = ""
    cancel_requested: bool = False
    bundle: RunBundle | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status in FINAL.values()

    @property
    def rounds(self) -> int:
        """The number of rounds that were requested."""
        return self.request.rounds

    def add(self, entry: Entry) -> None:
        """Take the next entry of this run."""
        fact = entry.fact
        if entry.kind == "run_started":
            self.status = "running"
            self.started_at = self.started_at or entry.at
        elif entry.kind == "cancel_requested":
            self.cancel_requested = True
        elif isinstance(fact, BundleExported):
            self.bundle = RunBundle(fact, entry.digest or "", entry.at)
        elif isinstance(fact, RunExtended):
            self.request = self.request.changed(rounds=fact.rounds)
            self.status = "running"
            self.ended_at = ""
            self.reason = ""
        elif isinstance(fact, RunFinished | RunFailed | RunCancelled):
            self.status = FINAL[entry.kind]
            self.ended_at = entry.at
            self.reason = as_text(fact.reason or "")


class RunList:
    """Name -> run, in the order of their requests."""

    kinds = ("run_requested", "run_started", "cancel_requested", "bundle_exported", "run_extended", *FINAL)

    def __init__(self) -> None:
        self.runs: dict[str, RunInfo] = {}

    def add(self, entry: Entry) -> None:
        """Take the next entry of `kinds`; one of a run that nobody has requested is passed over."""
        if entry.run is None:
            return
        if isinstance(entry.fact, RunRequested):
            self.runs[entry.run] = RunInfo(entry.run, entry.fact, entry.at)
        elif entry.run in self.runs:
            self.runs[entry.run].add(entry)
