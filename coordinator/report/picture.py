"""One picture of one run that stands alone: an SVG with the accuracies of every device, for a document or a slide."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files

from edge_agent.errors import StateError

from ..store import RunFolder
from ..words import counted
from .charts import MARKERS, WIDTH, _mark, dot_chart
from .figures import SCOPES, RunFigures, as_number, read_run

_HEADER = 62
_LEGEND_LEFT, _LEGEND_STEP = 130, 105


def picture(folder: RunFolder) -> str:
    """The SVG; light or dark as its reader prefers.

    Raises:
        StateError: the run has no figures of devices yet, or they are damaged.
    """
    run = read_run(folder.run, folder.summary() or {}, folder.metrics())
    rows = [(agent.id, {str(s): agent.acc[s] for s in SCOPES if s in agent.acc}) for agent in run.agents if agent.acc]
    if not rows:
        raise StateError(f"{folder.folder}: no device has said yet what it got; a picture can be made after the run")
    chart = dot_chart(_words(rows), rows, x_label="accuracy on held-back samples", low=0.0, high=1.0)
    height = _height_of(chart)
    placed = chart.replace("<svg ", f'<svg x="0" y="{_HEADER}" width="{WIDTH}" height="{height}" ', 1)
    whole = f'viewBox="0 0 {WIDTH} {_HEADER + height}" width="{1.5 * WIDTH:g}"'
    sheet = f'<rect class="sheet" width="{WIDTH}" height="{_HEADER + height}" rx="8"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {whole} role="img"><style>{_style()}</style>'
        f"{sheet}{_title(run)}{_legend()}{placed}</svg>\n"
    )


def _title(run: RunFigures) -> str:
    rounds = as_number(run.summary.get("rounds"))
    what = f"{run.summary.get('method', run.run)}, {'?' if rounds is None else counted(int(rounds), 'round')}"
    return f'<text class="label" x="14" y="24" font-weight="600">{escape(what)}</text>'


def _legend() -> str:
    keys = []
    for place, scope in enumerate(SCOPES):
        x = _LEGEND_LEFT + place * _LEGEND_STEP
        keys.append(f'{_mark(MARKERS[scope], scope, x, 45)}<text class="label" x="{x + 11}" y="49">acc.{scope}</text>')
    return "".join(keys)


def _words(rows: list[tuple[str, dict[str, float]]]) -> str:
    said = (f"{name}: " + ", ".join(f"acc.{scope} {value:.3f}" for scope, value in acc.items()) for name, acc in rows)
    return "Accuracy of each device. " + "; ".join(said)


def _height_of(chart: str) -> int:
    found = re.search(r'viewBox="0 0 \d+ (\d+)"', chart)
    return int(found[1]) if found else 0


def _style() -> str:
    """The page's colours and marks; what is not for charts is left out."""
    sheet = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    colours = sheet[sheet.index(":root") : sheet.index("* {")]
    marks = [
        line for line in sheet.splitlines() if line.startswith(("text {", ".tick", ".label", ".grid", ".fill", ".line"))
    ]
    return " ".join([*colours.split(), *marks, ".sheet { fill: var(--sheet); }"])
