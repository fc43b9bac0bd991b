"""Worker processes against one process: the same bits, whoever is killed; and who takes part in a round."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import pytest
import torch
from simulation_harness import (
    closed_rounds,
    learned_anywhere,
    run,
    run_and_updates,
    small_plan,
    updates_of,
    write_images,
)

from coordinator.config import CohortConfig
from coordinator.processes.pipe import SharedBuffer
from coordinator.processes.supervisor import Limits
from coordinator.rounds.selection import choose
from coordinator.simulation import setup
from coordinator.simulation.client_pool import Dropouts, Durations
from coordinator.simulation.client_tasks import answer
from coordinator.simulation.datasets import Pools
from coordinator.simulation.engines import pool as local_pool
from coordinator.simulation.engines.base import EngineChoice, Work
from coordinator.simulation.engines.pool import LocalWorkers, WorkerPool
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import PARTITION, Prepared, read_plan
from edge_agent.client import supported
from edge_agent.core.errors import DataError, RunFailed, UsageError
from edge_agent.core.task import Task
from edge_agent.training.precision import StepTimes
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Job
from edge_agent.wire.messages.up import Fault, UpdateManifest


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 60)


def plan_for(images, **changes):
    return small_plan(images, "fedper", **changes)


# --- the pool --------------------------------------------------------------------------------------------------------


def test_a_pool_ends_in_the_bits_of_one_process_though_a_worker_is_killed_and_the_run_was_stopped(tmp_path, images):
    """Two jobs in one process; then SIGINT and SIGTERM for all workers, ignored, and kill -9 for one of them."""
    plan = plan_for(images)
    whole, updates = run_and_updates(plan, tmp_path / "whole")
    folder = tmp_path / "pool"
    with open_simulation(Prepared.of(plan), folder) as simulation:
        for _ in range(2):
            simulation.step()
    again = Prepared.of(plan.model_copy(update={"engine": "pool", "workers": 2}), folder / PARTITION).shared()
    with open_simulation(again, folder) as simulation:
        pool = simulation.engine
        for worker in pool.pids:
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
        simulation.talk()
        simulation.clients._hand_out()
        while not pool._busy:
            pool._advance()
        victim = next(iter(pool._busy))
        os.kill(victim.pid, signal.SIGKILL)
        result = simulation.finish()
        assert pool._crashes.total() == 1
        assert victim.pid not in pool.pids
        found = updates_of(simulation)
        orphan = pool._all[0]
        pool._hosts._selector.unregister(orphan.handle.pipe)
        orphan.handle.pipe.close()  # what its owner's death does
        assert orphan.handle._process.wait(10) == 0
    assert learned_anywhere(result) == learned_anywhere(whole)
    assert found == updates
    assert (result["engine"], result["workers"], result["threads"]) == ("pool", 2, 1)
    for pid in pool.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


FAKE = """
import json, os, signal, socket, struct, sys
end = socket.socket(fileno=0)
def hear():
    topic, size = struct.unpack("<HI", end.recv(6, socket.MSG_WAITALL))
    return end.recv(topic + size, socket.MSG_WAITALL)
def say(words, topic=b"done"):
    text = json.dumps(words).encode()
    end.sendall(struct.pack("<HI", len(topic), len(text)) + topic + text)
begun = hear()
"""
DIES = "say({'turn': 0, 'own_files': []}, b'ready'); hear(); os.kill(os.getpid(), signal.SIGKILL)"
WAITS = "say({'turn': 0, 'own_files': []}, b'ready'); hear()"
NEVER_STARTS = "sys.exit('no module named torch')"
SAYS_WHERE_BLOBS_ARE = """
say({"turn": 0, "own_files": []}, b"ready")
while True:
    first, blobs, *_ = socket.recv_fds(end, 6, 8)
    end.recv(sum(struct.unpack("<HI", first)), socket.MSG_WAITALL)
    told = " ".join(str(os.fstat(blob).st_ino) + ":" + os.pread(blob, 9, 0).decode() for blob in blobs)
    reply = {"type": "fault", "error": "E", "message": told}
    say({"reply": json.dumps(reply), "seconds": 1.5})
