"""``/metrics``: predictions and their times in Prometheus' text format, counted since the start."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..answer import ClassAnswer, PairId
from ..inputs_state import InputsState
from ..inputs_watch import InputsWatch
from ..pair import Pair
from ..predictor import Observation
from ..sources.loop import SourceLoop
from .messages import Access, Request, Response, Route

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper ends of the buckets of times, seconds."""

STAGES = ("decode", "encode", "head")
_MOST_LABELS = 200
"""Classes that have a counter of their own; further ones count as ``other``."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """How many values were not above each bucket's end, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * len(BUCKETS_S)
        self._total = 0
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one value."""
        self._total += 1
        self._sum_s += seconds
        for number, end in enumerate(BUCKETS_S):
            if seconds <= end:
                self._counts[number] += 1

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterable[str]:
        """Yield the samples of the histogram."""
        for end, count in zip(BUCKETS_S, self._counts, strict=True):
            yield _sample(f"{name}_bucket", {**labels, "le": f"{end:g}"}, count)
        yield _sample(f"{name}_bucket", {**labels, "le": "+Inf"}, self._total)
        yield _sample(f"{name}_sum", labels, self._sum_s)
        yield _sample(f"{name}_count", labels, self._total)


class Metrics:
    """Counts every answer, and shows the counts at ``/metrics``."""

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
        """Show the states of sources, too, from now on."""
        self._feeds = feeds

    def show_inputs(self, inputs: InputsWatch) -> None:
        """Show whether inputs have changed, too, from now on."""
        self._inputs = inputs

    def on_answer(self, observation: Observation) -> None:
        """Count an answer; see `Observer`."""
        answer = observation.answer
        label = answer.label if isinstance(answer, ClassAnswer) else answer.state
        if not isinstance(answer, ClassAnswer) and answer.is_anomaly is None:
            label = "number"
        with self._lock:
            if label not in self._by_state and len(self._by_state) >= _MOST_LABELS:
                label = "other"
            self._by_state[label] += 1
            if isinstance(answer, ClassAnswer) and answer.is_unknown:
                self._unknown += 1
            for stage, milliseconds in vars(answer.stages).items():
                self._seconds[stage].add(milliseconds / 1000)

    def on_switch(self, pair: Pair) -> None:
        """Note the pair that answers from now on."""
        with self._lock:
            if self._pair is not None:
                self._switches += 1
            self._pair = pair.id

    def routes(self) -> Iterable[Route]:
        """Return the route."""
        yield Route("GET", "/metrics", Access.ASK, self._show)

    def text(self) -> str:
        """Return all counts in Prometheus' text format."""
        with self._lock:
            lines = _head("headwater_predictions_total", "counter", "Answers by class.")
            lines += [
                _sample("headwater_predictions_total", {"class": label}, n) for label, n in self._by_state.items()
            ]
            lines += _head("headwater_unknown_total", "counter", "Answers to inputs unlike all training samples.")
            lines.append(_sample("headwater_unknown_total", {}, self._unknown))
            lines += _head("headwater_prediction_seconds", "histogram", "Seconds of each stage of an answer.")
            for stage, histogram in self._seconds.items():
                lines += histogram.lines("headwater_prediction_seconds", {"stage": stage})
            lines += _head("headwater_pair_switches_total", "counter", "Times that another head or encoder came in.")
            lines.append(_sample("headwater_pair_switches_total", {}, self._switches))
            if self._pair is not None:
                lines += _head("headwater_head_info", "gauge", "The encoder and the head that answer.")
                lines.append(_sample("headwater_head_info", self._pair.as_json(), 1))
        if self._feeds:
            lines += self._source_lines()
        state = InputsState.NOT_ENOUGH if self._inputs is None else self._inputs.status.state
        if state is not InputsState.NOT_ENOUGH:
            lines += _head("headwater_inputs_changed", "gauge", "1 while inputs are unlike what the head learned from.")
            lines.append(_sample("headwater_inputs_changed", {}, state is InputsState.CHANGED))
        return "\n".join(lines) + "\n"

    def _source_lines(self) -> list[str]:
        """Return the samples of the sources."""
        lines = _head("headwater_source_up", "gauge", "1 while a source gives new inputs.")
        for feed in self._feeds:
            lines.append(_sample("headwater_source_up", {"source": feed.name}, feed.state.condition == "ok"))
        lines += _head("headwater_source_answered_total", "counter", "Inputs of a source that were answered.")
        for feed in self._feeds:
            lines.append(_sample("headwater_source_answered_total", {"source": feed.name}, feed.state.answered))
        lines += _head("headwater_source_refused_total", "counter", "Inputs of a source that could not be answered.")
        for feed in self._feeds:
            lines.append(_sample("headwater_source_refused_total", {"source": feed.name}, feed.state.refused))
        return lines

    def _show(self, _request: Request) -> Response:
        return Response(200, self.text().encode(), CONTENT_TYPE)


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    pairs = ",".join(f'{label}="{text.translate(escapes)}"' for label, text in labels.items())
    shown = f"{{{pairs}}}" if pairs else ""
    return f"{name}{shown} {int(value) if isinstance(value, bool) else value!r}"
