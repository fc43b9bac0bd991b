"""What encoders share: a module of layers, and modules that do not ship, checked when they are built."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from ..core.errors import HeadwaterError, UsageError
from ..core.task import Task
from . import Encoder, NoParams

Build = Callable[[Task, Any], nn.Module]


def encoder(*accepts: str, smallest: int = 1, params: type[BaseModel] = NoParams) -> Callable[[Build], Encoder]:
    """Make an `Encoder` of the function that builds it; ``accepts`` are the kinds of inputs that it can take."""
    return partial(Encoder, Params=params, accepts=accepts, smallest=smallest)


class Layers(nn.Module):
    """An encoder that runs its layers one after another."""

    def __init__(self, feature_dim: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Features (n, feature_dim) of ``inputs`` (n, ...)."""
        features: torch.Tensor = self.layers(inputs)
        return features


class AnyParams(BaseModel):
    """Whatever a factory takes."""

    model_config = ConfigDict(extra="allow")


def own_encoder(name: str, factory: Callable[..., nn.Module]) -> Encoder:
    """Return an encoder that does not ship: any factory of a ``torch.nn.Module``.

    It is called with ``encoder_params`` as keyword arguments, and with ``task`` where it has a parameter of that name.
    Building raises a `UsageError` where the factory fails, makes no module, or one that does not turn inputs into
    features (n, d).
    """

    def build(task: Task, params: AnyParams) -> nn.Module:
        """Make the module, and note how many features it has."""
        arguments = params.model_dump()
        if "task" in inspect.signature(factory).parameters:
            arguments = {"task": task, **arguments}
        try:
            module = factory(**arguments)
        except HeadwaterError:
            raise
        # Whatever a user's factory raises is its own matter, and no reason for a traceback.
        except Exception as error:
            raise UsageError(f"encoder '{name}': making it failed: {type(error).__name__}: {error}") from error
        if not isinstance(module, nn.Module):
            raise UsageError(f"encoder '{name}': expected a torch.nn.Module, got {type(module).__name__}")
        width = _measure_width(name, module, task)
        if getattr(module, "feature_dim", width) != width:
            raise UsageError(
                f"encoder '{name}': its feature_dim is {module.feature_dim}, but its features have {width} columns"
            )
        module.feature_dim = width  # type: ignore[assignment]
        return module

    build.__wrapped__ = factory  # type: ignore[attr-defined]  # where `inspect` looks for the source
    return Encoder(build, AnyParams)


def _measure_width(name: str, module: nn.Module, task: Task) -> int:
    """Return how many features an encoder has, found by running two empty inputs; no random number is used up.

    Raises:
        UsageError: The encoder fails, or does not turn inputs into features (n, d).
    """
    shape = (2, *task.input_shape)
    was_training = module.training
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            features = module.eval()(torch.zeros(shape))
    except Exception as error:
        raise UsageError(
            f"encoder '{name}': inputs of shape {shape} failed: {type(error).__name__}: {error}"
        ) from error
    finally:
        module.train(was_training)
    if not isinstance(features, torch.Tensor):
        got = type(features).__name__
    elif features.ndim != 2 or len(features) != 2:
        got = f"shape {tuple(features.shape)}"
    else:
        return int(features.shape[1])
    raise UsageError(f"encoder '{name}': inputs of shape {shape} gave {got}, expected features (2, d)")
