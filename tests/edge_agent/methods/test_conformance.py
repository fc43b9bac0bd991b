"""What every method must keep, checked on every method that is found."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_agent import heads, methods
from edge_agent.core.errors import ConfigError, TrainingFailed
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.methods.base import Method, weighted_mean
from edge_agent.methods.values import Update
from edge_agent.training import peft
from edge_agent.wire.tensors import decode, encode, specs_of

every_method = pytest.mark.parametrize("name", methods.names())

OWN_PACE = {"fedadam"}
"""Methods whose server goes from the old state at its own pace: they rest only where nobody moves."""

MEANS = [
    name
    for name in methods.names()
    if (methods.get(name).aggregate, methods.get(name).fold, methods.get(name).next_state)
    == (Method.aggregate, Method.fold, Method.next_state)
]
SUMS = [name for name in methods.names() if methods.create(name).server_step_is_sum()]
"""Methods that do not aggregate in their own way."""


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


@every_method
def test_docstring_names_source_and_says_what_travels(name):
    text = inspect.getdoc(inspect.getmodule(methods.get(name)))
    for heading in ("Source:", "Travels:", "Stays:", "Server:", "Differs from the paper:"):
        assert heading in text, f"{name} lacks '{heading}'"
    assert methods.get(name).source


@every_method
def test_unknown_parameters_are_refused(name):
    with pytest.raises(ConfigError, match="local_epoch: unknown key; did you mean 'local_epochs'"):
        methods.create(name, {"local_epoch": 1})


@every_method
def test_every_parameter_of_its_own_is_described(name):
    own = methods.get(name).Params.model_fields.keys() - Method.Params.model_fields.keys()
    fields = methods.get(name).Params.model_fields
    undescribed = {field for field in own if not fields[field].description and fields[field].annotation is not float}
    assert not undescribed


@every_method
def test_an_update_holds_the_declared_names_and_no_others(name, federation):
    fed = federation(name)
    extras = fed.method.sends(fed.method.build(fed.task), fed.task)
    for update in fed.run_round():
        assert set(update.tensors) == set(fed.returned) | set(extras)
        for name, zeros in extras.items():
            assert (update.tensors[name].shape, update.tensors[name].dtype) == (zeros.shape, zeros.dtype), name
        assert fed.method.objection(update.tensors) == ""
    assert all(sent.startswith("extra.") and not zeros.any() for sent, zeros in extras.items())


@every_method
def test_only_shared_parts_travel(name, federation):
    fed = federation(name)
    parts = {tensor.split(".")[0] for tensor in fed.shared}
    assert parts <= set(fed.method.shared)
    assert set(fed.returned) <= set(fed.shared)
    assert not [tensor for tensor in fed.shared if tensor.endswith("num_batches_tracked")]


@pytest.mark.parametrize("norm", ["global", "local_stats", "local_all"])
@every_method
def test_what_travels_of_batch_norm_can_be_chosen(name, norm, federation, make_method):
    """Two rounds with each choice: of the encoder's batch norm just that is in updates and state, and all is finite."""
    if (name, norm) in {
        ("pfedhn", "global"),
        ("afl", "local_stats"),
        ("afl", "local_all"),
        ("fedcof", "local_stats"),
        ("fedcof", "local_all"),
    }:
        with pytest.raises(ConfigError, match="norm"):
            make_method(name, norm=norm)
        return
    fed = federation(make_method(name, norm=norm), rounds=2)
    kinds = {"global": ["bias", "running_mean", "running_var", "weight"], "local_stats": ["bias", "weight"]}
    returns_encoder = any(sent.startswith("encoder.") for sent in fed.returned)
    chosen = kinds.get(norm, []) if returns_encoder else []
    for update in (*fed.run_round(), *fed.run_round()):
        of_norm = [sent for sent in update.tensors if sent.startswith("encoder.layers.1.")]
        assert sorted(sent.rpartition(".")[2] for sent in of_norm) == chosen
        assert all(np.isfinite(array).all() for array in update.tensors.values())
    assert fed.method.norm == norm
    for client in fed.clients.values():
        fed.download(client.id)
        assert torch.isfinite(fed.method.predict(client, client.train_inputs)).all()


