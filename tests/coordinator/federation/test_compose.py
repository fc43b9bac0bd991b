"""The parts of compose.yaml as processes of this machine, by the commands and files that the containers have."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from identity_harness import free_ports

from coordinator.broker import find_mosquitto

pytestmark = [
    pytest.mark.slow,
    pytest.mark.broker,
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
PROGRAMS = {"coordinator": "coordinator", "agent-1": "edge_agent", "agent-2": "edge_agent"}
NEEDS_MORE = ("headwater_agent_", "headwater_privacy_", "headwater_run_", "headwater_round_opened_")
"""Figures of textfiles, of runs with differential privacy, and of a run that goes on."""


class Compose:
    """Mosquitto, coordinator, two agents and Prometheus; each host name is 127.0.0.1 with a port of ours."""

    def __init__(self, folder, configs):
        self.folder = folder
        self.configs = configs
        self.processes = {}
        self.services = yaml.safe_load((configs / "containers/compose.yaml").read_text(encoding="utf-8"))["services"]
        self.broker, self.web, self.prometheus = free_ports(3)
        self.places = {
            "mosquitto:1883": f"127.0.0.1:{self.broker}",
            "0.0.0.0:8470": f"127.0.0.1:{self.web}",
            "coordinator:8470": f"localhost:{self.web}",
            "listener 1883": f"listener {self.broker} 127.0.0.1",
            "scrape_interval: 15s, evaluation_interval: 15s": "scrape_interval: 500ms, evaluation_interval: 500ms",
        }

    def __enter__(self):
        for name, service in self.services.items():
            (self.folder / name).mkdir()
            for volume in service["volumes"]:
                source, target, *_ = volume.split(":")
                if source.startswith("."):
                    self._copy(name, source, target)
        mosquitto = self.folder / "mosquitto/mosquitto.conf"
        self.start("mosquitto", [find_mosquitto(), "-c", str(mosquitto)])
        for name, module in PROGRAMS.items():
            self.start(name, [sys.executable, "-m", module, *self.command(name)])
        config = f"--config.file={self.folder / 'prometheus/prometheus.yml'}"
        listen = f"--web.listen-address=127.0.0.1:{self.prometheus}"
        storage = f"--storage.tsdb.path={self.folder}/tsdb"
        self.start("prometheus", ["prometheus", config, listen, storage])
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()

    def _copy(self, name, source, target):
        text = (self.configs / "containers" / source).read_text(encoding="utf-8")
        for written, here in {**self.places, "/var/lib/headwater/": f"{self.folder / name}/"}.items():
            text = text.replace(written, here)
        (self.folder / name / target.rpartition("/")[2]).write_text(text)

    def command(self, name):
        """The service's command with the configuration's place on this machine."""
        return [
            str(self.folder / name / word.rpartition("/")[2]) if "/" in word else word
            for word in self.services[name]["command"]
        ]

    def start(self, name, command):
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def ask(self, port, path, **query):
        """(status, body) of an address; (0, "") where nobody answers."""
        address = f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def data(self, path, **query):
        """``data`` of an answer of Prometheus; None where there is none."""
        status, body = self.ask(self.prometheus, f"/api/v1/{path}", **query)
        answer = json.loads(body) if body.startswith("{") else {}
        assert status in {0, 200, 503}, answer
        return answer.get("data")

    def until(self, condition, what, limit_s=120.0):
        """Return what the condition returns once that is true."""
        end = time.monotonic() + limit_s
        pause = threading.Event()
        while not (found := condition()):
            if time.monotonic() > end:
                logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in self.folder.glob("*.log"))
                raise AssertionError(f"not within {limit_s} s: {what}\n{logs}")
            pause.wait(0.2)
        return found


@pytest.fixture(scope="module")
def root():
    return Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory, root):
    with Compose(tmp_path_factory.mktemp("compose"), root / "configs") as made:
        made.until(lambda: made.ask(made.web, "/ready")[0] == 200, "/ready answers 200")
        state = str(made.folder / "coordinator/state")
        check = [sys.executable, "-m", "coordinator.web.health", "--state", state, "--ready"]
        subprocess.run(check, check=True, timeout=60)
        config = str(made.folder / "coordinator/coordinator.toml")
        command = [sys.executable, "-m", "coordinator", "run", "-c", config, "--rounds", "2"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        yield made


def test_a_run_ends_and_the_agent_without_torch_gets_its_bundle(site):
    command = [
        sys.executable,
        "-m",
        "edge_agent",
        "status",
        "--json",
        "--config",
        str(site.folder / "agent-2/agent.toml"),
    ]

    def status():
        found = json.loads(subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout)
        return found if found["bundle_id"] and found["head"] else None

    found = site.until(status, "agent-2 has a head on the released encoder")
    assert (found["tier"], found["condition"], found["running"]) == ("head", "ok", True)


def test_prometheus_scrapes_the_coordinator_and_loads_each_alert(site, root):
    def target():
        (found,) = (site.data("targets") or {"activeTargets": [{"health": "unknown"}]})["activeTargets"]
        return found if found["health"] == "up" else None

    found = site.until(target, "the coordinator's target is up")
    assert found["labels"]["job"] == "headwater"
    assert found["lastError"] == ""
    (group,) = yaml.safe_load((root / "configs/grafana/alerts.yml").read_text(encoding="utf-8"))["groups"]

    def rules():
        (loaded,) = site.data("rules")["groups"]
        return loaded["rules"] if all(one["health"] == "ok" for one in loaded["rules"]) else None

    loaded = site.until(rules, "each rule was evaluated")
    assert [one["name"] for one in loaded] == [one["alert"] for one in group["rules"]]
    assert {one["name"]: one["state"] for one in loaded if one["state"] != "inactive"} == {}, "all is well here"


def test_each_query_of_the_dashboard_is_answered(site, root):
    dashboard = json.loads((root / "configs/grafana/dashboard.json").read_text(encoding="utf-8"))
    (variable,) = [one for one in dashboard["templating"]["list"] if one["name"] == "instance"]
    figure = re.fullmatch(r"label_values\((\w+), instance\)", variable["definition"])[1]
    values = site.until(lambda: site.data("label/instance/values", **{"match[]": figure}), "a coordinator to choose")
    assert values == [f"localhost:{site.web}"]
    expressions = [one["expr"] for panel in dashboard["panels"] for one in panel.get("targets", ())]
    assert len(expressions) > 30
    empty = []
    for expression in expressions:
        for chosen in (variable["allValue"], values[0]):  # 'All', and one by its name
            answer = site.data("query", query=expression.replace("$instance", chosen))
            assert answer is not None, expression
            assert answer["resultType"] == "vector", expression
        if not answer["result"]:
            empty.append(expression)
    (updates,) = site.data("query", query="headwater_updates_accepted_total")["result"]
    assert float(updates["value"][1]) == 2.0, "two rounds of the one agent that trains"
    unexplained = [one for one in empty if not any(name in one for name in NEEDS_MORE) and "> 0" not in one]
    assert unexplained == []
