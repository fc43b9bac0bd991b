"""Warnings about a result: numbers by hand, and a simulation that collapses."""

from __future__ import annotations

import math

import pytest

from coordinator.report import render
from coordinator.report.figures import read_run
from coordinator.runs.result_notes import absent_of, lines, standard_error, warnings_of


def client(name, personal, local=None, support=100, **fields):
    return {"id": name, "acc": {"local": local, "global": None, "personal": personal}, "support": support, **fields}


def kinds(agents, losses=(), classes=10):
    return [(one["kind"], one["clients"]) for one in warnings_of(agents, losses, classes)]


def test_standard_error_by_hand():
    """98 samples, 49 and 97 right: rates 50 / 100 and 98 / 100, (0.25 + 0.0196) / 100 under the root."""
    assert standard_error(0.5, 97 / 98, samples=98) == pytest.approx(math.sqrt(0.002696))


def test_a_client_below_its_local_baseline_by_more_than_noise():
    """On 100 samples 0.78 and 0.90 are 79 and 91 of 102 with one right and one wrong answer added: 0.118 apart.

    Two standard errors are 2 sqrt((0.7745 x 0.2255 + 0.8922 x 0.1078) / 102) = 0.103; 0.81 is only 0.088 away.
    """
    assert kinds([client("a", 0.90, 0.80), client("b", 0.81, 0.90), client("c", 0.78, 0.90)]) == [
        ("below_local", ["c"])
    ]
    (message,) = lines(warnings_of([client("c", 0.78, 0.90)], [], 10))
    assert message == (
        "client 'c': acc.personal 0.780 is below its local baseline, acc.local 0.900, by more than noise (0.103, two "
        "standard errors on 100 held-out samples)"
    )


def test_agents_that_are_absent_at_the_end():
    def closed(number, agents, missing=(), rejected=()):
        told = [{"agent": agent, "reason": "NaN"} for agent in rejected]
        return {"round": number, "agents": agents, "missing": missing, "rejected": told}

    records = [closed(1, ["a", "b"], rejected=["c"]), closed(2, ["a"], missing=["b"], rejected=["c"]), closed(3, ["a"])]
    found = list(absent_of(records, 3, lambda agent: agent == "b", {"c": "NaN"}))
    assert [(one["kind"], one["clients"]) for one in found] == [("offline", ["b"]), ("left_out", ["c"])]
    assert "last heard in round 2 of 3; its last update is of round 1" in found[0]["message"]
    assert found[1]["message"].endswith("last asked in round 2 of 3; it delivered no update: NaN")


def test_few_samples_say_nothing():
    assert kinds([client("a", 0.0, 1.0, support=2)]) == []
    assert kinds([client("a", 0.0, 1.0, support=8)]) == [("below_local", ["a"])]
    assert kinds([client("a", 0.0, 1.0, support=0), client("b", None, 1.0), client("c", 0.5, None)]) == []


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
    found = warnings_of([client(f"c{number:02d}", 0.1, 0.9) for number in range(25)], [], 10)
    assert len(found) == 25
    shown = list(lines(found))
    assert len(shown) == 11
    assert shown[-1] == "15 more clients below acc.local by more than noise; the result names all of them"


def test_the_report_lists_them_as_text():
    warning = {"kind": "below_local", "clients": ["a"], "message": "client 'a' <b>is</b> low"}
    page = render(read_run("run-0001", {"warnings": [warning, "damaged"]}, []))
    assert "<li>client &#39;a&#39; &lt;b&gt;is&lt;/b&gt; low</li>" in page
    assert "Warnings" not in render(read_run("run-0001", {"warnings": []}, []))
    assert "Warnings" not in render(read_run("run-0001", {"warnings": 7}, []))
