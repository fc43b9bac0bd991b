"""What one update adds to the sum of a round, and where it points: bounds against numbers worked out by hand."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from paper_methods import fedpac_update

from coordinator.config import AggregationConfig
from coordinator.journal.entries import RoundClosed
from coordinator.rounds.aggregation import aggregate, notes
from coordinator.rounds.bounds import find_bounds
from coordinator.rounds.directions import Direction, find_directions, outliers
from coordinator.rounds.passes import Origin, read_here
from coordinator.rounds.repeats import count_after_round
from coordinator.rounds.robust import CENTRE, centered_clipping_shares
from edge_agent import methods
from edge_agent.methods import Update

START = {"encoder.w": np.zeros(2, np.float32)}
FEDAVG = methods.create("fedavg", {})


def sent(client, change, weight=10.0, received=START):
    """An update that changes what was received by ``change``."""
    return Update(client, weight, {"encoder.w": received["encoder.w"] + np.array(change, np.float32)})


def bounds_of(updates, received=START, start=START, repeats=None, **config):
    finding = find_bounds(Origin(FEDAVG, received, start), lambda: updates, AggregationConfig(**config), repeats or {})
    return read_here(finding, lambda: updates)


def result_of(updates, received=START, start=START, **config):
    """What the round makes of the weights, and the decisions."""
    after, decisions = aggregate(FEDAVG, received, lambda: updates, AggregationConfig(**config), start)
    return after["encoder.w"].tolist(), decisions


def test_bounds_of_size_and_of_samples_do_not_multiply():
    """4.9 times the change for 4.9 times the samples is 24 votes; what it adds is bounded by a third of the sum.

    Three others add 10 each: a third of the sum is 15, so that the 49 samples with a change of 4.9 count as 15 / 4.9.
    """
    updates = [sent("a", [1, 0]), sent("b", [1, 0]), sent("c", [1, 0]), sent("d", [4.9, 0], 49)]
    _, decisions = result_of(updates)
    assert decisions.capped == {"d": (49, pytest.approx(15 / 4.9))}
    assert not decisions.suspects


def test_in_larger_rounds_an_update_adds_at_most_three_times_the_median():
    """Nine others add 10 each, so that a third of the sum would be 45."""
    updates = [*[sent(f"a{number}", [1, 0]) for number in range(9)], sent("b", [2, 0], 40)]
    _, decisions = result_of(updates)
    assert decisions.capped == {"b": (40, pytest.approx(30 / 2))}


def test_who_was_at_the_bound_again_and_again_adds_an_eighth_of_the_sum_and_is_named():
    """Three others add 10 each. 2.7 medians or more are at the bound of 3; from the third round on 30 / 7 count."""
    repeats = {}
    counted = []
    for _ in range(4):
        updates = [sent("a", [1, 0]), sent("b", [1, 0]), sent("c", [1, 0]), sent("d", [1, 0], 27)]
        _, decisions = aggregate(FEDAVG, START, lambda updates=updates: updates, AggregationConfig(), START, repeats)
        repeats = count_after_round(repeats, decisions.repeats, "abcd")
        counted.append(decisions.capped["d"][1])
    assert counted == pytest.approx([15, 15, 30 / 7, 30 / 7])
    assert repeats == {"d": 4}
    assert "near the bound in round after round (4 more than below)" in notes(decisions.to_fact())["d"]
    # Below the bound it loses one of its count each round, and counts in full again.
    below = bounds_of([sent("a", [1, 0]), sent("b", [1, 0]), sent("c", [1, 0]), sent("d", [1, 0])], repeats={"d": 2})
    assert below.repeats == {"d": 1}


def test_an_agent_that_takes_no_part_keeps_its_count_and_an_earlier_journal_has_none():
    assert count_after_round({"a": 3, "b": 2}, {"b": 3}, ["b", "c"]) == {"a": 3, "b": 3}
    assert RoundClosed().repeats == {}
    assert bounds_of([sent("a", [1, 0])], repeats={"a": 2}).repeats == {"a": 2}
    at_bound = [*(sent(name, [1, 0]) for name in "abc"), sent("d", [1, 0], 49)]
    assert bounds_of(at_bound, repeats={"d": 5}, repeat_share=None).repeats == {}


def test_an_update_that_is_not_along_the_others_adds_no_more_than_the_median():
    updates = [*[sent(f"a{number}", [1, 0]) for number in range(9)], sent("b", [0, 1], 30)]
    _, decisions = result_of(updates)
    assert decisions.capped == {"b": (30, pytest.approx(10))}


@pytest.mark.parametrize("factor, weight", [(-0.1, 10), (-1, 10), (-1, 49), (-4.9, 49), (-4.9, 10)])
def test_one_update_of_four_that_points_back_is_left_out_whatever_its_size(factor, weight):
    """Without it the others' mean is what the round makes; before there was a bound, it ended on the other side."""
    updates = [sent("a", [1, 0.2]), sent("b", [1, -0.2]), sent("c", [1, 0]), sent("d", [factor, 0], weight)]
    result, decisions = result_of(updates)
    assert result == pytest.approx([1, 0])
    assert decisions.unused == ("d",)
    assert decisions.suspects == {"d": "its change of the model points against those of the others: cosine -1.00"}


