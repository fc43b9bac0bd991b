"""The request of an analysis: its settings, and where its target is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from edge_agent.core.task import Frozen

Accuracy = Annotated[float, Field(gt=0, le=1)]


class Settings(Frozen):
    """The settings of an analysis; all but ``targets`` and ``head`` concern features."""

    targets: tuple[Accuracy, ...] = Field((), description="Accuracy 0..1: show rounds and bytes until it was reached")
    samples: int = Field(
        300, ge=1, description="test samples of each client whose features are measured; accuracies are of all of them"
    )
    probe: int = Field(
        256, ge=2, description="number of samples, evenly from all clients, on which two clients are compared"
    )
    threshold: float = Field(
        0.01, gt=0, le=1, description="threshold of the sparsity ratio; ours, the paper does not state its own"
    )
    important: float = Field(
        0.5, gt=0, le=1, description="share of the features that count as important (FedPick, Sec. VIII-B)"
    )
    tsne: int = Field(4, ge=0, description="number of clients whose features are plotted by t-SNE; 0 = none")
    perplexity: float = Field(30.0, ge=1, lt=1e6, description="perplexity of t-SNE; at most a third of the samples")
    head: str = Field("lr", description="device head to fit where personal parts are not available")
    test_fraction: float = Field(0.25, gt=0, lt=1, description="share of the samples of --data held out for testing")
    seed: int = Field(0, ge=0, lt=1 << 32, description="seed of random samples, t-SNE and fits")


@dataclass(frozen=True)
class Location:
    """Where the target of an analysis is, and the clients' data."""

    what: str
    """The path of the target, or the name of a run."""

    state: Path | None = None
    """The state folder in which a run of that name is looked up."""

    data: Sequence[str] = ()
    """The values of ``--data``, see `client_samples`; empty: none were given."""
