"""Hosted clients beside agents in one run, in one thread: who may say what, and that the result is that of agents."""

from __future__ import annotations

import numpy as np
import pytest
from faulty_broker import FaultyBroker
from federation_disturbances import Stranger, killed_at_append
from federation_duties import quick_params
from federation_harness import Federation
from simulation_harness import small_plan, write_images

from coordinator.config import NO_BOUNDS
from coordinator.hosted.agents import Here, HostedAgents
from coordinator.hosted.transport import CombinedTransport
from coordinator.rounds.selection import Tiers, describe_lack
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import PARTITION, Prepared
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.children import InlineWorker
from edge_agent.core.config import DataConfig
from edge_agent.core.errors import DuplicateId
from edge_agent.wire.messages import down, up
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message

CLIENTS = ("c0", "c1", "c2", "c3")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "images.npz", 96)


def simulated(images, folder, method="fedper"):
    """What a simulation of the run ends in; its partition is left in ``folder``."""
    changes = {"clients": 4, "partition": "dirichlet", "alpha": 0.7, "min_size": 8, "rounds": 3, "seed": 7}
    prepared = Prepared.of(small_plan(images, method, **changes))
    with open_simulation(prepared, folder) as simulation:
        return prepared, simulation.finish()


class Mixed(Federation):
    """Agents at a broker, and hosted clients in a process that is this one, all on rows of one partition."""

    def __init__(self, folder, prepared, source, partition, hosted=()):
        agents = tuple(name for name in CLIENTS if name not in hosted)
        # As in a simulation, which takes the papers' own means.
        options = {"cohort": {"min_agents": 4}, "aggregation": NO_BOUNDS}
        super().__init__(folder, agents=agents, task=prepared.task, **options)
        self.source = source
        self.partition = partition
        self.hosted = hosted
        clients = [{"id": name, "data": {"source": source, "partition": partition}} for name in hosted]
        self.config = type(self.config).model_validate({**self.config.model_dump(), "hosted": clients})
        self.make_tasks = self.real_duties
        self.crew = None

    def real_duties(self, config, tier):
        data = DataConfig(source=self.source, partition=self.partition)
        return TaskRunner(config.model_copy(update={"data": data}), tier)

    def start_coordinator(self):
        self.start_crew()
        super().start_coordinator(self.join)

    def join(self, coordinator):
        main = coordinator.transport
        side = self.crew.broker.transport()
        side.subscribe(*self.topics.for_coordinator())
        coordinator.transport = CombinedTransport(main, side, self.topics, self.hosted)

    def kill_coordinator(self):
        """Hosted clients die with it."""
        if self.coordinator is not None:
            self.coordinator.transport = self.coordinator.transport._main
        super().kill_coordinator()
        self.crew = None

    def start_crew(self):
        configs = [c.agent("home", self.config.state, self.config.round.lease_s) for c in self.config.hosted]
        self.crew = HostedAgents(configs, Here(InlineWorker()), clock=self.clock)
        self.crew.start()

    def step(self):
        busy = super().step()
        return (self.crew is not None and self.crew.step()) or busy


def ended(fed, method="fedper"):
    fed.request(method, rounds=3, seed=7, params=quick_params(method))
    fed.finish()
    updates = {(e.round, e.agent): (e.digest, e.body) for e in fed.entries("update_accepted")}
    return fed.encoder_sha256, updates


@pytest.mark.parametrize("method", ["fedper", "fedavg"])
def test_simulated_as_agents_and_with_two_of_four_hosted_a_run_ends_in_the_same_bits(tmp_path, images, method):
    prepared, result = simulated(images, tmp_path / "sim", method)
    partition = tmp_path / "sim" / PARTITION
    with Mixed(tmp_path / "agents", prepared, images, partition) as fed:
        by_agents = ended(fed, method)
    with Mixed(tmp_path / "mixed", prepared, images, partition, ("c0", "c2")) as fed:
        mixed = ended(fed, method)
        told = {agent["id"]: agent["transport"] for agent in fed.coordinator.status()["agents"]}
        personal = {agent["id"]: agent["acc"]["personal"] for agent in fed.state.run(fed.run).summary()["agents"]}
    assert mixed == by_agents
    assert len(mixed[1]) == 12
    assert mixed[0] == result["encoder_sha256"]
    assert told == {"c0": "hosted", "c1": "mqtt", "c2": "hosted", "c3": "mqtt"}
    assert np.mean(list(personal.values())) == pytest.approx(
        result["last"]["acc"]["personal"]["clients_mean"], abs=1e-6
    )


@pytest.fixture(scope="module")
def simulation(tmp_path_factory, images):
    folder = tmp_path_factory.mktemp("simulation") / "fedper"
    return folder / PARTITION, *simulated(images, folder)


@pytest.fixture
def mixed(tmp_path, images, simulation):
    """A run of FedPer with two hosted clients of four that is to end as a simulation does: (made anew, its hash)."""
    partition, prepared, result = simulation

    def make(folder="mixed"):
        return Mixed(tmp_path / folder, prepared, images, partition, ("c0", "c2"))

    return make, result["encoder_sha256"]


