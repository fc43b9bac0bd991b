"""The arithmetic of a plan, with costs that can be multiplied by hand."""

from __future__ import annotations

import pytest

from coordinator.capacity.costs import Costs, Origin
from coordinator.capacity.demand import demand_of, heartbeats_per_s
from coordinator.capacity.limits import limits_of
from coordinator.capacity.plan import make_plan
from coordinator.capacity.settings import MOST_AGENTS, PlanSettings, parse_size
from coordinator.capacity.work import Size, Work

ORIGIN = Origin(processor="abacus", cores=1, python="3", broker="none", date="2026-01-01", command="count")
COSTS = Costs(
    origin=ORIGIN,
    coordinator_cpu_s=Work(heartbeats=0.001, updates=0.002, update_mb=0.01, final_reports=0.004),
    broker_cpu_s=Work(updates=0.001),
    coordinator_in_bytes=Work(heartbeats=100, updates=1000, update_mb=1e6),
    coordinator_out_bytes=Work(updates=500),
    agents_in_bytes=Work(update_mb=1e6, final_mb=1e6),
    journal_bytes=Work(updates=500),
    journal_rows=Work(updates=1),
    coordinator_mb=Size(processes=90, agents=0.01, model_mb=10),
    broker_mb=Size(processes=8, agents=0.02),
    kept_update_s=0.001,
    aggregator_factor=1.5,
    sum_s_per_mb=0.001,
    merge_s_per_mb=0.005,
    checks=(),
    measured=(),
)
SETTINGS = PlanSettings(
    agents=1000, model="2MB", rounds_per_day=86.4, cohort=100, run_rounds=10, joins_per_day=0, kept_days=365
)
"""A round of 1,000 s: 100 updates of 2 MB. 1,000 agents send 50 heartbeats a second, 50,000 in that time."""


def changed(**values):
    return SETTINGS.model_copy(update=values)


@pytest.mark.parametrize(
    "agents, rate",
    [
        (300, 20.0),  # every 15 s
        (750, 50.0),
        (1000, 50.0),  # every 20 s
        (6000, 50.0),  # every 120 s, which is the longest
        (120_000, 1000.0),
    ],
)
def test_heartbeats_follow_the_rule_of_the_coordinator(agents, rate):
    assert heartbeats_per_s(agents, 45.0) == pytest.approx(rate)


def test_the_coordinator_alone_does_everything():
    """Heartbeats take 50 s. A round takes 0.2 + 2 s, the end of a run 4 s, which counts: 54 s of 1,000 s."""
    demand = demand_of(SETTINGS, COSTS, 1000)
    assert demand.coordinator.cores == pytest.approx(0.054)
    assert demand.round_cpu_s == pytest.approx(2.2)
    assert demand.coordinator.memory_mb == pytest.approx(90 + 10 + 20)
    assert demand.coordinator.in_mb_s == pytest.approx((5 + 0.1 + 200) / 1000)
    assert demand.coordinator.out_mb_s == pytest.approx((2 + 0.05) / 1000)
    # 8,640 updates a day with 500 bytes each, for 365 days; 100 updates and two models.
    assert demand.coordinator.disk_mb == pytest.approx(365 * 4.32 + 200 + 4)
    assert demand.journal_rows_per_day == pytest.approx(8640)
    assert demand.aggregators.cores == 0


def test_looks_at_an_open_round_take_a_share_of_the_time_up_to_all_of_it():
    """0.05 of the time, and 0.0001 for each of 100 agents, for 300 s: 18 s. 20,000 agents would take it twice."""
    work = COSTS.coordinator_cpu_s.model_copy(update={"open_seconds": 0.05, "open_member_seconds": 0.0001})
    costs = COSTS.model_copy(update={"coordinator_cpu_s": work})
    assert demand_of(SETTINGS, costs, 1000).round_cpu_s == pytest.approx(2.2 + 300 * 0.06)
    many = demand_of(changed(cohort=20_000), costs, 20_000)
    assert many.round_cpu_s == pytest.approx(20_000 * 0.022 + 300)
    # Two aggregators look as long, each at its 50 agents, and need 1.5 times as much for everything.
    divided = demand_of(changed(partitions=2), costs, 1000)
    assert divided.aggregators.cores == pytest.approx(1.5 * (2.2 + 2 * 300 * 0.05 + 300 * 100 * 0.0001) / 1000)
    short = demand_of(changed(open_s=5000.0), costs, 1000)  # no longer than until the next round
    assert short.round_cpu_s == pytest.approx(2.2 + 1000 * 0.06)


def test_brokers_pass_on_what_both_sides_send():
    demand = demand_of(changed(brokers=2), COSTS, 1000)
    assert demand.brokers.cores == pytest.approx(0.1 / 1000)
    assert demand.brokers.memory_mb == pytest.approx(2 * 8 + 20)
    assert demand.brokers.in_mb_s == pytest.approx((5 + 200.1 + 2) / 1000)
    assert demand.brokers.out_mb_s == pytest.approx((5 + 200.1 + 1000 * 2) / 1000)  # the final model goes to all agents