@every_method
def test_the_same_seed_gives_the_same_bytes(name, federation):
    one, again = (federation(name, seed=4, rounds=2).run() for _ in range(2))
    assert encode(one.state) == encode(again.state)
    for client in one.clients:
        assert encode(one.personal(client)) == encode(again.personal(client))
        assert encode(one.clients[client].memory) == encode(again.clients[client].memory)


@every_method
def test_another_seed_gives_other_bytes(name, federation):
    one, other = (federation(name, seed=seed, rounds=1).run() for seed in (4, 5))
    first = next(iter(one.clients))
    tensors = [{**fed.state, **fed.personal(first)} for fed in (one, other)]
    assert encode(tensors[0]) != encode(tensors[1])


@every_method
def test_the_state_survives_its_bytes(name, federation):
    fed = federation(name, rounds=1).run()
    assert same(decode(encode(fed.state)), fed.state)


@every_method
def test_updates_stay_finite(name, federation):
    for update in federation(name).run_round():
        for key, array in update.tensors.items():
            assert np.isfinite(array).all(), key


@every_method
def test_steps_in_mixed_precision_give_updates_of_the_same_form_that_are_near(name, federation):
    """Weights stay float32; a step's rounding differs by about a hundredth of what it changes."""
    plain = federation(name)
    mixed = federation(name)
    for client in list(mixed.clients):
        mixed.clients[client] = replace(mixed.clients[client], precision="bfloat16")
    before = dict(plain.state)
    moved = 0.0
    apart = 0.0
    for one, other in zip(plain.run_round(), mixed.run_round(), strict=True):
        assert specs_of(one.tensors) == specs_of(other.tensors)
        for key in [key for key, array in one.tensors.items() if array.dtype.kind == "f" and key in before]:
            assert np.isfinite(other.tensors[key]).all(), key
            moved += float(((one.tensors[key] - before[key]).astype(np.float64) ** 2).sum())
            apart += float(((one.tensors[key] - other.tensors[key]).astype(np.float64) ** 2).sum())
    assert apart <= 0.25 * moved
    assert apart > 0 or not moved, "bfloat16 was not used"


