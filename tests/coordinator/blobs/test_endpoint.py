"""The endpoint over real sockets: ranges of blobs for whom they are meant, and nothing for anybody else."""

from __future__ import annotations

import http.client
import re
from urllib.parse import urlsplit

import pytest
from blob_site import ask, endpoint

from coordinator.blobs import endpoint as endpoint_module
from coordinator.blobs.http_requests import HEAD_BYTES
from edge_agent.wire.blobs.chunks import Outgoing

BLOB = Outgoing.of(bytes(range(256)) * 1000, 1000)
DIGEST = BLOB.ref.digest
SIZE = BLOB.ref.size_bytes


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def served(clock):
    opened = endpoint(clock=clock)
    opened.offered(BLOB)
    yield opened
    opened.close()


def parts(served, agent="a"):
    (url,) = served.urls(agent, DIGEST)
    return urlsplit(url)


def target_of(served, agent="a"):
    found = parts(served, agent)
    return f"{found.path}?{found.query}"


def get(served, target, method="GET", **headers):
    connection = http.client.HTTPConnection(parts(served).hostname, parts(served).port, timeout=10)
    connection.request(method, target, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def raw(served, request):
    return ask((parts(served).hostname, parts(served).port), request)


@pytest.mark.parametrize(
    "text, span",
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=1000-1999", (1000, 2000)),
        ("bytes=255000-", (255000, SIZE)),
        (f"bytes=9-{SIZE * 2}", (9, SIZE)),
    ],
)
def test_a_range_is_answered_with_its_bytes(served, text, span):
    response, content = get(served, target_of(served), Range=text)
    assert (response.status, content) == (206, bytes(BLOB.data[span[0] : span[1]]))
    assert response.getheader("Content-Range") == f"bytes {span[0]}-{span[1] - 1}/{SIZE}"
    assert served.take_fetched() == {"a": span[1] - span[0]}
    assert served.take_fetched() == {}


def test_without_a_range_the_whole_blob_comes_and_head_says_its_size(served):
    response, content = get(served, target_of(served))
    assert (response.status, content) == (200, bytes(BLOB.data))
    response, content = get(served, target_of(served), "HEAD")
    assert (response.status, response.getheader("Content-Length"), content) == (200, str(SIZE), b"")


def test_one_connection_answers_many_requests(served):
    connection = http.client.HTTPConnection(parts(served).hostname, parts(served).port, timeout=10)
    socket_of_first = None
    for start in (0, 1000, 2000):
        connection.request("GET", target_of(served), headers={"Range": f"bytes={start}-{start + 999}"})
        socket_of_first = socket_of_first or connection.sock
        assert connection.getresponse().read() == bytes(BLOB.data[start : start + 1000])
        assert connection.sock is socket_of_first
    connection.close()


@pytest.mark.parametrize("text", [f"bytes={SIZE}-", "bytes=5-4", "bytes=-5", "bytes=0-1,5-6", "lines=0-1", "bytes=a-b"])
def test_a_range_that_is_none_is_refused(served, text):
    response, content = get(served, target_of(served), Range=text)
    assert (response.status, content) == (416, b"")


def test_an_expired_a_forged_and_a_foreign_path_get_the_same_answer_and_no_byte(served, clock):
    target = target_of(served)
    forged = target[:-1] + ("0" if target[-1] != "0" else "1")
    for wrong in (forged, target.replace("agent=a", "agent=b"), target.replace(DIGEST, "b" * 64), "/", "/blobs/"):
        response, content = get(served, wrong)
        assert (response.status, content) == (403, b""), wrong
    clock.now += 601
    response, content = get(served, target)
    assert (response.status, content) == (403, b"")
    assert served.take_fetched() == {}
    assert served.describe().refused_requests == 6


def test_a_blob_is_served_while_it_is_on_offer(served):
    target = target_of(served)
    served.withdrawn(DIGEST)
    assert served.urls("a", DIGEST) == ()
    (response, _) = ask_after_withdrawal(served, target)
    assert response.startswith(b"HTTP/1.1 404 ")


def ask_after_withdrawal(served, target):
    address = urlsplit(served.describe().where)
    answer = ask((address.hostname, address.port), f"GET {target} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
    return answer, target


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST {} HTTP/1.1\r\n\r\n",
        b"GET {} HTTP/1.0\r\n\r\n",
        b"GET {} HTTP/1.1\r\nContent-Length: 5\r\n\r\n",
        b"GET {} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET {} HTTP/1.1\r\nRange: bytes=0-1\r\nRange: bytes=2-3\r\n\r\n",
        b"GET {} HTTP/1.1\r\nno header\r\n\r\n",
        b"GET {} HTTP/1.1\r\nA: b\r\n folded\r\n\r\n",
        b"GET {} HTTP/1.1\nA: b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET {} HTTP/1.1\r\nA: " + b"x" * HEAD_BYTES,
        b"GET {} HTTP/1.1\r\n\r\nGET {} HTTP/1.1\r\n\r\n ",
    ],
    ids=["post", "1.0", "body", "chunked", "twice", "no header", "folded", "line feed", "tls", "long", "two at once"],
)
def test_what_is_no_plain_request_ends_the_connection(served, request_bytes):
    filled = request_bytes.replace(b"{}", target_of(served).encode())
    answer = raw(served, filled[:HEAD_BYTES])  # what is not read would reset the connection
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"\r\nConnection: close\r\n" in answer
    assert served.take_fetched() == {}


def test_a_request_that_does_not_come_in_time_is_left(monkeypatch, served):
    monkeypatch.setattr(endpoint_module, "HEAD_S", 0.05)
    assert raw(served, b"GET / HTTP/1.1\r\n") == b""


def test_strangers_of_one_address_take_few_places(monkeypatch, served):
    monkeypatch.setattr(endpoint_module, "STRANGERS_OF_ONE", 0)
    address = (parts(served).hostname, parts(served).port)
    try:
        answer = ask(address, b"GET / HTTP/1.1\r\n\r\n")
    except ConnectionError:
        answer = b""
    assert answer == b""


def test_the_log_holds_no_path(served, caplog):
    target = target_of(served)
    proof = re.search("proof=([0-9a-f]+)", target)[1]
    get(served, target.replace("agent=a", "agent=b"))
    assert "blob_refused" in caplog.text
    assert proof not in caplog.text


def test_after_the_end_nothing_listens(clock):
    opened = endpoint(clock=clock)
    opened.offered(BLOB)
    found = parts(opened)
    opened.close()
    assert opened.urls("a", DIGEST) == ()
    with pytest.raises(OSError, match="refused"):
        ask((found.hostname, found.port), b"")
