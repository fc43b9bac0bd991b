"""SGD and Adam of PyTorch as they are, without its compiler, which they would import, and its marks for profilers.

PyTorch (2.6 to 2.13 at least) wraps the methods of its optimizers for `torch.compile`. The wrappers import
``torch._dynamo`` when they are called first, and with it a library for symbolic mathematics: a second of processor time
and 75 MB of memory on a PC, as much time as PyTorch itself takes. Nothing here is compiled, so the methods inside of
the wrappers are called. A version of PyTorch that wraps nothing, or otherwise, works as well; it only imports more.

PyTorch also marks each step, and each removal of gradients, as a region for its profiler: 11 of the 100 microseconds
that a step of one linear layer takes on an AMD EPYC. Nothing here asks for these regions, nor for hooks of steps, which
the same wrapper calls.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar, cast

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _remove_gradients(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Forget the gradients of all weights, or fill them with zeros, as `torch.optim.Optimizer.zero_grad` does."""
    for group in self.param_groups:
        for weight in group["params"]:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad = torch.zeros_like(weight.grad)


def _without_compiler(optimizer: type[Kind]) -> type[Kind]:
    """Return a class with the same arithmetic, state and name whose methods do not import PyTorch's compiler."""
    methods: dict[str, Any] = {
        name: inspect.unwrap(getattr(optimizer, name)) for name in ("add_param_group", "load_state_dict", "state_dict")
    }
    methods["zero_grad"] = _remove_gradients
    # The wrapper of `step` also switches gradients off, as `no_grad` does.
    step = torch.no_grad()(inspect.unwrap(optimizer.step))
    # PyTorch wraps a step that does not say this once more when the first optimizer is made, for profilers and hooks.
    step.hooked = True
    methods["step"] = step
    return cast("type[Kind]", type(optimizer.__name__, (optimizer,), methods))


SGD = _without_compiler(torch.optim.SGD)
"""`torch.optim.SGD` without the compiler."""

Adam = _without_compiler(torch.optim.Adam)
"""`torch.optim.Adam` without the compiler."""
