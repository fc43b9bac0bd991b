"""Containers of tensors that lie: each is refused in no time, or means the same to every reader."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load
from tensor_containers import box, containers, entry, same

from edge_agent.core.errors import TensorsError
from edge_agent.wire.tensors import MAX_HEADER_BYTES, decode, encode, inspect

GOOD = {"a": entry([1], 0, 4), "b": entry([2], 4, 12)}
BODY = bytes(12)
HOSTILE = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "header of 2**60": (2**60).to_bytes(8, "little") + b"{}",
    "header of 2**64 - 1": b"\xff" * 8 + b"{}",
    "header one over the limit": box(b"{}".ljust(MAX_HEADER_BYTES + 1)),
    "header of 4 MB": box(b"{}".ljust(1 << 22)),
    "header longer than the container": (100).to_bytes(8, "little") + b"{}",
    "empty header": box(b""),
    "a list": box(b"[]"),
    "null": box(b"null"),
    "not JSON": box(b"{nonsense}"),
    "leading space": box(b" {}"),
    "byte order mark": box(b"\xef\xbb\xbf{}"),
    "UTF-16": box("{}".encode("utf-16-le")),
    "not UTF-8": box(b'{"\xff":1}'),
    "trailing garbage in the header": box(b"{}x"),
    "deep lists": box(b'{"a":' + b"[" * 400_000),
    "deep objects": box(b'{"a":' * 100_000),
    "5000 digits": box(b'{"a":' + b"9" * 5000 + b"}"),
    "the same name twice": box(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "the same name by way of an escape": box(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"\\u0061":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "a field twice": box(b'{"a":{"dtype":"F32","dtype":"F64","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "a metadata key twice": box(b'{"__metadata__":{"a":"1","a":"2"}}'),
    "metadata that are numbers": box({"__metadata__": {"a": 1}}),
    "metadata that are a list": box({"__metadata__": ["a"]}),
    "half a surrogate pair as name": box(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "half a surrogate pair in metadata": box(b'{"__metadata__":{"a":"\\ud800"}}'),
    "a name of 300 characters": box({"x" * 300: entry([1], 0, 4)}, bytes(4)),
    "a tensor that is a number": box({"a": 5}),
    "a field too many": box({"a": {**entry([1], 0, 4), "x": 1}}, bytes(4)),
    "a field too few": box({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "an unknown dtype": box({"a": entry([1], 0, 4, "F31")}, bytes(4)),
    "a dtype we do not carry": box({"a": entry([2], 0, 4, "BF16")}, bytes(4)),
    "a list as dtype": box({"a": entry([1], 0, 4, ["F32"])}, bytes(4)),
    "a negative side": box({"a": entry([-1], 0, 4)}, bytes(4)),
    "a side with a point": box({"a": entry([1.0], 0, 4)}, bytes(4)),
    "a side that is true": box({"a": entry([True], 0, 4)}, bytes(4)),
    "a side that is NaN": box(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
    "a shape that is text": box({"a": entry("1", 0, 4)}, bytes(4)),
    "9 dimensions": box({"a": entry([1] * 9, 0, 4)}, bytes(4)),
    "a product beyond 64 bits": box({"a": entry([2**33, 2**33], 0, 4)}, bytes(4)),
    "a product that wraps to 4 bytes": box({"a": entry([2**31, 2**31, 2**31, 2**31], 0, 4)}, bytes(4)),
    "an empty array too large for numpy": box({"a": entry([0, 2**47, 2**47], 0, 0)}),
    "offsets the wrong way round": box({"a": entry([1], 4, 0)}, bytes(4)),
    "negative offsets": box({"a": entry([1], -4, 0)}, bytes(4)),
    "three offsets": box({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(8)),
    "offsets that do not fit the shape": box({"a": entry([2], 0, 4)}, bytes(4)),
    "offsets beyond the end": box({"a": entry([2**40], 0, 2**42)}, bytes(4)),
    "an overlap": box({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, BODY),
    "the same bytes twice": box({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)),
    "a hole": box({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, BODY),
    "a hole at the beginning": box({"a": entry([1], 4, 8)}, bytes(8)),
    "a byte behind the last tensor": box(GOOD, BODY + b"x"),
    "a byte too few": box(GOOD, BODY[:-1]),
    "a true of 255": box({"a": entry([2], 0, 2, "BOOL")}, b"\x01\xff"),
    "200,000 empty tensors": box({f"t{number}": entry([0], 0, 0) for number in range(200_000)}),
    "8193 empty tensors": box(
        "{{{}}}".format(
            ",".join(f'"{n:x}":{{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}' for n in range(8193))
        ).encode()
    ),
}


def test_the_pattern_of_the_hostile_containers_is_sound():
    """Else every one of them might be refused for a reason that is not its own."""
    assert {name: array.shape for name, array in decode(box(GOOD, BODY)).items()} == {"a": (1,), "b": (2,)}
    assert decode(box({"m": entry([2], 0, 2, "BOOL")}, b"\x01\x00"))["m"].tolist() == [True, False]
    most = {f"{number:x}": entry([0], 0, 0, "I8") for number in range(2000)}
    assert len(decode(box(most))) == 2000


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_containers_are_refused_by_either_way_of_reading(data):
    for read in (decode, inspect):
        if data is HOSTILE["a true of 255"] and read is inspect:
            continue  # only the header is looked at
        with pytest.raises(TensorsError) as caught:
            read(data)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "name", ["header of 2**60", "header of 4 MB", "200,000 empty tensors", "a product beyond 64 bits"]
)
def test_lies_about_size_cost_neither_time_nor_memory(name):
    data = memoryview(HOSTILE[name])
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(TensorsError):
            decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert time.process_time() - began < 0.5  # in truth below a millisecond


@pytest.mark.parametrize("name", ["deep lists", "deep objects", "8193 empty tensors"])
def test_the_worst_header_within_the_limit_costs_some_megabytes_at_most(name):
    tracemalloc.start()
    try:
        with pytest.raises(TensorsError):
            decode(HOSTILE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * MAX_HEADER_BYTES


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_with_our_own_error(data):
    with pytest.raises(TensorsError):
        decode(data)


@st.composite
def mutants(draw):
    """A good container with one thing changed: a bit, the length, the tail, or one token of the header."""
    tensors = draw(containers.filter(bool))
    data = bytearray(encode(tensors))
    how = draw(st.sampled_from(["flip", "cut", "extend", "length", "splice", "header"]))
    if how == "flip":
        place = draw(st.integers(0, len(data) - 1))
        data[place] ^= 1 << draw(st.integers(0, 7))
    elif how == "cut":
        del data[draw(st.integers(0, len(data) - 1)) :]
    elif how == "extend":
        data += draw(st.binary(min_size=1, max_size=9))
    elif how == "length":
        data[:8] = draw(st.integers(0, 2**64 - 1) | st.integers(0, 300)).to_bytes(8, "little")
    elif how == "splice":
        other = encode(draw(containers))
        place = draw(st.integers(0, len(data)))
        data[place:] = other[draw(st.integers(0, len(other))) :]
    else:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        name = draw(st.sampled_from(sorted(header)))
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        header[name][field] = draw(
            st.sampled_from(["F32", "BF16", 1, None, [], [0], [0, 0], [0, 4], [1, 1], [2**40], [-1], [0, 2**62]])
        )
        data = bytearray(box(header, bytes(data[8 + int.from_bytes(data[:8], "little") :])))
    return bytes(data)


@settings(max_examples=300)
@given(mutants())
def test_a_mutant_is_refused_or_read_exactly_as_the_library_reads_it(data):
    """Whatever we let in must mean the same to every other reader of the format."""
    try:
        ours = decode(data)
    except TensorsError:
        return
    assert same(load(data), ours)


def test_the_library_refuses_what_it_is_known_to_refuse():
    """If one day it accepts these, or refuses the others, our own limits deserve a new look."""
    rejected = {name for name, data in HOSTILE.items() if not _library_reads(data)}
    assert {"header of 2**60", "an overlap", "a hole", "a byte behind the last tensor"} <= rejected
    assert {"the same name twice", "a true of 255", "8193 empty tensors"}.isdisjoint(rejected)


def _library_reads(data):
    if len(data) > 1 << 20:
        return False
    try:
        load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, OverflowError, UnicodeDecodeError):
        return False
    return True
