"""Who is asked in a round."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .config import CohortConfig, CoordinatorConfig
from .words import counted, listed


def choose(available: Sequence[str], config: CohortConfig, *, seed: int, round_number: int) -> tuple[str, ...]:
    """The cohort, sorted; the same agents, seed and round give the same cohort. Empty when too few are available.

    ``fraction`` of the available agents, at least ``min_agents`` and at most ``max_agents``, times ``over_selection``.
    With ``fraction_max`` any number of them from the one share to the other is as likely.
    """
    if len(available) < config.min_agents:
        return ()
    rng = np.random.default_rng([seed, round_number])
    wanted = max(config.min_agents, _share(len(available), config, rng))
    wanted = min(wanted, config.max_agents or wanted)
    size = min(len(available), math.ceil(wanted * config.over_selection))
    chosen = rng.choice(len(available), size=size, replace=False)
    ordered = sorted(available)
    return tuple(sorted(ordered[index] for index in chosen))


def lack(present: Sequence[str], config: CoordinatorConfig) -> str:
    """How many train agents a round needs, how many of them are not there, and which of them should be: those here."""
    least = config.cohort.min_agents
    away = [client.id for client in config.hosted if client.id not in present]
    hosted = f"; hosted, but away: {listed(away)}" if away else ""
    needed = counted(least, "train agent")
    return f"{needed}, {least - len(present)} more must come; here: {listed(present)}{hosted}"


def _share(available: int, config: CohortConfig, rng: np.random.Generator) -> int:
    """How many of the available agents the configured share is."""
    least = round(config.fraction * available)
    if config.fraction_max is None:
        return least
    return int(rng.integers(least, round(config.fraction_max * available), endpoint=True))
