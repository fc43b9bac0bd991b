"""Whatever a peer sends costs that peer its message or its update, never the process, the round, or the honest ones."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from federation_harness import WIDE_TASK, Federation, Stranger, step_of

from edge_agent.errors import ProtocolMismatch
from edge_agent.wire import messages as wire
from edge_agent.wire.chunks import CHUNK_BYTES, HEADER_BYTES, Outgoing, decode_frame
from edge_agent.wire.tensors import encode

EXPECTED_ERRORS = {"MessageError", "ChunkError", "ProtocolMismatch"}
QUORUM = {"quorum": 0.6, "grace_s": 3, "deadline_s": 60}


@pytest.fixture
def fed(tmp_path):
    """Two honest agents that train for 5 s, and ``mallory`` who has been asked as well, in the only round."""
    with Federation(tmp_path, agents=(), round=QUORUM, cohort={"min_agents": 3}, capture=True) as federation:
        for name in ("a0", "a1"):
            federation.add(name, seconds=5)
        federation.mallory = Stranger(federation, "mallory")
        federation.mallory.hello()
        federation.request(rounds=1)
        federation.wait(1)
        assert federation.coordinator.loop.fleet.collector.open_round.cohort == ("a0", "a1", "mallory")
        yield federation


def assert_honest_result(fed):
    """The run ends, its weights are those of the two honest agents alone (10 samples each), and nothing broke."""
    start = fed.final
    fed.finish()
    mean = (step_of("a0") + step_of("a1")) / 2
    for name, array in fed.final.items():
        np.testing.assert_allclose(array, start[name] + mean, rtol=1e-6)
    assert fed.metrics()[0]["agents"] == ["a0", "a1"]
    assert {key.rpartition(" ")[2] for key in fed.coordinator.refused.counts} <= EXPECTED_ERRORS


def refusals(fed, agent="mallory"):
    return [entry.body["reason"] for entry in fed.entries("update_refused", round=1, agent=agent)]


def changed(tensors, name, array):
    return {**tensors, name: array}


def a_weight(tensors):
    return next(name for name in sorted(tensors) if name.endswith("weight"))


BAD_TENSORS = {
    "nan": (lambda t, n: changed(t, n, np.full_like(t[n], np.nan)), "holds NaN or infinity"),
    "infinity": (lambda t, n: changed(t, n, np.full_like(t[n], np.inf)), "holds NaN or infinity"),
    "one nan among many": (
        lambda t, n: changed(
            t, n, np.concatenate([t[n].ravel()[:-1], [np.nan]]).astype(np.float32).reshape(t[n].shape)
        ),
        "holds NaN or infinity",
    ),
    "wrong name": (
        lambda t, n: {("evil" if k == n else k): v for k, v in t.items()},
        "missing '.*'; unexpected 'evil'",
    ),
    "missing": (lambda t, n: {k: v for k, v in t.items() if k != n} | {"pad": np.zeros_like(t[n])}, "missing"),
    "extra": (lambda t, n: {**t, "extra.more": np.zeros(3, np.float32)}, "unexpected 'extra.more'"),
    "wrong shape": (lambda t, n: changed(t, n, t[n].reshape(-1)), "expected float32"),
    "transposed": (lambda t, n: changed(t, n, np.ascontiguousarray(t[n].T)), "expected float32"),
    "int32": (lambda t, n: changed(t, n, t[n].astype(np.int32)), "is int32"),
    "float64": (lambda t, n: changed(t, n, t[n].astype(np.float64)), "is float64"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_an_update_with_bad_tensors_is_refused_with_its_reason(fed, case):
    spoil, reason = BAD_TENSORS[case]
    receipt = fed.mallory.deliver(spoil(dict(fed.final), a_weight(fed.final)))
    assert not receipt.accepted
    (noted,) = refusals(fed)
    assert noted == receipt.reason
    assert re.search(reason, noted)
    assert fed.coordinator.collector.refused.counts == {f"mallory: {noted}": 1}
    assert_honest_result(fed)


def test_a_refused_update_leaves_nothing_on_disk(fed):
    fed.mallory.deliver({name: np.full_like(array, np.nan) for name, array in fed.final.items()})
    blobs = fed.state.blobs.folder
    assert {path.name for path in blobs.rglob("*") if path.is_file()} == {fed.record.checkpoint}


def test_after_a_refusal_another_try_in_the_same_round_is_refused_too(fed):
    fed.mallory.deliver({name: np.full_like(array, np.nan) for name, array in fed.final.items()})
    receipt = fed.mallory.deliver(fed.final)
    assert not receipt.accepted
    assert receipt.reason.startswith("already refused in round 1")
    assert_honest_result(fed)


@pytest.mark.parametrize(
    "data, reason",
    [
        (bytes(331), "331 bytes announced, the method's tensors take 332"),
        (bytes(332 + 8 + 512 * 1024 + 1), "bytes announced"),
    ],
    ids=["one byte too small", "one byte too large"],
)
def test_a_manifest_of_another_size_is_refused_before_anything_is_stored(fed, data, reason):
    """83 numbers are 332 bytes; a header of up to 512 KiB and its length of 8 bytes may come on top."""
    receipt = fed.mallory.deliver(data)
    assert not receipt.accepted
    assert reason in receipt.reason
    assert not list(fed.state.blobs.folder.rglob("*.part"))
    assert_honest_result(fed)


def test_zero_samples_are_refused(fed):
    receipt = fed.mallory.deliver(fed.final, samples=0)
    assert "0 samples" in receipt.reason
    assert_honest_result(fed)


def header_of(length, size):
    return struct.pack("<Q", length) + b"{" + b" " * (size - 9)


@pytest.mark.parametrize("length", [513 * 1024, 1 << 40, (1 << 64) - 1])
def test_an_oversized_tensor_header_is_refused(fed, length):
    receipt = fed.mallory.deliver(header_of(length, 2000))
    assert not receipt.accepted
    assert "header of" in refusals(fed)[0]
    assert_honest_result(fed)


def test_bytes_that_are_no_tensors_are_refused(fed):
    receipt = fed.mallory.deliver(np.random.default_rng(0).bytes(900))
    assert not receipt.accepted
    assert_honest_result(fed)


def test_a_tiny_chunk_size_does_not_end_the_coordinator(fed):
    """64-byte chunks: the window of 1 MiB would be 16,384 of them, more than a grant may name."""
    receipt = fed.mallory.deliver(fed.final, chunk_bytes=64)
    assert receipt.accepted
    fed.finish()
    assert fed.metrics()[0]["agents"] == ["a0", "a1", "mallory"]


def test_a_million_tiny_chunks_are_refused_before_anything_is_kept_for_them(fed):
    """A manifest of a large blob in 64-byte chunks costs its sender a word, and us nothing."""
    fed.mallory.heard()
    blob = wire.BlobRef(digest="ab" * 32, size_bytes=64 << 20, chunk_bytes=64)
    fed.mallory.say(wire.UpdateManifest(run=fed.run, round=1, blob=blob, samples=1))
    fed.settle()
    (receipt,) = fed.mallory.heard(wire.Receipt)
    assert receipt.reason.startswith("1048576 chunks of 64 bytes; expected chunks of 1024 bytes or more")
    assert_honest_result(fed)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frame: frame[:-1],
        lambda frame: frame[:HEADER_BYTES],
        lambda frame: frame[:10],
        lambda frame: b"",
        lambda frame: frame + b"x",
        lambda frame: frame[:100] + bytes([frame[100] ^ 1]) + frame[101:],
        lambda frame: b"XX" + frame[2:],
        lambda frame: frame[:2] + b"\xff" + frame[3:],
        lambda frame: frame[:4] + bytes(8) + frame[12:],
        lambda frame: frame[:12] + struct.pack("<I", 1 << 31) + frame[16:],
    ],
    ids=["cut", "no data", "no header", "empty", "longer", "flipped", "magic", "version", "other blob", "index"],
)
def test_a_damaged_chunk_costs_itself_and_the_upload_can_go_on(fed, spoil):
    blob = fed.mallory.offer(fed.final)
    fed.settle()
    assert fed.mallory.heard(wire.Grant)
    fed.mallory.chunk(spoil(blob.frame(0)))
    fed.settle()
    assert fed.coordinator.refused.total == 1
    assert not fed.mallory.heard(wire.Receipt)
    fed.mallory.chunk(blob.frame(0))
    fed.settle()
    assert fed.mallory.heard(wire.Receipt)[0].accepted


def test_a_whole_blob_with_another_hash_is_asked_for_again(fed):
    """Chunks with right checksums whose sum is not what was announced: lies about the digest gain nothing."""
    good, lie = Outgoing.of(encode(fed.final)), Outgoing.of(bytes(len(encode(fed.final))))
    manifest = wire.UpdateManifest(run=fed.run, round=1, blob=good.ref, samples=10)
    fed.mallory.say(manifest)
    fed.settle()
    fed.mallory.heard()
    lying = replace(decode_frame(lie.frame(0)), transfer=decode_frame(good.frame(0)).transfer)
    fed.mallory.chunk(lying.encode())
    fed.settle()
    (grant,) = fed.mallory.heard(wire.Grant, wire.Receipt)
    assert grant.missing == ((0, 1),)
    fed.mallory.chunk(good.frame(0))
    fed.settle()
    assert fed.mallory.heard(wire.Receipt)[0].accepted


def test_a_chunk_without_a_grant_is_refused_and_counted(fed):
    fed.mallory.send(Outgoing.of(encode(fed.final)))
    fed.settle()
    assert fed.coordinator.refused.counts == {"mallory: ChunkError": 1}
    assert_honest_result(fed)


def test_a_chunk_for_the_upload_of_somebody_else_changes_nothing(tmp_path):
    """Uploads are told apart by topic: frames of a0's blob on mallory's topic do not reach a0's file."""
    with Federation(tmp_path, agents=(), round=QUORUM, cohort={"min_agents": 2}) as fed:
        victim, mallory = Stranger(fed, "victim"), Stranger(fed, "mallory")
        victim.hello()
        mallory.hello()
        fed.request(rounds=1)
        fed.settle()
        blob = victim.offer(fed.final)
        fed.settle()
        mallory.chunk(blob.frame(0))
        fed.settle()
        assert fed.coordinator.refused.counts == {"mallory: ChunkError": 1}
        assert not victim.heard(wire.Receipt)


