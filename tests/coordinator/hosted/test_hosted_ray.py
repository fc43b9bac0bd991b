"""Hosted clients on a Ray cluster: the bits of this machine, whoever dies; by a stand-in for Ray, and on a real one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from federation_duties import TASK, quick_params
from hosted_harness import coordinator_toml, processes, simulated, until
from simulation_harness import write_images

from coordinator.broker import EmbeddedBroker
from coordinator.config import CoordinatorConfig, HostedRayConfig
from coordinator.hosted.lanes import Lanes
from coordinator.hosted.on_ray import ClusterLocation, OnCluster, Workers, device_on_cluster
from coordinator.hosted.placement import COMMAND, clients_of_processes, command_of_processes
from coordinator.hosted.remote_session import RemoteSession
from coordinator.hosted.transport import HostedTransport
from coordinator.journal.entries import fact_of
from coordinator.rounds.request import Request
from coordinator.service.preflight import check_defaults
from coordinator.state.store import StateFolder
from edge_agent import methods
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.client import ClientState
from edge_agent.core.config import AgentConfig, DataConfig, parse
from edge_agent.core.errors import (
    ConfigError,
    DataError,
    MissingCapability,
    RunFailed,
    TrainingCancelled,
    TrainingFailed,
)
from edge_agent.methods.values import TrainingControl
from edge_agent.wire.messages.down import Job

LIMIT_S = 60.0


class ActorGone(Exception):
    """What Ray raises is of one family, too."""


class StandIn:
    """As much of Ray as is used, in this process. ``dies``: how many computations end with their actor."""

    def __init__(self):
        self.exceptions = SimpleNamespace(RayError=ActorGone)
        self.dies = 0
        self.hangs = False
        self.starts = True
        self.software = None
        self.log = []

    def cluster_resources(self):
        return {"CPU": 2.0}

    available_resources = cluster_resources

    def put(self, value):
        assert isinstance(value, np.ndarray), "arrays are handed on without a copy"
        self.log.append("put")
        return value

    def remote(self, kind):
        def hire():
            self.log.append("hired")
            return _Hired(self, kind())

        return SimpleNamespace(options=lambda **options: self.log.append(options) or SimpleNamespace(remote=hire))

    def kill(self, actor):
        self.log.append("killed")

    def wait(self, replies, num_returns, timeout):
        """All of them are there, or none ever is."""
        if self.hangs or not self.starts:
            threading.Event().wait(0.001)
            return [], replies
        return replies[:1], replies[1:]

    def get(self, reply):
        return reply()


class _Hired:
    def __init__(self, ray, actor):
        self._ray = ray
        self._actor = actor
        self.ready = SimpleNamespace(remote=lambda: self._ready)
        self.compute = SimpleNamespace(remote=lambda *arguments: lambda: self._compute(*arguments))

    def _ready(self):
        versions = self._actor.ready()
        return {**versions, "software": self._ray.software or versions["software"]}

    def _compute(self, *arguments):
        result = self._actor.compute(*arguments)
        self._ray.log.append("computed")
        if self._ray.dies:
            self._ray.dies -= 1
            raise ActorGone("The actor died unexpectedly\n\nkilled by the memory monitor")
        return result


class InTurn(Lanes):
    """Lanes whose turn the caller's own thread has."""

    def __init__(self):
        super().__init__(1, lambda: None)
        self._turn.acquire()


@pytest.fixture
def source(tmp_path):
    return write_images(tmp_path / "own.npz", 60)


def location_on(ray, reports=None, **settings):
    """Return the location that is a stand-in's cluster, with its workers, from a thread that has its turn."""
    report = (lambda text: reports.append(text)) if reports is not None else lambda _: None
    chosen = HostedRayConfig(**settings)
    workers = Workers(ray, chosen, report, time.monotonic)
    workers.start(clients=3, threads=1)
    lanes = InTurn()
    return ClusterLocation(OnCluster(ray, workers, lanes), lanes, chosen.gpus)


