from __future__ import annotations

import copy
import logging
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_agent import heads, methods
from edge_agent.errors import ConfigError, TrainingFailed
from edge_agent.heads._selection import fisher_score, keep_top, mistake_of_share
from edge_agent.task import Task, WindowInput
from edge_agent.training.gumbel import cut, drawn_mask, gumbel, mask_noise, steady_mask
from edge_agent.training.loops import features_of
from edge_agent.training.losses import negative_entropy, symmetric_divergence
from edge_agent.training.parts import to_arrays
from edge_agent.wire.tensors import encode

QUICK = {"local_epochs": 1, "batch_size": 4}
TINY = Task(
    input=WindowInput(channels=1, length=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 6},
)
LOCAL = {"mask", "relevant_head", "irrelevant_head"}


def fedpick(**params):
    return methods.create("fedpick", {**QUICK, **params})


def parts_of(names):
    return {name.split(".")[0] for name in names}


# --- what travels ------------------------------------------------------------------------------------------------


def test_no_batch_norm_and_nothing_of_the_selection_travels(federation):
    fed = federation(fedpick(), rounds=1)
    norms = {f"encoder.{name}" for name, module in fed.clients["a"].model.encoder.named_modules()
             if isinstance(module, torch.nn.BatchNorm2d)}  # fmt: skip
    assert norms
    for update in fed.run_round():
        assert parts_of(update.tensors) == {"encoder", "head"}
        assert not [name for name in update.tensors if name.rpartition(".")[0] in norms]
    assert parts_of(fed.personal("a")) == {"encoder", *LOCAL}


@pytest.mark.parametrize(
    "params, parts, norm",
    [
        ({"share_mask": True}, {"encoder", "head", "mask"}, False),
        ({"share_local_heads": True}, {"encoder", "head", "relevant_head", "irrelevant_head"}, False),
        ({"share_norm": True}, {"encoder", "head"}, True),
    ],
)
def test_what_the_ablations_share_travels(federation, params, parts, norm):
    fed = federation(fedpick(**params), rounds=2).run()
    assert parts_of(fed.state) == parts
    assert any(name.endswith("running_mean") for name in fed.state) is norm


def test_sharing_norm_in_one_method_leaves_others_alone():
    assert (fedpick(share_norm=True).norm, fedpick().norm) == ("global", "local_all")


def test_a_fisher_mask_cannot_be_shared():
    with pytest.raises(ConfigError, match="share_mask with selector 'fisher'"):
        fedpick(share_mask=True, selector="fisher")


# --- mask --------------------------------------------------------------------------------------------------------

SCORES = torch.tensor([0.3, -0.2])
FIRST, SECOND = torch.tensor([0.5, 0.9]), torch.tensor([0.2, 0.4])


