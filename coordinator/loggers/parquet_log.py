"""``--log parquet``: the tables of `csv_log` as Parquet, with types, for pandas, Polars, DuckDB or Spark.

A Parquet file cannot grow: it is replaced by a longer one, never with every round, but when it has a sixteenth more
rounds than before, so that a run of many rounds writes each row some seventeen times and not a thousand. What came
since is written at the end, or comes again when the run is resumed.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, ClassVar

from edge_agent.core.storage import write_atomic

from .log_files import FolderLogger
from .records import (
    RoundResult,
    RunDescription,
    RunEnd,
    client_rows,
    clients_table,
    columns_of_rounds,
)

if TYPE_CHECKING:
    import pyarrow as pa

GROWTH = 16
"""The files are written again when they have this part more rounds."""


class ParquetLogger(FolderLogger):
    """Writes the tables of a run as Parquet files, again whenever they have grown enough."""

    package: ClassVar[str] = "pyarrow"
    extra: ClassVar[str] = "tables"

    def begin(self, run: RunDescription) -> None:
        """Write empty tables."""
        super().begin(run)
        self._rounds: list[pa.Table] = []
        self._clients: list[pa.Table] = []
        self._done = 0
        self._next = 1
        self._write()

    def log_round(self, row: RoundResult) -> None:
        """Take the figures of a round, and write the tables where they have grown enough."""
        if row.round > self._done:  # else the tables could not be written before, which is tried again
            self._rounds.append(_rounds_table([row]))
            self._clients.append(_clients_table([row]))
            self._done = row.round
        if row.round >= self._next:
            self._write()
            self._next = row.round + 1 + row.round // GROWTH

    def end(self, end: RunEnd) -> None:
        """Write all tables."""
        import pyarrow as pa

        self._write()
        columns, rows = clients_table(end)
        values = [[row[position] for row in rows] for position in range(len(columns))]
        kinds = [pa.string(), *(pa.float64() for _ in columns[1:])]
        arrays = [pa.array(column, kind) for column, kind in zip(values, kinds, strict=True)]
        self._write_table("final_clients", pa.Table.from_arrays(arrays, names=columns))
        super().end(end)

    def _write(self) -> None:
        """Replace both tables by what there is now, each as a whole."""
        import pyarrow as pa

        rounds = pa.concat_tables([_rounds_table([]), *self._rounds])
        clients = pa.concat_tables([_clients_table([]), *self._clients])
        self._write_table("rounds", rounds)
        self._write_table("clients", clients)
        self._rounds = [rounds]
        self._clients = [clients.combine_chunks()]

    def _write_table(self, name: str, table: pa.Table) -> None:
        from pyarrow import parquet

        content = io.BytesIO()
        parquet.write_table(table, content)
        write_atomic(self.run_folder / f"{name}.parquet", content.getvalue())


def _rounds_table(rows: list[RoundResult]) -> pa.Table:
    """Return the figures of rounds; what a round lacks is null."""
    import pyarrow as pa

    columns = columns_of_rounds()
    whole = {"round", "clients", "bytes_up", "bytes_down"}
    whole |= {name for name in columns if name.endswith(".clients")}
    metrics = [{"round": row.round, **row.metrics()} for row in rows]
    arrays = []
    for name in columns:
        kind = pa.int64() if name in whole else pa.float64()
        arrays.append(pa.array([figures.get(name) for figures in metrics], kind))
    return pa.Table.from_arrays(arrays, names=list(columns))


def _clients_table(rows: list[RoundResult]) -> pa.Table:
    """Return the figures that clients have reported in rounds: round, client, metric, value."""
    import pyarrow as pa

    figures = [(row.round, *figures) for row in rows for figures in client_rows(row.per_client)]
    kinds = (pa.int64(), pa.string(), pa.string(), pa.float64())
    arrays = []
    for position, kind in enumerate(kinds):
        arrays.append(pa.array([line[position] for line in figures], kind))
    return pa.Table.from_arrays(arrays, names=["round", "client", "metric", "value"])
