"""Reading an ONNX file that somebody else has made: what no bundle can hold is refused first, and all of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from edge_agent.core.errors import ExportRejected, UsageError, cause
from edge_agent.core.storage import read_regular

MOST_FILE_BYTES = 1 << 30
"""The most bytes of an ONNX file; a bundle has no more, and a device's limit of memory is half of it."""

MOST_NODES = 50_000
"""The most nodes of an ONNX file; a bundle has a fifth at most, once sizes are constants."""

OLDEST_OPSET = 13
"""The oldest version of ONNX's operators that is quantized for each channel; older files are converted to it."""

NEWEST_OPSET = 21
"""The newest version of ONNX's operators that ONNX Runtime 1.18 has, the oldest that agents may have."""

NEWEST_IR = 10
"""The newest version of the format that ONNX Runtime 1.18 reads."""

_WEIGHTS_ALONE = "it holds weights without a network: name that, and the file by --weights {path}"
_NOT_ONNX = {
    ".py": "name the class or function in it: {path}:NAME",
    ".hwb": "it is a bundle already; 'edge-agent fit --bundle {path}' fits a head to it",
    **dict.fromkeys((".pth", ".pt", ".bin", ".safetensors"), _WEIGHTS_ALONE),
}
"""What to do about a file whose name says that it is no ONNX file."""

_ONNX_DOMAINS = ("", "ai.onnx")
_SHOWN = 5
"""How many names of one kind a message lists."""


def read_graph(path: Path) -> Any:
    """Return the model (`onnx.ModelProto`) in a file, with operators of a version that devices have.

    Raises:
        UsageError: The file does not exist or cannot be read.
        ExportRejected: It is too large, is not ONNX, or has something that no bundle can hold; all of it is listed.
    """
    content = _read_file(path)
    try:
        model = onnx.load_from_string(content)
    except Exception as error:  # protobuf's own errors have no common base
        raise ExportRejected(
            f"{path}: not an ONNX file ({type(error).__name__}); give one that ends in .onnx"
        ) from error
    if not model.graph.node:
        raise ExportRejected(f"{path}: not an ONNX file, or a graph without nodes; export the network again")
    if not all(isinstance(name, str) for name in _names_in(model)):
        raise ExportRejected(f"{path}: has names that are no UTF-8 text; copy the file, or export the network again")
    mistakes = [
        *_mistakes_in_form(model, path),
        *_mistakes_in_nodes(model),
        *_mistakes_in_interface(model),
        *_mistakes_in_weights(model),
    ]
    if mistakes:
        lines = "\n".join(f"  - {mistake}" for mistake in mistakes)
        raise ExportRejected(f"{path}: {len(mistakes)} reason(s) why this is no encoder; nothing was written\n{lines}")
    return _upgraded(model)


