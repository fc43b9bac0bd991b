"""A whole federation in one process: a coordinator and two agents that talk over the in-memory transport.

Run it:  python examples/01_two_agents_in_memory.py        (about 5 s)

The in-memory broker is part of the package: it queues and redelivers like a real one, so a test of your own code can
use it, too. Real agents do just this, each in its own process, with `MqttTransport` in place of `broker.transport()`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from coordinator.config import CoordinatorConfig
from coordinator.service.coordinator import Coordinator
from coordinator.state.run_request import Request
from coordinator.state.store import StateFolder
from edge_agent import methods
from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.tasks import TaskRunner
from edge_agent.config import AgentConfig, DataConfig
from edge_agent.task import ImageInput, Task
from edge_agent.wire.memory import MemoryBroker

TASK = Task(input=ImageInput(channels=1, height=16, width=16), class_names=tuple("0123456789"), encoder="small_cnn")
ROUNDS = 3


def agent(broker: MemoryBroker, folder: Path, number: int) -> Agent:
    """A train-tier agent with one half of the handwritten digits."""
    config = AgentConfig(
        id=f"agent-{number}",
        state=folder / f"agent-{number}",
        data=DataConfig(source=f"digits:optdigits?client={number}&clients=2"),
    )
    boot = f"boot-{number}"
    return Agent(config, broker.transport(will_of(config, boot)), TaskRunner(config, "train"), boot=boot)


def federate(folder: Path) -> dict[str, Any]:
    """Run FedPer and return the run's summary; everything lies in ``folder`` afterwards."""
    broker = MemoryBroker()
    settings = {
        "state": folder / "coordinator",
        "task": TASK,
        "cohort": {"min_agents": 2},
        "export": {"after_run": False},
    }
    config = CoordinatorConfig.model_validate(settings)
    params = methods.create("fedper", {"lr": 0.05, "momentum": 0.9}).params.model_dump(mode="json")
    request = Request(method="fedper", params=params, rounds=ROUNDS, seed=0, task=TASK)
    with StateFolder(config.state).open("example") as state:
        run = state.journal.request_run(request.body())
        parts = [
            Coordinator(config, state, broker.transport(), probe_s=0),
            *(agent(broker, folder, n) for n in range(2)),
        ]
        for part in parts:
            part.start()
        while state.journal.unfinished():
            had_news = [part.step(0.0) for part in parts]  # everybody takes a turn
            if not any(had_news):
                parts[0].step(0.01)  # the coordinator waits a moment for some
        for line in state.run(run).metrics():
            if line["kind"] == "round":
                print(f"round {line['round']}: {', '.join(line['agents'])} took {line['seconds']:.2f} s")
        return state.run(run).summary() or {}


def main() -> None:
    """Federate in a temporary folder and print what each agent got."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for found in federate(Path(folder))["agents"]:
            print(f"{found['id']}: acc.local {found['acc']['local']:.3f}, acc.personal {found['acc']['personal']:.3f}")


if __name__ == "__main__":
    main()
