"""Rounds over slow links, on a simulated clock: nothing is sent twice, the link is used, control messages pass."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from faulty_broker import Faults
from federation_duties import WIDE_TASK
from slow_link import LinkedFederation

from coordinator.fleet import uploads
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.messages import down as down_module
from edge_agent.wire.messages import up as up_module

MODEL = WIDE_TASK.model_copy(update={"encoder_params": {"feature_dim": 67}})
"""1.1 MB: 4096 * 67 numbers and some more."""

ROUND = {"quorum": 1.0, "deadline_s": 3000}


def federation(folder, rates, **options):
    options = {"agents": tuple(rates), "task": MODEL, "round": ROUND, **options}
    return LinkedFederation(folder, rates=rates, **options)


def model_bytes(fed):
    return len(fed.state.blobs.read(fed.record.checkpoint))


PROBE_S = 7.3
"""Pauses between control messages to each agent beside those of the protocol."""


def round_closes(fed, limit_s=3000.0):
    """Seconds until the first round has closed; control messages are sent to each agent meanwhile."""
    probed_at = fed.clock.now

    def is_over():
        nonlocal probed_at
        if fed.clock.now - probed_at >= PROBE_S:
            probed_at = fed.clock.now
            for name in fed.agents:
                fed.coordinator.send(name, down_module.Cancel(run="run-0000", round=1, reason="probe"))
        return fed.entries("round_closed")

    return fed.until(is_over, limit_s)


@pytest.mark.parametrize("rate", [8_000, 40_000, 200_000])
def test_a_round_over_a_slow_link_sends_each_byte_once_and_lets_control_messages_pass(tmp_path, rate):
    with federation(tmp_path, {"a0": rate}) as fed:
        fed.settle()
        fed.request(rounds=1)
        took_s = round_closes(fed)
        size = model_bytes(fed)
        down = fed.line("a0", "down")
        up = fed.line("a0", "up")
        assert took_s < 1.25 * 2 * size / rate
        assert down.bytes < 1.1 * size
        assert up.bytes < 1.1 * size
        assert max(down.slowest_control_s, up.slowest_control_s) < 2.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The encoder after a round of two agents without any fault."""
    with federation(tmp_path_factory.mktemp("undisturbed"), {"a0": 1e9, "a1": 1e9}) as fed:
        fed.request(rounds=1)
        fed.finish()
        return fed.encoder_sha256


def published(fed):
    """Bytes of chunks that the coordinator has published."""
    frames = [decode_frame(p) for topic, p in fed.broker.captured if "/b/" in topic or topic.endswith("/db")]
    return sum(len(frame.data) for frame in frames)


def test_a_slow_agent_beside_fast_ones_costs_them_seconds_at_first_and_nothing_later(tmp_path):
    """At 1 MB/s a round takes 2.2 s; the slow one's first model alone takes 137 s at 8 kB/s."""
    rates = {"a0": 1e6, "a1": 1e6, "a2": 1e6, "slow": 8_000}
    with federation(tmp_path, rates, round={"quorum": 0.7, "grace_s": 1, "deadline_s": 3000}, capture=True) as fed:
        fed.settle()
        fed.request(rounds=4)
        fed.until(lambda: len(fed.entries("round_closed")) == 4, 3000)
        size = model_bytes(fed)
        seconds = [line["seconds"] for line in fed.metrics()]
        assert seconds[0] < 15
        assert max(seconds[1:]) < 5
        assert all(fed.line(name, "down").bytes < 1.1 * 5 * size for name in ("a0", "a1", "a2"))
        assert fed.line("slow", "down").slowest_control_s < 2.0
        assert published(fed) < 1.2 * 5 * size


def test_agents_at_the_same_slow_rate_share_one_broadcast(tmp_path):
    with federation(tmp_path, dict.fromkeys(("a0", "a1", "a2", "a3"), 40_000), capture=True) as fed:
        fed.settle()
        fed.request(rounds=1)
        took_s = round_closes(fed)
        size = model_bytes(fed)
        assert took_s < 1.25 * 2 * size / 40_000
        assert published(fed) == size
        for name in fed.agents:
            assert fed.line(name, "down").bytes < 1.1 * size
            assert fed.line(name, "down").slowest_control_s < 2.0


@contextlib.contextmanager
def federation_beside_a_far_agent(tmp_path, others, *, delay_s):
    """A federation after three rounds, and the size of its model in bytes.

    Its agents are ``far``, whose link delays both directions by ``delay_s``, and three with ``others`` bytes a second.
    """
    rates = {"far": 1e6, "a1": others, "a2": others, "a3": others}
    with federation(tmp_path, rates) as fed:
        fed.agents["far"].transport.subscribes_late = True
        fed.line("far", "down").delay_s = delay_s
        fed.line("far", "up").delay_s = delay_s
        fed.settle()
        fed.request(rounds=3)
        fed.finish(900)
        yield fed, len(fed.state.blobs.read(fed.record.checkpoint))


