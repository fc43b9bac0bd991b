"""``headwater gains`` as people type it: simulations by their folders, runs by their names, mistakes in words."""

from __future__ import annotations

import json

import pytest

from coordinator import simulate
from coordinator.cli import main

SETTINGS = {
    "data": "digits:optdigits?n=120",
    "clients": 2,
    "rounds": 1,
    "encoder": "linear",
    "engine": "serial",
    "params": {"local_epochs": 1},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two simulations on the same division of the same samples."""
    parent = tmp_path_factory.mktemp("simulations")
    for method in ("fedavg", "fedper"):
        simulate(method, out=parent / method, **SETTINGS)
    return parent


def called(capsys, *words):
    """Exit code, stdout and stderr of ``headwater gains``."""
    code = 0
    try:
        main(["gains", *map(str, words)])
    except SystemExit as end:
        code = end.code
    result = capsys.readouterr()
    return code, result.out, result.err


def test_simulations_are_compared_in_the_order_in_which_they_are_named(folders, capsys, monkeypatch):
    monkeypatch.chdir(folders)
    _, out, _ = called(capsys, "fedper", "fedavg", "--json")
    steps = json.loads(out)["steps"]
    assert [step["name"] for step in steps] == ["alone", "fedper", "fedavg"]
    summary = json.loads((folders / "fedper/runs/run-0001/summary.json").read_text())
    personal = [agent["acc"]["personal"] for agent in summary["agents"]]
    assert steps[1]["accuracy"] == pytest.approx(sum(personal) / len(personal))
    _, out, _ = called(capsys, "fedper", "fedavg")
    assert "What each step has brought 2 devices" in out
    assert "fedavg (fedavg, 1 round)" in out


def test_all_finished_runs_of_a_state_folder_are_the_default(folders, capsys):
    _, out, _ = called(capsys, "--state", folders / "fedavg", "--json")
    assert [step["name"] for step in json.loads(out)["steps"]] == ["alone", "run-0001"]
    _, named, _ = called(capsys, "run-0001", "--state", folders / "fedavg", "--json")
    assert json.loads(named)["steps"][1] == json.loads(out)["steps"][1]


def test_what_is_no_run_is_named(folders, tmp_path, capsys):
    code, _, err = called(capsys, "run-0009", "--state", folders / "fedavg")
    assert code == 2
    assert "run-0009: neither a folder nor a finished run" in err
    assert "finished runs there: run-0001" in err
    code, _, err = called(capsys, tmp_path)
    assert code == 2
    assert f"{tmp_path} has no finished run" in err
