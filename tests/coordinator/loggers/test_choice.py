"""Which log a name means, and what is refused before anything starts."""

from __future__ import annotations

import http.server
import importlib.metadata
import re
import socket
import threading

import pytest

from coordinator.loggers.base import Logger
from coordinator.loggers.choice import LOGGERS, absolute_choice, check_loggers, make_loggers
from coordinator.loggers.csv_log import CsvLogger
from coordinator.loggers.mlflow_log import MlflowLogger
from coordinator.loggers.run_logs import RunLogs
from edge_agent.core.errors import ConfigError, MissingCapability, UsageError

OWN = """
from coordinator.loggers.base import Logger

class Mine(Logger):
    def begin(self, run): print("begin", run.name, self.target)
    def log_round(self, row): print(row.round, row.accuracy)
    def end(self, end): print(end.status)

class NoLogger:
    pass
"""


def test_the_names_are_those_of_the_files():
    assert set(LOGGERS.names()) >= {"csv", "jsonl", "mlflow", "parquet", "tensorboard", "wandb"}
    assert not {"base", "choice", "log_files", "run"} & set(LOGGERS.names())
    for name in ("csv", "jsonl", "mlflow", "parquet", "tensorboard", "wandb"):
        assert LOGGERS.load_class(name, Logger).__name__.lower() == f"{name}logger"


def test_all_mistakes_come_at_once_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError) as told:
        make_loggers(["cvs", "jsonl:a", "jsonl:a", "mlflow:http://me:secret@host:5000", 5], tmp_path)
    said = str(told.value)
    assert "4 mistakes" in said
    assert "unknown log 'cvs': did you mean 'csv'?" in said
    assert "--log jsonl:a is given twice" in said
    assert "password" in said
    assert "secret" not in said
    assert "log=5: expected a name such as 'csv'" in said


def test_a_temporary_folder_keeps_no_log():
    with pytest.raises(ConfigError, match=r"folder of this run is temporary; say where: 'csv:FOLDER', or give out="):
        make_loggers(["csv"], None)
    assert make_loggers(["csv:there"], None)[0].logger.target == "there"


def test_relative_folders_count_from_where_they_are_given(tmp_path):
    assert absolute_choice("csv:logs", tmp_path) == f"csv:{tmp_path / 'logs'}"
    assert absolute_choice("csv", tmp_path) == "csv"
    assert absolute_choice("mlflow:http://h:1?experiment=x", tmp_path) == "mlflow:http://h:1?experiment=x"
    assert absolute_choice("wandb:me/it", tmp_path) == "wandb:me/it"
    assert absolute_choice("wandb:it?dir=w&mode=offline", tmp_path) == f"wandb:it?dir={tmp_path / 'w'}&mode=offline"
    assert absolute_choice("cvs:logs", tmp_path) == "cvs:logs", "refused later, with all mistakes"
    (tmp_path / "mine.py").write_text(OWN)
    assert absolute_choice("mine.py:Mine?x", tmp_path) == "mine.py:Mine?x", "no such file here"
    assert absolute_choice(f"{tmp_path}/mine.py:Mine?x", tmp_path) == f"{tmp_path}/mine.py:Mine?x"


