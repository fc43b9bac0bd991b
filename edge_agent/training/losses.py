"""Loss functions that several methods share."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

Variant = Literal["in", "out"]
Reduction = Literal["mean", "valid_mean", "none"]


def supervised_contrastive(
    features: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    variant: Variant = "in",
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Supervised contrastive loss of ``features`` (n, d), which are brought to unit length here.

    With S = cosine / temperature, A = all others, P = the others of the same label:
    ``in``: logsumexp_A S - logsumexp_P S + log |P|, the logarithm outside the mean over positives;
    ``out``: logsumexp_A S - mean_P S, the logarithm inside. ``in`` <= ``out``.

    Anchors without positives contribute 0. ``mean`` divides by n, ``valid_mean`` by the number of anchors that have
    positives, ``none`` gives one value for each anchor (n,).
    """
    unit = F.normalize(features, dim=1, eps=1e-12)
    similarity = unit @ unit.T / temperature
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    count = positive.sum(dim=1)
    # The lowest finite number stands for "left out": with -inf an anchor without positives would give NaN gradients.
    out = torch.finfo(similarity.dtype).min
    everyone = torch.logsumexp(similarity.masked_fill(itself, out), dim=1)
    if variant == "in":
        same = torch.logsumexp(similarity.masked_fill(~positive, out), dim=1) - count.clamp(min=1).log()
    else:
        same = (similarity * positive).sum(dim=1) / count.clamp(min=1)
    losses = torch.where(count > 0, everyone - same, torch.zeros_like(everyone))
    return _reduced(losses, count, reduction)


def _reduced(losses: torch.Tensor, positives: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    if reduction == "none":
        return losses
    anchors = (positives > 0).sum().clamp(min=1) if reduction == "valid_mean" else len(losses)
    return losses.sum() / anchors


def balanced_softmax(
    logits: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """Cross entropy (batch mean) of ``logits + gamma * log counts``: corrects for class sizes ``counts`` (K,).

    Classes of count 0 get probability 0; they must not occur among the labels.
    """
    return F.cross_entropy(logits + gamma * counts.to(logits.dtype).log(), labels)


def negative_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Batch mean of sum_c q_c log q_c for q = softmax(logits): between -log K (uniform) and 0 (certain)."""
    log_q = F.log_softmax(logits, dim=1)
    return (log_q.exp() * log_q).sum(dim=1).mean()


def symmetric_divergence(first: torch.Tensor, second: torch.Tensor, *, detach_first: bool = False) -> torch.Tensor:
    """Batch mean of KL(p || q) + KL(q || p) for the softmaxes p, q of two logits (n, K); 0 only where they are equal.

    ``detach_first``: the first side of each term is a target that gets no gradient from it.
    """
    log_p, log_q = F.log_softmax(first, dim=1), F.log_softmax(second, dim=1)
    target_p, target_q = (log_p.detach(), log_q.detach()) if detach_first else (log_p, log_q)
    forth = F.kl_div(log_q, target_p, reduction="batchmean", log_target=True)
    return forth + F.kl_div(log_p, target_q, reduction="batchmean", log_target=True)