def test_an_unknown_round_is_refused_as_late(fed):
    receipt = fed.mallory.deliver(fed.final, round=77)
    assert not receipt.accepted
    assert "late: the update is for round 77" in receipt.reason
    assert_honest_result(fed)


def test_an_unknown_run_is_refused(fed):
    receipt = fed.mallory.deliver(fed.final, run="run-9999")
    assert not receipt.accepted
    assert "run-9999" in receipt.reason
    assert fed.state.journal.runs() == [fed.run]
    assert_honest_result(fed)


def test_an_agent_outside_the_cohort_is_refused(fed):
    eve = Stranger(fed, "eve")
    eve.hello()
    fed.settle()
    receipt = eve.deliver(fed.final)
    assert receipt.reason == "eve was not asked for an update in round 1"
    assert fed.coordinator.collector.refused.counts == {f"eve: {receipt.reason}": 1}
    assert_honest_result(fed)


def test_an_agent_that_never_said_hello_is_refused_too(fed):
    receipt = Stranger(fed, "eve").deliver(fed.final)
    assert not receipt.accepted
    assert_honest_result(fed)


def garbage():
    dice = np.random.default_rng(7)
    deep = b'{"v":1,"type":"hello","facts":' + b"[" * 5000 + b"]" * 5000 + b"}"
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
        b'{"v":1}',
        b'{"v":"1","type":"bye"}',
    )
    yield b'{"v":1,"v":1,"type":"bye"}'
    yield b'{"v":1,"type":["bye"]}'
    yield b'{"v":1,"type":"bye","more":1}'
    yield b'{"v":true,"type":"bye"}'
    yield b'{"v":1.0,"type":"bye"}'
    yield b'{"v":' + b"9" * 3000 + b',"type":"bye"}'
    yield b'{"v":-' + b"9" * 3000 + b',"type":"bye"}'
    yield b'{"v":' + b"9" * 5000 + b',"type":"bye"}'
    yield b'{"v":1,"type":"want","digest":"' + b"0" * 64 + b'","ranges":[[0,99999999999999]]}'
    yield b'{"v":1,"type":"want","digest":"' + b"0" * 64 + b'","ranges":[[5,1]]}'
    yield b'{"v":1,"type":"progress","digest":"' + b"0" * 64 + b'","seen":' + b"9" * 3000 + b"}"
    yield b'{"v":1,"type":"hello","software":"x","tier":"train","samples":NaN}'
    yield b"x" * 60_000
    for size in (1, 39, 40, 41, 500, 5000):
        yield dice.bytes(size)