@pytest.mark.parametrize("number, before", [(3, True), (9, False)])
def test_a_coordinator_killed_with_its_hosted_clients_goes_on_to_the_same_bits(mixed, number, before):
    """They keep their heads in the state folder, so what they learned before is there again."""
    make, sha = mixed
    with make() as fed:
        fed.request("fedper", rounds=3, seed=7, params=quick_params("fedper"))
        with killed_at_append(fed, number, before=before):
            fed.until(lambda: fed.coordinator is None)
        fed.start_coordinator()
        fed.finish()
        assert fed.encoder_sha256 == sha
        kept = sorted(
            path.parent.parent.parent.name for path in fed.config.state.glob("hosted/*/runs/*/kept-9999999.*")
        )
        assert kept == ["c0", "c2"]


def test_hosted_clients_that_vanish_in_a_round_do_their_work_again_when_they_are_back(mixed):
    make, sha = mixed
    with make() as fed:
        fed.request("fedper", rounds=3, seed=7, params=quick_params("fedper"))
        fed.until(lambda: fed.entries("round_opened", round=2))
        for agent in fed.crew.agents:
            agent.transport.cut()
        side = fed.coordinator.transport._side
        fed.start_crew()
        fed.crew.broker.attach(side)
        fed.coordinator.transport._side.broker = fed.crew.broker
        fed.finish()
        assert fed.encoder_sha256 == sha
        assert [entry.body["attempt"] for entry in fed.entries("round_opened")] == [1, 1, 1]


def test_nobody_at_the_broker_can_speak_as_a_hosted_client(mixed, caplog):
    make, sha = mixed
    with make() as fed:
        imposter = Stranger(fed, "c0")
        imposter.hello()
        fed.request("fedper", rounds=3, seed=7, params=quick_params("fedper"))
        fed.until(lambda: fed.entries("round_opened", round=1))
        imposter.say(up.Fault(error="X", message="I cannot", run=fed.run, round=1))
        imposter.say(up.Bye())
        fed.finish()
        assert fed.encoder_sha256 == sha
        assert imposter.heard(down.Welcome, down.Job) == [], "what is for c0 stays in the house"
    assert caplog.text.count("agent=c0 is hosted here and was heard at the broker") == 1


def test_an_agent_with_the_id_of_a_hosted_client_is_refused_and_everybody_can_read_it(mixed):
    make, sha = mixed
    with make() as fed:
        fed.add("c0")
        fed.wait(1)
        second = fed.agents["c0"]
        with pytest.raises(DuplicateId, match="the id 'c0' is in use: the coordinator itself hosts a client") as told:
            second.raise_if_rejected()
        assert told.value.exit_code == 2
        assert second.boot in str(told.value)
        notes = {agent["id"]: agent["notes"] for agent in fed.coordinator.status()["agents"]}
        assert "an agent at the broker has the id 'c0', too" in notes.pop("c0")[0]
        assert set(map(tuple, notes.values())) == {()}
        fed.kill("c0")
        fed.request("fedper", rounds=3, seed=7, params=quick_params("fedper"))
        fed.finish()
        assert fed.encoder_sha256 == sha


def test_a_hosted_client_that_is_away_is_in_the_status_with_the_reason(mixed):
    make, _ = mixed
    with make() as fed:
        away = {"c0": "its process ended, signal 9"}
        fed.coordinator.transport._away = lambda: away
        fed.coordinator.config = fed.config
        unheard = {agent["id"]: (agent["present"], agent["notes"]) for agent in fed.coordinator.status()["agents"]}
        assert unheard == {"c0": (False, ["its process ended, signal 9"]), "c2": (False, [])}
        words = describe_lack(["c1", "c2"], fed.config, Tiers())
        assert words == "4 train agents, 2 more must come; here: c1, c2; hosted, but away: c0"
        fed.settle()
        away.clear()
        heard = {agent["id"]: (agent["present"], agent["notes"]) for agent in fed.coordinator.status()["agents"]}
        assert heard == dict.fromkeys(CLIENTS, (True, []))


def test_both_sides_are_heard_in_turn_and_hear_what_is_for_all():
    main = FaultyBroker(capture=True)
    side = FaultyBroker(capture=True)
    topics = Topics("home")
    hosted = side.transport()
    hosted.subscribe("x/+")
    joined = CombinedTransport(main.transport(), hosted, topics, ["h"])
    joined.subscribe("x/+")
    joined.start()
    for broker, name in ((main, "m"), (side, "s")):
        for number in range(3):
            broker.route(f"x/{name}", bytes([number]))
    heard = [event.topic for _ in range(20) if isinstance(event := joined.receive(0), Message)]
    assert sorted(heard) == ["x/m"] * 3 + ["x/s"] * 3
    assert heard[:3] != ["x/m"] * 3
    for topic in (topics.down("h"), topics.down("other"), topics.announce, topics.broadcast("ab")):
        joined.publish(topic, b"x")
    assert [topic for topic, _ in main.captured][3:] == [topics.down("other"), topics.announce, topics.broadcast("ab")]
    assert [topic for topic, _ in side.captured][3:] == [topics.down("h"), topics.announce, topics.broadcast("ab")]
