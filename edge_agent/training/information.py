"""Mutual information of two feature vectors, bounded through a network that predicts one from the other."""

from __future__ import annotations

import torch
from torch import nn


class GaussianPredictor(nn.Module):
    """q(out | in) = N(mean, e^logvar), two small perceptrons; log variances stay within -1 and 1."""

    def __init__(self, inputs: int, outputs: int, hidden: int = 128) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
        self.logvar = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs), nn.Tanh())

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and log variances, (n, outputs) each."""
        return self.mean(inputs), self.logvar(inputs)


def gaussian_misfit(values: torch.Tensor, mean: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
    """sum_d (value - mean)^2 / e^logvar + logvar, averaged over rows.

    Twice the negative log-likelihood without its constant; the smaller, the better ``values`` are predicted.
    """
    return ((values - mean).square() * torch.exp(-logvar) + logvar).sum(dim=1).mean()


def vclub(
    values: torch.Tensor, mean: torch.Tensor, logvar: torch.Tensor, others: torch.Tensor | None = None
) -> torch.Tensor:
    """The bound vCLUB in nats: mean over i of log q(value_i | i) - mean over j of log q(value_j | i).

    Cheng et al., "CLUB", ICML 2020. It bounds the mutual information from above as far as q is the true conditional.
    j runs over all rows, or for each i over the one row ``others[i]`` (n,). Normalising terms cancel.
    """
    if others is None:  # only the first two moments of all rows matter: n steps instead of n^2
        first, second = values.mean(dim=0), values.square().mean(dim=0)
    else:
        first, second = values[others], values[others].square()
    gap = second - values.square() + 2 * mean * (values - first)
    return 0.5 * (gap * torch.exp(-logvar)).sum(dim=1).mean()
