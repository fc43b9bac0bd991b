"""Warnings about a result: numbers by hand, and a simulation that collapses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from coordinator.report import render
from coordinator.report.figures import read_run
from coordinator.rounds.request import Request
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
from edge_agent import methods
from edge_agent.core.task import ImageInput, Task


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


def requested(method="fedavg", encoder="small_cnn", side=32):
    names = ("a", "b", "c", "d")
    task = Task(input=ImageInput(height=side, width=side + 8), class_names=names, encoder=encoder)
    return Request(method, {}, 5, 0, task)


def names_of(agents, losses=(), *, request=None, has_bundle=False):
    request = request or requested()
    leaves_encoder = methods.create(request.method).leaves_encoder
    steps = next_steps(request, agents, losses, has_bundle=has_bundle, leaves_encoder=leaves_encoder)
    return [next_step.step for next_step in steps]


def test_next_steps_are_named_where_clients_are_worse_than_alone():
    """Ten clients of 100 held-out samples, each 6 points below: none by more than noise, their mean by 3 errors.

    By hand: (72 + 1) / 102 and (78 + 1) / 102 have standard errors of 0.0447 and 0.0414, together 0.0609; of the mean
    of ten that is 0.0193, twice that 0.0385, and 6 / 102 = 0.0588 is above it. Of four it is 0.0609, which is not.
    """
    good = client("a", 0.9, 0.8, samples=400)
    assert names_of([good]) == []
    assert names_of([good, client("b", 0.7, 0.9, samples=400)]) == [], "no more than noise in the mean"
    assert names_of([good, client("b", 0.7, 0.9, samples=400, better_alone=True)]) == ["other_method"]
    below = [client(f"c{number}", 0.72, 0.78, samples=400) for number in range(10)]
    assert names_of(below) == ["other_method"]
    assert names_of(below[:4]) == []


def test_next_steps_are_those_that_the_figures_speak_for():
    few = [client(name, 0.5, 0.8, samples=40, better_alone=True) for name in "abc"]
    falling = [{"a": loss, "b": 2 * loss} for loss in (2.0, 1.5, 1.2, 1.0, 0.9)]
    rounds, *others = next_steps(requested("fedper"), few, falling, has_bundle=False)
    assert rounds.message == (
        "more rounds (--rounds): the training loss still falls, from 2.25 to 1.35 in the last 3 rounds"
    )
    assert [next_step.step for next_step in others] == ["more_samples", "pretrained_encoder"]
    assert names_of(few, falling[:3]) == ["more_samples", "pretrained_encoder"], "too few rounds to say"
    many = [client(name, 0.5, 0.8, samples=400, better_alone=True) for name in "abc"]
    settled = [{"a": 1.0}] * 5
    assert names_of(many, settled) == ["larger_encoder"]
    assert names_of(many, settled, request=requested(side=24)) == ["other_method"], "24 of 24 x 32 pixels are too few"
    assert names_of(many, request=requested("afl")) == ["pretrained_encoder", "train_encoder"]


def test_the_disagreement_of_clients_is_what_their_personal_models_gain_over_the_shared_one():
    """Both clients: 50 and 30 points more than the shared model, 40 in the mean."""
    first = client("a", 0.8, 0.9, samples=400, better_alone=True)
    second = client("b", 0.7, 0.6, samples=400)
    apart = [replace(first, acc={**first.acc, "global": 0.3}), replace(second, acc={**second.acc, "global": 0.4})]
    (step,) = next_steps(requested(), apart, [], has_bundle=False)
    assert "40.0 points above the shared one" in step.message
    alike = [replace(agent, acc={**agent.acc, "global": agent.acc["personal"]}) for agent in apart]
    assert names_of(alike) == ["personal_part"], "every device answers with the shared model"
    (step,) = next_steps(requested(), [alike[0], apart[1]], [], has_bundle=False)
    assert step.message.endswith("15.0 points above the shared one in the mean, by more than noise")


def test_a_blend_is_for_those_that_lose_with_their_own_layers():
    own = client("a", 0.5, 0.8, samples=400, better_alone=True, head="model")
    assert names_of([own], has_bundle=True) == ["blend"]
    assert names_of([own]) == ["other_method"], "without a bundle there is no encoder to fit a head on"
    assert names_of([replace(own, head="blend of lr and lr")], has_bundle=True) == ["other_method"]
    winning = client("b", 0.9, 0.8, samples=400, head="model")
    assert names_of([replace(own, head="lr"), winning], has_bundle=True) == ["other_method"]


def test_the_report_lists_the_next_steps_as_text():
    steps = [{"step": "more_rounds", "message": "more <b>rounds</b>"}, "as earlier versions wrote it", 7]
    page = render(read_run("run-0001", {"next_steps": steps}, []))
    assert "<li>More &lt;b&gt;rounds&lt;/b&gt;.</li>" in page
    assert "<li>As earlier versions wrote it.</li>" in page
    assert page.count("What to try next") == 1
    assert "What to try next" not in render(read_run("run-0001", {"next_steps": 7}, []))
    assert "What to try next" not in render(read_run("run-0001", {}, []))
