"""Simulated clocks: when updates arrive, by hand; buffered rounds; the same bits and times after a stop."""

from __future__ import annotations

import json

import numpy as np
import pytest
from simulation_harness import learned, learned_anywhere, run, run_and_updates, small_plan, write_images

import coordinator
from coordinator.simulation.device_speeds import PROFILES, DeviceSpeed, Speeds, read_speeds
from coordinator.simulation.plan import Plan
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from coordinator.simulation.timed_clients import TIMES
from coordinator.views.runs import replay
from edge_agent.client import ClientState, Session
from edge_agent.core.config import parse
from edge_agent.core.errors import ConfigError, DataError, StateError, UnknownName
from edge_agent.wire.tensors import decode

PARAMS = {"local_epochs": 2, "batch_size": 8}


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 90)


def write_speeds(folder, *lines):
    path = folder / "speeds.csv"
    path.write_text("\n".join(["name,seconds_per_sample,down_mbit_s,up_mbit_s", *lines]) + "\n")
    return str(path)


def drawn(plan, seconds):
    """The plan with devices of 1, 10 and 100 times as many seconds for a sample, one for each of three clients."""
    clients = list(Prepared.of(plan).division.clients)
    assert len(clients) == len(seconds) == 3
    return {
        client: DeviceSpeed(name=client, seconds_per_sample=each, down_mbit_s=1e6, up_mbit_s=1e6)
        for client, each in zip(clients, seconds, strict=True)
    }


def timed(plan, folder, monkeypatch, seconds):
    speeds = drawn(plan, seconds)
    monkeypatch.setattr(Speeds, "draw", classmethod(lambda cls, *_: cls(speeds)))
    return run(plan, folder)


def test_seconds_of_a_device_by_hand():
    """1 MB down at 8 Mbit/s is 1 s, 100 samples of 20 ms are 2 s, 1 MB up at 2 Mbit/s is 4 s."""
    device = DeviceSpeed(name="x", seconds_per_sample=0.02, down_mbit_s=8, up_mbit_s=2)
    assert device.seconds(100, 10**6, 10**6) == pytest.approx(7.0)


def test_devices_are_drawn_by_the_seed_whatever_the_order_of_clients():
    kinds = list(PROFILES.values())
    names = [f"c{number}" for number in range(200)]
    first = Speeds.draw(kinds, names, 3)
    assert first == Speeds.draw(kinds, names[::-1], 3)
    assert first != Speeds.draw(kinds, names, 4)
    counts = [list(first.of_client.values()).count(kind) for kind in kinds]
    assert min(counts) > 25, "each kind is as likely as the others: 50 in the mean"


def test_a_table_of_devices_is_read(tmp_path):
    path = write_speeds(tmp_path, "mine,0.25,10,2")
    assert read_speeds(path, tmp_path) == [
        DeviceSpeed(name="mine", seconds_per_sample=0.25, down_mbit_s=10, up_mbit_s=2)
    ]
    assert read_speeds("pi4, jetson", tmp_path) == [PROFILES["pi4"], PROFILES["jetson"]]


@pytest.mark.parametrize(
    "lines, error, message",
    [
        (["a,0,1,1", "b,1,-1,x"], ConfigError, "3 mistakes"),
        ([], DataError, "has no line after name,seconds_per_sample"),
    ],
)
def test_impossible_tables_are_refused(lines, error, message, tmp_path):
    with pytest.raises(error, match=message):
        read_speeds(write_speeds(tmp_path, *lines), tmp_path)


