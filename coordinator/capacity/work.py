"""What a fleet gives its coordinator and broker to do, counted; costs are stated for one unit of each count."""

from __future__ import annotations

from pydantic import Field

from edge_agent.core.task import Frozen

MB = 1_000_000
"""Bytes of a megabyte, as disks and networks count."""


class Work(Frozen):
    """Counts of what happens in some time, each from zero. The same fields hold costs of one unit, see `costs`."""

    starts: float = Field(0.0, ge=0, description="starts of a coordinator")
    joins: float = Field(0.0, ge=0, description="agents that connect, subscribe, say hello and are welcomed")
    seconds: float = Field(0.0, ge=0, description="seconds of an event loop, with timers and status files")
    agent_seconds: float = Field(0.0, ge=0, description="connected agents times seconds: their rows in status files")
    heartbeats: float = Field(0.0, ge=0, description="heartbeats")
    open_seconds: float = Field(
        0.0, ge=0, description="seconds while a round, or the end of a run, is open: looks at it"
    )
    open_member_seconds: float = Field(0.0, ge=0, description="these seconds times the agents of a round")
    rounds: float = Field(0.0, ge=0, description="rounds, opened and closed")
    updates: float = Field(0.0, ge=0, description="updates: job, download, manifest, receipt, row of the journal")
    update_mb: float = Field(0.0, ge=0, description="MB of the models of these, down, up, checked, stored and summed")
    final_reports: float = Field(0.0, ge=0, description="agents that get the final model of a run and report")
    final_mb: float = Field(0.0, ge=0, description="MB of the final models that go to these agents")

    def scaled(self, factor: float) -> Work:
        """Return this work multiplied by a factor, count by count."""
        return Work(**{name: factor * getattr(self, name) for name in Work.model_fields})

    def plus(self, other: Work) -> Work:
        """Return the sum of this work and another, count by count."""
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in Work.model_fields})


class Size(Frozen):
    """Counts of what is there at a time. The same fields hold costs of one unit, as those of `Work` do."""

    processes: float = Field(0.0, ge=0, description="the process itself")
    agents: float = Field(0.0, ge=0, description="connected agents, with their subscriptions and rows")
    cohort: float = Field(0.0, ge=0, description="agents of the round, with their uploads under way")
    model_mb: float = Field(0.0, ge=0, description="MB of the model")
