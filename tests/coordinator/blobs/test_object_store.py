"""Blobs in an S3-compatible store, with a real HTTP server of its protocol, and in a folder that is served."""

from __future__ import annotations

import http.client
import secrets
import threading
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from blob_site import NO_PROGRESS_S, Site
from s3_site import use_keys

from coordinator.blobs.ledger import StoreLedger
from coordinator.blobs.object_store import LEAST_RATE, PATIENCE_S, Bucket, ServedFolder, StoredBlobs, try_store
from edge_agent.core.errors import UsageError
from edge_agent.wire.blobs.chunks import Outgoing

BLOB = Outgoing.of(bytes(range(256)) * 4000)
DIGEST = BLOB.ref.digest


@pytest.fixture
def bucket(s3):
    return Bucket(f"s3://models/{secrets.token_hex(4)}", s3.address, 60.0)


@pytest.fixture
def opened(tmp_path):
    """Returns a function that opens a store for blobs; what was opened is closed at the end."""
    stores = []

    def start(store, **options):
        options = {"ledger": StoreLedger(tmp_path / "in-store.txt", store.where), "valid_s": 60.0, **options}
        stored = StoredBlobs(store, 1000, lambda: None, **options)
        stored.start()
        stores.append(stored)
        return stored

    yield start
    for stored in stores:
        stored.close()


def get(url, **headers):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def test_a_blob_is_fetched_from_the_store_by_a_presigned_url_and_removed_at_the_end(bucket, opened, tmp_path):
    stored = opened(bucket)
    site = Site(tmp_path, stored)
    hosts = []
    site.change_urls = lambda urls: hosts.extend(urlsplit(url).netloc for url in urls) or urls
    site.offer(BLOB)
    assert site.until_here(BLOB) == bytes(BLOB.data)
    assert site.chunk_bytes == 0
    site.distributor.pump()
    assert site.distributor.bytes_to == {"a": BLOB.ref.size_bytes}
    assert set(hosts) == {urlsplit(bucket.url(DIGEST)).netloc}
    site.distributor.withdraw([DIGEST])
    stored.close()
    status, _ = get(bucket.url(DIGEST))
    assert status == 404


def test_a_presigned_url_is_of_one_blob_and_has_an_end(bucket, s3):
    bucket.put(DIGEST, BLOB.data)
    status, content = get(bucket.url(DIGEST), Range="bytes=10-19")
    assert (status, content) == (206, bytes(BLOB.data[10:20]))
    parts = urlsplit(bucket.url(DIGEST))
    assert parts.path.endswith(f"/{DIGEST}")
    assert "X-Amz-Expires=60&" in f"{parts.query}&"
    assert "X-Amz-Signature=" in parts.query
    assert "SignedHeaders=host" in parts.query
    assert s3.keys["owner"][1] not in parts.query, "the key's name, and never the key"
    for changed in (
        bucket.url(DIGEST).replace(DIGEST, "b" * 64),
        bucket.url(DIGEST).replace("Expires=60", "Expires=99"),
    ):
        assert get(changed)[0] == 403


def test_a_large_blob_goes_in_parts(bucket):
    large = Outgoing.of(secrets.token_bytes(20 << 20))
    bucket.put(large.ref.digest, large.data)
    status, content = get(bucket.url(large.ref.digest))
    assert (status, content) == (200, bytes(large.data))


def test_doctor_tries_the_store(bucket, s3):
    assert try_store(bucket).endswith("can be written")
    with pytest.raises(UsageError, match=r"s3://nobody/x' cannot be written .* over MQTT"):
        try_store(Bucket("s3://nobody/x", s3.address, 60.0))


def test_a_wrong_secret_and_a_user_without_rights_are_refused_and_told(s3, monkeypatch):
    """The server really checks: the same request passes with the owner's keys."""
    address = f"s3://models/{secrets.token_hex(4)}"
    assert try_store(Bucket(address, s3.address, 60.0)).endswith("can be written")
    key, secret = s3.keys["owner"]
    before = s3.names()
    for keys in ((key, secret[::-1]), ("AKIAUNKNOWN", secret), s3.keys["stranger"]):
        use_keys(monkeypatch, *keys)
        with pytest.raises(UsageError, match=r"cannot be written .*; give this program the rights to put, get and"):
            try_store(Bucket(address, s3.address, 60.0))
    assert s3.names() == before


