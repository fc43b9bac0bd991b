"""A log that fails, hangs or is slow: it delays no round, warns once, and what it lacks is said."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from coordinator.loggers import delivery
from coordinator.loggers.base import Logger
from coordinator.loggers.delivery import Delivery, LogOutcome
from coordinator.loggers.records import RoundResult, RunDescription, RunEnd

END = RunEnd("finished", round=3)


class Memory(Logger):
    """Keeps what it gets, and fails as long as it is told to."""

    def __init__(self):
        super().__init__("memory")
        self.calls = []
        self.tried = 0
        self.is_away = False
        self.gate = threading.Event()
        self.gate.set()

    def take(self, call):
        assert self.gate.wait(60)
        self.tried += 1
        if self.is_away:
            raise ConnectionRefusedError(111, "Connection refused")
        self.calls.append(call)

    def begin(self, run):
        self.take("begin")

    def log_round(self, row):
        self.take(row.round)

    def end(self, end):
        self.take(end.status)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 0.02)


@pytest.fixture
def run(tmp_path):
    return RunDescription("uid", "name", tmp_path)


def until(condition):
    """Wait until something holds; a test that waits for ever has found a hang."""
    deadline = time.monotonic() + 60
    waiting = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        waiting.wait(0.005)


def test_calls_come_in_their_order(run):
    log = Memory()
    sent = Delivery("memory", log)
    sent.begin(run)
    for number in (1, 2, 3):
        sent.log_round(RoundResult(number, 3, 2))
    sent.end(END)
    assert sent.wait() == LogOutcome("memory", "memory", 3, 0, is_complete=True)
    assert log.calls == ["begin", 1, 2, 3, "finished"]


def test_a_log_that_is_away_gets_everything_when_it_is_back_and_warns_once(run, caplog):
    log = Memory()
    sent = Delivery("memory", log)
    sent.begin(run)
    until(lambda: log.calls)
    log.is_away = True
    with caplog.at_level(logging.INFO, "coordinator"):
        for number in (1, 2, 3):
            sent.log_round(RoundResult(number, 3, 2))
        until(lambda: log.tried > 5)
        log.is_away = False
        sent.end(END)
        outcome = sent.wait()
    assert outcome == LogOutcome("memory", "memory", 3, 0, is_complete=True)
    assert log.calls == ["begin", 1, 2, 3, "finished"], "nothing twice"
    assert [record.getMessage().split()[0] for record in caplog.records] == ["log_away", "log_back"]
    assert "connection refused" in caplog.records[0].getMessage()


def test_a_log_that_stays_away_is_given_up_after_the_limit_and_what_it_lacks_is_said(run, caplog, monkeypatch):
    log = Memory()
    log.is_away = True
    sent = Delivery("memory", log)
    sent.begin(run)
    sent.log_round(RoundResult(1, 3, 2))
    began = time.monotonic()
    monkeypatch.setattr(delivery, "AWAY_LIMIT_S", 0.2)
    sent.end(END, limit_s=1000)  # for one that answers
    outcome = sent.wait()
    assert time.monotonic() - began < 10
    assert (outcome.rounds, outcome.unsent, outcome.is_complete) == (0, 1, False)
    assert outcome.describe() == (
        "not all is logged to memory (memory): 1 of 1 rounds and the end of the run are missing: "
        "no program listens on that port (connection refused)"
    )
    assert [record.getMessage().split()[0] for record in caplog.records] == ["log_away"]
    assert LogOutcome.from_json(outcome.to_json()) == outcome
    until(lambda: not sent._thread.is_alive())


def test_a_log_that_hangs_delays_neither_a_round_nor_the_end_for_longer_than_the_limit(run, monkeypatch):
    log = Memory()
    log.gate.clear()
    sent = Delivery("memory", log)
    began = time.monotonic()
    sent.begin(run)
    for number in range(1, 1001):
        sent.log_round(RoundResult(number, 1000, 2))
    monkeypatch.setattr(delivery, "ROW_LIMIT_S", 0.0)
    sent.end(END, limit_s=0.1)
    outcome = sent.wait()
    assert time.monotonic() - began < 10
    assert (outcome.rounds, outcome.unsent) == (0, 1000)
    assert "did not answer in time" in outcome.reason
    log.gate.set()
    until(lambda: not sent._thread.is_alive())
    assert log.calls == ["begin"], "what was given up is not logged behind the caller's back"


def test_rounds_beyond_what_may_wait_are_left_out_and_counted(run, monkeypatch):
    monkeypatch.setattr(delivery, "WAITING_LIMIT", 10)
    log = Memory()
    log.gate.clear()
    sent = Delivery("memory", log)
    sent.begin(run)
    for number in range(1, 6):
        sent.log_round(RoundResult(number, 5, 3, per_client={name: {"loss": 1.0} for name in "abc"}))
    assert len(sent._calls) == 3, "the beginning and two rounds of four lines each"
    log.gate.set()
    until(lambda: not sent._calls)
    sent.log_round(RoundResult(6, 6, 0))
    sent.end(END)
    outcome = sent.wait()
    assert log.calls == ["begin", 1, 2], "no round after one that is missing, and no end"
    assert outcome == LogOutcome("memory", "memory", 2, 4, is_complete=False, reason=outcome.reason)
    assert outcome.describe() == (
        "not all is logged to memory (memory): 4 of 6 rounds and the end of the run are missing: "
        "it was away for so long that memory had no room for more rounds"
    )


def test_a_log_that_shows_no_clients_is_not_given_any(run):
    log = Memory()
    log.takes_clients = False
    rows = []
    log.log_round = rows.append
    sent = Delivery("memory", log)
    sent.begin(run)
    sent.log_round(RoundResult(1, 1, 1, per_client={"a": {"loss": 1.0}}))
    sent.end(END)
    sent.wait()
    assert rows == [RoundResult(1, 1, 1)]


def test_a_parent_waits_until_the_log_has_it_or_has_failed(run):
    log = Memory()
    sent = Delivery("memory", log)
    sent.begin(run)
    sent.flush(60)
    assert log.calls == ["begin"]
    log.is_away = True
    sent.log_round(RoundResult(1, 1, 1))
    sent.flush(60)
    assert log.tried >= 2
    sent.end(END, limit_s=0)
