"""Agents that have a key obey the coordinator that made it, once for each command, and nobody else."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from faulty_broker import Faults
from federation_harness import Federation

from coordinator.state.backup import back_up
from coordinator.state.command_keys import MASTER, CommandKeys
from edge_agent.agent.event_loop import Agent
from edge_agent.core.errors import DuplicateId, ProtocolMismatch, StateError
from edge_agent.wire.messages import codec, down, up
from edge_agent.wire.seal import REMEMBERED, STARTS, AgentKey, Guard, with_mac


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=2, capture=True, keyed=True) as federation:
        federation.settle()
        yield federation


def sent_to(fed, topic, kind=None):
    """Payloads on a topic, of one type of message."""
    found = [payload for where, payload in fed.broker.captured if where == topic]
    return [payload for payload in found if kind is None or json.loads(payload)["type"] == kind]


def counts(agent: Agent) -> tuple[int, int]:
    return agent.guard.refused, agent.guard.replayed


def test_whole_run_is_done_with_keys(fed):
    fed.request(rounds=2)
    fed.finish()
    assert fed.encoder_sha256
    assert [counts(agent) for agent in fed.agents.values()] == [(0, 0), (0, 0)]


def test_mac_and_keys_are_those_of_another_library(fed):
    payload = sent_to(fed, fed.topics.down("a0"), "welcome")[0]
    body, _, end = payload.rpartition(b',"mac":"')
    master = (fed.config.state / MASTER).read_bytes()
    key = HKDF(hashes.SHA256(), 32, salt=None, info=b"headwater commands\0home\0a0").derive(master)
    check = HMAC(key, hashes.SHA256())
    check.update(b"a0\0" + body + b"}")
    assert end == check.finalize().hex().encode() + b'"}'


def test_announcement_is_signed_with_the_public_key_of_the_agents(fed):
    body, _, end = sent_to(fed, fed.topics.announce)[-1].rpartition(b',"sig":"')
    public_key = fed.keys().of_agent("a1").public_key
    Ed25519PublicKey.from_public_bytes(public_key).verify(bytes.fromhex(end[:-2].decode()), body + b"}")


def test_command_without_proof_is_refused_and_counted(fed):
    fed.broker.route(fed.topics.down("a0"), fed.order(down.Refused(error="DuplicateId", message="stop")))
    fed.broker.route(fed.topics.announce, b'{"v":2}')  # ended every agent of the fleet after some minutes
    fed.settle()
    assert counts(fed.agents["a0"]) == (2, 0)
    assert counts(fed.agents["a1"]) == (1, 0)
    assert fed.agents["a0"].rejected is None
    assert fed.agents["a0"].welcomed
    fed.agents["a0"].write_status()
    status = json.loads((fed.folder / "a0" / "status.json").read_bytes())
    assert status["commands"] == {"authenticated": True, "refused": 2, "replayed": 0}


def test_command_to_another_agent_is_refused(fed):
    """A broker, or who has taken it over, may deliver it on any topic."""
    fed.broker.route(fed.topics.down("a1"), sent_to(fed, fed.topics.down("a0"))[0])
    fed.settle()
    assert counts(fed.agents["a1"]) == (1, 0)


def test_key_of_another_agent_proves_nothing(fed):
    stolen = fed.keys().of_agent("a1")
    forged = with_mac(stolen.key, "a0", fed.order(down.Who(question="x"), seq=10_000))
    fed.broker.route(fed.topics.down("a0"), forged)
    fed.settle()
    assert counts(fed.agents["a0"]) == (1, 0)


def test_every_flipped_bit_of_a_command_is_noticed():
    keys = CommandKeys(bytes(range(32)), "home")
    payload = keys.proven("a0", codec.encode(down.Who(boot="c1", seq=7, federation="f" * 32, epoch=3, question="q")))
    guard = Guard(keys.of_agent("a0"), "b1")
    for position in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[position // 8] ^= 1 << position % 8
        assert not guard.lets_in(bytes(damaged), to_all=False), position
    assert guard.refused == 8 * len(payload)
    assert guard.lets_in(payload, to_all=False)


def test_row_19_recorded_commands_are_refused_after_a_restart_of_the_agent(fed):
    """Row 19 of the fault matrix: they are published again when the agent has been restarted."""
    fed.request(rounds=1)
    fed.finish()
    recorded = sent_to(fed, fed.topics.down("a0"))
    kinds = {json.loads(payload)["type"] for payload in recorded}
    assert {"welcome", "job", "grant", "receipt"} <= kinds
    fed.kill("a0")
    agent = fed.add("a0")
    for payload in recorded:  # before its hello is answered, and after
        agent._on_words(payload)
    assert agent.guard.replayed >= len(recorded) - sum(json.loads(p)["type"] == "who" for p in recorded)
    assert not agent.welcomed
    assert agent.jobs.job is None
    fed.settle()
    assert agent.welcomed
    before = agent.guard.replayed
    for payload in recorded:
        fed.broker.route(fed.topics.down("a0"), payload)
    fed.settle()
    assert agent.guard.replayed == before + len(recorded)
    assert agent.guard.refused == 0
    assert agent.jobs.job is None
    assert agent.welcomed


def test_commands_of_an_earlier_start_of_the_coordinator_are_refused(fed):
    fed.request(rounds=1)
    fed.finish()
    recorded = sent_to(fed, fed.topics.down("a0"), "welcome") + sent_to(fed, fed.topics.down("a0"), "job")
    fed.kill_coordinator()
    fed.start_coordinator()
    fed.settle()
    agent = fed.agents["a0"]
    assert agent.welcomed
    for payload in recorded:
        fed.broker.route(fed.topics.down("a0"), payload)
    fed.settle()
    assert agent.guard.replayed == len(recorded)
    assert agent.welcomed
    fed.request(rounds=1)
    fed.finish()
    assert fed.encoder_sha256


def test_run_with_keys_has_the_same_bits_on_a_network_that_loses_doubles_and_shuffles(tmp_path):
    results = set()
    for keyed in (False, True):
        faults = Faults(np.random.default_rng(8), lose=0.1, duplicate=0.1, reorder=0.1, flip=0.05) if keyed else None
        with Federation(tmp_path / str(keyed), faults=faults, keyed=keyed, round={"deadline_s": 3600}) as fed:
            fed.request(rounds=3)
            took = fed.finish(3600.0)
            results.add(fed.encoder_sha256)
    assert len(results) == 1
    assert took < 300, "recovery must not wait for deadlines"
    assert all(sum(column) > 0 for column in zip(*(counts(agent) for agent in fed.agents.values()), strict=True))


def test_new_state_folder_is_a_stranger_to_agents_with_keys(fed, tmp_path, caplog):
    fed.kill_coordinator()
    fed.config = fed.config.model_copy(update={"state": tmp_path / "empty"})
    with caplog.at_level(logging.WARNING):
        fed.start_coordinator()
        fed.wait(30.0)
    assert len(fed.coordinator.roster) == 0
    assert {agent.membership.federation for agent in fed.agents.values()} != {fed.coordinator.federation_id}
    assert "enroll this agent again" in caplog.text


def test_secret_is_made_once_and_private(tmp_path):
    first = CommandKeys.of(tmp_path, "home")
    again = CommandKeys.of(tmp_path, "home")
    assert first.of_agent("a0") == again.of_agent("a0")
    assert first.of_agent("a0").key not in {first.of_agent("a1").key, CommandKeys.of(tmp_path, "x").of_agent("a0").key}
    path = tmp_path / MASTER
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert first.of_agent("a0").key.hex() not in repr(first.of_agent("a0"))
    path.write_bytes(b"short")
    with pytest.raises(StateError, match="5 bytes, expected 32"):
        CommandKeys.of(tmp_path, "home")


def guard_of(boot="b1"):
    return Guard(AgentKey("home", "a0", bytes(32), bytes(32)), boot)


def test_each_number_counts_once_and_none_below_those_that_are_remembered():
    guard = guard_of()
    assert guard.is_new(down.Welcome(software="x", lease_s=1, boot="c1", seq=100, answers="b1"))
    ack = down.Ack(run="r-1", digest="a" * 64, missing=(), boot="c1")
    random = np.random.default_rng(0)
    first = [int(seq) for seq in random.permutation(np.arange(101, 101 + REMEMBERED // 2))]
    assert all(guard.is_new(ack.model_copy(update={"seq": seq})) for seq in first)
    assert not any(guard.is_new(ack.model_copy(update={"seq": seq})) for seq in [*first, 100, 99, 0])
    assert guard.is_new(ack.model_copy(update={"seq": 1 << 60}))
    for seq in range(1000, 1000 + 2 * REMEMBERED):
        assert guard.is_new(ack.model_copy(update={"seq": seq}))
    assert not guard.is_new(ack.model_copy(update={"seq": 1000}))


def test_welcome_counts_for_the_start_that_it_names_alone():
    welcome = down.Welcome(software="x", lease_s=1, boot="c1", seq=5, answers="b0")
    guard = guard_of()
    assert not guard.is_new(welcome)
    assert guard.is_new(welcome.model_copy(update={"answers": "b1"}))
    assert guard.is_new(welcome.model_copy(update={"answers": "b1", "boot": "c2"}))
    assert not guard.is_new(welcome.model_copy(update={"answers": "b1", "seq": 6}))  # c1 has a successor


@pytest.mark.parametrize("error", [DuplicateId, ProtocolMismatch])
def test_rejection_by_another_start_has_to_name_the_start(error):
    refused = down.Refused(error=error.__name__, message="x", boot="c1", seq=6)
    named = refused.model_copy(update={"whom": "b1"})
    assert not guard_of().is_new(refused)
    assert guard_of().is_new(named)
    guard = guard_of()
    assert guard.is_new(down.Welcome(software="x", lease_s=1, boot="c1", seq=5, answers="b1"))
    assert guard.is_new(refused)
    assert not guard.is_new(refused)
    assert guard.is_new(down.Welcome(software="x", lease_s=1, boot="c2", seq=1, answers="b1"))
    assert not guard.is_new(named), "c1 has a successor"


def test_recorded_questions_of_earlier_starts_do_not_make_it_forget_what_it_has_obeyed():
    guard = guard_of()
    welcome = down.Welcome(software="x", lease_s=1, boot="c9", seq=1, answers="b1")
    cancel = down.Cancel(run="run-0001-" + "0" * 32, round=1, reason="x", boot="c9", seq=2)
    assert guard.is_new(welcome)
    assert guard.is_new(cancel)
    for number in range(3 * STARTS):
        guard.is_new(down.Who(boot=f"c{number + 10}", seq=3))
    assert not guard.is_new(cancel)
    assert not guard.is_new(welcome)
    assert len(guard._numbers) <= STARTS


def test_agent_of_another_protocol_is_told_so_before_its_first_welcome(fed):
    """With a key it takes a rejection of a coordinator that it does not know only where that names its start."""
    agent = fed.agents["a0"]
    hello = json.loads(codec.encode(up.Hello(software="x", tier="train", samples=1, boot=agent.boot)))
    fed.broker.route(fed.topics.up("a0"), json.dumps({**hello, "v": 99, "crc": None}).encode())
    fed.settle()
    payload = sent_to(fed, fed.topics.down("a0"), "refused")[-1]
    assert json.loads(payload)["whom"] == agent.boot
    new = Guard(fed.keys().of_agent("a0"), agent.boot)
    assert new.lets_in(payload, to_all=False)
    assert new.is_new(codec.parse_from_coordinator(payload))


def test_backup_holds_the_secret_privately_so_that_agents_obey_the_coordinator_that_starts_on_it(fed, tmp_path):
    back_up(fed.state, tmp_path / "backup")
    assert (tmp_path / "backup" / MASTER).stat().st_mode & 0o777 == 0o600
    fed.kill_coordinator()
    fed.config = fed.config.model_copy(update={"state": tmp_path / "backup"})
    fed.start_coordinator()
    fed.request(rounds=1)
    fed.finish()
    assert fed.encoder_sha256
    assert [agent.guard.refused for agent in fed.agents.values()] == [0, 0]
