"""Five devices that are set up wrongly, as real processes at a real broker: each is seen with its remedy."""

from __future__ import annotations

import contextlib
import html
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from coordinator.broker import held_port
from coordinator.broker.access import set_password
from coordinator.cli import main as headwater
from coordinator.config import WebConfig
from coordinator.web.server import Settings, WebProcess
from edge_agent.cli import main as edge_agent

HARNESS = Path(__file__).parents[2] / "harness"
WITHIN_S = 15.0

COORDINATOR = """
state = "state"
[embedded]
port = {port}
password_file = "users"
[task]
class_names = ["cat", "dog"]
encoder = "linear"
encoder_params = {{ feature_dim = 4 }}
input = {{ kind = "image", channels = 1, height = 8, width = 8 }}
"""
AGENT = """
id = "{name}"
tier = "{tier}"
state = "{state}"
heartbeat_s = 2
[broker]
url = "mqtt://127.0.0.1:{port}"
user = "{user}"
password_file = "{user}.password"
[data]
source = "images:{data}"
"""

SEEN = {
    "classes": ("DataError", "correct the data"),
    "password": ("LoginRefused", "headwater password"),
    "wrong-id": ("LoginRefused", "the same name"),
    "old": ("ProtocolMismatch", "upgrade the"),
    "disk": ("DiskError", "free space on the device's disk"),
}
"""Device -> what its fault is called, and a part of the remedy."""


class Home:
    """A folder with a coordinator and devices as processes."""

    def __init__(self, folder, capsys):
        self.folder = folder
        self.capsys = capsys
        self.processes = {}
        self.views = []
        with held_port("127.0.0.1", 0) as self.port:
            pass
        (folder / "coordinator.toml").write_text(COORDINATOR.format(port=self.port))
        for kind, names in (("right", ("cat", "dog")), ("wrong", ("Hund", "katze"))):
            self.pictures(folder / kind, names)

    def pictures(self, folder, names):
        from PIL import Image

        for number, name in enumerate(names):
            (folder / name).mkdir(parents=True)
            for one in range(4):
                Image.new("L", (8, 8), 60 * number + one).save(folder / name / f"{one}.png")

    def device(self, name, *, tier="head", user=None, password=None, data="right", state=None):
        user = user or name
        folder = self.folder
        (folder / f"{user}.password").write_text(password or f"of {user}")
        text = AGENT.format(name=name, tier=tier, state=state or name, port=self.port, user=user, data=data)
        (folder / f"{name}.toml").write_text(text)
        return folder / f"{name}.toml"

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *map(str, command)], cwd=self.folder, stdout=log, stderr=log
            )

    def call(self, command, *words):
        """stdout of a command; its exit code does not count."""
        with contextlib.suppress(SystemExit):
            command([*map(str, words)])
        return self.capsys.readouterr().out

    def until(self, condition, limit_s):
        begin = time.monotonic()
        pause = threading.Event()
        while not condition():
            if time.monotonic() - begin > limit_s:
                return None
            pause.wait(0.25)
        return time.monotonic() - begin

    def close(self):
        for view in self.views:
            view.stop()
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def home(tmp_path, capsys):
    home = Home(tmp_path, capsys)
    yield home
    home.close()


@pytest.mark.slow
@pytest.mark.broker
def test_five_kinds_of_wrong_devices_are_seen_with_their_remedies(home, small_disk):
    """Wrong classes, wrong password, wrong id, old version, full disk: in three commands and a web view within 15 s."""
    for user in ("classes", "password", "old", "disk"):
        set_password(home.folder / "users", user, f"of {user}")
    home.start("serve", "-m", "coordinator", "serve", "--config", "coordinator.toml")
    state = home.folder / "state"
    view = WebProcess(Settings(state, WebConfig(listen="127.0.0.1:0")), lambda _: None)
    assert home.until((state / "status.json").exists, 60) is not None
    home.views.append(view)
    view.start()
    assert home.until(lambda: view.url, 60) is not None
    devices = {
        "classes": home.device("classes", tier="train", data="wrong"),
        "password": home.device("password", password="another"),
        "wrong-id": home.device("wrong-id", user="old"),
        "old": home.device("old"),
        "disk": home.device("disk", state=small_disk / "state"),
    }
    began = {}
    for name, config in devices.items():
        program = (HARNESS / "old_agent.py",) if name == "old" else ("-m", "edge_agent")
        home.start(name, *program, "run", "--config", config)
        began[name] = time.monotonic()
    assert home.until(lambda: (small_disk / "state" / "status.json").exists(), 60) is not None
    with contextlib.suppress(OSError), (small_disk / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    began["disk"] = time.monotonic()

    def in_status():
        text = home.call(headwater, "status", "--state", state)
        return {name for name, (error, remedy) in SEEN.items() if _says(text, name, error, remedy)}

    def in_agents():
        found = json.loads(home.call(headwater, "agents", "--state", state, "--json"))["agents"]
        faults = {one["id"]: one["fault"] or {} for one in found}
        return {
            name
            for name, (error, remedy) in SEEN.items()
            if faults.get(name, {}).get("error") == error and remedy in faults[name]["remedy"]
        }

    def on_device():
        seen = set()
        for name, (error, remedy) in SEEN.items():
            found = json.loads(home.call(edge_agent, "status", "--config", devices[name], "--json") or "{}")
            fault = found.get("fault") or {}
            if fault.get("error") == error and remedy in fault["remedy"] and found["condition"] in {"fault", "stalled"}:
                seen.add(name)
        return seen

    def in_web():
        with urllib.request.urlopen(view.url, timeout=10) as answer:
            parts = re.split(r'<tr><th scope="row">', answer.read().decode())
        texts = {name: html.unescape(part) for part in parts for name in SEEN if f"<bdi>{name}</bdi>" in part}
        return {name for name, (error, remedy) in SEEN.items() if {error, remedy} <= _parts(texts, name, error, remedy)}

    waits = {where: dict[str, float]() for where in ("status", "agents", "device", "web")}

    def everywhere():
        for where, look in (("status", in_status), ("agents", in_agents), ("device", on_device), ("web", in_web)):
            for name in look():
                waits[where].setdefault(name, time.monotonic() - began[name])
        return all(len(seen) == len(SEEN) for seen in waits.values())

    found = home.until(everywhere, 2 * WITHIN_S)
    logs = "\n".join(f"{name}: {(home.folder / f'{name}.log').read_text()[-800:]}" for name in home.processes)
    shown = {where: {name: round(s, 1) for name, s in sorted(seen.items())} for where, seen in waits.items()}
    assert found is not None, f"{shown}\n{home.call(headwater, 'status', '--state', state)}\n{logs}"
    print(shown)
    assert max(s for seen in waits.values() for s in seen.values()) <= WITHIN_S, shown


def _parts(texts, name, *wanted):
    return {part for part in wanted if part in texts.get(name, "")}


def _says(text, name, error, remedy):
    """Whether a line of the status is about that device, and has error (of devices on the roster) and remedy."""
    for line in text.splitlines():
        is_refused = line.startswith("refused: ") and f"'{name}'" in line
        is_known = line.startswith(f"{name} *: {error}: ")
        if (is_refused or is_known) and remedy in line:
            return True
    return False
