"""Updates that agents put into an S3-compatible store that checks signatures, and that the coordinator collects."""

from __future__ import annotations

import base64
import contextlib
import http.client
import secrets
import threading
from urllib.parse import urlsplit

import pytest
from blob_site import NO_PROGRESS_S, Site
from s3_site import use_keys
from upload_site import TENSORS, UploadSite

from coordinator.blobs import ledger as ledger_module
from coordinator.blobs import store_thread, stored_uploads
from coordinator.blobs.inflow import Inflow
from coordinator.blobs.ledger import StoreLedger
from coordinator.blobs.object_store import Bucket, ServedFolder, StoredBlobs
from coordinator.blobs.stored_uploads import StoredUploads
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages import up

SIZE = TENSORS["w"].nbytes
FOREIGN = "photo.jpg"


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """The threads look often at whether there is something to remove."""
    monkeypatch.setattr(store_thread, "LOOK_S", 0.02)


class Stores:
    """A prefix of the bucket with a file of somebody else in it, and sites whose updates go there."""

    def __init__(self, s3, folder, stack):
        self.s3 = s3
        s3.refused.clear()
        self.folder = folder
        self.prefix = secrets.token_hex(4)
        self.now = 0.0
        self._stack = stack
        s3.client().put_object(Bucket="models", Key=f"{self.prefix}/{FOREIGN}", Body=b"x")
        s3.client().put_object(Bucket="models", Key=f"{self.prefix}/{'c' * 64}", Body=b"x")

    def bucket(self):
        return Bucket(f"s3://models/{self.prefix}", self.s3.address, 60.0)

    def ledger(self):
        return StoreLedger(self.folder / "updates.txt", f"s3://models/{self.prefix}")

    def open(self, site):
        stored = StoredUploads(self.bucket(), 1000, Inflow(site.woken.set), self.ledger(), 60.0, clock=lambda: self.now)
        stored.start()
        self._stack.callback(stored.close)
        return stored

    def site(self, **options):
        site = UploadSite(self.folder, self.open, **options)
        self._stack.callback(site.close)
        return site

    def names(self):
        """What is there beside the files of others, which never change."""
        names = {name.removeprefix(f"{self.prefix}/") for name in self.s3.names() if name.startswith(self.prefix)}
        assert {FOREIGN, "c" * 64} <= names
        return names - {FOREIGN, "c" * 64}


@pytest.fixture
def stores(s3, tmp_path):
    with contextlib.ExitStack() as stack:
        yield Stores(s3, tmp_path, stack)


