"""Blobs in a store of others: an S3-compatible one with presigned URLs, or a folder that a web server serves.

A thread puts each blob there under its SHA-256 while agents that have asked wait for its URL, and removes it when it
is withdrawn. A store that refuses costs that blob its URL: it goes in chunks over MQTT, the log and ``status`` say why,
and the next blob is tried again.

What a killed coordinator, or a store that did not answer, has left there is removed by this rule: the `ledger` says
that it is ours, it is not on offer, and all URLs for it have ended, which takes ``valid_s`` after the start.
"""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from edge_agent.core.errors import MissingCapability, UsageError, cause
from edge_agent.core.formats import printable
from edge_agent.core.storage import write_atomic
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.fields import BlobRef

from ..fleet.blob_urls import BlobSite
from ..fleet.upload_urls import UploadUrls
from .ledger import StoreLedger
from .store_thread import StoreThread

log = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""The bytes of one part of a blob on its way to the store; S3 takes no fewer than 5 MiB."""

CONNECT_S = 5
"""The seconds that a connection to the store may take."""

ANSWER_S = 30
"""The seconds that the store may be silent."""

PATIENCE_S = 15.0
"""The seconds that agents wait for a blob on its way into the store, beside those that its bytes take."""

LEAST_RATE = 1e6
"""The bytes per second that a store takes at least: agents wait no longer, and get chunks."""

PROBE = b"headwater"
"""The content of the file by which a store is tried."""


class RemoteStore(Protocol):
    """Where files are put, and how agents reach them. Its functions may take long, and raise whatever they like."""

    where: str
    """What it is, for people."""

    def put(self, name: str, data: memoryview) -> None:
        """Write a file; it is complete when this returns."""

    def remove(self, name: str) -> None:
        """Remove a file that may not be there."""

    def url(self, name: str) -> str:
        """Return the URL by which an agent can fetch the file now; it must not wait for anything."""


class UploadStore(RemoteStore, Protocol):
    """A store to which agents can put files, too."""

    def put_url(self, name: str, ref: BlobRef) -> str:
        """Return the URL by which an agent can put a blob there now: no other content, and no other size."""

    def size_of(self, name: str) -> int | None:
        """Return the bytes of a file; None where there is none."""

    def read(self, name: str, first: int, end: int) -> bytes:
        """Return the bytes ``first..end`` of a file."""


class ServedFolder:
    """A folder of this machine, or one that is mounted, which a web server serves.

    Its URLs have no end: who knows the SHA-256 of a blob can fetch it while it is on offer.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.where = str(folder)
        self._folder = folder
        self._url = url.rstrip("/")

    def put(self, name: str, data: memoryview) -> None:
        """Write a file, complete under its name or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / name
        write_atomic(path, data)
        path.chmod(0o644)  # the web server is another user

    def remove(self, name: str) -> None:
        """Remove a file that may not be there."""
        (self._folder / name).unlink(missing_ok=True)

    def url(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self._url}/{name}"


class Bucket:
    """A bucket of an S3-compatible store, through fsspec; its URLs are presigned and end."""

    def __init__(self, address: str, endpoint: str | None, valid_s: float) -> None:
        """Connect to nothing yet.

        Args:
            address: The bucket and the prefix of names in it, as ``s3://BUCKET/PREFIX``.
            endpoint: The URL of a store that is not Amazon's; None: it is.
            valid_s: How long a URL holds.

        Raises:
            MissingCapability: The extra 's3' is not installed.
            UsageError: fsspec knows no such protocol.
        """
        try:
            import fsspec
            import s3fs  # noqa: F401 - fsspec imports it by name; its absence is to be said here
        except ImportError as error:
            raise MissingCapability.package("s3fs", "s3", f"[blobs] store = '{address}'") from error
        self.where = address
        self._valid_s = valid_s
        limits = {"connect_timeout": CONNECT_S, "read_timeout": ANSWER_S, "retries": {"max_attempts": 2}}
        options: dict[str, Any] = {"config_kwargs": {"signature_version": "s3v4", **limits}}
        if endpoint is not None:
            options["endpoint_url"] = endpoint
        try:
            # Listings are never asked for, and a cached one would hide what others have changed.
            self._files, self._root = fsspec.core.url_to_fs(address, use_listings_cache=False, **options)
        except ValueError as error:
            raise UsageError(
                f"[blobs] store = '{address}': {cause(error)}; expected s3://BUCKET/PREFIX, or a folder"
            ) from error

    def put(self, name: str, data: memoryview) -> None:
        """Write a file in parts, complete under its name or not at all."""
        with self._files.open(self._path(name), "wb", block_size=PART_BYTES) as file:
            for position in range(0, len(data), PART_BYTES):
                file.write(data[position : position + PART_BYTES])

    def remove(self, name: str) -> None:
        """Remove a file that may not be there: the store says nothing of one that is not."""
        self._files.rm_file(self._path(name))

    def url(self, name: str) -> str:
        """Return a presigned URL of a file, which is made without asking the store."""
        url: str = self._files.sign(self._path(name), expiration=int(self._valid_s))
        return url

    def put_url(self, name: str, ref: BlobRef) -> str:
        """Return a presigned URL for a PUT, whose signature is over the size and the SHA-256, too."""
        checksum = base64.b64encode(bytes.fromhex(ref.digest)).decode()
        url: str = self._files.sign(
            self._path(name),
            expiration=int(self._valid_s),
            client_method="put_object",
            ContentLength=ref.size_bytes,
            ChecksumSHA256=checksum,
        )
        return url

    def size_of(self, name: str) -> int | None:
        """Return the bytes of a file; None where there is none."""
        try:
            return int(self._files.info(self._path(name), refresh=True)["size"])
        except FileNotFoundError:
            return None

    def read(self, name: str, first: int, end: int) -> bytes:
        """Return the bytes ``first..end`` of a file."""
        data: bytes = self._files.cat_file(self._path(name), start=first, end=end)
        return data

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def try_store(store: RemoteStore) -> str:
    """Write and remove a small file, and return where; for 'headwater doctor' and for the log of a start.

    Raises:
        UsageError: The store refuses, or does not answer.
    """
    name = f"headwater-probe-{secrets.token_hex(8)}"
    try:
        store.put(name, memoryview(PROBE))
        store.url(name)
        if isinstance(store, Bucket):  # updates are collected from there
            store.size_of(name)
        store.remove(name)
    except Exception as error:
        raise UsageError(
            f"[blobs] store = '{store.where}' cannot be written ({reason_of_store(error)}); give this program the "
            "rights to put, get and delete files there, of a bucket by the keys in AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY. Until then blobs go over MQTT"
        ) from error
    return f"{store.where} can be written"


def reason_of_store(error: BaseException) -> str:
    """Return why a store failed, in one line: libraries of stores put pages into their errors."""
    return printable(cause(error))[:300]


class _Step(Enum):
    """How far a blob is on its way into the store."""

    UNDER_WAY = "under way"
    THERE = "there"
    FAILED = "failed"


class StoredBlobs:
    """Puts blobs on offer into a store, and gives agents its URLs."""

    def __init__(
        self,
        store: RemoteStore,
        above_bytes: int,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        ledger: StoreLedger,
        valid_s: float,
        uploads: UploadUrls | None = None,
    ) -> None:
        """Put nothing yet.

        Args:
            store: The store.
            above_bytes: Blobs of more bytes are put there.
            wake: Called in another thread when a blob is there, or could not be put.
            clock: The time in seconds, which only goes forward.
            ledger: Notes what is in the store.
            valid_s: How long a URL holds.
            uploads: Where agents put updates; None: they go over MQTT.
        """
        self.above_bytes = above_bytes
        self.uploads = uploads

        self._store = store
        self._wake = wake
        self._clock = clock
        self._ledger = ledger
        self._steps: dict[str, _Step] = {}
        self._awaited_until: dict[str, float] = {}
        """Blob on its way -> when agents stop waiting for it."""

        self._fetched = Counter[str]()
        self._problem = ""
        self._thread = StoreThread("blob-store", self._sweep, valid_s, clock)
        self._is_closed = False

    def start(self) -> None:
        """Start the thread, and try the store: one without rights is in the log before a run needs it."""
        self._thread.do(self._try)
        self._thread.start()

    def offered(self, blob: Outgoing) -> None:
        """Begin to put a blob into the store."""
        if not self._is_closed:
            self._steps[blob.ref.digest] = _Step.UNDER_WAY
            takes_s = PATIENCE_S + blob.ref.size_bytes / LEAST_RATE
            self._awaited_until[blob.ref.digest] = self._clock() + takes_s
            self._thread.do(partial(self._put, blob))

    def withdrawn(self, digest: str) -> None:
        """Remove a blob from the store, if it was put there."""
        step = self._steps.pop(digest, None)
        self._awaited_until.pop(digest, None)
        if step not in {None, _Step.FAILED} and not self._is_closed:
            self._thread.do(partial(self._remove, digest))

    def urls(self, agent: str, digest: str) -> tuple[str, ...] | None:  # noqa: ARG002 - a store knows no agents
        """Return the URL of a blob, for whatever agent; None while it is on its way into the store, not for ever."""
        step = self._steps.get(digest, _Step.FAILED)
        if step is _Step.UNDER_WAY:
            is_late = self._clock() >= self._awaited_until.get(digest, 0.0)
            return () if is_late else None
        if step is _Step.FAILED:
            return ()
        try:
            return (self._store.url(digest),)
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the blob goes in chunks
            self._fail(f"no URL can be made ({reason_of_store(error)})")
            return ()

    def arrived(self, agent: str, ref: BlobRef) -> None:
        """Count a blob that an agent has fetched: the store does not say what it sends."""
        self._fetched[agent] += ref.size_bytes

    def take_fetched(self) -> dict[str, int]:
        """Return the bytes that agents have fetched since the last call."""
        fetched = dict(self._fetched)
        self._fetched.clear()
        return fetched

    def describe(self) -> BlobSite:
        """Return where the store is, and why it could not be used last."""
        return BlobSite("store", self._store.where, takes_updates=self.uploads is not None, problem=self._problem)

    def close(self) -> None:
        """Put nothing more, and remove what is there; what takes too long is removed after the next start."""
        if self._is_closed:
            return
        if self.uploads is not None:
            self.uploads.close()
        for digest in list(self._steps):
            self.withdrawn(digest)
        self._is_closed = True
        self._thread.close()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Remove what is in the store, is ours and is not on offer: a killed process or a failure has left it there."""
        for digest in sorted(self._ledger.names()):
            self._remove(digest)

    def _try(self) -> None:
        try:
            log.info("blob_store store=%s", try_store(self._store))
        except UsageError as error:
            self._fail(str(error))

    def _put(self, blob: Outgoing) -> None:
        """Put a blob into the store, unless it was withdrawn meanwhile."""
        digest = blob.ref.digest
        if digest not in self._steps:
            return
        try:
            self._ledger.add([digest])
            self._store.put(digest, blob.data)
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the blob goes in chunks
            self._fail(f"blob {digest[:12]} cannot be put there ({reason_of_store(error)})")
            step = _Step.FAILED
        else:
            self._problem = ""
            step = _Step.THERE
            log.info("blob_stored digest=%s bytes=%d store=%s", digest[:12], blob.ref.size_bytes, self._store.where)
        if digest in self._steps:
            self._steps[digest] = step
        self._wake()

    def _remove(self, digest: str) -> None:
        """Remove a blob from the store, unless it is on offer again."""
        if digest in self._steps:
            return
        try:
            self._store.remove(digest)
            self._ledger.discard(digest)
        except Exception as error:  # noqa: BLE001 - it is tried again by the next sweep
            reason = reason_of_store(error)
            log.warning("blob_not_removed digest=%s store=%s reason=%s", digest[:12], self._store.where, reason)

    def _fail(self, problem: str) -> None:
        """Note why the store could not be used; blobs go over MQTT."""
        self._problem = problem
        log.warning("blob_store_failed store=%s reason=%s; blobs go over MQTT", self._store.where, problem)