def test_gumbel_noise_by_hand():
    # -log(-log .5) = -log .693147 = .366513; -log(-log .2) = -.475885
    torch.testing.assert_close(gumbel(FIRST), torch.tensor([0.366513, 2.250367]), atol=1e-6, rtol=0)
    torch.testing.assert_close(gumbel(SECOND), torch.tensor([-0.475885, 0.087422]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature, expected", [(1.0, [0.758120, 0.876851]), (0.5, [0.907610, 0.980657])])
def test_the_soft_mask_by_hand(temperature, expected):
    noise = gumbel(FIRST) - gumbel(SECOND)
    found = drawn_mask(SCORES, noise, temperature=temperature, hard=False)
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


def test_the_hard_mask_goes_forward_and_the_soft_ones_gradient_back():
    scores = SCORES.clone().requires_grad_()
    mask = drawn_mask(scores, gumbel(FIRST) - gumbel(SECOND), temperature=1.0)
    assert mask.tolist() == [1.0, 1.0]
    mask.sum().backward()
    # m (1 - m) / T of .758120 and .876851
    torch.testing.assert_close(scores.grad, torch.tensor([0.183374, 0.107983]), atol=1e-6, rtol=0)


def test_the_hard_mask_is_exactly_zero_or_one_and_splits_features_without_loss():
    generator = torch.Generator().manual_seed(0)
    scores, z = torch.randn(200, 30, generator=generator) * 5, torch.randn(200, 30, generator=generator)
    mask = drawn_mask(scores, mask_noise(scores, generator), temperature=0.3)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(z * mask + z * (1 - mask), z)


def test_at_inference_the_mask_is_the_sign_of_the_logit_and_draws_nothing():
    tiny = torch.tensor([0.3, -0.2, 0.0, 1e-30, -1e-30])
    for temperature in (0.1, 1.0, 7.0):
        assert steady_mask(tiny, temperature=temperature).tolist() == [1, 0, 0, 1, 0]
    soft = steady_mask(SCORES, temperature=2.0, hard=False)
    torch.testing.assert_close(soft, torch.sigmoid(SCORES / 2))


@pytest.mark.parametrize("threshold, picks", [(0.5, [1, 0]), (0.6, [0, 0]), (0.4, [1, 1])])
def test_a_threshold_is_one_of_the_soft_mask(threshold, picks):
    # sigmoid(.3) = .574, sigmoid(-.2) = .450
    assert steady_mask(SCORES, temperature=1.0, threshold=threshold).tolist() == picks
    assert 1 / (1 + math.exp(-cut(2.0, threshold) / 2.0)) == pytest.approx(threshold)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_a_feature_is_picked_with_probability_sigmoid_at_any_temperature(temperature):
    generator = torch.Generator().manual_seed(3)
    scores = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0]).expand(40_000, 5)
    share = drawn_mask(scores, mask_noise(scores, generator), temperature=temperature).mean(dim=0)
    torch.testing.assert_close(share, torch.sigmoid(scores[0]), atol=0.012, rtol=0)  # five standard errors


def test_noise_is_finite_even_where_the_uniform_numbers_end():
    assert torch.isfinite(gumbel(torch.tensor([0.0, 1.0, 1e-45, 1 - 1e-7]))).all()


def test_the_first_gumbel_is_added_and_the_second_taken_away():
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.rand(2, 3, generator=generator) for _ in range(2))
    found = mask_noise(torch.zeros(2, 3), torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, -torch.log(-torch.log(first)) + torch.log(-torch.log(second)))


# --- losses ------------------------------------------------------------------------------------------------------


def test_entropy_by_hand():
    # .7 ln .7 + .3 ln .3 = -.610864; uniform over five: -ln 5, the least there is.
    assert float(negative_entropy(torch.log(torch.tensor([[0.7, 0.3]])))) == pytest.approx(-0.610864, abs=1e-6)
    assert float(negative_entropy(torch.zeros(3, 5))) == pytest.approx(-math.log(5), abs=1e-6)
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)) * 3
    assert -math.log(5) < float(negative_entropy(logits)) < 0
    assert float(negative_entropy(torch.tensor([[500.0, 0, 0]]))) == 0


def test_symmetric_divergence_by_hand():
    # .7 ln(.7/.5) + .3 ln(.3/.5) + .5 ln(.5/.7) + .5 ln(.5/.3) = .169460
    p, q = torch.log(torch.tensor([[0.7, 0.3]])), torch.zeros(1, 2)
    assert float(symmetric_divergence(p, q)) == pytest.approx(0.169460, abs=1e-6)
    assert float(symmetric_divergence(q, p)) == pytest.approx(0.169460, abs=1e-6)
    assert float(symmetric_divergence(p, p + 3.0)) == pytest.approx(0, abs=1e-7)


def test_detached_targets_leave_each_side_one_gradient():
    p, q = torch.tensor([[0.4, -1.0, 0.2]], requires_grad=True), torch.tensor([[0.0, 0.3, 1.0]], requires_grad=True)
    symmetric_divergence(p, q, detach_first=True).backward()
    # KL(p || q) by the logits of q is softmax(q) - softmax(p), and the other way round.
    apart = (torch.softmax(q, dim=1) - torch.softmax(p, dim=1)).detach()
    torch.testing.assert_close(q.grad, apart)
    torch.testing.assert_close(p.grad, -apart)
    whole = [t.detach().clone().requires_grad_() for t in (p, q)]
    symmetric_divergence(*whole).backward()
    assert not torch.allclose(whole[0].grad, p.grad)


