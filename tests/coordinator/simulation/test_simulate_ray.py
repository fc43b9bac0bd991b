"""Engine ray: the bits of one process, whoever dies; by a stand-in for Ray, and (slow) on a cluster of two workers."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from simulation_harness import closed_rounds, learned_anywhere, run, run_and_updates, small_plan, write_images

from coordinator.processes.cluster import connect_to_cluster
from coordinator.simulation.engines import ray_cluster
from coordinator.simulation.engines.base import ADVICE, EngineChoice
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import PARTITION, Prepared
from edge_agent.core.errors import MissingCapability, RunFailed, UsageError
from edge_agent.core.installation import install_command

STATEFUL = "fedper"


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 60)


def plan_for(images, **changes):
    return small_plan(images, STATEFUL, **{"engine": "ray", "workers": 2, **changes})


def alone(plan):
    return plan.model_copy(update={"engine": "serial", "workers": None})


def kept(folder):
    files = (folder / "clients").rglob("*.safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- a stand-in: everything in this process, one answer at a time ----------------------------------------------------


class ActorGone(Exception):
    """What Ray raises is of one family, too."""


class StandIn:
    """As much of Ray as is used. ``dies_at``: clients at whose jobs an actor dies, once for each mention."""

    def __init__(self):
        self.exceptions = SimpleNamespace(RayError=ActorGone)
        self.cpus = 2
        self.dies_at = []
        self.stops_at = None
        self.options = None
        self.environment = {}
        self.log = []
        self.software = None

    def is_initialized(self):
        return self.options is not None

    def init(self, **options):
        self.options = options
        self.environment = dict(os.environ)
        if options["address"] == "nowhere":
            raise ConnectionError("could not find any running Ray\nmore")
        if options["address"] == "closed":
            raise ActorGone("no authentication token was found\nmore")
        os.environ["RAY_AUTH_MODE"] = "token"  # as Ray does for a cluster that it starts
        print("what Ray says of dead actors")
        signal.signal(signal.SIGTERM, lambda *_: None)

    def shutdown(self):
        self.log.append("shutdown")
        self.options = None

    def cluster_resources(self):
        return {"CPU": float(self.cpus)}

    available_resources = cluster_resources

    def put(self, value):
        assert isinstance(value, np.ndarray), "arrays are handed on without a copy"
        self.log.append(("put", len(value)))
        return value

    def remote(self, kind):
        def made(*arguments):
            self.log.append("hired")
            return _Actor(self, kind, arguments)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made))

    def kill(self, actor):
        self.log.append("killed")

    def wait(self, asked, num_returns, timeout):
        assert num_returns == 1
        return asked[-1:], asked[:-1]

    def get(self, answer):
        return answer()


class _Actor:
    def __init__(self, ray, kind, arguments):
        self._ray = ray
        self._make = lambda: kind(*arguments)
        self._made = None
        self.ready = SimpleNamespace(remote=lambda: self._ready)
        self.work = SimpleNamespace(remote=lambda *arguments: lambda: self._work(*arguments))

    def _ready(self):
        if "every start" in self._ray.dies_at:
            raise ActorGone(
                "The actor died because of an error raised in its creation task\n\nModuleNotFoundError: torch"
            )
        self._made = self._make()
        said = self._made.ready()
        return {**said, "software": self._ray.software or said["software"]}

    def _work(self, client, *arguments):
        if self._ray.stops_at == client:
            raise KeyboardInterrupt
        found = self._made.work(client, *arguments)
        if client in self._ray.dies_at:
            self._ray.dies_at.remove(client)
            raise ActorGone("The actor died unexpectedly\n\nkilled by the memory monitor")
        return found


@pytest.fixture
def ray(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


def test_a_run_on_ray_has_the_bits_of_one_process_though_actors_die(ray, images, tmp_path, capsys):
    """c1's actor dies twice after all was computed: nothing of it is kept, or the third try would start elsewhere."""
    plan = plan_for(images)
    whole, expected = run_and_updates(alone(plan), tmp_path / "whole")
    ray.dies_at = ["c1", "c2", "c1"]
    before = signal.getsignal(signal.SIGTERM)
    result, found = run_and_updates(plan, tmp_path / "ray")
    assert found == expected
    assert learned_anywhere(result) == learned_anywhere(whole)
    assert kept(tmp_path / "ray") == kept(tmp_path / "whole") != {}
    assert (result["engine"], result["workers"]) == ("ray", 2)
    assert ray.log.count("hired") == 2 + 3
    assert ray.log[-3:] == ["killed", "killed", "shutdown"]
    assert signal.getsignal(signal.SIGTERM) is before
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "what Ray says of dead actors\n")


