"""An analysis on disk: ``analysis.json``, an SVG file for each figure of the papers, ``index.html`` with all of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from edge_agent.storage import write_atomic, write_json

from ...report.page import megabytes, percent, render_page
from ...report.svg import (
    MARKERS,
    Picture,
    Series,
    class_style,
    dot_chart,
    line_chart,
    matrix_chart,
    named_bars,
    nice_ceiling,
    point_chart,
)

PAGE, NUMBERS = "index.html", "analysis.json"

STYLES = {
    "encoder": "global",
    "projector": "personal",
    "specific": "personal",
    "relevant": "personal",
    "irrelevant": "local",
}
MOST_CLIENTS = 60
"""Rows of a chart of clients; the numbers of all are in analysis.json."""

MOST_OF_CLASSES = 4
"""Clients whose accuracies by class are drawn."""

_MEASURES = {
    "separation": ("Class separation", "1 - cosine distance within classes / overall; higher is more apart", 1.0),
    "before_after": ("CKA with the encoder's features", "Linear CKA of encoder features and those made of them", 1.0),
    "sparsity": ("Sparsity ratio", "Share of components of L2-normalised features below the threshold", 1.0),
    "fisher": ("Fisher score", "Mean over features of variance between / within classes", None),
}


_TARGET_COLUMNS = (
    *(("scope", ""), ("target", "n"), ("rounds done", "n"), ("accuracy", "n")),
    *(("from agents", "n"), ("to agents", "n"), ("for an agent", "n")),
)


def write(result: Mapping[str, Any], out: Path) -> Path:
    """Write all files and return the page's path; files of an earlier analysis are replaced, nothing is removed."""
    made = list(pictures(result))
    out.mkdir(parents=True, exist_ok=True)
    for picture in made:
        write_atomic(out / f"{picture.name}.svg", picture.as_file())
    write_json(out / NUMBERS, result)
    write_atomic(out / PAGE, render(result, made).encode(errors="replace"))
    return out / PAGE


def render(result: Mapping[str, Any], made: Sequence[Picture]) -> str:
    """The page as HTML. It loads nothing and runs nothing."""
    sent = result["communication"]
    return render_page(
        "analysis.html",
        kind="Headwater analysis",
        title=f"{result['run_id']} · {result['method']} · analysis",
        result=result,
        numbers=NUMBERS,
        pictures=made,
        accuracy_rows=_accuracy_rows,
        target_columns=_TARGET_COLUMNS,
        target_rows=[] if sent is None else [_target_row(one) for one in sent["targets"]],
        left_out=[(one["what"], one["why"]) for one in result["left_out"]],
    )