@every_method
def test_the_aggregate_does_not_depend_on_the_order_beyond_rounding(name, federation):
    fed = federation(name)
    fed.round = 1
    updates = [fed.update(client) for client in sorted(fed.clients)]
    forward, backward = (fed.method.aggregate(dict(fed.state), order) for order in (updates, updates[::-1]))
    assert forward.keys() == backward.keys()
    for key in forward:
        np.testing.assert_allclose(forward[key], backward[key], rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_parts_of_a_round_give_the_bits_of_the_aggregate(name, parts, federation):
    fed = federation(name)
    fed.round = 1
    updates = [fed.update(client) for client in sorted(fed.clients)]
    total = WeightedSum()
    for part in range(parts):
        partial = WeightedSum()
        for update in updates[part::parts]:
            fed.method.fold(partial, update)
        total.merge(WeightedSum.from_tensors(partial.to_tensors()))
    assert total.is_exact
    after = fed.method.next_state(dict(fed.state), total)
    whole = fed.method.aggregate(dict(fed.state), updates)
    assert after.keys() == whole.keys()
    for key, array in whole.items():
        assert np.asarray(after[key]).tobytes() == np.asarray(array).tobytes(), key


@pytest.mark.parametrize("name", MEANS)
def test_the_default_aggregate_is_the_weighted_mean(name, federation):
    fed = federation(name)
    updates = fed.run_round()
    weights = [u.weight if fed.method.weighting == "samples" else 1.0 for u in updates]
    for key in fed.returned:
        by_hand = sum(w * u.tensors[key].astype(np.float64) for w, u in zip(weights, updates, strict=True))
        np.testing.assert_allclose(fed.state[key], by_hand / sum(weights), rtol=1e-6, atol=1e-7, err_msg=key)


@every_method
def test_identical_updates_are_a_fixed_point(name, federation):
    fed = federation(name)
    fed.round = 1
    first = fed.update("a")
    if name in OWN_PACE:
        first = Update("a", first.weight, {**first.tensors, **{key: fed.state[key] for key in fed.returned}})
    after = fed.method.aggregate(
        dict(fed.state), [first, Update("b", 1.0, first.tensors), Update("c", 9.0, first.tensors)]
    )
    for key in fed.returned:
        np.testing.assert_allclose(after[key], first.tensors[key], rtol=1e-5, atol=1e-6, err_msg=key)


@every_method
def test_a_download_leaves_personal_tensors_bit_for_bit(name, federation):
    """But for those that the method hands this very client."""
    fed = federation(name)
    fed.run_round()
    before = fed.personal("a")
    fed.download("a")
    given = fed.method.downlink(fed.state, "a")
    assert same(fed.personal("a"), {key: given.get(key, array) for key, array in before.items()})


@every_method
def test_a_client_that_misses_a_round_keeps_what_is_its_own(name, federation):
    fed = federation(name)
    fed.run_round()
    personal = fed.personal("b")
    memory = {key: array.copy() for key, array in fed.clients["b"].memory.items()}
    fed.run_round(["a", "c"])
    assert same(fed.personal("b"), personal)
    assert same(fed.clients["b"].memory, memory)
    fed.run_round()


@every_method
@pytest.mark.parametrize(
    "labels",
    [
        pytest.param([0, 1, 2] * 3, id="alone"),
        pytest.param([1] * 6, id="one class"),
        pytest.param([0, 2] * 3, id="an empty class"),
        pytest.param([0, 1, 2], id="fewer samples than a batch"),
        pytest.param([0, 1, 2, 0, 1], id="a last batch of one"),
        pytest.param([2, 1], id="two samples"),
    ],
)
def test_a_single_client_with_awkward_data_completes_two_rounds(name, federation, labels):
    fed = federation(name, rounds=2, labels={"only": labels}).run()
    fed.download("only")
    client = fed.clients["only"]
    fed.method.personalize(client, fed.download("only"))
    probabilities = fed.method.predict(client, client.train_inputs)
    assert torch.isfinite(probabilities).all()


@every_method
def test_a_client_without_samples_says_so(name, federation):
    fed = federation(name, labels={"empty": []})
    with pytest.raises(TrainingFailed, match="'empty' has no training samples"):
        fed.run_round()


@every_method
def test_predictions_are_probabilities_and_change_no_tensor(name, federation, images):
    fed = federation(name, rounds=1).run()
    client = fed.clients["a"]
    fed.method.personalize(client, fed.download("a"))
    before = {key: tensor.clone() for key, tensor in client.model.state_dict().items()}
    inputs, _ = images([0, 1, 2, 1], seed=9)
    found = [fed.method.predict(client, inputs), fed.method.predict_global(client, inputs)]
    for probabilities in [p for p in found if p is not None]:
        assert probabilities.shape == (4, 3)
        assert probabilities.dtype == torch.float32
        assert (probabilities >= 0).all()
        torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(4))
    assert all(torch.equal(tensor, before[key]) for key, tensor in client.model.state_dict().items())


@every_method
def test_predicting_between_rounds_does_not_shift_training(name, federation):
    quiet, watched = (federation(name, seed=2, rounds=2) for _ in range(2))
    quiet.run()
    for _ in range(2):
        for client in watched.clients.values():
            watched.download(client.id)
            watched.method.predict(client, client.train_inputs)
        watched.run_round()
    assert encode(watched.state) == encode(quiet.state)


