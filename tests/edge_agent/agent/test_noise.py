"""Clipping and noise of one update, and the ledger of a device."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from coordinator.config import DifferentialPrivacyConfig
from edge_agent import methods
from edge_agent.core.config import PrivacyConfig
from edge_agent.core.errors import PrivacyRefused, StateError, TrainingFailed
from edge_agent.heads.fedpac import extras
from edge_agent.privacy.accountant import cost, epsilon_of
from edge_agent.privacy.noise import Mechanism
from edge_agent.privacy.policy import LEDGER_FILE, Ledger
from edge_agent.wire.messages.down import Noise

FEDAVG = methods.create("fedavg")
FEDPAC = methods.create("fedpac")
RUN = Noise(clip=2.0, clip_statistics=6.0, noise=0.5)


def rng(seed=0):
    return np.random.default_rng(seed)


def test_a_change_that_is_too_long_is_shortened_to_clip_over_all_tensors_together():
    received = {"encoder.w": np.float32([1, 1]), "head.w": np.float32([0, 0])}
    update = {"encoder.w": np.float32([4, 1]), "head.w": np.float32([0, 4])}  # change (3, 0, 0, 4), norm 5
    made = Mechanism(2.5, 1.0, 0.0).apply(FEDAVG, update, received, rng())
    assert made["encoder.w"].tolist() == [2.5, 1.0]
    assert made["head.w"].tolist() == [0.0, 2.0]
    assert {array.dtype for array in made.values()} == {np.dtype(np.float32)}


def test_a_short_change_stays_as_it_is():
    received = {"head.w": np.float32([1, 2])}
    update = {"head.w": np.float32([1.5, 2])}
    assert Mechanism(2.5, 1.0, 0.0).apply(FEDAVG, update, received, rng())["head.w"].tolist() == [1.5, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_an_update_that_cannot_be_clipped_does_not_leave_at_all(bad):
    """Beside NaN a secret would leave unclipped. What float32 holds has a norm in float64."""
    received = {"head.w": np.float32([0, 0])}
    update = {"head.w": np.float32([bad, 7])}
    mechanism = Mechanism(1.0, 1.0, 0.0)
    if np.isfinite(bad):
        assert mechanism.apply(FEDAVG, update, received, rng())["head.w"].tolist() == [
            1.0,
            pytest.approx(0.0, abs=1e-30),
        ]
    else:
        with pytest.raises(TrainingFailed, match="nothing of it leaves"):
            mechanism.apply(FEDAVG, update, received, rng())


def test_noise_is_gaussian_of_noise_times_clip():
    received = {"head.w": np.zeros(200_000, np.float32)}
    made = Mechanism(2.0, 1.0, 0.75).apply(FEDAVG, dict(received), received, rng(3))["head.w"]
    assert stats.kstest(made / 1.5, "norm").pvalue > 0.01


def test_variances_stay_variances_and_what_is_counted_does_not_leave():
    received = {"encoder.norm.running_var": np.full(1000, 0.1, np.float32)}
    update = {"encoder.norm.running_var": np.full(1000, 0.2, np.float32)}
    mechanism = Mechanism(1.0, 1.0, 5.0)
    assert mechanism.apply(FEDAVG, update, received, rng())["encoder.norm.running_var"].min() == 0.0
    counts = {"prototypes.counts": np.array([3, 4])}
    with pytest.raises(PrivacyRefused, match=r"'prototypes\.counts' of method 'fedavg' is counted"):
        mechanism.apply(FEDAVG, counts, counts, rng())


def fedpac_update(seed=0, samples=60):
    """Features around three of four class means, as FedPAC's client sends them."""
    labels = rng(seed).integers(0, 3, samples)
    features = rng(seed).normal(size=(samples, 5)) + labels[:, None]
    head = {"head.weight": rng(seed).normal(size=(4, 5)).astype(np.float32), "head.bias": np.zeros(4, np.float32)}
    statistics = extras(head, features, features, labels, {"min_class_count": 2})
    return {"encoder.w": np.ones(3, np.float32), **statistics}


@pytest.mark.parametrize("noise", [0.0, 0.1, 3.0])
def test_noisy_statistics_of_fedpac_are_such_that_the_coordinator_accepts(noise):
    update = fedpac_update()
    made = Mechanism(1.0, 10.0, noise).apply(FEDPAC, update, {"encoder.w": np.zeros(3, np.float32)}, rng(1))
    assert FEDPAC.objection(made) == ""
    assert {n: (a.shape, a.dtype) for n, a in made.items()} == {n: (a.shape, a.dtype) for n, a in update.items()}


def test_statistics_of_fedpac_move_by_their_own_clip_and_noise_by_the_square_root_of_two_groups():
    """Without data the arrays are noise alone: of 0.5 * 6 * sqrt(2) = 4.243 for each number of the statistics."""
    update = {name: np.zeros_like(array) for name, array in fedpac_update().items()}
    bias = []
    for seed in range(400):
        made = Mechanism(2.0, 6.0, 0.5).apply(FEDPAC, update, {"encoder.w": np.zeros(3, np.float32)}, rng(seed))
        bias.extend(made["extra.head.bias"])
    assert stats.kstest(np.array(bias) / (0.5 * 6 * math.sqrt(2)), "norm").pvalue > 0.01
    norm = lambda arrays: math.sqrt(sum(float((np.float64(a) ** 2).sum()) for a in arrays))
    clipped = Mechanism(2.0, 0.5, 0.0).apply(FEDPAC, fedpac_update(), {"encoder.w": np.zeros(3, np.float32)}, rng())
    shares = {n: a / 1000 if n == "extra.counts" else a for n, a in clipped.items() if n.startswith("extra.")}
    assert norm(shares.values()) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("method", ["scaffold", "spherefed", "fedkd", "fedfomo"])