class _NoRights(BaseHTTPRequestHandler):
    """Answers as S3 does where a key has no rights."""

    def _refuse(self):
        body = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.close_connection = True  # the body is not read: its sender waits to hear whether it is welcome
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET = do_POST = do_DELETE = _refuse  # noqa: N815 - names of the standard library

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def serve():
    """Returns a function that serves HTTP on a free port by a handler, and returns the address."""
    servers = []

    def start(handler):
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_without_rights_the_blob_goes_over_mqtt_and_the_status_says_why(s3, serve, opened, tmp_path, caplog):
    stored = opened(Bucket("s3://models/x", serve(_NoRights), 60.0))
    site = Site(tmp_path, stored)
    site.offer(BLOB)
    assert site.until_here(BLOB) == bytes(BLOB.data)
    assert site.downloads.ways.http_bytes == 0
    assert all(not want.by_chunks for want in site.wants()), "the coordinator knew before the agent tried"
    assert "no access" in stored.describe().problem
    assert "blob_store_failed" in caplog.text


class _Slow:
    """A store that takes a blob only when it is told to."""

    where = "slow"

    def __init__(self):
        self.go = threading.Event()
        self.names = []

    def put(self, name, data):
        if bytes(data) != b"headwater":
            assert self.go.wait(NO_PROGRESS_S)
        self.names.append(name)

    def remove(self, name):
        self.names.remove(name)

    def url(self, name):
        return f"http://127.0.0.1:1/{name}"


def test_agents_wait_for_a_blob_that_is_on_its_way_into_the_store(opened, tmp_path):
    slow = _Slow()
    stored = opened(slow)
    site = Site(tmp_path, stored)
    seen = []
    site.change_urls = lambda urls: seen.append(urls) or urls
    site.offer(BLOB)
    for _ in range(20):
        site.now += 0.5
        site.step()
    assert (seen, site.chunk_bytes) == ([], 0)
    assert site.distributor.waiting_for_blobs(["a"]) == 1
    slow.go.set()
    site.until(lambda: bool(seen))
    assert seen == [(f"http://127.0.0.1:1/{DIGEST}",)]


def test_agents_do_not_wait_for_ever_for_a_store_that_does_not_answer(tmp_path):
    slow = _Slow()
    now = [0.0]
    ledger = StoreLedger(tmp_path / "in-store.txt", slow.where)
    stored = StoredBlobs(slow, 1000, lambda: None, lambda: now[0], ledger=ledger, valid_s=600.0)
    stored.start()
    site = Site(tmp_path, stored)
    site.offer(BLOB)
    assert stored.urls("a", DIGEST) is None
    now[0] += PATIENCE_S + BLOB.ref.size_bytes / LEAST_RATE
    assert site.until_here(BLOB) == bytes(BLOB.data)
    assert site.downloads.ways.http_bytes == 0
    slow.go.set()
    stored.close()


def test_a_blob_that_is_withdrawn_on_its_way_is_removed(opened):
    slow = _Slow()
    stored = opened(slow)
    stored.offered(BLOB)
    stored.withdrawn(DIGEST)
    slow.go.set()
    stored.close()
    assert slow.names == []


def test_a_folder_that_a_web_server_serves_will_do(serve, opened, tmp_path):
    folder = tmp_path / "www"

    class Handler(SimpleHTTPRequestHandler):
        """Python's own server of files, which answers no ranges."""

        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *_):
            """Say nothing."""

    stored = opened(ServedFolder(folder, serve(Handler)))
    site = Site(tmp_path, stored)
    site.offer(BLOB)
    assert site.until_here(BLOB) == bytes(BLOB.data)
    assert site.chunk_bytes == 0
    site.distributor.withdraw([DIGEST])
    stored.close()
    assert list(folder.iterdir()) == []
