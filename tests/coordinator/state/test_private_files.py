"""Whatever a device or a coordinator keeps is for its user alone, whatever the user's umask allows."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading

import pytest
from process_site import DIGITS, Site

from edge_agent.core.locks import folder_lock, private_files
from edge_agent.core.storage import write_atomic

pytestmark = pytest.mark.skipif(os.name == "nt", reason="modes are those of POSIX")


def open_to_others(folder):
    """Files and folders below, and the folder, that others than their owner may use in any way."""
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*")) if not path.is_symlink()}
    assert found
    return {str(path): oct(mode) for path, mode in found.items() if mode & 0o077}


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.slow
@pytest.mark.broker
def test_row_47_trees_of_a_real_run_are_private_on_both_sides(tmp_path, open_umask):
    """Processes of a user whose umask is 0: a run of two rounds."""
    with Site(tmp_path, DIGITS) as site:
        run = site.request(2)
        site.finish(run)
        names = ("state", "a0", "a1", "a2")
        kept = [path for name in names for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert {"journal.db", "master.key", "status.json", "federation.json"} <= {path.name for path in kept}
        assert [found for name in names if (found := open_to_others(tmp_path / name))] == []


def test_what_the_holder_of_a_state_folder_and_its_children_write_is_private(tmp_path, open_umask):
    folder = tmp_path / "state"
    with folder_lock(folder, "test"):
        write_atomic(folder / "head" / "arrays.safetensors", b"x")
        write_atomic(folder / "features" / "x.safetensors", b"x", durable=False)
        child = "import pathlib; pathlib.Path('child').write_text('x')"
        subprocess.run([sys.executable, "-c", child], cwd=folder, check=True)
    assert open_to_others(folder) == {}


def test_folder_that_was_open_is_closed(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o755)
    with folder_lock(folder, "test"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_umask_is_as_before_when_the_last_holder_has_ended(tmp_path, open_umask):
    """Also where they end in another order than they began, in several threads."""
    first = private_files()
    second = private_files()
    with first:
        thread = threading.Thread(target=second.__enter__)
        thread.start()
        thread.join()
    assert os.umask(0o077) == 0o077
    second.__exit__(None, None, None)
    assert os.umask(0) == 0
