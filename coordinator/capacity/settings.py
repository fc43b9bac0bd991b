"""The settings of ``headwater plan``: a fleet, what is asked of it, and the machines that are there."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from edge_agent.core.task import Frozen

from ..config import RoundConfig
from .work import MB

MOST_AGENTS = 1_000_000
"""Fleets for which costs are extrapolated; nothing supports them beyond."""

DAY_S = 86_400.0
SMALLEST_BYTES = 1000
LARGEST_BYTES = 1 << 40
_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": MB, "GB": 1000 * MB}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``0.5MB``, ``45 MB`` or ``500000``; 1 MB are 10^6 bytes.

    Raises:
        ValueError: The text is not a size, or not one of a model.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMG]?B?)", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"'{text}' is no size; expected one such as 0.5MB, 45MB or 500000")
    size_bytes = round(float(match[1]) * _UNITS[match[2]])
    if not SMALLEST_BYTES <= size_bytes <= LARGEST_BYTES:
        raise ValueError(f"'{text}' is {size_bytes} bytes; expected {SMALLEST_BYTES} to {LARGEST_BYTES}")
    return size_bytes


class PlanSettings(Frozen):
    """A fleet, and the machines that serve it."""

    agents: int = Field(ge=1, le=MOST_AGENTS, description="number of agents")
    model: str = Field("5MB", description="size of the model, each way: 0.5MB, 45MB, 500000")
    rounds_per_day: float = Field(10.0, gt=0, le=DAY_S, description="rounds in a day")
    cohort: int = Field(0, ge=0, le=MOST_AGENTS, description="agents in a round; 0 = all")
    run_rounds: int = Field(
        100, ge=1, le=1_000_000, description="rounds of a run; after the last one all agents get the final model"
    )
    round_s: float = Field(
        0.0, ge=0, le=7 * DAY_S, description="seconds in which a round has to be done; 0 = until the next one begins"
    )
    open_s: float = Field(
        300.0, gt=0, le=7 * DAY_S, description="seconds that agents take for a round, or for the end of a run"
    )
    joins_per_day: float = Field(1.0, ge=0, le=1440, description="times a day that an agent connects")
    partitions: int = Field(0, ge=0, le=1024, description="aggregators; 0 = the coordinator alone")
    brokers: int = Field(1, ge=1, le=1024, description="broker nodes")
    connections: int = Field(50_000, ge=1, le=10_000_000, description="connections that a broker node may have open")
    cores: int = Field(4, ge=1, le=1024, description="cores of a machine")
    memory_gb: float = Field(16.0, gt=0, le=100_000, description="memory of a machine, GB")
    network_mbit: float = Field(1000.0, gt=0, le=1_000_000, description="network of a machine, Mbit/s each way")
    disk_gb: float = Field(200.0, gt=0, le=1_000_000, description="disk of a machine, GB")
    kept_days: float = Field(365.0, ge=0, le=36_500, description="days for which the journal is kept")
    busy: float = Field(0.7, gt=0, le=1, description="share of cores, memory, network and disk that may be used")

    @field_validator("model")
    @classmethod
    def _check_model(cls, text: str) -> str:
        parse_size(text)
        return text

    @property
    def model_mb(self) -> float:
        """The size of the model in MB."""
        return parse_size(self.model) / MB

    @property
    def interval_s(self) -> float:
        """The seconds from one round to the next, or those in which a round has to be done, if fewer."""
        between_s = DAY_S / self.rounds_per_day
        if self.round_s == 0:
            return between_s
        return min(self.round_s, between_s)

    @property
    def lease_s(self) -> float:
        """The lease that a coordinator has by default, from which heartbeats follow."""
        lease_s: float = RoundConfig.model_fields["lease_s"].default
        return lease_s

    def cohort_of(self, agents: int) -> int:
        """Return how many of so many agents take part in a round."""
        if self.cohort == 0:
            return agents
        return min(self.cohort, agents)
