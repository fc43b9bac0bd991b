"""Tables of comparisons: what each form shows of a cell, and that no name breaks one."""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from comparison_harness import comparison_of, made_up, row_of, run_of, trials_of

from coordinator.research.compare.facts import facts, hours_in_all
from coordinator.research.compare.findings import findings
from coordinator.research.compare.row_statistics import compute_statistics
from coordinator.research.compare.table_formats import figures_csv, latex, latex_text, markdown, text_lines
from coordinator.research.compare.table_model import SAME_AS_BEST, Cell, Column, Table
from coordinator.research.compare.tables import (
    all_tables,
    costs_table,
    differences_table,
    methods_table,
    tuning_table,
)

HOSTILE = r"""a&b%c$d#e_f{g}h~i^j\k<l>m|n"o`p*q[r]中é"""
SHARE = Column("mean", "client mean", "%", digits=1, factor=100.0, has_spread=True)
DIFFERENCE = Column("to", "to best", "points", digits=1, factor=100.0, is_signed=True, has_interval=True)


def tables_of(*rows, **fields):
    comparison = comparison_of(*rows, **fields)
    return {table.key: table for table in all_tables(comparison, compute_statistics(comparison))}


@pytest.mark.parametrize(
    "column, cell, text",
    [
        (SHARE, Cell(0.8214, spread=0.0049), "82.1 ± 0.5"),
        (SHARE, Cell(0.8214), "82.1"),
        (SHARE, Cell(None), "–"),
        (DIFFERENCE, Cell(-0.012, low=-0.02, high=0.004), "−1.2 [−2.0, +0.4]"),
        (DIFFERENCE, Cell(0.012), "+1.2"),
        (DIFFERENCE, Cell(-0.0001), "0.0"),
        (Column("p", "p", digits=3, least=0.001), Cell(0.0004), "< 0.001"),
        (Column("p", "p", digits=3, least=0.001), Cell(0.0104), "0.010"),
        (Column("n", "seeds"), Cell(6), "6"),
    ],
)
def test_a_cell_is_shown_with_its_unit_and_what_stands_beside_it(column, cell, text):
    assert cell.text(column) == text


def test_best_and_not_distinguishable_are_marked_in_markdown_and_latex():
    table = Table("t", "Title", (SHARE,), ((Cell(0.9, is_best=True),), (Cell(0.89, marks=(SAME_AS_BEST,)),)))
    assert "| **90.0** |\n| 89.0 ≈ |" in markdown(table)
    content = latex([table], "Caption")
    assert r"\textbf{90.0} \\" in content
    assert r"89.0$^{\approx}$ \\" in content


def test_a_row_within_two_standard_errors_of_the_best_is_marked():
    """b - a: 0.02, -0.01, 0.02: mean 0.01, one standard error; c - a: -0.2 each time but for 0.01."""
    rows = [
        row_of("a", [run_of(seed, [0.7]) for seed in range(3)]),
        row_of("b", [run_of(seed, [0.7 + gain]) for seed, gain in enumerate((0.02, -0.01, 0.02))]),
        row_of("local", [run_of(seed, [0.5 + 0.01 * seed]) for seed in range(3)]),
    ]
    table = tables_of(*rows)["methods"]
    column = next(index for index, column in enumerate(table.columns) if column.key == "client_mean")
    assert [row[0].value for row in table.rows] == ["b", "a", "local"]
    assert [row[column].symbols for row in table.rows] == ["", "≈", ""]
    assert [row[column].is_best for row in table.rows] == [True, False, False]
    comparison = comparison_of(*rows)
    assert "Not distinguishable from it: a." in findings(comparison, compute_statistics(comparison))


