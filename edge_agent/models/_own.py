"""An encoder that does not ship: any factory of a ``torch.nn.Module``, checked when it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from ..errors import HeadwaterError, UsageError
from ..task import Task


class OwnEncoder:
    """Stands in the registry for a module with ``build``.

    ``factory`` is called with ``encoder_params`` as keyword arguments, and with ``task`` where it has a parameter of
    that name.
    """

    class Params(BaseModel):
        """Whatever the factory takes."""

        model_config = ConfigDict(extra="allow")

    def __init__(self, name: str, factory: Callable[..., nn.Module]) -> None:
        self.name, self.factory = name, factory

    def build(self, task: Task, **params: Any) -> nn.Module:
        """A new module, with its ``feature_dim``.

        Raises:
            UsageError: the factory fails, makes no module, or one that does not turn inputs into features (n, d).
        """
        if "task" in inspect.signature(self.factory).parameters:
            params = {"task": task, **params}
        try:
            module = self.factory(**params)
        except HeadwaterError:
            raise
        # Whatever a user's factory raises is its own matter, and no reason for a traceback.
        except Exception as error:
            raise UsageError(f"encoder '{self.name}': making it failed: {type(error).__name__}: {error}") from error
        if not isinstance(module, nn.Module):
            raise UsageError(f"encoder '{self.name}': expected a torch.nn.Module, got {type(module).__name__}")
        width = self._width(module, task)
        if getattr(module, "feature_dim", width) != width:
            raise UsageError(
                f"encoder '{self.name}': its feature_dim is {module.feature_dim}, but its features have {width} columns"
            )
        module.feature_dim = width  # type: ignore[assignment]
        return module

    def _width(self, module: nn.Module, task: Task) -> int:
        """Columns of the features, found by running two empty inputs; no random number is used up."""
        shape, was_training = (2, *task.input_shape), module.training
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                result = module.eval()(torch.zeros(shape))
        except Exception as error:
            raise UsageError(
                f"encoder '{self.name}': inputs of shape {shape} failed: {type(error).__name__}: {error}"
            ) from error
        finally:
            module.train(was_training)
        if not isinstance(result, torch.Tensor) or result.ndim != 2 or len(result) != 2:
            got = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise UsageError(f"encoder '{self.name}': inputs of shape {shape} gave {got}, expected features (2, d)")
        return int(result.shape[1])
