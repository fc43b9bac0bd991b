"""Makes tests/federation_harness.py importable: tests are no package, and ``tests`` on the path would hide ours."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

_NAME = "federation_harness"
if _NAME not in sys.modules:
    _SPEC = importlib.util.spec_from_file_location(_NAME, Path(__file__).parents[1] / f"{_NAME}.py")
    sys.modules[_NAME] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules[_NAME])


@pytest.fixture(autouse=True)
def quiet_loggers():
    """The commands set up logging for a process of their own; the test run keeps its own."""
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    levels = {name: logging.getLogger(name).level for name in ("", "coordinator", "edge_agent", "export")}
    yield
    root.handlers[:] = before
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
