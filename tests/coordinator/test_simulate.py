"""A simulated run against the same run with real agents, stopped ones against undisturbed ones, and its figures."""

from __future__ import annotations

import gzip
from statistics import fmean

import numpy as np
import pytest
from federation_harness import SMALL, Federation, quick_params

from coordinator import simulate
from coordinator.simulate import Plan, Prepared, open_simulation, pools, results
from coordinator.simulate.duties import Shared
from edge_agent import methods
from edge_agent.agent.duties import Duties
from edge_agent.data import Samples, partition
from edge_agent.errors import ConfigError, DataError, RunFailed, UnknownName, UsageError


@pytest.fixture
def images(tmp_path):
    """90 images of 4 x 4 with three classes that differ in brightness."""
    labels = np.arange(90) % 3
    inputs = np.clip(np.random.default_rng(0).normal(60, 25, (90, 4, 4)) + 60 * labels[:, None, None], 0, 255)
    path = tmp_path / "images.npz"
    np.savez(path, inputs=inputs.astype(np.uint8), labels=labels, class_names=np.array(["a", "b", "c"]))
    return f"npz:{path}"


def plan_for(images, method="fedavg", **changes):
    wished = {
        "method": method,
        "params": quick_params(method),
        "data": (images,),
        "clients": 3,
        "rounds": 2,
        "encoder": "linear",
        "encoder_params": {"feature_dim": 4},
        "device": "cpu",
        "engine": "serial",
    }
    return Plan(**{**wished, **changes})


def run(plan, folder):
    with open_simulation(Prepared.of(plan), folder) as simulation:
        return simulation.finish()


# --- the same as on devices ------------------------------------------------------------------------------------------


def federation_on(prepared, folder):
    """Real agents with their own caches, outboxes and models, on the rows that the simulation gives its clients."""

    class RowDuties(Duties):
        def _samples(self, task):
            share = prepared.division.clients[self.config.id]
            parts = prepared.pools.arrays(share)
            spec, names = prepared.task.input, prepared.task.class_names
            train, test = (Samples(part.inputs, part.labels, names, spec) for part in parts)
            self.samples = len(train)
            return train, test

    clients = tuple(prepared.division.clients)
    fed = Federation(folder, agents=clients, task=prepared.task, duties=RowDuties)
    with fed:
        plan = prepared.plan
        fed.request(plan.method, rounds=plan.rounds, seed=plan.seed, params=dict(plan.params))
        fed.finish()
        assert fed.record.status == "finished", fed.record.outcome
        updates = {(e.round, e.agent): (e.digest, e.body["metrics"]) for e in fed.entries("update_accepted")}
        return fed.encoder_sha256, updates, fed.state.run(fed.run).summary(), fed.metrics()


@pytest.mark.parametrize("method", methods.names())
def test_a_simulation_ends_in_the_bits_of_the_federation(tmp_path, images, method):
    """Same seed, same samples: every update of every client is the same, to the last bit, and so is the encoder."""
    prepared = Prepared.of(plan_for(images, method, seed=5))
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
    prepared = Prepared.of(plan_for(images))
    *_, metrics = federation_on(prepared, tmp_path / "federation")
    result = run(prepared.plan, tmp_path / "simulation")
    told = [(one["bytes_up"], one["bytes_down"]) for one in result["rounds"]]
    assert told == [(line["bytes_up"], line["bytes_down"]) for line in metrics]
    assert told[0][1] > 3 * 4 * (16 * 4 + 4 + 4 * 3 + 3)


def test_one_model_object_serves_all_clients(images):
    """What 100 clients need together is what one of them needs."""
    prepared = Prepared.of(plan_for(images, "local"))
    shared = Shared(prepared.pools, prepared.division, prepared.model, prepared.plan.folder)
    request = prepared.request()
    job = simulate.Job(
        run="run-0001", round=1, rounds=2, seed=0, method="local", params=request.params, task=request.task,
        blobs=(), deadline_s=1.0,
    )  # fmt: skip
    sessions = [shared.duties(client)._session_for(job) for client in prepared.division.clients]
    assert len({id(session._model) for session in sessions}) == 1
    assert len({id(session._fresh) for session in sessions}) == 1


# --- stopped and gone on with ----------------------------------------------------------------------------------------


def learned(result):
    """All but time and traffic, which are those of the process that closed a round."""
    rounds = [{**one, "seconds": None, "bytes_up": None, "bytes_down": None} for one in result["rounds"]]
    return {**result, "rounds": rounds, "seconds": None}


