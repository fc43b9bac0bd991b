"""Bytes of each agent, added up from journal entries; the sums are worked out by hand."""

from __future__ import annotations

import pytest

from coordinator.journal.entries import fact_of
from coordinator.journal.memory import MemoryJournal
from coordinator.views.traffic import AgentTraffic


@pytest.fixture
def journal():
    return MemoryJournal()


def close_round(journal, run, number, traffic):
    journal.append(fact_of("round_closed", {"traffic": traffic}), run=run, round=number)


def report(journal, run, agent, up_bytes, down_bytes):
    fact = fact_of("release_reported", {"bytes_up": up_bytes, "bytes_down": down_bytes})
    journal.append(fact, run=run, agent=agent)


def traffic_of(journal):
    traffic = AgentTraffic()
    for entry in journal.entries():
        traffic.add(entry)
    return traffic


def test_closed_rounds_of_all_runs_are_added_up(journal):
    close_round(journal, "first", 1, {"a": [10, 100], "b": [1, 2]})
    close_round(journal, "first", 2, {"a": [20, 200]})
    close_round(journal, "second", 1, {"a": [40, 400]})
    traffic = traffic_of(journal)
    assert traffic.bytes_from() == {"a": 10 + 20 + 40, "b": 1}
    assert traffic.bytes_to() == {"a": 100 + 200 + 400, "b": 2}


def test_a_report_counts_its_whole_run_and_no_round_of_it_twice(journal):
    close_round(journal, "first", 1, {"a": [10, 100]})
    report(journal, "first", "a", 10, 150)
    close_round(journal, "second", 1, {"a": [10, 100]})
    traffic = traffic_of(journal)
    assert traffic.bytes_from() == {"a": 10 + 10}
    assert traffic.bytes_to() == {"a": 150 + 100}


def test_a_report_during_a_run_takes_nothing_from_later_rounds(journal):
    close_round(journal, "first", 1, {"a": [10, 100]})
    report(journal, "first", "a", 10, 100)
    close_round(journal, "first", 2, {"a": [10, 100]})
    assert traffic_of(journal).bytes_from() == {"a": 20}


def test_a_journal_without_rounds_has_no_traffic(journal):
    journal.append(fact_of("run_requested", {"method": "fedavg", "rounds": 2}), run="first")
    assert traffic_of(journal).bytes_to() == {}
