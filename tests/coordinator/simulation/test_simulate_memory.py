"""A simulation takes as many workers as fit into memory, refuses with numbers, and stops before memory runs out."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from simulation_harness import learned, run, small_plan, write_images

from coordinator.simulation import memory_plan
from coordinator.simulation import run as run_module
from coordinator.simulation.engines.base import EngineChoice
from coordinator.simulation.memory_plan import MemoryNeed, fit_memory
from coordinator.simulation.memory_watch import MemoryWatch, occupied
from coordinator.simulation.plan import Plan
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from edge_agent.core.config import parse
from edge_agent.core.errors import ConfigError, RunFailed, UsageError

MB = 10**6

NEED = MemoryNeed(process=100 * MB, shared=50 * MB, samples=20 * MB, client=30 * MB, model=5 * MB, is_measured=True)
"""By hand: this process 100 + 50 + 6 x 5 = 180 MB; a client 2 x 30 MB, for what it frees is kept; a worker 165 MB."""

needs_proc = pytest.mark.skipif(occupied([]) is None, reason="needs /proc")


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 90)


@pytest.mark.parametrize("text, size", [("8GB", 8 * 10**9), ("1.5 GB", 15 * 10**8), ("500MB", 500 * MB), (None, None)])
def test_a_limit_is_a_number_of_bytes(text, size):
    assert Plan(data=("digits",), max_memory=text).max_memory_bytes == size


@pytest.mark.parametrize("text", ["8", "8gb", "-1GB", "many GB", "8GiB", ""])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="max_memory"):
        parse(Plan, {"data": ("digits",), "max_memory": text}, where="the simulation")


@pytest.mark.parametrize("engine, workers, expected", [("serial", 1, 240), ("pool", 1, 345), ("pool", 4, 840)])
def test_the_memory_of_all_processes_by_hand(engine, workers, expected):
    assert NEED.total(EngineChoice(engine, workers)) == expected * MB


@pytest.mark.parametrize(
    "limit_mb, engine, choice",
    [
        (950, None, EngineChoice("pool", 4)),  # 840 of 855 MB
        (930, None, EngineChoice("pool", 3)),  # 675 of 837 MB: 840 are too many
        (390, None, EngineChoice("pool", 1)),  # 345 of 351 MB
        (270, None, EngineChoice("serial", 1)),  # 240 of 243 MB
        (390, "pool", EngineChoice("pool", 1)),
        (270, "pool", None),
        (260, None, None),
    ],
)
def test_as_many_workers_as_fit(limit_mb, engine, choice, images, monkeypatch):
    monkeypatch.setattr(memory_plan, "needed", lambda *_: NEED)
    plan = small_plan(images, max_memory=f"{limit_mb}MB", engine=engine)
    prepared = replace(Prepared.of(plan), choice=EngineChoice("pool", 4))
    if choice is not None:
        assert fit_memory(prepared).choice == choice
        return
    with pytest.raises(UsageError) as refused:
        fit_memory(prepared)
    message = str(refused.value)
    assert "would take 0.34 GB with one client at a time" in message
    assert f"max_memory = {limit_mb}MB allows 0.2" in message
    assert "0.03 GB a client while it trains" in message
    assert ("--engine serial" in message) == (limit_mb == 270)


@needs_proc
@pytest.mark.parametrize("max_memory", [None, "64GB"])
def test_no_limit_is_above_what_is_available(max_memory, images, monkeypatch):
    """As in a control group that leaves little: one process instead of four workers."""
    prepared = Prepared.of(small_plan(images, engine=None, max_memory=max_memory))
    prepared = replace(prepared, choice=EngineChoice("pool", 4))
    taken = occupied([]).total
    monkeypatch.setattr(memory_plan, "available_bytes", lambda: 10**12)
    assert fit_memory(prepared).choice == EngineChoice("pool", 4)
    monkeypatch.setattr(memory_plan, "available_bytes", lambda: taken // 4)
    assert fit_memory(prepared).choice == EngineChoice("serial")
    monkeypatch.setattr(memory_plan, "available_bytes", lambda: 0)
    with pytest.raises(UsageError, match="the memory that is available allows"):
        fit_memory(prepared)


@needs_proc
def test_a_trial_changes_no_bit_of_the_run(images, tmp_path):
    plan = small_plan(images)
    free = run(plan, tmp_path / "free")
    limited = run(plan.model_copy(update={"max_memory": "64GB"}), tmp_path / "limited")
    assert "memory_bytes" not in free
    figures = limited.pop("memory_bytes")
    assert learned(limited) == learned(free)
    assert figures["limit"] <= 64 * 10**9
    assert 0 < figures["expected"] < figures["limit"]


@needs_proc
@pytest.mark.parametrize("limit", [None, "64GB"])
def test_a_method_that_fails_is_told_by_its_first_round(limit, images, tmp_path, monkeypatch):
    """Not by the trial for memory, whose model takes one sample and one batch before."""
    plan = small_plan(images, max_memory=limit)
    prepared = Prepared.of(plan)
    monkeypatch.setattr(type(prepared.model.model.encoder), "forward", lambda *_: 1 / 0)
    with pytest.raises(RunFailed, match="ZeroDivisionError"):
        run(plan, tmp_path / "sim")


@needs_proc
def test_a_client_that_takes_more_than_there_is_ends_the_trial_and_not_the_process(images, monkeypatch):
    """Allocations fail in the trial where the system would otherwise kill this process at some point; not after it."""
    taken_mb = occupied([]).total // MB
    prepared = Prepared.of(small_plan(images, max_memory=f"{2 * taken_mb}MB"))
    asked = []

    def hungry(*_):
        asked.append(8 * taken_mb)
        return np.empty(8 * taken_mb * MB, np.uint8)  # nothing is written: the test itself takes no memory

    monkeypatch.setattr(type(prepared.method), "local_update", hungry)
    with pytest.raises(UsageError, match=rf"max_memory = {2 * taken_mb}MB allows"):
        fit_memory(prepared)
    assert asked
    assert hungry().nbytes == 8 * taken_mb * MB, "the limit is gone"


@needs_proc
def test_memory_of_a_child_is_its_own_and_pages_of_both_count_once():
    """A child that fills 64 MB for itself; what it shares with others is not added up."""
    code = "import sys; held = bytearray(b'x' * (64 << 20)); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"ready\n"
        alone = occupied([])
        both = occupied([child.pid])
    finally:
        child.communicate()
    assert 64 << 20 < both.private - alone.private < 90 << 20
    assert both.shared == pytest.approx(alone.shared, rel=0.05)
    assert occupied([child.pid]).private == pytest.approx(alone.private, rel=0.05), "it has ended"


@needs_proc
def test_a_watch_names_what_is_too_much():
    taken = occupied([]).total
    assert MemoryWatch(None, lambda: ()).look() == ""
    assert MemoryWatch(2 * taken, lambda: ()).look() == ""
    assert "GB that are allowed" in MemoryWatch(taken // 2, lambda: ()).look()
    assert "has 5 MB of memory left" in MemoryWatch(None, lambda: (), available=lambda: 5 * MB).look()


@needs_proc
def test_processes_of_other_machines_are_not_looked_at(images, tmp_path):
    """Their ids are those of other processes here."""
    prepared = replace(Prepared.of(small_plan(images)), choice=EngineChoice("pool", 1))
    with open_simulation(prepared, tmp_path / "sim") as simulation:
        (pid,) = simulation.engine.pids
        assert simulation.engine.pids_here == (pid,)
        simulation.engine._hosts.are_here = False
        assert simulation.engine.pids == (pid,)
        assert simulation.engine.pids_here == ()


def test_a_simulation_that_was_stopped_for_memory_goes_on_with_the_same_bits(images, tmp_path, monkeypatch):
    plan = small_plan(images, rounds=3)
    undisturbed = run(plan, tmp_path / "undisturbed")
    opened = []

    def available():
        return 0 if opened and opened[0].open_round > 1 else 10**12

    watch = functools.partial(MemoryWatch, every_s=0.001, available=available)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "MemoryWatch", watch)
        with (
            pytest.raises(RunFailed, match=r"stopped before memory ran out: .* 0 MB of memory left; nothing is lost"),
            open_simulation(Prepared.of(plan), tmp_path / "stopped") as simulation,
        ):
            opened.append(simulation)
            while not simulation.is_over:
                simulation.step()
    assert learned(run(plan, tmp_path / "stopped")) == learned(undisturbed)


GREEDY = """
from edge_agent.methods.fedavg import FedAvg


