from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from edge_agent import heads, methods
from edge_agent.errors import ConfigError, TrainingFailed
from edge_agent.methods.base import Update
from edge_agent.task import ImageInput, Task, WindowInput
from edge_agent.training.augment import flips_and_turns
from edge_agent.training.ensembles import ensemble
from edge_agent.training.loops import features_of, local_optimizer, train_epochs
from edge_agent.training.parts import to_arrays
from edge_agent.wire.tensors import encode

TINY = Task(
    input=WindowInput(channels=1, length=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 6},
)
QUICK = {"local_epochs": 1, "batch_size": 4, "projector_width": 8, "contrastive_weight": 1.0}


def dualfed(**params):
    return methods.create("dualfed", {**QUICK, **params})


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before, model):
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def is_statistic(name):
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


# --- what travels ------------------------------------------------------------------------------------------------


def test_encoder_weights_and_global_classifier_travel_and_nothing_else(federation):
    fed = federation(dualfed(), rounds=1)
    parts = {name.split(".")[0] for name in fed.shared}
    assert parts == {"encoder", "head"}
    assert not [name for name in fed.shared if is_statistic(name)]
    assert "encoder.layers.1.weight" in fed.shared, "gamma of batch norm travels"
    assert {"projector.0.weight", "personal_head.weight", "encoder.layers.1.running_mean"} <= set(fed.personal("a"))
    for update in fed.run_round():
        assert set(update.tensors) == set(fed.shared)


@pytest.mark.parametrize(
    "params, shared",
    [
        ({}, {"encoder", "head"}),
        ({"personal": ["projector", "personal_head", "head"]}, {"encoder"}),
        ({"personal": []}, {"encoder", "projector", "personal_head", "head"}),
        ({"personal": ["personal_head"]}, {"encoder", "projector", "head"}),
        ({"personal": ["encoder", "projector", "personal_head", "head"]}, set()),
        ({"global_classifier_at": "post_personal"}, {"encoder", "head"}),
        ({"global_classifier_at": "post_personal", "personal": ["personal_head"]}, {"encoder", "head"}),
        ({"global_classifier_at": "post_shared"}, {"encoder", "projector", "head"}),
    ],
)
def test_tables_six_and_seven_are_switches(federation, params, shared):
    fed = federation(dualfed(**params), rounds=2).run()
    assert set(fed.method.shared) == shared
    assert {name.split(".")[0] for name in fed.state} == shared


@pytest.mark.parametrize(
    "params, shared_model, on_features",
    [
        ({}, True, True),
        ({"personal": []}, True, True),
        ({"personal": ["personal_head", "head"]}, False, False),
        ({"personal": ["encoder"]}, False, True),
        ({"global_classifier_at": "post_personal"}, False, False),
        ({"global_classifier_at": "post_shared"}, True, False),
    ],
)
def test_a_shared_classifier_is_told_only_where_all_below_it_is_shared(
    federation, images, params, shared_model, on_features
):
    fed = federation(dualfed(**params), rounds=1).run()
    inputs, _ = images([0, 1, 2], seed=3)
    assert (fed.method.predict_global(fed.clients["a"], inputs) is not None) is shared_model
    assert (fed.method.global_head(fed.state) is not None) is on_features


def test_an_unknown_part_or_switch_is_refused():
    with pytest.raises(ConfigError, match=r"(?s)schedule.*personal"):
        methods.create("dualfed", {"personal": ["classifier"], "schedule": "both"})


# --- projector ---------------------------------------------------------------------------------------------------


def test_the_papers_projector_has_its_layers_and_weights():
    # Linear(512, 256) 131,328; norm 512; Linear(256, 512) 131,584; norm 1,024.
    from edge_agent.methods.dualfed import Params, projector

    made = projector(512, Params())
    assert [type(layer).__name__ for layer in made] == ["Linear", "ReLU", "BatchNorm1d", "Linear", "BatchNorm1d"]
    assert sum(weight.numel() for weight in made.parameters()) == 131_328 + 512 + 131_584 + 1_024


