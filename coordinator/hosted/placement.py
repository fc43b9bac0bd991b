"""Which process has which hosted clients, and on which device or cluster they compute.

A process is bound to one device: each process that uses a GPU needs a context of its own there, which takes hundreds of
megabytes, and clients of one process share its model. Clients that compute on a Ray cluster are in one process, which
has their files and hands out their computations. Where a client computes decides nothing else: on processors of one
kind all divisions end in the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.core import capabilities
from edge_agent.core.config import AgentConfig

from ..config import CoordinatorConfig
from ..processes.cluster import Advice
from ..processes.supervisor import worker_command

COMMAND = worker_command("coordinator.hosted.agents:serve")
"""The command of a process whose clients compute in it."""

RAY_ADVICE = Advice(
    "[hosted_ray]",
    without_ray="leave that section out, and the clients compute on this machine",
    without_address="correct hosted_ray.address; the coordinator goes on trying",
)
"""What errors about the cluster of hosted clients advise: the section of the configuration."""

AUTO = "auto"
"""The device of a client that leaves the choice to others."""


def clients_of_processes(config: CoordinatorConfig) -> list[list[AgentConfig]]:
    """Return the hosted clients of each process, those of the configuration in their order.

    Without ``hosted_devices`` clients compute where they are configured to, in as many processes as are configured, or
    as the machine has cores. With a GPU there is one in all.
    """
    agents = [client.agent(config.federation, config.state, config.round.lease_s) for client in config.hosted]
    if config.hosted_ray is not None:
        return [agents]
    if config.hosted_devices:
        return divide_by_device(agents, config.hosted_devices)
    processes = min(config.hosted_processes or _processes_for(agents), len(agents))
    return [agents[number::processes] for number in range(processes)]


def command_of_processes(config: CoordinatorConfig) -> tuple[str, ...]:
    """Return the command of the processes of hosted clients, which decides where these compute."""
    if config.hosted_ray is not None:
        return worker_command("coordinator.hosted.on_ray:serve", config.hosted_ray.model_dump_json())
    return COMMAND


def _processes_for(agents: Sequence[AgentConfig]) -> int:
    """Return how many processes these clients get on this machine: one for each core, or one for its GPU."""
    machine = capabilities.find()
    uses_gpu = bool(machine.accelerators) and any(agent.training.device != "cpu" for agent in agents)
    return 1 if uses_gpu else machine.cores


def divide_by_device(agents: Sequence[AgentConfig], devices: Sequence[str]) -> list[list[AgentConfig]]:
    """Return the clients of each process that has any, where there is a process for each of ``devices``.

    A client that names a device goes to a process of that device; the others go to any process. Of several processes
    that one is taken which has the fewest clients so far, the first one of these.

    Args:
        agents: The clients. A device that one of them names is among ``devices``.
        devices: The device of each process; one that is there twice has two processes.
    """
    groups: list[list[AgentConfig]] = [[] for _ in devices]
    # Those that name a device come first: the others fill up what these leave.
    for agent in sorted(agents, key=lambda agent: agent.training.device == AUTO):
        wanted = agent.training.device
        allowed = [number for number, device in enumerate(devices) if wanted in {AUTO, device}]
        number = min(allowed, key=lambda number: len(groups[number]))
        training = agent.training.model_copy(update={"device": devices[number]})
        groups[number].append(agent.model_copy(update={"training": training}))
    return [group for group in groups if group]
