"""A federation over several brokers that share their messages: one is stopped or killed in the middle of a round."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from broker_clusters import BridgedMosquittos
from configured_brokers import NEEDS_NATS, FromNats
from mqtt_harness import NEEDS_MOSQUITTO
from process_site import AGENTS, LARGE, Site

from coordinator.state.status_file import read_status
from edge_agent.wire.failover import order_for

pytestmark = pytest.mark.broker

ROUNDS = 3
MEDIUM = LARGE.model_copy(update={"encoder_params": {"feature_dim": 256}})
"""4096 * 256 numbers: 4.2 MB, 69 chunks, so that a round is under way for a while."""

LIMIT_S = 5.0
"""Within so many seconds of a loss the next broker is connected: the default of ``failover_s``."""

ELECTION_S = 60.0
"""Seconds that NATS may take to elect leaders; it took 0.2 to 17 where this was measured."""

STATUS_S = 2.0
"""A status file is that old at most, on a busy machine."""


def broker_of(site):
    """The broker that the coordinator is connected to; None while it is connected to none."""
    connection = read_status(site.state.path).content.get("broker_connection")
    return None if connection is None else connection["url"]


def disturbed_run(site, disturb):
    """A run whose broker is disturbed in its second round: its id, and the seconds until another one is connected."""
    run = site.request(ROUNDS)
    site.until(lambda: (2, 1) in site.opened(run), "round 2 opens")
    lost = broker_of(site)
    began = time.monotonic()
    disturb(lost)
    assert not site.entries(run, "run_finished"), "disturbed too late for this test to say anything"
    site.until(lambda: broker_of(site) not in {None, lost}, "the coordinator is at another broker")
    return run, time.monotonic() - began


def assert_counted_once(site, run):
    """No round was opened again, and no update of an agent counts twice."""
    assert site.opened(run) == [(number, 1) for number in range(1, ROUNDS + 1)]
    accepted = Counter((entry.round, entry.agent) for entry in site.entries(run, "update_accepted"))
    assert accepted == {(number, agent): 1 for number in range(1, ROUNDS + 1) for agent in AGENTS}


@NEEDS_MOSQUITTO
def test_a_stopped_and_a_killed_broker_cost_seconds_and_no_bits(tmp_path):
    """The stopped one keeps its connections; what its machine has taken from senders arrives when it continues."""
    cluster = BridgedMosquittos(tmp_path)
    with Site(tmp_path, MEDIUM, broker=cluster) as site:
        site.until(lambda: broker_of(site) is not None, "the coordinator is connected")
        assert broker_of(site) == order_for("home-coordinator", cluster.url)[0]
        undisturbed = site.finish(site.request(ROUNDS))
        # 1. The broker is stopped, and continues when the run goes on over the other one.
        run, took_s = disturbed_run(site, cluster.pause)
        assert took_s < LIMIT_S + STATUS_S
        assert "it has not answered for" in read_status(site.state.path).broker_connection
        site.until(lambda: (3, 1) in site.opened(run), "round 3 opens while the broker is stopped")
        cluster.resume_all()
        assert site.finish(run) == undisturbed
        assert_counted_once(site, run)
        # 2. The other one is killed for good.
        run, took_s = disturbed_run(site, cluster.kill)
        assert took_s < LIMIT_S + STATUS_S
        assert site.finish(run) == undisturbed
        assert_counted_once(site, run)


@NEEDS_NATS
@pytest.mark.slow
@pytest.mark.parametrize("qos", [0, 1])
def test_a_nats_cluster_that_loses_a_node_ends_the_run_with_the_same_bits(tmp_path, qos):
    """The nodes answer no login until they have elected leaders; with QoS 1 they refuse subscriptions meanwhile."""
    cluster = FromNats(tmp_path, 3)
    with Site(tmp_path, MEDIUM, broker=cluster, qos=qos) as site:
        undisturbed = site.finish(site.request(ROUNDS))
        run, took_s = disturbed_run(site, cluster.kill)
        assert took_s < ELECTION_S
        assert site.finish(run) == undisturbed
        assert_counted_once(site, run)
