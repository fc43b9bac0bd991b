"""``headwater export``."""

from __future__ import annotations

import contextlib
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.bundle import figure_rows

from ..config import DEFAULT_CONFIG, ExportConfig, HostedConfig, load_config
from ..views.runs import RunRecord
from .options import Config, Json, RunOption, State, one_of
from .output import console, fit_command, is_live, present, ready_for, set_up_logging, table, text

if TYPE_CHECKING:
    from ..simulation.trained import TrainedModel


if TYPE_CHECKING:
    from export import Report

Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Default: the latest one with a closed round.", show_default=False)
]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Bundle file to write; *.safetensors: the encoder's weights alone.")
]
Calibration = Annotated[
    list[str] | None,
    typer.Option(
        "--calibration",
        help="Labelled data source that int8 takes its ranges from and is compared on; once for each domain. Default: "
        "the configuration's and hosted clients, or all clients of a simulation.",
    ),
]


def export(
    out: Out,
    run: Run = None,
    config: Config = None,
    state: State = None,
    run_option: RunOption = None,
    calibration: Calibration = None,
    as_json: Json = False,
) -> None:
    """Freeze a run's encoder, check it, quantize it, and write it as one bundle file.

    A check that fails leaves an earlier bundle file untouched and says why. --state may be the folder of a simulation,
    which needs no configuration. A file that ends in .safetensors gets the weights as they are, for --weights of other
    runs and for PyTorch.

    Example: headwater export -c coordinator.toml run-0001 --out encoder.hwb
    """
    from ..simulation.trained import TrainedModel, export_run

    set_up_logging(quiet=True)
    run = one_of(run, run_option, "RUN")
    if config is None and state is not None and not DEFAULT_CONFIG.exists():
        folder = state
        settings = ExportConfig()
        hosted = tuple[HostedConfig, ...]()
    else:
        loaded = load_config(config, state)
        folder = loaded.state
        settings = loaded.export
        hosted = loaded.hosted
    ready_for(out)
    if out.suffix == ".safetensors":
        title = "weights"
        result = _write_weights(TrainedModel.of(folder, run), out)
        next_command = f"headwater run --weights {shlex.quote(str(out))}"
    else:
        busy = console.status("exporting and checking") if is_live(console) else contextlib.nullcontext()
        with busy:
            made = export_run(folder, out, settings, run=run, calibration=calibration or (), hosted=hosted)
            title = "exported"
            result = _exported(*made)
        next_command = fit_command(out, made[0].manifest.task.input.kind)
    shown = {name: value for name, value in result.items() if name != "figures"}
    rows = [(name, near_one(value) if name == "int8_cosine" else _cell(value)) for name, value in shown.items()]
    tables = [table(title, ("what", "value"), rows, left=2)]
    if "figures" in result:
        tables.append(
            table("variants", ("variant or domain", "figures"), figure_rows.variant_rows(result["figures"]), left=2)
        )
    present(result, [*tables, f"next: {next_command}"], as_json=as_json)


def _write_weights(trained: TrainedModel, out: Path) -> dict[str, Any]:
    """Write the encoder's tensors by its own names, and return what was written."""
    record = trained.record
    digest = trained.write_weights(out)
    return {
        "run_id": record.run,
        "round": record.round,
        "path": str(out),
        "bytes": out.stat().st_size,
        "tensors": len(trained.model.encoder.state_dict()),
        "sha256": digest,
    }


def _exported(report: Report, record: RunRecord) -> dict[str, Any]:
    from edge_agent.bundle.manifest import variant_figures

    manifest = report.manifest
    return {
        "run_id": record.run,
        "round": record.round,
        "path": str(report.path),
        "bytes": report.path.stat().st_size,
        "bundle_id": manifest.bundle_id,
        "feature_dim": manifest.feature_dim,
        "variants": list(manifest.variants),
        "parity_max_abs": manifest.parity.max_abs,
        "int8_cosine": manifest.parity.int8_cosine,
        "int8_note": report.int8_note,
        "figures": variant_figures(manifest),
        "heads": {name: card.exactness for name, card in manifest.heads.items()},
        "seconds": report.seconds,
    }


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(how)}" for name, how in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else text(value)


def near_one(value: float | None) -> str:
    """Return a cosine with as many digits as it takes to tell it from 1, and one more."""
    if value is None or not 0.999 <= value < 1:
        return text(value)
    return f"{value:.{min(16, 1 + math.ceil(-math.log10(1 - value)))}f}"
