"""Fine-tuned copies: a personal version of a model, made from the shared one and kept in the client's memory.

The shared model itself stays as it is, bit for bit: a tuned copy never travels.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from ..core.task import Task
from ..methods.values import Client
from .loops import evaluate, features_of
from .parts import Parts, encoder_and_head, load_arrays, put_back, to_arrays

_KEPT = "tuned."
_STAMP = "tuned_from"


def fingerprint(model: nn.Module, *, with_counters: bool = False) -> np.ndarray:
    """Return the SHA-256 (32,) uint8 of a model's tensors: identifies what a copy was made from.

    Batch norm counters, which change nothing, are left out unless asked for.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if with_counters or not name.endswith("num_batches_tracked"):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return np.frombuffer(digest.digest(), dtype=np.uint8)


def make_copy(client: Client, tune: Callable[[Client], object], parts: Sequence[str]) -> None:
    """Let ``tune`` train ``client.model``, keep what became of its ``parts`` in memory, put the model back.

    ``tune`` gets the client with generators that are seeded by the model, so neither when nor how often a copy is made
    shifts the random numbers of training.

    Raises:
        TrainingFailed: ``tune`` failed; the model is restored and memory is as before.
    """
    model = client.model
    stamp = fingerprint(client.model)
    names = [name for name in model.state_dict() if name.split(".", 1)[0] in parts]
    seed = int.from_bytes(stamp[:7].tobytes(), "little")
    generator = torch.Generator(device=client.device)
    generator.manual_seed(seed)
    devices = [client.device] if client.device.type == "cuda" else []
    with put_back(model), torch.random.fork_rng(devices=devices):
        (torch.manual_seed if devices else torch.default_generator.manual_seed)(seed)  # which dropout draws from
        tune(replace(client, rng=np.random.default_rng(seed), generator=generator, memory={}, log={}))
        arrays = to_arrays(model, names)
    model.zero_grad(set_to_none=True)
    client.memory.update({_STAMP: stamp, **{_KEPT + name: array for name, array in arrays.items()}})


def has_copy(client: Client) -> bool:
    """Return whether the copy in memory was made from the very model that the client has now."""
    return np.array_equal(client.memory.get(_STAMP, ()), fingerprint(client.model))


@contextlib.contextmanager
def with_copy_loaded(client: Client) -> Iterator[None]:
    """Load the tuned copy into ``client.model``, and restore the model at the end."""
    copy = {name.removeprefix(_KEPT): array for name, array in client.memory.items() if name.startswith(_KEPT)}
    with put_back(client.model, copy):
        load_arrays(client.model, copy)
        yield


def on_features(client: Client) -> Client:
    """Return the client with features in the place of inputs, and with all parts of its model but the encoder.

    Training what stands on a frozen encoder in eval mode gives the same numbers this way, and each sample passes
    through the encoder once instead of once an epoch. The modules are the client's own, no copies.
    """
    above = {name: part for name, part in client.model.named_children() if name != "encoder"}
    inputs = features_of(client.model, client.train_inputs) if client.samples else client.train_inputs
    return replace(client, model=Parts(**above), train_inputs=inputs)


PERSONAL = "personal"


def two_networks(task: Task) -> Parts:
    """Return the encoder and head, and a copy of both as the part ``personal``: they start from the same weights.

    Raises:
        UnknownName: No encoder has this name.
        ConfigError: The encoder does not fit the task.
    """
    model = encoder_and_head(task)
    model.add_module(PERSONAL, copy.deepcopy(model))
    return model


def second(model: Parts, name: str = PERSONAL) -> Parts:
    """Return the personal network.

    Raises:
        UnknownName: The model has no such part.
    """
    return cast("Parts", model.part(name))


def pairs(model: Parts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the weights of the personal network, each with its counterpart in the shared one."""
    shared = dict(model.named_parameters())
    return [(weight, shared[name]) for name, weight in second(model).named_parameters()]


def copy_tensors(source: nn.Module, target: nn.Module, *, buffers_only: bool = False) -> None:
    """Give ``target`` the tensors of ``source`` that have the same names: all of them, or its buffers alone."""
    target_tensors = dict(target.named_buffers()) if buffers_only else target.state_dict()
    state = source.state_dict()
    with torch.no_grad():
        for name, tensor in target_tensors.items():
            if name in state:
                tensor.copy_(state[name])


def probabilities_with(model: nn.Module, weights: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Return class probabilities (n, K) of a model with other weights in the places named; the model keeps its own.

    Raises:
        DataError: There are no inputs.
    """
    tensors = dict(weights)
    return evaluate(lambda piece: torch.softmax(functional_call(model, tensors, (piece,)), dim=1), model, inputs)
