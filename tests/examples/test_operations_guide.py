"""The page on operations: its commands are run here, or say why not; those that are not run exist all the same."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from coordinator.runs.request import Request
from coordinator.state.store import StateFolder
from edge_agent.task import ImageInput, Task

MODULES = {"headwater": "coordinator", "edge-agent": "edge_agent"}


@pytest.fixture(scope="module")
def blocks(root):
    """(reason why it is not run or None, commands) of each block without a language."""
    text = (root / "examples/guides/operations.md").read_text(encoding="utf-8")
    pattern = r"(?:<!-- not run: (.*?) -->\n)?^```\n(.*?)^```$"
    plain = re.sub(r"^```(?:json|toml|ini)\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [(why or None, body.splitlines()) for why, body in re.findall(pattern, plain, re.MULTILINE | re.DOTALL)]


@pytest.fixture(scope="module")
def root(request):
    return request.config.rootpath


def test_commands_that_are_not_marked_do_what_the_page_says(root, blocks, tmp_path):
    shutil.copy(root / "configs/coordinator.toml", tmp_path)
    size = ImageInput(channels=3, height=32, width=32)
    task = Task(input=size, class_names=("a", "b"), encoder="small_cnn")
    with StateFolder(tmp_path / "state").look(create=True) as state:
        run = state.journal.request_run(Request("fedavg", {}, 3, 0, task).body())
    done = []
    for line in [line for why, lines in blocks if why is None for line in lines]:
        program, *words = shlex.split(line)
        command = [sys.executable, "-m", MODULES[program], *words] if program in MODULES else [program, *words]
        done.append(
            subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120).stdout
        )
    assert len(done) == 3
    assert run in done[-1], "the run is in the copy, and it is looked at without a coordinator"
    assert json.loads((tmp_path / "restored/backup.json").read_text())


def test_commands_that_are_marked_exist_with_their_options(blocks):
    marked = [line for why, lines in blocks if why for line in lines]
    assert len(marked) > 8
    known = {}
    for words in (re.split(r"\s+", line) for line in marked):
        for position, word in enumerate(words[:-1]):
            if (module := MODULES.get(word.rpartition("/")[2])) and re.fullmatch(r"[a-z]+", words[position + 1]):
                command = words[position + 1]
                if (module, command) not in known:
                    ask = [sys.executable, "-m", module, command, "--help"]
                    done = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=60)
                    known[module, command] = done.stdout
                options = [one for one in words[position + 2 :] if re.fullmatch(r"--?[a-z-]+", one)]
                assert all(option in known[module, command] for option in options), words
    assert {command for _, command in known} >= {"serve", "run", "backup", "doctor"}
