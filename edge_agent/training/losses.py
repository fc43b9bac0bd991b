"""Loss functions that several methods share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F


def supervised_contrastive(
    features: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    variant: Literal["in", "out"] = "in",
    reduction: Literal["mean", "none"] = "mean",
) -> torch.Tensor:
    """Return the supervised contrastive loss of ``features`` (n, d), which are brought to unit length here.

    With S = cosine / temperature, A = all others, P = the others of the same label:
    ``in``: logsumexp_A S - logsumexp_P S + log |P|, the logarithm outside the mean over positives;
    ``out``: logsumexp_A S - mean_P S, the logarithm inside. ``in`` <= ``out``.

    Anchors without positives contribute 0 and count in the ``mean``; ``none`` gives one value for each anchor (n,).
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
    return losses.sum() / len(losses) if reduction == "mean" else losses


def balanced_softmax(
    logits: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """Return the mean cross entropy of ``logits + gamma * log counts``, which corrects for class sizes (K,).

    Classes of count 0 get probability 0; they must not occur among the labels.
    """
    return F.cross_entropy(logits + gamma * counts.to(logits.dtype).log(), labels)


def negative_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the batch mean of sum_c q_c log q_c for q = softmax(logits): between -log K (uniform) and 0 (certain)."""
    log_q = F.log_softmax(logits, dim=1)
    return (log_q.exp() * log_q).sum(dim=1).mean()


def symmetric_divergence(first: torch.Tensor, second: torch.Tensor, *, detach_first: bool = False) -> torch.Tensor:
    """Return the batch mean of KL(p || q) + KL(q || p) for the softmaxes p, q of two logits (n, K).

    0 if they are equal.

    ``detach_first``: the first side of each term is a target that gets no gradient from it.
    """
    log_p = F.log_softmax(first, dim=1)
    log_q = F.log_softmax(second, dim=1)
    target_p, target_q = (log_p.detach(), log_q.detach()) if detach_first else (log_p, log_q)
    forth = F.kl_div(log_q, target_p, reduction="batchmean", log_target=True)
    return forth + F.kl_div(log_p, target_q, reduction="batchmean", log_target=True)


class GaussianPredictor(nn.Module):
    """q(out | in) = N(mean, e^logvar), two small perceptrons; log variances stay within -1 and 1."""

    def __init__(self, inputs: int, outputs: int, hidden: int = 128) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
        self.logvar = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs), nn.Tanh())

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means and log variances, (n, outputs) each."""
        return self.mean(inputs), self.logvar(inputs)


def gaussian_misfit(values: torch.Tensor, mean: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
    """Return sum_d (value - mean)^2 / e^logvar + logvar, averaged over rows.

    Twice the negative log-likelihood without its constant; the smaller, the better ``values`` are predicted.
    """
    return ((values - mean).square() * torch.exp(-logvar) + logvar).sum(dim=1).mean()


def vclub(
    values: torch.Tensor, mean: torch.Tensor, logvar: torch.Tensor, others: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the bound vCLUB in nats: mean over i of log q(value_i | i) - mean over j of log q(value_j | i).

    Cheng et al., "CLUB", ICML 2020. It bounds the mutual information from above as far as q is the true conditional.
    j runs over all rows, or for each i over the one row ``others[i]`` (n,). Normalising terms cancel.
    """
    if others is None:  # only the first two moments of all rows matter: n steps instead of n^2
        first = values.mean(dim=0)
        second = values.square().mean(dim=0)
    else:
        first = values[others]
        second = values[others].square()
    gap = second - values.square() + 2 * mean * (values - first)
    return 0.5 * (gap * torch.exp(-logvar)).sum(dim=1).mean()


def proximal_gradient(
    parameters: Iterable[torch.Tensor], anchors: Iterable[torch.Tensor], strength: float
) -> Callable[[], None]:
    """Return what adds ``strength * (w - anchor)`` to each gradient: the gradient of strength / 2 * |w - anchor|^2.

    To be called before each step of an optimizer. There is one anchor for each parameter, read in each call;
    parameters without a gradient are left alone.
    """
    pairs = list(zip(parameters, anchors, strict=True))

    def add() -> None:
        for weight, anchor in pairs:
            if weight.grad is not None:
                weight.grad.add_(weight.detach() - anchor.detach(), alpha=strength)

    return add
