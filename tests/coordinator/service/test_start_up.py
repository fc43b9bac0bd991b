"""What commands load before they do anything: a start costs what is imported."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.journal.entries import RunRequested, fact_of
from coordinator.service import app
from coordinator.service.standby import Standby
from coordinator.state.starts import record_start
from coordinator.state.store import StateFolder
from edge_agent.core.errors import StateError, UsageError
from edge_agent.wire.memory import MemoryBroker

LOADED = """
import contextlib, io, sys
from {package}.cli import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main(sys.argv[1:])
assert out.getvalue(), "nothing was shown"
print(" ".join(sorted(sys.modules)))
"""

HEAVY = {"torch", "torchvision", "sqlalchemy", "pandas", "matplotlib", "onnx", "onnxruntime", "sklearn", "amqtt"}


def loaded_by(package: str, *words: str) -> set[str]:
    """All modules that are there after a command."""
    code = LOADED.format(package=package)
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, text=True, timeout=120)
    return set(done.stdout.split())


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("words", [["--help"], ["simulate", "--help"], ["run", "--help"], ["methods"], ["--version"]])
def test_commands_that_only_show_load_nothing_heavy(words):
    assert not packages(loaded_by("coordinator", *words)) & HEAVY


def test_help_loads_no_command_and_no_settings():
    modules = loaded_by("coordinator", "--help")
    assert not packages(modules) & {"pydantic", "numpy", "rich"}
    assert not {name for name in modules if name.startswith("coordinator.cli.")}


def test_the_list_of_methods_loads_neither_numpy_nor_pydantic_nor_any_method():
    modules = loaded_by("coordinator", "methods")
    assert not packages(modules) & (HEAVY | {"numpy", "pydantic"})
    assert not {name for name in modules if name.startswith("edge_agent.methods.")}


@pytest.mark.parametrize("option", ["--state", "--config"])
def test_status_loads_neither_numpy_nor_the_network_nor_the_service(tmp_path, option):
    config = tmp_path / "coordinator.toml"
    config.write_text('state = "state"\n')
    with StateFolder(tmp_path / "state").open("test") as state:
        state.journal.request_run(fact_of("run_requested", {"method": "fedavg", "rounds": 1}))
    place = config if option == "--config" else tmp_path / "state"
    modules = loaded_by("coordinator", "status", option, str(place))
    assert not packages(modules) & (HEAVY | {"numpy", "paho"})
    assert not {name for name in modules if name.startswith(("coordinator.service", "coordinator.hosted"))}


@pytest.mark.parametrize("command", ["run", "serve", "demo", "init", "enroll", "sign", "audit", "analyze", "export"])
def test_help_of_a_command_loads_what_its_options_are_made_of_and_not_what_it_does(command):
    assert not packages(loaded_by("coordinator", command, "--help")) & (HEAVY | {"numpy", "paho", "cryptography"})


@pytest.mark.parametrize(
    "command", [(), ("fit",), ("predict",), ("evaluate",), ("import",), ("verify",), ("rollback",)]
)
def test_help_of_the_device_loads_nothing_but_the_standard_library(command):
    assert not packages(loaded_by("edge_agent", *command, "--help")) & (HEAVY | {"pydantic", "numpy", "paho"})


class Stop:
    """Set at the third pause, of ``START_AGAIN_S`` each."""

    def __init__(self):
        self.pauses = 0

    def wait(self, seconds):
        assert seconds == app.START_AGAIN_S
        self.pauses += 1
        return self.pauses == 3


def with_free(monkeypatch, free):
    monkeypatch.setattr(app.shutil, "disk_usage", lambda _folder: SimpleNamespace(free=free))


@pytest.mark.parametrize(
    "cause", [sqlite3.OperationalError("database or disk is full"), OSError(errno.ENOSPC, "No space left on device")]
)
@pytest.mark.parametrize("free, pauses", [(0, 3), (1 << 20, 0)], ids=["full", "with room"])
def test_a_start_that_fails_on_a_full_disk_is_tried_again_until_there_is_room(
    tmp_path, monkeypatch, caplog, free, pauses, cause
):
    def fail():
        raise StateError(f"cannot be written ({cause})") from cause

    with_free(monkeypatch, free)
    stop = Stop()
    with pytest.raises(StateError):
        app._when_there_is_room(tmp_path, stop, fail)
    assert stop.pauses == pauses
    assert [str(cause) in record.getMessage() for record in caplog.records] == [True] * bool(pauses)
    results = iter((fail, lambda: "started"))
    if free == 0:
        assert app._when_there_is_room(tmp_path, Stop(), lambda: next(results)()) == "started"
    with pytest.raises(StateError):
        app._when_there_is_room(tmp_path, None, fail)


@pytest.mark.parametrize("trouble", ["locked", "no database", "changed"])
def test_room_is_not_waited_for_where_that_would_not_help(tmp_path, monkeypatch, trouble):
    """The disk is full, and the start fails for another reason."""
    with_free(monkeypatch, 0)
    stop = Stop()
    folder = StateFolder(tmp_path)
    with folder.open("headwater serve") as state:
        state.journal.append(fact_of("coordinator_started", {}))
    with contextlib.ExitStack() as stack:
        if trouble == "locked":
            stack.enter_context(StateFolder(tmp_path).open("headwater serve"))
        elif trouble == "no database":
            folder.journal.path.write_bytes(b"no database " * 1000)
        else:
            with contextlib.closing(sqlite3.connect(folder.journal.path)) as connection, connection:
                connection.execute("UPDATE entries SET agent = 'a9'")
        with pytest.raises(StateError, match=r"is in use by headwater serve|not a database|its content was changed"):
            app._when_there_is_room(tmp_path, stop, lambda: stack.enter_context(folder.open("headwater serve")))
    assert stop.pauses == 0


def test_a_state_folder_serves_no_federation_of_another_name(tmp_path):
    """Two federations on one broker, and a configuration with the state folder of the other one."""
    config = CoordinatorConfig.model_validate(
        {"federation": "attic", "state": tmp_path, "task": {"class_names": ["a"]}, "embedded": {"port": 0}}
    )
    with StateFolder(tmp_path).open("headwater serve") as state:
        record_start(state.journal, version="x", boot="b", name="home")
        state.journal.request_run(RunRequested(method="fedavg", rounds=1))
    with pytest.raises(UsageError, match=r"journal of federation 'home', .* names 'attic': correct 'federation'"):
        with app.coordinator(config):
            pass
    with pytest.raises(UsageError, match="journal of federation 'home'"):
        Standby("attic", tmp_path, MemoryBroker().transport())
    with StateFolder(tmp_path).look() as state:
        assert [entry.kind for entry in state.journal.entries()] == ["coordinator_started", "run_requested"]
