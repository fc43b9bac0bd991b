"""Engine ``stacked``: the clients of a cohort trained at once on one device, where that is possible and faster.

On a GPU a small model leaves most of the chip idle; many of them in one pass do not. The results differ from those of
the other engines by rounding. A method whose local training is not the standard one, or a model that cannot be stacked,
is trained one client after another on the same device, and so are all clients where a trial finds that faster.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from edge_agent import methods
from edge_agent.client.stacked import Convolutions, Schedule, Stack, has_norm, has_unfolding, obstacle, schedule
from edge_agent.core.errors import TrainingFailed
from edge_agent.core.task import Tensors
from edge_agent.methods import Client, Method
from edge_agent.training.loops import diverged
from edge_agent.training.parts import Parts
from edge_agent.wire.messages.up import Fault, UpdateManifest

from ..client_tasks import Answer, HalfRound, Shared, attempt, failed_reply
from ..failures import Failure
from ..out_of_memory import is_out_of_memory
from .base import Done, Serial, Work

log = logging.getLogger(__name__)

MOST_AT_ONCE = 256
MOST_UPDATE_BYTES = 1 << 30
"""Updates of one stack are in the host's memory until the coordinator has taken them."""


class Stacked(Serial):
    """An engine that trains many clients in one pass."""

    name = "stacked"

    def __init__(self, shared: Shared, *, always: bool = False) -> None:
        """``always``: also where one after another would be faster."""
        self._always = always
        self._model = shared.model.model
        self._device = next(self._model.parameters()).device
        size = sum(tensor.nbytes for tensor in self._model.state_dict().values())
        super().__init__(shared, most=max(1, min(MOST_AT_ONCE, MOST_UPDATE_BYTES // size)))
        self._verdict: Verdict | None = None
        self._jobs = self._stacked = 0

    @property
    def figures(self) -> dict[str, Any]:
        """How many training jobs were done at once in this process, on which device, and why not others."""
        verdict = self._verdict or Verdict(None, "no client has trained")
        stacked = {
            "jobs": self._stacked,
            "of": self._jobs,
            "device": device_name(self._device),
            "because": verdict.reason,
            "convolutions": verdict.convolutions,
            "seconds_of_a_step": dict(verdict.seconds),
            "bits_of_serial": not self._stacked,
        }
        return {"stacked": stacked}

    def _advance(self) -> None:
        """Run the first job, and at once with it all others that can be."""
        work = self._given.pop(0)
        self._jobs += work.job.purpose == "train"
        method = self._method(work)
        job = work.job
        alike = [
            other
            for other in (self._given if method is not None else ())
            if (other.job.run, other.job.round, other.job.purpose) == (job.run, job.round, job.purpose)
            and self._has_enough(other)
        ]
        if method is None or not (alike or self._always):
            self._run(work)
            return
        self._given = [other for other in self._given if other not in alike]
        self._jobs += len(alike)
        self._run_all(method, [work, *alike])

    def _method(self, work: Work) -> Method | None:
        """The method of a job that can be done at once with others; None where it cannot."""
        if work.job.purpose != "train" or not self._has_enough(work):
            return None
        method = methods.create(work.job.method, work.job.params)
        is_standard = method.has_standard_update()
        if self._verdict is None:
            reason = obstacle(self._model) if is_standard else f"method '{method.name}' trains in its own way"
            if reason:
                self._decide(Verdict(None, reason))
        is_off = not is_standard or (self._verdict is not None and self._verdict.convolutions is None)
        return None if is_off else method

    def _has_enough(self, work: Work) -> bool:
        """Whether batches have two samples for batch norm; a client with one trains alone, and reports the error."""
        samples = len(self._shared.division.clients[work.client].train)
        return min(samples, int(work.job.params.get("batch_size", samples))) > 1 or not has_norm(self._model)

    def _decide(self, verdict: Verdict) -> Verdict:
        self._verdict = verdict
        if verdict.convolutions is None:
            log.warning("one_by_one device=%s because=%s", self._device, verdict.reason)
        return verdict

    def _run_all(self, method: Method, works: Sequence[Work]) -> None:
        """Train in order of samples; in two halves where memory is short, one by one where stacking fails."""
        works = sorted(works, key=lambda work: -len(self._shared.division.clients[work.client].train))
        is_short = False
        try:
            verdict = self._verdict or self._decide(self._try(method, works))
            if verdict.convolutions is not None:
                self._train(method, works, verdict.convolutions)
                return
        except RuntimeError as error:
            is_short = is_out_of_memory(error) and len(works) > 1
            if not is_short:
                self._decide(Verdict(None, f"it cannot be done: {' '.join(str(error).split())[:300]}"))
        if not is_short:
            for work in works:
                self._run(work)
            return
        # Out here, where the error does not hold on to the memory any more. No state has been saved and no reply sent
        # yet: all clients start again.
        half = len(works) // 2
        self._most = max(1, half)
        log.warning("fewer_at_once device=%s clients=%d", self._device, self._most)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._run_all(method, works[:half])
        self._run_all(method, works[half:])

    def _try(self, method: Method, works: Sequence[Work]) -> Verdict:
        """The verdict of the first clients that train, once in a run."""

        def begin(work: Work, received: Tensors) -> Client:
            job = work.job.model_copy(update={"evaluate": False})
            return HalfRound.begin(self._shared, work.client, job, received).client

        starters = [
            Starter(received, functools.partial(begin, work, received)) for work, received in _with_received(works)
        ]
        return Trial(method, self._model, starters).verdict(self._measure, always=self._always)

    def _measure(self, _: str, work: Callable[[], object]) -> float:
        """Seconds on a clock, waiting for the device."""
        begin = self._now()
        work()
        return self._now() - begin

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _train(self, method: Method, works: Sequence[Work], convolutions: Convolutions) -> None:
        begin = time.perf_counter()
        params = method.params
        stack = Stack(self._model, len(works))
        begun = list[tuple[Work, HalfRound]]()
        failed = list[tuple[Work, Fault, Failure]]()
        for work, received in _with_received(works):
            try:
                half = HalfRound.begin(self._shared, work.client, work.job, received)
            except RuntimeError:  # out of memory, for example: `_run_all` trains fewer at once, or one by one
                raise
            # A method of a user's may raise anything; it costs this client's work.
            except Exception as error:  # noqa: BLE001
                failed.append((work, *failed_reply(work.client, work.job, error)))
                continue
            stack.hold(len(begun))
            begun.append((work, half))
        clients = [half.client for _, half in begun]
        schedules = [schedule(client, params) for client in clients]
        losses = stack.train(clients, schedules, params, method.frozen, convolutions)
        seconds = (time.perf_counter() - begin) / len(works)
        for position, (work, half) in enumerate(begun):
            stack.put(position)
            end = functools.partial(_end, half, schedules[position], losses[:, position], method)
            reply, failure = attempt(work.client, work.job, end)
            content = half.resources.outbox.content if isinstance(reply, UpdateManifest) else []
            self._done.append(Done.of(work, Answer(reply, content, seconds, failure)))
        for work, fault, failure in failed:
            self._done.append(Done.of(work, Answer(fault, [], seconds, failure)))
        self._stacked += len(begun)


def device_name(device: torch.device) -> str:
    """The product name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _with_received(works: Sequence[Work]) -> list[tuple[Work, Tensors]]:
    """Works with what they receive; what several receive is decoded once."""
    decoded: dict[tuple[str, ...], Tensors] = {}
    result = []
    for work in works:
        key = tuple(blob.ref.digest for blob in work.blobs)
        if key not in decoded:
            decoded[key] = work.received()
        result.append((work, decoded[key]))
    return result


def _end(half: HalfRound, own: Schedule, losses: np.ndarray, method: Method) -> UpdateManifest:
    """Log the last epoch's mean loss as local training does, and end the round.

    Raises:
        TrainingFailed: the mean loss of some epoch is no finite number.
    """
    epochs = method.params.local_epochs
    params = method.params
    steps = len(own) // max(1, epochs)
    for epoch in range(1, epochs + 1):
        mine = slice((epoch - 1) * steps, epoch * steps)
        mean = float(np.average(losses[mine], weights=[len(rows) for rows in own[mine]]))
        if not math.isfinite(mean):
            raise diverged(half.client, mean, f"{epoch} of {epochs}", {"lr": params.lr})
        half.client.log["loss"] = mean
    return half.end()


# --- whether stacking is faster --------------------------------------------------------------------------------------

Measure = Callable[[str, Callable[[], object]], float]
"""Name and work -> seconds."""

TIMED_STEPS = 3
WARM_STEPS = 1
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
    """Loads the model, and returns the client with fresh generators."""


@dataclass(frozen=True)
class Verdict:
    """How convolutions of a stack are computed; None: no stack, for this ``reason``."""

    convolutions: Convolutions | None
    reason: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of one client's step, by the way that was timed."""


@dataclass(frozen=True)
class Trial:
    """Clients, the one with the most samples first, of a method with standard training."""

    method: Method
    model: Parts
    starters: Sequence[Starter]

    def verdict(self, measure: Measure, *, always: bool) -> Verdict:
        """Whether and how to train them at once; ``always``: whenever it equals the method's own training."""
        difference = self.difference()
        device = next(self.model.parameters()).device
        if not difference <= (TOLERANCE if _has_64_bits(device) else SHORT_TOLERANCE):
            return Verdict(None, f"it would differ from method '{self.method.name}' by {difference:.2g} of a step")
        if always:
            return Verdict("grouped", "asked for")
        few = self.starters[:FEW]
        seconds = {ONE_BY_ONE: self._one_by_one(measure, few)}
        ways: list[Convolutions] = ["grouped", "unfolded"] if has_unfolding(self.model) else ["grouped"]
        for way in ways:
            seconds[way] = self._at_once(measure, few if device.type == "cpu" else self.starters, way)
        times = ", ".join(f"{name} {1000 * value:.3g} ms" for name, value in seconds.items())
        fastest = min(ways, key=lambda way: seconds[way])
        is_faster = seconds[fastest] < seconds[ONE_BY_ONE]
        return Verdict(fastest if is_faster else None, f"a client's step takes {times}", seconds)

    def difference(self) -> float:
        """Difference of one stacked epoch of two small clients from the method's own, relative to its change."""
        method = self._with_epochs(1)
        pair = self.starters[:2]
        try:
            self._in_64_bits(0, pair[0])  # the stacks have the precision of the model
            before, alone, stacked = (Stack(self.model, len(pair)) for _ in range(3))
            for number, starter in enumerate(pair):
                client = self._in_64_bits(number, starter)
                before.hold(number)
                stacked.hold(number)
                method.local_update(client, starter.received)
                alone.hold(number)
            clients = [self._in_64_bits(number, starter) for number, starter in enumerate(pair)]
            schedules = [schedule(client, method.params) for client in clients]
            stacked.train(clients, schedules, method.params, method.frozen)
        except TrainingFailed:
            return 0.0  # training one by one reports the same
        finally:
            self.model.float()
        return _distance(alone, stacked) / (_distance(alone, before) or 1.0)

    def _in_64_bits(self, number: int, starter: Starter) -> Client:
        """A client with a few samples, one less than the one before, in 64 bits where the device has them."""
        rows = max(2, self.method.params.batch_size * 3 // 2 + 2 - number)
        self.model.float()
        few = _shortened(starter.begin(), rows)
        if not _has_64_bits(few.device):
            return few
        self.model.double()
        return replace(few, train_inputs=few.train_inputs.double())

    def _with_epochs(self, epochs: int) -> Method:
        return type(self.method)(self.method.params.model_copy(update={"local_epochs": epochs}))

    def _one_by_one(self, measure: Measure, starters: Sequence[Starter]) -> float:
        """Seconds of one client's step by the method's own code."""
        method = self._with_epochs(1)
        total = 0.0
        steps = 0
        for number, starter in enumerate(starters):
            client = _shortened(starter.begin(), TIMED_STEPS * self.method.params.batch_size)
            update = functools.partial(method.local_update, client, starter.received)
            if number == 0:
                update()
            total += measure(ONE_BY_ONE, update)
            steps += len(schedule(client, method.params))
        return total / steps

    def _at_once(self, measure: Measure, starters: Sequence[Starter], way: Convolutions) -> float:
        """Seconds of one client's step in a stack."""
        params = self._with_epochs(WARM_STEPS + TIMED_STEPS).params
        stack = Stack(self.model, len(starters))
        clients = list[Client]()
        for position, starter in enumerate(starters):
            clients.append(starter.begin())
            stack.hold(position)
        schedules = [schedule(client, params)[: WARM_STEPS + TIMED_STEPS] for client in clients]
        warm = [own[:WARM_STEPS] for own in schedules]
        rest = [own[WARM_STEPS:] for own in schedules]
        stack.train(clients, warm, params, self.method.frozen, way)
        seconds = measure(way, lambda: stack.train(clients, rest, params, self.method.frozen, way))
        return seconds / sum(map(len, rest))


def _shortened(client: Client, rows: int) -> Client:
    return replace(client, train_inputs=client.train_inputs[:rows], train_labels=client.train_labels[:rows])


def _has_64_bits(device: torch.device) -> bool:
    return device.type != "mps"


def _distance(one: Stack, other: Stack) -> float:
    """Between all their tensors, as if they were one vector."""
    pairs = ((tensor.double(), other.tensors[name].double()) for name, tensor in one.tensors.items())
    return math.sqrt(sum(float((mine - theirs).square().sum()) for mine, theirs in pairs))
