"""What the agents of a federation of the tests are asked to do, and work that costs them next to nothing."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent import methods
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.agent.transfers import Outbox
from edge_agent.core.config import AgentConfig
from edge_agent.core.task import ImageInput, Task, Tensors
from edge_agent.data import Samples
from edge_agent.wire.messages import down, up
from edge_agent.wire.messages import fields as fields_module

TASK = Task(
    input=ImageInput(channels=1, height=4, width=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 4},
)
"""One chunk: 16 * 4 + 4 + 4 * 3 + 3 = 83 numbers."""

WIDE_TASK = TASK.model_copy(
    update={"input": ImageInput(channels=1, height=64, width=64), "encoder_params": {"feature_dim": 32}}
)
"""103 chunks, nine full frames: 4096 * 32 numbers and some more, 524 kB."""

SMALL = {"local_epochs": 1, "batch_size": 8, "lr": 0.05}
QUICK = {"augment": False, "local_steps": 2, "tune_epochs": 1, "tune_rounds": 1, "head_epochs": 1, "ala_most_epochs": 2}


def quick_params(method: str) -> dict[str, Any]:
    """Parameters of a method with which a dozen samples are trained on in no time."""
    fields = methods.get(method).Params.model_fields
    head = {"head": "prototype"} if method == "repper" else {}
    return {**SMALL, **{name: value for name, value in QUICK.items() if name in fields}, **head}


def step_of(agent: str) -> float:
    """How far `FakeDuties` of this agent moves each number in round 1; twice as far in round 2, and so on."""
    return (zlib.crc32(agent.encode()) % 9973 + 1) / 4096


class FakeDuties:
    """Training without training: every received number moves by a step that depends on agent and round alone."""

    def __init__(self, config: AgentConfig, tier: str = "train", samples: int = 10) -> None:
        self.config = config
        self.tier = tier
        self.samples = samples
        self.bundle_id = self.rolled_back = ""
        self.outbox = Outbox(config.state / "outbox", config.privacy)
        self.done: list[tuple[str, int, str]] = []
        self.installed: list[str] = []
        self.checked: list[Task] = []
        self.rests = 0
        self.before: Callable[[down.Job], None] = lambda job: None
        self.after: Callable[[down.Job], None] = lambda job: None
        self.cancelled: fields_module.JobKey | None = None

    @property
    def bundles(self) -> FakeDuties:
        """The bundle in use: this object says all about it itself."""
        return self

    lacks_head = False
    now = staticmethod(time.time)

    def note_start(self) -> None:
        pass

    note_stop = note_start

    def note_life(self, now: float) -> None:
        pass

    def kept(self) -> str:
        return ""

    def decline(self, message: down.Install, samples: int) -> up.Report | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"cores": 1}

    def check(self, task: Task) -> None:
        self.checked.append(task)

    def release_memory(self) -> None:
        self.rests += 1

    def cancel(self, key: fields_module.JobKey | None) -> None:
        self.cancelled = key

    def forget_runs(self) -> int:
        return 0

    def do(self, job: down.Job, received: Tensors, encoder: Path | None = None) -> up.UpdateManifest | up.Report:
        self.before(job)
        self.done.append((fields_module.run_name(job.run), job.round, job.purpose))
        if job.purpose == "personalize":
            return up.Report(run=job.run, samples=self.samples, acc_personal=0.5)
        move = np.float32(step_of(self.config.id) * job.round)
        tensors = {name: array + move for name, array in received.items()}
        metrics = {"loss": 1.0} if job.work == 1 else {"loss": 1.0, "work": job.work}
        manifest = self.outbox.put(tensors, down.job_key(job), self.samples, metrics)
        self.after(job)
        return manifest

    def install(self, message: down.Install, path: Path) -> up.Report:
        self.installed.append(message.bundle_id)
        self.bundle_id = message.bundle_id
        return up.Report(
            run=message.run,
            about=message.bundle_id,
            samples=self.samples,
            bundle_id=message.bundle_id,
            acc_personal=0.5,
        )


class TinyDuties(TaskRunner):
    """The real duties on 24 made-up images of three classes, different for each agent."""

    _rows: tuple[Samples, Samples] | None = None

    def check(self, task: Task) -> None:
        """The made-up images fit every task."""

    def read_samples(self, task: Task) -> tuple[Samples, Samples]:
        if self._rows is None:
            rng = np.random.default_rng(sum(map(ord, self.config.id)))
            labels = np.arange(24, dtype=np.int64) % 3
            inputs = rng.normal(size=(24, *task.input_shape)).astype(np.float32) + labels[:, None, None, None]
            every = Samples(inputs, labels, task.class_names, task.input)
            rows = np.arange(24)
            self._rows = (every.take(rows[:18]), every.take(rows[18:]))
            self.samples = 18
        return self._rows

    def report(self, job: down.Job, head: str, overall: float | None, right: np.ndarray | None) -> up.Report:
        return up.Report(run=job.run, samples=18, acc_personal=None if right is None else float(right.mean()))
