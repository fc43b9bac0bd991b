from __future__ import annotations

import math
import subprocess
import sys
import time

import numpy as np
import pytest
from feature_clouds import clouds

from edge_agent import heads
from edge_agent.core.errors import ConfigError, StateError, TrainingFailed
from edge_agent.heads import FitData, _layers, saved
from edge_agent.heads.dualfed import DualFedHeadParams as Params
from edge_agent.heads.dualfed import Trainer, contrastive, start

RNG = np.random.default_rng


def fitted(found: FitData, seed: int = 0, **params):
    head = heads.create("dualfed", {"epochs": 20, "batch_size": 16, "projector_width": 8, **params})
    head.fit(found, RNG(seed))
    return head


# --- layers ------------------------------------------------------------------------------------------------------


def torch_chain(depth, width, norm, size=6):
    import torch

    from edge_agent.methods.dualfed import DualFedParams as MethodParams
    from edge_agent.methods.dualfed import projector

    torch.manual_seed(0)
    return projector(size, MethodParams(projector_depth=depth, projector_width=width, projector_norm=norm))


def arrays_of(module, prefix):
    return {
        f"{prefix}.{name}": tensor.detach().numpy().copy()
        for name, tensor in module.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-9), (np.float32, 1e-5)])
@pytest.mark.parametrize("depth, norm", [(1, True), (2, True), (3, True), (1, False), (2, False), (3, False)])
def test_projector_and_classifier_are_torchs_over_twenty_steps(depth, norm, dtype, tolerance):
    """Biased variance normalises, unbiased enters the running one; weights, statistics and answers stay together."""
    import torch
    from torch.nn import functional as F

    from edge_agent.training.losses import supervised_contrastive

    # In float32 both sides round, and what a batch norm makes of it grows with each step: small ones, large batches.
    rate, weight, sizes = (0.05, 1.5, (20, 7)) if dtype == np.float64 else (0.002, 0.5, (64, 40))
    params = Params(
        lr=rate, momentum=0.5, weight_decay=1e-3, contrastive_weight=weight, projector_depth=depth, projector_width=9,
        projector_norm=norm,
    )  # fmt: skip
    kind = torch.float64 if dtype == np.float64 else torch.float32
    net = torch_chain(depth, 9, norm).to(kind)
    last = torch.nn.Linear(6, 3).to(kind)
    tensors = {**arrays_of(net, "projector"), **arrays_of(last, "personal_head")}
    trainer = Trainer(tensors, params, max(sizes))
    optimizer = torch.optim.SGD([*net.parameters(), *last.parameters()], lr=rate, momentum=0.5, weight_decay=1e-3)
    rng = RNG(1)
    for step in range(20):
        n = sizes[step % 3 == 2]
        inputs = rng.normal(size=(n, 6)).astype(dtype)
        labels = rng.integers(0, 3, n)
        u = net(torch.from_numpy(inputs))
        contrast = supervised_contrastive(u, torch.from_numpy(labels), 0.2, "out")
        value = F.cross_entropy(last(u), torch.from_numpy(labels)) + weight * contrast
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        assert trainer.step(inputs, labels) == pytest.approx(float(value.detach()), abs=tolerance)
    for name, expected in {**arrays_of(net, "projector"), **arrays_of(last, "personal_head")}.items():
        np.testing.assert_allclose(tensors[name], expected, atol=tolerance, rtol=tolerance, err_msg=name)
    inputs = rng.normal(size=(5, 6)).astype(dtype)
    found = _layers.chain_of(tensors, "projector", 5).forward(inputs, train=False)
    np.testing.assert_allclose(found, net.eval()(torch.from_numpy(inputs)).detach().numpy(), atol=10 * tolerance)


def test_fresh_arrays_have_the_methods_names_shapes_and_range():
    made = start(6, 3, Params(projector_width=9), RNG(0))
    expected = {**arrays_of(torch_chain(2, 9, norm=True), "projector")}
    shapes = {name: array.shape for name, array in expected.items()}
    shapes |= {"personal_head.weight": (3, 6), "personal_head.bias": (3,)}
    assert {name: array.shape for name, array in made.items()} == shapes
    assert all(array.dtype == np.float32 for array in made.values())
    for name, inputs in (("projector.0", 6), ("projector.3", 9), ("personal_head", 6)):
        for array in (made[f"{name}.weight"], made[f"{name}.bias"]):
            assert 0.3 / math.sqrt(inputs) < np.abs(array).max() <= 1 / math.sqrt(inputs)


