"""Real recordings of a watch, where they are at hand: an encoder of five people, personal heads for two others.

The archive (7 people, 98 recordings, 7 shoulder exercises, 6 channels, 50 Hz; from the package seglearn, BSD-3) is not
part of the project. Its place is HEADWATER_WATCH_DATA, or a folder ``shared`` beside the project.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from edge_agent import data
from edge_agent.personal.personalize import alone

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(os.environ.get("HEADWATER_WATCH_DATA") or ROOT.parent / "shared" / "data" / "watch_subjects_a.npz")


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("example_watch", ROOT / "examples" / "04_sensor_windows.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(
    not ARCHIVE.is_file(), reason="no recordings of a watch here; HEADWATER_WATCH_DATA names the archive"
)
def test_two_people_fare_better_with_heads_of_their_own_than_with_the_shared_one(example, tmp_path):
    """Both halves of a person's recordings come from one sitting, so this says nothing about another day."""
    people = example.open_archive(ARCHIVE)
    found = example.new_clients(people, tmp_path)
    assert len(found) == 2
    for subject, scores in found.items():
        samples = data.load(people.source(subject))
        train, test = data.split(samples, 0.5, seed=0)
        best = alone(train, test, len(samples.class_names))
        local = best.right.mean()
        print(f"person {subject}: {scores}, acc.local {local:.3f}, {len(test)} windows")
        assert len(test) > 200
        assert scores["acc.personal"] > scores["acc.global"] + 0.05
        # As good as alone at best: statistics of the windows are enough for these exercises.
        assert best.model.name == "window statistics + lr"
        assert local > 0.95
