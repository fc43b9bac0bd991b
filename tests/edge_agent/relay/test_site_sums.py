"""The sums of a relay without a federation: what is under way, what is lost, and what the next sum gets of the link."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent.core.children import InlineWorker
from edge_agent.relay.sums import AGAIN_S, SiteSums
from edge_agent.wire.blobs.chunks import Outgoing, decode_frame
from edge_agent.wire.messages.site_sums import OpenSite, SendSum, SiteRound, SumReady
from edge_agent.wire.messages.up import UpdateManifest
from edge_agent.wire.tensors import pieces

AGENTS = ("a0", "a1", "a2")
VALUES = 20_000


class Site:
    """A relay's sums, and what they say to the coordinator, by a clock that a test sets."""

    def __init__(self, folder):
        self.folder = folder
        self.now = 0.0
        self.said = []
        self.frames = []
        self.sums = SiteSums(
            folder, self.said.append, self.frames.append, lambda _: True, InlineWorker(), lambda: self.now
        )

    def open(self, number):
        """Open a round, and deliver the updates of all agents, which are then added up."""
        terms = SiteRound(
            run="run-0001", round=number, agents=AGENTS, update={"w": ("<f4", (VALUES,))}, weighting="uniform",
            within_s=60.0,
        )  # fmt: skip
        self.sums.opened(OpenSite(epoch=1, start="s" * 16, number=number, round=terms))
        for place, agent in enumerate(AGENTS):
            values = np.random.default_rng((number, place)).normal(size=VALUES).astype(np.float32)
            update = Outgoing.of(b"".join(map(bytes, pieces({"w": values}, {}))))
            manifest = UpdateManifest(run="run-0001", round=number, blob=update.ref, samples=1)
            assert self.sums.manifest(agent, manifest)
            for index in range(update.count):
                assert self.sums.chunk(agent, decode_frame(update.frame(index)))
        return self.announced()

    def announced(self):
        """Return the sum that is announced next."""
        self.said.clear()
        self.now += AGAIN_S
        self.sums.tick()
        self.sums.tick()
        (ready,) = (message for message in self.said if isinstance(message, SumReady))
        return ready.blob

    def request(self, blob):
        """Ask for all of a sum; returns the frames that are sent at once."""
        self.frames.clear()
        self.sums.send(SendSum(digest=blob.digest, missing=((0, -(-blob.size_bytes // blob.chunk_bytes)),)))
        return list(self.frames)


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "updates")


def test_a_sum_that_is_half_sent_when_its_round_ends_does_not_hold_up_the_next_one(site):
    first = site.request(site.open(1))
    assert first
    assert len(site.request(site.open(2))) == len(first), "the link is as free as before"


def test_a_sum_whose_file_is_gone_is_made_again_from_its_updates(site, caplog):
    blob = site.open(1)
    (site.folder / f"{blob.digest}.sum").unlink()
    assert site.request(blob) == []
    assert "sum_lost" in caplog.text
    assert site.announced() == blob
    assert site.request(blob)
