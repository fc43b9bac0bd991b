"""The step that is timed before the first real one: in turns, warmed up, and without a trace."""

from __future__ import annotations

import pytest
import torch

from edge_agent import methods
from edge_agent.core.task import ImageInput, Task
from edge_agent.training import precision
from edge_agent.training.precision import StepTimes, time_steps

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b"), encoder="small_cnn", encoder_params={}
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return methods.create("fedavg").build(TASK)


@pytest.mark.parametrize("float32_s, bfloat16_s, chosen", [(1, 9, "float32"), (9, 1, "bfloat16"), (1, 1, "float32")])
def test_the_quicker_precision_is_chosen_and_float32_where_they_are_equal(float32_s, bfloat16_s, chosen):
    assert StepTimes(float32_s, bfloat16_s).chosen == chosen


def test_steps_are_timed_in_balanced_turns_after_warming_up(model, monkeypatch):
    """Steps on their own clock: 10 and 20 s when cold, then 1 and 2 s, the second turn disturbed by 5 s."""
    now = [0.0]
    order = []

    def step(_, inputs, kind):
        order.append(kind)
        assert len(inputs) == 4
        cold = len(order) <= 2
        disturbed = 5.0 if 6 < len(order) <= 10 else 0.0
        now[0] += (1.0 if kind == "float32" else 2.0) * (10 if cold else 1) + disturbed

    monkeypatch.setattr(precision, "_step", step)
    monkeypatch.setattr(precision, "BUDGET_S", 1000.0)
    times = time_steps(model, torch.zeros(4, 1, 8, 8), clock=lambda: now[0])
    assert (times.float32_s, times.bfloat16_s, times.chosen) == (1.0, 2.0, "float32")
    assert order == ["float32", "bfloat16"] + ["float32", "bfloat16", "bfloat16", "float32"] * 3


def test_slow_steps_are_timed_in_one_turn(model, monkeypatch):
    now = [0.0]
    count = [0]

    def step(*_):
        count[0] += 1
        now[0] += 10.0

    monkeypatch.setattr(precision, "_step", step)
    time_steps(model, torch.zeros(2, 1, 8, 8), clock=lambda: now[0])
    assert count[0] == 2 + 4


@pytest.mark.parametrize("samples", [1, 6])
def test_timing_leaves_model_and_generators_as_they_were(model, samples):
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    times = time_steps(model, torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert times.float32_s > 0 < times.bfloat16_s
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert not model.training


def test_a_step_runs_in_the_precision_that_it_is_timed_for(model, monkeypatch):
    seen = []
    features = model.features
    monkeypatch.setattr(
        model, "features", lambda inputs: seen.append(torch.is_autocast_enabled("cpu")) or features(inputs)
    )
    for kind in ("float32", "bfloat16"):
        precision._step(model, torch.zeros(2, 1, 8, 8), kind)
    assert seen == [False, True]
