"""A federation with certificates: commands called in this process, and real programs at a real Mosquitto."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time

import pytest

from coordinator.broker import held_port
from coordinator.cli import main as headwater
from edge_agent.cli import main as edge_agent

DATA = "digits:optdigits?n=120&client={}&clients=3"
LIMIT_S = 60.0


def free_ports(count=2):
    """Ports that are free, and differ: each is held while the others are chosen."""
    with contextlib.ExitStack() as held:
        return [held.enter_context(held_port("127.0.0.1", 0)) for _ in range(count)]


class Fleet:
    """The folder of one federation. ``call`` and ``device`` run commands; ``start`` runs programs until the end."""

    def __init__(self, folder, capsys, *, federation="home"):
        self.folder = folder
        self.capsys = capsys
        self.federation = federation
        self.config = folder / "coordinator.toml"
        self.port, self.enroll_port = free_ports()
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def call(self, *words):
        """(exit code, stdout, stderr) of ``headwater``."""
        with pytest.raises(SystemExit) as ended:
            headwater([*map(str, words)])
        out = self.capsys.readouterr()
        return ended.value.code, out.out, out.err

    def device(self, *words):
        """(exit code, stdout, stderr) of ``edge-agent``."""
        code = edge_agent([*map(str, words)])
        out = self.capsys.readouterr()
        return code, out.out, out.err

    def init(self, **settings):
        """A new federation on loopback with a small task; ``settings`` go to [identity]."""
        code, _, err = self.call(
            *("init", self.folder, "--host", "localhost", "--federation", self.federation),
            *("--port", self.port, "--enroll-port", self.enroll_port),
        )
        assert code == 0, err
        text = self.config.read_text().replace("small_cnn", "linear")
        text = text.replace("channels = 3, height = 32, width = 32", "channels = 1, height = 8, width = 8")
        self.config.write_text(text + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        return self

    def token(self, name, *options):
        code, out, err = self.call("enroll", name, "--config", self.config, *options)
        assert code == 0, err
        return out.strip()

    def enroll(self, token, name, client=0):
        return self.device(
            *("enroll", token, "--config", self.folder / f"{name}.toml", "--state", self.folder / name),
            *("--data", DATA.format(client)),
        )

    def start(self, name, *command):
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *map(str, command)], cwd=self.folder, stdout=log, stderr=log
            )

    def serve(self):
        self.start("serve", "coordinator", "serve", "--config", self.config)
        self.until(lambda: "serving federation" in self.said("serve"), "the coordinator serves")

    def run(self, name):
        self.start(name, "edge_agent", "run", "--config", self.folder / f"{name}.toml")

    def stop(self, name):
        process = self.processes.pop(name)
        process.terminate()
        process.wait(20)

    def kill(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def log(self, name):
        return self.folder / f"{name}.log"

    def said(self, name):
        return self.log(name).read_text() if self.log(name).exists() else ""

    def online(self):
        """Names of the agents that the coordinator's status file shows as online."""
        try:
            status = json.loads((self.folder / "state" / "status.json").read_text())
        except (FileNotFoundError, ValueError):
            return set()
        return {agent["id"] for agent in status["agents"] if agent["present"]}

    def until(self, condition, what, limit_s=LIMIT_S):
        """Seconds until the condition holds."""
        begin = time.monotonic()
        pause = threading.Event()
        while not condition():
            if time.monotonic() - begin > limit_s:
                logs = "\n".join(f"{path.name}:\n{path.read_text()[-2500:]}" for path in self.folder.glob("*.log"))
                raise AssertionError(f"not within {limit_s:.0f} s: {what}\n{logs}")
            pause.wait(0.02)
        return time.monotonic() - begin