@pytest.mark.parametrize("kind", ["up", "ub", "s", "h"])
def test_garbage_on_every_topic_an_agent_speaks_on_harms_nobody(fed, kind):
    topic = {"up": fed.topics.up, "ub": fed.topics.up_chunks, "s": fed.topics.presence, "h": fed.topics.heartbeat}[kind]
    for payload in garbage():
        fed.mallory.raw(payload, topic("mallory"))
        fed.settle()
    assert kind == "s" or fed.coordinator.refused.total > 20
    assert_honest_result(fed)


def test_garbage_on_every_topic_an_agent_listens_to_harms_nobody(fed):
    """Somebody with too many rights, or a broker without rules. Only a protocol number may end an agent."""
    fed.coordinator.config.round.model_copy()
    (job,) = fed.messages(fed.topics.down("a0"), wire.Job)[:1]
    topics = [fed.topics.down("a0"), fed.topics.down_chunks("a0"), fed.topics.announce]
    topics.append(fed.topics.broadcast(job.blobs[0].digest))
    for payload in garbage():
        if b"9999" in payload and b'"bye"' in payload:
            continue
        for topic in topics:
            fed.mallory.raw(payload, topic)
    fed.settle()
    fed.agents["a0"].raise_if_refused()
    assert_honest_result(fed)


