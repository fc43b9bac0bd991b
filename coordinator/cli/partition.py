"""``headwater partition``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from edge_agent.core.config import parse
from edge_agent.core.errors import UsageError
from edge_agent.core.storage import write_atomic

from ..simulation.plan import Plan
from .options import Given, Json, Verbose, from_model
from .output import present, ready_for, set_up_logging, show, table
from .reading import shown_reading
from .simulate import sources

if TYPE_CHECKING:
    from edge_agent.data.partition import Division

    from ..simulation.datasets import ClassCounts

Rule = Annotated[
    str | None,
    typer.Argument(
        metavar="RULE",
        help="iid, dirichlet, pathological, quantity, fedpac, fedrir_dirichlet, fedrir_pathological, domains, "
        "subjects, users, or a saved partition.json to show.",
    ),
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="TABLE",
        help="Index table in place of a rule: CSV, Parquet or JSON with the columns client, row and perhaps part "
        "(train, test or validation).",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="File of the partition; default: partition.json, none for a saved one."),
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Plot of the classes of each client: .svg or .png.")]

SPLIT = ("test_fraction", "validation", "seed")
SHOWN_CLIENTS = 40
SHOWN_CLASSES = 12


@from_model(Plan, ("data", "clients", "alpha", "size", "test_size", "classes_each", "min_size", *SPLIT))
def partition(
    given: Given,
    rule: Rule = None,
    table: From = None,
    out: Out = None,
    plot: Plot = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Divide data among clients, and save who has which rows in a file that simulations and devices read.

    headwater simulate --partition partition.json divides as this file says, with any seed and method; a device takes
    its rows by partition = "partition.json" in the [data] of its configuration. Two files with the same hash give all
    clients the same samples.

    Where an index table has rows for validation, a second file beside the first, partition-validation.json, evaluates
    clients on these in place of the test samples: choose settings by it.

    Example: headwater partition dirichlet --alpha 0.3 --clients 10 --data digits:optdigits --plot who-has-what.svg
    """
    from ..report.page import source_name
    from ..report.pictures import format_of, picture
    from ..report.run_charts import MOST_PLOTTED
    from ..report.run_charts import partition as chart_of
    from ..simulation.datasets import class_counts, prepare
    from ..simulation.index_tables import division_for_validation

    set_up_logging(verbose=verbose, quiet=True)
    raw = {**given, "partition": _rule(rule, table), "data": sources(given.get("data")), "folder": str(Path.cwd())}
    plan = parse(Plan, raw, where="the partition")
    is_saved = plan.saved_partition is not None and table is None
    file = out or (None if is_saved else Path("partition.json"))
    kind = "svg" if plot is None else format_of(plot.suffix)
    validation_file = None
    if table is not None and file is not None:
        validation_file = file.with_name(f"{file.stem}-validation{file.suffix}")
    for path in filter(None, (file, plot)):
        ready_for(path)
    with shown_reading():
        pools, division, task = prepare(plan)
    counts = class_counts(division, pools, task.class_names)
    result = {
        **counts.to_json(),
        "file": None if file is None else str(file),
        "plot": None if plot is None else str(plot),
        "data": ", ".join(source_name(source) for source in plan.data),
    }
    if file is not None:
        try:
            _check_replaceable(file, division)
        except UsageError:
            # Who only looks at several partitions, one after another, has no use for the file.
            if not as_json:
                show(*_shape_of(counts))
            raise
        division.write(file)
    if table is not None and validation_file is not None:
        validation = division_for_validation(table, pools)
        if validation is not None:
            _check_replaceable(validation_file, validation)
            validation.write(validation_file)
            result["validation_file"] = str(validation_file)
    if plot is not None:
        write_atomic(plot, picture([chart_of(result, MOST_PLOTTED)], kind))
    parts = [*_parts(counts, file, plot)]
    if "validation_file" in result:
        parts.append(f"evaluated on the samples for validation: {result['validation_file']}")
    present(result, parts, as_json=as_json)


def _rule(rule: str | None, table: Path | None) -> str:
    """Return the rule, or the path of the index table that stands in its place.

    Raises:
        UsageError: Neither was given, or both; or the table is not there, or no table.
    """
    if table is None:
        if rule is None:
            raise UsageError("no rule: give one, for example 'headwater partition iid', or --from TABLE")
        return rule
    if rule is not None:
        raise UsageError(f"rule {rule} and --from {table}: give one of them")
    path = table.expanduser().absolute()
    if not path.is_file():
        raise UsageError(f"--from {table}: there is no such file; expected a table with the columns client and row")
    from ..simulation.index_tables import is_table

    if not is_table(path):
        raise UsageError(
            f"--from {table}: no index table; expected .csv, .parquet, or .json with the columns client and row"
        )
    return str(path)


def _check_replaceable(path: Path, division: Division) -> None:
    """Raise where ``path`` holds anything but this partition, on which others may rely."""
    from edge_agent.data.partition import Division

    if not path.exists():
        return
    try:
        saved = Division.read(path).sha256
    except UsageError as error:
        raise UsageError(f"{path} holds something else; choose another --out") from error
    if saved != division.sha256:
        free = path.with_name(f"{path.stem}-{division.sha256[:8]}{path.suffix}")
        raise UsageError(
            f"{path} holds another partition (hash {saved[:16]}, this one has {division.sha256[:16]}), and runs or "
            f"devices may rely on it; this one is not saved: choose another file, for example --out {free}, or remove "
            "that one first"
        )


def _parts(counts: ClassCounts, file: Path | None, plot: Path | None) -> Iterator[Table | str]:
    """Yield what the partition looks like, and where it is."""
    yield from _shape_of(counts)
    yield f"hash {counts.division.sha256[:16]}; partition: {file or 'as it was'}"
    if plot is not None:
        yield f"picture: {plot}"


def _shape_of(counts: ClassCounts) -> Iterator[Table | str]:
    """Yield the table of the first clients, and what the partition is as a whole."""
    clients = counts.clients
    more = ["…"] if len(counts.classes) > SHOWN_CLASSES else []
    rows = []
    for client in clients[:SHOWN_CLIENTS]:
        cells = [count or "·" for count in client.train[:SHOWN_CLASSES]]
        classes = sum(1 for count in client.train if count)
        rows.append((client.id, sum(client.train), sum(client.test), classes, *cells, *more))
    columns = ("client", "train", "test", "classes", *counts.classes[:SHOWN_CLASSES], *more)
    yield table(f"partition {counts.division.rule}: training samples of each class", columns, rows)
    if len(clients) > SHOWN_CLIENTS:
        yield f"… and {len(clients) - SHOWN_CLIENTS} clients more; --json has them all"
    sizes = sorted(sum(client.train) for client in clients)
    repeated = sum(sizes) - counts.used_samples
    draws = f", {repeated} of them draws of a sample that another client has, too" if repeated else ""
    yield (
        f"{len(clients)} clients with {sizes[0]} to {sizes[-1]} training samples (median {sizes[len(sizes) // 2]}); "
        f"{counts.used_samples} of {counts.pool_samples} samples of the pool are trained on{draws}"
    )
