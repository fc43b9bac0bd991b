"""A coordinator that speaks another protocol version: asked again for minutes before an agent gives up."""

from __future__ import annotations

import json
import random

import pytest
from federation_disturbances import Stranger
from federation_harness import Federation

from edge_agent.agent.health import FINAL_S, LEAST_ANSWERS, LONGEST_PAUSE_S, Mismatch
from edge_agent.core.errors import ProtocolMismatch
from edge_agent.wire.messages import codec, down, up

SEVEN_BYTES = b'{"v":5}'


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=2, cohort={"min_agents": 1}, capture=True) as federation:
        federation.settle()
        yield federation


def hellos(fed, name="a0"):
    return len(fed.messages(fed.topics.up(name), up.Hello))


def newer_coordinator(fed, *, as_refusal):
    """In place of ours: answers every hello, in words of version 4 or with what version 4 says to version 3."""
    fed.kill_coordinator()
    ears = Stranger(fed, "newer")
    ears.transport.subscribe(fed.topics.up("+"))
    step = fed.step
    rejection = codec.encode(
        down.Refused(error="ProtocolMismatch", message="coordinator 9 speaks protocol 5..5: upgrade")
    )

    def both():
        busy = step()
        while (event := ears.transport.receive(0)) is not None:
            busy = True
            topic = getattr(event, "topic", "")
            if topic.endswith("/up") and b'"hello"' in event.payload:
                ears.raw(rejection if as_refusal else SEVEN_BYTES, topic.replace("/up", "/dn"))
        return busy

    fed.step = both
    return ears


@pytest.mark.parametrize("announced", [True, False])
def test_seven_bytes_end_no_agent(fed, announced, caplog):
    ears = Stranger(fed, "x")
    before = hellos(fed)
    ears.raw(SEVEN_BYTES, fed.topics.announce if announced else fed.topics.down("a0"))
    fed.settle()
    assert "protocol_mismatch reason=agent" in caplog.text
    assert "says hello again in" in caplog.text
    fed.wait(5)
    assert hellos(fed) == before + 1
    for agent in fed.agents.values():
        agent.raise_if_rejected()
        assert agent.welcomed
    fed.request(rounds=1)
    fed.finish()
    assert fed.record.status == "finished"


def test_seven_bytes_every_ten_seconds_end_no_agent_whose_coordinator_answers(fed):
    """Work goes on, and the agent is never taken for lost."""
    ears = Stranger(fed, "x")
    fed.request(rounds=3)
    for _ in range(40):
        ears.raw(SEVEN_BYTES, fed.topics.announce)
        fed.wait(10)
    assert fed.record.status == "finished"
    for agent in fed.agents.values():
        agent.raise_if_rejected()
        assert agent.welcomed


@pytest.mark.parametrize("as_refusal", [True, False])
def test_an_upgraded_coordinator_is_asked_with_growing_pauses_and_then_given_up(fed, as_refusal):
    agent = fed.agents["a0"]
    newer_coordinator(fed, as_refusal=as_refusal).raw(SEVEN_BYTES, fed.topics.announce)
    before = hellos(fed)
    fed.wait(FINAL_S - 40)
    agent.raise_if_rejected()
    asked = hellos(fed) - before
    assert LEAST_ANSWERS <= asked <= 20
    agent.welcomed = False
    agent.write_status()
    waits = json.loads((agent.config.state / "status.json").read_bytes())["waits_for"]
    assert "speaks another protocol" in waits
    assert "ends when that goes on for 5 minutes" in waits
    fed.wait(40 + LONGEST_PAUSE_S)
    with pytest.raises(ProtocolMismatch, match=r"agent .* speaks protocol 3\.\.4: .*for more than 5 minutes") as end:
        agent.raise_if_rejected()
    assert end.value.exit_code == 3


def test_an_upgrade_that_is_taken_back_within_minutes_costs_no_agent(fed):
    step = fed.step
    newer_coordinator(fed, as_refusal=False).raw(SEVEN_BYTES, fed.topics.announce)
    fed.wait(FINAL_S - 60)
    fed.step = step
    fed.start_coordinator()
    fed.until(lambda: fed.coordinator.roster.present() == ["a0", "a1"], limit_s=5)
    fed.wait(FINAL_S)
    for agent in fed.agents.values():
        agent.raise_if_rejected()


class Bench:
    def __init__(self):
        self.now = 0.0
        self.mismatch = Mismatch(lambda: self.now, random.Random(3))

    def ask(self):
        """The time passes until the next hello is due; returns how long that took."""
        began = self.now
        self.now = self.now + self.mismatch.next_s()
        assert self.mismatch.is_due()
        return self.now - began


def test_pauses_double_within_their_jitter_up_to_a_minute():
    bench = Bench()
    bench.mismatch.note("v2")
    for longest in (2, 4, 8, 16, 32, 60, 60, 60):
        assert longest / 2 <= bench.ask() <= longest
        assert not bench.mismatch.is_due()
        bench.mismatch.note("v2")


def test_a_flood_neither_puts_the_next_hello_off_nor_counts_as_many_answers():
    bench = Bench()
    for _ in range(10_000):
        bench.mismatch.note("v2")
        bench.now += 0.0001
    assert bench.mismatch.next_s() <= 2
    bench.now = FINAL_S + 1
    bench.mismatch.note("v2")
    assert not bench.mismatch.is_final()


def test_two_messages_with_minutes_of_silence_between_are_two_beginnings():
    bench = Bench()
    assert bench.mismatch.note("v2")
    for _ in range(4):
        bench.now += 100
        bench.mismatch.is_due()
    assert bench.mismatch.reason == ""
    assert bench.mismatch.note("v2")
    assert not bench.mismatch.is_final()
