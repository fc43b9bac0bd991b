"""An agent without a broker, in the coordinator's own process: for a federation in one program, on one machine."""

from __future__ import annotations

from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.runtime import AgentRuntime
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.config import AgentConfig
from edge_agent.wire.memory import MemoryBroker


def agent_in_memory(config: AgentConfig, broker: MemoryBroker) -> Agent:
    """Return an agent that trains, connected to a broker in memory; its start is called as its id."""
    transport = broker.transport(will_of(config, config.id))
    return Agent(config, transport, TaskRunner(config, "train"), AgentRuntime(boot=config.id))
