"""Comparisons of small samples, in this process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from compared_samples import SETTINGS, write_samples

from coordinator import compare
from coordinator.research.compare.interface import Running


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working folder, with the samples."""
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path)
    return tmp_path


@pytest.fixture
def run(place):
    """Compare methods in this process: (methods, other arguments) -> the result."""

    def compared(*methods, running=None, **changes):
        how = {"seeds": (0, 1), "tune": 2, **SETTINGS, **changes}
        return compare(list(methods), running=running or Running(in_process=True), **how)

    return compared


@pytest.fixture(scope="session")
def words():
    """The same settings as words of a command."""
    options = {"-d": "npz:i.npz", "-n": 2, "-r": 1, "--encoder": "linear", "--encoder-param": "feature_dim=4"}
    return SimpleNamespace(settings=[str(word) for pair in options.items() for word in pair])
