"""The files of a comparison: all of them from the records alone, written whole, the same each time."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest
from comparison_harness import comparison_of, made_up, row_of, run_of

from coordinator.research.compare.outputs import summary_lines, to_json, write_outputs
from edge_agent.core.errors import UsageError


@pytest.fixture(scope="module")
def comparison():
    return made_up(methods=5, clients=6, seeds=3, rounds=4)


def test_the_same_records_give_the_same_files(comparison, tmp_path):
    first = {path.name: path.read_bytes() for path in write_outputs(comparison, tmp_path / "new" / "a")}
    second = {path.name: path.read_bytes() for path in write_outputs(comparison, tmp_path / "b")}
    assert first == second
    assert {"table.md", "table.tex", "table.csv", "differences.csv", "clients.csv"} <= first.keys()
    assert all(first.values())


def test_records_read_back_from_json_give_the_same_lines(comparison):
    read_back = type(comparison).model_validate_json(comparison.model_dump_json())
    assert summary_lines(read_back) == summary_lines(comparison)
    assert json.loads(json.dumps(to_json(read_back))) == to_json(comparison)


def test_long_form_has_each_client_of_each_run(comparison, tmp_path):
    write_outputs(comparison, tmp_path)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "clients.csv").read_text(encoding="utf-8"))))
    runs = [run for record in comparison.methods for run in (*record.runs, *record.untuned)]
    assert len(lines) == sum(len(run.clients) for run in runs)
    accuracies = [client.accuracy for record in comparison.methods for run in (*record.runs, *record.untuned)
                  for client in run.clients]  # fmt: skip
    assert [float(line["accuracy"]) for line in lines] == accuracies


def test_parquet_holds_the_same_as_the_long_csv(comparison, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_outputs(comparison, tmp_path)
    rows = parquet.read_table(tmp_path / "clients.parquet").to_pylist()
    lines = list(csv.DictReader(io.StringIO((tmp_path / "clients.csv").read_text(encoding="utf-8"))))
    assert [{name: str(value) for name, value in row.items()} for row in rows] == lines


def test_without_pyarrow_all_other_files_are_written(comparison, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    names = [path.name for path in write_outputs(comparison, tmp_path)]
    assert "clients.csv" in names
    assert "clients.parquet" not in names


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_computed(comparison, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        write_outputs(comparison, tmp_path / "file")


def test_a_comparison_without_a_result_has_tables_of_what_is_missing(tmp_path):
    rows = [row_of("local", [run_of(0, [], failure="out of memory")]), row_of("fedavg", [])]
    comparison = comparison_of(*rows, seeds=(0, 1))
    write_outputs(comparison, tmp_path)
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "out of memory" in text
    assert "| local | seed 0 | out of memory |\n| local | seed 1 | not run yet |" in text
    assert "| fedavg | seeds 0, 1 | not run yet |" in text
    assert "Not over yet: 3 of 4 runs are still to be made. No run has a result yet." in text
    assert any("1 simulation without a result" in line for line in summary_lines(comparison))


def test_no_line_of_the_terminal_is_wider_than_it_may_be(comparison):
    assert max(map(len, summary_lines(comparison, width=100))) <= 100
