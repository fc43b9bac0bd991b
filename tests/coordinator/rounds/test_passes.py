"""Passes over parts of a round's updates: whatever the division, the bits are those of one reader."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.config import AggregationConfig
from coordinator.rounds.aggregation import combine
from coordinator.rounds.bounds import Measure, SumBounded
from coordinator.rounds.directions import MultiplyChanges, SumOfChanges
from coordinator.rounds.passes import HereReader, Origin, Packet, Pass, Reader
from edge_agent import methods
from edge_agent.core.errors import TensorsError
from edge_agent.methods import Update
from edge_agent.wire.tensors import decode, encode

PASSES = (Measure, SumOfChanges, MultiplyChanges, SumBounded)
SHAPES = {"encoder.w": (7, 3), "encoder.norm.running_mean": (3,), "head.weight": (2, 3)}


def travelled(packet):
    """The packet after it has been bytes."""
    return Packet.from_tensors(decode(encode(packet.to_tensors())))


class PartedReader(Reader):
    """Reads the updates in parts, each as another process would: pass and answer travel as bytes."""

    def __init__(self, origin, updates, parts):
        super().__init__(origin)
        self._updates = updates
        self._parts = [updates[part::parts] for part in range(parts)]

    def read(self, one_pass: Pass):
        kind = next(kind for kind in PASSES if kind.name == one_pass.name)
        answers = []
        for part in self._parts:
            there = kind.from_packet(travelled(one_pass.to_packet([update.client for update in part])))
            answers.append(one_pass.unpack(travelled(there.pack(there.over(self.origin, part)))))
        return one_pass.join(answers)

    def updates(self):
        return iter(self._updates)


def round_of(count, seed):
    """State and updates of a round, in which some are too long, too heavy, or turned round."""
    rng = np.random.default_rng(seed)
    state = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    way = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    updates = []
    for number in range(count):
        size = {0: 50.0, 1: -1.0, 2: 8.0}.get(number, 1.0)
        change = {name: size * (way[name] + rng.standard_normal(way[name].shape)) for name in SHAPES}
        tensors = {name: (state[name] + change[name]).astype(np.float32) for name in SHAPES}
        samples = 90_000.0 if number == 3 else float(rng.integers(1, 900))
        updates.append(Update(f"agent-{number:03d}", samples, tensors))
    start = {name: (array - way[name]).astype(np.float32) for name, array in state.items()}
    return state, start, updates


@pytest.mark.parametrize("rule", ["mean", "clipped", "median"])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_round_read_in_parts_has_the_bits_and_decisions_of_one_reader(parts, rule):
    method = methods.create("fedavg", {})
    state, start, updates = round_of(20, seed=parts)
    origin = Origin(method, method.broadcast(state), start)
    config = AggregationConfig(rule=rule)
    whole, decisions = combine(HereReader(origin, lambda: updates), state, config)
    after, of_parts = combine(PartedReader(origin, updates, parts), state, config)
    assert of_parts == decisions
    if rule != "median":
        assert decisions.clipped
        assert decisions.capped
    assert after.keys() == whole.keys()
    for name, array in whole.items():
        assert after[name].tobytes() == array.tobytes(), name


def test_more_parts_than_updates_change_nothing():
    method = methods.create("fedavg", {})
    state, start, updates = round_of(5, seed=3)
    origin = Origin(method, method.broadcast(state), start)
    whole, _ = combine(HereReader(origin, lambda: updates), state, AggregationConfig())
    after, _ = combine(PartedReader(origin, updates, 8), state, AggregationConfig())
    assert after["encoder.w"].tobytes() == whole["encoder.w"].tobytes()


def test_bytes_that_are_no_packet_are_an_error():
    with pytest.raises(TensorsError, match="without values"):
        Packet.from_tensors({})
    with pytest.raises(TensorsError, match="not JSON"):
        Packet.from_tensors({"json": np.frombuffer(b"{", np.uint8)})
    with pytest.raises(TensorsError, match="no sizes"):
        Measure().unpack(Packet({}, {}))
