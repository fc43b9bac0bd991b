"""Networks in torch as graphs: classes in a Python file, and networks of torchvision, with weights from a file."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from edge_agent.core import registry
from edge_agent.core.errors import ExportRejected, UsageError
from edge_agent.core.task import EncoderTask, Task
from edge_agent.models.torchvision_networks import networks

from ..encoder import to_onnx
from ..parity import BATCHES, TOLERANCE, Gate, session
from .input_form import InputForm
from .sizes import fix_sizes, unknown_operators
from .torchvision_names import check_name
from .weights import Weights, put_weights, read_weights, without_prefix

_OUTPUT = "output"
"""The name of a network's first output, which says nothing of what it is; further ones get numbers."""


@dataclass(frozen=True)
class TorchNetwork:
    """A network in torch, in eval mode, with its weights."""

    module: nn.Module
    name: str
    notes: tuple[str, ...] = ()


def is_in_python(source: str) -> bool:
    """Return whether a source names a class in a Python file."""
    return registry.is_reference(source)


def load_class(source: str, weights: Path | None) -> TorchNetwork:
    """Return the network that ``PATH.py:NAME`` names: a module, or a class or function that gives one.

    The file is run: it is the operator's own.

    Raises:
        UsageError: There is no such name, or it gives no `torch.nn.Module` without arguments.
        WeightsError: The weights are those of another network.
    """
    loaded = registry.load_reference("network", source)
    network = loaded
    if not isinstance(loaded, nn.Module):
        try:
            network = loaded()
        except (Exception, SystemExit) as error:  # a script's main function may end the process
            raise UsageError(
                f"network '{source}': {type(error).__name__}: {error}; expected a class or function without arguments, "
                "or a torch.nn.Module"
            ) from error
    if not isinstance(network, nn.Module):
        raise UsageError(f"network '{source}': gives {type(network).__name__}, expected a torch.nn.Module")
    if weights is not None:
        put_weights(network, read_weights(weights), weights)
    name = source.rpartition(":")[2]
    return TorchNetwork(network.eval(), name, _notes_on(loaded, weights))


def _notes_on(loaded: Any, weights: Path | None) -> tuple[str, ...]:
    """Return a note where a network may have random weights."""
    if weights is not None or isinstance(loaded, nn.Module) or not inspect.isclass(loaded):
        return ()
    return ("no --weights: the network has those that its class gives it",)


def load_torchvision(name: str, weights: Path | None) -> TorchNetwork:
    """Return a network of torchvision with the weights of a file, which may know any number of classes.

    Raises:
        UsageError: There is no such network, or no file was named.
        WeightsError: The weights are those of another network.
        MissingCapability: torchvision is not installed.
    """
    check_name(name)
    if weights is None:
        raise UsageError(
            f"{name}: --weights is missing: which file holds the weights of this network of torchvision? Nothing is "
            "downloaded here: take the .pth that torchvision offers for it, or what "
            "torch.save(NETWORK.state_dict(), FILE) has written of one of your own"
        )
    tensors = read_weights(weights)
    build = networks().get_model
    network: nn.Module = build(name, weights=None)
    expected = network.state_dict()
    tensors = without_prefix(tensors, set(expected))
    *_, last = expected
    notes = list[str]()
    classifier = last.rpartition(".")[0]
    own = {key for key in expected if key.rpartition(".")[0] == classifier}
    if _has_other_classes(tensors, expected, own):
        # The classifier is built for as many classes, and is cut off later.
        network = build(name, weights=None, num_classes=len(tensors[last]))
    elif not own & tensors.keys():
        # An encoder alone, as `headwater export --out FILE.safetensors` writes it.
        notes.append(f"the weights have no classifier '{classifier}'; it is cut off in any case")
        tensors = {**tensors, **{key: expected[key] for key in own}}
    put_weights(network, tensors, weights)
    return TorchNetwork(network.eval(), name, tuple(notes))


def _has_other_classes(tensors: Weights, expected: Weights, names: set[str]) -> bool:
    """Return whether weights have all tensors of a classifier (``names``), for another number of classes.

    The network is built for that number, so all of these tensors have to agree on it.
    """
    if not names <= tensors.keys():
        return False
    counts = {tuple(tensors[name].shape[:1]) for name in names}
    has_same_form = all(tensors[name].shape[1:] == expected[name].shape[1:] for name in names)
    return has_same_form and len(counts) == 1 and counts != {tuple(expected[name].shape[:1]) for name in names}