@pytest.mark.parametrize(
    "method, jobs", [*(("fedper", jobs) for jobs in (0, 1, 3, 5, 6, 8)), ("fedavg", 4), ("local", 5)]
)
def test_a_stopped_simulation_goes_on_and_tells_the_same(tmp_path, images, method, jobs):
    """Two rounds of three clients and three reports are nine jobs; wherever it stops, what comes out is the same."""
    plan = plan_for(images, method)
    whole = run(plan, tmp_path / "whole")
    folder = tmp_path / "stopped"
    with open_simulation(Prepared.of(plan), folder) as simulation:
        done = 0
        while done < jobs:
            done += simulation.step() is not None
    found = simulate.planned(folder)
    assert found == plan
    with open_simulation(Prepared.of(found, folder / simulate.PARTITION), folder) as simulation:
        again = simulation.finish()
    assert learned(again) == learned(whole)


def test_a_simulation_that_is_over_tells_its_result_again(tmp_path, images):
    plan = plan_for(images)
    first = run(plan, tmp_path / "sim")
    assert run(plan, tmp_path / "sim") == first


def test_two_processes_cannot_work_in_one_folder(tmp_path, images):
    prepared = Prepared.of(plan_for(images))
    with open_simulation(prepared, tmp_path / "sim"), pytest.raises(Exception, match="is in use by headwater simulate"):
        with open_simulation(prepared, tmp_path / "sim"):
            pass


def test_a_folder_with_something_else_is_left_alone(tmp_path, images):
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="is not empty and holds no simulation"):
        run(plan_for(images), tmp_path / "sim")
    assert [path.name for path in (tmp_path / "sim").iterdir()] == ["thesis.txt"]


def test_a_client_that_diverges_fails_the_run_and_is_named(tmp_path, images):
    plan = plan_for(images, params={**SMALL, "lr": 1e30})
    with pytest.raises(RunFailed, match=r"round 1 .*c0: TrainingFailed: client 'c0': loss became nan"):
        run(plan, tmp_path / "sim")


# --- rounds and figures ----------------------------------------------------------------------------------------------


def test_a_share_of_the_clients_takes_part_in_each_round(tmp_path, images):
    result = run(plan_for(images, clients=6, fraction=0.5, rounds=4), tmp_path / "sim")
    assert [one["clients"] for one in result["rounds"]] == [3] * 4
    with simulate.StateFolder(tmp_path / "sim").look() as state:
        cohorts = [tuple(e.body["cohort"]) for e in state.journal.entries("run-0001", ("round_opened",))]
        agents = state.run("run-0001").summary()["agents"]
    assert len(set(cohorts)) > 1
    assert [agent["id"] for agent in agents] == [f"c{n}" for n in range(6)]


def test_evaluation_every_other_round_and_after_training(tmp_path, images):
    result = run(plan_for(images, rounds=4, evaluate_every=2, evaluate_after=True), tmp_path / "sim")
    assert [sorted(one["acc"]) for one in result["rounds"]] == [[], ["after", "global", "personal"]] * 2
    assert run(plan_for(images, evaluate_every=0), tmp_path / "never")["rounds"][0]["acc"] == {}


def test_evaluation_changes_nothing(tmp_path, images):
    """It costs time and no bits: an update does not depend on whether anybody looked before or after."""
    shas = {
        run(plan_for(images, evaluate_every=every, evaluate_after=after), tmp_path / f"{every}{after}")[
            "encoder_sha256"
        ]
        for every, after in ((0, False), (1, False), (1, True))
    }
    assert len(shas) == 1


def test_seconds_are_real_while_the_clock_of_deadlines_stands_still(tmp_path, images):
    with open_simulation(Prepared.of(plan_for(images)), tmp_path / "sim") as simulation:
        result = simulation.finish()
        assert simulation.clock.now < 2.0
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


def test_best_is_the_earliest_of_the_highest_means():
    def acc(value):
        return {"clients_mean": value, "samples_mean": value, "worst10": value}

    rounds = [
        {"round": 1, "acc": {"personal": acc(0.1), "after": acc(0.6)}},
        {"round": 2, "acc": {"personal": acc(0.7), "after": acc(0.5)}},
        {"round": 3, "acc": {}},
    ]
    best = results.best_of(rounds, 3, {"personal": acc(0.7)}, 3)
    assert best["personal"]["rounds_done"] == 1  # what round 2 received is what one round has made
    assert best["after"]["rounds_done"] == 1
    assert results.best_of([], 3, {"global": acc(0.2)}, 3)["global"]["rounds_done"] == 3


def test_a_round_that_scored_a_few_is_never_the_best():
    rounds = [{"round": n, "acc": {"global": {"clients": n, "clients_mean": 1 / n}}} for n in (1, 2, 3)]
    last = {"global": {"clients": 3, "clients_mean": 0.2}}
    assert results.best_of(rounds, 3, last, 3)["global"] == {"rounds_done": 2, "clients": 3, "clients_mean": 1 / 3}


