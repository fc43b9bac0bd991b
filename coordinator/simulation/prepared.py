"""A simulation before its first step: data, partition, method and model, and the coordinator's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_agent import methods, models
from edge_agent.client.session import Built, supported
from edge_agent.config import Precision, parse
from edge_agent.data.partition import Division
from edge_agent.errors import UsageError
from edge_agent.methods import Method
from edge_agent.task import Task
from edge_agent.training.precision import time_steps
from edge_agent.training.weights import read_weights

from ..config import CoordinatorConfig
from ..processes.pipe import SharedBuffer
from ..state.run_request import Request
from .engines.choice import Choice
from .own_parts import register
from .plan import Plan
from .pools import Pools, prepare

FEDERATION = "simulation"
WEIGHTS = "weights.safetensors"
LONGEST_ROUND_S = 7 * 86_400.0
LEASE_S = 3600.0
GRACE_S, LONGEST_SILENCE_S = 0.01, 1.0
"""Of the standing clock, which moves only when nobody has anything to do: whoever has not delivered then never will."""

ANYBODY = 1e-6
"""Quorum where clients drop out: one update is enough."""

MANY_ATTEMPTS = 100


def weights_for(plan: Plan, saved: Path | None) -> Path | None:
    """What encoders begin with: where a simulation is gone on with its own copy, beside the partition in ``saved``."""
    kept = None if saved is None else saved.parent / WEIGHTS
    return kept if kept is not None and plan.weights is not None and kept.exists() else plan.weights_place


@dataclass(frozen=True)
class Prepared:
    """Everything that can be wrong has been looked at; nothing has been written."""

    plan: Plan
    method: Method
    pools: Pools
    division: Division
    task: Task
    model: Built
    choice: Choice = field(default_factory=Choice)
    memory: SharedBuffer | None = None
    """Where the pools lie that workers are to share."""

    @classmethod
    def of(cls, plan: Plan, saved: Path | None = None) -> Prepared:
        """Data, partition, method and model of a plan. ``saved``: the partition of a run that is gone on with.

        Raises:
            UsageError: of any kind: names, parameters, data, or things that do not go together.
        """
        import torch

        if plan.threads:
            torch.set_num_threads(plan.threads)
        register(plan)
        method = methods.create(plan.method_name, plan.params, paper=plan.paper)
        pools, division, task = prepare(plan, saved)
        if plan.new_clients >= len(division.clients):
            raise UsageError(
                f"new_clients = {plan.new_clients} of {len(division.clients)} clients; somebody has to train before"
            )
        if (place := weights_for(plan, saved)) is not None:
            pools = replace(pools, weights=read_weights(models.create(task), place)[0])
        model = Built.of(method, task, seed=plan.seed, device=plan.device, weights=pools.weights)
        return cls(plan, method, pools, division, task, model, Choice.of(plan, len(division.clients)))

    def with_params(self, params: dict[str, Any]) -> Prepared:
        """The same with these parameters of the method, and the model that they make.

        Raises:
            ConfigError: unknown or impossible parameters, all of them listed.
        """
        method, plan = methods.create(self.plan.method_name, params), self.plan
        if method.params == self.method.params:
            return self
        model = Built.of(method, self.task, seed=plan.seed, device=plan.device, weights=self.pools.weights)
        return replace(self, method=method, model=model)

    def shared(self) -> Prepared:
        """The same with its pools, where processes are to share them, in memory that they can; forget the original."""
        if self.choice.engine != "pool":
            return self
        area = SharedBuffer.of(*self.pools.content())
        pools = replace(Pools.from_memory(area.map(), self.task), owners=self.pools.owners)
        return replace(self, memory=area, pools=pools)

    @property
    def newcomers(self) -> tuple[str, ...]:
        """Clients that never train."""
        clients = tuple(self.division.clients)
        return clients[len(clients) - self.plan.new_clients :]

    def settled_precision(self) -> Precision:
        """What steps are done in: as planned, but float32 where a step is not faster in bfloat16 on this machine.

        All workers follow this one decision: their results must not depend on who trained whom.

        Raises:
            DataError: this GPU has no bfloat16.
        """
        if self.plan.precision == "float32":
            return "float32"
        import torch

        model = self.model.model
        device = next(model.parameters()).device
        supported(self.plan.precision, device)
        train, _ = self.pools.arrays(max(self.division.clients.values(), key=lambda share: len(share.train)))
        inputs = torch.from_numpy(train.inputs[: self.method.params.batch_size]).to(device)
        times = time_steps(model, inputs)
        times.log()
        return times.chosen

    def request(self) -> Request:
        """The run to ask for."""
        params = self.method.params.model_dump(mode="json")
        plan = self.plan
        return Request(plan.method_name, params, plan.rounds, plan.seed, self.task, plan.keep_every)

    def config(self, folder: Path) -> CoordinatorConfig:
        """A coordinator that waits for everybody who can still deliver."""
        plan = self.plan
        patient = {"quorum": 1.0, "max_attempts": 1, "deadline_s": LONGEST_ROUND_S}
        lenient = {
            "quorum": ANYBODY,
            "max_attempts": MANY_ATTEMPTS,
            "grace_s": GRACE_S,
            "deadline_s": LONGEST_SILENCE_S,
        }
        closing = lenient if plan.dropout else patient
        raw = {
            "federation": FEDERATION,
            "state": folder,
            "task": self.task,
            "cohort": {"fraction": plan.fraction, "fraction_max": plan.fraction_max},
            "round": {"lease_s": LEASE_S, **closing},
            "export": {"after_run": False},
            "evaluate_every": plan.evaluate_every,
        }
        return parse(CoordinatorConfig, raw, where="the simulation's coordinator")
