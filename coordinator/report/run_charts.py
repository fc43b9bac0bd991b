"""Charts of a run: what each device gains, accuracies, loss, time and bytes by round, and who has which samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from edge_agent.core.worst_tenth import mean_of_worst_tenth

from ..state.noise import Compared, Gain, classify_gain, classify_mean_gain
from ..text import counted
from .charts import MARKERS, Axis, Bars, Key, Lines, Mark, Matrix, Row, Rows, Series, ends, percent, points
from .figures import CURVES, SCOPES, AgentFigures, Curve, RoundFigures, RunFigures

MOST_DEVICES = 60
"""Rows of the chart of devices; of more, those that gain least and most are shown."""

MOST_CELLS = 60
"""Clients and classes of the chart of a partition on a page."""

MOST_PLOTTED = 1000
"""Clients and classes of the same chart in a file."""

LEAST_SPREAD = 5
"""Agents from which the spread over them is drawn."""

SLOW_FIRST = 3.0
"""A first round of more than so many times the others' median reaches beyond the plot."""

EQUAL = 0.05
"""Rounds that differ by no more than this share of their mean are one sentence."""

LEAST_WAIT_S = 0.05
"""Seconds of waiting before a round that are drawn: less is 0.0 in a table."""

NORMAL_95 = 1.959964

NOTHING_DOWN = "0 MB to agents: they still had that model, by its hash, and did not get it again."
"""What rounds mean that sent nothing, as the first ones of a run that repeats another."""

KEYS = tuple(Key(f"acc.{scope}", scope, MARKERS[scope], is_said=scope != "global") for scope in SCOPES)
ACCURACY = "accuracy on held-out samples"

_NAMES: Mapping[Curve, tuple[str, str]] = {
    "global": ("acc.global", "global"),
    "personal": ("acc.personal", "personal"),
    "after": ("acc.personal after training", "plain"),
}
"""Curve -> name and role of its lines."""


def wilson(share: float, count: float) -> tuple[float, float]:
    """The Wilson score interval, 95 %, of a share that was seen in ``count`` samples."""
    if count <= 0:
        return 0.0, 1.0
    square = NORMAL_95**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    reach = (
        NORMAL_95 * math.sqrt(max(0.0, share * (1 - share)) / count + square / (4 * count**2)) / (1 + square / count)
    )
    return max(0.0, middle - reach), min(1.0, middle + reach)


def gains(agents: Iterable[AgentFigures]) -> list[tuple[float, AgentFigures]]:
    """acc.personal - acc.local of each agent that has both, the largest first."""
    known = [(one.acc["personal"] - one.acc["local"], one) for one in agents if {"personal", "local"} <= one.acc.keys()]
    return sorted(known, key=lambda pair: (-pair[0], pair[1].id))


def benefit_sentence(agents: Sequence[AgentFigures]) -> str:
    """What the devices gain from taking part, in a sentence or two; empty where it is not known."""
    known = gains(agents)
    if not known:
        return ""
    local, personal = (fmean(one.acc[scope] for _, one in known) for scope in ("local", "personal"))
    kinds = Counter(_classify(one) for _, one in known)
    # Noise is known only where the devices report how many samples they hold out.
    is_noise_known = not kinds[Gain.UNKNOWN]
    better = kinds[Gain.ABOVE] if is_noise_known else sum(gain > 0 for gain, _ in known)
    more = f"{better} of {counted(len(known), 'device')} {'is' if better == 1 else 'are'} more accurate"
    than = "with the federation than with the best model that each fits alone"
    parts = [f"{more} {than}, by more than noise." if is_noise_known else f"{more} {than}."]
    if kinds[Gain.WITHIN]:
        devices = counted(kinds[Gain.WITHIN], "device")
        parts.append(f"The difference of {devices} is within noise.")
    alone = sorted(one.id for _, one in known if one.better_alone)
    if alone:
        shown = ", ".join(alone[:10]) + (f" and {len(alone) - 10} more" if len(alone) > 10 else "")
        parts.append(f"Better off alone by more than noise: {shown}.")
    else:
        parts.append("No device is better off alone by more than noise.")
    change = f"{points(personal - local)} percentage points"
    if classify_mean(agents) is Gain.WITHIN:
        change += ", within noise"
    parts.append(f"The mean goes from {percent(local)} to {percent(personal)} ({change}).")
    return " ".join(parts)


