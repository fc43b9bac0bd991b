"""A warm start by processes that somebody else starts: how they meet, what they agree on, and who is missing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hosted_harness import until
from simulation_harness import write_images

from coordinator.cli.pretrain import _request
from coordinator.config import load_config
from coordinator.hosted import machines
from coordinator.hosted.machines import (
    Introduction,
    Launch,
    Meeting,
    check_equal,
    device_of_process,
    parse_introduction,
)
from edge_agent import methods
from edge_agent.core.errors import TrainingFailed, UsageError
from edge_agent.core.storage import read_tensors
from edge_agent.training.weights import read_weights

ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


# --- which process this is -------------------------------------------------------------------------------------------


def test_a_launcher_says_which_process_this_is():
    assert Launch.from_environment({"PATH": "/bin"}) is None
    launch = Launch.from_environment(
        {**ENVIRONMENT, "LOCAL_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    )
    assert launch == Launch(1, 3, 1, "10.0.0.1", 29500, has_store=True, attempt=2)
    assert Launch.from_environment(ENVIRONMENT) == Launch(1, 3, 0, "10.0.0.1", 29500)


def test_all_mistakes_of_the_environment_are_told_at_once():
    with pytest.raises(UsageError) as caught:
        Launch.from_environment({"RANK": "3", "WORLD_SIZE": "3", "MASTER_PORT": "99999", "LOCAL_RANK": "x"})
    for words in (
        "MASTER_ADDR is missing",
        "MASTER_PORT = '99999' is no number of 1..65535",
        "LOCAL_RANK = 'x' is no number",
        "RANK = 3 is not below WORLD_SIZE = 3",
        "start it with torchrun",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "local, device, devices, gpus, expected",
    [
        (0, "auto", (), 0, "auto"),
        (1, "auto", (), 2, "cuda:1"),
        (1, "cuda", (), 2, "cuda:1"),
        (1, "cpu", (), 2, "cpu"),
        (0, "cuda:3", (), 4, "cuda:3"),
        (1, "auto", ("cuda:0", "cpu"), 1, "cpu"),
        (0, "auto", ("meta",), 0, "meta"),
    ],
)
def test_each_process_of_a_machine_has_its_device(local, device, devices, gpus, expected):
    assert device_of_process(local, device, devices, gpus) == expected


def test_more_processes_than_devices_are_refused():
    with pytest.raises(UsageError, match=r"process 2 of this machine .* lists 2; list one for each"):
        device_of_process(2, "auto", ("cuda:0", "cuda:1"), 4)
    with pytest.raises(UsageError, match=r"process 2 of this machine .* has no GPU: there are 2"):
        device_of_process(2, "auto", (), 2)


# --- the meeting -----------------------------------------------------------------------------------------------------


def introduced(**changes):
    same = {
        "machine": "m", "address": "10.0.0.1", "device": "cpu", "headwater": "1", "torch": "2.6",
        "request": "a" * 64, "samples": "b" * 64,
    }  # fmt: skip
    return Introduction(**{**same, **changes})


def test_all_that_differs_is_told_at_once():
    check_equal([introduced(), introduced(machine="n", device="cuda:0", address="10.0.0.2")])
    with pytest.raises(UsageError) as caught:
        check_equal(
            [
                introduced(),
                introduced(headwater="2", torch="2.7"),
                introduced(machine="n", request="c" * 64, samples="c" * 64),
                introduced(machine="o", samples="d" * 64),
            ]
        )
    assert str(caught.value) == (
        "rank 1 has Headwater 2, rank 0 has 1; rank 1 has torch 2.7, rank 0 has 2.6; rank 2 (n) has another "
        "configuration or other options than rank 0; rank 3 (o) has other samples than rank 0 (dddddddddddd, not "
        "bbbbbbbbbbbb); give all machines the same software, configuration and data"
    )


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"machine": "m"}', introduced(device="x" * 64).model_dump_json().encode()[:-1]]
)
def test_bytes_of_something_else_are_refused(content):
    with pytest.raises(UsageError, match=rf"rank 2 .* {len(content)} bytes that are no introduction; give all"):
        parse_introduction(2, content)


class Clock:
    """Time that passes with each look at it."""

    def __init__(self, step_s):
        self.now = 0.0
        self._step_s = step_s

    def __call__(self):
        self.now += self._step_s
        return self.now


def met(launch, limit_s=20.0, said=None, clock=time.monotonic, **same):
    """Meet, add up the ranks of all by the exchange, and return devices and the sum."""
    import torch

    meeting = Meeting(launch, limit_s, (said if said is not None else []).append, clock=clock)
    given = {"device": f"cpu:{launch.number}", "request": "r", "samples": "s", "parts": 4, **same}
    with meeting.open(**given) as (rank, gather):
        rows = gather(torch.full((3,), float(launch.number)))
    return rank.devices, rank.parts, [row.tolist() for row in rows]


def test_processes_that_meet_exchange_what_they_have():
    port = free_port()
    results = {}

    def join(number):
        results[number] = met(Launch(number, 3, 0, "127.0.0.1", port))

    threads = [threading.Thread(target=join, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = ("cpu:0", "cpu:1", "cpu:2"), 4, [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert results == dict.fromkeys(range(3), expected)


def test_others_that_train_something_else_are_refused_by_all():
    port = free_port()
    errors = {}

    def join(number):
        try:
            met(Launch(number, 2, 0, "127.0.0.1", port), request=f"request {number}")
        except UsageError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=join, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors.keys() == {0, 1}
    assert all("has another configuration" in text for text in errors.values())


def test_who_does_not_come_is_named_after_the_deadline_and_told_meanwhile(monkeypatch):
    """The clock passes 2 s with each look: after 20 s of it nobody is waited for any more."""
    monkeypatch.setattr(machines, "LOOK_S", 0.001)
    said = []
    port = free_port()
    expected = rf"ranks 1, 2 of 3 did not come to 127\.0\.0\.1:{port} within 20 s; start"
    with pytest.raises(TrainingFailed, match=expected):
        met(Launch(0, 3, 0, "127.0.0.1", port), said=said, clock=Clock(2.0))
    assert len(said) >= 2
    assert said[0].startswith(f"waiting for ranks 1, 2 of 3 at 127.0.0.1:{port}, for ")


def test_where_nobody_listens_is_told_meanwhile_and_in_the_end(monkeypatch):
    monkeypatch.setattr(machines, "LOOK_S", 0.001)
    said = []
    port = free_port()
    expected = rf"nobody listens at 127\.0\.0\.1:{port} \(.*refused\)\) after 20 s; expected the process of rank 0"
    with pytest.raises(TrainingFailed, match=expected):
        met(Launch(1, 2, 0, "127.0.0.1", port), said=said, clock=Clock(2.0))
    assert said[0].startswith(f"waiting for rank 0 at 127.0.0.1:{port} (")


def test_a_port_that_others_have_is_refused():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"rank 0 cannot listen at 127\.0\.0\.1:{port} .*a free port there"):
            met(Launch(0, 2, 0, "127.0.0.1", port))


# --- processes -------------------------------------------------------------------------------------------------------


def written(folder, source, parts=4, devices=None):
    """Write a configuration with a warm start, and return its path."""
    listed = "" if devices is None else f"devices = {json.dumps(devices)}\n"
    path = folder / "coordinator.toml"
    path.write_text(
        f'state = "{folder}/state"\n[task]\nclass_names = ["a", "b", "c"]\nencoder = "linear"\n'
        "encoder_params.feature_dim = 4\n"
        'input = { kind = "image", channels = 1, height = 4, width = 4 }\n[run]\nmethod = "fedavg"\n'
        f'[warm_start]\ndata = "{source}"\nepochs = 2\nlr = 0.1\nbatch_size = 10\nparts = {parts}\n{listed}'
    )
    return path


@contextlib.contextmanager
def started(folder, **commands):
    """Start programs by name, yield them, and end them; their output is in NAME.log."""
    running = {}
    try:
        for name, (command, environment) in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environment}
                )
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def ended(folder, running):
    """Return the exit codes of all, when they have ended."""
    words = lambda: "\n".join((folder / f"{name}.log").read_text() for name in running)
    until(lambda: all(process.poll() is not None for process in running.values()), "they have ended", words)
    return {name: process.returncode for name, process in running.items()}


def pretrain(config, out, *options):
    return [sys.executable, "-m", "coordinator", "pretrain", "-c", str(config), "--out", str(out), *options]


def ranks(config, folder, addresses, port):
    """Return a command with its environment for each process, each at an address of its own."""
    commands = {}
    for number, address in enumerate(addresses):
        environment = {
            "RANK": str(number), "WORLD_SIZE": str(len(addresses)), "MASTER_ADDR": addresses[0],
            "MASTER_PORT": str(port),
        }  # fmt: skip
        out = folder / f"rank-{number}.safetensors"
        commands[f"rank{number}"] = (pretrain(config, out, "--address", address, "--wait", "120"), environment)
    return commands


@pytest.fixture
def source(tmp_path):
    return write_images(tmp_path / "own.npz", 120, dark=40, noise=10, step=70)


@pytest.mark.slow
def test_two_machines_end_in_the_bits_of_one(tmp_path, source):
    """Each process is at an address of its own, and connections go from one to the other."""
    config = written(tmp_path, source)
    alone = subprocess.run(
        pretrain(config, tmp_path / "alone.safetensors", "--json"), check=True, capture_output=True, text=True
    )
    told = json.loads(alone.stdout)
    commands = ranks(config, tmp_path, ("127.0.0.1", "127.0.0.2"), free_port())
    with started(tmp_path, **commands) as running:
        codes = ended(tmp_path, running)
    assert codes == {"rank0": 0, "rank1": 0}, "".join((tmp_path / f"{name}.log").read_text() for name in running)
    expected = (tmp_path / "alone.safetensors").read_bytes()
    assert (tmp_path / "rank-0.safetensors").read_bytes() == expected
    assert not (tmp_path / "rank-1.safetensors").exists(), "rank 0 alone writes"
    assert told["sha256"] in (tmp_path / "rank0.log").read_text().replace("\n", "").replace(" ", "")
    assert "rank 1 of 2 is done; rank 0 has the result" in (tmp_path / "rank1.log").read_text()
    # A run begins with the encoder of the file, and leaves out the classifier that was trained with it.
    encoder = methods.create("fedavg", {}).build(load_config(config).task).encoder
    weights, left_out = read_weights(encoder, tmp_path / "alone.safetensors")
    trained = read_tensors(tmp_path / "alone.safetensors")
    for name, array in weights.items():
        np.testing.assert_array_equal(array, trained[f"encoder.{name}"])
    assert weights.keys() == encoder.state_dict().keys()
    assert left_out == ("head.bias", "head.weight")


@pytest.mark.slow
def test_torchrun_on_two_machines_ends_in_the_bits_of_one(tmp_path, source):
    """Two of torchrun, as on two machines, with two processes each."""
    config = written(tmp_path, source, devices=["cpu", "cpu"])
    alone = tmp_path / "alone.safetensors"
    subprocess.run(pretrain(config, alone), check=True, capture_output=True)
    port = free_port()
    commands = {}
    for node in range(2):
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
            *("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)),
        ]
        out = tmp_path / f"node-{node}.safetensors"
        commands[f"node{node}"] = ([*launcher, *pretrain(config, out)[1:]], {})
    with started(tmp_path, **commands) as running:
        codes = ended(tmp_path, running)
    assert codes == {"node0": 0, "node1": 0}, "".join((tmp_path / f"node{node}.log").read_text() for node in range(2))
    assert (tmp_path / "node-0.safetensors").read_bytes() == alone.read_bytes()
    assert not (tmp_path / "node-1.safetensors").exists()


@pytest.mark.slow
def test_one_process_of_a_launcher_ends_in_the_bits_of_none(tmp_path, source):
    config = written(tmp_path, source, parts=2)
    subprocess.run(pretrain(config, tmp_path / "alone.safetensors"), check=True, capture_output=True)
    with started(tmp_path, **ranks(config, tmp_path, ("127.0.0.1",), free_port())) as running:
        assert ended(tmp_path, running) == {"rank0": 0}
    assert (tmp_path / "rank-0.safetensors").read_bytes() == (tmp_path / "alone.safetensors").read_bytes()


@pytest.mark.slow
def test_a_machine_that_is_lost_in_the_training_ends_the_others_with_the_reason(tmp_path, source):
    path = written(tmp_path, source)
    path.write_text(path.read_text().replace("epochs = 2", "epochs = 100000"))
    port = free_port()
    commands = ranks(path, tmp_path, ("127.0.0.1", "127.0.0.2"), port)
    with started(tmp_path, **commands) as running:
        until(lambda: are_connected(running["rank0"].pid, port), "they train")
        running["rank1"].send_signal(signal.SIGKILL)
        codes = ended(tmp_path, running)
    assert codes == {"rank0": 1, "rank1": -signal.SIGKILL}
    log = (tmp_path / "rank0.log").read_text()
    assert "rank 0 of 2 lost another process, or cannot reach it" in log
    assert "Traceback" not in log
    assert not (tmp_path / "rank-0.safetensors").exists()


def are_connected(pid, port):
    """Return whether a process has connections beside those at the port where all meet (of Linux)."""
    own = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(file.readlink()))
    meeting = f":{port:04X}"
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(
        state == "01" and f"socket:[{inode}]" in own and not local.endswith(meeting) and not remote.endswith(meeting)
        for _, local, remote, state, _, _, _, _, _, inode, *_ in rows
    )


def test_without_a_warm_start_in_the_configuration_nothing_is_trained(tmp_path, source):
    path = written(tmp_path, source)
    path.write_text(path.read_text().partition("[warm_start]")[0])
    with pytest.raises(UsageError, match=r"the configuration has no \[warm_start\]; add one"):
        _request(load_config(path), None, None, tmp_path / "out")
