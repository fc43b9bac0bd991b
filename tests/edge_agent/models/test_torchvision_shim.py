from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from edge_agent.core.errors import MissingCapability
from edge_agent.models import _torchvision, torchvision_networks

# A package that fails as the real one does beside a torch that it was not compiled for.
MISMATCHED = """
import torch
torch.library.register_fake("torchvision::nms")(lambda *boxes: None)
"""
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from edge_agent.models import _torchvision, torchvision_networks
found = torchvision_networks.networks()
import torchvision
print(found.answer, hasattr(torch.ops.torchvision, "nms"), len(_torchvision._declared))
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

    monkeypatch.setattr(_torchvision.importlib, "import_module", fail)
    with pytest.raises(MissingCapability, match="another version"):
        torchvision_networks.networks()


def test_a_missing_torchvision_names_the_extra(monkeypatch):
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(_torchvision.importlib, "import_module", fail)
    with pytest.raises(MissingCapability, match=r"pip install .*\.\[train\]'"):
        torchvision_networks.networks()


DOCTOR = """
import json, sys
sys.path.insert(0, sys.argv[1])
from edge_agent.core import capabilities
print(json.dumps(capabilities.torchvision_advice()))
"""


@pytest.mark.parametrize(
    "init, words",
    [
        ("", None),
        (MISMATCHED, "'import torchvision' fails here (RuntimeError: operator torchvision::nms does not exist)"),
        ("raise RuntimeError('of another world')", "torchvision cannot be imported: of another world"),
    ],
    ids=["matching", "mismatched", "broken"],
)
def test_doctor_really_imports_it(tmp_path, init, words):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(init))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", DOCTOR, str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=180, env=environment,
    )  # fmt: skip
    advice = json.loads(done.stdout)
    if words is None:
        assert advice == []
        return
    assert words in advice[0]
    assert ("import_torchvision()" in advice[0]) == (init == MISMATCHED)


SCRIPT = """
from edge_agent.models import import_torchvision
import_torchvision()
from torchvision import datasets, models, transforms
print(len(datasets.FakeData(4, (3, 8, 8))), type(models.resnet18(weights=None)).__name__)
"""


def test_a_script_imports_the_installed_torchvision():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=180)
    assert done.stdout.split() == ["4", "ResNet"], done.stderr
