"""SGD and Adam of PyTorch as they are, without PyTorch's compiler, which they would import.

PyTorch (2.6 to 2.13 at least) wraps the methods of its optimizers for `torch.compile`. The wrappers import
``torch._dynamo`` when they are called first, and with it a library for symbolic mathematics: a second of processor time
and 75 MB of memory on a PC, as much time as PyTorch itself takes. Nothing here is compiled, so the methods inside of
the wrappers are called. A version of PyTorch that wraps nothing, or otherwise, works as well; it only imports more.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar, cast

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _without_compiler(optimizer: type[Kind]) -> type[Kind]:
    """Return a class with the same arithmetic, state and name whose methods do not import PyTorch's compiler."""
    methods: dict[str, Any] = {
        name: inspect.unwrap(getattr(optimizer, name))
        for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    }
    # The wrapper of `step` also switches gradients off, as `no_grad` does.
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return cast("type[Kind]", type(optimizer.__name__, (optimizer,), methods))


SGD = _without_compiler(torch.optim.SGD)
"""`torch.optim.SGD` without the compiler."""

Adam = _without_compiler(torch.optim.Adam)
"""`torch.optim.Adam` without the compiler."""
