"""``headwater bundle``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.bundle import figure_rows
from edge_agent.core.errors import UsageError
from edge_agent.core.formats import printable
from export.foreign.settings import ForeignSettings

from ..config import DEFAULT_CONFIG
from .options import Config, Given, Json, State, from_model, state_path
from .output import console, fit_command, is_live, present, ready_for, set_up_logging, table, text

if TYPE_CHECKING:
    from export.foreign import ForeignReport

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="FILE.onnx, FILE.py:CLASS, or the name of a network of torchvision."),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Bundle file to write, usually *.hwb.")]


@from_model(ForeignSettings)
def bundle(
    given: Given, model: Model, out: Out, config: Config = None, state: State = None, as_json: Json = False
) -> None:
    """Make a bundle of a network that no run has trained: check it, quantize it, and write it as one file.

    The features are the input of the network's last classifier, or the tensor that --features names. Without --classes
    the bundle has no classes: each device's heads have those of its own data. With a federation (--config or --state)
    that has a release key the bundle is signed.

    Example: headwater bundle resnet18.onnx --preprocessing preprocessor_config.json --out resnet18.hwb
    """
    from edge_agent.core import config as config_module
    from export.foreign import bundle_network

    from ..runs.release import sign

    # 1. All options are checked before the work, which takes minutes for a large network.
    set_up_logging(quiet=True)
    settings = config_module.parse(ForeignSettings, given, where="options")
    state_folder = _state_folder(config, state)
    if Path(model).is_file() and out.is_file() and out.samefile(model):
        raise UsageError(f"--out {out}: is the file of the network itself; name another file")
    ready_for(out)
    # 2. The bundle, and its signature where a federation's release key signs here.
    busy = console.status("reading and checking") if is_live(console) else contextlib.nullcontext()
    with busy:
        made = bundle_network(model, out, settings)
    version = None if state_folder is None else sign(out, state_folder)
    # 3. The result, with a note where a federation was named and nothing signed.
    result = _result(made, version)
    is_named = config is not None or state is not None
    if is_named and version is None:
        result["notes"].append(f"not signed: {state_folder} has no release key that signs here; see 'headwater keys'")
    rows = [(name, _cell(value)) for name, value in result.items() if name not in {"figures", "notes", "gates"}]
    tables = [table("bundle", ("what", "value"), rows, left=2)]
    tables.append(
        table("checks", ("check", "measured"), [(gate.name, gate.detail) for gate in made.report.gates], left=2)
    )
    tables.append(
        table("variants", ("variant or domain", "figures"), figure_rows.variant_rows(result["figures"]), left=2)
    )
    lines = [f"note: {printable(note)}" for note in result["notes"]]
    lines.append(f"next: {fit_command(out, made.form.spec.kind)}")
    present(result, [*tables, *lines], as_json=as_json)


def _state_folder(config: Path | None, state: Path | None) -> Path | None:
    """Return the state folder of the federation whose release key signs, by --state or the configuration; None: none.

    Raises:
        UsageError: The folder that --state names does not exist.
        ConfigError: The configuration cannot be read.
    """
    if config is None and state is None and not DEFAULT_CONFIG.exists():
        return None
    if state is not None and not state.is_dir():
        raise UsageError(f"--state {state}: no such folder; name that of a federation, or leave the bundle unsigned")
    return state_path(config, state)


def _result(made: ForeignReport, version: int | None) -> dict[str, Any]:
    """Return what was made, as JSON."""
    from edge_agent.bundle.manifest import variant_figures

    report = made.report
    manifest = report.manifest
    return {
        "path": str(report.path),
        "bytes": report.path.stat().st_size,
        "bundle_id": manifest.bundle_id,
        "features": made.point.tensor,
        "features_why": made.point.reason,
        "feature_dim": manifest.feature_dim,
        "pooling": made.pooling,
        "input": manifest.task.input.model_dump(mode="json"),
        "layout": made.form.layout,
        "classes": manifest.task.num_classes,
        "shared_classifier": manifest.global_head is not None,
        "variants": list(manifest.variants),
        "int8_note": report.int8_note,
        "parity_max_abs": manifest.parity.max_abs,
        "int8_cosine": manifest.parity.int8_cosine,
        "signed": version,
        "gates": [{"name": gate.name, "passed": gate.passed, "detail": gate.detail} for gate in report.gates],
        "figures": variant_figures(manifest),
        "notes": list(made.notes),
        "seconds": report.seconds,
    }


def _cell(value: object) -> str:
    """Return a value for a table, without characters that control a terminal: names of tensors are the network's."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(_cell(part) for part in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(text(value))
