"""With ``--log-format json`` every line that the programs write on stderr is one JSON object."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import datetime, timezone

import pytest
from process_site import AGENTS, DIGITS, Site

pytestmark = pytest.mark.broker


def lines_of(site, name):
    return [json.loads(line) for line in (site.folder / f"{name}.log").read_text(encoding="ascii").splitlines()]


@pytest.mark.slow
def test_every_line_of_a_coordinator_and_its_agents_is_an_object_with_run_round_and_agent(tmp_path):
    began = datetime.now(timezone.utc)
    with Site(tmp_path, DIGITS, log_format="json") as site:
        run = site.request(2)
        site.finish(run)
        command = ["-m", "coordinator", "run", "-c", "coordinator.toml", "-r", "1", "--log-format", "json"]
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        followed = [json.loads(line)["line"] for line in done.stderr.splitlines()]
        assert "run-0002: round 1 of 1 is closed" in followed
        for process in site.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
        served = lines_of(site, "serve")
        assert {line["level"] for line in served} <= {"info", "warning"}
        assert all(datetime.fromisoformat(line["time"]) >= began.replace(microsecond=0) for line in served)
        closed = [line for line in served if line["event"] == "round_closed" and line["run"] == run]
        assert [line["round"] for line in closed] == [1, 2]
        assert all(line["clients"] == len(AGENTS) and line["seconds"] > 0 for line in closed)
        assert {line["agent"] for line in served if line["event"] == "agent_joined"} == set(AGENTS)
        said = [line["line"] for line in served if line["event"] == "output"]
        assert said[-1] == "stopped; the next start resumes from here"
        for name in AGENTS:
            assert "welcomed" in {line["event"] for line in lines_of(site, name)}


def test_the_reason_why_a_program_ends_is_an_object_too(tmp_path):
    (tmp_path / "a0.toml").write_text('id = "a0"\n[data]\nsource = "no-such-source"\n')
    site = Site(tmp_path, DIGITS, log_format="json")
    site.agent("a0")
    assert site.processes["a0"].wait(timeout=60) == 2
    (line,) = lines_of(site, "a0")
    assert (line["event"], line["logger"]) == ("output", "stderr")
    assert "no-such-source" in line["line"]
