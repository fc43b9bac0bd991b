"""``headwater reproduce``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.errors import RunFailed, StateError, TrainingFailed, UsageError
from edge_agent.storage import check_writable, write_atomic, write_json

from ..runs.request import Weights
from ..simulation.plan import Plan
from ..text import counted
from .simulate import run_plan
from .terminal import (
    INTERRUPTED,
    Given,
    Json,
    Verbose,
    console,
    from_model,
    print_json,
    set_up_logging,
    show,
    sigterm_as_ctrl_c,
    table,
)

if TYPE_CHECKING:
    from ..research.reproduce import Cell, Outcome, Reproduction

Name = Annotated[
    str | None, typer.Argument(metavar="TABLE", help="Name of a table, or its TOML file; none: list the tables.")
]
Rows = Annotated[list[str] | None, typer.Option("--row", "-m", help="Only this row; repeatable.")]
Columns = Annotated[list[str] | None, typer.Option("--column", help="Only this column; repeatable.")]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Seeds with commas; default: those of the table.")]
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
        "data": "Source of the data, where they are elsewhere; repeatable.",
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

    The same command again continues where it was stopped. Writes table.md, table.json and curves.svg into --out after
    each cell. Exit code 1 where a cell failed.

    Example: headwater reproduce fedpac-t1-fmnist-20 --row fedpac --row local --rounds 20
    """
    from ..research.reproduce import Reproduction, names, outcomes, read_table

    set_up_logging(verbose=verbose, quiet=True)
    if name is None:
        _list(names(), as_json=as_json)
        return
    if "weights" in changes:
        changes["weights"] = Weights.of(changes["weights"]).path
    folder = out or Path(f"reproduce-{Path(name).stem}")
    if not only_show:
        check_writable(folder)
    asked = Reproduction(name, read_table(name), folder, changes, rows or (), columns or (), _numbers(seeds))
    cells = asked.cells()
    if not only_show:
        _run_all(asked, cells, again=again)
    result = outcomes(asked.table, cells)
    if as_json:
        print_json(_told(asked, result))
    else:
        show(*_shown(asked, result))
    if any(cell.failure for cell in cells):
        raise typer.Exit(1)


def _list(known: Sequence[str], *, as_json: bool) -> None:
    from ..research.reproduce import read_table

    tables = {name: read_table(name) for name in known}
    if as_json:
        print_json({"tables": {name: {"title": one.title, "source": one.source} for name, one in tables.items()}})
        return
    rows = [(name, one.title, len(one.rows), len(one.columns)) for name, one in tables.items()]
    show(table("tables that can be made again", ("name", "title", "rows", "columns"), rows, left=2))


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        result = tuple(int(word) for word in (text or "").split(",") if word.strip())
    except ValueError as error:
        raise UsageError(f"--seeds '{text}': expected numbers with commas, for example 0,1,2") from error
    if len(set(result)) < len(result):
        raise UsageError(f"--seeds '{text}': a seed is given twice; that is not another run")
    return result


def _run_all(asked: Reproduction, cells: Sequence[Cell], *, again: bool) -> None:
    from ..research.reproduce import with_advice
    from ..simulation.client_pool import GO_ON

    missing = [cell for cell in cells if not cell.is_over and (again or not cell.failure)]
    asked.check(missing)
    is_begun = {cell.folder: not (again and cell.is_to_begin_anew) and cell.is_begun() for cell in cells}
    for place, cell in enumerate(missing, 1):  # only now: nothing is run that will not fit
        console.print(f"{place} of {len(missing)}: {cell}, {counted(cell.plan.rounds, 'round')}", soft_wrap=True)
        if again:
            cell.forgive()
        try:
            with with_advice(asked.table), sigterm_as_ctrl_c():
                run_plan(cell.plan, cell.folder, resume=is_begun[cell.folder])
        except (RunFailed, TrainingFailed, UsageError) as error:
            reason = str(error).removesuffix(GO_ON)
            cell.fail(reason, would_again=isinstance(error, TrainingFailed))
            console.print(f"{cell} failed: {reason}; --again tries once more", soft_wrap=True)
        except StateError as error:
            raise StateError(f"{cell}: {str(error).removesuffix(GO_ON)}; then the same command goes on") from error
        except KeyboardInterrupt:
            _write(asked, cells)
            words = " ".join(shlex.quote(word) for word in ("headwater", *sys.argv[1:]))
            console.print(f"stopped in {cell}; nothing is lost, the same command goes on: {words}", soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
        _write(asked, cells)
    _write(asked, cells)


def _write(asked: Reproduction, cells: Sequence[Cell]) -> None:
    """Table, figures and curves in their files: what is wanted, and what is there beside it."""
    from ..research.reproduce import curves, markdown, outcomes, promises

    shown = asked.shown(cells)
    result = outcomes(asked.table, shown)
    page = markdown(asked.table, result, promises(asked.table, result), _command(asked))
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_json(asked.folder / "table.json", _told(asked, result))
    write_atomic(asked.folder / "table.md", page.encode())
    write_atomic(asked.folder / "curves.svg", curves(asked.table, shown))


def _told(asked: Reproduction, found: Sequence[Outcome]) -> dict[str, Any]:
    from ..research.reproduce import promises

    return {
        "title": asked.table.title,
        "source": asked.table.source,
        "measure": asked.table.measure,
        "average": asked.table.average,
        "when": asked.table.when,
        "cells": [one.as_json() for one in found],
        "promises": promises(asked.table, found),
        "notes": list(asked.table.notes),
        "folder": str(asked.folder),
    }


def _command(asked: Reproduction) -> str:
    words = ["headwater", "reproduce", asked.name]
    words += [word for row in asked.rows for word in ("--row", row)]
    words += [word for column in asked.columns for word in ("--column", column)]
    words += ["--seeds", ",".join(map(str, asked.seeds))] if asked.seeds else []
    for name, value in asked.changes.items():
        words += [word for one in (value if isinstance(value, tuple) else (value,)) for word in (f"--{name}", str(one))]
    words += ["--out", str(asked.folder)]
    return " ".join(map(shlex.quote, words))


def _shown(asked: Reproduction, found: Sequence[Outcome]) -> Iterator[Any]:
    from ..research.reproduce import promises
    from ..research.reproduce.pages import CAVEAT, said

    kept = promises(asked.table, found)
    columns = ("method", "verdict", "paper", "ours", "±", "diff.", "best", "after\ntraining", "rounds", "seeds")
    for column in dict.fromkeys(one.column.name for one in found):
        rows = [_cells(one) for one in found if one.column.name == column]
        yield table(f"{asked.table.title}: {column}", columns, rows, left=2)
        doubt = next(one.column.doubt for one in found if one.column.name == column)
        yield from [f"doubtful: {doubt}"] if doubt else []
        yield from (said(one).replace("**", "") for one in kept if one["column"] == column)
    yield f"percent; {CAVEAT.replace('`', '')}"
    yield f"table: {asked.folder}/table.md; curves: {asked.folder}/curves.svg; figures: {asked.folder}/table.json"


def _cells(one: Outcome) -> tuple[object, ...]:
    numbers = (one.paper, one.ours, one.std, one.difference, one.best, one.after)
    told = [None if value is None else f"{value:.2f}" for value in numbers]
    return (one.row.name, one.verdict, *told, max(one.rounds, default=None), one.seeds)
