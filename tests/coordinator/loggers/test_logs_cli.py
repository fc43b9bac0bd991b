"""``headwater simulate --log``, ``--name``, ``--tag`` and ``--note`` as people type them."""

from __future__ import annotations

import functools
import json
import socket

import pytest
from simulation_harness import write_images

from coordinator.loggers import delivery
from coordinator.loggers.csv_log import CsvLogger
from coordinator.simulation.client_pool import SimulatedClients


@pytest.fixture
def call(call, tmp_path, monkeypatch):
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(call, "simulate")


@pytest.fixture
def short(tmp_path):
    images = write_images(tmp_path / "i.npz", 60)
    encoder = ("--encoder", "linear", "--encoder-param", "feature_dim=4")
    return ("-d", images, *encoder, "--device", "cpu", "--engine", "serial", "-n", 2, "-r", 2, "--no-local")


def rounds_in(folder):
    (table,) = folder.glob("*/rounds.csv")
    return [line.partition(",")[0] for line in table.read_text().splitlines()]


def test_name_tags_and_note_are_in_the_summary_the_result_the_page_and_the_logs(call, short, tmp_path):
    about = ("--name", "first <b>try</b>", "--tag", "goal=base line", "--tag", "trial=007", "--note", "what & why")
    code, out, err = call(*short, "-m", "fedper", *about, "--log", "csv:tables", "--out", "sim")
    assert code == 0, err
    (folder,) = (tmp_path / "tables").iterdir()
    assert f"logged to csv: {folder}" in out
    assert rounds_in(tmp_path / "tables") == ["round", "1", "2"]
    expected = {"name": "first <b>try</b>", "tags": {"goal": "base line", "trial": "007"}, "note": "what & why"}
    run = tmp_path / "sim/runs/run-0001"
    for path in (run / "summary.json", tmp_path / "sim/result.json", folder / "run.json"):
        content = json.loads(path.read_text())
        assert {name: content[name] for name in expected} == expected, path
    page = (run / "report.html").read_text()
    assert "first &lt;b&gt;try&lt;/b&gt;: fedper on" in page
    assert "<b>try" not in page
    assert "base line" in page
    assert "what &amp; why" in page
    assert "name" not in json.loads((run / "summary.json").read_text())["simulation"]["plan"]


def test_a_run_that_is_resumed_keeps_its_logs_and_one_that_is_over_is_logged_elsewhere(
    call, short, tmp_path, monkeypatch
):
    work = SimulatedClients.work
    done = []

    def interrupted(self):
        if self._jobs or self._engine.is_busy:
            done.append(1)
            if len(done) == 4:
                raise KeyboardInterrupt
        return work(self)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedClients, "work", interrupted)
        assert call(*short, "--log", "csv:tables", "--out", "sim")[0] == 130
    (described,) = (tmp_path / "tables").glob("*/run.json")
    stopped = json.loads(described.read_text())
    assert (stopped["status"], stopped["reason"], stopped["rounds_done"]) == ("stopped", "stopped before its end", 1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = call("--resume", "--out", tmp_path / "sim")
    assert code == 0, err
    assert rounds_in(tmp_path / "tables") == ["round", "1", "2"]
    assert json.loads(described.read_text())["status"] == "finished"
    code, out, err = call("--resume", "--out", tmp_path / "sim", "--log", "csv:later", "--json")
    assert code == 0, err
    assert rounds_in(tmp_path / "elsewhere/later") == ["round", "1", "2"]
    assert [log["logger"] for log in json.loads(out)["logs"]] == ["csv"]


def test_folders_in_a_file_count_from_the_file(call, short, tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans/plan.toml").write_text('log = "csv:tables"\nname = "n"\nnote = "x"\n[tags]\ntrial = 3\n')
    code, _, err = call(*short, "--config", "plans/plan.toml", "--out", "sim")
    assert code == 0, err
    assert rounds_in(tmp_path / "plans/tables") == ["round", "1", "2"]
    assert json.loads((tmp_path / "sim/result.json").read_text())["tags"] == {"trial": "3"}


@pytest.mark.parametrize(
    "words, message",
    [
        (("--log", "cvs"), "unknown log 'cvs': did you mean 'csv'?"),
        (("--log", "csv:file/below"), "no file can be written there"),
        (("--tag", "goal"), "--tag goal: expected name=value, for example --tag goal=VALUE"),
        (("--log", "mlflow:http://a:b@127.0.0.1:1"), "holds a password"),
        (("--name", "x" * 201), "name"),
    ],
)
def test_mistakes_are_refused_before_anything_is_made(call, short, tmp_path, words, message):
    (tmp_path / "file").write_text("")
    code, out, err = call(*short, *words, "--out", "sim")
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "sim").exists()


def test_a_log_that_breaks_in_the_middle_costs_a_warning_and_is_said_at_the_end(call, short, monkeypatch, caplog):
    monkeypatch.setattr(delivery, "AWAY_LIMIT_S", 0.1)

    def full(self, row):
        raise OSError(28, "No space left on device", "rounds.csv")

    monkeypatch.setattr(CsvLogger, "log_round", full)
    code, out, err = call(*short, "--log", "csv", "--out", "sim")
    assert code == 0, err
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("coordinator.loggers")]
    assert len(warnings) == 1
    assert warnings[0].startswith("log_away log=csv")
    assert "2 of 2 rounds and the end of the run are missing: rounds.csv:" in out
    assert "headwater simulate --resume --out sim" in out
    assert "Traceback" not in err


def test_a_server_that_is_away_is_refused(call, short, tmp_path):
    pytest.importorskip("mlflow")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    code, _, err = call(*short, "--log", f"mlflow:{address}", "--out", "sim")
    assert code == 2
    assert f"the server at {address} does not answer" in err
    assert not (tmp_path / "sim").exists()
