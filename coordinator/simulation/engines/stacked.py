"""Engine ``stacked``: the clients of a cohort trained at once on one device, where that is possible and faster.

On a GPU a small model leaves most of the chip idle; many of them in one pass do not. What comes out differs from the
other engines by rounding, so its bits are its own. A method whose local training is not plain, or a model that cannot
be stacked, is trained one client after another on the same device, and so is everybody where a trial finds that faster.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edge_agent import methods
from edge_agent.agent.runner import fault
from edge_agent.client.stacked import Schedule, Stack, has_norm, obstacle, schedule
from edge_agent.errors import HeadwaterError, RunFailed
from edge_agent.methods import Method
from edge_agent.methods.base import Plain
from edge_agent.task import Tensors
from edge_agent.training.loops import diverged
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Fault, UpdateManifest

from ..duties import Answer, Begun, Shared, answer, attempt, is_out_of_memory
from .base import Done, Work
from .trial import Measure, Starter, Trial, Verdict, timed

log = logging.getLogger(__name__)

MOST_AT_ONCE = 256
MOST_UPDATE_BYTES = 1 << 30
"""Updates of one stack lie in the host's memory until the coordinator has taken them."""


@dataclass(frozen=True)
class _Kind:
    """What clients do whose work can be done at once."""

    method: Method
    plain: Plain


