"""What this device can do, found without importing anything heavy: packages are looked up, not loaded."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import struct
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import Field

from .task import Frozen

Tier = Literal["train", "head", "idle"]

_PACKAGES = {
    "numpy": "numpy",
    "pydantic": "pydantic",
    "paho-mqtt": "paho",
    "onnxruntime": "onnxruntime",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "torch": "torch",
    "torchvision": "torchvision",
}
"""Distribution -> module. Vendors ship a module under another distribution's name, so both are looked for."""

_CPU_KEYS = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"} | {
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"
}  # fmt: skip
"""Lines of /proc/cpuinfo that tell processors apart, on x86 and on ARM."""

_ACCELERATORS = {
    "/dev/nvidia0": "nvidia gpu",
    "/dev/nvhost-gpu": "jetson gpu",
    "/dev/hailo0": "hailo",
    "/dev/apex_0": "coral",
}

_TRAIN_BYTES = 1 << 30
"""Least memory for training with torch: an agent with torch takes 375 MB before the first batch."""


class Capabilities(Frozen):
    """One device, as `doctor` shows it and an agent announces it."""

    python: str
    system: str = Field(description="operating system and kernel release")
    machine: str = Field(description="processor architecture, as the kernel names it")
    board: str | None = Field(None, description="model of a single-board computer")
    is_64bit: bool = Field(description="whether this Python is a 64-bit program; ONNX Runtime needs one")
    cores: int = Field(ge=1, description="processor cores that this process may use")
    memory_bytes: int | None = Field(None, description="memory in all; a limit of the service's cgroup counts")
    available_bytes: int | None = Field(None, description="memory that could be used now")
    accelerators: tuple[str, ...] = ()
    packages: dict[str, str] = Field(default_factory=dict, description="installed package -> version")

    @property
    def tier(self) -> Tier:
        """What the device may be: ``train``, ``head``, or ``idle`` while no package lets it compute anything."""
        if "torch" in self.packages and (self.memory_bytes is None or self.memory_bytes >= _TRAIN_BYTES):
            return "train"
        return "head" if "onnxruntime" in self.packages and self.is_64bit else "idle"

    @property
    def head(self) -> str:
        """The head to begin with: logistic regression needs 0.1 s and nothing but numpy."""
        return "lr"

    def advice(self) -> tuple[str, ...]:
        """Return what would let this device do more, one sentence each."""
        from .installation import install_command

        result = []
        if not self.is_64bit:
            result.append(
                "this Python is a 32-bit program: ONNX Runtime needs a 64-bit system (Raspberry Pi OS 64-bit)"
            )
        elif "onnxruntime" not in self.packages:
            result.append(
                f"no onnxruntime, which runs encoders: {install_command('agent')} (on a Jetson: NVIDIA's wheel)"
            )
        if "pillow" not in self.packages:
            result.append(f"no pillow, which reads image files: {install_command('agent')}")
        if "scikit-learn" not in self.packages:
            result.append(
                "no scikit-learn: head 'svm' cannot be fitted with kernel rbf here; linear and other heads can"
            )
        if "torch" in self.packages and self.tier != "train":
            result.append(f"torch is installed, but less than {_TRAIN_BYTES >> 20} MB of memory: tier head is safer")
        return tuple(result)


_CHILD_S = 60.0


def torchvision_advice() -> tuple[str, ...]:
    """What a real import of torchvision says, in a child process, which needs torch; empty where it works.

    It is looked up in no other way: a wheel whose compiled part does not match torch is installed as any other.
    """
    if not {"torch", "torchvision"} <= packages().keys():
        return ()
    from .children import answer_of_child
    from .errors import cause

    try:
        said = answer_of_child("edge_agent.models._torchvision", "main", {}, _CHILD_S)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return (f"torchvision could not be tried: {cause(error)}",)
    if not said["plain"]:
        return ()
    if said["ours"]:
        return (f"{said['ours']}: its encoders cannot be used",)
    mismatch = (
        f"'import torchvision' fails here ({said['plain']}): its compiled part is not for this torch. Headwater's "
        "encoders and files of yours that it loads work all the same; a script of yours calls "
        "edge_agent.models.import_torchvision() first, or install the pair from one index"
    )
    return (mismatch,)


def find() -> Capabilities:
    """The capabilities of this device now."""
    lines = (_text(Path("/proc/meminfo")) or "").splitlines()  # sizes in kB by name; no such file outside of Linux
    fields = [line.replace(":", " ").split() for line in lines]
    memory = {field[0]: int(field[1]) * 1024 for field in fields if len(field) > 1 and field[1].isdigit()}
    limit = _text(Path("/sys/fs/cgroup/memory.max")) or ""
    limits = [memory["MemTotal"]] if "MemTotal" in memory else []
    limits += [int(limit)] if limit.isdigit() else []
    return Capabilities(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        board=_text(Path("/proc/device-tree/model")),
        is_64bit=struct.calcsize("P") == 8,
        cores=cores(),
        memory_bytes=min(limits, default=None),
        available_bytes=memory.get("MemAvailable"),
        accelerators=tuple(name for path, name in _ACCELERATORS.items() if Path(path).exists()),
        packages=packages(),
    )


@functools.cache
def processor() -> str:
    """The processor as a name for files: architecture, and a digest of its model and instruction set extensions.

    Two machines of one architecture may compute int8 with other instructions: x86-64 with and without VNNI, arm64 with
    and without dot products.
    """
    lines = (line.partition(":") for line in (_text(Path("/proc/cpuinfo")) or "").splitlines())
    described = {f"{name.strip()}:{value}" for name, _, value in lines if name.strip() in _CPU_KEYS}
    content = "\n".join(sorted(described)) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def packages() -> dict[str, str]:
    """Versions of the optional and required packages that are installed; nothing is imported."""
    result = {}
    for name, module in _PACKAGES.items():
        if importlib.util.find_spec(module) is not None:
            try:
                result[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                result[name] = "unknown"
    return result


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\x00\n ") or None
    except OSError:
        return None
