"""Comparisons on small samples: equal trials, equal samples, what is kept when one is stopped, and what fails."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from compared_samples import SETTINGS, write_samples

import coordinator
from coordinator.research.compare import interface, optuna_search, simulated_runs
from coordinator.research.compare.interface import Running, read_comparison
from coordinator.research.compare.records import ClientScore, Comparison
from coordinator.research.compare.runners import FIRST_NEED_BYTES, LocalWorkers
from coordinator.research.compare.settings import ALWAYS
from coordinator.research.compare.simulated_runs import RunOutcome, RunSpec, simulate_run
from coordinator.simulation.datasets import prepare
from coordinator.simulation.plan import Plan
from edge_agent.core.errors import ConfigError, MissingCapability, RunFailed, StateError, UnknownName, UsageError
from edge_agent.data.partition import Division
from edge_agent.methods.fedavg import FedAvg


def without_times(comparison: Comparison) -> dict:
    """The record without what differs from run to run."""
    text = re.sub(r'"(cpu_s|seconds)": ?[0-9.e+-]+', r'"\1": 0', comparison.model_dump_json())
    return json.loads(text)


def without_costs(entries) -> list[dict]:
    """Trials or runs as JSON, without what differs from run to run."""
    return [entry.model_dump(mode="json", exclude={"cpu_s", "seconds"}) for entry in entries]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One comparison of FedProx with the four that are always there, and how it is called again."""
    folder = tmp_path_factory.mktemp("whole")
    write_samples(folder)
    settings = {**SETTINGS, "data": f"npz:{folder / 'i.npz'}"}

    def call(**changes):
        how = {"running": Running(in_process=True), "out": folder / "out", **changes}
        return coordinator.compare(["fedprox"], seeds=(0, 1), tune=2, untuned=True, **settings, **how)

    return SimpleNamespace(call=call, settings=settings, comparison=call().comparison, folder=folder / "out")


# --- what is run -----------------------------------------------------------------------------------------------------


def test_every_method_has_equal_trials_paired_seeds_and_the_same_samples(whole):
    record = whole.comparison
    assert [method.name for method in record.methods] == [*ALWAYS, "fedprox"]
    assert {len(method.trials) for method in record.methods} == {2}
    assert {len(method.runs) for method in record.methods} == {2}
    assert all(method.trials[0].params == {} for method in record.methods)
    hashes = {}
    for method in record.methods:
        for run in (*method.runs, *method.untuned):
            hashes.setdefault(run.seed, set()).add(run.partition_hash)
            assert Division.read(whole.folder / run.folder / "partition.json").sha256 == run.partition_hash
            assert run.failure == ""
            assert run.cpu_s > 0
            assert run.curve[-1][0] == 1
            mean = sum(client.accuracy for client in run.clients) / len(run.clients)
            assert run.curve[-1][1] == pytest.approx(mean, abs=1e-6)
    assert {len(values) for values in hashes.values()} == {1}
    assert len(set.union(*hashes.values())) == 2
    assert read_comparison(whole.folder).methods == record.methods


def test_the_runs_have_the_parameters_of_the_best_trial(whole):
    for method in whole.comparison.methods:
        scores = [trial.score for trial in method.trials]
        assert method.chosen == scores.index(max(scores))
        assert all(run.params == method.trials[method.chosen].params for run in method.runs)
        assert all(run.params == {} for run in method.untuned)
        if method.chosen == 0:
            tuned = [run.clients for run in method.runs]
            assert tuned == [run.clients for run in method.untuned]


def test_a_run_is_the_simulation_that_the_front_door_makes(whole):
    (fedprox,) = (method for method in whole.comparison.methods if method.name == "fedprox")
    for run in fedprox.untuned:
        settings = {**whole.settings, "local": False}
        result = coordinator.simulate("fedprox", seed=run.seed, engine="serial", **settings)
        expected = {client: scores["acc.personal"] or scores["acc.global"] for client, scores in result.clients.items()}
        assert {client.id: client.accuracy for client in run.clients} == expected


def test_trials_leave_no_folders_and_runs_leave_simulations(whole):
    trials = [path for path in (whole.folder / "trials").rglob("*") if path.is_file()]
    assert len(trials) == 2 * 5
    assert {path.suffix for path in trials} == {".json"}
    result = json.loads((whole.folder / whole.comparison.methods[0].runs[0].folder / "result.json").read_text())
    assert result["scored_on"] == "test"