@pytest.mark.parametrize(
    "depth, norm, layers",
    [
        (1, True, ["Linear(6,6)", "BatchNorm1d(6)"]),
        (1, False, ["Linear(6,6)"]),
        (2, False, ["Linear(6,9)", "ReLU", "Linear(9,6)"]),
        (3, True, ["Linear(6,9)", "ReLU", "BatchNorm1d(9)", "Linear(9,9)", "ReLU", "BatchNorm1d(9)", "Linear(9,6)",
                   "BatchNorm1d(6)"]),
    ],
)  # fmt: skip
def test_depth_width_and_norm_of_table_five(depth, norm, layers):
    from edge_agent.methods.dualfed import Params, projector

    def shown(layer):
        sizes = [getattr(layer, key) for key in ("in_features", "out_features", "num_features") if hasattr(layer, key)]
        return type(layer).__name__ + (f"({','.join(map(str, sizes))})" if sizes else "")

    made = projector(6, Params(projector_depth=depth, projector_width=9, projector_norm=norm))
    assert [shown(layer) for layer in made] == layers


# --- training against a twin -------------------------------------------------------------------------------------


def contrastive_by_hand(vectors, labels, temperature):
    """Eq. 7, anchor by anchor."""
    unit = [vector / vector.norm() for vector in vectors]
    total = torch.zeros(())
    for j, anchor in enumerate(unit):
        same = [p for p in range(len(unit)) if p != j and labels[p] == labels[j]]
        others = torch.stack([anchor @ unit[a] / temperature for a in range(len(unit)) if a != j])
        for p in same:
            total = total - (anchor @ unit[p] / temperature - others.exp().sum().log()) / len(same)
    return total / len(unit)


def twin(model, inputs, labels, rng, *, epochs, weight, together, moving, temperature=0.2):
    """The local update written out, one batch of four after another; returns the trained copy."""
    net = copy.deepcopy(model).train()

    def personal(x, y):
        u = net.part("projector")(net.encoder(x))
        value = F.cross_entropy(net.part("personal_head")(u), y)
        return value + weight * contrastive_by_hand(u, y.tolist(), temperature) if weight else value

    def shared(x, y):
        z = net.encoder(x)
        if not together:
            net.part("projector")(z)  # answers nothing here, but its batch norm sees the batch
        return F.cross_entropy(net.head(z), y)

    def descend(loss, parts):
        optimizer = torch.optim.SGD([w for part in parts for w in net.part(part).parameters()], lr=0.05, momentum=0.5)
        for _ in range(epochs):
            for rows in np.split(rng.permutation(len(labels)), range(4, len(labels), 4)):
                optimizer.zero_grad()
                loss(inputs[rows], labels[rows]).backward()
                optimizer.step()

    below = ("encoder", "projector", "personal_head")
    if together:
        descend(lambda x, y: personal(x, y) + shared(x, y), (*below, "head"))
    else:
        descend(personal, below)
        if not moving:
            net.eval()
        descend(shared, ("head",))
    return net


def tiny(federation, **params):
    fed = federation(dualfed(lr=0.05, local_epochs=2, **params), TINY, labels={"x": []})
    client = fed.clients["x"]
    client.train_inputs = torch.randn(12, 1, 4, generator=torch.Generator().manual_seed(7)).double()
    client.train_labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 2, 0])
    client.model.double()  # batches of four behind two batch norms blow float32's rounding up to 1e-3
    return fed.method, client