def client(folder, source):
    return AgentConfig(id="h", state=folder, data=DataConfig(source=source))


def job_of(method, **changes):
    made = methods.create(method, quick_params(method))
    fields = {
        "boot": "b", "seq": 1, "run": "run-0001", "round": 1, "rounds": 2, "method": method,
        "params": made.params.model_dump(mode="json"), "task": TASK, "seed": 3, "evaluate": True, "blobs": (),
        "deadline_s": 60.0,
    }  # fmt: skip
    return Job(**{**fields, **changes})


def first_state(method):
    """What a client of the method receives in the first round."""
    made = methods.create(method, quick_params(method))
    from edge_agent.client import Built
    from edge_agent.training.parts import to_arrays

    model = Built.of(made, TASK, seed=3, device="cpu").model
    return made.start(to_arrays(model, made.shared_names(model)))


def flat(outcome):
    kept = {**outcome.kept.personal, **{f"m.{name}": array for name, array in outcome.kept.memory.items()}}
    tensors = {name: array.tobytes() for name, array in {**outcome.update, **kept}.items()}
    right = None if outcome.right is None else outcome.right.tolist()
    return tensors, outcome.metrics, outcome.samples, right


@pytest.mark.parametrize("method", ["fedper", "scaffold", "apfl"])
def test_a_session_that_computes_elsewhere_ends_in_the_bits_of_one_that_computes_here(tmp_path, source, method):
    """With batch norm or memory, in training and after it; the ranges of activations are equal, too."""
    received = first_state(method)
    job = job_of(method)
    here = TaskRunner(client(tmp_path / "here", source), "train").session(job)
    there = location_on(StandIn()).tasks(client(tmp_path / "there", source)).session(job)
    assert isinstance(there, RemoteSession)
    state = ClientState()
    for number in (1, 2):
        expected = here.train(received, state, round_number=number, rounds=2, evaluate=True)
        outcome = there.train(received, state, round_number=number, rounds=2, evaluate=True)
        assert flat(outcome) == flat(expected)
        assert flat(expected)[0], "something was learned"
        assert all(array.flags.writeable for array in outcome.update.values()), "noise is added in place"
        state = expected.kept
    assert flat(there.finish(received, state, rounds=2)) == flat(here.finish(received, state, rounds=2))
    encoder = {name: array for name, array in received.items() if name.startswith("encoder.")}
    np.testing.assert_equal(there.activation_ranges(encoder), here.activation_ranges(encoder))
    times = there.step_times()
    assert times.float32_s > 0
    assert times.bfloat16_s > 0


def trained(tmp_path, source, ray, control=None, **settings):
    session = location_on(ray, **settings).tasks(client(tmp_path, source)).session(job_of("fedper"))
    return session.train(first_state("fedper"), ClientState(), round_number=1, rounds=2, evaluate=True, control=control)


def test_a_lost_worker_is_replaced_and_what_it_computed_is_computed_again(tmp_path, source):
    """It dies when all is computed: nothing of that counts, and the second try starts from the same state."""
    whole = trained(tmp_path, source, StandIn())
    ray = StandIn()
    ray.dies = 2
    outcome = trained(tmp_path, source, ray)
    assert flat(outcome) == flat(whole)
    assert ray.log.count("computed") == 3
    assert (ray.log.count("hired"), ray.log.count("killed")) == (2 + 2, 2)


def test_a_client_at_which_workers_die_again_and_again_is_named(tmp_path, source):
    ray = StandIn()
    ray.dies = 3
    with pytest.raises(
        TrainingFailed, match=r"3 workers .* while client 'h' computed in round 1, the last with ActorGone"
    ):
        trained(tmp_path, source, ray)


