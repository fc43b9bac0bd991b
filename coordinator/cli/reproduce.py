"""``headwater reproduce``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.core.errors import RunFailed, StateError, TrainingFailed, UsageError
from edge_agent.core.storage import check_writable

from ..rounds.request import Weights
from ..simulation.plan import Plan
from ..text import counted
from .options import INTERRUPTED, Given, Json, Verbose, from_model
from .output import console, present, set_up_logging, sigterm_as_ctrl_c, table
from .simulate import run_plan

if TYPE_CHECKING:
    from ..research.reproduce.cells import Cell, Reproduction
    from ..research.reproduce.outcome import Outcome

Name = Annotated[
    str | None, typer.Argument(metavar="TABLE", help="Name of a table, or its TOML file; none: list the tables.")
]
Rows = Annotated[list[str] | None, typer.Option("--row", "-m", help="Only this row; repeatable.")]
Columns = Annotated[list[str] | None, typer.Option("--column", help="Only this column; repeatable.")]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Seeds, such as 0,1,2 or 0:3; default: those of the table.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder; default: reproduce-TABLE. Runs in it are reused.")
]
Again = Annotated[bool, typer.Option("--again", help="Retry failed rows; they resume where possible.")]
OnlyShow = Annotated[bool, typer.Option("--show", help="Run nothing; show the results so far.")]


@from_model(
    Plan,
    ("rounds", "data", "weights", "device", "engine", "workers"),
    help={
        "rounds": "Fewer rounds than the table's; the output says so.",
        "data": "Source of the data, if not the table's; repeatable.",
    },
)
def reproduce(
    changes: Given,
    name: Name = None,
    rows: Rows = None,
    columns: Columns = None,
    seeds: Seeds = None,
    out: Out = None,
    again: Again = False,
    only_show: OnlyShow = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run the cells of a published table, and compare with the published values.

    A cell is one simulation: a row, a column and a seed. A whole table takes hours to days, a few rows with fewer
    rounds minutes (--row, --rounds); each line of progress says how long all cells still take. The same command
    continues where it was stopped. Writes table.md, table.json, curves.svg and, for print, curves.pdf into --out after
    each cell. Exit code 1 means that a cell failed.

    Example: headwater reproduce fedpac-t1-fmnist-20 --row fedpac --row local --rounds 20
    """
    from ..research.compare.settings import parse_seeds
    from ..research.reproduce.cells import Reproduction, read_table
    from ..research.reproduce.outcome import as_json as to_json
    from ..research.reproduce.outcome import outcomes

    set_up_logging(verbose=verbose, quiet=True)
    if name is None:
        _list_tables(as_json=as_json)
        return
    if "weights" in changes:
        changes["weights"] = Weights.of(changes["weights"]).path
    folder = out or Path(f"reproduce-{Path(name).stem}")
    if not only_show:
        check_writable(folder)
    numbers = () if seeds is None else parse_seeds(seeds)
    reproduction = Reproduction(name, read_table(name), folder, changes, rows or (), columns or (), numbers)
    cells = reproduction.cells()
    if not only_show:
        _run_all(reproduction, cells, again=again)
    result = outcomes(reproduction.table, cells)
    present(to_json(reproduction, result), _shown(reproduction, result), as_json=as_json)
    if any(cell.failure for cell in cells):
        raise typer.Exit(1)


def _list_tables(*, as_json: bool) -> None:
    """Print the tables that come with Headwater."""
    from ..research.reproduce.cells import names, read_table

    tables = {name: read_table(name) for name in names()}
    content = {"tables": {name: {"title": read.title, "source": read.source} for name, read in tables.items()}}
    listing = [(name, read.title, len(read.rows), len(read.columns)) for name, read in tables.items()]
    headings = ("name", "title", "rows", "columns")
    present(content, [table("tables that can be reproduced", headings, listing, left=2)], as_json=as_json)


