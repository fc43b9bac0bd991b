"""A simulation that is continued: resumed from Python, and with more rounds than it began with."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import linecache
import types

import numpy as np
import pytest
from simulation_harness import write_images

from coordinator import SimulationResult, simulate
from coordinator.cli import main
from coordinator.journal.entries import fact_of
from coordinator.journal.memory import MemoryJournal
from coordinator.journal.sqlite import SqliteJournal
from coordinator.simulation import own_parts
from coordinator.simulation import setup as simulation_folder
from coordinator.simulation.own_sources import own_sources
from coordinator.state.store import StateFolder
from coordinator.views.run_list import RunList
from coordinator.views.runs import replay
from edge_agent import methods
from edge_agent.core.errors import RunFailed, StateError, UsageError
from edge_agent.methods.base import _reads_rounds
from edge_agent.methods.fedavg import FedAvg


@pytest.fixture
def settings(tmp_path):
    images = write_images(tmp_path / "images.npz", 90)
    return {"data": images, "clients": 3, "engine": "serial", "local": False, "params": {"batch_size": 8}}


def contents(folder):
    """SHA-256 of all checkpoints and client states of a simulation."""
    files = [path for name in ("blobs", "clients") for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def scores(result):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in result.rounds]


@pytest.mark.parametrize("method", ["fedavg", "fedpac", "repper", "dualfed", "scaffold"])
@pytest.mark.parametrize("others", [{}, {"fraction": 0.4, "new_clients": 1}], ids=["all", "some"])
def test_more_rounds_end_in_the_bits_of_an_uninterrupted_run(tmp_path, settings, method, others):
    settings |= others
    whole = simulate(method, **settings, rounds=4, out=tmp_path / "whole")
    simulate(method, **settings, rounds=1, out=tmp_path / "parts", resume=True)
    simulate(method, **settings, rounds=2, out=tmp_path / "parts", resume=True)
    parts = simulate(method, **settings, rounds=4, out=tmp_path / "parts", resume=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert scores(parts) == scores(whole)
    assert parts.clients == whole.clients
    assert SimulationResult.open(tmp_path / "parts").rounds == parts.rounds
    with StateFolder(tmp_path / "parts").look() as state:
        assert [entry.fact.rounds for entry in state.journal.entries("run-0001", ("run_extended",))] == [2, 4]
        runs = RunList()
        for entry in state.journal.entries(kinds=RunList.kinds):
            runs.add(entry)
        assert (runs.runs["run-0001"].status, runs.runs["run-0001"].rounds) == ("finished", 4)


def test_the_command_continues_a_finished_run(tmp_path, settings, capsys):
    whole = simulate("fedper", **settings, rounds=3, out=tmp_path / "whole")
    simulate("fedper", **settings, rounds=1, out=tmp_path / "parts")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--resume", "--rounds", "3", "--out", str(tmp_path / "parts"), "--json"])
    assert ended.value.code == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert scores(SimulationResult.open(tmp_path / "parts")) == scores(whole)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--resume", "--rounds", "2", "--out", str(tmp_path / "parts")])
    assert ended.value.code == 2
    assert "2 rounds asked for, and the simulation there has 3" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "method, params, reason",
    [
        ("spherefed", {}, "its last round calibrates"),
        ("fedkd", {}, "share of energy"),
        ("repper", {"decay_at": (0.5,)}, "step size falls"),
    ],
)
def test_a_method_that_depends_on_the_number_of_rounds_is_refused(tmp_path, settings, method, params, reason):
    settings["params"] = {**settings["params"], **params}
    simulate(method, **settings, rounds=2, out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json")} | contents(tmp_path / "run")
    with pytest.raises(UsageError, match=f"2 rounds cannot become 3: method '{method}' depends on .*{reason}"):
        simulate(method, **settings, rounds=3, out=tmp_path / "run", resume=True)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json")} | contents(tmp_path / "run")
    assert after == before
    assert len(SimulationResult.open(tmp_path / "run").rounds) == 2


def test_each_method_that_reads_the_number_of_rounds_says_what_for():
    reading = {name for name in methods.names() if _reads_rounds(methods.get(name))}
    assert reading == {"fedkd", "repper", "spherefed"}
    assert all("tied_to_rounds" in vars(methods.get(name)) for name in reading)
    assert {name for name in methods.names() if methods.create(name).tied_to_rounds} == {"fedkd", "spherefed"}
    assert methods.create("spherefed", {"calibrate": False}).tied_to_rounds == ""
    assert methods.create("fedkd", {"energy_start": 0.9, "energy_end": 0.9}).tied_to_rounds == ""


@pytest.mark.parametrize(
    "others, reason",
    [
        ({"full_last_round": True, "fraction": 0.4}, "with full_last_round all clients take part in round 2"),
        ({"mode": "buffered", "speeds": "pi4,jetson", "buffer": 1}, "clients that are at work at the end lose"),
    ],
    ids=["full last round", "buffered"],
)
def test_a_run_whose_last_round_is_unlike_the_others_is_continued_until_that_has_begun(
    tmp_path, settings, others, reason
):
    settings |= others
    whole = simulate("fedper", **settings, rounds=4, out=tmp_path / "whole")

    def stop_in_round_1(job):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate("fedper", **settings, rounds=2, out=tmp_path / "begun", watch=stop_in_round_1)
    begun = simulate("fedper", **settings, rounds=4, out=tmp_path / "begun", resume=True)
    assert contents(tmp_path / "begun") == contents(tmp_path / "whole")
    assert begun.clients == whole.clients
    simulate("fedper", **settings, rounds=2, out=tmp_path / "over")
    with pytest.raises(UsageError, match=f"2 rounds cannot become 4: .*{reason}"):
        simulate("fedper", **settings, rounds=4, out=tmp_path / "over", resume=True)
    assert len(SimulationResult.open(tmp_path / "over").rounds) == 2


def step_of(client):
    return client.round / client.rounds


class Scheduled(FedAvg):
    """Reads the number of rounds in a function of its file."""

    def local_update(self, client, received):
        step_of(client)
        return super().local_update(client, received)


class Plain(FedAvg):
    """Reads it nowhere."""

    def local_update(self, client, received):
        return super().local_update(client, received)


def test_own_methods_are_asked_by_their_code():
    assert Scheduled().tied_to_rounds == "its code reads client.rounds"
    assert Plain().tied_to_rounds == ""


# --- resume from Python ----------------------------------------------------------------------------------------------


def test_a_stopped_run_is_resumed_in_the_same_bits(tmp_path, settings):
    whole = simulate("fedper", **settings, rounds=3, out=tmp_path / "whole")
    jobs = itertools.count()

    def stop(job):
        if next(jobs) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate("fedper", **settings, rounds=3, out=tmp_path / "parts", watch=stop)
    with pytest.raises(UsageError, match="continue it with resume=True"):
        simulate("fedper", **settings, rounds=3, out=tmp_path / "parts")
    parts = simulate("fedper", **settings, rounds=3, out=tmp_path / "parts", resume=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert [row["loss"] for row in parts.rounds] == [row["loss"] for row in whole.rounds]
    assert parts.clients == whole.clients


def test_more_rounds_for_a_run_that_was_stopped(tmp_path, settings):
    simulate("fedper", **settings, rounds=4, out=tmp_path / "whole")
    jobs = itertools.count()

    def stop(job):
        if next(jobs) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate("fedper", **settings, rounds=2, out=tmp_path / "parts", watch=stop)
    simulate("fedper", **settings, rounds=4, out=tmp_path / "parts", resume=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize("step", ["write_json", "append"])
def test_a_kill_while_rounds_are_added_costs_nothing(tmp_path, settings, monkeypatch, step):
    simulate("fedper", **settings, rounds=3, out=tmp_path / "whole")
    simulate("fedper", **settings, rounds=1, out=tmp_path / "parts")

    def killed(*_arguments, **_named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if step == "write_json":
            patched.setattr(simulation_folder, "write_json", killed)
        else:  # after the plan is written and personal models are gone
            patched.setattr(SqliteJournal, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            simulate("fedper", **settings, rounds=3, out=tmp_path / "parts", resume=True)
    if step == "append":
        with pytest.raises(UsageError, match=r"has not finished \(1 of 3 rounds\)"):
            SimulationResult.open(tmp_path / "parts")
    simulate("fedper", **settings, rounds=3, out=tmp_path / "parts", resume=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_samples_of_the_caller_are_resumed_and_others_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 2
    settings = {"clients": 2, "engine": "serial", "local": False, "out": tmp_path / "run", "resume": True}
    first = simulate("fedper", data=(pixels, labels), rounds=1, **settings)
    again = simulate("fedper", data=(pixels, labels), rounds=1, **settings)
    assert (again.rounds, again.clients) == (first.rounds, first.clients)
    assert len(simulate("fedper", data=(pixels, labels), rounds=2, **settings).rounds) == 2
    with pytest.raises(UsageError):
        simulate("fedper", data=(pixels, labels[::-1].copy()), rounds=2, **settings)


def test_a_finished_run_is_read_without_its_data_and_shown_to_functions_and_logs(tmp_path, settings, capsys):
    settings |= {"rounds": 2, "out": tmp_path / "run", "resume": True}
    first = simulate("fedper", **settings)
    (tmp_path / "images.npz").unlink()
    before = contents(tmp_path / "run")
    written = (tmp_path / "run" / "result.json").read_bytes()
    rows = []
    again = simulate("fedper", **settings, on_round=rows.append)
    assert (again.summary, again.clients) == (first.summary, first.clients)
    assert [(row.round, row.rounds, row.is_replayed) for row in rows] == [(1, 2, True), (2, 2, True)]
    assert [row.loss for row in rows] == [row["loss"] for row in first.rounds]
    assert (tmp_path / "run" / "result.json").read_bytes() == written
    # A log that comes later has everything, and the result says so.
    logged = simulate("fedper", **settings, log=f"csv:{tmp_path / 'logs'}")
    assert [(log["rounds"], log["is_complete"]) for log in logged.summary["logs"]] == [(2, True)]
    assert SimulationResult.open(tmp_path / "run").summary == logged.summary
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--resume", "--out", str(tmp_path / "run"), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == logged.summary
    assert contents(tmp_path / "run") == before


def test_a_result_of_before_more_rounds_is_not_taken_for_that_of_after_them(tmp_path, settings):
    settings |= {"out": tmp_path / "run", "resume": True}
    simulate("fedper", **settings, rounds=1)
    earlier = (tmp_path / "run" / "result.json").read_bytes()
    whole = simulate("fedper", **settings, rounds=2)
    # As a kill leaves it that comes between the end of the run and the writing of its files.
    (tmp_path / "run" / "result.json").write_bytes(earlier)
    with pytest.raises(StateError, match=r"result\.json: missing, or not of this run"):
        SimulationResult.open(tmp_path / "run")
    assert scores(simulate("fedper", **settings, rounds=2)) == scores(whole)
    assert len(SimulationResult.open(tmp_path / "run").rounds) == 2


def test_a_finished_run_that_is_called_otherwise_is_written_again(tmp_path, settings):
    settings |= {"rounds": 1, "out": tmp_path / "run", "resume": True}
    simulate("fedper", **settings, name="first try")
    again = simulate("fedper", **settings, name="second try", tags={"kind": "test"})
    assert (again.summary["name"], again.summary["tags"]) == ("second try", {"kind": "test"})
    assert SimulationResult.open(tmp_path / "run").summary["name"] == "second try"


def test_other_settings_are_refused_all_at_once(tmp_path, settings):
    simulate("fedper", **settings, rounds=2, out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"method fedper, now fedavg.*seed 0, now 1"):
        simulate("fedavg", **settings, rounds=2, seed=1, out=tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match="1 round asked for, and the simulation there has 2"):
        simulate("fedper", **settings, rounds=1, out=tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match="name it with out="):
        simulate("fedper", **settings, resume=True)


# --- the journal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_an_extended_run_is_unfinished_until_it_ends_again(tmp_path, kind):
    memory = contextlib.nullcontext(MemoryJournal())
    with memory if kind == "memory" else SqliteJournal(tmp_path / "journal.db") as journal:
        names = [journal.request_run(fact_of("run_requested", {"method": "fedavg", "rounds": 1})) for _ in range(2)]
        for name in names:
            journal.append(fact_of("run_finished", {}), run=name)
        assert journal.unfinished() == []
        journal.append(fact_of("run_extended", {"rounds": 5}), run=names[0])
        assert journal.unfinished() == names[:1]
        record = replay(journal, names[0])
        assert (record.status, record.request.rounds, record.end) == ("running", 5, None)
        journal.append(fact_of("run_finished", {}), run=names[0])
        assert journal.unfinished() == []
        assert replay(journal, names[0]).status == "finished"


# --- parts of the user's own -----------------------------------------------------------------------------------------

OWN_PARTS = """
from torch import nn

