"""Warnings about a result: numbers by hand, and a simulation that collapses."""

from __future__ import annotations

import math

import pytest

from coordinator.report import render
from coordinator.report.figures import read_run
from coordinator.runs.result_notes import (
    ResultWarning,
    describe_warnings,
    find_absent,
    find_warnings,
    local_models,
    next_steps,
)
from coordinator.state.noise import standard_error
from coordinator.state.run_lines import AgentLine, RoundLine


def client(name, personal, local=None, support=100, **fields):
    acc = {"local": local, "global": None, "personal": personal}
    return AgentLine(name, acc=acc, support=support, **fields)


def kinds(agents, losses=(), classes=10):
    return [(warning.kind, [*warning.clients]) for warning in find_warnings(agents, losses, classes)]


def test_standard_error_by_hand():
    """98 samples, 97 right: the rate is 98 / 100, 0.0196 / 100 under the root."""
    assert standard_error(97 / 98, 98) == pytest.approx(math.sqrt(0.000196))


def test_a_client_that_is_better_off_alone():
    """The device compared both models on each of its held-out samples, so its word counts, and not the distance."""
    alone = client("c", 0.78, 0.90, local_model="window statistics + lr", better_alone=True)
    assert kinds([client("a", 0.9, 0.8), client("b", 0.7, 0.9, better_alone=False), alone]) == [("below_local", ["c"])]
    (message,) = describe_warnings(find_warnings([alone], [], 10))
    assert message == (
        "client 'c' is better off alone: acc.local 0.900 (window statistics + lr) is above acc.personal 0.780 by more "
        "than noise (McNemar's test on 100 held-out samples)"
    )


def test_the_models_behind_acc_local_are_counted():
    assert local_models([AgentLine("a"), AgentLine("b", local_model="")]) == ""
    assert local_models([AgentLine("a", local_model="raw inputs + lr")] * 2) == "raw inputs + lr"
    mixed = [AgentLine(name, local_model=name) for name in ("a", "b", "b")]
    assert local_models(mixed) == "b (2 ×), a (1 ×)"


def test_agents_that_are_absent_at_the_end():
    def closed(number, agents, missing=(), rejected=()):
        told = [{"agent": agent, "reason": "NaN"} for agent in rejected]
        return RoundLine.from_json({"round": number, "agents": agents, "missing": missing, "rejected": told})

    records = [closed(1, ["a", "b"], rejected=["c"]), closed(2, ["a"], missing=["b"], rejected=["c"]), closed(3, ["a"])]
    found = list(find_absent(records, 3, lambda agent: agent == "b", {"c": "NaN"}))
    assert [(warning.kind, warning.clients) for warning in found] == [("offline", ("b",)), ("left_out", ("c",))]
    assert "last heard in round 2 of 3; its last update is of round 1" in found[0].message
    assert found[1].message.endswith("last asked in round 2 of 3; it delivered no update: NaN")


def test_a_collapsed_worst_tenth():
    nine = [client(f"c{number}", 0.9) for number in range(9)]
    assert kinds([*nine, client("z", 0.0)]) == [("collapsed_tenth", ["z"])]
    assert kinds([*nine, client("z", 0.6)]) == []
    twenty = [client(f"c{number:02d}", 0.9) for number in range(18)]
    assert kinds([*twenty, client("x", 0.2), client("y", 0.1)]) == [("collapsed_tenth", ["y", "x"])]
    assert kinds([client("alone", 0.0)]) == []


def test_a_loss_that_explodes():
    """Ten classes: guessing costs log 10 = 2.30, so nothing below 4.61 has exploded, nor twice a large first value."""
    losses = [{"a": 0.5, "b": 0.5, "c": 200.0}, {"a": 4.5, "c": 390.0}, {"b": 4.7}]
    assert kinds([], losses) == [("exploding_loss", ["b"])]
    assert "at 'b' it rose from 0.5 to 4.7" in next(describe_warnings(find_warnings([], losses, 10)))


def test_clients_of_one_class():
    found = find_warnings([client("a", 1.0, 1.0, one_class=True), client("b", 0.9, 0.9, one_class=False)], [], 10)
    assert [(warning.kind, warning.clients) for warning in found] == [("one_class", ("a",))]


def test_many_clients_below_take_few_lines():
    found = find_warnings(
        [client(f"c{number:02d}", 0.1, 0.9, local_model="x", better_alone=True) for number in range(25)], [], 10
    )
    assert len(found) == 25
    shown = list(describe_warnings(found))
    assert len(shown) == 11
    assert shown[-1] == "15 more clients below acc.local by more than noise; the result names all of them"


def test_the_report_lists_them_as_text():
    warning = {"kind": "below_local", "clients": ["a"], "message": "client 'a' <b>is</b> low"}
    page = render(read_run("run-0001", {"warnings": [warning, "damaged"]}, []))
    assert "<li>Client &#39;a&#39; &lt;b&gt;is&lt;/b&gt; low.</li>" in page
    assert "Warnings" not in render(read_run("run-0001", {"warnings": []}, []))
    assert "Warnings" not in render(read_run("run-0001", {"warnings": 7}, []))


def alone(*names):
    return [ResultWarning("below_local", (name,), f"{name} is better off alone") for name in names]


def test_a_simulation_names_all_clients_that_are_better_off_alone_in_one_line():
    one_class = ResultWarning("one_class", ("z",), "z has one class")
    names = [f"c{number}" for number in range(12)]
    told = list(describe_warnings([*alone(*names), one_class], 0))
    assert told[0] == "z has one class"
    assert told[1].startswith(
        "12 clients are better off alone: acc.local is above acc.personal by more than noise (c0, "
    )
    assert len(told) == 2
    assert list(describe_warnings(alone("c0"), 0)) == ["c0 is better off alone"], "one has a line with its figures"
    assert len(list(describe_warnings(alone(*names)))) == 11, "a federation: ten lines, and one on the others"


def test_next_steps_are_those_that_the_figures_speak_for():
    few = [AgentLine(name, samples=40) for name in "abc"]
    falling = [{"a": loss} for loss in (2.0, 1.5, 1.2, 1.0, 0.9)]
    still = [{"a": 0.5}] * 5
    assert next_steps("fedavg", few, falling, []) == [], "nobody is better off alone"
    rounds, weights, other = next_steps("fedper", few, falling, alone("a"))
    assert rounds == "more rounds (--rounds): the training loss still falls, from 1.5 to 0.9 in the last 3 rounds"
    assert "half of the devices have 40 samples or fewer" in weights
    assert other == "a method that keeps more on the device (--method fedrep or fedavg_ft)"
    many = [AgentLine(name, samples=400) for name in "abc"]
    assert next_steps("fedavg", many, still, alone("a")) == [
        "a method that keeps more on the device (--method fedper or fedrep)"
    ]
    assert len(next_steps("fedavg", many, falling[:3], alone("a"))) == 1, "too few rounds to say"