def test_one_seed_has_no_interval_and_says_so():
    rows = [row_of("local", [run_of(0, [0.5])]), row_of("fedavg", [run_of(0, [0.6])])]
    comparison = comparison_of(*rows)
    statistics = compute_statistics(comparison)
    text = markdown(methods_table(comparison, statistics))
    assert "[" not in re.sub(r"\\\[", "", text.split("\n- ")[0])
    assert "no interval" in text
    assert "one pair: no verdict" in markdown(differences_table(statistics))
    assert any("compare with more seeds" in sentence for sentence in findings(comparison, statistics))
    assert dict(facts(comparison))["Seeds"] == "0 alone"


@pytest.mark.parametrize("hours, text", [(15 / 3600, "15 s"), (0.1, "6 min"), (5.5, "5 h 30 min")])
def test_costs_are_shown_in_the_unit_that_people_would_use(hours, text):
    row = row_of("local", [run_of(0, [0.5])])
    statistics = compute_statistics(comparison_of(row))
    costs = replace(statistics.rows[0].costs, trial_hours=hours / 2, run_hours=hours / 2)
    rows = (replace(statistics.rows[0], costs=costs),)
    assert hours_in_all(replace(statistics, rows=rows)).startswith(f"{text} of CPU time in all; ")


def test_a_row_of_another_footing_and_one_without_a_seed_are_marked():
    settings = (("local", 2, "SGD"), ("fedavg", 2, "Adam"), ("ditto", 1, "SGD"))
    rows = [
        row_of(name, [run_of(seed, [0.5]) for seed in range(seeds)], footing={"optimizer": optimizer})
        for name, seeds, optimizer in settings
    ]
    tables = tables_of(*rows)
    symbols = {row[0].value: row[0].symbols for row in tables["methods"].rows}
    assert symbols == {"local": "", "fedavg": "†", "ditto": "‡"}
    footing = [[cell.marked_text(column) for cell, column in zip(row, tables["footing"].columns, strict=True)]
               for row in tables["footing"].rows]  # fmt: skip
    assert footing == [["optimizer", "the others", "SGD"], ["optimizer", "fedavg †", "Adam"]]


def test_tuning_without_runs_of_the_defaults_says_what_is_missing():
    row = row_of("local", [run_of(0, [0.5], params={"lr": 0.1})], chosen=1, trials=trials_of([0.1, 0.2]))
    comparison = comparison_of(row, trials=2, search="random")
    text = markdown(tuning_table(comparison, compute_statistics(comparison)))
    assert "No runs with defaults" in text
    assert "lr=0.1" in text


def test_csv_has_the_figures_as_they_were_computed():
    comparison = made_up(methods=3, clients=5, seeds=3)
    statistics = compute_statistics(comparison)
    content = figures_csv(all_tables(comparison, statistics)).decode()
    lines = {line["row"]: line for line in csv.DictReader(io.StringIO(content))}
    header = content.splitlines()[0].split(",")
    assert len(set(header)) == len(header)
    for row in statistics.rows:
        assert float(lines[row.name]["client_mean"]) == row.client_mean.mean
        assert float(lines[row.name]["client_mean_sd"]) == row.client_mean.deviation
        assert float(lines[row.name]["bytes_up"]) == row.costs.bytes_up
        if row.to_baseline is not None:
            assert float(lines[row.name]["to_baseline_low"]) == row.to_baseline.estimate.low
        else:
            assert lines[row.name]["to_baseline"] == ""


def test_hostile_names_break_neither_markdown_nor_the_terminal():
    rows = [row_of(HOSTILE, [run_of(0, [0.5])]), row_of("[bold]x[/bold]\x1b[31m\n", [run_of(0, [0.6])])]
    tables = tables_of(*rows)
    lines = [line for line in markdown(tables["methods"]).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(tables["methods"].columns) + 1}
    shown = "\n".join(text_lines(tables["methods"], 200))
    assert "[bold]x[/bold]" in shown
    assert "\x1b" not in shown


