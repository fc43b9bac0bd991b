"""Whatever a peer sends as an update costs that peer its update, never the process, the round, or the honest ones."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from federation_disturbances import QUORUM, Stranger, assert_honest_result, besieged, refusals
from federation_duties import WIDE_TASK
from federation_harness import Federation

from edge_agent.wire.blobs.chunks import CHUNK_BYTES, HEADER_BYTES, Outgoing, decode_frame
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.tensors import encode


@pytest.fixture
def fed(tmp_path):
    with besieged(tmp_path) as federation:
        yield federation


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
    assert fed.coordinator.collector.rejected.counts == {f"mallory: {noted}": 1}
    assert_honest_result(fed)


def test_a_refused_update_leaves_nothing_on_disk(fed):
    fed.mallory.deliver({name: np.full_like(array, np.nan) for name, array in fed.final.items()})
    blobs = fed.state.blobs.folder
    assert {path.name for path in blobs.rglob("*") if path.is_file()} == {fed.record.checkpoint}


def test_after_a_refusal_another_try_in_the_same_round_is_refused_too(fed):
    fed.mallory.deliver({name: np.full_like(array, np.nan) for name, array in fed.final.items()})
    receipt = fed.mallory.deliver(fed.final)
    assert not receipt.accepted
    assert receipt.reason.startswith("already rejected in round 1")
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
    blob = fields.BlobRef(digest="ab" * 32, size_bytes=64 << 20, chunk_bytes=64)
    fed.mallory.say(up.UpdateManifest(run=fed.run_id, round=1, blob=blob, samples=1))
    fed.settle()
    (receipt,) = fed.mallory.heard(down.Receipt)
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
    assert fed.mallory.heard(down.Grant)
    fed.mallory.chunk(spoil(blob.frame(0)))
    fed.settle()
    assert fed.coordinator.rejected.total == 1
    assert not fed.mallory.heard(down.Receipt)
    fed.mallory.chunk(blob.frame(0))
    fed.settle()
    assert fed.mallory.heard(down.Receipt)[0].accepted


def test_a_whole_blob_with_another_hash_is_asked_for_again(fed):
    """Chunks with right checksums whose sum is not what was announced: lies about the digest gain nothing."""
    good = Outgoing.of(encode(fed.final))
    lie = Outgoing.of(bytes(len(encode(fed.final))))
    manifest = up.UpdateManifest(run=fed.run_id, round=1, blob=good.ref, samples=10)
    fed.mallory.say(manifest)
    fed.settle()
    fed.mallory.heard()
    lying = replace(decode_frame(lie.frame(0)), transfer=decode_frame(good.frame(0)).transfer)
    fed.mallory.chunk(lying.encode())
    fed.settle()
    (grant,) = fed.mallory.heard(down.Grant, down.Receipt)
    assert grant.missing == ((0, 1),)
    fed.mallory.chunk(good.frame(0))
    fed.settle()
    assert fed.mallory.heard(down.Receipt)[0].accepted


def test_a_chunk_without_a_grant_is_refused_and_counted(fed):
    fed.mallory.send(Outgoing.of(encode(fed.final)))
    fed.settle()
    assert fed.coordinator.rejected.counts == {"mallory: ChunkError": 1}
    assert_honest_result(fed)


def test_a_chunk_for_the_upload_of_somebody_else_changes_nothing(tmp_path):
    """Uploads are told apart by topic: frames of a0's blob on mallory's topic do not reach a0's file."""
    with Federation(tmp_path, agents=(), round=QUORUM, cohort={"min_agents": 2}) as fed:
        victim = Stranger(fed, "victim")
        mallory = Stranger(fed, "mallory")
        victim.hello()
        mallory.hello()
        fed.request(rounds=1)
        fed.settle()
        blob = victim.offer(fed.final)
        fed.settle()
        mallory.chunk(blob.frame(0))
        fed.settle()
        assert fed.coordinator.rejected.counts == {"mallory: ChunkError": 1}
        assert not victim.heard(down.Receipt)


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
    assert fed.coordinator.collector.rejected.counts == {f"eve: {receipt.reason}": 1}
    assert_honest_result(fed)


def test_an_agent_that_never_said_hello_is_refused_too(fed):
    receipt = Stranger(fed, "eve").deliver(fed.final)
    assert not receipt.accepted
    assert_honest_result(fed)


def test_metrics_that_are_no_numbers_are_refused_and_do_not_hold_the_round(fed):
    blob = Outgoing.of(encode(fed.final))
    manifest = up.UpdateManifest(run=fed.run_id, round=1, blob=blob.ref, samples=10)
    raw = {**json.loads(codec.encode(manifest)), "boot": "x", "metrics": {"loss": float("nan")}}
    raw.pop("crc", None)
    fed.mallory.raw(json.dumps(raw).encode())
    fed.settle()
    fed.mallory.send(blob)
    fed.settle()
    assert fed.coordinator.rejected.counts == {"mallory: MessageError": 1, "mallory: ChunkError": 1}
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
