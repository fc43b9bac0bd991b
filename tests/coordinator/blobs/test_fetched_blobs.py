"""Downloads by HTTP from the coordinator to the disk of an agent, and chunks over MQTT where that does not work."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from blob_site import Site, endpoint

from edge_agent.wire.blobs import http_attempt
from edge_agent.wire.blobs.chunks import Outgoing

SIZE = 3_000_000


def blob_of(seed, size=SIZE):
    return Outgoing.of(np.random.default_rng(seed).bytes(size))


@pytest.fixture
def served():
    opened = endpoint(above_bytes=1000)
    yield opened
    opened.close()


@pytest.fixture
def site(tmp_path, served):
    return Site(tmp_path, served)


def test_a_large_blob_comes_by_http_once_and_completely(site):
    blob = blob_of(1)
    site.offer(blob)
    assert site.until_here(blob) == bytes(blob.data)
    assert site.chunk_bytes == 0
    assert site.downloads.ways.http_bytes == SIZE
    site.distributor.pump()
    assert site.distributor.bytes_to == {"a": SIZE}
    assert site.distributor.fetched_bytes == SIZE
    assert site.distributor.waiting_for_blobs(["a"]) == 0


def test_a_small_blob_and_an_older_agent_get_chunks(site, tmp_path, served):
    small = blob_of(2, 1000)
    site.offer(small)
    assert site.until_here(small) == bytes(small.data)
    older = Site(tmp_path / "older", served, by_http=False)
    blob = blob_of(3, 50_000)
    older.offer(blob)
    assert older.until_here(blob) == bytes(blob.data)
    assert (site.downloads.ways.http_bytes, older.downloads.ways.http_bytes) == (0, 0)
    assert all(not want.by_chunks for want in (*site.wants(), *older.wants()))


def test_an_agent_that_is_fetching_counts_as_waiting_until_it_has_the_blob(site):
    blob = blob_of(4)
    site.offer(blob)
    assert site.distributor.waiting_for_blobs(["a"]) == 1
    site.until_here(blob)
    assert site.distributor.waiting_for_blobs(["a"]) == 0


def test_where_http_is_not_reachable_chunks_are_requested_at_once(site, served):
    blob = blob_of(5, 200_000)
    site.change_urls = lambda _: ("http://127.0.0.1:1/blobs",)  # nothing listens on port 1
    site.offer(blob)
    assert site.until_here(blob) == bytes(blob.data)
    assert [want.by_chunks for want in site.wants()][:2] == [False, True]
    assert site.downloads.ways.http_bytes == 0
    assert "127.0.0.1:1" in site.downloads.ways.http_problem
    assert served.take_fetched() == {}


def test_where_the_server_refuses_chunks_are_requested(site):
    blob = blob_of(6, 200_000)
    site.change_urls = lambda urls: tuple(url.replace("agent=a", "agent=b") for url in urls)
    site.offer(blob)
    assert site.until_here(blob) == bytes(blob.data)
    assert site.downloads.ways.http_bytes == 0
    assert "status 403" in site.downloads.ways.http_problem


def test_other_bytes_cost_one_blob_and_are_never_used(site, served):
    blob = blob_of(7, 200_000)
    other = blob_of(8, 200_000)
    served.offered(other)
    (url_of_other,) = served.urls("a", other.ref.digest)
    site.change_urls = lambda _: (url_of_other,)
    site.offer(blob)
    assert site.until_here(blob) == bytes(blob.data)
    assert site.downloads.ways.http_bytes == 200_000
    assert [want.by_chunks for want in site.wants()][:2] == [False, True]


def test_the_next_url_is_tried_where_the_first_fails(site):
    blob = blob_of(9)
    site.change_urls = lambda urls: ("http://127.0.0.1:1/", *urls)
    site.offer(blob)
    assert site.until_here(blob) == bytes(blob.data)
    assert site.chunk_bytes == 0


def test_a_cut_download_goes_on_with_a_fresh_url(site, monkeypatch):
    """The server ends three times, each time after a quarter of the blob; what has arrived is not sent again."""
    blob = blob_of(10)
    monkeypatch.setattr("coordinator.blobs.endpoint.SLICE_BYTES", SIZE // 4)
    cuts = []
    whole_send = site.urls._send

    def send_a_quarter(sock, grant, blob_to_send, span):
        first, end = span
        if len(cuts) < 3 and end - first > SIZE // 4:
            cuts.append(span)
            whole_send(sock, grant, blob_to_send, (first, first + SIZE // 4))
            raise ConnectionAbortedError
        whole_send(sock, grant, blob_to_send, span)

    monkeypatch.setattr(site.urls, "_send", send_a_quarter)
    site.offer(blob)
    assert site.until_here(blob) == bytes(blob.data)
    assert len(cuts) == 3
    assert site.chunk_bytes == 0
    assert site.downloads.ways.http_bytes == SIZE
    site.distributor.pump()
    assert site.distributor.fetched_bytes <= 1.02 * SIZE, "at most a part of a chunk is sent twice at each cut"


def test_a_restarted_agent_goes_on_where_it_was(site):
    blob = blob_of(11)
    site.offer(blob)
    site.until(lambda: site.downloads.ways.http_bytes > 0)
    arrived = site.downloads.ways.http_bytes
    assert 0 < arrived < SIZE
    site.downloads.pause()
    site.start_agent()
    site.offer(blob)
    assert site.until_here(blob) == bytes(blob.data)
    assert site.downloads.ways.http_bytes == SIZE - arrived


def test_chunks_go_on_where_http_has_stopped(site):
    blob = blob_of(12)
    site.offer(blob)
    site.until(lambda: site.downloads.ways.http_bytes > 0)
    arrived = site.downloads.ways.http_bytes
    site.urls.withdrawn(blob.ref.digest)  # the endpoint serves it no longer, the distributor still does
    assert site.until_here(blob) == bytes(blob.data)
    assert site.downloads.ways.mqtt_bytes <= SIZE - arrived


def test_a_server_that_stands_still_is_left(site, monkeypatch):
    asked = threading.Event()

    def stand_still(sock, *_):
        asked.set()
        sock.recv(1)  # waits until the agent ends the connection

    blob = blob_of(13, 200_000)
    monkeypatch.setattr(site.urls, "_send", stand_still)
    monkeypatch.setattr(http_attempt, "ANSWER_S", 60.0)
    site.offer(blob)
    site.until(asked.is_set)
    site.now += 13.0
    site.step()
    assert site.downloads.ways.http_problem == ""
    site.now += 2.0
    assert site.until_here(blob) == bytes(blob.data)
    assert "nothing has come for 15 s" in site.downloads.ways.http_problem


def test_a_download_that_is_not_needed_any_more_ends_its_fetch(site):
    blob = blob_of(14)
    site.offer(blob)
    site.until(lambda: site.downloads.ways.http_bytes > 0)
    (download,) = site.downloads._under_way.values()
    fetch = download.fetch
    site.downloads.keep_only(())
    assert fetch.is_stopped
    again = blob_of(15)
    site.offer(again)
    assert site.until_here(again) == bytes(again.data)
