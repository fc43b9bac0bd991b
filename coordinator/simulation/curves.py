"""A simulation's accuracies by round as one SVG file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..report.charts import Series, accuracy_floor, line_chart, standalone
from .results import rounds_done

_STYLES = {"global": "global", "personal": "personal", "after": "local"}
_NAMES = {"global": "acc.global", "personal": "acc.personal", "after": "after training"}


def curves(result: Mapping[str, Any]) -> str:
    """The SVG; accuracies of the model that existed after so many rounds."""
    series = list(_series(result))
    if not series:  # no client has test samples: an empty frame is clearer than a missing file
        series = [Series("no client has test samples", ((0.0, 0.0), (1.0, 0.0)), "plain")]
    low = accuracy_floor(y for line in series for _, y in line.points)
    text = f"Accuracy by rounds done: {', '.join(line.name for line in series)}"
    chart = line_chart(text, series, x_label="rounds done", y_label="accuracy", low=low, high=1.0)
    title = f"{result['method']}, {result['clients']} clients, partition {result['partition']}, seed {result['seed']}"
    return standalone(title, chart, [line.key for line in series])


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
