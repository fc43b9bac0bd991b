"""The proximal term: weights are pulled back to those that they started from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def pulled_back(parameters: Iterable[torch.Tensor], strength: float) -> Callable[[], None]:
    """What adds ``strength * (w - w0)`` to each gradient, with w0 the values at the time of this call.

    That is the gradient of strength / 2 * |w - w0|^2. To be called before each step of an optimizer; parameters without
    a gradient are left alone.
    """
    weights = list(parameters)
    return pulled_to(weights, [weight.detach().clone() for weight in weights], strength)


def pulled_to(
    parameters: Iterable[torch.Tensor], anchors: Iterable[torch.Tensor], strength: float
) -> Callable[[], None]:
    """As `pulled_back`, to anchors of one's own choice, one for each parameter.

    They are looked at anew each time: an anchor that moves meanwhile pulls to where it is.
    """
    pairs = list(zip(parameters, anchors, strict=True))

    def pull() -> None:
        for weight, anchor in pairs:
            if weight.grad is not None:
                weight.grad.add_(weight.detach() - anchor.detach(), alpha=strength)

    return pull
