"""What a search tries: ranges and lists, in methods' files and as users type them; and the tuners that draw."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.research.compare.optuna_search import OptunaSearch
from coordinator.research.compare.settings import (
    TUNERS,
    Arguments,
    choices_of,
    command_of,
    contenders_of,
    parse_seeds,
    tuner_named,
)
from coordinator.research.compare.tuners import Budget, Grid, Halving, Random, rungs_of
from edge_agent import methods
from edge_agent.core.errors import ConfigError, MissingCapability, UnknownName, UsageError
from edge_agent.core.search_space import Choices, Range, parse_space
from edge_agent.methods import MethodParams, search_space, searched

STEP = Range(0.001, 0.1, log=True)


# --- spaces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, space",
    [
        ("0.001:0.1:log", STEP),
        ("0:1", Range(0.0, 1.0)),
        ("0,0.01,0.1", Choices((0, 0.01, 0.1))),
        ("sgd,adam", Choices(("sgd", "adam"))),
        ("true,false,null", Choices((True, False, None))),
        ("5", Choices((5,))),
    ],
)
def test_values_are_read_as_they_are_typed_and_written_so_again(text, space):
    assert parse_space(text) == space
    assert parse_space(str(space)) == space


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "no values"),
        (",", "no values"),
        ("1:0.1", "the smaller number first"),
        ("0:1:log", "begins above 0"),
        ("a:b", "two numbers"),
        ("1:2:lin", "only ':log' is known"),
        ("1:nan", "finite"),
        ("1:2:log:x", "only ':log'"),
    ],
)
def test_what_has_no_values_is_refused_with_an_example(text, reason):
    with pytest.raises(UsageError, match=reason):
        parse_space(text)


def test_draws_are_within_the_range_and_even_on_its_scale():
    rng = np.random.default_rng(3)
    values = [STEP.at(rng.random()) for _ in range(4000)]
    assert all(0.001 <= value <= 0.1 for value in values)
    # Half of the draws lie below the geometric mean, 0.01: within four standard deviations of 4000 coins.
    assert abs(sum(value < 0.01 for value in values) - 2000) < 4 * math.sqrt(1000)
    assert all(value == float(f"{value:.3g}") for value in values)
    whole = {Range(1, 3, whole=True).at(rng.random()) for _ in range(100)}
    assert whole == {1, 2, 3}
    assert Range(0.001, 0.1, log=True).grid(3) == (0.001, 0.01, 0.1)
    assert Range(1, 3, whole=True).grid(9) == (1, 2, 3)
    assert Choices((1, True, 1)).size == 2


@pytest.mark.parametrize("name", methods.names())
def test_every_method_has_a_space_that_its_parameters_allow(name):
    kind = methods.get(name).Params
    space = search_space(kind)
    assert space
    rng = np.random.default_rng(0)
    for parameter, values in space.items():
        for value in (*values.ends(), values.at(rng.random())):
            assert getattr(kind.model_validate({parameter: value}), parameter) == value


def test_a_field_that_is_defined_again_keeps_its_values_unless_it_has_no_effect():
    assert search_space(methods.get("fedbabu").Params)["lr"] == search_space(methods.get("fedavg").Params)["lr"]
    assert search_space(methods.get("repper").Params)["lr"] == Range(0.0001, 0.01, log=True)
    assert "lr" not in search_space(methods.get("linear_probe").Params)
    assert set(search_space(methods.get("fedprox_ft").Params)) == {"lr", "mu", "tune_epochs"}


def test_all_mistakes_of_a_methods_own_space_are_listed():
    class Wrong(MethodParams):
        empty: float = searched(1.0, Choices(()), description="no values")
        beyond: float = searched(0.5, Range(0, 2), ge=0, le=1, description="1 is the largest")
        reverse: float = searched(0.5, Range(2, 1), description="the wrong way round")

    with pytest.raises(ConfigError) as caught:
        search_space(Wrong)
    assert len(caught.value.mistakes) == 3
    assert "empty: no values" in str(caught.value)
    assert "beyond = 2.0" in str(caught.value)


def arguments(**changes: Any) -> Arguments:
    fields = {
        "methods": choices_of(["fedprox", "ditto"], changes.pop("params", {}), always=()),
        "plan": {"data": ["digits"], "folder": "."},
        "seeds": (0, 1),
        "trials": 4,
    }
    return Arguments.model_validate({**fields, **changes})


def test_a_users_range_is_for_the_methods_that_have_the_parameter():
    contenders = contenders_of(arguments(space={"mu": "0,0.1", "ditto.lr": "0.01:0.02"}))
    spaces = {contender.choice.name: contender.space for contender in contenders}
    assert spaces["fedprox"] == {"lr": Range(0.001, 0.3, log=True), "mu": Choices((0, 0.1))}
    assert spaces["ditto"]["lr"] == Range(0.01, 0.02)


def test_a_parameter_that_is_set_is_not_searched():
    contenders = contenders_of(arguments(params={"lr": 0.02, "ditto.lr": 0.03}))
    assert all("lr" not in contender.space for contender in contenders)
    assert [contender.choice.params for contender in contenders] == [{"lr": 0.02}, {"lr": 0.03}]


@pytest.mark.parametrize(
    "space, params, reason",
    [
        ({"my": "0,1"}, {}, "unknown parameter of --space my 'my': did you mean 'mu'"),
        ({"fedprox.proximal_weight": "1,2"}, {}, "unknown parameter"),
        ({"fedprx.mu": "1,2"}, {}, "did you mean 'fedprox'"),
        ({"mu": "-1,0.1"}, {}, "mu = -1"),
        ({"mu": "0:nan"}, {}, "finite"),
        ({"lr": "0.1,0.2"}, {"lr": 0.1}, "set by --set and searched by --space"),
        ({"batch_size": "1.5,2"}, {}, "batch_size = 1.5"),
    ],
)
def test_a_range_that_no_method_has_or_allows_is_refused(space, params, reason):
    with pytest.raises(ConfigError, match=reason):
        contenders_of(arguments(space=space, params=params))


def test_a_search_of_what_has_no_effect_is_refused():
    chosen = choices_of(["linear_probe"], {}, always=())
    with pytest.raises(ConfigError, match=r"linear_probe\.lr"):
        contenders_of(arguments(methods=chosen, space={"linear_probe.lr": "0.1,0.2"}))


@pytest.mark.parametrize("params", [{"moo": 1}, {"fedprox.mu": -1}, {"nope.mu": 1}])
def test_a_parameter_that_cannot_be_set_is_refused(params):
    with pytest.raises(ConfigError):
        choices_of(["fedprox"], params, always=())


def test_the_command_of_a_comparison_has_values_as_the_command_line_reads_them():
    """Read as JSON, or else as text: True is no JSON, and 7 would be a number."""
    values = {"wide": True, "seed": None, "name": "7", "kind": "deep", "widths": [1, 2]}
    plan = {"data": ["digits"], "folder": ".", "encoder_params": values, "standardise": True, "full_last_round": False}
    words = list(command_of(arguments(plan=plan, params={"fedprox.mu": 0.5}), Path("out")))
    pairs = [word for flag, word in itertools.pairwise(words) if flag == "--encoder-param"]
    assert pairs == ["wide=true", "seed=null", 'name="7"', "kind=deep", "widths=[1, 2]"]
    assert "fedprox.mu=0.5" in words
    assert "--standardise" in words
    assert "--full-last-round" not in words


@pytest.mark.parametrize("text, seeds", [("0:3", (0, 1, 2)), ("4,2", (4, 2)), ("7", (7,))])
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0:0", "3:1", "1,1", "a", "1:2:3", "-1,0"])
def test_seeds_that_are_none(text):
    with pytest.raises(UsageError, match=r"--seeds"):
        parse_seeds(text)


# --- tuners ----------------------------------------------------------------------------------------------------------

SPACE = {"lr": STEP, "mu": Choices((0.0, 0.1, 1.0))}


def play(tuner, score=lambda params: -abs(math.log10(params.get("lr", 0.01)) + 1.5)):
    """Run a search whose trials cost nothing; returns all proposals."""
    proposals = []
    while wave := tuner.ask():
        proposals += wave
        for proposal in wave:
            tuner.tell(proposal, score(proposal.params))
    assert tuner.rounds_left == 0
    return proposals


@pytest.mark.parametrize("name", ["random", "halving", "optuna"])
def test_all_methods_get_as_many_trials_and_the_first_has_the_defaults(name):
    budget = Budget(trials=9, rounds=9, seed=5)
    for space in (SPACE, {"lr": STEP}, {"a": Range(0, 1), **SPACE}):
        proposals = play(tuner_named(name)(space, budget))
        assert {proposal.number for proposal in proposals} == set(range(9))
        assert proposals[0].params == {}
        assert play(tuner_named(name)(space, budget)) == proposals
    assert play(tuner_named(name)({}, budget))[0].params == {}


def test_random_trials_differ_and_methods_try_the_same_step_sizes():
    budget = Budget(trials=12, rounds=3, seed=1)
    wide = play(Random(SPACE, budget))
    narrow = play(Random({"lr": STEP}, budget))
    assert [p.params.get("lr") for p in wide] == [p.params.get("lr") for p in narrow]
    assert len({str(p.params) for p in wide}) == 12
    assert play(Random(SPACE, Budget(trials=12, rounds=3, seed=2))) != wide


@pytest.mark.parametrize("seed", range(5))
def test_random_trials_leave_no_part_of_a_range_out(seed):
    params = [proposal.params for proposal in play(Random(SPACE, Budget(trials=12, rounds=1, seed=seed)))][1:]
    parts = sorted(math.floor(11 * (math.log10(choice["lr"]) + 3) / 2 + 1e-9) for choice in params)
    # A value is rounded to three digits, which may put it beyond the edge of its part.
    assert all(abs(part - expected) <= 1 for part, expected in zip(parts, range(11), strict=True))
    assert len(set(parts)) >= 9
    times = [sum(choice["mu"] == mu for choice in params) for mu in (0.0, 0.1, 1.0)]
    assert min(times) >= 3


def test_a_space_with_few_values_has_each_once():
    few = {"head": Choices(("lr", "svm")), "k": Range(1, 2, whole=True)}
    params = [proposal.params for proposal in play(Random(few, Budget(trials=12, rounds=1)))]
    expected = [{"head": head, "k": k} for head, k in itertools.product(("lr", "svm"), (1, 2))]
    assert params[0] == {}
    assert sorted(map(str, params[1:])) == sorted(map(str, expected))


@pytest.mark.parametrize(
    "trials, rounds, rungs",
    [
        (12, 10, [(12, 1), (4, 3), (1, 10)]),
        (12, 100, [(12, 11), (4, 33), (1, 100)]),
        (9, 3, [(9, 1), (3, 3)]),
        (2, 10, [(2, 10)]),
        (12, 2, [(12, 2)]),
        (1, 1, [(1, 1)]),
    ],
)
def test_successive_halving_has_its_rungs(trials, rounds, rungs):
    assert rungs_of(Budget(trials, rounds)) == rungs


def test_successive_halving_keeps_the_best_third_and_none_that_failed():
    budget = Budget(trials=9, rounds=9, seed=0)
    scores = dict(enumerate([0.1, None, 0.9, 0.3, 0.8, 0.2, 0.7, None, 0.9]))
    tuner = Halving(SPACE, budget)
    first = tuner.ask()
    assert [proposal.rounds for proposal in first] == [1] * 9
    for proposal in first:
        tuner.tell(proposal, scores[proposal.number])
    second = tuner.ask()
    assert [(proposal.number, proposal.rounds) for proposal in second] == [(2, 3), (4, 3), (8, 3)]
    assert [proposal.params for proposal in second] == [first[number].params for number in (2, 4, 8)]
    for proposal in second:
        tuner.tell(proposal, None)
    assert list(tuner.ask()) == []
    assert "9 trials of 1 round, then 3 trials of 3 rounds, then 1 trial of 9 rounds: 27 rounds for each method" in (
        Halving.describe(budget)
    )


def test_a_grid_has_all_combinations_beside_the_defaults():
    proposals = play(Grid(SPACE, Budget(trials=1, rounds=2, points=2)))
    assert [p.params for p in proposals] == [
        {},
        *({"lr": lr, "mu": mu} for lr in (0.001, 0.1) for mu in (0.0, 0.1, 1.0)),
    ]
    with pytest.raises(UsageError, match="expected at most"):
        Grid({"a": Range(0, 1), "b": Range(0, 1)}, Budget(trials=1, rounds=1, points=1000))


def test_optuna_learns_from_scores():
    """The same sampler of Optuna, asked without this project in between, proposes the same."""
    import optuna

    budget = Budget(trials=15, rounds=1, seed=4)
    proposals = play(OptunaSearch({"lr": STEP}, budget), lambda params: params.get("lr", 0.0))
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=4))
    expected = []
    for _ in range(14):
        trial = study.ask()
        expected.append(trial.suggest_float("lr", 0.001, 0.1, log=True))
        study.tell(trial, expected[-1])
    assert [proposal.params["lr"] for proposal in proposals[1:]] == expected


@pytest.mark.parametrize("space", [Range(0.5, 8, log=True, whole=True), Range(1.5, 3.7, whole=True)])
def test_optuna_searches_the_whole_numbers_within_a_range(space):
    proposals = play(OptunaSearch({"k": space}, Budget(trials=20, rounds=1)))
    values = {proposal.params["k"] for proposal in proposals[1:]}
    assert values <= set(range(math.ceil(space.low), math.floor(space.high) + 1))
    assert len(values) > 1


def test_without_optuna_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingCapability, match=r"optuna.*\[optuna\].*--search random"):
        OptunaSearch(SPACE, Budget(trials=2, rounds=1))


def test_an_unknown_search_gets_the_nearest_name():
    assert set(TUNERS) == {"random", "halving", "grid", "optuna"}
    with pytest.raises(UnknownName, match="did you mean 'halving'"):
        tuner_named("halvin")
