"""Engine ``ray``: actors on the machines of a cluster, each one thread and one model; this process has all files.

Samples go to each machine once. What a client keeps between rounds goes with its job and comes back with its answer, so
no folder has to be shared. An actor that dies takes nothing with it: its job is done again, by a new one, from the same
kept state, with the same bits. Every machine needs the same Headwater; the same torch, too, where bits are to be equal.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent import __version__
from edge_agent.agent.local_state import ClientStateFiles, merge, split
from edge_agent.agent.runner import fault
from edge_agent.agent.tasks import kept_before
from edge_agent.data.partition import Division
from edge_agent.errors import HeadwaterError, RunFailed, UsageError
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import UpdateManifest
from edge_agent.wire.tensors import decode, pieces

from ..duties import kept_in
from ..plan import Plan
from .actor import Actor, Bytes, as_bytes
from .base import ANSWERS, Done, Work
from .connection import connected
from .deaths import Deaths
from .shelf import Shelf

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""Silence after which it is said what is waited for."""

SPARE_STORE_BYTES = 512 * 1024**2
"""Room beside the samples, for models on their way; more than that goes to disk, which Ray does by itself."""


@dataclass(frozen=True)
class Orders:
    """What actors are told first, and where their clients' files are, which only this process sees."""

    words: dict[str, Any]
    pools: Callable[[], Sequence[bytes | memoryview]]
    division: Division
    clients: Path
    plan: Plan

    def kept(self, work: Work) -> ClientStateFiles:
        """What a client has kept."""
        return kept_in(self.clients, work.client, work.job.run, self.plan.keep_every)

    @property
    def cpus(self) -> int:
        """CPUs of one actor."""
        return max(1, self.plan.threads)


@dataclass(eq=False)
class _Hand:
    """One actor."""

    number: int
    actor: Any
    pid: int = 0


