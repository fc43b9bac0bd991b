"""Simulations that several files of tests analyze; they are only looked at, so each is run once."""

from __future__ import annotations

import shutil

import pytest
from analysis_harness import simulated
from simulation_harness import write_images


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("analyses")


@pytest.fixture(scope="session")
def images(folder):
    return write_images(folder / "images.npz")


@pytest.fixture(scope="session")
def runs(folder, images):
    """Method -> (folder, result); each is run once."""
    made = {}

    def run(method):
        if method not in made:
            made[method] = simulated(images, folder / method, method)
        return made[method]

    return run


@pytest.fixture(scope="session")
def coordinator(runs, folder):
    """A coordinator's state folder: a simulation's without what only a simulation has."""
    path, _ = runs("fedavg")
    for name in ("journal.db", "blobs", "runs"):
        source = path / name
        target = folder / "coordinator" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return folder / "coordinator"
