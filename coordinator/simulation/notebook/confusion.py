"""Which classes are taken for which: counts over the clients' test samples, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_agent.core.errors import UsageError

from ...report.charts import Matrix, clean
from ...report.pictures import picture
from ...text import counted
from .picture import Plot
from .restored import RestoredRun
from .tables import ShownTable, data_frame, joined, name_of

if TYPE_CHECKING:
    import pandas as pd

MOST_CLASSES = 12
"""Classes up to which all counts are shown; of more, those are listed that are taken for each other most often."""

MOST_PAIRS = 10


@dataclass(frozen=True, repr=False)
class Confusion:
    """Counts of test samples by their class and by the answer of the client that has them.

    Attributes:
        counts: (K, K) int64; row: the class, column: the answer.
        classes: The names of the K classes.
        clients: The clients whose samples are counted.
        left_out: Clients that keep no model, so that their answers are not known.
    """

    counts: np.ndarray
    classes: tuple[str, ...]
    clients: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """Share of samples (0..1) that were answered right, over all samples; None: there are none."""
        total = int(self.counts.sum())
        return float(np.trace(self.counts) / total) if total else None

    def to_pandas(self) -> pd.DataFrame:
        """Return the counts as a table; its rows are the classes, its columns the answers.

        Raises:
            MissingCapability: pandas is not installed.
        """
        names = list(self.classes)
        return data_frame(lambda pd: pd.DataFrame(self.counts, index=names, columns=names), "a table of answers")

    def plot(self, path: str | Path | None = None) -> Plot:
        """Shares of each class by answer; with ``path`` also written there, as SVG, PNG or PDF by its suffix.

        Raises:
            UsageError: ``path`` has another suffix, or cannot be written.
        """
        return Plot.of(lambda kind: picture([self._chart()], kind), path)

    def _chart(self) -> Matrix:
        totals = self.counts.sum(axis=1, keepdims=True)
        # A class without samples has no shares.
        shares = np.where(totals, self.counts / np.maximum(totals, 1), np.nan)
        names = tuple(clean(name) for name in self.classes)
        return Matrix(
            title=f"Answers of {self._whose()}",
            summary=f"Share of the test samples of each class by answer. {self._accuracy()}",
            row_label="class of the sample",
            column_label="answer",
            rows=names,
            columns=names,
            values=tuple(tuple(None if np.isnan(value) else float(value) for value in row) for row in shares),
            low=0.0,
            high=1.0,
            zero="·",
        )

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> ShownTable:
        caption = f"Answers to the test samples of {self._whose()}"
        if len(self.classes) > MOST_CLASSES:
            return ShownTable(caption, ("class", "answer", "samples"), tuple(self._pairs()), tuple(self._notes()))
        # Names are as long as 80 columns allow for all of them.
        width = max(3, 70 // (len(self.classes) + 1) - 2)
        names = [name_of(name, width) for name in self.classes]
        rows = [(name, *map(str, row.tolist())) for name, row in zip(names, self.counts, strict=True)]
        return ShownTable(caption, ("class", *names), tuple(rows), tuple(self._notes()))

    def _pairs(self) -> Iterator[tuple[str, str, str]]:
        """Yield the classes that are taken for each other most often: class, answer, samples."""
        wrong = self.counts.copy()
        np.fill_diagonal(wrong, 0)
        order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
        for position in order:
            row, column = divmod(int(position), len(self.classes))
            if wrong[row, column]:
                yield name_of(self.classes[row]), name_of(self.classes[column]), str(wrong[row, column])

    def _notes(self) -> Iterator[str]:
        yield self._accuracy()
        if len(self.classes) > MOST_CLASSES:
            yield f"the most frequent mistakes of {len(self.classes)} classes; .counts has all"
        if self.left_out:
            yield f"left out, because they keep no model: {joined(self.left_out)}"

    def _accuracy(self) -> str:
        total = int(self.counts.sum())
        if self.accuracy is None:
            return "There are no test samples."
        return f"{int(np.trace(self.counts))} of {counted(total, 'sample')} answered right ({self.accuracy:.4f})"

    def _whose(self) -> str:
        return f"client {name_of(self.clients[0])}" if len(self.clients) == 1 else counted(len(self.clients), "client")


def confusion_of(run: RestoredRun, clients: Sequence[str]) -> Confusion:
    """Return the counts over the test samples of some clients.

    Raises:
        UsageError: None of them keeps a model.
        StateError: The state of a client is damaged.
    """
    names = run.task.class_names
    left_out = [client for client in clients if client in run.without_model]
    counted_clients = [client for client in clients if client not in run.without_model]
    if not counted_clients:
        raise UsageError(f"{joined(left_out)}: without torch, or never trained, so no model of theirs is kept")
    counts = np.zeros((len(names), len(names)), np.int64)
    for client in counted_clients:
        answers = run.answers_of(client)
        np.add.at(counts, (answers.labels, answers.answers), 1)
    return Confusion(counts, names, tuple(counted_clients), tuple(left_out))
