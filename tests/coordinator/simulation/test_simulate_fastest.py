"""Engine fastest: what is expected by hand, what is chosen, and that a choice is kept and said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from simulation_harness import learned_anywhere, run, small_plan, write_images

from coordinator.cli.simulate import reading
from coordinator.simulation.engines.base import EngineChoice
from coordinator.simulation.engines.fastest import EngineTrial, choose, settle_engine, step_in_pass, steps_of_all_rounds
from coordinator.simulation.engines.stacked import ONE_BY_ONE
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import ENGINE, Prepared
from edge_agent.core.errors import RunFailed, StateError

PARAMS = {"local_epochs": 2, "batch_size": 8}


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 90)


def test_seconds_that_are_expected_by_hand():
    """10,000 steps of 1 ms are 10 s; of four workers 2.5 + 10 / 4 s; in one pass of 0.3 ms 3 s: far less."""
    seconds = {ONE_BY_ONE: 1e-3, "grouped": 3e-4, "unfolded": 7e-4}
    trial = choose(seconds, steps=10_000, jobs=0, workers=4, has_pool=True)
    assert trial.expected_s == {"serial": 10.0, "pool": 5.0, "stacked": 3.0}
    assert (trial.engine, trial.workers) == ("stacked", 1)
    assert trial.reason() == (
        "stacked was chosen; expected of all rounds: pool 5.0 s, serial 10.0 s, stacked 3.0 s; "
        "its numbers equal those of the others up to rounding"
    )


@pytest.mark.parametrize(
    "grouped_s, steps, has_pool, engine",
    [
        (4.1e-4, 10_000, True, "pool"),  # 4.1 s are not a fifth below 5 s
        (3.9e-4, 10_000, True, "stacked"),
        (7e-4, 10_000, False, "stacked"),
        (9e-4, 10_000, False, "serial"),
        (9e-4, 1_000, True, "serial"),  # 1 s is over before workers have started
    ],
)
def test_the_bits_of_the_others_are_given_up_for_a_fifth_of_the_time(grouped_s, steps, has_pool, engine):
    assert (
        choose({ONE_BY_ONE: 1e-3, "grouped": grouped_s}, steps=steps, jobs=0, workers=4, has_pool=has_pool).engine
        == engine
    )


def test_what_cannot_be_stacked_says_so():
    trial = choose(
        {ONE_BY_ONE: 1e-3}, steps=100, jobs=0, workers=2, has_pool=True, not_stacked="two of its layers share weights"
    )
    assert trial.engine == "serial"
    assert trial.reason().endswith("; not stacked: two of its layers share weights")


def test_what_no_engine_saves_is_expected_of_each():
    """1,000 jobs take 6 s beside their steps: of 11 s in a pool, stacking would save 2 s, which is not a fifth."""
    trial = choose({ONE_BY_ONE: 1e-3, "grouped": 3e-4}, steps=10_000, jobs=1000, workers=4, has_pool=True)
    assert trial.expected_s == {"serial": 16.0, "pool": 11.0, "stacked": 9.0}
    assert trial.engine == "pool"


@pytest.mark.parametrize(
    "together, expected_ms",
    [(1, 5.0), (4, 2.75), (16, 2.1875)],
)
def test_a_pass_costs_what_it_always_costs_and_what_each_client_adds(together, expected_ms):
    """One client takes 5 ms, four take 11 ms: 3 ms for the pass and 2 ms for each client."""
    assert step_in_pass(0.005, 0.011, 4, together) == pytest.approx(expected_ms / 1000)


def test_more_clients_in_less_time_are_noise_and_not_a_gain():
    assert step_in_pass(0.005, 0.004, 4, 10) == pytest.approx(0.0005)


def test_steps_of_all_rounds_by_hand(images):
    """Three clients of 23, 23 and 22 training samples in batches of 8: 3 x 3 x 2 epochs, of 5 rounds half of them."""
    prepared = Prepared.of(small_plan(images, params=PARAMS, rounds=5, fraction=0.5))
    sizes = [len(share.train) for share in prepared.division.clients.values()]
    assert all(16 < size <= 24 for size in sizes)
    assert steps_of_all_rounds(prepared) == 5 * 0.5 * 3 * 3 * 2


def test_the_choice_changes_nothing_that_is_learned_and_is_said(images, tmp_path):
    """Times of a clock that stands still: nothing saves a fifth, so that the bits stay those of one after another."""
    plan = small_plan(images, params=PARAMS)
    serial = run(plan, tmp_path / "serial")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settle_engine, "__defaults__", (lambda: 0.0,))
        result = run(plan.model_copy(update={"engine": "fastest"}), tmp_path / "fastest")
    trial = result.pop("engine_trial")
    assert trial["engine"] == "serial"
    assert set(trial["step_ms"]) == {ONE_BY_ONE, "grouped"}
    assert learned_anywhere(result) == learned_anywhere(serial)
    places = {"folder": "sim", "curves": "sim/curves.svg", "report": "sim/report.html"}
    assert f"engine: {trial['reason']}" in reading({**result, **places, "engine_trial": trial})
    assert json.loads((tmp_path / "fastest" / ENGINE).read_text())["engine"] == "serial"


def test_a_resumed_run_keeps_the_engine_that_it_began_with(images, tmp_path):
    plan = small_plan(images, params=PARAMS, engine="fastest")
    with open_simulation(Prepared.of(plan), tmp_path / "sim") as simulation:
        for _ in range(10):
            simulation.step()
    chosen = json.loads((tmp_path / "sim" / ENGINE).read_text())
    other = EngineTrial(engine="stacked", workers=1, expected_s={}, step_ms={})
    (tmp_path / "sim" / ENGINE).write_text(other.model_dump_json())
    prepared, trial = settle_engine(Prepared.of(plan), tmp_path / "sim")
    assert prepared.choice == EngineChoice("stacked")
    assert trial == other
    assert chosen["engine"] in {"serial", "pool", "stacked"}
    assert run(plan, tmp_path / "sim")["engine"] == "stacked"


def test_a_resumed_run_has_the_workers_that_are_asked_for_now(images, tmp_path):
    """As the message of a run advises that was stopped for memory."""
    trial = EngineTrial(engine="pool", workers=4)
    (tmp_path / ENGINE).write_text(trial.model_dump_json())
    prepared, _ = settle_engine(Prepared.of(small_plan(images, engine="fastest", workers=2)), tmp_path)
    assert prepared.choice == EngineChoice("pool", 2)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"method": "fedprox", "params": {}}, "method 'fedprox' trains in its own way"),
        ({"clients": 1}, "there is one client"),
        ({"augment": "crop_flip"}, "augment is crop_flip, and a stack trains on inputs as they are"),
    ],
)
def test_why_nothing_is_stacked(changes, reason, images, tmp_path):
    prepared = Prepared.of(small_plan(images, **{"params": PARAMS, "engine": "fastest", **changes}))
    _, trial = settle_engine(prepared, tmp_path)
    assert trial.not_stacked == reason
    assert trial.engine in {"serial", "pool"}


def test_a_trial_that_fails_leaves_it_to_the_first_round_to_say_why(images, tmp_path, monkeypatch):
    prepared = Prepared.of(small_plan(images, params=PARAMS, engine="fastest"))
    monkeypatch.setattr(type(prepared.method), "local_update", lambda *_: 1 / 0)
    settled, trial = settle_engine(prepared, tmp_path)
    assert settled.choice == EngineChoice("serial")
    assert trial.reason() == "serial was chosen; not stacked: the trial failed (ZeroDivisionError)"
    with pytest.raises(RunFailed, match="ZeroDivisionError"):
        run(prepared.plan, tmp_path / "sim")


def test_a_damaged_choice_is_named(images, tmp_path):
    (tmp_path / ENGINE).write_text('{"engine": "quantum"}')
    with pytest.raises(StateError, match=r"engine.json: damaged; remove it"):
        settle_engine(Prepared.of(small_plan(images, engine="fastest")), tmp_path)


def test_an_engine_that_is_named_is_not_timed(images, tmp_path):
    prepared = replace(Prepared.of(small_plan(images)), choice=EngineChoice("pool", 2))
    assert settle_engine(prepared, tmp_path) == (prepared, None)