def put(url, content, checksum):
    """Status of the answer to a PUT."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    headers = {} if checksum is None else {"x-amz-checksum-sha256": checksum}
    with contextlib.closing(connection):
        connection.request("PUT", f"{parts.path}?{parts.query}", body=content, headers=headers)
        return connection.getresponse().status


def ways(site):
    return [message.way for _, message in site.said if isinstance(message, up.UpdateManifest)]


def test_a_large_update_goes_through_the_store_and_is_removed_there(stores):
    site = stores.site(agents=("a", "b"))
    for value, agent in enumerate(site.agents):
        site.train(agent, float(value))
    site.until_receipts(2)
    assert sorted(site.entries) == ["a", "b"]
    assert site.mqtt_bytes == 0
    assert set(ways(site)) == {"", "stored"}
    assert stores.s3.refused == []
    site.until(lambda: not stores.names())
    stores.now += 121.0
    site.until(lambda: not site.site._ledger.names())
    assert stores.ledger().names() == frozenset(), "also for the next process"


def test_a_presigned_upload_is_of_one_name_one_size_and_one_content(stores, s3):
    site = stores.site()
    manifest = site.train("a")
    content = site.outboxes["a"].path_of(manifest.blob.digest).read_bytes()
    checksum = base64.b64encode(bytes.fromhex(manifest.blob.digest)).decode()
    url = stores.bucket().put_url("update-a", manifest.blob)
    other = base64.b64encode(bytes(32)).decode()
    for wrong in (
        (url.replace("update-a", "update-b"), content, checksum),
        (url.replace("Expires=60", "Expires=6000"), content, checksum),
        (url, content[:-1], checksum),
        (url, content + b"x", checksum),
        (url, bytes(len(content)), checksum),
        (url, bytes(len(content)), other),
        (url, content, None),
        (stores.bucket().url("update-a"), content, None),
    ):
        assert put(*wrong) == 403
    assert stores.names() == set()
    assert put(url, content, checksum) == 200
    assert stores.names() == {"update-a"}


def test_a_store_that_refuses_the_update_costs_two_attempts(stores, s3, monkeypatch):
    site = stores.site()
    key, secret = s3.keys["owner"]
    use_keys(monkeypatch, key, secret[::-1])
    stored = stores.open(site)
    site.collector._site = stored
    site.train("a")
    site.until_receipts()
    assert site.entries == ["a"]
    assert ways(site)[-1] == "chunks"
    assert stores.names() == set()


def test_what_is_not_in_the_store_or_has_another_size_is_sent_in_chunks(stores, s3):
    for case, act in {
        "gone": lambda name: s3.client().delete_object(Bucket="models", Key=name),
        "larger": lambda name: s3.client().put_object(Bucket="models", Key=name, Body=b"x" * (SIZE * 2)),
    }.items():
        site = UploadSite(stores.folder / case, stores.open)
        with contextlib.closing(site):
            manifest = site.train("a")
            name = stored_uploads.name_of(site.collector._expected("a", manifest))
            site.until(lambda site=site: "stored" in ways(site))
            act(f"{stores.prefix}/{name}")
            site.until_receipts()
            assert site.entries == ["a"]
            assert site.mqtt_bytes > SIZE, case
            assert site.collector.http_bytes == 0


def test_after_a_restart_of_the_coordinator_an_update_in_the_store_is_collected(stores):
    site = stores.site()
    site.train("a")
    site.until(lambda: "stored" in ways(site))
    site.collector.pause()
    site.site.close()
    assert len(stores.names()) == 1
    site.start_coordinator()
    site.uploads["a"].cut()
    site.uploads["a"].offer_again()
    site.until_receipts()
    assert site.entries == ["a"]
    assert site.mqtt_bytes == 0
    site.until(lambda: not stores.names())


def test_after_a_restart_of_the_agent_the_update_counts_once(stores):
    site = stores.site()
    site.train("a")
    site.until(lambda: "stored" in ways(site))
    site.start_agent("a")
    site.now += 2.0
    site.uploads["a"].offer_again()
    site.until_receipts()
    assert site.entries == ["a"]
    assert site.mqtt_bytes == 0


def let_it_sweep(stored):
    """Wait until the thread of a store has swept, where a sweep is due."""
    stored._thread.do(lambda: None)  # the thread looks after each thing that it does
    is_done = threading.Event()
    stored._thread.do(is_done.set)
    assert is_done.wait(NO_PROGRESS_S)


def test_an_update_that_nobody_collects_is_removed_when_its_url_has_ended(stores):
    """Its round is closed, or its coordinator was killed; what is expected meanwhile is not removed."""
    site = stores.site()
    site.train("a")
    site.until(lambda: "stored" in ways(site))
    site.collector.pause()
    site.site.close()
    (left,) = stores.names()
    assert stores.ledger().names() == {left}
    site.start_coordinator()
    expected = site.collector._expected("a", site.train("a", 5.0))
    site.site.expect(expected)
    stores.bucket().put(stored_uploads.name_of(expected), memoryview(b"still needed"))
    needed = stored_uploads.name_of(expected)
    for pass_s, remaining in ((59.0, {left, needed}), (2.0, {needed}), (120.0, {needed})):
        stores.now += pass_s
        let_it_sweep(site.site)
        assert stores.names() == remaining


def test_blobs_that_a_killed_coordinator_has_left_are_removed_and_those_on_offer_are_not(stores, tmp_path):
    now = [0.0]
    left = Outgoing.of(b"left" * 1000)
    needed = Outgoing.of(b"needed" * 1000)

    def ledger():
        return StoreLedger(tmp_path / "blobs.txt", "s3")

    def start():
        stored = StoredBlobs(stores.bucket(), 1000, lambda: None, lambda: now[0], ledger=ledger(), valid_s=60.0)
        stored.start()
        return stored

    killed = start()
    site = Site(tmp_path / "site", killed)
    for blob in (left, needed):
        killed.offered(blob)
        site.until(lambda blob=blob: bool(killed.urls("a", blob.ref.digest)))
    killed._thread.close(NO_PROGRESS_S)  # it ends, and removes nothing
    assert stores.names() == {left.ref.digest, needed.ref.digest}
    stored = start()
    stored.offered(needed)
    site.until(lambda: bool(stored.urls("a", needed.ref.digest)))
    now[0] += 59.0
    site.step()
    assert stores.names() == {left.ref.digest, needed.ref.digest}, "URLs of the former process still hold"
    now[0] += 2.0
    site.until(lambda: left.ref.digest not in stores.names())
    assert stores.names() == {needed.ref.digest}
    stored.withdrawn(needed.ref.digest)
    stored.close()
    assert stores.names() == set()
    assert ledger().names() == frozenset()


def test_what_could_not_be_removed_is_removed_later(stores, tmp_path):
    now = [0.0]
    blob = Outgoing.of(b"blob" * 1000)
    store = stores.bucket()
    remove = store.remove

    def fails(_):
        raise PermissionError("no access")

    ledger = StoreLedger(tmp_path / "blobs.txt", "s3")
    stored = StoredBlobs(store, 1000, lambda: None, lambda: now[0], ledger=ledger, valid_s=60.0)
    stored.start()
    site = Site(tmp_path / "site", stored)
    stored.offered(blob)
    site.until(lambda: bool(stored.urls("a", blob.ref.digest)))
    store.remove = fails
    stored.withdrawn(blob.ref.digest)
    has_tried = threading.Event()
    stored._thread.do(has_tried.set)
    assert has_tried.wait(NO_PROGRESS_S)
    assert stores.names() == {blob.ref.digest}
    store.remove = remove
    now[0] += 61.0
    site.until(lambda: not stores.names())
    stored.close()


def test_an_update_that_comes_after_it_was_given_up_is_removed_too(stores):
    """Its URL holds beyond its round, and nobody asks its agent to stop."""
    site = stores.site()
    manifest = site.train("a")
    expected = site.collector._expected("a", manifest)
    (url,) = site.site.expect(expected).urls
    site.site.release("a")
    is_removed = threading.Event()
    site.site._thread.do(is_removed.set)
    assert is_removed.wait(NO_PROGRESS_S)
    content = site.outboxes["a"].path_of(manifest.blob.digest).read_bytes()
    assert put(url, content, base64.b64encode(bytes.fromhex(manifest.blob.digest)).decode()) == 200
    assert len(stores.names()) == 1
    site.uploads["a"].drop_all()
    site._waiting.clear()
    stores.now += 61.0
    site.until(lambda: not stores.names())
    assert len(site.site._ledger.names()) == 1, "another request may still be under way"
    stores.now += 61.0
    site.until(lambda: not site.site._ledger.names())


def test_a_folder_is_cleared_by_the_same_rule(tmp_path):
    folder = tmp_path / "www"
    folder.mkdir()
    (folder / FOREIGN).write_text("x")
    (folder / ("c" * 64)).write_text("x")
    blob = Outgoing.of(b"blob" * 1000)
    (folder / blob.ref.digest).write_bytes(blob.data)
    ledger = StoreLedger(tmp_path / "blobs.txt", str(folder))
    ledger.add([blob.ref.digest])
    now = [0.0]
    store = ServedFolder(folder, "http://h/x")
    stored = StoredBlobs(store, 1000, lambda: None, lambda: now[0], ledger=ledger, valid_s=60.0)
    stored.start()
    site = Site(tmp_path / "site", stored)
    now[0] += 61.0
    site.until(lambda: not ledger.names())
    stored.close()
    assert sorted(path.name for path in folder.iterdir()) == ["c" * 64, FOREIGN]


def test_a_ledger_does_not_grow_with_what_was_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "MOST_LINES", 10)
    path = tmp_path / "in-store.txt"
    ledger = StoreLedger(path, "s3://a/b")
    ledger.add(["stays"])
    for number in range(100):
        ledger.add([f"n{number}"])
        ledger.discard(f"n{number}")
    assert len(path.read_text().splitlines()) < 20
    assert StoreLedger(path, "s3://a/b").names() == {"stays"}


def test_a_ledger_is_read_again_and_a_torn_or_damaged_line_is_left_out(tmp_path):
    path = tmp_path / "in-store.txt"
    ledger = StoreLedger(path, "s3://a/b")
    ledger.add(["x", "y", "z"])
    ledger.discard("y")
    assert StoreLedger(path, "s3://a/b").names() == {"x", "z"}
    with path.open("ab") as file:
        file.write(b"+../../etc\n\xff\xff\n+A B\n-x\n+half-a-na")
    assert StoreLedger(path, "s3://a/b").names() == {"z"}
    assert StoreLedger(path, "s3://other").names() == frozenset(), "of another store nothing is removed"
