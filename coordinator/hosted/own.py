"""What the coordinator computes on data of its own: warm starts before a run, and the proxy's figure after a round.

Both in one process beside it, one thing at a time. A run waits for its warm start, and no round waits for the proxy.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.errors import HeadwaterError, RunFailed
from edge_agent.storage import read_tensors
from edge_agent.wire.tensors import pieces
from edge_agent.worker import Worker

from ..config import ProxyConfig, WarmStartConfig
from ..fleet.uploads import reason_of
from ..runs.context import Aside, Steps, Waiting
from ..runs.release import encoder_sha256
from ..state.retention import keep
from ..text import counted
from .desk import Desk

if TYPE_CHECKING:
    from ..runs.round_loop import RunLoop
    from ..state.store import StateFolder

log = logging.getLogger(__name__)

PROXY_LIMIT_S = 600.0
"""How long a run that is over waits for figures of its last rounds."""

MOST_REASONS = 10
"""Different failures of the proxy that the journal has of one run; the log has all."""

WHOM = ("the coordinator",)
_PROXY, _WARM = "proxy-{}.safetensors", "warm.safetensors"


@dataclass(frozen=True, eq=False)
class _Figure:
    """A figure that is asked for: the shared model after a round, whose state lies at ``place``."""

    loop: RunLoop
    number: int
    place: Path
    question: dict[str, Any]


class OwnWork(Aside):
    """An `Aside` that asks a `Desk`.

    Of the proxy's figures one is computed and one waits: where that takes longer than rounds do, the newest takes the
    place of the one that waits, so that the figure after the last round always comes.
    """

    def __init__(self, proxy: ProxyConfig | None, desk: Desk, worker: Worker) -> None:
        """``worker`` is not shared with others: its thread waits for answers."""
        self._proxy, self._desk, self._worker = proxy, desk, worker
        self._asked: _Figure | None = None
        self._next: _Figure | None = None

    def start(self, state: StateFolder) -> None:
        """Remove states that were kept for figures of runs that are over by now."""
        unfinished = set(state.journal.unfinished())
        for name in (_PROXY.format("*"), _WARM):
            for place in (state.path / "runs").glob(f"*/{name}"):
                if place.parent.name not in unfinished:
                    _remove(place)

    def prepare(self, loop: RunLoop) -> Steps:
        """The warm start that was asked for, where it has not been made; figures that a kill has taken.

        Raises:
            RunFailed: the warm start cannot be made.
        """
        entries = loop.fleet.state.journal.entries(loop.run, ("warm_started", "round_closed"))
        closed = max((entry.round or 0 for entry in entries), default=0)
        if closed:
            for number, place in _left_over(loop.fleet.state.run(loop.run).folder):
                self._evaluate(loop, number, place)
            self.closed(loop, closed)
        elif loop.request.warm_start is not None and not entries:
            yield from self._warm(loop, loop.request.warm_start)

    def closed(self, loop: RunLoop, number: int) -> None:
        """Ask for the proxy's figure where it is due and not known."""
        if not self._is_due(loop, number):
            return
        place = loop.fleet.state.run(loop.run).folder / _PROXY.format(number)
        try:
            _keep_for_a_while(loop.fleet.state.blobs.path(loop.checkpoint), place)
        except OSError as error:
            _note_failure(loop, number, reason_of(error))
            _remove(place)
            return
        self._evaluate(loop, number, place)

    def rest(self, loop: RunLoop) -> Steps:
        """Until the figures of the last rounds are there, or have failed."""
        until = loop.fleet.clock() + PROXY_LIMIT_S
        while (due := self._of(loop.run)) and loop.fleet.clock() < until:
            rounds = " and ".join(str(figure.number) for figure in due)
            what = f"acc.proxy after round {rounds}, evaluated on the proxy samples"
            yield Waiting(what, WHOM, until, "proxy")
        for figure in due:
            _note_failure(loop, figure.number, f"no figure {PROXY_LIMIT_S:g} s after the last round")
        self.ended(loop.run)

    def ended(self, run: str) -> None:
        """Whatever is asked for the run is dropped, also what is being computed."""
        for figure in self._of(run):
            if figure is self._asked:
                self._desk.drop(figure.question)
                self._asked = None
            else:
                self._next = None
            _remove(figure.place)

    def collect(self) -> None:
        """Take what has been answered."""
        self._worker.collect()

    def close(self) -> None:
        """End the process."""
        self._desk.close()
        self._worker.close()

    # --- warm start ------------------------------------------------------------------------------------------------

    def _warm(self, loop: RunLoop, settings: WarmStartConfig) -> Steps:
        place = loop.fleet.state.run(loop.run).folder / _WARM
        place.parent.mkdir(parents=True, exist_ok=True)
        question = {"do": "warm", "into": str(place), "settings": settings.model_dump(mode="json"), **_asked(loop)}
        found: list[tuple[dict[str, Any] | None, BaseException | None]] = []
        begin = loop.fleet.stopwatch()
        self._worker.submit("warm start", lambda: self._desk.ask(question), lambda r, e: found.append((r, e)))
        long = counted(settings.epochs, "epoch")
        what = f"an encoder that learns from {settings.data}, {long}, before the first round"
        try:
            while not found:
                yield Waiting(what, WHOM, None, "warm start")
        finally:
            if not found:  # the run was cancelled
                self._desk.drop(question)
        answer, error = found[0]
        if answer is None:
            raise RunFailed(f"warm start: {reason_of(error) if error is not None else 'no answer'}")
        self._adopt(loop, place, {**answer, "seconds": round(loop.fleet.stopwatch() - begin, 3)})

    def _adopt(self, loop: RunLoop, place: Path, told: dict[str, Any]) -> None:
        """The run goes on from what was learned; in the journal before it is acted upon."""
        journal, blobs = loop.fleet.state.journal, loop.fleet.state.blobs
        state = read_tensors(place)
        digest = blobs.put(*pieces(state))
        loop.state, loop.checkpoint = state, digest
        keep(journal, loop.run, loop.request, 0, digest)
        body = {**told, "encoder_sha256": encoder_sha256(loop)}
        journal.append("warm_started", run=loop.run, digest=digest, body=body)
        loop.forget_blobs()
        place.unlink(missing_ok=True)
        known = "unknown" if told["accuracy"] is None else told["accuracy"]
        log.info("warm_started run=%s samples=%d accuracy=%s", loop.run, told["samples"], known)

    # --- proxy -----------------------------------------------------------------------------------------------------

    def _evaluate(self, loop: RunLoop, number: int, place: Path) -> None:
        """Ask for the figure of the state that lies at ``place``."""
        if not self._is_due(loop, number):
            _remove(place)
            return
        question = {"do": "proxy", "state": str(place), **_asked(loop), **self._where()}
        figure = _Figure(loop, number, place, question)
        if self._asked is None:
            self._ask(figure)
            return
        if self._next is not None:
            log.info("proxy_skipped run=%s round=%d: rounds are faster", self._next.loop.run, self._next.number)
            _remove(self._next.place)
        self._next = figure

    def _ask(self, figure: _Figure) -> None:
        self._asked = figure
        self._worker.submit("proxy", lambda: self._desk.ask(figure.question), functools.partial(self._take, figure))

    def _take(self, figure: _Figure, answer: dict[str, Any] | None, error: BaseException | None) -> None:
        """What has come of a figure; of a run that is over nobody wants to know."""
        if figure is not self._asked:
            return
        self._asked = None
        _remove(figure.place)
        if answer is None:
            _note_failure(figure.loop, figure.number, reason_of(error) if error is not None else "no answer")
        else:
            _note(figure.loop, figure.number, answer)
        following, self._next = self._next, None
        if following is not None:
            self._ask(following)

    def _of(self, run: str) -> list[_Figure]:
        """The figures of a run that are still to come."""
        return [figure for figure in (self._asked, self._next) if figure is not None and figure.loop.run == run]

    def _is_due(self, loop: RunLoop, number: int) -> bool:
        if self._proxy is None or (number % self._proxy.every and number != loop.request.rounds):
            return False
        if not any(name.startswith("encoder.") for name in loop.state):
            return False
        if number in (figure.number for figure in self._of(loop.run)):
            return False
        return not loop.fleet.state.journal.entries(loop.run, ("proxy_evaluated",), round=number)

    def _where(self) -> dict[str, Any]:
        return {} if self._proxy is None else self._proxy.model_dump(mode="json", include={"data", "folder", "device"})


