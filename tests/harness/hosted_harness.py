"""A coordinator with hosted clients as processes: its configuration, the simulation of the same run, and waiting."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time

from federation_duties import SMALL

from coordinator.config import NO_BOUNDS
from coordinator.simulation.plan import Plan
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import PARTITION, Prepared

SOURCE = "digits:optdigits?n=160"
LIMIT_S = 180.0
"""Without anything new; on a busy machine a process needs half a minute to import torch."""


def simulated(folder, rounds=3):
    plan = Plan(
        method="fedper", params=SMALL, data=(SOURCE,), clients=4, rounds=rounds, seed=7, encoder="linear",
        encoder_params={"feature_dim": 8}, device="cpu", engine="serial",
    )  # fmt: skip
    prepared = Prepared.of(plan)
    with open_simulation(prepared, folder) as simulation:
        return prepared, simulation.finish()


def until(condition, what, words=lambda: ""):
    pause = threading.Event()
    end = time.monotonic() + LIMIT_S
    said = words()
    while not (found := condition()):
        if words() != said:
            end = time.monotonic() + LIMIT_S
            said = words()
        assert time.monotonic() < end, f"nothing new within {LIMIT_S} s: {what}\n{said}"
        pause.wait(0.02)
    return found


@contextlib.contextmanager
def processes(folder, **commands):
    """Programs by name, which end with the block; their words are in NAME.log."""
    running = []
    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                running.append(subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=log, stderr=log))
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def coordinator_toml(task, url, clients=("c0", "c1"), placement="hosted_processes = 1"):
    hosted = "".join(
        f'[[hosted]]\nid = "{name}"\ndevice = "cpu"\ndata = {{ source = "{SOURCE}", partition = "sim/{PARTITION}" }}\n'
        for name in clients
    )
    spec = task.input
    # As in a simulation: with this step size the loss explodes, and updates would be beyond every bound.
    without_bounds = "".join(f'{name} = "none"\n' for name in (*NO_BOUNDS, "max_loss"))
    return (
        f'state = "state"\n{placement}\n[broker]\nurl = "{url}"\n[cohort]\nmin_agents = 4\n'
        "[round]\nquorum = 1.0\n[export]\nafter_run = false\n"
        f"[aggregation]\n{without_bounds}"
        f'[task]\nclass_names = {json.dumps(task.class_names)}\nencoder = "linear"\nencoder_params.feature_dim = 8\n'
        f'input = {{ kind = "image", channels = {spec.channels}, height = {spec.height}, width = {spec.width}, '
        f"mean = {list(spec.mean)}, std = {list(spec.std)} }}\n{hosted}"
    )
