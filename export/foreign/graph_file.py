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

OLDEST_OPSET = 13
"""The oldest version of ONNX's operators that is quantized for each channel; older files are converted to it."""

NEWEST_OPSET = 21
"""The newest version of ONNX's operators that ONNX Runtime 1.18 has, the oldest that agents may have."""

NEWEST_IR = 10
"""The newest version of the format that ONNX Runtime 1.18 reads."""

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
    mistakes = [*_mistakes_in_form(model, path), *_mistakes_in_interface(model), *_mistakes_in_weights(model)]
    if mistakes:
        lines = "\n".join(f"  - {mistake}" for mistake in mistakes)
        raise ExportRejected(f"{path}: {len(mistakes)} reason(s) why this is no encoder; nothing was written\n{lines}")
    return _upgraded(model)


def _read_file(path: Path) -> bytes:
    """Return the content of a file, which is not read if it is too large."""
    try:
        if not path.is_file():
            raise UsageError(
                f"{path}: no such file; give an ONNX file, PATH.py:CLASS, or the name of a network of torchvision"
            )
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


def _mistakes_in_form(model: Any, path: Path) -> Iterator[str]:
    """Yield what the format allows and a bundle does not: other files, control flow, functions, newer versions.

    ``path`` is that of the file, for commands that mend it.
    """
    outside = [tensor.name for tensor in model.graph.initializer if tensor.external_data or tensor.data_location == 1]
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


def _mistakes_in_interface(model: Any) -> Iterator[str]:
    """Yield why the inputs are not one float32 array."""
    inputs = inputs_of(model)
    if len(inputs) != 1:
        listed = _names([f"{value.name} {_shape_text(value)}" for value in inputs])
        yield f"{len(inputs)} inputs ({listed}), expected one; export the part that takes images or recordings alone"
        return
    element = inputs[0].type.tensor_type.elem_type
    if element != TensorProto.FLOAT:
        kind = TensorProto.DataType.Name(element).lower()
        yield f"input '{inputs[0].name}' is {kind}, expected float32; export the network in float32"
    if len(sides_of(inputs[0])) not in {2, 3, 4}:
        yield f"input '{inputs[0].name}' is {_shape_text(inputs[0])}, expected 2 to 4 axes, the batch first"


def _mistakes_in_weights(model: Any) -> Iterator[str]:
    """Yield the weights that hold NaN or infinity."""
    damaged = []
    for tensor in model.graph.initializer:
        is_float = tensor.data_type in {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}
        is_here = not tensor.external_data and tensor.data_location != 1
        if is_float and is_here and not np.isfinite(numpy_helper.to_array(tensor)).all():
            damaged.append(tensor.name)
    if damaged:
        yield (
            f"{len(damaged)} weights hold NaN or infinity ({_names(damaged)}); take a checkpoint from before training "
            "diverged"
        )


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
