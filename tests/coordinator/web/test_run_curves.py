"""Figures of runs by round: computed over all agents, read as the file grows, whatever is in it."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from coordinator.web.run_curves import RunCurves


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def line(number, acc, **more):
    record = {"kind": "round", "round": number, "agents": sorted(acc), "acc": {"personal": acc}, **more}
    return json.dumps(record) + "\n"


def test_mean_spread_and_worst_tenth_by_hand(path):
    acc = {f"a{number}": number / 20 for number in range(20)}  # 0, 0.05 ... 0.95
    path.write_text(line(1, acc))
    curves = RunCurves(path)
    assert not curves.read()
    spread = curves.points[1].acc["personal"]
    assert spread.mean == pytest.approx(0.475)
    assert spread.worst == pytest.approx(0.025)  # of the two lowest
    assert (spread.low, spread.high) == pytest.approx(tuple(np.percentile(list(acc.values()), (10, 90))))
    assert spread.agents == 20


def test_file_is_read_on_as_it_grows_and_an_unfinished_line_is_waited_for(path):
    whole = line(1, {"a": 0.5}) + line(2, {"a": 0.6})
    path.write_text(whole[:-10])
    curves = RunCurves(path)
    curves.read()
    assert sorted(curves.points) == [1]
    path.write_text(whole)
    curves.read()
    assert sorted(curves.points) == [1, 2]
    assert list(curves.of_agent("a")) == [(1, None, 0.5), (2, None, 0.6)]
    assert curves.newest() == {"a": (None, 0.6)}


def test_small_reads_give_what_one_large_read_gives(path):
    path.write_text("".join(line(number, {f"a{n}": n / 9 for n in range(9)}) for number in range(1, 40)))
    whole = RunCurves(path)
    pieces = RunCurves(path)
    whole.read()
    while pieces.read(100):
        pass
    assert pieces.rounds() == whole.rounds()
    assert list(pieces.of_agent("a3")) == list(whole.of_agent("a3"))


@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "[]",
        "null",
        '"x"',
        "\x00",
        '{"kind":"round"}',
        '{"kind":"round","round":"x"}',
        '{"kind":"round","round":-1}',
        '{"kind":"round","round":1e300}',
        '{"kind":"round","round":2,"acc":5,"loss":[],"rejected":{"a":1},"missing":7}',
        '{"kind":"round","round":2,"acc":{"personal":{"a":"x","b":1e999}},"rejected":[1,{"agent":5}]}',
        "[" * 5000,
    ],
)
def test_lines_of_another_form_cost_themselves_alone(path, damaged):
    path.write_text(line(1, {"a": 0.5}) + damaged + "\n" + line(3, {"a": 0.7}))
    curves = RunCurves(path)
    curves.read()
    assert {1, 3} <= set(curves.points)
    assert curves.points[3].acc["personal"].mean == 0.7


def test_another_file_in_its_place_is_read_from_its_beginning(path):
    path.write_text(line(1, {"a": 0.5}) + line(2, {"a": 0.6}))
    curves = RunCurves(path)
    curves.read()
    path.unlink()
    path.write_text(line(1, {"b": 0.1}))
    curves.read()
    assert sorted(curves.points) == [1]
    assert curves.newest() == {"b": (None, 0.1)}


def test_incidents_name_round_agent_and_reason(path):
    rejected = [{"agent": "x", "reason": "NaN"}]
    left_out = [{"agent": "y", "reason": "its policy"}]
    path.write_text(line(4, {}, rejected=rejected, left_out=left_out, missing=["z"], bounded={"w": "clipped (x 0.01)"}))
    curves = RunCurves(path)
    curves.read()
    assert {(one.agent, one.what) for one in curves.incidents} == {
        ("x", "rejected: NaN"),
        ("y", "left out: its policy"),
        ("z", "no update before the round closed"),
        ("w", "clipped (x 0.01)"),
    }
    point = curves.points[4]
    assert (point.rejected, point.missing, point.acc) == (1, 1, {})


def test_missing_file_is_a_run_without_rounds(path):
    curves = RunCurves(path)
    assert not curves.read()
    assert curves.rounds() == []


def test_figures_of_single_agents_are_bounded_and_means_stay(path, monkeypatch):
    monkeypatch.setattr("coordinator.web.run_curves.MOST_POINTS", 5)
    path.write_text("".join(line(number, {"a": 0.5, "b": 0.7}) for number in range(1, 5)))
    curves = RunCurves(path)
    curves.read()
    assert not curves.is_for_agents
    assert curves.newest() == {}
    assert curves.points[4].acc["personal"].mean == pytest.approx(0.6)


def test_two_readers_of_a_growing_file_count_each_round_once(path):
    lines = [line(number, {f"a{n}": 0.5 for n in range(20)}) for number in range(1, 401)]
    path.write_text("")
    curves = RunCurves(path)
    over = threading.Event()

    def read():
        while not over.is_set():
            curves.read(2000)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    with path.open("a") as file:
        for one in lines:
            file.write(one)
            file.flush()
    over.set()
    for reader in readers:
        reader.join()
    while curves.read():
        pass
    assert (len(curves.points), curves.damaged, curves.version) == (400, 0, path.stat().st_size)
    assert len(list(curves.of_agent("a3"))) == 400


def test_nothing_changes_while_a_page_holds_the_lock(path):
    lock = threading.RLock()
    path.write_text("".join(line(number, {"a": 0.5}) for number in range(1, 50)))
    curves = RunCurves(path, lock)
    reader = threading.Thread(target=curves.read)
    with lock:
        reader.start()
        reader.join(0.2)
        assert (curves.points, curves.version) == ({}, 0)
    reader.join()
    assert len(curves.points) == 49
