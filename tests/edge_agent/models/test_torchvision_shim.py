from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from edge_agent.errors import MissingCapability
from edge_agent.models import torchvision_networks

# A package that fails as the real one does beside a torch that it was not compiled for.
MISMATCHED = """
import torch
torch.library.register_fake("torchvision::nms")(lambda *boxes: None)
"""
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from edge_agent.models import torchvision_networks
found = torchvision_networks.networks()
print(found.answer, hasattr(torch.ops.torchvision, "nms"), len(torchvision_networks._declared))
"""


def load_in_child(folder, init: str) -> str:
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(init))
    (package / "models.py").write_text("answer = 42")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout.strip() or done.stderr


def test_a_matching_pair_is_imported_plainly(tmp_path):
    assert load_in_child(tmp_path, "") == "42 False 0"


def test_a_mismatched_pair_is_imported_after_declaring_the_operators(tmp_path):
    assert load_in_child(tmp_path, MISMATCHED) == "42 True 1"


def test_another_failure_is_not_papered_over(monkeypatch):
    def fail(name: str) -> None:
        raise RuntimeError("libtorch_cuda.so is of another version")

    monkeypatch.setattr(torchvision_networks.importlib, "import_module", fail)
    with pytest.raises(MissingCapability, match="another version"):
        torchvision_networks.networks()


def test_a_missing_torchvision_names_the_extra(monkeypatch):
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(torchvision_networks.importlib, "import_module", fail)
    with pytest.raises(MissingCapability, match=r"pip install .*\.\[train\]'"):
        torchvision_networks.networks()
