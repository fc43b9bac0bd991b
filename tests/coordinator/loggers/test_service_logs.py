"""Logs of other programs, read by those programs: TensorBoard, a real MLflow server, an offline run of W&B."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path

import pytest
from cut_line import CutLine
from logged_runs import SETTINGS, files_limited_to, kill_in_round_3, log_simulation, losses, only, row_of
from simulation_harness import small_plan

import coordinator
from coordinator.api import Watching, finish
from coordinator.loggers import delivery, wandb_log
from coordinator.loggers.choice import make_loggers
from coordinator.loggers.records import RunDescription, RunEnd
from coordinator.loggers.run_logs import RunLogs, open_parent
from coordinator.loggers.wandb_file import BLOCK_BYTES, read_records
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from edge_agent.core.errors import RunFailed, StateError

pytestmark = pytest.mark.filterwarnings("default")  # of packages of others, which are not ours to mend


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def test_tensorboard_reads_rounds_final_figures_and_texts(tmp_path, images):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plan = small_plan(images, "fedper", rounds=4, local=False, log=(f"tensorboard:{tmp_path / 'tb'}",), note="a note")
    result = log_simulation(plan, tmp_path / "sim")
    read = accumulator.EventAccumulator(str(only(tmp_path / "tb"))).Reload()
    points = read.Scalars("loss")
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert [point.value for point in points] == pytest.approx(losses(result))
    worst = read.Scalars("acc.personal/worst_tenth")
    assert [point.value for point in worst] == pytest.approx(
        [f["acc"]["personal"]["worst10"] for f in result["rounds"]]
    )
    (end,) = read.Scalars("last.acc.personal/mean")
    assert (end.step, end.value) == (4, pytest.approx(result["last"]["acc"]["personal"]["clients_mean"]))
    texts = {tag: read.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert texts["note"] == "a note"
    assert "| params.lr |" in texts["parameters"]
    assert texts["clients"].startswith("| client |")


def test_a_new_event_file_is_read_after_the_older_ones_whatever_the_clock_says(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def log_rounds(count):
        (named,) = make_loggers([f"tensorboard:{tmp_path / 'tb'}"], tmp_path)
        named.logger.begin(RunDescription("uid", "name", tmp_path))
        for number in range(1, count + 1):
            named.logger.log_round(row_of(number))

    log_rounds(3)
    (before,) = (tmp_path / "tb").glob("*/*tfevents*")
    before.rename(before.with_name("events.out.tfevents.9000000000.headwater"))
    log_rounds(2)  # a resumed run gives all rows again
    read = accumulator.EventAccumulator(str(only(tmp_path / "tb"))).Reload()
    assert [point.step for point in read.Scalars("loss")] == [1, 2]


# --- MLflow ----------------------------------------------------------------------------------------------------------


def cpu_ticks(group):
    """The processor time that the processes of a group have used, in ticks of the system."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += int(fields[11]) + int(fields[12])
    return total


class MlflowServer:
    """A server of this machine, whose runs are in a database below a folder."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}", "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "artefacts")]
        with (self.folder / "server.log").open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, cwd=self.folder, start_new_session=True
            )
        waiting = threading.Event()
        used_ticks = 0
        moved_at = time.monotonic()
        while True:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            # On a busy machine its start takes minutes; one that uses no processor at all has come to a halt.
            if cpu_ticks(self.process.pid) > used_ticks:
                used_ticks = cpu_ticks(self.process.pid)
                moved_at = time.monotonic()
            assert time.monotonic() < moved_at + 60, (self.folder / "server.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                waiting.wait(0.2)
            else:
                return

    def kill(self):
        """Kill the server and its workers, which are a group of their own."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None


@pytest.fixture
def mlflow_server(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # its first answers take long on a busy machine
    for package in ("mlflow", "flask", "sqlalchemy"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"a server of MLflow needs {package}")
    server = MlflowServer(tmp_path / "server")
    server.start()
    yield server
    server.kill()


def mlflow_client(server):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=server.url)


def runs_at(server, experiment="headwater"):
    client = mlflow_client(server)
    found = client.get_experiment_by_name(experiment)
    return client.search_runs([found.experiment_id])


def history(server, run, name):
    points = mlflow_client(server).get_metric_history(run.info.run_id, name)
    return sorted((point.step, point.value) for point in points)


