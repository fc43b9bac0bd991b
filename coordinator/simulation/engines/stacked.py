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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from edge_agent import methods
from edge_agent.agent.runner import fault
from edge_agent.client.stacked import Convolutions, Schedule, Stack, has_norm, has_unfolding, obstacle, schedule
from edge_agent.errors import HeadwaterError, RunFailed, TrainingFailed
from edge_agent.methods import Client, Method
from edge_agent.task import Tensors
from edge_agent.training.loops import diverged
from edge_agent.training.parts import Parts
from edge_agent.wire.messages import Fault, UpdateManifest

from ..client_tasks import Answer, HalfRound, Shared, answer, attempt, is_out_of_memory
from .base import Done, Work

log = logging.getLogger(__name__)

MOST_AT_ONCE = 256
MOST_UPDATE_BYTES = 1 << 30
"""Updates of one stack are in the host's memory until the coordinator has taken them."""


class Stacked:
    """An engine that trains many clients in one pass."""

    name, workers = "stacked", 1

    def __init__(self, shared: Shared, *, always: bool = False, measure: Measure | None = None) -> None:
        """``always``: also where one after another would be faster. ``measure`` times some work."""
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
        """No process of its own."""
        return ()

    @property
    def figures(self) -> dict[str, Any]:
        """How many training jobs were done at once in this process, on which device, and why not others."""
        result = self._verdict or Verdict(None, "nobody has trained")
        stacked = {
            "jobs": self._stacked,
            "of": self._jobs,
            "device": device_name(self._device),
            "because": result.reason,
            "convolutions": result.convolutions,
            "seconds_of_a_step": dict(result.seconds),
            "bits_of_serial": not self._stacked,
        }
        return {"stacked": stacked}

    @property
    def room(self) -> int:
        """As many as are done at once."""
        return max(0, self._most - len(self._given))

    @property
    def is_busy(self) -> bool:
        """Whether any job was given that has not been taken."""
        return bool(self._given or self._done)

    def start(self) -> None:
        """Nothing to do: the first clients that train decide how."""

    def give(self, work: Work) -> None:
        """Queue the job; `take` runs it."""
        self._given.append(work)

    def take(self) -> Done:
        """Run the first job, and at once with it all others that can be.

        Raises:
            RunFailed: nothing was given.
        """
        if not self._done:
            self._work()
        return self._done.popleft()

    def close(self) -> None:
        """Nothing to do: nothing runs between two calls."""

    # --- inside ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if not self._given:
            raise RunFailed("internal error: no job was queued; please report this")
        first = self._given.pop(0)
        self._jobs += first.job.purpose == "train"
        method = self._method(first)
        alike = [] if method is None else [work for work in self._given if self._is_alike(first, work)]
        if method is None or not (alike or self._always):
            self._alone(first)
            return
        self._given = [work for work in self._given if work not in alike]
        self._jobs += len(alike)
        self._together(method, [first, *alike])

    def _alone(self, work: Work) -> None:
        result = answer(self._shared, work.client, work.job, work.received())
        self._done.append(Done.of(work, result))

    def _method(self, work: Work) -> Method | None:
        """The method of a job that can be done at once with others; None where it cannot."""
        if work.job.purpose != "train" or not self._has_enough(work):
            return None
        method = methods.create(work.job.method, work.job.params)
        is_standard = method.has_standard_update()
        if self._verdict is None:
            told = f"method '{method.name}' trains in a way of its own" if not is_standard else obstacle(self._model)
            if told:
                self._give_up(told)
        is_off = not is_standard or (self._verdict is not None and self._verdict.convolutions is None)
        return None if is_off else method

    def _has_enough(self, work: Work) -> bool:
        """Whether batches have two samples for batch norm; a client with one trains alone, and reports the error."""
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

    def _together(self, method: Method, works: Sequence[Work]) -> None:
        """Train in order of samples; in two halves where memory is short, one by one where stacking fails."""
        works = sorted(works, key=lambda work: -len(self._shared.division.clients[work.client].train))
        is_short = False
        try:
            verdict = self._verdict or self._try(method, works)
            if verdict.convolutions is not None:
                self._train(method, works, verdict)
                return
        except RuntimeError as error:
            is_short = is_out_of_memory(error) and len(works) > 1
            if not is_short:
                self._give_up(f"it cannot be done: {' '.join(str(error).split())[:300]}")
        if is_short:  # out here, where the error does not hold on to the memory any more
            self._halve(method, works)
            return
        for work in works:
            self._alone(work)

    def _halve(self, method: Method, works: Sequence[Work]) -> None:
        """No state has been saved and no reply sent yet: all clients start again."""
        half = len(works) // 2
        self._most = max(1, half)
        log.warning("fewer_at_once device=%s clients=%d", self._device, self._most)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._together(method, works[:half])
        self._together(method, works[half:])

    def _try(self, method: Method, works: Sequence[Work]) -> Verdict:
        """The verdict of the first clients that train, once in a run."""
        starters = [
            Starter(received, functools.partial(self._client, work, received)) for work, received in _fed(works)
        ]
        result = Trial(method, self._model, starters).verdict(self._measure, always=self._always)
        if result.convolutions is None:
            self._give_up(result.reason)
        self._verdict = result
        return result

    def _client(self, work: Work, received: Tensors) -> methods.Client:
        job = work.job.model_copy(update={"evaluate": False})
        return HalfRound.begin(self._shared, work.client, job, received).client

    def _train(self, method: Method, works: Sequence[Work], verdict: Verdict) -> None:
        begin, params = time.perf_counter(), method.params
        stack, begun, gone = Stack(self._model, len(works)), list[HalfRound](), list[tuple[Work, Fault]]()
        there = list[Work]()
        for work, received in _fed(works):
            try:
                begun.append(HalfRound.begin(self._shared, work.client, work.job, received))
            except HeadwaterError as error:
                gone.append((work, fault(error, work.job.run, work.job.round)))
                continue
            stack.hold(len(there))
            there.append(work)
        clients = [one.client for one in begun]
        schedules = [schedule(client, params) for client in clients]
        losses = stack.first(len(there)).train(
            clients, schedules, params, method.frozen, verdict.convolutions or "grouped"
        )
        seconds = (time.perf_counter() - begin) / len(works)
        for place, work in enumerate(there):
            stack.put(place)
            said = self._end(begun[place], schedules[place], losses[:, place], method)
            content = begun[place].resources.outbox.content if isinstance(said, UpdateManifest) else []
            self._done.append(Done.of(work, Answer(said, content, seconds)))
        self._done.extend(Done.of(work, Answer(said, [], seconds)) for work, said in gone)
        self._stacked += len(there)

    def _end(self, begun: HalfRound, own: Schedule, losses: np.ndarray, method: Method) -> UpdateManifest | Fault:
        def work() -> UpdateManifest:
            _tell_loss(begun, own, losses, method)
            return begun.end()

        return attempt(begun.client.id, begun.job, work)


