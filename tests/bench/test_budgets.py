"""The figures of this machine beside their budgets and yardsticks: ``pytest -m bench -s tests/bench``.

Slow, and a busy machine misses budgets through no fault of the code, so what fails here is the measuring alone.
"""

from __future__ import annotations

from statistics import median

import pytest
import yardstick_install
import yardstick_local_steps
import yardstick_memory
import yardstick_precision
import yardstick_scikit_learn
import yardstick_simulate
import yardstick_stacked
import yardstick_transport
from yardstick_loop import bare_seconds

from coordinator.research.bench import device, rounds, simulate
from coordinator.research.bench.measuring import METHODS, RoundPlan, Row, SimulationSize

pytestmark = pytest.mark.bench

ROUND_S = {500_000: 0.1, 45_000_000: 2.0}
"""Payload -> median of a round of four agents that train nothing."""

BUDGETS = {
    "round over bare training": 1.3,
    "coordinator peak above idle": 300.0,
    "fedavg: round over bare loop": 1.05,
    "fedpac: round over bare loop": 1.25,
    "fedavg: local round over a plain loop": 1.05,
    "fedpac: local round over a plain loop": 1.05,
    "dualfed: local round over a plain loop": 1.1,
    "fedpick: local round over a plain loop": 1.1,
    "fedrir: local round over a plain loop": 1.1,
    "fedavg: CPU of a round with evaluation over one without": 1.2,
    "fedpac: CPU of a round with evaluation over one without": 1.2,
    "ResNet18, 100 clients over 4, as many updates": 1.1,
    "idle agent": 45.0,
    "CPU until ready": 0.3,
    "ResNet18 fp32 loaded and run": 100.0,
    "ResNet18 int8 loaded and run": 100.0,
    "LR head, 600 x 512 x 10, CPU": 0.12,
    "SVM head, 600 x 512 x 10, CPU": 0.25,
    "DualFed head, 600 x 512 x 10, 50 epochs, CPU": 1.0,
    "FedPick head, 600 x 512 x 10, 50 epochs, CPU": 1.5,
    "LR head, 600 x 512 x 10, the process": 60.0,
    "SVM head, 600 x 512 x 10, the process": 60.0,
    "DualFed head, 600 x 512 x 10, 50 epochs, the process": 60.0,
    "FedPick head, 600 x 512 x 10, 50 epochs, the process": 60.0,
    "LR head, accuracy below that of scikit-learn": 0.005,
}


def show(title, rows, **more):
    print(f"\n{title}")
    budgets = {**BUDGETS, **more}
    for row in rows:
        budget = budgets.get(row.name)
        verdict = "" if budget is None else ("met" if row.value <= budget else "MISSED")
        print(f"  {row.name:58} {row.value:10.4g} {row.unit:3} {budget or '':>6} {verdict}")


@pytest.mark.parametrize("broker", rounds.brokers("all"))
@pytest.mark.parametrize("payload_bytes, count", [(500_000, 20), (45_000_000, 5)])
def test_rounds_without_training(broker, payload_bytes, count, tmp_path):
    plan = RoundPlan(payload=str(payload_bytes), rounds=count)
    found = rounds.measure(plan, broker, tmp_path)
    show(f"{broker}, {payload_bytes / 1e6:g} MB", found.rows(), **{"round, median": ROUND_S[payload_bytes]})
    assert len(found.seconds) == count - 1
    assert all(second > 0 for second in found.seconds)


def test_rounds_with_training(tmp_path):
    plan = RoundPlan(rounds=5, workload="w1")
    bare_s = bare_seconds(4, tmp_path)
    rows = rounds.measure(plan, rounds.brokers("all")[0], tmp_path / "run").rows()
    rows += [
        Row("bare training on all cores", bare_s, "s"),
        Row("round over bare training", rows[0].value / bare_s, "x"),
    ]
    show("W1", rows)
    assert all(row.value > 0 for row in rows[:3])


def test_transport_in_both_directions(tmp_path):
    found = yardstick_transport.measure(4, 45_000_000, rounds.brokers("all"), tmp_path)
    print(f"\n{found}")
    assert len(found["legs"]) == 2 * len(rounds.brokers("all"))


@pytest.mark.parametrize("method", METHODS)
def test_simulated_rounds_over_a_bare_loop(method, tmp_path):
    size = SimulationSize()
    show(method, yardstick_simulate.measure(method, simulate.data_source(tmp_path, size), size, tmp_path / "r").rows())
    show(method, simulate.report(SimulationSize(method=method), tmp_path)["rows"])


@pytest.mark.parametrize("method", sorted(yardstick_local_steps.CASES))
def test_local_rounds_over_plain_loops(method):
    mine, theirs = yardstick_local_steps.Turns(method).measure(9)
    ratio = median(yardstick_local_steps.ratios_of(mine, theirs))
    show(method, [Row(f"{method}: local round over a plain loop", ratio, "x")])
    assert ratio > 0


def test_memory_of_a_simulation_by_its_clients(tmp_path):
    show("memory", yardstick_memory.memory_rows(100, 0, tmp_path / "memory"))


def test_precisions_of_training():
    show("precision", yardstick_precision.report(5, "auto", 1)["rows"])


@pytest.mark.gpu
def test_stacked_rounds_over_a_loop_on_one_device(tmp_path):
    names = [f"{clients} clients: round over that loop" for clients in (20, 100)]
    show("stacked", yardstick_stacked.report(SimulationSize(), tmp_path)["rows"], **dict.fromkeys(names, 0.2))


def test_a_device_without_torch(tmp_path):
    found = list(device.rows(tmp_path, tmp_path / "cache", repeats=3))
    theirs = yardstick_scikit_learn.measure(device.real_features(tmp_path / "cache"), tmp_path)
    found.append(Row("LR by scikit-learn, CPU", theirs["seconds"], "s"))
    accuracy = next(row.value for row in found if row.name == "LR head, 600 x 512 x 10, accuracy")
    found.append(Row("LR head, accuracy below that of scikit-learn", theirs["accuracy"] - accuracy, ""))
    show("device", found)
    names = {row.name for row in found}
    assert {name for name in BUDGETS if name.startswith(("idle", "CPU", "ResNet18 ", "LR", "SVM", "DualFed"))} <= names


def test_predictions_during_an_install(tmp_path):
    found = yardstick_install.report(tmp_path, tmp_path / "cache")
    for where, figures in found.items():
        rows = [Row(f"install {where}: {name}", value, "") for name, value in figures.items()]
        show(f"install {where}", rows, **{"install beside, 300 MB available: peak_mb": 400.0})
        assert figures["answers"] > 10
    assert found["beside"]["after_mb"] < found["here"]["after_mb"]
