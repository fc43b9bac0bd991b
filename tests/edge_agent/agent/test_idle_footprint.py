"""An agent that waits for work is small: what it does not need yet is not imported."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from edge_agent.agent.data_check import check
from edge_agent.core.children import in_child
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.core.errors import DataError, UnknownName

HEAVY = ("numpy", "torch", "onnxruntime", "sklearn", "PIL", "tarfile")


def imported_after(code: str) -> set[str]:
    ask = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_program_of_an_agent_imports_nothing_heavy():
    assert imported_after("import edge_agent.cli.agent, edge_agent.agent.app") == set()


def test_what_is_imported_is_noticed():
    assert imported_after("import edge_agent.wire.tensors") == {"numpy"}


def test_duties_without_a_bundle_and_an_empty_outbox_stay_light(tmp_path):
    code = f"""
from pathlib import Path
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.agent.transfers import Outbox
from edge_agent.core.config import AgentConfig, DataConfig
config = AgentConfig(id="a", state=Path({str(tmp_path)!r}), data=DataConfig(source="images:x"))
assert TaskRunner(config, "head").bundles.bundle_id == ""
assert Outbox(config.state / "outbox", config.privacy).get() is None
"""
    assert imported_after(code) == set()


def test_checking_the_data_leaves_nothing_behind(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros(1))
    code = f"""
from edge_agent.agent.data_check import check
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.core.children import in_child
in_child(lambda: check(AgentConfig(data=DataConfig(source="npz:{tmp_path / "x.npz"}"))))
"""
    assert imported_after(code) == set()


@pytest.mark.parametrize(
    "source, error, words",
    [("images:nowhere", DataError, r"there is no /.*nowhere"), ("pictures:x", UnknownName, "images")],
)
def test_wrong_data_are_told_with_their_reason(source, error, words):
    with pytest.raises(error, match=words):
        in_child(lambda: check(AgentConfig(data=DataConfig(source=source))))
