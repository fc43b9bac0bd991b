"""DualFed: what travels, how its parts are built, how it answers, and what its device head makes of them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper_methods import dualfed, is_statistic

from edge_agent import heads, methods
from edge_agent.core.errors import ConfigError
from edge_agent.methods.values import Update
from edge_agent.training.loops import TrainingOptions, features_of, local_optimizer, train
from edge_agent.training.networks import ensemble
from edge_agent.training.parts import to_arrays

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
    from edge_agent.methods.dualfed import DualFedParams, projector

    made = projector(512, DualFedParams())
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
    from edge_agent.methods.dualfed import DualFedParams, projector

    def shown(layer):
        sizes = [getattr(layer, key) for key in ("in_features", "out_features", "num_features") if hasattr(layer, key)]
        return type(layer).__name__ + (f"({','.join(map(str, sizes))})" if sizes else "")

    made = projector(6, DualFedParams(projector_depth=depth, projector_width=9, projector_norm=norm))
    assert [shown(layer) for layer in made] == layers


# --- aggregation -------------------------------------------------------------------------------------------------


def test_the_mean_is_uniform_whatever_the_sample_counts():
    method = dualfed()
    one = {"head.bias": np.float32([1.0])}
    five = {"head.bias": np.float32([5.0])}
    assert method.aggregate({}, [Update("a", 1.0, one), Update("b", 3.0, five)])["head.bias"] == 3.0


def test_identical_clients_give_the_model_of_one(federation):
    fed = federation(dualfed(), labels={"a": [0, 1, 2] * 3, "b": [0, 1, 2] * 3})
    a = fed.clients["a"]
    b = fed.clients["b"]
    b.train_inputs = a.train_inputs
    b.rng = copy.deepcopy(a.rng)
    b.model.load_state_dict(a.model.state_dict())
    updates = fed.run_round()
    for name in fed.shared:
        np.testing.assert_allclose(fed.state[name], updates[0].tensors[name], rtol=1e-6)


# --- answers -----------------------------------------------------------------------------------------------------


def test_the_global_classifier_may_sit_behind_the_projector(federation, images):
    fed = federation(dualfed(global_classifier_at="post_shared"), rounds=2).run()
    client = fed.clients["a"]
    inputs, _ = images([0, 1, 2], seed=3)
    client.model.eval()
    with torch.no_grad():
        u = client.model.part("projector")(client.model.encoder(inputs))
        expected = torch.softmax(client.model.head(u), dim=1)
    torch.testing.assert_close(fed.method.predict_global(client, inputs), expected)


def test_added_probabilities_and_added_logits_can_disagree():
    # softmax(10,0,0) = (.999909,.000045,.000045), softmax(-20,1,0) = (0,.731059,.268941): sums .999909,.731104,.268987.
    personal = torch.tensor([[10.0, 0, 0]])
    shared = torch.tensor([[-20.0, 1, 0]])
    probabilities = ensemble(personal, shared, "probs")
    torch.testing.assert_close(2 * probabilities, torch.tensor([[0.999909, 0.731104, 0.268987]]), atol=1e-6, rtol=0)
    assert probabilities.argmax() == 0
    logits = ensemble(personal, shared, "logits")
    torch.testing.assert_close(logits, torch.softmax(torch.tensor([[-10.0, 1, 0]]), dim=1))
    assert logits.argmax() == 1


@given(st.lists(st.floats(-6, 6).map(lambda x: round(x, 3)), min_size=4, max_size=4))
def test_with_two_classes_both_ensembles_agree(values):
    personal = torch.tensor([values[:2]], dtype=torch.float64)
    shared = torch.tensor([values[2:]], dtype=torch.float64)
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
        p = client.model.part("personal_head")(u).double().numpy()
        s = client.model.head(z).double().numpy()

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


# --- devices -----------------------------------------------------------------------------------------------------


def test_its_device_head_gets_the_methods_parameters():
    given_params = {"contrastive_weight": 2.0, "temperature": 0.05, "ensemble": "logits", "projector_depth": 3}
    head = heads.create("dualfed", dualfed(**given_params, lr=0.02).head_params("dualfed"))
    assert {name: getattr(head.params, name) for name in given_params} == given_params
    assert (head.params.lr, head.params.projector_width, head.params.batch_size) == (0.02, 8, 256), "its own batch size"
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
    from edge_agent.heads._layers import batches
    from edge_agent.heads.dualfed import DualFedHeadParams as HeadParams
    from edge_agent.heads.dualfed import Trainer

    method = dualfed(lr=0.005, batch_size=16)
    fed = federation(method, labels={"a": [0, 1, 2] * 15})
    client = fed.clients["a"]
    fed.download("a")
    features = features_of(client.model, client.train_inputs).numpy()
    trained = ("projector", "personal_head")
    names = [name for name in client.model.state_dict() if name.split(".")[0] in trained]
    arrays = {name: a for name, a in to_arrays(client.model, names).items() if not name.endswith("tracked")}
    params = HeadParams(**method.head_params("dualfed"), batch_size=16)
    labels = client.train_labels.numpy()
    trainer = Trainer(arrays, params, 17)
    rng = copy.deepcopy(client.rng)
    for _ in range(5):
        for rows in batches(len(labels), 16, rng, params.smallest_batch):
            trainer.step(features[rows], labels[rows])
    optimizer = local_optimizer([w for part in trained for w in client.model.part(part).parameters()], method.params)
    loss = method.personal_loss(client)
    train(
        client,
        loss,
        method.params,
        optimizer=optimizer,
        options=TrainingOptions(epochs=5, batch_size=16, frozen=("encoder", "head")),
    )
    for name, array in arrays.items():
        np.testing.assert_allclose(array, client.model.state_dict()[name].numpy(), atol=1e-5, rtol=1e-4, err_msg=name)
