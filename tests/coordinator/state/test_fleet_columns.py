"""A column of the fleet's table is declared once: terminal, JSON and page follow."""

from __future__ import annotations

import contextlib
import json
from typing import get_args

import pytest
from web_site import FolderSite, agent_status

from coordinator.cli import main as headwater
from coordinator.cli.fleet import SortKey
from coordinator.state import fleet_columns
from coordinator.state.fleet_columns import COLUMNS, Column, Shape
from coordinator.web.fleet_table import SORTS
from edge_agent.core.locks import folder_lock

ADDED = Column(
    "sent",
    lambda row: int(row.bytes_up),
    Shape.NUMBER,
    ("traffic", "sent"),
    terminal="sent bytes",
    page="sent bytes",
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_columns, "COLUMNS", (*COLUMNS, ADDED))
    made = FolderSite(tmp_path / "state")
    made.run(1, ("porch",), end="run_finished")
    made.status([agent_status("porch", bytes_up=123456)])
    yield made
    made.close()


def printed(site, capsys, *words):
    with contextlib.suppress(SystemExit), folder_lock(site.path, "a coordinator"):
        headwater(["agents", *words, "--state", str(site.path)])
    return capsys.readouterr().out


def test_a_column_that_is_declared_once_is_in_the_table_of_the_terminal(site, capsys):
    head, _, row = printed(site, capsys).splitlines()[-3:]
    assert head.split()[-1] == row.split()[-1].replace("123456", "bytes")


def test_a_column_that_is_declared_once_is_in_json(site, capsys):
    (agent,) = json.loads(printed(site, capsys, "--json"))["agents"]
    assert agent["traffic"] == {"sent": 123456}


def test_a_column_that_is_declared_once_is_on_the_page(site):
    with site.client() as client:
        text = client.get("/").text
    assert "sent bytes" in text
    assert '<td class="n">123456</td>' in text


def test_every_column_of_the_page_can_be_sorted_by():
    assert set(SORTS) == {column.name for column in fleet_columns.page_columns()}


def test_the_sort_options_of_the_command_are_those_of_the_columns():
    assert get_args(SortKey) == tuple(column.option for column in COLUMNS if column.option)