def test_what_all_clients_receive_is_put_into_the_store_once(ray, images, tmp_path):
    """Two rounds, what comes after them, and the samples: four things, however many clients."""
    run(plan_for(images, clients=6), tmp_path / "ray")
    assert len([one for one in ray.log if one[0] == "put"]) == 4


def test_weights_to_begin_with_travel_to_machines_where_the_file_is_not(ray, images, tmp_path):
    """Clients of `local` begin from them on the machine where they are trained, and send nothing."""
    plan = small_plan(images, "local", engine="ray", workers=2)
    path = tmp_path / "w.safetensors"
    fresh = Prepared.of(plan).model.fresh
    save_file({name: np.full_like(array, 0.01) for name, array in fresh.items() if name.startswith("encoder.")}, path)
    without = learned_anywhere(run(alone(plan), tmp_path / "without"))
    plan = plan.model_copy(update={"weights": path})
    whole = learned_anywhere(run(alone(plan), tmp_path / "whole"))
    ray.dies_at = ["c1", "c2"]
    with open_simulation(Prepared.of(plan).shared(), tmp_path / "ray") as simulation:
        simulation.talk()  # the run has begun; workers hired from now on cannot find a file
        path.unlink()
        (tmp_path / "ray" / "weights.safetensors").unlink()
        assert learned_anywhere(simulation.finish()) == whole
    assert ray.log.count("hired") == 2 + 2
    assert whole["rounds"] != without["rounds"]


def test_a_cluster_of_our_own_reports_nothing_shows_nothing_and_leaves_nothing(ray, images, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    with open_simulation(Prepared.of(plan_for(images)), tmp_path / "ray"):
        options = ray.options
        place = Path(ray.options["_temp_dir"])
        assert place.is_dir()
        assert place.parent == Path(tempfile.gettempdir())
        assert (options["address"], options["num_cpus"], options["include_dashboard"]) == ("local", 2, False)
        assert ray.environment["RAY_USAGE_STATS_ENABLED"] == "0"
        assert len(ray.environment["RAY_AUTH_TOKEN"]) == 64, "nobody else may send it work"
    assert not place.exists()
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"
    assert not {"RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"} & os.environ.keys()


def test_a_run_that_was_stopped_on_ray_goes_on_elsewhere(ray, images, tmp_path):
    plan = plan_for(images)
    whole, expected = run_and_updates(alone(plan), tmp_path / "whole")
    ray.stops_at = "c1"
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "ray")
    assert ray.log[-1] == "shutdown"
    result, found = run_and_updates(alone(plan), tmp_path / "ray", saved=True)
    assert (learned_anywhere(result), found) == (learned_anywhere(whole), expected)


def test_a_client_at_which_actors_die_again_and_again_is_named(ray, images, tmp_path):
    ray.dies_at = ["c0"] * 3
    with pytest.raises(RunFailed, match="3 workers ended while client 'c0' worked in round 1, the last with Actor"):
        run(plan_for(images), tmp_path / "ray")
    assert ray.log[-1] == "shutdown"


def test_actors_that_cannot_start_end_the_run_with_the_reason(ray, images, tmp_path):
    ray.dies_at = ["every start"]
    with pytest.raises(RunFailed, match=r"creation task / ModuleNotFoundError: torch; try --engine serial"):
        run(plan_for(images), tmp_path / "ray")
    assert ray.log[-1] == "shutdown"


