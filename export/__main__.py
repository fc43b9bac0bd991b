"""``python -m export``: from a run's checkpoint to a bundle file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_agent import methods
from edge_agent.core import config
from edge_agent.core.errors import ConfigError, HeadwaterError
from edge_agent.core.storage import read_regular_text, read_tensors
from edge_agent.core.task import Task

from .build import TrainedEncoder, build_bundle, model_from_state, synthetic_inputs
from .calibration import Calibration
from .domains import domains_of
from .packing import BundleOptions, Report

_EXAMPLE = """example:
  python -m export --state state.safetensors --task task.json --method repper \\
      --calibration digits --out encoder.hwb
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of the command line ``arguments``."""
    options = _parser().parse_args(arguments)
    try:
        report = _export(options)
    except HeadwaterError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    manifest = report.manifest
    size = report.path.stat().st_size
    if options.json:
        content = {
            "path": str(report.path),
            "bytes": size,
            "bundle_id": manifest.bundle_id,
            "variants": {precision: variant.file for precision, variant in manifest.variants.items()},
            "parity": manifest.parity.model_dump(mode="json"),
            "gates": [asdict(gate) for gate in report.gates],
            "int8_note": report.int8_note,
            "quantization": None if manifest.quantization is None else manifest.quantization.model_dump(mode="json"),
            "seconds": report.seconds,
        }
        print(json.dumps(content, indent=1))
        return 0
    for gate in report.gates:
        print(f"{'ok  ' if gate.passed else 'FAIL'} {gate.name}: {gate.detail}")
    if report.int8_note:
        print(f"int8 {report.int8_note}")
    print(f"{report.path}: {size / 1e6:.2f} MB, {', '.join(manifest.variants)}, {manifest.bundle_id[:16]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m export",
        description="Write the frozen encoder of a run as a bundle for devices.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--state", type=Path, required=True, help="checkpoint of the shared tensors (.safetensors)")
    parser.add_argument("--task", type=Path, required=True, help="the task as JSON")
    parser.add_argument("--method", required=True, help=f"one of {', '.join(methods.names())}")
    parser.add_argument("--params", default="{}", help="the method's parameters as JSON")
    parser.add_argument(
        "--calibration",
        action="append",
        metavar="SOURCE",
        help="labelled data source (kind:where?option=value) that int8 takes its ranges from and is compared on; give "
        "several, one for each domain (default: random inputs, and nothing is compared)",
    )
    parser.add_argument("--samples", type=int, default=128, help="random inputs (default 128)")
    parser.add_argument("--exporter", choices=("auto", "dynamo", "legacy"), default="auto")
    parser.add_argument("--no-int8", action="store_true", help="fp32 only")
    parser.add_argument("--name", help="name of the release (default: the state file's name)")
    parser.add_argument("--out", type=Path, required=True, help="bundle file to write, usually *.hwb")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _export(options: argparse.Namespace) -> Report:
    """Export the state that the command line names.

    Raises:
        HeadwaterError: An option, a file or the export is at fault.
    """
    try:
        text = read_regular_text(options.task)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--task", [f"cannot read {options.task}: {error}"]) from error
    task = config.parse(Task, _object(text, str(options.task)), where=str(options.task))
    method = methods.create(options.method, _object(options.params, "--params"))
    state = read_tensors(options.state)
    if options.samples < 1:
        raise ConfigError("--samples", [f"{options.samples}, expected at least 1"])
    model = model_from_state(method, task, state)
    trained = TrainedEncoder(model, method, task, method.global_head(state), method.shared_statistics(state))
    if options.calibration:
        calibration = Calibration.from_domains(domains_of(options.calibration, task))
    else:
        calibration = Calibration.from_inputs(synthetic_inputs(task, options.samples))
    name = options.name or options.state.stem
    choices = BundleOptions(name, exporter=options.exporter, int8=not options.no_int8)
    return build_bundle(trained, calibration, options.out, choices)


def _object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        ConfigError: The text is not JSON, or not an object.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(where, [f"invalid JSON: {error}"]) from error
    if not isinstance(content, dict):
        raise ConfigError(where, [f"is {type(content).__name__}, expected a JSON object"])
    return content


if __name__ == "__main__":
    sys.exit(main())
