"""Freed memory stays with the process: counted in page faults, in their own processes as it is for good."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from edge_agent.core import limits

WORK = """
import resource
import numpy as np
from edge_agent.core.limits import give_freed_memory_back, keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def step():
    blocks = [np.ones(1 << 20, np.float32) for _ in range(8)]

if KEEP:
    assert keep_freed_memory()
step(), step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
held = resident()
give_freed_memory_back()
print(faults, held - resident())
"""

pytestmark = pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")), reason="another allocator than glibc's"
)


def _figures(*, keep: bool) -> tuple[int, int]:
    """Page faults of twenty steps of 32 MiB each, and bytes that went back to the system when asked to."""
    done = subprocess.run(
        [sys.executable, "-c", WORK.replace("KEEP", str(keep))], capture_output=True, text=True, check=True, timeout=120
    )
    faults, back = done.stdout.split()
    return int(faults), int(back)


def test_a_step_finds_the_memory_of_the_step_before_and_gives_it_back_when_all_is_over():
    faults, back = _figures(keep=True)
    assert faults < 1000  # 20 steps of 8192 pages each would be 163,840
    assert back > 24 << 20


def test_without_it_pages_come_and_go_with_each_step():
    faults, _ = _figures(keep=False)
    assert faults > 20_000


def test_an_allocator_that_cannot_be_told_is_left_alone(monkeypatch):
    monkeypatch.setattr(limits, "_c_library", lambda: None)
    limits.keep_freed_memory.cache_clear()
    assert limits.keep_freed_memory() is False
    limits.give_freed_memory_back()
    limits.keep_freed_memory.cache_clear()


def test_freed_memory_is_given_back_at_most_once_a_second(monkeypatch):
    given = []
    now = [10.0]
    monkeypatch.setattr(limits, "give_freed_memory_back", lambda: given.append(now[0]))
    freed = limits.FreedMemory(clock=lambda: now[0])
    for now[0] in (10.0, 10.02, 10.98, 11.0, 11.5, 50.0):
        freed.give_back()
    assert given == [10.0, 11.0, 50.0]
