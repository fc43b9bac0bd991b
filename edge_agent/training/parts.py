"""Models of named parts, and their tensors as named arrays: what travels, what stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as Norm  # what all layers of NORM_LAYERS are

from ..core.errors import TensorsError, UnknownName
from ..core.task import RUNNING_STATISTICS, Task, Tensors
from ..models import create


class Parts(nn.Module):
    """A model of named parts; the first word of each tensor's name is its part (``encoder.conv1.weight``).

    ``Parts(encoder=..., head=...)`` answers with logits. Methods with other parts reach them by ``part(name)``.
    """

    encoder: nn.Module
    head: nn.Module
    frozen_names: frozenset[str] = frozenset()
    """Names of tensors that all clients get and nobody changes; see `edge_agent.training.peft`."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, module in parts.items():
            self.add_module(name, module)

    def part(self, name: str) -> nn.Module:
        """Return the part called ``name``.

        Raises:
            UnknownName: The model has no part of this name.
        """
        module = self._modules.get(name)
        if module is None:
            raise UnknownName("part", name, self._modules)
        return module

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return features (n, d) of the encoder."""
        features: torch.Tensor = self.encoder(inputs)
        return features

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits (n, K)."""
        logits: torch.Tensor = self.head(self.encoder(inputs))
        return logits


NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_COUNTER = "num_batches_tracked"


def encoder_and_head(task: Task, **others: Callable[[int], nn.Module]) -> Parts:
    """Return the task's encoder with one linear layer on top, fresh weights from torch's global generator.

    ``others`` make further parts, by name, from the width of the features.

    Raises:
        UnknownName: No encoder has this name.
        ConfigError: The encoder does not fit the task.
    """
    encoder = create(task)
    width = feature_dim(encoder)
    model = channels_last(Parts(encoder=encoder, head=nn.Linear(width, task.num_classes)))
    for name, make in others.items():
        model.add_module(name, make(width))
    return model


def encoder_alone(task: Task) -> Parts:
    """Return the task's encoder as the only part.

    Raises:
        UnknownName: No encoder has this name.
        ConfigError: The encoder does not fit the task.
    """
    return channels_last(Parts(encoder=create(task)))


def feature_dim(encoder: nn.Module) -> int:
    """Return the width d of an encoder's features."""
    return int(getattr(encoder, "feature_dim"))  # noqa: B009 - nn.Module types every attribute as a tensor or a module