def test_names_that_cannot_be_agents_are_not_remembered(fed):
    root = fed.topics.root
    for number in range(20):
        fed.mallory.raw(b"x", f"{root}/a/UPPER{number}/up")
        fed.mallory.raw(b"online x", f"{root}/s/..")
    fed.settle()
    assert fed.coordinator.refused.counts == {"topic: MessageError": 40}
    assert [member.id for member in fed.coordinator.roster.members()] == ["a0", "a1", "mallory"]


def test_what_strangers_can_make_the_coordinator_remember_is_bounded(fed):
    for number in range(1500):
        fed.mallory.raw(b"x", fed.topics.up(f"n{number}"))
    fed.settle()
    assert len(fed.coordinator.refused.counts) <= 1000
    assert fed.coordinator.refused.total == 1500


@pytest.mark.parametrize(
    "version, upgrade",
    [(0, "upgrade the peer"), (99, "upgrade this side"), (10**2500, "upgrade this side")],
    ids=["older", "newer", "absurd"],
)
def test_an_agent_of_another_protocol_is_told_so_and_the_coordinator_says_it_too(fed, version, upgrade, caplog):
    hello = wire.Hello(software="other", tier="train", samples=1)
    raw = {**json.loads(wire.encode(hello)), "v": version}
    raw.pop("crc", None)
    fed.mallory.heard()
    fed.mallory.raw(json.dumps(raw).encode())
    fed.settle()
    (refused,) = fed.mallory.heard(wire.Refused)
    assert refused.error == "ProtocolMismatch"
    for text in (refused.message, caplog.text):
        assert f"speaks protocol {version}"[:50] in text
        assert upgrade in text
    assert fed.coordinator.refused.counts == {"mallory: ProtocolMismatch": 1}
    assert_honest_result(fed)


@pytest.mark.parametrize("version, upgrade", [(0, "upgrade the peer"), (99, "upgrade this side")])
def test_an_agent_that_hears_another_protocol_stops_and_says_which_side_to_upgrade(fed, version, upgrade):
    raw = {**json.loads(wire.encode(wire.Welcome(epoch=1, software="x", lease_s=1))), "v": version}
    raw.pop("crc", None)
    fed.mallory.raw(json.dumps(raw).encode(), fed.topics.down("a0"))
    fed.settle()
    with pytest.raises(ProtocolMismatch, match=rf"speaks protocol 1\.\.1: peer speaks protocol {version}.*{upgrade}"):
        fed.agents["a0"].raise_if_refused()
    fed.agents["a1"].raise_if_refused()


def test_an_agent_that_is_refused_stops_with_the_coordinators_words(fed):
    message = wire.Refused(error="ProtocolMismatch", message="coordinator 9.9 speaks protocol 7..8: upgrade the agent")
    fed.mallory.raw(wire.encode(message), fed.topics.down("a0"))
    fed.settle()
    with pytest.raises(ProtocolMismatch, match="upgrade the agent"):
        fed.agents["a0"].raise_if_refused()


def poison(fed, message, agent="a0"):
    fed.mallory.transport.publish(fed.topics.down(agent), wire.encode(message), retain=True)


def test_a_retained_job_is_not_obeyed(tmp_path):
    with Federation(tmp_path, agents=1, cohort={"min_agents": 1}) as fed:
        fed.mallory = Stranger(fed, "mallory")
        blob = Outgoing.of(b"x" * 100)
        job = wire.Job(
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
        agent.raise_if_refused()
        assert agent.welcomed


@pytest.mark.parametrize("message", ["bye", "update"])
def test_retained_messages_of_agents_are_not_believed_by_a_coordinator(tmp_path, message):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 1}) as fed:
        fed.add("a0", seconds=5)
        fed.request(rounds=1)
        fed.wait(1)
        mallory = Stranger(fed, "mallory")
        ref = Outgoing.of(bytes(400)).ref
        words = {"bye": wire.Bye(), "update": wire.UpdateManifest(run=fed.run, round=1, blob=ref, samples=0)}
        fed.kill_coordinator()
        mallory.transport.publish(fed.topics.up("a0"), wire.encode(words[message]), retain=True)
        fed.start_coordinator()
        fed.finish()
        assert fed.record.status == "finished"
        assert fed.metrics()[0]["refused"] == []


