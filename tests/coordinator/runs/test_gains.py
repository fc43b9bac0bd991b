"""Gains of runs over the step before: computed by hand, on the same devices, and told from noise."""

from __future__ import annotations

import json
import math

import pytest

from coordinator.runs.gains import NamedRun, compare_runs, describe_comparison
from coordinator.runs.run_summary import RunSummary
from coordinator.state.noise import Gain
from edge_agent.core.errors import UsageError


def device(name, local, personal, support=100, traffic=0):
    acc = {"local": local, "personal": personal}
    return {"id": name, "acc": acc, "support": support, "bytes_up": traffic, "bytes_down": traffic}


def run(name, *agents, method="afl", rounds=1, **more):
    summary = {"run_id": name, "method": method, "rounds": rounds, "seconds": 3.0, "agents": agents}
    return NamedRun(name, RunSummary.from_json(summary), **more)


FIRST = run("run-0001", device("a", 0.40, 0.80), device("b", 0.60, 0.62, traffic=10**6))
SECOND = run("run-0002", device("a", 0.40, 0.84), device("b", 0.60, 0.40), method="fedavg_ft", rounds=10)


def test_gains_by_hand():
    comparison = compare_runs([FIRST, SECOND])
    assert [step.name for step in comparison.steps] == ["alone", "run-0001", "run-0002"]
    assert [step.accuracy for step in comparison.steps] == pytest.approx([0.5, 0.71, 0.62])
    assert comparison.steps[0].gain is None
    first, second = (step.gain for step in comparison.steps[1:])
    assert (first.mean, second.mean) == pytest.approx((0.21, -0.09))
    # Of 102 with one right and one wrong answer added: a from 41 to 81, 0.392 against 2 * 0.063; b from 61 to 63.
    assert (first.better, first.as_good, first.worse) == (1, 1, 0)
    assert (second.better, second.as_good, second.worse) == (0, 1, 1)
    # The mean of both: from 0.5 to 0.706, 0.206 against 2 * 0.046.
    error = math.sqrt(sum(p * (1 - p) / 102 for p in (41 / 102, 81 / 102, 61 / 102, 63 / 102))) / 2
    assert 2 * error < 0.206
    assert first.verdict is Gain.ABOVE
    assert comparison.steps[1].bytes_each == 10**6


def test_the_step_to_stay_with_is_the_first_that_no_later_one_beats():
    better = run("run-0003", device("a", 0.40, 0.99), device("b", 0.60, 0.90), method="fedper")
    assert compare_runs([FIRST, SECOND]).best.name == "run-0001"
    assert compare_runs([FIRST, SECOND, better]).best.name == "run-0003"
    slightly = run("run-0003", device("a", 0.40, 0.81), device("b", 0.60, 0.63), method="fedper")
    assert compare_runs([FIRST, slightly]).best.name == "run-0001", "one point of 100 samples is noise"
    assert compare_runs([run("r", device("a", 0.5, 0.52))]).best.name == "alone"


def test_only_devices_with_the_same_samples_in_every_step_count():
    other = run("run-0002", device("a", 0.4, 0.9), device("b", 0.6, 0.9, support=90), device("c", 0.1, 0.9))
    comparison = compare_runs([FIRST, other])
    assert comparison.devices == ("a",)
    assert comparison.left_out == ("b", "c")
    assert comparison.steps[0].accuracy == 0.4
    assert "Not compared: b, c;" in "\n".join(describe_comparison(comparison))


@pytest.mark.parametrize(
    "agents",
    [
        (),
        (device("z", 0.4, 0.9),),
        (device("a", 0.4, 0.9, support=99), device("b", 0.4, 0.9, support=0)),
        (device("a", None, 0.9), device("b", 0.4, None)),
    ],
)
def test_runs_of_other_devices_are_refused(agents):
    with pytest.raises(UsageError, match=r"all of run-0001, run-0002, on as many held-out samples; compare runs"):
        compare_runs([FIRST, run("run-0002", *agents)])


def test_sentences_say_what_pays_and_what_to_stay_with():
    text = [*describe_comparison(compare_runs([FIRST, SECOND]))]
    assert text[0] == "run-0001 (afl, 1 round) pays: +21.0 points against alone, more than noise."
    assert text[1] == "run-0002 (fedavg_ft, 10 rounds) does harm: -9.0 points against run-0001, more than noise."
    assert "Stay with run-0001" in text[2]
    assert "'headwater run --from run-0001' continues from its encoder" in text[2]
    simulated = run("sim", device("a", 0.4, 0.9), is_simulated=True)
    assert "headwater run" not in "\n".join(describe_comparison(compare_runs([simulated])))
    alone = "\n".join(describe_comparison(compare_runs([run("run-0001", device("a", 0.5, 0.52))])))
    assert "cannot be told from the step before: +2.0 points against alone, within noise" in alone
    assert "No run beats what the devices reach alone by more than noise" in alone


def test_json_has_all_of_it():
    body = json.loads(json.dumps(compare_runs([FIRST, SECOND]).to_json()))
    assert body["best"] == "run-0001"
    assert body["steps"][2]["gain"]["verdict"] == "below"
    assert body["steps"][0]["gain"] is None