def channels_last(model: Parts) -> Parts:
    """Return the model in the memory format "channels last", which saves a fifth of a training step's CPU time."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def names_that_travel(
    model: nn.Module, shared: Iterable[str], norm: Literal["global", "local_stats", "local_all"]
) -> tuple[str, ...]:
    """Return names, sorted, of the shared parts' tensors that leave the device under a batch norm policy.

    ``global``: all. ``local_stats``: all but running means and variances. ``local_all``: nothing of a batch norm layer.
    Batch counters never travel: a mean of counters means nothing.

    Raises:
        UnknownName: ``shared`` names a part that the model does not have.
    """
    parts = dict(model.named_children())
    for part in shared:
        if part not in parts:
            raise UnknownName("part", part, parts)
    chosen = set(shared)
    stay = set(_norm_tensors(model, norm))
    return tuple(sorted(name for name in model.state_dict() if name.split(".", 1)[0] in chosen and name not in stay))


def _norm_tensors(model: nn.Module, norm: str) -> Iterator[str]:
    """Yield names of the batch norm tensors that stay; layers are known by type, for ``downsample.1`` says nothing."""
    for path, module in model.named_modules():
        if isinstance(module, NORM_LAYERS):
            yield f"{path}.{_COUNTER}"
            if norm != "global":
                yield from (f"{path}.{name}" for name in RUNNING_STATISTICS)
            if norm == "local_all":
                yield from (f"{path}.{name}" for name in ("weight", "bias"))


def personal_names(model: nn.Module, shared_names: Iterable[str]) -> tuple[str, ...]:
    """Return names, sorted, of all tensors that stay on the device: every tensor that is not among ``shared_names``."""
    return tuple(sorted(model.state_dict().keys() - set(shared_names)))


def norm_names(model: nn.Module, shared_names: Iterable[str], part: str = "encoder") -> tuple[str, ...]:
    """Return names, sorted, of the batch norm tensors of ``part`` that do not travel, counters aside."""
    staying = {name for name in _norm_tensors(model, "local_all") if name.split(".", 1)[0] == part}
    return tuple(sorted(name for name in staying - set(shared_names) if not name.endswith(_COUNTER)))


def to_arrays(model: nn.Module, names: Iterable[str]) -> Tensors:
    """Return copies of the named tensors as contiguous arrays on the host.

    Raises:
        TensorsError: The model has no tensor of such a name.
    """
    state = model.state_dict()
    chosen_names = tuple(names)
    missing = [f"no tensor '{name}'" for name in chosen_names if name not in state]
    if missing:
        raise TensorsError(first_of(missing))
    copies = {name: state[name].to("cpu", copy=True, memory_format=torch.contiguous_format) for name in chosen_names}
    return {name: copy.numpy() for name, copy in copies.items()}


def load_arrays(model: nn.Module, tensors: Mapping[str, np.ndarray]) -> None:
    """Load exactly the named tensors into the model; all others stay bit for bit.

    Raises:
        TensorsError: Names, shapes or dtypes differ from the model's; all of them are listed and nothing is loaded.
    """
    state = model.state_dict()
    sources = {name: torch.tensor(array) for name, array in tensors.items()}  # copies: arrays may be read-only
    mistakes = []
    for name, source in sources.items():
        target = state.get(name)
        if target is None:
            mistakes.append(f"the model has no tensor '{name}'")
        elif source.shape != target.shape or source.dtype != target.dtype:
            mistakes.append(f"'{name}' is {_form(source)}, the model has {_form(target)}")
    if mistakes:
        raise TensorsError(first_of(mistakes))
    with torch.no_grad():
        for name, source in sources.items():
            state[name].copy_(source)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@contextlib.contextmanager
def put_back(model: nn.Module, names: Iterable[str] | None = None) -> Iterator[None]:
    """At the end the named tensors of the model, by default all, are what they were before, bit for bit."""
    state = model.state_dict()
    before = {name: state[name].clone() for name in (state if names is None else names)}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in before.items():
                state[name].copy_(tensor)


def first_of(mistakes: Sequence[str], shown: int = 5) -> str:
    """Return the first ``shown`` mistakes, and how many more there are."""
    return "; ".join(mistakes[:shown]) + (f"; and {len(mistakes) - shown} more" if len(mistakes) > shown else "")


MOST_ROWS = 1024
"""The most samples, evenly spaced, from which the statistics are taken; more change nothing that matters."""

PIECE_ROWS = 256
"""The most samples of one forward pass."""


def own_layers(model: nn.Module, personal: Collection[str]) -> list[Norm]:
    """Return batch norm layers of ``model`` with running statistics that are among the tensors called ``personal``."""
    return [
        layer
        for path, layer in model.named_modules()
        if isinstance(layer, NORM_LAYERS) and f"{path}.running_mean" in personal
    ]


def take_statistics(layers: Collection[Norm], forward: Callable[[torch.Tensor], object], inputs: torch.Tensor) -> None:
    """Replace the running statistics of ``layers`` by those of ``inputs`` (n, ...).

    ``forward`` runs the model in eval mode on some of the inputs; all other layers do as in evaluation, so nothing
    random is drawn. Fewer than two inputs have no variance: the statistics stay as they are.
    """
    if len(inputs) < 2 or not layers:
        return
    rows = np.unique(np.linspace(0, len(inputs) - 1, min(MOST_ROWS, len(inputs))).round().astype(np.int64))
    pieces = np.array_split(rows, -(-len(rows) // PIECE_ROWS))
    momenta = [layer.momentum for layer in layers]
    hooks = [layer.register_forward_pre_hook(_use_batch) for layer in layers]
    hooks += [layer.register_forward_hook(_use_running) for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the plain mean over all pieces
        with torch.no_grad():
            for piece in pieces:
                forward(inputs[torch.from_numpy(piece).to(inputs.device)])
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


@contextlib.contextmanager
def statistics_of(
    layers: Collection[Norm], forward: Callable[[torch.Tensor], object], inputs: torch.Tensor
) -> Iterator[None]:
    """Give ``layers`` the statistics of ``inputs``, and restore those from before, bit for bit, at the end."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(put_back(layer))
        take_statistics(layers, forward, inputs)
        yield


def _use_batch(layer: nn.Module, _: Any) -> None:
    layer.training = True


def _use_running(layer: nn.Module, *_: Any) -> None:
    layer.training = False