def test_partitions_take_the_bytes_of_updates_from_the_coordinator():
    """The coordinator keeps 0.1 s, and merges four partial sums of 2 MB: 4 * 4 * 2 MB as two float64 each, 0.04 s.

    Aggregators need 1.5 times the 2.2 s of a coordinator alone.
    """
    demand = demand_of(changed(partitions=4), COSTS, 1000)
    assert demand.coordinator.in_mb_s == pytest.approx((5 + 0.1 + 32) / 1000)
    assert demand.aggregators.cores == pytest.approx(3.3 / 1000)
    assert demand.aggregators.in_mb_s == pytest.approx(200.1 / 1000)
    assert demand.aggregators.out_mb_s == pytest.approx(32 / 1000)
    assert demand.aggregators.memory_mb == pytest.approx(4 * (90 + 2.5 + 20))
    assert demand.aggregators.disk_mb == pytest.approx(200 + 4 * 4)
    assert demand.round_cpu_s == pytest.approx(3.3 / 4)  # of an aggregator, more than the 0.14 s of the coordinator
    alone = demand_of(changed(partitions=4, run_rounds=1_000_000), COSTS, 1)
    assert alone.round_cpu_s == pytest.approx(0.001 + 4 * 2 * 0.005)  # one update: merging takes longer than summing


def test_the_first_limit_is_where_the_smallest_fleet_has_not_enough():
    """All agents in each round: a thread does N * (1 / 120 * 0.001 + 0.022 / 1000) a second, of which it may do 0.7."""
    limits = limits_of(changed(cohort=0, disk_gb=100_000, memory_gb=1000), COSTS)
    reached = {limit.name: limit.agents for limit in limits}
    assert reached["coordinator: its one thread"] == int(0.7 / (0.001 / 120 + 0.022 / 1000)) == 23_076
    assert reached["broker nodes: connections"] == 50_000
    assert reached["broker nodes: memory"] is None  # 0.02 MB for each of a million agents, of 700 GB
    assert limits[0].agents == min(agents for agents in reached.values() if agents is not None)
    assert [limit.agents is None for limit in limits] == sorted(limit.agents is None for limit in limits)


def test_a_larger_fleet_than_the_limit_has_not_enough_and_a_smaller_one_has():
    settings = changed(cohort=0, disk_gb=100_000, memory_gb=1000)
    limit = next(limit for limit in limits_of(settings, COSTS) if limit.name == "coordinator: its one thread")
    for agents, is_reached in ((limit.agents, False), (limit.agents + 1, True)):
        planned = limits_of(settings.model_copy(update={"agents": agents}), COSTS)
        assert {one.name: one.is_reached for one in planned}["coordinator: its one thread"] is is_reached


def test_a_limit_that_no_fleet_keeps_to_is_at_no_agents():
    limits = limits_of(changed(memory_gb=0.1), COSTS)  # the process alone has 110 MB
    assert limits[0].agents == 0
    assert limits[0].is_reached


def test_needed_processes_are_the_fewest_that_suffice():
    """100,000 agents, all in a round: heartbeats take 0.833 of a thread, so the coordinator cannot be enough."""
    assert make_plan(changed(agents=100_000, cohort=0), COSTS).partitions_needed is None
    # 20,000 agents of 4 MB: 0.167 for heartbeats, 0.84 for updates. Divided: 0.167, and 0.02 or 0.08 at a run's end.
    plan = make_plan(changed(agents=20_000, cohort=0, model="4MB", disk_gb=10_000), COSTS)
    assert plan.partitions_needed == 2  # of 1.5 * 0.84 / 2 each
    assert plan.brokers_needed == 2  # which send 80 GB in a round of 1,000 s, and as much again: 160 of 87.5 MB/s each
    assert plan.machines_needed is not None
    many = make_plan(changed(agents=120_000, cohort=1, rounds_per_day=1, connections=30_000, busy=1.0), COSTS)
    assert many.brokers_needed == 4


def test_a_fleet_that_is_idle_has_one_machine():
    plan = make_plan(changed(agents=10, cohort=1, rounds_per_day=1), COSTS)
    assert (plan.partitions_needed, plan.brokers_needed, plan.machines_needed) == (0, 1, 1)


def test_parts_of_a_figure_add_up_to_it():
    plan = make_plan(changed(partitions=3), COSTS)
    in_a_round = [term for term in plan.terms() if term.figure == "CPU seconds of the coordinator, a round"]
    assert sum(term.product for term in in_a_round) == pytest.approx(2.2)
    memory = [term for term in plan.terms() if term.figure == "most memory of the coordinator, MB"]
    assert sum(term.product for term in memory) == pytest.approx(120)
    assert all("abacus" in term.source for term in plan.terms())
    merging = next(term for term in plan.terms() if term.count == "partial sums, MB")
    assert merging.product == pytest.approx(3 * 2 * 0.005)
    aggregators = next(term for term in plan.terms() if term.figure == "CPU seconds of all aggregators, a round")
    assert aggregators.product == pytest.approx(3.3)


def test_one_aggregator_takes_so_many_updates_a_second():
    assert make_plan(SETTINGS, COSTS).sums_per_s() == pytest.approx(1 / 0.033)


def test_a_round_may_have_less_time_than_until_the_next():
    assert changed(round_s=100.0).interval_s == 100.0
    assert changed(round_s=5000.0).interval_s == pytest.approx(1000.0)


@pytest.mark.parametrize("text, size", [("5MB", 5_000_000), ("0.5 mb", 500_000), ("2000", 2000), ("1GB", 10**9)])
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-5MB", "5XB", "1e9", "nan", "999", "2000000GB", "5MBMB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected"):
        parse_size(text)


def test_the_largest_fleet_of_a_plan_is_that_of_the_settings():
    assert PlanSettings(agents=MOST_AGENTS).cohort_of(MOST_AGENTS) == MOST_AGENTS
    assert PlanSettings(agents=10, cohort=100).cohort_of(10) == 10
