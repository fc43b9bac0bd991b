"""A simulated run against the same run with real agents, stopped ones against undisturbed ones, and its figures."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from federation_duties import SMALL
from federation_harness import Federation
from simulation_harness import learned, run, small_plan, write_images

from coordinator.simulation import results
from coordinator.simulation import setup as simulation_folder
from coordinator.simulation.client_tasks import Shared, SimulatedResources
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from coordinator.state.store import StateFolder
from edge_agent import methods
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.errors import TrainingFailed, UsageError
from edge_agent.data import Samples, partition
from edge_agent.wire.messages.down import Job


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 90)


# --- the same as on devices ------------------------------------------------------------------------------------------


def federation_on(prepared, folder):
    """Real agents with their own caches, outboxes and models, on the rows that the simulation gives its clients."""

    class RowDuties(TaskRunner):
        def read_samples(self, task):
            share = prepared.division.clients[self.config.id]
            parts = prepared.pools.arrays(share)
            spec = prepared.task.input
            names = prepared.task.class_names
            train, test = (Samples(part.inputs, part.labels, names, spec) for part in parts)
            self.samples = len(train)
            return train, test

    clients = tuple(prepared.division.clients)
    fed = Federation(folder, agents=clients, task=prepared.task, tasks=RowDuties)
    with fed:
        plan = prepared.plan
        fed.request(plan.method, rounds=plan.rounds, seed=plan.seed, params=dict(plan.params))
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        updates = {(e.round, e.agent): (e.digest, e.body["metrics"]) for e in fed.entries("update_accepted")}
        return fed.encoder_sha256, updates, fed.state.run(fed.run).summary(), fed.metrics()


@pytest.mark.parametrize("method", methods.names())
def test_a_simulation_ends_in_the_bits_of_the_federation(tmp_path, images, method):
    """Same seed, same samples: every update of every client is the same, to the last bit, and so is the encoder."""
    prepared = Prepared.of(small_plan(images, method, seed=5))
    sha, updates, summary, _ = federation_on(prepared, tmp_path / "federation")
    with open_simulation(prepared, tmp_path / "simulation") as simulation:
        result = simulation.finish()
        entries = simulation.state.journal.entries(simulation.run, ("update_accepted",))
    assert {(e.round, e.agent): (e.digest, e.body["metrics"]) for e in entries} == updates
    assert len(entries) == 6
    assert result["encoder_sha256"] == sha
    personal = [agent["acc"]["personal"] for agent in summary["agents"]]
    assert result["last"]["acc"]["personal"]["clients_mean"] == pytest.approx(fmean(personal), abs=1e-6)


def test_bytes_are_those_that_the_federation_counts(tmp_path, images):
    prepared = Prepared.of(small_plan(images))
    *_, metrics = federation_on(prepared, tmp_path / "federation")
    result = run(prepared.plan, tmp_path / "simulation")
    told = [(one["bytes_up"], one["bytes_down"]) for one in result["rounds"]]
    assert told == [(line["bytes_up"], line["bytes_down"]) for line in metrics]
    assert told[0][1] > 3 * 4 * (16 * 4 + 4 + 4 * 3 + 3)


def test_one_model_object_serves_all_clients(images):
    """What 100 clients need together is what one of them needs."""
    prepared = Prepared.of(small_plan(images, "local"))
    shared = Shared(prepared.plan, prepared.pools, prepared.division, prepared.model, prepared.plan.folder)
    request = prepared.request()
    job = Job(
        run="run-0001", round=1, rounds=2, seed=0, method="local", params=request.params, task=request.task,
        blobs=(), deadline_s=1.0,
    )  # fmt: skip
    sessions = [SimulatedResources(shared, client).tasks().session(job) for client in prepared.division.clients]
    assert len({id(session._model) for session in sessions}) == 1
    assert len({id(session._fresh) for session in sessions}) == 1


# --- stopped and gone on with ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, jobs", [*(("fedper", jobs) for jobs in (0, 1, 3, 5, 6, 8)), ("fedavg", 4), ("local", 5)]
)
def test_a_stopped_simulation_goes_on_and_tells_the_same(tmp_path, images, method, jobs):
    """Two rounds of three clients and three reports are nine jobs; wherever it stops, what comes out is the same."""
    plan = small_plan(images, method)
    whole = run(plan, tmp_path / "whole")
    folder = tmp_path / "stopped"
    with open_simulation(Prepared.of(plan), folder) as simulation:
        done = 0
        while done < jobs:
            done += simulation.step() is not None
    found = simulation_folder.read_plan(folder)
    assert found == plan
    with open_simulation(Prepared.of(found, folder / simulation_folder.PARTITION), folder) as simulation:
        again = simulation.finish()
    assert learned(again) == learned(whole)


def test_a_simulation_that_is_over_tells_its_result_again(tmp_path, images):
    plan = small_plan(images)
    first = run(plan, tmp_path / "sim")
    assert run(plan, tmp_path / "sim") == first


def test_two_processes_cannot_work_in_one_folder(tmp_path, images):
    prepared = Prepared.of(small_plan(images))
    with open_simulation(prepared, tmp_path / "sim"), pytest.raises(Exception, match="is in use by headwater simulate"):
        with open_simulation(prepared, tmp_path / "sim"):
            pass


def test_a_folder_with_something_else_is_left_alone(tmp_path, images):
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="is not empty and holds no simulation"):
        run(small_plan(images), tmp_path / "sim")
    assert [path.name for path in (tmp_path / "sim").iterdir()] == ["thesis.txt"]


def test_a_client_that_diverges_fails_the_run_and_is_named(tmp_path, images):
    plan = small_plan(images, params={**SMALL, "lr": 1e30})
    with pytest.raises(TrainingFailed, match=r"round 1 .*c2: TrainingFailed: client 'c2': loss became nan"):
        run(plan, tmp_path / "sim")


# --- rounds and figures ----------------------------------------------------------------------------------------------


def test_a_share_of_the_clients_takes_part_in_each_round(tmp_path, images):
    result = run(small_plan(images, clients=6, fraction=0.5, rounds=4), tmp_path / "sim")
    assert [one["clients"] for one in result["rounds"]] == [3] * 4
    with StateFolder(tmp_path / "sim").look() as state:
        cohorts = [tuple(e.body["cohort"]) for e in state.journal.entries("run-0001", ("round_opened",))]
        agents = state.run("run-0001").summary()["agents"]
    assert len(set(cohorts)) > 1
    assert [agent["id"] for agent in agents] == [f"c{n}" for n in range(6)]


def test_training_on_varied_images_is_another_training_and_repeats_bit_by_bit(tmp_path, images):
    hashes = []
    for folder, augment in (("plain", None), ("first", "crop_flip"), ("again", "crop_flip"), ("turned", "flip_turn")):
        result = run(small_plan(images, augment=augment), tmp_path / folder)
        hashes.append(result["encoder_sha256"])
    plain, first, again, turned = hashes
    assert first == again
    assert len({plain, first, turned}) == 3


def test_all_clients_take_part_in_the_last_round_where_that_is_asked_for(tmp_path, images):
    plan = small_plan(images, clients=6, fraction=0.3, rounds=3, full_last_round=True)
    assert [figures["clients"] for figures in run(plan, tmp_path / "sim")["rounds"]] == [2, 2, 6]


def test_evaluation_every_other_round_and_after_training(tmp_path, images):
    result = run(small_plan(images, rounds=4, evaluate_every=2, evaluate_after=True), tmp_path / "sim")
    assert [sorted(one["acc"]) for one in result["rounds"]] == [[], ["after", "global", "personal"]] * 2
    assert run(small_plan(images, evaluate_every=0), tmp_path / "never")["rounds"][0]["acc"] == {}


def test_evaluation_changes_nothing(tmp_path, images):
    """It costs time and no bits: an update does not depend on whether anybody looked before or after."""
    shas = {
        run(small_plan(images, evaluate_every=every, evaluate_after=after), tmp_path / f"{every}{after}")[
            "encoder_sha256"
        ]
        for every, after in ((0, False), (1, False), (1, True))
    }
    assert len(shas) == 1


def test_seconds_are_real_while_the_clock_of_deadlines_stands_still(tmp_path, images):
    with open_simulation(Prepared.of(small_plan(images)), tmp_path / "sim") as simulation:
        result = simulation.finish()
        assert simulation.clock_s < 2.0
    assert all(one["seconds"] > 0 for one in result["rounds"])


def test_the_spread_of_a_round_worked_out_by_hand():
    """Ten clients 0.0 .. 0.9, the last one with 11 of 20 test samples: (0 + .. + .8 + 11 * 0.9) / 20 = 13.5 / 20.

    The variance of n equally spaced values is (n^2 - 1) / 12 steps squared: 0.0825, its root is 0.287228.
    """
    shares = {f"c{n}": (np.array([n]), np.arange(1 if n < 9 else 11)) for n in range(10)}
    division = partition.divided("iid", {}, partition.Pool.of(np.zeros(20, np.int64), np.zeros(20, np.int64)), shares)
    scores = {f"c{n}": n / 10 for n in range(10)}
    expected = {"clients": 10, "clients_mean": 0.45, "samples_mean": 0.675, "std": 0.287228, "worst10": 0.0}
    assert results.spread(scores, division) == expected
    assert results.spread({"c8": 0.8, "c9": 0.9}, division)["worst10"] == 0.8


def result_of(rounds, last):
    """As much of a result of three rounds and three clients as the best rounds are found by."""
    return {"rounds": rounds, "last": {"rounds_done": 3, "acc": last}, "clients": 3, "new_clients": 0}


def test_best_is_the_earliest_of_the_highest_means():
    def acc(value):
        return {"clients_mean": value, "samples_mean": value, "worst10": value}

    rounds = [
        {"round": 1, "acc": {"personal": acc(0.1), "after": acc(0.6)}},
        {"round": 2, "acc": {"personal": acc(0.7), "after": acc(0.5)}},
        {"round": 3, "acc": {}},
    ]
    best = results.best_of(result_of(rounds, {"personal": acc(0.7)}))
    assert best["personal"]["rounds_done"] == 1  # what round 2 received is what one round has made
    assert best["after"]["rounds_done"] == 1
    assert results.best_of(result_of([], {"global": acc(0.2)}))["global"]["rounds_done"] == 3


def test_a_round_that_scored_a_few_is_never_the_best():
    rounds = [{"round": n, "acc": {"global": {"clients": n, "clients_mean": 1 / n}}} for n in (1, 2, 3)]
    last = {"global": {"clients": 3, "clients_mean": 0.2}}
    assert results.best_of(result_of(rounds, last))["global"] == {"rounds_done": 2, "clients": 3, "clients_mean": 1 / 3}


def test_the_result_has_what_papers_compare(tmp_path, images):
    result = run(small_plan(images, seed=3), tmp_path / "sim")
    assert {
        "run_id", "method", "params", "rounds", "best", "last", "seed", "partition", "partition_hash", "clients",
        "encoder_sha256",
    } <= set(result)  # fmt: skip
    assert result["seed"] == 3
    assert result["params"]["lr"] == 0.05
    assert set(result["rounds"][0]) == {"round", "seconds", "clients", "acc", "loss", "bytes_up", "bytes_down"}
