"""Updates that agents send by HTTP to the coordinator's own endpoint: resumed, checked, and counted once."""

from __future__ import annotations

import contextlib
import http.client
import socket
from urllib.parse import urlsplit

import pytest
from blob_site import ask
from upload_site import TENSORS, CutProxy, UploadSite, endpoint_for, through

from coordinator.blobs import endpoint as endpoint_module
from coordinator.blobs import inflow as inflow_module
from coordinator.fleet.upload_urls import ExpectedUpload
from edge_agent.wire.blobs import put_by_http
from edge_agent.wire.blobs.chunks import CHUNK_BYTES
from edge_agent.wire.messages import up
from edge_agent.wire.messages.fields import BlobRef

SIZE = TENSORS["w"].nbytes


@pytest.fixture
def opened(tmp_path):
    """Returns a function that opens a site whose updates go to an endpoint; all is closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            of_endpoint = {name: options.pop(name) for name in ("above_bytes", "valid_s") if name in options}

            def start(site):
                endpoint = endpoint_for(site, **of_endpoint)
                stack.callback(endpoint.close)
                site.endpoint = endpoint
                return endpoint.uploads

            site = UploadSite(tmp_path, start, **options)
            stack.callback(site.close)
            return site

        yield make


def manifests(site):
    return [message for _, message in site.said if isinstance(message, up.UpdateManifest)]


def proxied(site, *cuts):
    """Have the site's URLs lead through a proxy that cuts connections after so many bytes."""
    address = urlsplit(site.endpoint.describe().where)
    proxy = CutProxy((address.hostname, address.port), list(cuts))
    site.change = lambda _, message: through(message, proxy.port)
    return proxy