@pytest.mark.slow
def test_mlflow_has_a_parent_with_a_child_for_each_seed(tmp_path, images, mlflow_server):
    choice = f"mlflow:{mlflow_server.url}?experiment=tables"
    parent = open_parent(choice, RunDescription("a parent", "fedper, two seeds", tmp_path, tags={"table": "1"}))
    shared = {"log": parent.child, "tags": {"goal": "try", "odd@key": "x"}, "note": "a note", **SETTINGS}
    results = [
        coordinator.simulate("fedper", data=images, seed=seed, out=tmp_path / f"s{seed}", name=f"seed {seed}", **shared)
        for seed in range(2)
    ]
    (outcome,) = parent.end(RunEnd("finished", figures={"acc.personal.mean": 0.5}))
    assert outcome.is_complete, outcome
    runs = {run.info.run_name: run for run in runs_at(mlflow_server, "tables")}
    assert set(runs) == {"fedper, two seeds", "seed 0", "seed 1"}
    above = runs["fedper, two seeds"]
    assert above.data.metrics["acc.personal.mean"] == 0.5
    assert above.data.tags["table"] == "1"
    for seed, result in enumerate(results):
        run = runs[f"seed {seed}"]
        assert run.data.tags["mlflow.parentRunId"] == above.info.run_id
        assert run.data.tags["mlflow.note.content"] == "a note"
        assert (run.data.tags["goal"], run.data.tags["odd_key"]) == ("try", "x")
        assert run.info.status == "FINISHED"
        assert run.data.params["seed"] == str(seed)
        assert float(run.data.params["params.lr"]) == result.summary["params"]["lr"]
        assert history(mlflow_server, run, "loss") == list(enumerate(losses(result.summary), 1))
        mean = result.summary["last"]["acc"]["personal"]["clients_mean"]
        assert run.data.metrics["last.acc.personal.mean"] == mean
        artefacts = {file.path for file in mlflow_client(mlflow_server).list_artifacts(run.info.run_id)}
        assert artefacts == {"clients.csv", "curves.svg", "report.html", "result.json"}


@pytest.mark.slow
def test_an_mlflow_server_that_is_killed_in_the_middle_costs_a_warning_and_gets_the_rest_later(
    tmp_path, images, mlflow_server, monkeypatch, caplog
):
    monkeypatch.setattr(delivery, "AWAY_LIMIT_S", 3.0)
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.2)
    choice = f"mlflow:{mlflow_server.url}"
    plan = small_plan(images, "fedper", rounds=8, local=False, log=(choice,))
    folder = tmp_path / "sim"
    logs = RunLogs.open(plan.log, folder)

    def on_round(row):
        if row.round == 3:
            logs.flush()
            mlflow_server.kill()

    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "coordinator.loggers"):
        with open_simulation(Prepared.of(plan), folder) as simulation:
            result = finish(simulation, folder, Watching(on_round=on_round, logs=logs))
    assert time.monotonic() - began < 60
    assert [record.getMessage().split()[0] for record in caplog.records] == ["log_away"]
    (outcome,) = result["logs"]
    assert (outcome["rounds"], outcome["unsent"], outcome["is_complete"]) == (3, 5, False)
    assert outcome["reason"]
    assert json.loads((folder / "result.json").read_text())["logs"] == [outcome]

    mlflow_server.start()
    (run,) = runs_at(mlflow_server)
    assert history(mlflow_server, run, "loss") == list(enumerate(losses(result)[:3], 1))
    assert run.info.status == "RUNNING"
    monkeypatch.undo()
    again = log_simulation(plan, folder)  # the run is over: it is logged once more
    assert again["logs"][0]["is_complete"], again["logs"]
    (run,) = runs_at(mlflow_server)
    assert history(mlflow_server, run, "loss") == list(enumerate(losses(result), 1)), "none missing, none twice"
    assert history(mlflow_server, run, "round") == [(number, float(number)) for number in range(1, 9)]
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_a_round_whose_answer_is_lost_is_at_the_server_once(tmp_path, mlflow_server, monkeypatch, capsys):
    """The server has the figures and the connection ends before it says so: they are not sent again."""
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.1)
    with CutLine(mlflow_server.port) as line:
        logs = RunLogs.open(f"mlflow:http://127.0.0.1:{line.port}", tmp_path)
        logs.begin(RunDescription("uid", "name", tmp_path))
        logs.log_round(row_of(1))
        logs.flush()
        line.last_words = b"runs/log-batch"
        logs.log_round(row_of(2))
        logs.log_round(row_of(3))
        logs.flush()
        (outcome,) = logs.end(RunEnd("finished", round=3, figures={"last": 0.5}))
    assert outcome.is_complete, outcome
    assert line.last_words == b"", "the answer was lost"
    (run,) = runs_at(mlflow_server)
    assert history(mlflow_server, run, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    # Once more, as a run that is over is: nothing comes twice.
    logs = RunLogs.open(f"mlflow:{mlflow_server.url}", tmp_path)
    logs.begin(RunDescription("uid", "name", tmp_path))
    for number in (1, 2, 3):
        logs.log_round(row_of(number))
    logs.end(RunEnd("finished", round=3, figures={"last": 0.5}))
    assert history(mlflow_server, run, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert history(mlflow_server, run, "last") == [(3, 0.5)]
    assert capsys.readouterr().out == "", "the output is that of the command, which may be JSON"


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_round_and_resumed_has_each_round_once_at_the_server(tmp_path, images, mlflow_server):
    plan = small_plan(images, "fedper", rounds=4, local=False, log=(f"mlflow:{mlflow_server.url}",))
    kill_in_round_3(plan, tmp_path / "sim")
    (run,) = runs_at(mlflow_server)
    assert [step for step, _ in history(mlflow_server, run, "loss")] == [1, 2]
    result = log_simulation(plan, tmp_path / "sim")
    (run,) = runs_at(mlflow_server)
    assert history(mlflow_server, run, "loss") == list(enumerate(losses(result), 1))
    assert run.info.status == "FINISHED"


# --- W&B -------------------------------------------------------------------------------------------------------------


def records_of(path):
    """Yield the records of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    yield from map(Record.FromString, read_records(path))


@pytest.fixture
def new_wandb():
    """The package without the process of its own that writes runs, also afterwards: the test starts another one."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.slow
@pytest.mark.usefixtures("new_wandb")
@pytest.mark.parametrize("limit", [5_000, 40_000])
def test_a_wandb_run_that_a_full_disk_has_cut_off_is_not_called_complete(tmp_path, monkeypatch, limit):
    """Its writer is another process, which has the limit of this one, and says nothing of it."""
    monkeypatch.setattr(wandb_log, "WRITE_LIMIT_S", 2.0)
    with files_limited_to(limit):
        logs = RunLogs.open(f"wandb:p?dir={tmp_path}", tmp_path)
        logs.begin(RunDescription("uid", "name", tmp_path))
        for number in range(1, 201):
            logs.log_round(row_of(number))
        (outcome,) = logs.end(RunEnd("finished", round=200))
    assert not outcome.is_complete
    assert "make room on the disk" in outcome.reason
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert path.stat().st_size == limit


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:20] + b"x" + content[21:]])
def test_an_offline_file_that_is_damaged_is_refused(tmp_path, damage):
    record = b"a" * 40_000  # two pieces: the first fills its block
    first = record[: BLOCK_BYTES - 7 - 7]
    content = b":W&B\xe1\xbe\0"
    for kind, data in ((2, first), (4, record[len(first) :])):
        checksum = zlib.crc32(bytes([kind]) + data)
        content += checksum.to_bytes(4, "little") + len(data).to_bytes(2, "little") + bytes([kind]) + data
    path = tmp_path / "run.wandb"
    path.write_bytes(content)
    assert list(read_records(path)) == [record]
    path.write_bytes(damage(content))
    with pytest.raises(StateError, match="damaged or cut off at byte"):
        list(read_records(path))