def test_trials_do_not_see_the_test_samples_of_their_seed(run, place):
    """With other test samples all trials are the same, and the runs are not."""
    before = run("fedprox", seeds=(0,), out="a").comparison
    plan = Plan.model_validate({**SETTINGS, "data": ["npz:i.npz"], "folder": str(place)})
    _, division, _ = prepare(plan)
    test_rows = [row for share in division.clients.values() for row in share.test]
    assert len(test_rows) == 15
    with np.load("i.npz", allow_pickle=False) as file:
        content = dict(file)
    content["inputs"][test_rows] = 255 - content["inputs"][test_rows]
    np.savez("i.npz", **content)
    after = run("fedprox", seeds=(0,), out="b").comparison
    scores = [[trial.score for trial in method.trials] for method in before.methods]
    assert [[trial.score for trial in method.trials] for method in after.methods] == scores
    assert [method.runs[0].clients for method in after.methods] != [method.runs[0].clients for method in before.methods]


def test_data_with_test_samples_that_each_seed_draws_anew_are_told(whole, run):
    assert "no trial has seen the test samples of seed 0" in whole.comparison.notes[0]
    assert run("fedprox", seeds=(3,), tune=1, out="one").comparison.notes == ()


def test_a_space_with_fewer_values_says_so(run):
    record = run("fedprox", seeds=(0,), tune=4, space={"lr": "0.1", "mu": "0"}, out="few").comparison
    notes = {method.name: method.note for method in record.methods}
    assert notes["fedavg"] == "2 trials in place of 4: its space has no more values (lr = 0.1)."
    assert notes["linear_probe"] == ""


def test_successive_halving_counts_a_trial_once_with_the_rounds_that_it_had(run):
    record = run("fedprox", seeds=(0,), tune=3, search="halving", rounds=3, out="halving").comparison
    assert record.search.endswith("3 trials of 1 round, then 1 trial of 3 rounds: 6 rounds for each method")
    for method in record.methods:
        assert sorted(trial.rounds for trial in method.trials) == [1, 1, 3]
        assert method.trials[method.chosen].rounds == 3


def test_nothing_is_tuned_with_no_trials(run):
    record = run("fedprox", seeds=(0,), tune=0, out="none").comparison
    assert (record.trials, record.search, record.tune_seed) == (0, "", None)
    assert all(method.trials == () and method.chosen is None for method in record.methods)
    assert all(method.runs[0].clients for method in record.methods)


def test_a_sweep_is_the_search_of_one_method_alone(place):
    result = coordinator.sweep(
        "fedprox", {"mu": "0,0.1"}, search="grid", params={"lr": 0.1}, running=Running(in_process=True), **SETTINGS
    )
    assert [trial.params for trial in result.trials] == [{}, {"mu": 0}, {"mu": 0.1}]
    assert result.best.score == max(trial.score for trial in result.trials)
    assert not (place / "sweep" / "runs").exists()
    best = result.best
    params = ", ".join(f"{name}={value}" for name, value in best.params.items()) or "the defaults"
    assert repr(result) == (
        f"fedprox: 3 trials on validation samples; the best, trial {best.number}: {params}, accuracy {best.score:.4f}; "
        "folder: sweep"
    )


def test_a_sweep_with_nothing_left_to_search_is_refused(place):
    with pytest.raises(UsageError, match="nothing to search: local has no parameter with values to search, or all of"):
        coordinator.sweep("local", params={"lr": 0.1}, running=Running(in_process=True), **SETTINGS)
    assert not (place / "sweep").exists()


# --- stopped and continued -------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Stands for Ctrl-C at some point."""


def test_a_comparison_that_is_stopped_anywhere_ends_as_if_it_was_not(whole, tmp_path):
    steps = []

    def stop(progress):
        steps.append(progress)
        if len(steps) % 7 == 0:
            raise Stop

    for _ in range(100):
        try:
            result = whole.call(out=tmp_path / "stopped", running=Running(in_process=True, watch=stop))
        except Stop:
            continue
        break
    assert len(steps) > 40
    assert without_times(result.comparison)["methods"] == without_times(whole.comparison)["methods"]


def test_tables_are_there_after_each_seed_before_a_comparison_is_over(run, monkeypatch):
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    seen = {}

    def note(progress):
        table = Path("long/table.md")
        text = table.read_text(encoding="utf-8") if table.exists() else ""
        found = re.search(r"Not over yet: \d+ of \d+ runs", text)
        seen[progress.event.partition(":")[0]] = found.group() if found else ""

    run("fedprox", seeds=(0, 1, 2), untuned=True, out="long", running=Running(in_process=True, watch=note))
    # What a table says at the end of a simulation was written at the end of the part before.
    assert seen["trials/fedprox/001-1-rounds"] == ""
    assert seen["untuned/fedprox/seed-0"] == "Not over yet: 30 of 30 runs"
    assert seen["runs/fedprox/seed-0"] == "Not over yet: 25 of 30 runs"
    assert seen["runs/fedprox/seed-1"] == "Not over yet: 15 of 30 runs"
    assert "Not over yet" not in Path("long/table.md").read_text(encoding="utf-8")


