from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from edge_agent.agent.tasks.task_queue import TaskQueue
from edge_agent.agent.transfers import OFFER_AGAIN_S, Downloads, Outbox, Uploads
from edge_agent.core.children import InlineWorker
from edge_agent.core.config import AgentConfig, DataConfig, PrivacyConfig
from edge_agent.core.errors import ChunkError, UsageError
from edge_agent.core.task import ImageInput, Task
from edge_agent.wire.blobs.chunks import CHUNK_BYTES, BlobCache, decode_frame
from edge_agent.wire.blobs.flow import MEASURED_S
from edge_agent.wire.messages.down import Ack, Grant, Job, Noise, Queued, Receipt, job_key
from edge_agent.wire.messages.fields import JobKey
from edge_agent.wire.messages.up import UpdateManifest
from edge_agent.wire.tensors import decode


def tensors(value=1.0, size=4):
    return {"encoder.weight": np.full(size, value, np.float32)}


def put(outbox, value=1.0, *, number=1, size=4):
    return outbox.put(tensors(value, size), JobKey("run-0001", number), 9, {"loss": 0.5})


@pytest.fixture
def outbox(tmp_path):
    return Outbox(tmp_path / "outbox", PrivacyConfig())


def test_what_is_put_is_there_for_the_next_process(outbox):
    manifest = put(outbox)
    again = Outbox(outbox.folder, PrivacyConfig())
    assert again.get() == manifest
    assert (manifest.run, manifest.round, manifest.samples) == ("run-0001", 1, 9)
    np.testing.assert_array_equal(decode(again.path_of(manifest.blob.digest).read_bytes())["encoder.weight"], 1.0)


def test_an_update_that_was_made_under_another_policy_does_not_leave(outbox, caplog):
    manifest = put(outbox)
    assert Outbox(outbox.folder, PrivacyConfig(metrics=())).get() is None
    assert "[privacy] has changed since the update was made" in caplog.text
    assert not outbox.path_of(manifest.blob.digest).exists()


def test_the_outbox_knows_what_noise_the_job_of_its_update_asked_for(outbox):
    noise = Noise(clip=1.0, clip_statistics=2.0, noise=0.1)
    outbox.put(tensors(), JobKey("run-0001", 1), 9, {}, noise)
    again = Outbox(outbox.folder, PrivacyConfig())
    assert [again.is_as_asked(one) for one in (noise, noise.model_copy(update={"noise": 0.2}), None)] == [1, 0, 0]
    put(outbox, number=2)
    assert [again.is_as_asked(one) for one in (noise, None)] == [0, 1]


def test_an_update_is_on_disk_before_the_note_that_names_it(outbox, monkeypatch):
    """Each file is synced before it takes its place, and that once: flash wears."""
    steps = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda _: steps.append("sync"))
    monkeypatch.setattr(Path, "replace", lambda path, to: steps.append(to.suffix) or replace(path, to))
    put(outbox, size=100_000)
    assert steps == ["sync", ".safetensors", "sync", "sync", ".json", "sync"], "file, its place, the folder; twice"


def test_a_metric_that_is_no_number_is_told_as_unknown(outbox):
    metrics = {"loss": float("nan"), "norm": float("inf"), "acc.personal": 0.5}
    manifest = outbox.put(tensors(), JobKey("run-0001", 1), 9, metrics)
    assert manifest.metrics == {"loss": None, "norm": None, "acc.personal": 0.5}
    assert outbox.get() == manifest


def test_an_empty_outbox_has_nothing(outbox):
    assert outbox.get() is None


