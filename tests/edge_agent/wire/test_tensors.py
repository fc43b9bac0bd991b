"""Containers of tensors: round trips, the library that others read them with, forms, and numbers that are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save
from tensor_containers import box, containers, entry, same

from edge_agent.core.errors import TensorsError
from edge_agent.core.task import parse_json
from edge_agent.wire import tensors as tensors_module
from edge_agent.wire.tensors import (
    MAX_DIMENSIONS,
    MAX_TENSORS,
    Spec,
    check_specs,
    decode,
    encode,
    first_non_finite,
    inspect,
    specs_of,
)

# --- round trips and the library -------------------------------------------------------------------------------------


@given(containers)
def test_arrays_make_the_round_trip_bit_for_bit(tensors):
    assert same(decode(encode(tensors)), tensors)


@given(containers)
def test_the_library_reads_what_we_write_and_we_read_what_it_writes(tensors):
    assert same(load(encode(tensors)), tensors)
    assert same(decode(save(tensors)), tensors)


@given(containers, st.randoms(use_true_random=False))
def test_equal_arrays_give_equal_bytes_in_whatever_order(tensors, dice):
    shuffled = list(tensors.items())
    dice.shuffle(shuffled)
    assert encode(dict(shuffled)) == encode(tensors)


@given(containers)
def test_the_header_alone_tells_every_form(tensors):
    specs, metadata = inspect(encode(tensors))
    assert (specs, metadata) == (specs_of(tensors), {})


def test_no_tensors_at_all_are_a_container_too():
    assert decode(encode({})) == {}
    assert encode({}) == save({})


def test_numbers_written_by_hand_are_read():
    body = np.array([1.5, -2.0], "<f4").tobytes() + b"\x07" + b"\x01\x00"
    header = {"w": entry([2, 1], 0, 8), "k": entry([], 8, 9, "U8"), "m": entry([2], 9, 11, "BOOL")}
    found = decode(box(header, body))
    assert found["w"].tolist() == [[1.5], [-2.0]]
    assert found["k"].shape == ()
    assert (int(found["k"]), found["m"].tolist()) == (7, [True, False])


def test_metadata_travel_beside_the_arrays_and_do_not_change_them():
    tensors = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2))}
    data = encode(tensors, {"kind": "lr", "größe": "7 \u2603"})
    assert same(decode(data), tensors)
    assert same(load(data), tensors)
    assert inspect(data)[1] == {"kind": "lr", "größe": "7 \u2603"}


def test_metadata_in_any_order_give_the_same_bytes_in_any_process():
    program = (
        "import sys, numpy as np; from edge_agent.wire.tensors import encode;"
        "keys = sys.argv[1].split(',');"
        "print(encode({'a': np.zeros(2)}, {k: k for k in keys}).hex())"
    )
    keys = [f"key{number}" for number in range(9)]
    seen = set()
    for seed, order in (("1", keys), ("2", keys[::-1])):
        child = subprocess.run(
            [sys.executable, "-c", program, ",".join(order)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(child.stdout)
    assert len(seen) == 1


@pytest.mark.parametrize("make", [lambda a: a.astype(">f4"), lambda a: a[:, ::2], lambda a: a.T, np.asfortranarray])
def test_byte_order_and_strides_do_not_matter(make):
    array = make(np.arange(24, dtype=np.float32).reshape(4, 6))
    found = decode(encode({"a": array}))["a"]
    assert found.dtype == np.dtype("<f4")
    assert np.array_equal(found, array)


def test_views_are_read_only_and_share_the_memory_of_the_container():
    data = bytearray(encode({"a": np.zeros(1000, np.float32), "m": np.zeros(3, bool)}))
    found = decode(data)
    assert not any(array.flags.writeable for array in found.values())
    assert np.shares_memory(found["a"], np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_is_read(kind):
    assert decode(kind(encode({"a": np.arange(4)})))["a"].tolist() == [0, 1, 2, 3]


def test_an_unaligned_container_is_read():
    """Nothing obliges a writer to pad the header to eight bytes."""
    header = json.dumps({"a": entry([2], 0, 16, "F64")}).encode()
    header += b" " * ((3 - len(header)) % 8)
    found = decode(box(header, np.array([3.0, 4.0]).tobytes()))["a"]
    assert found.tolist() == [3.0, 4.0]
    assert first_non_finite({"a": found}) is None


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": np.zeros(2, complex)},
        {"a": np.array(["text"])},
        {"a": np.array([object()])},
        {"a": np.zeros(2, "M8[s]")},
        {"a": np.zeros(2, np.uint32)},
        {"a": np.zeros((1,) * (MAX_DIMENSIONS + 1))},
        {"__metadata__": np.zeros(1)},
        {"\ud800": np.zeros(1)},
        {"x" * 300: np.zeros(1)},
    ],
    ids=["complex", "text", "object", "date", "uint32", "9 dimensions", "reserved name", "surrogate", "long name"],
)
def test_what_we_could_not_read_back_is_not_written(tensors):
    with pytest.raises(TensorsError):
        encode(tensors)


def test_more_tensors_than_are_read_are_not_written():
    with pytest.raises(TensorsError, match=f"{MAX_TENSORS + 1} tensors"):
        encode({f"t{number}": np.zeros(0, np.int8) for number in range(MAX_TENSORS + 1)})


# --- forms -----------------------------------------------------------------------------------------------------------


def spec(*shape, dtype=np.float32):
    return Spec(np.dtype(dtype), shape)


def test_equal_forms_pass_in_any_order():
    check_specs({"a": spec(2), "b": spec(3)}, {"b": spec(3), "a": spec(2)})
    check_specs({}, {})


def test_every_difference_is_listed_at_once():
    found = {"extra": spec(1), "shape": spec(2, 3), "dtype": spec(4, dtype=np.float64), "good": spec(5)}
    expected = {"missing": spec(1), "shape": spec(3, 2), "dtype": spec(4), "good": spec(5)}
    with pytest.raises(TensorsError) as caught:
        check_specs(found, expected)
    assert str(caught.value).split("; ") == [
        "missing 'missing'",
        "unexpected 'extra'",
        "'dtype' is float64[4], expected float32[4]",
        "'shape' is float32[2, 3], expected float32[3, 2]",
    ]


def test_of_each_kind_of_difference_five_are_listed():
    with pytest.raises(TensorsError) as caught:
        check_specs({f"x{n}": spec(1) for n in range(50)}, {f"m{n}": spec(1) for n in range(50)})
    assert len(str(caught.value).split("; ")) == 10


@pytest.mark.parametrize("shape, nbytes", [((), 4), ((0,), 0), ((2, 3), 24), ((1, 0, 7), 0)])
def test_the_size_of_a_form_is_its_product(shape, nbytes):
    assert spec(*shape).nbytes == nbytes


# --- finiteness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_nan_and_infinity_are_found_wherever_they_are(dtype, bad, shape):
    array = np.ones(shape, dtype)
    array.flat[-1] = bad
    assert first_non_finite({"a": np.ones(3, dtype), "b": array}) == "b"


def test_the_first_by_name_is_told():
    bad = np.array([np.nan])
    assert first_non_finite({"z": bad, "b": bad, "a": np.ones(1)}) == "b"


@pytest.mark.parametrize(
    "array",
    [
        np.full(4, np.finfo(np.float32).max, np.float32),
        np.full(1000, 1e30, np.float32),
        np.full(4, np.finfo(np.float64).max),
        np.array([60_000, -60_000], np.float16),
        np.zeros(0, np.float32),
        np.zeros((0, 5), np.float64),
        np.array([2**62, -1]),
        np.array([True]),
        np.zeros((4, 6), np.float32)[:, ::2],
    ],
    ids=["max", "1e30", "max64", "half", "empty", "empty rows", "integers", "bool", "strided"],
)
def test_numbers_whose_squares_overflow_are_finite_all_the_same(array):
    assert first_non_finite({"a": array}) is None


def test_two_infinities_do_not_cancel():
    assert first_non_finite({"a": np.array([np.inf, -np.inf], np.float32)}) == "a"


@given(hnp.arrays(st.sampled_from([np.float16, np.float32, np.float64]), hnp.array_shapes(min_side=0)))
def test_the_quick_way_agrees_with_looking_at_every_number(array):
    assert (first_non_finite({"a": array}) is None) is bool(np.isfinite(array).all())


def test_one_header_of_many_containers_is_parsed_once(monkeypatch):
    """As of the updates of a round: what differs between them is behind the header."""
    parsed = []

    def counting(text):
        parsed.append(text)
        return parse_json(text)

    monkeypatch.setattr(tensors_module, "parse_json", counting)
    for number in range(5):
        arrays = decode(encode({"once.w": np.full((3, 2), number, np.float32)}))
        assert arrays["once.w"].tolist() == [[number, number]] * 3
    assert len(parsed) == 1


def test_a_container_whose_header_is_known_and_whose_end_is_missing_is_refused():
    whole = encode({"cut.w": np.arange(8, dtype=np.float32)})
    decode(whole)
    with pytest.raises(TensorsError, match="tensors take 32 bytes, the container has 28"):
        decode(whole[:-4])
