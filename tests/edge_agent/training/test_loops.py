from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from edge_agent import methods
from edge_agent.core.errors import ConfigError, DataError, TrainingFailed
from edge_agent.core.task import Task, WindowInput
from edge_agent.methods.values import Client, MethodParams
from edge_agent.training import loops
from edge_agent.training.parts import Parts

TASK = Task(input=WindowInput(channels=1, length=4), class_names=("a", "b", "c"), encoder="linear")


class Double(nn.Module):
    def forward(self, inputs):
        return 2 * inputs


def client_with(model: Parts, n: int = 6, seed: int = 0) -> Client:
    draw = torch.Generator().manual_seed(seed)
    return Client(
        id="lamp",
        model=model,
        train_inputs=torch.randn(n, 4, generator=draw),
        train_labels=torch.arange(n) % 3,
        task=TASK,
        device=torch.device("cpu"),
        rng=np.random.default_rng(seed),
        generator=torch.Generator().manual_seed(seed),
    )


def linear_parts() -> Parts:
    torch.manual_seed(0)
    return Parts(encoder=nn.Linear(4, 5), head=nn.Linear(5, 3))


@given(st.integers(0, 70), st.integers(1, 20), st.integers(0, 9))
def test_one_epoch_visits_every_sample_once_and_ends_with_no_single_one(n, size, seed):
    found = loops.batches(n, size, np.random.default_rng(seed))
    assert sorted(np.concatenate([*found, np.empty(0, np.int64)]).tolist()) == list(range(n))
    assert all(size <= len(batch) <= size + 1 or batch is found[-1] for batch in found)
    if size > 1 and n > 1:
        assert all(len(batch) > 1 for batch in found)


