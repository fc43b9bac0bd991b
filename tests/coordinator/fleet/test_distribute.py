"""Blobs on their way down: once for all who need them, again only for those who lack something."""

from __future__ import annotations

import pytest
from chunked_blobs import ranges_of
from federation_disturbances import Stranger
from federation_duties import WIDE_TASK
from federation_harness import Federation

from coordinator.fleet.carousel import BYTES_OF_A_REPORT
from coordinator.fleet.downloads import GATHER_S, LONGEST_GATHER_S, SWEEP_S, Distributor
from edge_agent.core.errors import ChunkError
from edge_agent.wire.blobs.chunks import Outgoing, decode_frame
from edge_agent.wire.blobs.flow import REPORT_AFTER_S, STALL_S
from edge_agent.wire.messages import down, up
from edge_agent.wire.messages.down import Listen
from edge_agent.wire.messages.up import Progress, Want
from edge_agent.wire.topics import Topics

TOPICS = Topics("home")


class Bench:
    """A distributor, what it has published, and its clock."""

    def __init__(self):
        self.now = 0.0
        self.published = []
        self.said = []
        self.distributor = Distributor(
            TOPICS,
            lambda topic, frame: self.published.append((topic, frame)),
            lambda agent, message: self.said.append((agent, message)),
            lambda: self.now,
        )

    def want(self, agent, offered, *ranges, direct=False):
        ranges = ranges or ((0, offered.count),)
        return self.distributor.want(agent, Want(digest=offered.ref.digest, ranges=ranges, direct=direct))

    def report(self, agent, offered, *missing):
        self.distributor.progress(agent, Progress(digest=offered.ref.digest, missing=missing))

    def taken(self):
        """(topic, chunk number) of everything published since the last call."""
        self.distributor.pump()
        found = []
        for topic, payload in self.published:
            frame = decode_frame(payload)
            chunk = -(-len(frame.data) // self.chunk_bytes)
            found += [(topic, frame.index + number) for number in range(chunk)]
        self.published.clear()
        return found

    def heard(self):
        found = list(self.said)
        self.said[:] = []
        return found

    chunk_bytes = 1000


@pytest.fixture
def bench():
    return Bench()


def blob(chunks=3):
    return Outgoing.of(bytes(range(250)) * (4 * chunks), 1000)


def large(chunks=200):
    return Outgoing.of(bytes(chunks * 4000), 4000)


def test_what_all_lack_goes_out_once_on_the_broadcast_topic(bench):
    offered = blob()
    digest = offered.ref.digest
    bench.distributor.offer(offered, ("a", "b"))
    bench.want("a", offered)
    assert bench.taken() == [], "the other one may answer too"
    bench.want("b", offered)
    assert bench.taken() == [(TOPICS.broadcast(digest), index) for index in range(3)]
    assert bench.distributor.bytes_to["a"] == bench.distributor.bytes_to["b"] == 3000 + 40 * 2


def test_agents_whose_link_is_unknown_are_asked_to_listen_where_others_need_the_blob_too(bench):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b"))
    for agent in ("a", "b"):
        bench.want(agent, offered, direct=True)
    assert bench.taken() == []
    listen = Listen(digest=offered.ref.digest, broadcast=True)
    assert bench.heard() == [("a", listen), ("b", listen)]
    bench.want("a", offered)
    assert bench.taken() == [], "the other one is about to listen too"
    bench.want("b", offered)
    assert bench.taken() == [(TOPICS.broadcast(offered.ref.digest), index) for index in range(3)]


def test_an_agent_that_cannot_listen_gets_the_blob_alone(bench):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b"))
    bench.want("a", offered, direct=True)
    bench.now += GATHER_S
    assert bench.taken() == []
    bench.want("a", offered, direct=True)
    bench.now += GATHER_S
    assert bench.taken() == [], "it may have asked before it was asked to listen"
    bench.now += STALL_S
    bench.taken()
    bench.want("a", offered, direct=True)
    bench.now += GATHER_S
    assert bench.taken() == [(TOPICS.down_chunks("a"), index) for index in range(3)]


def test_it_waits_only_a_moment_for_those_who_do_not_answer(bench):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b", "mute"))
    bench.want("a", offered)
    bench.now += GATHER_S / 2
    bench.want("b", offered)
    assert bench.distributor.pump() == pytest.approx(GATHER_S), "while answers keep coming, it waits for the next"
    bench.now += GATHER_S
    assert [index for _, index in bench.taken()] == [0, 1, 2]


def test_the_first_does_not_wait_for_ever_for_answers_that_keep_coming(bench):
    offered = blob()
    bench.distributor.offer(offered, [f"a{number}" for number in range(200)])
    for number in range(200):
        bench.want(f"a{number}", offered)
        bench.now += 0.9 * GATHER_S
        if bench.taken():
            break
    assert bench.now == pytest.approx(LONGEST_GATHER_S, abs=GATHER_S)


def test_have_is_an_answer_and_one_alone_gets_it_alone(bench):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b"))
    bench.distributor.have("b", offered.ref.digest)
    bench.want("a", offered, direct=True)
    assert bench.taken() == [(TOPICS.down_chunks("a"), index) for index in range(3)]
    assert bench.heard() == []


def test_whoever_misses_a_chunk_gets_that_chunk_again(bench):
    offered = blob()
    digest = offered.ref.digest
    bench.distributor.offer(offered, ("a", "b"))
    for agent in ("a", "b"):
        bench.want(agent, offered)
    bench.taken()
    bench.distributor.have("a", digest)
    bench.report("b", offered, (1, 2))
    assert bench.taken() == [(TOPICS.down_chunks("b"), 1)], "chunk 2, sent later, has arrived"


def test_what_several_lack_is_merged(bench):
    offered = blob(chunks=100)
    bench.distributor.offer(offered, ("a", "b"))
    bench.want("a", offered, (0, 2), (5, 7))
    bench.want("b", offered, (1, 3), (9, 10))
    assert [index for _, index in bench.taken()] == [0, 1, 2, 5, 6, 9]


def test_an_agent_that_has_most_of_a_blob_does_not_get_it_again_by_broadcast(bench):
    """It lacks 10 of 100 chunks, the others all: 90 would come for nothing, 10 are tolerated."""
    offered = blob(chunks=100)
    bench.distributor.offer(offered, ("a", "b", "c"))
    bench.want("a", offered)
    bench.want("b", offered, (10, 100))
    bench.want("c", offered, (0, 10))
    bench.taken()
    assert bench.heard() == [("c", Listen(digest=offered.ref.digest, broadcast=False))]
    bench.want("c", offered, (0, 10), direct=True)
    bench.now += GATHER_S
    alone = [index for topic, index in bench.taken() if topic == TOPICS.down_chunks("c")]
    assert alone == [0, 1, 2, 3, 4, 5, 6, 7]


def drive(bench, agents, offered, *, rate=1e9, until=120.0, rates=None):
    """Receivers that store what comes at ``rate``, report when asked, and say when they have all.

    ``agents`` are names and when they ask. Returns how many chunks were published, and what each agent received.
    """
    rates = {name: (rates or {}).get(name, rate) for name in agents}
    lacking = {name: set(range(offered.count)) for name in agents}
    listening = set()
    asked = set()
    received = dict.fromkeys(agents, 0)
    queue = []
    published = 0
    free = dict.fromkeys(agents, 0.0)
    told = dict.fromkeys(agents, 0.0)
    news = dict.fromkeys(agents, 0.0)
    bench.distributor.offer(offered, agents)
    while bench.now < until and any(lacking.values()):
        for name, at in agents.items():
            if bench.now >= at and name not in asked:
                asked.add(name)
                bench.want(name, offered, direct=True)
        bench.distributor.pump()
        for name, message in bench.heard():
            (listening.add if message.broadcast else listening.discard)(name)
            bench.want(name, offered, *ranges_of(lacking[name]), direct=not message.broadcast)
        bench.distributor.pump()
        for topic, payload in bench.published:
            frame = decode_frame(payload)
            span = range(frame.index, frame.index - (-len(frame.data) // offered.ref.chunk_bytes))
            published += len(span)
            hearers = listening if "/b/" in topic else [topic.split("/")[-2]]
            for name in sorted(hearers):
                free[name] = max(free[name], bench.now) + len(payload) / rates[name]
                queue.append((free[name], name, span, frame.report))
                received[name] += len(span)
        bench.published.clear()
        arrived = sorted((item for item in queue if item[0] <= bench.now), key=lambda item: item[0])
        queue = [item for item in queue if item[0] > bench.now]
        for _, name, span, report in arrived:
            if not lacking[name]:
                continue
            lacking[name] -= set(span)
            if not lacking[name]:
                listening.discard(name)
                bench.distributor.have(name, offered.ref.digest)
            elif report or bench.now - told[name] >= REPORT_AFTER_S:
                told[name] = bench.now
                bench.report(name, offered, *ranges_of(lacking[name]))
            news[name] = bench.now
        for name in agents:
            if lacking[name] and news[name] > told[name] and bench.now - told[name] >= REPORT_AFTER_S:
                told[name] = bench.now
                bench.report(name, offered, *ranges_of(lacking[name]))
        bench.now += 0.01
    assert not any(lacking.values()), {name: len(left) for name, left in lacking.items()}
    return published, received


@pytest.mark.parametrize("spread_s", [0.0, 0.3, 2.0])
def test_a_cohort_that_asks_at_different_times_shares_one_carousel(bench, spread_s):
    """1.2 MB at 100 kB/s take 12 s; 30 agents ask within the first 2 s."""
    offered = large(300)
    agents = {f"a{number:02}": number * spread_s / 30 for number in range(30)}
    published, received = drive(bench, agents, offered, rate=100_000)
    assert published <= 1.2 * 300
    assert max(received.values()) <= 1.1 * 300


def test_agents_that_come_when_others_are_done_get_the_beginning_alone(bench):
    """The second asks when half is out: it gets the second half with the first, then the first half."""
    offered = large(300)
    published, received = drive(bench, {"a": 0.0, "b": 7.0}, offered, rate=100_000)
    assert 400 < published < 500
    assert max(received.values()) <= 1.1 * 300


def test_a_slow_agent_gets_the_blob_for_itself_and_does_not_hold_up_the_others(bench):
    """8 kB/s of one of five: the others have 0.8 MB after seconds, it after 100 s; each receives it once."""
    offered = large(200)
    agents = dict.fromkeys(("a", "b", "c", "d", "slow"), 0.0)
    done = {}
    real = bench.distributor.have
    bench.distributor.have = lambda agent, digest: done.setdefault(agent, bench.now) and real(agent, digest)
    published, received = drive(bench, agents, offered, rate=1e6, rates={"slow": 8000}, until=300.0)
    assert max(done[name] for name in "abcd") < 8
    assert done["slow"] < 1.05 * 200 * 4040 / 8000
    assert published <= 2.1 * 200
    assert max(received.values()) <= 1.1 * 200


def test_an_agent_whose_link_hangs_does_not_hold_up_the_others(bench):
    offered = large(50)
    bench.distributor.offer(offered, ("a", "stuck"))
    for agent in ("a", "stuck"):
        bench.want(agent, offered)
    bench.chunk_bytes = 4000
    assert [index for _, index in bench.taken()] == [0, 1]
    bench.now += 0.1
    bench.report("a", offered, (2, 50))
    assert bench.taken() == []
    bench.now += STALL_S
    assert [index for _, index in bench.taken()][:2] == [2, 3]


def test_a_fleet_that_falls_silent_together_goes_on_with_one_broadcast(bench):
    """As where the machine of the broker is busy: sent to each alone, the blob would be published 20 times."""
    offered = large(50)
    bench.chunk_bytes = 4000
    agents = [f"a{number:02}" for number in range(20)]
    bench.distributor.offer(offered, agents)
    for agent in agents:
        bench.want(agent, offered)
    assert [index for _, index in bench.taken()] == [0, 1]
    bench.heard()
    bench.now += 2 * STALL_S
    assert bench.taken() == []
    for agent in agents:
        bench.report(agent, offered, (2, 50))
    topics = {topic for topic, _ in bench.taken()}
    assert topics == {TOPICS.broadcast(offered.ref.digest)}
    assert bench.heard() == [], "nobody is asked to request it alone"


def test_a_part_of_a_fleet_whose_answers_take_seconds_is_waited_for_before_it_gets_the_blob_alone(bench):
    """As where thousands of answers arrive one after another: some are there, and the others no worse links."""
    offered = large(50)
    bench.chunk_bytes = 4000
    agents = [f"a{number:02}" for number in range(30)]
    bench.distributor.offer(offered, agents)
    for agent in agents:
        bench.want(agent, offered)
    assert [index for _, index in bench.taken()] == [0, 1]
    bench.heard()
    bench.now += 2 * STALL_S
    for agent in agents[10:]:
        bench.report(agent, offered, (2, 50))
    assert {topic for topic, _ in bench.taken()} == {TOPICS.broadcast(offered.ref.digest)}
    assert bench.heard() == [], "ten of thirty are silent, and nobody is asked to request it alone"
    # What they answer at last counts, and those that stay silent are served alone.
    bench.report(agents[0], offered, (2, 50))
    for _ in range(8):
        bench.now += 1.0
        for agent in agents[10:]:
            bench.report(agent, offered, (2, 50))
        bench.taken()
    assert {agent for agent, _ in bench.heard()} == set(agents[1:10])


def test_the_reports_of_a_large_fleet_do_not_shrink_the_windows_that_they_are_asked_for(bench):
    """Two thousand reports take seconds to arrive, which looks like slow links: each chunk had its own reports."""
    offered = large(100)
    bench.chunk_bytes = 4000
    agents = [f"a{number:04}" for number in range(2000)]
    bench.distributor.offer(offered, agents)
    for agent in agents:
        bench.want(agent, offered)
    asked = 0
    following = 0
    while True:
        bench.distributor.pump()
        frames = [decode_frame(payload) for _, payload in bench.published]
        bench.published.clear()
        asked += sum(frame.report for frame in frames)
        chunks = sum(-(-len(frame.data) // 4000) for frame in frames)
        assert chunks
        following += chunks
        if following == 100:
            break
        # Only the first ones were asked while nobody else was.
        bench.now += 0.2 if asked == 1 else 1.5
        for agent in agents:
            bench.report(agent, offered, (following, 100))
    assert asked <= 100 * 4000 / (2000 * BYTES_OF_A_REPORT / 2) + 1


def test_most_of_a_fleet_that_take_long_to_listen_get_more_time(bench):
    offered = large(50)
    bench.chunk_bytes = 4000
    agents = [f"a{number:02}" for number in range(20)]
    bench.distributor.offer(offered, agents)
    for agent in agents:
        bench.want(agent, offered, direct=True)
    bench.taken()
    bench.heard()
    bench.now += 2 * STALL_S
    assert bench.taken() == []
    assert bench.heard() == []
    for agent in agents[:19]:
        bench.want(agent, offered)
    bench.taken()
    assert bench.heard() == [("a19", Listen(digest=offered.ref.digest, broadcast=False))]
    bench.now += LONGEST_GATHER_S
    assert {topic for topic, _ in bench.taken()} == {TOPICS.broadcast(offered.ref.digest)}


def test_an_agent_whose_report_waits_to_be_read_is_not_silent(bench):
    offered = large(50)
    bench.chunk_bytes = 4000
    unread_s = 2 * STALL_S
    bench.distributor._unread_s = lambda: unread_s
    bench.distributor.offer(offered, ("a", "b"))
    for agent in ("a", "b"):
        bench.want(agent, offered)
    bench.taken()
    bench.now += 1.5 * STALL_S
    bench.taken()
    assert bench.heard() == []
    unread_s = 0.0
    bench.now += SWEEP_S
    bench.taken()
    assert {agent for agent, _ in bench.heard()} == {"a", "b"}


def test_nothing_is_published_again_because_it_is_asked_for_again(bench):
    """Below 61 kB/s each agent asked every second, and each question had up to 4 MiB sent again."""
    offered = large(50)
    bench.chunk_bytes = 4000
    bench.distributor.offer(offered, ("a",))
    bench.want("a", offered, direct=True)
    assert len(bench.taken()) == 2
    for _ in range(3):
        bench.now += 0.3
        bench.want("a", offered, direct=True)
        assert bench.taken() == []


def test_a_new_connection_gets_what_was_lost_with_the_old_one_at_once(bench):
    offered = large(50)
    bench.chunk_bytes = 4000
    bench.distributor.offer(offered, ("a",))
    bench.want("a", offered, direct=True)
    bench.taken()
    bench.distributor.forget("a")
    bench.want("a", offered, direct=True)
    assert [index for _, index in bench.taken()] == [0, 1]
    bench.distributor.disconnected()
    assert [index for _, index in bench.taken()] == []
    bench.want("a", offered, direct=True)
    assert [index for _, index in bench.taken()] == [0, 1], "the coordinator's own connection counts too"


def test_a_lie_about_what_arrived_brings_nobody_beyond_the_window(bench):
    offered = large(2000)
    bench.chunk_bytes = 4000
    bench.distributor.offer(offered, ("a",))
    bench.want("a", offered, direct=True)
    assert len(bench.taken()) == 2
    bench.report("a", offered, (1999, 2000))
    assert len(bench.taken()) == 1, "what it says to have is not sent to it"


def test_nothing_is_sent_to_those_who_are_gone(bench):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b"))
    for agent in ("a", "b"):
        bench.want(agent, offered)
    bench.distributor.forget("a")
    bench.distributor.forget("b")
    bench.now += 1
    bench.distributor.pump()
    assert bench.distributor.pump() is None
    assert bench.taken() == []


def test_a_blob_that_is_not_on_offer_is_not_sent(bench):
    offered = blob()
    assert not bench.want("a", offered)
    bench.distributor.offer(offered, ("a",))
    bench.distributor.withdraw({offered.ref.digest})
    assert not bench.want("a", offered)


@pytest.mark.parametrize("ranges", [[(0, 4)], [(-1, 2)], [(2, 2)], [(2, 1)], [(0, 1), (3, 9)]])
@pytest.mark.parametrize("is_known", [True, False])
def test_ranges_outside_the_blob_are_refused_and_change_nothing(bench, ranges, is_known):
    offered = blob()
    bench.distributor.offer(offered, ("a", "b") if not is_known else ("a",))
    if is_known:
        bench.want("a", offered, (0, 1), direct=True)
        assert len(bench.taken()) == 1
    with pytest.raises(ChunkError):
        bench.want("a", offered, *ranges, direct=True)
    bench.now += 1
    assert bench.taken() == []


def test_ten_agents_cost_one_broadcast(tmp_path):
    """Each chunk of two rounds and the last model once, however many listen."""
    with Federation(tmp_path, agents=10, task=WIDE_TASK, capture=True) as fed:
        fed.request(rounds=2)
        fed.finish()
        frames = [decode_frame(p) for topic, p in fed.broker.captured if "/b/" in topic or topic.endswith("/db")]
        assert sum(len(frame.data) for frame in frames) == 3 * len(fed.state.blobs.read(fed.record.checkpoint))
        assert fed.coordinator.distributor._offers == {}


def test_an_agent_that_has_the_blob_in_its_cache_gets_nothing(tmp_path):
    with Federation(tmp_path, agents=(), task=WIDE_TASK, cohort={"min_agents": 1}, capture=True) as fed:
        agent = Stranger(fed, "a0")
        agent.hello()
        fed.request(rounds=1)
        fed.settle()
        (job,) = agent.heard(down.Job)
        agent.say(up.Have(digest=job.blobs[0].digest))
        fed.wait(2)
        assert not [topic for topic, _ in fed.broker.captured if "/b/" in topic or topic.endswith("/db")]
