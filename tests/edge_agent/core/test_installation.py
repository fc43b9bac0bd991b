from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from edge_agent.core import installation
from edge_agent.core.errors import MissingCapability
from edge_agent.core.installation import find_origin, install_command, parse_origin, program_command

ROOT = Path(installation.__file__).parents[2]
PYTHON = shlex.quote(sys.executable)


@pytest.fixture
def noted(monkeypatch):
    """Have pip noted this in the place of ``direct_url.json``; None: it came from an index."""

    class Noted:
        text: str | None = None

        def read_text(self, name):
            assert name == "direct_url.json"
            return self.text

    found = Noted()
    monkeypatch.setattr(metadata, "distribution", lambda _: found)
    find_origin.cache_clear()
    yield found
    find_origin.cache_clear()


@pytest.fixture
def copy(tmp_path):
    """A folder that pip can install from, with a blank in its name."""
    folder = tmp_path / "a copy"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def note_of(folder, **about):
    return json.dumps({"url": folder.as_uri(), "dir_info": about})


@pytest.mark.parametrize("about, option", [({}, ""), ({"editable": False}, ""), ({"editable": True}, "-e ")])
def test_a_copy_from_a_folder_is_extended_from_that_folder(noted, copy, about, option):
    noted.text = note_of(copy, **about)
    assert install_command("camera") == f"cd '{copy}' && {PYTHON} -m pip install {option}'.[camera]'"


def test_a_folder_that_is_gone_is_described_instead_of_named(noted, tmp_path):
    noted.text = note_of(tmp_path / "removed")
    hint = f"{PYTHON} -m pip install '.[camera]' (in the folder of your copy of the repository)"
    assert install_command("camera") == hint


def test_a_copy_from_an_index_is_extended_from_there(noted, tmp_path, monkeypatch):
    packages = tmp_path / "lib/python3/site-packages"
    monkeypatch.setattr(installation, "__file__", str(packages / "edge_agent/core/installation.py"))
    assert install_command("camera") == f"{PYTHON} -m pip install 'headwater[camera]'"


def test_a_developers_copy_that_pip_has_not_noted_is_extended_in_its_folder(noted, copy, monkeypatch):
    monkeypatch.setattr(installation, "__file__", str(copy / "edge_agent/core/installation.py"))
    assert install_command("camera") == f"cd '{copy}' && {PYTHON} -m pip install -e '.[camera]'"


@pytest.mark.parametrize(
    "note, requirement",
    [
        (
            {"url": "file:///srv/headwater-1-py3-none-any.whl", "archive_info": {}},
            "headwater[heads] @ file:///srv/headwater-1-py3-none-any.whl",
        ),
        (
            {"url": "https://example.org/{x}.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "headwater[heads] @ git+https://example.org/{x}.git@ab12",
        ),
    ],
)
def test_a_copy_from_a_file_or_a_repository_is_extended_from_the_same(note, requirement):
    assert parse_origin(note).install_command("heads") == f"{PYTHON} -m pip install '{requirement}'"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"url": 7}', '{"url": "file:///x", "vcs_info": {}}'])
def test_a_note_that_cannot_be_read_names_no_package_of_others(noted, text):
    noted.text = text
    assert "'.[heads]'" in install_command("heads")


def test_sources_without_an_installation_are_extended_from_their_folder(monkeypatch):
    def distribution(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    find_origin.cache_clear()
    assert install_command("heads") == f"cd {shlex.quote(str(ROOT))} && {PYTHON} -m pip install '.[heads]'"
    find_origin.cache_clear()


def test_the_coordinator_learns_the_extra_and_no_path(noted, copy):
    noted.text = note_of(copy)
    error = MissingCapability.package("cv2", "camera", "reading cameras")
    assert str(copy) in str(error)
    assert "camera" in error.public_message
    assert "/" not in error.public_message


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A virtual environment with both programs, whose folder is not on the path."""
    programs = tmp_path / "copy/.venv/bin"
    programs.mkdir(parents=True)
    for name in ("headwater", "edge-agent", "python3"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python3"))
    monkeypatch.setenv("PATH", "/nowhere")
    return programs


def test_a_program_is_named_so_that_a_shell_here_finds_it(environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "copy")
    assert program_command("edge-agent") == ".venv/bin/edge-agent"
    monkeypatch.chdir(environment)
    assert program_command("edge-agent") == str(environment / "edge-agent"), "a shell does not look into this folder"
    monkeypatch.setenv("PATH", str(environment))
    assert program_command("edge-agent") == "edge-agent"
    (environment / "edge-agent").unlink()
    assert program_command("edge-agent") == f"{environment}/python3 -m edge_agent"


def test_a_program_of_another_copy_on_the_path_is_not_taken_for_this_one(environment, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "edge-agent").write_text("#!/bin/sh\n")
    (other / "edge-agent").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))
    monkeypatch.chdir(other)
    assert program_command("edge-agent") == str(environment / "edge-agent")