def _classify(agent: AgentFigures) -> Gain:
    """Return whether a device gains by more than noise."""
    support = None if agent.support is None else round(agent.support)
    return classify_gain(
        agent.acc.get("local"), agent.acc.get("personal"), support, better_alone=agent.better_alone is True
    )


def classify_mean(agents: Iterable[AgentFigures]) -> Gain:
    """Return whether the mean gain is more than noise; UNKNOWN where a device does not report its held-out samples."""
    compared = []
    for _, one in gains(agents):
        if not one.support:
            return Gain.UNKNOWN
        compared.append(Compared(one.acc["local"], one.acc["personal"], round(one.support)))
    return classify_mean_gain(compared)


def benefit(agents: Sequence[AgentFigures]) -> Rows | None:
    """Each device from its local to its personal accuracy, the largest gain first."""
    known = [one for _, one in gains(agents)]
    ranked = {one.id for one in known}
    known += [one for one in agents if one.acc and one.id not in ranked]
    if not known:
        return None
    shown = known
    caption = ""
    if len(known) > MOST_DEVICES:
        half = MOST_DEVICES // 2
        shown = [*known[:half], *known[-half:]]
        caption = f"The {half} devices that gain most and the {half} that gain least, of {len(known)}. "
    keys = tuple(key for key in KEYS if any(key.role in one.acc for one in known))
    has_local = any("local" in one.acc for one in known)
    has_interval = any(one.support for one in shown)
    title = "Accuracy of each device"
    if has_local:
        title = "Benefit of each device"
        caption += "From the best model that the device fits alone to its personal model. "
    if has_interval:
        scopes = "acc.local and acc.personal" if has_local else "acc.personal"
        caption += f"Shaded: 95 % Wilson intervals of {scopes} for the device's held-out samples"
        caption += (
            "; both are of the same samples, so overlapping intervals do not exclude a difference."
            if has_local
            else "."
        )
    return Rows(
        title,
        benefit_sentence(agents) or _listed_accuracies(known),
        Axis(
            ACCURACY,
            low=accuracy_floor(v for one in shown for v in one.acc.values()),
            high=1.0,
            digits=1,
            is_share=True,
        ),
        keys,
        tuple(_row(one, keys) for one in shown),
        caption.rstrip(),
    )


def _row(agent: AgentFigures, keys: Sequence[Key]) -> Row:
    marks = {}
    for key in keys:
        if key.role in agent.acc:
            value = agent.acc[key.role]
            has_interval = key.role != "global" and agent.support and 0 <= value <= 1
            marks[key.name] = Mark(value, *(wilson(value, agent.support or 0.0) if has_interval else ()))
    return Row(agent.id, marks, "; ".join(agent.notes), "bad" if agent.better_alone else "")


def _listed_accuracies(agents: Sequence[AgentFigures]) -> str:
    means = []
    for scope in SCOPES:
        values = [one.acc[scope] for one in agents if scope in one.acc]
        means += [f"acc.{scope} {percent(fmean(values))}"] if values else []
    return f"Mean over devices: {', '.join(means)}."


