"""FedRIR's two stages against the same steps written out, and what its distillation does."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from paper_methods import FEDRIR_MODES, FEDRIR_PARTS, fedrir, is_statistic, parts_of, tensors_of
from torch.nn import functional as F

from edge_agent.methods import fedrir as fedrir_module
from edge_agent.training.networks import SpecificEncoder
from edge_agent.wire.tensors import encode

# --- the two stages ----------------------------------------------------------------------------------------------


def test_mcsl_trains_the_client_specific_encoder_and_the_generator_alone(federation):
    fed = federation(fedrir())
    client = fed.clients["a"]
    before = tensors_of(client.model)
    others = ("encoder", "head", "distiller")
    still = encode(tensors_of(client.model, *others))
    fed.method.learn_specific(client)
    assert encode(tensors_of(client.model, *others)) == still
    after = tensors_of(client.model, "specific", "generator")
    assert all(not np.array_equal(array, before[name]) for name, array in after.items())
    assert client.log["loss.mcsl"] > 0


@FEDRIR_MODES
def test_the_reported_loss_is_the_cross_entropy_and_its_terms_add_up(federation, mode):
    """One batch of all samples: the loss is what the model answers before the step, in train mode."""
    fed = federation(fedrir(id_mode=mode, batch_size=100, id_weight=0.5, local_epochs=1))
    client = fed.clients["a"]
    twin = copy.deepcopy(client.model).train()
    both = torch.cat([twin.encoder(client.train_inputs), twin.part("specific")(client.train_inputs)[0]], 1)
    expected = F.cross_entropy(twin.head(both), client.train_labels).item()
    fed.method.distill(client)
    told = client.log
    assert told["loss"] == pytest.approx(expected, rel=1e-5)
    assert told["loss.total"] == pytest.approx(told["loss"] + 0.5 * told["loss.id"], rel=1e-5)
    assert told["loss.id"] != 0


def test_a_negative_misfit_does_not_make_the_loss_negative(federation):
    """The official form rewards a predictable c without end: its sum fell to -453 where the cross entropy was 0.6."""
    fed = federation(fedrir(id_mode="official", id_weight=1.0, lr=0.01, local_epochs=30))
    client = fed.clients["a"]
    fed.method.distill(client)
    assert client.log["loss.total"] < 0 < client.log["loss"]


@FEDRIR_MODES
@pytest.mark.parametrize("frozen_bn", ["train", "eval"])
def test_id_leaves_the_client_specific_encoder_bit_for_bit_but_for_statistics(federation, mode, frozen_bn):
    fed = federation(fedrir(id_mode=mode, frozen_bn=frozen_bn))
    client = fed.clients["a"]
    before = tensors_of(client.model)
    fed.method.distill(client)
    moved = {name for name, array in tensors_of(client.model).items() if not np.array_equal(array, before[name])}
    frozen = {name for name in moved if name.startswith(("specific.", "generator."))}
    assert not {name for name in frozen if not is_statistic(name)}
    assert bool(frozen) is (frozen_bn == "train")
    trained = {name for name in before if name.startswith(("encoder.", "head.", "distiller."))}
    assert trained <= moved | {name for name in trained if is_statistic(name)}
    assert all(weight.requires_grad for weight in client.model.parameters())


def official_loss(model, inputs, labels):
    shared = model.encoder(inputs)
    own = model.part("specific")(inputs)[0].detach()
    mean, logvar = model.part("distiller")(shared)
    misfit = ((own - mean) ** 2 / logvar.exp() + logvar).sum(1).mean()
    return F.cross_entropy(model.head(torch.cat([shared, own], 1)), labels) + misfit


def train_official_by_hand(model, inputs, labels):
    optimizer = torch.optim.Adam(
        [p for part in ("encoder", "head", "distiller") for p in model.part(part).parameters()], lr=5e-4
    )
    official_loss(model, inputs, labels).backward()
    optimizer.step()


def train_vclub_by_hand(model, inputs, labels):
    shared = model.encoder(inputs)
    own = model.part("specific")(inputs)[0].detach()
    idm = torch.optim.Adam(model.part("distiller").parameters(), lr=5e-4)
    mean, logvar = model.part("distiller")(own)
    ((shared.detach() - mean) ** 2 / logvar.exp() + logvar).sum(1).mean().backward()
    idm.step()
    mean, logvar = (moment.detach() for moment in model.part("distiller")(own))
    q = torch.distributions.Normal(mean, (0.5 * logvar).exp())
    everybody = torch.stack([q.log_prob(row.expand_as(mean)).sum(1) for row in shared])  # (j, i)
    bound = (q.log_prob(shared).sum(1) - everybody.mean(0)).mean()
    optimizer = torch.optim.Adam([*model.encoder.parameters(), *model.head.parameters()], lr=5e-4)
    optimizer.zero_grad()
    value = F.cross_entropy(model.head(torch.cat([shared, own], 1)), labels) + bound.clamp(min=0)
    gradients = torch.autograd.grad(value, [p for group in optimizer.param_groups for p in group["params"]])
    for parameter, gradient in zip([*model.encoder.parameters(), *model.head.parameters()], gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("mode, by_hand", [("official", train_official_by_hand), ("vclub", train_vclub_by_hand)])
def test_one_step_of_id_equals_the_same_step_written_out(federation, mode, by_hand):
    fed = federation(fedrir(id_mode=mode, batch_size=100, lr=5e-4, id_weight=1.0))
    client = fed.clients["a"]
    twin = copy.deepcopy(client.model).train()
    by_hand(twin, client.train_inputs, client.train_labels)
    fed.method.distill(client)
    expected = tensors_of(twin)
    for name, array in tensors_of(client.model).items():
        np.testing.assert_allclose(array, expected[name], atol=3e-5, rtol=1e-4, err_msg=name)


def test_one_step_of_mcsl_equals_the_same_step_written_out(federation):
    fed = federation(fedrir(batch_size=100, lr=5e-4, mask_ratio=0.0, kld_weight=0.3))
    client = fed.clients["a"]
    twin = copy.deepcopy(client.model).train()
    draws = torch.Generator()
    draws.set_state(client.generator.get_state())
    order = copy.deepcopy(client.rng).permutation(client.samples)
    inputs = client.train_inputs[torch.from_numpy(order)]
    mean, logvar = twin.part("specific")(inputs)
    redrawn = twin.part("generator")(mean + torch.randn(mean.shape, generator=draws) * (logvar / 2).exp())
    kld = (-0.5 * (1 + logvar - mean**2 - logvar.exp())).sum(1).mean()
    parameters = [*twin.part("specific").parameters(), *twin.part("generator").parameters()]
    (((redrawn - inputs) ** 2).mean() + 0.3 * kld).backward()
    torch.optim.Adam(parameters, lr=5e-4).step()
    fed.method.learn_specific(client)
    expected = tensors_of(twin)
    for name, array in tensors_of(client.model).items():
        np.testing.assert_allclose(array, expected[name], atol=3e-5, rtol=1e-4, err_msg=name)


def test_masks_change_what_mcsl_learns_from_and_not_what_it_learns_to_draw(federation, monkeypatch):
    seen = []
    drawn = []
    forward = SpecificEncoder.forward
    monkeypatch.setattr(SpecificEncoder, "forward", lambda self, x: (seen.append(x), forward(self, x))[1])
    monkeypatch.setattr(F, "mse_loss", lambda a, b, loss=F.mse_loss: (drawn.append(b), loss(a, b))[1])
    fed = federation(fedrir(batch_size=100, mask_ratio=0.5))
    fed.method.learn_specific(fed.clients["a"])
    assert [(x == 0).float().mean().item() for x in seen] == [0.5]
    assert (drawn[0] != 0).all()


def test_id_sees_whole_images(federation, monkeypatch):
    seen = []
    forward = SpecificEncoder.forward
    monkeypatch.setattr(SpecificEncoder, "forward", lambda self, x: (seen.append(x), forward(self, x))[1])
    fed = federation(fedrir(batch_size=100))
    fed.method.distill(fed.clients["a"])
    assert all((x != 0).all() for x in seen)


def test_statistics_of_the_encoder_stay_its_clients_own(federation):
    fed = federation(fedrir())
    fed.run_round()
    name = "encoder.layers.1.running_mean"
    assert not np.array_equal(fed.personal("a")[name], fed.personal("b")[name])


# --- information distillation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", [True, False])
def test_an_estimate_below_zero_pulls_at_nothing(federation, monkeypatch, floor):
    monkeypatch.setattr(fedrir_module, "vclub", lambda shared, *_: -shared.square().sum())
    encoders = []
    for weight in (1.0, 0.0):
        fed = federation(fedrir(id_mode="vclub", id_weight=weight, id_floor=floor))
        fed.method.distill(fed.clients["a"])
        encoders.append(encode(tensors_of(fed.clients["a"].model, "encoder", "head")))
    assert (encoders[0] == encoders[1]) is floor


@FEDRIR_MODES
def test_the_weight_of_distillation_matters(federation, mode):
    one, other = (federation(fedrir(id_mode=mode, id_weight=weight, idm_steps=30)) for weight in (0.0, 1.0))
    for fed in (one, other):
        fed.run_round()
    assert encode(one.state) != encode(other.state)


def test_negatives_and_inner_steps_are_used(federation):
    states = []
    for params in ({}, {"negatives": "permutation"}, {"idm_steps": 4}):
        fed = federation(fedrir(id_mode="vclub", **params), seed=1)
        fed.run_round()
        states.append(encode({**fed.state, **fed.personal("a")}))
    assert len(set(states)) == 3


@FEDRIR_MODES
def test_without_distillation_the_loss_is_cross_entropy(federation, mode):
    without = federation(fedrir(id_mode=mode, without_id=True))
    weightless = federation(fedrir(id_mode="official", id_weight=0.0))
    assert parts_of(without.clients["a"].model) == FEDRIR_PARTS - {"distiller"}
    for fed in (without, weightless):
        client = fed.clients["a"]
        client.model.load_state_dict(weightless.clients["a"].model.state_dict(), strict=False)
        fed.method.distill(client)
    one, other = (tensors_of(fed.clients["a"].model, "encoder", "head") for fed in (without, weightless))
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], atol=1e-6, err_msg=name)


def test_without_mcsl_the_head_sees_shared_features_only(federation):
    fed = federation(fedrir(without_mcsl=True), rounds=1).run()
    client = fed.clients["a"]
    assert parts_of(client.model) == {"encoder", "head"}
    assert client.model.head.in_features == 12
    assert set(client.log) == {"loss"}
