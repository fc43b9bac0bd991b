"""Charts of a run: what each device gains, accuracies, loss, time and bytes by round, and who has which samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Clients and classes of the chart of a partition in a file."""

LEAST_SPREAD = 5
"""The least number of agents whose spread is drawn."""

SLOW_FIRST = 3.0
"""A first round that took more than this many times the median of the others reaches beyond the plot."""

EQUAL = 0.05
"""Rounds that differ by no more than this share of their mean are described in a sentence instead of a chart."""

LEAST_WAIT_S = 0.05
"""Seconds of waiting before a round that are drawn: less is 0.0 in a table."""

NORMAL_95 = 1.959964
"""95 % of a normal distribution lie within this many standard deviations of its mean."""

NOTHING_DOWN = "0 MB to agents: they still had that model, by its hash, and did not get it again."
"""The explanation of rounds that sent nothing, as the first ones of a run that repeats another."""

KEYS = tuple(Key(f"acc.{scope}", scope, MARKERS[scope], is_said=scope != "global") for scope in SCOPES)
ACCURACY = "accuracy on held-out samples"

_NAMES: Mapping[Curve, tuple[str, str]] = {
    "global": ("acc.global", "global"),
    "personal": ("acc.personal", "personal"),
    "after": ("acc.personal after training", "plain"),
}
"""Curve -> name and role of its lines."""


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the ends (0..1) of the 95 % Wilson score interval of a share that was measured on ``count`` samples.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 1927.
    """
    if count <= 0:
        return 0.0, 1.0
    square = NORMAL_95**2
    variance = max(0.0, share * (1 - share)) / count  # a share from a peer may lie outside 0..1
    middle = (share + square / (2 * count)) / (1 + square / count)
    reach = NORMAL_95 * math.sqrt(variance + square / (4 * count**2)) / (1 + square / count)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def gains(agents: Iterable[AgentFigures]) -> list[tuple[float, AgentFigures]]:
    """Return acc.personal - acc.local of each agent that has both, with the agent; the largest first."""
    compared = list[tuple[float, AgentFigures]]()
    for agent in agents:
        if "personal" in agent.acc and "local" in agent.acc:
            compared.append((agent.acc["personal"] - agent.acc["local"], agent))
    return sorted(compared, key=lambda pair: (-pair[0], pair[1].id))


def benefit_sentence(agents: Sequence[AgentFigures]) -> str:
    """Say in a few sentences what the devices gain from taking part; empty where no device can be compared."""
    compared = gains(agents)
    if not compared:
        return ""
    # 1. How many devices gain, and how many differ by no more than noise.
    kinds = Counter(_classify(agent) for _, agent in compared)
    sentences = [_who_is_more_accurate(compared, kinds)]
    if kinds[Gain.WITHIN]:
        devices = counted(kinds[Gain.WITHIN], "device")
        sentences.append(f"The difference of {devices} is within noise.")
    # 2. Which devices lose: their owners have to know it.
    sentences.append(_who_is_better_alone(compared))
    # 3. What the devices gain in the mean.
    local = fmean(agent.acc["local"] for _, agent in compared)
    personal = fmean(agent.acc["personal"] for _, agent in compared)
    change = f"{points(personal - local)} percentage points"
    if classify_mean(agents) is Gain.WITHIN:
        change += ", within noise"
    sentences.append(f"The mean goes from {percent(local)} to {percent(personal)} ({change}).")
    return " ".join(sentences)


def _who_is_more_accurate(compared: Sequence[tuple[float, AgentFigures]], kinds: Counter[Gain]) -> str:
    """Say how many devices gain from the federation.

    Where every device reports how many samples it holds out, a device counts that gains by more than noise; otherwise
    one that gains at all.
    """
    is_noise_known = not kinds[Gain.UNKNOWN]
    better = kinds[Gain.ABOVE]
    if not is_noise_known:
        better = len([gain for gain, _ in compared if gain > 0])
    verb = "is" if better == 1 else "are"
    devices = f"{better} of {counted(len(compared), 'device')}"
    sentence = f"{devices} {verb} more accurate with the federation than with the best model that each fits alone"
    if is_noise_known:
        return f"{sentence}, by more than noise."
    return f"{sentence}."


def _who_is_better_alone(compared: Sequence[tuple[float, AgentFigures]]) -> str:
    """Name the devices that are better off alone, the first ten of many."""
    better_alone = sorted(agent.id for _, agent in compared if agent.better_alone)
    if not better_alone:
        return "No device is better off alone by more than noise."
    names = ", ".join(better_alone[:10])
    if len(better_alone) > 10:
        names += f" and {len(better_alone) - 10} more"
    return f"Better off alone by more than noise: {names}."


def _classify(agent: AgentFigures) -> Gain:
    """Return whether a device gains by more than noise."""
    support = None if agent.support is None else round(agent.support)
    return classify_gain(
        agent.acc.get("local"), agent.acc.get("personal"), support, better_alone=agent.better_alone is True
    )


def classify_mean(agents: Iterable[AgentFigures]) -> Gain:
    """Return whether the mean gain is more than noise; UNKNOWN where a device does not report its held-out samples."""
    compared = []
    for _, agent in gains(agents):
        if not agent.support:
            return Gain.UNKNOWN
        compared.append(Compared(agent.acc["local"], agent.acc["personal"], round(agent.support)))
    return classify_mean_gain(compared)


def benefit(agents: Sequence[AgentFigures]) -> Rows | None:
    """Return the chart of each device's step from its local to its personal accuracy, the largest gain first.

    None where no device has reported an accuracy.
    """
    scored = _order_by_gain(agents)
    if not scored:
        return None
    # 1. The rows: all devices, or both ends of the order where there are too many.
    shown = _both_ends(scored)
    captions = list[str]()
    if len(shown) < len(scored):
        half = MOST_DEVICES // 2
        captions.append(f"The {half} devices that gain most and the {half} that gain least, of {len(scored)}.")
    # 2. What is compared: without an accuracy of a model that a device fits alone, nothing is.
    scopes = {scope for agent in scored for scope in agent.acc}
    has_local = "local" in scopes
    title = "Accuracy of each device"
    if has_local:
        title = "Benefit of each device"
        captions.append("From the best model that the device fits alone to its personal model.")
    has_intervals = any(agent.support for agent in shown)
    if has_intervals:
        captions.append(_about_intervals(has_local=has_local))
    # 3. The marks, on an axis that begins below the lowest of them.
    keys = tuple(key for key in KEYS if key.role in scopes)
    floor = accuracy_floor(share for agent in shown for share in agent.acc.values())
    return Rows(
        title,
        benefit_sentence(agents) or _describe_mean_accuracies(scored),
        Axis(ACCURACY, low=floor, high=1.0, digits=1, is_share=True),
        keys,
        tuple(_row(agent, keys) for agent in shown),
        " ".join(captions),
    )


def _order_by_gain(agents: Sequence[AgentFigures]) -> list[AgentFigures]:
    """Return the agents that have an accuracy, the largest gain first.

    Agents that cannot be compared follow those that can, in their own order.
    """
    ordered = [agent for _, agent in gains(agents)]
    compared_ids = {agent.id for agent in ordered}
    not_compared = [agent for agent in agents if agent.id not in compared_ids]
    ordered.extend(agent for agent in not_compared if agent.acc)
    return ordered


def _both_ends(agents: list[AgentFigures]) -> list[AgentFigures]:
    """Return the agents, or the first and last `MOST_DEVICES` / 2 of more than so many."""
    if len(agents) <= MOST_DEVICES:
        return agents
    half = MOST_DEVICES // 2
    return [*agents[:half], *agents[-half:]]


def _about_intervals(*, has_local: bool) -> str:
    """Say what the shaded intervals are, and what two overlapping ones do not mean."""
    if not has_local:
        return "Shaded: 95 % Wilson intervals of acc.personal for the device's held-out samples."
    return (
        "Shaded: 95 % Wilson intervals of acc.local and acc.personal for the device's held-out samples; both are of "
        "the same samples, so overlapping intervals do not exclude a difference."
    )


def _row(agent: AgentFigures, keys: Sequence[Key]) -> Row:
    """Return the marks of one device, with intervals where the number of its held-out samples is known."""
    marks = {}
    for key in keys:
        if key.role not in agent.acc:
            continue
        share = agent.acc[key.role]
        # A peer may have sent a share outside 0..1, which has no interval.
        is_share = 0 <= share <= 1
        if agent.support and key.role != "global" and is_share:
            marks[key.name] = Mark(share, *wilson(share, agent.support))
        else:
            marks[key.name] = Mark(share)
    tone = "bad" if agent.better_alone else ""
    return Row(agent.id, marks, "; ".join(agent.notes), tone)


def _describe_mean_accuracies(agents: Sequence[AgentFigures]) -> str:
    """Say what the mean accuracy of each scope is over the devices that have it."""
    means = []
    for scope in SCOPES:
        shares = [agent.acc[scope] for agent in agents if scope in agent.acc]
        if shares:
            means.append(f"acc.{scope} {percent(fmean(shares))}")
    return f"Mean over devices: {', '.join(means)}."


def accuracy(run: RunFigures) -> Lines | None:
    """Return the chart of accuracies by rounds done: means, their spread over agents, means of the worst tenth.

    None where no line has two points.
    """
    series = list[Series]()
    for scope in CURVES:
        series.extend(_lines_of_scope(scope, run.curve(scope)))
    if run.proxy:
        scores = tuple((float(figures.round), figures.acc) for figures in run.proxy)
        series.append(Series("acc.proxy", scores, "c7"))
    longest = max((len(line.points) for line in series), default=0)
    if longest < 2:
        return None
    floor = accuracy_floor(y for line in series for _, y in line.drawn_points)
    return Lines(
        "Accuracy by rounds done",
        ends(series, "after round", percent),
        Axis("rounds done", low=0.0),
        Axis("accuracy", low=floor, high=1.0, digits=1, is_share=True),
        tuple(series),
        " ".join(_notes_on_accuracy(run, series)),
    )


def _lines_of_scope(scope: Curve, models: Sequence[tuple[int, Mapping[str, float]]]) -> Iterator[Series]:
    """Yield the mean accuracy of the models of a scope, and that of the worst tenth where it differs.

    Args:
        scope: What the accuracies are of.
        models: (Rounds done, accuracy of each agent), in order.
    """
    if not models:
        return
    name, role = _NAMES[scope]
    means = tuple((float(done), fmean(shares.values())) for done, shares in models)
    # With fewer agents a spread would say nothing that their mean does not.
    band: tuple[tuple[float, float], ...] = ()
    most_agents = max(len(shares) for _, shares in models)
    if most_agents >= LEAST_SPREAD:
        band = tuple(_spread(list(shares.values())) for _, shares in models)
    yield Series(f"{name}, mean", means, role, band=band)
    worst = tuple((float(done), mean_of_worst_tenth(shares.values())) for done, shares in models)
    if worst != means:
        yield Series(f"{name}, worst tenth", worst, role, dashed=True)


def _notes_on_accuracy(run: RunFigures, series: Sequence[Series]) -> Iterator[str]:
    """Yield what a reader of the lines has to know: when models were scored, and over how many agents."""
    yield "Scored as received, before the round's training; the last points are the end of the run, as on the cards."
    if any(line.role == "plain" for line in series):
        yield "After training: the same agents after the round's local training."
    if any(line.band for line in series):
        yield "Shaded: the middle four fifths of the agents."
    populations = _agents_of_models(run)
    fewest = min(populations, default=0)
    most = max(populations, default=0)
    if fewest < most:
        yield f"Means are over {fewest} to {most} agents."


def _agents_of_models(run: RunFigures) -> list[int]:
    """Return for each model of each scope how many agents have an accuracy of it."""
    populations = list[int]()
    for scope in CURVES:
        populations += [len(shares) for _, shares in run.curve(scope)]
    return populations


def loss(rounds: Sequence[RoundFigures]) -> Lines | None:
    """Return the chart of the training loss by round; None before the second round that has one."""
    means = tuple((float(figures.round), fmean(figures.loss.values())) for figures in rounds if figures.loss)
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
    """Return sentences on time and bytes of the rounds, and charts of what is not the same in each round."""
    sentences = list[str]()
    charts = list[Bars]()
    for sentence, chart in (*_seconds(rounds), *_traffic(rounds)):
        sentences.append(sentence)
        if chart is not None:
            charts.append(chart)
    return sentences, charts


@dataclass(frozen=True)
class _Duration:
    """The time of one round: waiting for agents before it, then from sending its tasks to its end."""

    round: int
    seconds: float
    waiting_s: float

    @property
    def total_s(self) -> float:
        return self.seconds + self.waiting_s


def _seconds(rounds: Sequence[RoundFigures]) -> Iterator[tuple[str, Bars | None]]:
    """Yield what the rounds took, as a sentence, and a chart where they differ; nothing where no time is known."""
    durations = list[_Duration]()
    for figures in rounds:
        if figures.seconds is not None:
            durations.append(_Duration(figures.round, figures.seconds, figures.waiting_s or 0.0))
    if not durations:
        return
    # 1. The sentence: the sum, what of it was waiting, and which round took longest.
    totals = [duration.total_s for duration in durations]
    whole = math.fsum(totals)
    waited = math.fsum(duration.waiting_s for duration in durations)
    sentence = f"{counted(len(durations), 'round')} took {whole:.1f} s in all"
    if waited >= EQUAL * whole:
        sentence += f", {waited:.1f} s of it waiting for enough agents"
    if _are_equal(totals):
        yield f"{sentence}, {fmean(totals):.2f} s each.", None
        return
    longest = max(durations, key=lambda duration: duration.total_s)
    sentence += f"; the median is {median(totals):.2f} s, "
    sentence += f"the longest is round {longest.round} with {longest.total_s:.2f} s."
    # 2. The bars: waiting first where any of it is long enough to be read, because the sentence counts it.
    working = tuple((float(duration.round), duration.seconds) for duration in durations)
    phases = [Series("from sending the tasks to the end", working, "plain")]
    longest_wait_s = max(duration.waiting_s for duration in durations)
    if longest_wait_s >= LEAST_WAIT_S:
        waiting = tuple((float(duration.round), duration.waiting_s) for duration in durations)
        phases.insert(0, Series("waiting for enough agents", waiting, "c1"))
    high, caption = slow_first(durations[0].round, totals)
    time_axis = Axis("time", "s", 0.0, high)
    title = "Time of each round"
    yield sentence, Bars(title, sentence, Axis("round"), time_axis, tuple(phases), caption, stacked=True)


def slow_first(number: int, seconds: Sequence[float]) -> tuple[float | None, str]:
    """Return where an axis of the times of rounds ends, and a sentence on the bar that reaches beyond it.

    The first round often takes longest, because everything is loaded in it. On an axis for all rounds its bar would
    squeeze the others.

    Args:
        number: The number of the first round.
        seconds: The seconds that it took, then those of the rounds that follow.

    Returns:
        The end of the axis in seconds (None: as the data need), and a sentence for the caption (empty: no bar reaches
        beyond the axis).
    """
    first = seconds[0]
    others = seconds[1:]
    if not others or max(others) <= 0:
        return None, ""
    end = 1.1 * max(others)
    if first <= max(SLOW_FIRST * median(others), end):
        return None, ""
    return end, f"Round {number} took {first:.1f} s; its bar is broken."


@dataclass(frozen=True)
class _Payload:
    """What one round moved, in MB (millions of bytes)."""

    round: int
    up_mb: float
    down_mb: float

    @classmethod
    def from_figures(cls, figures: RoundFigures) -> _Payload | None:
        """Return what a round moved; a direction that is not known counts as 0. None where neither is known."""
        if figures.bytes_up is None and figures.bytes_down is None:
            return None
        return cls(figures.round, (figures.bytes_up or 0) / 1e6, (figures.bytes_down or 0) / 1e6)


def _traffic(rounds: Sequence[RoundFigures]) -> Iterator[tuple[str, Bars | None]]:
    """Yield what the rounds moved, as a sentence, and a chart where they differ; nothing where no bytes are known."""
    payloads = list[_Payload]()
    for figures in rounds:
        payload = _Payload.from_figures(figures)
        if payload is not None:
            payloads.append(payload)
    if not payloads:
        return
    # 1. The sentence; where all rounds moved the same it says all that a chart would.
    ups = [payload.up_mb for payload in payloads]
    downs = [payload.down_mb for payload in payloads]
    total = f"{math.fsum(ups):.2f} MB came from agents and {math.fsum(downs):.2f} MB went to agents in all"
    if _are_equal(ups) and _are_equal(downs):
        if len(payloads) > 1:
            moved = f"{fmean(ups):.2f} MB from and {fmean(downs):.2f} MB to agents"
            total += f"; each of {counted(len(payloads), 'round')} moved {moved}"
        yield f"{total}.", None
        return
    # 2. The chart of rounds that differ.
    numbers = [float(payload.round) for payload in payloads]
    series = (
        Series("from agents", tuple(zip(numbers, ups, strict=True)), "up"),
        Series("to agents", tuple(zip(numbers, downs, strict=True)), "down"),
    )
    caption = "Payload in MB (millions of bytes), as counted by the coordinator."
    has_silent_round = 0.0 in downs
    if has_silent_round:
        caption += f" {NOTHING_DOWN}"
    summary = f"{total}."
    yield summary, Bars("Traffic of each round", summary, Axis("round"), Axis("payload", "MB", 0.0), series, caption)


def _are_equal(values: Sequence[float]) -> bool:
    """Return whether all values are within the share `EQUAL` of their mean of each other."""
    return max(values) - min(values) <= EQUAL * abs(fmean(values))


def partition(shown: Mapping[str, Any], most: int = MOST_CELLS) -> Matrix:
    """Return the chart of a partition: how many training samples of which class each client has.

    Args:
        shown: A JSON object with ``rule``, ``classes`` (names), and ``clients`` with ``id`` and ``train`` (counts by
            class); where they are known, also the ``settings`` of the rule, such as alpha and seed, and the name of
            the ``data``.
        most: The most clients and the most classes that the chart has; of more, the first ones are shown.
    """
    # 1. What the partition is, in a sentence on all clients and classes.
    clients = shown["clients"]
    classes = list(shown["classes"])
    sizes = [sum(client["train"]) for client in clients]
    classes_held = [len([count for count in client["train"] if count]) for client in clients]
    summary = (
        f"{counted(len(clients), 'client')} with {_range(sizes)} training samples of {_range(classes_held)} of "
        f"{len(classes)} classes each."
    )
    # 2. Where not all fit, the caption says which ones are shown.
    shortened = []
    if len(clients) > most:
        shortened.append(f"the first {most} of {len(clients)} clients")
    if len(classes) > most:
        shortened.append(f"the first {most} of {len(classes)} classes")
    caption = summary
    if shortened:
        caption += f" Shown: {' and '.join(shortened)}."
    # 3. The cells: a row for each class and a column for each client, as dark as the largest count of all.
    shown_clients = clients[:most]
    shown_classes = tuple(classes[:most])
    cells = tuple(_counts_of_class(shown_clients, position) for position in range(len(shown_classes)))
    darkest = max((max(client["train"]) for client in clients), default=0)
    if darkest == 0:  # a scale needs two ends
        darkest = 1
    return Matrix(
        f"Partition {_rule_and_settings(shown)}: training samples of each class",
        summary,
        "class",
        "client",
        shown_classes,
        tuple(client["id"] for client in shown_clients),
        cells,
        0.0,
        float(darkest),
        digits=0,
        zero="·",
        caption=caption,
    )


def _counts_of_class(clients: Sequence[Mapping[str, Any]], position: int) -> tuple[float, ...]:
    """Return how many training samples each client has of the class at this position."""
    return tuple(float(client["train"][position]) for client in clients)


def _rule_and_settings(shown: Mapping[str, Any]) -> str:
    """Return the rule of a partition with its data and settings, as far as they are known."""
    text = str(shown["rule"])
    if shown.get("data"):
        text += f" of {shown['data']}"
    settings = ", ".join(f"{name} {_setting(value)}" for name, value in shown.get("settings", {}).items())
    if settings:
        text += f" ({settings})"
    return text


def _setting(value: object) -> str:
    """Return a setting of a partition as text."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def sample_counts(sizes: Sequence[tuple[str, float]]) -> Rows:
    """Return the chart of how many samples each agent has, most first; their classes stay on the devices.

    Args:
        sizes: (Agent, number of its training samples).
    """
    order = sorted(sizes, key=lambda pair: (-pair[1], pair[0]))
    counts = [size for _, size in order]
    summary = f"{counted(len(order), 'agent')} with {_range(counts)} training samples."
    key = Key("samples", "plain", "bar")
    rows = tuple(Row(name, {key.name: Mark(size)}) for name, size in order[:MOST_DEVICES])
    caption = "Their classes stay on the devices."
    if len(order) > MOST_DEVICES:
        caption = f"The {MOST_DEVICES} largest of {len(order)}. {caption}"
    return Rows("Samples of each agent", summary, Axis("training samples", low=0.0), (key,), rows, caption, "bars")


def accuracy_floor(values: Iterable[float]) -> float:
    """Return where an axis of accuracies begins.

    That is 0, or the lowest value where that is negative. Where all values are at least 0.5 it is the largest tenth
    that is at least 0.05 below the lowest one, and at most 0.9.
    """
    lowest = min(values, default=0.0)
    if lowest < 0.5:
        return min(0.0, lowest)
    return min(0.9, math.floor(10 * lowest - 0.5) / 10)


def _range(values: Sequence[float]) -> str:
    """Return the lowest and the highest value as text; one number where they are equal."""
    low = min(values, default=0)
    high = max(values, default=0)
    if low == high:
        return f"{low:.0f}"
    return f"{low:.0f} to {high:.0f}"


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the tenth and the ninetieth percentile."""
    if len(values) < 2:
        return values[0], values[0]
    tenths = quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]