def _read_file(path: Path) -> bytes:
    """Return the content of a file, which is not read if it is too large."""
    try:
        if not path.is_file():
            reason = "is not a file" if path.exists() else "no such file"
            raise UsageError(
                f"{path}: {reason}; give an ONNX file, PATH.py:CLASS, or the name of a network of torchvision"
            )
        if path.suffix in _NOT_ONNX:
            raise UsageError(f"{path}: not an ONNX file; {_NOT_ONNX[path.suffix].format(path=path)}")
        size = path.stat().st_size
        if size > MOST_FILE_BYTES:
            raise ExportRejected(
                f"{path}: {size / 1e9:.1f} GB, at most {MOST_FILE_BYTES / 1e9:.1f} GB are read: no device could run "
                "it; choose a smaller network"
            )
        return read_regular(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {cause(error)}") from error


def inputs_of(model: Any) -> list[Any]:
    """Return the declarations of the inputs of a model; initializers are none, although old files list them."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def sides_of(value: Any) -> list[int | None]:
    """Return the sides of a declared value; None for one that has a name instead of a number, or nothing."""
    # A side of 0 or less stands for one that is not known.
    return [side.dim_value if side.dim_value > 0 else None for side in value.type.tensor_type.shape.dim]


def opset_of(model: Any) -> int:
    """Return the version of ONNX's own operators that a model uses; 0 where it states none."""
    return max((entry.version for entry in model.opset_import if entry.domain in _ONNX_DOMAINS), default=0)


def _names_in(model: Any) -> Iterator[str | bytes]:
    """Yield all names in a model; protobuf gives one that is no text as bytes."""
    graph = model.graph
    for entry in model.opset_import:
        yield entry.domain
    for value in (*graph.input, *graph.output, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)


def _mistakes_in_form(model: Any, path: Path) -> Iterator[str]:
    """Yield what the format allows and a bundle does not: other files, control flow, functions, newer versions.

    ``path`` is that of the file, for commands that mend it.
    """
    outside = [name for name, tensor in _tensors_of(model) if _is_outside(tensor)]
    if outside:
        yield (
            f"{len(outside)} weights are in another file ({_names(outside)}), as torch.onnx.export writes them unless "
            'it gets external_data=False; join them: python -c "import onnx; '
            f'onnx.save(onnx.load({str(path)!r}), {str(path.with_stem(f"{path.stem}-joined"))!r})"'
        )
    flow = sorted(
        {node.op_type for node in model.graph.node if any(_has_graph(attribute) for attribute in node.attribute)}
    )
    if flow:
        yield f"control flow ({_names(flow)}), which devices do not run; export with fixed branches and lengths"
    if len(model.graph.node) > MOST_NODES:
        yield f"{len(model.graph.node)} nodes, at most {MOST_NODES} are read; export the network without loops unrolled"
    if model.graph.sparse_initializer:
        yield f"{len(model.graph.sparse_initializer)} sparse weights; export the network with dense ones"
    if model.functions:
        yield f"{len(model.functions)} local functions; inline them with onnx.inliner.inline_local_functions"
    opset = opset_of(model)
    if opset > NEWEST_OPSET:
        yield (
            f"operators of version {opset}, devices have up to {NEWEST_OPSET}; export with opset_version={NEWEST_OPSET}"
        )


def _has_graph(attribute: Any) -> bool:
    """Return whether an attribute of a node holds a graph."""
    return bool(attribute.HasField("g") or attribute.graphs)


def _tensors_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a model with their names: initializers, and the tensors that nodes hold themselves."""
    for tensor in model.graph.initializer:
        yield tensor.name, tensor
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield _label_of(node), attribute.t


def _is_outside(tensor: Any) -> bool:
    """Return whether the values of a tensor are in another file."""
    return bool(tensor.external_data or tensor.data_location == TensorProto.EXTERNAL)


def _label_of(node: Any) -> str:
    """Return what people know a node by: its name, else its first result, else its operator."""
    return str(node.name or next(iter(node.output), "") or node.op_type)


def _mistakes_in_nodes(model: Any) -> Iterator[str]:
    """Yield why the nodes are no order in which each computes something new from what is there before it.

    All that follows the results of nodes back to the input relies on it: a circle would have no end.
    """
    # 1. An empty name stands for an optional input that is left out.
    available = {"", *(value.name for value in model.graph.input)}
    available.update(tensor.name for tensor in model.graph.initializer)
    available.update(tensor.values.name for tensor in model.graph.sparse_initializer)
    opset = opset_of(model)
    too_early: list[str] = []
    written_twice: list[str] = []
    wrong_count: list[str] = []
    for node in model.graph.node:
        # 2. What it reads is there, and what it writes is not.
        too_early += [name for name in node.input if name not in available]
        results = [name for name in node.output if name]
        written_twice += [name for name in results if name in available or results.count(name) > 1]
        available.update(results)
        # 3. It has as many inputs and results as its operator.
        if not _has_right_counts(node, opset):
            wrong_count.append(f"{_label_of(node)} {node.op_type}")
    if too_early:
        yield f"{len(too_early)} inputs of nodes are computed by no node before them ({_names(too_early)})"
    if written_twice:
        yield f"{len(written_twice)} results of nodes have a name that is taken ({_names(written_twice)})"
    if wrong_count:
        yield f"{len(wrong_count)} nodes have too few or too many inputs or results ({_names(wrong_count)})"


def _has_right_counts(node: Any, opset: int) -> bool:
    """Return whether a node has as many inputs and results as its operator; those of others are not known."""
    if node.domain not in _ONNX_DOMAINS or not 1 <= opset <= NEWEST_OPSET:
        return True
    try:
        operator = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return True
    has_inputs = operator.min_input <= len(node.input) <= operator.max_input
    has_results = operator.min_output <= len(node.output) <= operator.max_output
    return has_inputs and has_results


def _mistakes_in_interface(model: Any) -> Iterator[str]:
    """Yield why the inputs are not one float32 array, and that there is no output."""
    if not model.graph.output:
        yield "no output, expected features or classes; export the network again"
    inputs = inputs_of(model)
    if len(inputs) != 1:
        listed = _names([f"{value.name} {_shape_text(value)}" for value in inputs])
        yield f"{len(inputs)} inputs ({listed}), expected one; export the part that takes images or recordings alone"
        return
    element = inputs[0].type.tensor_type.elem_type
    if element != TensorProto.FLOAT:
        is_type = element in TensorProto.DataType.values()
        kind = TensorProto.DataType.Name(element).lower() if is_type else f"of type {element}"
        yield f"input '{inputs[0].name}' is {kind}, expected float32; export the network in float32"
    if len(sides_of(inputs[0])) not in {2, 3, 4}:
        yield f"input '{inputs[0].name}' is {_shape_text(inputs[0])}, expected 2 to 4 axes, the batch first"


def _mistakes_in_weights(model: Any) -> Iterator[str]:
    """Yield the weights that cannot be read, and those that hold NaN or infinity."""
    torn = []
    damaged = []
    for name, tensor in _tensors_of(model):
        if _is_outside(tensor):
            continue
        values = _values_of(tensor)
        is_float = tensor.data_type in {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}
        if values is None:
            torn.append(name)
        elif is_float and not np.isfinite(values).all():
            damaged.append(name)
    if torn:
        yield (
            f"{len(torn)} weights have other bytes than their shape and type say ({_names(torn)}); the file is "
            "damaged, copy it or export the network again"
        )
    if damaged:
        yield (
            f"{len(damaged)} weights hold NaN or infinity ({_names(damaged)}); take a checkpoint from before training "
            "diverged"
        )


def _values_of(tensor: Any) -> np.ndarray | None:
    """Return the values of a tensor; None where its bytes are not those of its shape and type."""
    if min(tensor.dims, default=0) < 0:
        return None
    try:
        return numpy_helper.to_array(tensor)
    except Exception:  # noqa: BLE001 - NumPy's errors, ONNX's own, and those of tables of types
        return None


def _upgraded(model: Any) -> Any:
    """Return a model whose operators are of a version that can be quantized.

    Raises:
        ExportRejected: ONNX's converter does not know how.
    """
    if opset_of(model) < OLDEST_OPSET:
        try:
            model = onnx.version_converter.convert_version(model, OLDEST_OPSET)
        except Exception as error:  # the converter's errors have no common base
            raise ExportRejected(
                f"operators of version {opset_of(model)} cannot be converted to {OLDEST_OPSET}: {str(error)[:200]}; "
                "export the network again with a newer opset_version"
            ) from error
    # The format's newer versions add types and notes, which the checks afterwards refuse where they are used.
    model.ir_version = min(model.ir_version, NEWEST_IR)
    return model


def _shape_text(value: Any) -> str:
    """Return the shape of a declared value for people."""
    sides = [
        str(side.dim_value) if side.HasField("dim_value") else side.dim_param or "?"
        for side in value.type.tensor_type.shape.dim
    ]
    return f"[{', '.join(sides)}]"


def _names(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:80] for name in names[:_SHOWN]) + more