def test_latex_escapes_every_character_that_it_would_read_as_its_own():
    assert latex_text("50 % & a_b ± 1") == r"50 \% \& a\_b $\pm$ 1"
    assert latex_text("d#e{f}") == r"d\#e\{f\}"
    assert latex_text(r"h~i^j\k<") == r"h\textasciitilde{}i\textasciicircum{}j\textbackslash{}k\textless{}"
    assert latex_text("中é") == "U+4E2Dé"


def test_latex_has_as_many_cells_in_each_line_as_columns():
    comparison = made_up(methods=3, clients=5, seeds=3)
    tables = all_tables(comparison, compute_statistics(comparison))
    for table in tables:
        body = latex([table], "x").split(r"\toprule")[1].split(r"\bottomrule")[0]
        lines = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {len(table.columns)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [HOSTILE, "afl"])
def test_latex_compiles(tmp_path, name):
    """No table is wider than a page of two columns, however long a name is."""
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex on the path: apt-get install texlive-latex-base texlive-latex-recommended")
    comparison = made_up(methods=9, clients=20, seeds=6)
    row = row_of(name, [run_of(seed, [0.4, 0.6]) for seed in range(6)], footing={"optimizer": name})
    comparison = comparison.model_copy(update={"methods": (*comparison.methods, row), "title": name})
    tables = all_tables(comparison, compute_statistics(comparison))
    (tmp_path / "table.tex").write_text(latex(tables, name), encoding="utf-8")
    document = (
        r"\documentclass[twocolumn]{article}\usepackage[letterpaper,width=6.75in,height=9in]{geometry}"
        r"\usepackage{booktabs,graphicx}\begin{document}Text.\input{table.tex}\end{document}"
    )
    (tmp_path / "paper.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False)
    printed = done.stdout.decode(errors="replace")
    assert done.returncode == 0, printed[-2000:]
    assert "Overfull" not in printed, printed


def test_all_rows_that_hurt_most_clients_are_named():
    """The one client of each row falls from 0.9 to 0.1, so that it is hurt; that of `ditto` stays."""
    rows = [row_of("local", [run_of(0, [0.9])]), row_of("ditto", [run_of(0, [0.9])])]
    rows += [row_of(name, [run_of(0, [0.1])]) for name in ("fedavg", "fedprox")]
    comparison = comparison_of(*rows)
    (said,) = [line for line in findings(comparison, compute_statistics(comparison)) if "hurt" in line]
    assert said == "Compared with local, the largest share of clients, 100.0 %, is hurt by fedavg, fedprox."


def test_few_seeds_are_said_to_prove_little():
    """With one degree of freedom, as two pairs have, |t| exceeds 2 in 1 - 2 atan(2) / pi of cases."""
    local = row_of("local", [run_of(0, [0.5]), run_of(1, [0.6])])
    comparison = comparison_of(local, row_of("fedavg", [run_of(0, [0.9]), run_of(1, [0.9])]))
    said = " ".join(findings(comparison, compute_statistics(comparison)))
    assert f"{100 * (1 - 2 * math.atan(2) / math.pi):.0f} % of comparisons" in said
    assert "With 2 seeds" in said


def test_notes_of_whoever_ran_it_stand_below_the_tables():
    row = row_of("local", [run_of(0, [0.5])], trials=trials_of([0.1]), chosen=0, note="a trial was stopped",
                 space={"lr": "0.01 to 1, logarithmic"})  # fmt: skip
    tables = tables_of(row, trials=3, search="random", notes=("tests were seen",), tune_seed=7, validation=0.2)
    assert "Tests were seen." in markdown(tables["methods"])
    text = markdown(tables["tuning"])
    assert "local: a trial was stopped" in text
    assert "Other numbers of trials: local 1" in text
    assert "20.0 % of the training samples" in text
    assert "seed 7" in text
    assert "0.01 to 1, logarithmic" in markdown(tables["space"])


# --- comparisons that are not over -----------------------------------------------------------------------------------


def half_done(**fields):
    """The trials of local are over and one of its two runs; the trials of fedavg and ditto are under way, or begin."""
    trials = [trial.model_copy(update={"params": {"lr": 0.1 * trial.number}}) for trial in trials_of([0.1, 0.3])]
    local = row_of("local", [run_of(0, [0.5, 0.7], params={"lr": 0.1})], trials=tuple(trials), chosen=1)
    fedavg = row_of("fedavg", [], trials=tuple(trials[:1]))
    ditto = row_of("ditto", [])
    settings = {"seeds": (0, 1), "trials": 2, "search": "random", "has_untuned": True, **fields}
    return comparison_of(local, fedavg, ditto, **settings)


def test_a_comparison_that_is_not_over_says_so_first_and_in_each_form():
    comparison = half_done()
    statistics = compute_statistics(comparison)
    said = "Not over yet: 11 of 12 runs are still to be made."
    assert findings(comparison, statistics)[0] == said
    table = methods_table(comparison, statistics)
    assert f"- {said}" in markdown(table)
    assert said in latex([table], "x")
    assert "Of one seed, without a spread." in markdown(table)
    assert "| local ‡ | 1 | **60.0** | **60.0** | **50.0** |" in markdown(table)
    assert not [sentence for sentence in findings(comparison, statistics) if "for some seeds" in sentence]
    runs = [(failure.row, failure.run) for failure in statistics.failures]
    assert runs[:2] == [("local", "seeds 0, 1 with defaults"), ("local", "seed 1")]
    assert statistics.pending_runs == sum(failure.count for failure in statistics.failures) == 11


def test_trials_that_are_under_way_are_no_disadvantage_and_no_choice():
    comparison = half_done()
    text = markdown(tuning_table(comparison, compute_statistics(comparison)))
    assert "Trials under way: fedavg 1 of 2, ditto 0 of 2." in text
    assert "Other numbers of trials" not in text
    assert "Runs with defaults were asked for, and none of them has a result yet." in text
    lines = {line.split(" | ")[0].strip("| ‡"): line for line in text.splitlines()}
    assert lines["local"].endswith("| 1 | lr=0.1 |")
    assert lines["fedavg"].endswith("| – | – |")


def test_parameters_that_are_chosen_are_shown_before_the_first_run_with_them():
    (local, *others) = half_done().methods
    comparison = half_done().model_copy(update={"methods": (local.model_copy(update={"runs": ()}), *others)})
    text = markdown(tuning_table(comparison, compute_statistics(comparison)))
    assert "| 1 | lr=0.1 |" in text


def test_a_comparison_that_is_over_has_no_word_of_progress():
    comparison = made_up(methods=4, seeds=2)
    comparison = comparison.model_copy(update={"has_untuned": True})
    statistics = compute_statistics(comparison)
    assert statistics.pending_runs == 0
    assert not [sentence for sentence in findings(comparison, statistics) if "Not over" in sentence]
    assert "Mean over 2 seeds ± standard deviation over seeds (n - 1)." in markdown(
        methods_table(comparison, statistics)
    )


def test_costs_are_processor_hours_and_hours_by_the_clock():
    """Trials: 2 x 36 CPU s and 0 s; runs: 180 CPU s and 7,200 s by the clock, a fourth of it with defaults."""
    row = row_of(
        "local",
        [run_of(0, [0.5], cpu_s=100.0, seconds=5400.0)],
        untuned=[run_of(0, [0.5], cpu_s=80.0, seconds=1800.0)],
        trials=trials_of([0.1, 0.2]),
        chosen=1,
    )
    statistics = compute_statistics(comparison_of(row, trials=2, search="random"))
    table = costs_table(statistics)
    cells = {column.key: cell.value for column, cell in zip(table.columns, table.rows[0], strict=True)}
    hours = [cells[key] for key in ("trial_cpu_hours", "run_cpu_hours", "trial_hours", "run_hours")]
    assert hours == pytest.approx([72 / 3600, 180 / 3600, 0.0, 2.0])
    assert "4 min of CPU time in all; 2 h by the clock" in markdown(table)