@given(st.integers(0, 70), st.integers(1, 20), st.integers(0, 9))
def test_dropping_the_last_batch_leaves_whole_ones_or_a_lone_short_one(n, size, seed):
    found = loops.batches(n, size, np.random.default_rng(seed), drop_last=True)
    assert [len(batch) for batch in found] == ([size] * (n // size) if n >= size else [n] * (n > 0))
    flat = np.concatenate([*found, np.empty(0, np.int64)]).tolist()
    assert len(set(flat)) == len(flat)
    assert set(flat) <= set(range(n))


def test_the_samples_left_out_differ_between_epochs():
    rng = np.random.default_rng(0)
    left = {frozenset(range(7)) - set(np.concatenate(loops.batches(7, 3, rng, drop_last=True))) for _ in range(9)}
    assert len(left) > 1


def test_a_last_single_sample_joins_the_batch_before():
    assert [len(b) for b in loops.batches(7, 3, np.random.default_rng(0))] == [3, 4]
    assert [len(b) for b in loops.batches(8, 3, np.random.default_rng(0))] == [3, 3, 2]
    assert [len(b) for b in loops.batches(3, 1, np.random.default_rng(0))] == [1, 1, 1]
    assert [len(b) for b in loops.batches(2, 50, np.random.default_rng(0))] == [2]


def test_a_last_batch_that_is_too_small_joins_the_one_before_it():
    def sizes(samples, size, smallest):
        return [len(b) for b in loops.batches(samples, size, np.random.default_rng(0), smallest=smallest)]

    assert sizes(226, 32, 8) == [32] * 6 + [34]
    assert sizes(231, 32, 8) == [32] * 6 + [39]
    assert sizes(232, 32, 8) == [32] * 7 + [8]
    assert sizes(6, 32, 8) == [6]
    assert sizes(11, 4, 8) == [4, 7], "no more than one batch joins"


def test_the_order_comes_from_the_generator():
    one, same, other = (loops.batches(20, 4, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_one_step_of_sgd_by_hand():
    # f(w) = CE of logits (w, 0) for label 0 at w = 0: gradient softmax - 1 = -1/2, so w = 0 + 0.4 * 1/2.
    weight = nn.Parameter(torch.zeros(1))
    client = client_with(Parts(encoder=nn.Identity(), head=nn.Identity()), n=2)

    def loss(inputs, labels):
        return F.cross_entropy(torch.cat([weight, torch.zeros(1)])[None], torch.zeros(1, dtype=torch.long))

    optimizer = loops.local_optimizer([weight], MethodParams(lr=0.4, momentum=0.0))
    mean = loops.train(
        client, loss, MethodParams(), optimizer=optimizer, options=loops.TrainingOptions(epochs=1, batch_size=2)
    )
    assert weight.item() == pytest.approx(0.2)
    assert mean == pytest.approx(math.log(2))


def test_fused_and_plain_sgd_agree():
    results = []
    for fused in (True, False):
        client = client_with(linear_parts())
        params = MethodParams(lr=0.1, momentum=0.9, weight_decay=0.01)
        optimizer = loops.local_optimizer(client.model.parameters(), params)
        if not fused:
            optimizer = torch.optim.SGD(client.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, fused=False)
        loops.train(
            client,
            loops.cross_entropy(client.model),
            MethodParams(),
            optimizer=optimizer,
            options=loops.TrainingOptions(epochs=3, batch_size=2),
        )
        results.append(torch.cat([p.detach().flatten() for p in client.model.parameters()]))
    torch.testing.assert_close(*results)


def test_adam_where_it_is_asked_for_follows_the_papers_recursion():
    """Two steps on one weight with gradients 0.5 and -0.25, worked out by Kingma and Ba's algorithm in float64."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = loops.local_optimizer([weight], MethodParams(optimizer="adam", lr=0.1, momentum=0.9))
    expected = 0.0
    mean = 0.0
    square = 0.0
    for step, gradient in enumerate((0.5, -0.25), 1):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        expected -= 0.1 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)) ** 0.5 + 1e-8)
    assert weight.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("method", ["apfl", "per_fedavg", "pfedme", "scaffold"])
def test_methods_that_are_made_of_sgd_steps_refuse_adam(method):
    with pytest.raises(ConfigError, match="optimizer"):
        methods.create(method, {"optimizer": "adam"})


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_device_without_fused_steps_gets_plain_ones(monkeypatch, kind):
    plain = getattr(torch.optim, kind)

    def refusing(parameters, *, fused=False, **settings):
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be on another device")
        return plain(parameters, **settings)

    monkeypatch.setattr(torch.optim, kind, refusing)
    params = MethodParams(lr=0.25, optimizer=kind.lower())
    optimizer = loops.local_optimizer([nn.Parameter(torch.ones(1))], params, lr=0.5)
    assert isinstance(optimizer, plain)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_frozen_parts_keep_their_bits_and_their_statistics():
    torch.manual_seed(0)
    model = Parts(encoder=nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), head=nn.Linear(5, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    client = client_with(model)
    optimizer = loops.local_optimizer(model.head.parameters(), MethodParams(lr=0.1))
    loops.train(
        client,
        loops.cross_entropy(model),
        MethodParams(),
        optimizer=optimizer,
        options=loops.TrainingOptions(epochs=2, batch_size=3, frozen=("encoder",)),
    )
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("encoder."))
    assert not torch.equal(after["head.weight"], before["head.weight"])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_frozen_parts_are_thawed_also_after_a_failure():
    model = linear_parts()
    client = client_with(model)
    client.train_inputs[:] = torch.nan
    with pytest.raises(TrainingFailed):
        loops.train(
            client,
            loops.cross_entropy(model),
            MethodParams(),
            options=loops.TrainingOptions(epochs=1, batch_size=3, frozen=("encoder",)),
        )
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_gradients_may_be_changed_before_a_step():
    model = linear_parts()
    before = [p.detach().clone() for p in model.parameters()]

    def silence() -> None:
        for parameter in model.parameters():
            parameter.grad.zero_()

    optimizer = loops.local_optimizer(model.parameters(), MethodParams())
    loops.train(
        client_with(model),
        loops.cross_entropy(model),
        MethodParams(),
        optimizer=optimizer,
        before_step=silence,
        options=loops.TrainingOptions(epochs=1, batch_size=3),
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_reported_loss_weighs_each_sample_once():
    # Batches of 3 and 4 (the seventh joins): the loss is the batch's first label value, not their plain mean.
    client = client_with(linear_parts(), n=7)
    client.train_labels = torch.arange(7)
    weight = nn.Parameter(torch.zeros(1))
    mean = loops.train(
        client,
        lambda _inputs, labels: labels.double().mean() + 0 * weight.sum(),
        MethodParams(),
        optimizer=loops.local_optimizer([weight], MethodParams()),
        options=loops.TrainingOptions(epochs=1, batch_size=3),
    )
    assert mean == pytest.approx(3.0)  # mean of 0..6


def test_zero_epochs_change_nothing_and_report_no_loss():
    model = linear_parts()
    optimizer = loops.local_optimizer(model.parameters(), MethodParams())
    client = client_with(model)
    mean = loops.train(
        client,
        loops.cross_entropy(model),
        MethodParams(),
        optimizer=optimizer,
        options=loops.TrainingOptions(epochs=0, batch_size=3),
    )
    assert math.isnan(mean)
    assert client.log == {}


def test_the_last_loss_is_logged_under_the_given_name():
    model = linear_parts()
    client = client_with(model)
    optimizer = loops.local_optimizer(model.parameters(), MethodParams())
    mean = loops.train(
        client,
        loops.cross_entropy(model),
        MethodParams(),
        optimizer=optimizer,
        options=loops.TrainingOptions(epochs=2, batch_size=3, log="loss.head"),
    )
    assert client.log == {"loss.head": mean}


def test_a_loss_that_explodes_names_client_epoch_and_step_size():
    model = linear_parts()
    optimizer = loops.local_optimizer(model.parameters(), MethodParams(lr=1e30))
    with pytest.raises(TrainingFailed) as caught:
        loops.train(
            client_with(model),
            loops.cross_entropy(model),
            MethodParams(),
            optimizer=optimizer,
            options=loops.TrainingOptions(epochs=5, batch_size=2),
        )
    message = str(caught.value)
    assert "client 'lamp'" in message
    assert "lr 1e+30" in message
    assert "lower lr" in message


def test_a_client_without_samples_is_told_so():
    model = linear_parts()
    optimizer = loops.local_optimizer(model.parameters(), MethodParams())
    with pytest.raises(TrainingFailed, match="'lamp' has no training samples"):
        loops.train(
            client_with(model, n=0),
            loops.cross_entropy(model),
            MethodParams(),
            optimizer=optimizer,
            options=loops.TrainingOptions(epochs=1, batch_size=2),
        )


def test_one_sample_under_batch_norm_is_explained():
    model = Parts(encoder=nn.BatchNorm1d(4), head=nn.Linear(4, 3))
    optimizer = loops.local_optimizer(model.parameters(), MethodParams())
    with pytest.raises(TrainingFailed, match="1 training sample; batch norm needs at least 2"):
        loops.train(
            client_with(model, n=1),
            loops.cross_entropy(model),
            MethodParams(),
            optimizer=optimizer,
            options=loops.TrainingOptions(epochs=1, batch_size=2),
        )


def test_other_value_errors_of_a_loss_are_not_disguised():
    def broken(inputs, labels):
        raise ValueError("a mistake in a method")

    model = linear_parts()
    with pytest.raises(ValueError, match="a mistake in a method"):
        loops.train(client_with(model), broken, MethodParams(), options=loops.TrainingOptions(epochs=1, batch_size=2))


def test_probabilities_come_from_eval_mode_and_leave_the_mode_alone():
    model = Parts(encoder=nn.Dropout(0.5), head=nn.Linear(4, 3)).train()
    inputs = torch.randn(5, 4)
    found = loops.predict_probabilities(model, inputs, batch=2)
    torch.testing.assert_close(found, torch.softmax(model.head(inputs), dim=1))
    assert model.training
    assert not found.requires_grad


def test_features_do_not_depend_on_the_batch_size():
    model = Parts(encoder=Double(), head=nn.Identity()).eval()
    inputs = torch.randn(5, 4)
    assert torch.equal(loops.features_of(model, inputs, batch=2), 2 * inputs)
    assert not model.training


def test_accuracy_counts_rows():
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    assert loops.accuracy(probabilities, torch.tensor([0, 1, 1, 0])) == 0.5


def test_evaluating_nothing_is_refused():
    with pytest.raises(DataError, match="no inputs"):
        loops.predict_probabilities(linear_parts(), torch.empty(0, 4))
    with pytest.raises(DataError, match="no samples"):
        loops.accuracy(torch.empty(0, 3), torch.empty(0, dtype=torch.long))
