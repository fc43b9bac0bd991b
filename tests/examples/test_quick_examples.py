"""The examples that need no broker, run with little work; `.ci/run` runs all of them as they are."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_agent import data
from edge_agent.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch):
    """An example as a module; what it registers is forgotten afterwards."""
    monkeypatch.setattr(data.registry, "_extra", {})

    def loaded(name: str):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_two_agents_in_memory_train_for_the_rounds_that_were_asked_for(load, tmp_path, monkeypatch):
    example = load("01_two_agents_in_memory")
    monkeypatch.setattr(example, "ROUNDS", 2)
    summary = example.run(tmp_path)
    assert (summary["status"], summary["rounds"]) == ("finished", 2)
    assert [agent["id"] for agent in summary["agents"]] == ["agent-0", "agent-1"]
    assert all(agent["acc"]["personal"] > 0.5 for agent in summary["agents"]), "chance is 0.1"


@pytest.mark.parametrize("name, most", [("08_notebook", 15), ("09_head_without_torch", 10)])
def test_short_scripts_are_as_short_as_they_are_said_to_be(name, most):
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= most


@pytest.mark.slow
def test_a_notebook_of_two_methods_ends_in_a_bundle_and_a_head_without_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__'); {check}"
    for name, check in (
        ("08_notebook", "0"),
        ("09_head_without_torch", "assert not {'torch', 'onnx', 'coordinator'} & set(sys.modules)"),
    ):
        command = [sys.executable, "-c", code.format(check=check), str(EXAMPLES / f"{name}.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "notebook").iterdir()} >= {
        "fedavg.svg",
        "personal.onnx",
        "encoder.hwb",
        "head",
    }


@pytest.mark.slow
def test_the_encoder_of_the_readme_is_of_use(tmp_path):
    """Its lines as they are, on a folder of photos; before, the clients were right on 18 %."""
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    lines = re.search(r"## From Python\n\n```python\n(.*?)```", text, re.DOTALL)[1]
    drawn = data.load("digits:slanted?client=0&clients=3&n=200", compact=True)
    for row, (pixels, label) in enumerate(zip(drawn.inputs, drawn.labels, strict=True)):
        folder = tmp_path / ("photos" if row % 2 else "test") / drawn.class_names[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(folder / f"{row}.png")
    code = f"{lines}\nprint(result.accuracy, head.evaluate('images:test')['acc.personal'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    clients, photos = map(float, done.stdout.split()[-2:])
    assert clients > 0.8
    assert photos > 0.8


def test_custom_data_source_loads_both_ways_and_explains_a_typo(load, capsys):
    load("02_custom_data_source").main()
    *rows, typo, hint = capsys.readouterr().out.splitlines()
    scores = {row.split(":")[0] + row.split(":")[1].split("?")[0]: float(row.split()[-1]) for row in rows}
    assert len(scores) == 3
    assert scores["wavescalm"] == 1.0
    assert scores["wavescalm"] >= scores["wavesstormy"]
    assert "1 mistake" in typo
    assert "m: unknown key" in hint


def test_custom_data_source_needs_no_torch():
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, str(EXAMPLES / "02_custom_data_source.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_waves_refuse_options_that_make_no_sense(load):
    example = load("02_custom_data_source")
    data.registry.add("waves", example.SOURCE)
    with pytest.raises(ConfigError, match="n = '1'"):
        data.load("waves:calm?n=1", example.INPUT, example.CLASSES)


@pytest.mark.slow
def test_offline_head_beats_the_shared_classifier_on_a_style_nobody_trained_on(load, capsys, tmp_path):
    example = load("03_offline_head")
    example.main(tmp_path)
    said = capsys.readouterr().out
    fit = dict(re.findall(r"^(acc\.\w+) +([\d.]+) %", said, re.MULTILINE))
    assert float(fit["acc.personal"]) > max(85, float(fit["acc.global"])), "chance is 10 %"
    assert (tmp_path / "encoder.hwb").is_file(), "the bundle stays"
    assert f"--bundle {tmp_path / 'encoder.hwb'} --data images:photos" in said
    assert [line for line in said.splitlines() if line.startswith("$")] == [
        f"$ edge-agent {word} …" for word in ("fit", "evaluate", "predict")
    ]
    assert len(re.findall(r"^\d +\d +[\d.]+ %$", said, re.MULTILINE)) == 3, "three predictions"


def test_made_up_recordings_are_what_the_window_source_reads(load, tmp_path):
    example = load("04_sensor_windows")
    path = tmp_path / "people.npz"
    example.made_up(path, people=2, each=1)
    people = example.open_archive(path)
    assert people.subjects == (0, 1)
    samples = data.load(people.source(1))
    # 300 samples at 50 Hz in windows of 100, each 50 on: (300 - 100) / 50 + 1 = 5 windows of each of 3 exercises.
    assert samples.inputs.shape == (15, 6, 100)
    assert np.bincount(samples.labels).tolist() == [5, 5, 5]


def test_new_people_fare_better_with_a_head_of_their_own(load, tmp_path):
    example = load("04_sensor_windows")
    path = tmp_path / "people.npz"
    example.made_up(path)
    found = example.new_clients(example.open_archive(path), tmp_path, rounds=4)
    assert sorted(found) == [5, 6]
    for result in found.values():
        assert result["acc.personal"] > result["acc.global"]
