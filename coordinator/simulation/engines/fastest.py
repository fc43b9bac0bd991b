"""Engine ``fastest``: serial, pool or stacked, by the seconds that a short trial expects of all rounds.

Serial and pool give the same bits; what stacked gives equals them up to rounding, and is therefore chosen only where it
saves a fifth. The choice is written into the folder of the run with what was expected of each engine, and a run that is
resumed keeps it.

The model of cost, in processor seconds: each job of a client takes `JOB_S` whatever the engine, for messages, journal
and state, and each step what a step takes. One after another that is timed; a pool divides it among its workers, which
take `START_S` to start. A pass of k clients takes a + k d: what it costs whatever its size, which is what stacking
saves, and what each client adds; both follow from passes of one client and of `FEW`.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import Field, ValidationError

from edge_agent.client import ClientState, Session
from edge_agent.client.stacked import Convolutions, obstacle
from edge_agent.core.errors import StateError
from edge_agent.core.storage import read_json
from edge_agent.core.task import Frozen, Tensors
from edge_agent.methods import Client
from edge_agent.training.parts import put_back

from ..plan import EngineName
from ..setup import ENGINE, Prepared
from .base import EngineChoice, can_use_pool
from .stacked import FEW, MOST_AT_ONCE, ONE_BY_ONE, Starter, Trial

log = logging.getLogger(__name__)

START_S = 2.5
"""Until the workers of a pool can compute: two at once on two cores, most of it the import of torch."""

JOB_S = 0.006
"""What one job of a client takes beside its steps, on an AMD EPYC."""

WAYS: tuple[Convolutions, ...] = ("grouped", "unfolded")

SAVING = 0.2
"""The share of the time that engine stacked has to save, since its bits are others."""


class EngineTrial(Frozen):
    """What was chosen before the first round, and the seconds that were expected of all rounds."""

    engine: EngineName
    workers: int = Field(ge=1)
    expected_s: dict[str, float] = Field(default_factory=dict, description="engine -> seconds of all rounds")
    step_ms: dict[str, float] = Field(
        default_factory=dict, description="way of computing -> milliseconds of one client's step"
    )
    convolutions: Convolutions = Field("grouped", description="how stacked computes convolutions")
    not_stacked: str = Field("", description="why clients cannot be trained in one pass; empty: they can")

    def reason(self) -> str:
        """Return the choice and the reason as one line of text."""
        line = f"{self.engine} was chosen"
        if self.expected_s:
            expected = ", ".join(f"{engine} {seconds:.1f} s" for engine, seconds in sorted(self.expected_s.items()))
            line = f"{line}; expected of all rounds: {expected}"
        if self.not_stacked:
            return f"{line}; not stacked: {self.not_stacked}"
        if self.engine == "stacked":
            return f"{line}; its numbers equal those of the others up to rounding"
        return line


def settle_engine(
    prepared: Prepared, folder: Path, clock: Callable[[], float] | None = None
) -> tuple[Prepared, EngineTrial | None]:
    """Return the simulation with the engine that is expected to be the fastest, and the trial; None: another was named.

    Raises:
        StateError: The choice in the folder of a resumed run is damaged.
    """
    if prepared.choice.engine != "fastest":
        return prepared, None
    saved = read_json(folder / ENGINE)
    if saved is not None:
        trial = _saved_trial(saved, folder / ENGINE)
    else:
        try:
            trial = time_engines(prepared, clock)
        # A method of a user's may raise anything. Whatever is wrong, its first round says it better.
        except Exception as error:  # noqa: BLE001
            log.info("engines_not_timed because=%s", type(error).__name__)
            trial = EngineTrial(engine="serial", workers=1, not_stacked=f"the trial failed ({type(error).__name__})")
    # A run is resumed with as many workers as are asked for now: they change no bits.
    workers = prepared.choice.workers if trial.engine == "pool" else 1
    return replace(prepared, choice=EngineChoice(trial.engine, workers)), trial


def _saved_trial(saved: object, path: Path) -> EngineTrial:
    """Return the trial in a file.

    Raises:
        StateError: It is none.
    """
    try:
        return EngineTrial.model_validate(saved)
    except ValidationError as error:
        raise StateError(f"{path}: damaged; remove it, and an engine is chosen again") from error


def time_engines(prepared: Prepared, clock: Callable[[], float] | None) -> EngineTrial:
    """Time some steps of some clients, and choose; model and random numbers are afterwards as before.

    ``clock``: returns seconds; None: processor time on a CPU, which other programs do not disturb, else wall time.
    """
    model = prepared.model.model
    device = next(iter(model.state_dict().values())).device
    if clock is None:
        clock = time.process_time if device.type == "cpu" else time.perf_counter

    def measure(_: str, work: Callable[[], object]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - begin

    with put_back(model), torch.random.fork_rng(devices=[]):
        starters = _starters(prepared)
        trial = Trial(prepared.method, model, starters)
        seconds = {ONE_BY_ONE: trial.one_by_one(measure, starters)}
        not_stacked = _obstacle(prepared, len(starters))
        if not not_stacked:
            verdict = trial.verdict(measure, always="grouped")
            not_stacked = verdict.reason if verdict.convolutions is None else ""
        if not not_stacked:
            together = min(cohort_size(prepared), MOST_AT_ONCE)
            for way in trial.ways():
                alone_s = trial.at_once(measure, starters[:1], way)
                few_s = len(starters) * trial.at_once(measure, starters, way)
                seconds[way] = step_in_pass(alone_s, few_s, len(starters), together)
    return choose(
        seconds,
        steps=steps_of_all_rounds(prepared),
        jobs=prepared.plan.rounds * cohort_size(prepared),
        workers=prepared.choice.workers,
        has_pool=can_use_pool(device) and prepared.choice.workers > 1,
        not_stacked=not_stacked,
    )


def step_in_pass(alone_s: float, few_s: float, few: int, together: int) -> float:
    """Return the seconds of one client's step in a pass of ``together`` clients, from passes of one and of ``few``."""
    each_s = max(0.0, (few_s - alone_s) / (few - 1))
    fixed_s = max(0.0, alone_s - each_s)
    return fixed_s / together + each_s


