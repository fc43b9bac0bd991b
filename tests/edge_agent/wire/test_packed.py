from __future__ import annotations

import zlib

import numpy as np
import pytest

from edge_agent.core.errors import TensorsError
from edge_agent.core.weighted_sum import WeightedSum, forms_of_sum
from edge_agent.wire.packed import pack, unpack
from edge_agent.wire.tensors import pieces


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 65_537])
def test_what_was_packed_comes_back(size):
    data = np.random.default_rng(size).bytes(size)
    assert unpack(pack([data[: size // 3], data[size // 3 :]]), size) == data


def test_a_sum_of_updates_takes_less_than_half():
    rng = np.random.default_rng(0)
    total = WeightedSum()
    for _ in range(5):
        total.add(float(rng.integers(50, 500)), {"w": rng.normal(size=10_000).astype(np.float32)})
    data = pieces(total.to_tensors())
    size = sum(memoryview(piece).nbytes for piece in data)
    assert len(pack(data)) < 0.45 * size
    assert unpack(pack(data), size) == b"".join(data)


def test_nothing_is_allocated_for_more_than_is_expected():
    bomb = (1 << 40).to_bytes(8, "little") + zlib.compress(bytes(1 << 20))
    with pytest.raises(TensorsError, match="expected at most 1000"):
        unpack(bomb, 1000)
    understated = (1000).to_bytes(8, "little") + zlib.compress(bytes(1 << 20))
    with pytest.raises(TensorsError, match="do not stand for 1000"):
        unpack(understated, 1000)


@pytest.mark.parametrize("damage", [b"", b"\1", b"\1\0\0\0\0\0\0\0", (8).to_bytes(8, "little") + b"not deflate"])
def test_damage_is_an_error(damage):
    with pytest.raises(TensorsError):
        unpack(damage, 1000)


def test_every_flipped_byte_is_noticed_or_harmless():
    data = bytes(range(256)) * 4
    packed = pack([data])
    for position in range(len(packed)):
        damaged = bytearray(packed)
        damaged[position] ^= 0x40
        try:
            assert unpack(damaged, len(data)) == data
        except TensorsError:
            continue


def test_the_forms_of_a_sum_are_those_of_its_arrays():
    update = {"w": np.zeros((2, 3), np.float32), "h": np.zeros(4, np.float16), "n": np.zeros((), np.int64)}
    total = WeightedSum()
    total.add(2.0, update)
    made = {name: (array.dtype, array.shape) for name, array in total.to_tensors().items()}
    assert forms_of_sum({name: (array.dtype, array.shape) for name, array in update.items()}) == made
