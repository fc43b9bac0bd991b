"""Blobs on their way down: once for all, again only for those who lack something."""

from __future__ import annotations

import pytest
from federation_disturbances import Stranger
from federation_duties import WIDE_TASK
from federation_harness import Federation

from coordinator.fleet.transfers import GATHER_S, Distributor
from edge_agent.errors import ChunkError
from edge_agent.wire import messages as wire
from edge_agent.wire.chunks import AHEAD_BYTES, STALL_S, Outgoing, decode_frame
from edge_agent.wire.messages import Topics

TOPICS = Topics("home")


class Bench:
    """A distributor, what it has published, and its clock."""

    def __init__(self):
        self.now = 0.0
        self.published = []
        self.distributor = Distributor(
            TOPICS, lambda topic, frame: self.published.append((topic, frame)), lambda: self.now
        )

    def taken(self):
        """(topic, chunk number) of everything published since the last call."""
        found = [(topic, decode_frame(frame).index) for topic, frame in self.published]
        self.published.clear()
        return found


@pytest.fixture
def bench():
    return Bench()


def blob(chunks=3, chunk_bytes=1000):
    return Outgoing.of(bytes(range(250)) * (4 * chunks), chunk_bytes)


def test_what_all_lack_goes_out_once_on_the_broadcast_topic(bench):
    offered = blob()
    digest = offered.ref.digest
    bench.distributor.offer(offered, ("a", "b"))
    bench.distributor.want("a", digest, [(0, 3)])
    bench.distributor.pump()
    assert bench.taken() == [], "the other one may answer too"
    bench.distributor.want("b", digest, [(0, 3)])
    bench.distributor.pump()
    assert bench.taken() == [(TOPICS.broadcast(digest), index) for index in range(3)]
    assert bench.distributor.bytes_to == {"a": 3 * 1040, "b": 3 * 1040}


def test_it_waits_only_a_moment_for_those_who_do_not_answer(bench):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b", "mute"))
    bench.distributor.want("a", offered.ref.digest, [(0, 3)])
    bench.distributor.want("b", offered.ref.digest, [(1, 2)])
    assert bench.distributor.pump() == pytest.approx(GATHER_S)
    bench.now += GATHER_S
    bench.distributor.pump()
    assert [index for _, index in bench.taken()] == [0, 1, 2]


def test_have_is_an_answer(bench):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b"))
    bench.distributor.have("b", offered.ref.digest)
    bench.distributor.want("a", offered.ref.digest, [(0, 3)])
    bench.distributor.pump()
    assert [topic for topic, _ in bench.taken()] == [TOPICS.down_chunks("a")] * 3, "one alone gets it alone"


def test_whoever_misses_a_chunk_gets_that_chunk_alone(bench):
    offered = blob()
    digest = offered.ref.digest
    bench.distributor.offer(offered, ("a", "b"))
    for agent in ("a", "b"):
        bench.distributor.want(agent, digest, [(0, 3)])
    bench.distributor.pump()
    bench.taken()
    bench.distributor.have("a", digest)
    bench.distributor.want("b", digest, [(1, 2)])
    bench.now += GATHER_S
    bench.distributor.pump()
    assert bench.taken() == [(TOPICS.down_chunks("b"), 1)]


def test_what_several_lack_is_merged(bench):
    offered = blob(chunks=10)
    digest = offered.ref.digest
    bench.distributor.offer(offered, ("a", "b"))
    bench.distributor.want("a", digest, [(0, 2), (5, 7)])
    bench.distributor.want("b", digest, [(1, 3), (9, 10)])
    bench.distributor.pump()
    assert [index for _, index in bench.taken()] == [0, 1, 2, 5, 6, 9]


