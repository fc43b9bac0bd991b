"""Whatever a peer says costs that peer its message: garbage, other protocols, what a broker retained, impostors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from federation_disturbances import Stranger, assert_honest_result, besieged, refusals
from federation_harness import Federation

from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages import codec, down, up
from edge_agent.wire.messages.codec import sealed
from edge_agent.wire.transport import Message


@pytest.fixture
def fed(tmp_path):
    with besieged(tmp_path) as federation:
        yield federation


def garbage():
    dice = np.random.default_rng(7)
    deep = b'{"v":3,"type":"hello","facts":' + b"[" * 5000 + b"]" * 5000 + b"}"
    yield from (
        b"",
        b"\x00",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"1",
        b"\xff\xfe",
        deep,
        b'{"v":3}',
        b'{"v":"1","type":"bye"}',
    )
    yield b'{"v":3,"v":3,"type":"bye"}'
    yield b'{"v":3,"type":["bye"]}'
    yield b'{"v":3,"type":"bye","more":1}'
    yield b'{"v":true,"type":"bye"}'
    yield b'{"v":3.0,"type":"bye"}'
    yield b'{"v":' + b"9" * 3000 + b',"type":"bye"}'
    yield b'{"v":-' + b"9" * 3000 + b',"type":"bye"}'
    yield b'{"v":' + b"9" * 5000 + b',"type":"bye"}'
    yield b'{"v":3,"type":"want","digest":"' + b"0" * 64 + b'","ranges":[[0,99999999999999]]}'
    yield b'{"v":3,"type":"want","digest":"' + b"0" * 64 + b'","ranges":[[5,1]]}'
    yield b'{"v":3,"type":"progress","digest":"' + b"0" * 64 + b'","seen":' + b"9" * 3000 + b"}"
    yield b'{"v":3,"type":"hello","software":"x","tier":"train","samples":NaN}'
    yield b"x" * 60_000
    for size in (1, 39, 40, 41, 500, 5000):
        yield dice.bytes(size)


@pytest.mark.parametrize("kind", ["up", "ub", "s", "h"])
def test_garbage_on_every_topic_an_agent_speaks_on_harms_nobody(fed, kind):
    topic = {"up": fed.topics.up, "ub": fed.topics.up_chunks, "s": fed.topics.presence, "h": fed.topics.heartbeat}[kind]
    for payload in garbage():
        fed.mallory.raw(payload, topic("mallory"))
        fed.settle()
    assert kind == "s" or fed.coordinator.rejected.total > 20
    assert_honest_result(fed)


def test_garbage_on_every_topic_an_agent_listens_to_harms_nobody(fed):
    """Somebody with too many rights, or a broker without rules. Only a protocol number may end an agent."""
    fed.coordinator.config.round.model_copy()
    (job,) = fed.messages(fed.topics.down("a0"), down.Job)[:1]
    topics = [fed.topics.down("a0"), fed.topics.down_chunks("a0"), fed.topics.announce]
    topics.append(fed.topics.broadcast(job.blobs[0].digest))
    for payload in garbage():
        if b"9999" in payload and b'"bye"' in payload:
            continue
        for topic in topics:
            fed.mallory.raw(payload, topic)
    fed.settle()
    fed.agents["a0"].raise_if_rejected()
    assert_honest_result(fed)


def test_a_long_presence_of_a_peer_does_not_reach_the_log(fed, caplog):
    boot = fed.coordinator.roster.get("mallory").boot
    fed.mallory.raw(f"offline {boot} {'9' * 100_000}".encode(), fed.topics.presence("mallory"))
    fed.settle()
    assert fed.coordinator.rejected.counts == {"mallory: MessageError": 1}
    assert max(len(record.getMessage()) for record in caplog.records) < 1000
    assert_honest_result(fed)


def test_names_that_cannot_be_agents_are_not_remembered(fed):
    root = fed.topics.root
    for number in range(20):
        fed.mallory.raw(b"x", f"{root}/a/UPPER{number}/up")
        fed.mallory.raw(b"online x", f"{root}/s/..")
    fed.settle()
    assert fed.coordinator.rejected.counts == {"topic: MessageError": 40}
    assert [member.id for member in fed.coordinator.roster.members()] == ["a0", "a1", "mallory"]


def test_what_strangers_can_make_the_coordinator_remember_is_bounded(fed):
    for number in range(1500):
        fed.mallory.raw(b"x", fed.topics.up(f"n{number}"))
    fed.settle()
    assert len(fed.coordinator.rejected.counts) <= 1000
    assert fed.coordinator.rejected.total == 1500


@pytest.mark.parametrize(
    "version, upgrade",
    [(0, "upgrade the peer"), (99, "upgrade this side"), (10**2500, "upgrade this side")],
    ids=["older", "newer", "absurd"],
)
def test_an_agent_of_another_protocol_is_told_so_and_the_coordinator_says_it_too(fed, version, upgrade, caplog):
    hello = up.Hello(software="other", tier="train", samples=1)
    raw = {**json.loads(codec.encode(hello)), "v": version}
    raw.pop("crc", None)
    fed.mallory.heard()
    fed.mallory.raw(json.dumps(raw).encode())
    fed.settle()
    (rejected,) = fed.mallory.heard(down.Refused)
    assert rejected.error == "ProtocolMismatch"
    for text in (rejected.message, caplog.text):
        assert f"speaks protocol {version}"[:50] in text
        assert upgrade in text
    assert fed.coordinator.rejected.counts == {"mallory: ProtocolMismatch": 1}
    assert_honest_result(fed)


@pytest.mark.parametrize("version, upgrade", [(0, "upgrade the peer"), (99, "upgrade this side")])
def test_a_forged_message_of_another_protocol_ends_nobody_and_costs_nothing(fed, version, upgrade, caplog):
    raw = {**json.loads(fed.order(down.Welcome(software="x", lease_s=1))), "v": version}
    raw.pop("crc", None)
    fed.mallory.raw(json.dumps(raw).encode(), fed.topics.down("a0"))
    fed.mallory.raw(b'{"v":3}', fed.topics.announce)
    fed.settle()
    assert "speaks protocol 3..4: peer speaks protocol" in caplog.text
    assert upgrade in caplog.text
    fed.wait(4)
    for agent in fed.agents.values():
        agent.raise_if_rejected()
        assert agent.welcomed
    assert_honest_result(fed)


def poison(fed, message, agent="a0"):
    fed.mallory.transport.publish(fed.topics.down(agent), codec.encode(message), retain=True)


def test_a_retained_job_is_not_obeyed(tmp_path):
    with Federation(tmp_path, agents=1, cohort={"min_agents": 1}) as fed:
        fed.mallory = Stranger(fed, "mallory")
        blob = Outgoing.of(b"x" * 100)
        job = down.Job(
            run="run-6666", round=1, rounds=1, seed=0, method="fedavg", task=fed.task, blobs=(blob.ref,), deadline_s=9
        )
        fed.kill("a0")
        poison(fed, job)
        agent = fed.add("a0")
        fed.settle()
        assert agent.jobs.job is None
        fed.request()
        fed.finish()
        assert fed.record.status == "finished"


@pytest.mark.parametrize("where", ["down", "announce"])
def test_a_retained_message_of_another_protocol_does_not_stop_an_agent(tmp_path, where):
    """It would be there again after each restart: nobody could start the agent before the broker is cleaned."""
    with Federation(tmp_path, agents=1, cohort={"min_agents": 1}) as fed:
        mallory = Stranger(fed, "mallory")
        topic = fed.topics.down("a0") if where == "down" else fed.topics.announce
        fed.kill("a0")
        mallory.transport.publish(topic, b'{"v":99,"type":"announce","epoch":1,"software":"x"}', retain=True)
        agent = fed.add("a0")
        fed.settle()
        agent.raise_if_rejected()
        assert agent.welcomed


@pytest.mark.parametrize("message", ["bye", "update"])
def test_retained_messages_of_agents_are_not_believed_by_a_coordinator(tmp_path, message):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 1}) as fed:
        fed.add("a0", seconds=5)
        fed.request(rounds=1)
        fed.wait(1)
        mallory = Stranger(fed, "mallory")
        ref = Outgoing.of(bytes(400)).ref
        words = {"bye": up.Bye(), "update": up.UpdateManifest(run=fed.run_id, round=1, blob=ref, samples=0)}
        fed.kill_coordinator()
        mallory.transport.publish(fed.topics.up("a0"), codec.encode(words[message]), retain=True)
        fed.start_coordinator()
        fed.finish()
        assert fed.record.status == "finished"
        assert fed.metrics()[0]["rejected"] == []


def test_a_lower_epoch_is_not_listened_to(fed):
    """Neither an announcement nor an order; whoever is really there answers the hello that follows."""
    agent = fed.agents["a0"]
    job = fed.agents["a0"].jobs.job
    epoch = agent.membership.epoch
    assert epoch >= 1
    fed.clock.now += 1
    fed.mallory.raw(fed.order(down.Announce(software="old"), epoch=0), fed.topics.announce)
    fed.mallory.raw(fed.order(down.Welcome(software="old", lease_s=1), epoch=0), fed.topics.down("a0"))
    fed.mallory.raw(fed.order(job.model_copy(update={"seed": 99}), epoch=0), fed.topics.down("a0"))
    fed.mallory.raw(fed.order(down.Cancel(run=job.run, round=1, reason="x"), epoch=0), fed.topics.down("a0"))
    fed.settle()
    assert agent.membership.epoch == epoch
    assert (agent.jobs.job.run, agent.jobs.job.seed) == (job.run, job.seed)
    assert agent.welcomed
    assert_honest_result(fed)


@pytest.mark.parametrize("field", ["rss_mb", "metrics"])
def test_a_report_with_infinity_does_not_fail_the_run(fed, field):
    report = json.loads(codec.encode(up.Report(run=fed.run_id, samples=10)))
    report.pop("crc", None)
    report[field] = float("inf") if field == "rss_mb" else {"x": float("inf")}
    fed.mallory.raw(json.dumps(report).encode())
    fed.settle()
    assert_honest_result(fed)
    assert fed.record.status == "finished"


def test_reports_of_strangers_are_not_in_the_summary(fed):
    Stranger(fed, "eve").say(up.Report(run=fed.run_id, samples=10**9, acc_personal=1.0))
    fed.settle()
    assert_honest_result(fed)
    assert [agent["id"] for agent in fed.state.run(fed.run).summary()["agents"]] == ["a0", "a1"]


def test_a_fault_of_one_agent_says_nothing_about_another(fed):
    fed.mallory.say(up.Fault(error="X", message="a0 is broken", run=fed.run_id, round=1))
    fed.settle()
    assert_honest_result(fed)
    assert refusals(fed) == ["X: a0 is broken"]


def test_an_impostor_boot_cannot_take_an_agent_off_the_roster(fed):
    fed.mallory.raw(b"offline wrong-boot", fed.topics.presence("a0"))
    fed.settle()
    assert fed.coordinator.roster.get("a0").is_present
    assert_honest_result(fed)


def test_a_job_that_cannot_be_read_is_answered_with_a_fault_so_that_nobody_waits(tmp_path):
    """A newer coordinator may ask for something this agent has no words for; the round need not wait for it."""
    with Federation(tmp_path, agents=1, cohort={"min_agents": 1}, capture=True) as fed:
        fed.settle()
        raw = b'{"v":3,"type":"job","run":"run-0007","round":3,"rounds":9,"purpose":"dance","boot":"c9","seq":5}'
        Stranger(fed, "x").raw(sealed(raw), fed.topics.down("a0"))
        fed.settle()
        (fault,) = fed.messages(fed.topics.up("a0"), up.Fault)
        assert (fault.run, fault.round, fault.error) == ("run-0007", 3, "MessageError")
        assert "purpose" in fault.message


def test_topic_of_a_peer_cannot_forge_a_line_in_the_log_of_an_agent(fed, caplog):
    """On a broker without rules anybody publishes below the broadcasts; the topic itself is text of theirs."""
    agent = next(iter(fed.agents.values()))
    topic = f"{fed.topics.root}/b/\x1b[2J\n2026-01-01 ERROR forged"
    for retained in (True, False):
        agent._on_message(Message(topic, b"junk", retained=retained))
    words = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert words
    assert all(word.isprintable() for word in words)
