"""How much memory a simulation takes, and the workers for which there is enough: known before its first round.

A client trains one batch here, and memory is read before and at the highest point, so that encoder, optimizer, the
method's other networks and what torch loads on its first step are measured and not guessed. Predictions of many samples
at once come from the sizes of the layers' inputs and outputs. Where the whole is far below the limit by the sizes
alone, nothing is trained.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_agent.client import Arrays, ClientState, Session
from edge_agent.core.errors import MissingCapability, UsageError
from edge_agent.core.limits import KEPT_BYTES, allocating_at_most, available_bytes, give_freed_memory_back
from edge_agent.training.parts import put_back

from .engines.base import EngineChoice
from .memory_watch import Occupied, occupied
from .out_of_memory import is_out_of_memory
from .setup import Prepared

log = logging.getLogger(__name__)

PLANNED_SHARE = 0.9
"""The share of the limit that is planned with: an allocator keeps more than what is in use."""

FAR_BELOW = 0.5
"""Where sizes alone give less than this share of the limit, they are not checked by a training."""

EVALUATED_ROWS = 512
"""The most samples that are evaluated at once, as `edge_agent.training.loops.evaluate` does."""

TRIAL_TEST_ROWS = 32
RESERVED_BYTES = 256 << 20
"""What libraries may reserve in the trial of a client without using it."""

COPIES_OF_AN_UPDATE = 6
"""An update at the coordinator: its chunks, the file's pages, the decoded arrays, and the sum in twice the width; and
one that waits while another is handled."""


@dataclass(frozen=True)
class MemoryNeed:
    """What was measured, in bytes.

    Attributes:
        process: Memory of this process that it shares with no other.
        shared: The pages that workers share: the samples, and the files of programs.
        samples: What the samples of all clients take; they are part of ``process`` or of ``shared``.
        client: What one client adds at the most while it works, with its samples.
        model: The size of the model.
        is_measured: Whether ``client`` was measured by a training; otherwise it follows from sizes.
    """

    process: int
    shared: int
    samples: int
    client: int
    model: int
    is_measured: bool

    def total(self, choice: EngineChoice) -> int:
        """Return the bytes that all processes take together with this engine and as many workers."""
        coordinator = self.process + self.shared + COPIES_OF_AN_UPDATE * self.model
        # What a step frees is kept for the next one, whose blocks may have other sizes.
        client = self.client + min(KEPT_BYTES, self.client)
        if choice.engine != "pool":
            return coordinator + client
        # A worker has loaded what this process has, and finds the samples in memory that all share.
        worker = self.process + client + self.model
        return coordinator + choice.workers * worker


@dataclass(frozen=True)
class MemoryPlan:
    """The engine and workers that were chosen, with what they are expected to take and may take, in bytes."""

    choice: EngineChoice
    need: MemoryNeed
    limit: int
    expected: int
    spare: int
    """What is left for samples that stay with their clients between rounds."""


def fit_memory(prepared: Prepared) -> MemoryPlan | None:
    """Return how the simulation fits into its memory; None where that is not known here and no limit was given.

    The limit is what this process and others can still take, control groups included, or ``max_memory`` where that is
    less. Engine ``ray`` computes on other machines: only this process is counted.

    Raises:
        UsageError: It does not fit, even with one worker; the message has the numbers.
        MissingCapability: There is a limit, and this system does not say what processes take.
    """
    now = occupied([])
    if now is None:
        if prepared.plan.max_memory is None:
            return None
        raise MissingCapability(
            f"max_memory = {prepared.plan.max_memory} needs /proc (Linux), which says what processes take; leave it out"
        )
    limit_bytes = _limit(prepared.plan.max_memory_bytes, now)
    if limit_bytes is None:
        return None
    usable = int(PLANNED_SHARE * limit_bytes)
    need = needed(prepared, now, limit_bytes)
    choice = _largest_choice(prepared, need, usable)
    if choice is None:
        raise UsageError(_refusal(prepared, need, limit_bytes))
    expected = need.total(choice)
    if choice != prepared.choice:
        log.warning(
            "fewer_workers engine=%s workers=%d instead_of=%d expected_mb=%d limit_mb=%d",
            choice.engine,
            choice.workers,
            prepared.choice.workers,
            expected // 10**6,
            limit_bytes // 10**6,
        )
    return MemoryPlan(choice, need, limit_bytes, expected, max(0, usable - expected))


def _limit(max_memory_bytes: int | None, now: Occupied) -> int | None:
    """Return the bytes that all processes may take: no more than there are; None where nothing says how many."""
    limits = []
    if max_memory_bytes is not None:
        limits.append(max_memory_bytes)
    available = available_bytes()
    if available is not None:
        limits.append(available + now.total)
    return min(limits, default=None)


def needed(prepared: Prepared, now: Occupied, limit_bytes: int) -> MemoryNeed:
    """Return what a simulation needs; a client trains one batch where sizes alone do not show that it is enough."""
    model = prepared.model.model
    model_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    pools = [pool for pool in (prepared.pools.train, prepared.pools.test) if pool is not None]
    samples = sum(pool.inputs.nbytes + pool.labels.nbytes for pool in pools)
    client = _client_by_sizes(prepared, model_bytes)
    by_size = MemoryNeed(now.private, now.shared, samples, client, model_bytes, is_measured=False)
    is_far_below = by_size.total(prepared.choice) < FAR_BELOW * limit_bytes
    if is_far_below and prepared.plan.max_memory is None:
        return by_size
    measured = _client_by_training(prepared, max(0, limit_bytes - now.total))
    if measured is None:
        return by_size
    client = max(measured, _evaluation(prepared, model_bytes))
    return replace(by_size, client=client, is_measured=True)


def _largest_choice(prepared: Prepared, need: MemoryNeed, usable: int) -> EngineChoice | None:
    """Return the chosen engine with as many workers as fit; one client after another where no worker does."""
    choice = prepared.choice
    if choice.engine != "pool":
        return choice if need.total(choice) <= usable else None
    for workers in range(choice.workers, 0, -1):
        fewer = replace(choice, workers=workers)
        if need.total(fewer) <= usable:
            return fewer
    one_by_one = EngineChoice("serial")
    is_free_to_choose = prepared.plan.engine is None
    if is_free_to_choose and need.total(one_by_one) <= usable:
        return one_by_one
    return None


def _refusal(prepared: Prepared, need: MemoryNeed, limit_bytes: int) -> str:
    """Return why a simulation does not fit, with the numbers, and what to change."""
    smallest = replace(prepared.choice, workers=1)
    plan = prepared.plan
    is_users_limit = limit_bytes == plan.max_memory_bytes
    allowed = f"max_memory = {plan.max_memory}" if is_users_limit else "the memory that is available"
    remedies = []
    would_fit_here = need.total(EngineChoice("serial")) <= PLANNED_SHARE * limit_bytes
    if would_fit_here and prepared.choice.engine == "pool":
        remedies.append("--engine serial")
    remedies += [f"a smaller batch_size than {prepared.method.params.batch_size}", "a smaller encoder", "fewer samples"]
    if is_users_limit:
        remedies.append("a larger --max-memory")
    return (
        f"this simulation would take {_gb(need.total(smallest))} with one client at a time, and {allowed} allows "
        f"{_gb(PLANNED_SHARE * limit_bytes)} ({PLANNED_SHARE:.0%} of {_gb(limit_bytes)}): {_gb(need.samples)} samples, "
        f"{_gb(need.process + need.shared)} this process with them, {_gb(need.client)} a client while it trains, "
        f"{_gb(need.model)} the model; try {', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


# --- a client ---------------------------------------------------------------------------------------------------------


def _client_by_training(prepared: Prepared, room_bytes: int) -> int | None:
    """Return what the client with the most samples adds while it trains one batch; None where it cannot be measured.

    Where that is more than there is room for, training ends before the system would end this process, and the result is
    what it had asked for, at least. Model, random numbers and parameters are afterwards as they were before.

    Args:
        prepared: The simulation.
        room_bytes: How much it may add.
    """
    method = prepared.method
    name = _largest_client(prepared)
    most_bytes = room_bytes + RESERVED_BYTES
    with (
        put_back(prepared.model.model),
        torch.random.fork_rng(devices=[]),
        _peak() as peak,
        allocating_at_most(most_bytes),
    ):
        try:
            params = method.params.model_copy(update={"local_epochs": 1})
            once = type(method)(params)
            train, test = prepared.pools.arrays(prepared.division.clients[name])
            rows = min(len(train.labels), params.batch_size)
            session = Session(
                once,
                prepared.task,
                name,
                Arrays(train.inputs[:rows], train.labels[:rows]),
                Arrays(test.inputs[:TRIAL_TEST_ROWS], test.labels[:TRIAL_TEST_ROWS]),
                seed=prepared.plan.seed,
                device=prepared.plan.device,
                model=prepared.model,
            )
            state = method.start({tensor: prepared.model.fresh[tensor] for tensor in session.shared})
            received = {**method.broadcast(state), **method.downlink(state, name)}
            session.train(received, ClientState(), round_number=1, rounds=prepared.plan.rounds, evaluate=True)
        # A method of a user's may raise anything. Whatever is wrong, its first round says it better.
        except Exception as error:  # noqa: BLE001
            if is_out_of_memory(error):
                return most_bytes
            log.info("memory_not_measured client=%s because=%s", name, type(error).__name__)
            return None
    give_freed_memory_back()
    return peak.bytes


def _client_by_sizes(prepared: Prepared, model_bytes: int) -> int:
    """Return what a client takes by the sizes of its samples, layers and weights; an upper bound for common methods."""
    total_of_row, _ = _bytes_of_a_row(prepared)
    batch: int = min(
        prepared.method.params.batch_size, max(len(share.train) for share in prepared.division.clients.values())
    )
    # Each output of a layer and its gradient; weights as received, loaded, their gradients, two moments, and sent.
    training = 3 * batch * total_of_row + 6 * model_bytes
    return max(_samples_of_a_client(prepared) + training, _evaluation(prepared, model_bytes))


def _evaluation(prepared: Prepared, model_bytes: int) -> int:
    """Return what a client takes while it evaluates as many samples as are evaluated at once."""
    _, largest_of_row = _bytes_of_a_row(prepared)
    most = max(max(len(share.train), len(share.test)) for share in prepared.division.clients.values())
    return _samples_of_a_client(prepared) + 3 * model_bytes + min(EVALUATED_ROWS, most) * largest_of_row


def _samples_of_a_client(prepared: Prepared) -> int:
    """Return the bytes of the samples of the client that has the most."""
    pool = prepared.pools.train.inputs
    row: int = pool[:1].astype("float32").nbytes
    return max((len(share.train) + len(share.test)) * row for share in prepared.division.clients.values())


def _largest_client(prepared: Prepared) -> str:
    return max(prepared.division.clients, key=lambda client: len(prepared.division.clients[client].train))


def _bytes_of_a_row(prepared: Prepared) -> tuple[int, int]:
    """Return the bytes of all outputs of the encoder's layers for one sample, and of the largest layer's both ends."""
    model = prepared.model.model
    encoder = dict(model.named_children()).get("encoder")
    row = prepared.pools.train.inputs[:1].astype("float32")
    if encoder is None:
        return row.nbytes, row.nbytes
    outputs: list[int] = []
    ends: list[int] = []

    def note(_: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        size = output.nbytes if isinstance(output, torch.Tensor) else 0
        outputs.append(size)
        ends.append(size + sum(tensor.nbytes for tensor in inputs if isinstance(tensor, torch.Tensor)))

    leaves = [module for module in encoder.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    was_training = model.training
    device = next(iter(model.state_dict().values())).device
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            encoder.eval()(torch.from_numpy(row).to(device))
    # An encoder of a user's may raise anything. Whatever is wrong, its first round says it better.
    except Exception as error:  # noqa: BLE001
        log.info("memory_not_measured because=%s", type(error).__name__)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return sum(outputs) + row.nbytes, max(ends, default=row.nbytes)


@dataclass
class _Peak:
    """The growth of this process at the highest point of some work, in bytes."""

    bytes: int = 0


@contextlib.contextmanager
def _peak() -> Iterator[_Peak]:
    """Measure how far this process grows inside; where the system cannot forget an earlier peak, that one counts."""
    peak = _Peak()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status_bytes("VmRSS")
    yield peak
    peak.bytes = max(0, _status_bytes("VmHWM") - before)


_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def _status_bytes(name: str) -> int:
    """Return a size of this process by its name in ``/proc/self/status``."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    return int(dict(_FIELD.findall(status))[name]) * 1024