@pytest.mark.parametrize("weight", [0.0, 3.0])
@pytest.mark.parametrize(
    "params, together, moving",
    [
        ({"schedule": "stage_wise", "stage2_bn": "train"}, False, True),
        ({"schedule": "stage_wise", "stage2_bn": "eval"}, False, False),
        ({"schedule": "simultaneous"}, True, True),
    ],
)
def test_a_local_update_is_the_papers_written_out(federation, weight, params, together, moving):
    method, client = tiny(federation, contrastive_weight=weight, **params)
    expected = twin(
        client.model,
        client.train_inputs,
        client.train_labels,
        np.random.default_rng([0, 1]),  # the client's own, before its first draw
        epochs=2,
        weight=weight,
        together=together,
        moving=moving,
    )
    method.local_update(client, {})
    for name, tensor in client.model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], atol=1e-9, rtol=1e-7, msg=name)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_stage_one_leaves_the_global_classifier_and_stage_two_all_else(federation, mode):
    fed = federation(dualfed(stage2_bn=mode), rounds=1)
    client, method = fed.clients["a"], fed.method
    fed.download("a")
    before = snapshot(client.model)
    method._train(client, ("encoder", "projector", "personal_head"), method._personal_loss(client))
    moved = changed(before, client.model)
    assert not [name for name in moved if name.startswith("head.")]
    assert {"encoder.layers.0.weight", "projector.0.weight", "personal_head.weight"} <= moved
    before = snapshot(client.model)
    method._train(client, ("head",), method._global_loss(client))
    moved = changed(before, client.model)
    assert {name for name in moved if not is_statistic(name)} == {"head.weight", "head.bias"}
    statistics = {name for name in before if is_statistic(name)}
    assert moved - {"head.weight", "head.bias"} == (statistics if mode == "train" else set())
    assert any(name.startswith("projector.") for name in statistics)


def test_the_global_classifier_may_sit_behind_the_projector(federation, images):
    fed = federation(dualfed(global_classifier_at="post_shared"), rounds=2).run()
    client = fed.clients["a"]
    inputs, _ = images([0, 1, 2], seed=3)
    client.model.eval()
    with torch.no_grad():
        u = client.model.part("projector")(client.model.encoder(inputs))
        expected = torch.softmax(client.model.head(u), dim=1)
    torch.testing.assert_close(fed.method.predict_global(client, inputs), expected)


def test_momentum_is_fresh_in_each_stage_or_kept(federation):
    fresh, kept = (federation(dualfed(optimizer_state=mode, momentum=0.9)) for mode in ("reset", "persist"))
    for fed in (fresh, kept):
        fed.run_round()
    assert encode(fresh.state) == encode(kept.state)
    assert fresh.clients["a"].memory == {}
    names = {name.split(".")[2] for name in kept.clients["a"].memory}
    assert names == {"encoder", "projector", "personal_head", "head"}
    for fed in (fresh, kept):
        fed.run_round()
    assert encode(fresh.state) != encode(kept.state)


# --- aggregation -------------------------------------------------------------------------------------------------


def test_the_mean_is_uniform_whatever_the_sample_counts():
    method = dualfed()
    one, five = {"head.bias": np.float32([1.0])}, {"head.bias": np.float32([5.0])}
    assert method.aggregate({}, [Update("a", 1.0, one), Update("b", 3.0, five)])["head.bias"] == 3.0


def test_identical_clients_give_the_model_of_one(federation):
    fed = federation(dualfed(), labels={"a": [0, 1, 2] * 3, "b": [0, 1, 2] * 3})
    a, b = fed.clients["a"], fed.clients["b"]
    b.train_inputs, b.rng = a.train_inputs, copy.deepcopy(a.rng)
    b.model.load_state_dict(a.model.state_dict())
    updates = fed.run_round()
    for name in fed.shared:
        np.testing.assert_allclose(fed.state[name], updates[0].tensors[name], rtol=1e-6)


# --- answers -----------------------------------------------------------------------------------------------------


def test_added_probabilities_and_added_logits_can_disagree():
    # softmax(10,0,0) = (.999909,.000045,.000045), softmax(-20,1,0) = (0,.731059,.268941): sums .999909,.731104,.268987.
    personal, shared = torch.tensor([[10.0, 0, 0]]), torch.tensor([[-20.0, 1, 0]])
    probabilities = ensemble(personal, shared, "probs")
    torch.testing.assert_close(2 * probabilities, torch.tensor([[0.999909, 0.731104, 0.268987]]), atol=1e-6, rtol=0)
    assert probabilities.argmax() == 0
    logits = ensemble(personal, shared, "logits")
    torch.testing.assert_close(logits, torch.softmax(torch.tensor([[-10.0, 1, 0]]), dim=1))
    assert logits.argmax() == 1


