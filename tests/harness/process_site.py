"""Real processes at a real broker, all in one folder, all gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

from coordinator.broker import EmbeddedBroker, MosquittoBroker, find_mosquitto
from coordinator.journal.entries import fact_of
from coordinator.rounds.request import Request
from coordinator.state.store import StateFolder
from edge_agent.core.task import ImageInput, Task

AGENTS = ("a0", "a1", "a2")
EVERYBODY = f"[cohort]\nmin_agents = {len(AGENTS)}\n[round]\nquorum = 1.0"
DIGITS = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=tuple("0123456789"),
    encoder="linear",
    encoder_params={"feature_dim": 32},
)
LARGE = Task(
    input=ImageInput(channels=1, height=64, width=64),
    class_names=tuple("0123456789"),
    encoder="linear",
    encoder_params={"feature_dim": 2048},
)
"""4096 * 2048 numbers: 33.6 MB, 547 chunks."""


class Site:
    """A broker, one coordinator and agents as processes, all in one folder, all gone at the end."""

    def __init__(
        self, folder, task, *, agents=AGENTS, rules=EVERYBODY, of_agents="", log_format="text", broker=None, qos=1
    ):
        self.folder = folder
        self.task = task
        self.agents = agents
        self.rules = rules.replace(f"min_agents = {len(AGENTS)}", f"min_agents = {len(agents)}")
        self.of_agents = of_agents
        self.log_format = ("--log-format", log_format)
        self.state = StateFolder(folder / "state")
        self.processes = {}
        self.broker = broker or (MosquittoBroker() if find_mosquitto() else EmbeddedBroker())
        self.qos = qos

    def __enter__(self):
        self.broker.start()
        (self.folder / "coordinator.toml").write_text(self.coordinator_toml())
        self.serve()
        for number, name in enumerate(self.agents):
            (self.folder / f"{name}.toml").write_text(
                f'id = "{name}"\ntier = "train"\nstate = "{name}"\nheartbeat_s = 2\n{self.of_agents}\n'
                f"{self.agents_broker_toml()}\n\n"
                f'[data]\nsource = "digits:optdigits?n=240&client={number}&clients={len(self.agents)}"\n'
            )
            self.agent(name)
        self.until(lambda: (self.folder / "state" / "journal.db").exists(), "the coordinator starts")
        return self

    def broker_toml(self):
        return f"[broker]\nurl = {json.dumps(self.broker.url)}\nqos = {self.qos}"

    def agents_broker_toml(self):
        """How agents connect."""
        return self.broker_toml()

    def coordinator_toml(self):
        task = self.task
        size = self.task.encoder_params["feature_dim"]
        return "\n".join(
            [
                'state = "state"',
                self.broker_toml(),
                self.rules,
                "[export]\nafter_run = false",
                f'[task]\nclass_names = {json.dumps(task.class_names)}\nencoder = "linear"',
                f"encoder_params = {{ feature_dim = {size} }}",
                f'input = {{ kind = "image", channels = 1, height = {task.input.height}, width = {task.input.width} }}',
            ]
        )

    def __exit__(self, *_):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self.broker.stop()

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *(() if command[0].endswith(".py") else ("-m",)), *command],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def serve(self):
        self.start("serve", "coordinator", "serve", "--config", "coordinator.toml", *self.log_format)

    def agent(self, name):
        self.start(name, "edge_agent", "run", "--config", f"{name}.toml", *self.log_format)

    def kill(self, name):
        os.kill(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def request(self, rounds, method="fedavg", **params):
        wanted = Request(method, {"batch_size": 8, **params}, rounds, 5, self.task)
        with self.state.look(create=True) as state:
            return state.journal.request_run(fact_of("run_requested", wanted.body()))

    def entries(self, run, *kinds):
        with self.state.look() as state:
            return state.journal.entries(run, kinds or None)

    def until(self, condition, what, limit_s=120.0, every_s=0.02):
        """Return when the condition holds; fail where no log grows for so long, or the coordinator ended by itself."""
        logs = sorted(self.folder.glob("*.log"))
        pause = threading.Event()
        end = time.monotonic() + limit_s
        sizes = ()
        while not condition():
            if (now := tuple(path.stat().st_size for path in logs)) != sizes:
                end = time.monotonic() + limit_s
                sizes = now
            has_given_up = "serve" in self.processes and (self.processes["serve"].poll() or 0) > 0
            if has_given_up or time.monotonic() > end:
                words = {path.name: path.read_text()[-1500:] for path in logs}
                raise AssertionError(
                    f"nothing new within {limit_s} s: {what}\n" + "\n".join(f"{k}:\n{v}" for k, v in words.items())
                )
            pause.wait(every_s)

    def finish(self, run):
        """SHA-256 of the encoder that the run ended with."""
        over = ("run_finished", "run_failed")
        self.until(lambda: self.entries(run, *over), f"{run} is over")
        (entry,) = self.entries(run, *over)
        assert entry.kind == "run_finished", entry.body
        return entry.body["encoder_sha256"]

    def opened(self, run):
        return [(entry.round, entry.body["attempt"]) for entry in self.entries(run, "round_opened")]