def _note(loop: RunLoop, number: int, answer: dict[str, Any]) -> None:
    with _only_logged(loop.run, number):
        state = loop.fleet.state
        state.journal.append("proxy_evaluated", run=loop.run, round=number, body=answer)
        state.run(loop.run).append_metrics({"kind": "proxy", "round": number, **answer})
    log.info("proxy_evaluated run=%s round=%d acc=%s by=%s", loop.run, number, answer["acc"], answer["by"])


def _note_failure(loop: RunLoop, number: int, why: str) -> None:
    """In the log each time, and once for each reason where people look."""
    log.warning("proxy_failed run=%s round=%d reason=%s", loop.run, number, why)
    with _only_logged(loop.run, number):
        state = loop.fleet.state
        known = {_pattern(str(e.body.get("reason"))) for e in state.journal.entries(loop.run, ("proxy_failed",))}
        if _pattern(why) in known or len(known) >= MOST_REASONS:
            return
        state.journal.append("proxy_failed", run=loop.run, round=number, body={"reason": why})
        state.run(loop.run).append_metrics({"kind": "proxy_failed", "round": number, "reason": why})


def _pattern(reason: str) -> str:
    """A reason without its numbers: those of rounds and processes are others each time."""
    return re.sub(r"\d+", "#", reason)


def _asked(loop: RunLoop) -> dict[str, Any]:
    """What both questions say of the run."""
    request = loop.request
    params, task = loop.method.params.model_dump(mode="json"), request.task.model_dump(mode="json")
    weights = None if request.weights is None else request.weights.model_dump(mode="json")
    return {"method": request.method, "params": params, "task": task, "seed": request.seed, "weights": weights}


def _left_over(folder: Path) -> list[tuple[int, Path]]:
    """Round and place of the states that were kept for figures, the oldest first."""
    found = ((re.fullmatch(r"proxy-(\d+)\.safetensors", place.name), place) for place in folder.glob("proxy-*"))
    return sorted((int(match[1]), place) for match, place in found if match is not None)


def _remove(place: Path) -> None:
    try:
        place.unlink(missing_ok=True)
    except OSError as error:
        log.warning("not_removed path=%s reason=%s", place, reason_of(error))


def _keep_for_a_while(blob: Path, place: Path) -> None:
    """The blob under another name, for the store forgets it when the next round is over."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    try:
        os.link(blob, place)
    except OSError:  # a file system without links
        shutil.copyfile(blob, place)


@contextlib.contextmanager
def _only_logged(run: str, number: int) -> Iterator[None]:
    """A figure that cannot be written is no reason to end anything."""
    try:
        yield
    except (HeadwaterError, OSError) as error:
        log.warning("proxy_not_written run=%s round=%d reason=%s", run, number, reason_of(error))
