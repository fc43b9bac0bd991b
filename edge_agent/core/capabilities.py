"""Capabilities of this device, found without importing anything heavy: packages are looked up, not loaded."""

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
"""The module that each distribution brings. Vendors ship some modules under another distribution's name."""

_CPU_KEYS = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"} | {
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"
}  # fmt: skip
"""Lines of /proc/cpuinfo that tell processors apart, on x86 and on ARM."""

_TRAIN_BYTES = 1 << 30
"""The least memory, in bytes, for training with torch: an agent takes 375 MB with torch before the first batch."""

_CHILD_S = 60.0
"""Seconds after which the trial import of torchvision in a child process is given up."""

_ACCELERATORS = {
    "/dev/nvidia0": "nvidia gpu",
    "/dev/nvhost-gpu": "jetson gpu",
    "/dev/hailo0": "hailo",
    "/dev/apex_0": "coral",
}
"""The accelerator behind each device file."""


class Capabilities(Frozen):
    """The capabilities of one device, as ``edge-agent doctor`` shows them and an agent announces them."""

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
        """The highest tier that the device can have: ``train``, ``head``, or ``idle`` while it can compute neither."""
        has_memory = self.memory_bytes is None or self.memory_bytes >= _TRAIN_BYTES
        if "torch" in self.packages and has_memory:
            return "train"
        return "head" if "onnxruntime" in self.packages and self.is_64bit else "idle"

    def advice(self) -> tuple[str, ...]:
        """Return a sentence for each package or setting that would let this device do more."""
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


def torchvision_advice() -> tuple[str, ...]:
    """Return what is wrong with torchvision, found by importing it in a child process; empty where it works.

    No other way tells: a wheel whose compiled part does not match torch is installed like any other.
    """
    if not {"torch", "torchvision"} <= packages().keys():
        return ()
    from .children import answer_of_child
    from .errors import cause

    try:
        errors = answer_of_child("edge_agent.models._torchvision", "main", {}, _CHILD_S)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return (f"torchvision could not be tried: {cause(error)}",)
    if not errors["plain"]:
        return ()
    if errors["ours"]:
        return (f"{errors['ours']}: its encoders cannot be used",)
    mismatch = (
        f"'import torchvision' fails here ({errors['plain']}): its compiled part does not match this torch. Encoders "
        "of Headwater and of files that it loads still work; your own scripts must call "
        "edge_agent.models.import_torchvision() first, or install torch and torchvision from one index"
    )
    return (mismatch,)


def find() -> Capabilities:
    """Return the capabilities of this device now."""
    memory = _read_meminfo()
    # A limit of the service's control group counts like the memory of the device.
    limits = []
    if "MemTotal" in memory:
        limits.append(memory["MemTotal"])
    group_limit = _text(Path("/sys/fs/cgroup/memory.max")) or ""
    if group_limit.isdigit():
        limits.append(int(group_limit))
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


def _read_meminfo() -> dict[str, int]:
    """Return the sizes in ``/proc/meminfo``, in bytes by name; empty outside of Linux."""
    sizes = {}
    for line in (_text(Path("/proc/meminfo")) or "").splitlines():
        fields = line.replace(":", " ").split()
        if len(fields) > 1 and fields[1].isdigit():
            sizes[fields[0]] = int(fields[1]) * 1024
    return sizes


@functools.cache
def processor() -> str:
    """Return the processor as a name for files: architecture, and a digest of its model and instruction set extensions.

    Two machines of one architecture may compute int8 with other instructions: x86-64 with and without VNNI, arm64 with
    and without dot products.
    """
    lines = (line.partition(":") for line in (_text(Path("/proc/cpuinfo")) or "").splitlines())
    described = {f"{name.strip()}:{value}" for name, _, value in lines if name.strip() in _CPU_KEYS}
    content = "\n".join(sorted(described)) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def packages() -> dict[str, str]:
    """Return the versions of the optional and required packages that are installed; nothing is imported."""
    result = {}
    for name, module in _PACKAGES.items():
        if importlib.util.find_spec(module) is not None:
            try:
                result[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                result[name] = "unknown"
    return result


def _text(path: Path) -> str | None:
    """Return the text of a system file without NULs and white space at its ends; None where it is empty or missing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\x00\n ") or None
    except OSError:
        return None
