"""Simulations whose states are kept, and analyses of them with few samples."""

from __future__ import annotations

from federation_duties import SMALL
from simulation_harness import run, small_plan

from coordinator.research.analyze import Location, Settings, analyze, find

PARAMS = {
    "dualfed": {**SMALL, "contrastive_weight": 1.0, "projector_width": 8},
    "repper": {**SMALL, "augment": False, "head": "prototype"},
    "fedpac": {**SMALL, "min_class_count": 1},
}


def simulated(images, out, method="fedavg", **changes):
    """Folder and result of a simulation of four rounds with features of 6 numbers; every other state is kept."""
    wished = {"params": PARAMS.get(method, SMALL), "rounds": 4, "encoder_params": {"feature_dim": 6}, "keep_every": 2}
    return out, run(small_plan(images, method, **{**wished, **changes}), out)


def analyzed(path, *data, **settings):
    chosen = Settings(**{"tsne": 0, "samples": 20, "probe": 24, **settings})
    return analyze(find(Location(str(path), data=data), chosen), chosen)


def reasons(result):
    return {one["what"]: one["why"] for one in result["left_out"]}