def device_name(device: torch.device) -> str:
    """The product name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _fed(works: Sequence[Work]) -> list[tuple[Work, Tensors]]:
    """Works with what they receive; what several receive is decoded once."""
    read: dict[tuple[str, ...], Tensors] = {}
    result = []
    for work in works:
        key = tuple(blob.ref.digest for blob in work.blobs)
        if key not in read:
            read[key] = work.received()
        result.append((work, read[key]))
    return result


def _tell_loss(begun: HalfRound, own: Schedule, losses: np.ndarray, method: Method) -> None:
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


Measure = Callable[[str, Callable[[], object]], float]
"""Name and work -> seconds."""

TIMED_STEPS, WARM_STEPS = 3, 1
FEW = 4
"""Clients that are timed one by one, and at once where there is no GPU, whose size would decide."""

TOLERANCE, SHORT_TOLERANCE = 1e-4, 0.05
"""Largest difference relative to the change by training, over all tensors, in 64 bits and where there are only 32:
another loss is far above. In 32 bits, batch norm over a few numbers amplifies rounding too much for a tighter bound."""

ONE_BY_ONE = "one by one"


@dataclass(frozen=True)
class Starter:
    """A client at the beginning of a round, repeatable."""

    received: Tensors
    begin: Callable[[], Client]
    """Loads the model, and gives the client with fresh generators."""


@dataclass(frozen=True)
class Verdict:
    """How convolutions of a stack are computed; None: no stack, for this ``reason``."""

    convolutions: Convolutions | None
    reason: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of one client's step, by the way that was timed."""


