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
"""Kind of features -> the role that its colour comes from."""

MOST_CLIENTS = 60
"""The most rows of a chart of clients; the numbers of all are in analysis.json."""

MOST_OF_CLASSES = 4
"""The number of clients whose accuracies by class are drawn."""

ALIKE = 0.005
"""Where the values of all pairs of clients lie within this range, a sentence says so instead of a matrix."""

SAME = 1e-4
"""Features are equal whose CKA is closer to 1 than this, because float32 rounds."""

STEADY = 0.05
"""Rounds whose bytes differ by no more than this share of the largest need no chart of sums: it has straight lines."""

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
"""(Name, CSS class) of each column of the table of targets; class ``n`` is for numbers."""


@dataclass(frozen=True)
class Figure:
    """Charts of one file, and the section of the page where they stand."""

    name: str
    section: str
    charts: tuple[Chart, ...]


def write(result: Mapping[str, Any], out: Path) -> Path:
    """Write all files and return the page's path; files of an earlier analysis are replaced, nothing is removed."""
    drawn_figures = list(figures(result))
    out.mkdir(parents=True, exist_ok=True)
    for figure in drawn_figures:
        write_atomic(out / f"{figure.name}.svg", picture(figure.charts))
    write_json(out / NUMBERS, result)
    write_atomic(out / PAGE, render(result, drawn_figures).encode(errors="replace"))
    return out / PAGE


def render(result: Mapping[str, Any], drawn_figures: Sequence[Figure]) -> str:
    """Return the page as HTML. It loads nothing and runs its own scripts.

    Args:
        result: The analysis, as `analyze` returns it.
        drawn_figures: Its figures, each of which has a file of its own beside the page.
    """
    all_sentences = list(sentences(result))
    sections = []
    for section in (_ACCURACY, _FEATURES, _BETWEEN, _DRAWN, _COST):
        texts = [text for section_of_text, text in all_sentences if section_of_text == section]
        html = list[str]()
        for figure in drawn_figures:
            if figure.section == section:
                html += _charts_of(figure)
        if html or texts:
            sections.append((section, texts, html))
    communication = result["communication"]
    targets = [] if communication is None else communication["targets"]
    return render_page(
        "analysis.html",
        kind="Headwater analysis",
        title=f"{result['method']}: analysis of {result['kind']} {result['subject']}",
        result=result,
        numbers=NUMBERS,
        sections=sections,
        files=[f"{figure.name}.svg" for figure in drawn_figures],
        accuracy_rows=_accuracy_rows,
        target_columns=_TARGET_COLUMNS,
        target_rows=[_target_row(target) for target in targets],
        left_out=[(gap["what"], gap["why"]) for gap in result["left_out"]],
    )


def _charts_of(figure: Figure) -> list[str]:
    """Return the HTML of each chart of a figure."""
    return [figure_html(chart, f"{figure.name}-{index}", level=3) for index, chart in enumerate(figure.charts)]