def _accuracy_rows(answer: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, one in [*answer["clients"].items(), ("mean", answer)]:
        yield name, *(percent(one[part]) for part in ("all", "head", "tail"))


def _target_row(one: Mapping[str, Any]) -> tuple[str, ...]:
    begin = (f"acc.{one['scope']}", percent(one["target"]))
    if not one["reached"]:
        return (*begin, "not reached", percent(one["best"]), "–", "–", "–")
    sizes = (megabytes(one[name]) for name in ("bytes_up", "bytes_down", "bytes_per_agent"))
    return (*begin, str(one["rounds_done"]), percent(one["acc"]), *sizes)


def pictures(result: Mapping[str, Any]) -> Iterator[Picture]:
    """Every picture that the numbers allow, in the order of a page."""
    states = [one for one in result["rounds"] if "separation" in one]
    if states:
        for measure in _MEASURES:
            yield from _measure(measure, states)
        yield from _between(states)
        yield from _selection(states)
        yield from _probe(result)
    yield from _mixing(result["rounds"])
    yield from _classes(result)
    yield from _drawn(result)
    yield from _traffic(result)


def _measure(measure: str, states: Sequence[Mapping[str, Any]]) -> Iterator[Picture]:
    title, caption, high = _MEASURES[measure]
    last = states[-1].get(measure, {})
    if not last:
        return
    means = [(one["round"], {kind: one[measure][kind]["mean"] for kind in last}) for one in states]
    yield from _over_rounds(f"{measure}-rounds", f"{title} by round", f"{caption}; mean over clients.", means, high)
    rows = _by_client({kind: result["clients"] for kind, result in last.items()})
    if rows:
        text = f"{title} of each client after {states[-1]['round']} rounds"
        low, top = _range([value for _, values in rows for value in values.values()], high)
        chart = dot_chart(text, rows[:MOST_CLIENTS], x_label=title.lower().replace("cka", "CKA"), low=low, high=top)
        keys = [(kind, _style(kind), MARKERS.get(_style(kind), "dot")) for kind in last]
        more = f" The first {MOST_CLIENTS} of {len(rows)}." if len(rows) > MOST_CLIENTS else ""
        yield Picture(f"{measure}-clients", text, f"{caption}.{more}", chart, keys)


def _over_rounds(
    name: str,
    title: str,
    caption: str,
    values: Sequence[tuple[int, Mapping[str, float | None]]],
    high: float | None,
) -> Iterator[Picture]:
    """Lines of the values by kind after each number of rounds; nothing where there is one state only."""
    series = []
    for kind in values[-1][1]:
        points = ((float(number), by_kind.get(kind)) for number, by_kind in values)
        known = tuple((number, value) for number, value in points if value is not None)
        if known:
            series.append(Series(kind, known, _style(kind)))
    if not series or len(values) == 1:
        return
    text = f"{title}. " + " ".join(
        f"{line.name}: {line.points[0][1]:.3f} after {line.points[0][0]:g} rounds, "
        f"{line.points[-1][1]:.3f} after {line.points[-1][0]:g}."
        for line in series
    )
    low, top = _range([value for line in series for _, value in line.points], high)
    chart = line_chart(
        text,
        series,
        x_label="rounds done",
        y_label=title.partition(" by ")[0].lower().replace("cka", "CKA"),
        low=low,
        high=top,
    )
    yield Picture(name, title, caption, chart, [line.key for line in series])


def _by_client(kinds: Mapping[str, Mapping[str, float | None]]) -> list[tuple[str, dict[str, float]]]:
    clients = dict.fromkeys(client for result in kinds.values() for client in result)
    rows = [
        (client, {_style(k): v for k, result in kinds.items() if (v := result.get(client)) is not None})
        for client in clients
    ]
    return [(client, values) for client, values in rows if values]


def _between(states: Sequence[Mapping[str, Any]]) -> Iterator[Picture]:
    last = states[-1]
    if "cka" in last:
        means = [(one["round"], {kind: one["cka"][kind]["mean"] for kind in last["cka"]}) for one in states]
        caption = "Linear CKA of two clients' features of the same samples; mean over all pairs of clients."
        yield from _over_rounds("cka-rounds", "CKA between clients by round", caption, means, 1.0)
        for kind, result in last["cka"].items():
            title = f"CKA between clients, {kind} features, after {last['round']} rounds"
            yield _matrix(f"cka-{kind}", title, "Linear CKA of two clients' features of the same samples.", result)
    if "overlap" in last:
        by = {"mask": "those that a client's mask picks most often", "fisher": "those of highest Fisher score"}
        caption = f"Shared by two clients / important to either; important are {by[last['overlap']['by']]}."
        title = f"Overlap of important features after {last['round']} rounds"
        yield _matrix("overlap", title, caption, last["overlap"])


def _matrix(name: str, title: str, caption: str, pairs: Mapping[str, Any]) -> Picture:
    values = [value for line in pairs["matrix"] for value in line if value is not None]
    low = math.floor(10 * min(values, default=0.0) + 1e-9) / 10
    low = 0.9 if low >= 1 else low
    mean = "" if pairs["mean"] is None else f" Mean over pairs: {pairs['mean']:.3f}."
    chart = matrix_chart(f"{title}.{mean}", pairs["clients"], pairs["matrix"], low=low, high=1.0)
    return Picture(name, title, f"{caption}{mean} From {low:g} (pale) to 1.", chart)


def _selection(states: Sequence[Mapping[str, Any]]) -> Iterator[Picture]:
    if "selection" not in states[-1]:
        return
    caption = "Share of features that a client's mask picks, over its test samples."
    means = [(one["round"], {"relevant": one["selection"]["mean"]}) for one in states]
    yield from _over_rounds("selection-rounds", "Selection ratio by round", caption, means, 1.0)
    rows = _by_client({"relevant": states[-1]["selection"]["clients"]})
    text = f"Selection ratio of each client after {states[-1]['round']} rounds"
    chart = dot_chart(text, rows[:MOST_CLIENTS], x_label="share of features picked", low=0.0, high=1.0)
    yield Picture("selection-clients", text, caption, chart)


def _probe(result: Mapping[str, Any]) -> Iterator[Picture]:
    answer = result["probe"]
    if answer is None:
        return
    percents = [100.0 * ratio for ratio in answer["ratios"]]
    worst = [min(values) for values in zip(*answer["clients"].values(), strict=True)]
    series = [Series("mean over clients", tuple(zip(percents, answer["mean"], strict=True)), "personal")]
    if len(answer["clients"]) > 1:
        series.append(Series("worst client", tuple(zip(percents, worst, strict=True)), "personal", is_dashed=True))
    low, high = _range([y for line in series for _, y in line.points], 1.0)
    title = "Accuracy on features of highest Fisher score"
    text = f"{title}: {answer['mean'][0]:.3f} on a tenth of the features, {answer['mean'][-1]:.3f} on all."
    chart = line_chart(text, series, x_label="features kept, %", y_label="accuracy", low=low, high=high)
    keys = [line.key for line in series]
    yield Picture(
        "probe", title, "Nearest neighbours among the client's training samples, on its test samples.", chart, keys
    )


def _mixing(states: Sequence[Mapping[str, Any]]) -> Iterator[Picture]:
    mixed = [one for one in states if "mixing" in one]
    if not mixed:
        return
    last = mixed[-1]["mixing"]
    order = sorted(range(len(last["clients"])), key=lambda i: (last.get("groups", [""] * len(last["clients"]))[i], i))
    names = [last["clients"][index] for index in order]
    matrix = [[last["weights"][row][column] for column in order] for row in order]
    title = f"Weights of combined classifiers after {mixed[-1]['round']} rounds"
    high = max(max(row) for row in matrix)
    grouped = f" Clients by group; {last['same_group']:.1%} of a row is of its group." if "same_group" in last else ""
    caption = f"Row: who receives; column: whose classifier. From 0 (pale) to {high:.2f}.{grouped}"
    yield Picture("mixing", title, caption, matrix_chart(f"{title}.{grouped}", names, matrix, low=0.0, high=high))
    kinds = {"same_group": "relevant", "own": "encoder", "if_even": "irrelevant"}
    shares = [(one["round"], {kind: one["mixing"].get(name) for name, kind in kinds.items()}) for one in mixed]
    labels = {"relevant": "own group", "encoder": "own classifier", "irrelevant": "own group, were all alike"}
    for made in _over_rounds("mixing-rounds", "Weight by round", "Mean share of a row of weights.", shares, 1.0):
        yield replace(made, keys=[(labels[name], style, shape) for name, style, shape in made.keys])


def _classes(result: Mapping[str, Any]) -> Iterator[Picture]:
    """Accuracies of a client's classes from most to fewest training samples."""
    styles = {scope: "global" if scope == "global" else "personal" for scope in result["accuracy"]}
    for client in result["clients"][:MOST_OF_CLASSES]:
        scopes = {
            s: answer["clients"][client] for s, answer in result["accuracy"].items() if client in answer["clients"]
        }
        if not scopes:
            continue
        rows = zip(*(one["classes"] for one in scopes.values()), strict=True)
        bars = [
            (row[0]["class"], str(row[0]["train"]), {styles[s]: one["acc"] for s, one in zip(scopes, row, strict=True)})
            for row in rows
        ]
        title = f"Accuracy by class of client {client}"
        text = "; ".join(f"{scope}: {one['all']:.3f} of all samples" for scope, one in scopes.items())
        chart = named_bars(f"{title}. {text}.", bars, y_label="accuracy")
        keys = [(f"acc.{scope}", styles[scope], "bar") for scope in scopes]
        yield Picture(f"classes-{client}", title, "Below each class its training samples, most to fewest.", chart, keys)


def _drawn(result: Mapping[str, Any]) -> Iterator[Picture]:
    for client, answer in groupby(result["tsne"], key=lambda one: one["client"]):
        drawings = list(answer)
        panels = [(one["features"], one["points"], one["labels"]) for one in drawings]
        labels = sorted({label for one in drawings for label in one["labels"]})
        title = f"Features of client {client}, t-SNE"
        text = f"{title}: {len(drawings[0]['points'])} test samples of {len(labels)} classes"
        caption = f"{len(drawings[0]['points'])} test samples, perplexity {drawings[0]['perplexity']:.3g}."
        keys = [(result["classes"][label], *class_style(label)) for label in labels][:30]
        yield Picture(f"tsne-{client}", title, caption, point_chart(text, panels), keys)


def _traffic(result: Mapping[str, Any]) -> Iterator[Picture]:
    sent = result["communication"]
    if sent is None:
        return
    series, totals = [], {}
    for key, name, style in (("bytes_up", "from agents", "personal"), ("bytes_down", "to agents", "global")):
        sums = accumulate(line[key] / 1e6 for line in sent["by_round"])
        points = tuple((float(line["round"]), total) for line, total in zip(sent["by_round"], sums, strict=True))
        series.append(Series(name, points, style, is_dashed=style == "global"))
        totals[key] = points[-1][1]
    title = "Traffic up to each round"
    text = f"{title}: {totals['bytes_up']:.2f} MB from agents and {totals['bytes_down']:.2f} MB to agents in all."
    high = nice_ceiling(max(totals.values()) or 1.0)
    chart = line_chart(text, series, x_label="rounds done", y_label="MB", low=0.0, high=high)
    keys = [line.key for line in series]
    yield Picture("traffic", title, "Payload in MB (millions of bytes), all rounds so far.", chart, keys)


def _style(kind: str) -> str:
    return STYLES.get(kind, "local")


def _range(values: Sequence[float], high: float | None) -> tuple[float, float]:
    """An axis for the values: from 0, or from 0.5 where all lie above it; up to ``high``, or a round number."""
    low = min(values, default=0.0)
    if high is None:
        return 0.0, nice_ceiling(max(values, default=0.0) or 1.0)
    return (0.5 if low >= 0.5 else math.floor(10 * min(low, 0.0)) / 10), high
