"""Defaults of ours beside the published values, which one definition holds."""

from __future__ import annotations

from typing import ClassVar

import pytest

from edge_agent import methods
from edge_agent.core.errors import ConfigError, UnknownName, UsageError
from edge_agent.core.published import DATA_SETS, SOURCES, Published, data_sets_of, published_in, published_of

PUBLISHED = {
    "afl": {"ridge": 0.0, "intercept": False, "scale": 1.0, "min_class_count": 1},
    "fedcof": {"scale": 1.0, "min_class_count": 1},
    "dualfed": {"contrastive_weight": 40.0, "batch_size": 256, "refresh_stats": False},
    "fedpick": {"batch_size": 32, "refresh_stats": False},
    "fedrir": {
        "lr": 5e-4,
        "batch_size": 100,
        "specific_dim": 512,
        "id_mode": "official",
        "id_weight": 1.0,
        "refresh_stats": False,
    },
}
"""AFL and FedCOF: plain sums and means of all samples.

DualFed: Sec. 5.3 and the official script for PACS. FedPick: FedBN's code, as its own is lost.

FedRIR: Sec. 4.2, Eq. 10 and the authors' code."""


@pytest.mark.parametrize("name", methods.names())
def test_published_values_are_what_papers_and_their_code_say(name):
    assert methods.paper_values(methods.get(name).Params) == PUBLISHED.get(name, {})
    made = methods.create(name, paper=True).params
    assert all(getattr(made, field) == value for field, value in PUBLISHED.get(name, {}).items())


@pytest.mark.parametrize("name", methods.names())
def test_a_default_of_ours_says_so_and_the_other_fields_do_not_differ(name):
    fields = methods.get(name).Params.model_fields
    ours, paper = (methods.create(name, paper=flag).params.model_dump() for flag in (False, True))
    differing = {field for field in fields if ours[field] != paper[field]}
    assert differing == set(methods.paper_values(methods.get(name).Params))
    assert all("ours" in (fields[field].description or "") for field in differing)


@pytest.mark.parametrize("name", methods.names())
def test_every_published_value_is_one_that_the_parameter_takes_and_says_who_says_it(name):
    params = methods.get(name).Params
    for field, values in published_of(params).items():
        assert field in params.model_fields
        assert len({(each.data, each.value) for each in values}) == len(values), field
        for each in values:
            assert each.source in SOURCES
            assert each.data == each.data.lower(), "what is asked for is compared in small letters"
            assert each.location or each.source not in {"not published", "others' code"}, "where, or what is missing"
            if each.value is not None:
                checked = getattr(methods.create(name, {field: each.value}).params, field)
                assert (checked, type(checked)) == (each.value, type(each.value))


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_value_that_paper_takes_has_its_source(name):
    """The first one that is stated is the one that ``--paper`` takes."""
    stated = published_of(methods.get(name).Params)
    for field, value in PUBLISHED[name].items():
        assert stated[field][0].value == value, field


FOR_DATA = {
    ("dualfed", "pacs"): {"contrastive_weight": 40.0, "temperature": 0.2, "batch_size": 256},
    ("dualfed", "OfficeHome"): {"contrastive_weight": 2.0, "temperature": 0.05, "batch_size": 256},
    ("fedpick", "digits5"): {"global_weight": 10.0, "relevant_weight": 10.0, "distillation_weight": 10.0},
    ("fedpick", "domainnet"): {"global_weight": 1.0, "irrelevant_weight": 0.001, "batch_size": 32},
    ("fedpac", "cifar-10"): {"lr": 0.02, "head_lr": 0.1},
    ("fedproto", "cifar-10"): {"alignment_weight": 0.1},
    ("spherefed", "officehome"): {"lr": 1.0},
}
"""DualFed's scripts and Sec. 5.3, FedPick's Table III, FedPAC's and FedProto's code."""


@pytest.mark.parametrize("name, data", FOR_DATA)
def test_values_of_one_data_set_are_taken_with_those_that_hold_for_all(name, data):
    params = methods.create(name, paper_for=data).params
    assert {field: getattr(params, field) for field in FOR_DATA[name, data]} == FOR_DATA[name, data]


def test_a_data_set_without_values_of_its_own_is_refused():
    for name in ("dualfed", "fedavg"):
        with pytest.raises(UnknownName, match=r"data set of published values 'pasc': did you mean 'pacs'\?"):
            methods.create(name, paper_for="pasc")
    with pytest.raises(UsageError, match=r"values for officehome and pacs .* none for 'domainnet'"):
        methods.create("dualfed", paper_for="domainnet")  # its script is cut off


def test_a_method_whose_values_hold_for_any_data_takes_these_for_one():
    """So that one option serves all methods of a comparison."""
    assert methods.create("fedrir", paper_for="pacs").params == methods.create("fedrir", paper=True).params
    assert methods.create("fedavg", paper_for="pacs").params == methods.create("fedavg").params


def test_the_data_sets_that_can_be_asked_for_are_those_with_values():
    assert set(DATA_SETS) == {data for name in methods.names() for data in data_sets_of(methods.get(name).Params)}


def test_values_in_use_are_those_of_the_data_set_that_was_asked_for():
    """FedPick's weight is 1 for two data sets; DualFed's temperature is that of PACS whether asked for or not."""
    fedpick = methods.get("fedpick").Params
    assert published_in(fedpick, {"global_weight": 1.0}, "domainnet")["global_weight"].data == "domainnet"
    assert published_in(fedpick, {"global_weight": 3.0, "lr": None}, "domainnet") == {}
    dualfed = methods.create("dualfed", paper=True).params
    in_use = published_in(type(dualfed), dualfed.model_dump(), None)
    assert (in_use["temperature"].data, in_use["batch_size"].data) == ("pacs", "")
    assert in_use["contrastive_weight"].source == "authors' code"
    assert "augment" not in in_use, "flips and rotations are off"


def test_a_method_of_ones_own_inherits_sources_and_adds_to_them():
    fedrir = methods.get("fedrir")

    class Params(fedrir.Params):
        published: ClassVar = {"lr": (Published(1e-3, "paper", "Table 9"),)}

    assert published_of(Params)["lr"][0].location == "Table 9"
    assert published_of(Params)["batch_size"] == published_of(fedrir.Params)["batch_size"]


def test_what_is_given_wins_over_both():
    assert methods.create("dualfed", {"contrastive_weight": 3.0}, paper=True).params.contrastive_weight == 3.0
    with pytest.raises(ConfigError, match="lambda_weight: unknown key"):
        methods.create("dualfed", {"lambda_weight": 3.0}, paper=True)