class Stacked:
    """An engine that trains many clients in one pass."""

    name, workers = "stacked", 1

    def __init__(self, shared: Shared, *, always: bool = False, measure: Measure | None = None) -> None:
        """``always``: also where one after another would be faster. ``measure`` says how long something takes."""
        self._shared, self._always = shared, always
        self._model = shared.model.model
        self._device = next(self._model.parameters()).device
        self._measure = measure or timed(self._device)
        size = sum(tensor.nbytes for tensor in self._model.state_dict().values())
        self._most: int = max(1, min(MOST_AT_ONCE, MOST_UPDATE_BYTES // size))
        self._verdict: Verdict | None = None
        self._given: list[Work] = []
        self._done = deque[Done]()
        self._jobs = self._stacked = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """None."""
        return ()

    @property
    def figures(self) -> dict[str, Any]:
        """How many jobs of training were done at once since this process began, where, and why not others."""
        found = self._verdict or Verdict(None, "nobody has trained")
        stacked = {
            "jobs": self._stacked,
            "of": self._jobs,
            "device": device_name(self._device),
            "because": found.reason,
            "convolutions": found.convolutions,
            "seconds_of_a_step": dict(found.seconds),
            "bits_of_serial": not self._stacked,
        }
        return {"stacked": stacked}

    @property
    def room(self) -> int:
        """As many as are done at once."""
        return max(0, self._most - len(self._given))

    @property
    def is_busy(self) -> bool:
        """Whether anything was given that has not been taken."""
        return bool(self._given or self._done)

    def start(self) -> None:
        """Nothing to do: the first clients to train show what suits."""

    def give(self, work: Work) -> None:
        """Note it; it is done when somebody asks for it."""
        self._given.append(work)

    def take(self) -> Done:
        """Do what can be done at once with the first that was given, or that alone.

        Raises:
            RunFailed: nothing was given.
        """
        if not self._done:
            self._work()
        return self._done.popleft()

    def close(self) -> None:
        """Nothing is under way between two calls."""

    # --- inside ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if not self._given:
            raise RunFailed("the engine was asked for work that it was not given; this is a mistake of ours, report it")
        first = self._given.pop(0)
        self._jobs += first.job.purpose == "train"
        kind = self._kind(first)
        alike = [] if kind is None else [work for work in self._given if self._is_alike(first, work)]
        if kind is None or not (alike or self._always):
            self._alone(first)
            return
        self._given = [work for work in self._given if work not in alike]
        self._jobs += len(alike)
        self._together(kind, [first, *alike])

    def _alone(self, work: Work) -> None:
        found = answer(self._shared, work.client, work.job, work.received())
        self._done.append(_done(work, found))

    def _kind(self, work: Work) -> _Kind | None:
        """What is known of training that can be done at once; None where it cannot."""
        if work.job.purpose != "train" or not self._has_enough(work):
            return None
        method = methods.create(work.job.method, work.job.params)
        plain = method.plain_update()
        if self._verdict is None:
            told = f"method '{method.name}' trains in a way of its own" if plain is None else obstacle(self._model)
            if told:
                self._give_up(told)
        is_off = plain is None or (self._verdict is not None and self._verdict.convolutions is None)
        return None if is_off or plain is None else _Kind(method, plain)

    def _has_enough(self, work: Work) -> bool:
        """Batch norm makes nothing of a single sample; what it says then is said alone."""
        samples = len(self._shared.division.clients[work.client].train)
        return min(samples, int(work.job.params.get("batch_size", samples))) > 1 or not has_norm(self._model)

    def _is_alike(self, first: Work, work: Work) -> bool:
        mine, other = first.job, work.job
        return (mine.run, mine.round, mine.purpose) == (other.run, other.round, other.purpose) and self._has_enough(
            work
        )

    def _give_up(self, reason: str) -> None:
        self._verdict = Verdict(None, reason)
        log.warning("one_by_one device=%s because=%s", self._device, reason)

    def _together(self, kind: _Kind, works: Sequence[Work]) -> None:
        """In order of their samples. Where memory is short, in two halves; where it cannot be done, one by one."""
        works = sorted(works, key=lambda work: -len(self._shared.division.clients[work.client].train))
        is_short = False
        try:
            verdict = self._verdict or self._try(kind, works)
            if verdict.convolutions is not None:
                self._train(kind, works, verdict)
                return
        except RuntimeError as error:
            is_short = is_out_of_memory(error) and len(works) > 1
            if not is_short:
                self._give_up(f"it cannot be done: {' '.join(str(error).split())[:300]}")
        if is_short:  # out here, where the error does not hold on to the memory any more
            self._halve(kind, works)
            return
        for work in works:
            self._alone(work)

    def _halve(self, kind: _Kind, works: Sequence[Work]) -> None:
        """Nothing has been kept or told yet: everybody begins anew."""
        half = len(works) // 2
        self._most = max(1, half)
        log.warning("fewer_at_once device=%s clients=%d", self._device, self._most)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._together(kind, works[:half])
        self._together(kind, works[half:])

    def _try(self, kind: _Kind, works: Sequence[Work]) -> Verdict:
        """Once in a run: what the first clients to train show."""
        starters = [
            Starter(received, functools.partial(self._client, work, received)) for work, received in _fed(works)
        ]
        found = Trial(kind.method, kind.plain, self._model, starters).verdict(self._measure, always=self._always)
        if found.convolutions is None:
            self._give_up(found.reason)
        self._verdict = found
        return found

    def _client(self, work: Work, received: Tensors) -> methods.Client:
        job = work.job.model_copy(update={"evaluate": False})
        return self._shared.duties(work.client).begin(job, received).client

    def _train(self, kind: _Kind, works: Sequence[Work], verdict: Verdict) -> None:
        begin, params = time.perf_counter(), kind.method.params
        stack, begun, gone = Stack(self._model, len(works)), list[Begun](), list[tuple[Work, Fault]]()
        there = list[Work]()
        for work, received in _fed(works):
            try:
                begun.append(self._shared.duties(work.client).begin(work.job, received))
            except HeadwaterError as error:
                gone.append((work, fault(error, work.job.run, work.job.round)))
                continue
            stack.hold(len(there))
            there.append(work)
        clients = [one.client for one in begun]
        schedules = [schedule(client, params) for client in clients]
        losses = stack.first(len(there)).train(
            clients, schedules, params, kind.plain, verdict.convolutions or "grouped"
        )
        seconds = (time.perf_counter() - begin) / len(works)
        for place, work in enumerate(there):
            stack.put(place)
            said = self._end(begun[place], schedules[place], losses[:, place], kind)
            content = begun[place].duties.outbox.content if isinstance(said, UpdateManifest) else []
            self._done.append(_done(work, Answer(said, content, seconds)))
        self._done.extend(_done(work, Answer(said, [], seconds)) for work, said in gone)
        self._stacked += len(there)

    def _end(self, begun: Begun, own: Schedule, losses: np.ndarray, kind: _Kind) -> UpdateManifest | Fault:
        def work() -> UpdateManifest:
            _tell_loss(begun, own, losses, kind.method)
            return begun.duties.end(begun)

        return attempt(begun.client.id, begun.job, work)


def device_name(device: torch.device) -> str:
    """What the device is called by those who sell it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _fed(works: Sequence[Work]) -> list[tuple[Work, Tensors]]:
    """Works with what they start from; what all of them receive is read once."""
    read: dict[tuple[str, ...], Tensors] = {}
    found = []
    for work in works:
        key = tuple(blob.ref.digest for blob in work.blobs)
        if key not in read:
            read[key] = work.received()
        found.append((work, read[key]))
    return found


def _tell_loss(begun: Begun, own: Schedule, losses: np.ndarray, method: Method) -> None:
    """The last epoch's mean loss, as local training logs it.

    Raises:
        TrainingFailed: that of some epoch is no finite number.
    """
    epochs, params = method.params.local_epochs, method.params
    steps = len(own) // max(1, epochs)
    for epoch in range(1, epochs + 1):
        mine = slice((epoch - 1) * steps, epoch * steps)
        weights = [len(rows) for rows in own[mine]]
        mean = float(np.average(losses[mine], weights=weights))
        if not math.isfinite(mean):
            raise diverged(begun.client, mean, f"{epoch} of {epochs}", {"lr": params.lr})
        begun.client.log["loss"] = mean


def _done(work: Work, found: Answer) -> Done:
    blob = None
    if isinstance(found.said, UpdateManifest):
        blob = Outgoing(found.said.blob, memoryview(b"".join(found.content)))
    return Done(work, found.said, blob, found.seconds)
