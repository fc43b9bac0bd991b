"""A few batches that say whether clients are to be trained at once here: is it true to the method, and is it faster?"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from edge_agent.client.stacked import Convolutions, Schedule, Stack, has_unfolding, schedule
from edge_agent.errors import TrainingFailed
from edge_agent.methods import Client, Method
from edge_agent.methods.base import Plain
from edge_agent.task import Tensors
from edge_agent.training.parts import Parts

Measure = Callable[[str, Callable[[], object]], float]
"""Seconds of some work, which is named."""

TIMED_STEPS, WARM_STEPS = 3, 1
FEW = 4
"""Clients that are timed one by one, and at once where there is no GPU, whose size would decide."""

TOLERANCE, SHORT_TOLERANCE = 1e-4, 0.05
"""Of the way that training goes, over all tensors, in 64 bits and where there are but 32: another loss is far above.
In 32 bits, batch norm over a few numbers makes so much of rounding that nothing can be told from it."""

ONE_BY_ONE = "one by one"


@dataclass(frozen=True)
class Starter:
    """A client at the beginning of a round, as often as it is wanted."""

    received: Tensors
    begin: Callable[[], Client]
    """Loads the model, and gives the client with fresh generators."""


@dataclass(frozen=True)
class Verdict:
    """How convolutions of a stack are to be computed; None: no stack, for that ``reason``."""

    convolutions: Convolutions | None
    reason: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of one client's step, by what was tried."""


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
    """Clients, the one with the most samples first, of a method whose local training is plain."""

    method: Method
    plain: Plain
    model: Parts
    starters: Sequence[Starter]

    def verdict(self, measure: Measure, *, always: bool) -> Verdict:
        """Whether and how to train them at once; ``always``: if only it is true to the method."""
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
        """How far one epoch of two clients with a few samples is from the method's own, in parts of the way it goes."""
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
            together.train(clients, [schedule(client, method.params) for client in clients], method.params, self.plain)
        except TrainingFailed:
            return 0.0  # the same will be said, whoever trains
        finally:
            self.model.float()
        return _distance(alone, together) / (_distance(alone, before) or 1.0)

    def _in_64_bits(self, place: int, starter: Starter) -> Client:
        """A client with a few samples, one less than the one before it, and its model; in 32 bits where 64 are none."""
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
        found = {ONE_BY_ONE: self._one_by_one(measure, self.starters[:FEW])}
        ways: tuple[Convolutions, ...] = ("grouped", "unfolded") if has_unfolding(self.model) else ("grouped",)
        for way in ways:
            found[way] = self._at_once(measure, self.starters[:FEW] if is_cpu else self.starters, way)
        return found

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
        stack.train(clients, warm, params, self.plain, way)
        taken = measure(way, lambda: stack.train(clients, rest, params, self.plain, way))
        return taken / sum(map(len, rest))


def _has_64_bits(device: torch.device) -> bool:
    return device.type != "mps"


def _cut(schedules: Sequence[Schedule], begin: int, end: int) -> list[Schedule]:
    return [one[begin:end] for one in schedules]


def _distance(one: Stack, other: Stack) -> float:
    """Between all their tensors, as if they were one vector."""
    pairs = ((tensor.double(), other.tensors[name].double()) for name, tensor in one.tensors.items())
    return math.sqrt(sum(float((mine - theirs).square().sum()) for mine, theirs in pairs))
