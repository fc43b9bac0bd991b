"""What one unit of each count costs: coefficients, the machine they come from, and how far off they are.

The package's own were measured on one machine. ``headwater bench costs`` measures and fits them on another one, in a
file of the same form, which ``headwater plan --costs`` reads.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from edge_agent.core.errors import ConfigError
from edge_agent.core.storage import read_regular
from edge_agent.core.task import Frozen

from .work import Size, Work

OWN = Path(__file__).with_name("costs.json")
"""The costs that come with the package."""

MOST_BYTES = 1 << 20
"""A file of costs has some kilobytes; a larger one is something else."""

MOST_MISTAKES = 20
"""Mistakes of a file that are listed."""


class Origin(Frozen):
    """The machine and the day of a measurement, and the command that repeats it."""

    processor: str = Field(max_length=200, description="name of the processor")
    cores: int = Field(ge=1, description="cores of the machine")
    python: str = Field(max_length=50, description="version of Python")
    broker: str = Field(max_length=50, description="broker that was measured")
    date: str = Field(max_length=50, description="day of the measurement")
    command: str = Field(max_length=200, description="command that measures them again")


class Point(Frozen):
    """One fleet that was measured: its size, its model and its rounds."""

    agents: int = Field(ge=1, description="agents")
    cohort: int = Field(ge=1, description="agents of a round")
    model_mb: float = Field(gt=0, description="size of the model")
    rounds: int = Field(ge=1, description="rounds")
    aggregators: int = Field(0, ge=0, description="aggregators beside the coordinator")

    @property
    def size(self) -> Size:
        """The agents, cohort and model that are there while this fleet is measured."""
        return Size(processes=1, agents=self.agents, cohort=self.cohort, model_mb=self.model_mb)


class PhaseUse(Frozen):
    """The work of one phase of a measurement, and what coordinator and broker used for it."""

    point: Point
    phase: str = Field(max_length=50, description="joining, idle, rounds or whole")
    work: Work
    used: dict[str, float] = Field(description="resource -> amount that was used")


class Check(Frozen):
    """A prediction of a fleet that the coefficients were not fitted to."""

    point: Point
    phase: str = Field(max_length=50, description="phase that was predicted")
    resource: str = Field(max_length=50, description="what was predicted")
    predicted: float = Field(ge=0)
    measured: float = Field(gt=0)

    @property
    def error(self) -> float:
        """The prediction's deviation, as a share of what was measured."""
        return self.predicted / self.measured - 1

    def as_json(self) -> dict[str, Any]:
        """Return the prediction and its deviation as a JSON object."""
        return {**self.model_dump(), "error": self.error}


class Costs(Frozen):
    """The cost of one unit of each count. A field that is 0 costs nothing that could be measured."""

    origin: Origin
    coordinator_cpu_s: Work = Field(description="CPU seconds of the coordinator")
    broker_cpu_s: Work = Field(description="CPU seconds of the broker")
    coordinator_in_bytes: Work = Field(description="bytes that the coordinator receives from the broker")
    coordinator_out_bytes: Work = Field(description="bytes that the coordinator sends to the broker")
    agents_in_bytes: Work = Field(description="bytes that all agents receive from the broker")
    journal_bytes: Work = Field(description="bytes of the journal on disk")
    journal_rows: Work = Field(description="rows of the journal")
    coordinator_mb: Size = Field(description="most memory of the coordinator, MB")
    broker_mb: Size = Field(description="most memory of the broker, MB")
    kept_update_s: float = Field(ge=0, description="CPU seconds of the coordinator for an update beside aggregators")
    aggregator_factor: float = Field(
        gt=0, description="CPU of aggregators for the same updates, as a multiple of what the coordinator alone needs"
    )
    sum_s_per_mb: float = Field(gt=0, description="CPU seconds to add 1 MB of float32 to an exact sum")
    merge_s_per_mb: float = Field(gt=0, description="CPU seconds to merge the partial sum of a model of 1 MB")
    checks: tuple[Check, ...] = Field(max_length=1000, description="predictions of fleets that were not fitted")
    measured: tuple[PhaseUse, ...] = Field(max_length=1000, description="what was measured, fitted or held out")


def of_work(costs: Work, work: Work) -> float:
    """Return what some work costs: the sum of each count times its cost."""
    return math.fsum(getattr(costs, name) * getattr(work, name) for name in Work.model_fields)


def of_size(costs: Size, size: Size) -> float:
    """Return what a process needs that has to do with so much: the sum of each count times its cost."""
    return math.fsum(getattr(costs, name) * getattr(size, name) for name in Size.model_fields)


@cache
def own_costs() -> Costs:
    """Return the costs that come with the package."""
    return read_costs(OWN)


def read_costs(path: Path) -> Costs:
    """Read costs that `headwater bench costs` has written.

    Raises:
        ConfigError: The file is missing, too large, or has another form.
    """
    where = f"{path} (--costs takes a file that 'headwater bench costs --out FILE' has written)"
    try:
        raw = read_regular(path, MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(where, [f"cannot be read: {error.strerror}"]) from error
    if len(raw) > MOST_BYTES:
        raise ConfigError(where, [f"has more than {MOST_BYTES} bytes; a file of costs has some kilobytes"])
    try:
        return Costs.model_validate_json(raw)
    except ValidationError as error:
        mistakes = []
        for mistake in error.errors()[:MOST_MISTAKES]:
            field = ".".join(map(str, mistake["loc"])) or "the file"
            mistakes.append(f"{field}: {mistake['msg']}")
        raise ConfigError(where, mistakes) from error
