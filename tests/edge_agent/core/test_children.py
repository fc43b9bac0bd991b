from __future__ import annotations

import signal
import sys
import threading

import pytest

from edge_agent.core.children import InlineWorker, Stop, ThreadWorker
from edge_agent.core.errors import TrainingFailed

PATIENCE_S = 20


class Loop:
    """An event loop in its smallest form: wait until woken, then collect."""

    def __init__(self, kind):
        self.woken = threading.Semaphore(0)
        self.worker = InlineWorker() if kind == "inline" else ThreadWorker(self.woken.release)
        self.done: list[tuple[object, BaseException | None, threading.Thread]] = []

    def submit(self, job):
        self.worker.submit("test", job, lambda *outcome: self.done.append((*outcome, threading.current_thread())))

    def until(self, count):
        while len(self.done) < count:
            assert isinstance(self.worker, InlineWorker) or self.woken.acquire(timeout=PATIENCE_S)
            self.worker.collect()
        return [outcome[:2] for outcome in self.done]


@pytest.fixture(params=["inline", "thread"])
def loop(request):
    made = Loop(request.param)
    yield made
    made.worker.close()


def test_results_come_back_in_order_and_in_the_thread_of_the_loop(loop):
    for number in range(20):
        loop.submit(lambda number=number: number * number)
    assert loop.until(20) == [(number * number, None) for number in range(20)]
    assert {thread for *_, thread in loop.done} == {threading.current_thread()}


def test_an_error_is_delivered_and_the_next_job_is_done(loop):
    error = TrainingFailed("loss is nan")

    def fail():
        raise error

    loop.submit(fail)
    loop.submit(lambda: "well")
    assert loop.until(2) == [(None, error), ("well", None)]


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError(), RecursionError(), ZeroDivisionError()])
def test_errors_that_nobody_expected_are_delivered_too(loop, error):
    def fail():
        raise error

    loop.submit(fail)
    assert loop.until(1) == [(None, error)]


def test_a_job_that_exits_ends_itself_and_not_the_worker():
    loop = Loop("thread")
    loop.submit(lambda: sys.exit(3))
    loop.submit(lambda: "still here")
    (_, error), second = loop.until(2)
    assert isinstance(error, SystemExit)
    assert second == ("still here", None)
    loop.worker.close()


def test_a_job_runs_beside_the_loop_and_not_in_it():
    loop = Loop("thread")
    gate = threading.Event()
    loop.submit(lambda: (gate.wait(PATIENCE_S), threading.current_thread()))
    loop.worker.collect()
    assert loop.done == [], "collect must not wait for the job"
    gate.set()
    ((was_set, thread), _), *_ = loop.until(1)
    assert was_set
    assert thread is not threading.current_thread()
    loop.worker.close()


def test_jobs_never_run_at_the_same_time(loop):
    running = [0]
    most = [0]

    def job():
        running[0] += 1
        most[0] = max(most[0], running[0])
        running[0] -= 1

    for _ in range(50):
        loop.submit(job)
    loop.until(50)
    assert most == [1]


def test_a_job_may_be_submitted_from_a_result(loop):
    loop.worker.submit("first", lambda: 1, lambda result, _: loop.submit(lambda: result + 1))
    assert loop.until(1) == [(2, None)]


def test_after_close_the_thread_ends():
    loop = Loop("thread")
    loop.worker.close()
    loop.worker._thread.join(PATIENCE_S)
    assert not loop.worker._thread.is_alive()


def test_a_signal_that_comes_while_its_event_is_looked_at_ends_the_wait():
    """The handler runs in the thread that waits, which may hold the event's lock at that moment."""
    stop = Stop()

    def interrupted():
        with stop._cond:
            stop.by_signal(signal.SIGTERM, None)

    waiting = threading.Thread(target=interrupted, daemon=True)
    waiting.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert stop.wait(PATIENCE_S)
    assert stop.signal == signal.SIGTERM
