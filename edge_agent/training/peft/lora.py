"""lora: low-rank adapters on linear and convolution layers, whose factor A is frozen.

Source: Sun, Li, Li, Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024, arXiv 2403.12313
(FFA-LoRA); Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.

A weight W (out, ...) becomes W + scale * B A, with A (rank, fan in) the same everywhere and B (out, rank) zero at
first. Only B learns and travels. Because A is the same at all clients, the mean of the products B A is the product of
the mean of B and A: averaging is exact, which it is not where both factors learn.

Differs from the papers: the rows of A are orthonormal and not drawn independently. A step of SGD on B with ``scale`` 1
is then the step of full training on W, projected onto the rows of A, so that learning rates carry over. Biases and
batch norm are frozen; so are convolutions of several groups, whose kernels are small.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ...core.task import Frozen, Tensors
from ..parts import load_arrays, to_arrays
from .base import Peft

_A = "lora_a"
_B = "lora_b"
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


class LoraParams(Frozen):
    """Parameters of `LowRankAdapters`."""

    rank: int = Field(
        4, ge=1, le=1024, description="r, rows of A; at most as many as a layer has inputs, times its kernel's size"
    )
    scale: float = Field(1.0, gt=0, le=1000, description="factor of B A; alpha / r in the papers")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of A, which differs from layer to layer")


class LowRankAdapters(Peft):
    """Everything is frozen but the factor B of each adapter."""

    Params = LoraParams
    needs = "linear or convolution layer of one group"
    source = "Sun, Li, Li, Ding, ICLR 2024"

    def prepare(self, encoder: nn.Module) -> frozenset[str]:
        """Add an adapter to each layer, and return the names of the factors B."""
        names = []
        for path, layer in list(_adaptable(encoder)):
            weight = layer.get_parameter("weight").detach()
            first = frozen_factor(path, weight[0].numel(), self.params)
            # As kernels of the layer's own form, so that the first factor is applied by the layer's own operation.
            kernels = torch.from_numpy(first).to(weight.dtype).reshape(len(first), *weight.shape[1:])
            layer.register_buffer(_A, kernels)
            layer.register_parameter(_B, nn.Parameter(weight.new_zeros(len(weight), len(first))))
            layer.register_forward_hook(_Adapter(self.params.scale))
            names.append(f"{path}.{_B}" if path else _B)
        return frozenset(names)

    def merge(self, tensors: Tensors) -> Tensors:
        """Return W + scale * B A in the place of W, computed in float64, and no factors."""
        merged = {name: array for name, array in tensors.items() if name.rpartition(".")[2] not in {_A, _B}}
        for name, second in tensors.items():
            path, _, last = name.rpartition(".")
            if last != _B:
                continue
            prefix = f"{path}." if path else ""
            weight = tensors[f"{prefix}weight"]
            first = tensors[prefix + _A].astype(np.float64)
            product = second.astype(np.float64) @ first.reshape(len(first), -1)
            change = self.params.scale * product.reshape(weight.shape)
            merged[f"{prefix}weight"] = (weight + change).astype(weight.dtype)
        return merged

    def plain(self, encoder: nn.Module) -> nn.Module:
        """Return a copy without adapters, which are merged into its weights."""
        copied = copy.deepcopy(encoder)
        merged = self.merge(to_arrays(encoder, encoder.state_dict()))
        for _, layer in list(_adaptable(copied)):
            hooks = layer._forward_hooks  # noqa: SLF001 - a copy has no handles of its own
            for handle in [handle for handle, hook in hooks.items() if isinstance(hook, _Adapter)]:
                del hooks[handle]
            delattr(layer, _A)
            delattr(layer, _B)
        load_arrays(copied, merged)
        return copied


def frozen_factor(path: str, fan_in: int, params: LoraParams) -> np.ndarray:
    """Return the rows of A (rank, fan_in) float64 of the layer at a path: orthonormal, in random directions."""
    rng = np.random.default_rng([params.seed, zlib.crc32(path.encode())])
    drawn = rng.standard_normal((fan_in, min(params.rank, fan_in)))
    columns, _ = np.linalg.qr(drawn)
    return np.ascontiguousarray(columns.T)


class _Adapter:
    """A hook that adds scale * B A x to what a layer answers to x."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
        reduced = _apply_first(layer, inputs[0])
        second: torch.Tensor = self._scale * getattr(layer, _B)
        # In place: the gradient of a layer does not need its answer, which is far larger than the factors.
        if isinstance(layer, nn.Linear):
            return answer.add_(F.linear(reduced, second))
        # Behind the first factor a convolution has kernels of one pixel, which mix the channels.
        ones = [1] * (reduced.ndim - 2)
        mix = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
        return answer.add_(mix(reduced, second.reshape(*second.shape, *ones)))


def _apply_first(layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return A x, by the layer's own operation: with its stride, padding and dilation."""
    kernels: torch.Tensor = getattr(layer, _A)
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        convolved: torch.Tensor = layer._conv_forward(inputs, kernels, None)  # noqa: SLF001 - stable since torch 1.8
        return convolved
    return F.linear(inputs, kernels)


def _adaptable(encoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and layer of each linear layer and each convolution of one group.

    Subclasses are left out: some are never called themselves, such as the projection of an attention layer.
    """
    for path, layer in encoder.named_modules():
        if type(layer) in _LAYERS and getattr(layer, "groups", 1) == 1:
            yield path, layer
