from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import edge_agent
from edge_agent.core.errors import StateError
from edge_agent.core.task import Task, WindowInput
from edge_agent.methods.values import Client
from edge_agent.training.loops import lasting, moments, restore
from edge_agent.training.optimizers import SGD, Adam
from edge_agent.training.parts import Parts, channels_last
from edge_agent.wire.tensors import decode, encode

TASK = Task(input=WindowInput(channels=1, length=4), class_names=("a", "b"), encoder="linear")
MAKERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def small_model() -> Parts:
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Flatten())
    return channels_last(Parts(encoder=convolutions, head=nn.Linear(8, 2)))


def client_of(model: Parts) -> Client:
    return Client(
        id="lamp",
        model=model,
        train_inputs=torch.zeros(0),
        train_labels=torch.zeros(0, dtype=torch.int64),
        task=TASK,
        device=torch.device("cpu"),
        rng=np.random.default_rng(0),
        generator=torch.Generator(),
    )


def take_steps(model: Parts, optimizer: torch.optim.Optimizer, seeds) -> None:
    for seed in seeds:
        inputs = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def bits(model: Parts) -> bytes:
    return encode({name: tensor.contiguous().numpy() for name, tensor in model.state_dict().items()})


OURS = {
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "adam, fused": lambda p: Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "sgd, fused": lambda p: SGD(p, lr=0.01, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", OURS)
def test_ours_take_the_same_steps_as_pytorchs_without_importing_its_compiler(name, monkeypatch):
    theirs = small_model()
    take_steps(theirs, MAKERS[name](theirs.parameters()), range(4))
    ours = small_model()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch._dynamo", None)  # an import of it is an error from here on
        optimizer = OURS[name](ours.parameters())
        take_steps(ours, optimizer, range(2))
        again = OURS[name](ours.parameters())
        again.load_state_dict(optimizer.state_dict())
        take_steps(ours, again, range(2, 4))
    assert bits(ours) == bits(theirs)
    assert all(weight.requires_grad for weight in ours.parameters())


def test_ours_keep_no_graph_of_their_steps():
    weight = nn.Parameter(torch.ones(2))
    (weight**2).sum().backward()
    SGD([weight], lr=0.1).step()
    assert weight.is_leaf
    assert weight.tolist() == pytest.approx([0.8, 0.8])


def test_nothing_on_a_device_makes_an_optimizer_that_imports_the_compiler():
    """Each process that trains would need a second and 75 MB more."""
    root = Path(edge_agent.__file__).parent
    makers = re.compile(r"torch\.optim\.(?!Optimizer\b)\w+\(")
    assert [str(path) for path in root.rglob("*.py") if makers.search(path.read_text(encoding="utf-8"))] == []


@every_optimizer
def test_going_on_from_kept_moments_is_the_same_as_never_having_stopped(make):
    whole = small_model()
    stopped = small_model()
    take_steps(whole, make(whole.parameters()), range(6))
    client = client_of(stopped)
    for seeds in (range(3), range(3, 6)):
        optimizer = make(stopped.parameters())
        with lasting(client, optimizer, "main", "persist"):
            take_steps(stopped, optimizer, seeds)
        client.memory = decode(encode(client.memory))  # as a device does between two rounds
    assert bits(stopped) == bits(whole)


@every_optimizer
def test_reset_starts_afresh_and_keeps_nothing(make):
    whole = small_model()
    stopped = small_model()
    take_steps(whole, make(whole.parameters()), range(4))
    client = client_of(stopped)
    for seeds in (range(2), range(2, 4)):
        optimizer = make(stopped.parameters())
        with lasting(client, optimizer, "main", "reset"):
            take_steps(stopped, optimizer, seeds)
    assert client.memory == {}
    assert bits(stopped) != bits(whole)


@every_optimizer
def test_moments_survive_a_round_trip_bit_for_bit(make):
    model = small_model()
    optimizer = make(model.parameters())
    other = make(model.parameters())
    take_steps(model, optimizer, range(3))
    kept = moments(optimizer, model, "main")
    restore(other, model, decode(encode(kept)), "main")
    assert encode(moments(other, model, "main")) == encode(kept)


def test_names_tell_label_parameter_and_moment():
    model = small_model()
    optimizer = torch.optim.Adam([*model.head.parameters(), model.encoder[0].weight])
    assert moments(optimizer, model, "id") == {}
    take_steps(model, optimizer, [0])
    parameters = ("head.weight", "head.bias", "encoder.0.weight")
    keys = ("step", "exp_avg", "exp_avg_sq")
    kept = moments(optimizer, model, "id")
    assert kept.keys() == {f"optimizer.id.{parameter}.{key}" for parameter in parameters for key in keys}
    assert kept["optimizer.id.head.weight.step"] == 1.0
    assert kept["optimizer.id.encoder.0.weight.exp_avg"].shape == (4, 3, 3, 3)


def test_labels_do_not_mix():
    model = small_model()
    one, two = (torch.optim.Adam(model.parameters()) for _ in range(2))
    take_steps(model, one, [0])
    restore(two, model, moments(one, model, "id"), "mcsl")
    assert not two.state


def test_moments_are_copies():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take_steps(model, optimizer, [0])
    kept = moments(optimizer, model, "main")
    before = encode(kept)
    restored = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    restore(restored, model, kept, "main")
    take_steps(model, optimizer, [1])
    take_steps(model, restored, [2])
    assert encode(kept) == before


def test_a_round_that_fails_keeps_the_moments_of_the_one_before():
    model = small_model()
    client = client_of(model)
    optimizer = torch.optim.Adam(model.parameters())
    with lasting(client, optimizer, "main", "persist"):
        take_steps(model, optimizer, [0])
    before = encode(client.memory)
    with pytest.raises(ZeroDivisionError), lasting(client, optimizer, "main", "persist"):
        take_steps(model, optimizer, [1])
        raise ZeroDivisionError
    assert encode(client.memory) == before


def test_moments_of_another_model_are_refused():
    model = small_model()
    memory = {"optimizer.main.head.weight.exp_avg": np.zeros((3, 8), np.float32)}
    with pytest.raises(StateError, match=r"head.weight.exp_avg' is \[3, 8\], its parameter \[2, 8\]"):
        restore(torch.optim.Adam(model.parameters()), model, memory, "main")


def test_the_learning_rate_is_that_of_the_new_optimizer():
    model = small_model()
    old = torch.optim.Adam(model.parameters(), lr=0.5)
    new = torch.optim.Adam(model.parameters(), lr=0.1)
    take_steps(model, old, [0])
    restore(new, model, moments(old, model, "main"), "main")
    assert new.param_groups[0]["lr"] == 0.1