def test_cosines_are_those_of_the_sum_of_the_others_and_of_the_way():
    """The way is (0, 3). a and b have length 1, c is shortened from 10 to the median 1.

    To the others: a (1, 0) with (0, 1) + (1, 0) has 1 / sqrt 2, b (0, 1) with (2, 0) has 0, c as a.
    """
    received = {"encoder.w": np.array([0, 3], np.float32)}
    updates = [sent("a", [1, 0], 1, received), sent("b", [0, 1], 9, received), sent("c", [10, 0], 1, received)]
    norms = {"weights": {"a": 1.0, "b": 1.0, "c": 10.0}}
    finding = find_directions(Origin(FEDAVG, received, START), norms)
    directions = read_here(finding, lambda: updates)["weights"]
    assert directions["a"].to_others == pytest.approx(0.5**0.5)
    assert directions["b"].to_others == pytest.approx(0)
    assert directions["c"].to_others == pytest.approx(0.5**0.5)
    assert [directions[agent].along_way for agent in "abc"] == pytest.approx([0, 1, 0])


def test_a_client_that_differs_from_the_others_but_goes_the_way_of_the_run_keeps_its_weight():
    """Two classes each: late in a run clients point against each other, and along the way that they have made."""
    received = {"encoder.w": np.array([3, 3], np.float32)}
    updates = [
        sent(name, change, 10, received) for name, change in (("a", [1, -0.8]), ("b", [-0.8, 1]), ("c", [1, -0.8]))
    ]
    alone = bounds_of(updates, received, start=None)
    assert alone.suspects.keys() == {"b"}
    on_the_way = bounds_of(updates, received)
    assert not on_the_way.suspects
    assert not on_the_way.opposed


def test_some_that_act_together_are_not_kept_by_pointing_alike():
    """Four of ten point straight back, as one; the other six have little in common beside the way."""
    received = {"encoder.w": np.array([5, 0], np.float32)}
    honest = [sent(f"a{number}", [0.4, (-1) ** number], 10, received) for number in range(6)]
    hostile = [sent(f"b{number}", [-1, 0], 10, received) for number in range(4)]
    assert bounds_of([*honest, *hostile], received).opposed == ("b0", "b1", "b2", "b3")


def test_an_update_that_leans_back_loses_weight_in_proportion():
    """Half of the ramp below the limit: half of its weight."""
    assert Direction(-0.1).trust(-0.1) == 1
    assert Direction(-0.175).trust(-0.1) == pytest.approx(0.5)
    assert Direction(-0.25).trust(-0.1) == pytest.approx(0)
    assert Direction(-0.9, -0.05).trust(-0.1) == 1
    assert Direction(0.9, -0.9).trust(-0.1) == 0


def test_where_most_point_against_each_other_nobody_is_an_outlier():
    assert not outliers({name: Direction(-0.8 + 0.02 * place, 0.1) for place, name in enumerate("abcd")})
    assert outliers({"a": Direction(-0.8, 0.0), "b": Direction(0.2, 0.0), "c": Direction(0.1, 0.0)}) == {"a"}


OPPOSED_HALVES = {
    "two against two": ([1, 0], [1, 0], [-1, 0], [-1, 0]),
    "all against the others": ([1, 0], [-0.5, 0.866], [-0.5, -0.866]),
}


@pytest.mark.parametrize("changes", OPPOSED_HALVES.values(), ids=OPPOSED_HALVES)
def test_where_half_point_against_the_rest_the_round_is_the_plain_mean_and_nobody_is_suspect(changes):
    """Nobody can tell who is right. With a weight of 0 for each, the round had no update and the run failed."""
    updates = [sent(f"a{number}", change) for number, change in enumerate(changes)]
    result, decisions = result_of(updates)
    np.testing.assert_allclose(result, np.mean(changes, axis=0), atol=1e-6)
    assert not decisions.suspects
    assert not decisions.unused


