"""Computations on the coordinator's own data, in a child process: the warm start, and accuracy on proxy samples.

A warm start trains the encoder before any client trains: plain cross entropy, the same for all methods. The classifier
is the method's own where it shares one that sits on the encoder's features; else one that is discarded. The same seed
gives the same bits on the same kind of processor.

The shared model is evaluated with the method's global classifier where there is one. Else a probe measures the
features alone: the nearest mean of each class, from one half of the samples, scored on the other half. Batch norm that
stays on clients takes its statistics from the samples themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_agent import data, heads, methods
from edge_agent.client import choose_device
from edge_agent.core.errors import ConfigError, DataError
from edge_agent.core.registry import PinnedFile
from edge_agent.core.storage import read_tensors, sha256_of, write_tensors
from edge_agent.core.task import Task
from edge_agent.heads import FitData
from edge_agent.methods.base import Method
from edge_agent.methods.values import Client, MethodParams
from edge_agent.training import peft
from edge_agent.training.loops import (
    TrainingOptions,
    accuracy,
    cross_entropy,
    features_of,
    local_optimizer,
    predict_probabilities,
    train_by_steps,
)
from edge_agent.training.loops import train as train_model
from edge_agent.training.parts import NORM_LAYERS, Parts, feature_dim, load_arrays, norm_names, to_arrays
from edge_agent.wire.tensors import pieces

from ..config import LEAST_IN_A_PART, WarmStartConfig
from ..rounds.compute_requests import ProxyRequest, ProxyResult, WarmStartRequest, WarmStartResult
from .machines import Meeting, device_of_process
from .spread import Gather, PartsOfBatches, Rank, gather_in_group, other_processes, step_by_parts

JOINED = f"{__name__}:join_warm"
"""The function of the other processes of a warm start on several devices."""

_SALT = 0xAA
"""Keeps the random numbers of a warm start apart from others that are drawn from the same seed."""

PROBE = "prototype"
"""The head that measures features where a method shares no classifier."""


def train_warm(body: Mapping[str, Any]) -> dict[str, Any]:
    """Train a method's first state on the samples of ``[warm_start]``, and write it to a file.

    Args:
        body: A `WarmStartRequest`, as the JSON of the pipe.

    Returns:
        The JSON of a `WarmStartResult`.

    Raises:
        HeadwaterError: The data do not fit the task, or training diverged.
    """
    request = WarmStartRequest.from_json(body)
    settings = request.settings
    rank = Rank(0, settings.device_names, settings.parts_of_batches)
    # The training is here and in a process for each further device of this machine.
    with other_processes(JOINED, request, rank, request.into.parent):
        warm = _train(request, rank, _read_samples(request, rank.parts))
    return _write_result(request, warm, rank).to_json()


def train_warm_on_machines(request: WarmStartRequest, meeting: Meeting) -> WarmStartResult | None:
    """Train as `train_warm` does, as one of the processes that a launcher has started, on this and other machines.

    Args:
        request: What is trained; the same in all processes, but for the device. Rank 0 alone writes its file.
        meeting: How this process meets the others.

    Returns:
        The result in the process of rank 0, None in the others.

    Raises:
        HeadwaterError: The data do not fit the task, training diverged, or another process did not come or ended.
    """
    launch = meeting.launch
    settings = request.settings
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device_of_process(launch.local, settings.device, settings.devices, gpus)
    parts = settings.parts or launch.processes
    _check_parts(settings, parts, launch.processes)
    # 1. The samples, before others are waited for: what is wrong with them is known at once.
    samples = _read_samples(request, parts)
    digest = sha256_of(*pieces({"inputs": samples[0].inputs, "labels": samples[0].labels}))
    # 2. The training of all, if all mean the same.
    agreement = _text_of_agreement(request, parts)
    with meeting.open(device, agreement, digest, parts) as (rank, gather):
        warm = _train(request, rank, samples, gather)
    if launch.number:
        return None
    return _write_result(request, warm, rank)


def _text_of_agreement(request: WarmStartRequest, parts: int) -> str:
    """Return everything that the result depends on beside the samples, as text that is the same on all machines.

    Where files are, and which devices compute, is each machine's own matter.
    """
    own_matters = {"device": "auto", "devices": (), "data": "", "folder": Path(), "parts": parts}
    pinned = PinnedFile.parse(request.method)
    common = request.model_copy(
        update={
            "method": request.method if pinned is None else pinned.sha256,
            "settings": request.settings.model_copy(update=own_matters),
            "into": Path(),
            "blobs": Path(),
            "weights": None,
        }
    )
    weights = "" if request.weights is None else request.weights.sha256
    return f"{common.model_dump_json()} {weights}"


def _check_parts(settings: WarmStartConfig, parts: int, processes: int) -> None:
    """Require that each process has a part of each batch, and each part enough samples; see `WarmStartConfig`."""
    mistakes = []
    if parts < processes:
        mistakes.append(f"parts = {parts} leaves some of {processes} processes without work; raise parts")
    least = LEAST_IN_A_PART * parts
    if parts > 1 and settings.batch_size < least:
        mistakes.append(f"batch_size = {settings.batch_size} is too small for {parts} parts; expected {least} or more")
    if mistakes:
        raise ConfigError("[warm_start]", mistakes)


def _write_result(request: WarmStartRequest, warm: Warm, rank: Rank) -> WarmStartResult:
    """Write the state of a warm start to its file, and return what came out."""
    settings = request.settings
    # 1. The accuracy on what was held out.
    score = None
    if len(warm.test):
        inputs = torch.from_numpy(warm.test.inputs).to(warm.device)
        probabilities = predict_probabilities(warm.trained, inputs)
        score = round(accuracy(probabilities, torch.from_numpy(warm.test.labels).to(warm.device)), 6)
    # 2. The state. The coordinator has trained all of the encoder; devices may freeze a part of it from here on.
    method = warm.method
    adapted = method.adapt(warm.model.cpu(), request.task)
    write_tensors(request.into, method.start(to_arrays(adapted, method.shared_names(adapted))))
    devices = ", ".join(rank.devices) if len(rank.devices) > 1 else ", ".join(settings.devices) or str(warm.device)
    return WarmStartResult(
        data=settings.data,
        samples=warm.samples,
        tested=len(warm.test),
        epochs=settings.epochs,
        loss=round(warm.loss, 6),
        accuracy=score,
        head="shared" if warm.shares_head else "discarded",
        device=devices,
    )


@dataclass(frozen=True)
class Warm:
    """A model after a warm start.

    Attributes:
        method: The method of the run.
        model: The method's model; its encoder is trained.
        trained: The encoder with the head that was trained with it.
        shares_head: Whether that head is the model's own.
        samples: How many samples it was trained on.
        test: The samples that were held out.
        loss: The mean loss of the last epoch.
        device: The device of the model.
    """

    method: Method
    model: Parts
    trained: Parts
    shares_head: bool
    samples: int
    test: data.Samples
    loss: float
    device: torch.device


def join_warm(request: str, rank: Rank) -> None:
    """Train as `train_warm` does, as one of the other processes; ``request``: a `WarmStartRequest`, as JSON."""
    warm_start = WarmStartRequest.model_validate_json(request)
    _train(warm_start, rank, _read_samples(warm_start, rank.parts))


def _least_of_a_batch(parts: int) -> int:
    """Return the least samples of a batch that is cut into so many parts."""
    return LEAST_IN_A_PART * parts if parts > 1 else 1


def _read_samples(request: WarmStartRequest, parts: int) -> tuple[data.Samples, data.Samples]:
    """Read the coordinator's own data, and return samples to train on and held-out ones.

    Raises:
        DataError: They do not fit the task, or are too few for a batch of so many parts.
    """
    settings = request.settings
    task = request.task
    samples = data.load(settings.data, task.input, task.class_names, folder=settings.folder)
    train, test = data.split(samples, settings.test_fraction, settings.seed)
    least = _least_of_a_batch(parts)
    if len(train) < least:
        raise DataError(
            f"{settings.data}: {len(train)} training samples are left after the split, expected {least} or more; lower "
            "test_fraction or parts"
        )
    return train, test


def _train(
    request: WarmStartRequest,
    rank: Rank,
    samples: tuple[data.Samples, data.Samples],
    gather: Gather = gather_in_group,
) -> Warm:
    """Train the model of a warm start; every process of the training ends with the same weights.

    Args:
        request: What is trained.
        rank: This process among those that train together.
        samples: Those to train on, and held-out ones.
        gather: The exchange with the other processes.

    Raises:
        TrainingFailed: Training diverged.
    """
    # 1. Its settings.
    settings = request.settings
    method = methods.create(request.method, request.params)
    task = request.task
    train, test = samples
    if settings.threads:
        torch.set_num_threads(settings.threads)
    # 2. The model, as a client of the method would begin.
    device = choose_device(rank.device)
    torch.manual_seed(request.seed)
    model = method.build(task)
    if request.weights is not None:
        request.weights.load_into(model)
    model = model.to(device)
    # A method that shares a head trains that one; for the others a linear head is trained and discarded.
    shared = to_arrays(model, method.shared_names(model))
    shares_head = "head" in method.shared and method.global_head(method.start(shared)) is not None
    head = model.head if shares_head else nn.Linear(feature_dim(model.encoder), task.num_classes)
    trained = Parts(encoder=model.encoder, head=head).to(device)
    generator = torch.Generator(device=device)
    generator.manual_seed(request.seed)
    client = Client(
        id="warm start",
        model=trained,
        train_inputs=torch.from_numpy(train.inputs).to(device),
        train_labels=torch.from_numpy(train.labels).to(device),
        task=task,
        device=device,
        rng=np.random.default_rng([request.seed, _SALT]),
        generator=generator,
    )
    # 3. Plain training with cross entropy.
    params = MethodParams(
        local_epochs=settings.epochs,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        batch_size=settings.batch_size,
    )
    if rank.parts == 1:
        loss = train_model(client, cross_entropy(trained), params)
    else:
        optimizer = local_optimizer([weight for weight in trained.parameters() if weight.requires_grad], params)
        parts = PartsOfBatches(rank, trained, cross_entropy(trained), request.seed, gather)
        options = TrainingOptions(smallest_batch=_least_of_a_batch(rank.parts), suspects={"lr": params.lr})
        loss = train_by_steps(client, step_by_parts(parts, optimizer), params, options=options, optimizer=optimizer)
    return Warm(
        method=method,
        model=model,
        trained=trained,
        shares_head=shares_head,
        samples=len(train),
        test=test,
        loss=loss,
        device=device,
    )


def evaluate_on_proxy(body: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate the state of a round on the samples of ``[proxy]``.

    Args:
        body: A `ProxyRequest`, as the JSON of the pipe.

    Returns:
        The JSON of a `ProxyResult`.

    Raises:
        HeadwaterError: The data do not fit the task, or the state is damaged.
    """
    # 1. The model of the state; names that only devices have stay as they were built.
    request = ProxyRequest.from_json(body)
    method = methods.create(request.method, request.params)
    task = request.task
    state = peft.merge(read_tensors(request.state), task)
    samples = _samples(request.data, request.folder, task.model_dump_json())
    device = choose_device(request.device)
    torch.manual_seed(0)
    model = method.build(task)
    names = model.state_dict().keys()
    load_arrays(model, {name: array for name, array in state.items() if name in names})
    model = model.to(device)
    inputs = torch.from_numpy(samples.inputs).to(device)
    # 2. Where batch norm stays on devices, the encoder gets the statistics of the proxy samples.
    is_local = bool(norm_names(model, method.shared_names(model)))
    if is_local:
        _take_statistics(model.encoder, inputs)
    features = features_of(model, inputs).cpu().numpy()
    if not np.isfinite(features).all():
        raise DataError("features hold NaN or infinity: the shared encoder has diverged")
    # 3. The global head classifies; without one, a probe that is fitted on half of the samples.
    rows = data.Samples(features, samples.labels, samples.class_names, samples.input)
    head = method.global_head(state)
    if head is not None:
        classifier = "global head"
        is_right = (features @ head["weight"].T + head["bias"]).argmax(axis=1) == samples.labels
    else:
        classifier = f"{PROBE} probe"
        is_right = _answer_by_probe(rows, task.num_classes)
    result = ProxyResult(
        acc=round(float(np.mean(is_right)), 6),
        samples=len(is_right),
        by=classifier,
        norm="proxy" if is_local else "shared",
    )
    return result.to_json()


