"""Logs that are files, read by other programs: complete, once, and never half a line."""

from __future__ import annotations

import contextlib
import json

import pandas as pd
import pytest
from logged_runs import SETTINGS, files_limited_to, kill_in_round_3, log_simulation, losses, only, row_of
from simulation_harness import small_plan

import coordinator
from coordinator.loggers.choice import LOGGERS
from coordinator.loggers.log_files import FolderLogger, LineFile
from coordinator.loggers.records import RunDescription, RunEnd, clients_table
from coordinator.loggers.run_logs import RunLogs, open_parent
from coordinator.simulation.logged import log_finished
from edge_agent.core.errors import RunFailed, StateError

FILE_LOGS = ("csv", "jsonl", "parquet", "tensorboard")


def logged_rounds(name, folder):
    """The rounds that a log has in the folder of a run, as other programs read it."""
    if name == "csv":
        return list(pd.read_csv(folder / "rounds.csv")["round"])
    if name == "parquet":
        return list(pd.read_parquet(folder / "rounds.parquet")["round"])
    if name == "jsonl":
        lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
        return [line["round"] for line in lines if line["kind"] == "round"]
    return [point.step for point in event_files(folder).Scalars("loss")]


def event_files(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder)).Reload()


def test_the_tables_have_the_figures_of_the_result(tmp_path, images):
    pytest.importorskip("pyarrow")
    rows = []
    result = coordinator.simulate(
        "fedper", data=images, out=tmp_path / "sim", log=["csv", "jsonl", "parquet"], on_round=rows.append,
        name="Bäche: first", tags={"goal": "try"}, note="nothing", evaluate_every=2, **SETTINGS,
    )  # fmt: skip
    logs = tmp_path / "sim" / "logs"
    by_csv = pd.read_csv(only(logs / "csv") / "rounds.csv")
    by_parquet = pd.read_parquet(only(logs / "parquet") / "rounds.parquet")
    pd.testing.assert_frame_equal(by_csv, by_parquet, check_dtype=False)
    assert list(by_csv["round"]) == [1, 2, 3, 4]
    assert list(by_csv["bytes_up"]) == [figures["bytes_up"] for figures in result.summary["rounds"]]
    evaluated = by_csv[by_csv["acc.personal.mean"].notna()]
    means = {f["round"]: f["acc"]["personal"]["clients_mean"] for f in result.summary["rounds"] if f["acc"]}
    assert dict(zip(evaluated["round"], evaluated["acc.personal.mean"], strict=True)) == means
    assert by_csv["acc.global.mean"].isna().all(), "a column for each scope, so that all runs have the same"

    reported = {
        (row.round, c, name): v for row in rows for c, them in row.per_client.items() for name, v in them.items()
    }
    for table in (
        pd.read_csv(only(logs / "csv") / "clients.csv"),
        pd.read_parquet(only(logs / "parquet") / "clients.parquet"),
    ):
        assert {(one.round, one.client, one.metric): one.value for one in table.itertuples()} == reported

    lines = [json.loads(line) for line in (only(logs / "jsonl") / "run.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", *["round"] * 4, "end"]
    assert lines[0]["name"] == "Bäche: first"
    assert lines[0]["tags"] == {"goal": "try"}
    assert lines[0]["params"]["params.lr"] == result.summary["params"]["lr"]
    assert [line["clients"] for line in lines[1:-1]] == [row.per_client for row in rows]
    assert lines[-1]["metrics"]["last.acc.personal.mean"] == result.summary["last"]["acc"]["personal"]["clients_mean"]

    final = pd.read_csv(only(logs / "csv") / "final_clients.csv").set_index("client")["acc.personal"]
    assert dict(final) == {client: scores["acc.personal"] for client, scores in result.clients.items()}
    assert list(final) == sorted(final), "the worst first"
    pd.testing.assert_series_equal(
        pd.read_parquet(only(logs / "parquet") / "final_clients.parquet").set_index("client")["acc.personal"], final,
        check_index_type=False,
    )  # fmt: skip
    described = json.loads((only(logs / "csv") / "run.json").read_text())
    assert (described["status"], described["rounds_done"], described["note"]) == ("finished", 4, "nothing")
    for name in ("report.html", "curves.svg", "result.json"):
        assert (only(logs / "csv") / name).exists()
    assert [one["is_complete"] for one in result.summary["logs"]] == [True] * 3
    assert json.loads((tmp_path / "sim" / "result.json").read_text()) == result.summary


def test_a_run_that_is_over_is_logged_from_its_folder_without_its_data(tmp_path, images):
    """The same files as the run itself has written, though the samples are gone."""
    logs = ("csv", "jsonl")
    plan = small_plan(
        images, "fedper", clients=4, new_clients=1, rounds=3, local=False, name="it", tags={"a": "b"}, log=logs
    )
    folder = tmp_path / "sim"
    log_simulation(plan, folder)
    (tmp_path / "images.npz").unlink()
    names = [f"{name}:{tmp_path / 'again'}/{name}" for name in logs]
    outcomes = log_finished(folder, RunLogs.open(names, None), tags={"more": "tags"})
    assert [(outcome.rounds, outcome.is_complete) for outcome in outcomes] == [(3, True), (3, True)]
    for name in ("rounds.csv", "clients.csv", "final_clients.csv", "report.html"):
        written = only(folder / "logs" / "csv") / name
        assert (only(tmp_path / "again" / "csv") / name).read_bytes() == written.read_bytes()
    lines, again = (
        [json.loads(line) for line in (only(base / "jsonl") / "run.jsonl").read_text().splitlines()]
        for base in (folder / "logs", tmp_path / "again")
    )
    assert again[0].pop("tags") == {"a": "b", "more": "tags"}
    assert lines[0].pop("tags") == {"a": "b"}
    assert again == lines
    with pytest.raises(StateError, match="holds no simulation that is over"):
        log_finished(tmp_path / "again", RunLogs.open(None, None))


def test_a_run_that_is_killed_in_a_round_and_resumed_has_each_row_once_and_no_torn_line(tmp_path, images):
    pytest.importorskip("pyarrow")
    pytest.importorskip("tensorboard")
    plan = small_plan(images, "fedper", rounds=4, local=False, log=FILE_LOGS)
    folder = tmp_path / "sim"
    kill_in_round_3(plan, folder)
    runs = {name: only(folder / "logs" / name) for name in FILE_LOGS}
    assert [logged_rounds(name, run) for name, run in runs.items()] == [[1, 2]] * 4
    result = log_simulation(plan, folder)
    assert [logged_rounds(name, run) for name, run in runs.items()] == [[1, 2, 3, 4]] * 4
    lines = [json.loads(line) for line in (runs["jsonl"] / "run.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", *["round"] * 4, "end"]
    assert [line["metrics"]["loss"] for line in lines[1:-1]] == losses(result)
    clients = pd.read_csv(runs["csv"] / "clients.csv")
    assert not clients.duplicated(["round", "client", "metric"]).any()
    assert len(clients) == 4 * 3 * 2, "four rounds, three clients, loss and accuracy"
    assert len(list(runs["tensorboard"].glob("events.out.tfevents.*"))) == 2, "one of each process"
    assert [point.value for point in event_files(runs["tensorboard"]).Scalars("loss")] == pytest.approx(losses(result))


@pytest.mark.parametrize("name", FILE_LOGS)
def test_what_a_full_disk_has_refused_is_there_once_when_there_is_room_again(tmp_path, name):
    pytest.importorskip({"parquet": "pyarrow", "tensorboard": "tensorboard"}.get(name, "csv"))
    log = LOGGERS.load_class(name, FolderLogger)(str(tmp_path / "logs"))
    log.check()
    log.begin(RunDescription("uid", "name", tmp_path))
    log.log_round(row_of(1))
    folder = only(tmp_path / "logs")
    largest = max(path.stat().st_size for path in folder.iterdir())
    page = tmp_path / "report.html"
    page.write_bytes(bytes(10 * largest + 10_000))
    artefacts = {page.name: page}
    end = RunEnd("finished", round=2, figures={"last": 0.5}, clients={"a": {"acc.local": 0.5}}, artefacts=artefacts)
    with files_limited_to(largest + 5), pytest.raises(OSError, match="File too large"):
        log.log_round(row_of(2))
    log.log_round(row_of(2))
    with files_limited_to(page.stat().st_size - 1), pytest.raises(OSError, match="File too large"):
        log.end(end)
    log.end(end)
    assert logged_rounds(name, folder) == [1, 2]
    assert (folder / page.name).read_bytes() == page.read_bytes()
    if name == "jsonl":
        assert (folder / "run.jsonl").read_text().count('"kind":"end"') == 1
    if name == "tensorboard":
        (final,) = event_files(folder).Scalars("last")
        assert (final.step, final.value) == (2, 0.5)
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_a_run_that_fails_says_so_in_its_logs_and_ends_well_when_it_is_resumed(tmp_path, images):
    folder = tmp_path / "sim"

    def broken(row):
        raise ValueError("no")

    plan = small_plan(images, "fedper", local=False, log=("csv", "jsonl"))
    for on_round, status in ((broken, "failed"), (None, "finished")):
        fails = pytest.raises(RunFailed, match="ValueError") if on_round else contextlib.nullcontext()
        with fails:
            log_simulation(plan, folder, on_round)
        described = json.loads((only(folder / "logs" / "csv") / "run.json").read_text())
        assert described["status"] == status
        assert ("ValueError" in described["reason"]) == (status == "failed")


def test_runs_of_a_parent_are_in_its_folder_and_two_of_one_name_stay_apart(tmp_path, images):
    parent = open_parent("jsonl", RunDescription("a parent", "three seeds", tmp_path / "parent"))
    for seed in range(2):
        coordinator.simulate(
            "fedper", data=images, seed=seed, out=tmp_path / f"sim{seed}", log=parent.child, name="the same",
            **{**SETTINGS, "rounds": 1},
        )  # fmt: skip
    (outcome,) = parent.end(RunEnd("finished", figures={"acc.personal.mean": 0.5}))
    assert outcome.is_complete
    folder = only(tmp_path / "parent" / "logs" / "jsonl")
    assert folder.name.startswith("three-seeds-")
    children = sorted(path for path in folder.iterdir() if path.is_dir())
    assert [path.name.rpartition("-")[0] for path in children] == ["the-same", "the-same"]
    seeds = set()
    for child in children:
        lines = [json.loads(line) for line in (child / "run.jsonl").read_text().splitlines()]
        seeds.add(lines[0]["params"]["seed"])
        assert json.loads((child / "run.json").read_text())["parent"] == {"uid": "a parent", "name": "three seeds"}
    assert seeds == {0, 1}
    assert json.loads((folder / "run.json").read_text())["figures"] == {"acc.personal.mean": 0.5}


def test_a_batch_that_a_full_disk_took_in_part_is_cut_off_before_it_is_tried_again(tmp_path):
    file = LineFile(tmp_path / "lines", b"head\n")
    with files_limited_to(6), pytest.raises(OSError, match="File too large"):
        file.append(b"one\n")
    assert (tmp_path / "lines").read_text() == "head\no"
    file.append(b"one\n")
    file.append(b"two\n")
    assert (tmp_path / "lines").read_text() == "head\none\ntwo\n"


def test_parquet_files_are_replaced_seldom_and_are_whole_at_the_end(tmp_path):
    pytest.importorskip("pyarrow")
    from coordinator.loggers.parquet_log import ParquetLogger

    log = ParquetLogger(str(tmp_path))
    log.check()
    writes = []
    write = log._write
    log._write = lambda: (writes.append(1), write())
    log.begin(RunDescription("uid", "name", tmp_path))
    for number in range(1, 401):
        log.log_round(row_of(number))
    assert len(writes) < 100
    log.end(RunEnd("finished", round=400, clients={"a": {"acc.local": 0.5}, "b": {}}))
    rounds = pd.read_parquet(only(tmp_path) / "rounds.parquet")
    assert list(rounds["acc.global.mean"]) == [number / 400 for number in range(1, 401)]
    assert list(pd.read_parquet(only(tmp_path) / "clients.parquet")["value"]) == list(range(1, 401))


def test_the_table_of_clients_begins_with_the_worst_and_ends_with_those_without_a_figure():
    end = RunEnd(
        "finished", clients={"a": {"acc.personal": 0.5}, "b": {}, "c": {"acc.personal": 0.25, "acc.local": 1.0}}
    )
    assert clients_table(end) == (
        ["client", "acc.local", "acc.personal"],
        [["c", 1.0, 0.25], ["a", None, 0.5], ["b", None, None]],
    )
