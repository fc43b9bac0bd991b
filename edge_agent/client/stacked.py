"""Many clients trained at once: their weights in tensors with one more axis in front, and each step one pass for all.

For methods whose local training is the standard one (`Method.has_standard_update`). Each client sees its samples in the
order in which it would see them alone, so the numbers are those of one client after another up to rounding: sums are
taken in another order, so bits are not equal. Clients that have fewer batches stop earlier; batches that are shorter
are filled up with rows that do not count, in the loss and in batch norm.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from ..methods.values import Client, MethodParams
from ..training.loops import batches, local_optimizer, training_mode
from ..training.parts import NORM_LAYERS, Parts

Convolutions = Literal["grouped", "unfolded"]
"""The way in which convolutions of many clients are computed: as one of many groups, or as products of matrices."""

Schedule = list[np.ndarray]
"""The rows (b,) int64 of each batch."""

Tensor = torch.Tensor


def schedule(client: Client, params: MethodParams) -> Schedule:
    """Return all batches of a round, drawn as local training draws them."""
    epochs = (batches(client.samples, params.batch_size, client.rng) for _ in range(params.local_epochs))
    return [rows for epoch in epochs for rows in epoch]


def obstacle(model: Parts) -> str:
    """Return why clients of such a model cannot be trained at once; empty where they can."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:  # noqa: SLF001 - the base of them all
            return f"'{name}' draws random numbers ({type(module).__name__})"
    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
        return "two of its layers share weights"
    return ""


def has_norm(model: nn.Module) -> bool:
    """Return whether there is batch norm, which cannot learn from one sample."""
    return any(isinstance(module, NORM_LAYERS) for module in model.modules())