def _answer_by_probe(rows: data.Samples, num_classes: int) -> np.ndarray:
    """Fit a probe on one half of features (n, d), and return whether it is right on each of the others, (m,) bool.

    Raises:
        DataError: There are too few samples to divide.
    """
    train, test = data.split(rows, 0.5, 0)
    if not len(test):
        raise DataError(f"{len(rows)} samples are too few for a probe; give two of a class or more")
    probe = heads.create(PROBE, {})
    probe.fit(FitData(train.inputs, train.labels, num_classes), np.random.default_rng(0))
    return np.asarray(probe.predict_proba(test.inputs).argmax(axis=1) == test.labels)


@functools.lru_cache(maxsize=1)
def _samples(source: str, folder: Path, task_json: str) -> data.Samples:
    """Return the proxy samples, which are read once for all rounds of a run; ``task_json``: the task, as JSON."""
    task = Task.model_validate_json(task_json)
    return data.load(source, task.input, task.class_names, folder=folder)


def _take_statistics(encoder: nn.Module, inputs: torch.Tensor, batch: int = 512) -> None:
    """Set the running means and variances of the encoder to those of these inputs."""
    layers = [layer for layer in encoder.modules() if isinstance(layer, NORM_LAYERS)]
    # Only the layers of batch norm collect statistics: dropout stays off.
    encoder.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean of all batches
        layer.train()
    with torch.no_grad():
        for piece in torch.split(inputs, batch):
            # A last batch of one sample has no variance.
            if len(piece) > 1 or len(inputs) == 1:
                encoder(piece)