def put(url, content, **headers):
    """Status of the answer to a PUT."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("PUT", f"{parts.path}?{parts.query}", body=content, headers=headers)
        return connection.getresponse().status


def test_a_large_update_goes_by_http_once_and_counts_once(opened):
    site = opened()
    manifest = site.train("a")
    site.until_receipts()
    assert site.entries == ["a"]
    assert site.mqtt_bytes == 0
    assert site.collector.http_bytes == manifest.blob.size_bytes
    assert site.collector.bytes_from == {"a": manifest.blob.size_bytes}
    assert site.uploads["a"].ways.http_bytes == manifest.blob.size_bytes
    assert not site.outboxes["a"].note.exists(), "the receipt has removed it"


def test_a_small_update_goes_in_chunks(opened):
    small = opened(above_bytes=10 * SIZE)
    small.train("a")
    small.until_receipts()
    assert (small.addresses(), small.collector.http_bytes) == ([], 0)


def test_an_agent_that_does_not_say_that_it_sends_by_http_gets_no_urls(opened):
    site = opened(by_http=False)
    site.train("a")
    site.until_receipts()
    assert (site.addresses(), site.collector.http_bytes) == ([], 0)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"hosts": ("elsewhere",)}, "none of [uploads] hosts"),
        ({"needs_tls": True}, "the URL is without TLS"),
    ],
)
def test_an_update_goes_only_where_the_device_lets_it(opened, caplog, options, problem):
    site = opened(**options)
    site.train("a")
    site.until_receipts()
    assert site.collector.http_bytes == 0
    assert problem in caplog.text
    assert [message.way for message in manifests(site)] == ["", "chunks"]


def test_a_cut_upload_goes_on_where_it_was_and_sends_little_again(opened):
    site = opened()
    proxy = proxied(site, 400_000, 300_000)
    manifest = site.train("a")
    site.until_receipts()
    proxy.close()
    assert site.entries == ["a"]
    assert site.mqtt_bytes == 0
    missing = [sum(stop - start for start, stop in message.missing) for message in site.addresses()]
    assert len(missing) == 3
    assert missing[0] > missing[1] > missing[2]
    again_bytes = site.collector.http_bytes - manifest.blob.size_bytes
    assert 0 <= again_bytes <= 2 * inflow_module.PART_BYTES, "at most what was taken while the rest was asked for"


def test_attempts_that_bring_nothing_end_in_chunks(opened):
    site = opened()
    proxy = proxied(site, 5000, 5000, 5000)
    site.train("a")
    site.until_receipts()
    proxy.close()
    assert site.entries == ["a"]
    assert [message.way for message in manifests(site)] == ["", "", "", "chunks"]
    assert len(site.addresses()) == 3, "the third answer names no fewer missing chunks than the first"
    assert site.mqtt_bytes > SIZE


def test_a_server_that_stands_still_costs_two_attempts(opened, monkeypatch):
    """It takes a connection, and reads and answers nothing."""
    monkeypatch.setattr(put_by_http, "SLICE_S", 0.3)
    monkeypatch.setattr(put_by_http, "LEAST_RATE", 1e9)
    site = opened()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        site.change = lambda _, message: through(message, listener.getsockname()[1])
        site.train("a")
        site.until_receipts()
    assert site.entries == ["a"]
    assert site.collector.http_bytes == 0
    assert manifests(site)[-1].way == "chunks"
    assert len(site.addresses()) == 3, "the third one is not used"


def test_after_a_restart_of_the_coordinator_the_rest_alone_is_sent(opened):
    site = opened()
    proxy = proxied(site, 500_000, *[0] * 8)
    manifest = site.train("a")
    site.until(lambda: len(site.addresses()) == 2)
    before = site.collector.http_bytes
    assert 0 < before < SIZE
    site.collector.pause()
    site.endpoint.close()
    proxy.close()
    site.change = lambda _, message: message
    site.start_coordinator()
    site.uploads["a"].cut()
    site.uploads["a"].offer_again()
    site.until_receipts()
    assert 0 <= before + site.collector.http_bytes - manifest.blob.size_bytes <= 2 * inflow_module.PART_BYTES
    assert site.entries == ["a"]


def test_after_a_restart_of_the_agent_the_rest_alone_is_sent(opened):
    site = opened()
    proxy = proxied(site, 500_000, *[0] * 8)
    manifest = site.train("a")
    site.until(lambda: len(site.addresses()) == 2)
    proxy.close()
    site.change = lambda _, message: message
    site.uploads["a"].pause()
    site.start_agent("a")
    site.now += 2.0
    site.uploads["a"].offer_again()
    site.until_receipts()
    assert site.collector.http_bytes - manifest.blob.size_bytes <= 2 * inflow_module.PART_BYTES
    assert site.entries == ["a"]


def test_what_was_begun_by_http_ends_in_chunks_and_the_other_way_round(opened):
    site = opened()
    proxy = proxied(site, 500_000, *[0] * 8)
    site.train("a")
    site.until_receipts()
    proxy.close()
    assert site.entries == ["a"]
    assert 0 < site.collector.http_bytes < SIZE
    assert site.mqtt_bytes < SIZE, "what had come by HTTP does not come again"


def test_updates_of_several_agents_come_at_once(opened):
    site = opened(agents=("a", "b", "c"))
    for value, agent in enumerate(site.agents):
        site.train(agent, float(value))
    site.until_receipts(3)
    assert sorted(site.entries) == ["a", "b", "c"]
    assert site.mqtt_bytes == 0


def test_an_update_that_was_changed_on_the_way_is_sent_again_in_chunks(opened):
    site = opened()
    manifest = site.train("a")
    site.change = lambda _, message: held.append(message) or message.model_copy(update={"urls": ("http://x.invalid/",)})
    held = []
    site.until(lambda: bool(held))
    site._waiting.clear()
    assert put(held[0].urls[0], bytes(manifest.blob.size_bytes)) == 200
    site.until_receipts()
    assert site.entries == ["a"]
    assert site.mqtt_bytes > SIZE


class _Url:
    """An update of agent ``a`` that is expected, and the URL for it, which nobody has used yet."""

    def __init__(self, site):
        self.site = site
        self.manifest = site.train("a")
        site.change = lambda _, message: held.append(message) or message
        held = []
        while not held:
            waiting, site._waiting = site._waiting, []
            for hand_over in waiting:
                hand_over()
        site._waiting.clear()
        (self.url,) = held[0].urls
        self.content = site.outboxes["a"].path_of(self.manifest.blob.digest).read_bytes()


@pytest.fixture
def url(opened):
    return _Url(opened(agents=("a", "b")))


def refused(url, target, content=b"x" * 100, **headers):
    """Status of a refusal that comes before the body is read: the body is not even sent."""
    parts = urlsplit(url.url)
    head = f"PUT {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    answer = ask((parts.hostname, parts.port), head.encode() + b"\r\n")
    assert b"Connection: close" in answer, answer
    return int(answer.split()[1])


def test_a_changed_an_expired_and_a_foreign_path_get_the_same_answer_before_a_byte_is_read(url):
    parts = urlsplit(url.url)
    target = f"{parts.path}?{parts.query}"
    size = url.manifest.blob.size_bytes
    changes = [
        target.replace("agent=a", "agent=b"),
        target.replace(f"size={size}", f"size={size + 1}"),
        target.replace("round=1", "round=2"),
        target.replace(url.manifest.blob.digest, "b" * 64),
        target.replace("run=", "run=x"),
        target[:-1] + ("0" if target[-1] != "0" else "1"),
        target.replace("/uploads/", "/blobs/"),
        "/uploads/",
    ]
    for changed in changes:
        assert changed != target
        assert refused(url, changed) == 403, changed
    url.site.now += 601
    assert refused(url, target) == 403
    assert url.site.endpoint.describe().refused_requests == len(changes) + 1
    assert list(url.site.collector._site.take_arrived()) == []


def test_the_path_of_a_download_takes_no_upload_and_that_of_an_upload_gives_none(url):
    path = url.site.endpoint._signer.path("a", url.manifest.blob.digest)
    assert refused(url, path) == 403
    parts = urlsplit(url.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", f"{parts.path}?{parts.query}")
        assert connection.getresponse().status == 403


@pytest.mark.parametrize(
    "content_range",
    [
        "bytes 0-99/200",
        "bytes 1-100/{size}",
        f"bytes {CHUNK_BYTES}-{CHUNK_BYTES + 98}/{{size}}",
        "bytes 5-4/{size}",
        "lines 0-99/{size}",
        "bytes 0-99/*",
        "bytes 999999999-1000000098/{size}",
        "",
    ],
)
def test_a_range_that_does_not_fit_is_refused_before_a_byte_is_read(url, content_range):
    parts = urlsplit(url.url)
    headers = {}
    if content_range:
        headers["Content-Range"] = content_range.format(size=url.manifest.blob.size_bytes)
    assert refused(url, f"{parts.path}?{parts.query}", **headers) == 416
    assert list(url.site.collector._site.take_arrived()) == []


@pytest.mark.parametrize(
    "headers", ["", "Content-Length: 0\r\n", "Content-Length: -1\r\n", "Transfer-Encoding: chunked\r\n"]
)
def test_a_body_without_a_length_is_refused(url, headers):
    parts = urlsplit(url.url)
    request = f"PUT {parts.path}?{parts.query} HTTP/1.1\r\n{headers}\r\n".encode()
    assert ask((parts.hostname, parts.port), request).startswith(b"HTTP/1.1 400 ")


def test_curl_style_expectations_are_answered(url):
    parts = urlsplit(url.url)
    size = url.manifest.blob.size_bytes
    head = f"PUT {parts.path}?{parts.query} HTTP/1.1\r\nContent-Length: {size}\r\nExpect: 100-continue\r\n\r\n"
    with contextlib.closing(http.client.socket.create_connection((parts.hostname, parts.port), 10)) as sock:
        sock.sendall(head.encode())
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(url.content)
        url.site.until_receipts()
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
    assert url.site.entries == ["a"]


def test_once_the_round_is_closed_its_urls_take_nothing(url):
    parts = urlsplit(url.url)
    url.site.collector.close()
    assert refused(url, f"{parts.path}?{parts.query}", b"x" * url.manifest.blob.size_bytes) == 404


def test_a_url_that_is_used_twice_counts_once(url):
    assert put(url.url, url.content) == 200
    url.site.until_receipts()
    parts = urlsplit(url.url)
    assert refused(url, f"{parts.path}?{parts.query}", url.content) == 404
    assert url.site.entries == ["a"]


def test_a_sender_that_trickles_is_left(url, monkeypatch):
    monkeypatch.setattr(endpoint_module, "SLICE_S", 0.05)
    parts = urlsplit(url.url)
    size = url.manifest.blob.size_bytes
    head = f"PUT {parts.path}?{parts.query} HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode()
    assert ask((parts.hostname, parts.port), head + b"x" * 100) == b""


def test_what_waits_for_the_loop_is_bounded(url, monkeypatch):
    """A loop that takes nothing makes its senders wait; what it does not expect any more ends them."""
    monkeypatch.setattr(inflow_module, "LOOK_S", 0.01)
    inflow = url.site.endpoint._inflow
    expected = inflow.expected_of("a")
    taken = 0
    part = inflow_module.ArrivedPart(expected, inflow_module.frame_of(expected.ref, 0, url.content[:CHUNK_BYTES]))
    for _ in range(inflow_module.MOST_PARTS):
        inflow.hand_over(part)
        taken += 1
    inflow.release("a")
    with pytest.raises(inflow_module.ChunkError, match="not expected"):
        inflow.hand_over(part)
    assert len(list(inflow.take_arrived())) == taken


def test_parts_are_whole_chunks():
    for chunk_bytes in (64, 1000, CHUNK_BYTES, inflow_module.PART_BYTES):
        ref = BlobRef(digest="a" * 64, size_bytes=1 << 22, chunk_bytes=chunk_bytes)
        assert inflow_module.fits(ref)
        assert inflow_module.part_bytes(ref) % chunk_bytes == 0
        assert 0 < inflow_module.part_bytes(ref) <= inflow_module.PART_BYTES


def test_an_update_in_large_chunks_gets_no_url(url):
    """Its agent would choose how much memory each of its requests takes."""
    ref = url.manifest.blob.model_copy(update={"chunk_bytes": 1 << 20})
    assert url.site.site.expect(ExpectedUpload("a", url.site.run, 1, ref)) is None


def test_to_an_aggregator_which_gives_no_urls_an_update_is_announced_without_a_way(opened):
    site = opened()
    manifest = site.train("a")
    site.uploads["a"]._attempts.way = "chunks"
    said = []
    site.uploads["a"]._link.send = lambda message, partition: said.append((message, partition))
    site.uploads["a"].offer_to("1-of-2")
    assert said == [(manifest, "1-of-2")]