def timed(device: torch.device) -> Measure:
    """Seconds on a clock, waiting for the device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def measure(_: str, work: Callable[[], object]) -> float:
        wait()
        begin = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - begin

    return measure


@dataclass(frozen=True)
class Trial:
    """Clients, the one with the most samples first, of a method with standard training."""

    method: Method
    model: Parts
    starters: Sequence[Starter]

    def verdict(self, measure: Measure, *, always: bool) -> Verdict:
        """Whether and how to train them at once; ``always``: whenever it equals the method's own training."""
        apart, device = self.difference(), next(self.model.parameters()).device
        if not apart <= (TOLERANCE if _has_64_bits(device) else SHORT_TOLERANCE):
            return Verdict(None, f"it would differ from method '{self.method.name}' by {apart:.2g} of a step")
        if always:
            return Verdict("grouped", "asked for")
        seconds = self.seconds(measure)
        best = min(seconds, key=lambda name: seconds[name])
        told = ", ".join(f"{name} {1000 * value:.3g} ms" for name, value in seconds.items())
        if best == ONE_BY_ONE:
            return Verdict(None, f"a client's step takes {told}", seconds)
        return Verdict("unfolded" if best == "unfolded" else "grouped", f"a client's step takes {told}", seconds)

    def difference(self) -> float:
        """Difference of one stacked epoch of two small clients from the method's own, relative to its change."""
        method, pair = self._short(), self.starters[:2]
        try:
            clients = [self._in_64_bits(place, starter) for place, starter in enumerate(pair)]
            before, alone, together = (Stack(self.model, len(pair)) for _ in range(3))
            for place, starter in enumerate(pair):
                clients[place] = self._in_64_bits(place, starter)
                before.hold(place)
                together.hold(place)
                method.local_update(clients[place], starter.received)
                alone.hold(place)
            clients = [self._in_64_bits(place, starter) for place, starter in enumerate(pair)]
            schedules = [schedule(client, method.params) for client in clients]
            together.train(clients, schedules, method.params, method.frozen)
        except TrainingFailed:
            return 0.0  # the same will be said, whoever trains
        finally:
            self.model.float()
        return _distance(alone, together) / (_distance(alone, before) or 1.0)

    def _in_64_bits(self, place: int, starter: Starter) -> Client:
        """A client with a few samples, one less than the one before, in 64 bits where the device has them."""
        rows = max(2, self.method.params.batch_size * 3 // 2 + 2 - place)
        self.model.float()
        client = starter.begin()
        few = replace(client, train_inputs=client.train_inputs[:rows], train_labels=client.train_labels[:rows])
        if not _has_64_bits(client.device):
            return few
        self.model.double()
        return replace(few, train_inputs=few.train_inputs.double())

    def seconds(self, measure: Measure) -> dict[str, float]:
        """Of one client's step: one by one by the method's own code, and at once in each way that there is."""
        is_cpu = next(self.model.parameters()).device.type == "cpu"
        result = {ONE_BY_ONE: self._one_by_one(measure, self.starters[:FEW])}
        ways: tuple[Convolutions, ...] = ("grouped", "unfolded") if has_unfolding(self.model) else ("grouped",)
        for way in ways:
            result[way] = self._at_once(measure, self.starters[:FEW] if is_cpu else self.starters, way)
        return result

    def _short(self) -> Method:
        """The method, with one epoch a round."""
        return type(self.method)(self.method.params.model_copy(update={"local_epochs": 1}))

    def _stack(self, starters: Sequence[Starter]) -> tuple[Stack, list[Client]]:
        stack, clients = Stack(self.model, len(starters)), list[Client]()
        for place, starter in enumerate(starters):
            clients.append(starter.begin())
            stack.hold(place)
        return stack, clients

    def _one_by_one(self, measure: Measure, starters: Sequence[Starter]) -> float:
        method, total, steps = self._short(), 0.0, 0
        for number, starter in enumerate(starters):
            client, rows = starter.begin(), TIMED_STEPS * self.method.params.batch_size
            client = replace(client, train_inputs=client.train_inputs[:rows], train_labels=client.train_labels[:rows])
            if number == 0:
                method.local_update(client, starter.received)
            total += measure(ONE_BY_ONE, functools.partial(method.local_update, client, starter.received))
            steps += len(schedule(client, method.params))
        return total / steps

    def _at_once(self, measure: Measure, starters: Sequence[Starter], way: Convolutions) -> float:
        params = self.method.params.model_copy(update={"local_epochs": max(1, WARM_STEPS + TIMED_STEPS)})
        stack, clients = self._stack(starters)
        full = [schedule(client, params)[: WARM_STEPS + TIMED_STEPS] for client in clients]
        warm, rest = _cut(full, 0, WARM_STEPS), _cut(full, WARM_STEPS, WARM_STEPS + TIMED_STEPS)
        stack.train(clients, warm, params, self.method.frozen, way)
        taken = measure(way, lambda: stack.train(clients, rest, params, self.method.frozen, way))
        return taken / sum(map(len, rest))


def _has_64_bits(device: torch.device) -> bool:
    return device.type != "mps"


def _cut(schedules: Sequence[Schedule], begin: int, end: int) -> list[Schedule]:
    return [one[begin:end] for one in schedules]


def _distance(one: Stack, other: Stack) -> float:
    """Between all their tensors, as if they were one vector."""
    pairs = ((tensor.double(), other.tensors[name].double()) for name, tensor in one.tensors.items())
    return math.sqrt(sum(float((mine - theirs).square().sum()) for mine, theirs in pairs))
