"""What a row of a comparison rests on: worked out from plan and method, in words, and where rows differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.research.footing import Footing, SharedFooting, footing_of
from coordinator.simulation.plan import Plan
from edge_agent import methods

FEDPAC = Plan(
    method="fedpac",
    params={"lr": 0.02, "weight_decay": 0.0005, "batch_size": 50},
    data=("idx:/nowhere",),
    partition="fedpac",
    clients=100,
    size=500,
    test_size=300,
    fraction=0.3,
    rounds=200,
)


def test_the_footing_of_a_plan_in_words():
    assert footing_of(FEDPAC) == {
        "optimizer": "SGD, step size 0.02, momentum 0.5, weight decay 0.0005",
        "optimizer's state": "reset in each stage of each round",
        "passes in a round": "1 of head (step size 0.1), then 5 of encoder",
        "at the end": "nothing",
        "batches": "50; a smaller last batch is used, a single sample joins the batch before",
        "augmentation": "none",
        "encoder": "fedpac_cnn",
        "parts of the model": "encoder, head",
        "batch norm": "all of it travels",
        "first weights": "random, the same for all clients",
        "partition": "fedpac, 100 clients, size 500, the generator of FedPAC's authors",
        "test samples": "the data's own test part, 300 for each client by the same rule",
        "rounds": "200, 30% of the clients in each",
    }


def changed(**fields) -> dict[str, str]:
    """The aspects that differ from those of `FEDPAC` in a plan with other fields."""
    before = footing_of(FEDPAC)
    after = footing_of(Plan.model_validate({**FEDPAC.model_dump(exclude_unset=True), **fields}))
    return {aspect: value for aspect, value in after.items() if value != before.get(aspect)}


DIRICHLET = {"partition": "dirichlet", "alpha": 0.1, "size": None, "test_size": None}


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"augment": "crop_flip"}, {"augmentation": "crop from a frame of 4 pixels, flip"}),
        ({"augment": "flip_turn", "method": "repper", "params": {}},
         {"optimizer": "Adam, step size 0.001, weight decay 0.0001", "passes in a round": "10 of encoder",
          "at the end": "head 'mlp', fitted to features", "parts of the model": "encoder",
          "batches": "256; a smaller last batch is used, a single sample joins the batch before",
          "augmentation": "flips and rotations, then two random views of each image"}),
        ({"iid_share": 0.4},
         {"partition": "fedpac, 100 clients, size 500, 40% of it over all classes, the generator of FedPAC's authors"}),
        ({"full_last_round": True}, {"rounds": "200, 30% of the clients in each, all in the last"}),
        ({"fraction_max": 1.0}, {"rounds": "200, 30% to 100% of the clients in each"}),
        ({"dropout": 0.1}, {"rounds": "200, 30% of the clients in each, of whom 10% drop out"}),
        ({"rounds": 5, "fraction": 1.0}, {"rounds": "5, all clients in each"}),
        ({"encoder": "small_cnn", "peft": "bn"}, {"encoder": "small_cnn, of which bn learns"}),
        ({"encoder": "fedpac_cnn", "encoder_params": {"b": 1, "a": 2}}, {"encoder": "fedpac_cnn (a 2, b 1)"}),
        ({"weights": Path("/x/net.safetensors")},
         {"first weights": "encoder from net.safetensors, the rest random, the same for all clients"}),
        ({"validation": 0.2}, {"test samples": "none: 20% of the training samples are held out in their place"}),
        ({"data": ("digits",)}, {"test samples": "25% of each client's samples, class by class"}),
        ({"partition": "p.json", "clients": None, "size": None, "test_size": None},
         {"partition": "file p.json", "test samples": "those of the partition",
          "encoder": "the encoder that suits the inputs"}),
        ({**DIRICHLET},
         {"partition": "dirichlet, 100 clients, alpha 0.1, at least 10 samples each",
          "encoder": "the encoder that suits the inputs",
          "test samples": "the data's own test part, in the client's mixture of classes"}),
        ({"partition": "domains", "clients": None, "size": None, "test_size": None},
         {"partition": "domains", "encoder": "the encoder that suits the inputs",
          "test samples": "the data's own test part, the client's own"}),
        ({**DIRICHLET, "partition": "fedrir_dirichlet", "data": ("idx:/nowhere?split=all",)},
         {"partition": "fedrir_dirichlet, 100 clients, alpha 0.1, at least 400 samples each, the generator of FedRIR's "
          "authors",
          "encoder": "the encoder that suits the inputs",
          "test samples": "25% of each client's samples, at random"}),
        ({"params": {"optimizer": "adam", "lr": 0.02, "norm": "local_stats", "refresh_stats": True}},
         {"optimizer": "Adam, step size 0.02, weight decay 0.0005",
          "batch norm": "gamma and beta travel, statistics stay and are recomputed before a client answers"}),
        ({"params": {**FEDPAC.params, "batch_size": 1}}, {"batches": "1; a smaller last batch is used"}),
    ],
)  # fmt: skip
def test_one_field_of_a_plan_changes_its_aspect(fields, expected):
    assert changed(**fields) == expected


@pytest.mark.parametrize(
    "method, params, expected",
    [
        ("fedrir", {}, {"optimizer's state": "kept between rounds"}),
        ("fedrir", {}, {"batches": "32; a last batch that is not whole sits out"}),
        ("fedrir", {"optimizer_state": "reset"}, {"optimizer's state": "reset in each stage of each round"}),
        ("dualfed", {"augment": True}, {"augmentation": "flips and rotations"}),
        ("afl", {}, {"optimizer": "none", "batches": "none"}),
        ("afl", {}, {"passes in a round": "sums over features, without training"}),
        ("fedfomo", {}, {"optimizer": "SGD, step size 0.1 times 0.99 each round, momentum 0.5, weight decay 0.0001"}),
        ("linear_probe", {"head": "svm"}, {"at the end": "head 'svm', fitted to features"}),
        ("linear_probe", {}, {"passes in a round": "nothing"}),
        ("ditto", {}, {"parts of the model": "encoder, head, personal"}),
    ],
)  # fmt: skip
def test_what_only_the_method_knows_is_its_own(method, params, expected):
    footing = footing_of(Plan(method=method, params=params, data=("digits",)))
    assert {aspect: footing[aspect] for aspect in expected} == expected


def test_numbers_that_a_search_has_chosen_are_no_difference():
    plans = [Plan(method="fedavg", params={"lr": lr, "batch_size": size}, data=("digits",)) for lr, size in
             ((0.1, 10), (0.02, 64))]  # fmt: skip
    assert footing_of(plans[0])["optimizer"] != footing_of(plans[1])["optimizer"]
    first, second = (footing_of(plan, searched={"lr", "batch_size", "mu"}) for plan in plans)
    assert first == second
    assert first["optimizer"] == "SGD, step size as tuned, momentum 0.5, weight decay 0"
    assert first["batches"].startswith("as tuned; ")


def test_metric_and_round_are_those_of_the_comparison():
    method = methods.create("fedavg")
    plan = Plan(data=("digits",))
    footing = Footing.of(plan, method, average="samples_mean", scope="global", when="best")
    assert footing.metric == "shared model, over all test samples"
    assert footing.round_counted == "the best round, chosen on test samples"
    assert "metric" not in footing_of(plan)


@pytest.mark.parametrize("name", methods.names())
def test_every_method_has_a_footing_and_no_random_number_is_used(name):
    state = torch.get_rng_state()
    footing = footing_of(Plan(method=name, data=("digits",)))
    assert footing["parts of the model"]
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_say_once_what_they_have_in_common_and_are_marked_where_they_differ():
    rows = {
        "A": {"optimizer": "SGD", "passes": "5", "end": "nothing", "batches": "50"},
        "B": {"optimizer": "SGD", "passes": "5", "end": "tuning", "batches": "10"},
        "C": {"optimizer": "SGD", "passes": "1", "end": "fit", "batches": "50"},
    }
    shared = SharedFooting.among(rows)
    assert shared.common == {"optimizer": "SGD"}
    assert shared.usual == {"passes": "5", "batches": "50"}
    assert shared.differences == {
        "A": {"end": "nothing"},
        "B": {"end": "tuning", "batches": "10"},
        "C": {"passes": "1", "end": "fit"},
    }, "no two rows end alike, so that each says how"
    assert list(shared.sentences()) == [
        "all rows: optimizer: SGD",
        "usual: passes: 5 · batches: 50",
        "≠ A: end: nothing",
        "≠ B: end: tuning · batches: 10",
        "≠ C: passes: 1 · end: fit",
    ]


def test_one_row_differs_from_none_and_no_rows_have_nothing():
    assert list(SharedFooting.among({"A": {"optimizer": "SGD"}}).sentences()) == ["all rows: optimizer: SGD"]
    assert list(SharedFooting.among({}).sentences()) == []