@pytest.mark.parametrize("others", [3e5, 1e5])
def test_a_far_agent_receives_each_byte_once_while_others_listen_to_a_broadcast(tmp_path, others):
    """An agent with a round trip of 2 s could listen only when half of the broadcast is over."""
    with federation_beside_a_far_agent(tmp_path, others, delay_s=1.0) as (fed, size):
        assert [entry.body["clients"] for entry in fed.entries("round_closed")] == [4, 4, 4]
        assert fed.line("far", "down").bytes < 1.05 * 4 * size
        assert fed.line("far", "up").bytes < 1.05 * 3 * size


@pytest.mark.parametrize("others", [1e6, 2e6])
def test_a_broadcast_waits_for_an_agent_that_is_about_to_listen(tmp_path, others):
    """An agent with a round trip of 0.95 s asks for the blob 1.9 s after the offer.

    Unless the broadcast waits, the others have the whole blob by then, and the agent is sent it a second time.
    """
    with federation_beside_a_far_agent(tmp_path, others, delay_s=0.475) as (fed, size):
        for name in fed.agents:
            assert fed.line(name, "down").bytes < 1.05 * 4 * size


def test_agents_that_ask_at_different_times_share_one_broadcast_in_every_round(tmp_path):
    """Their requests take 10 ms to 1 s; known or not, each blob is published once, and each agent receives it once."""
    names = [f"a{number:02}" for number in range(20)]
    with federation(tmp_path, dict.fromkeys(names, 1e6), capture=True) as fed:
        for number, name in enumerate(names):
            fed.line(name, "up").delay_s = 0.01 + number / 20
        fed.settle()
        fed.request(rounds=2)
        fed.finish(900)
        size = len(fed.state.blobs.read(fed.record.checkpoint))
        assert published(fed) < 1.2 * 3 * size
        for name in names:
            assert fed.line(name, "down").bytes < 1.1 * 3 * size


def test_a_connection_that_breaks_after_every_100_kb_costs_what_was_under_way(tmp_path, undisturbed):
    """40 kB/s: about one second of it, 40 kB, is lost each time; nothing that has arrived comes again."""
    with federation(tmp_path, {"a0": 1e9, "a1": 40_000}) as fed:
        fed.settle()
        fed.request(rounds=1)
        breaks = 0

        def step():
            nonlocal breaks
            line = fed.line("a1", "down")
            transport = fed.agents["a1"].transport
            if line.bytes + fed.line("a1", "up").bytes > (breaks + 1) * 100_000:
                breaks += 1
                transport.reconnect()
            return fed.entries("round_closed")

        took_s = fed.until(step, 3000)
        size = model_bytes(fed)
        sent = fed.line("a1", "down").bytes + fed.line("a1", "up").bytes
        assert breaks > 20
        assert sent < 2 * 1.1 * size + breaks * 45_000
        assert took_s < 1.25 * (sent / 40_000 + breaks * 0.5)
        fed.finish(3000)
        assert fed.encoder_sha256 == undisturbed


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_link_that_hangs_for_90_s_delivers_the_rest_and_little_of_it_twice(tmp_path, undisturbed, way):
    """As behind a radio without a signal: nothing is lost, and everything comes late."""
    with federation(tmp_path, {"a0": 1e9, "a1": 40_000}) as fed:
        fed.settle()
        fed.request(rounds=1)
        fed.until(lambda: fed.line("a1", way).bytes > 300_000, 300)
        fed.line("a1", way).free_at += 90
        took_s = round_closes(fed)
        size = model_bytes(fed)
        assert took_s < 90 + 1.25 * 2 * size / 40_000
        assert fed.line("a1", way).bytes < 1.2 * size
        fed.finish(3000)
        assert fed.encoder_sha256 == undisturbed


@pytest.mark.parametrize(
    "faults",
    [{"duplicate": 0.3}, {"reorder": 0.1}, {"flip": 0.05}, {"lose": 0.05}],
    ids=lambda faults: next(iter(faults)),
)
def test_a_bad_slow_link_delivers_the_same_bits_and_sends_little_twice(tmp_path, undisturbed, faults):
    disturbed = Faults(np.random.default_rng(5), **faults, only=lambda topic: "a1" in topic or "/b/" in topic)
    with federation(tmp_path, {"a0": 1e9, "a1": 40_000}, faults=disturbed, capture=True) as fed:
        fed.settle()
        fed.request(rounds=1)
        fed.finish(3000)
        assert fed.encoder_sha256 == undisturbed
        assert fed.line("a1", "up").bytes < 1.3 * model_bytes(fed)