# --- training against a twin -------------------------------------------------------------------------------------


def twin(model, inputs, labels, rng, generator, weights, *, detach=False, soft=False, temperature=1.0):
    """Eq. 15 written out for two epochs of batches of four; returns the trained copy."""
    net = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    for _ in range(2):
        for rows in np.split(rng.permutation(len(labels)), range(4, len(labels), 4)):
            z, y = net.encoder(inputs[rows]), labels[rows]
            s = net.part("mask")(z)
            u1, u2 = (torch.rand(s.shape, generator=generator, dtype=s.dtype) for _ in range(2))
            m = torch.sigmoid((s - torch.log(-torch.log(u1)) + torch.log(-torch.log(u2))) / temperature)
            b = m if soft else (m > 0.5).double().sub(m).detach() + m
            g, r, u = (net.part(h)(v) for h, v in
                       (("head", z), ("relevant_head", z * b), ("irrelevant_head", z * (1 - b))))  # fmt: skip
            qg, qr, qu = (torch.softmax(logits, dim=1) for logits in (g, r, u))
            tg, tr = (qg.detach(), qr.detach()) if detach else (qg, qr)
            distance = (tg * (tg.log() - qr.log())).sum(1) + (tr * (tr.log() - qg.log())).sum(1)
            terms = F.cross_entropy(g, y), F.cross_entropy(r, y), (qu * qu.log()).sum(1).mean(), distance.mean()
            optimizer.zero_grad()
            sum(w * term for w, term in zip(weights, terms, strict=True)).backward()
            optimizer.step()
    return net


def tiny(federation, **params):
    fed = federation(fedpick(lr=0.05, local_epochs=2, **params), TINY, labels={"x": []})
    client = fed.clients["x"]
    client.train_inputs = torch.randn(12, 1, 4, generator=torch.Generator().manual_seed(7)).double()
    client.train_labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 2, 0])
    client.model.double()
    return fed.method, client


@pytest.mark.parametrize(
    "weights, params, options",
    [
        ((1.0, 1.0, 0.001, 1.0), {}, {}),
        ((0.7, 1.3, 0.2, 2.0), {}, {}),
        ((1.0, 1.0, 0.1, 1.0), {"detach_targets": True}, {"detach": True}),
        ((1.0, 1.0, 0.1, 1.0), {"mask": "soft"}, {"soft": True}),
        ((1.0, 1.0, 0.1, 1.0), {"temperature": 0.5}, {"temperature": 0.5}),
    ],
)
def test_a_local_update_is_equation_15_written_out(federation, weights, params, options):
    names = ("global_weight", "relevant_weight", "irrelevant_weight", "distillation_weight")
    method, client = tiny(federation, **dict(zip(names, weights, strict=True)), **params)
    rng, generator = np.random.default_rng([0, 1]), torch.Generator().manual_seed(1)  # as the client's own
    expected = twin(client.model, client.train_inputs, client.train_labels, rng, generator, weights, **options)
    method.local_update(client, {})
    for name, tensor in client.model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], atol=1e-10, rtol=1e-8, msg=name)


