"""A reproduced table as Markdown, and the curves behind it as a picture."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...simulation.results import rounds_done
from ...text import listed
from .cells import Cell
from .definition import Table
from .outcome import HUNDRED, Outcome

CAVEAT = "One machine, few seeds: differences below a point are noise; `last` is after the last round, never the best."


def markdown(table: Table, found: Sequence[Outcome], kept: Sequence[Mapping[str, Any]], command: str) -> str:
    """The whole table with its notes; ends in a newline."""
    return "\n".join(_lines(table, found, kept, command)) + "\n"


def _lines(table: Table, found: Sequence[Outcome], kept: Sequence[Mapping[str, Any]], command: str) -> Iterator[str]:
    yield f"# {table.title}"
    yield f"\nPublished: {table.source}; {table.measure}.\n"
    for column in table.columns:
        rows = [one for one in found if one.column.name == column.name]
        if not rows:
            continue
        yield f"## {column.name}\n"
        if column.doubt:
            yield f"*Doubtful:* {column.doubt}\n"
        yield "| method | paper | ours | ± | difference | verdict | best | after training | rounds | seeds |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        yield from (_row(one) for one in rows)
        yield ""
        yield from (f"{said(one)}\n" for one in kept if one["column"] == column.name)
    yield f"*{CAVEAT}* `best` is chosen on the test samples. All values are percent."
    notes = [f"{row.name}: {row.note}" for row in table.rows if row.note]
    yield from (f"\n- {note}" if not place else f"- {note}" for place, note in enumerate([*table.notes, *notes]))
    yield f"\n```\n{command}\n```"


def _row(one: Outcome) -> str:
    rounds = "–".join(str(number) for number in sorted({min(one.rounds), max(one.rounds)})) if one.rounds else "–"
    numbers = (one.paper, one.ours, one.std)
    sign = "–" if one.difference is None else f"{one.difference:+.2f}"
    cells = [one.row.name, *map(_number, numbers), sign, one.verdict, *map(_number, (one.best, one.after)), rounds]
    return f"| {' | '.join([*cells, str(one.seeds)])} |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def said(one: Mapping[str, Any]) -> str:
    """A sentence on whether an order that the paper claims holds."""
    claim = f"{one['row']} above {listed(one['above'])}"
    if one["holds"] is None and not one["compared"]:
        return f"The paper's order ({claim}) cannot be checked yet: there is nothing to compare."
    if one["holds"] is None:
        missing = [name for name in one["above"] if name not in one["compared"]]
        return (
            f"The paper's order holds so far: {one['row']} above {listed(one['compared'])}, which are "
            f"{len(one['compared'])} of {len(one['above'])}; not there yet: {listed(missing)}."
        )
    if one["holds"]:
        return f"The paper's order holds: {claim}."
    return f"The paper's order does **not** hold ({claim}): {listed(one['beaten_by'])} came out at least as high."


def curves(table: Table, cells: Sequence[Cell]) -> bytes:
    """An SVG with a panel for each column: accuracy in percent by rounds done, one line for each row and seed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "headwater", "font.size": 9}):
        columns = [column for column in table.columns if any(cell.column.name == column.name for cell in cells)]
        figure = Figure(figsize=(1.2 + 5.6 * len(columns), 4.4), layout="constrained")
        panels = figure.subplots(1, len(columns), squeeze=False)[0]
        for panel, column in zip(panels, columns, strict=True):
            _draw(panel, [cell for cell in cells if cell.column.name == column.name], table)
            panel.set_title(column.name)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _draw(panel: Any, cells: Sequence[Cell], table: Table) -> None:
    rows = list(dict.fromkeys(cell.row.name for cell in cells))
    for cell in cells:
        result = cell.result
        points = [] if result is None else list(_points(result, cell.row.scope, table.average))
        if points:
            place = rows.index(cell.row.name)
            style = {"color": f"C{place % 10}", "linestyle": ("-", "--", ":")[place // 10 % 3], "linewidth": 1.3}
            panel.plot(*zip(*points, strict=True), label=cell.row.name, **style)
    panel.set(xlabel="rounds done", ylabel="accuracy, %")
    panel.grid(alpha=0.3)
    handles, names = panel.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    if once:
        panel.legend(once.values(), once.keys(), fontsize=8, loc="lower right")


def _points(result: Mapping[str, Any], scope: str, average: str) -> Iterator[tuple[int, float]]:
    for one in result["rounds"]:
        if scope in one["acc"]:
            yield rounds_done(scope, one["round"]), HUNDRED * one["acc"][scope][average]
    last = result["last"]
    if scope in last["acc"]:
        yield last["rounds_done"], HUNDRED * last["acc"][scope][average]