@every_method
def test_the_global_head_is_a_linear_classifier_or_none(name, federation):
    fed = federation(name, rounds=1).run()
    head = fed.method.global_head(fed.state)
    if head is not None:
        assert {key: array.shape for key, array in head.items()} == {"weight": (3, 12), "bias": (3,)}


@every_method
def test_its_device_heads_exist_and_take_the_parameters_it_gives(name):
    method = methods.create(name)
    assert set(method.heads) <= set(heads.names())
    assert set(method.exactness) <= set(method.heads)
    for head in method.heads:
        heads.create(head, method.head_params(head))


@every_method
def test_it_calls_itself_by_its_file_name(name):
    assert methods.create(name).name == name


def test_finding_methods_heads_and_encoders_does_not_import_torch():
    code = (
        "import sys, edge_agent.methods as m, edge_agent.methods.base, edge_agent.heads as h, edge_agent.models as e\n"
        "assert m.names() and h.names() and e.names()\n"
        "print(sorted({'torch', 'torchvision', 'onnx', 'sklearn', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_weighted_and_uniform_means_by_hand():
    # 1 with one sample, 5 with three: (1 + 15) / 4 = 4; without weights 3.
    updates = [Update("a", 1.0, {"w": np.float32([1.0])}), Update("b", 3.0, {"w": np.float32([5.0])})]
    method = methods.create("fedavg")
    assert method.aggregate({}, updates)["w"] == 4.0
    method.weighting = "uniform"
    assert method.aggregate({}, updates)["w"] == 3.0


def test_the_mean_of_nobody_is_refused():
    with pytest.raises(TrainingFailed, match="no update with a positive weight"):
        weighted_mean([])


SECOND_NETWORK = {"apfl", "ditto", "fedfomo", "pfedme"}
NO_ENCODER = {"afl", "fedcof", "fedproto", "lg_fedavg", "linear_probe", "local"}
OTHER_REASONS = {"pfedhn", "scaffold"}
NO_PEFT = SECOND_NETWORK | NO_ENCODER | OTHER_REASONS
"""Methods that cannot train a part of their encoder alone."""


@pytest.mark.parametrize("choice", peft.names())
@pytest.mark.parametrize("name", sorted(set(methods.names()) - NO_PEFT))
def test_a_part_of_the_encoder_learns_alone(name, choice, federation, make_method, task):
    """Two rounds of clients that begin with other weights: they get what is frozen, and only the rest changes."""
    norm = "local_stats" if make_method(name).norm == "local_all" else None
    fed = federation(make_method(name, norm=norm), task.with_peft(choice), rounds=2)
    model = fed.fresh_model(0)
    frozen = model.frozen_names
    start = {tensor: array.copy() for tensor, array in fed.state.items()}
    learning = [tensor for tensor in fed.returned if tensor.startswith("encoder.")]
    extras = fed.method.sends(model, fed.task)
    assert frozen
    assert learning
    assert not frozen.intersection(fed.returned)
    for update in (*fed.run_round(), *fed.run_round()):
        assert set(update.tensors) == {*fed.returned, *extras}
        state = fed.clients[update.client].model.state_dict()
        for tensor in frozen:
            assert np.array_equal(state[tensor].numpy(), start[tensor]), tensor
    for tensor in frozen:
        assert np.array_equal(fed.state[tensor], start[tensor]), tensor
    for tensor in learning:
        assert not np.array_equal(fed.state[tensor], start[tensor]), tensor
    for client in fed.clients.values():
        fed.method.personalize(client, fed.download(client.id))
        assert torch.isfinite(fed.method.predict(client, client.train_inputs)).all()


@pytest.mark.parametrize("name", sorted(NO_PEFT))
def test_methods_that_cannot_train_a_part_of_the_encoder_say_why(name, federation, task):
    reason = "second network" if name in SECOND_NETWORK else "hold no encoder" if name in NO_ENCODER else f"'{name}'"
    with pytest.raises(ConfigError, match=f"{reason}.*; leave peft out, or choose another method"):
        federation(name, task.with_peft("lora"))