def export_network(network: TorchNetwork, form: InputForm) -> tuple[Any, Gate]:
    """Return a network as a graph (`onnx.ModelProto`), and whether its outputs are those of torch.

    Raises:
        ExportRejected: The exporter cannot translate it, or it does not take such inputs.
    """
    task = EncoderTask(input=form.spec, encoder=network.name[:200])
    wrapped = _Wrapped(network.module)
    shape = form.given_shape(2)
    try:
        with torch.no_grad():
            results = wrapped(torch.zeros(shape))
    except Exception as error:  # what a user's network raises is that network's matter
        raise ExportRejected(
            f"network '{network.name}' does not take inputs {[*shape]}: {type(error).__name__}: {error}; name another "
            "--size, --channels or --layout"
        ) from error
    if not results or any(result.is_complex() for result in results):
        kind = "complex numbers" if results else "no tensor"
        raise ExportRejected(
            f"network '{network.name}' gives {kind}; expected a tensor of real numbers, or several in a tuple or "
            "dictionary; return its features or logits"
        )
    outputs = [_OUTPUT, *(f"{_OUTPUT}_{number}" for number in range(1, len(results)))]
    exported = _export(wrapped, task, outputs, shape)
    return onnx.load_from_string(exported), _agreement(wrapped, exported, form)


def _export(network: nn.Module, task: Task, outputs: list[str], shape: tuple[int, ...]) -> bytes:
    """Return a network as a graph, by the exporter of torch that writes operators which devices have.

    Raises:
        ExportRejected: Neither of them can translate the network.
    """
    legacy: bytes | None = None
    with _plain_attention(), _silent_stdout():
        # 1. The older exporter, which takes a tenth of the time.
        with contextlib.suppress(ExportRejected):
            legacy = to_onnx(network, task, "legacy", outputs=outputs, shape=shape).model
        if legacy is not None and _has_known_operators(legacy):
            return legacy
        # 2. The newer one. Where it fails, the checks afterwards name what is wrong in the graph of the first.
        try:
            return to_onnx(network, task, outputs=outputs, shape=shape).model
        except ExportRejected:
            if legacy is None:
                raise
            return legacy


def _has_known_operators(content: bytes) -> bool:
    """Return whether a graph has only operators that every device has, once its sizes are constants."""
    model = onnx.load_from_string(content)
    return not any(unknown_operators(model)) or not any(unknown_operators(fix_sizes(model)))


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Let attention be computed step by step: its fast form is one operator of torch that no exporter knows."""
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """Send what is written to file descriptor 1 nowhere: an exporter that fails prints the whole graph there."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


class _Wrapped(nn.Module):
    """A network whose outputs are a tuple, also where it gives one tensor or a mapping."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors among the network's outputs."""
        outputs = self.network(inputs)
        if isinstance(outputs, torch.Tensor):
            return (outputs,)
        values: Iterable[Any] = outputs.values() if isinstance(outputs, Mapping) else outputs
        return tuple(value for value in values if isinstance(value, torch.Tensor))


def _agreement(network: nn.Module, model: bytes, form: InputForm) -> Gate:
    """Return whether the exported graph gives what torch does for batches of 1, 2 and 7 random inputs."""
    inputs = np.random.default_rng(0).standard_normal(form.given_shape(max(BATCHES)), dtype=np.float32)
    opened = session(model)
    name = opened.get_inputs()[0].name
    worst = 0.0
    scale = 0.0
    for size in BATCHES:
        with torch.no_grad():
            expected = network(torch.from_numpy(inputs[:size]))
        for ours, theirs in zip(expected, opened.run(None, {name: inputs[:size]}), strict=True):
            reference = ours.numpy().astype(np.float64)
            # The same infinity, as attention's masks have, is no difference; NaN is one, which no bound allows.
            difference = np.where(reference == theirs, 0.0, np.abs(reference - theirs))
            worst = float(np.maximum(worst, difference.max(initial=0)))
            finite = np.abs(reference[np.isfinite(reference)])
            scale = max(scale, float(finite.max(initial=0)))
    allowed = TOLERANCE * max(1.0, scale)
    detail = f"largest difference to torch {worst:.2g}, allowed {allowed:.2g}"
    if np.isnan(worst):
        detail = "the network, or its graph, gives NaN for random inputs; look for NaN in its weights, and for 0 / 0"
    return Gate("torch", worst <= allowed, detail)
