from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.errors import ChunkError, StateError
from edge_agent.wire import chunks as chunks_module
from edge_agent.wire.chunks import (
    CHUNK_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    Chunks,
    Frame,
    Incoming,
    Outgoing,
    chunk_count,
    decode_frame,
    expand,
    transfer_id,
)
from edge_agent.wire.messages import BlobRef

SMALL = 64
"""The smallest chunk that a `BlobRef` allows, so that short blobs have many."""


def blob(size: int, seed: int = 0, chunk_bytes: int = SMALL) -> tuple[bytes, Outgoing]:
    data = np.random.default_rng(seed).bytes(size)
    return data, Outgoing.of(data, chunk_bytes)


def frames_of(outgoing: Outgoing) -> list[Frame]:
    return [decode_frame(outgoing.frame(index)) for index in range(outgoing.count)]


# --- the frame -------------------------------------------------------------------------------------------------------

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@given(u64, st.tuples(u32, u32).map(sorted).filter(lambda pair: pair[0] < pair[1]), u64, st.binary(max_size=200))
def test_a_frame_makes_the_round_trip(transfer, place, offset, data):
    index, count = place
    payload = Frame(transfer, index, count, offset, data).encode()
    assert decode_frame(payload) == Frame(transfer, index, count, offset, data)
    assert len(payload) == 40 + len(data)


def test_the_frame_is_the_one_of_the_protocol_page():
    """Magic, version, flags, id u64, index u32, count u32, offset u64, length u32, reserved, crc32; little-endian."""
    place = bytes.fromhex("080706050403020102000000050000008000000000000000")
    fields = b"HW" + b"\x01\x00" + place + b"\x03\x00\x00\x00" + bytes(4)
    expected = fields + zlib.crc32(fields + b"abc").to_bytes(4, "little") + b"abc"
    assert Frame(0x0102030405060708, 2, 5, 128, b"abc").encode() == expected


def test_a_full_frame_is_below_the_lowest_limit_of_the_cloud_services():
    _, outgoing = blob(CHUNK_BYTES + 1, chunk_bytes=CHUNK_BYTES)
    assert (len(outgoing.frame(0)), len(outgoing.frame(1))) == (FRAME_BYTES, HEADER_BYTES + 1)
    assert FRAME_BYTES == 60 * 1024 < 64_000


def test_every_flipped_bit_of_a_frame_is_refused():
    payload = Frame(7, 1, 3, 64, b"some bytes of a model").encode()
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChunkError):
            decode_frame(bytes(damaged))


@settings(max_examples=300)
@given(st.data())
def test_any_burst_of_damage_up_to_32_bits_in_a_full_chunk_is_refused(data):
    payload = bytearray(Frame(7, 1, 3, 64, bytes(range(256)) * 8).encode())
    begin = data.draw(st.integers(0, len(payload) - 4))
    mask = data.draw(st.binary(min_size=4, max_size=4).filter(any))
    payload[begin : begin + 4] = bytes(a ^ b for a, b in zip(payload[begin : begin + 4], mask, strict=True))
    with pytest.raises(ChunkError):
        decode_frame(bytes(payload))


@given(st.binary(max_size=100), st.sampled_from([b"", b"HW\x01\x00"]))
def test_arbitrary_bytes_are_no_frame(payload, start):
    with pytest.raises(ChunkError):
        decode_frame(start + payload)


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3])
def test_a_frame_cut_short_is_refused(cut):
    with pytest.raises(ChunkError):
        decode_frame(Frame(7, 1, 3, 64, b"12345").encode()[:cut])


def test_a_frame_that_goes_on_is_refused():
    with pytest.raises(ChunkError, match="promises 5 bytes and holds 6"):
        decode_frame(Frame(7, 1, 3, 64, b"12345").encode() + b"6")


@pytest.mark.parametrize("index, count", [(3, 3), (4, 3), (0, 0)])
def test_a_chunk_number_beyond_the_last_is_refused(index, count):
    with pytest.raises(ChunkError):
        decode_frame(Frame(7, index, count, 0, b"x").encode())


def test_another_version_is_refused_by_name():
    payload = bytearray(Frame(7, 0, 1, 0, b"x").encode())
    payload[2] = 9
    with pytest.raises(ChunkError, match="version 9, expected b'HW' version 1"):
        decode_frame(bytes(payload))


# --- which chunks are there ------------------------------------------------------------------------------------------


