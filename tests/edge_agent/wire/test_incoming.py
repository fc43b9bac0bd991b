"""Putting a blob together from its chunks: any order, crashes, hostile notes and a full disk."""

from __future__ import annotations

import errno
import json
import os

import pytest
from chunked_blobs import CHUNK, blob, frames_of
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.core.errors import ChunkError
from edge_agent.wire.blobs import chunks as chunks_module
from edge_agent.wire.blobs.chunks import Frame, Incoming, decode_frame, flags_of
from edge_agent.wire.messages.fields import BlobRef


@given(st.integers(1, 700), st.randoms(use_true_random=False), st.integers(0, 3))
@settings(max_examples=40)
def test_any_order_with_duplicates_gives_the_blob(tmp_path_factory, size, dice, extra):
    folder = tmp_path_factory.mktemp("in")
    data, outgoing = blob(size)
    frames = frames_of(outgoing)
    frames += dice.choices(frames, k=extra)
    dice.shuffle(frames)
    incoming = Incoming(outgoing.ref, folder)
    seen = set[int]()
    for frame in frames:
        assert incoming.add(frame) == 1
        seen.add(frame.index)
        assert incoming.chunks.present == len(seen)
    incoming.finish(folder / "whole", durable=False)
    assert (folder / "whole").read_bytes() == data
    assert [path.name for path in folder.iterdir()] == ["whole"]


@given(st.integers(1, 700), st.lists(st.tuples(st.integers(0, 10), st.integers(1, 5)), max_size=12), st.randoms())
@settings(max_examples=40)
def test_frames_of_several_chunks_that_overlap_give_the_blob(tmp_path_factory, size, cuts, dice):
    folder = tmp_path_factory.mktemp("in")
    data, outgoing = blob(size)
    spans = [(start, min(start + count, outgoing.count)) for start, count in cuts if start < outgoing.count]
    spans += [(index, index + 1) for index in range(outgoing.count)]
    dice.shuffle(spans)
    incoming = Incoming(outgoing.ref, folder)
    seen = set[int]()
    for start, stop in spans:
        assert incoming.add(decode_frame(outgoing.frame(start, stop))) == stop - start
        seen.update(range(start, stop))
        assert incoming.chunks.present == len(seen)
    incoming.finish(folder / "whole", durable=False)
    assert (folder / "whole").read_bytes() == data


def test_a_frame_with_other_bytes_cannot_change_chunks_that_have_been_hashed(tmp_path):
    """Else a file could pass the check of its hash, and hold other bytes."""
    data, outgoing = blob(3 * CHUNK)
    incoming = Incoming(outgoing.ref, tmp_path)
    incoming.add(decode_frame(outgoing.frame(0, 2)))
    other = Frame(frames_of(outgoing)[0].transfer, 0, 3, 0, bytes(2 * CHUNK) + data[2 * CHUNK :])
    incoming.add(other)
    incoming.finish(tmp_path / "whole", durable=False)
    assert (tmp_path / "whole").read_bytes() == data


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("crash_after", range(10))
def test_a_crash_after_any_chunk_costs_at_most_what_was_not_noted(tmp_path, monkeypatch, crash_after, durable):
    monkeypatch.setattr(chunks_module, "_SAVE_BYTES", 4 * CHUNK)
    data, outgoing = blob(9 * CHUNK)
    frames = frames_of(outgoing)
    order = [4, 0, 8, 1, 7, 2, 3, 6, 5]
    killed = Incoming(outgoing.ref, tmp_path)
    for index in order[:crash_after]:
        killed.add(frames[index])
    os.close(killed._file)  # as the system does for a process that is killed

    resumed = Incoming(outgoing.ref, tmp_path)
    noted = crash_after // 4 * 4
    assert {i for i in range(9) if i in resumed.chunks} == set(order[:noted])
    for index, is_missing in enumerate(flags_of(resumed.chunks.missing(), 9)):
        if is_missing:
            resumed.add(frames[index])
    resumed.finish(tmp_path / "whole", durable=durable)
    assert (tmp_path / "whole").read_bytes() == data


