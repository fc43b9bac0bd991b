"""FedPick: what travels, training by its equation, how it answers, and which features it picks."""

from __future__ import annotations

import copy
import logging
import math

import numpy as np
import pytest
import torch
from paper_methods import fedpick, on_twelve_windows
from torch.nn import functional as F

from edge_agent import heads, methods
from edge_agent.core.errors import ConfigError, TrainingFailed
from edge_agent.heads._features import fisher_score, keep_top, mistake_of_share
from edge_agent.training.loops import features_of
from edge_agent.training.parts import to_arrays
from edge_agent.wire.tensors import encode

LOCAL = {"mask", "relevant_head", "irrelevant_head"}


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


# --- training against a twin -------------------------------------------------------------------------------------


def twin(model, inputs, labels, rng, generator, weights, *, detach=False, soft=False, temperature=1.0):
    """Eq. 15 written out for two epochs of batches of four; returns the trained copy."""
    net = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    for _ in range(2):
        for rows in np.split(rng.permutation(len(labels)), range(4, len(labels), 4)):
            z = net.encoder(inputs[rows])
            y = labels[rows]
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
    method = fedpick(lr=0.05, local_epochs=2, **params)
    return method, on_twelve_windows(federation, method)


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
    rng = np.random.default_rng([0, 1])
    generator = torch.Generator().manual_seed(1)  # as the client's own
    expected = twin(client.model, client.train_inputs, client.train_labels, rng, generator, weights, **options)
    method.local_update(client, {})
    for name, tensor in client.model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], atol=1e-10, rtol=1e-8, msg=name)


def test_without_its_own_losses_it_is_cross_entropy_of_the_global_classifier(federation):
    """'w/o PFSM' in Table IV: FedBN."""
    plain = fedpick(relevant_weight=0, irrelevant_weight=0, distillation_weight=0, ensemble="none")
    fed = federation(plain, rounds=1)
    other = federation(methods.create("fedavg", {"local_epochs": 1, "batch_size": 4, "lr": plain.params.lr}), rounds=1)
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
        g = model.head(z)
        r = model.part("relevant_head")(z * picked)
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
    assert (head.params.lr, head.params.batch_size) == (0.02, 32), "its own batch size"
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
