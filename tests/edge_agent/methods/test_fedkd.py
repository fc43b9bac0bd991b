from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_agent import methods
from edge_agent.methods.fedkd import compressed, learned_from, mutual_loss, smallest_rank, truncated

QUICK = {"batch_size": 4}


@pytest.mark.parametrize("energy, rank", [(0.6, 1), (0.9, 2), (0.93, 3), (1.0, 3)])
def test_the_smallest_rank_with_enough_energy_by_hand(energy, rank):
    # Squares 9, 4, 1 of 14: .643, .929, 1.
    assert smallest_rank(np.array([3.0, 2.0, 1.0]), energy) == rank


def test_a_matrix_that_needs_every_singular_value_keeps_them():
    # All equal: nine tenths of the energy of ten values take nine, 95 % of them all ten.
    matrix = np.eye(10, dtype=np.float32)
    assert np.linalg.matrix_rank(truncated(matrix, 0.9)[0]) == 9
    np.testing.assert_array_equal(truncated(matrix, 0.95)[0], matrix)


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1.0))
def test_what_is_kept_holds_the_energy_and_one_rank_less_would_not(seed, energy):
    matrix = np.random.default_rng(seed).standard_normal((5, 7)).astype(np.float32)
    low, _ = truncated(matrix, energy)
    whole = np.square(matrix, dtype=np.float64).sum()
    assert np.square(low, dtype=np.float64).sum() >= energy * whole * (1 - 1e-5)
    rank = np.linalg.matrix_rank(low, tol=1e-4)
    less = np.linalg.svd(matrix, compute_uv=False)[: rank - 1].astype(np.float64)
    assert np.square(less).sum() < energy * whole


def test_all_energy_is_lossless_and_vectors_are_never_touched():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((4, 3, 2, 2)).astype(np.float32)
    vector = np.float32([1, 2, 3])
    assert truncated(matrix, 1.0)[0] is matrix
    assert truncated(vector, 0.1) == (vector, 12)
    assert not truncated(np.zeros((3, 4), np.float32), 0.9)[0].any()


def test_bytes_are_those_of_the_factors_or_of_the_matrix_if_fewer():
    # Rank 1 of (8, 20): 1 * (8 + 20 + 1) numbers; full rank: 8 * 29 numbers against 160, so 160.
    outer = np.outer(np.arange(1, 9), np.arange(1, 21)).astype(np.float32)
    assert truncated(outer, 0.9)[1] == 29 * 4
    assert truncated(np.random.default_rng(0).standard_normal((8, 20)).astype(np.float32), 1.0)[1] == 160 * 4
    found, taken = compressed({"a": outer, "b": np.zeros(5, np.float32)}, {"a": outer}, 0.9)
    np.testing.assert_array_equal(found["a"], outer)
    assert taken == 20


@pytest.mark.parametrize("decomposed", ["updates", "weights"])
def test_what_an_update_carries_is_of_low_rank(federation, decomposed):
    method = methods.create("fedkd", {**QUICK, "decomposed": decomposed, "energy_start": 0.5, "energy_end": 0.5})
    fed = federation(method)
    received = {name: array.copy() for name, array in method.broadcast(fed.state).items()}
    sent = fed.run_round()[0].tensors
    base = received["head.weight"] if decomposed == "updates" else 0.0
    assert 1 <= np.linalg.matrix_rank(sent["head.weight"] - base, tol=1e-5) < 3
    log = fed.clients["a"].log
    assert 0 < log["svd.up_bytes"] < log["svd.down_bytes"]  # nothing is cut before the first round


def test_with_all_energy_the_student_is_plainly_averaged(federation):
    fed = federation(methods.create("fedkd", {**QUICK, "energy_start": 1.0, "energy_end": 1.0}))
    updates = fed.run_round()
    mean = np.mean([update.tensors["head.weight"].astype(np.float64) for update in updates], axis=0)
    np.testing.assert_allclose(fed.method.broadcast(fed.state)["head.weight"], mean, rtol=1e-5, atol=1e-6)


