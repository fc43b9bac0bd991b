"""``--log csv``: tables as CSV, which every program reads.

``rounds.csv`` has a line for each round, ``clients.csv`` one for each figure that a client has reported in a round
(round, client, metric, value), ``final_clients.csv`` one for each client after the run. `log_files` has the rest.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from edge_agent.core.storage import write_atomic

from .log_files import FolderLogger, LineFile
from .records import RoundResult, RunDescription, RunEnd, as_csv, client_rows, clients_table, columns_of_rounds

CLIENT_COLUMNS = ("round", "client", "metric", "value")


class CsvLogger(FolderLogger):
    """Writes the tables of a run as CSV files, a row at a time."""

    def begin(self, run: RunDescription) -> None:
        """Make the tables with their heads."""
        super().begin(run)
        self._columns = columns_of_rounds()
        self._rounds = LineFile(self.run_folder / "rounds.csv", _lines([self._columns]))
        self._clients = LineFile(self.run_folder / "clients.csv", _lines([CLIENT_COLUMNS]))
        self._clients_done = 0

    def log_round(self, row: RoundResult) -> None:
        """Add a line for the round, and one for each figure of a client."""
        if row.round > self._clients_done:  # else the round's own line failed before, and is tried again
            self._clients.append(_lines((row.round, *figures) for figures in client_rows(row.per_client)))
            self._clients_done = row.round
        metrics = {"round": row.round, **row.metrics()}
        self._rounds.append(_lines([[metrics.get(name) for name in self._columns]]))

    def end(self, end: RunEnd) -> None:
        """Write the table of clients after the run."""
        write_atomic(self.run_folder / "final_clients.csv", as_csv(*clients_table(end)).encode())
        super().end(end)


def _lines(rows: Iterable[Iterable[object]]) -> bytes:
    """Return rows as lines of CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