@pytest.mark.parametrize("seed", range(3))
def test_rates_that_change_all_the_time_are_followed(tmp_path, undisturbed, seed):
    """Each ten seconds another rate between 8 and 400 kB/s; what passes is what is needed."""
    dice = np.random.default_rng(seed)
    with federation(tmp_path, {"a0": 1e9, "a1": 40_000}) as fed:
        fed.settle()
        fed.request(rounds=1)
        changed_at = fed.clock.now

        def step():
            nonlocal changed_at
            if fed.clock.now - changed_at >= 10:
                changed_at = fed.clock.now
                fed.line("a1", "down").rate = fed.line("a1", "up").rate = float(8000 * 50 ** dice.random())
            return fed.entries("round_closed")

        fed.until(step, 3000)
        size = model_bytes(fed)
        assert fed.line("a1", "down").bytes < 1.15 * size
        assert fed.line("a1", "up").bytes < 1.15 * size
        fed.finish(3000)
        assert fed.encoder_sha256 == undisturbed


# --- what cannot be over in time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way, phase", [("down", "model"), ("up", "update")])
def test_a_transfer_that_cannot_be_over_in_time_is_refused_within_seconds_with_the_figures(tmp_path, way, phase):
    """1.1 MB at 8 kB/s take 137 s, and the round closes after 60: the others need not wait for that."""
    round_ = {"quorum": 1.0, "grace_s": 1, "deadline_s": 60}
    with federation(tmp_path, {"a0": 1e6, "a1": 1e6}, round=round_, cohort={"min_agents": 1}) as fed:
        fed.line("a1", way).rate = 8_000.0
        fed.settle()
        fed.request(rounds=1)
        assert round_closes(fed) < 20
        (rejected,) = fed.entries("update_refused", agent="a1")
        reason = rejected.body["reason"]
        assert f"TransferTooSlow: the {phase} cannot arrive in time" in reason
        assert "kB/s, and the round closes in" in reason
        assert fed.agents["a1"].jobs.job is None
        assert fed.line("a1", way).bytes < 150_000, "no more is sent of it"


# --- many uploads at a time ------------------------------------------------------------------------------------------


def test_uploads_beyond_the_budget_wait_for_their_turn_and_nothing_is_sent_twice(tmp_path, monkeypatch):
    """Room for two full windows: of eight fast agents some send at a time, and the others know why they wait."""
    monkeypatch.setattr(uploads, "BUDGET_BYTES", 2 << 20)
    monkeypatch.setattr(uploads, "LEAST_BUDGET_BYTES", 1 << 20)
    names = [f"a{number}" for number in range(8)]
    with federation(tmp_path, dict.fromkeys(names, 200_000), capture=True) as fed:
        fed.settle()
        fed.request(rounds=1)
        most = 0
        told = set()

        def step():
            nonlocal most
            most = max(most, fed.coordinator.collector.under_way_bytes())
            told.update(name for name in names if "turn of its update" in fed.agents[name].uploads.waits_for)
            return fed.entries("round_closed")

        fed.until(step, 3000)
        size = model_bytes(fed)
        assert most <= 2 << 20
        assert len(told) == 6
        for name in names:
            assert fed.line(name, "up").bytes < 1.1 * size
            assert len(fed.messages(fed.topics.up(name), up_module.UpdateManifest)) == 1, "who waits does not ask again"


def test_slow_uploads_and_dead_ones_leave_room_for_others(tmp_path, monkeypatch):
    """An agent at 8 kB/s, and one that is gone without a word, would each take the whole budget for minutes."""
    monkeypatch.setattr(uploads, "BUDGET_BYTES", 1 << 20)
    rates = {"dead": 200_000, "slow": 8_000, "a2": 1e6, "a3": 1e6}
    with federation(tmp_path, rates, round={"quorum": 0.5, "grace_s": 600, "deadline_s": 3000}) as fed:
        for name, rate in rates.items():
            fed.line(name, "down").rate = 1e9
            fed.line(name, "up").rate = rate
        fed.settle()
        fed.request(rounds=1)
        fed.until(lambda: "dead" in fed.coordinator.collector._uploads or "slow" in fed.coordinator.collector._uploads)
        begin = fed.clock.now
        fed.kill("dead", will=False)
        fed.until(lambda: len(fed.entries("update_accepted")) == 2, 100)
        assert fed.clock.now - begin < 30
        assert {entry.agent for entry in fed.entries("update_accepted")} == {"a2", "a3"}