class Cluster:
    """An engine of Ray actors."""

    name = "ray"

    def __init__(self, orders: Orders, workers: int) -> None:
        """``workers`` 0: as many as the cluster has CPUs for, and no more than clients."""
        self.workers = workers
        self._orders = orders
        self._stack = contextlib.ExitStack()
        self._ray: Any = None
        self._shelf: Shelf[Any] = Shelf(self._lay)
        self._deaths = Deaths()
        self._crew: list[_Hand] = []
        self._asked: dict[Any, tuple[_Hand, Work | None]] = {}
        """What was asked of whom; None: to get ready."""

        self._waiting: list[Work] = []
        self._done: list[Done] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Those of the actors, as far as they are known; they may be on other machines."""
        return tuple(hand.pid for hand in self._crew if hand.pid)

    @property
    def figures(self) -> dict[str, Any]:
        """How many workers there are in the end, and on how many machines."""
        return {"workers": self.workers}

    @property
    def room(self) -> int:
        """Actors without work, those that are still starting included."""
        return self.workers - len(self._at_work()) - len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether any work has not come back."""
        return bool(self._at_work() or self._waiting or self._done)

    def start(self) -> None:
        """Connect, hand out the samples, and start all actors; none is waited for.

        Raises:
            MissingCapability: Ray is not installed.
            RunFailed: there is no cluster.
            UsageError: the cluster has fewer CPUs than workers were asked for.
        """
        content, plan = self._orders.pools(), self._orders.plan
        room = sum(memoryview(piece).nbytes for piece in content) + SPARE_STORE_BYTES
        link = connected(plan.address, cpus=self.workers * self._orders.cpus, store_bytes=room)
        self._ray = self._stack.enter_context(link)
        self._stack.callback(self._dismiss)
        self.workers = self._affordable()
        self._pools = self._ray.put(as_bytes(content))
        self._words = json.dumps({**self._orders.words, "division": self._orders.division.model_dump(mode="json")})
        for number in range(self.workers):
            self._hire(number)

    def give(self, work: Work) -> None:
        """To an idle actor, or to the first that gets ready."""
        self._shelf.expect(work)
        self._waiting.append(work)
        self._hand_out()

    def take(self) -> Done:
        """The next work that comes back.

        Raises:
            RunFailed: actors end before they can begin, or are of another version.
        """
        while not self._done:
            self._listen()
        return self._done.pop(0)

    def close(self) -> None:
        """End all actors at once, and the cluster if it is ours."""
        self._shelf.close()
        self._asked.clear()
        self._stack.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _affordable(self) -> int:
        cpus = int(self._ray.cluster_resources().get("CPU", 0)) // self._orders.cpus
        if self.workers > cpus:
            raise UsageError(
                f"{self.workers} workers, but the cluster has CPUs for {cpus}; ask for fewer with --workers"
            )
        return self.workers or max(1, min(cpus, len(self._orders.division.clients)))

    def _gpus(self) -> float:
        """Each actor's share of the cluster's GPUs; without one it does not even see them."""
        if not self._orders.plan.device.startswith("cuda"):
            return 0.0
        return min(1.0, float(self._ray.cluster_resources().get("GPU", 0)) / self.workers)

    def _hire(self, number: int) -> None:
        options = {"num_cpus": self._orders.cpus, "num_gpus": self._gpus() or None, "max_restarts": 0}
        actor = self._ray.remote(Actor).options(**options).remote(self._words, self._pools)
        hand = _Hand(number, actor)
        self._crew.append(hand)
        self._asked[actor.ready.remote()] = (hand, None)

    def _at_work(self) -> list[Work]:
        return [work for _, work in self._asked.values() if work is not None]

    def _lay(self, blob: Outgoing) -> Any:
        return self._ray.put(as_bytes([blob.data]))

    def _hand_out(self) -> None:
        asked = {hand for hand, _ in self._asked.values()}
        idle = [hand for hand in self._crew if hand not in asked]
        while idle and self._waiting:
            work = self._waiting.pop(0)
            try:
                kept = merge(*self._orders.kept(work).before(kept_before(work.job)))
            except HeadwaterError as error:
                self._finish(Done(work, fault(error, work.job.run, work.job.round), None, 0.0))
                continue
            hand, job = idle.pop(0), work.job.model_dump_json()
            answer = hand.actor.work.remote(work.client, job, as_bytes(pieces(kept)), *self._shelf.take(work))
            self._asked[answer] = (hand, work)

    def _listen(self) -> None:
        """Wait for one answer; all that have come are heard."""
        waited = list(self._asked)
        done, _ = self._ray.wait(waited, num_returns=1, timeout=PATIENCE_S)
        if not done:
            free = self._ray.available_resources().get("CPU", 0)
            starting = sum(work is None for _, work in self._asked.values())
            log.warning("waiting_for actors=%d starting=%d free_cpus=%g", len(waited), starting, free)
        for answer in done:
            self._hear(answer, *self._asked.pop(answer))
        self._hand_out()

    def _hear(self, answer: Any, hand: _Hand, work: Work | None) -> None:
        try:
            found = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            self._bury(hand, work, _reason(error))
            return
        if work is None:
            self._is_ready(hand, found)
        else:
            self._came_back(work, *found)

    def _is_ready(self, hand: _Hand, who: dict[str, Any]) -> None:
        import torch

        self._deaths.began()
        hand.pid = who["pid"]
        if who["software"] != __version__:
            raise RunFailed(
                f"worker {hand.number} has Headwater {who['software']}, this is {__version__}; "
                "install the same on all machines of the cluster"
            )
        if who["torch"] != torch.__version__:
            log.warning("torch_differs worker=%d has=%s here=%s", hand.number, who["torch"], torch.__version__)

    def _came_back(self, work: Work, words: str, update: Bytes, kept: Bytes) -> None:
        """What the client keeps is in its file before anybody hears of its update."""
        told = json.loads(words)
        if told["kept_round"] is not None:
            self._orders.kept(work).write(told["kept_round"], *split(decode(kept.data)))
        said = ANSWERS[told["type"]].model_validate_json(told["said"])
        blob = Outgoing(said.blob, update.data) if isinstance(said, UpdateManifest) else None
        self._finish(Done(work, said, blob, float(told["seconds"])))

    def _finish(self, done: Done) -> None:
        self._shelf.forget(done.work)
        self._done.append(done)

    def _bury(self, hand: _Hand, work: Work | None, why: str) -> None:
        """An actor is gone, or no good: another one takes its place, and its work."""
        self._crew.remove(hand)
        self._ray.kill(hand.actor)
        log.warning("worker_died number=%d of=%s", hand.number, why)
        if work is None:
            self._deaths.before_work(why)
        elif (given_up := self._deaths.given_up(work, why)) is not None:
            self._finish(given_up)
        else:
            self._waiting.insert(0, work)
        self._hire(hand.number)

    def _dismiss(self) -> None:
        for hand in self._crew:
            self._ray.kill(hand.actor)
        self._crew.clear()


def _reason(error: BaseException) -> str:
    """What Ray says of it, without the pages in between: where it begins, and the error that it ends with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason was given"]
    told = lines[:1] if len(lines) == 1 else [lines[0], lines[-1]]
    return f"{type(error).__name__}: {' / '.join(line[:200] for line in told)}"
