"""Many clients trained at once: their weights in tensors with one more axis in front, and each step one pass for all.

For methods whose local training is the standard one (`Method.has_standard_update`). Each client sees its samples in the
order in which it would see them alone, so the numbers are those of one client after another up to rounding: sums are
taken in another order, so bits are not equal. Clients that have fewer batches stop earlier; batches that are shorter
are filled up with rows that count for nothing, in the loss and in batch norm.
"""

from __future__ import annotations

import contextlib
import copy
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
"""How convolutions of many clients are computed: as one of many groups, or as products of matrices."""

Schedule = list[np.ndarray]
"""Rows of each batch, (b,) int64."""

Tensor = torch.Tensor


def schedule(client: Client, params: MethodParams) -> Schedule:
    """All batches of a round, drawn as local training draws them."""
    epochs = (batches(client.samples, params.batch_size, client.rng) for _ in range(params.local_epochs))
    return [rows for epoch in epochs for rows in epoch]


def obstacle(model: Parts) -> str:
    """Why clients of such a model cannot be trained at once; empty where nothing speaks against it."""
    for place, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:  # noqa: SLF001 - the base of them all
            return f"'{place}' draws random numbers ({type(module).__name__})"
    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
        return "two of its layers share weights"
    return ""


def has_norm(model: nn.Module) -> bool:
    """Whether there is batch norm, which cannot learn from one sample."""
    return any(isinstance(module, NORM_LAYERS) for module in model.modules())


