"""The route ``/metrics``: counts and times of answers since the start, in Prometheus' text format."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..answer import Answer, ClassAnswer, PairId
from ..inputs_state import InputsState
from ..inputs_watch import InputsWatch
from ..pair import Pair
from ..predictor import Observation
from ..sources.loop import SourceLoop
from .messages import Access, Request, Response, Route

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""The upper bounds of the histogram's buckets, in seconds."""

STAGES = ("decode", "encode", "head")
"""The stages of an answer that have a histogram."""

_MOST_LABELS = 200
"""The most classes with a counter of their own; further ones are counted as ``other``."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


_SOURCE_COUNTS = {
    "answered": "Inputs of a source that were answered.",
    "refused": "Inputs of a source that could not be answered.",
    "dropped": "Inputs of a source that came faster than they could be answered.",
    "lost": "Times that a source was lost.",
}
"""The counts of `FeedState` that are shown, and what they mean."""


class Histogram:
    """A cumulative histogram: how many values are at most each bucket's upper bound, their count and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * len(BUCKETS_S)
        self._total = 0
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one value."""
        self._total += 1
        self._sum_s += seconds
        for bucket, upper_bound in enumerate(BUCKETS_S):
            if seconds <= upper_bound:
                self._counts[bucket] += 1

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterable[str]:
        """Yield the lines of the histogram."""
        for upper_bound, count in zip(BUCKETS_S, self._counts, strict=True):
            yield _sample(f"{name}_bucket", {**labels, "le": f"{upper_bound:g}"}, count)
        yield _sample(f"{name}_bucket", {**labels, "le": "+Inf"}, self._total)
        yield _sample(f"{name}_sum", labels, self._sum_s)
        yield _sample(f"{name}_count", labels, self._total)


class Metrics:
    """Counts every answer, and serves the counts at ``/metrics``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_state: Counter[str] = Counter()
        self._unknown = 0
        self._seconds = {stage: Histogram() for stage in STAGES}
        self._pair: PairId | None = None
        self._switches = 0
        self._feeds: Sequence[SourceLoop[Any]] = ()
        self._inputs: InputsWatch | None = None

    def show_sources(self, feeds: Sequence[SourceLoop[Any]]) -> None:
        """Include the states of these sources from now on."""
        self._feeds = feeds

    def show_inputs(self, inputs: InputsWatch) -> None:
        """Include from now on whether inputs have changed."""
        self._inputs = inputs

    def on_answer(self, observation: Observation) -> None:
        """Count an answer; see `Observer`."""
        answer = observation.answer
        label = _counted_label(answer)
        with self._lock:
            if label not in self._by_state and len(self._by_state) >= _MOST_LABELS:
                label = "other"
            self._by_state[label] += 1
            if isinstance(answer, ClassAnswer) and answer.is_unknown:
                self._unknown += 1
            for stage, milliseconds in vars(answer.stages).items():
                self._seconds[stage].add(milliseconds / 1000)

    def on_switch(self, pair: Pair) -> None:
        """Count a switch to another pair; see `Observer`."""
        with self._lock:
            if self._pair is not None:
                self._switches += 1
            self._pair = pair.id

    def routes(self) -> Iterable[Route]:
        """Yield the route."""
        yield Route("GET", "/metrics", Access.ASK, self._show)

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        with self._lock:
            lines = _header_lines("headwater_predictions_total", "counter", "Answers by class.")
            lines += [
                _sample("headwater_predictions_total", {"class": label}, n) for label, n in self._by_state.items()
            ]
            lines += _header_lines(
                "headwater_unknown_total", "counter", "Answers to inputs unlike all training samples."
            )
            lines.append(_sample("headwater_unknown_total", {}, self._unknown))
            lines += _header_lines("headwater_prediction_seconds", "histogram", "Seconds of each stage of an answer.")
            for stage, histogram in self._seconds.items():
                lines += histogram.lines("headwater_prediction_seconds", {"stage": stage})
            lines += _header_lines(
                "headwater_pair_switches_total", "counter", "Times that another head or encoder came in."
            )
            lines.append(_sample("headwater_pair_switches_total", {}, self._switches))
            if self._pair is not None:
                lines += _header_lines("headwater_head_info", "gauge", "The encoder and the head that answer.")
                lines.append(_sample("headwater_head_info", self._pair.as_json(), 1))
        if self._feeds:
            lines += self._source_lines()
        state = InputsState.NOT_ENOUGH if self._inputs is None else self._inputs.status.state
        if state is not InputsState.NOT_ENOUGH:
            lines += _header_lines(
                "headwater_inputs_changed", "gauge", "1 while inputs are unlike what the head learned from."
            )
            lines.append(_sample("headwater_inputs_changed", {}, state is InputsState.CHANGED))
        return "\n".join(lines) + "\n"

    def _source_lines(self) -> list[str]:
        """Return the lines of the sources."""
        lines = _header_lines("headwater_source_up", "gauge", "1 while a source gives new inputs.")
        for feed in self._feeds:
            lines.append(_sample("headwater_source_up", {"source": feed.name}, feed.state.condition == "ok"))
        for count, about in _SOURCE_COUNTS.items():
            name = f"headwater_source_{count}_total"
            lines += _header_lines(name, "counter", about)
            for feed in self._feeds:
                lines.append(_sample(name, {"source": feed.name}, getattr(feed.state, count)))
        return lines

    def _show(self, _request: Request) -> Response:
        return Response(200, self.text().encode(), CONTENT_TYPE)


def _counted_label(answer: Answer) -> str:
    """Return the label under which an answer is counted: its class, ``normal``, ``anomaly`` or ``number``."""
    if isinstance(answer, ClassAnswer):
        return answer.label
    return "number" if answer.is_anomaly is None else answer.state


def _header_lines(name: str, kind: str, about: str) -> list[str]:
    """Return the two comment lines that begin a metric."""
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """Return the line of one value, with its labels in braces."""
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    pairs = ",".join(f'{label}="{text.translate(escapes)}"' for label, text in labels.items())
    braces = f"{{{pairs}}}" if pairs else ""
    number = int(value) if isinstance(value, bool) else value
    return f"{name}{braces} {number!r}"
