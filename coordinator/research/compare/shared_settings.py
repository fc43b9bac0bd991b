"""The further settings of `coordinator.compare` and `coordinator.sweep`, as type checkers and editors see them.

Made from the fields of `Plan` by tests/harness/reference.py; change them there.
"""

from __future__ import annotations

from ...simulation.settings import PlanSettings


class SharedSettings(PlanSettings, total=False):
    """All further settings of a comparison; `Plan` has their limits, and says which go together."""

    partition: str
    """iid, dirichlet, pathological, quantity, fedpac, fedrir_dirichlet, fedrir_pathological, domains, subjects, users,
    a saved partition.json, or an index table (.csv, .parquet, .json) with the columns client, row and perhaps part."""

    clients: int | None
    """number of clients; default: 20, or as many as the data name."""

    rounds: int
    """number of rounds."""

    encoder: str | None
    """an encoder in edge_agent/models, or PATH.py:NAME; default: one that suits the inputs."""