from edge_agent.methods.fedavg import FedAvg


class Eager(FedAvg):
    scale = 1.0


def net(task):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
"""


@pytest.fixture
def own_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_PARTS)
    return file


@pytest.mark.parametrize("part", ["method", "encoder"])
@pytest.mark.parametrize("rounds", [1, 2], ids=["as many rounds", "more rounds"])
def test_a_run_does_not_go_on_with_another_source(tmp_path, settings, own_file, part, rounds):
    parts = {"method": f"{own_file}:Eager"} if part == "method" else {"method": "fedavg", "encoder": f"{own_file}:net"}
    simulate(**parts, **settings, rounds=1, out=tmp_path / "run")
    before = contents(tmp_path / "run")
    own_file.write_text(OWN_PARTS.replace("1.0", "2.0"))
    with pytest.raises(
        UsageError, match=rf"another source of the {part} \(SHA-256 \w+, now \w+\); put the source back"
    ):
        simulate(**parts, **settings, rounds=rounds, out=tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before
    own_file.write_text(OWN_PARTS)
    assert len(simulate(**parts, **settings, rounds=rounds, out=tmp_path / "run", resume=True).rounds) == rounds


def test_only_a_run_with_rounds_left_needs_the_file_of_its_method(tmp_path, settings, own_file):
    simulate(f"{own_file}:Eager", **settings, rounds=1, out=tmp_path / "run")
    own_file.unlink()
    assert simulate(f"{own_file}:Eager", **settings, rounds=1, out=tmp_path / "run", resume=True).rounds
    with pytest.raises(UsageError, match="there is no file"):
        simulate(f"{own_file}:Eager", **settings, rounds=2, out=tmp_path / "run", resume=True)


CELL = """
from torch import nn