def _run_all(reproduction: Reproduction, cells: Sequence[Cell], *, again: bool) -> None:
    """Run the cells that have no result yet, one after another, and write the table after each.

    A cell that fails is recorded as failed, and the next one begins.

    Args:
        reproduction: The table and its folder.
        cells: The selected cells.
        again: Whether cells that have failed are run once more.

    Raises:
        StateError: The folder cannot be used any more, such as a full disk; the same command resumes.
        typer.Exit: Ctrl-C was pressed; the same command resumes.
    """
    from ..research.reproduce.cells import with_advice
    from ..research.reproduce.outcome import write
    from ..simulation.client_pool import RESUMABLE

    # 1. All mistakes in all cells are reported before the first one runs.
    missing = [cell for cell in cells if not cell.is_over and (again or not cell.failure)]
    reproduction.check(missing)
    is_begun = {cell.folder: not (again and cell.must_restart) and cell.is_begun() for cell in cells}
    # 2. The runs. The time left that each line of progress shows includes the later cells.
    for number, cell in enumerate(missing, 1):
        console.print(f"{number} of {len(missing)}: {cell}, {counted(cell.plan.rounds, 'round')}", soft_wrap=True)
        later_rounds = sum(later.plan.rounds for later in missing[number:])
        if again:
            cell.forgive()
        try:
            with with_advice(reproduction.table), sigterm_as_ctrl_c():
                run_plan(cell.plan, cell.folder, resume=is_begun[cell.folder], later_rounds=later_rounds)
        except (RunFailed, TrainingFailed, UsageError) as error:
            reason = str(error).removesuffix(RESUMABLE)
            cell.fail(reason, would_again=isinstance(error, TrainingFailed))
            console.print(f"{cell} failed: {reason}; --again tries once more", soft_wrap=True)
        except StateError as error:
            raise StateError(f"{cell}: {str(error).removesuffix(RESUMABLE)}; then the same command resumes") from error
        except KeyboardInterrupt:
            write(reproduction, cells)
            command = shlex.join(("headwater", *sys.argv[1:]))
            console.print(f"stopped in {cell}; nothing is lost, the same command resumes: {command}", soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
        write(reproduction, cells)
    # 3. Where nothing was run the table is written all the same: the selection may differ from the last one.
    if not missing:
        write(reproduction, cells)


HEADINGS = ("method", "verdict", "paper", "ours", "±", "diff.", "best", "after\ntraining", "rounds", "seeds")


def _shown(reproduction: Reproduction, results: Sequence[Outcome]) -> Iterator[Any]:
    """Yield what the terminal shows: for each column its table, orders and footing; then sources and files."""
    from ..research.reproduce.outcome import FOOTING, caveat, check_orders, footing_lines, footings, source_lines

    published = reproduction.table
    orders = check_orders(published, results)
    for column in {result.column.name: result.column for result in results}.values():
        rows = [_row(result) for result in results if result.column == column]
        yield table(f"{published.title}: {column.name}", HEADINGS, rows, left=2)
        if column.doubt:
            yield f"doubtful: {column.doubt}"
        for order in orders:
            if order.column == column.name:
                yield " ".join(order.sentences()).replace("**", "")
        yield FOOTING
        yield from footing_lines(published, footings(results)[column.name])
    yield from source_lines(published)
    yield f"percent; {caveat(published).replace('`', '')}"
    # With --show nothing is written; there are files only if an earlier run has written them.
    folder = reproduction.folder
    if (folder / "table.md").exists():
        yield f"table: {folder}/table.md; curves: {folder}/curves.svg; figures: {folder}/table.json"


def _row(result: Outcome) -> tuple[Any, ...]:
    """Return a cell of the published table as a row of the terminal's, under `HEADINGS`."""
    numbers = (result.paper, result.ours, result.std, result.difference, result.best, result.after)
    texts = [None if number is None else f"{number:.2f}" for number in numbers]
    return (result.row.name, result.verdict, *texts, max(result.rounds, default=None), result.seeds)
