"""A coordinator that is behind: what it handles first, and whom it takes for lost."""

from __future__ import annotations

import numpy as np
from federation_harness import Federation

from coordinator.fleet.collection import Collection
from coordinator.fleet.message_ranks import rank_by
from coordinator.fleet.uploads import Collector
from coordinator.journal.entries import fact_of
from coordinator.state.store import StateFolder
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.inbox import ORDINARY, Inbox, Rank
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.tensors import encode, specs_of
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message

TOPICS = Topics("home")
DIGEST = "0" * 64


def rank(topic, payload, *, retained=False):
    return rank_by(TOPICS)(Message(topic, payload, retained))


def test_signs_of_life_and_wills_are_urgent_and_the_newest_of_each_start_counts():
    beat = codec.encode(up.Heartbeat(boot="b1"))
    assert rank(TOPICS.heartbeat("a"), beat) == Rank(is_urgent=True, replaces="h a b1")
    assert rank(TOPICS.heartbeat("a"), codec.encode(up.Heartbeat(boot="b2"))).replaces == "h a b2"
    assert rank(TOPICS.presence("a"), b"offline b1 1").is_urgent
    assert not rank(TOPICS.presence("a"), b"online b1 1").is_urgent


def test_a_message_that_is_repeated_until_it_is_answered_waits_once():
    hello = codec.encode(up.Hello(software="x", tier="train", samples=1, boot="b1"))
    assert rank(TOPICS.up("a"), hello) == Rank(replaces="hello a b1")
    ref = fields.BlobRef(digest=DIGEST, size_bytes=10, chunk_bytes=64)
    update = up.UpdateManifest(run="r", round=1, blob=ref, samples=1, boot="b1")
    assert rank(TOPICS.up("a"), codec.encode(update)) == Rank(replaces="update a b1")


def test_chunks_requests_and_what_is_refused_keep_their_order():
    want = codec.encode(up.Want(digest=DIGEST, ranges=((0, 1),), boot="b1"))
    assert rank(TOPICS.up("a"), want) == ORDINARY
    assert rank(TOPICS.up_chunks("a"), b"chunk") == ORDINARY
    assert rank("elsewhere", b"x") == ORDINARY
    assert rank(TOPICS.heartbeat("a"), codec.encode(up.Heartbeat(boot="b1")), retained=True) == ORDINARY


def test_ten_thousand_agents_that_repeat_themselves_take_bounded_memory():
    """Each says hello ten times before it is answered: 10,000 messages wait, and not 100,000."""
    inbox = Inbox(rank_by(TOPICS))
    for number in range(10_000):
        hello = codec.encode(up.Hello(software="x", tier="train", samples=1, boot=f"b{number}"))
        for _ in range(10):
            assert inbox.put_message(Message(TOPICS.up(f"agent-{number}"), hello))
    waiting = 0
    while inbox.waiting_bytes:
        inbox.get(0)
        waiting += 1
    assert waiting == 10_000


def test_an_agent_whose_messages_wait_unread_is_not_lost_and_a_silent_one_is(tmp_path):
    with Federation(tmp_path, agents=("talks", "silent")) as fed:
        fed.settle()
        fed.kill("silent", will=False)
        fed.kill("talks", will=False)
        transport = fed.coordinator.transport
        lease_s = fed.coordinator.roster.lease_s
        transport.unread_s = lease_s + 1  # the coordinator was busy, and what was said since waits to be read
        fed.wait(lease_s + 1)
        assert fed.coordinator.roster.present() == ["silent", "talks"]
        boot = fed.coordinator.roster.get("talks").boot
        fed.coordinator.handle("talks", "h", codec.encode(up.Heartbeat(boot=boot)))
        transport.unread_s = 0.0
        fed.wait(1)
        assert fed.coordinator.roster.present() == ["talks"]


def test_a_coordinator_that_is_behind_lets_one_upload_begin_at_a_time(tmp_path):
    tensors = {"w": np.arange(64, dtype=np.float32)}
    blob = Outgoing.of(encode(tensors))
    agents = ("a0", "a1", "a2")
    unread_s = 0.1
    said = []
    with StateFolder(tmp_path).open("test") as state:
        note = lambda agent, message: said.append((agent, type(message)))
        collector = Collector(state.blobs, state.journal, note, lambda: 0.0, unread_s=lambda: unread_s)
        run = state.journal.request_run(fact_of("run_requested", {}))
        collector.open(Collection(run, 1, agents, specs_of(tensors)))
        for agent in agents:
            collector.manifest(agent, up.UpdateManifest(run=run, round=1, blob=blob.ref, samples=1))
        collector.tick()
        assert said == [("a0", down.Grant), ("a1", down.Queued), ("a2", down.Queued)]
        unread_s = 0.0
        collector.tick()
        assert said[3:] == [("a1", down.Grant), ("a2", down.Grant)]
