from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

from edge_agent.bundle import archive, graph_check, installed
from edge_agent.core.errors import BundleDamaged
from edge_agent.personal import encoder as encoders
from edge_agent.personal.encoder import Encoder, onnxruntime

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import onnx
    from onnx import TensorProto, helper, numpy_helper

SIDES = (2, 3, 8, 8)


def model(nodes, constants=(), *, sides=("n", *SIDES[1:]), opset=17, output="features", **more):
    values = [numpy_helper.from_array(np.asarray(value), name) for name, value in dict(constants).items()]
    given = helper.make_tensor_value_info("image", TensorProto.FLOAT, list(sides))
    made = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    body = helper.make_graph(nodes, "g", [given], [made], values)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, **more)


def node(operator, *inputs, to="features", **attributes):
    return helper.make_node(operator, list(inputs), [to], **attributes)


def ints(*values):
    return np.array(values, np.int64)


WEIGHT = np.ones((6, 3, 3, 3), np.float32)
CELLS = {name: np.ones((1, *sides), np.float32) for name, sides in {"w": (20, 8), "r": (20, 5), "b": (40,)}.items()}
"""The weights of an LSTM of five cells for inputs of eight channels, and its biases."""
CASES = {
    "convolution": ([node("Conv", "image", "w", strides=[2, 1], pads=[1, 0, 2, 1], dilations=[1, 2])], {"w": WEIGHT}),
    "same": ([node("Conv", "image", "w", auto_pad="SAME_UPPER", strides=[3, 3])], {"w": WEIGHT}),
    "groups": ([node("Conv", "image", "w", group=3)], {"w": WEIGHT[:, :1]}),
    "transposed": (
        [node("ConvTranspose", "image", "w", strides=[2, 2], pads=[1, 1, 0, 0], output_padding=[1, 0])],
        {"w": np.ones((3, 4, 3, 3), np.float32)},
    ),
    "pool": ([node("MaxPool", "image", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)], {}),
    "pool that ends in the pad": (
        [node("AveragePool", "image", kernel_shape=[2, 2], strides=[3, 3], pads=[0, 0, 1, 1], ceil_mode=1)],
        {},
    ),
    "global pool": ([node("GlobalAveragePool", "image")], {}),
    "product": ([node("MatMul", "image", "w")], {"w": np.ones((8, 5), np.float32)}),
    "product with a vector": ([node("MatMul", "image", "w")], {"w": np.ones(8, np.float32)}),
    "product of the last axis": ([node("MatMul", "w", "image")], {"w": np.ones((3, 7, 8), np.float32)}),
    "gemm": (
        [node("Flatten", "image", to="flat"), node("Gemm", "flat", "w", "b", transB=1)],
        {"w": np.ones((5, 192), np.float32), "b": np.ones(5, np.float32)},
    ),
    "flatten": ([node("Flatten", "image", axis=2)], {}),
    "flatten from the end": ([node("Flatten", "image", axis=-1)], {}),
    "broadcast": ([node("Add", "image", "w")], {"w": np.ones((5, 1, 1, 1, 8), np.float32)}),
    "where": ([node("Where", "c", "image", "w")], {"c": np.ones((8, 1), bool), "w": np.ones((1,), np.float32)}),
    "concat": ([node("Concat", "image", "image", "image", axis=-1)], {}),
    "split": (
        [helper.make_node("Split", ["image", "parts"], ["features", "rest"], axis=1)],
        {"parts": ints(1, 2)},
    ),
    "split evenly": ([helper.make_node("Split", ["image"], ["features", "rest"], axis=3)], {}),
    "slice": (
        [node("Slice", "image", "from", "to", "axes", "steps")],
        {"from": ints(-2, 7), "to": ints(1 << 62, -9), "axes": ints(1, -1), "steps": ints(1, -2)},
    ),
    "squeeze": (
        [node("Unsqueeze", "image", "one", to="wide"), node("Squeeze", "wide", "two")],
        {"one": ints(0, -1), "two": ints(-1)},
    ),
    "transpose": ([node("Transpose", "image", perm=[2, 0, 3, 1])], {}),
    "transpose to the reverse": ([node("Transpose", "image")], {}),
    "reshape": ([node("Reshape", "image", "to")], {"to": ints(0, -1, 4)}),
    "reshape by the batch's size": (
        [
            node("Shape", "image", to="sides"),
            node("Gather", "sides", "zero", to="batch", axis=0),
            node("Unsqueeze", "batch", "axis", to="row"),
            node("Concat", "row", "rest", to="wanted", axis=0),
            node("Reshape", "image", "wanted"),
        ],
        {"zero": np.array(0, np.int64), "axis": ints(0), "rest": ints(-1)},
    ),
    "expand by numbers": (
        [
            node("Shape", "image", to="sides"),
            node("Mul", "sides", "twice", to="double"),
            node("Div", "double", "twice", to="half"),
            node("Sub", "half", "none", to="wanted"),
            node("ReduceMean", "image", to="mean", axes=[2, 3]),
            node("Expand", "mean", "wanted"),
        ],
        {"twice": ints(2), "none": ints(0, 0, 0, 0)},
    ),
    "fill": (
        [node("Slice", "sides", "a", "b", to="part"), node("ConstantOfShape", "part")],
        {"sides": ints(7, 3, 5), "a": ints(1), "b": ints(3)},
    ),
    "pad": ([node("Pad", "image", "by")], {"by": ints(0, 0, 1, 2, 0, 0, -1, 3)}),
    "gather": ([node("Gather", "image", "at", axis=2)], {"at": ints(1, 1, 1, 0, 5).reshape(1, 5)}),
    "mean": ([node("ReduceMean", "image", axes=[-1, 1], keepdims=0)], {}),
    "mean of all": ([node("ReduceMean", "image", keepdims=0)], {}),
    "sum": ([node("ReduceSum", "image", "axes")], {"axes": ints(1)}),
    "norm": (
        [node("LayerNormalization", "image", "w", axis=-1)],
        {"w": np.ones(8, np.float32)},
    ),
    "memory cells": (
        [
            node("Reshape", "image", "to", to="steps"),
            helper.make_node("LSTM", ["steps", "w", "r", "b"], ["", "last", "state"], hidden_size=5),
            node("Concat", "last", "state", axis=0),
        ],
        {**CELLS, "to": ints(-1, 3, 8)},
    ),
    "memory cells at all steps": (
        [node("Reshape", "image", "to", to="steps"), node("LSTM", "steps", "w", "r", hidden_size=5)],
        {**CELLS, "to": ints(-1, 3, 8)},
    ),
    "int8": (
        [
            node("QuantizeLinear", "image", "s", "z", to="q"),
            node("DequantizeLinear", "q", "s", "z", to="d"),
            helper.make_node("Cast", ["d"], ["f"], to=TensorProto.FLOAT),
            node("Clip", "f"),
        ],
        {"s": np.float32(0.1), "z": np.uint8(3)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_those_that_onnxruntime_computes(name):
    nodes, constants = CASES[name]
    content = model(nodes, constants).SerializeToString()
    session = onnxruntime().InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    expected = session.run(None, dict.fromkeys(names, np.zeros(SIDES, np.float32)))[0].shape
    assert graph_check.check(content, [SIDES]).outputs == (expected,)


def test_memory_and_work_by_hand():
    nodes = [
        node("Conv", "image", "w", to="maps"),  # (2, 6, 6, 6)
        node("Relu", "maps", to="kept"),
        node("Add", "kept", "maps", to="sum"),  # both inputs are alive
        node("GlobalAveragePool", "sum", to="mean"),
        node("Flatten", "mean"),
    ]
    cost = graph_check.check(model(nodes, {"w": WEIGHT}).SerializeToString(), [SIDES])
    maps = 2 * 6 * 6 * 6
    assert cost.memory_bytes == 4 * WEIGHT.size + 8 * 3 * maps
    assert cost.work == maps * 27 + 3 * maps + 12  # convolution, three operators that look at each value, the mean


def test_memory_and_work_of_memory_cells_by_hand():
    """Sixteen steps of a batch of three: the values of four gates of five cells are kept for all of them."""
    nodes = [node("Reshape", "image", "to", to="steps"), node("LSTM", "steps", "w", "r", "b", hidden_size=5)]
    cost = graph_check.check(model(nodes, {**CELLS, "to": ints(-1, 3, 8)}).SerializeToString(), [SIDES])
    weights = sum(array.size for array in CELLS.values())
    values = 384 + 16 * 3 * 5 + (16 + 2) * 3 * 20  # the input, the result, and the gates with two steps more for states
    assert cost.memory_bytes == 4 * weights + 8 * 3 + 8 * values
    assert cost.work == 384 + 16 * 3 * 20 * (8 + 5)


def test_values_that_do_not_depend_on_the_input_stay():
    """ONNX Runtime computes them when it loads the graph, and keeps them."""
    nodes = [
        node("ConstantOfShape", "sides", to="zeros"),
        node("Relu", "zeros", to="folded"),
        node("ReduceMean", "folded", to="mean", keepdims=0),
        node("Add", "image", "mean"),
    ]
    cost = graph_check.check(model(nodes, {"sides": ints(1000)}).SerializeToString(), [SIDES])
    assert cost.memory_bytes == 8 + 8 * (1000 + 1000 + 1 + 2 * 384)


def bomb(size=1 << 30):
    nodes = [
        node("ConstantOfShape", "sides", to="zeros"),
        node("ReduceMean", "zeros", to="mean", keepdims=0),
        node("Flatten", "image", to="flat"),
        node("Add", "flat", "mean"),
    ]
    return model(nodes, {"sides": ints(size)})


def doubling():
    """Each step is twice as long as the one before."""
    steps = [node("Concat", f"v{at}", f"v{at}", to=f"v{at + 1}", axis=1) for at in range(22)]
    nodes = [node("Flatten", "image", to="v0"), *steps, node("ReduceMean", "v22", axes=[1])]
    return model(nodes)


def outer():
    """Two vectors that an addition spreads to a table."""
    nodes = [node("ConstantOfShape", "a", to="x"), node("ConstantOfShape", "b", to="y"), node("Add", "x", "y")]
    return model(nodes, {"a": ints(1 << 15, 1), "b": ints(1, 1 << 15)})


def loop():
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["still"])],
        "body",
        [
            helper.make_tensor_value_info("at", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("still", TensorProto.BOOL, [])],
    )
    nodes = [helper.make_node("Loop", ["times", "yes"], [], body=body), node("Flatten", "image")]
    return model(nodes, {"times": np.array(1 << 62, np.int64), "yes": np.array(True)})


def branch():
    body = helper.make_graph(
        [helper.make_node("Identity", ["image"], ["same"])],
        "body",
        [],
        [helper.make_tensor_value_info("same", TensorProto.FLOAT, None)],
    )
    return model([node("If", "yes", then_branch=body, else_branch=body)], {"yes": np.array(True)})


def outside():
    made = model([node("Add", "image", "w")], {"w": np.zeros(8, np.float32)})
    weight = made.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key = "location"
    entry.value = "../../../etc/passwd"
    return made


def batch_of_a_billion():
    """The shape that a graph claims for its own input is a constant of its own, too."""
    nodes = [node("Shape", "image", to="sides"), node("ConstantOfShape", "sides")]
    return model(nodes, sides=(1 << 30, 1, 1, 1))


def by_the_data():
    nodes = [
        node("ReduceMean", "image", to="mean", keepdims=0),
        helper.make_node("Cast", ["mean"], ["number"], to=TensorProto.INT64),
        node("Unsqueeze", "number", "axis", to="size"),
        node("ConstantOfShape", "size"),
    ]
    return model(nodes, {"axis": ints(0)})


def heavy(times=200):
    """Little memory, and more multiplications than a device is to do for an input."""
    steps = [node("MatMul", f"v{at}", "w", to=f"v{at + 1}") for at in range(times)]
    nodes = [
        node("ReduceMean", "image", to="mean", keepdims=0),
        node("Expand", "mean", "sides", to="v0"),
        *steps,
        node("ReduceMean", f"v{times}", to="one", keepdims=0),
        node("ReduceMean", "image", to="rows", axes=[1, 2, 3], keepdims=0),
        node("Add", "rows", "one", to="sum"),
        node("Unsqueeze", "sum", "axis"),
    ]
    return model(nodes, {"sides": ints(1024, 1024), "w": np.zeros((1024, 1024), np.float32), "axis": ints(1)})


def sized(*nodes, **constants):
    """An input plus a number of zeros that ``nodes`` work out as ``size``."""
    rest = [
        node("ConstantOfShape", "size", to="zeros"),
        node("ReduceSum", "zeros", to="none", keepdims=0),
        node("Add", "image", "none"),
    ]
    return model([*nodes, *rest], constants)


def constant_twice():
    made = helper.make_node("Constant", [], ["size"], value_ints=[1])
    made.attribute.append(helper.make_attribute("value", numpy_helper.from_array(ints(1))))
    return sized(made)


def truncated():
    """2 ** 32 is 0 as int32: the size is 1 by reading, and 2 ** 32 + 1 in ONNX Runtime."""
    cast, back = (
        helper.make_node("Cast", [one], [other], to=kind)
        for one, other, kind in (("a", "b", TensorProto.INT32), ("b", "c", TensorProto.INT64))
    )
    return sized(cast, back, node("Sub", "d", "c", to="size"), a=ints(1 << 32), d=ints((1 << 32) + 1))


def wrapped():
    """-2 ** 31 - 1 is 2 ** 31 - 1 as int32."""
    cast = helper.make_node("Cast", ["c"], ["d"], to=TensorProto.INT64)
    steps = [node("Sub", "a", "b", to="c"), cast, node("Add", "d", "e", to="size")]
    narrow = {"a": np.array([-(1 << 31)], np.int32), "b": np.array([1], np.int32)}
    return sized(*steps, **narrow, e=ints((1 << 31) + 2))


def narrow_size():
    made = sized(size=ints(1))
    made.graph.initializer[0].CopyFrom(TensorProto(name="size", data_type=TensorProto.INT64, dims=[1], int32_data=[1]))
    return made


def backwards(start, end):
    """The first element counts where a reader of Python takes none."""
    part = node("Slice", "numbers", "from", "to", "axes", "steps", to="part")
    return sized(
        part,
        node("Concat", "part", "one", to="size", axis=0),
        numbers=ints(1 << 32, 5),
        **{"from": ints(start), "to": ints(end)},
        axes=ints(0),
        steps=ints(-1),
        one=ints(1),
    )


def columns():
    """A result of 8.7 MB, by way of 16 GB."""
    nodes = [
        node("ConstantOfShape", "sides", to="x"),
        node("ConstantOfShape", "kernel", to="w"),
        node("ConvTranspose", "x", "w", to="wide"),
        node("ReduceSum", "wide", to="none", keepdims=0),
        node("Add", "image", "none"),
    ]
    return model(nodes, {"sides": ints(1, 1, 64, 64), "kernel": ints(1, 1, 1000, 1000)})


def texts():
    cast = helper.make_node("Cast", ["image"], ["text"], to=TensorProto.STRING)
    return model([cast, helper.make_node("Cast", ["text"], ["features"], to=TensorProto.FLOAT)])


def no_groups():
    """A division by zero in ONNX Runtime, which ends the process."""
    nodes = [node("ConstantOfShape", "sides", to="x"), node("Conv", "x", "w", group=0)]
    return model(nodes, {"sides": ints(1, 0, 8, 8), "w": WEIGHT[:, :1]})


def cells(*names, sides=(-1, 3, 8), **attributes):
    """An LSTM with these inputs behind its steps."""
    constants = {
        **CELLS, "to": ints(*sides), "lengths": np.full(3, 99, np.int32), "wide": np.ones((1, 24, 8), np.float32),
    }  # fmt: skip
    step = node("LSTM", "steps", *names, **{"hidden_size": 5, **attributes})
    return model([node("Reshape", "image", "to", to="steps"), step], constants)


def many_cells():
    """An input of 8 values a step and weights of 2.6 MB, whose gates take 8 GB."""
    shapes = {"sides": ints(4096, 64, 8), "input": ints(1, 4096, 8), "state": ints(1, 4096, 1024)}
    nodes = [
        node("ConstantOfShape", "sides", to="x"),
        node("ConstantOfShape", "input", to="w"),
        node("ConstantOfShape", "state", to="r"),
        helper.make_node("LSTM", ["x", "w", "r"], ["", "last"], hidden_size=1024),
        node("ReduceSum", "last", to="none", keepdims=0),
        node("Add", "image", "none"),
    ]
    return model(nodes, shapes)


HOSTILE = {
    "cells whose gates fill the memory": (many_cells, "MiB of memory"),
    "cells with lengths of their own": (lambda: cells("w", "r", "", "lengths"), "lengths of its own"),
    "cells with peepholes": (lambda: cells("w", "r", "", "", "", "", "b"), "peepholes"),
    "cells that read backwards": (lambda: cells("w", "r", direction="reverse"), "a direction, layout, clip or act"),
    "cells that clip": (lambda: cells("w", "r", clip=1.0), "a direction, layout, clip or activations"),
    "cells with other activations": (lambda: cells("w", "r", activations=["Elu"] * 3), "field 9 of a attribute"),
    "cells with too many weights": (lambda: cells("wide", "r"), r"\(1, 24, 8\) as input 1, not \(1, 20, 8\)"),
    "cells without weights of the state": (lambda: cells("w"), "LSTM has no input 2"),
    "no cells": (lambda: cells("w", "r", hidden_size=0), "with 0 cells"),
    "cells for images": (lambda: cells("w", "r", sides=(0, 0, 0, 0)), r"LSTM of \(2, 3, 8, 8\)"),
    "two constants": (constant_twice, "a Constant has 2 attributes"),
    "a number cut by a cast": (truncated, "depends on the data"),
    "a number of 32 bits": (wrapped, "depends on the data"),
    "a size in the wrong field": (narrow_size, "element type 7 has its values as 'int32_data'"),
    "backwards from before the first": (lambda: backwards(-100, -200), "Slice backwards"),
    "backwards over sizes": (lambda: backwards(-1, -2), "sizes are read backwards"),
    "columns": (columns, "MiB of memory"),
    "texts": (texts, "Cast to element type 8"),
    "no groups": (no_groups, "in 0 groups"),
    "bomb": (bomb, "8192 MiB of memory"),
    "doubling": (doubling, "MiB of memory"),
    "outer sum": (outer, "MiB of memory"),
    "loop": (loop, r"'ai\.onnx\.Loop' is not one"),
    "branch": (branch, r"'ai\.onnx\.If' is not one"),
    "files outside": (outside, "field 13 of a tensor"),
    "claimed batch": (batch_of_a_billion, "expected"),
    "size by the data": (by_the_data, "depends on the data"),
    "endless work": (heavy, "multiplications"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_graphs_are_refused_before_they_run(name):
    make, complaint = HOSTILE[name]
    content = make().SerializeToString()
    begin = time.process_time()
    with pytest.raises(BundleDamaged, match=complaint):
        graph_check.check(content, [SIDES])
    assert time.process_time() - begin < 1


def varint(value):
    result = b""
    while value > 127:
        result = result + bytes([value & 127 | 128])
        value = value >> 7
    return result + bytes([value])


def with_field(message, number, value):
    """A serialised message with one more field of bytes."""
    return message + varint(number << 3 | 2) + varint(len(value)) + value


def test_what_two_readers_could_understand_differently_is_refused():
    good = model([node("Relu", "image")])
    body = good.graph.node[0]
    twice = with_field(body.SerializeToString(), 4, b"Loop")  # the last operator counts for protobuf
    attribute = helper.make_attribute("alpha", 1.0)
    attribute.i = 7
    stated = onnx.AttributeProto(name="alpha", type=onnx.AttributeProto.INT, f=1.0)
    for wrong in (attribute, stated):
        changed = onnx.NodeProto()
        changed.CopyFrom(body)
        changed.attribute.append(wrong)
        content = with_field(b"", 7, with_field(b"", 1, changed.SerializeToString()))
        with pytest.raises(BundleDamaged, match="attribute of type"):
            graph_check.check(content, [SIDES])
    with pytest.raises(BundleDamaged, match="occurs twice"):
        graph_check.check(with_field(b"", 7, with_field(b"", 1, twice)), [SIDES])
    good.functions.add(name="f", domain="ai.onnx")
    with pytest.raises(BundleDamaged, match="field 25 of a model"):
        graph_check.check(good.SerializeToString(), [SIDES])


def test_damaged_bytes_are_refused_or_read_and_never_raise_anything_else():
    rng = np.random.default_rng(0)
    for name in ("convolution", "slice", "reshape by the batch's size", "transposed"):
        nodes, constants = CASES[name]
        good = model(nodes, constants).SerializeToString()
        for _ in range(400):
            bad = bytearray(good)
            for at in rng.integers(0, len(bad), rng.integers(1, 4)):
                bad[at] = rng.integers(0, 256)
            with contextlib.suppress(BundleDamaged):
                graph_check.check(bytes(bad[: rng.integers(1, len(bad) + 1)]), [SIDES])


def beginning(size, *fields):
    """Bytes of a model whose last ``size`` bytes are the last of these fields, each within the one before it.

    Each is a number, or bytes that stand before it and a number.
    """
    head = b""
    for one in reversed(fields):
        before, number = one if isinstance(one, tuple) else (b"", one)
        head = before + varint(number << 3 | 2) + varint(len(head) + size) + head
    return head


def attribute(name, kind):
    """The name and the type of an attribute."""
    return onnx.AttributeProto(name=name, type=kind).SerializeToString()


RELU = helper.make_node("Relu", ["image"], ["features"]).SerializeToString()


def slices(count):
    """Many nodes, each with as many axes as a constant may say."""
    zeros = {name: np.full(4096, value, np.int64) for name, value in {"zero": 0, "one": 1}.items()}
    nodes = [
        helper.make_node("Slice", ["image", "zero", "one", "zero", "one"], [f"{at}" if at else "features"])
        for at in range(count)
    ]
    return model(nodes, zeros).SerializeToString()


def remembered(count):
    """Many sums of as many small integers as are worked out."""
    nodes = [helper.make_node("Add", ["zero", "zero"], [f"{at}"]) for at in range(count)]
    return model([node("Relu", "image"), *nodes], {"zero": np.zeros(4096, np.int64)}).SerializeToString()


MIB = 1 << 20
LONG = {  # how the file begins, how many zeros follow, and what is said
    "integers of an attribute": (
        lambda: beginning(32 * MIB, 7, 1, (RELU, 5), (attribute("axes", onnx.AttributeProto.INTS), 8)),
        32 * MIB,
        "bytes of integers",
    ),
    "integers of a constant": (lambda: beginning(MIB, 7, 5, (b"\x10\x07", 7)), MIB, "bytes of integers"),
    "text of an attribute": (
        lambda: beginning(400 * MIB, 7, 1, (RELU, 5), (attribute("mode", onnx.AttributeProto.STRING), 4)),
        400 * MIB,
        "bytes of texts",
    ),
    "name of a value": (lambda: beginning(400 * MIB, 7, 1, (RELU, 1)), 400 * MIB, "bytes of texts"),
    "note of the model": (
        lambda: model([node("Relu", "image")]).SerializeToString() + beginning(380 * MIB, 6),
        380 * MIB,
        "are not values of constants",
    ),
    "note of a node": (lambda: beginning(380 * MIB, 7, 1, (RELU, 6)), 380 * MIB, "are not values of constants"),
    "numbers that no node reads": (
        lambda: beginning(380 * MIB, 7, 1, (RELU, 5), (attribute("f", onnx.AttributeProto.FLOATS), 7)),
        380 * MIB,
        "are not values of constants",
    ),
    "a constant that no node reads": (
        lambda: beginning(
            380 * MIB,
            7,
            1,
            (RELU, 5),
            (attribute("t", onnx.AttributeProto.TENSOR), 5),
            (b"\x08" + varint(380 * MIB) + b"\x10\x03", 9),
        ),
        380 * MIB,
        "are not values of constants",
    ),
    "values that a constant has not": (
        lambda: beginning(380 * MIB, 7, 5, (b"\x08\x02\x10\x01", 9)),
        380 * MIB,
        r"a constant of shape \[2\] has 99614720 values",
    ),
    "small fields": (lambda: b"\x08\x07" * (5 * MIB), 0, "fields"),
    "empty names": (lambda: beginning(0, 7, 1, (RELU + b"\x0a\x00" * MIB, 2)), 0, "fields"),
    "small nodes": (lambda: with_field(b"", 7, b"\x0a\x06\x22\x04Relu" * MIB), 0, "fields"),
    "nodes": (lambda: with_field(b"", 7, b"\x0a\x06\x22\x04Relu" * 30_000), 0, "30000 nodes"),
    "empty graphs": (lambda: b"\x3a\x00" * 99_999, 0, "99999 graphs, at most 8"),
    "axes": (lambda: slices(9000), 0, "numbers in sizes"),
    "sums": (lambda: remembered(9000), 0, "numbers in sizes"),
}

PEAK = """
import re
from pathlib import Path
def peak():  # KiB of this program; ru_maxrss is also that of the process before its exec
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""

READ = (
    PEAK
    + """
import json, sys, time
from pathlib import Path
from edge_agent.bundle import graph_check
from edge_agent.core import storage
from edge_agent.core.errors import BundleDamaged
before, begin = peak(), time.process_time()
try:
    said = str(graph_check.check(storage.mapped(Path(sys.argv[1])), [(2, 3, 8, 8)]))
except BundleDamaged as error:
    said = str(error)
print(json.dumps({"said": said, "s": time.process_time() - begin, "MB": (peak() - before) / 1024}))
"""
)


@pytest.mark.parametrize("name", LONG)
def test_what_is_read_of_a_graph_is_counted_before_it_takes_memory_or_time(tmp_path, name):
    begins, zeros, message = LONG[name]
    path = tmp_path / "encoder.onnx"
    with path.open("wb") as file:
        file.truncate(file.write(begins()) + zeros)  # which take no room on the disk
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert re.search(f"{message}.*; refused before it is run", result["said"])
    assert result["s"] < 1
    assert result["MB"] < 64


# --- bundles ---------------------------------------------------------------------------------------------------------


def repacked(made, files, name="hostile.hwb"):
    """A bundle whose manifest is right and whose files are others."""
    opened = archive.open_bundle(made.path)
    fields = made.manifest.model_dump(mode="json", exclude={"schema_version", "files", "variants"})
    fields["variants"] = {kind: variant.file for kind, variant in made.manifest.variants.items()}
    contents = {file: opened.read(file) for file in made.manifest.files} | files
    path = made.path.with_name(name)
    archive.pack(path, fields, contents)
    return path


OPENED = (
    PEAK
    + """
import json, resource, sys, time
from pathlib import Path
from edge_agent.bundle import installed
from edge_agent.personal import encoder
from edge_agent.core.errors import BundleDamaged
encoder.onnxruntime()
before = peak()
begin = time.process_time()
try:
    encoder.Encoder.open(installed.install(Path(sys.argv[1]), Path(sys.argv[2])))
    said = "opened"
except BundleDamaged as error:
    said = str(error)
spent, children = time.process_time() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({"said": said, "MB": (peak() - before) / 1024, "s": spent, "children": children}))
"""
)


@pytest.mark.parametrize("name", ["bomb", "loop", "files outside"])
def test_row_39_a_bomb_a_loop_and_files_outside_cost_neither_memory_nor_time(make_bundle, tmp_path, name):
    made = make_bundle(dim=192)
    path = repacked(made, {"encoder.onnx": HOSTILE[name][0]().SerializeToString()})
    assert path.stat().st_size < 16 << 10
    done = subprocess.run(
        [sys.executable, "-c", OPENED, path, tmp_path / "bundles"], capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    assert "refused before it is run" in result["said"]
    assert result["MB"] < 64
    assert result["s"] < 1
    assert result["children"] == 0


def test_an_encoder_is_tried_in_a_process_of_its_own_once(trials, make_bundle, tmp_path, monkeypatch):
    made = make_bundle()
    bundle = installed.install(made.path, tmp_path / "bundles")
    asked = []
    original = encoders.answer_of_child
    monkeypatch.setattr(encoders, "answer_of_child", lambda *given: asked.append(given) or original(*given))
    Encoder.open(bundle)
    Encoder.open(bundle)
    assert len(asked) == 1
    assert asked[0][2]["precision"] == "fp32"
    Encoder.open(bundle, cache=False)  # which believes no record, either
    assert len(asked) == 2


def test_an_encoder_that_computes_something_else_fails_its_trial(trials, make_bundle, tmp_path):
    bundle = installed.install(make_bundle(golden_error=0.5).path, tmp_path / "bundles")
    with pytest.raises(BundleDamaged, match="trial of the fp32 encoder: self-test"):
        Encoder.open(bundle)
    assert not (bundle.made / "trial.json").exists()


def test_a_trial_runs_a_batch_as_large_as_the_agent_does(trials, make_bundle, tmp_path):
    """Where the reader knows less of this graph than ONNX Runtime does, the trial fails, and not the agent."""
    made = make_bundle()
    nodes = [  # a batch of 32 has an element that is not there
        node("Shape", "image", to="sides", start=0, end=1),
        node("Div", "sides", "batch", to="at"),
        node("Gather", "zero", "at", to="none"),
        node("Flatten", "image", to="flat"),
        node("Gemm", "flat", "w", to="product", transB=1),
        node("Relu", "product", to="positive"),
        node("Add", "positive", "none"),
    ]
    content = model(nodes, {"batch": ints(32), "zero": np.zeros(1, np.float32), "w": made.weight}).SerializeToString()
    bundle = installed.install(repacked(made, {"encoder.onnx": content}), tmp_path / "bundles")
    with pytest.raises(BundleDamaged, match="trial of the fp32 encoder: the encoder does not run"):
        Encoder.open(bundle)


def test_an_encoder_that_takes_more_memory_than_it_may_fails_its_trial(trials, make_bundle, tmp_path):
    made = make_bundle(dim=1)
    nodes = [  # 256 MiB at once
        node("ReduceMean", "image", to="mean", keepdims=0),
        node("Expand", "mean", "sides", to="wide"),
        node("Relu", "wide", to="positive"),
        node("ReduceMean", "positive", to="one", keepdims=0),
        node("ReduceMean", "image", to="rows", axes=[1, 2, 3], keepdims=0),
        node("Add", "rows", "one", to="sum"),
        node("Unsqueeze", "sum", "axis"),
    ]
    hungry = model(nodes, {"sides": ints(1 << 25), "axis": ints(1)}).SerializeToString()
    bundle = installed.install(repacked(made, {"encoder.onnx": hungry}), tmp_path / "bundles")
    with pytest.raises(BundleDamaged, match=r"trial of the fp32 encoder: (the encoder does not run|it ended)"):
        encoders.try_out(bundle.folder, "fp32", 64 << 20)


def test_a_trial_gets_no_more_than_half_of_the_machine_whatever_the_size_of_the_file(
    make_bundle, tmp_path, monkeypatch
):
    bundle = installed.install(make_bundle().path, tmp_path / "bundles")
    given = []
    monkeypatch.setattr(encoders, "try_out", lambda folder, precision, memory, *_: given.append(memory))
    cost = encoders.cost_of(bundle, "fp32").memory_bytes
    file = (bundle.folder / "encoder.onnx").stat().st_size
    encoders._try_once(bundle, "fp32", record=False)
    monkeypatch.setattr(graph_check.os, "sysconf", {"SC_PHYS_PAGES": 2, "SC_PAGE_SIZE": cost + file}.get)
    encoders._try_once(bundle, "fp32", record=False)
    assert given == [cost + 4 * file + (96 << 20), cost + file + (96 << 20)]


def test_an_encoder_that_does_not_end_is_killed(trials, make_bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_check, "MOST_WORK", 1 << 60)
    monkeypatch.setattr(encoders, "TRIAL_S", 4.0)
    made = make_bundle(dim=1)
    path = repacked(made, {"encoder.onnx": heavy(9000).SerializeToString()})
    bundle = installed.install(path, tmp_path / "bundles")
    begin = time.monotonic()
    with pytest.raises(BundleDamaged, match="did not end within 4 s"):
        Encoder.open(bundle)
    assert time.monotonic() - begin < 30


def test_golden_tensors_beyond_their_size_are_not_read(make_bundle, tmp_path):
    made = make_bundle(spoilt={"more": np.zeros(1 << 16, np.float32)})
    bundle = installed.install(made.path, tmp_path / "bundles")
    with pytest.raises(BundleDamaged, match="are possible"):
        bundle.golden()
