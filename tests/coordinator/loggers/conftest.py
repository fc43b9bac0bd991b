"""Images for simulations that are logged."""

from __future__ import annotations

import pytest
from simulation_harness import write_images


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 90)
