"""A comparison in the logs of experiments: one parent, and a child for each method and seed."""

from __future__ import annotations

import csv
import json
from statistics import fmean

import pytest
from comparison_harness import comparison_of, row_of, run_of
from simulation_harness import small_plan, write_images

from coordinator.api import Watching, finish
from coordinator.research.compare.logged import check_logs, describe_logs, log_comparison
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from edge_agent.core.errors import ConfigError


@pytest.fixture
def compared(tmp_path):
    """A comparison of two methods with two seeds in a folder, one run of which has failed; (record, folder)."""
    images = write_images(tmp_path / "images.npz", 90)
    folder = tmp_path / "comparison"
    rows = []
    for method in ("fedavg", "fedper"):
        runs = []
        for seed in range(2):
            location = f"runs/{method}/seed-{seed}"
            if (method, seed) == ("fedavg", 1):
                runs.append(run_of(seed, [], failure="loss is nan", folder=location))
                continue
            plan = small_plan(images, method, seed=seed, local=False)
            with open_simulation(Prepared.of(plan), folder / location) as simulation:
                result = finish(simulation, folder / location, Watching())
            scope = "personal" if method == "fedper" else "global"
            summary = simulation.state.run("run-0001").summary()
            scores = [agent["acc"][scope] for agent in summary["agents"]]
            assert fmean(scores) == pytest.approx(result["last"]["acc"][scope]["clients_mean"], abs=1e-6)
            runs.append(run_of(seed, scores, folder=location))
        rows.append(row_of(method, runs))
    return comparison_of(*rows, baseline="fedavg", command="headwater compare …"), folder


def test_each_run_is_a_child_of_the_comparison_and_logging_again_adds_nothing(compared, tmp_path):
    record, folder = compared
    table = folder / "table.md"
    table.write_text("| a table |\n")
    for _ in range(2):
        outcomes = log_comparison([f"csv:{tmp_path / 'logs'}"], record, folder)
        assert [outcome.is_complete for outcome in outcomes] == [True] * 4, "the parent, and three runs"
    (parent,) = (tmp_path / "logs").iterdir()
    assert (parent / "table.md").read_text() == "| a table |\n"
    described = json.loads((parent / "run.json").read_text())
    assert described["name"] == "Three methods on digits"
    expected = fmean(fmean(score.accuracy for score in run.clients) for run in record.methods[1].runs)
    assert described["figures"]["fedper.client_mean"] == pytest.approx(expected)
    children = {}
    for child in parent.iterdir():
        if child.is_dir():
            run = json.loads((child / "run.json").read_text())
            children[run["name"]] = child
            assert run["tags"] == {"method": run["params"]["method"], "parameters": "chosen"}
            assert run["parent"]["uid"] == described["uid"]
    assert set(children) == {"fedavg, seed 0", "fedper, seed 0", "fedper, seed 1"}
    for child in children.values():
        with (child / "rounds.csv").open() as file:
            assert [row["round"] for row in csv.DictReader(file)] == ["1", "2"]


def test_a_run_whose_folder_is_gone_is_said_and_the_others_are_logged(compared, tmp_path):
    record, folder = compared
    (folder / "runs/fedper/seed-0/result.json").unlink()
    outcomes = log_comparison([f"jsonl:{tmp_path / 'logs'}"], record, folder)
    assert [outcome.is_complete for outcome in outcomes] == [True, True, False, True]
    assert "holds no simulation that is over" in outcomes[2].reason
    lines = list(describe_logs(outcomes, 1))
    assert lines[0].startswith("logged to jsonl: ")
    assert lines[1] == "and 2 runs below"
    assert lines[2].startswith(f"not all is logged to the logs ({folder}/runs/fedper/seed-0)")
    assert len(lines) == 3


def test_what_cannot_be_logged_is_refused_before_the_first_simulation(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'csv'"):
        check_logs(["cvs"], tmp_path)
    check_logs(["csv"], tmp_path)
