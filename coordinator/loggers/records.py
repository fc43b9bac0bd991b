"""What a log gets of a run: its description, one row for each closed round, and how it has ended."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

Scalar = str | int | float | bool | None
"""A value that every log can hold."""

SCOPES = ("global", "personal", "after")
"""The scopes that the accuracies of a round can have: the shared model, the client's own, that after local training."""

ROUND_METRICS = ("clients", "loss", "seconds", "bytes_up", "bytes_down")
"""The figures of a round that are no accuracies, as `RoundResult.metrics` names them."""


@dataclass(frozen=True)
class Spread:
    """The accuracies of one scope over clients, 0..1."""

    mean: float
    """Mean over clients."""

    std: float
    """Standard deviation over clients."""

    worst_tenth: float
    """Mean of the worst tenth of the clients."""

    samples_mean: float
    """Mean over the test samples of all clients."""

    clients: int
    """Number of clients."""


@dataclass(frozen=True)
class RoundResult:
    """The figures of one closed round.

    Accuracies are those of the model that the round's clients received, before they trained: after round 1 they are
    those of the first weights.
    """

    round: int
    """Its number, from 1."""

    rounds: int
    """How many rounds are planned."""

    clients: int
    """Number of clients whose update is in the round."""

    acc: Mapping[str, Spread] = field(default_factory=dict)
    """Scope (``global``, ``personal``, ``after``) -> accuracy; only scopes that were evaluated."""

    loss: float | None = None
    """Mean over the clients of their training loss; None: none reported one."""

    seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    per_client: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Client -> what it has reported, such as ``acc.personal`` and ``loss``."""

    is_replayed: bool = False
    """Whether the round was closed before this process resumed the run."""

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy over clients, 0..1: of personal models where there are any, else of the shared one."""
        for scope in ("personal", "global"):
            if scope in self.acc:
                return self.acc[scope].mean
        return None

    def metrics(self) -> dict[str, float]:
        """Return all figures but those of single clients by name, such as ``acc.personal.worst_tenth``."""
        result: dict[str, float] = {}
        for scope, spread in self.acc.items():
            for name, value in asdict(spread).items():
                result[f"acc.{scope}.{name}"] = value
        for name in ROUND_METRICS:
            value = getattr(self, name)
            if value is not None:
                result[name] = value
        return result

    def without_clients(self) -> RoundResult:
        """Return the same without the figures of single clients, for logs that show none."""
        return replace(self, per_client={})


def columns_of_rounds() -> tuple[str, ...]:
    """Return the columns of a table of rounds: all metrics that any round can have, whichever scopes it evaluates."""
    figures = [f"acc.{scope}.{name}" for scope in SCOPES for name in Spread.__dataclass_fields__]
    return ("round", *ROUND_METRICS, *figures)


@dataclass(frozen=True)
class ParentRun:
    """The run that several others belong to, such as the seeds of one method."""

    uid: str
    name: str

    @property
    def label(self) -> str:
        """A name that no other run has, and that can be a folder's."""
        return label_of(self.name, self.uid)


@dataclass(frozen=True)
class RunDescription:
    """A run as a log gets it before the first round: its name, its folder and its parameters."""

    uid: str
    """Unique among all runs, the same after a resume: by it a log finds what it has written before."""

    name: str
    folder: Path
    """The run's own folder."""

    params: Mapping[str, Scalar] = field(default_factory=dict)
    """Settings and the method's parameters; names of nested ones are joined by dots."""

    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    parent: ParentRun | None = None
    is_parent: bool = False
    """Whether it has no rounds, and other runs belong to it."""

    @property
    def path(self) -> Path:
        """A relative path that no other run has, with the parent's folder first, for logs that are folders."""
        own = label_of(self.name, self.uid)
        return Path(own) if self.parent is None else Path(self.parent.label, own)


def short_id(uid: str, length: int = 8) -> str:
    """Return so many characters (at most 64) that tell runs apart, whatever form their ``uid`` has."""
    return hashlib.sha256(uid.encode()).hexdigest()[:length]


def label_of(name: str, uid: str) -> str:
    """Return a name that no other run has, without characters that a shell or a file system treats specially."""
    readable = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60]
    return f"{readable or 'run'}-{short_id(uid)}"


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended."""

    status: Literal["finished", "failed", "stopped"]
    """``stopped``: by the user; both that and a failed run can be resumed, and then end once more."""

    reason: str = ""
    """Why it failed, or ended before its last round; empty: neither."""

    round: int = 0
    """The last closed round."""

    figures: Mapping[str, float] = field(default_factory=dict)
    """Final figures by name, such as ``last.acc.personal.mean``."""

    clients: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Client -> its accuracies after the run: ``acc.local``, ``acc.global``, ``acc.personal``."""

    artefacts: Mapping[str, Path] = field(default_factory=dict)
    """File name -> a file that belongs to the result."""


def client_rows(metrics: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str, float]]:
    """Yield (client, metric, value), one row for each figure: clients may have reported different ones."""
    for client, figures in metrics.items():
        for name, value in figures.items():
            yield client, name, value


def clients_table(end: RunEnd) -> tuple[list[str], list[list[str | float | None]]]:
    """Return columns and rows of the table of all clients at the end: one row each, the worst personal accuracy first.

    A client without a figure has None in its column.
    """
    names = sorted({name for figures in end.clients.values() for name in figures})
    rows: list[list[str | float | None]] = []
    for client, figures in end.clients.items():
        rows.append([client, *(figures.get(name) for name in names)])
    by = names.index("acc.personal") + 1 if "acc.personal" in names else 0

    def rank(row: list[str | float | None]) -> tuple[bool, float, str]:
        value = row[by]
        is_number = isinstance(value, float)
        return not is_number, float(value) if isinstance(value, float) else 0.0, str(row[0])

    return ["client", *names], sorted(rows, key=rank)


def as_csv(columns: list[str], rows: list[list[str | float | None]]) -> str:
    """Return a table as CSV; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
