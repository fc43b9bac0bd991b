"""Runs in the emulated guest: import the host's bundle, compute features, fit the head again, answer with arrays.

usage: in_guest.py BUNDLE INPUTS HEAD OWN OUT (HEAD, OWN: heads that the host fitted and saved, with the bundle's batch
norm and with its own; INPUTS and OUT: .npz)
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import numpy as np

from edge_agent import heads
from edge_agent.bundle import installed
from edge_agent.heads import FitData
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.personalize import load_head
from edge_agent.personal.precision import estimate_norm


def main(bundle_file: Path, inputs_file: Path, head_folder: Path, own_folder: Path, out: Path) -> None:
    """Everything that a device computes, as named arrays."""
    bundle = installed.install(bundle_file, out.parent / "guest-bundles")
    with np.load(inputs_file, allow_pickle=False) as given:
        inputs = given["inputs"]
        labels = given["labels"]
    found = {"machine": np.array(platform.machine())}
    for precision in ("fp32", "int8"):
        found[precision] = Encoder.open(bundle, precision).features(inputs)  # after its self-test
    found["statistics"] = estimate_norm(bundle, inputs).statistics
    own = load_head(own_folder, bundle)
    found["own"] = Encoder.open(bundle, norm=own.norm).features(inputs)  # after the self-test of these statistics
    found["labels_by_head_with_own_norm"] = own.head.predict_proba(found["own"]).argmax(axis=1)
    saved = load_head(head_folder, bundle, "fp32")
    found["labels_by_saved_head"] = saved.head.predict_proba(found["fp32"]).argmax(axis=1)
    head = heads.create("lr")
    head.fit(FitData(found["fp32"], labels, bundle.manifest.task.num_classes), np.random.default_rng(0))
    found["labels_by_own_head"] = head.predict_proba(found["fp32"]).argmax(axis=1)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
