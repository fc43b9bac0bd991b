"""The demonstration: a real federation of processes on this machine, from nothing to personal heads.

Data are digits in six styles (see `edge_agent.data.digits`). Writers are split six ways, one part for each agent, so
the two head-tier agents have both a style and digits that no training agent has seen.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.config import parse
from edge_agent.errors import HeadwaterError, UsageError
from edge_agent.task import ImageInput, Task

from .cli.follow import follow
from .config import CoordinatorConfig
from .processes import launch
from .runs.request import Request
from .runs.result_warnings import lines
from .service.app import coordinator

MARKER = ".headwater-demo"
TRAIN_STYLES = ("optdigits", "inverted", "photo", "rendered")
HEAD_STYLES = ("slanted", "striped")
STYLES = (*TRAIN_STYLES, *HEAD_STYLES)
SAMPLES_OF_RENDERED = 400
EVALUATE_EVERY = 5

SETTINGS: dict[str, dict[str, Any]] = {
    "repper": {"augment": False, "global_head": True, "local_epochs": 1, "batch_size": 128, "lr": 3e-3}
}
"""What the demonstration asks for and says so; all else, and other methods, have their defaults.

RepPer's views flip images, which turns digits into other digits; the shared classifier is for ``acc.global``; one epoch
a round with a larger step keeps the encoders of clients with 225 images near each other."""


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration produced."""

    folder: Path
    summary: dict[str, Any]
    report: Path
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        kept = ("run_id", "method", "rounds", "seed", "encoder_sha256", "agents", "faults", "warnings", "bundle")
        return {
            **{key: self.summary[key] for key in kept},
            "seconds": round(self.seconds, 1),
            "report": str(self.report),
            "folder": str(self.folder),
        }

    def reading(self) -> Iterator[str]:
        """What the table says, and what to try next."""
        heads = [a for a in self.summary["agents"] if a["tier"] == "head"]
        personal, local = _mean(heads, "personal"), _mean(heads, "local")
        if personal is not None and local is not None:
            yield (
                f"The {len(heads)} devices without torch get {personal:.3f} with their own head on the shared encoder, "
                f"{local:.3f} with raw pixels alone (same data)."
            )
        yield from (f"warning: {line}" for line in lines(self.summary["warnings"]))
        if settings := SETTINGS.get(self.summary["method"]):
            asked = " ".join(f"--set {name}={json.dumps(value)}" for name, value in settings.items())
            yield f"Settings of this run that are no defaults of {self.summary['method']}: {asked}"
        bundle = self.summary.get("bundle")
        yield f"All of it took {self.seconds:.0f} s. Plots: {self.report}"
        if bundle:
            yield "Next, on this machine or any other, without torch and without a network:"
            source = f"digits:{HEAD_STYLES[0]}"
            yield f"  edge-agent fit --bundle {bundle['path']} --data {source} --head lr --out my-head"
            yield f"  edge-agent evaluate --bundle {bundle['path']} --data {source} --head my-head"


def run_demo(folder: Path, *, method: str, rounds: int, seed: int) -> DemoResult:
    """Run the demonstration in ``folder``, which is emptied first if it is one of ours.

    Raises:
        UsageError: the folder holds something else.
        HeadwaterError: the run failed; the message holds the agents' stderr tail.
    """
    begin = time.monotonic()
    folder = folder.absolute()
    _empty(folder)
    config = _coordinator_config(folder)
    request = _request(config, method, rounds, seed)
    with coordinator(config) as service:
        with _agents(folder, service.broker_url, seed) as agents:
            run = service.state.journal.request_run(request.body())

            def step() -> None:
                service.step(service.idle_s())
                _check_alive(agents, folder)

            follow(service.state, run, step)
        results = service.state.run(run)
        summary = results.summary()
    if summary is None:
        raise HeadwaterError(f"{run} left no summary in {results.folder}; look at {folder / 'logs'}")
    return DemoResult(folder, summary, results.report_path, time.monotonic() - begin)


def _coordinator_config(folder: Path) -> CoordinatorConfig:
    task = Task(input=ImageInput(channels=3, height=32, width=32), class_names=tuple("0123456789"), encoder="small_cnn")
    raw = {
        "federation": "demo",
        "state": str(folder / "coordinator"),
        "embedded": {"port": 0},
        "task": task.model_dump(mode="json"),
        "cohort": {"min_agents": len(TRAIN_STYLES)},
        "round": {"quorum": 1.0, "deadline_s": 300.0},
        "evaluate_every": EVALUATE_EVERY,
        # The older exporter takes 0.2 s for this encoder where the newer takes 7; the gates are the same.
        "export": {"exporter": "legacy", "calibration": f"digits:{TRAIN_STYLES[0]}?n=128"},
    }
    return parse(CoordinatorConfig, raw, where="the demo's configuration")


def _request(config: CoordinatorConfig, method: str, rounds: int, seed: int) -> Request:
    from .cli.run import request_for

    return request_for(config, method, rounds, seed, SETTINGS.get(method, {}))


@contextlib.contextmanager
def _agents(folder: Path, url: str, seed: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """All agents as processes; they are told to stop at the end, and made to if they do not."""
    agents: dict[str, subprocess.Popen[bytes]] = {}
    (folder / "logs").mkdir()
    try:
        for number, style in enumerate(STYLES):
            tier = "train" if style in TRAIN_STYLES else "head"
            path = _write_agent(folder, url, number, style, tier, seed)
            log = (folder / "logs" / f"{tier}-{style}.log").open("wb")
            command = launch.command("edge_agent", "run", "--config", str(path))
            agents[f"{tier}-{style}"] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            log.close()
        yield agents
    finally:
        for process in agents.values():
            process.terminate()
        for process in agents.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def _write_agent(folder: Path, url: str, number: int, style: str, tier: str, seed: int) -> Path:
    """One agent's configuration file, as one would write it by hand."""
    count = f"&n={SAMPLES_OF_RENDERED}" if style == "rendered" else ""
    source = f"digits:{style}?client={number}&clients={len(STYLES)}&seed={seed}{count}"
    path = folder / f"{tier}-{style}.toml"
    path.write_text(
        f'id = "{tier}-{style}"\nfederation = "demo"\ntier = "{tier}"\nstate = "agents/{tier}-{style}"\n'
        "heartbeat_s = 5\n\n"
        f'[broker]\nurl = "{url}"\n\n[data]\nsource = "{source}"\n\n[head]\nname = "lr"\n',
        encoding="utf-8",
    )
    return path


def _check_alive(agents: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    for name, process in agents.items():
        code = process.poll()
        if code is not None:
            log = (folder / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            last = "\n".join(log.splitlines()[-5:])
            raise HeadwaterError(f"agent {name} ended with code {code}; the end of its output:\n{last}")


def _empty(folder: Path) -> None:
    """Make way: only an empty folder or an earlier demonstration is touched."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise UsageError(f"{folder} is not empty and not of an earlier demo; choose another with --dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()


def _mean(agents: list[dict[str, Any]], scope: str) -> float | None:
    values = [a["acc"][scope] for a in agents if a["acc"][scope] is not None]
    return sum(values) / len(values) if values else None
