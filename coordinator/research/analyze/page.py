"""An analysis on disk: ``analysis.json``, an SVG file for each figure of the papers, ``index.html`` with all of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from edge_agent.core.storage import write_atomic, write_json

from ...report.charts import (
    CLASSES,
    MARKERS,
    Axis,
    Chart,
    Key,
    Lines,
    Mark,
    Matrix,
    Row,
    Rows,
    Scatter,
    Series,
    ends,
    figure_html,
    percent,
)
from ...report.page import megabytes, render_page
from ...report.pictures import picture

PAGE = "index.html"
NUMBERS = "analysis.json"

ROLES = {
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

ALIKE = 0.005
"""Pairs of clients whose values all lie so close to each other need a sentence, not a matrix."""

SAME = 1e-4
"""CKA that is closer to 1 is that of equal features: float32 rounds."""

_MEASURES = {
    "separation": ("Class separation", "1 - cosine distance within classes / overall; higher is more apart", 1.0),
    "before_after": ("CKA with the encoder's features", "Linear CKA of encoder features and those made of them", 1.0),
    "sparsity": ("Sparsity ratio", "Share of components of L2-normalised features below the threshold", 1.0),
    "fisher": ("Fisher score", "Mean over features of variance between / within classes", None),
}
_ACCURACY = "Accuracy by class"
_FEATURES = "Features of each client"
_BETWEEN = "Between clients"
_DRAWN = "Features, drawn"
_COST = "Cost"

_TARGET_COLUMNS = (
    *(("scope", ""), ("target", "n"), ("rounds done", "n"), ("accuracy", "n")),
    *(("from agents", "n"), ("to agents", "n"), ("for an agent", "n")),
)


@dataclass(frozen=True)
class Figure:
    """Charts of one file, and the section of the page where they stand."""

    name: str
    section: str
    charts: tuple[Chart, ...]


def write(result: Mapping[str, Any], out: Path) -> Path:
    """Write all files and return the page's path; files of an earlier analysis are replaced, nothing is removed."""
    made = list(figures(result))
    out.mkdir(parents=True, exist_ok=True)
    for one in made:
        write_atomic(out / f"{one.name}.svg", picture(one.charts))
    write_json(out / NUMBERS, result)
    write_atomic(out / PAGE, render(result, made).encode(errors="replace"))
    return out / PAGE