@given(st.lists(st.floats(-6, 6).map(lambda x: round(x, 3)), min_size=4, max_size=4))
def test_with_two_classes_both_ensembles_agree(values):
    personal, shared = torch.tensor([values[:2]], dtype=torch.float64), torch.tensor([values[2:]], dtype=torch.float64)
    if abs(values[0] + values[2] - values[1] - values[3]) < 1e-6:
        return
    assert ensemble(personal, shared, "probs").argmax() == ensemble(personal, shared, "logits").argmax()


@pytest.mark.parametrize("kind", ["probs", "logits"])
def test_the_answer_is_that_of_both_classifiers(federation, images, kind):
    fed = federation(dualfed(ensemble=kind), rounds=1).run()
    client = fed.clients["a"]
    inputs, _ = images([0, 1, 2, 2], seed=3)
    found = fed.method.predict(client, inputs).double().numpy()
    client.model.eval()
    with torch.no_grad():
        z = client.model.encoder(inputs)
        u = client.model.part("projector")(z)
        p, s = client.model.part("personal_head")(u).double().numpy(), client.model.head(z).double().numpy()

    def softmax(x):
        return np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)

    expected = softmax(p + s) if kind == "logits" else (softmax(p) + softmax(s)) / 2
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_both_classifiers_learn_the_stripes(federation, images):
    method = dualfed(lr=0.05, batch_size=8, local_epochs=2, contrastive_weight=2.0)
    fed = federation(method, rounds=8, labels={"a": [0, 1, 2] * 10, "b": [0, 1, 2] * 10}).run()
    fed.download("a")
    inputs, wanted = images([0, 1, 2] * 20, seed=99)
    for found in (method.predict(fed.clients["a"], inputs), method.predict_global(fed.clients["a"], inputs)):
        assert (found.argmax(dim=1) == wanted).double().mean() > 0.9


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["stage_wise", "simultaneous"])
def test_a_lambda_that_makes_training_diverge_is_named(federation, schedule):
    fed = federation(dualfed(contrastive_weight=1e38, temperature=1e-3, schedule=schedule))
    with pytest.raises(TrainingFailed, match=r"client 'a': loss became .* contrastive_weight \(lambda\) 1e\+38"):
        fed.run_round()


def test_one_sample_is_too_few_for_batch_norm(federation):
    fed = federation(dualfed(), labels={"only": [1]})
    with pytest.raises(TrainingFailed, match="batch norm needs at least 2"):
        fed.run_round()


def test_a_batch_without_positives_trains_on_cross_entropy_alone(federation):
    # Three samples of three classes: the contrastive loss is 0, so lambda makes no difference.
    pair = [federation(dualfed(contrastive_weight=w), rounds=1, labels={"a": [0, 1, 2]}).run() for w in (0.0, 7.0)]
    for name in pair[0].state:
        np.testing.assert_array_equal(pair[0].state[name], pair[1].state[name])


# --- devices -----------------------------------------------------------------------------------------------------


def test_its_device_head_gets_the_methods_parameters():
    given_params = {"contrastive_weight": 2.0, "temperature": 0.05, "ensemble": "logits", "projector_depth": 3}
    head = heads.create("dualfed", dualfed(**given_params, lr=0.02).head_params("dualfed"))
    assert {name: getattr(head.params, name) for name in given_params} == given_params
    assert (head.params.lr, head.params.projector_width, head.params.batch_size) == (0.02, 8, 4)
    assert dualfed().head_params("lr") == {}


def test_parts_trained_here_answer_the_same_in_the_device_head(federation, images):
    """The device head loaded with a client's own projector and classifiers is that client's personal model."""
    fed = federation(dualfed(), rounds=2).run()
    client = fed.clients["a"]
    names = [name for name in client.model.state_dict() if name.split(".")[0] in ("projector", "personal_head")]
    arrays = {name: a for name, a in to_arrays(client.model, names).items() if not name.endswith("tracked")}
    shared = {f"shared.{key}": getattr(client.model.head, key).detach().numpy() for key in ("weight", "bias")}
    head = heads.create("dualfed", fed.method.head_params("dualfed"))
    head.load({"classes": np.arange(3), **arrays, **shared}, 3, 12)
    inputs, _ = images([0, 1, 2], seed=3)
    features = client.model.eval().features(inputs).detach().numpy()
    np.testing.assert_allclose(head.predict_proba(features), fed.method.predict(client, inputs).numpy(), atol=1e-6)


