"""Training that is killed within an epoch and resumed from its checkpoint ends in the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from federation_duties import TASK, quick_params

from edge_agent import methods
from edge_agent.client import Arrays, ClientState, Session
from edge_agent.core.errors import TrainingCancelled
from edge_agent.methods.values import TrainingControl
from edge_agent.run_folder import checkpoint as checkpoint_module
from edge_agent.run_folder.checkpoint import TrainingCheckpointFile
from edge_agent.run_folder.layout import TRAINING_FILE
from edge_agent.training.parts import to_arrays

ONE_PASS = [name for name in methods.names() if methods.create(name).one_pass()]
RESUMABLE = [name for name in methods.names() if methods.get(name).resumable]
EPOCHS = 3
BATCHES = 3


class Killed(BaseException):
    """Stands for the end of the process."""


class Steps:
    """A clock that counts training steps, and ends the process after ``last`` of them."""

    def __init__(self, last=10**6, die=None):
        self.now = 0
        self.last = last
        self.die = die

    def is_cancelled(self):
        if self.now >= self.last:
            if self.die is not None:
                self.die()
            raise Killed
        self.now += 1
        return False

    def __call__(self):
        return float(self.now)


def session_of(method, **params):
    rng = np.random.default_rng(3)
    labels = np.arange(24, dtype=np.int64) % 3
    inputs = rng.normal(size=(24, *TASK.input_shape)).astype(np.float32) + labels[:, None, None, None]
    data = Arrays(inputs[:20], labels[:20]), Arrays(inputs[20:], labels[20:])
    options = {**quick_params(method), "local_epochs": EPOCHS, **params}
    return Session(methods.create(method, options), TASK, "a0", *data, seed=5, device="cpu")


def train(folder, method, *, last=10**6, every=2, training="t", share=1.0, die=None, **params):
    """One round of a client that keeps ``folder`` on its disk, and how many steps it did."""
    session = session_of(method, **params)
    clock = Steps(last, die)
    received = session.method.start(to_arrays(session._model, session._shared))
    received |= session.method.downlink(received, "a0")
    checkpoint = TrainingCheckpointFile(folder, training, every, clock)
    control = TrainingControl(share, clock.is_cancelled, checkpoint)
    outcome = session.train(received, ClientState(), round_number=2, rounds=4, evaluate=True, control=control)
    return outcome, clock.now


def assert_same(one, other):
    for ours, theirs in (
        (one.update, other.update),
        (one.kept.personal, other.kept.personal),
        (one.kept.memory, other.kept.memory),
    ):
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            assert array.tobytes() == theirs[name].tobytes(), name
    assert one.metrics == other.metrics


def test_the_methods_that_train_in_one_pass():
    assert {"fedavg", "fedprox", "fedper", "fedbn", "fedavgm", "fedadam", "fedrod", "local"} <= set(ONE_PASS)
    assert not {"fedrep", "fedpac", "dualfed", "fedrir", "ditto", "scaffold"} & set(ONE_PASS)


@pytest.mark.parametrize("method", ONE_PASS)
def test_every_such_method_resumes_with_the_same_bits(tmp_path, method):
    undisturbed, steps = train(tmp_path / "undisturbed", method, every=0)
    assert steps == EPOCHS * BATCHES
    for last in (3, 5, 8):
        with pytest.raises(Killed):
            train(tmp_path / str(last), method, last=last)
        outcome, rest = train(tmp_path / str(last), method)
        assert_same(outcome, undisturbed)
        assert rest == steps - (last - last % 2), "saved after each second step; only what came behind is done again"


def test_the_methods_of_the_five_papers_are_resumed():
    assert {"dualfed", "fedpac", "fedpick", "repper", "fedrir", "fedrep"} <= set(RESUMABLE)
    assert not set(ONE_PASS) & set(RESUMABLE), "those need not say so"


OF_SEVERAL = [(name, {}) for name in RESUMABLE] + [
    ("fedrir", {"optimizer": "adam", "optimizer_state": "persist"}),
    ("fedrir", {"id_mode": "vclub", "optimizer": "adam"}),
    ("fedpac", {"momentum": 0.9, "head_epochs": 2}),
    ("fedpick", {"selector": "fisher"}),
    ("fedrep", {"frozen_norm": "train"}),
]


@pytest.mark.parametrize(
    "method, params", OF_SEVERAL, ids=lambda value: value if isinstance(value, str) else str(value)
)
def test_methods_of_several_passes_resume_in_each_of_them_with_the_same_bits(tmp_path, monkeypatch, method, params):
    monkeypatch.setattr(checkpoint_module, "CHECKPOINT_BYTES_PER_S", 1e12)  # a large state would be saved less often
    undisturbed, steps = train(tmp_path / "undisturbed", method, every=0, **params)
    for last in {1, steps // 2, steps // 2 + 1, steps - 2, steps - 1} - {0}:
        with pytest.raises(Killed):
            train(tmp_path / str(last), method, last=last, every=1, **params)
        outcome, rest = train(tmp_path / str(last), method, every=1, **params)
        assert_same(outcome, undisturbed)
        assert rest == steps - last, "passes that were over are not trained again"


@pytest.mark.parametrize("params", [{"optimizer": "adam"}, {"momentum": 0.9}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("last", range(2, 9))
def test_the_state_of_the_optimizer_is_in_the_checkpoint(tmp_path, params, last):
    undisturbed, _ = train(tmp_path / "undisturbed", "fedavg", every=0, **params)
    with pytest.raises(Killed):
        train(tmp_path / "killed", "fedavg", last=last, every=1, **params)
    outcome, rest = train(tmp_path / "killed", "fedavg", every=1, **params)
    assert_same(outcome, undisturbed)
    assert rest == EPOCHS * BATCHES - last


def test_training_that_is_killed_twice_resumes_twice(tmp_path):
    undisturbed, _ = train(tmp_path / "undisturbed", "fedbn", every=0)
    for last in (4, 3):
        with pytest.raises(Killed):
            train(tmp_path / "killed", "fedbn", last=last, every=1)
    outcome, rest = train(tmp_path / "killed", "fedbn", every=1)
    assert_same(outcome, undisturbed)
    assert rest == 2


def test_a_process_that_is_really_killed_resumes(tmp_path):
    here = Path(__file__)
    code = (
        f"import sys; sys.path[:0] = [{str(here.parent)!r}, {str(here.parents[2] / 'harness')!r}]\n"
        "import pathlib, test_local_checkpoints as t\n"
        f"t.train(pathlib.Path({str(tmp_path / 'killed')!r}), 'fedavg', last=5, die=t.kill)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    outcome, rest = train(tmp_path / "killed", "fedavg")
    assert_same(outcome, train(tmp_path / "undisturbed", "fedavg", every=0)[0])
    assert rest == EPOCHS * BATCHES - 4


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other training"])
def test_a_checkpoint_that_is_damaged_or_of_another_training_is_ignored(tmp_path, damage, caplog):
    with pytest.raises(Killed):
        train(tmp_path, "fedavg", last=6)
    path = tmp_path / TRAINING_FILE
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    if damage == "flipped":
        path.write_bytes(data[:40] + bytes([data[40] ^ 255]) + data[41:])
    if damage == "empty":
        path.write_bytes(b"")
    training = "another" if damage == "other training" else "t"
    outcome, steps = train(tmp_path, "fedavg", training=training)
    assert steps == EPOCHS * BATCHES
    assert_same(outcome, train(tmp_path / "undisturbed", "fedavg", every=0)[0])
    assert ("training restarts" in caplog.text) == (damage != "other training")


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    outcome, _ = train(tmp_path / "file", "fedavg")
    assert_same(outcome, train(tmp_path / "undisturbed", "fedavg", every=0)[0])
    assert "checkpoint_not_written" in caplog.text


def test_a_checkpoint_takes_at_most_a_twentieth_of_the_time(tmp_path, monkeypatch):
    now = [0.0]
    checkpoint = TrainingCheckpointFile(tmp_path, "t", 10, lambda: now[0])

    def slow_disk(*_, **__):
        now[0] += 7

    monkeypatch.setattr("edge_agent.run_folder.checkpoint.write_tensors", slow_disk)
    due = []
    for now[0] in range(12):
        due.append(checkpoint.is_due())
    assert due == [False] * 10 + [True] * 2
    checkpoint.save({}, {})
    now[0] = 18 + 139
    assert not checkpoint.is_due()
    now[0] = 18 + 140
    assert checkpoint.is_due()


def test_checkpoints_write_less_than_what_wears_out_an_sd_card(tmp_path):
    """45 MB on a disk that takes no time: 225 s between two of them, however often they are asked for."""
    now = [0.0]
    checkpoint = TrainingCheckpointFile(tmp_path, "t", 5, lambda: now[0])
    now[0] = 5
    assert checkpoint.is_due()
    checkpoint.save({"w": np.zeros(45_000_000 // 4, np.float32)}, {})
    now[0] = 5 + 224
    assert not checkpoint.is_due()
    now[0] = 5 + 225
    assert checkpoint.is_due()


@pytest.mark.parametrize("share, steps", [(0.5, 4), (1 / 3, 3), (0.01, 1), (0.99, 9)])
def test_a_shortened_training_does_its_share_of_the_steps_and_reports_it(tmp_path, share, steps):
    """9 steps in all: the first ones of the whole training, with a checkpoint in between, too."""
    outcome, done = train(tmp_path / "one", "fedprox", share=share)
    assert done == steps
    assert outcome.metrics["work"] == pytest.approx(steps / 9)
    if steps > 2:
        with pytest.raises(Killed):
            train(tmp_path / "killed", "fedprox", share=share, last=2)
        assert_same(train(tmp_path / "killed", "fedprox", share=share)[0], outcome)


def test_a_share_has_no_effect_on_methods_of_several_passes(tmp_path):
    outcome, done = train(tmp_path, "fedrep", share=0.1)
    assert done == BATCHES * (1 + EPOCHS)
    assert "work" not in outcome.metrics


def test_training_that_is_cancelled_stops_at_the_next_step():
    session = session_of("fedavg")
    asked = []

    def is_cancelled():
        asked.append(1)
        return len(asked) > 4

    control = TrainingControl(is_cancelled=is_cancelled)
    received = session.method.start(to_arrays(session._model, session._shared))
    with pytest.raises(TrainingCancelled, match="round 2"):
        session.train(received, ClientState(), round_number=2, rounds=4, evaluate=False, control=control)
    assert len(asked) == 5
