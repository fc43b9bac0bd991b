"""``headwater traces``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.core.children import stop_on_signals
from edge_agent.core.errors import MissingCapability

from ..journal.store import Journal
from ..state.store import StateFolder
from ..text import counted
from ..views.runs import replay
from ..views.spans import Span, spans_of
from .options import INTERRUPTED, Config, Json, State, state_path
from .output import present

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

LOOK_EVERY_S = 2.0
SENT_AT_ONCE = 500

RunName = Annotated[str | None, typer.Argument(metavar="RUN", help="Only this run; default: all.")]
Follow = Annotated[bool, typer.Option("--follow", help="Go on until stopped, with what has ended meanwhile.")]


def traces(
    run: RunName = None, config: Config = None, state: State = None, follow: Follow = False, as_json: Json = False
) -> None:
    """Send runs as traces to an OpenTelemetry collector: the run, its rounds, and the phases of each.

    Where to is in the environment, as OpenTelemetry defines it: OTEL_EXPORTER_OTLP_ENDPOINT and its like. The spans are
    worked out from the journal beside the coordinator, with ids from the run's own: a restart continues the trace.
    Without --follow all spans that have ended are sent, once.

    Example: headwater traces --follow --config coordinator.toml
    """
    send = sender(exporter())
    with StateFolder(state_path(config, state)).look() as folder, stop_on_signals() as stop:
        ended = Ended(folder.journal, run)
        while True:
            new = ended.read()
            for begin in range(0, len(new), SENT_AT_ONCE):
                send(new[begin : begin + SENT_AT_ONCE])
            if not follow or stop.wait(LOOK_EVERY_S):
                break
        spans = len(ended.known)
        runs = len({of for of, _ in ended.known})
        result = {"spans": spans, "runs": runs}
        present(result, [f"{counted(spans, 'span')} of {counted(runs, 'run')} sent"], as_json=as_json)
        if stop.signal == signal.SIGINT:
            raise typer.Exit(INTERRUPTED)


class Ended:
    """The spans that have ended in a journal, each once."""

    def __init__(self, journal: Journal, run: str | None = None) -> None:
        self._journal = journal
        self._run = run
        self._version: object = None
        self._over = set[str]()
        self.known = set[tuple[str, str]]()
        """Trace and id of those that were read."""

    def read(self) -> list[Span]:
        """Return the spans that have ended since the last call; runs that are over are not read again.

        Raises:
            UnknownName: no such run.
        """
        version = self._journal.version()
        new = list[Span]()
        if version == self._version:
            return new
        self._version = version
        if self._run is not None:
            replay(self._journal, self._run)  # an unknown one is named, with the nearest
        for run in [self._run] if self._run is not None else self._journal.runs():
            if run not in self._over:
                spans = list(spans_of(self._journal.entries(run)))
                new += [span for span in spans if (span.trace, span.id) not in self.known]
                self._over |= {run} if spans and spans[-1].name == "run" else set()
        self.known |= {(span.trace, span.id) for span in new}
        return new


def exporter() -> SpanExporter:
    """Return what sends spans to the collector that the environment names.

    Raises:
        MissingCapability: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise MissingCapability.package(
            "opentelemetry-exporter-otlp-proto-http", "otel", "'headwater traces'"
        ) from error
    made: SpanExporter = OTLPSpanExporter()
    return made


def sender(to: SpanExporter) -> Callable[[Iterable[Span]], None]:
    """Return a function that sends spans of ours by an exporter of OpenTelemetry.

    It raises HeadwaterError where the collector does not take them.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    from edge_agent import __version__
    from edge_agent.core.errors import HeadwaterError

    resource = Resource.create({"service.name": "headwater", "service.version": __version__})

    def context(span: Span, of: str) -> SpanContext:
        return SpanContext(
            int(span.trace, 16), int(of, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )

    def readable(span: Span) -> Any:
        return ReadableSpan(
            name=span.name,
            context=context(span, span.id),
            parent=context(span, span.parent) if span.parent else None,
            resource=resource,
            attributes=span.attributes,
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=int(span.begin.timestamp() * 1e9),
            end_time=int(span.end.timestamp() * 1e9),
        )

    def send(spans: Iterable[Span]) -> None:
        if to.export([readable(span) for span in spans]) is not SpanExportResult.SUCCESS:
            raise HeadwaterError(
                "the OpenTelemetry collector does not take the spans; is OTEL_EXPORTER_OTLP_ENDPOINT right, and does "
                "it run? Nothing is lost: the journal has them, and the next call sends them again"
            )

    return send
