"""A bundle that a device has tried and does not run: kept apart from the bundle that it runs, with its accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .values import as_number, as_text

if TYPE_CHECKING:
    from edge_agent.wire.messages import Report

SCOPES = ("local", "global", "personal")


@dataclass(frozen=True)
class Candidate:
    """What a device says of a bundle that it was offered and went back from."""

    bundle_id: str
    """Empty where a version before did not note it."""

    run: str = ""
    """The run that the bundle is of."""

    release: int = 0
    """Number of the release by which it came; 0: by none."""

    reason: str = ""
    """Why the device does not run it."""

    acc: Mapping[str, float] = field(default_factory=dict)
    """Scope (local, global, personal) -> accuracy on the device, 0..1; empty where it was not measured."""

    @classmethod
    def from_report(cls, report: Report) -> Candidate | None:
        """Return the candidate that a report is about; None where the device runs what it is about."""
        if not report.rolled_back or report.about == report.bundle_id != "":
            return None
        reported = {"local": report.acc_local, "global": report.acc_global, "personal": report.acc_personal}
        acc = {scope: value for scope, value in reported.items() if value is not None} if report.samples else {}
        return cls(report.about, report.run, report.release, report.rolled_back[:500], acc)

    @classmethod
    def from_body(cls, body: object) -> Candidate | None:
        """Return the candidate in an entry of the journal or in the status; None where there is none."""
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
        """Return it as JSON, for the journal and the status."""
        return {
            "bundle_id": self.bundle_id,
            "run": self.run,
            "release": self.release,
            "reason": self.reason,
            "acc": dict(self.acc),
        }

    @property
    def note(self) -> str:
        """What is to be known of a device that went back from a bundle."""
        return f"rolled back the encoder of {self.run or 'a run'}: {self.reason}"


def accuracies_of(body: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracies of an entry by scope, without those that are not known."""
    known = {scope: as_number(body.get(scope)) for scope in SCOPES}
    return {scope: value for scope, value in known.items() if value is not None}