def _accuracy_rows(answer: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the name and the accuracies of each client, and last the means over clients."""
    for name, accuracies in [*answer["clients"].items(), ("mean", answer)]:
        yield name, percent(accuracies["all"]), percent(accuracies["head"]), percent(accuracies["tail"])


def _target_row(target: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row of an accuracy in the table of targets."""
    scope = f"acc.{target['scope']}"
    accuracy = percent(target["target"])
    if not target["reached"]:
        return scope, accuracy, "not reached", percent(target["best"]), "–", "–", "–"
    return (
        scope,
        accuracy,
        str(target["rounds_done"]),
        percent(target["acc"]),
        megabytes(target["bytes_up"]),
        megabytes(target["bytes_down"]),
        megabytes(target["bytes_per_agent"]),
    )


def sentences(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (section, sentence) for each thing that a chart would show as one colour or one straight line."""
    states = _states_with_features(result)
    if states:
        last = states[-1]
        for kind, pairs in last.get("cka", {}).items():
            values = _alike(pairs)
            if values:
                yield _BETWEEN, _sentence_on_alike(kind, values, last["round"])
    communication = result["communication"]
    if communication is not None and _is_steady(communication):
        up = megabytes(communication["bytes_up"])
        down = megabytes(communication["bytes_down"])
        moved = f"{up} from agents and {down} to agents in all"
        yield _COST, f"Each of {communication['rounds']} rounds moved the same: {moved}."


def _sentence_on_alike(kind: str, values: Sequence[float], rounds_done: int) -> str:
    """Say between which values the CKA of all pairs of clients lies, and why where it is 1."""
    subject = f"Linear CKA between clients, {kind} features"
    if min(values) > 1 - SAME:
        return (
            f"{subject}: 1 for all pairs after {rounds_done} rounds, because the features are the same: these clients "
            "use one shared encoder, for which CKA is 1 whatever it has learned."
        )
    return f"{subject}: all pairs lie between {min(values):.3f} and {max(values):.3f} after {rounds_done} rounds."


def _states_with_features(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the states whose features were measured, in order."""
    return [state for state in result["rounds"] if "separation" in state]


def figures(result: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield every figure that the numbers allow, in the order of a page."""
    states = _states_with_features(result)
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
    """Yield the figure of a measure by round, and that of each client after the last one."""
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
    means = list[tuple[int, Mapping[str, float | None]]]()
    for state in states:
        by_kind = {kind: state[measure][kind]["mean"] for kind in kinds}
        means.append((state["round"], by_kind))
    return means


def _label(title: str) -> str:
    """Return a title as the label of an axis."""
    return title.lower().replace("cka", "CKA")


def _over_rounds(
    name: str,
    title: str,
    caption: str,
    values: Sequence[tuple[int, Mapping[str, float | None]]],
    high: float | None,
    names: Mapping[str, str] | None = None,
) -> Iterator[Figure]:
    """Yield a figure with a line for each kind of values by rounds done; nothing where there is one state only.

    Args:
        name: The name of the figure.
        title: Its title.
        caption: Its caption.
        values: (Rounds done, kind -> value) of each state, in order; None: the value is not defined.
        high: The end of the axis; None: as the values need.
        names: Kind -> the name of its line, where that is not the kind.
    """
    if len(values) == 1:
        return
    _, last_values = values[-1]
    series = list[Series]()
    for kind in last_values:
        points = tuple((float(rounds_done), by_kind.get(kind)) for rounds_done, by_kind in values)
        line = Series((names or {}).get(kind, kind), points, _role(kind))
        if line.drawn_points:
            series.append(line)
    if not series:
        return
    axis = _range(_values_of(series), high, _label(title.partition(" by ")[0]))
    summary = f"{title}. {ends(series, 'after round')}"
    yield Figure(name, _FEATURES, (Lines(title, summary, Axis("rounds done"), axis, tuple(series), caption),))


def _values_of(series: Sequence[Series]) -> list[float]:
    """Return the values of all points of some series."""
    values = list[float]()
    for line in series:
        values += [y for _, y in line.drawn_points]
    return values


def _by_client(
    name: str,
    title: str,
    caption: str,
    kinds: Mapping[str, Mapping[str, float | None]],
    label: str,
    high: float | None,
) -> Iterator[Figure]:
    """Yield a figure with a row for each client, the highest value of the first kind first.

    Args:
        name: The name of the figure.
        title: Its title.
        caption: Its caption, without the full stop at its end.
        kinds: Kind -> client -> value; None: not defined. A client without any value has no row.
        label: The label of the axis.
        high: The end of the axis; None: as the values need.
    """
    rows = _rows_of_clients(kinds)
    if not rows:
        return
    # 1. Clients without a value of the first kind come last.
    first = next(iter(kinds))

    def sort_key(row: Row) -> float:
        return -row.marks[first].value if first in row.marks else math.inf

    rows.sort(key=sort_key)
    # 2. The range of each kind, over all clients.
    ranges = list[str]()
    all_values = list[float]()
    for kind in kinds:
        values = [row.marks[kind].value for row in rows if kind in row.marks]
        if values:
            ranges.append(f"{kind} {min(values):.3f} to {max(values):.3f}")
            all_values += values
    axis = _range(all_values, high, label)
    # 3. The chart of the first clients.
    keys = tuple(Key(kind, _role(kind), MARKERS.get(_role(kind), "dot")) for kind in kinds)
    text = f"{caption}."
    if len(rows) > MOST_CLIENTS:
        text += f" The first {MOST_CLIENTS} of {len(rows)}."
    chart = Rows(title, f"{title}: {', '.join(ranges)}.", axis, keys, tuple(rows[:MOST_CLIENTS]), text)
    yield Figure(name, _FEATURES, (chart,))


def _rows_of_clients(kinds: Mapping[str, Mapping[str, float | None]]) -> list[Row]:
    """Return a row for each client with a value, which has a mark for each kind."""
    marks_by_client: dict[str, dict[str, Mark]] = {}
    for kind, values in kinds.items():
        for client, value in values.items():
            if value is not None:
                marks_by_client.setdefault(client, {})[kind] = Mark(value)
    # Clients of equal values stand in the order in which the kinds name them.
    clients = dict[str, None]()
    for values in kinds.values():
        clients.update(dict.fromkeys(values))
    return [Row(client, marks_by_client[client]) for client in clients if client in marks_by_client]


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
    defined = list[float]()
    for _, by_kind in means:
        defined += [mean for mean in by_kind.values() if mean is not None]
    if defined and min(defined) <= 1 - SAME:
        text = f"{caption}; mean over all pairs of clients."
        yield from _over_rounds("cka-rounds", "CKA between clients by round", text, means, 1.0)
    for kind, pairs in last["cka"].items():
        if not _alike(pairs):
            title = f"CKA between clients, {kind} features, after {last['round']} rounds"
            yield _matrix(f"cka-{kind}", title, f"{caption}.", pairs)


def _alike(pairs: Mapping[str, Any]) -> list[float]:
    """Return the values of all pairs of clients where they hardly differ, so that a matrix would have one colour.

    Empty where they do differ.
    """
    values = []
    for row, line in enumerate(pairs["matrix"]):
        for column, value in enumerate(line):
            if row != column and value is not None:
                values.append(value)
    if values and max(values) - min(values) <= ALIKE:
        return values
    return []


def _matrix(name: str, title: str, caption: str, pairs: Mapping[str, Any]) -> Figure:
    """Return the figure of a matrix of pairs of clients, which is pale at the tenth below its lowest value."""
    values = list[float]()
    for line in pairs["matrix"]:
        values += [value for value in line if value is not None]
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
    """Yield the share of features that the clients' masks pick: by round, and of each client after the last one."""
    if "selection" not in states[-1]:
        return
    caption = "Share of features that a client's mask picks, over its test samples"
    means = [(state["round"], {"relevant": state["selection"]["mean"]}) for state in states]
    yield from _over_rounds("selection-rounds", "Selection ratio by round", f"{caption}.", means, 1.0)
    text = f"Selection ratio of each client after {states[-1]['round']} rounds"
    kinds = {"relevant": states[-1]["selection"]["clients"]}
    yield from _by_client("selection-clients", text, caption, kinds, "share of features picked", 1.0)


def _probe(result: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the accuracy on the features of highest Fisher score by the share of features that is kept."""
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
    axis = _range(_values_of(series), 1.0, "accuracy")
    caption = "Nearest neighbours among the client's training samples, on its test samples."
    chart = Lines(title, text, Axis("features kept", "%"), axis, tuple(series), caption)
    yield Figure("probe", _FEATURES, (chart,))


def _mixing(states: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield the weights of combined classifiers after the last round, and the shares of a client's own group."""
    mixed = [state for state in states if "mixing" in state]
    if not mixed:
        return
    # 1. The weights after the last round. Clients of one group stand together, so that their weights are blocks.
    last = mixed[-1]["mixing"]
    groups = last.get("groups", [""] * len(last["clients"]))
    order = sorted(range(len(groups)), key=lambda index: (groups[index], index))
    names = tuple(last["clients"][index] for index in order)
    cells = tuple(_in_order(last["weights"][row], order) for row in order)
    title = f"Weights of combined classifiers after {mixed[-1]['round']} rounds"
    high = max(max(row) for row in cells)
    grouped = ""
    if "same_group" in last:
        grouped = f" Clients by group; {last['same_group']:.1%} of a row is of its group."
    caption = f"Row: who receives; column: whose classifier. From 0 (pale) to {high:.2f}.{grouped}"
    chart = Matrix(title, f"{title}.{grouped}", "receives", "whose", names, names, cells, 0.0, high, caption=caption)
    yield Figure("mixing", _BETWEEN, (chart,))
    # 2. The shares of a row by round, in the colours of kinds of features, which mean something else there.
    shares = list[tuple[int, Mapping[str, float | None]]]()
    for state in mixed:
        mixing = state["mixing"]
        by_kind = {
            "relevant": mixing.get("same_group"),
            "encoder": mixing.get("own"),
            "irrelevant": mixing.get("if_even"),
        }
        shares.append((state["round"], by_kind))
    names_of = {"relevant": "own group", "encoder": "own classifier", "irrelevant": "own group, were all alike"}
    yield from _over_rounds(
        "mixing-rounds", "Weight by round", "Mean share of a row of weights.", shares, 1.0, names_of
    )


def _in_order(values: Sequence[float], order: Sequence[int]) -> tuple[float, ...]:
    """Return the values at the indices of ``order``."""
    return tuple(values[index] for index in order)


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
    """Return the chart of a client's accuracies: a bar for each class and scope.

    Args:
        client: The client.
        scopes: Scope -> accuracies; all of them have the classes in the same order.
    """
    # 1. A colour for each scope; heads that a device fits are personal.
    keys = list[Key]()
    for scope in scopes:
        role = "global" if scope == "global" else "personal"
        keys.append(Key(f"acc.{scope}", role, "bar"))
    # 2. A row for each class, with the bars of the scopes that have tested it.
    rows = list[Row]()
    classes_by_scope = [accuracies["classes"] for accuracies in scopes.values()]
    for entries in zip(*classes_by_scope, strict=True):
        marks = {}
        for key, entry in zip(keys, entries, strict=True):
            if entry["acc"] is not None:
                marks[key.name] = Mark(entry["acc"])
        rows.append(Row(f"{entries[0]['class']} ({entries[0]['train']})", marks))
    title = f"Accuracy by class of client {client}"
    text = "; ".join(f"{scope} {accuracies['all']:.3f} of all samples" for scope, accuracies in scopes.items())
    caption = "In brackets the client's training samples of the class, most to fewest; no bar: none was tested."
    axis = Axis("accuracy", low=0.0, high=1.0, digits=3)
    return Rows(title, f"{title}: {text}.", axis, tuple(keys), tuple(rows), caption, "bars")


def _drawn(result: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield a figure for each client, with its t-SNE drawings side by side."""
    for client, drawings in groupby(result["tsne"], key=lambda drawing: drawing["client"]):
        charts = tuple(_cloud(client, drawing, result["classes"]) for drawing in drawings)
        yield Figure(f"tsne-{client}", _DRAWN, charts)


def _cloud(client: str, drawing: Mapping[str, Any], classes: Sequence[str]) -> Scatter:
    """Return the chart of a client's points; up to thirty classes differ in colour or shape."""
    points_of: dict[int, list[tuple[float, float]]] = {}
    for (x, y), label in zip(drawing["points"], drawing["labels"], strict=True):
        points_of.setdefault(label, []).append((x, y))
    series = [Series(classes[label], tuple(points_of[label]), f"c{label % CLASSES}") for label in sorted(points_of)]
    count = len(drawing["points"])
    title = f"{drawing['features'].capitalize()} features of client {client}, t-SNE"
    text = f"{title}: {count} test samples of {len(series)} classes."
    caption = f"{count} test samples, perplexity {drawing['perplexity']:.3g}."
    return Scatter(title, text, Axis("t-SNE 1"), Axis("t-SNE 2"), tuple(series), caption, bare=True)


def _is_steady(communication: Mapping[str, Any]) -> bool:
    """Return whether all rounds moved as much, within the share `STEADY`: sums are then straight lines."""
    for direction in ("bytes_up", "bytes_down"):
        values = [moved[direction] for moved in communication["by_round"]]
        if max(values) - min(values) > STEADY * max(values):
            return False
    return True


def _traffic(result: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the bytes from and to agents up to each round; nothing where all rounds moved the same."""
    communication = result["communication"]
    if communication is None or _is_steady(communication):
        return
    series = (
        Series("from agents", _sums_by_round(communication, "bytes_up"), "personal"),
        Series("to agents", _sums_by_round(communication, "bytes_down"), "global", dashed=True),
    )
    title = "Traffic up to each round"
    up = megabytes(communication["bytes_up"])
    down = megabytes(communication["bytes_down"])
    text = f"{title}: {up} from agents and {down} to agents in all."
    caption = "Payload in MB (millions of bytes), all rounds so far."
    chart = Lines(title, text, Axis("rounds done"), Axis("payload", "MB", low=0.0), series, caption)
    yield Figure("traffic", _COST, (chart,))


def _sums_by_round(communication: Mapping[str, Any], direction: str) -> tuple[tuple[float, float], ...]:
    """Return (round, MB that all rounds up to it have moved) in a direction, ``bytes_up`` or ``bytes_down``."""
    numbers = [float(moved["round"]) for moved in communication["by_round"]]
    sums = accumulate(moved[direction] / 1e6 for moved in communication["by_round"])
    return tuple(zip(numbers, sums, strict=True))


def _role(kind: str) -> str:
    """Return the role that the colour of a kind of features comes from."""
    return ROLES.get(kind, "local")


def _range(values: Sequence[float], high: float | None, label: str) -> Axis:
    """Return an axis for some values.

    It begins at 0, at the tenth below a negative value, or at 0.5 where no value is below that, and ends at ``high``.
    Without ``high`` it begins at 0, ends where the values need it, and may be logarithmic if all of them are positive.
    """
    lowest = min(values, default=0.0)
    if high is None:
        return Axis(label, low=0.0, digits=3, can_log=lowest > 0)
    low = math.floor(10 * min(lowest, 0.0)) / 10
    if lowest >= 0.5:
        low = 0.5
    return Axis(label, low=low, high=high, digits=3)
