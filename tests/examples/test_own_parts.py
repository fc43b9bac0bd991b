"""The examples that add a method and a head, run with little work."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_agent import heads, methods, models
from edge_agent.methods import Update

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
    monkeypatch.setattr(module, "CLIENTS", 2)
    return module


@pytest.mark.slow
def test_the_method_example_compares_two_methods(own_method, capsys):
    own_method.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["fedavg", "medianavg"]
    assert all(0 <= float(line.split()[-1]) <= 1 for line in lines)


def test_the_median_by_hand(own_method):
    method = own_method.MedianAvg(own_method.MedianAvg.Params())
    updates = [Update(name, 1.0, {"w": np.float32([value])}) for name, value in (("a", 0.0), ("b", 1.0), ("c", 99.0))]
    assert method.aggregate({"w": np.float32([7.0])}, updates)["w"] == 1.0


def test_the_encoder_example_trains_and_exports(monkeypatch, capsys):
    monkeypatch.setattr(models.registry, "_extra", {})
    module = load("07_my_own_encoder")
    monkeypatch.setattr(module, "ROUNDS", 1)
    module.main()
    said = capsys.readouterr().out
    assert "accuracy of the clients: 0." in said
    assert "bundle for devices: " in said


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


def test_the_names_that_others_may_build_on_exist():
    """The table of the guide: ``module`` lists its own names, and the others are named beside their module."""
    text = (EXAMPLES / "guides" / "research.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1]
        for line in text.partition("## What you can build on")[2].splitlines()
        if line.startswith("|")
    ]
    named = set()
    for row in rows:
        words = re.findall(r"`([\w.]+)`", row)
        for place in (word for word in words if word.startswith("edge_agent.")):
            module = importlib.import_module(place)
            others = [word for word in words if word not in {place, "__all__", "torch.nn.Module"}]
            assert [name for name in [*others, *getattr(module, "__all__", ())] if not hasattr(module, name)] == []
            named.add(place)
    assert named >= {"edge_agent.methods", "edge_agent.heads", "edge_agent.data", "edge_agent.training.loops"}


def test_examples_import_only_what_others_may_build_on():
    """A module is named by the guide, or it is a front door."""
    text = (EXAMPLES / "guides" / "research.md").read_text(encoding="utf-8")
    allowed = {"coordinator", "edge_agent", "export", "headwater", *re.findall(r"`(edge_agent\.[\w.]+)`", text)}
    for name in ("05_my_own_method", "06_my_own_head", "07_my_own_encoder", "08_notebook", "09_head_without_torch"):
        tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
        ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} - sys.stdlib_module_names
        imported = {module for module in ours if module.partition(".")[0] in {"coordinator", "edge_agent", "export"}}
        assert imported <= allowed, name
