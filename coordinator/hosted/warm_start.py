"""A warm start: the encoder is trained on data of the coordinator before any client trains.

Plain cross entropy, the same for all methods. The classifier on top is the method's own where it shares one that sits
on the encoder's features; else one that is discarded. The same seed gives the same bits on the same kind of
processor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_agent import data, methods
from edge_agent.client import choose_device
from edge_agent.config import parse
from edge_agent.errors import DataError
from edge_agent.methods import Method
from edge_agent.methods.values import Client, MethodParams
from edge_agent.models.base import Parts
from edge_agent.storage import write_tensors
from edge_agent.task import Task
from edge_agent.training.loops import accuracy, cross_entropy, predict_probabilities
from edge_agent.training.loops import train as train_model
from edge_agent.training.parts import feature_dim, to_arrays

from ..config import WarmStartConfig
from ..runs.request import Weights

_SALT = 0xAA


def train_warm(question: dict[str, Any]) -> dict[str, Any]:
    """Train; the method's first state is then in the file ``into``, and the result has its accuracy.

    ``question``: method, params, task, seed, weights to begin with, and the settings of ``[warm_start]``.

    Raises:
        HeadwaterError: the data do not fit the task, or training diverged.
    """
    settings = parse(WarmStartConfig, question["settings"], where="[warm_start]")
    method, task = methods.create(question["method"], question["params"]), Task.model_validate(question["task"])
    if settings.threads:
        torch.set_num_threads(settings.threads)
    samples = data.load(settings.data, task.input, task.class_names, folder=settings.folder)
    train, test = data.split(samples, settings.test_fraction, settings.seed)
    if not len(train):
        raise DataError(f"{settings.data}: no training samples are left after the split; lower test_fraction")
    device = choose_device(settings.device)
    torch.manual_seed(question["seed"])
    model = method.build(task)
    if question.get("weights") is not None:
        Weights.model_validate(question["weights"]).load_into(model)
    model = model.to(device)
    trained, is_own = _with_head(method, model, task)
    client = _client(trained.to(device), task, train, question["seed"], device)
    loss = train_model(client, cross_entropy(client.model), _params(settings))
    write_tensors(Path(question["into"]), method.start(to_arrays(model, method.shared_names(model))))
    return {
        "data": settings.data,
        "samples": len(train),
        "tested": len(test),
        "epochs": settings.epochs,
        "loss": round(loss, 6),
        "accuracy": _score(trained, test, device),
        "head": "shared" if is_own else "discarded",
        "device": str(device),
    }


def _with_head(method: Method, model: Parts, task: Task) -> tuple[Parts, bool]:
    """The encoder with a classifier, and whether that is the method's own."""
    shared = to_arrays(model, method.shared_names(model))
    if "head" in method.shared and method.global_head(method.start(shared)) is not None:
        return Parts(encoder=model.encoder, head=model.head), True
    return Parts(encoder=model.encoder, head=nn.Linear(feature_dim(model.encoder), task.num_classes)), False


def _client(model: Parts, task: Task, train: data.Samples, seed: int, device: torch.device) -> Client:
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return Client(
        id="warm start",
        model=model,
        train_inputs=torch.from_numpy(train.inputs).to(device),
        train_labels=torch.from_numpy(train.labels).to(device),
        task=task,
        device=device,
        rng=np.random.default_rng([seed, _SALT]),
        generator=generator,
    )


def _params(settings: WarmStartConfig) -> MethodParams:
    fields = ("lr", "momentum", "weight_decay", "batch_size")
    return MethodParams(local_epochs=settings.epochs, **{name: getattr(settings, name) for name in fields})


def _score(model: Parts, test: data.Samples, device: torch.device) -> float | None:
    """Accuracy on held-out samples; None where there are none."""
    if not len(test):
        return None
    result = predict_probabilities(model, torch.from_numpy(test.inputs).to(device))
    return round(accuracy(result, torch.from_numpy(test.labels).to(device)), 6)
