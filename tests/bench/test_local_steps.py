"""The plain loops beside which local rounds are measured do the work of their methods, step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import yardstick_local_steps as local

from edge_agent import methods, models
from edge_agent.training.loops import Position

BITS = {"fedavg", "fedpac", "fedpick", "repper"}
"""Methods whose loops do the same sums in the same order."""

WITHOUT_GRADIENT = {"encoder.layers.0.bias", "encoder.layers.4.bias"}
"""Biases in front of batch norm: their gradients are rounding alone, and Adam brings each to the size of a step."""


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """What the benchmark registers in this process is forgotten after each test."""
    for registry in (methods.registry, models.registry):
        monkeypatch.setattr(registry, "_extra", dict(registry._extra))


@pytest.mark.parametrize("name", sorted(local.CASES))
def test_a_plain_loop_ends_with_the_weights_of_its_method(name, monkeypatch):
    """A loop that leaves out a term, a stage or a draw of random numbers would end elsewhere, and be no yardstick."""
    params = {"batch_size": 16}
    monkeypatch.setitem(local.CASES, name, replace(local.CASES[name], samples=64, params=params))
    turns = local.Turns(name)
    update = turns.ours()
    plain = turns.bare()
    difference = 0.0
    change = 0.0
    for tensor in plain.keys() - WITHOUT_GRADIENT:
        start = turns.start[tensor].numpy()
        difference += float(np.square(update[tensor] - plain[tensor].numpy()).sum())
        change += float(np.square(plain[tensor].numpy() - start).sum())
    assert change > 0
    assert difference == 0.0 if name in BITS else difference < 1e-3 * change


def test_the_figures_are_medians_of_pairs():
    """2 / 1, 30 / 20 and 3 / 2: load that falls on one pair falls on both of its sides."""
    line = local.row("fedavg", [2.0, 30.0, 3.0], [1.0, 20.0, 2.0])
    assert line == "| `fedavg` | w1_cnn | 2.000 | 3.000 | 1.500 (1.500 to 1.750) |"


def test_means_of_losses_and_terms_are_those_of_samples_by_hand():
    """(2 x 3 + 5 x 1) / 4 = 2.75; a term that only the second batch names counts as 0 in the first: 8 x 1 / 4 = 2."""
    position = Position(sums={"": torch.zeros(())})
    position.add(torch.tensor(2.0), {}, 3)
    position.add(torch.tensor(5.0), {"beside": torch.tensor(8.0)}, 1)
    assert position.mean_losses(4) == {"": 2.75, "beside": 2.0}
    assert position.batch == 2
