from __future__ import annotations

import os

import numpy as np
import pytest

from edge_agent.core.errors import StateError
from edge_agent.run_folder.client_state import GENERATIONS, LAST_ROUND, ClientStateFiles
from edge_agent.run_folder.layout import remove_ended_runs


def arrays(value):
    return {"head.weight": np.full((2, 3), value, np.float32)}, {"n": np.array([value], np.int64)}


@pytest.fixture
def files(tmp_path):
    return ClientStateFiles(tmp_path / "runs" / "run-0001")


def value_before(files, number):
    personal, memory = files.before(number)
    if not personal:
        return None
    assert personal["head.weight"].shape == (2, 3)
    assert memory["n"] == personal["head.weight"][0, 0]
    return int(memory["n"][0])


def test_a_round_starts_from_the_newest_earlier_one(files):
    assert value_before(files, 1) is None
    files.write(1, *arrays(10))
    files.write(2, *arrays(20))
    assert value_before(files, 2) == 10
    assert value_before(files, 3) == 20


def test_doing_a_round_again_starts_from_the_same_place(files):
    """Round 2 is done, the update is lost, round 2 is asked for again: not from its own result."""
    files.write(1, *arrays(10))
    files.write(2, *arrays(20))
    assert value_before(files, 2) == 10
    files.write(2, *arrays(20))
    assert value_before(files, 2) == 10


def test_missed_rounds_are_bridged(files):
    files.write(3, *arrays(30))
    assert value_before(files, 50) == 30
    assert value_before(files, 3) is None


def test_only_the_last_generations_stay_on_disk(files):
    for number in range(1, 8):
        files.write(number, *arrays(number))
    assert len(list(files.folder.glob("kept-*"))) == GENERATIONS
    assert value_before(files, 7) == 6


def test_names_with_dots_and_both_kinds_come_back_apart(files):
    files.write(1, {"memory.x": np.zeros(2), "a.b.c": np.ones(1)}, {"personal.y": np.ones(3)})
    personal, memory = files.before(2)
    assert set(personal) == {"memory.x", "a.b.c"}
    assert set(memory) == {"personal.y"}


def test_a_damaged_file_is_said_to_be_damaged_and_what_to_do(files):
    files.write(1, *arrays(1))
    files.write(2, *arrays(2))
    newest = max(files.folder.iterdir())
    newest.write_bytes(newest.read_bytes()[:-5])
    with pytest.raises(StateError, match=r"damaged .* remove it to go on from an earlier round, .* other results"):
        files.before(3)
    newest.unlink()
    assert value_before(files, 3) == 1


def test_what_stood_after_rounds_that_are_kept_stays(tmp_path):
    """Every third round: a client that was not in round 3 stood there as it came out of round 2."""
    files = ClientStateFiles(tmp_path, keep_every=3)
    for number in (1, 2, 5, 6, 7, 8, 11, 12, 13, 14):
        files.write(number, *arrays(number))
    assert [value_before(files, kept + 1) for kept in (3, 6, 9, 12)] == [2, 6, 8, 12]
    assert sorted(int(path.stem[-7:]) for path in files.folder.glob("kept-*")) == [2, 6, 8, 12, 13, 14]


@pytest.mark.parametrize("last", [10, LAST_ROUND])
def test_a_client_that_is_set_back_forgets_what_it_kept_of_later_rounds(files, last):
    """Else round 4 would be the oldest of three and go at once, and round 5 would start from nothing."""
    for number in (9, last):
        files.write(number, *arrays(number % 100))
    files.write(4, *arrays(4))
    assert files.rounds() == [4]
    files.write(5, *arrays(5))
    assert files.rounds() == [4, 5]
    assert value_before(files, 5) == 4


def test_what_was_kept_of_rounds_that_were_set_back_goes_and_what_stood_before_stays(tmp_path):
    files = ClientStateFiles(tmp_path, keep_every=3)
    for number in (1, 2, 3, 4, 5, 6, 7, 8):
        files.write(number, *arrays(number))
    files.write(5, *arrays(50))
    assert files.rounds() == [3, 5]
    assert value_before(files, 6) == 50


def test_only_the_newest_runs_stay_and_the_one_under_way_among_them(tmp_path):
    for age, run in enumerate(["run-0004", "run-0001", "run-0003", "run-0002"]):
        (tmp_path / run).mkdir()
        (tmp_path / run / "kept-0000001.safetensors").write_bytes(b"x")
        os.utime(tmp_path / run, (1000 - age, 1000 - age))
    assert remove_ended_runs(tmp_path, "run-0005", 3) == ["run-0002", "run-0003"]
    assert remove_ended_runs(tmp_path, "run-0001", 1) == ["run-0004"]
    assert [path.name for path in tmp_path.iterdir()] == ["run-0001"]
    assert remove_ended_runs(tmp_path / "nowhere", "run-0001", 1) == []
