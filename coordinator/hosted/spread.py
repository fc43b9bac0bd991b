"""One training spread over several devices of this machine, by `torch.distributed`: data parallel, in fixed order.

Each device has a process, a copy of the model and all samples. A batch is cut into a fixed number of parts. Each
process computes the gradients of some of the parts; all processes then receive the gradients of all parts, add them up
in the order of the parts, and do the same step. So the result depends on the number of parts, and not on who computed
which: one device that computes all parts ends in the same bits as several of its kind.

The process that asks computes, too, as rank 0, and starts the others. They meet at a file, and exchange gradients
through the memory of the CPU (backend gloo), which every device can reach. A process that ends closes its connections:
then the exchange fails in all others. The others end with the process that started them.

Layers of batch norm see one part at a time; their running statistics are the mean over the parts. What layers draw at
random (dropout) follows from the seed, the step and the part.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import distributed, nn

from edge_agent.core.errors import HeadwaterError, TrainingFailed, cause
from edge_agent.training.loops import Loss, Step

from ..processes.pipe import Frame, Pipe
from ..processes.supervisor import ChildProcess, Limits, worker_command
from ..processes.worker_main import listen
from ..rounds.compute_requests import Travelling

COMMAND = worker_command(f"{__name__}:serve")

EXCHANGE_LIMIT_S = 600.0
"""Seconds that one process waits for another: the slowest one may still be reading its samples."""

ENDING_S = 1.0
"""Seconds in which a process whose connections are closed is gone."""

NETWORK_OF_THIS_MACHINE = {"linux": "lo", "darwin": "lo0"}
"""The network interface by which processes of one machine reach each other."""


@dataclass(frozen=True)
class Rank:
    """A process among those that train together.

    Attributes:
        number: Its number, from 0.
        devices: The device of each process.
        parts: How many parts a batch is cut into, at least one for each process.
    """

    number: int
    devices: tuple[str, ...]
    parts: int

    @property
    def device(self) -> str:
        """The device of this process."""
        return self.devices[self.number]

    def owns(self, part: int) -> bool:
        """Return whether this process computes the part of that number."""
        return part % len(self.devices) == self.number


Gather = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Gives the row (n,) of this process to all others, and returns those of all processes by rank."""


