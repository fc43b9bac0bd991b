"""``headwater export``."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_agent import data
from edge_agent import methods as registry
from edge_agent.errors import UsageError
from edge_agent.wire.tensors import decode

from ..encoders import NORM_NOTES
from ..journal import RunRecord, utc_now
from ..pooling import pooled_before
from ..request import Request
from ..serving import load_config
from ..store import StateFolder
from .options import Config, Json, State, console, print_json, ready_for, set_up_logging, show, table, text

Run = Annotated[str | None, typer.Option("--run", help="Run; default: the latest one with a closed round.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Bundle file to write.")]
Calibration = Annotated[
    str | None,
    typer.Option("--calibration", help="Data source of inputs that settle the int8 ranges; default: the file's."),
]


def export(
    out: Out,
    config: Config = None,
    state: State = None,
    run: Run = None,
    calibration: Calibration = None,
    as_json: Json = False,
) -> None:
    """Freeze a run's encoder, check it, quantize it, and write it as one bundle file.

    A gate that fails leaves a bundle that lies there untouched and says why.

    Example: headwater export -c coordinator.toml --run run-0001 --out encoder.hwb
    """
    from export.bundle import export_bundle, model_from_state, synthetic_inputs

    set_up_logging(quiet=True)
    settings = load_config(config, state)
    ready_for(out)
    with StateFolder(settings.state).look() as folder:
        record = _record(folder, run)
        weights = decode(folder.blobs.read(record.checkpoint or ""))
        pooled = pooled_before(folder, record.run, record.round)
    request = Request.from_body(record.request)
    method = registry.create(request.method, request.params)
    source = calibration or settings.export.calibration
    task, folder_of = request.task, None if calibration else settings.export.folder  # as typed here, or in the file
    inputs = synthetic_inputs(task)
    if source:
        inputs = data.load(source, task.input, task.class_names, folder=folder_of).inputs[:128]
    busy = console.status("exporting and checking") if console.is_terminal else contextlib.nullcontext()
    with busy:
        report = export_bundle(
            model_from_state(method, task, {**weights, **pooled}),
            method,
            task,
            inputs,
            out,
            name=record.run,
            created=utc_now().isoformat(timespec="seconds"),
            global_head=method.global_head(weights),
            exporter=settings.export.exporter,
            norm_note=NORM_NOTES[method.norm] if pooled else "",
            int8=settings.export.int8,
        )
    _tell(report, record, as_json=as_json)


def _record(folder: StateFolder, run: str | None) -> RunRecord:
    names = [run] if run else list(reversed(folder.journal.runs()))
    for name in names:
        record = folder.journal.replay(name)
        if record.round and record.checkpoint:
            return record
    which = f"run '{run}' has" if run else "there are no runs with"
    raise UsageError(f"{which} no closed round yet; nothing can be exported before the first one")


def _tell(report: Any, record: RunRecord, *, as_json: bool) -> None:
    manifest = report.manifest
    found = {
        "run_id": record.run,
        "round": record.round,
        "path": str(report.path),
        "bytes": report.path.stat().st_size,
        "fingerprint": manifest.fingerprint,
        "feature_dim": manifest.feature_dim,
        "variants": list(manifest.variants),
        "parity_max_abs": manifest.parity.max_abs,
        "int8_cosine": manifest.parity.int8_cosine,
        "int8_note": report.int8_note,
        "heads": {name: card.exactness for name, card in manifest.heads.items()},
        "seconds": report.seconds,
    }
    if as_json:
        print_json(found)
        return
    shown = [(name, near_one(value) if name == "int8_cosine" else _cell(value)) for name, value in found.items()]
    show(table("exported", ("what", "value"), shown, left=2))


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(how)}" for name, how in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else text(value)


def near_one(value: float | None) -> str:
    """A cosine with as many digits as it takes to tell it from 1, and one more."""
    if value is None or not 0.999 <= value < 1:
        return text(value)
    return f"{value:.{min(16, 1 + math.ceil(-math.log10(1 - value)))}f}"
