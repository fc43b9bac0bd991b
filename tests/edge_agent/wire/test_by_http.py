"""Fetches from servers that refuse, lie, stop or stand still: only whole chunks of the right place come out."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

import pytest

from edge_agent.wire.blobs import by_http, http_attempt
from edge_agent.wire.blobs.by_http import BlobFetcher
from edge_agent.wire.blobs.chunks import Outgoing

BLOB = Outgoing.of(bytes(range(256)) * 100, 1000)
SIZE = BLOB.ref.size_bytes
ALL = ((0, BLOB.count),)
PATIENCE_S = 30.0


@pytest.fixture
def serve():
    """Returns a function that answers each connection with some bytes, and returns a URL and what was received."""
    listeners = []

    def start(answer, stays_open=False):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        received = []

        def run():
            # Also a connection that breaks while it is answered is closed in the end.
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                while True:
                    peer, _ = listener.accept()
                    stack.enter_context(peer)
                    received.append(peer.recv(1 << 16))
                    peer.sendall(answer)
                    if not stays_open:
                        peer.close()

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/x?proof=secret", received

    yield start
    for listener in listeners:
        listener.close()


def fetched(*urls, missing=ALL, hosts=()):
    """(bytes by position, problems) of a fetch that is over."""
    woken = threading.Event()
    fetch = BlobFetcher(woken.set, ssl.create_default_context, hosts).begin(BLOB.ref, urls, missing)
    found = {}
    while not fetch.is_over:
        for piece in fetch.take_pieces():
            frame = piece.as_frame(BLOB.ref)
            found[frame.offset] = bytes(frame.data)
        if not fetch.is_over:
            assert woken.wait(PATIENCE_S), "the fetch does not end"
            woken.clear()
    return found, fetch.problems


def part(first, end, data=None, size=SIZE):
    data = bytes(BLOB.data[first:end]) if data is None else data
    head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Content-Range: bytes {first}-{end - 1}/{size}\r\n\r\n".encode() + data


def test_a_range_is_asked_for_and_comes_in_whole_chunks(serve):
    url, received = serve(part(2000, 5000))
    found, problems = fetched(url, missing=((2, 5),))
    assert b"".join(found[place] for place in sorted(found)) == bytes(BLOB.data[2000:5000])
    assert problems == []
    assert b"Range: bytes=2000-4999\r\n" in received[0]
    assert received[0].startswith(b"GET /x?proof=secret HTTP/1.1\r\n")


def test_the_last_chunk_may_be_shorter(serve):
    url, _ = serve(part(25000, SIZE))
    found, problems = fetched(url, missing=((25, 26),))
    assert (found, problems) == ({25000: bytes(BLOB.data[25000:])}, [])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        part(0, 1000),
        part(1000, SIZE),
        part(0, SIZE, size=SIZE + 1),
        part(0, SIZE, data=b"x" * (SIZE + 1)),
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 25600\r\nContent-Range: bytes */25600\r\n\r\n",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 25600\r\n\r\n",
        b"SSH-2.0-server\r\n",
        b"",
        b"HTTP/1.1 206 Partial Content\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 206 Partial Content\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
    ids=[
        "403",
        "redirect",
        "size",
        "chunked",
        "less",
        "elsewhere",
        "total",
        "more",
        "star",
        "none",
        "ssh",
        "nothing",
        "headers",
        "long",
    ],
)
def test_an_answer_that_is_not_the_range_gives_no_byte(serve, answer):
    url, received = serve(answer)
    found, problems = fetched(url)
    assert found == {}
    assert len(problems) == 1
    assert "secret" not in problems[0], "the log must not hold the proof"
    assert len(received) == 1, "no redirect is followed, and nothing is tried twice"


def test_what_came_before_the_end_counts_and_the_next_url_brings_the_rest(serve):
    whole = part(0, SIZE)
    cut_url, _ = serve(whole[: len(whole) - SIZE + 4500])  # four chunks and a half
    good_url, received = serve(part(4000, SIZE))
    found, problems = fetched(cut_url, good_url)
    assert b"".join(found[place] for place in sorted(found)) == bytes(BLOB.data)
    assert len(problems) == 1
    assert b"Range: bytes=4000-25599\r\n" in received[0]


def test_the_whole_blob_without_a_range_is_taken_where_all_of_it_is_missing(serve):
    url, _ = serve(f"HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n".encode() + bytes(BLOB.data))
    assert b"".join(fetched(url)[0].values()) == bytes(BLOB.data)
    found, problems = fetched(url, missing=((3, BLOB.count),))
    assert (found, len(problems)) == ({}, 1), "what is here already would come again"


def test_a_silent_server_is_left(serve, monkeypatch):
    monkeypatch.setattr(http_attempt, "ANSWER_S", 0.1)
    url, _ = serve(part(0, SIZE)[:200], stays_open=True)
    found, problems = fetched(url)
    assert found == {}
    assert len(problems) == 1


@pytest.mark.parametrize("url", ["http://user@127.0.0.1/x", "ftp://127.0.0.1/x", "http:///x", "http://127.0.0.1:x/"])
def test_a_url_that_is_none_is_refused(url):
    found, problems = fetched(url)
    assert (found, len(problems)) == ({}, 1)


def test_only_hosts_that_the_device_allows_are_asked(serve):
    url, received = serve(part(0, SIZE))
    found, problems = fetched(url, hosts=("fl.example.org",))
    assert (found, received) == ({}, [])
    assert "none of [downloads] hosts" in problems[0]
    assert b"".join(fetched(url, hosts=("127.0.0.1",))[0].values()) == bytes(BLOB.data)


def test_no_proxy_of_the_environment_is_used(serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    url, _ = serve(part(0, SIZE))
    assert b"".join(fetched(url)[0].values()) == bytes(BLOB.data)


def test_a_stopped_fetch_ends_though_nobody_takes_its_pieces(monkeypatch, serve):
    monkeypatch.setattr(by_http, "LOOK_S", 0.01)
    monkeypatch.setattr(by_http, "PIECE_BYTES", 1000)
    woken = threading.Event()
    url, _ = serve(part(0, SIZE))
    fetch = BlobFetcher(woken.set, ssl.create_default_context).begin(BLOB.ref, (url,), ALL)
    assert woken.wait(PATIENCE_S)
    fetch.stop()
    while not fetch._has_ended.wait(0):
        woken.clear()
        assert fetch._has_ended.wait(PATIENCE_S)
    assert len(list(fetch.take_pieces())) <= by_http.MOST_PIECES


def test_a_stopped_fetch_ends_though_the_server_goes_on_to_send_single_bytes():
    """A chunk of a mebibyte would take hours, and no byte comes so late that the server counts as silent."""
    blob = Outgoing.of(bytes(1 << 20), 1 << 20)
    is_over = threading.Event()

    def send_single_bytes():
        with contextlib.suppress(OSError), listener.accept()[0] as peer:
            peer.recv(1 << 16)
            peer.sendall(part(0, blob.ref.size_bytes, bytes(blob.data), blob.ref.size_bytes)[:200])
            while not is_over.wait(0.01):
                peer.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=send_single_bytes)
        server.start()
        fetcher = BlobFetcher(lambda: None, ssl.create_default_context)
        fetch = fetcher.begin(blob.ref, (f"http://127.0.0.1:{listener.getsockname()[1]}/x",), ((0, 1),))
        fetch.stop()
        has_ended = fetch._has_ended.wait(PATIENCE_S)
        is_over.set()
        server.join(PATIENCE_S)
    assert has_ended
    assert fetch.problems == [f"{fetch.host}: the fetch was stopped"]
