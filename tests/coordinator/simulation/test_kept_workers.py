"""Worker processes that stay between simulations: the same bits, replaced where something of before could matter."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from simulation_harness import write_images

from coordinator import simulate, workers
from coordinator.simulation.engines.kept_workers import KeptWorkers, mark_of
from coordinator.simulation.memory_watch import private_bytes
from edge_agent.core.errors import RunFailed, TrainingFailed, UsageError

OWN = """
from edge_agent.methods.fedavg import FedAvg

class Mine(FedAvg):
    def local_update(self, client, received):
        print("at work in round", client.round, flush=True)
        {line}
        return super().local_update(client, received)
"""


@pytest.fixture
def settings(tmp_path):
    images = write_images(tmp_path / "images.npz", 90)
    return {"data": images, "clients": 2, "rounds": 1, "local": False, "params": {"batch_size": 8}}


def encoder_of(result):
    return result.summary["encoder_sha256"]


def test_runs_of_several_methods_and_data_share_the_workers_and_have_the_bits_of_engine_serial(tmp_path, settings):
    other = {**settings, "data": write_images(tmp_path / "other.npz", 60, names=("x", "y"), seed=1)}
    cases = [("fedavg", settings), ("fedper", other), ("fedbn", settings)]
    alone = [simulate(method, **fields, engine="serial") for method, fields in cases]
    with workers(2) as pool:
        kept = [simulate(method, **fields, pool=pool) for method, fields in cases]
        assert pool.started == 2
    assert list(map(encoder_of, kept)) == list(map(encoder_of, alone))
    assert [result.clients for result in kept] == [result.clients for result in alone]
    assert {result.summary["engine"] for result in kept} == {"pool"}


def test_nothing_stays_after_the_context(settings):
    with workers(1) as pool:
        simulate("fedavg", **settings, pool=pool)
        (worker,) = pool._idle
        logs = worker.log.parent
        assert worker.child.is_running
        assert logs.is_dir()
    assert not worker.child.is_running
    assert not logs.exists()
    with pytest.raises(UsageError, match=r"its workers have ended; make new ones with coordinator\.workers\(1\)"):
        simulate("fedavg", **settings, pool=pool)


def test_cells_of_a_notebook_share_workers_without_a_context(settings):
    pool = workers(1)
    simulate("fedavg", **settings, pool=pool)
    simulate("fedavg", **settings, pool=pool)
    assert repr(pool) == "KeptWorkers(1: 1 started so far)"
    (worker,) = pool._idle
    pool.close()
    assert not worker.child.is_running
    assert repr(pool) == "KeptWorkers(1: ended)"
    forgotten = workers(1)
    simulate("fedavg", **settings, pool=forgotten)
    (worker,) = forgotten._idle
    del forgotten
    gc.collect()
    assert not worker.child.is_running


def test_a_worker_that_was_killed_is_replaced(settings):
    with workers(1) as pool:
        first = simulate("fedavg", **settings, pool=pool)
        os.kill(pool._idle[0].child.pid, signal.SIGKILL)
        pool._idle[0].child.wait()
        again = simulate("fedavg", **settings, pool=pool)
        assert pool.started == 2
    assert encoder_of(again) == encoder_of(first)


def test_a_worker_that_holds_much_memory_is_not_kept(settings):
    with KeptWorkers(1, most_bytes=1) as pool:
        simulate("fedavg", **settings, pool=pool)
        assert pool._idle == []
        simulate("fedavg", **settings, pool=pool)
        assert pool.started == 2
    assert private_bytes(os.getpid()) > 1 << 20
    assert private_bytes(1 << 30) == 0


def test_a_file_that_has_changed_is_loaded_by_a_new_worker(tmp_path, settings):
    own = tmp_path / "mine.py"
    own.write_text(OWN.format(line="pass"))
    with workers(1) as pool:
        simulate(f"{own}:Mine", **settings, pool=pool)
        simulate(f"{own}:Mine", **settings, pool=pool)
        assert pool.started == 1
        assert str(own) in dict(mark[:2] for mark in pool._idle[0].own_files)
        own.write_text(OWN.format(line="raise ValueError('my mistake')"))
        # This process has loaded the file before; the new worker reads it as it is now.
        with pytest.raises((RunFailed, TrainingFailed), match="my mistake") as caught:
            simulate(f"{own}:Mine", **settings, pool=pool)
        assert pool.started == 2
        # The file of a kept worker goes with it, so that no message names it; the error has the traceback itself.
        assert "the whole traceback is in" not in str(caught.value)
    assert mark_of(own.with_name("gone.py")) == (str(own.with_name("gone.py")), 0, 0)


LATE = """
import sys
from pathlib import Path
from edge_agent.methods.fedavg import FedAvg

class Late(FedAvg):
    def local_update(self, client, received):
        sys.path.insert(0, str(Path(__file__).parent))
        from late_helper import ROUNDS
        client.model.encoder.requires_grad_(ROUNDS > 0)
        return super().local_update(client, received)
"""


def test_a_file_that_is_imported_at_work_counts_too(tmp_path, settings):
    own = tmp_path / "late.py"
    own.write_text(LATE)
    helper = tmp_path / "late_helper.py"
    helper.write_text("ROUNDS = 1\n")
    with workers(1) as pool:
        simulate(f"{own}:Late", **settings, pool=pool)
        assert str(helper) in dict(mark[:2] for mark in pool._idle[0].own_files)
        helper.write_text("ROUNDS = 1  # changed\n")
        simulate(f"{own}:Late", **settings, pool=pool)
        assert pool.started == 2


def test_an_interrupted_run_leaves_no_worker_at_its_job(settings):
    def stop(job):
        raise KeyboardInterrupt

    with workers(2) as pool:
        with pytest.raises(KeyboardInterrupt):
            simulate("fedavg", **{**settings, "rounds": 3}, pool=pool, watch=stop)
        result = simulate("fedavg", **settings, pool=pool)
    assert encoder_of(result) == encoder_of(simulate("fedavg", **settings, engine="serial"))


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_an_engine_without_processes_is_refused(settings, engine):
    with workers(1) as pool, pytest.raises(UsageError, match=f"engine = '{engine}' uses no worker processes"):
        simulate("fedavg", **settings, engine=engine, pool=pool)


def test_there_is_at_least_one():
    with pytest.raises(UsageError, match="workers: 0, expected 1 or more"):
        workers(0)
    assert workers().count >= 1