from edge_agent.methods import MethodParams
from edge_agent.methods.fedavg import FedAvg


class EagerParams(MethodParams):
    eagerness: float = 0.5


class Steady(FedAvg):
    def steadiness(self):
        return 1


class Eager(Steady):
    Params = EagerParams
    scale = 1.0

    @staticmethod
    def speed():
        return 3


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.LazyLinear(4))


def net():
    return Net()
"""


def run_cell(text):
    """The module of a notebook after a cell with this text, whose source `linecache` has."""
    name = f"<cell {len(linecache.cache)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType("__main__")
    exec(compile(text, name, "exec"), vars(module))
    return module


def test_a_run_does_not_go_on_with_another_class_of_the_program(tmp_path, settings):
    simulate(run_cell(CELL).Eager, **settings, rounds=1, out=tmp_path / "run")
    assert simulate(run_cell(CELL).Eager, **settings, rounds=1, out=tmp_path / "run", resume=True).rounds
    edited = run_cell(CELL.replace("return 1", "return 2")).Eager
    with pytest.raises(UsageError, match="another source of the method"):
        simulate(edited, **settings, rounds=1, out=tmp_path / "run", resume=True)


def sources_of_cell(text):
    """The hashes of method and encoder of a cell: of the class, and of the function, of an encoder."""
    module = run_cell(text)
    method = own_parts.add_method(module.Eager)
    of_class = own_sources(method=method, encoder=own_parts.add_encoder(module.Net))
    of_function = own_sources(encoder=own_parts.add_encoder(module.net))
    return {**of_class, "function": of_function["encoder"]}


@pytest.mark.parametrize(
    "before, after, part",
    [
        ("eagerness: float = 0.5", "eagerness: float = 0.6", "method"),
        ("return 1", "return 2", "method"),
        ("scale = 1.0", "scale = 2.0", "method"),
        ("return 3", "return 4", "method"),
        ("LazyLinear(4)", "LazyLinear(5)", "encoder"),
        ("return Net()", "return Net().eval()", "function"),
    ],
)
def test_each_edit_in_a_cell_of_a_notebook_changes_the_hash_of_its_part_alone(before, after, part):
    first = sources_of_cell(CELL)
    assert first == sources_of_cell(f"# another cell\n{CELL}")
    edited = sources_of_cell(CELL.replace(before, after))
    assert [name for name in first if edited[name] != first[name]] == [part]


def test_a_method_that_failed_is_mended_for_a_new_run(tmp_path, settings, own_file):
    own_file.write_text(OWN_PARTS.replace("scale = 1.0", "def loss(self, *_): return 1 / 0"))
    method = f"{own_file}:Eager"
    with pytest.raises(
        RunFailed, match=r"own.py, line \d+, in loss\); once you have edited that file, start a new run in"
    ):
        simulate(method, **settings, rounds=1, out=tmp_path / "run")
    own_file.write_text(OWN_PARTS)
    with pytest.raises(UsageError, match="no round is over; remove the folder and start again"):
        simulate(method, **settings, rounds=1, out=tmp_path / "run", resume=True)


def test_parts_that_ship_have_no_source_of_the_user():
    assert own_sources(method="fedavg", encoder="small_cnn") == {}
    assert own_sources() == {}