def test_the_result_has_what_papers_compare(tmp_path, images):
    result = run(plan_for(images, seed=3), tmp_path / "sim")
    assert {
        "run_id", "method", "params", "rounds", "best", "last", "seed", "partition", "partition_hash", "clients",
        "encoder_sha256",
    } <= set(result)  # fmt: skip
    assert result["seed"] == 3
    assert result["params"]["lr"] == 0.05
    assert set(result["rounds"][0]) == {"round", "seconds", "clients", "acc", "loss", "bytes_up", "bytes_down"}


# --- data and who gets them ------------------------------------------------------------------------------------------


def idx_folder(folder, train=400, test=200, classes=10):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for stem, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % classes).astype(np.uint8)
        pixels = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        for name, array in ((f"{stem}-images-idx3-ubyte", pixels), (f"{stem}-labels-idx1-ubyte", labels)):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
            with gzip.open(folder / f"{name}.gz", "wb") as file:
                file.write(header + array.tobytes())
    return f"idx:{folder}"


def prepared_pools(plan):
    return pools.prepare(plan)


def test_idx_files_are_divided_by_their_own_training_and_test_part(tmp_path):
    plan = Plan(data=(idx_folder(tmp_path / "idx"),), partition="fedpac", clients=5, size=50)
    pools, division, task = prepared_pools(plan)
    assert (len(pools.train), len(pools.test)) == (400, 200)
    assert task.encoder == "fedpac_cnn"
    assert (task.input.mean, task.input.std) == ((0.1307,), (0.3081,))
    train, test = pools.arrays(division.clients["c1"])
    for part in (train, test):  # 10 even, then 40 = 13 + 13 + 14 of classes 2, 3 and 4
        assert np.bincount(part.labels, minlength=10).tolist() == [1, 1, 14, 14, 15, 1, 1, 1, 1, 1]
    white = (1 - 0.1307) / 0.3081
    assert train.inputs.max() == pytest.approx(white, abs=1e-5)


def test_a_named_split_is_divided_alone_and_clients_hold_back_a_part(tmp_path):
    source = idx_folder(tmp_path / "idx")
    pools, division, _ = prepared_pools(Plan(data=(f"{source}?split=all",), clients=4))
    assert (len(pools.train), pools.test) == (600, None)
    sizes = {(len(share.train), len(share.test)) for share in division.clients.values()}
    assert all(train + test == 150 and abs(test - 150 / 4) <= 5 for train, test in sizes)
    rows = [row for share in division.clients.values() for row in share.train + share.test]
    assert sorted(rows) == list(range(600))


def test_missing_test_files_are_told(tmp_path):
    source = idx_folder(tmp_path / "idx")
    for path in (tmp_path / "idx").glob("t10k*"):
        path.unlink()
    with pytest.raises(DataError, match="no test files"):
        prepared_pools(Plan(data=(source,)))


def test_the_six_styles_of_digits_are_domains(tmp_path):
    pools, division, task = prepared_pools(Plan(data=("digits?n=12",), partition="domains"))
    assert list(division.clients) == ["inverted", "optdigits", "photo", "rendered", "slanted", "striped"]
    assert len(pools.train) == 72
    assert task.class_names == tuple("0123456789")
    assert all(len(share.train) + len(share.test) == 12 for share in division.clients.values())


def test_folders_of_images_are_domains_with_the_classes_of_all(tmp_path):
    from PIL import Image

    root = tmp_path / "office"
    for domain, classes in (("Web Cam", "ab"), ("amazon", "bc")):
        for name in classes:
            (root / domain / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (8, 8), (60 * number, 10, 10)).save(root / domain / name / f"{number}.png")
    pools, division, task = prepared_pools(Plan(data=(f"images:{root}",), partition="domains", encoder="linear"))
    assert list(division.clients) == ["amazon", "web-cam"]
    assert task.class_names == ("a", "b", "c")
    labels = {name: set(pools.arrays(share)[0].labels.tolist()) for name, share in division.clients.items()}
    assert labels == {"amazon": {1, 2}, "web-cam": {0, 1}}


def recordings(path, people=(3, 7)):
    rng = np.random.default_rng(0)
    arrays = {
        "samples": rng.normal(5, 2, (len(people) * 2 * 400, 6)).astype(np.float32),
        "lengths": np.full(len(people) * 2, 400),
        "label": np.arange(len(people) * 2) % 2,
        "subject": np.repeat(people, 2),
        "label_names": np.array(["rest", "wave"]),
        "sampling_hz": np.array(50),
    }
    np.savez(path, **arrays)
    return f"windows:{path}"


