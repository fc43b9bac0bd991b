"""What was not believed is counted without end and told in few lines."""

from __future__ import annotations

import logging

import pytest
from federation_disturbances import Stranger
from federation_harness import Clock, Federation

from coordinator.fleet.rejections import AGAIN_S, LINES_AT_ONCE, MAX_COUNTED, Rejections


@pytest.fixture
def clock():
    return Clock()


def test_the_same_refusal_is_told_once_and_again_after_a_while_with_its_count(clock):
    refusals = Rejections(clock)
    told = [refusals.note("a: x") for _ in range(5)]
    assert told == [1, None, None, None, None]
    clock.now += AGAIN_S
    assert refusals.note("a: x") == 6
    assert (refusals.total, refusals.counts) == (6, {"a: x": 6})


def test_a_thousand_strangers_get_no_thousand_lines(clock):
    refusals = Rejections(clock)
    assert sum(refusals.note(f"n{n}") is not None for n in range(1000)) == LINES_AT_ONCE
    clock.now += AGAIN_S
    assert refusals.note("one more") == 1


def test_what_is_remembered_is_bounded(clock):
    refusals = Rejections(clock)
    for number in range(3 * MAX_COUNTED + 5):
        refusals.note(f"n{number}")
    assert len(refusals.counts) <= MAX_COUNTED
    assert len(refusals._logged_at) <= MAX_COUNTED
    assert refusals.total == 3 * MAX_COUNTED + 5


def test_the_most_frequent_come_first(clock):
    refusals = Rejections(clock)
    for what in "abbccc":
        refusals.note(what)
    assert list(refusals.top(2).items()) == [("c", 3), ("b", 2)]


def test_rejected_messages_are_in_the_log_now_and_then_and_in_the_status_with_their_count(tmp_path, caplog):
    with Federation(tmp_path, agents=1) as fed:
        mallory = Stranger(fed, "mallory")
        for _ in range(50):
            mallory.raw(b"x")
        fed.settle()
        lines = [r for r in caplog.records if "message_refused" in r.message and r.levelno >= logging.WARNING]
        assert len(lines) == 1
        status = fed.coordinator.status()
        assert status["rejected_messages"] == 50
        assert status["rejected_most"]["messages"] == {"mallory: MessageError": 50}
