"""Jobs of many clients in a few threads: in order within a lane, and only one that computes at a time."""

from __future__ import annotations

import threading

import pytest

from coordinator.hosted.lanes import Lanes

LIMIT_S = 60.0


class Loop:
    """Collects what lanes have finished, as an agent's loop does."""

    def __init__(self, threads):
        self._woken = threading.Event()
        self.lanes = Lanes(threads, self._woken.set)
        self.ended = []

    def done(self, name):
        return lambda result, error: self.ended.append((name, result, error))

    def collect_until(self, count, *lanes):
        while len(self.ended) < count:
            assert self._woken.wait(LIMIT_S), f"nothing new: {self.ended}"
            self._woken.clear()
            for lane in lanes:
                lane.collect()


def test_jobs_of_a_lane_run_in_their_order_although_there_are_more_threads():
    loop = Loop(3)
    lane = loop.lanes.lane()
    order = []
    for number in range(20):
        lane.submit("job", lambda number=number: order.append(number), loop.done(number))
    loop.collect_until(20, lane)
    assert order == [name for name, _, _ in loop.ended] == list(range(20))


def test_a_job_that_waits_gives_its_turn_to_other_lanes_and_two_never_compute_at_once():
    """The first job waits for the second one, which could not run if it kept its turn."""
    loop = Loop(2)
    first, second = loop.lanes.lane(), loop.lanes.lane()
    other_ran = threading.Event()
    computing = []
    most = []

    def compute():
        computing.append(1)
        most.append(len(computing))
        computing.pop()

    def waits():
        compute()
        with loop.lanes.waiting():
            assert other_ran.wait(LIMIT_S)
        compute()
        return "waited"

    def other():
        compute()
        other_ran.set()

    first.submit("waits", waits, loop.done("first"))
    second.submit("other", other, loop.done("second"))
    loop.collect_until(2, first, second)
    assert {name: result for name, result, _ in loop.ended} == {"first": "waited", "second": None}
    assert most == [1, 1, 1]


def test_an_error_is_delivered_and_the_next_job_runs():
    loop = Loop(1)
    lane = loop.lanes.lane()

    def breaks():
        raise ValueError("broken")

    lane.submit("breaks", breaks, loop.done("breaks"))
    lane.submit("works", lambda: 1, loop.done("works"))
    loop.collect_until(2, lane)
    assert [(name, result, str(error)) for name, result, error in loop.ended] == [
        ("breaks", None, "broken"),
        ("works", 1, "None"),
    ]


def test_a_closed_lane_drops_what_waits():
    loop = Loop(1)
    lane, other = loop.lanes.lane(), loop.lanes.lane()
    is_closed = threading.Event()
    lane.submit("runs", lambda: is_closed.wait(LIMIT_S), loop.done("runs"))
    lane.submit("waits", lambda: pytest.fail("it was dropped"), loop.done("waits"))
    lane.close()
    is_closed.set()
    other.submit("later", lambda: None, loop.done("later"))
    loop.collect_until(2, lane, other)
    assert sorted(name for name, _, _ in loop.ended) == ["later", "runs"]