def test_machines_with_another_headwater_are_refused(ray, images, tmp_path):
    ray.software = "0.0.1"
    with pytest.raises(RunFailed, match=r"worker 1 has Headwater 0\.0\.1, this is .*install the same on all machines"):
        run(plan_for(images), tmp_path / "ray")


def test_a_cluster_of_others_is_asked_for_no_more_than_it_has_and_left_standing(ray, images, tmp_path):
    ray.options = {"somebody": "else's"}
    with open_simulation(Prepared.of(plan_for(images, workers=None, address="auto")), tmp_path / "all") as simulation:
        assert (simulation.engine.workers, simulation.engine.figures) == (2, {"workers": 2})
    with (
        pytest.raises(UsageError, match="3 workers, but the cluster has CPUs for 2"),
        open_simulation(Prepared.of(plan_for(images, workers=3, address="auto")), tmp_path / "more"),
    ):
        pass
    assert "shutdown" not in ray.log


@pytest.mark.parametrize(
    "address, reason",
    [("nowhere", "could not find any running"), ("closed", "token was found"), ("127.0.0.1:{}", "refused")],
)
def test_an_address_where_nobody_lets_us_in_is_told(ray, images, tmp_path, address, reason):
    """A port that was free a moment ago; Ray itself would knock there for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = address.format(taken.getsockname()[1])
    plan = plan_for(images, address=address)
    with (
        pytest.raises(
            RunFailed, match=rf"can be used at '{address}' \(.*{reason}.*\); run this on .*RAY_AUTH_MODE=token"
        ),
        open_simulation(Prepared.of(plan), tmp_path / "ray"),
    ):
        pass
    assert ray.log == ["shutdown"] * (address in ("nowhere", "closed"))


def test_without_ray_it_is_said_what_to_install(images, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingCapability, match=re.escape(f"{install_command('ray')}, or try --engine pool")):
        EngineChoice.of(plan_for(images), 3)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"engine": "pool", "address": "auto"}, "address = auto has no effect on engine pool"),
        ({"address": "ray://host:10001"}, "is one for Ray's remote client; run on a machine of the cluster"),
    ],
)
def test_what_cannot_be_asked_for_is_told(images, changes, words):
    with pytest.raises(ValueError, match=words):
        plan_for(images, **changes)


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.fixture
def local_cluster():
    """Two workers on this machine; a simulation finds the connection and uses it."""
    pytest.importorskip("ray")
    with connect_to_cluster(None, ADVICE, cpus=2) as ray:
        yield ray


@pytest.mark.slow
def test_a_process_may_start_one_real_cluster_after_another():
    pytest.importorskip("ray")
    for _ in range(2):
        with connect_to_cluster(None, ADVICE, cpus=1) as ray:
            assert ray.cluster_resources()["CPU"] == 1


@pytest.mark.slow
def test_a_real_cluster_ends_in_the_bits_of_one_process_though_an_actor_is_killed_and_the_run_was_stopped(
    local_cluster, images, tmp_path
):
    """Begun in one process, gone on with on Ray with an actor killed at work, ended in one process."""
    plan = plan_for(images, rounds=3)
    folder = tmp_path / "ray"
    whole, expected = run_and_updates(alone(plan), tmp_path / "whole")
    with open_simulation(Prepared.of(alone(plan)), folder) as simulation:
        for _ in range(2):
            simulation.step()
    with open_simulation(Prepared.of(plan, folder / PARTITION), folder) as simulation:
        engine = simulation.engine
        assert isinstance(engine._hosts, ray_cluster.RayWorkers)
        simulation.talk()
        simulation.clients._hand_out()
        while not engine._busy:
            engine._advance()
        victim = next(iter(engine._busy))
        os.kill(victim.pid, signal.SIGKILL)
        while closed_rounds(simulation) < 2:
            simulation.step()
        assert engine._crashes.total() == 1
        assert victim.pid not in engine.pids
    result, found = run_and_updates(alone(plan), folder, saved=True)
    assert (learned_anywhere(result), found) == (learned_anywhere(whole), expected)
    assert kept(folder) == kept(tmp_path / "whole") != {}
    assert local_cluster.is_initialized(), "a connection that was there stays"