def test_a_computation_whose_round_is_over_is_ended_with_its_worker(tmp_path, source):
    ray = StandIn()
    location = location_on(ray)
    session = location.tasks(client(tmp_path, source)).session(job_of("fedper"))
    ray.hangs = True
    control = TrainingControl(is_cancelled=lambda: True)
    with pytest.raises(TrainingCancelled, match="before the cluster had computed"):
        session.train(first_state("fedper"), ClientState(), round_number=1, rounds=2, evaluate=False, control=control)
    assert ray.log.count("killed") == 1
    assert ray.log.count("hired") == 2 + 1


def test_an_error_there_is_the_error_here(tmp_path, source, monkeypatch):
    """Its class, its words, and whether the coordinator may read them."""

    def fails(*_arguments, **_options):
        raise DataError("3 classes", is_public=True)

    location = location_on(StandIn())
    session = location.tasks(client(tmp_path, source)).session(job_of("fedper"))
    monkeypatch.setattr("edge_agent.client.Session.train", fails)
    with pytest.raises(DataError, match="3 classes") as caught:
        session.train(first_state("fedper"), ClientState(), round_number=1, rounds=2, evaluate=False)
    assert caught.value.is_public


def test_what_is_received_by_all_is_put_into_the_store_once(tmp_path, source):
    ray = StandIn()
    location = location_on(ray)
    received = first_state("fedper")
    for name in ("a", "b"):
        config = client(tmp_path / name, source).model_copy(update={"id": name})
        session = location.tasks(config).session(job_of("fedper"))
        session.train(received, ClientState(), round_number=1, rounds=2, evaluate=False)
    assert ray.log.count("put") == 2 + 1, "the samples of each client, and one model"


def test_workers_with_another_version_are_refused():
    ray = StandIn()
    ray.software = "0.0.1"
    with pytest.raises(RunFailed, match=r"at 'auto' has Headwater 0\.0\.1, this is .*install the same on all machines"):
        location_on(ray)


def test_workers_that_cannot_start_are_told_with_the_reason(monkeypatch):
    def fails(_self):
        raise ActorGone("The actor died in its creation task\n\nModuleNotFoundError: torch")

    monkeypatch.setattr(_Hired, "_ready", fails)
    with pytest.raises(RunFailed, match=r"cannot start: the last one ended with .*ModuleNotFoundError: torch; install"):
        location_on(StandIn())


def test_a_full_cluster_is_waited_for_and_told(monkeypatch):
    """Nobody reports before that; when the first worker is there, nothing is waited for any more."""
    monkeypatch.setattr("coordinator.hosted.on_ray.SILENCE_S", 0.0)
    ray = StandIn()
    ray.starts = False
    reports = []
    workers = Workers(ray, HostedRayConfig(workers=5), reports.append, time.monotonic)
    waiter = threading.Thread(target=lambda: workers.start(clients=9, threads=2), daemon=True)
    waiter.start()
    until(lambda: reports, "it is told")
    assert re.match(
        r"the Ray cluster at 'auto' has started none of 5 workers for 0 s; each needs 2 CPUs, 2 CPUs are free",
        reports[0],
    )
    ray.starts = True
    waiter.join(LIMIT_S)
    assert reports[-1] == ""


# --- the configuration -----------------------------------------------------------------------------------------------

RAW = {
    "task": {"class_names": ["a", "b"], "encoder": "linear", "input": {"kind": "image", "channels": 1}},
    "hosted": [{"id": "h", "data": {"source": "digits:optdigits?n=20"}}],
}


def configured(**more):
    return parse(CoordinatorConfig, {**RAW, **more}, where="test")


def test_clients_on_a_cluster_share_the_process_that_has_their_files():
    clients = [{"id": name, "data": {"source": "digits:optdigits?n=20"}} for name in "abc"]
    config = configured(hosted=clients, hosted_ray={"workers": 2})
    assert [[agent.id for agent in group] for group in clients_of_processes(config)] == [["a", "b", "c"]]
    command = command_of_processes(config)
    assert json.loads(command[-1]) == {"address": "auto", "workers": 2, "gpus": 0.0}
    assert command_of_processes(configured()) == COMMAND


