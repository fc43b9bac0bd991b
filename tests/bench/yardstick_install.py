"""Predictions of the running pair while a new bundle is prepared, on one core: in the agent, or in a process beside it.

A program of the device's owner predicts pictures of 224 x 224 with a ResNet18, one after another, in another process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.research.bench.device import resnet18
from edge_agent.agent.head_tier import install_bundle
from edge_agent.bundle import archive
from edge_agent.core.config import AgentConfig, DataConfig, HeadConfig
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Install

PREDICTS = """
import json, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
os.sched_setaffinity(0, {0})
from edge_agent.bundle import installed
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.personalize import load_head
state, stop, seconds, pause = Path(sys.argv[1]), [], [], threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
bundle = installed.current(state / "bundles")
head, encoder = load_head(state / "head", bundle), Encoder.open(bundle, "fp32")
picture = np.zeros((1, 3, 224, 224), np.float32)
print("ready", flush=True)
while not stop:
    begin = time.monotonic()
    head.predict_proba(encoder.features(picture))
    seconds.append((begin, time.monotonic() - begin))
    pause.wait(0.05)
print(json.dumps(seconds))
"""

INSTALLS = """
import json, os, sys, time
from pathlib import Path
os.sched_setaffinity(0, {0})
from edge_agent.agent import candidate
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.config import AgentConfig
from edge_agent.wire.messages.down import Install
config, message = AgentConfig.model_validate_json(sys.argv[1]), Install.model_validate_json(sys.argv[2])
if int(sys.argv[5]):
    candidate.available_bytes = lambda: int(sys.argv[5]) << 20
tasks = TaskRunner(config, "head", beside=sys.argv[4] == "beside")
before, begin = candidate.resident_mb_of(os.getpid()), time.monotonic()
report = tasks.install(message, Path(sys.argv[3]))
assert report.bundle_id == message.bundle_id, report
after = candidate.resident_mb_of(os.getpid())
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
peak = report.metrics.get("install.peak_mb", int(peak.split()[1]) * 1024 / 1e6)
print(json.dumps({"begin": begin, "end": time.monotonic(), "idle_mb": before, "after_mb": after, "peak_mb": peak}))
"""


def measure(where: str, folder: Path, cache: Path, available_mb: int = 0) -> dict[str, Any]:
    """Milliseconds of predictions before and during an install, and MB of the agent; ``where``: ``here`` or ``beside``.

    ``available_mb``: as if so much memory were available; 0: what there is.
    """
    config = AgentConfig(
        id="dev",
        state=folder / f"{where}-{available_mb}",
        data=DataConfig(source="digits:optdigits?n=60"),
        head=HeadConfig(name="prototype", precision="fp32", local=False, min_gain=-1),
    )
    resnet18(cache)
    first = next(cache.glob("resnet18-*.hwb"))
    second = other_bundle(first, folder / "other.hwb")
    install_bundle(config, order(first), first)
    child = [sys.executable, "-c"]
    predicting = subprocess.Popen([*child, PREDICTS, str(config.state)], stdout=subprocess.PIPE, text=True)
    try:
        predicting.stdout.readline()
        threading.Event().wait(4)
        words = [config.model_dump_json(), order(second).model_dump_json(), str(second), where, str(available_mb)]
        done = subprocess.run([*child, INSTALLS, *words], capture_output=True, text=True, check=True)
    finally:
        predicting.send_signal(signal.SIGTERM)
    found = json.loads(done.stdout)
    answers = json.loads(predicting.communicate()[0])
    times = {
        "before": [seconds for at, seconds in answers if at + seconds < found["begin"] - 1],
        "during": [seconds for at, seconds in answers if found["begin"] < at < found["end"]],
    }
    figures = {f"{name}_{q}_ms": 1000 * float(np.quantile(v, q / 100)) for name, v in times.items() for q in (50, 95)}
    return {
        **figures,
        "during_max_ms": 1000 * max(times["during"]),
        "answers": len(times["during"]),
        "seconds": found["end"] - found["begin"],
        **{name: found[name] for name in ("idle_mb", "after_mb", "peak_mb")},
    }


def order(path: Path) -> Install:
    """The coordinator's offer of a bundle."""
    bundle_id = archive.open_bundle(path).manifest.bundle_id
    return Install(run="run-0001", bundle_id=bundle_id, blob=Outgoing.of(path.read_bytes()).ref)


def other_bundle(path: Path, made: Path) -> Path:
    """A bundle of the same encoder with another id."""
    opened = archive.open_bundle(path)
    fields = opened.manifest.model_dump(mode="json", exclude={"schema_version", "files", "variants"})
    fields |= {"variants": {name: one.file for name, one in opened.manifest.variants.items()}, "norm_note": "other"}
    archive.pack(made, fields, {name: opened.read(name) for name in opened.manifest.files})
    return made


def report(folder: Path, cache: Path) -> dict[str, dict[str, Any]]:
    """Both ways, and as on a board of 512 MB."""
    found = {where: measure(where, folder, cache) for where in ("here", "beside")}
    return {**found, "beside, 300 MB available": measure("beside", folder, cache, 300)}
