"""Two classifiers that answer together."""

from __future__ import annotations

from typing import Literal

import torch

Ensemble = Literal["probs", "logits"]
"""``probs``: the mean of both softmaxes. ``logits``: the softmax of the summed logits. They can disagree."""


def ensemble(first: torch.Tensor, second: torch.Tensor, kind: Ensemble) -> torch.Tensor:
    """Class probabilities (n, K) of two classifiers' logits (n, K) together; rows sum to 1."""
    if kind == "logits":
        return torch.softmax(first + second, dim=1)
    return (torch.softmax(first, dim=1) + torch.softmax(second, dim=1)) / 2
