"""The shared model on samples that the coordinator has: one accuracy per round without asking any client.

With the method's global classifier where there is one. Else a probe says how much the features alone are worth: the
nearest mean of each class, from one half of the samples, scored on the other half. Batch norm that stays on clients
takes its statistics from the samples themselves.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_agent import data, heads, methods
from edge_agent.client import choose_device
from edge_agent.errors import DataError
from edge_agent.heads import FitData
from edge_agent.methods import Method
from edge_agent.models.base import Parts
from edge_agent.storage import read_tensors
from edge_agent.task import Task, Tensors
from edge_agent.training.loops import features_of
from edge_agent.training.parts import NORM_LAYERS, load_arrays, norm_names

PROBE = "prototype"


def evaluate_on_proxy(question: dict[str, Any]) -> dict[str, Any]:
    """``acc`` (0..1), on how many samples, ``by`` what, and where batch norm had its statistics from.

    ``question``: method, params, task, the file of the state, and data, folder and device of ``[proxy]``.

    Raises:
        HeadwaterError: the data do not fit the task, or the state is damaged.
    """
    method, task = methods.create(question["method"], question["params"]), Task.model_validate(question["task"])
    state = read_tensors(Path(question["state"]))
    samples = _samples(question["data"], question["folder"], task)
    device = choose_device(question["device"])
    model = _model(method, task, state).to(device)
    inputs = torch.from_numpy(samples.inputs).to(device)
    if is_local := bool(norm_names(model, method.shared_names(model))):
        _take_statistics(model.encoder, inputs)
    features = features_of(model, inputs).cpu().numpy()
    if not np.isfinite(features).all():
        raise DataError("features hold NaN or infinity: the shared encoder has diverged")
    head = method.global_head(state)
    acc, scored = _linear(head, features, samples) if head is not None else _probe(features, samples, task)
    return {
        "acc": round(acc, 6),
        "samples": scored,
        "by": "global head" if head is not None else f"{PROBE} probe",
        "norm": "proxy" if is_local else "shared",
    }


@functools.lru_cache(maxsize=1)
def _read(source: str, folder: str, task: str) -> data.Samples:
    known = Task.model_validate_json(task)
    return data.load(source, known.input, known.class_names, folder=Path(folder))


def _samples(source: str, folder: str, task: Task) -> data.Samples:
    """The samples; only the last source is kept."""
    return _read(source, folder, task.model_dump_json())


def _model(method: Method, task: Task, state: Tensors) -> Parts:
    torch.manual_seed(0)
    model = method.build(task)
    known = model.state_dict().keys()
    load_arrays(model, {name: array for name, array in state.items() if name in known})
    return model


def _take_statistics(encoder: nn.Module, inputs: torch.Tensor, batch: int = 512) -> None:
    """Set the running means and variances of the encoder to those of these inputs."""
    layers = [layer for layer in encoder.modules() if isinstance(layer, NORM_LAYERS)]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean of all batches
    encoder.eval()
    for layer in layers:
        layer.train()
    with torch.no_grad():
        for piece in torch.split(inputs, batch):
            if len(piece) > 1 or len(inputs) == 1:
                encoder(piece)


def _linear(head: Tensors, features: np.ndarray, samples: data.Samples) -> tuple[float, int]:
    told = (features @ head["weight"].T + head["bias"]).argmax(axis=1)
    return float(np.mean(told == samples.labels)), len(samples)


def _probe(features: np.ndarray, samples: data.Samples, task: Task) -> tuple[float, int]:
    rows = data.Samples(features, samples.labels, samples.class_names, samples.input)
    train, test = data.split(rows, 0.5, 0)
    if not len(test):
        raise DataError(f"{len(samples)} samples are too few for a probe; give two of a class or more")
    probe = heads.create(PROBE, {})
    probe.fit(FitData(train.inputs, train.labels, task.num_classes), np.random.default_rng(0))
    return float(np.mean(probe.predict_proba(test.inputs).argmax(axis=1) == test.labels)), len(test)