def test_each_person_of_a_recording_is_a_client_and_time_splits_train_from_test(tmp_path):
    """Four recordings of seven windows (400 samples, 100 at a stride of 50): two test, one between is left out."""
    plan = Plan(data=(recordings(tmp_path / "watch.npz"),), partition="subjects", standardise=True)
    pools, division, task = prepared_pools(plan)
    assert list(division.clients) == ["subject-3", "subject-7"]
    assert task.encoder == "cnn1d"
    assert len(pools.train) == 28
    for share in division.clients.values():
        assert (len(share.train), len(share.test)) == (8, 4)
        assert max(share.train[:4]) + 1 < min(share.test[:2])
    rows = np.concatenate([share.train for share in division.clients.values()])
    np.testing.assert_allclose(pools.train.inputs[rows].mean(axis=(0, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(pools.train.inputs[rows].std(axis=(0, 2)), 1, atol=1e-4)


def test_a_saved_partition_gives_another_seed_the_same_split(tmp_path, images):
    first = run(plan_for(images, partition="dirichlet", alpha=0.5, min_size=5), tmp_path / "one")
    saved = str(tmp_path / "one" / simulate.PARTITION)
    second = run(plan_for(images, partition=saved, clients=None, seed=9), tmp_path / "two")
    assert second["partition_hash"] == first["partition_hash"]
    assert second["partition"] == "dirichlet"
    assert second["encoder_sha256"] != first["encoder_sha256"]
    with pytest.raises(DataError, match="give the data that it was made for"):
        Prepared.of(plan_for("digits:optdigits?n=90", partition=saved, clients=None))


def test_a_saved_fedpac_partition_brings_its_normalisation_and_encoder(tmp_path):
    source = idx_folder(tmp_path / "idx")
    _, division, task = prepared_pools(Plan(data=(source,), partition="fedpac", clients=5, size=50))
    division.write(tmp_path / "p.json")
    _, again, same = prepared_pools(Plan(data=(source,), partition=str(tmp_path / "p.json")))
    assert (again, same) == (division, task)


def test_the_seed_decides_who_gets_what(images):
    hashes = [prepared_pools(plan_for(images, seed=seed))[1].sha256 for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_input_fields_on_top_of_those_of_the_data(images):
    _, _, task = prepared_pools(plan_for(images, input={"mean": 0.25, "height": 8}))
    assert task.input.mean == (0.25,)
    assert task.input.shape == (1, 8, 4)
    with pytest.raises(ConfigError, match="did you mean 'height'"):
        prepared_pools(plan_for(images, input={"hight": 8}))


@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({"partition": "fedpack"}, UnknownName, "unknown partition 'fedpack': did you mean 'fedpac'"),
        ({"method": "fedavgg"}, UnknownName, "did you mean 'fedavg'"),
        ({"data": ("npzz:x",)}, UnknownName, "did you mean 'npz'"),
        ({"data": ("digits:optdigit",)}, UnknownName, "did you mean 'optdigits'"),
        ({"encoder": "linaer"}, UnknownName, "did you mean 'linear'"),
        ({"clients": 0}, ValueError, "greater than or equal to 1"),
        ({"clients": 91}, DataError, "90 samples for 91 clients"),
        ({"partition": "dirichlet"}, ValueError, "needs alpha"),
        ({"alpha": 0.5}, ValueError, "alpha = 0.5 means nothing to partition iid; it is for dirichlet"),
        (
            {"partition": "dirichlet", "alpha": 1e-9, "clients": 4},
            DataError,
            "alpha 1e-09 with 4 clients .*raise --alpha",
        ),
        ({"partition": "domains"}, UsageError, "give --data once for each domain"),
        ({"partition": "subjects"}, UsageError, "expected windows:FILE"),
        ({"partition": "fedpac"}, DataError, "the pool has 3 classes, the rule is made for ten"),
        ({"data": ("digits", "digits:photo")}, ValueError, "are for --partition domains"),
        ({"params": {"lrr": 1}}, ConfigError, "did you mean 'lr'"),
    ],
)
def test_what_cannot_be_is_told_before_a_folder_is_made(images, changes, kind, words):
    with pytest.raises(kind, match=words):
        Prepared.of(plan_for(images, **changes))


def test_a_number_of_clients_that_the_data_contradict_is_refused(tmp_path):
    plan = Plan(data=("digits?n=12",), partition="domains", clients=7)
    with pytest.raises(UsageError, match="--clients 7 with partition domains: the data hold 6 of them"):
        prepared_pools(plan)
