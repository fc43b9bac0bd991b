from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from edge_agent.agent.transfers import Downloads
from edge_agent.core.errors import ChunkError
from edge_agent.wire.blobs.chunks import BlobCache, Outgoing, decode_frame
from edge_agent.wire.blobs.flow import IDLE_S, REPORT_AFTER_S
from edge_agent.wire.messages.down import Listen
from edge_agent.wire.messages.up import Have, Progress, Want


class Bench:
    def __init__(self, folder):
        self.now = 0.0
        self.said = []
        self.listening = []
        self.cache = BlobCache(folder, 1 << 20)
        link = SimpleNamespace(send=self.said.append, listen=self.listening.append, unlisten=self.listening.remove)
        self.downloads = Downloads(self.cache, link, lambda: self.now)

    def heard(self):
        found = list(self.said)
        self.said[:] = []
        return found

    def begin(self, blob):
        self.downloads.fetch((blob.ref,))
        if blob.ref.digest in self.listening:
            self.downloads.listening((f"fl/1/home/b/{blob.ref.digest[:16]}",))

    def frame(self, blob, index):
        self.downloads.frame(decode_frame(blob.frame(index)))


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path / "cache")


@pytest.fixture
def blob():
    return Outgoing.of(bytes(range(256)) * 20, 1000)


def want(blob, *ranges, direct=True):
    return Want(digest=blob.ref.digest, ranges=ranges, direct=direct)


def listen(bench, blob, broadcast=True):
    bench.downloads.listen(Listen(digest=blob.ref.digest, broadcast=broadcast))


def test_a_blob_is_requested_for_this_agent_alone_until_it_is_asked_to_listen(bench, blob):
    """Else a broadcast could fill the queue of a slow link before the coordinator knows that it is slow."""
    bench.downloads.fetch((blob.ref,))
    assert (bench.heard(), bench.listening) == ([want(blob, (0, 6))], [])
    listen(bench, blob)
    assert (bench.heard(), bench.listening) == ([], [blob.ref.digest])
    bench.downloads.listening((f"fl/1/home/b/{blob.ref.digest[:16]}",))
    assert bench.heard() == [want(blob, (0, 6), direct=False)]
    listen(bench, blob, broadcast=False)
    assert (bench.heard(), bench.listening) == ([want(blob, (0, 6))], [])
    other = Outgoing.of(b"other" * 1000, 1000)
    bench.downloads.fetch((other.ref,))
    assert (bench.heard(), bench.listening) == ([want(other, (0, 5))], []), "that holds for the next blob"


def test_a_new_connection_begins_anew(bench, blob):
    listen(bench, blob)
    bench.downloads.fetch((blob.ref,))
    assert bench.listening == [blob.ref.digest]
    bench.downloads.cut()
    assert bench.listening == []
    bench.downloads.listening(("fl/1/home/a/a0/dn", "fl/1/home/a/a0/db"))
    assert bench.heard() == [want(blob, (0, 6))]


def test_a_model_that_cannot_arrive_in_time_says_so_with_the_figures(bench):
    """40 chunks of 1000 bytes; one each second is 1 kB/s, and a quarter of the first ten seconds is not enough."""
    blob = Outgoing.of(bytes(40_000), 1000)
    bench.downloads.fetch((blob.ref,))
    for index in range(5):
        assert index > 2 or not bench.downloads.objection((blob.ref,), 10)
        bench.frame(blob, index)
        bench.now += 1.0
    assert bench.downloads.objection((blob.ref,), 40) == ""
    why = bench.downloads.objection((blob.ref,), 20)
    assert "0.035 MB are still to come, which take 35 s at the measured 1 kB/s, and the round closes in 20 s" in why


def test_the_rate_of_the_link_before_is_not_that_of_a_model_under_way(bench):
    """400 chunks of 1000 bytes: 20 at one a second, then, on another link, a hundred a second."""
    blob = Outgoing.of(bytes(400_000), 1000)
    bench.downloads.fetch((blob.ref,))
    for index in range(20):
        bench.now += 1.0
        bench.frame(blob, index)
    assert "at the measured 1 kB/s" in bench.downloads.objection((blob.ref,), 100)
    bench.downloads.cut()
    assert bench.downloads.objection((blob.ref,), 100) == "", "nothing is known of the new link"
    for index in range(20, 320):
        bench.now += 0.01
        bench.frame(blob, index)
        assert bench.downloads.objection((blob.ref,), 100) == ""
    assert "at the measured 100 kB/s" in bench.downloads.objection((blob.ref,), 0.1)


def test_a_link_that_became_fast_is_not_judged_by_the_time_before(bench):
    """A chunk a second for 100 s, then 20 a second: 200 chunks are still to come, and the round closes in 60 s."""
    blob = Outgoing.of(bytes(400_000), 1000)
    bench.downloads.fetch((blob.ref,))
    for index in range(100):
        bench.now += 1.0
        bench.frame(blob, index)
    assert "at the measured 1 kB/s" in bench.downloads.objection((blob.ref,), 60)
    for index in range(100, 200):
        bench.now += 0.05
        bench.frame(blob, index)
    assert bench.downloads.objection((blob.ref,), 60) == ""


def test_a_broadcast_that_is_too_slow_is_left_while_there_is_time(bench):
    """60 of 400 chunks at five a second: 68 s are left to come. After the deadline nothing is won by leaving it."""
    blob = Outgoing.of(bytes(400_000), 1000)
    listen(bench, blob)
    bench.begin(blob)
    for index in range(60):
        bench.now += 0.2
        bench.frame(blob, index)
    bench.heard()
    for left_s in (69, 0, -1):
        assert bench.downloads.objection((blob.ref,), left_s) == ""
        assert (bench.heard(), bench.listening) == ([], [blob.ref.digest])
    assert bench.downloads.objection((blob.ref,), 60) == ""
    assert (bench.heard(), bench.listening) == ([want(blob, (60, 400))], [])


