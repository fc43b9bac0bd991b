from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.bundle.archive import open_bundle
from edge_agent.core.storage import write_tensors
from edge_agent.training.parts import to_arrays
from export.__main__ import main


@pytest.fixture
def files(tmp_path, task):
    method = methods.create("repper", {"global_head": True})
    torch.manual_seed(0)
    model = method.build(task)
    write_tensors(tmp_path / "run.safetensors", to_arrays(model, method.shared_names(model)))
    (tmp_path / "task.json").write_text(task.model_dump_json())
    return tmp_path


def arguments(folder, **changes) -> list[str]:
    settings = {
        "state": folder / "run.safetensors",
        "task": folder / "task.json",
        "method": "repper",
        "params": '{"global_head": true}',
        "samples": 16,
        "exporter": "legacy",
        "out": folder / "out.hwb",
        **changes,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def test_a_checkpoint_becomes_a_bundle(files, capsys):
    assert main([*arguments(files), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    manifest = open_bundle(files / "out.hwb").manifest
    assert told["bundle_id"] == manifest.bundle_id
    assert told["bytes"] == (files / "out.hwb").stat().st_size
    assert told["variants"] == {"fp32": "encoder.onnx", "int8": "encoder.int8.onnx"}
    assert manifest.name == "run"
    assert manifest.global_head is not None
    assert manifest.quantization.ranges == "16 inputs without labels"
    assert told["quantization"]["note"].startswith("accuracies not measured")


def test_without_json_it_prints_lines_for_people(files, capsys):
    assert main([*arguments(files, name="spring"), "--no-int8"]) == 0
    printed = capsys.readouterr().out
    assert "ok   parity: largest difference" in printed
    assert "int8 not asked for" in printed
    assert "out.hwb" in printed
    assert open_bundle(files / "out.hwb").manifest.name == "spring"


def test_calibration_inputs_come_from_a_data_source(files, capsys):
    rng = np.random.default_rng(0)
    np.savez(
        files / "own.npz", inputs=rng.integers(0, 255, (30, 8, 8), dtype=np.uint8), labels=np.array(list("abc" * 10))
    )
    source = f"npz:{files / 'own.npz'}?inputs=inputs&labels=labels"
    assert main(arguments(files, calibration=source)) == 0, capsys.readouterr().err
    manifest = open_bundle(files / "out.hwb").manifest
    assert manifest.quantization.ranges == "30 inputs of 1 domain(s)"


@pytest.mark.parametrize(
    "changes, code, complaint",
    [
        ({"method": "reper"}, 2, "did you mean 'repper'"),
        ({"params": "{global_head}"}, 2, "--params"),
        ({"params": "[1]"}, 2, "is list, expected a JSON object"),
        ({"params": '{"temprature": 1}'}, 2, "did you mean 'temperature'"),
        ({"method": "local", "params": "{}"}, 1, "shares no encoder"),
        ({"samples": 0}, 2, "at least 1"),
        ({"calibration": "nps:somewhere"}, 2, "did you mean 'npz'"),
        ({"task": "/nowhere/task.json"}, 2, "cannot read"),
        ({"state": "/nowhere/run.safetensors"}, 1, "cannot be read"),
    ],
)
def test_mistakes_end_with_their_exit_code_and_one_message(files, capsys, changes, code, complaint):
    assert main(arguments(files, **changes)) == code
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.err.startswith("error: ")
    assert not (files / "out.hwb").exists()


def test_a_task_with_mistakes_lists_them(files, capsys):
    (files / "task.json").write_text('{"class_names": [], "encodr": "small_cnn"}')
    assert main(arguments(files)) == 2
    error = capsys.readouterr().err
    assert "did you mean 'encoder'" in error
    assert "2 mistakes" in error


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "python -m export --state" in capsys.readouterr().out