@pytest.mark.parametrize("smallest", [2, 3, 9])
@pytest.mark.parametrize("count, size", [(1, 4), (4, 4), (5, 4), (6, 4), (7, 4), (9, 4), (3, 1)])
def test_batches_are_those_of_the_training_loop(count, size, smallest):
    from edge_agent.training.loops import batches

    ours = list(_layers.batches(count, size, RNG(3), smallest))
    theirs = batches(count, size, RNG(3), smallest=smallest)
    assert [rows.tolist() for rows in ours] == [rows.tolist() for rows in theirs]


def test_gradients_are_finite_differences():
    """Loss of one batch by each weight of projector and classifier, in float32: a step of 1/100 and a loose bound."""
    params = Params(lr=1.0, momentum=0.0, contrastive_weight=0.7, temperature=0.5, projector_width=5)
    tensors = start(4, 3, params, RNG(2))
    inputs = RNG(3).normal(size=(12, 4)).astype(np.float32)
    labels = np.arange(12) % 3

    def loss(name=None, place=None, by=0.0):
        copies = {key: array.copy() for key, array in tensors.items()}
        if name is not None:
            copies[name][place] += by
        return Trainer(copies, params, 12).step(inputs, labels)

    moved = {key: array.copy() for key, array in tensors.items()}
    Trainer(moved, params, 12).step(inputs, labels)  # with step size 1 and no momentum the change is the gradient
    for name in ("projector.0.weight", "projector.2.weight", "projector.3.bias", "projector.3.weight",
                 "projector.4.bias", "personal_head.weight", "personal_head.bias"):  # fmt: skip
        place = tuple(size // 2 for size in tensors[name].shape)
        slope = (loss(name, place, 0.01) - loss(name, place, -0.01)) / 0.02
        assert (tensors[name] - moved[name])[place] == pytest.approx(slope, abs=3e-3), name


# --- contrastive loss --------------------------------------------------------------------------------------------

PAIRS = np.float32([[1, 0], [1, 0], [0, 1], [0, 1]])


def test_two_pairs_by_hand():
    # tau 1: each anchor log(1 + 2/e) = .551445; tau .1: log(1 + 2 e^-10) = 9.0796e-5
    assert contrastive(PAIRS, np.array([0, 0, 1, 1]), 1.0)[0] == pytest.approx(0.551445, abs=1e-6)
    assert contrastive(PAIRS, np.array([0, 0, 1, 1]), 0.1)[0] == pytest.approx(9.0796e-5, abs=2e-6)


def test_three_of_a_kind_by_hand():
    # L_out = .894129, .748774, 1.139178 and 0 for the fourth, which has no positives and counts in the mean.
    vectors = np.float32([[1, 0], [0.6, 0.8], [0, 1], [-1, 0]])
    loss, pull = contrastive(vectors, np.array([0, 0, 0, 1]), 0.5)
    assert loss == pytest.approx((0.894129 + 0.748774 + 1.139178) / 4, abs=1e-6)
    for row, column in np.ndindex(4, 2):
        step = np.zeros_like(vectors)
        step[row, column] = 0.01
        sides = [contrastive(vectors + sign * step, np.array([0, 0, 0, 1]), 0.5)[0] for sign in (1, -1)]
        assert pull[row, column] == pytest.approx((sides[0] - sides[1]) / 0.02, abs=1e-3)


def test_one_class_of_equal_vectors_by_hand():
    loss, pull = contrastive(np.ones((5, 3), np.float32), np.zeros(5, int), 0.2)
    assert loss == pytest.approx(math.log(4), abs=1e-5)
    assert np.abs(pull).max() < 1e-6


def test_singletons_alone_pull_nothing():
    loss, pull = contrastive(RNG(0).normal(size=(4, 3)).astype(np.float32), np.arange(4), 0.05)
    assert (loss, np.abs(pull).max()) == (0, 0)


def test_turning_and_stretching_vectors_changes_nothing():
    rng = RNG(1)
    vectors = rng.normal(size=(9, 4)).astype(np.float32)
    labels = rng.integers(0, 3, 9)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    other = (vectors * rng.uniform(0.5, 3, (9, 1)) @ turn).astype(np.float32)
    assert contrastive(other, labels, 0.2)[0] == pytest.approx(contrastive(vectors, labels, 0.2)[0], abs=1e-5)


@pytest.mark.parametrize("temperature", [0.02, 0.2, 5.0])
def test_loss_and_gradient_are_torchs(temperature):
    import torch

    from edge_agent.training.losses import supervised_contrastive

    rng = RNG(2)
    vectors = rng.normal(size=(30, 8)).astype(np.float32)
    labels = rng.integers(0, 12, 30)
    leaf = torch.tensor(vectors, requires_grad=True)
    expected = supervised_contrastive(leaf, torch.from_numpy(labels), temperature, "out")
    expected.backward()
    loss, pull = contrastive(vectors, labels, temperature)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    np.testing.assert_allclose(pull, leaf.grad.numpy(), atol=2e-6, rtol=1e-4)


# --- head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("params", [{}, {"projector_depth": 1}, {"projector_norm": False}, {"ensemble": "logits"}])
def test_it_learns(params, shared):
    head = fitted(clouds(shared=shared), **params, contrastive_weight=2.0, lr=0.05)
    unseen = clouds(1)
    answer = head.predict_proba(unseen.features)
    assert (answer.argmax(axis=1) == unseen.labels).mean() > 0.9
    np.testing.assert_allclose(answer.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("kind", ["probs", "logits"])
def test_the_shared_classifier_answers_along(kind):
    found = clouds(shared=True)
    head = fitted(found, ensemble=kind, shared_c=None)
    alone = fitted(clouds())
    assert (alone.arrays["projector.0.weight"] == head.arrays["projector.0.weight"]).all()
    shared = found.features.astype(np.float64) @ found.global_head["weight"].T + found.global_head["bias"]
    own = alone.predict_proba(found.features)

    def softmax(x):
        return np.exp(x - x.max(axis=1, keepdims=True)) / np.exp(x - x.max(axis=1, keepdims=True)).sum(1, keepdims=True)

    expected = (own + softmax(shared)) / 2 if kind == "probs" else softmax(np.log(own) + shared)
    np.testing.assert_allclose(head.predict_proba(found.features), expected, atol=1e-5)


def test_the_shared_classifier_is_trained_on_the_device_as_head_tuned_is():
    found = clouds(shared=True)
    tuned = heads.create("tuned", {"c": 2.0})
    tuned.fit(found, np.random.default_rng(0))
    head = fitted(found, shared_c=2.0)
    np.testing.assert_array_equal(head.arrays["shared.weight"], tuned.arrays["weight"])
    np.testing.assert_array_equal(head.arrays["shared.bias"], tuned.arrays["bias"])


def test_a_shared_classifier_of_other_clients_does_not_spoil_the_answer():
    """Others have hardly any class but the first: as it came, its half of the answer outvotes the personal one."""
    found = clouds(shared=True)
    biased = {**found.global_head, "bias": np.where(np.arange(found.num_classes) == 0, 30, 0).astype(np.float32)}
    given = FitData(found.features, found.labels, found.num_classes, biased)
    answers = {c: fitted(given, shared_c=c).predict_proba(found.features).argmax(axis=1) for c in (None, 1)}
    right = {c: (answer == found.labels).mean() for c, answer in answers.items()}
    assert right[1] > right[None] + 0.2


def test_classes_that_never_occurred_get_nothing_and_the_shared_classifier_is_cut_to_the_rest():
    whole = clouds(classes=4, shared=True, count=80)
    rows = whole.labels != 1
    seen = FitData(whole.features[rows], whole.labels[rows], 4, whole.global_head)
    head = fitted(seen)
    answer = head.predict_proba(whole.features)
    assert (answer[:, 1] == 0).all()
    np.testing.assert_allclose(answer.sum(axis=1), 1, atol=1e-6)
    assert head.arrays["shared.weight"].shape == (3, 6)
    assert (answer.argmax(axis=1) == whole.labels)[rows].mean() > 0.9


def test_one_class_alone_is_the_answer():
    head = fitted(FitData(np.ones((4, 6), np.float32), np.full(4, 2), 3))
    assert head.predict_proba(np.zeros((2, 6), np.float32)).tolist() == [[0, 0, 1]] * 2


@pytest.mark.parametrize("count", [2, 3, 17, 33])
def test_few_samples_and_a_last_batch_of_one_are_enough(count):
    head = fitted(clouds(count=count, classes=2))
    assert np.isfinite(head.predict_proba(clouds().features)).all()


def test_many_rows_are_predicted_in_blocks_that_join():
    head = fitted(clouds(shared=True))
    rows = clouds(2, count=1500).features
    whole = head.predict_proba(rows)
    np.testing.assert_allclose(whole[700:800], head.predict_proba(rows[700:800]), atol=1e-6)
    assert head.predict_proba(rows[:0]).shape == (0, 3)


def test_the_generator_alone_decides():
    arrays = [fitted(clouds(), seed).arrays["projector.0.weight"] for seed in (0, 0, 1)]
    assert (arrays[0] == arrays[1]).all()
    assert (arrays[0] != arrays[2]).any()


def test_predicting_changes_nothing():
    head = fitted(clouds(shared=True))
    before = {name: array.copy() for name, array in head.arrays.items()}
    one = head.predict_proba(clouds().features)
    again = head.predict_proba(clouds().features)
    assert (one == again).all()
    assert all((head.arrays[name] == array).all() for name, array in before.items())


def test_from_disk_it_predicts_the_same_bits(tmp_path):
    head = fitted(clouds(shared=True))
    saved.save(tmp_path, saved.SavedHead(head, "ab" * 32, "fp32", ("a", "b", "c"), {}))
    found = saved.load(tmp_path).head
    assert (found.predict_proba(clouds().features) == head.predict_proba(clouds().features)).all()


@pytest.mark.parametrize("lacking", ["projector.0.bias", "projector.2.running_var", "personal_head.weight"])
def test_a_saved_head_that_lacks_an_array_is_refused(tmp_path, lacking):
    head = fitted(clouds())
    del head.arrays[lacking]
    saved.save(tmp_path, saved.SavedHead(head, "ab" * 32, "fp32", ("a", "b", "c"), {}))
    with pytest.raises(StateError, match="do not fit head 'dualfed'"):
        saved.load(tmp_path)


def test_a_lambda_that_makes_training_diverge_is_named():
    with pytest.raises(TrainingFailed, match=r"contrastive_weight \(lambda\) 1e\+38"):
        fitted(clouds(), contrastive_weight=1e38, temperature=1e-3)
    with pytest.raises(TrainingFailed, match=r"lr 1e\+30"):
        fitted(clouds(), lr=1e30, epochs=3)


def test_impossible_parameters_are_refused():
    with pytest.raises(ConfigError, match=r"(?s)temperature.*batch_size"):
        heads.create("dualfed", {"temperature": 0, "batch_size": 1})


BUDGET = """
import os
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
import sys, time
from pathlib import Path
import numpy as np
from edge_agent import heads
from edge_agent.heads import FitData
rng = np.random.default_rng(0)
labels = np.arange(600) % 10
features = rng.standard_normal((600, 512), dtype=np.float32)
shared = {"weight": np.zeros((10, 512), np.float32), "bias": np.zeros(10, np.float32)}
data = FitData(features, labels, 10, shared)
begin = time.process_time()
heads.create(sys.argv[1]).fit(data, np.random.default_rng(0))
seconds = time.process_time() - begin
# Not getrusage: its peak begins with that of the process that started this one.
peak = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
print(seconds, int(peak) / 1024, "torch" in sys.modules)
"""


@pytest.mark.bench
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
@pytest.mark.parametrize("name, budget_s", [("dualfed", 1.0), ("fedpick", 1.5)])
def test_six_hundred_samples_of_512_features_fit_in_time_and_memory(name, budget_s):
    done = subprocess.run([sys.executable, "-c", BUDGET, name], capture_output=True, text=True, check=True, timeout=60)
    seconds, megabytes, has_torch = done.stdout.split()
    print(f"{name}: {float(seconds):.2f} s, {float(megabytes):.1f} MB")
    assert float(seconds) <= budget_s
    assert float(megabytes) <= 60
    assert has_torch == "False"


def test_fitting_takes_seconds_at_most_even_on_a_busy_machine():
    begin = time.process_time()
    fitted(clouds(count=600, size=64), epochs=50, batch_size=256, projector_width=64)
    assert time.process_time() - begin < 5
