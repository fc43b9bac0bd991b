"""The long form of a comparison: one line for each client of each run, as CSV and parquet."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from edge_agent.data.columns import import_pyarrow

from .records import ClientScore, Comparison, MethodRecord, SeedRun
from .table_formats import csv_bytes

CLIENT_COLUMNS = ("row", "method", "parameters", "seed", "client", "samples", "accuracy")
"""Columns of the long form: one line for each client of each run; ``parameters`` is ``chosen`` or ``defaults``."""


@dataclass(frozen=True)
class ClientLine:
    """One client of one run, in the long form."""

    row: str
    method: str
    parameters: str
    seed: int
    client: str
    samples: int
    accuracy: float


def client_lines(comparison: Comparison) -> Iterator[ClientLine]:
    """Yield every client of every run that did not fail, those without test samples included."""
    for record in comparison.methods:
        for parameters, runs in (("chosen", record.runs), ("defaults", record.untuned)):
            for run in runs:
                if not run.failure:
                    yield from (_client_line(record, parameters, run, client) for client in run.clients)


def _client_line(record: MethodRecord, parameters: str, run: SeedRun, client: ClientScore) -> ClientLine:
    """Return one client of one run."""
    return ClientLine(
        record.name, record.method, parameters, run.seed, client.id, samples=client.samples, accuracy=client.accuracy
    )


def clients_csv(comparison: Comparison) -> bytes:
    """Return the long form of all clients, with the columns `CLIENT_COLUMNS`, as CSV in UTF-8."""
    lines = [tuple(vars(line).values()) for line in client_lines(comparison)]
    return csv_bytes(CLIENT_COLUMNS, lines)


def clients_parquet(comparison: Comparison) -> bytes:
    """Return the long form of all clients, with the columns `CLIENT_COLUMNS`, as a parquet file.

    Raises:
        MissingCapability: pyarrow is not installed.
    """
    pa = import_pyarrow("a parquet file of clients")
    from pyarrow import parquet

    types = (pa.string(), pa.string(), pa.string(), pa.int64(), pa.string(), pa.int64(), pa.float64())
    schema = pa.schema(list(zip(CLIENT_COLUMNS, types, strict=True)))
    lines = [vars(line) for line in client_lines(comparison)]
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(lines, schema), file)
    return file.getvalue()
