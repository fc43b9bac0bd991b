"""Figures as rows, and the sentence about the machine that they come from."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "paho-mqtt", "pydantic", "onnxruntime", "torch", "amqtt")


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {"name": self.name, "value": rounded(self.value), "unit": self.unit}


def rounded(value: float, digits: int = 4) -> float:
    """``value`` with so many significant digits; not a number stays what it is."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def machine() -> dict[str, Any]:
    """Processor, cores, load and versions: what figures depend on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": rounded(os.getloadavg()[0], 3) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: result for name in PACKAGES if (result := _version(name))},
    }


def caveat(of: dict[str, Any], not_shown: str) -> str:
    """What a reader has to know before comparing anything."""
    versions = ", ".join(f"{name} {version}" for name, version in of["packages"].items())
    return (
        f"Caveats: {of['processor']}, {of['cores']} cores, load {of['load']} at the start, Python {of['python']}, "
        f"{versions}. {not_shown} Compare ratios of one run, not times of two machines."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
