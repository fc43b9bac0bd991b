"""The room of researchers: who may import it, and what its commands say where its extra is not installed."""

import json
import os
import subprocess
import sys

import pytest

from coordinator.cli import COMMANDS, RESEARCH

WITHOUT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocked = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Blocker())
"""
"""Begins a program in which the packages of its first argument are not installed."""

ONLY_RESEARCH = "sklearn"
"""The package that the extra adds to what it shares with the coordinator."""


def run_python(code: str, *words: str, cwd=None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=cwd, env=os.environ)


def without(blocked: str, *words: str, cwd=None) -> subprocess.CompletedProcess:
    """A command of ``headwater`` where some packages are not installed."""
    return run_python(f"{WITHOUT}\nfrom coordinator.cli import main\nmain(sys.argv[1:])", blocked, *words, cwd=cwd)


def loaded_research(code: str) -> list[str]:
    """What is loaded by ``code`` of the room, and of the packages that nothing else needs."""
    rooms = f'[name for name in sys.modules if name.startswith(("coordinator.research", "{ONLY_RESEARCH}"))]'
    done = run_python(f"{code}\nimport json, sys\nprint(json.dumps({rooms}))")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_list_of_commands_and_no_help_of_another_command_loads_the_room():
    code = (
        "import contextlib, io\n"
        "from coordinator.cli import COMMANDS, RESEARCH, main\n"
        "for words in ([], ['--help'], *([name, '--help'] for name in COMMANDS if name not in RESEARCH)):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        with contextlib.suppress(SystemExit):\n"
        "            main(words)\n"
    )
    assert loaded_research(code) == []
    assert set(COMMANDS) > RESEARCH


def test_the_room_is_seen_where_it_is_loaded():
    """The tests beside this one could pass because nothing is ever seen."""
    assert loaded_research("import coordinator.cli.analyze")


def test_what_serves_and_what_simulates_do_without_the_room():
    modules = (
        "coordinator.service.app",
        "coordinator.service.coordinator",
        "coordinator.web.app",
        "coordinator.report",
        "coordinator.simulation.run",
        "coordinator.simulation.engines.pool",
        "coordinator.api",
    )
    assert loaded_research(f"import {', '.join(modules)}") == []


@pytest.mark.parametrize(
    "missing, words",
    [
        ("pydantic", ("bench", "device")),
        ("torch", ("bench", "simulate", "--clients", "2", "--rounds", "1", "--samples", "20")),
        ("rich", ("analyze", "nothing")),
        ("rich", ("reproduce",)),
    ],
)
def test_a_command_of_researchers_names_its_extra_with_exit_code_5(missing, words, tmp_path):
    done = without(missing, *words, "--json", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert f"needs '{missing}', which is not installed" in done.stderr
    assert ".[research]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["kind"] == "MissingCapability"


def test_another_command_names_the_extra_of_the_coordinator(tmp_path):
    done = without("rich", "status", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert ".[coordinator]'" in done.stderr


def test_t_sne_names_the_extra():
    code = (
        f"{WITHOUT}\n"
        "import numpy as np\n"
        "from coordinator.research.analyze.measures import tsne\n"
        "from edge_agent.core.errors import MissingCapability\n"
        "try:\n"
        "    tsne(np.zeros((9, 2)), 3.0, 0)\n"
        "except MissingCapability as error:\n"
        "    print(error)\n"
    )
    done = run_python(code, ONLY_RESEARCH)
    assert "t-SNE needs 'sklearn'" in done.stdout, done.stderr
    assert ".[research]'" in done.stdout
