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
from ..figures import EngineFigures, StackedFigures
from ..out_of_memory import is_out_of_memory
from .base import Done, Serial, Work

log = logging.getLogger(__name__)

MOST_AT_ONCE = 256
MOST_UPDATE_BYTES = 1 << 30
"""Updates of one stack are in the host's memory until the coordinator has taken them."""


class Stacked(Serial):
    """An engine that trains many clients in one pass."""

    name = "stacked"

    def __init__(
        self,
        shared: Shared,
        *,
        always: bool = False,
        convolutions: Convolutions = "grouped",
        most: int | None = None,
    ) -> None:
        """Make the engine.

        Args:
            shared: What all clients have in common.
            always: Stack also where a trial finds one after another faster, or was made before.
            convolutions: How convolutions are computed in that case.
            most: So many clients fit into memory; None: as many as are useful.
        """
        self._always = always
        self._convolutions = convolutions
        self._model = shared.model.model
        self._device = next(self._model.parameters()).device
        size = sum(tensor.nbytes for tensor in self._model.state_dict().values())
        super().__init__(shared, most=max(1, min(most or MOST_AT_ONCE, MOST_AT_ONCE, MOST_UPDATE_BYTES // size)))
        self._verdict: Verdict | None = None
        self._jobs = 0
        self._stacked = 0

    @property
    def figures(self) -> EngineFigures:
        """How many training jobs were done at once in this process, on which device, and why not others."""
        verdict = self._verdict or Verdict(None, "no client has trained")
        stacked: StackedFigures = {
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
        if work.job.purpose == "train":
            self._jobs += 1
        method = self._method(work)
        if method is None:
            self._run(work)
            return
        alike = [other for other in self._given if self._is_alike(other, work)]
        if not alike and not self._always:
            self._run(work)
            return
        self._given = [other for other in self._given if other not in alike]
        self._jobs += len(alike)
        self._run_all(method, [work, *alike])

    def _is_alike(self, other: Work, work: Work) -> bool:
        """Return whether a job can be done at once with another one: both are of one round."""
        here = (work.job.run, work.job.round, work.job.purpose)
        return (other.job.run, other.job.round, other.job.purpose) == here and self._has_enough(other)

    def _method(self, work: Work) -> Method | None:
        """Return the method of a job that can be done at once with others; None where it cannot."""
        if work.job.purpose != "train" or not self._has_enough(work):
            return None
        method = methods.create(work.job.method, work.job.params)
        is_standard = method.has_standard_update()
        if self._verdict is None:
            reason = f"method '{method.name}' trains in its own way"
            if is_standard:
                reason = obstacle(self._model)
            if reason:
                self._decide(Verdict(None, reason))
        if not is_standard:
            return None
        is_ruled_out = self._verdict is not None and self._verdict.convolutions is None
        if is_ruled_out:
            return None
        return method

    def _has_enough(self, work: Work) -> bool:
        """Return whether batches have two samples for batch norm; a client with one trains alone, and says so."""
        samples = len(self._shared.division.clients[work.client].train)
        batch_size = int(work.job.params.get("batch_size", samples))
        return min(samples, batch_size) > 1 or not has_norm(self._model)

    def _decide(self, verdict: Verdict) -> Verdict:
        """Remember the verdict for all later rounds, and log it where nothing is stacked."""
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
        """Find out by the first clients that train whether and how to stack; this is done once in a run."""

        def begin(work: Work, received: Tensors) -> Client:
            job = work.job.model_copy(update={"evaluate": False})
            return HalfRound.begin(self._shared, work.client, job, received).client

        starters = []
        for work, received in _with_received(works):
            starters.append(Starter(received, functools.partial(begin, work, received)))
        trial = Trial(method, self._model, starters)
        return trial.verdict(self._measure, always=self._convolutions if self._always else None)

    def _measure(self, _: str, work: Callable[[], object]) -> float:
        """Return the seconds that some work takes, on the device too."""
        begin = self._now()
        work()
        return self._now() - begin

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _train(self, method: Method, works: Sequence[Work], convolutions: Convolutions) -> None:
        """Train clients in one pass.

        Raises:
            RuntimeError: Memory ran out, or torch cannot compute this in one pass. No reply has been made by then.
        """
        begin = time.perf_counter()
        params = method.params
        stack = Stack(self._model, len(works))
        # 1. The first half of each client's round: its model, with what it has received, becomes a part of the stack.
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
        # 2. All clients' steps at once, each with its own batches.
        clients = [half.client for _, half in begun]
        schedules = [schedule(client, params) for client in clients]
        losses = stack.train(clients, schedules, params, method.frozen, convolutions)
        seconds = (time.perf_counter() - begin) / len(works)
        # 3. The second half of each client's round, with its part of the stack in the model.
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
    """Return the product name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(device)


def _with_received(works: Sequence[Work]) -> list[tuple[Work, Tensors]]:
    """Return works with what they receive; what several receive is decoded once."""
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

TOLERANCE = 1e-4
"""Largest difference relative to the change by training, over all tensors, in 64 bits: another loss is far above."""

SHORT_TOLERANCE = 0.05
"""The same in 32 bits, where batch norm over a few numbers amplifies rounding too much for a tighter bound."""

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

    def verdict(self, measure: Measure, *, always: Convolutions | None = None) -> Verdict:
        """Decide whether and how to train them at once.

        ``always``: in this way whenever it equals the method's own training; None: if that is faster, too.
        """
        # 1. Training in one pass has to be the method's own training.
        difference = self.difference()
        device = next(self.model.parameters()).device
        tolerance = TOLERANCE if _has_64_bits(device) else SHORT_TOLERANCE
        is_equal = difference <= tolerance  # not so for a difference that is not a number
        if not is_equal:
            return Verdict(None, f"it would differ from method '{self.method.name}' by {difference:.2g} of a step")
        if always is not None:
            return Verdict(always, "asked for")
        # 2. It has to be faster, in one of the ways in which convolutions can be computed.
        few = self.starters[:FEW]
        at_once = few if device.type == "cpu" else self.starters
        seconds = {ONE_BY_ONE: self.one_by_one(measure, few)}
        ways = self.ways()
        for way in ways:
            seconds[way] = self.at_once(measure, at_once, way)
        times = ", ".join(f"{name} {1000 * value:.3g} ms" for name, value in seconds.items())
        reason = f"a client's step takes {times}"
        fastest = min(ways, key=lambda way: seconds[way])
        if seconds[fastest] < seconds[ONE_BY_ONE]:
            return Verdict(fastest, reason, seconds)
        return Verdict(None, reason, seconds)

    def ways(self) -> list[Convolutions]:
        """Return the ways in which convolutions of this model can be computed."""
        if has_unfolding(self.model):
            return ["grouped", "unfolded"]
        return ["grouped"]

    def difference(self) -> float:
        """Return how far one stacked epoch of two small clients is from the method's own, relative to its change."""
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
        """Return a client with a few samples, one less than the one before, in 64 bits where the device has them."""
        rows = max(2, self.method.params.batch_size * 3 // 2 + 2 - number)
        self.model.float()
        few = _shortened(starter.begin(), rows)
        if not _has_64_bits(few.device):
            return few
        self.model.double()
        return replace(few, train_inputs=few.train_inputs.double())

    def _with_epochs(self, epochs: int) -> Method:
        return type(self.method)(self.method.params.model_copy(update={"local_epochs": epochs}))

    def one_by_one(self, measure: Measure, starters: Sequence[Starter]) -> float:
        """Return the seconds of one client's step by the method's own code."""
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

    def at_once(self, measure: Measure, starters: Sequence[Starter], way: Convolutions) -> float:
        """Return the seconds of one client's step in a stack."""
        params = self._with_epochs(WARM_STEPS + TIMED_STEPS).params
        stack = Stack(self.model, len(starters))
        clients = list[Client]()
        for position, starter in enumerate(starters):
            clients.append(starter.begin())
            stack.hold(position)
        schedules = [schedule(client, params)[: WARM_STEPS + TIMED_STEPS] for client in clients]
        warm = [steps[:WARM_STEPS] for steps in schedules]
        rest = [steps[WARM_STEPS:] for steps in schedules]
        stack.train(clients, warm, params, self.method.frozen, way)
        seconds = measure(way, lambda: stack.train(clients, rest, params, self.method.frozen, way))
        return seconds / sum(map(len, rest))


def _shortened(client: Client, rows: int) -> Client:
    return replace(client, train_inputs=client.train_inputs[:rows], train_labels=client.train_labels[:rows])


def _has_64_bits(device: torch.device) -> bool:
    return device.type != "mps"


def _distance(first: Stack, second: Stack) -> float:
    """Return the distance between all tensors of two stacks, as if these were one vector."""
    squares = 0.0
    for name, tensor in first.tensors.items():
        difference = tensor.double() - second.tensors[name].double()
        squares += float(difference.square().sum())
    return math.sqrt(squares)
