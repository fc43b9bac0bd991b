"""A bundle that a device has tried and rolled back, with its accuracies, beside the bundle that the device runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..journal.entries import TriedBundle
from .values import as_number, as_text

if TYPE_CHECKING:
    from edge_agent.wire.messages.up import Report

SCOPES = ("local", "global", "personal")


@dataclass(frozen=True)
class Candidate:
    """A bundle that a device has tried and rolled back, as the device reported it."""

    bundle_id: str
    """Id of the bundle; empty where an earlier version did not record it."""

    run: str = ""
    """The run that the bundle is of."""

    release: int = 0
    """Number of the release that offered the bundle; 0: no release did."""

    reason: str = ""
    """Why the device rolled the bundle back."""

    acc: Mapping[str, float] = field(default_factory=dict)
    """Scope (local, global, personal) -> accuracy on the device, 0..1; empty where it was not measured."""

    @classmethod
    def from_report(cls, report: Report) -> Candidate | None:
        """Return the candidate that a report is about; None where the device runs the bundle of the report."""
        runs_it = report.bundle_id != "" and report.about == report.bundle_id
        if not report.rolled_back or runs_it:
            return None
        acc = {}
        # Accuracies without held-out samples say nothing.
        if report.samples:
            reported = {"local": report.acc_local, "global": report.acc_global, "personal": report.acc_personal}
            acc = {scope: value for scope, value in reported.items() if value is not None}
        return cls(report.about, report.run, report.release, report.rolled_back[:500], acc)

    @classmethod
    def from_fact(cls, fact: TriedBundle | None) -> Candidate | None:
        """Return the candidate in an entry of the journal; None where there is none."""
        if fact is None:
            return None
        acc = accuracies_of(fact.acc or {})
        return cls(as_text(fact.bundle_id), as_text(fact.run), fact.release, as_text(fact.reason), acc)

    def to_fact(self) -> TriedBundle:
        """Return the candidate for an entry of the journal."""
        return TriedBundle(
            bundle_id=self.bundle_id, run=self.run, release=self.release, reason=self.reason, acc=dict(self.acc)
        )

    @classmethod
    def from_body(cls, body: object) -> Candidate | None:
        """Return the candidate in the status; None where there is none."""
        if not isinstance(body, dict):
            return None
        acc = body.get("acc")
        return cls(
            as_text(body.get("bundle_id") or ""),
            as_text(body.get("run") or ""),
            int(as_number(body.get("release")) or 0),
            as_text(body.get("reason") or ""),
            accuracies_of(acc if isinstance(acc, dict) else {}),
        )

    def body(self) -> dict[str, Any]:
        """Return the candidate as JSON, for the status."""
        return {
            "bundle_id": self.bundle_id,
            "run": self.run,
            "release": self.release,
            "reason": self.reason,
            "acc": dict(self.acc),
        }

    @property
    def note(self) -> str:
        """The line of a status that says which encoder the device rolled back, and why."""
        return f"rolled back the encoder of {self.run or 'a run'}: {self.reason}"


def accuracies_of(body: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracies of an entry by scope; unknown ones are left out."""
    known = {scope: as_number(body.get(scope)) for scope in SCOPES}
    return {scope: value for scope, value in known.items() if value is not None}