def test_a_worker_without_a_share_of_a_gpu_computes_on_the_cpu():
    assert device_on_cluster("auto", 0) == "cpu"
    assert device_on_cluster("auto", 0.5) == "auto"
    assert device_on_cluster("cuda", 1) == "cuda"
    assert device_on_cluster("cpu", 1) == "cpu"


def test_a_worker_gets_its_share_of_processors():
    ray = StandIn()
    Workers(ray, HostedRayConfig(), lambda _: None, time.monotonic).start(clients=9, threads=2)
    assert ray.log[0] == {"num_cpus": 2, "num_gpus": None, "max_restarts": 0}
    assert ray.log.count("hired") == 1, "two CPUs have room for one client of two threads"


def test_all_mistakes_are_told_at_once():
    clients = [
        {"id": "a", "device": "cuda:1", "data": {"source": "none:"}},
        {"id": "b", "device": "cuda", "data": {"source": "none:"}},
    ]
    with pytest.raises(ConfigError) as caught:
        configured(hosted=clients, hosted_processes=2, hosted_ray={})
    for words in ("excludes hosted_processes", "'a' has device = 'cuda:1'", "'b' has device = 'cuda', but hosted_ray"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"\[hosted_ray\] without \[\[hosted\]\] clients"):
        configured(hosted=[], hosted_ray={})
    with pytest.raises(ConfigError, match=r"is a URL; expected HOST:PORT") as caught:
        configured(hosted_ray={"address": "ray://head:10001", "gpus": 1.5})
    assert "use a share up to 1, or 2, 3" in str(caught.value)


def test_without_ray_a_start_is_refused_and_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingCapability, match=r"\[hosted_ray\] needs the package ray .*pip install.*, or leave that"):
        check_defaults(configured(hosted_ray={}), None)