def test_the_sender_stays_within_reach_of_the_slowest_that_moves(bench):
    """61,400-byte chunks: 4 MiB ahead are 68 of them, until progress is reported or the receiver stalls."""
    chunk = 61_400
    offered = Outgoing.of(bytes(200 * chunk), chunk)
    digest = offered.ref.digest
    ahead = AHEAD_BYTES // chunk
    bench.distributor.offer(offered, ("a", "b"))
    for agent in ("a", "b"):
        bench.distributor.want(agent, digest, [(0, 200)])
    bench.distributor.pump()
    assert len(bench.taken()) == ahead
    bench.distributor.progress("a", digest, ahead)
    bench.distributor.pump()
    assert bench.taken() == [], "b has not moved"
    bench.now += STALL_S / 2
    bench.distributor.progress("a", digest, ahead)
    bench.distributor.progress("b", digest, 10)
    bench.distributor.pump()
    assert len(bench.taken()) == 10


def test_a_receiver_that_stalls_does_not_hold_up_the_others(bench):
    chunk = 61_400
    offered = Outgoing.of(bytes(200 * chunk), chunk)
    digest, ahead = offered.ref.digest, AHEAD_BYTES // chunk
    bench.distributor.offer(offered, ("a", "b"))
    for agent in ("a", "b"):
        bench.distributor.want(agent, digest, [(0, 200)])
    bench.distributor.pump()
    bench.taken()
    bench.now += STALL_S + 0.1
    bench.distributor.progress("a", digest, ahead)
    bench.distributor.pump()
    assert len(bench.taken()) == ahead


def test_a_lie_about_progress_brings_nobody_further_ahead(bench):
    chunk = 61_400
    offered = Outgoing.of(bytes(200 * chunk), chunk)
    bench.distributor.offer(offered, ("a",))
    bench.distributor.want("a", offered.ref.digest, [(0, 200)])
    bench.distributor.pump()
    sent = len(bench.taken())
    bench.distributor.progress("a", offered.ref.digest, 10**9)
    bench.distributor.pump()
    assert len(bench.taken()) == sent, "at most what has been sent counts as seen"


def test_nothing_is_sent_to_those_who_are_gone(bench):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b"))
    for agent in ("a", "b"):
        bench.distributor.want(agent, offered.ref.digest, [(0, 3)])
    bench.distributor.forget("a")
    bench.distributor.forget("b")
    bench.now += 1
    assert bench.distributor.pump() is None
    assert bench.taken() == []


def test_a_blob_that_is_not_on_offer_is_not_sent(bench):
    offered = blob()
    assert not bench.distributor.want("a", offered.ref.digest, [(0, 1)])
    bench.distributor.offer(offered, ("a",))
    bench.distributor.withdraw({offered.ref.digest})
    assert not bench.distributor.want("a", offered.ref.digest, [(0, 1)])


@pytest.mark.parametrize("ranges", [[(0, 4)], [(-1, 2)], [(2, 2)], [(2, 1)], [(0, 1), (3, 9)]])
def test_ranges_outside_the_blob_are_refused_and_change_nothing(bench, ranges):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b"))
    with pytest.raises(ChunkError):
        bench.distributor.want("a", offered.ref.digest, ranges)
    bench.now += 1
    bench.distributor.pump()
    assert bench.taken() == []


def test_ten_agents_cost_one_broadcast(tmp_path):
    """Nine chunks for each of two rounds and the last model, however many listen."""
    with Federation(tmp_path, agents=10, task=WIDE_TASK, capture=True) as fed:
        fed.request(rounds=2)
        fed.finish()
        chunks = [topic for topic, _ in fed.broker.captured if "/b/" in topic or topic.endswith("/db")]
        assert len(chunks) == 3 * 9
        assert fed.coordinator.distributor._offers == {}


def test_an_agent_that_has_the_blob_in_its_cache_gets_nothing(tmp_path):
    with Federation(tmp_path, agents=(), task=WIDE_TASK, cohort={"min_agents": 1}, capture=True) as fed:
        agent = Stranger(fed, "a0")
        agent.hello()
        fed.request(rounds=1)
        fed.settle()
        (job,) = agent.heard(wire.Job)
        agent.say(wire.Have(digest=job.blobs[0].digest))
        fed.wait(2)
        assert not [topic for topic, _ in fed.broker.captured if "/b/" in topic or topic.endswith("/db")]