def ranges_of(numbers: set[int]) -> list[tuple[int, int]]:
    """Half-open ranges of a set, found number by number."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


@given(st.integers(1, 40), st.lists(st.integers(0, 39)), st.integers(0, 40), st.integers(1, 6))
def test_chunks_behave_like_a_set(count, adds, below, limit):
    chunks, twin = Chunks(count), set[int]()
    for index in (index for index in adds if index < count):
        assert chunks.add(index) is (index not in twin)
        twin.add(index)
    lacking = set(range(count)) - twin
    below = min(below, count)
    assert {index for index in range(count) if index in chunks} == twin
    assert (chunks.present, chunks.complete) == (len(twin), not lacking)
    assert list(chunks.missing(limit=count)) == ranges_of(lacking)
    assert list(chunks.missing(below=below, limit=limit)) == ranges_of({i for i in lacking if i < below})[:limit]
    assert chunks.prefix() == min(lacking, default=count)
    assert chunks.highest() == max(twin, default=-1) + 1
    assert set(expand(chunks.missing(limit=count), count)) == lacking


@pytest.mark.parametrize("bad", [(-1, 2), (2, 2), (3, 2), (0, 6), (5, 6), (0, 2**62)])
def test_ranges_outside_the_blob_are_refused(bad):
    with pytest.raises(ChunkError):
        list(expand([(0, 1), bad], 5))


@pytest.mark.parametrize("size, count", [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_the_last_chunk_holds_what_is_left(size, count):
    data, outgoing = blob(size)
    frames = frames_of(outgoing)
    assert (outgoing.count, chunk_count(outgoing.ref)) == (count, count)
    assert b"".join(bytes(frame.data) for frame in frames) == data
    assert [frame.offset for frame in frames] == [64 * index for index in range(count)]


def test_a_blob_is_named_by_its_content_and_its_chunks_by_its_name():
    data, outgoing = blob(100)
    assert outgoing.ref.digest == hashlib.sha256(data).hexdigest()
    assert transfer_id(outgoing.ref.digest) == int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def test_a_file_is_sent_without_being_read_into_memory(tmp_path):
    data, outgoing = blob(1000)
    (tmp_path / "blob").write_bytes(data)
    mapped = Outgoing.open(tmp_path / "blob", outgoing.ref.digest, SMALL)
    assert mapped.ref == outgoing.ref
    assert [mapped.frame(index) for index in range(mapped.count)] == [outgoing.frame(i) for i in range(outgoing.count)]


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_that_is_not_there_or_empty_is_told(tmp_path, content):
    if content is not None:
        (tmp_path / "blob").write_bytes(content)
    with pytest.raises(StateError, match="blob cannot be opened"):
        Outgoing.open(tmp_path / "blob", "a" * 64)


# --- putting a blob together -----------------------------------------------------------------------------------------


@given(st.integers(1, 700), st.randoms(use_true_random=False), st.integers(0, 3))
@settings(max_examples=40)
def test_any_order_with_duplicates_gives_the_blob(tmp_path_factory, size, dice, extra):
    folder = tmp_path_factory.mktemp("in")
    data, outgoing = blob(size)
    frames = frames_of(outgoing)
    frames += dice.choices(frames, k=extra)
    dice.shuffle(frames)
    incoming, seen = Incoming(outgoing.ref, folder), set[int]()
    for frame in frames:
        assert incoming.add(frame) is (frame.index not in seen)
        seen.add(frame.index)
    assert incoming.received_bytes == size
    incoming.finish(folder / "whole", durable=False)
    assert (folder / "whole").read_bytes() == data
    assert [path.name for path in folder.iterdir()] == ["whole"]


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("crash_after", range(10))
def test_a_crash_after_any_chunk_costs_at_most_what_was_not_noted(tmp_path, monkeypatch, crash_after, durable):
    monkeypatch.setattr(chunks_module, "_SAVE_EVERY", 4)
    data, outgoing = blob(9 * SMALL)
    frames = frames_of(outgoing)
    order = [4, 0, 8, 1, 7, 2, 3, 6, 5]
    killed = Incoming(outgoing.ref, tmp_path)
    for index in order[:crash_after]:
        killed.add(frames[index])
    os.close(killed._file)  # as the system does for a process that is killed

    resumed = Incoming(outgoing.ref, tmp_path)
    noted = crash_after // 4 * 4
    assert {i for i in range(9) if i in resumed.chunks} == set(order[:noted])
    for index in expand(resumed.chunks.missing(), 9):
        resumed.add(frames[index])
    assert resumed.received_bytes == (9 - noted) * SMALL
    resumed.finish(tmp_path / "whole", durable=durable)
    assert (tmp_path / "whole").read_bytes() == data


def test_a_polite_stop_loses_nothing(tmp_path):
    data, outgoing = blob(5 * SMALL)
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
    _, outgoing = blob(SMALL)
    incoming = Incoming(outgoing.ref, tmp_path)
    incoming.close()
    with (tmp_path / "other").open("wb") as other:  # gets the number that has just become free
        incoming.close()
        incoming.discard()
        other.write(b"x")
        other.flush()
    assert (tmp_path / "other").read_bytes() == b"x"


def test_a_wrong_hash_is_refused_and_everything_forgotten(tmp_path):
    _, outgoing = blob(3 * SMALL)
    lie = BlobRef(digest=outgoing.ref.digest[:16] + "0" * 48, size_bytes=3 * SMALL, chunk_bytes=SMALL)
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
        {"data": b"x" * 63},
        {"data": b"x" * 65},
        {"data": b""},
    ],
    ids=str,
)
def test_a_frame_that_does_not_fit_is_refused_and_changes_nothing(tmp_path, change):
    _, outgoing = blob(3 * SMALL - 5)
    good = frames_of(outgoing)[1]
    incoming = Incoming(outgoing.ref, tmp_path)
    before = incoming.path.read_bytes()
    with pytest.raises(ChunkError):
        incoming.add(Frame(**{**vars(good), **change}))
    assert incoming.chunks.present == 0
    assert incoming.path.read_bytes() == before == bytes(3 * SMALL - 5)
    incoming.discard()


def part_and_notes(folder, outgoing):
    incoming = Incoming(outgoing.ref, folder)
    for frame in frames_of(outgoing)[:3]:
        incoming.add(frame)
    incoming.close()
    return folder / f"{outgoing.ref.digest}.part", folder / f"{outgoing.ref.digest}.chunks"


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
    data, outgoing = blob(5 * SMALL)
    _, file = part_and_notes(tmp_path, outgoing)
    file.write_bytes(notes)
    incoming = Incoming(outgoing.ref, tmp_path)
    assert incoming.chunks.present == 0
    for frame in frames_of(outgoing):
        incoming.add(frame)
    incoming.finish(tmp_path / "whole", durable=False)
    assert (tmp_path / "whole").read_bytes() == data


def test_notes_that_lie_about_what_is_there_are_found_out_by_the_hash(tmp_path):
    _, outgoing = blob(5 * SMALL)
    _, file = part_and_notes(tmp_path, outgoing)
    file.write_text(json.dumps({"chunk_bytes": SMALL, "missing": []}))
    incoming = Incoming(outgoing.ref, tmp_path)
    assert incoming.chunks.complete
    with pytest.raises(ChunkError, match="SHA-256"):
        incoming.finish(tmp_path / "whole", durable=False)
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("size", [0, 1, 5 * SMALL - 1, 5 * SMALL + 1])
def test_a_part_file_of_another_length_means_starting_afresh(tmp_path, size):
    data, outgoing = blob(5 * SMALL)
    part, _ = part_and_notes(tmp_path, outgoing)
    os.truncate(part, size)
    incoming = Incoming(outgoing.ref, tmp_path)
    assert incoming.chunks.present == 0
    for frame in frames_of(outgoing):
        incoming.add(frame)
    incoming.finish(tmp_path / "whole", durable=False)
    assert (tmp_path / "whole").read_bytes() == data


def test_notes_without_their_part_are_not_believed_later(tmp_path):
    """A crash just before the notes are removed must not make the next download of the same blob begin with holes."""
    _, outgoing = blob(5 * SMALL)
    part, notes = part_and_notes(tmp_path, outgoing)
    part.unlink()
    os.close(Incoming(outgoing.ref, tmp_path)._file)  # begins, and is killed before it has noted anything
    assert not notes.exists()
    again = Incoming(outgoing.ref, tmp_path)
    assert again.chunks.present == 0
    again.discard()


def test_a_flipped_bit_on_the_disk_is_found_out_by_the_hash(tmp_path):
    _, outgoing = blob(5 * SMALL)
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
    data, outgoing = blob(2 * SMALL)
    frames = frames_of(outgoing)
    incoming = Incoming(outgoing.ref, tmp_path)
    real = os.pwrite

    def full(file, content, offset):
        if failure == "half written":
            return real(file, bytes(content)[:10], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    incoming.add(frames[0])
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ChunkError, match="cannot be kept"):
        incoming.add(frames[1])
    assert incoming.chunks.missing() == ((1, 2),)
    monkeypatch.setattr(os, "pwrite", real)
    assert incoming.add(frames[1])
    incoming.finish(tmp_path / "whole", durable=False)
    assert (tmp_path / "whole").read_bytes() == data


def test_notes_for_which_the_disk_has_no_room_do_not_stop_a_download(tmp_path, monkeypatch):
    data, outgoing = blob(3 * SMALL)
    incoming = Incoming(outgoing.ref, tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(chunks_module, "_SAVE_EVERY", 1)
    monkeypatch.setattr(chunks_module, "write_atomic", full)
    for frame in frames_of(outgoing):
        incoming.add(frame)
    incoming.finish(tmp_path / "whole", durable=False)
    assert (tmp_path / "whole").read_bytes() == data


def test_a_part_file_takes_no_more_than_its_blob_and_is_private(tmp_path):
    _, outgoing = blob(5 * SMALL)
    incoming = Incoming(outgoing.ref, tmp_path)
    assert incoming.path.stat().st_size == 5 * SMALL
    assert incoming.path.stat().st_mode & 0o077 == 0
    incoming.discard()
    assert list(tmp_path.iterdir()) == []