def test_a_polite_stop_loses_nothing(tmp_path):
    data, outgoing = blob(5 * CHUNK)
    frames = frames_of(outgoing)
    first = Incoming(outgoing.ref, tmp_path)
    for index in (0, 3):
        first.add(frames[index])
    assert first.is_open
    first.close()
    assert not first.is_open
    second = Incoming(outgoing.ref, tmp_path)
    assert second.chunks.missing() == ((1, 3), (4, 5))
    for index in (4, 2, 1):
        second.add(frames[index])
    second.finish(tmp_path / "whole", durable=False)
    assert (tmp_path / "whole").read_bytes() == data


def test_closing_twice_does_not_close_a_file_of_somebody_else(tmp_path):
    _, outgoing = blob(CHUNK)
    incoming = Incoming(outgoing.ref, tmp_path)
    incoming.close()
    with (tmp_path / "other").open("wb") as other:  # gets the number that has just become free
        incoming.close()
        incoming.discard()
        other.write(b"x")
        other.flush()
    assert (tmp_path / "other").read_bytes() == b"x"


def test_a_wrong_hash_is_refused_and_everything_forgotten(tmp_path):
    _, outgoing = blob(3 * CHUNK)
    lie = BlobRef(digest=outgoing.ref.digest[:16] + "0" * 48, size_bytes=3 * CHUNK, chunk_bytes=CHUNK)
    incoming = Incoming(lie, tmp_path)
    for frame in frames_of(outgoing):
        incoming.add(frame)
    with pytest.raises(ChunkError, match="SHA-256"):
        incoming.finish(tmp_path / "whole", durable=True)
    assert list(tmp_path.iterdir()) == []
    fresh = Incoming(lie, tmp_path)
    assert fresh.chunks.present == 0
    fresh.discard()


@pytest.mark.parametrize(
    "change",
    [
        {"transfer": 1},
        {"count": 4},
        {"offset": 65},
        {"offset": 2**63},
        {"index": 2},
        {"index": 2, "offset": 128, "data": b"x" * 123},
        {"data": b"x" * 63},
        {"data": b"x" * 65},
        {"data": b""},
    ],
    ids=str,
)
def test_a_frame_that_does_not_fit_is_refused_and_changes_nothing(tmp_path, change):
    _, outgoing = blob(3 * CHUNK - 5)
    good = frames_of(outgoing)[1]
    incoming = Incoming(outgoing.ref, tmp_path)
    before = incoming.path.read_bytes()
    with pytest.raises(ChunkError):
        incoming.add(Frame(**{**vars(good), **change}))
    assert incoming.chunks.present == 0
    assert incoming.path.read_bytes() == before == bytes(3 * CHUNK - 5)
    incoming.discard()


def part_and_notes(folder, outgoing):
    incoming = Incoming(outgoing.ref, folder)
    for frame in frames_of(outgoing)[:3]:
        incoming.add(frame)
    incoming.close()
    return folder / f"{outgoing.ref.digest}.part", folder / f"{outgoing.ref.digest}.chunks"


def assert_becomes(data, incoming, outgoing, path):
    """With all chunks it is the blob that was sent."""
    for frame in frames_of(outgoing):
        incoming.add(frame)
    incoming.finish(path, durable=False)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "notes",
    [
        b"",
        b"not JSON",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"chunk_bytes":64}',
        b'{"chunk_bytes":64,"missing":5}',
        b'{"chunk_bytes":64,"missing":{"ab":1}}',
        b'{"chunk_bytes":64,"missing":[[0]]}',
        b'{"chunk_bytes":64,"missing":[["a","b"]]}',
        b'{"chunk_bytes":64,"missing":[[0.0,1.0]]}',
        b'{"chunk_bytes":64,"missing":[[0,99]]}',
        b'{"chunk_bytes":64,"missing":[[-5,1]]}',
        b'{"chunk_bytes":64,"missing":[[0,1e999]]}',
        b'{"chunk_bytes":64,"missing":[[null,null]]}',
        b'{"chunk_bytes":65,"missing":[]}',
        b'{"chunk_bytes":"64","missing":[]}',
    ],
)
def test_hostile_notes_mean_starting_afresh(tmp_path, notes):
    data, outgoing = blob(5 * CHUNK)
    _, file = part_and_notes(tmp_path, outgoing)
    file.write_bytes(notes)
    incoming = Incoming(outgoing.ref, tmp_path)
    assert incoming.chunks.present == 0
    assert_becomes(data, incoming, outgoing, tmp_path / "whole")


