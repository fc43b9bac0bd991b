"""The command ``edge-agent export``: a personal model as one ONNX file for any runtime."""

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
        help="saved head, or a state folder; default: that of a device whose state folder is the bundle",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the ONNX file to write")


def export(arguments: argparse.Namespace) -> int:
    """Write a personal model as one ONNX file, for programs and runtimes that know nothing of Headwater.

    The file takes the pixels of an image of the task's size (uint8, height, width, channels) or a window of a recording
    (float32, channels, time), and gives probabilities, the encoder's features, and whether the input is unlike all
    training samples. Preparation of the input, encoder, the device's own batch norm, head and calibration are in it, as
    plain operators of ONNX. Labels and all that a program has to know are in its metadata, under 'headwater'.

    Its answers are compared with those of 'edge-agent predict' before it is written. It has the precision of the head:
    'edge-agent fit --precision int8' makes one for int8.

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
    content = {"file": str(out), "bytes": len(written.content), "largest_difference": written.worst, **written.about}
    rows = [
        ("file", f"{out}, {len(written.content) / 1e6:.2f} MB"),
        ("input", f"{written.about['input']['name']}: {shape}, {written.about['input']['dtype']}"),
        ("outputs", ", ".join(written.about["outputs"])),
        ("head", f"{head.head.name}, on {head.precision} features"),
        ("checked", f"answers differ from those of the head by {written.worst:.1g} at most"),
    ]
    return output.result(arguments, content, lambda: formats.pairs(rows))
