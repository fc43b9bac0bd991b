"""Steps of training neither read values back from their device nor mix devices, so that a GPU is never waited for.

There need be no GPU for that: reads are counted on the CPU, where a step more must not read more; and on torch's
"meta" device, which has no values, a read or a tensor on another device raises.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.client import Arrays, Built, ClientState, Session, stacked
from edge_agent.client.stacked import Stack, schedule
from edge_agent.core.task import ImageInput, Task
from edge_agent.methods import Client
from edge_agent.training.optimizers import SGD

READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__")
"""Methods of tensors that wait for the device. What C++ does alone, as an index by a mask, is not seen."""

TASK = Task(input=ImageInput(channels=1, height=16, width=16), class_names=("a", "b", "c", "d"), encoder="small_cnn")
BATCH = 8
GENERATORS = np.random.default_rng(0)


def session_of(name, samples, **params):
    method = methods.create(name, {"local_epochs": 1, "batch_size": BATCH, **params})
    inputs = GENERATORS.standard_normal((samples, *TASK.input_shape)).astype(np.float32)
    data = Arrays(inputs, np.arange(samples) % 4)
    nothing = Arrays(inputs[:0], data.labels[:0])
    model = Built.of(method, TASK, seed=0, device="cpu")
    return Session(method, TASK, "c", data, nothing, seed=0, device="cpu", model=model), model


@pytest.fixture
def reads(monkeypatch):
    """The name of each read of a tensor's values."""
    seen = []

    def watched(name):
        real = getattr(torch.Tensor, name)

        def read(self, *words, **options):
            seen.append(name)
            return real(self, *words, **options)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    return seen


def test_reads_are_seen(reads):
    tensor = torch.ones(1)
    assert tensor.item() + float(tensor) + bool(tensor) + int(tensor) + tensor.tolist()[0] == 5
    assert reads == ["item", "__float__", "__bool__", "__int__", "tolist"]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedpac", "dualfed", "fedpick", "fedrir", "repper"])
def test_more_steps_read_no_more_values(name, reads):
    counts = []
    for batches in (2, 5):
        session, model = session_of(name, batches * BATCH)
        received = {tensor: model.fresh[tensor] for tensor in session.shared}
        state = session.method.start(received)
        received = {**session.method.broadcast(state), **session.method.downlink(state, "c")}
        reads.clear()
        session.train(received, ClientState(), round_number=1, rounds=2, evaluate=False)
        counts.append(sorted(reads))
    assert counts[0] == counts[1]


def test_a_stack_reads_its_losses_once(reads):
    counts = []
    for batches in (2, 5):
        session, model = session_of("fedavg", batches * BATCH)
        client = session.before_round(model.fresh, ClientState(), round_number=1, rounds=1)
        stack = Stack(model.model, 2)
        stack.hold(0)
        stack.hold(1)
        clients = [client, client]
        schedules = [schedule(one, session.method.params) for one in clients]
        reads.clear()
        stack.train(clients, schedules, session.method.params, ())
        counts.append(list(reads))
    assert counts == [["cpu", "numpy"]] * 2


def plain_sgd(weights, _):
    """The fused optimizer knows no device "meta"."""
    return SGD(list(weights), lr=0.1, momentum=0.5)


def on_meta(name, **params):
    """A client without values, on the device "meta"."""
    session, model = session_of(name, 2 * BATCH, **params)
    client = session.before_round(model.fresh, ClientState(), round_number=1, rounds=1)
    device = torch.device("meta")
    moved = replace(
        client,
        model=model.model.to(device),
        train_inputs=client.train_inputs.to(device),
        train_labels=client.train_labels.to(device),
        device=device,
    )
    return session.method, moved


def losses(name) -> list[tuple[Client, object, methods.Method]]:
    method, client = on_meta(name)
    if name == "fedpac":
        targets = torch.zeros(4, 128, device=client.device)
        return [(client, method.aligned_loss(client.model, targets), method)]
    if name == "dualfed":
        both = (method.personal_loss(client), method.global_loss(client), method.sum_of_losses(client))
        return [(client, loss, method) for loss in both]
    return [(client, method.loss(client, {}), method)]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedpac", "dualfed"])
def test_a_step_stays_on_its_device(name):
    for client, loss, method in losses(name):
        client.model.train()
        optimizer = plain_sgd(client.model.parameters(), method.params)
        value = loss(client.train_inputs, client.train_labels)
        assert value.device.type == "meta"
        value.backward()
        optimizer.step()


def test_a_stack_stays_on_its_device(monkeypatch):
    """All its steps are done; only then are its losses read, of which there are none."""
    monkeypatch.setattr(stacked, "local_optimizer", plain_sgd)
    method, client = on_meta("fedavg")
    steps = []
    real = stacked._Training._step

    def counted(self, batch):
        steps.append(1)
        return real(self, batch)

    monkeypatch.setattr(stacked._Training, "_step", counted)
    schedules = [schedule(client, method.params) for _ in range(2)]
    with pytest.raises(NotImplementedError, match="meta"):
        stacked.Stack(client.model, 2).train([client, client], schedules, method.params, ())
    assert len(steps) == len(schedules[0]) == 2