class Stack:
    """All tensors of one model for each of ``count`` clients: name -> (count, ...)."""

    def __init__(self, model: Parts, count: int) -> None:
        self._model = model
        self.tensors = {
            name: torch.empty((count, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            for name, tensor in model.state_dict().items()
        }

    def hold(self, position: int) -> None:
        """Copy the tensors of the model to a position of the stack."""
        with torch.no_grad():
            for name, tensor in self._model.state_dict().items():
                self.tensors[name][position].copy_(tensor)

    def put(self, position: int) -> None:
        """Copy the tensors at a position of the stack into the model."""
        with torch.no_grad():
            for name, tensor in self._model.state_dict().items():
                tensor.copy_(self.tensors[name][position])

    def train(
        self,
        clients: Sequence[Client],
        schedules: Sequence[Schedule],
        params: MethodParams,
        frozen: Sequence[str],
        convolutions: Convolutions = "grouped",
    ) -> np.ndarray:
        """Train the clients at the first positions, the one with the most batches first.

        Returns the loss of each step, (steps, clients), NaN where a client had no such step.

        Raises:
            ValueError: The clients are in another order.
        """
        steps = [len(batches_of_one) for batches_of_one in schedules]
        if steps != sorted(steps, reverse=True):
            raise ValueError(f"clients with {steps} batches: expected those with the most first")
        if not any(steps):
            return np.empty((0, len(clients)))
        tensors = {name: tensor[: len(clients)] for name, tensor in self.tensors.items()}
        with training_mode(self._model, frozen, "eval"), _stackable(self._model, convolutions) as layers:
            return _Training(self._model, tensors, layers, params).run(_Batches(clients, schedules))


class _Batches:
    """The samples of all clients, one after another, and which of them are in which batch."""

    def __init__(self, clients: Sequence[Client], schedules: Sequence[Schedule]) -> None:
        self._inputs = torch.cat([client.train_inputs for client in clients])
        self._labels = torch.cat([client.train_labels for client in clients])
        firsts = np.cumsum([0, *(client.samples for client in clients)])[:-1]
        self.lengths = np.zeros((len(schedules[0]), len(clients)), np.int64)
        """The number of samples in each batch, (steps, clients)."""

        for position, batches_of_one in enumerate(schedules):
            self.lengths[: len(batches_of_one), position] = [len(rows) for rows in batches_of_one]
        index = np.broadcast_to(firsts[:, None], (*self.lengths.shape, int(self.lengths.max()))).copy()
        for position, batches_of_one in enumerate(schedules):
            for step, rows in enumerate(batches_of_one):
                index[step, position, : len(rows)] += rows
        self._index = torch.from_numpy(index).to(self._inputs.device)
        self._on_device = torch.from_numpy(self.lengths).to(self._inputs.device)

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return inputs (k, b, ...), labels (k, b) and the mask of rows that count (k, b) of the first k clients.

        None: all.
        """
        k = int(np.count_nonzero(self.lengths[step]))
        lengths = self.lengths[step, :k]
        longest = int(lengths.max())
        rows = self._index[step, :k, :longest]
        counts = None
        if not (lengths == longest).all():
            columns = torch.arange(longest, device=rows.device)
            counts = (columns < self._on_device[step, :k, None]).to(self._inputs.dtype)
        return self._inputs[rows], self._labels[rows], counts


class _Training:
    """One round of all clients whose tensors are given."""

    def __init__(self, model: Parts, tensors: dict[str, Tensor], layers: _NormLayers, params: MethodParams) -> None:
        self._model = model
        self._layers = layers
        self._params = params
        learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self._live = {name: tensors[name].detach().requires_grad_() for name in learning}
        self._rest = {name: tensor for name, tensor in tensors.items() if name not in self._live}
        self._optimizer = local_optimizer(self._live.values(), params)

    def run(self, batches: _Batches) -> np.ndarray:
        """Return all steps; the loss of each, (steps, clients)."""
        count = batches.lengths.shape[1]
        device = next(iter(self._live.values())).device
        losses = torch.full(batches.lengths.shape, math.nan, device=device)
        for step in range(len(batches.lengths)):
            inputs, labels, counts = batches.at(step)
            if len(labels) < count:
                count = len(labels)
                self._continue_with(count)
            losses[step, :count] = self._step((inputs, labels) if counts is None else (inputs, labels, counts))
        result: np.ndarray = losses.cpu().numpy()
        return result

    def _step(self, batch: tuple[Tensor, ...]) -> Tensor:
        for name in self._layers.counters:
            self._rest[name] += 1
        self._optimizer.zero_grad(set_to_none=True)
        losses, statistics = vmap(self._loss, randomness="error")(self._live, self._rest, *batch)
        losses.sum().backward()  # type: ignore[no-untyped-call]  # no client's loss depends on another's weights
        self._optimizer.step()
        with torch.no_grad():
            for name, tensor in statistics.items():
                self._rest[name].copy_(tensor)
        result: Tensor = losses.detach()
        return result

    def _loss(
        self,
        live: dict[str, Tensor],
        rest: dict[str, Tensor],
        inputs: Tensor,
        labels: Tensor,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cross entropy () of one client, and its running statistics after this batch."""
        self._layers.counts = counts
        self._layers.statistics = {}
        logits = functional_call(self._model, {**live, **rest}, (inputs,))
        if counts is None:
            return F.cross_entropy(logits, labels), self._layers.statistics
        each = F.cross_entropy(logits, labels, reduction="none")
        return (each * counts).sum() / counts.sum(), self._layers.statistics

    def _continue_with(self, k: int) -> None:
        """Continue with the first k clients only, because the others have done all their steps."""
        states = [self._optimizer.state[weight] for weight in self._live.values()]
        self._live = {name: weight.detach()[:k].requires_grad_() for name, weight in self._live.items()}
        self._rest = {name: tensor[:k] for name, tensor in self._rest.items()}
        self._optimizer = local_optimizer(self._live.values(), self._params)
        for weight, state in zip(self._live.values(), states, strict=True):
            continued = {}
            for name, value in state.items():
                # Moments have the shape of the weight, one for each client; counters of steps do not.
                is_stacked = isinstance(value, Tensor) and value.ndim == weight.ndim
                continued[name] = value[:k] if is_stacked else value
            self._optimizer.state[weight] = continued


# --- layers that do otherwise in a stack -----------------------------------------------------------------------------


class _NormLayers:
    """The facts about a batch that batch norm layers need, and the statistics that they report."""

    def __init__(self) -> None:
        self.counters: list[str] = []
        """Names of the counters of batches."""

        self.counts: Tensor | None = None
        """The mask (b,) of the rows of the batch that count; None: all do."""

        self.statistics: dict[str, Tensor] = {}
        """Running statistics after the batch."""

    def norm(self, name: str, layer: nn.modules.batchnorm._BatchNorm, inputs: Tensor) -> Tensor:
        """Apply batch norm to (b, C, ...) by the statistics of the rows that count."""
        across = [axis for axis in range(inputs.ndim) if axis != 1]
        shape = [1, -1] + [1] * (inputs.ndim - 2)
        mean, size = self._mean(inputs, across)
        centred = inputs - mean.view(shape)
        variance, _ = self._mean(centred.square(), across)
        done = layer.num_batches_tracked
        if layer.running_mean is not None and layer.running_var is not None and done is not None:
            share = 1.0 / done if layer.momentum is None else layer.momentum
            unbiased = (variance * size / (size - 1)).detach()
            old_mean = layer.running_mean
            old_variance = layer.running_var
            self.statistics[f"{name}.running_mean"] = old_mean + share * (mean.detach() - old_mean)
            self.statistics[f"{name}.running_var"] = old_variance + share * (unbiased - old_variance)
        result = centred * torch.rsqrt(variance + layer.eps).view(shape)
        return result if not layer.affine else result * layer.weight.view(shape) + layer.bias.view(shape)

    def _mean(self, values: Tensor, across: list[int]) -> tuple[Tensor, Tensor | int]:
        """Return the means (C,) over the rows that count, and the count of numbers in each."""
        if self.counts is None:
            return values.mean(across), values.numel() // values.shape[1]
        weights = self.counts.view([-1] + [1] * (values.ndim - 1))
        size = self.counts.sum() * values[0, 0].numel()
        return (values * weights).sum(across) / size, size


@contextlib.contextmanager
def _stackable(model: Parts, convolutions: Convolutions) -> Iterator[_NormLayers]:
    """Let batch norm in train mode report its statistics without changing them, and convolutions run as requested."""
    layers = _NormLayers()
    changed = list[nn.Module]()
    for name, module in model.named_modules():
        forward: Callable[[Tensor], Tensor] | None = None
        if isinstance(module, NORM_LAYERS) and module.training:
            forward = functools.partial(layers.norm, name, module)
            if module.num_batches_tracked is not None:
                layers.counters.append(f"{name}.num_batches_tracked")
        elif convolutions == "unfolded" and _unfolds(module):
            forward = functools.partial(_unfolded, module)
        if forward is not None:
            module.forward = forward
            changed.append(module)
    try:
        yield layers
    finally:
        for module in changed:
            del module.forward


def has_unfolding(model: nn.Module) -> bool:
    """Return whether there are convolutions that can be computed in more than one way."""
    return any(_unfolds(module) for module in model.modules())


def _unfolds(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution that `_unfolded` can compute."""
    if not isinstance(layer, nn.Conv2d):
        return False
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _unfolded(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Return a convolution as the product of its kernels with all patches of the inputs."""
    patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    result = layer.weight.flatten(1) @ patches
    if layer.bias is not None:
        result = result + layer.bias[:, None]
    sides = []
    for axis, size in enumerate(inputs.shape[-2:]):
        reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        sides.append((size + 2 * int(layer.padding[axis]) - reach - 1) // layer.stride[axis] + 1)
    return result.reshape(*result.shape[:-1], *sides)
