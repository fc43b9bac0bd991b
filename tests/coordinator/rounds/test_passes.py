"""Passes over parts of a round's updates: whatever the division, the bits are those of one reader."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.config import AggregationConfig
from coordinator.rounds.aggregation import aggregate, combine
from coordinator.rounds.bounds import Measure, Measured, SumBounded
from coordinator.rounds.directions import MultiplyChanges, SumOfChanges
from coordinator.rounds.passes import Origin, Packet, PassValues
from edge_agent import methods
from edge_agent.core.errors import TensorsError
from edge_agent.methods import Update
from edge_agent.wire.tensors import decode, encode

PASSES = (Measure, SumOfChanges, MultiplyChanges, SumBounded)
SHAPES = {"encoder.w": (7, 3), "encoder.norm.running_mean": (3,), "head.weight": (2, 3)}


def travelled(packet):
    """The packet after it has been bytes."""
    return Packet.from_tensors(decode(encode(packet.to_tensors())))


def read_in_parts(reading, updates, parts):
    """The result of a computation whose passes are divided; pass and answer travel as bytes."""
    divided = [updates[part::parts] for part in range(parts)]
    answer = None
    try:
        while True:
            one_pass, origin = reading.send(answer)
            kind = next(kind for kind in PASSES if kind.name == one_pass.name)
            answers = []
            for part in divided:
                there = kind.from_packet(travelled(one_pass.to_packet([update.client for update in part])))
                answers.append(one_pass.unpack(travelled(there.pack(there.over(origin, part)))))
            answer = one_pass.join(answers)
            assert one_pass.is_exact(answer)
    except StopIteration as end:
        return end.value


def in_parts(state, start, updates, parts, config):
    """State and decisions of a round that was read in parts."""
    method = methods.create("fedavg", {})
    origin = Origin(method, method.broadcast(state), start)
    combined = read_in_parts(combine(origin, state, lambda: iter(updates), config), updates, parts)
    after = combined.state
    return method.next_state(state, combined.total) if after is None else after, combined.decisions


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
    state, start, updates = round_of(20, seed=parts)
    config = AggregationConfig(rule=rule)
    whole, decisions = aggregate(methods.create("fedavg", {}), state, lambda: updates, config, start)
    after, of_parts = in_parts(state, start, updates, parts, config)
    assert of_parts == decisions
    if rule != "median":
        assert decisions.clipped
        assert decisions.capped
    assert after.keys() == whole.keys()
    for name, array in whole.items():
        assert after[name].tobytes() == array.tobytes(), name


def test_more_parts_than_updates_change_nothing():
    state, start, updates = round_of(5, seed=3)
    whole, _ = aggregate(methods.create("fedavg", {}), state, lambda: updates, AggregationConfig(), start)
    after, _ = in_parts(state, start, updates, 8, AggregationConfig())
    assert after["encoder.w"].tobytes() == whole["encoder.w"].tobytes()


def test_bytes_that_are_no_packet_are_an_error():
    with pytest.raises(TensorsError, match="without values"):
        Packet.from_tensors({})
    with pytest.raises(TensorsError, match="not JSON"):
        Packet.from_tensors({"json": np.frombuffer(b"{", np.uint8)})
    with pytest.raises(TensorsError, match="without MeasuredSizes as this version knows them"):
        Measure().unpack(Packet.from_values(PassValues()))


def test_sizes_that_are_infinite_or_no_number_travel():
    """An update may overflow: that is for the bounds to judge, not for the way between two processes."""
    sizes = [Measured("agent-1", 3.0, {"weights": float("inf")}), Measured("agent-2", 2.5, {"weights": 1e-7})]
    assert Measure().unpack(travelled(Measure().pack(sizes))) == sizes
    (size,) = Measure().unpack(travelled(Measure().pack([Measured("agent-3", 1.0, {"weights": float("nan")})])))
    assert np.isnan(size.norms["weights"])