def test_without_its_own_losses_it_is_cross_entropy_of_the_global_classifier(federation):
    """'w/o PFSM' in Table IV: FedBN."""
    plain = fedpick(relevant_weight=0, irrelevant_weight=0, distillation_weight=0, ensemble="none")
    fed = federation(plain, rounds=1)
    other = federation(methods.create("fedavg", {**QUICK, "lr": plain.params.lr}), rounds=1)
    for name, client in fed.clients.items():
        twin_model = other.clients[name].model
        twin_model.load_state_dict(
            {key: tensor for key, tensor in client.model.state_dict().items() if key in twin_model.state_dict()}
        )
        fed.method.local_update(client, {})
        other.method.local_update(other.clients[name], {})
        for key, tensor in twin_model.state_dict().items():
            torch.testing.assert_close(client.model.state_dict()[key], tensor, atol=1e-6, rtol=1e-5, msg=key)


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["hard", "soft"])
@pytest.mark.parametrize("kind", ["probs", "logits", "none"])
def test_the_answer_is_that_of_global_and_relevant_classifier(federation, images, kind, mask):
    fed = federation(fedpick(ensemble=kind, mask=mask, temperature=0.5), rounds=2).run()
    client = fed.clients["a"]
    inputs, _ = images([0, 1, 2, 2], seed=3)
    found = fed.method.predict(client, inputs)
    model = client.model.eval()
    with torch.no_grad():
        z = model.encoder(inputs)
        s = model.part("mask")(z)
        picked = (s > 0).float() if mask == "hard" else torch.sigmoid(s / 0.5)
        g, r = model.head(z), model.part("relevant_head")(z * picked)
    expected = {
        "probs": (torch.softmax(g, 1) + torch.softmax(r, 1)) / 2,
        "logits": torch.softmax(g + r, 1),
        "none": torch.softmax(g, 1),
    }[kind]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(fed.method.predict_global(client, inputs), torch.softmax(g, 1))
    assert torch.equal(fed.method.predict(client, inputs), found), "no noise at inference"


@pytest.mark.parametrize("params", [{}, {"selector": "fisher"}, {"mask": "soft"}])
def test_both_classifiers_learn_the_stripes(federation, images, params):
    method = fedpick(lr=0.05, batch_size=8, local_epochs=2, **params)
    fed = federation(method, rounds=8, labels={"a": [0, 1, 2] * 10, "b": [0, 1, 2] * 10}).run()
    fed.download("a")
    inputs, wanted = images([0, 1, 2] * 20, seed=99)
    for found in (method.predict(fed.clients["a"], inputs), method.predict_global(fed.clients["a"], inputs)):
        assert (found.argmax(dim=1) == wanted).double().mean() > 0.9


# --- selection ---------------------------------------------------------------------------------------------------


def test_the_fisher_score_by_hand():
    # Feature 0: class means 1 and 4, all 2; between 2 (1-2)^2 + 1 (4-2)^2 = 6, within 2 * 1 + 0 = 2: score 3.
    # Feature 1: all means 1: 0. Feature 2: means 0 and 3, no spread within: infinite. Feature 3 never varies: 0.
    features = np.array([[0, 0, 0, 5], [2, 2, 0, 5], [4, 1, 3, 5]], np.float32)
    assert fisher_score(features, np.array([0, 0, 1])).tolist() == [3.0, 0.0, math.inf, 0.0]


def test_the_fisher_score_is_scikit_learns_f_value_up_to_a_factor():
    from sklearn.feature_selection import f_classif

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 100)
    features = rng.normal(size=(100, 7)) + rng.normal(size=(4, 7))[labels]
    # An F value is the same ratio, each side divided by its degrees of freedom: K - 1 = 3 and n - K = 96.
    np.testing.assert_allclose(fisher_score(features, labels) * 96 / 3, f_classif(features, labels)[0], rtol=1e-9)


def test_a_constant_feature_of_any_size_scores_zero():
    features = np.full((30, 2), [1e6, 0.1], np.float32)
    assert fisher_score(features, np.arange(30) % 3).tolist() == [0.0, 0.0]


def test_the_top_share_is_kept_and_ties_fall_to_the_first():
    scores = np.array([0.5, 2.0, np.inf, 0.5])
    assert keep_top(scores, 0.5).tolist() == [False, True, True, False]
    assert keep_top(scores, 0.75).tolist() == [True, True, True, False]
    assert keep_top(scores, 0.01).tolist() == [False, False, True, False]
    assert keep_top(np.zeros(3), 0.3).all(), "one class alone says nothing about any feature"


