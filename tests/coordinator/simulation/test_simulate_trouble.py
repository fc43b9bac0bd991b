"""What becomes of a simulation when something fails: it stops at once, says why, and goes on when that is mended."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from federation_duties import SMALL, quick_params
from simulation_harness import learned, run, small_plan, write_images

from coordinator.cli.simulate import reading
from coordinator.fleet import uploads
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.research.reproduce import outcome
from coordinator.rounds.server_step import ServerStep
from coordinator.simulation import results
from coordinator.simulation.client_pool import SimulatedClients
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import PARTITION, PLAN, Prepared, read_plan
from coordinator.state.starts import record_start
from coordinator.state.store import BlobStore, StateFolder
from coordinator.views.runs import replay
from edge_agent import methods
from edge_agent.core.errors import RunFailed, StateError, TrainingFailed, UsageError
from edge_agent.core.storage import write_atomic
from edge_agent.data import partition
from edge_agent.data.partition import Division
from edge_agent.run_folder.client_state import ClientStateFiles
from edge_agent.wire.blobs import chunks
from edge_agent.wire.messages.up import Report, UpdateManifest

PLACES = {"folder": "sim", "curves": "sim/curves.svg", "report": "sim/report.html"}


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 90)


def stopped_after(plan, folder, jobs):
    """A simulation that was stopped when clients had done so many jobs."""
    with open_simulation(Prepared.of(plan), folder) as simulation:
        done = 0
        while done < jobs:
            done += simulation.step() is not None


def record_in(folder):
    with StateFolder(folder).look() as state:
        return replay(state.journal, "run-0001")


# --- full disks and lost messages ------------------------------------------------------------------------------------


def full_disk(patch, owner, name, after):
    """The call number ``after`` + 1 of a function finds the disk full, and so does each later one."""
    real = getattr(owner, name)
    calls = []

    def full(*args, **options):
        calls.append(1)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **options)

    patch.setattr(owner, name, full)


@pytest.mark.parametrize(
    "owner, name, after",
    [
        (uploads, "sync_folder", 1),
        (chunks.os, "pwrite", 1),
        (ClientStateFiles, "write", 4),
        (BlobStore, "put", 1),
        (ServerStep, "close", 1),
    ],
)
def test_a_full_disk_stops_a_simulation_at_once_and_it_goes_on_when_there_is_room(
    tmp_path, images, monkeypatch, caplog, owner, name, after
):
    plan = small_plan(images, "fedper")
    whole = run(plan, tmp_path / "whole")
    with monkeypatch.context() as patch:
        full_disk(patch, owner, name, after)
        with open_simulation(Prepared.of(plan), tmp_path / "sim") as simulation:
            with pytest.raises(StateError, match=r"[Nn]o space left.*make room.*--resume") as told:
                simulation.finish()
            assert simulation.clock_s < 2.0
    assert str(tmp_path / "sim") in str(told.value)
    assert not [record for record in caplog.records if record.exc_info]
    assert not record_in(tmp_path / "sim").is_over
    assert learned(run(plan, tmp_path / "sim")) == learned(whole)


def test_a_file_that_a_full_disk_does_not_take_is_named(tmp_path, monkeypatch):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def writelines(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.open", lambda *_: Full())
    with pytest.raises(OSError, match="No space left") as told:
        write_atomic(tmp_path / "kept", b"x")
    assert told.value.filename == str(tmp_path / "kept")


@pytest.mark.parametrize("kind", [UpdateManifest, Report])
def test_a_simulation_in_which_nobody_has_anything_to_do_any_more_ends(tmp_path, images, monkeypatch, kind):
    """One word of one client is lost: nobody repeats it, so nothing would happen for a week of simulated time."""
    plan = small_plan(images)
    say = SimulatedClients._reply
    lost = []

    def forgetful(self, client, message):
        if isinstance(message, kind) and client == "c1" and not lost:
            lost.append(message)
        else:
            say(self, client, message)

    monkeypatch.setattr(SimulatedClients, "_reply", forgetful)
    with open_simulation(Prepared.of(plan), tmp_path / "sim") as simulation:
        with pytest.raises(RunFailed, match=r"no client has a job left.* c1.*--resume"):
            while simulation.clock_s < 30.0:
                simulation.step()
    assert not record_in(tmp_path / "sim").is_over
    assert learned(run(plan, tmp_path / "sim")) == learned(run(plan, tmp_path / "whole"))


# --- trouble that passes ---------------------------------------------------------------------------------------------


def test_a_damaged_file_of_a_client_ends_nothing_for_good(tmp_path, images):
    plan = small_plan(images, "fedper", rounds=3)
    whole = run(plan, tmp_path / "whole")
    folder = tmp_path / "sim"
    stopped_after(plan, folder, 4)
    clients = [path.name for path in (folder / "clients").iterdir() if not list(path.rglob("kept-0000002*"))]
    path = next((folder / "clients" / clients[0]).rglob("kept-0000001*"))
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    for _ in range(2):
        with pytest.raises(RunFailed, match=rf"round 2 .*{clients[0]}: StateError: .*with other results.*--resume"):
            run(plan, folder)
    path.write_bytes(content)
    assert learned(run(plan, folder)) == learned(whole)


def test_a_checkpoint_that_was_away_for_a_while_ends_nothing_for_good(tmp_path, images):
    plan = small_plan(images, "fedper")
    whole = run(plan, tmp_path / "whole")
    folder = tmp_path / "sim"
    stopped_after(plan, folder, 4)
    blob = folder / "blobs" / record_in(folder).checkpoint
    blob.rename(tmp_path / "away")
    with pytest.raises(StateError, match=r"cannot be read .*put it back.*--resume"):
        run(plan, folder)
    (tmp_path / "away").rename(blob)
    assert learned(run(plan, folder)) == learned(whole)


def test_a_client_that_cannot_go_on_is_told_in_its_own_words_and_the_run_stays_open(tmp_path, images):
    plan = small_plan(images, params={**SMALL, "lr": 1e30})
    for _ in range(2):
        with pytest.raises(
            TrainingFailed, match=r"round 1 .*c2: TrainingFailed: client 'c2': loss.*start a new run"
        ) as told:
            run(plan, tmp_path / "sim")
        assert "quorum" not in str(told.value)
        assert "--resume" not in str(told.value)
    assert not record_in(tmp_path / "sim").is_over


def test_a_client_that_fails_after_the_last_round_is_missing_there_and_costs_nothing_else(
    tmp_path, images, monkeypatch
):
    def personalize(self, client, received):
        if client.id == "c2":
            raise TrainingFailed("no head for c2")

    monkeypatch.setattr(methods.get("fedper"), "personalize", personalize)
    result = run(small_plan(images, "fedper"), tmp_path / "sim")
    assert result["failed"] == {"c2": "TrainingFailed: no head for c2"}
    assert result["last"]["acc"]["personal"]["clients"] == 2
    assert [one["clients"] for one in result["rounds"]] == [3, 3]
    assert result["best"]["personal"]["clients"] == 3, "a mean over two of three is not compared with those over all"
    assert "missing at the end: client 'c2': TrainingFailed: no head for c2" in reading(result | PLACES)


def test_what_breaks_after_the_last_round_is_told_and_tried_again(tmp_path, images, monkeypatch):
    plan = small_plan(images, "fedper")
    whole = run(plan, tmp_path / "whole")

    def personalize(self, client, received):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(methods.get("fedper"), "personalize", personalize)
        with pytest.raises(RunFailed, match=r"the end of the run has failed at c\d: ZeroDivisionError.*--resume"):
            run(plan, tmp_path / "sim")
    assert learned(run(plan, tmp_path / "sim")) == learned(whole)


# --- journals that are lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "started, words",
    [(False, "the journal is empty, all of its entries are lost"), (True, "knows of no run.*clients.*remove .*--out")],
)
def test_a_simulation_whose_journal_was_lost_does_not_begin_again_over_what_clients_have_kept(
    tmp_path, images, started, words
):
    plan = small_plan(images, "fedper")
    folder = tmp_path / "sim"
    stopped_after(plan, folder, 4)
    for path in folder.glob("journal.db*"):
        path.unlink()
    with SqliteJournal(folder / "journal.db") as journal:  # what is left when all was in a log that a power cut took
        if started:
            record_start(journal, version="0.1.0", boot="later")
    with pytest.raises(StateError, match=words):
        run(plan, folder)
    assert list((folder / "clients").rglob("kept-*"))


def test_a_journal_that_is_older_than_what_clients_have_kept_is_refused(tmp_path, images):
    """A round is forgotten, and with it that all clients are beyond it."""
    plan = small_plan(images, "local", rounds=4)
    folder = tmp_path / "sim"
    stopped_after(plan, folder, 4)
    shutil.copy(folder / "journal.db", tmp_path / "older.db")
    stopped_after(plan, folder, 7)
    shutil.copy(tmp_path / "older.db", folder / "journal.db")
    with pytest.raises(StateError, match=r"is in round 2, .*c0.* state of round [34].*remove .*--out"):
        run(plan, folder)


# --- beginnings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["write_json", "create_engine"])
def test_a_simulation_that_was_killed_while_it_began_begins_anew(tmp_path, images, monkeypatch, name):
    plan = small_plan(images)
    folder = tmp_path / "sim"

    def killed(*_, **__):
        raise KeyboardInterrupt

    place = {
        "write_json": "coordinator.simulation.setup",
        "create_engine": "coordinator.simulation.run",
    }[name]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"{place}.{name}", killed)
        run(plan, folder)
    assert (folder / PARTITION).exists()
    assert learned(run(plan, folder)) == learned(run(plan, tmp_path / "whole"))


def test_a_simulation_that_was_killed_while_its_journal_was_made_begins_anew(tmp_path, images):
    (tmp_path / "sim").mkdir()
    for name in ("lock", "journal.db", "journal.db-journal"):
        (tmp_path / "sim" / name).touch()
    assert run(small_plan(images), tmp_path / "sim")["rounds"]


def test_a_torn_plan_of_a_run_that_never_began_is_written_anew(tmp_path, images):
    plan = small_plan(images)
    folder = tmp_path / "sim"
    with StateFolder(folder).open("headwater simulate"):
        (folder / PLAN).write_text('{"meth')
    assert read_plan(folder) is None
    assert run(plan, folder)["rounds"]
    assert read_plan(folder) == plan


def test_a_torn_plan_of_a_run_says_how_to_get_out_of_that(tmp_path, images):
    stopped_after(small_plan(images), tmp_path / "sim", 1)
    (tmp_path / "sim" / PLAN).write_text('{"meth')
    with pytest.raises(StateError, match=r"damaged.*put it back from a backup, or remove .*sim") as told:
        read_plan(tmp_path / "sim")
    assert "to start afresh" not in str(told.value)


def test_a_partition_that_lies_in_a_folder_is_not_taken_for_a_beginning(tmp_path, images):
    plan = small_plan(images)
    (tmp_path / "mine").mkdir()
    Prepared.of(plan).division.write(tmp_path / "mine" / PARTITION)
    with pytest.raises(UsageError, match="is not empty and holds no simulation"):
        run(plan, tmp_path / "mine")


def test_the_folder_of_a_coordinator_is_not_taken_for_a_beginning(tmp_path, images):
    with StateFolder(tmp_path / "state").open("headwater serve") as state:
        state.journal.append(fact_of("coordinator_started", {}))
    with pytest.raises(UsageError, match="is not empty and holds no simulation"):
        run(small_plan(images), tmp_path / "state")


@pytest.mark.parametrize("place", ["a.txt", "a.txt/sim"])
def test_a_file_is_no_folder_for_a_simulation(tmp_path, images, place):
    (tmp_path / "a.txt").write_text("x")
    for ask in (read_plan, lambda folder: run(small_plan(images), folder)):
        with pytest.raises(UsageError, match=r"a\.txt is a file; choose another --out"):
            ask(tmp_path / place)


# --- what belongs together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rounds": 4}, "rounds 6, now 4"),
        ({"method": "fedavg"}, "method fedper, now fedavg"),
        ({"seed": 5}, "seed 0, now 5"),
        ({"dropout": 0.5}, r"dropout 0\.0, now 0\.5"),
        ({"params": {**SMALL, "lr": 0.5}}, "params"),
    ],
)
def test_a_plan_that_was_changed_is_not_gone_on_with(tmp_path, images, change, words):
    folder = tmp_path / "sim"
    stopped_after(small_plan(images, "fedper", params=SMALL, rounds=6), folder, 1)
    raw = json.loads((folder / PLAN).read_text())
    (folder / PLAN).write_text(json.dumps(raw | change))
    with pytest.raises(UsageError, match=rf"{words}.*restore it.*--out"):
        run(read_plan(folder), folder)


@pytest.mark.parametrize("what", ["fewer clients", "other rows"])
def test_a_partition_that_was_changed_is_not_gone_on_with(tmp_path, images, what):
    plan = small_plan(images, clients=4)
    folder = tmp_path / "sim"
    stopped_after(plan, folder, 1)
    division = Division.read(folder / PARTITION)
    names = list(division.clients)
    shares = list(division.clients.values())
    pairs = zip(names, shares[:3] if what == "fewer clients" else shares[::-1], strict=False)
    division.model_copy(update={"clients": dict(pairs)}).write(folder / PARTITION)
    with (
        pytest.raises(UsageError, match=r"partition\.json .* other samples.*restore it.*--out"),
        open_simulation(Prepared.of(plan, folder / PARTITION), folder),
    ):
        pass


def test_a_run_on_another_machine_is_gone_on_with_data_that_lie_elsewhere(tmp_path, images):
    plan = small_plan(images)
    folder = tmp_path / "sim"
    stopped_after(plan, folder, 1)
    shutil.move(tmp_path / "images.npz", tmp_path / "elsewhere.npz")
    moved = plan.model_copy(update={"data": (f"npz:{tmp_path / 'elsewhere.npz'}",)})
    assert len(run(moved, folder)["rounds"]) == 2


@pytest.mark.parametrize(
    "engine",
    [{"engine": "serial"}, pytest.param({"engine": "pool", "workers": 2}, marks=pytest.mark.slow)],
    ids=lambda to: to["engine"],
)
def test_a_simulation_from_before_a_change_of_defaults_ends_as_it_was_begun(tmp_path, images, monkeypatch, engine):
    """The plan holds only what was given; here the version that began had another width of a tensor by default."""
    kind = methods.get("fedrir")

    class Earlier(kind.Params):
        specific_dim: int = 24

    params = {name: value for name, value in quick_params("fedrir").items() if name != "specific_dim"}
    plan = small_plan(images, "fedrir", params=params)
    folder = tmp_path / "sim"
    with monkeypatch.context() as earlier:
        earlier.setattr(kind, "Params", Earlier)
        whole = run(plan, tmp_path / "whole")
        stopped_after(plan, folder, 4)
    assert kind.Params().specific_dim != 24
    prepared = Prepared.of(read_plan(folder).model_copy(update=engine), folder / PARTITION).shared()
    with open_simulation(prepared, folder) as simulation:
        again = simulation.finish()
    assert again["params"]["specific_dim"] == 24
    assert {**learned(again), "engine": "serial", "workers": 1} == learned(whole)


# --- clients without test samples ------------------------------------------------------------------------------------


def test_best_is_chosen_among_rounds_in_which_all_who_can_be_were_scored(tmp_path, images):
    """One of four clients has no test samples, one is new: the other two make a round whole."""
    prepared = Prepared.of(small_plan(images, "fedper", clients=4, new_clients=1, rounds=3, evaluate_after=True))
    rows = {name: (np.array(own.train), np.array(own.test)) for name, own in prepared.division.clients.items()}
    rows["c1"] = (rows["c1"][0], np.array([], np.int64))
    division = partition.divided("iid", {}, prepared.division.pool, rows)
    with open_simulation(replace(prepared, division=division), tmp_path / "sim") as simulation:
        result = simulation.finish()
    assert result["scored_clients"] == 2
    assert [one["acc"]["after"]["clients"] for one in result["rounds"]] == [2, 2, 2]
    assert "after" in result["best"]
    assert outcome._after(result, "clients_mean") == 100 * result["rounds"][-1]["acc"]["after"]["clients_mean"]
    assert results.best_of({**result, "last": {"rounds_done": 3, "acc": {}}})["after"] == result["best"]["after"]


def test_a_round_whose_updates_are_all_refused_advises_what_helps_in_a_simulation(tmp_path, images, monkeypatch):
    kind = methods.get("fedavg")
    monkeypatch.setattr(kind, "objection", lambda *_: "a test refuses it", raising=True)
    with pytest.raises(RunFailed) as failed:
        run(small_plan(images), tmp_path / "sim")
    assert "a test refuses it" in str(failed.value)
    assert "mend what the reason names in the method or the data" in str(failed.value)
    assert "deadline_s" not in str(failed.value), "nobody waits for a deadline here, and no agent can be repaired"