def test_a_notebook_shows_the_table_of_a_comparison(whole):
    shown = repr(whole.call()).splitlines()
    assert max(map(len, shown)) <= 140
    assert any("fedprox" in line and "linear_probe" not in line for line in shown)
    assert shown[-1] == f"page: {whole.folder / 'index.html'}"


def test_nothing_is_run_again(whole, monkeypatch):
    monkeypatch.setattr(simulated_runs, "_simulate", None)
    assert whole.call().comparison.methods == whole.comparison.methods


def test_what_a_killed_attempt_has_spent_is_counted(place):
    own = {"data": ["npz:i.npz"], "folder": str(place), "local": False, "engine": "serial"}
    plan = Plan.model_validate({**SETTINGS, **own})
    spec = RunSpec("one", plan, is_trial=False)
    readings = iter([(5.0, 6.0), (7.0, 8.0), (0.5, 0.5), (0.25, 0.25), (0.25, 0.25)])
    meter = SimpleNamespace(read=lambda: next(readings))

    def stop(_: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        simulate_run(spec, place, meter, stop)
    assert spec.read(place).cpu_s == 12
    assert not spec.read(place).is_over
    outcome = simulate_run(spec, place, meter)
    assert (outcome.cpu_s, outcome.seconds) == (13, 15)


def test_waiting_for_other_simulations_is_no_time_of_the_next_one(monkeypatch):
    """A worker is idle from 10 to 50 s by the clock, and then works for 3 s."""
    clock = [0.0]
    monkeypatch.setattr(simulated_runs.time, "monotonic", lambda: clock[0])
    meter = simulated_runs.Meter()
    for waited_s, worked_s in ((0, 10), (40, 3)):
        clock[0] += waited_s
        meter.leave_out_wait()
        clock[0] += worked_s
        assert meter.read()[1] == worked_s


def test_clients_without_samples_do_not_change_the_score_of_a_trial():
    clients = [
        ClientScore(id=name, samples=n, accuracy=a) for name, n, a in (("a", 5, 0.6), ("b", 0, 0.0), ("c", 9, 1))
    ]
    assert RunOutcome(plan={}, clients=tuple(clients)).score == pytest.approx(0.8)
    assert RunOutcome(plan={}, clients=(clients[1],)).score is None


@pytest.mark.slow
def test_a_comparison_that_is_killed_continues_and_finds_the_same(place, words, run):
    """The process is killed by SIGKILL again and again, always after some more lines about simulations."""
    command = [sys.executable, "-m", "coordinator", "compare", "fedprox", *words.settings, "--seeds", "0:2"]
    command += ["--tune", "2", "--parallel", "2", "--out", "killed", "--device", "cpu"]
    lines = 0
    for kill_after in (1, 4, 9, None):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        seen = 0
        for line in process.stderr:
            seen += " rounds, " in line
            if kill_after is not None and seen == kill_after:
                os.kill(process.pid, signal.SIGKILL)
                break
        lines += seen
        process.stderr.close()
        process.stdout.close()
        code = process.wait()
        assert code == (0 if kill_after is None else -signal.SIGKILL)
    expected = without_times(run("fedprox", out="whole").comparison)
    record = without_times(read_comparison(place / "killed"))
    assert record.pop("command") != expected.pop("command")
    assert record == expected
    # Of 20 simulations at most two for each kill were under way, or over and not told.
    assert 20 - 3 * 2 <= lines <= 20


def test_other_arguments_are_refused_with_what_differs(run):
    begun = {"seeds": (0,), "tune": 0, "out": "begun"}
    run("fedprox", **begun)
    for change, text in (
        ({"rounds": 2}, "rounds 1, now 2"),
        ({"tune": 3}, "trials 0, now 3"),
        ({"seeds": (1, 0)}, r"seeds \[0\], now \[1, 0\]"),
        ({"seeds": (0, 1), "rounds": 2}, r"arguments: rounds 1, now 2; continue"),
        ({"tune": 3, "space": {"mu": "0,1"}}, "space {}, now"),
        ({"alpha": 0.5, "partition": "dirichlet"}, "partition none, now dirichlet"),
        ({"params": {"fedprox.mu": 1}}, r"arguments: fedprox\.mu none, now 1; continue"),
        # Seeds that are added are no mistake beside it.
        ({"params": {"mu": 1}, "seeds": (0, 1)}, r"arguments: fedprox\.mu none, now 1; continue"),
        # The trials have the first seed: others are added behind it.
        ({"seeds": (1, 0)}, "behind its first seed, seeds may be added"),
    ):
        with pytest.raises(UsageError, match=text):
            run("fedprox", **{**begun, **change})


def test_seeds_methods_and_defaults_that_are_added_give_what_one_comparison_of_them_all_gives(whole, monkeypatch):
    def call(*methods, out="grown", **changes):
        how = {"out": whole.folder.parent / out, "running": Running(in_process=True, say=said.append), **changes}
        return coordinator.compare(list(methods), tune=2, **whole.settings, **how).comparison

    said = []
    space = {"space": {"ditto.lr": "0.01,0.1"}}
    at_once = call("fedprox", "ditto", seeds=(0, 1), untuned=True, out="at-once", **space)
    assert said == []
    call("fedprox", seeds=(0,))
    call("fedprox", seeds=(0, 1))
    grown = call("fedprox", "ditto", seeds=(0, 1), untuned=True, **space)
    assert [line.partition("now also has ")[2] for line in said] == ["seed 1", "method ditto, runs with defaults"]
    assert without_times(grown)["methods"] == without_times(at_once)["methods"]
    # What was there before is not run again, and nothing can be taken away.
    monkeypatch.setattr(simulated_runs, "_simulate", None)
    assert call("fedprox", "ditto", seeds=(0, 1), untuned=True, **space).methods == grown.methods
    with pytest.raises(UsageError, match=r"seeds \[0, 1\], now \[0\]"):
        call("fedprox", "ditto", seeds=(0,), untuned=True, **space)
    with pytest.raises(UsageError, match="methods local, fedavg, fedavg_ft, linear_probe, fedprox, ditto, now"):
        call("fedprox", seeds=(0, 1), untuned=True)


def test_values_of_a_python_program_are_those_that_a_file_has(run, monkeypatch):
    """Numbers of NumPy, as a loop over ``np.linspace`` has them, and tuples, also where seeds are added to them."""
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    params = {"fedprox.mu": np.float32(0.5), "dualfed.personal": ("personal_head",)}
    call = functools.partial(run, "fedprox", "dualfed", tune=0, params=params, rounds=np.int64(1), out="folder")
    call(seeds=np.arange(1))
    record = call(seeds=np.arange(2)).comparison
    assert record.methods[-1].runs[1].params == {"personal": ["personal_head"]}
    assert record.methods[-2].runs[1].params == {"mu": 0.5}


def test_the_folder_of_a_search_stays_that_of_the_search(run, place, monkeypatch):
    """The trials of both would be the same, but afterwards the command of the search could not continue it."""
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    how = {"out": "folder", "space": {"fedprox.mu": "0,0.1"}}

    def search():
        return coordinator.sweep("fedprox", trials=2, running=Running(in_process=True), **how, **SETTINGS)

    found = search()
    with pytest.raises(UsageError, match="folder holds the search of fedprox, which 'headwater sweep' continues"):
        run("fedprox", **how)
    assert search() == found


def test_a_search_that_this_machine_lacks_leaves_no_arguments_behind(run, monkeypatch):
    def lack():
        raise MissingCapability("Optuna is not installed")

    monkeypatch.setattr(optuna_search, "import_optuna", lack)
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    with pytest.raises(MissingCapability):
        run("fedprox", search="optuna", out="folder")
    assert run("fedprox", search="random", out="folder").failures == ()


@pytest.mark.parametrize("field", ["methods", "seeds"])
def test_a_file_of_arguments_that_lacks_something_is_named(run, monkeypatch, field):
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    run("fedprox", tune=0, out="folder")
    path = Path("folder/arguments.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: []}))
    with pytest.raises(ConfigError, match=rf"arguments\.json(.|\n)*{field} = "):
        run("fedprox", tune=0, out="folder")


def test_another_engine_is_no_other_comparison(whole):
    again = whole.call(running=Running(in_process=True, engine="stacked"))
    assert again.comparison.methods == whole.comparison.methods


def test_data_that_have_changed_are_another_task(run, place):
    run("fedprox", seeds=(0,), tune=0, out="begun")
    with np.load("i.npz", allow_pickle=False) as file:
        content = dict(file)
    content["labels"] = content["labels"][::-1]
    np.savez("i.npz", **content)
    with pytest.raises(StateError, match="the data have changed meanwhile"):
        run("fedprox", seeds=(0,), tune=0, out="begun")
    write_samples(place)
    run("fedprox", seeds=(0,), tune=0, out="begun")


def test_a_folder_of_others_is_left_alone(run, place):
    (place / "theirs").mkdir()
    (place / "theirs" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"not empty \(thesis\.tex\)"):
        run("fedprox", out="theirs")


# --- what fails ------------------------------------------------------------------------------------------------------


class Explodes(FedAvg):
    """A method that fails in its first round."""

    def local_update(self, client, received):
        raise ZeroDivisionError("nothing to divide")


@pytest.fixture(autouse=True)
def _own_methods_are_forgotten(monkeypatch):
    from edge_agent import methods

    monkeypatch.setattr(methods.registry, "_extra", dict(methods.registry._extra))


def test_a_method_whose_trials_all_fail_has_no_runs_and_stops_nobody(run):
    result = run(Explodes, seeds=(0, 1))
    own = result.comparison.methods[-1]
    assert own.name == "explodes"
    assert [trial.score for trial in own.trials] == [None, None]
    assert own.chosen is None
    assert [run.seed for run in own.runs] == [0, 1]
    assert all("all 2 trials failed; trial 0: " in run.failure for run in own.runs)
    assert "nothing to divide" in own.runs[0].failure
    assert all(run.clients for method in result.comparison.methods[:-1] for run in method.runs)
    assert len(result.failures) == 2


def test_the_crash_of_one_seed_is_recorded_and_can_be_tried_again(run, monkeypatch):
    simulate = simulated_runs._simulate

    def failing(spec, *others):
        if spec.location == "runs/fedprox/seed-1":
            raise RunFailed("the machine was tired")
        return simulate(spec, *others)

    monkeypatch.setattr(simulated_runs, "_simulate", failing)
    result = run("fedprox", out="tired")
    assert result.failures == ("fedprox, seed 1: the machine was tired",)
    monkeypatch.setattr(simulated_runs, "_simulate", simulate)
    assert run("fedprox", out="tired").failures == result.failures
    again = run("fedprox", out="tired", running=Running(in_process=True, again=True))
    assert again.failures == ()
    assert without_times(again.comparison)["methods"] == without_times(run("fedprox", out="new").comparison)["methods"]


def score_at_once(spec, _base, ledger, _watch):
    """Stands for a simulation whose only client is as accurate as its settings say, at random."""
    what = json.dumps([spec.plan.params, spec.plan.seed, spec.plan.rounds, spec.is_trial], sort_keys=True)
    accuracy = zlib.crc32(what.encode()) % 1000 / 1000
    return ledger.over(clients=(ClientScore(id="c", samples=9, accuracy=accuracy),), curve=((1, accuracy),))


@pytest.mark.parametrize("search", ["random", "halving", "optuna"])
def test_a_trial_that_is_scored_at_its_second_try_changes_what_follows_from_it(run, monkeypatch, search):
    """The trial that would be chosen fails at first, so that other parameters run; then it is tried again."""
    settings = {"search": search, "tune": 9, "rounds": 9}
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    expected = run("fedprox", out="whole", **settings).comparison.methods[-1]
    assert expected.chosen > 0

    def failing(spec, *others):
        if spec.location.startswith(f"trials/fedprox/{expected.chosen:03d}-"):
            raise RunFailed("the machine was tired")
        return score_at_once(spec, *others)

    monkeypatch.setattr(simulated_runs, "_simulate", failing)
    other = run("fedprox", out="tired", **settings).comparison
    assert other.methods[-1].chosen != expected.chosen
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    again = run("fedprox", out="tired", running=Running(in_process=True, again=True), **settings).comparison
    own = again.methods[-1]
    assert (own.chosen, without_costs(own.trials)) == (expected.chosen, without_costs(expected.trials))
    assert without_costs(own.runs) == without_costs(expected.runs)
    assert own.note == f"Scored when they were tried again, after a failure: trials {expected.chosen}."
    assert [method.note for method in again.methods[:-1]] == [method.note for method in other.methods[:-1]]
    # The same command, without --again, finds all of it done.
    monkeypatch.setattr(simulated_runs, "_simulate", None)
    assert run("fedprox", out="tired", **settings).comparison == again


def test_what_was_spent_on_parameters_that_are_not_chosen_any_more_is_counted(run, monkeypatch):
    settings = {"tune": 2, "seeds": (0,)}
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    chosen = run("fedprox", out="whole", **settings).comparison.methods[-1].chosen

    def failing(spec, *others):
        if spec.location.startswith(f"trials/fedprox/{chosen:03d}-"):
            raise RunFailed("the machine was tired")
        return score_at_once(spec, *others)

    monkeypatch.setattr(simulated_runs, "_simulate", failing)
    run("fedprox", out="tired", **settings)
    path = Path("tired/runs/fedprox/seed-0.json")
    outcome = json.loads(path.read_text())
    path.write_text(json.dumps({**outcome, "cpu_s": 100.0}))
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    again = run("fedprox", out="tired", running=Running(in_process=True, again=True), **settings).comparison
    assert again.methods[-1].runs[0].params != outcome["plan"]["params"]
    assert again.methods[-1].runs[0].cpu_s >= 100


def test_runs_of_other_parameters_are_refused_where_no_trial_was_tried_again(run, monkeypatch):
    monkeypatch.setattr(simulated_runs, "_simulate", score_at_once)
    run("fedprox", out="edited")
    path = Path("edited/runs/fedprox/seed-0.json")
    outcome = json.loads(path.read_text())
    path.write_text(json.dumps({**outcome, "plan": {**outcome["plan"], "params": {"mu": 0.3}}}))
    for again in (False, True):
        with pytest.raises(StateError, match=r"seed-0\.json: has other settings \(params .*choose another folder"):
            run("fedprox", out="edited", running=Running(in_process=True, again=again))


def test_a_full_disk_stops_the_comparison_and_the_same_call_continues(run, monkeypatch):
    simulate = simulated_runs._simulate

    def full(spec, *others):
        if spec.location.startswith("runs/"):
            raise StateError("no space left on device; make room")
        return simulate(spec, *others)

    monkeypatch.setattr(simulated_runs, "_simulate", full)
    with pytest.raises(StateError, match="make room"):
        run("fedprox", out="disk")
    record = read_comparison(Path("disk"))
    assert all(len(method.trials) == 2 and method.runs == () for method in record.methods)
    monkeypatch.setattr(simulated_runs, "_simulate", simulate)
    assert run("fedprox", out="disk").failures == ()


@pytest.mark.parametrize(
    "methods, change, error, text",
    [
        (["fedprx"], {}, UnknownName, "did you mean 'fedprox'"),
        (["fedprox"], {"seed": 3}, ConfigError, "a comparison sets it itself"),
        (["fedprox"], {"alpha": 0.3}, ConfigError, "has no effect on partition iid"),
        (["fedprox"], {"nonsense": 1}, ConfigError, "nonsense: unknown key"),
        (["fedprox"], {"seeds": ()}, UsageError, "no seed"),
        (["fedprox"], {"seeds": (1, 1)}, UsageError, "twice"),
        (["fedprox"], {"search": "grid"}, UsageError, "for sweep alone"),
        (["fedprox"], {"search": "rando"}, UnknownName, "did you mean 'random'"),
        (["fedprox"], {"tune": 0, "untuned": True}, UsageError, "nothing is tuned"),
        (
            ["fedprox"],
            {"tune": 0, "space": {"mu": "0,0.1"}},
            UsageError,
            "space of mu: nothing is searched with tune = 0",
        ),
        (["fedprox"], {"space": {"moo": "1,2"}}, ConfigError, "unknown parameter"),
        (["fedprox"], {"params": {"mu": -2}}, ConfigError, "mu = -2"),
        (["fedprox"], {"data": "npz:nothing.npz"}, UsageError, "nothing.npz"),
        (["fedprox"], {"running": Running(address="auto")}, UsageError, "only on ray"),
        (["fedprox"], {"engine": "stacked"}, ConfigError, r"give it as running=Running\(engine="),
        (["fedprox"], {"tune": -1}, ConfigError, "trials = -1"),
        (["fedprox"], {"tune_seed": -1, "validation": 1.5}, ConfigError, "2 mistakes"),
        (["fedprox"], {"space": {"mu": 0.1}}, ConfigError, "space.mu = 0.1"),
        (["fedprox"], {"seeds": 3}, UsageError, "expected whole numbers"),
        (["fedprox"], {"seeds": ("a",)}, UsageError, "expected whole numbers"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_written(run, place, methods, change, error, text):
    with pytest.raises(error, match=text):
        run(*methods, out="nothing", **change)
    assert not (place / "nothing" / "arguments.json").exists()


def test_a_method_of_the_program_itself_cannot_run_in_other_processes(run):
    class Here(FedAvg):
        pass

    with pytest.raises(UsageError, match="other processes cannot import it"):
        run(Here, running=Running(parallel=2))
    assert run(Here, seeds=(0,), tune=0, running=Running()).failures == ()


def test_methods_that_cannot_do_the_task_are_named_before_hours_are_spent(run):
    class Picky(FedAvg):
        def check(self, task):
            raise ConfigError("picky", [f"needs 10 classes, found {task.num_classes}"])

    with pytest.raises(ConfigError, match="picky: needs 10 classes, found 3"):
        run("fedprox", Picky)


# --- worker processes and the command --------------------------------------------------------------------------------


def test_a_further_worker_is_started_only_where_it_fits_into_memory(tmp_path, monkeypatch):
    said = []
    free = [FIRST_NEED_BYTES]
    workers = LocalWorkers(tmp_path, 3, say=said.append, free_bytes=lambda: free[0])

    def spawn(self):
        worker = SimpleNamespace(number=0, spec=None, child=SimpleNamespace(pipe=SimpleNamespace(send=lambda *_: None)))
        self._workers.append(worker)
        return worker

    monkeypatch.setattr(LocalWorkers, "_spawn", spawn)
    spec = RunSpec("one", Plan(data=("digits",)), is_trial=True)
    assert workers.has_room
    workers.start(spec)
    assert not workers.has_room
    assert not workers.has_room
    assert len(said) == 1
    assert "1 of 3 workers run: 1.1 GB of memory are free" in said[0]
    free[0] = 2 * FIRST_NEED_BYTES
    assert workers.has_room
    workers._need_bytes = 2 * FIRST_NEED_BYTES
    assert not workers.has_room


def test_the_command_runs_in_worker_processes_and_finds_what_this_process_finds(place, call, words, run):
    options = [*words.settings, "--device", "cpu", "--seeds", "0", "--tune", "1", "--set", "fedprox.mu=0.5"]
    code, out, err = call("compare", "fedprox", *options, "--out", "by-command", "--json")
    assert code == 0, err
    record = Comparison.model_validate_json(out)
    assert "runs/fedprox/seed-0: " in err
    assert read_comparison(place / "by-command") == record
    here = run("fedprox", seeds=(0,), tune=1, params={"fedprox.mu": 0.5}, out="here").comparison
    assert without_times(record)["methods"] == without_times(here)["methods"]
    # The command in the record is one that continues it.
    code, out, err = call(*record.command.split()[1:])
    assert code == 0, err
    assert re.search(r"^ *fedprox +\d", out, re.MULTILINE)
    assert (place / "by-command" / "table.tex").exists()


@pytest.mark.usefixtures("place")
def test_the_command_says_what_is_wrong_with_its_words(call, words):
    for options, text in (
        ([], "no methods"),
        (["fedprox", "--space", "mu"], "expected NAME=VALUES"),
        (["fedprox", "--space", "mu=1", "--space", "mu=2"], "given twice"),
        (["fedprox", "--seeds", "a"], "expected FIRST:END"),
    ):
        code, _, err = call("compare", *options, *words.settings)
        assert (code, text in err) == (2, True), err
    code, _, err = call("compare", "fedprox")
    assert (code, "no data" in err) == (2, True)
    code, _, err = call("sweep", "fedprox", *words.settings, "--search", "grid", "--trials", "3")
    assert (code, "has no effect on --search grid" in err) == (2, True)
    code, _, err = call("sweep", "fedprox", *words.settings, "--points", "3")
    assert (code, "only on grid" in err) == (2, True)


@pytest.mark.usefixtures("place")
def test_a_failing_run_is_exit_code_1_and_a_ctrl_c_130(call, words, monkeypatch):
    def none_better(*_, **__):
        raise KeyboardInterrupt

    options = [*words.settings, "--seeds", "0", "--tune", "0", "--out", "c"]
    monkeypatch.setattr(interface, "_run_all", none_better)
    code, _, err = call("compare", "fedprox", *options)
    assert code == 130
    assert "--seeds 0 is one seed" in err
    assert "the same command continues" in err
    monkeypatch.undo()


@pytest.mark.slow
def test_a_worker_that_crashes_costs_its_own_run_alone(place, call, words):
    (place / "own.py").write_text(
        "import os\nfrom edge_agent.methods.fedavg import FedAvg\n\n\nclass Dies(FedAvg):\n"
        "    def local_update(self, client, received):\n        os._exit(3)\n"
    )
    options = [*words.settings, "--device", "cpu", "--seeds", "0", "--tune", "0", "--json"]
    code, out, err = call("compare", "own.py:Dies", *options)
    assert code == 1
    record = Comparison.model_validate_json(out)
    assert "its worker ended 3 times" in record.methods[-1].runs[0].failure
    assert all(method.runs[0].clients for method in record.methods[:-1])
    assert "exit code 3" in err


# --- methods of the user's own ---------------------------------------------------------------------------------------

OWN_METHOD = """
from edge_agent.methods.fedavg import FedAvg


class Eager(FedAvg):
    def aggregate(self, state, updates):
        return super().aggregate(state, updates)


def net(task, feature_dim):
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(16, feature_dim))
"""


EDITED_METHOD = OWN_METHOD.replace("return super", "raise ValueError('edited') or super")


def test_results_of_another_source_are_not_mixed_with_those_of_this_one(run, place, monkeypatch):
    (place / "own.py").write_text(OWN_METHOD)
    first = run("own.py:Eager", "fedper", untuned=True).comparison
    (place / "own.py").write_text(EDITED_METHOD)
    for changes in ({}, {"seeds": (0, 1, 2)}, {"methods": ["fedrep"]}):
        added = changes.pop("methods", [])
        with pytest.raises(UsageError, match=r"another source of method eager \(SHA-256 \w+, now \w+\); --again .*"):
            run("own.py:Eager", "fedper", *added, untuned=True, **changes)
    # Nothing was changed by the refusal, and the source of before continues.
    (place / "own.py").write_text(OWN_METHOD)
    monkeypatch.setattr(simulated_runs, "_simulate", None)
    assert run("own.py:Eager", "fedper", untuned=True).comparison == first


def test_a_source_that_is_not_found_later_stays_noted(run, place, monkeypatch):
    (place / "own.py").write_text(OWN_METHOD)
    run("own.py:Eager", tune=0)
    with monkeypatch.context() as patched:
        patched.setattr(interface, "own_sources_of", lambda *_: {})
        run("own.py:Eager", tune=0)
    (place / "own.py").write_text(EDITED_METHOD)
    with pytest.raises(UsageError, match="another source of method eager"):
        run("own.py:Eager", tune=0)


def test_only_the_methods_with_another_source_are_run_again(run, place, monkeypatch):
    (place / "own.py").write_text(OWN_METHOD)
    run("own.py:Eager", "fedper", untuned=True)
    (place / "own.py").write_text(EDITED_METHOD)
    (place / "comparison/runs/eager/notes.txt").write_text("a file of the user")
    simulate = simulated_runs._simulate
    simulated = list[str]()

    def noting(spec, *others):
        simulated.append(spec.location)
        return simulate(spec, *others)

    monkeypatch.setattr(simulated_runs, "_simulate", noting)
    said = list[str]()
    again = Running(in_process=True, again=True, say=said.append)
    changed = run("own.py:Eager", "fedper", untuned=True, running=again).comparison
    assert sorted(simulated) == sorted(
        [f"trials/eager/{number:03d}-1-rounds" for number in range(2)]
        + [f"untuned/eager/seed-{seed}" for seed in (0, 1)]
    )
    assert re.search("another source of method eager .* all simulations of eager run again", said[0])
    (eager,) = [method for method in changed.methods if method.name == "eager"]
    assert all("ValueError: edited" in run.failure for run in eager.untuned), "the changed source was run"
    assert (place / "comparison/runs/eager/notes.txt").exists()
    # The folder is one of the changed source now.
    simulated.clear()
    assert run("own.py:Eager", "fedper", untuned=True).comparison == changed
    assert simulated == []


def test_a_simulation_that_cannot_be_removed_is_not_continued_with_another_source(run, place):
    (place / "own.py").write_text(OWN_METHOD)
    run("own.py:Eager", tune=0)
    (place / "own.py").write_text(EDITED_METHOD)
    folder = place / "comparison/runs/eager/seed-1"
    folder.rename(place / "elsewhere")
    folder.symlink_to(place / "elsewhere")
    (place / "comparison/runs/eager/figures").mkdir()
    with pytest.raises(UsageError, match=r"seed-1: cannot be removed to run again \(see the warning\); remove it"):
        run("own.py:Eager", tune=0, running=Running(in_process=True, again=True))
    with pytest.raises(UsageError, match="another source of method eager"):
        run("own.py:Eager", tune=0)
    folder.unlink()
    run("own.py:Eager", tune=0, running=Running(in_process=True, again=True))
    assert (place / "comparison/runs/eager/figures").is_dir()


@pytest.mark.parametrize("how", [{"in_process": True}, {"parallel": 1}], ids=["in this process", "in a worker"])
def test_runs_that_come_after_an_edit_fail_and_are_not_mixed_with_those_before(run, place, how):
    (place / "own.py").write_text(OWN_METHOD)

    def edit(progress):
        if progress.is_over and progress.event.startswith("runs/eager/seed-0"):
            (place / "own.py").write_text(f"{OWN_METHOD}\n# changed\n")

    edited = run("own.py:Eager", tune=0, running=Running(watch=edit, **how)).comparison
    (eager,) = [method for method in edited.methods if method.name == "eager"]
    (others,) = {bool(each.failure) for method in edited.methods if method is not eager for each in method.runs}
    assert not others
    assert eager.runs[0].failure == ""
    assert re.match(r"another source of the method \(SHA-256 \w+, now \w+\) than the compa", eager.runs[1].failure)
    # The source of before makes the missing run.
    (place / "own.py").write_text(OWN_METHOD)
    whole = run("own.py:Eager", tune=0, running=Running(again=True, **how)).comparison
    (eager,) = [method for method in whole.methods if method.name == "eager"]
    assert [each.failure for each in eager.runs] == ["", ""]


def test_another_source_of_the_encoder_concerns_all_methods(run, place):
    (place / "own.py").write_text(OWN_METHOD)
    run("fedper", tune=0, encoder="own.py:net")
    (place / "own.py").write_text(f"{OWN_METHOD}\n# changed\n")
    with pytest.raises(UsageError, match=r"another source of encoder .* fedper"):
        run("fedper", tune=0, encoder="own.py:net")