def test_nothing_is_asked_for_before_it_can_be_heard(bench, blob):
    listen(bench, blob)
    bench.downloads.fetch((blob.ref,))
    assert bench.heard() == []
    assert bench.listening == [blob.ref.digest]
    bench.now += 10
    bench.downloads.tick()
    assert bench.heard() == []
    bench.downloads.listening(("fl/1/home/b/0000000000000000",))
    assert bench.heard() == []
    bench.downloads.listening((f"fl/1/home/b/{blob.ref.digest[:16]}",))
    assert bench.heard() == [want(blob, (0, 6), direct=False)]


def test_all_chunks_make_the_blob_and_it_is_said_to_be_here(bench, blob):
    listen(bench, blob)
    bench.begin(blob)
    bench.heard()
    for index in (5, 0, 3, 3, 1, 4, 2):
        assert not bench.downloads.has_all((blob.ref,))
        bench.frame(blob, index)
    assert bench.downloads.has_all((blob.ref,))
    assert bench.cache.read(blob.ref.digest) == bytes(range(256)) * 20
    assert bench.heard()[-1] == Have(digest=blob.ref.digest)
    assert bench.listening == []


def test_what_is_in_the_cache_is_not_asked_for(bench):
    blob = Outgoing.of(b"already here")
    bench.cache.folder.mkdir()
    bench.cache.path(blob.ref.digest).write_bytes(b"already here")
    bench.downloads.fetch((blob.ref,))
    assert bench.heard() == [Have(digest=blob.ref.digest)]
    assert bench.listening == []


def test_silence_makes_it_ask_again_for_what_is_missing(bench, blob):
    bench.begin(blob)
    for index in (0, 1, 4):
        bench.frame(blob, index)
    bench.heard()
    bench.now += IDLE_S
    bench.downloads.tick()
    assert bench.heard() == [want(blob, (2, 4), (5, 6))]


def test_progress_is_reported_so_that_the_sender_goes_on(bench, blob):
    bench.begin(blob)
    bench.frame(blob, 0)
    bench.frame(blob, 1)
    bench.heard()
    bench.now += REPORT_AFTER_S
    bench.downloads.tick()
    assert bench.heard() == [Progress(digest=blob.ref.digest, missing=((2, 6),))]


def test_a_restart_goes_on_where_it_was(bench, blob, tmp_path):
    bench.begin(blob)
    for index in (0, 1, 2):
        bench.frame(blob, index)
    bench.downloads.pause()
    again = Bench(tmp_path / "cache")
    again.begin(blob)
    assert again.heard() == [want(blob, (3, 6))]
    for index in (3, 4, 5):
        again.frame(blob, index)
    assert again.downloads.has_all((blob.ref,))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_blob_whose_chunks_had_all_arrived_before_a_restart_is_checked_at_once(bench, blob, tmp_path, is_damaged):
    incoming = bench.cache.receive(blob.ref)
    for index in range(6):
        incoming.add(decode_frame(blob.frame(index)))
    incoming.close()
    if is_damaged:
        incoming.path.write_bytes(bytes(blob.ref.size_bytes))
    again = Bench(tmp_path / "cache")
    again.begin(blob)
    assert again.downloads.has_all((blob.ref,)) != is_damaged
    assert again.heard() == [want(blob, (0, 6)) if is_damaged else Have(digest=blob.ref.digest)]


def test_a_wrong_whole_is_thrown_away_and_asked_for_again(bench, blob):
    listen(bench, blob)
    bench.begin(blob)
    bench.heard()
    for index in range(5):
        bench.frame(blob, index)
    wrong = replace(decode_frame(blob.frame(5)), data=bytes(120))
    with pytest.raises(ChunkError, match="SHA-256"):
        bench.downloads.frame(wrong)
    assert not bench.downloads.has_all((blob.ref,))
    assert bench.listening == [blob.ref.digest], "subscribed once; the broker need not confirm it again"
    assert want(blob, (0, 6), direct=False) in bench.heard()
    for index in range(6):
        bench.frame(blob, index)
    assert bench.downloads.has_all((blob.ref,))


def test_chunks_of_blobs_that_nobody_asked_for_are_ignored(bench, blob):
    bench.frame(blob, 0)
    assert bench.heard() == []
    assert not list(bench.cache.folder.rglob("*.part"))


def test_blobs_that_are_no_longer_needed_are_no_longer_asked_for(bench, blob):
    """A round that closed without us: its model would be asked for every second for ever."""
    other = Outgoing.of(b"x" * 3000, 1000)
    listen(bench, blob)
    bench.begin(blob)
    bench.begin(other)
    bench.frame(blob, 0)
    bench.heard()
    bench.downloads.keep_only((other.ref,))
    assert bench.listening == [other.ref.digest]
    bench.now += 60
    bench.downloads.tick()
    assert {message.digest for message in bench.heard()} == {other.ref.digest}
    bench.begin(blob)
    assert want(blob, (1, 6), direct=False) in bench.heard(), "what had arrived was kept"


def test_one_chunk_arriving_twice_is_one_chunk(bench):
    blob = Outgoing.of(b"y" * 2500, 1000)
    bench.begin(blob)
    for _ in range(5):
        bench.frame(blob, 0)
    assert not bench.downloads.has_all((blob.ref,))