def test_what_is_no_table_is_refused(tmp_path):
    (tmp_path / "other.csv").write_text("client,speed\n")
    with pytest.raises(DataError, match="its first line is client,speed; expected name,seconds_per_sample"):
        read_speeds("other.csv", tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        read_speeds("missing.csv", tmp_path)
    with pytest.raises(UnknownName, match="did you mean 'jetson'"):
        read_speeds("pi4,jetsn", tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mode": "buffered"}, "needs speeds"),
        ({"buffer": 2}, "buffer = 2 has no effect on mode synchronous"),
        ({"speeds": "pi4", "max_staleness": 2}, "max_staleness = 2 has no effect"),
        ({"speeds": "pi4", "dropout": 0.5}, "dropout = 0.5 with speeds"),
        ({"mode": "buffered", "speeds": "pi4", "head_clients": 1}, "in which all clients train"),
    ],
)
def test_settings_of_time_that_do_not_go_together(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse(Plan, {"data": ("digits",), **changes}, where="the simulation")


def test_a_synchronous_round_takes_as_long_as_its_slowest_device(images, tmp_path, monkeypatch):
    """Two epochs of 22 or 23 samples: the slowest needs 1 s for each; nothing that is learned changes."""
    plan = small_plan(images, params=PARAMS, rounds=2, speeds="pi4")
    slowest = len(list(Prepared.of(plan).division.clients.values())[2].train)
    result = timed(plan, tmp_path / "timed", monkeypatch, (0.01, 0.1, 1.0))
    assert [row.pop("simulated_s") for row in result["rounds"]] == pytest.approx([2 * slowest, 4 * slowest], rel=1e-4)
    free = run(plan.model_copy(update={"speeds": None}), tmp_path / "free")
    assert learned(result) == learned(free)


def test_buffered_rounds_close_with_the_first_update_by_hand(images, tmp_path, monkeypatch):
    """Seconds for each job a, b, c are 1 : 2.5 : 100 times those of a, which is asked again in each round.

    With a buffer of one: a arrives at 1, 2 (asked at 1), then b at 2.5, a at 3, both asked again when a round closes.
    """
    plan = small_plan(images, params=PARAMS, rounds=4, speeds="pi4", mode="buffered", buffer=1)
    shares = list(Prepared.of(plan).division.clients.values())
    each = [1 / (2 * len(share.train)) for share in shares]
    seconds = (each[0], 2.5 * each[1], 100 * each[2])
    result = timed(plan, tmp_path / "timed", monkeypatch, seconds)
    closed = [row["simulated_s"] for row in result["rounds"]]
    assert closed == pytest.approx([1.0, 2.0, 2.5, 3.0], rel=1e-3)
    asked_in = [row["clients"] for row in result["rounds"]]
    assert asked_in == [2, 1, 1, 0], "updates count where they were asked for: b's in round 1"


def plain_event_loop(plan, seconds):
    """Federated averaging with a buffer as a loop over arrivals: the last state, and when each round was closed.

    ``seconds``: of each client's job, whatever travels.
    """
    prepared = Prepared.of(plan)
    shares = prepared.division.clients
    sessions = {}
    for client, share in shares.items():
        samples = prepared.pools.arrays(share)
        sessions[client] = Session(
            prepared.method, prepared.task, client, *samples, seed=plan.seed, device="cpu", model=prepared.model
        )
    state = {name: prepared.model.fresh[name].astype(np.float64) for name in next(iter(sessions.values())).shared}
    at_work = {}  # client -> when its update arrives, the round that it began in, the state then, and the update
    closed = []
    given_up = 0
    now_s = 0.0
    for number in range(1, plan.rounds + 1):
        for client in shares:
            if client not in at_work:
                received = {name: array.astype(np.float32) for name, array in state.items()}
                outcome = sessions[client].train(
                    received, ClientState(), round_number=number, rounds=plan.rounds, evaluate=False
                )
                at_work[client] = (now_s + seconds[client], number, received, outcome.update)
        first = sorted(at_work, key=lambda client: at_work[client][0])[: plan.buffer]
        total = sum(len(shares[client].train) for client in first)
        following = dict.fromkeys(state, 0.0)
        for client in first:
            now_s, asked_in, began_with, update = at_work.pop(client)
            staleness = number - asked_in
            for name, array in update.items():
                change = (array.astype(np.float64) - began_with[name]) / (1 + staleness) ** 0.5
                following[name] = following[name] + len(shares[client].train) / total * (state[name] + change)
        state = following
        closed.append(now_s)
        for client in list(at_work):
            if number + 1 - at_work[client][1] > plan.max_staleness:
                del at_work[client]
                given_up += 1
    return state, closed, given_up


@pytest.mark.parametrize(
    "buffer, max_staleness, each_s, given_up",
    [
        (1, 10, (1.0, 2.6, 4.7), 0),
        (2, 10, (1.0, 1.7, 4.1), 0),
        (1, 2, (1.0, 1.9, 7.3), 2),
    ],
)
def test_buffered_rounds_give_the_model_of_a_plain_loop_over_arrivals(
    buffer, max_staleness, each_s, given_up, images, tmp_path, monkeypatch
):
    """Who counts in which round, with which weight, and who is given up: worked out by other code."""
    plan = small_plan(
        images, params=PARAMS, rounds=9, speeds="pi4", mode="buffered", buffer=buffer, max_staleness=max_staleness
    )
    shares = Prepared.of(plan).division.clients
    seconds_of_a_sample = [each / (2 * len(share.train)) for each, share in zip(each_s, shares.values(), strict=True)]
    state, closed, left = plain_event_loop(plan, dict(zip(shares, each_s, strict=True)))
    assert left >= given_up
    speeds = drawn(plan, seconds_of_a_sample)
    monkeypatch.setattr(Speeds, "draw", classmethod(lambda cls, *_: cls(speeds)))
    with open_simulation(Prepared.of(plan), tmp_path / "sim") as simulation:
        result = simulation.finish()
        record = replay(simulation.state.journal, simulation.run)
        learned_state = decode(simulation.state.blobs.read(record.checkpoint))
    assert [row["simulated_s"] for row in result["rounds"]] == pytest.approx(closed, rel=1e-3)
    for name, array in state.items():
        np.testing.assert_allclose(learned_state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("mode", ["synchronous", "buffered"])
@pytest.mark.parametrize("jobs", [1, 3, 4])
def test_a_run_that_was_stopped_ends_with_the_same_bits_and_times(mode, jobs, images, tmp_path, monkeypatch):
    buffered = {"mode": "buffered", "buffer": 1, "max_staleness": 3} if mode == "buffered" else {}
    plan = small_plan(images, params=PARAMS, rounds=5, speeds="pi4", **buffered)
    undisturbed = timed(plan, tmp_path / "undisturbed", monkeypatch, (0.01, 0.025, 0.06))
    with open_simulation(Prepared.of(plan), tmp_path / "stopped") as simulation:
        done = 0
        while done < jobs:
            done += simulation.step() is not None
    # Another table would be drawn now: the run keeps the devices that it began with.
    monkeypatch.setattr(Speeds, "draw", classmethod(lambda cls, *_: cls({})))
    assert learned(run(plan, tmp_path / "stopped")) == learned(undisturbed)
    times = [json.loads((tmp_path / name / TIMES).read_text()) for name in ("undisturbed", "stopped")]
    assert times[0] == times[1]


def test_a_resumed_run_needs_no_table_any_more(images, tmp_path):
    path = write_speeds(tmp_path, "slow,0.5,10,2", "fast,0.01,10,2")
    plan = small_plan(images, params=PARAMS, speeds=path)
    undisturbed = run(plan, tmp_path / "undisturbed")
    with open_simulation(Prepared.of(plan), tmp_path / "sim") as simulation:
        simulation.step()
    (tmp_path / "speeds.csv").unlink()
    result, _ = run_and_updates(plan, tmp_path / "sim", saved=True)
    assert learned(result) == learned(undisturbed)


def test_workers_give_the_bits_and_times_of_one_after_another(images, tmp_path):
    plan = small_plan(images, params=PARAMS, rounds=4, speeds="pi4,pc", mode="buffered", buffer=2, clients=5)
    serial = run(plan, tmp_path / "serial")
    pool = run(plan.model_copy(update={"engine": "pool", "workers": 2}), tmp_path / "pool")
    assert learned_anywhere(serial) == learned_anywhere(pool)
    assert all(row["simulated_s"] > 0 for row in serial["rounds"])


def test_a_program_has_the_simulated_seconds_beside_the_accuracies(images, tmp_path):
    settings = {"encoder": "linear", "params": PARAMS, "engine": "serial", "clients": 3, "local": False}
    result = coordinator.simulate("fedavg", data=images, rounds=2, speeds="pi4", out=tmp_path / "sim", **settings)
    seconds = [row["simulated_s"] for row in result.rounds]
    assert 0 < 2 * seconds[0] == pytest.approx(seconds[1])


def test_a_damaged_clock_is_named(images, tmp_path):
    plan = small_plan(images, params=PARAMS, speeds="pi4")
    with open_simulation(Prepared.of(plan), tmp_path / "sim") as simulation:
        simulation.step()
    (tmp_path / "sim" / TIMES).write_text('{"now_s": -1}')
    with pytest.raises(StateError, match="damaged"):
        run(plan, tmp_path / "sim")
