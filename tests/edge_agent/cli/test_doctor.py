"""``edge-agent doctor``: its verdict on data of other classes, and on a running agent that has a fault."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from edge_agent import __version__
from edge_agent.agent import data_check
from edge_agent.cli import main
from edge_agent.core.locks import folder_lock
from edge_agent.core.storage import write_json
from edge_agent.core.task import ImageInput, Task

TASK = Task(input=ImageInput(channels=3, height=32, width=32), class_names=("mug", "key", "box"), encoder="small_cnn")
FAULT = {
    "kind": "data",
    "error": "DataError",
    "code": "data",
    "message": "images:photos: has class 'Mug', expected 'mug'",
    "remedy": "correct the data",
    "at": "2026-11-24T10:00:00+00:00",
}


@pytest.fixture
def place(tmp_path):
    """The configuration of an agent with photos of three classes, whose broker is away."""
    for name in TASK.class_names:
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "1.png")
    (tmp_path / "agent.toml").write_text(
        'id = "porch"\ntier = "head"\nstate = "state"\n\n[broker]\nurl = "mqtt://127.0.0.1:1"\n\n'
        f'[data]\nsource = "images:{tmp_path}/photos"\n'
    )
    (tmp_path / "state").mkdir()
    return tmp_path


@pytest.fixture
def diagnose(place, capsys):
    """Call with nothing: the exit code, the verdict, and the agent's own steps by name."""

    def run():
        capsys.readouterr()
        code = main(["doctor", "--config", str(place / "agent.toml"), "--json"])
        found = json.loads(capsys.readouterr().out)
        return code, found["verdict"], {step["step"]: step for step in found["agent"]}

    return run


def test_without_a_task_the_classes_are_not_compared(diagnose):
    code, verdict, steps = diagnose()
    assert (code, steps["data"]["ok"]) == (75, True)
    assert "the broker cannot be reached" in verdict
    assert "running agent" not in steps, "none runs"


def test_class_folders_are_compared_with_the_task_that_was_named_last(place, diagnose):
    data_check.note_task(place / "state", TASK)
    code, _, steps = diagnose()
    assert (code, steps["data"]["detail"].endswith("fits the last task")) == (75, True)
    (place / "photos/mug").rename(place / "photos/Mug")
    (place / "photos/key").rename(place / "photos/keys")
    code, verdict, _ = diagnose()
    assert code == 2
    assert verdict.startswith("not ready: data: ")
    assert "Mug" in verdict
    assert "keys" in verdict


def test_class_folders_are_compared_with_the_bundle_before_any_task(place, diagnose, make_bundle):
    assert main(["import", str(make_bundle("b.hwb").path), "--state", str(place / "state")]) == 0
    code, verdict, _ = diagnose()
    assert code == 2
    assert verdict.startswith("not ready: data: "), "the bundle is about digits"


def test_a_fault_of_the_running_agent_is_the_verdict(place, diagnose):
    """It said "ready" of an agent that did no work because of its class folders."""
    write_json(place / "state/status.json", {"condition": "fault", "fault": FAULT})
    assert diagnose()[0] == 75, "that agent does not run: its fault may be over"
    with folder_lock(place / "state", "edge-agent porch"):
        code, verdict, steps = diagnose()
        assert (code, steps["running agent"]["ok"]) == (2, False)
        assert verdict == f"not ready: running agent: DataError: {FAULT['message']}; correct the data"
        write_json(place / "state/status.json", {"condition": "stalled", "fault": {**FAULT, "error": "DiskError"}})
        assert diagnose()[0] == 1
        write_json(place / "state/status.json", {"condition": "ok", "fault": None, "version": __version__})
        code, _, steps = diagnose()
        assert code == 75
        assert steps["running agent"]["detail"].endswith("has no fault")
        write_json(place / "state/status.json", {"condition": "ok", "fault": None, "version": "0.0.7"})
        assert "restart the agent" in diagnose()[2]["running agent"]["detail"]


@pytest.mark.parametrize("way", ["--config", "--broker"])
def test_each_broker_of_a_list_is_tried_and_the_one_that_fails_is_named(place, capsys, way):
    file = place / "agent.toml"
    file.write_text(file.read_text().replace('"mqtt://127.0.0.1:1"', '["mqtt://127.0.0.1:1", "mqtt://127.0.0.1:2"]'))
    value = {"--config": str(file), "--broker": "mqtt://127.0.0.1:1,mqtt://127.0.0.1:2"}[way]
    assert main(["doctor", way, value, "--json"]) == 75
    report = json.loads(capsys.readouterr().out)
    failed = [step["step"] for step in report["broker"] if not step["ok"]]
    assert failed == ["tcp of mqtt://127.0.0.1:1", "tcp of mqtt://127.0.0.1:2"]
    assert "the broker cannot be reached (tcp of mqtt://127.0.0.1:1: " in report["verdict"]


@pytest.mark.parametrize("text", ["{", "[]", '{"class_names": 7}'])
def test_a_noted_task_that_cannot_be_read_is_named_with_what_to_do(place, diagnose, text):
    (place / "state" / data_check.LAST_TASK).write_text(text)
    code, verdict, _ = diagnose()
    assert code == 1
    assert data_check.LAST_TASK in verdict
    assert "remove it" in verdict
