"""What every test run gets: one thread for each numeric library, a random order with a printed seed, no deadlines."""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

# Before any test file imports numpy or torch: two threads on two cores make timings jump and last bits differ.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Children import compiled modules: without them each of some hundred compiles the packages again, 0.1 s and more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False  # so does the next run: pytest would rewrite the asserts of 430 files again, for 4 s

# Folders of tests are in memory where there is room: a disk takes some 10 ms for each of thousands of syncs, and no
# test depends on it. A place named by TMPDIR or --basetemp is taken as it is.
_MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and hasattr(os, "statvfs"):
    _found = os.statvfs(_MEMORY)
    if _found.f_bavail * _found.f_frsize > 4 << 30 and not _found.f_flag & os.ST_NOEXEC and os.access(_MEMORY, os.W_OK):
        os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

# So that a failing assert of what several files share shows its values, too.
pytest.register_assert_rewrite(*(path.stem for path in (Path(__file__).parent / "harness").glob("*.py")))

settings.register_profile("headwater", deadline=None, print_blob=True)
settings.load_profile("headwater")

SEED = int(os.environ.get("HEADWATER_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
os.environ["HEADWATER_TEST_SEED"] = str(SEED)  # the processes among which pytest-xdist divides the files need one order


LONG = {  # files with tests of some ten seconds
    "test_broker_configurations.py",
    "test_broker_lists.py",
    "test_broker_matrix.py",
    "test_candidate.py",
    "test_federation_processes.py",
    "test_guides.py",
    "test_papers_over_mosquitto.py",
}


_ANSWERING = threading.Lock()
"""Held while a function answers in the place of a child: agents of some tests work in threads."""


def answer_here(module: str, name: str, question: Any, _limit_s: float) -> dict[str, Any]:
    """Answer as `edge_agent.core.children.answer_of_child` would, without a child: the same JSON goes in and comes out.

    Raises:
        subprocess.SubprocessError: The function raised an error, which would have ended the child.
    """
    program = importlib.import_module(module)
    streams = SimpleNamespace(stdin=io.StringIO(json.dumps(question)), stdout=io.StringIO())
    with _ANSWERING, pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "sys", streams)
        try:
            getattr(program, name)()
        except Exception as error:
            raise subprocess.CalledProcessError(1, [module, name]) from error
    answer: dict[str, Any] = json.loads(streams.stdout.getvalue().splitlines()[-1])
    return answer


def pytest_report_header() -> str:
    return f"test order: HEADWATER_TEST_SEED={SEED}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without searching for garbage: what modules and tests hold stays, and no later search looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle files, and tests within a file, so that no test can lean on another; a file's fixtures stay together.

    Files with long tests come first: a worker that begins one last would leave the others idle.
    """
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    dice = random.Random(SEED)
    files = sorted(by_file)
    dice.shuffle(files)
    files.sort(key=lambda file: file.rpartition("/")[2] not in LONG)
    for file in files:
        dice.shuffle(by_file[file])
    items[:] = [item for file in files for item in by_file[file]]


REGISTRIES = (
    "edge_agent.data",
    "edge_agent.heads",
    "edge_agent.heads.numeric",
    "edge_agent.methods",
    "edge_agent.models",
)


def _registered() -> dict[str, dict[str, Any]]:
    """Return what this process has registered so far, by registry; one that is not imported yet holds nothing."""
    imported = [name for name in REGISTRIES if name in sys.modules]
    return {name: sys.modules[name].registry._extra.copy() for name in imported}


@pytest.fixture(scope="module", autouse=True)
def _registered_parts_are_forgotten() -> Iterator[None]:
    """Methods, encoders and other parts that the tests of a file register do not outlive that file.

    Otherwise a page that lists all methods would show those of whatever file the same process has run before.
    """
    before = _registered()
    yield
    for name in _registered():
        parts = sys.modules[name].registry._extra
        parts.clear()
        parts.update(before.get(name, {}))


@pytest.fixture(autouse=True)
def _no_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders are not tried in a process of their own, which takes 0.5 s for each, but where a test asks for it."""
    if "trials" not in request.fixturenames:
        monkeypatch.setattr("edge_agent.personal.encoder.try_out", lambda *_: None)


@pytest.fixture
def trials() -> None:
    """Encoders are tried as on a device."""


@pytest.fixture(autouse=True)
def _answers_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local data are checked and certificates renewed in this process, unless a test asks for ``children``.

    A device does both in a new interpreter, which takes 0.3 s for each of many agents. Whether torchvision can be
    imported is not tried, because that takes 2 s; the tests of torchvision ask in processes of their own.
    """
    if "children" in request.fixturenames:
        return
    monkeypatch.setattr("edge_agent.agent.data_check.answer_of_child", answer_here)
    monkeypatch.setattr("edge_agent.identity.renewal.answer_of_child", answer_here)
    monkeypatch.setattr("edge_agent.core.capabilities.torchvision_advice", tuple)


@pytest.fixture
def children() -> None:
    """Children of agents and commands are processes, as on a device."""


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A separate file system of 2 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="headwater-disk-"))
    mounted = os.name != "nt" and os.geteuid() == 0
    mounted = (
        mounted
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        folder.rmdir()
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()