def test_a_fisher_mask_is_chosen_anew_from_the_received_encoder(federation):
    fed = federation(fedpick(selector="fisher", keep_ratio=0.25), rounds=2)
    fed.run_round()
    client = fed.clients["c"]
    fed.download("c")
    features = features_of(client.model, client.train_inputs).numpy()
    wanted = keep_top(fisher_score(features, client.train_labels.numpy()), 0.25)
    assert wanted.sum() == 3
    fed.method.local_update(client, {})
    assert client.model.part("mask").kept.numpy().astype(bool).tolist() == wanted.tolist()
    assert "mask.kept" in fed.personal("c")
    assert client.log["mask.selected"] == 0.25


def test_the_share_of_picked_features_is_told(federation):
    fed = federation(fedpick(lr=1e-12), rounds=1)
    client = fed.clients["a"]
    fed.run_round()
    model = client.model.train()  # the share is taken while training, with batch statistics: near that of eval mode
    with torch.no_grad():
        share = float((model.part("mask")(model.encoder(client.train_inputs)) > 0).float().mean())
    assert client.log["mask.selected"] == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize(
    "bias, expected, words", [(-1e4, 0.0, "almost no feature"), (1e4, 1.0, "almost every feature")]
)
def test_a_mask_that_selects_nothing_or_everything_is_warned_of(federation, caplog, bias, expected, words):
    fed = federation(fedpick(), rounds=1)
    for client in fed.clients.values():
        with torch.no_grad():
            client.model.part("mask")[2].bias.fill_(bias)
    with caplog.at_level(logging.WARNING):
        fed.run_round()
    assert fed.clients["a"].log["mask.selected"] == expected
    assert f"mask_extreme client=a selected={expected:.4f}: {words}" in caplog.text


def test_an_ordinary_mask_is_not_warned_of(federation, caplog):
    with caplog.at_level(logging.WARNING):
        federation(fedpick(), rounds=1).run()
    assert "mask_extreme" not in caplog.text
    assert mistake_of_share(0.02) == mistake_of_share(0.98) == ""
    assert mistake_of_share(0.019)
    assert mistake_of_share(0.981)


# --- bad input and devices ---------------------------------------------------------------------------------------


def test_a_loss_weight_that_makes_training_diverge_is_named(federation):
    fed = federation(fedpick(irrelevant_weight=1e38, lr=10.0, local_epochs=3))
    with pytest.raises(TrainingFailed, match=r"client 'a': loss became .* irrelevant_weight 1e\+38"):
        fed.run_round()


def test_its_device_head_gets_the_methods_parameters():
    given = {"mask": "soft", "selector": "fisher", "keep_ratio": 0.2, "detach_targets": True, "temperature": 2.0}
    head = heads.create("fedpick", fedpick(**given, lr=0.02).head_params("fedpick"))
    assert {name: getattr(head.params, name) for name in given} == given
    assert (head.params.lr, head.params.batch_size) == (0.02, 4)
    assert fedpick().head_params("svm") == {}


@pytest.mark.parametrize(
    "params", [{}, {"mask": "soft", "temperature": 0.4}, {"selector": "fisher"}, {"ensemble": "logits"}]
)
def test_parts_trained_here_answer_the_same_in_the_device_head(federation, images, params):
    """The device head loaded with a client's own mask and classifiers is that client's personal model."""
    fed = federation(fedpick(**params), rounds=2).run()
    client = fed.clients["c"]
    names = [name for name in client.model.state_dict() if name.split(".")[0] in LOCAL]
    shared = {f"shared.{key}": getattr(client.model.head, key).detach().numpy() for key in ("weight", "bias")}
    head = heads.create("fedpick", fed.method.head_params("fedpick"))
    head.load({"classes": np.arange(3), **to_arrays(client.model, names), **shared}, 3, 12)
    inputs, _ = images([0, 1, 2], seed=3)
    features = client.model.eval().features(inputs).detach().numpy()
    np.testing.assert_allclose(head.predict_proba(features), fed.method.predict(client, inputs).numpy(), atol=1e-6)


def test_training_draws_its_noise_from_the_clients_generator_only(federation):
    fed = federation(fedpick(), rounds=1)
    client = fed.clients["a"]
    fed.download("a")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    noise = client.generator.get_state()
    fed.method.local_update(client, {})
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(client.generator.get_state(), noise)
    assert encode(fed.personal("a"))
