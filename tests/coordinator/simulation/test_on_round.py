"""Functions that see each closed round of a simulation: what they get, how they end a run, and what their errors do."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import fmean

import pytest
from simulation_harness import learned, run, small_plan, write_images

import coordinator
from coordinator import StopRun
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from coordinator.views.runs import replay
from edge_agent import methods
from edge_agent.core.errors import RunFailed


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 90)


def watched(plan, folder, on_round, *, steps=None):
    """The result of a simulation whose rounds a function sees; None where it is left after so many jobs."""
    with open_simulation(Prepared.of(plan), folder) as simulation:
        simulation.observer.add(on_round)
        if steps is None:
            return simulation.finish()
        simulation.observer.replay(replay(simulation.state.journal, simulation.run).round)
        while steps:
            steps -= simulation.step() is not None
    return None


def stop_after(number, seen=None):
    """A function that ends a run after a round, and keeps the rows that it gets."""

    def on_round(row):
        if seen is not None:
            seen.append(row)
        if row.round == number:
            raise StopRun(f"round {number} is enough")

    return on_round


def test_each_closed_round_is_seen_once_with_the_figures_of_the_result(tmp_path, images):
    rows = []
    result = watched(small_plan(images, "fedper", rounds=3, evaluate_after=True), tmp_path / "sim", rows.append)
    assert [(row.round, row.rounds, row.is_replayed) for row in rows] == [(1, 3, False), (2, 3, False), (3, 3, False)]
    for row, figures in zip(rows, result["rounds"], strict=True):
        assert (row.loss, row.seconds, row.bytes_up, row.bytes_down) == tuple(
            figures[name] for name in ("loss", "seconds", "bytes_up", "bytes_down")
        )
        assert row.acc.keys() == {"personal", "after"}
        for scope, name in (("personal", "acc.personal"), ("after", "acc.after.personal")):
            scores = [reported[name] for reported in row.per_client.values()]
            assert row.acc[scope].mean == pytest.approx(fmean(scores), abs=1e-6)
            assert row.acc[scope].worst_tenth == pytest.approx(min(scores), abs=1e-6)
        assert row.accuracy == row.acc["personal"].mean == figures["acc"]["personal"]["clients_mean"]
        assert row.loss == fmean(reported["loss"] for reported in row.per_client.values())
        assert row.metrics()["acc.personal.mean"] == row.accuracy
    assert result["stopped"] is None


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_a_run_that_is_stopped_ends_as_one_of_so_many_rounds(tmp_path, images, method):
    """With new clients, who wait for the last round: they are evaluated, too."""
    shorter = run(small_plan(images, method, clients=4, new_clients=1, rounds=2), tmp_path / "shorter")
    plan = small_plan(images, method, clients=4, new_clients=1, rounds=5)
    result = watched(plan, tmp_path / "sim", stop_after(2))
    assert result["stopped"] == "round 2 is enough"
    assert result["last"] == shorter["last"]
    assert "new" in result["last"]["acc"]
    assert learned(result)["rounds"] == learned(shorter)["rounds"]
    assert result["encoder_sha256"] == shorter["encoder_sha256"]


@pytest.mark.parametrize("jobs", [6, 7, 8])
def test_a_run_that_was_stopped_and_killed_meanwhile_ends_there_also_without_the_function(tmp_path, images, jobs):
    """Killed after the last job of round 2, and while clients evaluate the end, which is three jobs."""
    plan = small_plan(images, "fedper", rounds=5)
    whole = watched(plan, tmp_path / "whole", stop_after(2))
    folder = tmp_path / "sim"
    watched(plan, folder, stop_after(2), steps=jobs)
    again = stop_after(2) if jobs == 6 else lambda _: None  # whether the request was journaled is open at the sixth
    assert learned(watched(plan, folder, again)) == learned(whole)


def test_a_run_that_is_resumed_shows_its_earlier_rounds_again_before_the_others(tmp_path, images):
    plan = small_plan(images, "fedper", rounds=4)
    whole = []
    watched(plan, tmp_path / "whole", whole.append)
    first, second = [], []
    watched(plan, tmp_path / "sim", first.append, steps=8)
    assert [row.round for row in first] == [1, 2]
    watched(plan, tmp_path / "sim", second.append)
    assert [(row.round, row.is_replayed) for row in second] == [(1, True), (2, True), (3, False), (4, False)]
    timeless = {"seconds": None, "bytes_up": None, "bytes_down": None, "is_replayed": None}
    assert [replace(row, **timeless) for row in second] == [replace(row, **timeless) for row in whole]
    third = []
    watched(plan, tmp_path / "sim", third.append)
    assert third == [replace(row, is_replayed=True) for row in second], "a run that is over shows all of them"


def test_a_request_while_a_round_is_open_waits_for_its_end(tmp_path, images):
    """A function that was not there before asks for the end at round 1, in a run that has opened round 2."""
    plan = small_plan(images, "fedper", rounds=4)
    watched(plan, tmp_path / "sim", lambda _: None, steps=4)
    result = watched(plan, tmp_path / "sim", stop_after(1))
    assert (result["last"]["rounds_done"], result["stopped"]) == (2, "round 1 is enough")


def test_a_request_after_the_last_round_changes_nothing(tmp_path, images):
    plan = small_plan(images, "fedper")
    assert watched(plan, tmp_path / "sim", stop_after(2))["stopped"] is None


def test_all_functions_see_the_round_after_which_one_ends_the_run(tmp_path, images):
    rows = []
    with open_simulation(Prepared.of(small_plan(images, rounds=3)), tmp_path / "sim") as simulation:
        simulation.observer.add(stop_after(1))
        simulation.observer.add(rows.append)
        simulation.finish()
    assert [row.round for row in rows] == [1]


def broken_function(row):
    if row.round == 2:
        raise ZeroDivisionError("in the user's own words")


def test_a_function_that_fails_is_named_and_the_run_can_be_resumed(tmp_path, images):
    plan = small_plan(images, "fedper", rounds=3)
    whole = run(plan, tmp_path / "whole")
    for _ in range(2):  # it fails at the same round again, which is shown again
        with pytest.raises(
            RunFailed,
            match=r"on_round function 'broken_function' has failed after round 2: ZeroDivisionError: in the user's own "
            r"words .*test_on_round.py, line \d+, in broken_function.*--resume",
        ) as told:
            watched(plan, tmp_path / "sim", broken_function)
        assert isinstance(told.value.__cause__, ZeroDivisionError)
    assert learned(run(plan, tmp_path / "sim")) == learned(whole)


def test_a_method_with_a_result_after_its_last_round_alone_is_not_ended_before(tmp_path, images):
    assert methods.create("spherefed").needs_last_round
    plan = small_plan(images, "spherefed", rounds=3)
    with pytest.raises(RunFailed, match=r"round 1 is enough.*'spherefed' has a result only after its last round"):
        watched(plan, tmp_path / "sim", stop_after(1))


def test_the_front_door_takes_a_function_and_names_the_end(tmp_path, images):
    rows = []
    result = coordinator.simulate(
        "fedper", data=images, clients=3, rounds=5, encoder="linear", encoder_params={"feature_dim": 4}, device="cpu",
        engine="serial", local=False, on_round=stop_after(2, rows), out=tmp_path / "sim",
    )  # fmt: skip
    assert [row.round for row in rows] == [1, 2]
    assert result.summary["stopped"] == "round 2 is enough"
    assert len(result.rounds) == 2
    page = (tmp_path / "sim/runs/run-0001/report.html").read_text(encoding="utf-8")
    assert re.search(r"Ended early: [Rr]ound 2 is enough\.", page)
    assert result.clients["c0"]["acc.personal"] is not None
