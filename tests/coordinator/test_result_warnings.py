"""Warnings about a result: numbers by hand, and a simulation that collapses."""

from __future__ import annotations

import math

import pytest

from coordinator.report import render
from coordinator.report.figures import read_run
from coordinator.runs.result_notes import absent_of, lines, local_models, standard_error, warnings_of


def client(name, personal, local=None, support=100, **fields):
    return {"id": name, "acc": {"local": local, "global": None, "personal": personal}, "support": support, **fields}


def kinds(agents, losses=(), classes=10):
    return [(one["kind"], one["clients"]) for one in warnings_of(agents, losses, classes)]


def test_standard_error_by_hand():
    """98 samples, 97 right: the rate is 98 / 100, 0.0196 / 100 under the root."""
    assert standard_error(97 / 98, 98) == pytest.approx(math.sqrt(0.000196))


def test_a_client_that_is_better_off_alone():
    """The device compared both models on each of its held-out samples, so its word counts, and not the distance."""
    alone = client("c", 0.78, 0.90, local_model="window statistics + lr", better_alone=True)
    assert kinds([client("a", 0.9, 0.8), client("b", 0.7, 0.9, better_alone=False), alone]) == [("below_local", ["c"])]
    (message,) = lines(warnings_of([alone], [], 10))
    assert message == (
        "client 'c' is better off alone: acc.local 0.900 (window statistics + lr) is above acc.personal 0.780 by more "
        "than noise (McNemar's test on 100 held-out samples)"
    )


def test_the_models_behind_acc_local_are_counted():
    assert local_models([{}, {"local_model": ""}]) == ""
    assert local_models([{"local_model": "raw inputs + lr"}] * 2) == "raw inputs + lr"
    mixed = [{"local_model": name} for name in ("a", "b", "b")]
    assert local_models(mixed) == "b (2 ×), a (1 ×)"


def test_agents_that_are_absent_at_the_end():
    def closed(number, agents, missing=(), rejected=()):
        told = [{"agent": agent, "reason": "NaN"} for agent in rejected]
        return {"round": number, "agents": agents, "missing": missing, "rejected": told}

    records = [closed(1, ["a", "b"], rejected=["c"]), closed(2, ["a"], missing=["b"], rejected=["c"]), closed(3, ["a"])]
    found = list(absent_of(records, 3, lambda agent: agent == "b", {"c": "NaN"}))
    assert [(one["kind"], one["clients"]) for one in found] == [("offline", ["b"]), ("left_out", ["c"])]
    assert "last heard in round 2 of 3; its last update is of round 1" in found[0]["message"]
    assert found[1]["message"].endswith("last asked in round 2 of 3; it delivered no update: NaN")


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
    assert "at 'b' it rose from 0.5 to 4.7" in next(lines(warnings_of([], losses, 10)))


def test_clients_of_one_class():
    found = warnings_of([client("a", 1.0, 1.0, one_class=True), client("b", 0.9, 0.9, one_class=False)], [], 10)
    assert [(one["kind"], one["clients"]) for one in found] == [("one_class", ["a"])]


def test_many_clients_below_take_few_lines():
    found = warnings_of(
        [client(f"c{number:02d}", 0.1, 0.9, local_model="x", better_alone=True) for number in range(25)], [], 10
    )
    assert len(found) == 25
    shown = list(lines(found))
    assert len(shown) == 11
    assert shown[-1] == "15 more clients below acc.local by more than noise; the result names all of them"


def test_the_report_lists_them_as_text():
    warning = {"kind": "below_local", "clients": ["a"], "message": "client 'a' <b>is</b> low"}
    page = render(read_run("run-0001", {"warnings": [warning, "damaged"]}, []))
    assert "<li>Client &#39;a&#39; &lt;b&gt;is&lt;/b&gt; low.</li>" in page
    assert "Warnings" not in render(read_run("run-0001", {"warnings": []}, []))
    assert "Warnings" not in render(read_run("run-0001", {"warnings": 7}, []))
