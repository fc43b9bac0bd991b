"""500 rounds with real processes, while agents and broker are killed by a seeded schedule: nothing grows or is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from process_site import AGENTS, DIGITS, Site

from coordinator.runs.audit import audit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.broker,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc"),
]

ROUNDS, EVERY, SETTLED = 500, 20, 220
"""Rounds, rounds between two disturbances, and rounds after which memory is measured: SQLite's cache is then full."""

MOST_MB_PER_1000_ROUNDS = 1.0
STATE_BYTES_PER_ROUND = 13_000
"""Each round has five entries of some 600 bytes in the journal, with three indexes, and a line of figures."""

CACHE_BYTES = 1 << 20
"""What agents may keep of downloads; 500 models of 9 kB are more than four times that."""


def resident_mb(process):
    (line,) = (one for one in Path(f"/proc/{process.pid}/status").read_text().splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def descriptors(process):
    return len([*Path(f"/proc/{process.pid}/fd").iterdir()])


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_500_rounds_under_a_seeded_schedule_leave_no_trace(tmp_path):
    dice = np.random.default_rng(7)
    rules = "[cohort]\nmin_agents = 2\n[round]\nquorum = 1.0\ngrace_s = 1"
    with Site(tmp_path, DIGITS, rules=rules, of_agents=f"cache_bytes = {CACHE_BYTES}\n") as site:
        run = site.request(ROUNDS, local_epochs=1)
        serve = site.processes["serve"]
        steady = site.processes["a2"]
        seen = []
        for number in range(EVERY, ROUNDS, EVERY):
            site.until(lambda number=number: closed(site, run) >= number, f"round {number} is over")
            seen.append((closed(site, run), *(f(one) for one in (serve, steady) for f in (resident_mb, descriptors))))
            victim = ("a0", "a1", "broker", "pause")[int(dice.integers(4))]
            if victim == "broker":
                os.kill(site.broker.pid, signal.SIGKILL)
            elif victim == "pause":
                site.processes["a0"].send_signal(signal.SIGSTOP)
                site.until(lambda number=number: closed(site, run) >= number + 3, "rounds go on without it")
                site.processes["a0"].send_signal(signal.SIGCONT)
            else:
                site.kill(victim)
                site.agent(victim)
        site.finish(run)
        assert serve.poll() is None
        rounds, serve_mb, serve_fds, agent_mb, agent_fds = np.array(seen).T
        after = rounds >= SETTLED
        slopes = {
            name: 1000 * np.polyfit(rounds[after], mb[after], 1)[0]
            for name, mb in (("coordinator", serve_mb), ("agent", agent_mb))
        }
        figures = {
            "slope_mb_per_1000_rounds": slopes,
            "resident_mb": {"coordinator": serve_mb[-1], "agent": agent_mb[-1]},
            "descriptors": {"coordinator": sorted({*serve_fds[after]}), "agent": sorted({*agent_fds[after]})},
            "series_mb": {"rounds": [*rounds], "coordinator": [*serve_mb], "agent": [*agent_mb]},
            "state_bytes": {name: size_of(tmp_path / name) for name in ("state", *AGENTS)},
        }
        if (report := os.environ.get("SOAK_REPORT")) is not None:
            Path(report).write_text(json.dumps(figures, indent=1))
        with site.state.look() as state:
            result = audit(state, run, [tmp_path / name for name in AGENTS])
        assert result.breaks == []
        assert [one.round for one in result.rounds] == list(range(1, ROUNDS + 1))
        assert max(slopes.values()) <= MOST_MB_PER_1000_ROUNDS, figures
        assert max(serve_fds[after]) - min(serve_fds[after]) <= 3, "a connection more or less while the broker is away"
        assert len([*(tmp_path / "state" / "blobs").glob("*")]) <= 2 + len(AGENTS)
        assert figures["state_bytes"]["state"] < ROUNDS * STATE_BYTES_PER_ROUND, figures
        assert max(figures["state_bytes"][name] for name in AGENTS) < 1.5 * CACHE_BYTES, figures


def closed(site, run):
    return len(site.entries(run, "round_closed"))