def cohort_size(prepared: Prepared) -> int:
    """Return how many clients train in a round, in the mean."""
    plan = prepared.plan
    share = (plan.fraction + (plan.fraction_max or plan.fraction)) / 2
    return max(1, round(share * (len(prepared.division.clients) - len(prepared.new_clients))))


def choose(
    seconds: dict[str, float], *, steps: float, jobs: float, workers: int, has_pool: bool, not_stacked: str = ""
) -> EngineTrial:
    """Return the engine for so many steps of clients.

    Args:
        seconds: Way of computing -> seconds of one client's step, `ONE_BY_ONE` among them.
        steps: Steps of all clients in all rounds.
        jobs: Jobs of all clients in all rounds.
        workers: Workers that a pool would have.
        has_pool: Whether there can be a pool.
        not_stacked: Why clients cannot be trained in one pass.
    """
    one_by_one_s = steps * seconds[ONE_BY_ONE]
    beside_s = JOB_S * jobs
    expected: dict[EngineName, float] = {"serial": beside_s + one_by_one_s}
    if has_pool:
        expected["pool"] = START_S + beside_s + one_by_one_s / workers
    engine = min(expected, key=lambda name: expected[name])
    in_one_pass: dict[Convolutions, float] = {way: seconds[way] for way in WAYS if way in seconds}
    convolutions: Convolutions = "grouped"
    if in_one_pass:
        convolutions = min(in_one_pass, key=lambda way: in_one_pass[way])
        expected["stacked"] = beside_s + steps * in_one_pass[convolutions]
        if expected["stacked"] < (1 - SAVING) * expected[engine]:
            engine = "stacked"
    return EngineTrial(
        engine=engine,
        workers=workers if engine == "pool" else 1,
        expected_s={str(name): round(value, 3) for name, value in expected.items()},
        step_ms={way: round(1000 * value, 4) for way, value in seconds.items()},
        convolutions=convolutions,
        not_stacked=not_stacked,
    )


def steps_of_all_rounds(prepared: Prepared) -> float:
    """Return how many steps the clients of all rounds make together."""
    plan = prepared.plan
    params = prepared.method.params
    trained = [share for client, share in prepared.division.clients.items() if client not in prepared.new_clients]
    steps = sum(params.local_epochs * math.ceil(len(share.train) / params.batch_size) for share in trained)
    share_of_clients = (plan.fraction + (plan.fraction_max or plan.fraction)) / 2
    return float(plan.rounds * share_of_clients * steps)


def _obstacle(prepared: Prepared, clients: int) -> str:
    """Return why clients cannot be trained in one pass; empty where a trial may find that they can."""
    method = prepared.method
    if not method.has_standard_update():
        return f"method '{method.name}' trains in its own way"
    if prepared.plan.precision != "float32":
        return f"precision is {prepared.plan.precision}"
    if prepared.plan.augment is not None:
        return f"augment is {prepared.plan.augment}, and a stack trains on inputs as they are"
    if clients < 2:
        return "there is one client"
    return obstacle(prepared.model.model)


def _starters(prepared: Prepared) -> list[Starter]:
    """Return the clients with the most samples, ready to begin their first round."""
    shares = prepared.division.clients
    largest = sorted(set(shares) - set(prepared.new_clients), key=lambda client: (-len(shares[client].train), client))
    starters = []
    for client in largest[:FEW]:
        session = Session(
            prepared.method,
            prepared.task,
            client,
            *prepared.pools.arrays(shares[client]),
            seed=prepared.plan.seed,
            device=prepared.plan.device,
            model=prepared.model,
        )
        method = prepared.method
        state = method.start({name: prepared.model.fresh[name] for name in session.shared})
        received = {**method.broadcast(state), **method.downlink(state, client)}
        starters.append(Starter(received, functools.partial(_begin, session, received, prepared.plan.rounds)))
    return starters


def _begin(session: Session, received: Tensors, rounds: int) -> Client:
    return session.before_round(received, ClientState(), round_number=1, rounds=rounds)
