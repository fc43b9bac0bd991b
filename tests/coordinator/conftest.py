"""Commands as people type them, run in the process of the tests."""

from __future__ import annotations

import logging

import pytest
from postgres_server import PostgresServer

from coordinator.cli import main


@pytest.fixture(autouse=True)
def quiet_loggers():
    """The commands set up logging for their own process; the test run keeps its own."""
    root = logging.getLogger()
    before = logging.getLogger().handlers[:]
    levels = {name: logging.getLogger(name).level for name in ("", "coordinator", "edge_agent", "export")}
    yield
    root.handlers[:] = before
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


BLANK = {"svg": b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.fixture(autouse=True)
def _blank_pictures(request, monkeypatch):
    """Charts are composed, and the picture of them is not drawn, which takes 0.1 s, unless a test asks for it."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("coordinator.report.pictures._write", lambda _figure, kind: BLANK[kind])


@pytest.fixture
def pictures():
    """Pictures of charts are drawn, as for users."""


@pytest.fixture
def call(capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def called(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return called


@pytest.fixture(scope="session")
def postgres():
    """One server of PostgreSQL for all tests of a session; each test makes databases of its own."""
    with PostgresServer() as server:
        yield server
