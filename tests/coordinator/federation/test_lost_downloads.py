"""Downloads at QoS 0 lose chunks: receipts and requests of our own carry that, for few more bytes than were lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from faulty_broker import Faults, FaultyBroker
from federation_duties import WIDE_TASK
from federation_harness import Federation

AGENTS = 20
ROUNDS = 2
TASK = WIDE_TASK.model_copy(update={"encoder_params": {"feature_dim": 64}})
"""4096 * 64 numbers, 1 MB: 18 frames to each agent, before each round and at the end."""

LOST = 0.01
"""The share of lost deliveries."""


def is_download(topic):
    return topic.endswith("/db") or "/b/" in topic


@dataclass
class Bytes:
    """What the broker has sent to agents on download topics, with what was lost on the way, and that alone."""

    delivered: int = 0
    lost: int = 0


class CountedFaults(Faults):
    """Faults that note what they were asked about, and what they took away."""

    def __init__(self, counted, seed, lose):
        super().__init__(np.random.default_rng(seed), lose=lose, only=is_download)
        self.counted = counted

    def deliveries(self, message):
        messages, late = super().deliveries(message)
        if is_download(message.topic):
            self.counted.delivered += len(message.payload)
            if not messages:
                self.counted.lost += len(message.payload)
        return messages, late


def run_with(folder, seed, lose):
    """The encoder's hash after a run, and the bytes of its downloads."""
    counted = Bytes()
    with Federation(folder, agents=(), task=TASK, cohort={"min_agents": AGENTS}) as fed:
        fed.kill_coordinator()
        fed.broker = FaultyBroker(CountedFaults(counted, seed, lose))
        fed.start_coordinator()
        for number in range(AGENTS):
            fed.add(f"a{number}")
        fed.until(lambda: len(fed.coordinator.roster.present()) == AGENTS)
        fed.request(rounds=ROUNDS)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        return fed.encoder_sha256, counted


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_with(tmp_path_factory.mktemp("undisturbed"), 0, 0.0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_percent_of_lost_chunks_costs_less_than_a_tenth_and_no_bits(tmp_path, undisturbed, seed):
    expected, without_loss = undisturbed
    sha256, with_loss = run_with(tmp_path, seed, LOST)
    assert sha256 == expected
    assert with_loss.lost > LOST / 2 * without_loss.delivered, "too little was lost for this test to say anything"
    assert with_loss.delivered <= 1.1 * without_loss.delivered
