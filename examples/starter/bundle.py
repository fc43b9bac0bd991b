"""Makes the starter bundle of trained weights: ``python examples/starter/bundle.py --bank F --weights F --out F``.

Through the gates that every bundle passes, with batch norm that devices may estimate again, and an int8 variant whose
ranges come from 256 training pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from train import TASK
from views import Views

from edge_agent import models
from edge_agent.bundle.manifest import NEWEST_SCHEMA
from edge_agent.training.parts import load_arrays
from edge_agent.wire.tensors import decode
from export.batch_norm import free_batch_norm
from export.calibration import Calibration
from export.packing import BundleOptions, Checked, Graphs, Origin, Report, check_passed, pack_checked
from export.parity import graph_gates, parity_gate

NAME = "starter-photos"
_PICTURES = 256
_SEED = 77


def make_bundle(weights: Path, bank: Path, out: Path) -> Report:
    """Write the bundle to ``out``."""
    encoder = models.create(TASK)
    load_arrays(encoder, decode(weights.read_bytes()))
    encoder.eval()
    with np.load(bank) as file:
        pictures, _, _ = next(iter(Views(dict(file), _PICTURES, _SEED)))
    inputs = (pictures.to(torch.float32).numpy() / 255 - TASK.input.mean[0]) / TASK.input.std[0]
    calibration = Calibration.from_inputs(inputs.astype(np.float32))
    free_norm = free_batch_norm(encoder, TASK)
    if free_norm is None:
        raise SystemExit("the encoder has no batch norm; expected the network starter_cnn")
    gates = graph_gates(free_norm.exported.model, TASK)
    gate, parity = parity_gate(free_norm.exported.model, encoder, calibration.joined_inputs(TASK))
    gates = [*gates, gate]
    check_passed(gates, TASK.encoder)
    origin = Origin(TASK, int(encoder.feature_dim), schema_version=NEWEST_SCHEMA)
    checked = Checked(Graphs(free_norm.exported, free_norm), origin, gates, parity, encoder)
    return pack_checked(checked, calibration, out, BundleOptions(NAME), {})


def main() -> None:
    """Make the bundle, and say what the gates measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bank", "weights", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    report = make_bundle(arguments.weights, arguments.bank, arguments.out)
    for gate in report.gates:
        print(f"{gate.name}: {gate.detail}")
    print(f"{report.path}, {report.path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
