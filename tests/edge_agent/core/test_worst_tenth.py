"""The worst tenth of the clients, which status, pages, metrics, reports and releases all take from one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.core.worst_tenth import mean_of_worst_tenth, worst_tenth


@pytest.mark.parametrize("clients, expected", [(1, 1), (9, 1), (10, 1), (11, 2), (30, 3), (250, 25)])
def test_a_tenth_is_rounded_up(clients, expected):
    assert list(worst_tenth(range(clients))) == list(range(expected))


def test_its_mean_is_of_the_lowest_values_in_whatever_order():
    assert mean_of_worst_tenth([0.9, 0.2, 0.8, 0.4, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7]) == pytest.approx(0.3)
    assert mean_of_worst_tenth([0.75]) == 0.75


def test_no_other_module_cuts_a_tenth_off_a_ranking():
    root = Path(__file__).parents[3]
    sources = [path for package in ("coordinator", "edge_agent", "export") for path in (root / package).rglob("*.py")]
    cut = [path.name for path in sources if "[: math.ceil(len(" in path.read_text() or "[: -(-len(" in path.read_text()]
    assert cut == ["worst_tenth.py"]