"""


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    """A pool whose workers are a few lines without torch."""
    begun = []

    def made(script, workers=1):
        path = tmp_path / "fake.py"
        path.write_text(FAKE + script)
        monkeypatch.setattr(local_pool, "COMMAND", (sys.executable, str(path)))
        pool = WorkerPool("pool", LocalWorkers({}, SharedBuffer.of(b"x"), tmp_path / "logs", Limits()), workers)
        begun.append(pool)
        pool.start()
        return pool

    yield made
    for pool in begun:
        pool.close()


def work_for(client="c1", *blobs):
    job = Job(
        run="run-0001", round=4, rounds=9, seed=0, method="fedavg", params={"batch_size": 50},
        task=Task(class_names=("a", "b")), blobs=(), deadline_s=1.0,
    )  # fmt: skip
    return Work(client, job, tuple(Outgoing.of(blob) for blob in blobs))


def test_a_client_at_which_workers_die_again_and_again_is_named_with_a_smaller_batch(pool_of):
    pool = pool_of(DIES)
    pool.give(work_for("c7"))
    done = pool.take()
    assert isinstance(done.reply, Fault)
    assert done.reply.error == "WorkerExited"
    reason = "the last with signal 9 (SIGKILL)"
    assert f"3 workers ended while client 'c7' worked in round 4, {reason}" in done.reply.message
    assert "a smaller batch_size than 50, fewer --workers" in done.reply.message
    assert (pool.is_busy, pool.room) == (False, 2)


def test_the_start_of_the_workers_is_measured_apart_from_the_rounds(pool_of):
    pool = pool_of(WAITS, workers=2)
    assert pool.start_s == 0.0
    pool.wait_until_ready()
    assert pool.start_s > 0.0
    assert len(pool._starting) < 2, "the first worker is ready before the first round is opened"


def test_workers_that_cannot_start_end_the_run_with_their_last_words(pool_of):
    pool = pool_of(NEVER_STARTS)
    pool.give(work_for())
    with pytest.raises(RunFailed, match=r"exit code 1; last output: no module named torch; try --engine serial"):
        pool.take()


def test_workers_that_die_while_they_have_nothing_to_do_can_start_all_the_same(pool_of):
    pool = pool_of(WAITS, workers=3)
    for _ in range(2):
        while pool._starting:
            pool._advance()
        gone = set(pool.pids)
        for pid in gone:
            os.kill(pid, signal.SIGKILL)
        while gone & set(pool.pids):
            pool._advance()
    assert len(pool.pids) == 3


def timed_as(monkeypatch, *, float32_s, bfloat16_s):
    """How often steps have been timed, which come out as told."""
    asked = []
    times = StepTimes(float32_s, bfloat16_s)
    monkeypatch.setattr(setup, "time_steps", lambda model, inputs: asked.append(len(inputs)) or times)
    return asked


@pytest.mark.slow
def test_mixed_precision_gives_other_bits_and_the_same_on_every_engine(images, tmp_path, monkeypatch):
    asked = timed_as(monkeypatch, float32_s=0.002, bfloat16_s=0.001)
    results = [
        run(plan_for(images, precision=precision, **how), tmp_path / f"{precision}-{number}")
        for number, (precision, how) in enumerate(
            [("float32", {}), ("bfloat16", {}), ("bfloat16", {"engine": "pool", "workers": 2})]
        )
    ]
    hashes = [result["encoder_sha256"] for result in results]
    assert hashes[0] != hashes[1] == hashes[2]
    assert [result["precision"] for result in results] == ["float32", "bfloat16", "bfloat16"]
    assert len(asked) == 2, "once for each simulation, whatever the number of workers"
    with pytest.raises(ValueError, match="precision = bfloat16 with engine stacked"):
        plan_for(images, precision="bfloat16", engine="stacked")


@pytest.mark.slow
def test_where_bfloat16_is_not_faster_a_simulation_trains_in_float32_and_says_so(images, tmp_path, monkeypatch, caplog):
    timed_as(monkeypatch, float32_s=0.001, bfloat16_s=0.009)
    plain = run(plan_for(images), tmp_path / "float32")
    caplog.clear()
    asked = run(plan_for(images, precision="bfloat16", engine="pool", workers=2), tmp_path / "asked")
    [line] = [record.message for record in caplog.records if "precision_not_used" in record.message]
    assert "float32_ms=1.00 bfloat16_ms=9.00" in line
    assert asked["precision"] == "float32"
    assert asked["encoder_sha256"] == plain["encoder_sha256"]


@pytest.mark.parametrize("begun_in", ["float32", "bfloat16"])
def test_a_resumed_simulation_keeps_the_precision_that_it_began_with(begun_in, images, tmp_path, monkeypatch):
    """Another machine, or another moment, would time otherwise."""
    times = {"float32": (1.0, 2.0), "bfloat16": (2.0, 1.0)}[begun_in]
    timed_as(monkeypatch, float32_s=times[0], bfloat16_s=times[1])
    plan = plan_for(images, precision="bfloat16")
    folder = tmp_path / "sim"
    with open_simulation(Prepared.of(plan), folder) as simulation:
        while not closed_rounds(simulation):
            simulation.step()
    asked = timed_as(monkeypatch, float32_s=times[1], bfloat16_s=times[0])
    found = read_plan(folder)
    assert found.precision == "bfloat16", "what was asked for"
    with open_simulation(Prepared.of(found, folder / PARTITION), folder) as simulation:
        assert simulation.finish()["precision"] == begun_in
    assert asked == []


def test_what_is_common_lies_in_memory_once_and_what_is_not_goes_when_it_is_not_needed(pool_of):
    pool = pool_of(SAYS_WHERE_BLOBS_ARE)
    told = []
    for client in ("a", "b", "c"):
        pool.give(work_for(client, b"to all   ", f"to {client}     ".encode()))
        told.append(pool.take().reply.message)
        assert len(pool._placed) <= 3
    common, own = zip(*(message.split(" ", 1) for message in told), strict=True)
    assert [blob.split(":")[1].strip() for blob in own] == ["to a", "to b", "to c"]
    assert len({message.split(":")[0] for message in told}) == 1
    assert common


def test_memory_that_is_not_there_is_told_as_such(images, tmp_path, monkeypatch):
    setup = Prepared.of(plan_for(images))
    with open_simulation(setup, tmp_path / "sim") as simulation:
        shared = simulation.engine._shared

    def full(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(Pools, "rows_of", full)
    said = answer(shared, "c2", work_for().job, {}).reply
    assert said.error == "MemoryError"
    assert "client 'c2' ran out of memory in round 4 ([enforce fail" in said.message
    assert "a smaller batch_size than 50" in said.message


def test_pools_in_shared_memory_give_each_client_the_same_samples(images):
    setup = Prepared.of(plan_for(images, engine="pool", workers=2))
    shared = setup.shared()
    assert shared.memory is not None
    for share in setup.division.clients.values():
        for mine, theirs in zip(setup.pools.arrays(share), shared.pools.arrays(share), strict=True):
            np.testing.assert_array_equal(mine.inputs, theirs.inputs)
            np.testing.assert_array_equal(mine.labels, theirs.labels)
    assert not shared.pools.train.inputs.flags.owndata


@pytest.mark.parametrize(
    "changes, chosen",
    [
        ({"engine": "serial"}, EngineChoice()),
        ({"engine": None, "workers": 2}, EngineChoice("pool", 2)),
        ({"engine": "pool", "workers": 64}, EngineChoice("pool", 3)),
    ],
)
def test_an_engine_is_the_one_that_was_asked_for_with_no_more_workers_than_clients(images, changes, chosen):
    assert EngineChoice.of(plan_for(images, **changes), 3) == chosen


@pytest.mark.parametrize("cores, clients, engine", [(1, 9, "serial"), (4, 1, "serial"), (4, 9, "pool")])
def test_by_default_there_is_a_pool_where_it_has_something_to_share_out(images, monkeypatch, cores, clients, engine):
    monkeypatch.setattr("coordinator.simulation.engines.base.cores", lambda: cores)
    chosen = EngineChoice.of(plan_for(images, engine=None), clients)
    assert (chosen.engine, chosen.workers) == (engine, min(cores, clients) if engine == "pool" else 1)


def test_the_longest_go_first_by_samples_and_then_by_what_was_measured():
    """Before: 30 > 20 > 10 samples. After a took 9 s for 10, b 2 s for 20: c is expected at 11 / 30 * 30 = 11 s."""
    durations = Durations({"a": 10, "b": 20, "c": 30})
    order = sorted("abc", key=lambda client: -durations.expected(client, "train"))
    assert order == ["c", "b", "a"]
    durations.note("a", "train", 9.0)
    durations.note("b", "train", 2.0)
    assert [durations.expected(client, "train") for client in "abc"] == [9.0, 2.0, pytest.approx(11.0)]
    assert durations.expected("c", "personalize") == 30.0


# --- who takes part --------------------------------------------------------------------------------------------------


def test_a_share_drawn_from_a_range_covers_the_range_and_is_drawn_again_alike():
    """Of ten agents, 0.2:0.6 is 2 to 6 of them; in 200 rounds each number comes up."""
    agents = [f"a{n}" for n in range(10)]
    config = CohortConfig(fraction=0.2, fraction_max=0.6)
    sizes = [len(choose(agents, config, seed=3, round_number=n)) for n in range(200)]
    assert set(sizes) == {2, 3, 4, 5, 6}
    assert all(30 <= sizes.count(size) <= 50 for size in set(sizes)) or min(map(sizes.count, set(sizes))) > 20
    assert choose(agents, config, seed=3, round_number=7) == choose(agents, config, seed=3, round_number=7)


def test_a_cohort_without_a_range_is_drawn_as_it_always_was():
    rng = np.random.default_rng([5, 2])
    expected = sorted(f"a{n}" for n in rng.choice(10, size=4, replace=False))
    found = choose([f"a{n}" for n in range(10)], CohortConfig(fraction=0.4), seed=5, round_number=2)
    assert list(found) == expected


def test_one_in_ten_drops_out_half_of_them_after_training():
    fates = [Dropouts(0.1, 0).fate(f"c{n}", number) for n in range(100) for number in range(100)]
    assert fates.count("vanishes") == pytest.approx(500, abs=80)
    assert fates.count("trains_in_vain") == pytest.approx(500, abs=80)
    assert Dropouts(0.5, 0).fate("c", 1, 1) == Dropouts(0.5, 0).fate("c", 1, 1)
    assert len({Dropouts(0.5, 0).fate("c", 1, attempt) for attempt in range(20)}) == 3


def test_rounds_close_without_those_who_drop_out_and_who_trained_in_vain_has_trained(tmp_path, images):
    plan = plan_for(images, clients=6, rounds=4, dropout=0.4, seed=2)
    dropouts = Dropouts(0.4, 2)
    fates = {(n, f"c{c}"): dropouts.fate(f"c{c}", n) for n in range(1, 5) for c in range(6)}
    assert {"vanishes", "trains_in_vain", "delivers"} == set(fates.values())
    result, updates = run_and_updates(plan, tmp_path / "sim")
    assert set(updates) == {key for key, fate in fates.items() if fate == "delivers"}
    assert [one["clients"] for one in result["rounds"]] == [
        sum(fates[n, f"c{c}"] == "delivers" for c in range(6)) for n in range(1, 5)
    ]
    number, client = next(key for key, fate in fates.items() if fate == "trains_in_vain" and key[0] > 2)
    kept = tmp_path / "sim" / "clients" / client / "runs" / "run-0001"
    assert any(int(path.stem[-7:]) >= number for path in kept.glob("kept-*"))
    assert result["dropout"] == 0.4


def test_a_round_in_which_all_drop_out_is_opened_again(tmp_path, images):
    """Of one client, the seed makes some round fail; the next attempt is another draw."""
    dropouts = None
    seed = -1
    while dropouts is None or dropouts.fate("c0", 1) == "delivers":
        seed += 1
        dropouts = Dropouts(0.7, seed)
    result, updates = run_and_updates(plan_for(images, clients=1, rounds=1, dropout=0.7, seed=seed), tmp_path / "sim")
    assert set(updates) == {(1, "c0")}
    assert result["rounds"][0]["clients"] == 1


def test_newcomers_never_train_and_fit_a_head_on_the_encoder_at_the_end(tmp_path, images):
    result, updates = run_and_updates(plan_for(images, clients=5, new_clients=2, rounds=3), tmp_path / "sim")
    assert {client for _, client in updates} == {"c0", "c1", "c2"}
    assert [one["clients"] for one in result["rounds"]] == [3, 3, 3]
    assert set(result["last"]["acc"]) == {"local", "personal", "new"}
    assert 0.5 < result["last"]["acc"]["new"]["clients_mean"] <= 1.0
    assert result["best"]["new"]["rounds_done"] == 3
    assert result["new_clients"] == 2


def test_newcomers_come_to_a_run_that_is_gone_on_with_as_well(tmp_path, images):
    plan = plan_for(images, new_clients=1, rounds=1)
    whole = run(plan, tmp_path / "whole")
    for jobs in (1, 2, 3):
        folder = tmp_path / str(jobs)
        with open_simulation(Prepared.of(plan), folder) as simulation:
            for _ in range(jobs):
                simulation.step()
        assert learned_anywhere(run(plan, folder)) == learned_anywhere(whole)


def test_somebody_has_to_train(images):
    with pytest.raises(UsageError, match="new_clients = 3 of 3 clients; at least one client must train"):
        Prepared.of(plan_for(images, new_clients=3))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"workers": 2}, "workers = 2 has no effect on engine serial"),
        ({"fraction": 0.5, "fraction_max": 0.2}, "fraction from 0.5 to 0.2: expected the smaller one first"),
        ({"dropout": 1.0}, "less than 1"),
        ({"augment": "crop_flip", "engine": "stacked"}, "augment = crop_flip with engine stacked"),
        ({"full_last_round": True}, "full_last_round has no effect where fraction is 1"),
    ],
)
def test_what_cannot_be_asked_for_is_told(images, changes, words):
    with pytest.raises(ValueError, match=words):
        plan_for(images, **changes)


def test_an_update_from_a_worker_is_the_one_that_its_manifest_names(images, tmp_path):
    with open_simulation(Prepared.of(plan_for(images)), tmp_path / "sim") as simulation:
        simulation.talk()
        simulation.clients._hand_out()
        done = simulation.engine.take()
    assert isinstance(done.reply, UpdateManifest)
    assert done.blob.ref == Outgoing.of(bytes(done.blob.data)).ref == done.reply.blob


def test_a_gpu_without_bfloat16_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old one")
    with pytest.raises(DataError, match=r"'bfloat16': an old one has none; use 'float32'"):
        supported("bfloat16", torch.device("cuda"))
    assert supported("float32", torch.device("cuda")) == "float32"
    assert supported("bfloat16", torch.device("cpu")) == "bfloat16", "a timed step tells whether it is faster"
