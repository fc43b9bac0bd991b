"""Bytes of large blobs by HTTP: of a fleet that needs one, and over a slow link that is cut.

    PYTHONPATH=.:tests/harness:tests/chaos python tests/bench/yardstick_blobs.py

The endpoint and the agents' downloads are those of the product, HTTP is real and goes through the proxy of
``tests/chaos``, which counts every byte of TCP's payload in both directions. Control messages are handed over directly
and counted as they would be encoded.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from blob_site import Site, endpoint
from proxy import Proxy

from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages import codec, down, up

PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class Measured:
    """What was sent for the blobs that arrived.

    Attributes:
        needed: Bytes of all blobs.
        received: Bytes that agents have received: answers, blobs, and control messages.
        sent: Bytes that agents have sent by HTTP.
        cuts: How often the link was cut.
        cpu_s: Seconds of CPU of both sides and the proxy together.
        largest_message: Bytes of the largest control message with URLs.
    """

    needed: int
    received: int
    sent: int
    cuts: int
    cpu_s: float
    largest_message: int

    @property
    def ratio(self) -> float:
        """Received bytes for each that was needed."""
        return self.received / self.needed


class _Through:
    """Changes URLs so that they go through a proxy, and counts the messages that carry them."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.message_bytes = 0
        self.largest = 0

    def __call__(self, urls: tuple[str, ...]) -> tuple[str, ...]:
        size = len(codec.encode(down.Located(digest="0" * 64, urls=urls)))
        self.message_bytes += size
        self.largest = max(self.largest, size)
        return tuple(url.replace(urlsplit(url).netloc, f"127.0.0.1:{self._proxy.port}") for url in urls)


def blob_in(folder: Path, size_bytes: int) -> Outgoing:
    """Return a blob of random bytes, memory-mapped from a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "blob"
    rng = np.random.default_rng(0)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for position in range(0, size_bytes, PIECE_BYTES):
            data = rng.bytes(min(PIECE_BYTES, size_bytes - position))
            digest.update(data)
            file.write(data)
    return Outgoing.open(path, digest.hexdigest())


def measure(folder: Path, *, agents: int, size_bytes: int, rate: float = float("inf"), cuts: int = 0) -> Measured:
    """Bring a blob to so many agents over one link, and return what that took.

    Args:
        folder: An empty folder for the blob and the agents' disks.
        agents: How many agents need the blob.
        size_bytes: The size of the blob.
        rate: Bytes per second of the link.
        cuts: How often the link is cut, at equal distances.
    """
    blob = blob_in(folder, size_bytes)
    served = endpoint()
    target = urlsplit(served.describe().where)
    began = time.process_time()
    with Proxy((target.hostname, target.port)) as proxy:
        proxy.down.rate = rate
        if cuts:
            proxy.down.cut_every = size_bytes // (cuts + 1) + 1
        through = _Through(proxy)
        sites = [Site(folder / f"a{number}", served, agent=f"a{number}") for number in range(agents)]
        for site in sites:
            site.change_urls = through
            site.offer(blob)
        have = up.Have(digest=blob.ref.digest)

        def is_here(site: Site) -> bool:
            """Return whether an agent has the blob, and see to it that no further cut comes."""
            if proxy.down.cuts >= cuts:
                proxy.down.cut_every = 0
            return have in site.said

        # All of them fetch at the same time: each gets a first step, with which its fetch begins.
        for site in sites:
            site.step()
        for site in sites:
            site.until(partial(is_here, site))
        measured = Measured(
            needed=agents * size_bytes,
            received=proxy.down.bytes + through.message_bytes,
            sent=proxy.up.bytes,
            cuts=proxy.down.cuts,
            cpu_s=time.process_time() - began,
            largest_message=through.largest,
        )
    served.close()
    return measured


def main() -> None:
    """Print the figures of a fleet, and of a large blob over a slow link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=150)
    parser.add_argument("--size", type=int, default=500_000, help="bytes of the fleet's blob")
    parser.add_argument("--large", type=int, default=1_000_000_000, help="bytes of the blob over the slow link")
    parser.add_argument("--rate", type=float, default=250_000, help="bytes per second of that link")
    parser.add_argument("--speed", type=float, default=100, help="by how much the link is faster here, to save time")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as folder:
            fleet = measure(Path(folder), agents=options.agents, size_bytes=options.size)
        print(f"{options.agents} agents x {options.size} bytes: {fleet.ratio:.4f} x, {fleet}")
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as folder:
            rate = options.rate * options.speed
            slow = measure(Path(folder), agents=1, size_bytes=options.large, rate=rate, cuts=3)
        print(f"{options.large} bytes, link {options.rate:g} B/s x {options.speed:g}: {slow.ratio:.4f} x, {slow}")


if __name__ == "__main__":
    main()