@pytest.mark.slow
def test_wandb_writes_a_run_that_it_can_send_later(tmp_path, images):
    pytest.importorskip("wandb")
    parent = open_parent(f"wandb:tables?dir={tmp_path / 'wb'}", RunDescription("a parent", "two", tmp_path))
    result = coordinator.simulate(
        "fedper", data=images, out=tmp_path / "sim", log=parent.child, name="a run", tags={"goal": "try"},
        note="a note", **SETTINGS,
    )  # fmt: skip
    parent.end(RunEnd("finished"))
    (outcome,) = result.summary["logs"]
    assert outcome["is_complete"], outcome
    assert "wandb sync" in outcome["where"]
    runs = {}
    for path in (tmp_path / "wb" / "wandb").glob("offline-run-*/run-*.wandb"):
        records = list(records_of(path))
        (run,) = (record.run for record in records if record.HasField("run"))
        runs[run.display_name] = (run, records)
        if run.display_name == "a run":
            kept = {file.name for file in (path.parent / "files").iterdir() if not file.is_symlink()}
            assert kept >= {"curves.svg", "report.html", "result.json"}, "also when the folder of the run is gone"
            sent = {file.path for record in records if record.HasField("files") for file in record.files.files}
            assert sent >= {"curves.svg", "report.html", "result.json"}
    assert set(runs) == {"two", "a run"}
    run, records = runs["a run"]
    assert (run.project, run.notes, list(run.tags), run.job_type) == ("tables", "a note", ["goal=try"], "run")
    assert run.run_group == runs["two"][0].run_group
    assert run.run_group.startswith("two-")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["params.lr"] == result.summary["params"]["lr"]
    rows = []
    for record in records:
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "loss" in items:
                rows.append((items["_step"], items["loss"]))
    assert rows == list(enumerate(losses(result.summary), 1))


@pytest.mark.slow
def test_a_resumed_wandb_run_is_written_again_and_the_first_folder_is_not_sent(tmp_path, images):
    pytest.importorskip("wandb")
    plan = small_plan(images, "fedper", rounds=3, local=False, log=(f"wandb:tables?dir={tmp_path / 'wb'}",))
    folder = tmp_path / "sim"

    def broken(row):
        if row.round == 2 and not row.is_replayed:
            raise ValueError("once")

    with pytest.raises(RunFailed, match="once"):
        log_simulation(plan, folder, broken)
    result = log_simulation(plan, folder, broken)
    assert result["logs"][0]["is_complete"], result["logs"]
    folders = sorted(path.name for path in (tmp_path / "wb" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    (current,) = (name for name in folders if not name.endswith(".superseded"))
    (path,) = (tmp_path / "wb" / "wandb" / current).glob("run-*.wandb")
    steps = []
    for record in records_of(path):
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            steps += [items["_step"]] if "loss" in items else []
    assert steps == [1, 2, 3]