def test_the_broadcast_is_cut_to_the_energy_that_clients_named(federation):
    fed = federation(methods.create("fedkd", {**QUICK, "energy_start": 0.4, "energy_end": 0.4}))
    before = fed.state["head.weight"].copy()
    fed.run_round()
    change = fed.method.broadcast(fed.state)["head.weight"] - before
    expected, _ = truncated(fed.state["head.weight"] - before, 0.4)
    np.testing.assert_allclose(change, expected, atol=1e-6)
    assert np.linalg.matrix_rank(change, tol=1e-5) == 1
    assert not [name for name in fed.method.broadcast(fed.state) if name.startswith("server.")]


def test_energy_rises_in_a_line_over_the_rounds(federation):
    fed = federation(methods.create("fedkd", {**QUICK, "energy_start": 0.5, "energy_end": 0.9}), rounds=3)
    energies = [fed.run_round(["a"])[0].tensors["extra.energy"][0] for _ in range(3)]
    np.testing.assert_allclose(energies, [0.5, 0.7, 0.9])


def test_an_energy_beyond_all_is_objected_to():
    method = methods.create("fedkd")
    assert method.objection({"extra.energy": np.array([0.95])}) == ""
    for energy in (0.0, 1.5, -1.0):
        assert "extra.energy" in method.objection({"extra.energy": np.array([energy])})


def test_the_divergence_by_hand():
    # KL((.7, .3) || (.5, .5)) = .7 ln 1.4 + .3 ln .6 = .082283.
    one = torch.log(torch.tensor([[0.5, 0.5]])).requires_grad_()
    other = torch.log(torch.tensor([[0.7, 0.3]]))
    other.requires_grad_()
    value = learned_from(one, other)
    assert value.item() == pytest.approx(0.082283, abs=1e-6)
    torch.autograd.backward(value)
    assert one.grad is not None
    assert other.grad is None


def test_each_network_learns_from_its_own_loss(federation):
    """Gradients of the sum equal those of L_t for the teacher and of L_s for the student, the other side a constant."""
    client = federation(methods.create("fedkd")).clients["b"]
    model = client.model.double().eval()
    (x, y) = (client.train_inputs.double(), client.train_labels)
    torch.autograd.backward(mutual_loss(model)(x, y))
    teacher = model.part("teacher")
    ce = torch.nn.functional.cross_entropy
    z_s = model.features(x)
    z_t = teacher.features(x)
    logits_s = model.head(z_s)
    logits_t = teacher.head(z_t)
    p_s = logits_s.softmax(1)
    p_t = logits_t.softmax(1)
    doubt = (ce(logits_s, y) + ce(logits_t, y)).detach()
    seen = z_s @ model.part("projection").weight.T
    mse = (z_t - seen).square().mean()
    own = {
        "teacher": ce(logits_t, y) + ((p_s * (p_s / p_t).log()).sum(1).mean() + mse) / doubt,
        "student": ce(logits_s, y) + ((p_t * (p_t / p_s).log()).sum(1).mean() + mse) / doubt,
    }
    groups = {"teacher": list(teacher.parameters()), "student": [*model.encoder.parameters(), *model.head.parameters()]}
    for who, weights in groups.items():
        expected = torch.autograd.grad(own[who], weights, retain_graph=True)
        for weight, slope in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.grad, slope)


def test_the_teacher_may_be_another_network_and_never_travels(federation):
    method = methods.create("fedkd", {**QUICK, "teacher_encoder": "linear", "teacher_params": {"feature_dim": 5}})
    fed = federation(method, rounds=1).run()
    assert tuple(fed.clients["a"].model.part("projection").weight.shape) == (5, 12)
    assert {name.split(".")[0] for name in fed.shared} == {"encoder", "head"}
    assert {name.split(".")[0] for name in fed.personal("a")} >= {"teacher", "projection"}
