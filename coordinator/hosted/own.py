"""What the coordinator computes on data of its own: warm starts before a run, and the proxy's figure after a round.

Both in one process beside it, one thing at a time. A run waits for its warm start, and no round waits for the proxy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.errors import HeadwaterError, RunFailed
from edge_agent.store import read_tensors
from edge_agent.wire.tensors import pieces
from edge_agent.work import Worker

from ..aside import Aside
from ..collect import reason_of
from ..config import ProxyConfig, WarmStartConfig
from ..fleet import Steps, Waiting
from ..keeping import keep
from ..words import counted
from .desk import Desk

if TYPE_CHECKING:
    from ..rounds import RunLoop

log = logging.getLogger(__name__)

PROXY_LIMIT_S = 600.0
"""How long a run that is over waits for figures of its last rounds."""


class OwnWork(Aside):
    """An `Aside` that asks a `Desk`."""

    def __init__(self, proxy: ProxyConfig | None, desk: Desk, worker: Worker) -> None:
        """``worker`` is not shared with others: its thread waits for answers."""
        self._proxy, self._desk, self._worker = proxy, desk, worker
        self._pending: set[tuple[str, int]] = set()

    def prepare(self, loop: RunLoop) -> Steps:
        """The warm start that was asked for, where it has not been made; figures that a kill has taken.

        Raises:
            RunFailed: the warm start cannot be made.
        """
        entries = loop.fleet.state.journal.entries(loop.run, ("warm_started", "round_closed"))
        closed = max((entry.round or 0 for entry in entries), default=0)
        if closed:
            for place in sorted(loop.fleet.state.run(loop.run).folder.glob("proxy-*.safetensors")):
                self._evaluate(loop, int(place.stem.removeprefix("proxy-")), place)
            self.closed(loop, closed)
        elif loop.request.warm_start is not None and not entries:
            yield from self._warm(loop, loop.request.warm_start)

    def closed(self, loop: RunLoop, number: int) -> None:
        """Ask for the proxy's figure where it is due and not known."""
        if not self._is_due(loop, number):
            return
        place = loop.fleet.state.run(loop.run).folder / f"proxy-{number}.safetensors"
        try:
            _keep_for_a_while(loop.fleet.state.blobs.path(loop.checkpoint), place)
        except OSError as error:
            self._tell(loop, number, place)(None, error)
            return
        self._evaluate(loop, number, place)

    def rest(self, loop: RunLoop) -> Steps:
        """Until the figures of the last rounds are there, or have failed."""
        until = loop.fleet.clock() + PROXY_LIMIT_S
        while any(run == loop.run for run, _ in self._pending) and loop.fleet.clock() < until:
            yield Waiting("the shared model is evaluated on the proxy samples", (), until, "proxy")

    def collect(self) -> None:
        """Take what has been answered."""
        self._worker.collect()

    def close(self) -> None:
        """End the process."""
        self._desk.close()
        self._worker.close()

    # --- warm start ------------------------------------------------------------------------------------------------

    def _warm(self, loop: RunLoop, settings: WarmStartConfig) -> Steps:
        place = loop.fleet.state.run(loop.run).folder / "warm.safetensors"
        place.parent.mkdir(parents=True, exist_ok=True)
        question = {"do": "warm", "into": str(place), "settings": settings.model_dump(mode="json"), **_asked(loop)}
        found: list[tuple[dict[str, Any] | None, BaseException | None]] = []
        begin = loop.fleet.stopwatch()
        self._worker.submit("warm start", lambda: self._desk.ask(question), lambda r, e: found.append((r, e)))
        what = f"the encoder learns from {settings.data}, {counted(settings.epochs, 'epoch')}, before the first round"
        try:
            while not found:
                yield Waiting(what, (), None, "warm start")
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
        body = {**told, "encoder_sha256": loop.encoder_sha256()}
        journal.append("warm_started", run=loop.run, digest=digest, body=body)
        loop.forget_blobs()
        place.unlink(missing_ok=True)
        log.info("warm_started run=%s samples=%d accuracy=%s", loop.run, told["samples"], told["accuracy"])

    # --- proxy -----------------------------------------------------------------------------------------------------

    def _evaluate(self, loop: RunLoop, number: int, place: Path) -> None:
        """Ask for the figure of the state that lies at ``place``."""
        if not self._is_due(loop, number):
            place.unlink(missing_ok=True)
            return
        self._pending.add((loop.run, number))
        question = {"do": "proxy", "state": str(place), **_asked(loop), **self._where()}
        self._worker.submit("proxy", lambda: self._desk.ask(question), self._tell(loop, number, place))

    def _is_due(self, loop: RunLoop, number: int) -> bool:
        if self._proxy is None or (number % self._proxy.every and number != loop.request.rounds):
            return False
        if not any(name.startswith("encoder.") for name in loop.state) or (loop.run, number) in self._pending:
            return False
        return not loop.fleet.state.journal.entries(loop.run, ("proxy_evaluated",), round=number)

    def _where(self) -> dict[str, Any]:
        return {} if self._proxy is None else self._proxy.model_dump(mode="json", include={"data", "folder", "device"})

    def _tell(self, loop: RunLoop, number: int, place: Path) -> Callable[[Any, BaseException | None], None]:
        def done(answer: dict[str, Any] | None, error: BaseException | None) -> None:
            self._pending.discard((loop.run, number))
            place.unlink(missing_ok=True)
            if answer is None:
                why = reason_of(error) if error is not None else "no answer"
                log.warning("proxy_failed run=%s round=%d reason=%s", loop.run, number, why)
                return
            with _only_logged(loop.run, number):
                state = loop.fleet.state
                state.journal.append("proxy_evaluated", run=loop.run, round=number, body=answer)
                state.run(loop.run).append_metrics({"kind": "proxy", "round": number, **answer})
            log.info("proxy_evaluated run=%s round=%d acc=%s by=%s", loop.run, number, answer["acc"], answer["by"])

        return done


def _asked(loop: RunLoop) -> dict[str, Any]:
    """What both questions say of the run."""
    request = loop.request
    params, task = loop.method.params.model_dump(mode="json"), request.task.model_dump(mode="json")
    return {"method": request.method, "params": params, "task": task, "seed": request.seed}


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
