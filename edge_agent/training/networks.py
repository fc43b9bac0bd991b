"""Small networks of single methods: FedRIR's autoencoder, masks, fixed classifiers, and two classifiers together."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import nn

from ..core.task import Task
from ..models.base import Layers
from ..models.papers import FEDRIR_CHANNELS, FEDRIR_KERNEL, fedrir_padding, fedrir_stages

SHRINKS = 4
"""The two stages halve twice: only sides divisible by 4 come back from the generator as they were."""


class SpecificEncoder(nn.Module):
    """An encoder of images to a Gaussian in ``dim`` dimensions: `models.papers.fedrir_cnn`, then one linear layer."""

    def __init__(self, task: Task, dim: int) -> None:
        super().__init__()
        layers, shape = fedrir_stages(task)
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(math.prod(shape), 2 * dim))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means and log variances, (n, dim) each."""
        mean, logvar = self.layers(images).chunk(2, dim=1)
        return mean, logvar


class Generator(Layers):
    """Codes (n, dim) to images (n, c, h, w), unbounded: one linear layer and two transposed convolutions.

    These undo the two stages of the encoder.
    """

    def __init__(self, task: Task, dim: int) -> None:
        _, shape = fedrir_stages(task)
        wide, narrow = FEDRIR_CHANNELS[::-1]
        padding = fedrir_padding(task)
        layers = [
            nn.Linear(dim, math.prod(shape)),
            nn.Unflatten(1, shape),
            nn.ConvTranspose2d(wide, narrow, FEDRIR_KERNEL, stride=2, padding=padding, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(narrow, task.input.channels, FEDRIR_KERNEL, stride=2, padding=padding, output_padding=1),
        ]
        super().__init__(math.prod(task.input_shape), layers)


def unfit_images(task: Task, patch: int) -> list[str]:
    """Return why `Generator` cannot reconstruct images masked in patches of ``patch`` pixels; empty if it can."""
    if task.input.kind != "image":
        mistake = f"task.input.kind is '{task.input.kind}', FedRIR masks and redraws images"
        return [f"{mistake}; set without_mcsl = true, or choose another method"]
    need = math.lcm(patch, SHRINKS)
    return [
        f"task.input.{name} is {side}, expected a multiple of {need} (patch {patch}, and the generator draws multiples "
        f"of {SHRINKS}); resize to {max(need, side - side % need)}"
        + (", or change patch" if side % SHRINKS == 0 else "")
        for name, side in zip(("height", "width"), task.input_shape[1:], strict=True)
        if side % need
    ]


def sample(mean: torch.Tensor, logvar: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one sample (n, d) of each row's Gaussian, through which gradients flow."""
    noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
    return mean + noise * torch.exp(0.5 * logvar)


def kl_to_standard_normal(mean: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence from N(mean, e^logvar) to N(0, 1): summed over dimensions, averaged over rows."""
    return -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(dim=1).mean()


_LEAST = 1e-9
_MOST = 1.0 - 2.0**-24  # the largest float32 below 1: with 1 itself the noise would be infinite


def gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Return the standard Gumbel noise ``-log(-log U)`` from uniform U, which is brought into 1e-9 .. 1 - 2^-24."""
    return -torch.log(-torch.log(uniform.clamp(_LEAST, _MOST)))


def mask_noise(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw g' - g'' of two independent Gumbels, shaped like ``logits``; g' is drawn first."""
    first, second = (
        torch.rand(logits.shape, generator=generator, device=logits.device, dtype=logits.dtype) for _ in range(2)
    )
    return gumbel(first) - gumbel(second)


def feature_mask(
    logits: torch.Tensor,
    noise: torch.Tensor | None = None,
    *,
    temperature: float,
    threshold: float = 0.5,
    hard: bool = True,
) -> torch.Tensor:
    """Return a mask like ``logits`` from m = sigmoid((logits + noise) / temperature).

    ``hard``: 1 where m > ``threshold``, else 0; with noise, as in training, it has the gradient of m (straight
    through). Without noise, for inference, and with threshold 0.5 it is exactly 1 where logits > 0. Otherwise m itself.
    """
    noisy = logits if noise is None else logits + noise
    if not hard:
        return torch.sigmoid(noisy / temperature)
    picked = (noisy > cut(temperature, threshold)).to(noisy.dtype)
    if noise is None:
        return picked
    # soft - soft is exactly 0, so the mask is exactly 0 or 1; (mask + soft) - soft would not be.
    soft = torch.sigmoid(noisy / temperature)
    return picked + (soft - soft.detach())


def cut(temperature: float, threshold: float) -> float:
    """Return the logit at which sigmoid(logit / ``temperature``) is ``threshold`` (0..1, exclusive)."""
    return temperature * math.log(threshold / (1.0 - threshold))


def orthonormal(rows: int, size: int, seed: int) -> np.ndarray:
    """Draw a matrix (rows, size) float64 with orthogonal rows of length 1, evenly from all such; rows <= size."""
    drawn = np.random.default_rng(seed).standard_normal((size, rows))
    columns, triangle = np.linalg.qr(drawn)
    signs = np.where(np.diag(triangle) < 0, -1.0, 1.0)  # a factorisation may choose them as it likes
    return np.ascontiguousarray((columns * signs).T)


def simplex(classes: int, size: int, seed: int) -> np.ndarray:
    """Return the equiangular tight frame (classes, size) float64: unit rows, each pair at cosine -1 / (classes - 1).

    Rows of sqrt(K / (K - 1)) (I - 11' / K) U' for K classes and orthonormal U'; they sum to 0. ``classes`` <= ``size``.
    One class alone gets one unit vector.
    """
    directions = orthonormal(classes, size, seed)
    if classes == 1:
        return directions
    return np.asarray(math.sqrt(classes / (classes - 1)) * (directions - directions.mean(axis=0)))


Ensemble = Literal["probs", "logits"]
"""``probs``: the mean of both softmaxes. ``logits``: the softmax of the summed logits. They can disagree."""


def ensemble(first: torch.Tensor, second: torch.Tensor, kind: Ensemble) -> torch.Tensor:
    """Return class probabilities (n, K) of two classifiers' logits (n, K) together; rows sum to 1."""
    if kind == "logits":
        return torch.softmax(first + second, dim=1)
    return (torch.softmax(first, dim=1) + torch.softmax(second, dim=1)) / 2
