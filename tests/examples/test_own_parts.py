"""The examples that add a method and a head, run with little work."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_agent import heads, methods
from edge_agent.methods.base import Update

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def own_method(monkeypatch):
    monkeypatch.setattr(methods.registry, "_extra", {})
    module = load("05_my_own_method")
    monkeypatch.setattr(module, "ROUNDS", 1)
    return module


def test_the_method_example_compares_two_methods(own_method, capsys):
    own_method.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["fedavg", "fedavgm"]
    assert all(0 <= float(line.split()[-1]) <= 1 for line in lines)
    # The first step starts from speed zero: both methods take the same one.
    assert lines[0].split()[-1] == lines[1].split()[-1]


def test_server_momentum_by_hand(own_method):
    method = own_method.FedAvgM(own_method.FedAvgM.Params(server_momentum=0.5))
    state = method.start({"w": np.float32([0.0])})
    state = method.aggregate(state, [Update("a", 1.0, {"w": np.float32([1.0])})])  # speed 1: w = 1
    state = method.aggregate(state, [Update("a", 1.0, {"w": np.float32([1.0])})])  # speed 0.5 * 1 + 0: w = 1.5
    assert state["w"] == 1.5
    assert set(method.broadcast(state)) == {"w"}


def test_the_head_example_runs_without_torch():
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); "
        "assert not {'torch', 'onnx'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES / "06_my_own_head.py")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: float(line.split()[-1]) for line in done.stdout.splitlines()}
    assert found.keys() == {"cosine", "prototype", "lr"}
    assert found["cosine"] > 0.8


def test_the_head_example_knows_its_classes_by_angle(monkeypatch):
    monkeypatch.setattr(heads.registry, "_extra", {})
    head = load("06_my_own_head").Cosine()
    features = np.float32([[1, 0], [5, 0], [0, 2]])
    head.fit(heads.FitData(features, np.array([0, 0, 2]), 3), np.random.default_rng(0))
    found = head.predict_proba(np.float32([[9, 1], [0.1, 0.2]]))
    assert found.argmax(axis=1).tolist() == [0, 2]
    assert (found[:, 1] == 0).all()
