"""A simulation's curves as one SVG that stands alone, in the report's colours, light or dark as its reader prefers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from ..report.charts import HEIGHT, WIDTH, Series, line_chart
from .results import rounds_done

_TOP = 46
_STYLES = {"global": "global", "personal": "personal", "after": "local"}
_NAMES = {"global": "acc.global", "personal": "acc.personal", "after": "after training"}


def curves(result: Mapping[str, Any]) -> str:
    """The SVG; accuracies of the model that was there after so many rounds."""
    series = list(_series(result))
    if not series:  # nobody has test samples: an empty frame says so better than a missing file
        series = [Series("no client has test samples", ((0.0, 0.0), (1.0, 0.0)), "plain")]
    low = 0.5 if min(y for line in series for _, y in line.points) >= 0.5 else 0.0
    words = f"Accuracy by rounds done: {', '.join(line.name for line in series)}"
    chart = line_chart(words, series, x_label="rounds done", y_label="accuracy", low=low, high=1.0)
    rows = -(-len(series) // 2)
    top = _TOP + 20 * rows
    placed = chart.replace("<svg ", f'<svg x="0" y="{top}" width="{WIDTH}" height="{HEIGHT}" ', 1)
    title = f"{result['method']}, {result['clients']} clients, partition {result['partition']}, seed {result['seed']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + HEIGHT}" width="{1.5 * WIDTH:g}" '
        f'role="img"><style>{_style()}</style><rect class="sheet" width="{WIDTH}" height="{top + HEIGHT}" rx="8"/>'
        f'<text class="label" x="14" y="26" font-weight="600">{escape(title)}</text>{_legend(series)}{placed}</svg>\n'
    )


def _series(result: Mapping[str, Any]) -> Iterator[Series]:
    rounds, last = result["rounds"], result["last"]
    for scope, style in _STYLES.items():
        for key, name, dashed in (("clients_mean", "mean", False), ("worst10", "worst tenth", True)):
            points = [
                (float(rounds_done(scope, one["round"])), one["acc"][scope][key])
                for one in rounds
                if scope in one["acc"]
            ]
            if scope in last["acc"]:
                points.append((float(last["rounds_done"]), last["acc"][scope][key]))
            if points:
                yield Series(f"{_NAMES[scope]}, {name}", tuple(points), style, is_dashed=dashed)


def _legend(series: list[Series]) -> str:
    keys = []
    for place, line in enumerate(series):
        x, y = 14 + 236 * (place % 2), _TOP + 20 * (place // 2)
        dash = " dashed" if line.is_dashed else ""
        mark = f'<line class="line {line.style}{dash}" x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}"/>'
        keys.append(f'{mark}<text class="tick" x="{x + 28}" y="{y}">{escape(line.name)}</text>')
    return "".join(keys)


def _style() -> str:
    """Colours and marks of the report's page; what is not for charts is left out."""
    sheet = files("coordinator.report").joinpath("report.css").read_text(encoding="utf-8")
    colours = sheet[sheet.index(":root") : sheet.index("* {")]
    marks = [
        line
        for line in sheet.splitlines()
        if line.startswith(("text {", ".tick", ".label", ".grid", ".fill", ".line", ".dashed"))
    ]
    return " ".join([*colours.split(), *marks, ".line.plain { stroke: var(--plain); } .sheet { fill: var(--sheet); }"])