def test_a_classifier_of_fedpac_that_answers_the_contrary_is_left_out():
    """Its encoder is that of the others, V = 0 and h theirs: all of them would take its classifier."""
    square = [[1.0, 0.0], [0.0, 1.0]]
    honest = [fedpac_update(name, v=0.5, head=square) for name in "abc"]
    liar = fedpac_update("d", v=0.0, head=[[-1.0, 0.0], [0.0, -1.0]])
    method = methods.create("fedpac", {})
    state = {"encoder.w": np.float32([0.5])}
    after, decisions = aggregate(method, state, lambda: [*honest, liar], AggregationConfig(), state)
    assert decisions.unused == ("d",)
    assert decisions.suspects["d"] == "its classifiers point against those of the others: cosine -1.00"
    np.testing.assert_allclose(after["clients.head.weight"], [square] * 3, atol=1e-6)


def test_centered_clipping_by_hand():
    """Changes 1, 2 and 9 on a line from centre 0: the radius is 2, so that 9 counts as 2.

    Step 1: (1 + 2 + 2) / 3 = 5/3. Step 2: 5/3 + (-2/3 + 1/3 + 2) / 3 = 20/9. Step 3: + (-11/9 - 2/9 + 2) / 3 = 65/27.
    """
    changes = np.array([1.0, 2.0, 9.0, 0.0])
    shares = centered_clipping_shares(np.outer(changes, changes))
    assert sum(shares) == pytest.approx(1)
    assert np.dot(shares, changes) == pytest.approx(65 / 27)


def test_the_centre_of_centered_clipping_lies_in_the_state_and_begins_the_next_round():
    """Round 1 moves by the 65 / 27 of the test before, the centre of round 2, in which all send just that."""
    updates = [sent("a", [1, 0]), sent("b", [2, 0]), sent("c", [9, 0])]
    config = AggregationConfig(rule="centered_clipping")
    first, _ = aggregate(FEDAVG, START, lambda: updates, config, START)
    np.testing.assert_allclose(first["encoder.w"], [65 / 27, 0], rtol=1e-6)
    np.testing.assert_allclose(first[f"{CENTRE}encoder.w"], [65 / 27, 0], rtol=1e-6)
    assert "encoder.w" in FEDAVG.broadcast(first)
    assert f"{CENTRE}encoder.w" not in FEDAVG.broadcast(first), "the centre never leaves the coordinator"
    again = [sent(name, [65 / 27, 0], 10, first) for name in "abc"]
    second, _ = aggregate(FEDAVG, first, lambda: again, config, START)
    np.testing.assert_allclose(second["encoder.w"], [130 / 27, 0], rtol=1e-6)


def test_a_colluding_minority_does_not_turn_centered_clipping_round():
    """Six of twenty send minus half the honest mean, as one (inner product attack)."""
    rng = np.random.default_rng(0)
    honest = [sent(f"a{number:02}", [1, 0] + 0.25 * rng.normal(size=2)) for number in range(14)]
    hostile = [sent(f"b{number}", [-0.5, 0]) for number in range(6)]
    result, decisions = result_of([*honest, *hostile], rule="centered_clipping")
    assert result[0] > 0.7
    assert set(decisions.unused) == {f"b{number}" for number in range(6)}


PRODUCTS = """
import numpy as np
from coordinator.rounds.directions import MultiplyChanges, Shares
from coordinator.rounds.passes import Origin
from edge_agent import methods
from edge_agent.methods import Update
rng = np.random.default_rng(0)
arrays = [{"w.weight": rng.standard_normal((300, 700)).astype(np.float32)} for _ in range(3)]
origin = Origin(methods.create("fedavg", {}), arrays[0], arrays[1])
shares = Shares({"weights": {"a": 1.0}})
one_pass = MultiplyChanges(shares, {"w.weight": arrays[1]["w.weight"].reshape(-1)}, has_way=True)
products = one_pass.over(origin, [Update("a", 1.0, arrays[2])])["a"]
print(products.with_sum["weights"].hex(), products.with_way.hex())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of processors of x86")
def test_aggregators_on_unlike_processors_say_the_same_of_an_update():
    """BLAS, made for each kind of processor, adds in another order on each."""
    answers = {}
    for kind in ("Prescott", "Haswell", "SkylakeX"):
        environment = {**os.environ, "OPENBLAS_CORETYPE": kind}
        done = subprocess.run(
            [sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        answers[kind] = done.stdout
    assert len(set(answers.values())) == 1, answers