def test_methods_whose_arrays_have_no_noise_defined_are_refused(method):
    made = methods.create(method)
    update = {"head.w": np.zeros(2, np.float32), "extra.x": np.zeros(2)}
    with pytest.raises(PrivacyRefused, match=r"sends 'extra\.x'"):
        Mechanism(1.0, 1.0, 1.0).apply(made, update, {"head.w": np.zeros(2, np.float32)}, rng())


def test_the_stricter_of_device_and_run_counts():
    of = lambda **policy: Mechanism.of(PrivacyConfig(**policy), RUN)
    assert of() == Mechanism(2.0, 6.0, 0.5)
    assert of(noise=3.0) == Mechanism(2.0, 6.0, 3.0)
    assert of(clip=5.0, noise=0.1) == Mechanism(2.0, 5.0, 0.6)  # 0.5 * 6 / 5: the round counts on noise of 0.5 * 6
    assert of(clip=1.0) == Mechanism(1.0, 1.0, 3.0)
    assert Mechanism.of(PrivacyConfig(), None) is None
    assert Mechanism.of(PrivacyConfig(clip=1.0, noise=2.0), None) == Mechanism(1.0, 1.0, 2.0)


@pytest.mark.parametrize("policy", [{"noise": 1.0}, {"epsilon": 3.0}])
def test_a_policy_that_wants_noise_without_any_clip_refuses(policy):
    with pytest.raises(PrivacyRefused, match=r"set privacy\.clip"):
        Mechanism.of(PrivacyConfig(**policy), None)


def test_ledger_counts_over_restarts_and_ends_before_the_budget_is_exceeded(tmp_path):
    policy = PrivacyConfig(epsilon=4.0, delta=1e-5)
    done = 0
    with pytest.raises(PrivacyRefused, match=r"privacy\.epsilon allows 4"):
        for _ in range(100):
            Ledger(tmp_path, policy).spend(5.0)
            done += 1
    assert epsilon_of(done * cost(5.0), 1e-5) <= 4.0 < epsilon_of((done + 1) * cost(5.0), 1e-5)
    figures = Ledger(tmp_path, policy).figures()
    assert figures["epsilon"] + figures["epsilon_left"] == pytest.approx(4.0)


def test_ledger_with_a_limit_lets_nothing_out_without_noise(tmp_path):
    with pytest.raises(PrivacyRefused, match="would be inf"):
        Ledger(tmp_path, PrivacyConfig(epsilon=4.0)).spend(0.0)
    assert Ledger(tmp_path, PrivacyConfig()).spend(0.0) == {}


@pytest.mark.parametrize("content", ["{", "[]", '{"cost": -1, "updates": 0}', '{"cost": "no", "updates": 1}', "{}",
                                     '{"cost": NaN, "updates": 1}'])  # fmt: skip
def test_damaged_ledger_lets_nothing_out(tmp_path, content):
    (tmp_path / LEDGER_FILE).write_text(content)
    with pytest.raises(StateError):
        Ledger(tmp_path, PrivacyConfig(epsilon=4.0)).spend(1.0)


def test_ledger_is_a_small_json_file(tmp_path):
    Ledger(tmp_path, PrivacyConfig()).spend(2.0)
    assert json.loads((tmp_path / LEDGER_FILE).read_text()) == {"cost": 0.25, "updates": 1, "without_noise": 0}


def test_ledger_of_an_earlier_version_counts_on(tmp_path):
    (tmp_path / LEDGER_FILE).write_text('{"cost": 0.25, "updates": 1}')
    ledger = Ledger(tmp_path, PrivacyConfig())
    ledger.note_without_noise()
    assert (ledger.spent(), ledger.figures()["updates_without_noise"]) == (0.25, 1)


@pytest.mark.parametrize("read", [lambda noise: PrivacyConfig(noise=noise),
                                  lambda noise: DifferentialPrivacyConfig(clip=1.0, noise=noise),
                                  lambda noise: Noise(clip=1.0, clip_statistics=1.0, noise=noise / 1000)])  # fmt: skip
def test_noise_that_protects_nothing_is_a_mistake(read):
    """Its cost would be infinite, or overflow: 1e-200 squared is 0."""
    for noise in (1e-200, 9.9e-4):
        with pytest.raises(ValidationError, match="protects nothing"):
            read(noise)
    assert [read(noise).noise > 0 for noise in (0, 1e-3)] == [False, True]


def test_an_infinite_epsilon_is_told_as_none(tmp_path):
    (tmp_path / LEDGER_FILE).write_text('{"cost": 1e300, "updates": 1}')
    ledger = Ledger(tmp_path, PrivacyConfig())
    assert ledger.figures()["epsilon"] is None
    assert ledger.spend(1.0) == {}
