"""How values are shown in tables."""

from __future__ import annotations

import pytest

from coordinator.cli.output import text
from edge_agent.agent.health import problem_of
from edge_agent.cli.output import value_text
from edge_agent.errors import UsageError


@pytest.mark.parametrize(
    "value, shown", [(1e-5, "1e-05"), (-0.00049, "-0.00049"), (0.0005, "0.001"), (0.0, "0.000"), (2.5, "2.500")]
)
def test_small_numbers_keep_their_digits(value, shown):
    assert value_text(value) == text(value) == shown


def test_what_is_not_known_is_a_dash():
    assert [value_text(value) for value in (None, "", 0, "x")] == ["–", "–", "0", "x"]


def test_remedy_on_the_device_does_not_send_to_where_it_is_shown():
    problem = problem_of("work", UsageError("no"))
    assert (problem.remedy, problem.as_json()["remedy"]) == (
        "see 'edge-agent status' on the device",
        "see the message",
    )
