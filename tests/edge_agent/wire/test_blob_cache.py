from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest

from edge_agent.core.errors import ChunkError, StateError
from edge_agent.wire.blobs import chunks
from edge_agent.wire.blobs.chunks import BlobCache, Outgoing, decode_frame
from edge_agent.wire.messages.fields import BlobRef

CHUNK = 64


def noise(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def age(cache: BlobCache, digest: str, seconds: float) -> None:
    os.utime(cache.path(digest), (seconds, seconds))


def arrive(cache: BlobCache, data: bytes, how_many: int | None = None):
    outgoing = Outgoing.of(data, CHUNK)
    incoming = cache.receive(outgoing.ref)
    for index in range(outgoing.count if how_many is None else how_many):
        incoming.add(decode_frame(outgoing.frame(index)))
    return incoming


def put(cache: BlobCache, data: bytes) -> str:
    return cache.finish(arrive(cache, data)).name


def test_a_blob_is_kept_under_its_hash(tmp_path):
    cache = BlobCache(tmp_path / "deep" / "cache", 10_000)
    data = noise(500, 1)
    digest = put(cache, data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert cache.has(digest)
    assert cache.read(digest) == data
    assert put(cache, data) == digest
    assert [path.name for path in cache.folder.iterdir() if path.is_file()] == [digest]


def test_a_blob_that_is_not_there_is_told(tmp_path):
    with pytest.raises(StateError, match="is not in"):
        BlobCache(tmp_path, 100).read("a" * 64)
    assert not BlobCache(tmp_path, 100).has("a" * 64)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"", lambda d: d[::-1]]
)
def test_a_damaged_blob_is_removed_so_that_it_is_fetched_again(tmp_path, damage):
    cache = BlobCache(tmp_path, 10_000)
    digest = put(cache, noise(500, 1))
    cache.path(digest).write_bytes(damage(noise(500, 1)))
    with pytest.raises(StateError, match="damaged and has been removed; fetch it again"):
        cache.read(digest)
    assert not cache.has(digest)


def test_the_least_recently_read_goes_first(tmp_path):
    cache = BlobCache(tmp_path, 1000)
    digests = [put(cache, noise(300, seed)) for seed in range(3)]
    for place, digest in enumerate(digests):
        age(cache, digest, 1000.0 + place)
    cache.read(digests[0])
    newest = put(cache, noise(300, 3))
    assert [cache.has(digest) for digest in (*digests, newest)] == [True, False, True, True]


@pytest.mark.parametrize("size, kept", [(100, 3), (101, 2), (400, 2), (401, 1), (700, 1), (701, 0), (5000, 0)])
def test_no_more_is_dropped_than_is_needed(tmp_path, size, kept):
    """Three blobs of 300 bytes in 1000: 100 are free, each one dropped gives 300 more."""
    cache = BlobCache(tmp_path, 1000)
    digests = [put(cache, noise(300, seed)) for seed in range(3)]
    put(cache, noise(size, 9))
    assert sum(map(cache.has, digests)) == kept


def test_files_of_others_are_left_alone(tmp_path):
    cache = BlobCache(tmp_path, 100)
    strangers = ["status.json", "a" * 63, "g" * 64, "a" * 64 + "\n", ".x.tmp"]
    for name in strangers:
        (tmp_path / name).write_bytes(b"x" * 90)
    put(cache, noise(100, 1))
    put(cache, noise(100, 2))
    assert all((tmp_path / name).exists() for name in strangers)


def test_a_blob_that_arrives_in_chunks_is_kept_when_it_is_whole(tmp_path):
    cache = BlobCache(tmp_path, 10_000)
    data = noise(300, 1)
    incoming = arrive(cache, data)
    assert not cache.has(incoming.ref.digest)
    assert cache.finish(incoming).read_bytes() == data
    assert cache.read(incoming.ref.digest) == data


def test_a_blob_with_the_wrong_content_is_not_kept(tmp_path):
    cache = BlobCache(tmp_path, 10_000)
    good = Outgoing.of(noise(128, 1), CHUNK)
    lie = BlobRef(digest=good.ref.digest[:16] + "f" * 48, size_bytes=128, chunk_bytes=CHUNK)
    incoming = cache.receive(lie)
    for index in range(2):
        incoming.add(decode_frame(good.frame(index)))
    with pytest.raises(ChunkError):
        cache.finish(incoming)
    assert not cache.has(lie.digest)
    assert list((tmp_path / "partial").iterdir()) == []


def test_a_download_makes_room_for_itself(tmp_path):
    cache = BlobCache(tmp_path, 1000)
    old = put(cache, noise(800, 1))
    incoming = arrive(cache, noise(300, 2))
    assert not cache.has(old)
    cache.finish(incoming)


def test_a_download_that_goes_on_after_a_restart_is_not_dropped_to_make_room_for_itself(tmp_path):
    data = noise(900, 1)
    arrive(BlobCache(tmp_path, 1000), data, how_many=5).close()
    incoming = BlobCache(tmp_path, 1000).receive(Outgoing.of(data, CHUNK).ref)
    assert incoming.chunks.present == 5
    incoming.discard()


def test_downloads_that_nobody_goes_on_with_do_not_fill_the_disk(tmp_path):
    """Each round has a new blob; a device that is always too late begins one after the other and finishes none."""
    cache = BlobCache(tmp_path, 1000)
    for seed in range(20):
        incoming = arrive(cache, noise(300, seed), how_many=2)
        os.utime(incoming.path, (1000.0 + seed, 1000.0 + seed))
        incoming.close()
    parts = sorted((tmp_path / "partial").glob("*.part"))
    assert sum(path.stat().st_size for path in parts) <= 1000
    assert len(parts) == 3
    assert arrive(cache, noise(300, 19), how_many=0).chunks.present == 2, "the newest are the ones that stay"


def test_a_download_under_way_is_never_dropped(tmp_path):
    cache = BlobCache(tmp_path, 1000)
    first = noise(600, 1)
    under_way = arrive(cache, first, how_many=5)
    os.utime(under_way.path, (1.0, 1.0))
    second = arrive(cache, noise(600, 2))
    outgoing = Outgoing.of(first, CHUNK)
    for index in range(5, outgoing.count):
        under_way.add(decode_frame(outgoing.frame(index)))
    assert cache.finish(under_way).read_bytes() == first
    cache.finish(second)


def test_blobs_of_many_rounds_are_bounded_by_their_number_and_the_newest_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "MOST_BLOBS", 8)
    cache = BlobCache(tmp_path, 10_000_000)
    digests = []
    for number in range(20):
        digest = put(cache, noise(10, number))
        age(cache, digest, number)
        digests.append(digest)
    assert sorted(path.name for path in cache.folder.iterdir() if path.is_file()) == sorted(digests[-8:])