def test_a_newer_update_replaces_the_older_one_on_disk_too(outbox):
    put(outbox, 1.0)
    newer = put(outbox, 2.0, number=2)
    assert outbox.get() == newer
    assert len(list(outbox.folder.iterdir())) == 2, "one note, one file"


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": lambda outbox, path: flipped(path),
    "a cut file": lambda outbox, path: path.write_bytes(path.read_bytes()[:-3]),
    "an empty file": lambda outbox, path: path.write_bytes(b""),
    "no file": lambda outbox, path: path.unlink(),
    "a torn note": lambda outbox, path: outbox.note.write_bytes(outbox.note.read_bytes()[:20]),
    "a note that is no object": lambda outbox, path: outbox.note.write_bytes(b"[1]"),
    "a note of another program": lambda outbox, path: outbox.note.write_text(json.dumps({"x": 1})),
    "a note with an impossible digest": lambda outbox, path: outbox.note.write_text(
        outbox.note.read_text().replace(path.stem.removeprefix("update-"), "../../../etc/passwd")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_outbox_is_empty_and_takes_the_next_update(outbox, damage):
    manifest = put(outbox)
    DAMAGES[damage](outbox, outbox.path_of(manifest.blob.digest))
    assert Outbox(outbox.folder, PrivacyConfig()).get() is None
    assert not outbox.note.exists()
    newer = put(outbox, 2.0)
    assert Outbox(outbox.folder, PrivacyConfig()).get() == newer


def test_forgetting_an_old_update_leaves_the_new_one_alone(outbox):
    """The receipt of round 1 arrives while the worker's thread has just written round 2."""
    older = put(outbox, 1.0)
    newer = put(outbox, 2.0, number=2)
    outbox.forget(older.blob.digest)
    assert outbox.get() == newer


class Bench:
    """Uploads with lists in place of a network."""

    def __init__(self, outbox):
        self.now = 0.0
        self.said = []
        self.frames = []
        self.outbox = outbox
        self.partitions = []
        link = SimpleNamespace(send=self._send, send_chunk=self._send_chunk)
        self.uploads = Uploads(outbox, link, lambda: self.now)

    def _send(self, message, partition):
        self.said.append(message)
        self.partitions.append(partition)

    def _send_chunk(self, frame, partition):
        self.frames.append(frame)
        self.partitions.append(partition)

    def sent(self):
        frames = [decode_frame(frame) for frame in self.frames]
        self.frames.clear()
        return [frame.index + i for frame in frames for i in range(-(-len(frame.data) // CHUNK_BYTES))]


@pytest.fixture
def bench(outbox):
    return Bench(outbox)


BIG = 5 * CHUNK_BYTES // 4 + 10
"""Floats that take six chunks."""


def grant(manifest, *ranges, at_most=16):
    return Grant(run=manifest.run, digest=manifest.blob.digest, credits=at_most, missing=ranges)


def ack(manifest, *missing):
    return Ack(run=manifest.run, digest=manifest.blob.digest, missing=missing)


def test_what_lies_in_the_outbox_at_the_start_is_held_and_offered(outbox):
    manifest = put(outbox)
    bench = Bench(outbox)
    assert bench.uploads.holds(JobKey("run-0001", 1))
    assert not bench.uploads.holds(JobKey("run-0001", 2))
    bench.uploads.offer_again()
    assert bench.said == [manifest]


def test_only_what_was_granted_is_sent(bench):
    manifest = put(bench.outbox, size=BIG)
    bench.uploads.offer(manifest)
    assert bench.sent() == []
    bench.uploads.grant(grant(manifest, (1, 2), (5, 6)))
    assert bench.sent() == [1, 5]


def test_credits_bound_what_is_under_way(bench):
    manifest = put(bench.outbox, size=BIG)
    bench.uploads.offer(manifest)
    bench.uploads.grant(grant(manifest, (0, 6), at_most=2))
    assert bench.sent() == [0, 1]
    bench.now += 0.1
    bench.uploads.ack(ack(manifest, (1, 6)))
    assert bench.sent() == [2]
    bench.uploads.ack(ack(manifest, (3, 6)))
    assert bench.sent() == [3, 4]


def test_a_gap_is_sent_again(bench):
    manifest = put(bench.outbox, size=BIG)
    bench.uploads.offer(manifest)
    bench.uploads.grant(grant(manifest, (0, 6)))
    assert bench.sent() == [0, 1]
    bench.now += 0.1
    bench.uploads.ack(ack(manifest, (0, 1), (2, 6)))
    assert bench.sent() == [2, 3]
    bench.uploads.ack(ack(manifest, (0, 1), (3, 6)))
    assert bench.sent()[0] == 0


def test_a_second_grant_sends_nothing_again_that_is_under_way(bench):
    """Below 60 kB/s each announcement that was repeated had the whole window sent again."""
    manifest = put(bench.outbox, size=BIG)
    bench.uploads.offer(manifest)
    bench.uploads.grant(grant(manifest, (0, 6)))
    assert bench.sent() == [0, 1]
    bench.now += 1.0
    bench.uploads.grant(grant(manifest, (0, 6)))
    assert bench.sent() == []
    bench.uploads.cut()
    bench.uploads.grant(grant(manifest, (0, 6)))
    assert bench.sent() == [0, 1], "a new connection: what was under way is lost"


def test_an_update_that_has_to_wait_for_its_turn_is_not_announced_meanwhile(bench):
    manifest = put(bench.outbox)
    bench.uploads.offer(manifest)
    bench.said.clear()
    bench.uploads.queued(Queued(run=manifest.run, digest=manifest.blob.digest, before=17, again_s=30))
    assert "17 others first" in bench.uploads.waits_for
    bench.now += 29.9
    bench.uploads.tick()
    assert bench.said == []
    bench.now += 0.2
    bench.uploads.tick()
    assert bench.said == [manifest]
    bench.uploads.grant(grant(manifest, (0, 1)))
    assert bench.sent() == [0]
    assert bench.uploads.waits_for == ""


def test_an_update_that_cannot_arrive_in_time_says_so_with_the_figures(bench):
    """100 chunks of 5116 bytes; one each second is 5.1 kB/s."""
    manifest = put(bench.outbox, size=100 * CHUNK_BYTES // 4 - 100)
    bench.uploads.offer(manifest)
    bench.uploads.grant(grant(manifest, (0, 100)))
    for number in range(1, 5):
        assert bench.uploads.objection(20) == "" or number > MEASURED_S
        bench.now += 1.0
        bench.uploads.ack(ack(manifest, (number, 100)))
    assert bench.uploads.objection(100) == ""
    assert "0.491 MB are still to come, which take 96 s at the measured 5.12 kB/s" in bench.uploads.objection(50)
    assert "the round closes in 50 s" in bench.uploads.objection(50)
    bench.uploads.drop_all()
    assert bench.uploads.objection(1) == ""
    bench.uploads.offer(put(bench.outbox, 2.0, size=100 * CHUNK_BYTES // 4 - 100))
    assert "which take 100 s" in bench.uploads.objection(50), (
        "the rate is that of the link, also before the first chunk"
    )
    bench.uploads.cut()
    assert bench.uploads.objection(50) == "", "the link is a new one"


def test_the_rate_of_the_link_before_is_not_that_of_an_update_under_way(bench):
    """1000 chunks, of which five took a second each; the new link takes 50 a second."""
    manifest = put(bench.outbox, size=1000 * CHUNK_BYTES // 4 - 100)
    bench.uploads.offer(manifest)
    bench.uploads.grant(grant(manifest, (0, 1000)))
    for number in range(1, 6):
        bench.now += 1.0
        bench.uploads.ack(ack(manifest, (number, 1000)))
    assert "at the measured 5.12 kB/s" in bench.uploads.objection(100)
    bench.uploads.cut()
    assert bench.uploads.objection(100) == "", "nothing is known of the new link"
    bench.uploads.grant(grant(manifest, (5, 1000), at_most=4))  # frames of one chunk
    for number in range(6, 206):
        bench.now += 0.02
        bench.uploads.ack(ack(manifest, (number, 1000)))
        assert bench.uploads.objection(100) == ""
    assert "256 kB/s" in bench.uploads.objection(1)


def test_a_link_that_became_fast_is_not_judged_by_the_time_before(bench):
    """A chunk a second for 100 s, then 100 a second: 800 chunks are still to come, and the round closes in 30 s."""
    manifest = put(bench.outbox, size=1000 * CHUNK_BYTES // 4 - 100)
    bench.uploads.offer(manifest)
    bench.uploads.grant(grant(manifest, (0, 1000), at_most=4))  # frames of one chunk
    for number in range(1, 101):
        bench.now += 1.0
        bench.uploads.ack(ack(manifest, (number, 1000)))
    assert "at the measured 5.12 kB/s" in bench.uploads.objection(30)
    for number in range(101, 501):
        bench.now += 0.01
        bench.uploads.ack(ack(manifest, (number, 1000)))
    assert bench.uploads.objection(30) == ""


def test_words_about_another_blob_change_nothing(bench):
    manifest = put(bench.outbox)
    noted = []
    bench.uploads.offer(manifest)
    other = "0" * 64
    bench.uploads.grant(Grant(run="run-0001", digest=other, credits=4, missing=((0, 1),)))
    bench.uploads.ack(Ack(run="run-0001", digest=other, missing=((0, 1),)))
    assert bench.uploads.receipt(Receipt(run="run-0001", digest=other, accepted=True), noted.append) is None
    assert bench.sent() == noted == []
    assert bench.uploads.holds(JobKey("run-0001", 1))


@pytest.mark.parametrize("ranges", [((0, 7),), ((6, 7),), ((-1, 2),), ((3, 3),), ((4, 2),)])
def test_ranges_outside_the_blob_are_refused(bench, ranges):
    manifest = put(bench.outbox, size=BIG)
    bench.uploads.offer(manifest)
    with pytest.raises(ChunkError):
        bench.uploads.grant(grant(manifest, *ranges))
    bench.uploads.grant(grant(manifest, (0, 1)))
    assert bench.sent() == [0]


@pytest.mark.parametrize("accepted", [True, False])
def test_a_receipt_of_either_kind_ends_it(bench, accepted):
    manifest = put(bench.outbox)
    bench.uploads.offer(manifest)
    receipt = Receipt(run=manifest.run, digest=manifest.blob.digest, accepted=accepted)
    kept = []
    assert bench.uploads.receipt(receipt, lambda _: kept.append(bench.outbox.get())) == manifest
    assert kept == [manifest], "noted before it goes"
    assert not bench.uploads.holds(JobKey("run-0001", 1))
    assert bench.outbox.get() is None


def test_a_late_receipt_does_not_touch_what_was_written_since(bench):
    """As above, through the uploads: round 2 is on disk and not yet offered when the receipt of round 1 comes."""
    older = put(bench.outbox, 1.0)
    bench.uploads.offer(older)
    newer = put(bench.outbox, 2.0, number=2)
    bench.uploads.receipt(
        Receipt(run=older.run, digest=older.blob.digest, accepted=False, reason="late"), lambda _: None
    )
    bench.uploads.offer(newer)
    bench.uploads.grant(grant(newer, (0, 1)))
    assert bench.sent() == [0]


def test_silence_makes_it_say_again(bench):
    manifest = put(bench.outbox)
    bench.uploads.offer(manifest)
    for _ in range(3):
        bench.now += OFFER_AGAIN_S - 0.1
        bench.uploads.tick()
        assert bench.said.pop() == manifest
        assert bench.said == []
        bench.now += 0.1
        bench.uploads.tick()
    assert all(isinstance(message, UpdateManifest) for message in bench.said)


def test_a_file_that_is_gone_is_dropped_so_that_it_can_be_computed_again(bench):
    manifest = put(bench.outbox)
    bench.uploads.offer(manifest)
    bench.outbox.path_of(manifest.blob.digest).unlink()
    bench.uploads.grant(grant(manifest, (0, 1)))
    assert not bench.uploads.holds(JobKey("run-0001", 1))
    assert bench.sent() == []


def test_a_round_that_is_over_drops_its_update_and_no_other(bench):
    bench.uploads.offer(put(bench.outbox))
    bench.uploads.drop(JobKey("run-0001", 2))
    bench.uploads.drop(JobKey("run-0002", 1))
    assert bench.uploads.holds(JobKey("run-0001", 1))
    bench.uploads.drop(JobKey("run-0001", 1))
    assert not bench.uploads.holds(JobKey("run-0001", 1))


@pytest.mark.parametrize("name", ["", "loss/total", "a b", "a\nb", "x" * 65])
def test_a_metric_that_no_coordinator_would_take_is_named_where_it_is_made(tmp_path, name):
    with pytest.raises(UsageError, match="rename it in the method's client"):
        Outbox(tmp_path, PrivacyConfig()).put(tensors(), JobKey("run-0001", 1), 9, {"loss": 0.5, name: 1.0})
    assert Outbox(tmp_path, PrivacyConfig()).get() is None


def test_a_job_that_asks_for_another_noise_now_is_done_again(tmp_path):
    noise = Noise(clip=1.0, clip_statistics=1.0, noise=2.0)
    config = AgentConfig(state=tmp_path, data=DataConfig(source="none:"))
    task = Task(input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b"), encoder="linear")
    job = Job(run="run-0001", round=1, rounds=1, seed=0, method="fedavg", task=task, blobs=(), deadline_s=60)
    outbox = Outbox(tmp_path, config.privacy)
    link = Mock()
    done = []
    waiting = put(outbox)
    tasks = SimpleNamespace(config=config, outbox=outbox, cancel=lambda _: None, release_memory=lambda: None)
    tasks.do = lambda job, *_: done.append(job.privacy) or outbox.put(tensors(2.0), job_key(job), 1, {}, job.privacy)
    downloads = Downloads(BlobCache(tmp_path / "cache", 10**6), link, lambda: 0.0)
    queue = TaskQueue(tasks, downloads, Uploads(outbox, link, lambda: 0.0), InlineWorker(), link)
    queue.on_job(job)
    link.send.assert_called_once_with(waiting, "")
    queue.on_job(job.model_copy(update={"privacy": noise}))
    assert done == [noise]
    assert link.send.call_args.args == (outbox.get(), "")
    assert outbox.get().samples == 1
