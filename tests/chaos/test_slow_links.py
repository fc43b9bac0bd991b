"""Rounds over slow links, on a simulated clock: nothing is sent twice, the link is used, control messages pass."""

from __future__ import annotations

import pytest
from federation_duties import WIDE_TASK
from slow_link import LinkedFederation

from edge_agent.wire import messages as wire

MODEL = WIDE_TASK.model_copy(update={"encoder_params": {"feature_dim": 67}})
"""1.1 MB: 4096 * 67 numbers and some more."""

ROUND = {"quorum": 1.0, "deadline_s": 3000}


def federation(folder, rates, **options):
    options = {"agents": tuple(rates), "task": MODEL, "round": ROUND, **options}
    return LinkedFederation(folder, rates=rates, **options)


def model_bytes(fed):
    return len(fed.state.blobs.read(fed.record.checkpoint))


PROBE_S = 7.3
"""Pauses between control messages to each agent beside those of the protocol."""


def round_closes(fed, limit_s=3000.0):
    """Seconds until the first round has closed; control messages are sent to each agent meanwhile."""
    probed_at = fed.clock.now

    def is_over():
        nonlocal probed_at
        if fed.clock.now - probed_at >= PROBE_S:
            probed_at = fed.clock.now
            for name in fed.agents:
                fed.coordinator.send(name, wire.Cancel(run="run-0000", round=1, reason="probe"))
        return fed.entries("round_closed")

    return fed.until(is_over, limit_s)


@pytest.mark.parametrize("rate", [8_000, 40_000, 200_000])
def test_a_round_over_a_slow_link_sends_each_byte_once_and_lets_control_messages_pass(tmp_path, rate):
    with federation(tmp_path, {"a0": rate}) as fed:
        fed.settle()
        fed.request(rounds=1)
        took_s, size = round_closes(fed), model_bytes(fed)
        down, up = fed.line("a0", "down"), fed.line("a0", "up")
        figures = (took_s * rate / (2 * size), down.bytes / size, up.bytes / size)
        print(
            f"\n{rate / 1000:.0f} kB/s: {took_s:.1f} s, {figures[0]:.3f} of ideal, sent {figures[1:]}, control", end=" "
        )
        print(down.slowest_control_s, up.slowest_control_s)
        assert took_s < 1.25 * 2 * size / rate
        assert down.bytes < 1.1 * size
        assert up.bytes < 1.1 * size
        assert max(down.slowest_control_s, up.slowest_control_s) < 2.0
