"""What another process has to be told before it can be clients, and what it makes of that."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_agent import methods
from edge_agent.client.session import Built
from edge_agent.data.partition import Division
from edge_agent.task import Task

from ..duties import Shared
from ..own_parts import register
from ..plan import Plan
from ..pools import Pools
from ..prepared import Prepared


def words_for(prepared: Prepared, setup: Sequence[str]) -> dict[str, Any]:
    """Everything but samples, partition and places, as JSON; ``setup``: functions to call first."""
    return {
        "plan": prepared.plan.model_dump(mode="json", exclude_unset=True),
        "params": prepared.method.params.model_dump(mode="json"),
        "task": prepared.task.model_dump(mode="json"),
        "newcomers": list(prepared.newcomers),
        "setup": list(setup),
    }


def shared_by(words: Mapping[str, Any], memory: memoryview, division: Division, clients: Path) -> Shared:
    """What all clients of this process have in common. ``memory`` holds the pools, and is not copied."""
    import torch

    plan, task = Plan.model_validate(words["plan"]), Task.model_validate(words["task"])
    for name in words["setup"]:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()
    if plan.threads:
        torch.set_num_threads(plan.threads)
    register(plan)
    method = methods.create(plan.method_name, words["params"])
    pools = Pools.from_memory(memory, task)
    model = Built.of(method, task, seed=plan.seed, device=plan.device, weights=pools.weights)
    return Shared(
        pools,
        division,
        model,
        clients,
        plan.device,
        precision=plan.precision,
        evaluate_after=plan.evaluate_after,
        keep_every=plan.keep_every,
        newcomers=frozenset(words["newcomers"]),
    )