def accuracy(run: RunFigures) -> Lines | None:
    """Accuracies by rounds done: means, the spread over agents, and the mean of the worst tenth."""
    series = []
    populations = set[int]()
    for scope in CURVES:
        name, role = _NAMES[scope]
        models = run.curve(scope)
        populations |= {len(acc) for _, acc in models}
        is_many = any(len(acc) >= LEAST_SPREAD for _, acc in models)
        band = tuple(_spread(list(acc.values())) for _, acc in models) if is_many else ()
        means = tuple((float(done), fmean(acc.values())) for done, acc in models)
        if means:
            series.append(Series(f"{name}, mean", means, role, band=band))
            worst = tuple((float(done), mean_of_worst_tenth(acc.values())) for done, acc in models)
            if worst != means:
                series.append(Series(f"{name}, worst tenth", worst, role, dashed=True))
    if run.proxy:
        series.append(Series("acc.proxy", tuple((float(one.round), one.acc) for one in run.proxy), "c7"))
    if not series or not any(len(one.points) > 1 for one in series):
        return None
    parts = [
        "Scored as received, before the round's training; the last points are the end of the run, as on the cards."
    ]
    if any(one.role == "plain" for one in series):
        parts.append("After training: the same agents after the round's local training.")
    if any(one.band for one in series):
        parts.append("Shaded: the middle four fifths of the agents.")
    parts += [f"Means are over {min(populations)} to {max(populations)} agents."] if len(populations) > 1 else []
    low = accuracy_floor(y for one in series for _, y in one.points if y is not None)
    return Lines(
        "Accuracy by rounds done",
        ends(series, "after round", percent),
        Axis("rounds done", low=0.0),
        Axis("accuracy", low=low, high=1.0, digits=1, is_share=True),
        tuple(series),
        " ".join(parts),
    )


def loss(rounds: Sequence[RoundFigures]) -> Lines | None:
    """Training loss by round."""
    means = tuple((float(line.round), fmean(line.loss.values())) for line in rounds if line.loss)
    if len(means) < 2:
        return None
    series = Series("training loss, mean", means, "plain")
    return Lines(
        "Training loss by round",
        ends([series]),
        Axis("round"),
        Axis("loss", can_log=True),
        (series,),
        "Mean over agents.",
    )


def cost(rounds: Sequence[RoundFigures]) -> tuple[list[str], list[Bars]]:
    """Time and bytes of the rounds: sentences, and charts of what is not the same in each round."""
    sentences = list[str]()
    charts = list[Bars]()
    for text, chart in (*_seconds(rounds), *_traffic(rounds)):
        sentences.append(text)
        charts += [] if chart is None else [chart]
    return sentences, charts


def _seconds(rounds: Sequence[RoundFigures]) -> Iterator[tuple[str, Bars | None]]:
    known = [(line.round, line.seconds, line.waiting_s or 0.0) for line in rounds if line.seconds is not None]
    if not known:
        return
    totals = [seconds + waiting for _, seconds, waiting in known]
    longest = max(range(len(known)), key=lambda index: totals[index])
    waited = math.fsum(waiting for *_, waiting in known)
    text = f"{counted(len(known), 'round')} took {math.fsum(totals):.1f} s in all"
    text += f", {waited:.1f} s of it waiting for enough agents" if waited >= EQUAL * math.fsum(totals) else ""
    if _are_equal(totals):
        yield f"{text}, {fmean(totals):.2f} s each.", None
        return
    text += f"; the median is {median(totals):.2f} s, "
    text += f"the longest is round {known[longest][0]} with {totals[longest]:.2f} s."
    high, caption = slow_first(known[0][0], totals)
    phases = [Series("from sending the tasks to the end", tuple((float(n), s) for n, s, _ in known), "plain")]
    # The caption counts waiting, so bars show it wherever it is long enough to be read.
    if any(waiting >= LEAST_WAIT_S for *_, waiting in known):
        phases.insert(0, Series("waiting for enough agents", tuple((float(n), w) for n, _, w in known), "c1"))
    chart = Bars(
        "Time of each round", text, Axis("round"), Axis("time", "s", 0.0, high), tuple(phases), caption, stacked=True
    )
    yield text, chart


def slow_first(number: int, seconds: Sequence[float]) -> tuple[float | None, str]:
    """Where the axis of the times of rounds from ``number`` on ends (None: as the data need), and what is beyond it."""
    first = seconds[0]
    others = seconds[1:]
    if not others or max(others) <= 0 or first <= max(SLOW_FIRST * median(others), 1.1 * max(others)):
        return None, ""
    return 1.1 * max(others), f"Round {number} took {first:.1f} s; its bar is broken."