def test_training_on_cached_features_is_training_with_the_encoder_frozen(federation):
    """What a device does without torch equals stage one with the encoder frozen in eval mode, batch for batch."""
    from edge_agent.heads.dualfed import Params as HeadParams
    from edge_agent.heads.dualfed import Trainer

    method = dualfed(lr=0.005, batch_size=16)
    fed = federation(method, labels={"a": [0, 1, 2] * 15})
    client = fed.clients["a"]
    fed.download("a")
    features = features_of(client.model, client.train_inputs).numpy()
    trained = ("projector", "personal_head")
    names = [name for name in client.model.state_dict() if name.split(".")[0] in trained]
    arrays = {name: a for name, a in to_arrays(client.model, names).items() if not name.endswith("tracked")}
    trainer = Trainer(arrays, HeadParams(**method.head_params("dualfed")), 17)
    rng = copy.deepcopy(client.rng)
    for _ in range(5):
        trainer.epoch(features, client.train_labels.numpy(), rng)
    optimizer = local_optimizer([w for part in trained for w in client.model.part(part).parameters()], method.params)
    loss = method._personal_loss(client)
    train_epochs(client, loss, optimizer, epochs=5, batch_size=16, frozen=("encoder", "head"))
    for name, array in arrays.items():
        np.testing.assert_allclose(array, client.model.state_dict()[name].numpy(), atol=1e-5, rtol=1e-4, err_msg=name)


# --- augmentation ------------------------------------------------------------------------------------------------


def test_flips_mirror_half_the_images_and_change_nothing_else():
    task = Task(input=ImageInput(channels=1, height=6, width=8), class_names=("a", "b"))
    images = torch.randn(40, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    found = flips_and_turns(task, degrees=0.0)(images, torch.Generator().manual_seed(1))
    same = torch.isclose(found, images, atol=1e-4).flatten(1).all(dim=1)
    mirrored = torch.isclose(found, images.flip(3), atol=1e-4).flatten(1).all(dim=1)
    assert bool((same ^ mirrored).all())
    assert 10 < int(mirrored.sum()) < 30


def test_turns_keep_the_shape_of_what_is_turned():
    # A disc in the middle of an oblong picture is the same disc after any rotation.
    task = Task(input=ImageInput(channels=1, height=32, width=64, mean=(0.0,), std=(1.0,)), class_names=("a", "b"))
    y, x = torch.meshgrid(torch.arange(32) - 15.5, torch.arange(64) - 31.5, indexing="ij")
    disc = ((y**2 + x**2) < 100).float().expand(16, 1, 32, 64)
    turned = flips_and_turns(task, degrees=180.0)(disc, torch.Generator().manual_seed(2))
    assert float((turned - disc).abs().mean()) < 0.02
    edge = ((x > 0).float()).expand(16, 1, 32, 64)
    assert (
        float((flips_and_turns(task, degrees=180.0)(edge, torch.Generator().manual_seed(2)) - edge).abs().mean()) > 0.2
    )


def test_windows_are_not_turned():
    windows = torch.randn(3, 1, 4)
    assert torch.equal(flips_and_turns(TINY)(windows, torch.Generator()), windows)


def test_without_augmentation_no_random_number_is_drawn(federation):
    plain, turned = federation(dualfed()), federation(dualfed(augment=True))
    for fed, alike in ((plain, True), (turned, False)):
        before = fed.clients["a"].generator.get_state()
        fed.run_round()
        assert torch.equal(fed.clients["a"].generator.get_state(), before) is alike
    assert encode(plain.state) != encode(turned.state)


def test_the_logged_losses_are_those_of_both_stages(federation):
    fed = federation(dualfed(lr=1e-12, batch_size=64, contrastive_weight=0.0), labels={"a": [0, 1, 2] * 2})
    fed.run_round()
    log = fed.clients["a"].log
    assert set(log) == {"loss", "loss.global"}
    assert all(0.2 < value < 5 * math.log(3) for value in log.values())
