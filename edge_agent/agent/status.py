"""What an agent does now, for ``edge-agent status``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..wire.messages import run_name

if TYPE_CHECKING:
    from . import Agent


def status_of(agent: Agent, waits_for: str | None) -> dict[str, Any]:
    """The content of ``status.json``; ``waits_for`` is None for an agent that a coordinator has welcomed."""
    job, problem, membership = agent.jobs.job, agent.condition.problem, agent.membership
    return {
        "id": agent.config.id,
        "tier": agent.duties.tier,
        "welcomed": agent.welcomed,
        "waits_for": waits_for,
        "federation_id": membership.federation or None,
        "epoch": membership.epoch,
        "other_coordinator": membership.note(),
        "job": None if job is None else {"run": run_name(job.run), "round": job.round, "rounds": job.rounds},
        "working": agent.jobs.is_working,
        "bundle_id": agent.duties.bundle_id,
        "rolled_back": agent.duties.rolled_back or None,
        "condition": agent.condition.name,
        "fault": None if problem is None else problem.as_json(),
    }