class Stack:
    """All tensors of one model for each of ``count`` clients: name -> (count, ...)."""

    def __init__(self, model: Parts, count: int) -> None:
        self._model = model
        self.tensors = {
            name: torch.empty((count, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            for name, tensor in model.state_dict().items()
        }

    def hold(self, place: int) -> None:
        """Copy what the model holds now to a place."""
        with torch.no_grad():
            for name, tensor in self._model.state_dict().items():
                self.tensors[name][place].copy_(tensor)

    def put(self, place: int) -> None:
        """Let the model hold what is at a place."""
        with torch.no_grad():
            for name, tensor in self._model.state_dict().items():
                tensor.copy_(self.tensors[name][place])

    def first(self, count: int) -> Stack:
        """The first clients alone, in the same memory."""
        part = copy.copy(self)
        part.tensors = {name: tensor[:count] for name, tensor in self.tensors.items()}
        return part

    def train(
        self,
        clients: Sequence[Client],
        schedules: Sequence[Schedule],
        params: MethodParams,
        frozen: Sequence[str],
        convolutions: Convolutions = "grouped",
    ) -> np.ndarray:
        """Train all of them; returns the loss of each step, (steps, clients), NaN where a client had no such step.

        Clients come in the order of their places, who has the most batches first.
        """
        steps = [len(one) for one in schedules]
        if steps != sorted(steps, reverse=True):
            raise ValueError(f"clients with {steps} batches: expected those with the most first")
        if not any(steps):
            return np.empty((0, len(clients)))
        with training_mode(self._model, frozen, "eval"), _in_place(self._model, convolutions) as layers:
            return _Training(self, layers, _Rows(clients, schedules), params).run()

    def learning(self) -> list[str]:
        """Names of the tensors that learn, as the model's parts are set now."""
        return [name for name, weight in self._model.named_parameters() if weight.requires_grad]

    def call(self, tensors: dict[str, Tensor], inputs: Tensor) -> Tensor:
        """Logits of one client, from its own tensors."""
        logits: Tensor = functional_call(self._model, tensors, (inputs,))
        return logits


class _Rows:
    """The samples of all clients, one after another, and which of them are in which batch."""

    def __init__(self, clients: Sequence[Client], schedules: Sequence[Schedule]) -> None:
        self._inputs = torch.cat([client.train_inputs for client in clients])
        self._labels = torch.cat([client.train_labels for client in clients])
        firsts = np.cumsum([0, *(client.samples for client in clients)])[:-1]
        self.lengths = np.zeros((len(schedules[0]), len(clients)), np.int64)
        for place, one in enumerate(schedules):
            self.lengths[: len(one), place] = [len(rows) for rows in one]
        index = np.broadcast_to(firsts[:, None], (*self.lengths.shape, int(self.lengths.max()))).copy()
        for place, one in enumerate(schedules):
            for step, rows in enumerate(one):
                index[step, place, : len(rows)] += rows
        self._index = torch.from_numpy(index).to(self._inputs.device)
        self._on_device = torch.from_numpy(self.lengths).to(self._inputs.device)

    def __len__(self) -> int:
        return len(self.lengths)

    def at_work(self, step: int) -> int:
        """How many clients have such a step: the first ones."""
        return int(np.count_nonzero(self.lengths[step]))

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs (k, b, ...), labels (k, b), and which rows count (k, b); None where all do."""
        k = self.at_work(step)
        lengths = self.lengths[step, :k]
        longest = int(lengths.max())
        rows = self._index[step, :k, :longest]
        if (lengths == longest).all():
            counts = None
        else:
            places = torch.arange(longest, device=rows.device)
            counts = (places < self._on_device[step, :k, None]).to(self._inputs.dtype)
        return self._inputs[rows], self._labels[rows], counts


class _Training:
    """One round of all clients of a stack."""

    def __init__(self, stack: Stack, layers: _Layers, rows: _Rows, params: MethodParams) -> None:
        self._stack, self._layers, self._rows, self._params = stack, layers, rows, params
        names = stack.learning()
        self._live = {name: _leaf(stack.tensors[name]) for name in names}
        self._rest = {name: tensor for name, tensor in stack.tensors.items() if name not in self._live}
        self._optimizer = local_optimizer(self._live.values(), params)
        self._count = len(next(iter(stack.tensors.values())))

    def run(self) -> np.ndarray:
        """All steps."""
        device = next(iter(self._stack.tensors.values())).device
        losses = torch.full(self._rows.lengths.shape, math.nan, device=device)
        for step in range(len(self._rows)):
            k = self._rows.at_work(step)
            if k < self._count:
                self._go_on_with(k)
            losses[step, :k] = self._step(*self._rows.batch(step))
        result: np.ndarray = losses.cpu().numpy()
        return result

    def _step(self, inputs: Tensor, labels: Tensor, counts: Tensor | None) -> Tensor:
        for name in self._layers.counters:
            self._rest[name] += 1
        self._optimizer.zero_grad(set_to_none=True)
        batch = (inputs, labels) if counts is None else (inputs, labels, counts)
        one = functools.partial(vmap(self._loss, randomness="error"), self._live, self._rest)
        losses, statistics = one(*batch)
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
        """Of one client: cross entropy (), and the running statistics as they are after this batch."""
        with self._layers.noting(counts) as statistics:
            logits = self._stack.call({**live, **rest}, inputs)
        if counts is None:
            return F.cross_entropy(logits, labels), statistics
        each = F.cross_entropy(logits, labels, reduction="none")
        return (each * counts).sum() / counts.sum(), statistics

    def _go_on_with(self, k: int) -> None:
        """The first k alone: those behind them have done all their steps."""
        old, self._count = self._optimizer, k
        kept = [old.state[weight] for weight in self._live.values()]
        self._live = {name: _leaf(weight.detach()[:k]) for name, weight in self._live.items()}
        self._rest = {name: tensor[:k] for name, tensor in self._rest.items()}
        self._optimizer = local_optimizer(self._live.values(), self._params)
        for weight, state in zip(self._live.values(), kept, strict=True):
            self._optimizer.state[weight] = {
                name: value[:k] if isinstance(value, Tensor) and value.ndim == weight.ndim else value
                for name, value in state.items()
            }


def _leaf(tensor: Tensor) -> Tensor:
    """The same memory as something that an optimizer can learn."""
    return tensor.detach().requires_grad_()


# --- layers that do otherwise in a stack -----------------------------------------------------------------------------


class _Layers:
    """What batch norm layers need to know of a batch, and the statistics that they report."""

    def __init__(self) -> None:
        self.counters: list[str] = []
        """Names of the counters of batches."""

        self._counts: Tensor | None = None
        self._statistics: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def noting(self, counts: Tensor | None) -> Iterator[dict[str, Tensor]]:
        """Running statistics that are noted inside; ``counts`` (b,) says which rows count."""
        self._counts, self._statistics = counts, {}
        yield self._statistics
        self._counts = None

    def norm(self, place: str, layer: nn.modules.batchnorm._BatchNorm, inputs: Tensor) -> Tensor:
        """Batch norm of (b, C, ...) by the statistics of the rows that count."""
        across = [axis for axis in range(inputs.ndim) if axis != 1]
        shape = [1, -1] + [1] * (inputs.ndim - 2)
        mean, size = self._mean(inputs, across)
        apart = inputs - mean.view(shape)
        variance, _ = self._mean(apart.square(), across)
        self._note(place, layer, mean.detach(), (variance * size / (size - 1)).detach())
        result = apart * torch.rsqrt(variance + layer.eps).view(shape)
        return result if not layer.affine else result * layer.weight.view(shape) + layer.bias.view(shape)

    def _mean(self, values: Tensor, across: list[int]) -> tuple[Tensor, Tensor | int]:
        """Means (C,) over the rows that count, and of how many numbers each."""
        if self._counts is None:
            return values.mean(across), values.numel() // values.shape[1]
        weights = self._counts.view([-1] + [1] * (values.ndim - 1))
        size = self._counts.sum() * values[0, 0].numel()
        return (values * weights).sum(across) / size, size

    def _note(self, place: str, layer: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor) -> None:
        done = layer.num_batches_tracked
        if layer.running_mean is None or layer.running_var is None or done is None:
            return
        share = 1.0 / done if layer.momentum is None else layer.momentum
        self._statistics[f"{place}.running_mean"] = layer.running_mean + share * (mean - layer.running_mean)
        self._statistics[f"{place}.running_var"] = layer.running_var + share * (variance - layer.running_var)


@contextlib.contextmanager
def _in_place(model: Parts, convolutions: Convolutions) -> Iterator[_Layers]:
    """Inside, batch norm in train mode reports its statistics and leaves them, and convolutions are as asked."""
    layers, changed = _Layers(), list[nn.Module]()
    for place, module in model.named_modules():
        forward: Callable[[Tensor], Tensor] | None = None
        if isinstance(module, NORM_LAYERS) and module.training:
            forward = functools.partial(layers.norm, place, module)
            if module.num_batches_tracked is not None:
                layers.counters.append(f"{place}.num_batches_tracked")
        elif convolutions == "unfolded" and isinstance(module, nn.Conv2d) and _unfolds(module):
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
    """Whether there are convolutions that can be computed in more than one way."""
    return any(isinstance(module, nn.Conv2d) and _unfolds(module) for module in model.modules())


def _unfolds(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _unfolded(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """A convolution as the product of its kernels with all patches of the inputs."""
    patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    result = layer.weight.flatten(1) @ patches
    if layer.bias is not None:
        result = result + layer.bias[:, None]
    return result.reshape(*result.shape[:-1], _side(layer, inputs, 0), _side(layer, inputs, 1))


def _side(layer: nn.Conv2d, inputs: Tensor, axis: int) -> int:
    reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
    return (inputs.shape[axis - 2] + 2 * int(layer.padding[axis]) - reach - 1) // layer.stride[axis] + 1