class Greedy(FedAvg):
    def local_update(self, client, received):
        if client.round == 2:
            held = [bytearray(b"x" * (8 << 20)) for _ in range(400)]
        return super().local_update(client, received)
"""


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("engine", ["serial", "pool"])
def test_a_method_that_takes_gigabytes_is_stopped_in_time(engine, tmp_path):
    """Real processes: 3.4 GB are asked for in round 2, and 1 GB is allowed. Without the greed it goes on."""
    source = write_images(tmp_path / "images.npz", 90)
    method = tmp_path / "greedy.py"
    method.write_text(GREEDY)
    command = [sys.executable, "-m", "coordinator", "simulate", "--out", str(tmp_path / "sim")]
    options = ["-m", f"{method}:Greedy", "-d", source, "--clients", "3", "--rounds", "3", "--no-local"]
    options += ["--engine", engine, "--max-memory", "1GB", "--set", "local_epochs=1"]
    peak = tmp_path / "peak.json"
    measured = f"""
import json, resource, subprocess, sys
done = subprocess.run({command + options!r}, capture_output=True, text=True)
most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
json.dump([done.returncode, done.stderr, most], open({str(peak)!r}, "w"))
"""
    subprocess.run([sys.executable, "-c", measured], check=True, timeout=200)
    code, errors, most = json.loads(peak.read_text())
    assert code == 1
    assert "stopped before memory ran out" in errors
    assert most < 1.2e9, "of the largest process"
    method.write_text(GREEDY.replace("client.round == 2", "False"))
    subprocess.run([*command, "--resume"], check=True, timeout=200, capture_output=True)
    assert len(json.loads((tmp_path / "sim" / "result.json").read_text())["rounds"]) == 3


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("method, encoder", [("fedavg", "resnet18"), ("fedrir", "fedrir_cnn"), ("repper", "small_cnn")])
def test_what_was_expected_is_what_was_taken(method, encoder, tmp_path):
    """In a process of its own, where nothing else has been computed before."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (1200, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "images.npz", inputs=images, labels=np.arange(1200) % 4)
    command = [sys.executable, "-m", "coordinator", "simulate", "--out", str(tmp_path / "sim"), "-m", method]
    options = ["-d", f"npz:{tmp_path / 'images.npz'}", "--clients", "4", "--rounds", "2", "--encoder", encoder]
    options += ["--engine", "pool", "--workers", "2", "--max-memory", "16GB", "--set", "local_epochs=1"]
    subprocess.run([*command, *options], check=True, timeout=280, capture_output=True)
    figures = json.loads((tmp_path / "sim" / "result.json").read_text())["memory_bytes"]
    assert 0.8 < figures["peak"] / figures["expected"] < 1.15
