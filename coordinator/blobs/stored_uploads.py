"""Updates that agents put into an S3-compatible store, from where the coordinator collects them.

An agent gets a presigned URL for one PUT: of its own name in the store, of the size and the SHA-256 that it has
announced, all of which the signature covers. When it says that the update is there, a thread compares the size, reads
the update in parts and hands these to the loop, as the endpoint does, so that the same checks follow. It is removed
from the store once it is here. Of a store that refuses, or does not have it, the loop hears so, and asks for chunks.

An agent may use its URL until that ends, also when its update is not needed any more, and a request that has begun then
goes on. So a name is kept in mind, and removed again, until twice the life of its URL has passed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial

from edge_agent.core.errors import ChunkError

from ..fleet.upload_urls import ArrivedPart, ExpectedUpload, UploadAddress
from .inflow import Inflow, fits, frame_of, part_bytes
from .ledger import StoreLedger
from .object_store import UploadStore, reason_of_store
from .store_thread import StoreThread

log = logging.getLogger(__name__)

PREFIX = "update-"
"""The beginning of the names of updates in the store."""

ENDING = "-" + 64 * "f"
"""As many characters as follow the agent in such a name."""

READ_BYTES = 8 << 20
"""About so many bytes of an update are read from the store at once."""


def name_of(upload: ExpectedUpload) -> str:
    """Return the name of an agent's update in the store: nobody else gets a URL of it."""
    return f"{PREFIX}{upload.agent}-{upload.ref.digest}"


class StoredUploads:
    """Gives agents URLs of a store for their updates, and collects these."""

    def __init__(
        self,
        store: UploadStore,
        above_bytes: int,
        inflow: Inflow,
        ledger: StoreLedger,
        valid_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Expect nothing yet.

        Args:
            store: The store.
            above_bytes: Updates of more bytes have URLs.
            inflow: What is expected, and what has come of it.
            ledger: Notes what is in the store.
            valid_s: How long a URL holds.
            clock: The time in seconds, which only goes forward.
        """
        self.above_bytes = above_bytes
        self._store = store
        self._inflow = inflow
        self._ledger = ledger
        self._clock = clock
        self._valid_s = valid_s
        self._started_at = clock()
        self._given_at: dict[str, float] = {}
        """Name -> when its last URL was made by this process; that of an earlier one counts as made at the start."""

        self._collecting: set[str] = set()
        """Names of updates that are being collected."""

        self._thread = StoreThread("update-store", self._sweep, valid_s, clock)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # --- the contract -------------------------------------------------------------------------------------------------

    def expect(self, upload: ExpectedUpload) -> UploadAddress | None:
        """Return the URL for an update; None where it cannot be made or noted."""
        if not fits(upload.ref):
            return None
        name = name_of(upload)
        try:
            self._ledger.add([name])
            self._given_at[name] = self._clock()
            url = self._store.put_url(name, upload.ref)
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the update goes in chunks
            log.warning("upload_url_failed store=%s reason=%s", self._store.where, reason_of_store(error))
            return None
        self._inflow.expect(upload)
        return UploadAddress((url,), whole=True)

    def collect(self, upload: ExpectedUpload) -> bool:
        """Begin to collect an update, unless that goes on already; return whether it is one that may be there."""
        if not fits(upload.ref):
            return False
        name = name_of(upload)
        self._inflow.expect(upload)
        if name not in self._collecting:
            self._collecting.add(name)
            self._thread.do(partial(self._collect, upload))
        return True

    def release(self, agent: str) -> None:
        """Expect nothing of an agent any more, and remove what it has put."""
        upload = self._inflow.release(agent)
        if upload is not None:
            self._thread.do(partial(self._remove, name_of(upload)))

    def keep_only(self, agents: Collection[str]) -> None:
        """Expect nothing of others than these for now; what they have put stays while it may be collected."""
        for agent in self._inflow.others_than(agents):
            self._inflow.release(agent)

    def take_arrived(self) -> Iterator[ArrivedPart]:
        """Yield what has arrived."""
        return self._inflow.take_arrived()

    def close(self) -> None:
        """Collect nothing more; what agents have put stays for the next start, which agents tell of it."""
        self.keep_only(())
        self._thread.close()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _collect(self, upload: ExpectedUpload) -> None:
        """Read an update from the store and hand it over; say so where that is not possible."""
        name = name_of(upload)
        problem = ""
        try:
            problem = self._read(upload)
        except ChunkError:  # it is not expected any more
            log.debug("update_not_collected name=%s", name)
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the update goes in chunks
            problem = reason_of_store(error)
        finally:
            self._collecting.discard(name)
        if problem:
            log.warning("update_not_collected agent=%s store=%s reason=%s", upload.agent, self._store.where, problem)
            with contextlib.suppress(ChunkError):
                self._inflow.hand_over(ArrivedPart(upload, None, problem))

    def _read(self, upload: ExpectedUpload) -> str:
        """Read an update from the store and hand it over; return what is wrong with it, which is empty if nothing is.

        Raises:
            ChunkError: It is not expected any more.
        """
        name = name_of(upload)
        ref = upload.ref
        # The size is compared before a byte is read.
        size_bytes = self._store.size_of(name)
        if size_bytes is None:
            return "the update is not there"
        if size_bytes != ref.size_bytes:
            return f"the update there has {size_bytes} bytes, expected {ref.size_bytes}"
        part = part_bytes(ref)
        step = READ_BYTES // part * part
        for first in range(0, size_bytes, step):
            end = min(first + step, size_bytes)
            data = self._store.read(name, first, end)
            if len(data) != end - first:
                return f"{len(data)} bytes were read, expected {end - first}"
            for position in range(first, end, part):
                piece = data[position - first : position - first + part]
                self._inflow.hand_over(ArrivedPart(upload, frame_of(ref, position, piece)))
        return ""

    def _sweep(self) -> None:
        """Remove what is in the store, is ours, and is not expected: a killed process or a failure has left it."""
        for name in sorted(self._ledger.names()):
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove an update from the store, unless it is expected (again), and forget it when it cannot come back."""
        agent = name[len(PREFIX) : -len(ENDING)]
        upload = self._inflow.expected_of(agent)
        if upload is not None and name_of(upload) == name:
            return
        may_come_until = self._given_at.get(name, self._started_at) + 2 * self._valid_s
        try:
            self._store.remove(name)
            if self._clock() >= may_come_until:
                self._ledger.discard(name)
                self._given_at.pop(name, None)
        except Exception as error:  # noqa: BLE001 - it is tried again by the next sweep
            log.warning("update_not_removed name=%s reason=%s", name, reason_of_store(error))
