"""Tables are made again with the paper's values: a default of ours changes none of their settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.research.reproduce.cells import Reproduction, names, read_table
from edge_agent import methods

SETTINGS = json.loads(Path(__file__).with_name("settings.json").read_text(encoding="utf-8"))
"""Table -> row -> all parameters of its method, as they were before any default became ours."""


def cells_of(table):
    return Reproduction(table, read_table(table), Path("nowhere"), {"data": ("digits",)}).cells()


def test_all_tables_have_their_settings_here():
    assert list(SETTINGS) == names()


@pytest.mark.parametrize("table", SETTINGS)
def test_parameters_of_a_table_are_those_written_down(table):
    cells = cells_of(table)
    assert {cell.row.name for cell in cells} == set(SETTINGS[table])
    for cell in cells:
        assert cell.plan.paper
        made = methods.create(cell.plan.method, cell.plan.params, paper=cell.plan.paper)
        assert made.params.model_dump(mode="json") == SETTINGS[table][cell.row.name], str(cell)


def test_it_would_show_if_tables_took_our_defaults():
    row = next(cell for cell in cells_of("fedrir-t4-fmnist") if cell.row.name == "FedRIR")
    ours = methods.create(row.plan.method, row.plan.params).params.model_dump(mode="json")
    changed = {name for name, value in ours.items() if value != SETTINGS["fedrir-t4-fmnist"]["FedRIR"][name]}
    assert {"id_mode", "specific_dim", "refresh_stats"} <= changed
