"""Batch norm statistics taken anew: by hand, and where the received weights are not those of the last training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edge_agent import methods
from edge_agent.client import Arrays, ClientState, Session
from edge_agent.core.task import Task, WindowInput
from edge_agent.training.parts import MOST_ROWS, Parts, own_layers, statistics_of, take_statistics

VALUES = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 6.0], [7.0, 6.0]])


def layers(model):
    return own_layers(model, set(model.state_dict()))


def test_statistics_by_hand():
    """Means 4 and 3; unbiased variances (9 + 1 + 1 + 9) / 3 and 4 x 9 / 3."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)).eval()
    model[0].running_mean.fill_(100.0)
    before = torch.random.get_rng_state()
    take_statistics(layers(model), model, VALUES)
    torch.testing.assert_close(model[0].running_mean, torch.tensor([4.0, 3.0]))
    torch.testing.assert_close(model[0].running_var, torch.tensor([20 / 3, 12.0]))
    assert torch.equal(torch.random.get_rng_state(), before), "nothing random is drawn, dropout rests"
    assert not any(module.training for module in model.modules())
    assert model[0].momentum == 0.1
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_layer_above_sees_what_the_layer_below_makes_of_the_batch():
    """Behind a batch norm that has the batch's own statistics all means are 0 and variances 1 (biased)."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).eval()
    model[0].running_mean.fill_(100.0)
    take_statistics(layers(model), model, VALUES)
    torch.testing.assert_close(model[1].running_mean, torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(model[1].running_var, torch.full((2,), 4 / 3), atol=1e-4, rtol=0)


def test_statistics_from_before_come_back_bit_for_bit():
    model = nn.Sequential(nn.BatchNorm1d(2)).eval()
    model.train()(VALUES * 3)
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with statistics_of(layers(model), model, VALUES):
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_one_sample_has_no_variance_and_changes_nothing():
    model = nn.Sequential(nn.BatchNorm1d(2)).eval()
    take_statistics(layers(model), model, VALUES[:1])
    assert torch.equal(model[0].running_mean, torch.zeros(2))


def test_a_part_of_many_samples_is_taken_evenly():
    model = nn.Sequential(nn.BatchNorm1d(1)).eval()
    seen = []
    rows = torch.arange(5000.0).reshape(-1, 1)
    take_statistics(layers(model), lambda piece: (seen.append(piece), model(piece)), rows)
    taken = torch.cat(seen)
    assert len(taken) == MOST_ROWS
    assert (taken[0], taken[-1]) == (0.0, 4999.0)
    assert model[0].running_mean.item() == pytest.approx(2499.5, abs=2)


def test_only_layers_whose_statistics_stay_are_taken():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2))
    assert own_layers(model, {"0.running_mean", "0.running_var", "1.weight"}) == [model[0]]


class Normed(methods.get("fedavg")):
    """FedAvg of a linear encoder behind batch norm, whose statistics stay."""

    norm = "local_stats"

    def build(self, task):
        torch.manual_seed(0)
        return Parts(encoder=nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.BatchNorm1d(2)), head=nn.Linear(2, 2))


def session(refresh):
    task = Task(input=WindowInput(channels=1, length=4), class_names=("low", "high"), encoder="linear")
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    inputs = (rng.normal(size=(40, 1, 4)) * 0.1 + labels[:, None, None] * 2 - 1).astype(np.float32)
    method = Normed(Normed.Params(refresh_stats=refresh))
    return Session(method, task, "a", Arrays(inputs, labels), Arrays(inputs, labels), seed=0)


def received_by(one):
    """Weights under which classes are told apart once features are centred; kept statistics are of features near 50."""
    received = {name: one._fresh[name].copy() for name in one._shared}
    received["encoder.1.weight"][:] = np.eye(2, 4)
    received["encoder.1.bias"][:] = 0.0
    received["head.weight"][:] = [[-1, -1], [1, 1]]
    received["head.bias"][:] = 0.0
    kept = {name: one._fresh[name].copy() for name in one._personal}
    kept["encoder.2.running_mean"][:] = 50.0
    return received, ClientState(kept)


@pytest.mark.parametrize("refresh, expected", [(False, 0.5), (True, 1.0)])
def test_a_received_model_is_scored_with_statistics_that_fit_it(refresh, expected):
    one = session(refresh)
    received, kept = received_by(one)
    round_one = one.train(received, kept, round_number=1, rounds=1, evaluate=True)
    assert round_one.metrics["acc.personal"] == expected
    end = one.finish(received, kept, rounds=1)
    assert end.metrics["acc.personal"] == expected
    mean = end.kept.personal["encoder.2.running_mean"]
    assert np.abs(mean - (0.0 if refresh else 50.0)).max() < 0.1, "what is kept answers as it was scored"


def test_scoring_does_not_change_what_training_makes():
    outcomes = []
    for evaluate in (False, True):
        one = session(True)
        received, kept = received_by(one)
        outcomes.append(one.train(received, kept, round_number=1, rounds=1, evaluate=evaluate))
    quiet, scored = outcomes
    for these, those in ((quiet.update, scored.update), (quiet.kept.personal, scored.kept.personal)):
        assert all(np.array_equal(those[name], array) for name, array in these.items())