def test_a_class_in_a_file_is_a_log(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    (named,) = make_loggers([f"{tmp_path}/mine.py:Mine?where"], tmp_path)
    assert (type(named.logger).__name__, named.logger.target) == ("Mine", "where")
    with pytest.raises(ConfigError, match=r"expected a subclass of coordinator\.loggers\.base\.Logger"):
        make_loggers([f"{tmp_path}/mine.py:NoLogger"], tmp_path)


def test_another_package_adds_a_log_by_its_entry_point(monkeypatch, tmp_path):
    point = importlib.metadata.EntryPoint("theirs", "coordinator.loggers.csv_log:CsvLogger", "headwater.loggers")
    monkeypatch.setattr(LOGGERS, "_plugins", {"theirs": point})
    (named,) = make_loggers(["theirs:here"], tmp_path)
    assert isinstance(named.logger, CsvLogger)
    assert LOGGERS.entry_points == "headwater.loggers"


class Missing(Logger):
    package = "no_such_package_of_anybody"
    extra = "wandb"

    def begin(self, run): ...

    def log_round(self, row): ...

    def end(self, end): ...


def test_a_log_whose_package_is_missing_says_what_to_install(tmp_path):
    with pytest.raises(MissingCapability, match=r"needs 'no_such_package_of_anybody', which is not installed; .*wandb"):
        RunLogs.open(Missing(), tmp_path)

    class Others(Missing):
        extra = ""

    with pytest.raises(MissingCapability, match="pip install no_such_package_of_anybody"):
        RunLogs.open(Others(), tmp_path)


def test_two_logs_that_cannot_be_used_are_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    loggers = [*make_loggers([f"csv:{tmp_path}/file/below"], tmp_path), *make_loggers([Missing()], tmp_path)]
    with pytest.raises(ConfigError) as told:
        check_loggers(loggers)
    assert "no file can be written there" in str(told.value)
    assert "no_such_package_of_anybody" in str(told.value)


def test_a_server_that_is_away_is_refused_with_what_to_do(tmp_path):
    pytest.importorskip("mlflow")
    with socket.socket() as listening:  # a port where nobody answers
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    with pytest.raises(UsageError) as told:
        RunLogs.open(f"mlflow:http://127.0.0.1:{port}", tmp_path)
    said = str(told.value)
    assert re.search(r"http://127\.0\.0\.1:\d+ does not answer \(.*connection refused", said)
    assert "mlflow server" in said
    with pytest.raises(UsageError, match="say where, for example --log mlflow:http://"):
        RunLogs.open("mlflow", tmp_path)
    with pytest.raises(UsageError, match=r"experimnt: expected \?experiment=NAME and no more"):
        RunLogs.open(f"mlflow:http://127.0.0.1:{port}?experimnt=tables", tmp_path)


class OtherServer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404, "nothing here")

    def do_POST(self):
        self.send_error(404, "nothing here")

    def log_message(self, *_): ...


@pytest.mark.filterwarnings("default")
def test_a_server_of_another_kind_is_refused_before_anything_starts(tmp_path):
    pytest.importorskip("mlflow")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}"
            with pytest.raises(UsageError, match=rf"{address} cannot be used: .*404.*correct the address"):
                RunLogs.open(f"mlflow:{address}", tmp_path)
        finally:
            server.shutdown()
            serving.join(30)


def test_a_folder_that_mlflow_refuses_is_named_in_whole_words_with_a_server_to_use(tmp_path, monkeypatch):
    """MLflow's own sentences about folders are longer than what is shown of them."""

    def refuse(_):
        raise RuntimeError("The filesystem backend is in maintenance mode. " + "migrate " * 60)

    monkeypatch.setattr(MlflowLogger, "package", "json")  # a package that is always there
    monkeypatch.setattr(MlflowLogger, "_client", refuse)
    with pytest.raises(UsageError) as caught:
        MlflowLogger("mlruns", tmp_path).check()
    assert re.search(
        r"mlruns cannot be used: The filesystem.* migrate …; name a server, such as http", str(caught.value)
    )


def test_wandb_sends_nothing_unless_it_is_asked_to_and_then_needs_a_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    (named,) = make_loggers(["wandb"], tmp_path)
    assert named.logger._mode == "offline"
    with pytest.raises(UsageError, match="mode=maybe: expected mode=offline, mode=online or dir=FOLDER"):
        RunLogs.open("wandb:project?mode=maybe", tmp_path)
    with pytest.raises(UsageError, match=r"there is no key for .*wandb login"):
        RunLogs.open("wandb:project?mode=online", tmp_path)
