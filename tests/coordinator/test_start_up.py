"""What commands load before they do anything: a start costs what is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coordinator.cli import methods as command
from coordinator.state.store import StateFolder
from edge_agent import methods

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


def test_status_loads_neither_numpy_nor_the_service(tmp_path):
    with StateFolder(tmp_path).open("test") as state:
        state.journal.request_run({"method": "fedavg", "rounds": 1})
    modules = loaded_by("coordinator", "status", "--state", str(tmp_path))
    assert not packages(modules) & (HEAVY | {"numpy", "paho"})
    assert not {name for name in modules if name.startswith(("coordinator.service", "coordinator.hosted"))}


def test_help_of_the_device_loads_nothing_but_the_standard_library():
    assert not packages(loaded_by("edge_agent", "--help")) & (HEAVY | {"pydantic", "numpy", "paho"})


@pytest.mark.parametrize("name", methods.names())
def test_the_list_of_methods_shows_what_their_classes_say(name):
    """The list reads the source, one method's page imports it."""
    read, described = command.from_source(name), command.describe(name)
    assert read is not None
    grades = {head: [card[0]] for head, card in described["exactness"].items()}
    assert read == {**{key: described[key] for key in read}, "exactness": grades}