def _traffic(rounds: Sequence[RoundFigures]) -> Iterator[tuple[str, Bars | None]]:
    known = [
        (line.round, (line.bytes_up or 0) / 1e6, (line.bytes_down or 0) / 1e6)
        for line in rounds
        if line.bytes_up is not None or line.bytes_down is not None
    ]
    if not known:
        return
    ups, downs = ([one[side] for one in known] for side in (1, 2))
    text = f"{math.fsum(ups):.2f} MB came from agents and {math.fsum(downs):.2f} MB went to agents in all"
    if _are_equal(ups) and _are_equal(downs):
        moved = f"{fmean(ups):.2f} MB from and {fmean(downs):.2f} MB to agents"
        each = f"; each of {counted(len(known), 'round')} moved {moved}" if len(known) > 1 else ""
        yield f"{text}{each}.", None
        return
    sides = (("from agents", ups, "up"), ("to agents", downs, "down"))
    series = tuple(
        Series(name, tuple((float(one[0]), value) for one, value in zip(known, values, strict=True)), role)
        for name, values, role in sides
    )
    caption = "Payload in MB (millions of bytes), as counted by the coordinator."
    if not all(downs):
        caption += f" {NOTHING_DOWN}"
    yield (
        f"{text}.",
        Bars("Traffic of each round", f"{text}.", Axis("round"), Axis("payload", "MB", 0.0), series, caption),
    )


def _are_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= EQUAL * abs(fmean(values))


def partition(shown: Mapping[str, Any], most: int = MOST_CELLS) -> Matrix:
    """Who has how many training samples of which class; the first ``most`` of more clients or classes.

    ``shown``: ``rule``, ``classes`` (names), and ``clients`` with ``id`` and ``train`` (counts by class); where they
    are known also the ``settings`` of the rule, such as alpha and seed, and the name of the ``data``.
    """
    clients = shown["clients"]
    classes = list(shown["classes"])
    sizes = [sum(one["train"]) for one in clients]
    held = [sum(map(bool, one["train"])) for one in clients]
    summary = (
        f"{counted(len(clients), 'client')} with {_range(sizes)} training samples of {_range(held)} of "
        f"{len(classes)} classes each."
    )
    left_out = [
        f"the first {most} of {len(items)} {name}"
        for items, name in ((clients, "clients"), (classes, "classes"))
        if len(items) > most
    ]
    settings = ", ".join(f"{name} {_setting(value)}" for name, value in shown.get("settings", {}).items())
    of_data = f" of {shown['data']}" if shown.get("data") else ""
    return Matrix(
        f"Partition {shown['rule']}{of_data}{f' ({settings})' if settings else ''}: training samples of each class",
        summary,
        "class",
        "client",
        tuple(classes[:most]),
        tuple(one["id"] for one in clients[:most]),
        tuple(tuple(float(one["train"][row]) for one in clients[:most]) for row in range(min(most, len(classes)))),
        0.0,
        float(max((max(one["train"]) for one in clients), default=1) or 1),
        digits=0,
        zero="·",
        caption=f"{summary} Shown: {' and '.join(left_out)}." if left_out else summary,
    )


def _setting(value: object) -> str:
    """Return a setting of a partition as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def sample_counts(sizes: Sequence[tuple[str, float]]) -> Rows:
    """Samples of each agent, most first; which classes they are of stays on the devices."""
    order = sorted(sizes, key=lambda pair: (-pair[1], pair[0]))
    values = [size for _, size in order]
    summary = f"{counted(len(order), 'agent')} with {_range(values)} training samples."
    key = Key("samples", "plain", "bar")
    rows = tuple(Row(name, {key.name: Mark(size)}) for name, size in order[:MOST_DEVICES])
    caption = f"The {MOST_DEVICES} largest of {len(order)}. " if len(order) > MOST_DEVICES else ""
    caption += "Their classes stay on the devices."
    return Rows("Samples of each agent", summary, Axis("training samples", low=0.0), (key,), rows, caption, "bars")


def accuracy_floor(values: Iterable[float]) -> float:
    """Where an axis of accuracies begins: 0 (or the lowest value below it), or a tenth below where all are higher."""
    lowest = min(values, default=0.0)
    return min(0.0, lowest) if lowest < 0.5 else min(0.9, math.floor(10 * lowest - 0.5) / 10)


def _range(values: Sequence[float]) -> str:
    low = min(values, default=0)
    high = max(values, default=0)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """The tenth and ninetieth percentile."""
    if len(values) < 2:
        return values[0], values[0]
    tenths = quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]
