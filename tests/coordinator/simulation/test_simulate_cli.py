"""``headwater simulate`` as people type it."""

from __future__ import annotations

import functools
import json
import logging
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from coordinator.cli import simulate
from coordinator.simulation.client_pool import SimulatedClients
from edge_agent.data.partition import Division


@pytest.fixture
def call(call, tmp_path, monkeypatch):
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(call, "simulate")


@pytest.fixture
def images(tmp_path):
    labels = np.arange(60) % 3
    inputs = np.random.default_rng(0).integers(0, 256, (60, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "i.npz", inputs=inputs, labels=labels, class_names=np.array(["a", "b", "c"]))
    encoder = ("--encoder", "linear", "--encoder-param", "feature_dim=4")
    return ("--data", "npz:i.npz", *encoder, "--device", "cpu", "--engine", "serial")


SHORT = ("--clients", 3, "--rounds", 2, "--set", "lr=0.05", "--params", "batch_size=8")


def test_one_json_object_on_stdout_and_a_line_for_each_round_on_stderr(call, images, tmp_path):
    code, out, err = call(*images, *SHORT, "--out", "sim", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["params"]["batch_size"] == 8
    assert result["task"]["encoder_params"] == {"feature_dim": 4}
    assert len(result["rounds"]) == 2
    assert [line.partition(":")[0] for line in err.splitlines()] == ["round 1 of 2", "round 2 of 2"]
    assert all("left" in line and "acc.personal" in line and "loss" in line for line in err.splitlines())
    assert json.loads((tmp_path / "sim" / "result.json").read_text()) == result


def test_zero_is_not_taken_for_silence(call, images, tmp_path):
    """Evaluation never, torch's own threads: both differ from what silence means."""
    code, out, err = call(*images, *SHORT, "--evaluate-every", 0, "--threads", 0, "--seed", 0, "--out", "sim", "--json")
    assert code == 0, err
    assert [one["acc"] for one in json.loads(out)["rounds"]] == [{}, {}]
    plan = json.loads((tmp_path / "sim" / "simulation.json").read_text())
    assert (plan["evaluate_every"], plan["threads"]) == (0, 0)


def test_what_clients_reach_alone_is_left_out_on_request(call, images, tmp_path):
    """By option and by configuration, and the shared model has the same bits."""
    (tmp_path / "plan.toml").write_text("local = false")
    results = []
    for number, words in enumerate(((), ("--no-local",), ("--config", "plan.toml"))):
        code, out, err = call(*images, *SHORT, *words, "--out", f"sim{number}", "--json")
        assert code == 0, err
        results.append(json.loads(out))
    assert ["local" in result["last"]["acc"] for result in results] == [True, False, False]
    assert len({result["encoder_sha256"] for result in results}) == 1


@pytest.mark.usefixtures("pictures")
def test_a_table_and_where_the_rest_is(call, images, tmp_path):
    code, out, err = call(*images, *SHORT, "--method", "fedper", "--after")
    assert code == 0, err
    folder = tmp_path / "simulation-fedper-iid-seed0"
    assert "run-0001: fedper, 3 clients, partition iid" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line[:3].strip() in {"1", "2", "end"}}
    assert set(rows) == {"1", "2", "end"}
    assert "chosen on the test samples" in out
    assert ET.parse(folder / "curves.svg").getroot().tag.endswith("svg")
    assert "acc.personal, worst tenth" in (folder / "curves.svg").read_text()
    run = folder / "runs" / "run-0001"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert re.search(r"<h1>fedper on npz:[\w.]+, 3 clients, iid <span", page)
    described = json.loads((run / "summary.json").read_text())["simulation"]
    assert described["plan"]["method"] == "fedper"
    assert described["partition"]["rule"] == "iid"
    rows = Division.read(folder / "partition.json").clients
    counts = {one["id"]: (sum(one["train"]), sum(one["test"])) for one in described["partition"]["clients"]}
    assert counts == {name: (len(share.train), len(share.test)) for name, share in rows.items()}
    result = json.loads((folder / "result.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    after = [fmean(one["acc"]["after"].values()) for one in metrics if one["kind"] == "round" and "after" in one["acc"]]
    assert after
    assert after == pytest.approx(
        [one["acc"]["after"]["clients_mean"] for one in result["rounds"] if "after" in one["acc"]], abs=1e-6
    )


@pytest.mark.parametrize("method", ["local", "lg_fedavg"])
def test_encoders_that_stay_with_clients_are_not_told_by_the_hash_of_nothing(call, images, method):
    assert call(*images, *SHORT, "--method", method, "--out", "sim")[1].count("no shared encoder") == 1
    _, out, _ = call("--resume", "--out", "sim", "--json")
    assert json.loads(out)["encoder_sha256"] == ""


def test_many_rounds_are_shown_evenly_apart():
    from coordinator.cli.output import show
    from coordinator.cli.simulate import SHOWN_ROUNDS, rounds_table

    rounds = [
        {"round": n, "acc": {}, "loss": None, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1} for n in range(1, 201)
    ]
    result = {"run_id": "r", "method": "m", "clients": 1, "partition": "iid", "rounds": rounds, "last": {"acc": {}}}
    shown = list(rounds_table(result).columns[0].cells)
    assert len(shown) <= SHOWN_ROUNDS + 2
    assert shown[0] == "1"
    assert shown[-2:] == ["200", "end"]
    show(rounds_table(result))


def test_ctrl_c_says_how_to_go_on_and_what_it_says_works(call, images, monkeypatch):
    """Stopped before the fifth of nine jobs; what comes out is what an undisturbed run gives."""
    whole = json.loads(call(*images, *SHORT, "--out", "whole", "--json")[1])
    work = SimulatedClients.work
    done = []

    def interrupted(self):
        if self._jobs or self._engine.is_busy:
            done.append(1)
            if len(done) == 5:
                raise KeyboardInterrupt
        return work(self)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedClients, "work", interrupted)
        code, out, err = call(*images, *SHORT, "--out", "a b", "--json")
    assert (code, out) == (130, "")
    said = err.splitlines()[-1]
    assert said.startswith("stopped with 1 of 2 rounds closed, nothing is lost; resume with: headwater simulate ")
    assert said.endswith("--resume --out 'a b'")
    code, out, err = call("--resume", "--out", "a b", "--json")
    assert code == 0, err
    assert json.loads(out)["encoder_sha256"] == whole["encoder_sha256"]
    assert json.loads(out)["last"] == whole["last"]
    assert err.splitlines()[0].startswith("round 2 of 2")


def test_ctrl_c_before_the_run_leaves_nothing(call, images, monkeypatch, tmp_path):
    from coordinator.simulation.setup import Prepared

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Prepared, "of", interrupted)
    code, _, err = call(*images, *SHORT, "--out", "sim")
    assert code == 130
    assert "the same command begins it" in err
    assert not (tmp_path / "sim").exists()


def test_a_file_holds_what_options_say_and_options_win(call, images, tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "plan.toml").write_text(
        'data = "npz:../i.npz"\nencoder = "linear"\nrounds = 7\nclients = 2\nengine = "serial"\n'
        "[encoder_params]\nfeature_dim = 4\n"
        "[params]\nlr = 0.05\nbatch_size = 8\n"
    )
    code, out, err = call("--config", "plans/plan.toml", "--rounds", 1, "--set", "lr=0.25", "--out", "sim", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["clients"], len(result["rounds"])) == (2, 1)
    assert (result["params"]["lr"], result["params"]["batch_size"]) == (0.25, 8)


def test_places_count_from_where_they_are_given_the_command_line_or_the_file(call, images, tmp_path):
    """Two partitions of one name: of two clients here, of three beside the file."""
    (tmp_path / "plans").mkdir()
    for clients, place in ((2, "."), (3, "plans")):
        made = (*images, "--clients", clients, "--rounds", 1, "--out", f"made-{clients}")
        assert call(*made)[0] == 0
        Path(f"made-{clients}/partition.json").rename(Path(place) / "p.json")
    Path("plans/plan.toml").write_text('data = "npz:i.npz"\nfolder = ".."\npartition = "p.json"\nrounds = 1\n')
    for typed, clients in (((), 3), (("--partition", "p.json"), 2)):
        words = ("--config", "plans/plan.toml", *images[2:], *typed)
        code, out, err = call(*words, "--out", f"sim-{clients}", "--json")
        assert code == 0, err
        assert json.loads(out)["clients"] == clients


@pytest.mark.parametrize(
    "line, typed",
    [
        ("data = 5", ()), ("data = { a = 1 }", ()), ("data = [[]]", ("--rounds", 1)), ("params = 5", ()),
        ("params = 5", ("--set", "lr=1")), ("params = [1]", ("--set", "lr=1")), ("input = 5", ("--input", "mean=1")),
        ('encoder_params = "x"', ("--encoder-param", "a=1")), ("partition = 5", ()), ("weights = 5", ()),
        ("weights = { a = 1 }", ()), ("folder = 5", ()),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_in_a_file_are_its_mistakes(call, images, tmp_path, line, typed):
    name = line.partition(" ")[0]
    Path("plan.toml").write_text(line + ("" if name == "data" else '\ndata = "npz:i.npz"') + "\n")
    code, _, err = call("--config", "plan.toml", *typed)
    assert code == 2
    assert err.startswith("headwater: plan.toml: ")
    assert f"  - {name}" in err


@pytest.mark.parametrize(
    "words, said",
    [
        (("--partition", "dirichlett", "--alpha", 1), "unknown partition 'dirichlett': did you mean 'dirichlet'?"),
        (("--partition", "dirichlet"), "partition dirichlet needs alpha, for example --alpha 0.5"),
        (("--alpha", "0.5"), "alpha = 0.5 has no effect on partition iid"),
        (("--clients", 0), "clients = 0"),
        (("--clients", 61), "60 samples for 61 clients"),
        (("--method", "fedpicc"), "did you mean 'fedpick'?"),
        (("--set", "lrr=1"), "did you mean 'lr'?"),
        (("--set", "lr"), "expected name=value"),
        (("--encoder-param", "width=3"), "width"),
        (("--input", "hight=3"), "did you mean 'height'?"),
        (("--partition", "none.json"), "no such file"),
        (("--fraction", "1.5", "--rounds", "0"), "2 mistakes"),
        (("--fraction", "half"), "--fraction 'half': expected a share such as 0.1, or two of them: 0.1:1.0"),
        (("--fraction", "0.9:0.1"), "fraction from 0.9 to 0.1: expected the smaller one first"),
        (("--workers", 2), "workers = 2 has no effect on engine serial"),
        (("--new-clients", 20), "at least one client must train"),
        (("--device", "cuda:99"), "cuda:99"),
        (("--partition", "domains", "--data", "npz:nowhere.npz"), "nowhere.npz"),
    ],
)
def test_mistakes_exit_with_2_and_write_nothing(call, images, tmp_path, words, said):
    before = set(tmp_path.iterdir())
    code, out, err = call(*images, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert set(tmp_path.iterdir()) == before


def test_without_data_it_says_how_to_name_some(call):
    code, _, err = call("--method", "fedavg")
    assert code == 2
    assert "--data digits" in err


def test_a_folder_that_holds_a_run_is_neither_overwritten_nor_gone_on_with_silently(call, images):
    assert call(*images, *SHORT, "--out", "sim")[0] == 0
    code, _, err = call(*images, *SHORT, "--out", "sim")
    assert code == 2
    assert "resume it with --resume, or choose another folder with --out" in err


@pytest.mark.parametrize(
    "words, said",
    [
        (("--resume",), "name the folder with --out"),
        (("--resume", "--out", "nowhere"), "nowhere holds no simulation"),
        (("--resume", "--out", "sim", "--rounds", 1), "1 round asked for, and the simulation there has 2"),
        (("--resume", "--out", "sim", "--alpha", 2), "alpha is None, 2.0 was given"),
    ],
)
def test_resuming_takes_nothing_but_the_folder_and_more_rounds(call, images, words, said):
    assert call(*images, *SHORT, "--out", "sim")[0] == 0
    code, _, err = call(*words)
    assert code == 2
    assert said in err


def test_a_run_that_failed_says_so_again_when_it_is_resumed(call, images):
    for words in ((*images, *SHORT, "--set", "lr=1e30", "--out", "sim"), ("--resume", "--out", "sim")):
        code, out, err = call(*words)
        assert (code, out) == (1, "")
        assert "client 'c1': loss became nan" in err
        assert "start a new run with different settings" in err
        assert "--resume" not in err


def test_a_terminal_gets_a_bar_with_the_time_that_is_left(call, images, monkeypatch):
    monkeypatch.setattr(simulate.console, "_force_terminal", True)
    monkeypatch.setattr(simulate.console, "is_interactive", True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    code, out, err = call(*images, *SHORT, "--out", "sim")
    assert code == 0
    assert " left " in err
    assert "acc.personal" in err
    assert "round 1 of 2:" not in err
    assert "run-0001: fedavg" in out


def test_who_takes_part_is_told_in_the_result_and_the_table(call, images):
    words = (*images, "--clients", 6, "--rounds", 3, "--new-clients", 2, "--fraction", "0.5:1.0", "--dropout", 0.1)
    code, out, err = call(*words, "--method", "fedper", "--out", "sim")
    assert code == 0, err
    assert "acc.new (clients that never trained: a head on the frozen encoder)" in out
    result = json.loads(Path("sim/result.json").read_text())
    assert {"rounds", "best", "last", "engine", "workers", "threads", "seed", "partition_hash"} <= set(result)
    assert (result["fraction"], result["new_clients"], result["dropout"]) == ([0.5, 1.0], 2, 0.1)
    assert {"clients_mean", "samples_mean", "std", "worst10"} <= set(result["last"]["acc"]["new"])


def test_a_run_may_be_gone_on_with_on_another_engine(call, images):
    whole = json.loads(call(*images, *SHORT, "--out", "sim", "--json")[1])
    code, out, err = call("--resume", "--out", "sim", "--engine", "serial", "--json")
    assert code == 0, err
    assert json.loads(out) == whole
    code, _, err = call("--resume", "--out", "sim", "--engine", "poool")
    assert code == 2
    assert "'serial', 'pool'" in err


def test_saved_partition_of_the_run_can_be_given_to_another(call, images):
    first = json.loads(call(*images, *SHORT, "--partition", "dirichlet", "--alpha", 1, "--out", "a", "--json")[1])
    given = ("--partition", Path("a/partition.json"), "--rounds", 1, "--method", "local", "--seed", 4)
    code, out, err = call(*images, *given, "--out", "b", "--json")
    assert code == 0, err
    second = json.loads(out)
    assert second["partition_hash"] == first["partition_hash"]
    assert second["partition"] == "dirichlet"
    code, out, err = call(*images, *given, "--engine", "pool", "--workers", 1, "--out", "c", "--json")
    assert code == 0, err
    assert json.loads(out)["rounds"][0]["acc"] == second["rounds"][0]["acc"]
    for folder in ("b", "c"):
        code, out, err = call("--resume", "--out", folder, "--json")
        assert code == 0, err


def test_a_file_and_the_command_line_may_write_one_place_in_two_ways(call, images):
    assert call(*images, *SHORT, "--out", "a")[0] == 0
    Path("plans").mkdir()
    Path("plans/plan.toml").write_text('data = "npz:i.npz"\nfolder = ".."\npartition = "../a/partition.json"\n')
    assert call("--config", "plans/plan.toml", "--rounds", 1, *images[2:], "--out", "sim")[0] == 0
    code, _, err = call("--resume", "--partition", "a/partition.json", "--out", "sim")
    assert code == 0, err


def test_the_time_that_is_left_knows_that_the_end_is_cheaper(tmp_path, images, monkeypatch):
    """2 rounds of 3 clients at 4 s each; the reports of 3 clients at the end count a quarter: 3 s are left."""
    from coordinator.simulation.plan import Plan
    from coordinator.simulation.run import open_simulation
    from coordinator.simulation.setup import Prepared

    seconds = [0.0]
    monkeypatch.setattr(simulate.time, "monotonic", lambda: seconds[0])
    plan = Plan(
        data=(images[1],), folder=tmp_path, clients=3, rounds=2, encoder="linear", device="cpu", engine="serial"
    )
    with open_simulation(Prepared.of(plan), tmp_path / "sim") as simulation:
        told = simulate._RunProgress(simulation, later_rounds=2 * plan.rounds)
        trained = 0
        while trained < 6:
            job = simulation.step()
            if job is not None:
                trained = trained + 1
                seconds[0] = seconds[0] + 4.0
                told.count(job)
        assert told.left_s() == pytest.approx(3 * 0.25 * 4.0)
        assert told.time_left() == "about 3 s left, 57 s with all that follow", "twice 6.75 trainings more"
        told.count(job.model_copy(update={"purpose": "personalize"}))
        assert told.left_s() == pytest.approx(24.0 / 6.25 * 0.5)


def test_paper_takes_the_published_values_and_what_is_set_wins(call, images, tmp_path):
    wanted = ("--clients", 3, "--rounds", 1, "--method", "dualfed", "--set", "projector_width=4")
    published = (40.0, 256, False)
    choices = [((), (1.0, 32, True)), (("--paper",), published)]
    choices += [(("--paper", "--set", "batch_size=9"), (40.0, 9, False))]
    for number, (options, expected) in enumerate(choices):
        code, out, err = call(*images, *wanted, *options, "--out", f"sim{number}", "--json")
        assert code == 0, err
        told = json.loads(out)["params"]
        assert (told["contrastive_weight"], told["batch_size"], told["refresh_stats"]) == expected
    again = call("--resume", "--out", "sim0", "--paper")
    assert again[0] == 2
    assert "paper is False, True was given" in again[2]


def test_a_client_below_its_local_baseline_is_named_everywhere(call, tmp_path, caplog):
    """Two classes, dark and bright, which the raw inputs tell apart and a model of fresh weights does not."""
    labels = np.repeat(np.arange(2), 100)
    inputs = np.clip(np.random.default_rng(0).normal(60, 8, (200, 4, 4)) + 120 * labels[:, None, None], 0, 255)
    np.savez(tmp_path / "i.npz", inputs=inputs.astype(np.uint8), labels=labels, class_names=np.array(["a", "b"]))
    options = ("--clients", 2, "--rounds", 1, "--set", "lr=1e-9", "--engine", "serial", "--device", "cpu")
    encoder = ("--encoder", "linear", "--encoder-param", "feature_dim=4")
    code, out, err = call("--data", "npz:i.npz", *options, *encoder, "--out", "sim")
    assert code == 0, err
    result = json.loads((tmp_path / "sim" / "result.json").read_text())
    below = [one for one in result["warnings"] if one["kind"] == "below_local"]
    assert [one["clients"] for one in below] == [["c0"], ["c1"]]
    assert result["last"]["acc"]["local"]["clients_mean"] == 1.0
    page = (tmp_path / "sim" / "runs" / "run-0001" / "report.html").read_text()
    assert "warning: 2 clients are better off alone: acc.local is above acc.personal by more than noise (c0, c1)" in out
    logged = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert not [line for line in logged if "better off alone" in line], "said twice on a terminal"
    for one in below:
        assert one["message"].removeprefix("c").replace("'", "&#39;") in page
