"""What commands load before they do anything: a start costs what is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coordinator.state.store import StateFolder

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
def test_status_loads_neither_numpy_nor_pydantic_nor_the_service(tmp_path, option):
    config = tmp_path / "coordinator.toml"
    config.write_text('state = "state"\n')
    with StateFolder(tmp_path / "state").open("test") as state:
        state.journal.request_run({"method": "fedavg", "rounds": 1})
    place = config if option == "--config" else tmp_path / "state"
    modules = loaded_by("coordinator", "status", option, str(place))
    assert not packages(modules) & (HEAVY | {"numpy", "paho", "pydantic"})
    assert not {name for name in modules if name.startswith(("coordinator.service", "coordinator.hosted"))}


def test_help_of_the_device_loads_nothing_but_the_standard_library():
    assert not packages(loaded_by("edge_agent", "--help")) & (HEAVY | {"pydantic", "numpy", "paho"})


@pytest.mark.parametrize("free, tries", [(0, 3), (1 << 20, 1)], ids=["full", "with room"])
def test_a_start_that_fails_on_a_full_disk_is_tried_again_until_there_is_room(tmp_path, monkeypatch, free, tries):
    from types import SimpleNamespace

    from coordinator.service import app
    from edge_agent.errors import StateError

    class Stop:
        pauses = 0

        def wait(self, seconds):
            assert seconds == app.START_AGAIN_S
            self.pauses += 1
            return self.pauses == tries

    def fail():
        raise StateError("database or disk is full")

    monkeypatch.setattr(app.shutil, "disk_usage", lambda _folder: SimpleNamespace(free=free))
    stop = Stop()
    with pytest.raises(StateError):
        app._when_there_is_room(tmp_path, stop, fail)
    assert stop.pauses == (tries if free == 0 else 0)
    results = iter((fail, lambda: "started"))
    if free == 0:
        assert app._when_there_is_room(tmp_path, Stop(), lambda: next(results)()) == "started"
    with pytest.raises(StateError):
        app._when_there_is_room(tmp_path, None, fail)
