"""Blobs laid where whoever computes can take them: what many clients begin with lies there once, whoever comes when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from edge_agent.wire.chunks import Outgoing

from .base import Work

Place = TypeVar("Place")


class Shelf(Generic[Place]):
    """Digest -> where ``lay`` has put that blob; a place that is let go of is free."""

    def __init__(self, lay: Callable[[Outgoing], Place]) -> None:
        self._lay = lay
        self.places: dict[str, Place] = {}
        self._needed = Counter[str]()

    def expect(self, work: Work) -> None:
        """This work is going to need its blobs."""
        self._needed.update(blob.ref.digest for blob in work.blobs)

    def take(self, work: Work) -> list[Place]:
        """Where the work's blobs lie. Those that nobody needs any more make room for those that are new."""
        new = [blob for blob in work.blobs if blob.ref.digest not in self.places]
        if new:
            self.places = {digest: place for digest, place in self.places.items() if self._needed[digest]}
        self.places.update({blob.ref.digest: self._lay(blob) for blob in new})
        return [self.places[blob.ref.digest] for blob in work.blobs]

    def forget(self, work: Work) -> None:
        """This work is done."""
        self._needed.subtract(blob.ref.digest for blob in work.blobs)
        self._needed = +self._needed

    def close(self) -> None:
        """Let go of everything."""
        self.places.clear()
