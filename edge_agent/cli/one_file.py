"""The command ``edge-agent export``: writes a personal model as one ONNX file for any runtime."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..core import formats
from ..core.errors import UsageError
from ..core.storage import check_writable, write_atomic
from . import output
from .arguments import add_bundle, bundle_of, encoder_of, head_folder, own_head


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent export``."""
    add_bundle(parser)
    parser.add_argument(
        "--head",
        type=Path,
        metavar="DIR",
        help="saved head, or a state folder; default: the head in use, if --bundle is a state folder",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the ONNX file to write")


def export(arguments: argparse.Namespace) -> int:
    """Write a personal model as one ONNX file, for programs and runtimes without Headwater.

    The input of the file is an image of the task's size (uint8, height, width, channels) or a window of a recording
    (float32, channels, time). Its outputs are the probabilities, the encoder's features, and whether the input is
    unlike all training samples. The file contains the preparation of the input, the encoder, the device's own batch
    norm, the head and its calibration, as standard ONNX operators. Its metadata, under 'headwater', have the labels
    and all else that a program needs to use it.

    Before the file is written, its answers are compared with those of 'edge-agent predict'. The file has the precision
    of the head; 'edge-agent fit --precision int8' fits a head for int8.

    Example:
      edge-agent export --bundle b.hwb --head my-head --out cat.onnx
    """
    from ..heads.saved import is_numeric
    from ..personal.one_file import write_one_file
    from ..personal.personalize import load_head, load_numeric_head

    out: Path = arguments.out
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file in it, such as {out / 'model.onnx'}")
    check_writable(out.parent)
    folder = head_folder(arguments.head) or own_head(arguments.bundle)
    if folder is None:
        raise UsageError("there is no head to export; fit one with 'edge-agent fit', and name its folder with --head")
    bundle = bundle_of(arguments)
    load = load_numeric_head if is_numeric(folder) else load_head
    head = load(folder, bundle, arguments.precision)
    written = write_one_file(bundle, encoder_of(arguments, bundle, head), head)
    write_atomic(out, written.content)
    shape = " x ".join(str(size) for size in written.about["input"]["shape"][1:])
    content = {
        "file": str(out),
        "bytes": len(written.content),
        "largest_difference": written.largest_difference,
        **written.about,
    }
    rows = [
        ("file", f"{out}, {len(written.content) / 1e6:.2f} MB"),
        ("input", f"{written.about['input']['name']}: {shape}, {written.about['input']['dtype']}"),
        ("outputs", ", ".join(written.about["outputs"])),
        ("head", f"{head.head.name}, on {head.precision} features"),
        ("checked", f"answers differ from those of the head by {written.largest_difference:.1g} at most"),
    ]
    return output.result(arguments, content, lambda: formats.pairs(rows))
