"""Frames on the wire, which chunks of a blob are there, and what is sent of one."""

from __future__ import annotations

import hashlib
import zlib

import pytest
from chunked_blobs import CHUNK, blob, frames_of, ranges_of
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.core.errors import ChunkError, StateError
from edge_agent.wire.blobs.chunks import (
    CHUNK_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    Chunks,
    Frame,
    Outgoing,
    chunk_count,
    chunks_per_frame,
    decode_frame,
    flags_of,
    transfer_id,
)

# --- the frame -------------------------------------------------------------------------------------------------------

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@given(
    u64,
    st.tuples(u32, u32).map(sorted).filter(lambda pair: pair[0] < pair[1]),
    u64,
    st.binary(max_size=200),
    st.booleans(),
)
def test_a_frame_makes_the_round_trip(transfer, place, offset, data, report):
    index, count = place
    payload = Frame(transfer, index, count, offset, data, report).encode()
    assert decode_frame(payload) == Frame(transfer, index, count, offset, data, report)
    assert len(payload) == 40 + len(data)


def test_the_frame_is_the_one_of_the_protocol_page():
    """Magic, version, flags, id u64, index u32, count u32, offset u64, length u32, reserved, crc32; little-endian."""
    place = bytes.fromhex("080706050403020102000000050000008000000000000000")
    fields = b"HW" + b"\x01\x00" + place + b"\x03\x00\x00\x00" + bytes(4)
    expected = fields + zlib.crc32(fields + b"abc").to_bytes(4, "little") + b"abc"
    assert Frame(0x0102030405060708, 2, 5, 128, b"abc").encode() == expected
    reporting = Frame(0x0102030405060708, 2, 5, 128, b"abc", report=True).encode()
    assert reporting[:4] == b"HW\x01\x01"


def test_a_full_frame_is_below_the_lowest_limit_of_the_cloud_services():
    _, outgoing = blob(12 * CHUNK_BYTES + 1, chunk_bytes=CHUNK_BYTES)
    assert chunks_per_frame(outgoing.ref) == 12
    assert FRAME_BYTES - 12 < len(outgoing.frame(0, 12)) <= FRAME_BYTES
    assert len(outgoing.frame(12, 13)) == HEADER_BYTES + 1
    assert FRAME_BYTES == 60 * 1024 < 64_000
    assert outgoing.wire_bytes == 12 * CHUNK_BYTES + 1 + 2 * HEADER_BYTES


def test_two_chunks_pass_a_link_of_64_kbit_in_less_than_1_5_seconds():
    assert 1.0 < 2 * (CHUNK_BYTES + HEADER_BYTES) / 8000 < 1.5


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
    with pytest.raises(ChunkError, match="states 5 bytes and holds 6"):
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


spans = st.tuples(st.integers(0, 39), st.integers(1, 40)).map(lambda pair: (min(pair), max(pair[1], pair[0] + 1)))


@given(st.integers(1, 40), st.lists(spans), spans, st.integers(1, 6))
def test_chunks_behave_like_a_set(count, adds, between, limit):
    chunks = Chunks(count)
    twin = set[int]()
    for start, stop in adds:
        if stop <= count:
            chunks.add(start, stop)
            twin.update(range(start, stop))
    lacking = set(range(count)) - twin
    low, high = (min(number, count) for number in between)
    assert {index for index in range(count) if index in chunks} == twin
    assert (chunks.present, chunks.complete) == (len(twin), not lacking)
    assert list(chunks.missing(limit=count)) == ranges_of(lacking)
    assert list(chunks.missing(low, high, limit)) == ranges_of({i for i in lacking if low <= i < high})[:limit]
    assert {i for i, flag in enumerate(flags_of(chunks.missing(limit=count), count)) if flag} == lacking


@pytest.mark.parametrize("bad", [(-1, 2), (2, 2), (3, 2), (0, 6), (5, 6), (0, 2**62)])
def test_ranges_outside_the_blob_are_refused(bad):
    with pytest.raises(ChunkError):
        flags_of([(0, 1), bad], 5)


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
    mapped = Outgoing.open(tmp_path / "blob", outgoing.ref.digest, CHUNK)
    assert mapped.ref == outgoing.ref
    assert [mapped.frame(index) for index in range(mapped.count)] == [outgoing.frame(i) for i in range(outgoing.count)]


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_that_is_not_there_or_empty_is_told(tmp_path, content):
    if content is not None:
        (tmp_path / "blob").write_bytes(content)
    with pytest.raises(StateError, match="blob cannot be opened"):
        Outgoing.open(tmp_path / "blob", "a" * 64)
