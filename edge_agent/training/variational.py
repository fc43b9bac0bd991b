"""A small convolutional variational autoencoder: what FedRIR learns a client's own features with."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..models.fedrir_cnn import CHANNELS, KERNEL, padding_for, stages
from ..task import Task

SHRINKS = 4
"""The two stages halve twice: only sides divisible by 4 come back from the generator as they were."""


class SpecificEncoder(nn.Module):
    """Images to a Gaussian in ``dim`` dimensions: the stages of `models.fedrir_cnn`, then one linear layer."""

    def __init__(self, task: Task, dim: int) -> None:
        super().__init__()
        layers, shape = stages(task)
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(math.prod(shape), 2 * dim))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and log variances, (n, dim) each."""
        mean, logvar = self.layers(images).chunk(2, dim=1)
        return mean, logvar


class Generator(nn.Module):
    """Codes (n, dim) to images: one linear layer and two transposed convolutions, which undo the two stages."""

    def __init__(self, task: Task, dim: int) -> None:
        super().__init__()
        _, shape = stages(task)
        wide, narrow = CHANNELS[::-1]
        padding = padding_for(task)
        self.layers = nn.Sequential(
            nn.Linear(dim, math.prod(shape)),
            nn.Unflatten(1, shape),
            nn.ConvTranspose2d(wide, narrow, KERNEL, stride=2, padding=padding, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(narrow, task.input.channels, KERNEL, stride=2, padding=padding, output_padding=1),
        )

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Images (n, c, h, w), unbounded."""
        images: torch.Tensor = self.layers(codes)
        return images


def sample(mean: torch.Tensor, logvar: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One draw (n, d) of each row's Gaussian, through which gradients flow."""
    noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
    return mean + noise * torch.exp(0.5 * logvar)


def kl_to_standard_normal(mean: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
    """KL divergence from N(mean, e^logvar) to N(0, 1): summed over dimensions, averaged over rows."""
    return -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(dim=1).mean()
