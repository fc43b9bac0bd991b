"""A warm start on several devices: the bits of one device, whoever computes which part, and ends when one dies."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from federation_duties import TASK
from simulation_harness import write_images
from torch import nn
from torch.nn import functional as F

from coordinator.config import WarmStartConfig
from coordinator.hosted import own_data, spread
from coordinator.hosted.own_data import train_warm
from coordinator.hosted.spread import PartsOfBatches, Rank, step_by_parts
from edge_agent.core.config import parse
from edge_agent.core.errors import ConfigError, DataError, TrainingFailed
from edge_agent.core.storage import read_tensors
from edge_agent.core.task import ImageInput, Task

CNN = Task(input=ImageInput(channels=1, height=16, width=16), class_names=tuple("0123456789"), encoder="small_cnn")
"""With batch norm."""

DIGITS = "digits:optdigits?n=60"


@pytest.fixture
def source(tmp_path):
    return write_images(tmp_path / "own.npz", 120, dark=40, noise=10, step=70)


def warmed(folder, source, name, task=TASK, **settings):
    """Return the answer and the bytes of the state of a warm start."""
    config = WarmStartConfig(data=source, epochs=2, lr=0.1, batch_size=10, **settings)
    into = folder / name
    answer = train_warm(
        {
            "method": "fedavg",
            "params": {},
            "task": task.model_dump(mode="json"),
            "seed": 1,
            "into": str(into),
            "settings": config.model_dump(mode="json"),
        }
    )
    return answer, into.read_bytes()


def test_two_parts_of_a_batch_have_the_gradient_of_the_batch():
    """Without batch norm the mean of all losses is the mean of the parts' means, times their shares: 5 = 3 + 2."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inputs = torch.randn(5, 4)
    labels = torch.tensor([0, 1, 2, 0, 1])

    def loss(inputs, labels):
        return F.cross_entropy(model(inputs), labels)

    whole = loss(inputs, labels)
    whole.backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    value = PartsOfBatches(Rank(0, ("cpu",), 2), model, loss, 0).collect(inputs, labels)
    assert value.item() == pytest.approx(whole.item())
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def test_statistics_of_batch_norm_are_the_mean_over_the_parts():
    """Means 1 and 5, momentum 0.1, from 0: the running mean is 0.1 * 3, whichever part came last."""
    model = nn.BatchNorm1d(1, affine=True)
    inputs = torch.tensor([[0.0], [2.0], [4.0], [6.0]])

    def loss(inputs, labels):
        return (model(inputs) ** 2).mean()

    PartsOfBatches(Rank(0, ("cpu",), 2), model, loss, 0).collect(inputs, torch.zeros(4))
    assert model.running_mean.item() == pytest.approx(0.3)
    assert model.num_batches_tracked.item() == 1


def test_what_layers_draw_at_random_follows_from_step_and_part():
    """Dropout draws the same for a part whoever computed other parts before, and other numbers in the next step."""

    def losses(device_count, rank):
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2, bias=False))
        nn.init.ones_(model[1].weight)
        drawn = []

        def loss(inputs, labels):
            value = model(inputs).sum()
            drawn.append(value.item())
            return value

        parts = PartsOfBatches(Rank(rank, ("cpu",) * device_count, 2), model, loss, 7)
        parts._exchange = lambda own: [*own, *own][:2]
        for _ in range(2):
            parts.collect(torch.ones(20, 8), torch.zeros(20))
        return drawn

    together = losses(1, 0)
    assert losses(2, 0) == together[0::2]
    assert losses(2, 1) == together[1::2]
    assert len(set(together)) > 1


def test_a_part_belongs_to_one_process():
    ranks = [Rank(number, ("cpu",) * 3, 7) for number in range(3)]
    assert [[part for part in range(7) if rank.owns(part)] for rank in ranks] == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("has_batch_norm", [False, True], ids=["linear", "batch norm"])
def test_several_devices_end_in_the_bits_of_one(tmp_path, source, has_batch_norm):
    """Four parts on one, two and three devices; the third one has processes with two parts and with one."""
    task = TASK
    if has_batch_norm:
        task = CNN
        source = DIGITS
    one, expected = warmed(tmp_path, source, "one", task, devices=["cpu"], parts=4)
    two, same = warmed(tmp_path, source, "two", task, devices=["cpu", "cpu"], parts=4)
    three, again = warmed(tmp_path, source, "three", task, devices=["cpu"] * 3, parts=4)
    assert expected == same == again
    assert (one["device"], two["device"]) == ("cpu", "cpu, cpu")
    assert one["loss"] == two["loss"] == three["loss"]
    assert one["accuracy"] == three["accuracy"]


def test_without_parts_a_warm_start_has_the_bits_that_it_had(tmp_path, source):
    _, plain = warmed(tmp_path, source, "plain", device="cpu")
    _, listed = warmed(tmp_path, source, "listed", devices=["cpu"])
    assert plain == listed
    _, cut = warmed(tmp_path, source, "cut", device="cpu", parts=2)
    assert cut != plain  # another order of the same additions
    for name, array in read_tensors(tmp_path / "cut").items():
        np.testing.assert_allclose(array, read_tensors(tmp_path / "plain")[name], atol=1e-4)


def test_a_training_fails_where_another_process_is_killed(tmp_path, source, monkeypatch):
    """The exchange of the first one fails at once, and the message names who has ended."""
    started = []

    class Watched(spread.ChildProcess):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    steps = []

    def killing(parts, optimizer):
        step = step_by_parts(parts, optimizer)

        def counted(inputs, labels):
            steps.append(len(inputs))
            if len(steps) == 3:
                os.kill(started[0].pid, signal.SIGKILL)
            return step(inputs, labels)

        return counted

    monkeypatch.setattr(spread, "ChildProcess", Watched)
    monkeypatch.setattr(own_data, "step_by_parts", killing)
    with pytest.raises(TrainingFailed, match=r"on 2 devices failed: rank 1 ended \(.*KILL"):
        warmed(tmp_path, source, "killed", devices=["cpu", "cpu"])
    assert not started[0].is_running
    assert not (tmp_path / "killed").exists()
    _, whole = warmed(tmp_path, source, "again", devices=["cpu", "cpu"])
    assert whole


def test_a_process_that_cannot_start_is_not_waited_for(tmp_path, source, monkeypatch):
    monkeypatch.setattr(own_data, "JOINED", "coordinator.hosted.own_data:nobody")
    with pytest.raises(TrainingFailed, match="rank 1 ended"):
        warmed(tmp_path, source, "none", devices=["cpu", "cpu"])


def test_too_few_samples_for_the_parts_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"\d training samples are left after the split, expected 10 or more"):
        warmed(tmp_path, "digits:optdigits?n=8", "few", CNN, device="cpu", parts=5)


def test_mistakes_of_devices_are_told_together():
    raw = {"data": "digits:optdigits", "device": "cpu", "devices": ["auto", "cuda:0", "cuda:1"], "parts": 2}
    with pytest.raises(ConfigError) as refused:
        parse(WarmStartConfig, {**raw, "batch_size": 3}, where="[warm_start]")
    for words in (
        "exclude each other",
        "name devices",
        "leaves some of 3 devices without work",
        "too small for 2 parts",
    ):
        assert words in str(refused.value)


def test_each_process_of_a_warm_start_has_its_device():
    config = WarmStartConfig(data="digits:optdigits", devices=["cuda:0", "cuda:1"])
    assert config.device_names == ("cuda:0", "cuda:1")
    assert config.parts_of_batches == 2
    assert [Rank(rank, config.device_names, 2).device for rank in range(2)] == ["cuda:0", "cuda:1"]
