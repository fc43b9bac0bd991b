"""Threads of numpy's linear algebra, counted by the kernel in their own processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: nothing would take two threads"),
]

TOLD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
COUNT = """
import json, os, sys, time
from edge_agent.cli import main
code = main(json.loads(sys.argv[1]))
tasks = len(os.listdir("/proc/self/task"))
print("\\n" + json.dumps([code, tasks, time.process_time(), time.thread_time()]))
"""
FIT = ("fit", "--bundle", "b.hwb", "--data", "digits?n=80", "--cache", "cache", "--out", "head")
PREDICT = ("predict", "--bundle", "b.hwb", "--data", "digits?n=80", "--cache", "cache", "--head", "head")
EVALUATE = ("evaluate", "--bundle", "b.hwb", "--data", "digits?n=80", "--cache", "cache", "--heads", "lr,mlp")


def counted(words, folder, told=None):
    """(threads at the end, CPU seconds of the process, CPU seconds of its main thread)."""
    environment = {name: value for name, value in os.environ.items() if name not in TOLD} | (told or {})
    command = [sys.executable, "-c", COUNT, json.dumps(words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=True)
    code, tasks, process_s, thread_s = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return tasks, process_s, thread_s


def test_commands_use_one_thread_unless_told(make_bundle, tmp_path):
    make_bundle(dim=48, global_head=True)
    for words in (FIT, PREDICT, EVALUATE):
        tasks, process_s, thread_s = counted(words, tmp_path)
        assert tasks == 1, words[0]
        assert process_s <= 1.1 * thread_s, words[0]


def test_number_of_threads_can_be_told_by_option_or_environment(make_bundle, tmp_path):
    make_bundle(dim=48)
    several = len(os.sched_getaffinity(0)) > 1  # on one core numpy starts no second thread, whatever it is told
    assert (counted((*FIT, "--threads", "2"), tmp_path)[0] > 1) == several
    assert (counted(FIT, tmp_path, {"OMP_NUM_THREADS": "2"})[0] > 1) == several
    assert counted((*FIT, "--threads", "1"), tmp_path, {"OMP_NUM_THREADS": "2"})[0] == 1, "the option wins"


WORKERS_BITS = """
import sys
from unittest import mock
from coordinator import cli
with mock.patch.object(cli, "command_tree"):
    cli.main([])
import os, numpy
print(len(os.listdir("/proc/self/task")), os.environ.get("OMP_NUM_THREADS"))
"""


def test_headwater_limits_numpy_and_leaves_torch_its_choice():
    environment = {name: value for name, value in os.environ.items() if name not in TOLD}
    command = [sys.executable, "-c", WORKERS_BITS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1", "None"]


def test_nothing_is_set_where_numpy_is_loaded_already(monkeypatch):
    """A program that calls us has made its choice; its environment stays as it is."""
    import numpy as np

    from edge_agent.core.limits import limit_threads

    assert np.__name__ in sys.modules
    for name in TOLD:
        monkeypatch.delenv(name, raising=False)
    limit_threads(1)
    assert not set(TOLD) & set(os.environ)