def test_a_lower_epoch_is_not_listened_to(fed):
    agent = fed.agents["a0"]
    epoch = agent.epoch
    assert epoch >= 1
    before = len(fed.messages(fed.topics.up("a0"), wire.Hello))
    fed.clock.now += 1
    fed.mallory.raw(wire.encode(wire.Announce(epoch=0, software="old", boot="old")), fed.topics.announce)
    fed.mallory.raw(wire.encode(wire.Welcome(epoch=0, software="old", lease_s=1, boot="old")), fed.topics.down("a0"))
    fed.settle()
    assert agent.epoch == epoch
    assert len(fed.messages(fed.topics.up("a0"), wire.Hello)) == before
    assert_honest_result(fed)


def test_metrics_that_are_no_numbers_are_refused_and_do_not_hold_the_round(fed):
    blob = Outgoing.of(encode(fed.final))
    manifest = wire.UpdateManifest(run=fed.run, round=1, blob=blob.ref, samples=10)
    raw = {**json.loads(wire.encode(manifest)), "boot": "x", "metrics": {"loss": float("nan")}}
    raw.pop("crc", None)
    fed.mallory.raw(json.dumps(raw).encode())
    fed.settle()
    fed.mallory.send(blob)
    fed.settle()
    assert fed.coordinator.refused.counts == {"mallory: MessageError": 1, "mallory: ChunkError": 1}
    assert_honest_result(fed)


@pytest.mark.parametrize("field", ["rss_mb", "metrics"])
def test_a_report_with_infinity_does_not_fail_the_run(fed, field):
    report = json.loads(wire.encode(wire.Report(run=fed.run, samples=10)))
    report.pop("crc", None)
    report[field] = float("inf") if field == "rss_mb" else {"x": float("inf")}
    fed.mallory.raw(json.dumps(report).encode())
    fed.settle()
    assert_honest_result(fed)
    assert fed.record.status == "finished"


def test_reports_of_strangers_are_not_in_the_summary(fed):
    Stranger(fed, "eve").say(wire.Report(run=fed.run, samples=10**9, acc_personal=1.0))
    fed.settle()
    assert_honest_result(fed)
    assert [agent["id"] for agent in fed.state.run(fed.run).summary()["agents"]] == ["a0", "a1"]


def test_a_fault_of_one_agent_says_nothing_about_another(fed):
    fed.mallory.raw(wire.encode(wire.Fault(error="X", message="a0 is broken", run=fed.run, round=1)))
    fed.settle()
    assert_honest_result(fed)
    assert refusals(fed) == ["X: a0 is broken"]


def test_an_impostor_boot_cannot_take_an_agent_off_the_roster(fed):
    fed.mallory.raw(b"offline wrong-boot", fed.topics.presence("a0"))
    fed.settle()
    assert fed.coordinator.roster.get("a0").is_present
    assert_honest_result(fed)


def test_a_flood_of_manifests_keeps_at_most_one_file_for_each_agent(tmp_path):
    with Federation(tmp_path, agents=(), round=QUORUM, cohort={"min_agents": 1}, task=WIDE_TASK) as fed:
        mallory = Stranger(fed, "mallory")
        mallory.hello()
        fed.request(rounds=1)
        fed.settle()
        base = bytearray(encode(fed.final))
        for number in range(20):
            base[-1] = number
            blob = mallory.offer(bytes(base))
            fed.settle()
            mallory.chunk(blob.frame(0))
            fed.settle()
        parts = list(fed.state.blobs.folder.rglob("*.part"))
        assert len(parts) == 1
        assert parts[0].stat().st_size < len(base) + CHUNK_BYTES


def test_a_job_that_cannot_be_read_is_answered_with_a_fault_so_that_nobody_waits(tmp_path):
    """A newer coordinator may ask for something this agent has no words for; the round need not wait for it."""
    with Federation(tmp_path, agents=1, cohort={"min_agents": 1}, capture=True) as fed:
        fed.settle()
        raw = b'{"v":1,"type":"job","run":"run-0007","round":3,"rounds":9,"purpose":"dance","boot":"c9","seq":5}'
        Stranger(fed, "x").raw(raw, fed.topics.down("a0"))
        fed.settle()
        (fault,) = fed.messages(fed.topics.up("a0"), wire.Fault)
        assert (fault.run, fault.round, fault.error) == ("run-0007", 3, "MessageError")
        assert "purpose" in fault.message