def test_devices_of_a_cluster_are_not_looked_for_on_this_machine(monkeypatch):
    monkeypatch.setattr("coordinator.service.preflight.check_ray_is_installed", lambda _advice: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    client_with_gpu = {"id": "h", "device": "cuda", "data": {"source": "digits:optdigits?n=20"}}
    check_defaults(configured(hosted=[client_with_gpu], hosted_ray={"gpus": 1}), None)


# --- the real thing --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster_at(port):
    """Run a real cluster with two processors on this machine, and yield the process of its head."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    # The sockets of Ray need a short path.
    with tempfile.TemporaryDirectory(prefix="hw-ray-", ignore_cleanup_errors=True) as folder:
        output = Path(folder) / "head.log"
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"),
            f"--object-store-memory={100 << 20}",
        ]
        with output.open("wb") as log:
            head = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            until(lambda: head.poll() is not None or b"Ray runtime started" in output.read_bytes(), "it is there")
            assert head.poll() is None, output.read_text()
            yield head
        finally:
            head.terminate()
            head.wait(LIMIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)


@pytest.fixture
def port(monkeypatch):
    """A port for a cluster that only programs with this test's token may use, as Ray wants by default."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def at_work(head):
    """Return the processes of the cluster that compute for a client now; Ray names each by what it does."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::Actor.compute") and is_below(int(path.parent.name), head.pid):
                found.append(int(path.parent.name))
    return found


def is_below(pid, ancestor):
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def placement_at(port):
    return f'hosted_ray = {{ address = "127.0.0.1:{port}", workers = 2 }}'


PARAMS = {"local_epochs": 150, "batch_size": 8, "lr": 0.001}
"""A training takes long enough to be killed in, and its loss does not explode."""


def ended(folder, prepared, placement, disturb=lambda state, run: None):
    """Return the encoder of a run of four hosted clients, its updates, and the log of their process."""
    shutil.copytree(folder.parent / "sim", folder / "sim")
    with EmbeddedBroker() as broker:
        (folder / "coordinator.toml").write_text(
            coordinator_toml(prepared.task, broker.url, ("c0", "c1", "c2", "c3"), placement)
        )
        serve = ("coordinator", "serve", "--config", "coordinator.toml")
        words = lambda: "\n".join(path.read_text()[-2000:] for path in folder.rglob("*.log"))
        with processes(folder, serve=serve), StateFolder(folder / "state").look(create=True) as state:
            params = methods.create("fedper", PARAMS).params.model_dump(mode="json")
            asked = Request("fedper", params, 2, 7, prepared.task)
            run = state.journal.request_run(fact_of("run_requested", asked.body()))
            disturb(state, run)
            (end,) = until(lambda: state.journal.entries(run, ("run_finished", "run_failed")), "the run is over", words)
            updates = [(entry.round, entry.agent) for entry in state.journal.entries(run, ("update_accepted",))]
    log = (folder / "state" / "hosted" / "process-0.log").read_text()
    assert end.kind == "run_finished", end.body
    return end.body["encoder_sha256"], sorted(updates), log


@pytest.mark.slow
@pytest.mark.broker
def test_on_a_real_cluster_a_run_ends_in_the_bits_of_this_machine_though_a_worker_is_killed_at_work(tmp_path, port):
    prepared, _ = simulated(tmp_path / "sim", 1)
    (tmp_path / "here").mkdir()
    here, expected, _ = ended(tmp_path / "here", prepared, "hosted_processes = 1")
    (tmp_path / "ray").mkdir()
    with cluster_at(port) as head:

        def kill_one_at_work(state, run):
            os.kill(until(lambda: at_work(head), "a worker computes")[0], signal.SIGKILL)

        there, updates, log = ended(tmp_path / "ray", prepared, placement_at(port), kill_one_at_work)
    assert there == here
    assert updates == expected == [(number, f"c{client}") for number in (1, 2) for client in range(4)]
    assert log.count("worker_lost") == 1
    assert "workers_started count=2" in log


@pytest.mark.slow
@pytest.mark.broker
def test_a_cluster_that_is_lost_in_a_run_and_comes_back_ends_in_the_bits_of_this_machine(tmp_path, port):
    """All of its processes are killed while they compute; until there is another one, clients are offline."""
    prepared, _ = simulated(tmp_path / "sim", 1)
    (tmp_path / "here").mkdir()
    here, expected, _ = ended(tmp_path / "here", prepared, "hosted_processes = 1")
    (tmp_path / "ray").mkdir()
    with contextlib.ExitStack() as clusters:

        def lose_cluster(state, run):
            with cluster_at(port) as head:
                until(lambda: at_work(head), "a worker computes")
                os.killpg(head.pid, signal.SIGKILL)
            clients = lambda: json.loads((tmp_path / "ray/state/status.json").read_text())["agents"]
            reason = "no Ray cluster can be used at"
            until(lambda: all(any(reason in note for note in one["notes"]) for one in clients()), "it is told")
            assert state.journal.entries(run, ("run_finished", "run_failed")) == []
            clusters.enter_context(cluster_at(port))

        there, updates, _ = ended(tmp_path / "ray", prepared, placement_at(port), lose_cluster)
    assert there == here
    assert updates == expected


@pytest.mark.slow
def test_a_cluster_that_is_away_is_told_in_the_status_and_tried_again(tmp_path):
    """Nobody listens at the port; clients are offline with that reason, in one line, without a traceback."""
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    config = configured(state=str(tmp_path), hosted_ray={"address": address})
    hosts = HostedTransport.of(config, lambda: None)
    hosts.start()
    try:
        until(lambda: "is restarted" in hosts.away()["h"], "it has ended once", lambda: hosts.away().get("h", ""))
        reason = hosts.away()["h"]
        assert f"no Ray cluster can be used at '{address}'" in reason
        assert "correct hosted_ray.address; the coordinator goes on trying" in reason
        assert "Traceback" not in (tmp_path / "hosted" / "process-0.log").read_text()
        until(lambda: hosts.processes[0].supervisor.restarts >= 2, "it is tried again")
    finally:
        hosts.close()