def gather_in_group(row: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows (n,) of all processes that `connected` has connected, by rank."""
    rows = [torch.empty_like(row) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, row)
    return rows


class PartsOfBatches:
    """Gradients of the parts of batches, exchanged with the other processes and added up in the order of the parts."""

    def __init__(self, rank: Rank, model: nn.Module, loss: Loss, seed: int, gather: Gather = gather_in_group) -> None:
        """Prepare for a model.

        Args:
            rank: This process among all, which says who computes which part.
            model: The model, on the device of this process.
            loss: The mean loss of a batch; see `loops.cross_entropy`.
            seed: The seed of what layers draw at random.
            gather: The exchange with the other processes.
        """
        self._gather = gather
        self._rank = rank
        self._loss = loss
        self._seed = seed
        self._step = 0
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._counts = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]

    def collect(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Set the gradients and statistics of the model to those of a batch, and return its mean loss, a scalar.

        Args:
            inputs: The batch, (b, ...), of at least as many samples as there are parts.
            labels: Its labels, (b,).
        """
        self._step += 1
        before = [buffer.clone() for buffer in (*self._statistics, *self._counts)]
        after = before[len(self._statistics) :]
        # 1. The parts of this process, each from the same model.
        own_rows = []
        inputs_of = torch.tensor_split(inputs, self._rank.parts)
        labels_of = torch.tensor_split(labels, self._rank.parts)
        for part in range(self._rank.parts):
            if not self._rank.owns(part):
                continue
            _copy_into((*self._statistics, *self._counts), before)
            own_rows.append(self._compute(part, inputs_of[part], labels_of[part], len(inputs)))
            after = [buffer.clone() for buffer in self._counts]
        # 2. Those of all processes, added up in the order of the parts.
        total = None
        for row in self._exchange(own_rows):
            total = row.clone() if total is None else total.add_(row)
        # 3. Into the model. The loss is the last number.
        if total is None:  # there is no part, so no process asks
            raise TrainingFailed("a batch without samples; expected at least one for each part")
        total = total.to(inputs.device)
        begin = 0
        for weight in self._weights:
            weight.grad = total[begin : begin + weight.numel()].view_as(weight).clone()
            begin += weight.numel()
        for buffer in self._statistics:
            buffer.copy_(total[begin : begin + buffer.numel()].view_as(buffer))
            begin += buffer.numel()
        _copy_into(self._counts, after)
        return total[begin]

    def _compute(self, part: int, inputs: torch.Tensor, labels: torch.Tensor, samples: int) -> torch.Tensor:
        """Return gradients, statistics and loss of a part, times its share of the samples: (n,) float32 on the CPU."""
        (number,) = np.random.SeedSequence([self._seed, self._step, part]).generate_state(1)
        torch.manual_seed(int(number))
        for weight in self._weights:
            weight.grad = None
        value = self._loss(inputs, labels)
        value.backward()  # type: ignore[no-untyped-call]
        share = len(inputs) / samples
        columns = []
        for weight in self._weights:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            columns.append(gradient.reshape(-1))
        columns += [buffer.reshape(-1) for buffer in self._statistics]
        columns.append(value.detach().reshape(1))
        return (torch.cat(columns).float() * share).cpu()

    def _exchange(self, own_rows: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the rows of all parts in their order; ``own_rows``: those of this process, in their order."""
        processes = len(self._rank.devices)
        if processes == 1:
            yield from own_rows
            return
        length = own_rows[0].numel()
        exchanges = -(-self._rank.parts // processes)
        for number in range(exchanges):
            # In the last exchange some processes may have no part left: they send zeros, which nobody adds.
            row = own_rows[number] if number < len(own_rows) else torch.zeros(length)
            rows = self._gather(row)
            yield from rows[: self._rank.parts - number * processes]


def _copy_into(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Set each buffer to its value."""
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def step_by_parts(parts: PartsOfBatches, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step of `loops.train_by_steps`: the parts of a batch, then one step of the optimizer."""

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = parts.collect(inputs, labels)
        optimizer.step()
        return value

    return step


class Joining(Travelling):
    """The message by which another process joins a training."""

    request: str = Field(description="the request of the training, as JSON")
    number: int = Field(ge=0, description="the number of the process")
    devices: tuple[str, ...] = Field(description="the device of each process")
    parts: int = Field(ge=1, description="parts of a batch")
    meeting: Path = Field(description="the file at which the processes meet")


@contextlib.contextmanager
def other_processes(function: str, request: Travelling, rank: Rank, folder: Path) -> Iterator[None]:
    """Run the other processes of a training, and connect with them, as long as the context lasts.

    Args:
        function: The function (``module:name``) that each of them calls with the JSON of ``request`` and its `Rank`.
        request: What is trained.
        rank: The rank of this process, of number 0.
        folder: A folder on this machine, for the file at which they meet, and for their logs.

    Raises:
        TrainingFailed: Another process ended before the training was over, or did not answer.
    """
    if len(rank.devices) == 1:
        yield
        return
    meeting = folder / f"meeting-{os.getpid()}"
    meeting.unlink(missing_ok=True)
    children = []
    threads = Limits(threads=torch.get_num_threads())
    try:
        for number in range(1, len(rank.devices)):
            child = ChildProcess((*COMMAND, function), folder / f"rank-{number}.log", threads)
            children.append(child)
            joining = Joining(
                request=request.model_dump_json(),
                number=number,
                devices=rank.devices,
                parts=rank.parts,
                meeting=meeting,
            )
            child.pipe.send("train", joining.model_dump_json().encode())
        try:
            # Nobody waits at the meeting for a process that has not even started.
            for child in children:
                child.pipe.receive()
            with connected(rank, meeting):
                yield
        except (EOFError, OSError) as error:
            raise _failure_of(children, error) from error
        except HeadwaterError:
            raise
        except RuntimeError as error:
            raise _failure_of(children, error) from error
    finally:
        for child in children:
            child.kill()
            child.close()
        meeting.unlink(missing_ok=True)


def _failure_of(children: Sequence[ChildProcess], error: Exception) -> TrainingFailed:
    """Return the error of a training whose exchange has failed: which other process has ended, and why."""
    # Its connections close a moment before the process is gone.
    until = time.monotonic() + ENDING_S
    pause = threading.Event()
    while all(child.is_running for child in children) and time.monotonic() < until:
        pause.wait(0.02)
    ended = [
        f"rank {number} ended ({child.exit_reason()})"
        for number, child in enumerate(children, 1)
        if not child.is_running
    ]
    reason = ", ".join(ended) or cause(error).splitlines()[0]
    return TrainingFailed(
        f"a training on {1 + len(children)} devices failed: {reason}; train on one device, or try again"
    )


@contextlib.contextmanager
def connected(rank: Rank, meeting: Path) -> Iterator[None]:
    """Connect the processes of a training with each other, as long as the context lasts; ``meeting``: their file."""
    interface = NETWORK_OF_THIS_MACHINE.get(sys.platform)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    processes = len(rank.devices)
    distributed.init_process_group(
        "gloo",
        init_method=meeting.absolute().as_uri(),
        rank=rank.number,
        world_size=processes,
        timeout=timedelta(seconds=EXCHANGE_LIMIT_S),
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def serve(pipe: Pipe, function: str) -> None:
    """Run as one of the other processes: receive the request, connect, and call the function; end with the owner."""
    frames = queue.SimpleQueue[Frame]()
    listen(pipe, frames.put)
    joining = Joining.model_validate_json(frames.get().payload)
    rank = Rank(joining.number, joining.devices, joining.parts)
    train = _named(function)
    pipe.send("ready", b"")
    with connected(rank, joining.meeting):
        train(joining.request, rank)


def _named(name: str) -> Callable[[str, Rank], object]:
    """Return the function ``module:name``."""
    module, _, function = name.partition(":")
    result: Callable[[str, Rank], object] = getattr(importlib.import_module(module), function)
    return result