def render(result: Mapping[str, Any], made: Sequence[Figure]) -> str:
    """Return the page as HTML. It loads nothing and runs its own scripts."""
    sent = result["communication"]
    said = list(sentences(result))
    sections = []
    for section in (_ACCURACY, _FEATURES, _BETWEEN, _DRAWN, _COST):
        shown = [one for one in made if one.section == section]
        texts = [text for where, text in said if where == section]
        html = [figure_html(chart, f"{one.name}-{n}", level=3) for one in shown for n, chart in enumerate(one.charts)]
        if html or texts:
            sections.append((section, texts, html))
    return render_page(
        "analysis.html",
        kind="Headwater analysis",
        title=f"{result['method']}: analysis of {result['kind']} {result['subject']}",
        result=result,
        numbers=NUMBERS,
        sections=sections,
        files=[f"{one.name}.svg" for one in made],
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


def sentences(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(Section, what a chart would show as one colour or one line)."""
    last: Mapping[str, Any] = next((one for one in reversed(result["rounds"]) if "separation" in one), {})
    for kind, pairs in last.get("cka", {}).items():
        if values := _alike(pairs):
            what = f"Linear CKA between clients, {kind} features"
            text = (
                f"{what}: all pairs lie between {min(values):.3f} and {max(values):.3f} after {last['round']} rounds."
            )
            if min(values) > 1 - SAME:
                text = (
                    f"{what}: 1 for all pairs after {last['round']} rounds, because the features are the same: these "
                    "clients use one shared encoder, for which CKA is 1 whatever it has learned."
                )
            yield _BETWEEN, text
    sent = result["communication"]
    if sent is not None and _is_steady(sent):
        yield (
            _COST,
            (
                f"Each of {sent['rounds']} rounds moved the same: {megabytes(sent['bytes_up'])} from agents and "
                f"{megabytes(sent['bytes_down'])} to agents in all."
            ),
        )


def figures(result: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield every figure that the numbers allow, in the order of a page."""
    states = [state for state in result["rounds"] if "separation" in state]
    yield from _classes(result)
    if states:
        for measure in _MEASURES:
            yield from _measure(measure, states)
        yield from _between(states)
        yield from _selection(states)
        yield from _probe(result)
    yield from _mixing(result["rounds"])
    yield from _drawn(result)
    yield from _traffic(result)


def _measure(measure: str, states: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield a measure by round, and of each client after the last one."""
    title, caption, high = _MEASURES[measure]
    last = states[-1].get(measure, {})
    if not last:
        return
    means = _means_by_round(measure, states)
    yield from _over_rounds(f"{measure}-rounds", f"{title} by round", f"{caption}; mean over clients.", means, high)
    named = f"{title} of each client after {states[-1]['round']} rounds"
    kinds = {kind: result["clients"] for kind, result in last.items()}
    yield from _by_client(f"{measure}-clients", named, caption, kinds, _label(title), high)


def _means_by_round(measure: str, states: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, float | None]]]:
    """Return (rounds done, mean over clients of each kind that the last state has), in order."""
    kinds = list(states[-1][measure])
    return [(state["round"], {kind: state[measure][kind]["mean"] for kind in kinds}) for state in states]


def _label(title: str) -> str:
    return title.lower().replace("cka", "CKA")


def _over_rounds(
    name: str,
    title: str,
    caption: str,
    values: Sequence[tuple[int, Mapping[str, float | None]]],
    high: float | None,
    names: Mapping[str, str] | None = None,
) -> Iterator[Figure]:
    """Yield lines of the values by kind after each number of rounds; nothing where there is one state only."""
    series = []
    for kind in values[-1][1]:
        points = tuple((float(number), by_kind.get(kind)) for number, by_kind in values)
        if any(value is not None for _, value in points):
            series.append(Series((names or {}).get(kind, kind), points, _role(kind)))
    if not series or len(values) == 1:
        return
    values_shown = [y for line in series for _, y in line.points if y is not None]
    axis = _range(values_shown, high, _label(title.partition(" by ")[0]))
    summary = f"{title}. {ends(series, 'after round')}"
    yield Figure(name, _FEATURES, (Lines(title, summary, Axis("rounds done"), axis, tuple(series), caption),))


def _by_client(
    name: str,
    title: str,
    caption: str,
    kinds: Mapping[str, Mapping[str, float | None]],
    label: str,
    high: float | None,
) -> Iterator[Figure]:
    """Yield a row for each client, the highest value of the first kind first."""
    marks_of: dict[str, dict[str, Mark]] = {}
    for kind, values in kinds.items():
        for client, value in values.items():
            marks = marks_of.setdefault(client, {})
            if value is not None:
                marks[kind] = Mark(value)
    rows = [Row(client, marks) for client, marks in marks_of.items() if marks]
    if not rows:
        return
    first = next(iter(kinds))
    rows.sort(key=lambda row: -row.marks[first].value if first in row.marks else math.inf)
    keys = tuple(Key(kind, _role(kind), MARKERS.get(_role(kind), "dot")) for kind in kinds)
    more = f" The first {MOST_CLIENTS} of {len(rows)}." if len(rows) > MOST_CLIENTS else ""
    axis = _range([mark.value for row in rows for mark in row.marks.values()], high, label)
    ranges = []
    for kind in kinds:
        shown = [row.marks[kind].value for row in rows if kind in row.marks]
        if shown:
            ranges.append(f"{kind} {min(shown):.3f} to {max(shown):.3f}")
    chart = Rows(title, f"{title}: {', '.join(ranges)}.", axis, keys, tuple(rows[:MOST_CLIENTS]), f"{caption}.{more}")
    yield Figure(name, _FEATURES, (chart,))


def _between(states: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield what compares pairs of clients: CKA of their features, and overlap of their important ones."""
    last = states[-1]
    if "cka" in last:
        yield from _similarity(states)
    if "overlap" in last:
        criteria = {"mask": "those that a client's mask picks most often", "fisher": "those of highest Fisher score"}
        caption = f"Shared by two clients / important to either; important are {criteria[last['overlap']['by']]}."
        title = f"Overlap of important features after {last['round']} rounds"
        yield _matrix("overlap", title, caption, last["overlap"])


def _similarity(states: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield the CKA between clients by round, and the matrices of the last state.

    What would be a chart of one value or one colour is left out: a sentence of the page says it.
    """
    last = states[-1]
    caption = "Linear CKA of two clients' features of the same samples"
    means = _means_by_round("cka", states)
    defined = [mean for _, by_kind in means for mean in by_kind.values() if mean is not None]
    if defined and min(defined) <= 1 - SAME:
        text = f"{caption}; mean over all pairs of clients."
        yield from _over_rounds("cka-rounds", "CKA between clients by round", text, means, 1.0)
    for kind, pairs in last["cka"].items():
        if not _alike(pairs):
            title = f"CKA between clients, {kind} features, after {last['round']} rounds"
            yield _matrix(f"cka-{kind}", title, f"{caption}.", pairs)


def _alike(pairs: Mapping[str, Any]) -> list[float]:
    """Return the values of all pairs of clients where they hardly differ: a matrix of one colour. Else empty."""
    values = []
    for row, line in enumerate(pairs["matrix"]):
        for column, value in enumerate(line):
            if row != column and value is not None:
                values.append(value)
    if values and max(values) - min(values) <= ALIKE:
        return values
    return []


def _matrix(name: str, title: str, caption: str, pairs: Mapping[str, Any]) -> Figure:
    """Return a matrix of pairs of clients, pale at the tenth below its lowest value."""
    values = [value for line in pairs["matrix"] for value in line if value is not None]
    low = math.floor(10 * min(values, default=0.0) + 1e-9) / 10
    if low >= 1:
        low = 0.9
    mean = ""
    if pairs["mean"] is not None:
        mean = f" Mean over pairs: {pairs['mean']:.3f}."
    names = tuple(pairs["clients"])
    cells = tuple(tuple(line) for line in pairs["matrix"])
    shown = f"{caption}{mean} From {low:g} (pale) to 1."
    chart = Matrix(title, f"{title}.{mean}", "client", "client", names, names, cells, low, 1.0, caption=shown)
    return Figure(name, _BETWEEN, (chart,))


def _selection(states: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    if "selection" not in states[-1]:
        return
    caption = "Share of features that a client's mask picks, over its test samples"
    means = [(state["round"], {"relevant": state["selection"]["mean"]}) for state in states]
    yield from _over_rounds("selection-rounds", "Selection ratio by round", f"{caption}.", means, 1.0)
    text = f"Selection ratio of each client after {states[-1]['round']} rounds"
    kinds = {"relevant": states[-1]["selection"]["clients"]}
    yield from _by_client("selection-clients", text, caption, kinds, "share of features picked", 1.0)


def _probe(result: Mapping[str, Any]) -> Iterator[Figure]:
    answer = result["probe"]
    if answer is None:
        return
    percents = [100.0 * ratio for ratio in answer["ratios"]]
    worst = [min(values) for values in zip(*answer["clients"].values(), strict=True)]
    series = [Series("mean over clients", tuple(zip(percents, answer["mean"], strict=True)), "personal")]
    if len(answer["clients"]) > 1:
        series.append(Series("worst client", tuple(zip(percents, worst, strict=True)), "personal", dashed=True))
    title = "Accuracy on features of highest Fisher score"
    text = f"{title}: {answer['mean'][0]:.3f} on a tenth of the features, {answer['mean'][-1]:.3f} on all."
    axis = _range([y for line in series for _, y in line.points if y is not None], 1.0, "accuracy")
    caption = "Nearest neighbours among the client's training samples, on its test samples."
    chart = Lines(title, text, Axis("features kept", "%"), axis, tuple(series), caption)
    yield Figure("probe", _FEATURES, (chart,))


def _mixing(states: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield the weights of combined classifiers after the last round, and the shares of a client's own group."""
    mixed = [state for state in states if "mixing" in state]
    if not mixed:
        return
    last = mixed[-1]["mixing"]
    # Clients of one group stand together, so that their weights are blocks.
    groups = last.get("groups", [""] * len(last["clients"]))
    order = sorted(range(len(groups)), key=lambda index: (groups[index], index))
    names = tuple(last["clients"][index] for index in order)
    cells = tuple(tuple(last["weights"][row][column] for column in order) for row in order)
    title = f"Weights of combined classifiers after {mixed[-1]['round']} rounds"
    high = max(max(row) for row in cells)
    grouped = ""
    if "same_group" in last:
        grouped = f" Clients by group; {last['same_group']:.1%} of a row is of its group."
    caption = f"Row: who receives; column: whose classifier. From 0 (pale) to {high:.2f}.{grouped}"
    chart = Matrix(title, f"{title}.{grouped}", "receives", "whose", names, names, cells, 0.0, high, caption=caption)
    yield Figure("mixing", _BETWEEN, (chart,))
    kinds = {"same_group": "relevant", "own": "encoder", "if_even": "irrelevant"}
    shares = [(state["round"], {kind: state["mixing"].get(name) for name, kind in kinds.items()}) for state in mixed]
    names_of = {"relevant": "own group", "encoder": "own classifier", "irrelevant": "own group, were all alike"}
    yield from _over_rounds(
        "mixing-rounds", "Weight by round", "Mean share of a row of weights.", shares, 1.0, names_of
    )


def _classes(result: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield accuracies of the first clients' classes, from most to fewest training samples."""
    for client in result["clients"][:MOST_OF_CLASSES]:
        scopes = {}
        for scope, answer in result["accuracy"].items():
            if client in answer["clients"]:
                scopes[scope] = answer["clients"][client]
        if scopes:
            yield Figure(f"classes-{client}", _ACCURACY, (_classes_of(client, scopes),))


def _classes_of(client: str, scopes: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return a bar for each class and scope of a client; all scopes have the classes in the same order."""
    keys = tuple(Key(f"acc.{scope}", "global" if scope == "global" else "personal", "bar") for scope in scopes)
    rows = []
    for entries in zip(*(accuracies["classes"] for accuracies in scopes.values()), strict=True):
        marks = {}
        for key, entry in zip(keys, entries, strict=True):
            if entry["acc"] is not None:
                marks[key.name] = Mark(entry["acc"])
        rows.append(Row(f"{entries[0]['class']} ({entries[0]['train']})", marks))
    title = f"Accuracy by class of client {client}"
    text = "; ".join(f"{scope} {accuracies['all']:.3f} of all samples" for scope, accuracies in scopes.items())
    caption = "In brackets the client's training samples of the class, most to fewest; no bar: none was tested."
    axis = Axis("accuracy", low=0.0, high=1.0, digits=3)
    return Rows(title, f"{title}: {text}.", axis, keys, tuple(rows), caption, "bars")


def _drawn(result: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the t-SNE drawings of each client side by side."""
    for client, drawings in groupby(result["tsne"], key=lambda drawing: drawing["client"]):
        charts = tuple(_cloud(client, drawing, result["classes"]) for drawing in drawings)
        yield Figure(f"tsne-{client}", _DRAWN, charts)


def _cloud(client: str, drawing: Mapping[str, Any], classes: Sequence[str]) -> Scatter:
    """Return the points of each class in a colour and shape that thirty classes do not share."""
    points_of: dict[int, list[tuple[float, float]]] = {}
    for (x, y), label in zip(drawing["points"], drawing["labels"], strict=True):
        points_of.setdefault(label, []).append((x, y))
    series = [Series(classes[label], tuple(points_of[label]), f"c{label % CLASSES}") for label in sorted(points_of)]
    count = len(drawing["points"])
    title = f"{drawing['features'].capitalize()} features of client {client}, t-SNE"
    text = f"{title}: {count} test samples of {len(series)} classes."
    caption = f"{count} test samples, perplexity {drawing['perplexity']:.3g}."
    return Scatter(title, text, Axis("t-SNE 1"), Axis("t-SNE 2"), tuple(series), caption, bare=True)


def _is_steady(sent: Mapping[str, Any]) -> bool:
    """Return whether all rounds moved as much, within a twentieth: sums are then straight lines."""
    for name in ("bytes_up", "bytes_down"):
        values = [line[name] for line in sent["by_round"]]
        if max(values) - min(values) > 0.05 * max(values):
            return False
    return True


def _traffic(result: Mapping[str, Any]) -> Iterator[Figure]:
    sent = result["communication"]
    if sent is None or _is_steady(sent):
        return
    series = []
    for key, name, role in (("bytes_up", "from agents", "personal"), ("bytes_down", "to agents", "global")):
        sums = accumulate(line[key] / 1e6 for line in sent["by_round"])
        points = tuple((float(line["round"]), total) for line, total in zip(sent["by_round"], sums, strict=True))
        series.append(Series(name, points, role, dashed=role == "global"))
    title = "Traffic up to each round"
    up = megabytes(sent["bytes_up"])
    down = megabytes(sent["bytes_down"])
    text = f"{title}: {up} from agents and {down} to agents in all."
    caption = "Payload in MB (millions of bytes), all rounds so far."
    chart = Lines(title, text, Axis("rounds done"), Axis("payload", "MB", low=0.0), tuple(series), caption)
    yield Figure("traffic", _COST, (chart,))


def _role(kind: str) -> str:
    return ROLES.get(kind, "local")


def _range(values: Sequence[float], high: float | None, label: str) -> Axis:
    """Return an axis for the values: from 0, or from 0.5 where all lie above it; up to ``high``, or as they need."""
    lowest = min(values, default=0.0)
    if high is None:
        return Axis(label, low=0.0, digits=3, can_log=lowest > 0)
    low = math.floor(10 * min(lowest, 0.0)) / 10
    if lowest >= 0.5:
        low = 0.5
    return Axis(label, low=low, high=high, digits=3)
