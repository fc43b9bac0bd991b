"""The figures of this machine, printed beside their budgets: ``pytest -m bench -s tests/bench``.

Slow, and a busy machine misses budgets through no fault of the code, so what fails here is the measuring alone.
"""

from __future__ import annotations

import pytest

from coordinator.bench import device, rounds, transport
from coordinator.bench.bare import bare_seconds

pytestmark = pytest.mark.bench


def show(title, rows):
    print(f"\n{title}")
    for row in rows:
        verdict = {True: "met", False: "MISSED", None: ""}[row.is_met]
        print(f"  {row.name:58} {row.value:10.4g} {row.unit:3} {row.budget or '':>6} {verdict}")


@pytest.mark.parametrize("broker", list(rounds.brokers("all")))
@pytest.mark.parametrize("payload_bytes, count", [(500_000, 20), (45_000_000, 5)])
def test_rounds_without_training(broker, payload_bytes, count, tmp_path):
    plan = rounds.Plan(payload_bytes=payload_bytes, rounds=count)
    found = rounds.measure(plan, broker, tmp_path)
    show(f"{broker}, {payload_bytes / 1e6:g} MB", found.rows())
    assert len(found.seconds) == count - 1
    assert all(second > 0 for second in found.seconds)


def test_rounds_with_training(tmp_path):
    plan = rounds.Plan(rounds=5, workload="w1")
    found = rounds.measure(plan, next(rounds.brokers("all")), tmp_path / "run", bare_s=bare_seconds(4, tmp_path))
    show("W1", found.rows())
    assert {row.name for row in found.rows()} >= {"bare training on all cores", "round over bare training"}


def test_transport_in_both_directions(tmp_path):
    found = transport.measure(4, 45_000_000, list(rounds.brokers("all")), tmp_path)
    print(f"\n{found}")
    assert len(found["legs"]) == 2 * len(list(rounds.brokers("all")))


def test_a_device_without_torch(tmp_path):
    found = list(device.rows(tmp_path, tmp_path / "cache", repeats=3))
    show("device", found)
    assert {row.budget for row in found} >= {45.0, 100.0, 0.3, 0.12, 0.25, 1.0, 1.5, 60.0}
