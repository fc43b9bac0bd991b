"""When a heartbeat is due, by a clock that the test sets."""

from __future__ import annotations

import pytest

from edge_agent.agent.heartbeat import HeartbeatTimer

EVERY_S = 10.0
IDLE_EVERY_S = 60.0


@pytest.fixture
def timer():
    idle_timer = HeartbeatTimer(EVERY_S)
    idle_timer.welcomed(0.0, IDLE_EVERY_S)
    return idle_timer


def test_an_idle_agent_of_a_large_fleet_sends_rarely_and_a_busy_one_as_configured(timer):
    assert not timer.is_due(IDLE_EVERY_S - 1, "ok", is_busy=False)
    assert timer.is_due(IDLE_EVERY_S, "ok", is_busy=False)
    assert timer.is_due(EVERY_S, "ok", is_busy=True)


def test_a_coordinator_that_asks_for_less_than_the_own_pause_changes_nothing():
    timer = HeartbeatTimer(EVERY_S)
    timer.welcomed(0.0, EVERY_S / 2)
    assert not timer.is_due(EVERY_S - 1, "ok", is_busy=False)
    assert timer.is_due(EVERY_S, "ok", is_busy=False)


def test_the_end_of_a_job_is_told_at_once(timer):
    assert not timer.is_due(1.0, "ok", is_busy=True)
    assert timer.is_due(2.0, "ok", is_busy=False)
    timer.note_sent(2.0, "ok")
    assert not timer.is_due(3.0, "ok", is_busy=False)


def test_another_condition_is_told_at_once_and_once(timer):
    assert timer.is_due(1.0, "fault", is_busy=False)
    timer.note_sent(1.0, "fault")
    assert not timer.is_due(2.0, "fault", is_busy=False)
    assert timer.is_due(3.0, "ok", is_busy=False)
