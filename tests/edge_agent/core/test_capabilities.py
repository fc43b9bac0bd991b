from __future__ import annotations

import subprocess
import sys

import pytest

from edge_agent.core import capabilities
from edge_agent.core.capabilities import Capabilities
from edge_agent.core.installation import install_command


def device(**changes):
    given = {"python": "3.11", "system": "Linux", "machine": "aarch64", "is_64bit": True, "cores": 4, **changes}
    return Capabilities(**given)


ALL = {"onnxruntime": "1", "pillow": "10", "scikit-learn": "1", "torch": "2"}


@pytest.mark.parametrize(
    "packages, memory, is_64bit, tier",
    [
        (ALL, 4 << 30, True, "train"),
        (ALL, None, True, "train"),
        (ALL, 1 << 29, True, "head"),
        ({"onnxruntime": "1"}, 1 << 29, True, "head"),
        ({"onnxruntime": "1"}, 1 << 29, False, "idle"),
        ({}, 4 << 30, True, "idle"),
    ],
)
def test_the_tier_follows_from_packages_memory_and_bits(packages, memory, is_64bit, tier):
    assert device(packages=packages, memory_bytes=memory, is_64bit=is_64bit).tier == tier


def test_advice_names_the_extra_that_helps():
    assert device(packages=ALL, memory_bytes=4 << 30).advice() == ()
    nothing = " ".join(device().advice())
    assert install_command("agent") in nothing
    assert "kernel rbf" in nothing
    assert "64-bit" in " ".join(device(is_64bit=False).advice())
    assert "tier head" in " ".join(device(packages=ALL, memory_bytes=1 << 29).advice())


def test_this_machine_is_described():
    found = capabilities.find()
    assert found.python == sys.version.split()[0]
    assert found.is_64bit == (sys.maxsize > 2**32)
    assert found.cores >= 1
    assert found.packages["numpy"]


def test_memory_comes_from_the_kernel_and_from_the_services_limit(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal:  2048 kB\nMemAvailable: 1024 kB\nHuge: x kB\n\n",
        "/sys/fs/cgroup/memory.max": "max",
    }
    monkeypatch.setattr(capabilities, "_text", lambda path: files.get(str(path)))
    assert capabilities.find().memory_bytes == 2048 * 1024
    assert capabilities.find().available_bytes == 1024 * 1024
    files["/sys/fs/cgroup/memory.max"] = "1000000"
    assert capabilities.find().memory_bytes == 1_000_000
    files.clear()
    assert capabilities.find().memory_bytes is None


def test_a_module_of_another_distribution_counts(monkeypatch):
    """NVIDIA's wheels bring the module onnxruntime under another name."""

    def missing(name):
        raise capabilities.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(capabilities.metadata, "version", missing)
    assert capabilities.packages()["onnxruntime"] == "unknown"


def test_looking_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from edge_agent.core.capabilities import find\n"
        "find()\n"
        "assert not {'torch', 'onnxruntime', 'sklearn', 'PIL', 'paho'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