def test_notes_that_lie_about_what_is_there_are_found_out_by_the_hash(tmp_path):
    _, outgoing = blob(5 * CHUNK)
    _, file = part_and_notes(tmp_path, outgoing)
    file.write_text(json.dumps({"chunk_bytes": CHUNK, "missing": []}))
    incoming = Incoming(outgoing.ref, tmp_path)
    assert incoming.chunks.complete
    with pytest.raises(ChunkError, match="SHA-256"):
        incoming.finish(tmp_path / "whole", durable=False)
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("size", [0, 1, 5 * CHUNK - 1, 5 * CHUNK + 1])
def test_a_part_file_of_another_length_means_starting_afresh(tmp_path, size):
    data, outgoing = blob(5 * CHUNK)
    part, _ = part_and_notes(tmp_path, outgoing)
    os.truncate(part, size)
    incoming = Incoming(outgoing.ref, tmp_path)
    assert incoming.chunks.present == 0
    assert_becomes(data, incoming, outgoing, tmp_path / "whole")


def test_notes_without_their_part_are_not_believed_later(tmp_path):
    """A crash just before the notes are removed must not make the next download of the same blob begin with holes."""
    _, outgoing = blob(5 * CHUNK)
    part, notes = part_and_notes(tmp_path, outgoing)
    part.unlink()
    os.close(Incoming(outgoing.ref, tmp_path)._file)  # begins, and is killed before it has noted anything
    assert not notes.exists()
    again = Incoming(outgoing.ref, tmp_path)
    assert again.chunks.present == 0
    again.discard()


def test_a_flipped_bit_on_the_disk_is_found_out_by_the_hash(tmp_path):
    _, outgoing = blob(5 * CHUNK)
    part, _ = part_and_notes(tmp_path, outgoing)
    damaged = bytearray(part.read_bytes())
    damaged[70] ^= 1
    part.write_bytes(damaged)
    incoming = Incoming(outgoing.ref, tmp_path)
    for frame in frames_of(outgoing)[3:]:
        incoming.add(frame)
    with pytest.raises(ChunkError):
        incoming.finish(tmp_path / "whole", durable=False)


@pytest.mark.parametrize("failure", ["nothing written", "half written"])
def test_a_chunk_for_which_the_disk_has_no_room_can_be_sent_again(tmp_path, monkeypatch, failure):
    data, outgoing = blob(2 * CHUNK)
    frames = frames_of(outgoing)
    incoming = Incoming(outgoing.ref, tmp_path)
    real = os.pwrite

    def full(file, content, offset):
        if failure == "half written":
            return real(file, bytes(content)[:10], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    incoming.add(frames[0])
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ChunkError, match="cannot be stored"):
        incoming.add(frames[1])
    assert incoming.chunks.missing() == ((1, 2),)
    monkeypatch.setattr(os, "pwrite", real)
    assert incoming.add(frames[1])
    incoming.finish(tmp_path / "whole", durable=False)
    assert (tmp_path / "whole").read_bytes() == data


def test_notes_for_which_the_disk_has_no_room_do_not_stop_a_download(tmp_path, monkeypatch):
    data, outgoing = blob(3 * CHUNK)
    incoming = Incoming(outgoing.ref, tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(chunks_module, "_SAVE_BYTES", CHUNK)
    monkeypatch.setattr(chunks_module, "write_atomic", full)
    assert_becomes(data, incoming, outgoing, tmp_path / "whole")


def test_a_part_file_takes_no_more_than_its_blob_and_is_private(tmp_path):
    _, outgoing = blob(5 * CHUNK)
    incoming = Incoming(outgoing.ref, tmp_path)
    assert incoming.path.stat().st_size == 5 * CHUNK
    assert incoming.path.stat().st_mode & 0o077 == 0
    incoming.discard()
    assert list(tmp_path.iterdir()) == []
