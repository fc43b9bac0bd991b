"""Binary masks that can be learned: Gumbel-sigmoid noise, hard forward and smooth backward.

Jang, Gu, Poole, "Categorical Reparameterization with Gumbel-Softmax" (2016), for two categories; the straight-through
gradient is that of Bengio, Leonard, Courville (2013).
"""

from __future__ import annotations

import math

import torch

_LEAST = 1e-9
_MOST = 1.0 - 2.0**-24  # the largest float32 below 1: with 1 itself the noise would be infinite


def gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise ``-log(-log U)`` from uniform U, which is brought into 1e-9 .. 1 - 2^-24."""
    return -torch.log(-torch.log(uniform.clamp(_LEAST, _MOST)))


def mask_noise(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """g' - g'' of two independent Gumbels, shaped like ``logits``; g' is drawn first."""
    first, second = (
        torch.rand(logits.shape, generator=generator, device=logits.device, dtype=logits.dtype) for _ in range(2)
    )
    return gumbel(first) - gumbel(second)


def drawn_mask(
    logits: torch.Tensor, noise: torch.Tensor, *, temperature: float, threshold: float = 0.5, hard: bool = True
) -> torch.Tensor:
    """Mask like ``logits`` from m = sigmoid((logits + noise) / temperature), for training.

    ``hard``: 1 where m > ``threshold``, else 0, with the gradient of m (straight through). Otherwise m itself.
    """
    noisy = logits + noise
    soft = torch.sigmoid(noisy / temperature)
    if not hard:
        return soft
    # soft - soft is exactly 0, so the mask is exactly 0 or 1; (mask + soft) - soft would not be.
    return (noisy > cut(temperature, threshold)).to(soft.dtype) + (soft - soft.detach())


def steady_mask(logits: torch.Tensor, *, temperature: float, threshold: float = 0.5, hard: bool = True) -> torch.Tensor:
    """Mask like ``logits`` without noise, for inference; ``hard`` with threshold 0.5: exactly 1 where logits > 0."""
    if not hard:
        return torch.sigmoid(logits / temperature)
    return (logits > cut(temperature, threshold)).to(logits.dtype)


def cut(temperature: float, threshold: float) -> float:
    """The logit at which sigmoid(logit / ``temperature``) is ``threshold`` (0..1, exclusive)."""
    return temperature * math.log(threshold / (1.0 - threshold))
